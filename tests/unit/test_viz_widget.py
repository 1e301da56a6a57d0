"""The frame of the explorers: what travels to the browser, where a refusal stands, what is seen without a kernel."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from typing import Any

import plotly.graph_objects as go
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelab.errors import BadInput
from moelab.titan.arms import named_arms
from moelab.viz import LayoutExplorer
from moelab.viz.projection import ProjectionExplorer
from moelab.viz.theme import new_figure
from moelab.viz.traffic import TrafficExplorer
from moelab.viz.widget import Explorer, changes, labelled_control

VALUES = st.recursive(
    st.none() | st.integers(0, 3) | st.sampled_from("ab"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("xyz"), inner, max_size=3),
    max_leaves=12,
)


def without_none(value: Any) -> Any:
    """What plotly reads: a key whose value is null is not there."""
    if isinstance(value, dict):
        return {key: without_none(one) for key, one in value.items() if one is not None}
    return [without_none(one) for one in value] if isinstance(value, list) else value


@given(st.dictionaries(st.sampled_from("xyz"), VALUES), st.dictionaries(st.sampled_from("xyz"), VALUES))
def test_changes_make_the_one_the_other(old: dict[str, Any], new: dict[str, Any]) -> None:
    made = copy.deepcopy(old)
    for path, value in changes(old, new):
        place: Any = made
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
    assert without_none(made) == without_none(new)
    assert not list(changes(new, new))


class Line(Explorer):
    """A line of a thousand points; its last point and its colour have a control."""

    def __init__(self) -> None:
        controls = {name: labelled_control("IntText", f"the {name}") for name in ("last", "red")}
        super().__init__(controls, ["line"])

    def look(self) -> tuple[str, Mapping[str, go.Figure]]:
        if not 0 <= self.chosen["red"] < 256:
            raise BadInput(f"red is {self.chosen['red']}; valid: 0 to <255>")
        figure = new_figure("A <line>", subtitle="")
        figure.add_scatter(y=[*range(999), self.chosen["last"]], line_color=f"rgb({self.chosen['red']},0,0)")
        return "drawn", {"line": figure}


def test_only_what_changed_travels() -> None:
    explorer, sent = Line(), list[Any]()
    explorer.plots.send = sent.append
    explorer.controls["red"].value = 7
    (message,) = sent
    assert message["changes"] == [(("line", "data", 0, "line", "color"), "rgb(7,0,0)")]
    explorer.controls["last"].value = 7
    assert [path for path, _ in sent[1]["changes"]] == [("line", "data", 0, "y")]
    assert explorer.plots.figures["line"] == json.loads(explorer.figures["line"].to_json())


@pytest.mark.parametrize(
    ("explorer", "control", "value", "words"),
    [
        (lambda: LayoutExplorer(named_arms()["dsv3_671b_bf16_standard"]), "ep", 16, None),
        (lambda: ProjectionExplorer(named_arms()["dsv3_671b_mxfp8_deepep"]), "pp", 4, ("price_per_gpu_hour", 2.0)),
        (TrafficExplorer, "token", 14, ("tokens", 8192)),
    ],
)
def test_another_choice_sends_arrays_and_no_trace_and_one_of_the_words_alone_nothing(
    explorer: Callable[[], Explorer], control: str, value: object, words: tuple[str, object] | None
) -> None:
    shown, sent = explorer(), list[Any]()
    shown.plots.send = sent.append
    shown.controls[control].value = value
    (message,) = sent
    assert all(len(path) > 2 for path, _ in message["changes"]), "all traces are sent again"
    if words:
        shown.controls[words[0]].value = words[1]
        assert len(sent) == 1


def test_a_refusal_stands_under_the_control_that_caused_it() -> None:
    explorer = Line()
    explorer.controls["red"].value = 256
    assert "the red" in explorer.words.value
    assert "red is 256; valid: 0 to &lt;255&gt;" in explorer.reasons["red"].value
    assert (explorer.reasons["last"].value, explorer.figures, explorer.plots.figures) == ("", {}, {"line": None})
    explorer.controls["last"].value = 5  # which has nothing to do with it
    assert (explorer.reasons["last"].value, explorer.refused[0]) == ("", "red")
    explorer.controls["red"].value = 255
    assert ">drawn<" in explorer.words.value
    assert (explorer.reasons["red"].value, set(explorer.figures)) == ("", {"line"})


def test_a_browser_that_missed_changes_gets_all_figures() -> None:
    explorer, sent = Line(), list[Any]()
    explorer.plots.send = sent.append
    explorer.plots._handle_custom_msg({"drawn": explorer.plots.number}, [])
    assert sent == []
    explorer.plots._handle_custom_msg({"drawn": 0}, [])
    assert [change for message in sent for change in message["changes"]] == [
        (("line",), explorer.plots.figures["line"])
    ]


def test_readers_without_a_kernel_see_the_title() -> None:
    shown = Line()._repr_mimebundle_()
    assert "A &lt;line&gt;" in shown["text/plain"]
    assert "application/vnd.jupyter.widget-view+json" in shown
