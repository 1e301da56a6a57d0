"""The frame of the explorers: what travels to the browser, where a refusal stands, what is seen without a kernel."""

from __future__ import annotations

import copy
import html
import json
from collections.abc import Callable, Mapping
from typing import Any

import plotly.graph_objects as go
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelab.errors import BadInput
from moelab.planning.gemm_fit import fit_b200
from moelab.planning.project import project
from moelab.planning.time.gemm import break_even_m
from moelab.titan.arms import named_arms
from moelab.viz import LayoutExplorer
from moelab.viz.grouped_gemm import ExpertExplorer
from moelab.viz.projection import ProjectionExplorer
from moelab.viz.theme import in_words, new_figure
from moelab.viz.traffic import TrafficExplorer
from moelab.viz.widget import Explorer, Number, changes

VALUES = st.recursive(
    st.none() | st.integers(0, 3) | st.sampled_from("ab"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("xyz"), inner, max_size=3),
    max_leaves=12,
)
OBJECTS = st.dictionaries(st.sampled_from("xyz"), VALUES)


def without_none(value: Any) -> Any:
    """What plotly reads: a key whose value is null is not there."""
    if isinstance(value, dict):
        return {key: without_none(one) for key, one in value.items() if one is not None}
    return [without_none(one) for one in value] if isinstance(value, list) else value


@given(OBJECTS, OBJECTS)
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
        super().__init__({name: Number(f"the {name}") for name in ("last", "red")}, {"last": 0, "red": 0})
        self.sent = list[Any]()
        self.plots.send = self.sent.append

    def draw(self, chosen: Mapping[str, Any]) -> tuple[str, go.Figure]:
        if not 0 <= chosen["red"] < 256:
            raise BadInput(f"red is {chosen['red']}; valid: 0 to <255>")
        figure = new_figure("A <line>", subtitle="")
        return "drawn", figure.add_scatter(y=[*range(999), chosen["last"]], line_color=f"rgb({chosen['red']},0,0)")


def test_only_what_changed_travels_and_a_browser_that_missed_it_gets_all() -> None:
    explorer = Line()
    explorer.controls["red"].value = 7
    explorer.controls["last"].value = 7
    ((red,), ((path, points),)) = (message["changes"] for message in explorer.sent)
    assert red == (("figure", "data", 0, "line", "color"), "rgb(7,0,0)")
    assert (path, points[-1]) == (("figure", "data", 0, "y"), 7)
    assert explorer.plots.figures["figure"] == json.loads(explorer.figure.to_json())
    explorer.sent.clear()
    for drawn in (explorer.plots.number, 0):
        explorer.plots._handle_custom_msg({"drawn": drawn}, [])
    assert [one["changes"] for one in explorer.sent] == [[(("figure",), explorer.plots.figures["figure"])]]


BF16, DEEPEP = (named_arms()[f"dsv3_671b_{arm}"] for arm in ("bf16_standard", "mxfp8_deepep"))
TPS = project(DEEPEP.model_copy(update={"mxfp8_kernels": "auto"})).tps
EVEN = break_even_m(1408, 2048, 8, fit_b200().rates())


@pytest.mark.parametrize(
    ("explorer", "control", "value", "words"),
    [
        (lambda: LayoutExplorer(BF16), "ep", 16, None),
        (lambda: ProjectionExplorer(DEEPEP), "pp", 4, ("price_per_gpu_hour", 2.0)),
        (TrafficExplorer, "token", 14, ("tokens", 8192)),
    ],
)
def test_another_choice_sends_arrays_and_no_trace_and_one_of_the_words_alone_nothing(
    explorer: Callable[[], Explorer], control: str, value: object, words: tuple[str, object] | None
) -> None:
    shown, sent = explorer(), list[Any]()
    shown.plots.send = sent.append
    shown.controls[control].value = value
    if words:
        shown.controls[words[0]].value = words[1]
    (message,) = sent
    assert all(len(path) > 2 for path, _ in message["changes"]), "all traces are sent again"


def shown_by(explorer: Explorer) -> str:
    """Words, reasons under the controls and titles of the figures, without tags."""
    reasons = [f"{name}: {one.value}" for name, one in explorer.reasons.items() if one.value]
    titles = [explorer.figure.layout.title.text] if explorer.figure else []
    return html.unescape(" | ".join(map(in_words, [explorer.words.value, *reasons, *titles])))


@pytest.mark.parametrize(
    ("explorer", "moves"),
    [
        (
            TrafficExplorer,
            [
                ({}, "a token reaches 7.27 GPUs on 3.61 nodes (derived)"),
                ({"routing": "group_limited"}, "6.60 GPUs on 2.93 nodes"),
                ({"model": "GLM-4.5", "ep": 64}, "| ep: Cannot be ep is 64 and does not divide 160 experts"),
                ({"ep": 8, "routing": "skewed"}, "(simulated)"),
            ],
        ),
        (
            lambda: LayoutExplorer(BF16),
            [
                ({}, "671 G parameters, 37.55 G active"),
                ({"pp": 16}, "Cannot be : see PP degree | pp: Cannot be ep is 32"),
                ({"ep": 16}, "FSDP 8"),
                ({"figure": "mesh", "rank": 9}, "| Groups of rank 9"),
                ({"model": "Qwen3-30B-A3B", "pp": 1}, "30.53 G parameters, 3.353 G active"),
            ],
        ),
        (
            lambda: ProjectionExplorer(DEEPEP),
            [
                ({}, f"{TPS:,.0f} tokens/s per GPU"),
                ({"network_gb_s": 400.0}, "extrapolated"),
                ({"gpus": 8}, "Illegal : see number of GPUs | gpus: Illegal ep is 32"),
                ({"gpus": 256, "activation_checkpoint": "none"}, "activation_checkpoint: Legal, but does not fit"),
                ({"model": "Qwen3-30B-A3B"}, "Legal · fits"),
            ],
        ),
        (
            lambda: ExpertExplorer("16B", 8192, ep=8),
            [
                ({}, f"your M is 49,152 rows on 8 experts, break-even {EVEN:,.0f} rows"),
                ({}, "MXFP8 loses"),
                ({"model": "Qwen3-235B-A22B"}, "16 experts of N 1,536, K 4,096"),
                ({"gpu": "H100, row-wise FP8"}, "Row-wise FP8 loses"),
                ({"gpu": "B200, MXFP8", "model": "671B", "tokens": 2**17}, "MXFP8 saves"),
                (
                    {"model": "GLM-4.5", "ep": 64},
                    "ep 64: give positive numbers, ep a divisor of 160",
                ),
            ],
        ),
    ],
    ids=["traffic", "layout", "projection", "experts"],
)
def test_explorers_say_what_follows_from_a_choice_or_why_it_cannot_be(
    explorer: Callable[[], Explorer], moves: list[tuple[dict[str, object], str]]
) -> None:
    moved = explorer()
    for choice, says in moves:
        for control, value in choice.items():
            moved.controls[control].value = value
        assert says in shown_by(moved)


def test_a_refusal_stands_under_the_control_that_caused_it() -> None:
    explorer = Line()
    explorer.controls["red"].value = 256
    assert "the red" in explorer.words.value
    assert "red is 256; valid: 0 to &lt;255&gt;" in explorer.reasons["red"].value
    assert (explorer.reasons["last"].value, explorer.figure, explorer.plots.figures) == ("", None, {"figure": None})
    explorer.controls["last"].value = 5  # which has nothing to do with it
    assert (explorer.reasons["last"].value, explorer.refused[0]) == ("", "red")
    assert [explorer.reasons[name].layout.display for name in ("last", "red")] == ["none", None]
    explorer.controls["red"].value = 255
    assert ">drawn<" in explorer.words.value
    assert (explorer.reasons["red"].value, bool(explorer.plots.figures["figure"])) == ("", True)


def test_readers_without_a_kernel_see_the_title() -> None:
    shown = Line()._repr_mimebundle_()
    assert "A &lt;line&gt;" in shown["text/plain"]
    assert "application/vnd.jupyter.widget-view+json" in shown
