"""The shape explorer: rows, N, K and groups as sliders; below them a step in its parts, BF16 beside MXFP8.

It shows :func:`moelab.viz.grouped_gemm.step_parts` and nothing of its own. ipywidgets loads slowly, so
it is imported when an explorer is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moelab.mxfp8.break_even import Constants, break_even_m
from moelab.mxfp8.grouped_gemm_cases import Case
from moelab.viz.grouped_gemm import step_parts
from moelab.viz.widget import as_output, make_panel

if TYPE_CHECKING:
    import ipywidgets

_STYLE, _WIDTH = {"description_width": "150px"}, {"width": "460px"}
ROWS = tuple(2**exponent for exponent in range(10, 21))
FEATURES = (512, 1024, 1408, 2048, 4096, 5120, 7168, 8192)
GROUPS = (1, 2, 4, 8, 16, 32)


class ShapeExplorer:
    """Sliders and a figure that belong together; show ``panel``.

    Args:
        case: where the sliders begin; a value that a slider does not have is added to it.
        constants: of the model.

    Attributes:
        controls: sliders by name: ``m``, ``n``, ``k``, ``groups``.
        said: the break-even in words.
        figure: the output that holds the figure.
        panel: everything, to be displayed.
    """

    def __init__(self, case: Case, constants: Constants) -> None:
        import ipywidgets as widgets

        self.constants = constants
        choices = {"m": ROWS, "n": FEATURES, "k": FEATURES, "groups": GROUPS}
        names = {"m": "rows M", "n": "output features N", "k": "input features K", "groups": "groups G"}
        self.controls: dict[str, ipywidgets.SelectionSlider] = {
            name: widgets.SelectionSlider(
                options=[(f"{value:,}", value) for value in sorted({*values, getattr(case, name)})],
                value=getattr(case, name),
                description=names[name],
                continuous_update=False,
                style=_STYLE,
                layout=_WIDTH,
            )
            for name, values in choices.items()
        }
        self.said, self.figure = widgets.HTML(), widgets.Output()
        self.panel = make_panel([*self.controls.values(), self.said, self.figure])
        for control in self.controls.values():
            control.observe(self._refresh, names="value")
        self._refresh()

    @property
    def case(self) -> Case:
        """As the sliders stand now."""
        return Case(**{name: control.value for name, control in self.controls.items()})

    def _refresh(self, _change: object = None) -> None:
        case = self.case
        even = break_even_m(case.n, case.k, case.groups, self.constants)
        told = "never, at any M" if even is None else f"from about {even:,.0f} rows on"
        self.said.value = f"<div role='status'>MXFP8 saves time <b>{told}</b> at these N, K and G</div>"
        self.figure.outputs = (as_output(step_parts(case, self.constants)),)
