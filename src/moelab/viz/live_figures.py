"""Figures of a page that are redrawn in place: one widget for all of a panel, which keeps zoom and hidden lines.

plotly's own ``FigureWidget`` (6.9) brings 5 MB of JavaScript with every figure, and anywidget (0.11) gives a widget 2 s
to start: six of them at once stay blank on a slow machine. Here plotly comes once, and is loaded after the start.
anywidget takes a while to load, so it is imported when figures are made.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

_JS = """
export default {
  render({ model, el }) {
    Object.assign(el.style, { display: "flex", flexFlow: "row wrap", gap: "2px 8px" });
    const places = {};
    let plotly;
    const draw = async () => {
      if (!plotly) {
        const loaded = { exports: {} };
        new Function("module", model.get("plotly"))(loaded);
        plotly = loaded.exports;
      }
      for (const [name, { data, layout }] of Object.entries(model.get("figures"))) {
        places[name] ??= el.appendChild(document.createElement("div"));
        await plotly.react(places[name], data, layout, { displaylogo: false });
      }
    };
    let drawn = draw();
    const again = () => { drawn = drawn.catch(console.error).then(draw); };
    model.on("change:figures", again);
    return () => {
      model.off("change:figures", again);
      Object.values(places).forEach((place) => plotly?.purge(place));
    };
  }
};
"""


def live_figures(figures: Mapping[str, go.Figure]) -> Any:
    """A widget that shows figures; :func:`redraw` changes them.

    Args:
        figures: by name, in the order in which they are shown; each with a ``width``, or it takes the whole row.
    """
    import traitlets
    from anywidget import AnyWidget

    class LiveFigures(AnyWidget):
        _esm = _JS
        plotly = traitlets.Unicode().tag(sync=True)
        figures = traitlets.Dict().tag(sync=True)

    return LiveFigures(plotly=get_plotlyjs(), figures=_as_json(figures))


def redraw(shown: Any, figures: Mapping[str, go.Figure]) -> None:
    """Bring a widget of :func:`live_figures` to what other figures of the same names show."""
    shown.figures = _as_json(figures)


def _as_json(figures: Mapping[str, go.Figure]) -> dict[str, Any]:
    return {name: json.loads(figure.to_json()) for name, figure in figures.items()}
