"""Words of a figure, as tests read them."""

from __future__ import annotations

from typing import Any


def title(figure: Any) -> str:
    return str(figure.layout.title.text).replace("<br>", " ")


def notes(figure: Any) -> str:
    return " ".join(str(note.text).replace("<br>", " ") for note in figure.layout.annotations)


def shown_title(output: Any) -> str:
    """Title of the figure that an explorer's output shows."""
    (shown,) = output.outputs
    return str(shown["data"]["application/vnd.plotly.v1+json"]["layout"]["title"]["text"]).replace("<br>", " ")
