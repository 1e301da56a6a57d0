"""Words of a figure, as tests read them."""

from __future__ import annotations

import base64
import re
import zlib
from typing import Any

from moelab.viz.report import ALPHABET

PYTHON_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"


def title(figure: Any) -> str:
    return str(figure.layout.title.text).replace("<br>", " ")


def notes(figure: Any) -> str:
    return " ".join(str(note.text).replace("<br>", " ") for note in figure.layout.annotations)


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
