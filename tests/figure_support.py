"""Words of a figure, as tests read them."""

from __future__ import annotations

from typing import Any


def title(figure: Any) -> str:
    return str(figure.layout.title.text).replace("<br>", " ")


def notes(figure: Any) -> str:
    return " ".join(str(note.text).replace("<br>", " ") for note in figure.layout.annotations)
