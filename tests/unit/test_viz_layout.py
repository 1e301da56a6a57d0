"""Layouts drawn: groups against TorchTitan's mesh, figures against their data."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from figure_support import title
from hypothesis import given, settings
from hypothesis import strategies as st
from titan_process import groups_of_torchtitan, in_titan_process

from moelab.errors import BadInput
from moelab.experiment import Experiment
from moelab.hardware import B200, H100
from moelab.layout import Layout, check
from moelab.layout.mesh import groups_of
from moelab.memory import MemoryEstimate, estimate
from moelab.recommendation import answer_lines, recommend
from moelab.viz import LayoutExplorer, best_layouts, memory_bars, mesh_map, pipeline_schedule, technique_gains
from moelab.viz.layout import ClusterGrid
from moelab.viz.theme import FAR, NEAR

PUBLISHED: dict[str, Any] = {
    "model": "671B",
    "hardware": "b200_x256",
    "nodes": 32,
    "gpus_per_node": 8,
    "pp": 2,
    "tp": 2,
    "ep": 32,
    "seq_len": 8192,
    "local_batch": 64,
    "activation_checkpoint": "full",
    "compile": "model+loss",
    "dataset": "c4",
}
"""The layout of the article by PyTorch and Nebius, March 2026."""


def experiment(**changes: Any) -> Experiment:
    return Experiment(**{**PUBLISHED, **changes})


def layout(**changes: Any) -> Layout:
    found = check(experiment(**changes)).layout
    assert found is not None
    return found


def memory(**changes: Any) -> MemoryEstimate:
    return estimate(experiment(**changes), layout(**changes), B200)


# --- groups ----------------------------------------------------------------------------------------------------------

NAMES = {("dp_shard", "cp"): "fsdp"}


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
    assert {NAMES.get(group.axes, group.axes[0]): list(group.ranks) for group in ours} == theirs


@settings(max_examples=25, deadline=None)
@given(rank=st.integers(0, 255), degrees=st.sampled_from([(2, 1, 2, 32), (4, 2, 1, 8), (1, 1, 8, 64), (8, 1, 1, 4)]))
def test_every_member_of_a_group_has_the_same_group(rank: int, degrees: tuple[int, int, int, int]) -> None:
    pp, dp_replicate, tp, ep = degrees
    made = layout(pp=pp, dp_replicate=dp_replicate, tp=tp, ep=ep)
    for group in groups_of(made, rank, gpus_per_node=8):
        assert rank in group.ranks
        other = next(each for each in groups_of(made, group.ranks[-1], gpus_per_node=8) if each.axes == group.axes)
        assert other.ranks == group.ranks


# --- figures ---------------------------------------------------------------------------------------------------------


def test_mesh_colours_peers_by_the_wire_and_says_how_many_nodes() -> None:
    figure = mesh_map(layout(), gpus_per_node=8, rank=37)
    assert "Rank 37 reaches 4 nodes by EP, 4 by expert FSDP, 16 by FSDP, 2 by PP; TP stays in its node" in title(figure)
    maps = [trace for trace in figure.data if trace.type == "heatmap"]
    peers = {}
    for note, trace in zip(figure.layout.annotations, maps, strict=True):
        palette = [color for _, color in trace.colorscale[::2]]
        colors = Counter(palette[int(value)] for row in trace.z for value in row if value is not None)
        peers[re.findall("<b>(.*)</b>", note.text)[0]] = colors[NEAR], colors[FAR]
    assert (peers["EP 32"], peers["TP 2"], peers["PP 2"]) == ((8, 24), (2, 0), (1, 1))


def test_every_gpu_is_a_square_of_its_own() -> None:
    for gpus_per_node, nodes in ((8, 32), (3, 5), (1, 1), (8, 65), (4, 257)):
        grid, ranks = ClusterGrid(gpus_per_node=gpus_per_node, nodes=nodes), range(gpus_per_node * nodes)
        squares = grid.squares(["#000000"] * len(ranks), [str(rank) for rank in ranks])
        cells = {text: (x, y) for y, row in enumerate(squares.text) for x, text in enumerate(row) if text}
        assert len(cells) == len(ranks)
        for rank in ranks:  # the square drawn is where the star would be
            x, y = cells[str(rank)]
            assert squares.x[x] < grid.square(rank)[0] < squares.x[x + 1]
            assert squares.y[y] < grid.square(rank)[1] < squares.y[y + 1]
            assert squares.x[x + 1] - squares.x[x] == pytest.approx(1.0)


def test_mesh_of_one_gpu_and_of_a_rank_that_is_not_there() -> None:
    alone = layout(model="nano", nodes=1, gpus_per_node=1, pp=1, tp=1, ep=1, seq_len=128)
    assert "talks to no other rank" in title(mesh_map(alone, gpus_per_node=1))
    with pytest.raises(BadInput, match="rank is 256; valid: 0 to 255"):
        mesh_map(layout(), gpus_per_node=8, rank=256)


def test_pipeline_states_the_bubble_and_that_it_is_simulated() -> None:
    figure = pipeline_schedule(layout(), "1F1B")
    assert "waits 1.5% of a step" in title(figure)
    assert "simulated: equal stage times" in title(figure)
    assert {trace.name: len(trace.x) for trace in figure.data} == {"forward": 128, "backward": 128, "wait (bubble)": 4}
    assert all(trace.text is None for trace in figure.data)  # 64 micro-batches leave no room for their numbers


@pytest.mark.parametrize(("name", "kinds"), [("Interleaved1F1B", "FB"), ("DualPipeV", "FBIW")])
def test_pipeline_of_two_stages_a_rank(name: str, kinds: str) -> None:
    figure = pipeline_schedule(layout(pp=4, pp_schedule=name, local_batch=8, compile="loss"), name)
    assert len(figure.data) == 2 * len(kinds) + 1
    assert "the rank's second stage" in title(figure)
    assert sum(bool(trace.showlegend) for trace in figure.data[:-1]) == len(kinds)


def test_a_long_step_is_cut_and_no_pipeline_is_nothing_to_draw_and_both_say_so() -> None:
    nothing = pipeline_schedule(layout(pp=1), "1F1B")
    assert (len(nothing.data), "No pipeline" in title(nothing)) == (0, True)
    figure = pipeline_schedule(layout(pp=16, ep=8, local_batch=512), "1F1B")
    assert sum(len(trace.x) for trace in figure.data) <= 9000
    assert "the first" in title(figure)


@pytest.mark.parametrize("changes", [{"precision": "mxfp8"}, {"pp": 32, "ep": 8}, {"pp": 1, "tp": 1}])
def test_memory_bars_add_up_to_the_prediction(changes: dict[str, Any]) -> None:
    predicted = memory(**changes)
    figure = memory_bars(predicted, layout(**changes), B200)
    bars = [trace for trace in figure.data if trace.type == "bar"]
    for rank, stage in enumerate(predicted.by_stage):
        assert sum(bar.y[rank] for bar in bars) == pytest.approx(stage.total_gib, abs=0.3)
    assert f"needs {predicted.worst_gib:.1f} of {predicted.capacity_gib:.1f} GiB of a B200" in title(figure)
    assert "predicted, not measured" in title(figure)
    assert predicted.dominant.split(":")[0] in title(figure)


def test_memory_that_does_not_fit_says_so_first_and_an_unknown_capacity_is_no_line() -> None:
    small = estimate(experiment(), layout(), H100)
    figure = memory_bars(small, layout(), H100)
    assert "Does not fit" in title(figure)
    assert figure.layout.yaxis.range[1] > small.worst_gib
    gpu = replace(H100, name="GRID A100X-40C", memory_gib=None)
    figure = memory_bars(estimate(experiment(), layout(), gpu), layout(), gpu)
    assert f"needs {small.worst_gib:.1f} GiB; what a GRID A100X-40C has is not known" in title(figure)
    assert not figure.layout.shapes


# --- explorer --------------------------------------------------------------------------------------------------------


def test_explorer_follows_its_controls_and_refuses_beside_the_one_that_was_changed() -> None:
    explorer = LayoutExplorer(experiment())
    assert "<b>legal · fits (" in explorer.words.value
    assert "tokens/s per GPU (" in explorer.words.value
    assert "671 G parameters, 37.55 G active" in explorer.words.value
    assert legal(explorer) == {1, 2, 4, 8, 16, 32, 64, 128}
    explorer.controls["pp"].value = 16
    assert "see <i>PP degree</i>" in explorer.words.value
    assert "ep is 32" in explorer.reasons["pp"].value
    assert not explorer.figures
    assert (legal(explorer), explorer.controls["ep"].value) == ({1, 2, 4, 8, 16}, 32)
    explorer.controls["ep"].value = 16
    assert "FSDP 8" in explorer.words.value
    assert explorer.experiment == experiment(pp=16, ep=16, accumulate_gradients=True)
    explorer.controls["figure"].value = "mesh"
    explorer.controls["rank"].value = 9
    assert "Rank 9" in title(explorer.figures["mesh"])
    explorer.controls["nodes"].value = 16
    assert explorer.controls["rank"].max == 127


def legal(explorer: LayoutExplorer) -> set[int]:
    return {value for label, value in explorer.controls["ep"].options if "illegal" not in label}


def test_explorer_says_in_its_line_that_a_layout_does_not_fit_and_takes_other_models_and_hardware() -> None:
    explorer = LayoutExplorer(experiment(pp=1, ep=8, tp=1))
    explorer.controls["hardware"].value = "h100_x1024"
    assert "<b>legal · does not fit (" in explorer.words.value
    assert "tokens/s" not in explorer.words.value
    explorer.controls["model"].value = "Qwen3-30B-A3B"
    assert "30.53 G parameters, 3.353 G active" in explorer.words.value
    explorer.controls["model"].value = "671B"
    assert explorer.experiment.shape is None


def test_the_answer_has_a_row_for_each_technique_and_each_layout() -> None:
    node = Experiment(
        model="16B", hardware="h100_node", gpus_per_node=8, ep=8, seq_len=4096, local_batch=4, compile="model+loss"
    )
    found = recommend(node, limit=3, settings=False)
    gains, layouts = technique_gains(found).frame, best_layouts(found).frame
    names = ["BF16, standard", "FP8 experts", "DeepEP", "FP8 experts with DeepEP"]
    assert list(gains["experts and all-to-all"]) == names
    assert "your experts multiply M = " in gains["why"][1]
    mfu = [100 * one.projection.mfu["causal"] for one in found.ranked if one.projection]
    assert list(layouts["MFU (%)"]) == pytest.approx(mfu)
    assert f"MFU {mfu[0]:.0f} %" in answer_lines(found)[0]
    assert list(layouts["tokens/s per GPU"]) == [round(one.projection.tps) for one in found.ranked]
