"""The step-time model: parts that add up, limits, laws, refusals, searches by speed, the command line, and costs."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from moelab.cli import main
from moelab.errors import BadInput, Refused
from moelab.experiment import EPBackend, Experiment, Precision, Routing
from moelab.hardware import Cluster, cluster_of
from moelab.layout import check
from moelab.model import SHAPES, flops_per_token, gemms, shape_of
from moelab.planning import trust
from moelab.planning.advice import answer_lines, recommend, recommendation_text
from moelab.planning.project import (
    KINDS,
    arms_text,
    can_be_placed,
    cluster_like,
    cost,
    gain_over,
    on,
    project,
    projection_text,
    with_network,
)
from moelab.planning.search import certain_tps, search
from moelab.planning.time.calibration import CALIBRATION, with_values
from moelab.planning.time.exchange import add_exchange, exchange_time_s, fsdp_time_s, ring_time_s
from moelab.planning.time.gemm import add_expert_casts, memory_rate, products_by_module, weights_by_module
from moelab.planning.time.job import CATEGORIES, INDEX, PASS_INDEX, Job, job_of, nothing
from moelab.planning.time.routing import RoutingModel
from moelab.planning.time.step import (
    expected_maximum,
    held_by_kind,
    held_by_rank,
    launches,
    module_times,
    step_parts_s,
)
from moelab.titan.arms import named_arms

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
ARMS = ("bf16_standard", "bf16_deepep", "mxfp8_standard", "mxfp8_deepep")
BF16, DEEPEP = (named_arms()[f"dsv3_671b_{arm}"] for arm in ARMS[:2])
NODE = Experiment(
    model="16B", hardware="h100_node", gpus_per_node=8, ep=8, seq_len=4096, activation_checkpoint="full",
    compile="model+loss", routing=Routing.RANDOM_BALANCED,
)  # fmt: skip
B200, FASTER_NETWORK = cluster_of("b200_x256"), with_network(cluster_of("b200_x256"), 100.0)


def changed(experiment: Experiment, **fields: Any) -> Experiment:
    return Experiment.model_validate({**experiment.model_dump(), **fields})


def of_gpu(**figures: Any) -> Cluster:
    """The cluster of B200s with other figures of its GPUs."""
    return replace(B200, name="own", node=replace(B200.node, gpu=replace(B200.node.gpu, **figures)))


@pytest.mark.parametrize("arm", ARMS)
def test_the_parts_add_up_to_the_step(arm: str) -> None:
    projected = project(named_arms()[f"dsv3_671b_{arm}"])
    assert sum(projected.breakdown_s.values()) == projected.step_time_s
    assert min(projected.breakdown_s.values()) >= 0
    assert projected.tps == pytest.approx(4096 * 8192 / 256 / projected.step_time_s)
    assert projected.interval[0] < projected.tps < projected.interval[1]
    # TorchTitan's count, and that of attention inside of documents of 427 tokens
    counts = [flops_per_token(SHAPES["671B"], 8192), flops_per_token(SHAPES["671B"], 2 * 427, causal=True)]
    assert list(projected.flops.values()) == counts
    assert list(projected.mfu.values()) == pytest.approx([flops * projected.tps / 2250e12 for flops in counts])


def test_a_breakdown_has_no_product_twice_and_none_too_few() -> None:
    """Products of one layer of each kind times their layers are those of the model."""
    for shape in SHAPES.values():
        layers = {"attention": shape.n_layers, "feed_forward": shape.n_dense_layers}
        layers |= {"moe": shape.n_moe_layers, "head": 1}
        flops = sum(
            layers[module] * 6 * 2048 * one.rows * one.n * one.k
            for module, weights in weights_by_module(shape, 1, 1).items()
            for one in weights
        )
        assert flops == sum(gemm.flops for gemm in gemms(shape, 2048))


@pytest.mark.parametrize(
    ("part", "without", "with_it"),
    [
        ("all-to-all", {"ep": 1, "model": "debug"}, {}),
        ("tensor-parallel collectives", {}, {"tp": 2, "local_batch": 2, "ep": 4}),
        ("context-parallel collectives", {}, {"cp": 2, "local_batch": 2, "ep": 4}),
        ("pipeline bubble", {}, {"pp": 2, "ep": 4, "local_batch": 8}),
        ("quantisation", {}, {"precision": "fp8"}),
    ],
)
def test_what_a_layout_does_not_do_costs_nothing(part: str, without: dict[str, Any], with_it: dict[str, Any]) -> None:
    projected = [project(changed(NODE, **fields)) for fields in (without, with_it)]
    assert projected[0].breakdown_s[part] == 0 < projected[1].breakdown_s[part]
    assert [part in projection_text(one) for one in projected] == [False, True]


@settings(max_examples=20, deadline=None)
@given(
    arm=st.sampled_from(ARMS),
    figure=st.sampled_from(["nic_gb_s", "bf16_tflops", "hbm_tb_s", "nvlink_gb_s"]),
    factor=st.floats(1.01, 1.9),
)
def test_better_hardware_is_never_slower(arm: str, figure: str, factor: float) -> None:
    experiment, better = named_arms()[f"dsv3_671b_{arm}"], with_network(B200, 50.0 * factor)
    if figure != "nic_gb_s":
        number = getattr(B200.node.gpu, figure)
        better = of_gpu(**{figure: replace(number, value=number.value * factor)})
    assert project(experiment, better).step_time_s <= project(experiment).step_time_s


def test_an_exchange_takes_its_bytes_over_the_slowest_wire() -> None:
    """Round-robin: 4,096 tokens of 7,168 BF16 features, of 8 copies three of four to other nodes; DeepEP sends one."""
    standard, deepep = project(BF16).job, project(DEEPEP).job
    for job, copies, share, beside_s in (
        (standard, 8, CALIBRATION.nccl_network, 0.0),
        (deepep, 1, CALIBRATION.deepep_network, CALIBRATION.deepep_s),
    ):
        seconds = 4096 * copies * 7168 * 2 * 0.75 / 50e9 / share + beside_s
        assert exchange_time_s(job, CALIBRATION, 2.0) == pytest.approx(seconds)
    quantised = project(changed(DEEPEP, precision="mxfp8", wgrad="bf16", dispatch_precision="mxfp8")).job
    add_exchange(times := nothing(), quantised, CALIBRATION)
    both_s = sum(exchange_time_s(quantised, CALIBRATION, element_bytes) for element_bytes in (33 / 32, 2.0))
    assert times[PASS_INDEX["forward"], INDEX["all-to-all"]] == pytest.approx(both_s)


@pytest.mark.parametrize(
    ("routing", "model", "expected"),
    [
        ("round_robin", "671B", RoutingModel(kind="round_robin")),
        ("learned", "671B", RoutingModel(kind="group_limited", groups=8, limited_groups=4)),
        ("learned", "16B", RoutingModel(kind="uniform")),
    ],
)
def test_a_learned_router_keeps_to_the_groups_of_its_model(routing: str, model: str, expected: RoutingModel) -> None:
    assert project(changed(BF16, routing=routing, model=model)).job.routing == expected


@pytest.mark.parametrize(
    ("experiment", "cluster", "error", "words"),
    [
        (changed(NODE, model="671B", hardware="b200_node"), None, Refused, r"does not fit: .* GiB of .* GiB"),
        (changed(BF16, precision="nvfp4"), None, Refused, "^precision is nvfp4: NVFP4 is numbers only"),
        (changed(NODE, hardware="h100_x1024", gpus_per_node=6, nodes=4), None, Refused, "nodes of 6 GPUs.* ep 1, 2"),
        (Experiment(hardware="cpu"), None, BadInput, "no bf16_tflops, hbm_tb_s, nvlink_gb_s"),
        (BF16, cluster_of("b200_node"), BadInput, "nic_gb_s"),
        (changed(BF16, nodes=16, gpus_per_node=16), None, BadInput, "a node of b200_x256 has 8"),
        (BF16, of_gpu(capability=12.0), BadInput, "no profile has a GPU of its kind"),
    ],
)  # fmt: skip
def test_what_has_no_projection(
    experiment: Experiment, cluster: Cluster | None, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        project(experiment, cluster)


def test_no_layout_is_found_where_every_group_ends_inside_a_node() -> None:
    odd = changed(NODE, hardware="h100_x1024", gpus_per_node=6, nodes=4)
    assert check(odd).legal
    assert "inside a node" in answer_lines(recommend(odd, fixed=["ep"]))[1]  # not a matter of memory


def test_figures_and_constants_that_cannot_be() -> None:
    for value in (0.0, -50.0, math.nan, math.inf):
        with pytest.raises(BadInput):
            with_network(B200, value)
        with pytest.raises(BadInput, match=f"nccl_network is {value}; give a positive number"):
            with_values(nccl_network=value)
        with pytest.raises(BadInput, match=f"price_per_gpu_hour is {value}"):
            cost(project(BF16), price_per_gpu_hour=value, watts_per_gpu=1.0)
    with pytest.raises(BadInput, match="no constant 'speed'"):
        with_values(speed=1.0)


@pytest.mark.parametrize(
    ("fields", "outside"),
    [
        ({"nodes": 128, "local_batch": 32}, ["1024 GPUs: validated for TorchTitan on up to 512"]),
        ({"ep": 16, "nodes": 64, "pp": 4, "local_batch": 32}, ["waiting at TorchTitan's exchanges over the network"]),
        ({"shape": {"moe_hidden_dim": 512}}, ["model and expert dimensions 7168 and 512"]),
        ({"model": "16B", "nodes": 4, "tp": 1, "pp": 1, "ep": 8, "local_batch": 4}, []),
        ({"tp": 8, "pp": 4}, ["tensor parallelism over 8 GPUs: validated up to 4"]),
        ({"pp": 1, "nodes": 64, "tp": 1, "ep": 32, "local_batch": 8}, ["671 G parameters without a pipeline"]),
        *((fields, []) for fields in ({"seq_len": 4096}, {"compile": "none"}, {"pp": 4}, {"routing": "learned"})),
    ],
)
def test_what_was_never_seen_is_named(fields: dict[str, Any], outside: list[str]) -> None:
    projected = project(changed(BF16, **fields))
    assert [one[: len(words)] for one, words in zip(projected.outside, outside, strict=True)] == outside
    assert projected.label == ("derived, extrapolated" if outside else "derived")


def test_advice_says_what_it_rests_on_that_was_not_seen() -> None:
    """In the sentence itself: of a projection, of arms beside each other, and of a search."""
    near, far = project(BF16), project(BF16, FASTER_NETWORK)
    assert len(project(DEEPEP).notes) == 2
    assert all(note.startswith("traffic") for note in project(DEEPEP).notes)  # the plan's others do not bear on speed
    assert far.outside == ("network of 100 GB/s: validated at 50",)
    widths = [one.interval[1] / one.tps - 1 for one in (near, far)]
    assert widths[1] > 1.5 * widths[0]
    text = arms_text({"a": near, "b": far}, {"c": "precision is nvfp4"})
    assert "extrapolated from limited evidence: network of 100 GB/s" in text
    assert f"{far.tps / near.tps - 1:+.1%}" in text
    assert text.endswith("c is not projected: precision is nvfp4")
    deepep, inside = project(changed(DEEPEP, ep=16, pp=4)), project(changed(DEEPEP, ep=8, pp=8, tp=1))
    waits = "extrapolated from limited evidence: waiting at TorchTitan's exchanges over the network"
    for projected, unseen in ((deepep, True), (inside, False)):
        text = projection_text(projected)
        assert bool(projected.outside) == unseen
        assert (waits in text) == ("DeepEP between nodes was never run here" in text) == unseen
    fixed = ("cp", "dp_replicate", "pp", "tp", "dp_shard")
    text = " ".join(recommendation_text(recommend(inside.experiment, FASTER_NETWORK, fixed=fixed, limit=2)).split())
    assert "(extrapolated from limited evidence: network of 100 GB/s" in text
    assert "(extrapolated *)" in text


def test_a_group_is_placed_on_the_cluster_that_is_asked_about() -> None:
    """NVLink joins 72 GPUs of the one and 8 of the other, whatever hardware the experiment names."""
    rack = cluster_of("gb200_nvl72_x4")
    experiment = changed(NODE, hardware="b200_x256", gpus_per_node=4, nodes=4, ep=16)
    rows = [project(experiment, cluster).job.rows_sent.network for cluster in (rack, B200)]
    assert rows[0] == 0 < rows[1]
    assert project(NODE, FASTER_NETWORK).experiment.hardware == "b200_x256"  # whose rules hold, not an H100's
    six = changed(experiment, nodes=6, ep=8)
    assert can_be_placed(experiment, 16, rack.node)
    assert can_be_placed(six, 8, rack.node)
    assert not can_be_placed(changed(six, gpus_per_node=8), 12, B200.node)


def test_gathers_hide_beside_layers_and_not_beside_the_ends() -> None:
    """On two nodes experts are gathered too; only what is longer than a layer's compute shows."""
    job = project(changed(NODE, nodes=2, hardware="h100_x1024")).job

    def exposed(**constants: float) -> float:
        return step_parts_s(job, with_values(**constants))["FSDP collectives"]

    kinds = held_by_kind(job.shape, job.degrees)
    gather, scatter = (
        {kind: fsdp_time_s(job, CALIBRATION, kinds[kind].dense, 0, size) for kind in ("embedding", "head")}
        for size in (2, 4)
    )
    ends_s = gather["embedding"] + scatter["embedding"] + 2 * gather["head"] + scatter["head"]
    assert ends_s < exposed() < 1.1 * ends_s  # the embedding is too short to hide the first layer's
    slow, slower = (exposed(nccl_network=share) for share in (0.02, 0.01))
    assert slow > 10 * exposed()
    # Everything on the wire takes twice as long and is longer than what it runs beside: all compute of the layers.
    modules, layers = module_times(job, CALIBRATION), {"dense": job.shape.n_dense_layers, "moe": job.shape.n_moe_layers}
    computes = [INDEX[name] for name in CATEGORIES if name != "all-to-all"]
    beside_s = sum(count * modules[kind][:, computes].sum() for kind, count in layers.items())
    assert slower - 2 * slow == pytest.approx(job.microbatches * beside_s, rel=0.1)


def test_replicas_add_up_their_gradients_once_a_step() -> None:
    """In FP32, to every replica and back; without a pipeline those of the embedding and of the head show alone."""
    pipeline = project(changed(BF16, model="16B", dp_replicate=2)).job
    flat = project(changed(NODE, hardware="h100_x1024", nodes=2, dp_replicate=2)).job
    kinds = held_by_kind(flat.shape, flat.degrees)
    for job, held in (
        (pipeline, [[held_by_rank(pipeline, rank)] for rank in range(pipeline.pp)]),
        (flat, [[kinds["embedding"], kinds["head"]]]),
    ):
        alone = replace(job, degrees=job.degrees._replace(dp_replicate=1))
        both_s, alone_s = (step_parts_s(one, CALIBRATION)["FSDP collectives"] for one in (job, alone))
        stride = job.degrees.fsdp * job.work.tp
        sums_s = [sum(2 * ring_time_s(job, CALIBRATION, 4 * one.padded, 2, stride=stride) for one in of) for of in held]
        assert any(both_s - alone_s == pytest.approx(one) for one in sums_s)


def test_launching_shows_where_it_takes_longer_than_what_is_launched() -> None:
    job, slow = project(NODE).job, with_values(launch_s=1e-2)
    kernels = launches(job, CALIBRATION, moe=True)
    assert sum(kernels.values()) / kernels["forward"] == pytest.approx(300 / 84, rel=0.02)  # of the traced steps
    layer = dict(zip(CATEGORIES, module_times(job, slow)["moe"].sum(axis=0), strict=True))
    shown = layer.pop("host and waiting")
    waits = 2 * slow.sync_s  # forward and again, at each dispatch
    assert shown == pytest.approx(1e-2 * sum(kernels.values()) - sum(layer.values()) + waits, rel=1e-9)
    assert step_parts_s(job, slow)["host and waiting"] > 100 * step_parts_s(job, CALIBRATION)["host and waiting"]
    graphs = replace(job, stack=replace(job.stack, launch_s=0.0))
    assert step_parts_s(graphs, slow)["host and waiting"] == 0


def test_the_expected_maximum_is_that_of_draws() -> None:
    draws = np.random.default_rng(0).standard_normal((20_000, 64)).max(axis=1).mean()
    maxima = [expected_maximum(number) for number in (1, 2, 64)]
    assert maxima == [0, pytest.approx(1 / math.sqrt(math.pi), abs=0.03), pytest.approx(draws, abs=0.03)]


def test_cost_of_deepseeks_tokens_at_its_own_speed() -> None:
    """2.664 M GPU-hours for 14.8 T tokens are 1,543 tokens/s/GPU (DeepSeek-V3 report)."""
    projected = project(BF16)
    at = cost(projected, price_per_gpu_hour=2.0, watts_per_gpu=1000.0)
    assert at.gpu_hours * projected.tps == pytest.approx(2.664e6 * 1543, rel=1e-3)
    hours = at.gpu_hours
    assert (at.days, at.price, at.energy_mwh) == pytest.approx((hours / 256 / 24, 2 * hours, hours / 1000))
    assert cost(projected, price_per_gpu_hour=2.0, watts_per_gpu=1000.0, tokens=7.4e12).days == at.days / 2


@pytest.mark.parametrize(("arm", "own"), [("mxfp8_standard", True), ("bf16_deepep", False)])
def test_a_gain_is_as_uncertain_as_the_parts_that_err(arm: str, own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of another precision err by themselves, errors that both sides share cancel."""
    monkeypatch.setattr(trust, "PART_SPREAD", {**dict.fromkeys(CATEGORIES, 0.0), "expert GEMMs": 0.02})
    sides = [project(experiment) for experiment in (named_arms()[f"dsv3_671b_{arm}"], BF16)]
    shares = [one.breakdown_s["expert GEMMs"] / one.step_time_s for one in sides]
    interval = gain_over(*sides)
    ratio = (1 + interval.high / 100) / (1 + interval.low / 100)
    spread = 0.02 * (math.hypot(*shares) if own else abs(shares[0] - shares[1]))
    assert math.log(ratio) / 2 == pytest.approx(1.645 * spread)
    # Drawn many times, as many of the gains lie inside.
    random = np.random.default_rng(0)
    errors = np.exp(random.normal(0, 0.02, (2, 4000)))
    errors[1] = errors[1] if own else errors[0]
    steps = [
        one.step_time_s + (error - 1) * one.breakdown_s["expert GEMMs"]
        for one, error in zip(sides, errors, strict=True)
    ]
    gains = 100 * (steps[1] / steps[0] - 1)
    assert np.mean((interval.low < gains) & (gains < interval.high)) == pytest.approx(0.9, abs=0.02)


def test_a_cluster_is_of_a_kind_of_gpu_and_takes_the_8_bit_format_that_it_multiplies() -> None:
    quantised = changed(BF16, precision="mxfp8")
    formats = {kind: on(kind, quantised).precision for kind in KINDS}
    assert formats == {"H100": "fp8", "H200": "fp8", "B200": "mxfp8", "GB200": "mxfp8"}
    assert on("H100", BF16).precision == "bf16"
    networks = (50.0, 100.0, 400.0)
    tps = {
        backend: [
            project(on("B200", BF16, ep_backend=backend), cluster_like("B200", nodes=32, network_gb_s=one)).tps
            for one in networks
        ]
        for backend in ("standard", "deepep")
    }
    assert all(one == sorted(one) for one in tps.values())
    gains = [deepep / standard for deepep, standard in zip(tps["deepep"], tps["standard"], strict=True)]
    assert gains == sorted(gains, reverse=True), "the faster the network, the less there is to save"
    with pytest.raises(BadInput, match="gpu is 'Z9'"):
        cluster_like("Z9", nodes=2)


def test_documents_are_told_and_taken_and_mfu_counts_what_is_computed() -> None:
    """On c4 attention stays inside of documents of 427 tokens: longer sequences cost no more, and count no more."""
    short, long = (
        project(changed(NODE, dataset="c4", seq_len=length, local_batch=8192 // length)) for length in (2048, 8192)
    )
    assert short.tps == pytest.approx(long.tps, rel=0.01)
    assert short.mfu["computed"] == pytest.approx(long.mfu["computed"], rel=0.01)
    assert short.flops["computed"] == long.flops["computed"] == flops_per_token(SHAPES["16B"], 2 * 427, causal=True)
    assert "documents: of 427 tokens on average (assumed: c4's)" in projection_text(long)
    brief = (project(changed(NODE, dataset="c4", seq_len=length, local_batch=16)) for length in (1024, 512))
    assert ["documents" in projection_text(one) for one in brief] == [True, False]  # half of 512 is less than 427
    whole = project(long.experiment, document_tokens=8192)
    assert whole.tps < long.tps
    assert whole.flops["computed"] == flops_per_token(SHAPES["16B"], 8192, causal=True)
    assert "documents" not in projection_text(whole)
    assert whole.to_json()["document_tokens"] == 8192
    with pytest.raises(BadInput, match="document_tokens is 0"):
        project(long.experiment, document_tokens=0)


# Advice


def test_an_answer_has_the_layouts_in_order_and_the_sentences() -> None:
    found = recommend(changed(NODE, local_batch=4), limit=5)
    ranks = [certain_tps(one.projection) for one in found.ranked if one.projection]
    assert ranks == sorted(ranks, reverse=True)
    assert all(project(one.experiment).tps == one.projection.tps for one in found.ranked if one.projection)
    text = " ".join(recommendation_text(found).split())
    assert f"{found.result.projected} projected" in text
    first, model, *_ = answer_lines(found, "DeepSeek-V3")
    assert found.best is not None
    assert f"fits ({found.ranked[0].headroom_gib:.1f} GiB free) · {found.best.tps:,.0f} tokens/s" in first
    assert model.startswith("DeepSeek-V3: 15.7")
    for times, words in ((1.5, "50.0 % faster"), (3.09, "3.1 × as fast")):
        slower = replace(found, own_tps=found.best.tps / times)
        (given_line,) = [one for one in answer_lines(slower) if "as given: " in one]
        assert given_line.endswith(f"the best is {words}")


def test_an_answer_says_how_many_gpus_it_would_take() -> None:
    none = recommend(changed(BF16, nodes=2, ep=8, tp=1, pp=1), limit=3)
    assert (none.best, none.gains) == (None, ())
    assert none.result.enough is not None
    first, closest, enough, *_ = answer_lines(none)
    assert first == "legal · no layout fits"
    assert re.match(r"the closest is [\d.]+ GiB short on its fullest GPU: FSDP", closest)
    assert enough.startswith(f"{none.result.enough.experiment.world_size} GPUs would do: ")


def test_a_gain_has_the_best_layout_on_either_side_and_one_machine_under_both() -> None:
    """At the published EP 32 DeepEP is projected to gain half; with a choice on either side experts stay in a node."""
    found = recommend(BF16, fixed=("cp", "dp_replicate", "tp", "pp_schedule"), limit=3)
    experts, deepep, both = found.gains
    assert (experts.name, deepep.name, both.name) == ("MXFP8 experts", "DeepEP", "MXFP8 experts with DeepEP")
    assert deepep.interval.value < 50 * (project(changed(BF16, ep_backend="deepep")).tps / project(BF16).tps - 1)
    sides = [(gain.with_it, gain.without) for gain in found.gains if gain.with_it]
    for gain, (with_it, without) in zip(found.gains, sides, strict=True):
        assert gain.interval.value == pytest.approx(100 * (with_it.tps / without.tps - 1))
        apart = 100 * (with_it.interval[1] / without.interval[0] - 1)
        assert gain.interval.low < gain.interval.value < gain.interval.high < apart
        alone = search(without.experiment, fixed=("cp", "dp_replicate", "tp", "pp_schedule"), limit=1)
        assert without.tps == alone.candidates[0].projection.tps
    best = found.best
    assert best is not None
    of_itself = gain_over(best, best)
    assert (of_itself.low, of_itself.value, of_itself.high) == (0, 0, 0)


def test_fewer_sequences_than_pipeline_stages_are_searched_too() -> None:
    """GPipe takes four on eight stages, 1F1B does not; without a pipeline the name of a schedule may be anything."""
    found = recommend(changed(NODE, pp_schedule="gpipe"), fixed=["cp"], global_batch=4, limit=200)
    assert {(1, "gpipe"), (8, "GPipe")} <= {(one.experiment.pp, one.experiment.pp_schedule) for one in found.ranked}


@pytest.mark.parametrize(
    ("hardware", "other", "backend"),
    [
        ("h200_node", "h100_node", "standard"),
        ("h100_node", "b200_node", "standard"),
        ("cpu", "h200_node", "deepep"),  # which no layout may have on a CPU
    ],
)
def test_a_search_goes_by_the_memory_and_rules_of_the_cluster_given(hardware: str, other: str, backend: str) -> None:
    own = NODE.model_copy(update={"local_batch": 16, "ep_backend": EPBackend(backend), "hardware": hardware})
    fixed = ("cp", "dp_replicate", "tp", "pp_schedule")
    expected, moved = (
        recommend(one, cluster_of(other), fixed=fixed, limit=3)
        for one in (own.model_copy(update={"hardware": other}), own)
    )
    assert moved.ranked
    assert moved.to_json() == expected.to_json()


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump(BF16.model_dump(mode="json")))
    assert main(["project", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out).items() >= json.loads(json.dumps(project(BF16).to_json())).items()
    for setting, code, words in (
        ("ep_backend=deepep", 0, ["all-to-all"]),
        ("pp=3", 3, check(changed(BF16, pp=3)).reasons),
        ("hardware=cpu", 2, ["has no bf16_tflops"]),
    ):
        assert main(["project", str(path), "--set", setting]) == code
        printed = capsys.readouterr()
        assert [word for word in words if word not in (printed.err if code else printed.out)] == []
    arms = [{}, {"precision": "fp8"}, {"precision": "nvfp4"}]
    study = {"experiment": NODE.model_dump(mode="json", exclude_unset=True), "arms": arms}
    path.write_text(yaml.safe_dump(study))
    assert main(["project", str(path)]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"high +over the first", printed)
    assert "nvfp4_standard_random-balanced is not projected: precision is nvfp4: NVFP4 is numbers only" in printed
    assert main(["project", str(path), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [len(answer[name]) for name in ("arms", "refused")] == [2, 1]
    assert main(["project", str(path), "--arm", "nvfp4_standard"]) == 3
    assert main(["plan", str(path), "--arm", "bf16_standard", "--search", "--limit", "1000000"]) == 2
    for length, words in (("0", "seq_len: got 0"), ("1.0e+308", "seq_len: got 1e+308")):
        hub = ["--from-hf", "Qwen3-30B-A3B", "--set", f"seq_len={length}"]
        assert main(["plan", *hub, "--search"]) == 2
        assert words in capsys.readouterr().err


# Experts in 8 bits


def fp8_job(**fields: Any) -> Job:
    experiment = changed(NODE, precision="fp8", ep_backend="deepep", dispatch_precision="fp8", **fields)
    layout = check(experiment).layout
    assert layout is not None
    return job_of(experiment, layout, cluster_of(experiment.hardware).node)  # whether it fits is not asked


def test_fp8_experts_have_their_weight_gradients_in_bf16_unless_asked() -> None:
    """Of three products of one size each forward, dgrad and wgrad, BF16's take about twice as long."""
    mixed, low = (fp8_job(activation_checkpoint="none", wgrad=wgrad) for wgrad in ("bf16", "fp8"))
    work = replace(mixed.work, one_pass_experts=False, scaled_products=False)
    bf16 = replace(mixed, work=work, precision=Precision.BF16)
    parts = [step_parts_s(job, CALIBRATION) for job in (low, mixed, bf16)]
    low_s, mixed_s, high_s = (one["expert GEMMs"] for one in parts)
    assert mixed_s - low_s == pytest.approx((high_s - low_s) / 3, rel=0.2)
    assert 0 < parts[1]["quantisation"] < parts[0]["quantisation"]


def test_selective_checkpointing_computes_no_product_in_8_bits_again() -> None:
    job = fp8_job(activation_checkpoint="selective")
    none, kept, again = (
        step_parts_s(replace(job, checkpointing=kind), CALIBRATION) for kind in ("none", "selective", "full+dispatch")
    )
    for part, factor in (("expert GEMMs", 1.2), ("quantisation", 1.0)):
        assert kept[part] == pytest.approx(none[part])
        assert again[part] > factor * kept[part]


def test_a_layer_of_fp8_experts_takes_what_it_was_measured_to_take() -> None:
    """``experts_h200.json``: 65,536 rows, eight experts of 7,168 by 2,048; SwiGLU's traffic is elementwise work."""
    rows = json.loads((RESULTS / "experts_h200.json").read_text())["rows"]
    (measured_ms,) = (row["ms"] for row in rows if row["part"] == "layer")
    base = fp8_job(local_batch=2, model="671B")
    base = replace(
        base, shape=shape_of("671B").thin(dense_layers=0, moe_layers=1, num_experts=16),
        node=cluster_of("h200_node").node, work=replace(base.work, tokens=8192, ep=2), checkpointing="none",
    )  # fmt: skip
    for name, job in {"fp8": base, "fp8, wgrad fp8": replace(base, bf16_wgrad=False)}.items():
        gemms_s = products_by_module(job, CALIBRATION)["moe"][:, INDEX["expert GEMMs"]].sum()
        add_expert_casts(casts := nothing(), job, CALIBRATION)
        swiglu_s = 9 * 2 * 65_536 * 2048 / memory_rate(job, CALIBRATION)
        assert 1e3 * (gemms_s + casts.sum() + swiglu_s) == pytest.approx(measured_ms[name], rel=0.12), name
