"""Layouts drawn: groups against TorchTitan's mesh, figures against their data."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from figure_support import assert_says, traces
from hypothesis import given, settings
from hypothesis import strategies as st
from titan_process import groups_of_torchtitan, in_titan_process

from moelab.errors import BadInput
from moelab.experiment import Experiment
from moelab.hardware import B200, H100
from moelab.layout import Layout, check
from moelab.layout.mesh import groups_of
from moelab.planning.advice import answer_lines, recommend
from moelab.planning.memory import estimate
from moelab.viz import LayoutExplorer, best_layouts, memory_bars, mesh_map, pipeline_schedule, technique_gains
from moelab.viz.layout import rank_grid
from moelab.viz.theme import FAR, NEAR

# The layout of the article by PyTorch and Nebius, March 2026.
PUBLISHED: dict[str, Any] = {"model": "671B", "hardware": "b200_x256", "nodes": 32, "gpus_per_node": 8}
PUBLISHED |= {"pp": 2, "tp": 2, "ep": 32, "seq_len": 8192, "local_batch": 64, "activation_checkpoint": "full"}
PUBLISHED |= {"compile": "model+loss", "dataset": "c4"}


def experiment(**changes: Any) -> Experiment:
    return Experiment(**{**PUBLISHED, **changes})


def layout(**changes: Any) -> Layout:
    checked = check(experiment(**changes)).layout
    assert checked is not None
    return checked


# Groups


@pytest.mark.parametrize(
    ("rank", "degrees"),
    [
        (37, {"dp_replicate": 2, "dp_shard": 16, "cp": 2, "tp": 2, "pp": 2, "ep": 8}),
        (200, {"dp_replicate": 1, "dp_shard": 64, "cp": 1, "tp": 2, "pp": 2, "ep": 32}),
        (0, {"dp_replicate": 1, "dp_shard": 64, "cp": 1, "tp": 2, "pp": 2, "ep": 1}),
    ],
)
def test_groups_are_those_of_torchtitans_mesh(rank: int, degrees: dict[str, int]) -> None:
    theirs = in_titan_process(groups_of_torchtitan, rank, {**degrees, "world_size": 256})
    ours = groups_of(layout(**degrees), rank, gpus_per_node=8)
    names = {("dp_shard", "cp"): "fsdp"}
    assert {names.get(group.axes, group.axes[0]): list(group.ranks) for group in ours} == theirs


@settings(max_examples=25, deadline=None)
@given(rank=st.integers(0, 255), degrees=st.sampled_from([(2, 1, 2, 32), (4, 2, 1, 8), (1, 1, 8, 64), (8, 1, 1, 4)]))
def test_every_member_of_a_group_has_the_same_group(rank: int, degrees: tuple[int, int, int, int]) -> None:
    made = layout(**dict(zip(("pp", "dp_replicate", "tp", "ep"), degrees, strict=True)))
    for group in groups_of(made, rank, gpus_per_node=8):
        assert rank in group.ranks
        others = groups_of(made, group.ranks[-1], gpus_per_node=8)
        assert group.ranks in [other.ranks for other in others if other.axes == group.axes]


# Figures

WAIT, SIMULATED = "wait (bubble)", "simulated: equal stage times"


def test_mesh_colours_peers_by_the_wire_and_says_how_many_nodes() -> None:
    figure = mesh_map(layout(), gpus_per_node=8, rank=37)
    peers = {}
    for note, trace in zip(figure.layout.annotations, traces(figure, type="heatmap"), strict=True):
        palette = [color for _, color in trace.colorscale[::2]]
        colors = Counter(palette[int(value)] for value in trace.z.ravel() if not math.isnan(value))
        peers[note.text.partition("<br>")[0]] = colors[NEAR], colors[FAR]
    assert peers["<b>EP 32</b> · 4 nodes"] == (8, 24)
    assert (peers["<b>TP 2</b> · 1 node"], peers["<b>PP 2</b> · 2 nodes"]) == ((2, 0), (1, 1))
    alone = layout(model="nano", nodes=1, gpus_per_node=1, pp=1, tp=1, ep=1, seq_len=128)
    assert_says(mesh_map(alone, gpus_per_node=1), "talks to no other rank")
    with pytest.raises(BadInput, match="rank is 256; valid: 0 to 255"):
        mesh_map(layout(), gpus_per_node=8, rank=256)


@pytest.mark.parametrize(("gpus_per_node", "nodes"), [(8, 32), (3, 5), (1, 1), (8, 65), (4, 257)])
def test_every_gpu_is_a_square_of_its_own(gpus_per_node: int, nodes: int) -> None:
    grid = rank_grid(gpus_per_node * nodes, gpus_per_node)
    assert sorted(grid[grid >= 0]) == list(range(gpus_per_node * nodes))
    # Without a step over an empty square one gets from a GPU to those of its node alone.
    for line in (*grid, *grid.T):
        for one, next_one in itertools.pairwise(line.tolist()):
            assert -1 in (one, next_one) or one // gpus_per_node == next_one // gpus_per_node


@pytest.mark.parametrize(
    ("changes", "says", "bars"),
    [
        ({}, ("waits 1.5% of a step", SIMULATED), {"forward": 128, "backward": 128, WAIT: 4}),
        ({"pp": 1}, ("No pipeline",), {}),
        # 8,552 of 16,384 blocks: all that begin in the first half of the time
        (
            {"pp": 16, "ep": 8, "local_batch": 512},
            ("the first 820 of 1581", SIMULATED),
            {"forward": 4339, "backward": 4213, WAIT: 30},
        ),
    ],
)
def test_a_pipeline_states_its_bubble_and_is_cut_where_it_is_long(
    changes: dict[str, Any], says: tuple[str, ...], bars: dict[str, int]
) -> None:
    figure = pipeline_schedule(layout(**changes), "1F1B")
    assert_says(figure, *says)
    assert {trace.name: len(trace.x) for trace in figure.data} == bars
    assert all(trace.text is None for trace in figure.data)  # 64 micro-batches leave no room for their numbers


@pytest.mark.parametrize(("name", "kinds"), [("Interleaved1F1B", "FB"), ("DualPipeV", "FBIW")])
def test_a_pipeline_of_two_stages_a_rank(name: str, kinds: str) -> None:
    figure = pipeline_schedule(layout(pp=4, pp_schedule=name, local_batch=8, compile="loss"), name)
    assert len(figure.data) == 2 * len(kinds) + 1
    assert [bool(trace.showlegend) for trace in figure.data[:-1]] == [True, False] * len(kinds)
    assert_says(figure, "the rank's second stage", "simulated")


@pytest.mark.parametrize("changes", [{"precision": "mxfp8"}, {"pp": 32, "ep": 8}, {"pp": 1, "tp": 1}])
def test_memory_bars_add_up_to_the_prediction(changes: dict[str, Any]) -> None:
    predicted = estimate(experiment(**changes), layout(**changes), B200)
    figure = memory_bars(predicted, layout(**changes), B200)
    bars = traces(figure, type="bar")
    sums = [sum(bar.x[rank] for bar in bars) for rank in range(len(predicted.by_stage))]
    assert sums == pytest.approx([stage.total_gib for stage in predicted.by_stage], abs=0.3)
    needs = f"needs {predicted.worst_gib:.1f} of {predicted.capacity_gib:.1f} GiB of a B200"
    assert_says(figure, needs, "predicted, not measured", predicted.dominant.split(":")[0])


def test_memory_that_does_not_fit_says_so_and_an_unknown_capacity_is_no_line() -> None:
    small, unknown = H100, replace(H100, name="A9", memory_gib=None)
    predicted = estimate(experiment(), layout(), small)
    figure = memory_bars(predicted, layout(), small)
    assert_says(figure, "Does not fit")
    assert figure.layout.xaxis.range[1] > predicted.worst_gib
    figure = memory_bars(estimate(experiment(), layout(), unknown), layout(), unknown)
    assert_says(figure, f"needs {predicted.worst_gib:.1f} GiB; what a A9 has is not known")
    assert not figure.layout.shapes


def test_the_line_of_what_a_gpu_has_crosses_no_number() -> None:
    predicted = estimate(experiment(), layout(), B200)
    predicted = replace(predicted, capacity_gib=1.03 * predicted.worst_gib)
    figure = memory_bars(predicted, layout(), B200)
    numbers = [one.x for one in figure.layout.annotations if one.text.startswith("<b>") and one.xanchor == "left"]
    assert len(numbers) == len(predicted.by_stage)
    assert not any(0.85 * predicted.capacity_gib < x < predicted.capacity_gib for x in numbers)


# The explorer


def test_menus_mark_what_would_be_illegal_and_the_experiment_follows() -> None:
    def legal() -> set[int]:
        return {value for label, value in explorer.controls["ep"].options if "illegal" not in label}

    explorer = LayoutExplorer(experiment())
    assert "legal · fits (" in explorer.words.value
    assert "tokens/s per GPU (" in explorer.words.value
    assert legal() == {1, 2, 4, 8, 16, 32, 64, 128}
    explorer.controls["pp"].value = 16
    assert (explorer.figure, legal(), explorer.controls["ep"].value) == (None, {1, 2, 4, 8, 16}, 32)
    explorer.controls["ep"].value = 16
    assert explorer.experiment == experiment(pp=16, ep=16, accumulate_gradients=True)
    explorer = LayoutExplorer(experiment(pp=1, ep=8, tp=1))
    explorer.controls["hardware"].value = "h100_x1024"
    assert "legal · does not fit (" in explorer.words.value
    assert "tokens/s" not in explorer.words.value
    for model in ("Qwen3-30B-A3B", "671B"):
        explorer.controls["model"].value = model
    assert explorer.experiment.shape is None


def test_the_answer_has_a_row_for_each_technique_and_each_layout() -> None:
    node: dict[str, Any] = {"model": "16B", "hardware": "h100_node", "gpus_per_node": 8, "ep": 8, "seq_len": 4096}
    answer = recommend(Experiment(**node, local_batch=4, compile="model+loss"), limit=3)
    gains, layouts = technique_gains(answer).frame, best_layouts(answer).frame
    names = ["BF16, standard", "FP8 experts", "DeepEP", "FP8 experts with DeepEP"]
    assert list(gains["experts and all-to-all"]) == names
    projections = [one.projection for one in answer.ranked if one.projection]
    assert list(layouts["MFU (%)"]) == pytest.approx([100 * one.mfu["computed"] for one in projections])
    assert list(layouts["tokens/s per GPU"]) == [round(one.tps) for one in projections]
    assert f"MFU {layouts['MFU (%)'][0]:.0f} %" in answer_lines(answer)[0]
