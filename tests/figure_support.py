"""What a figure or a page says, as tests read it."""

from __future__ import annotations

import base64
import re
import zlib
from typing import Any

from moelab.viz.report import ALPHABET

PYTHON_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"


def title(figure: Any) -> str:
    return str(figure.layout.title.text).replace("<br>", " ")


def notes(figure: Any) -> list[str]:
    return [str(note.text) for note in figure.layout.annotations]


def assert_says(figure: Any, *words: str) -> None:
    """Each of these stands in the title."""
    assert [one for one in words if one not in title(figure)] == [], title(figure)


def traces(figure: Any, **like: object) -> list[Any]:
    """Traces of such a name, type or place."""
    return [trace for trace in figure.data if like.items() <= trace.to_plotly_json().items()]


def unpacked(page: str, element: str) -> str:
    """A text that a report holds compressed: ``plotlyjs`` or ``drawings``."""
    (digits,) = re.findall(rf'<script id="{element}" type="text/plain">([^<]*)</script>', page)
    return zlib.decompress(base64.b85decode(digits.translate(str.maketrans(ALPHABET, PYTHON_DIGITS)))).decode()


def shown_page(page: str) -> str:
    """A report with the data of its figures readable and without plotly's source."""
    if 'id="drawings"' not in page:
        return page
    drawings = unpacked(page, "drawings")
    return re.sub(r'<script id="\w+" type="text/plain">[^<]*</script>', "", page) + drawings
