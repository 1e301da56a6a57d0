"""The step-time model: parts that add up, limits, laws, refusals, the command line, and what training costs."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from contextlib import suppress
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
from moelab.hardware import Cluster, ImpossibleHardware, cluster_of
from moelab.layout import check, facts_of, resolve
from moelab.model import SHAPES, flops_per_token, gemms, shape_of
from moelab.plan import headroom_gib
from moelab.projection import uncertainty
from moelab.projection.calibration import CALIBRATION, with_values
from moelab.projection.exchange import add_exchange, exchange_time_s, fsdp_time_s, ring_time_s
from moelab.projection.gemm import (
    add_expert_casts,
    gemm_time_s,
    products_by_module,
    rates_of,
    weights_by_module,
)
from moelab.projection.job import CATEGORIES, INDEX, PASS_INDEX, Job, job_of, nothing
from moelab.projection.memory_bound import held_by_kind, held_by_rank, memory_rate
from moelab.projection.project import (
    DEEPSEEK_TOKENS,
    Projection,
    arms_text,
    can_be_placed,
    cost,
    project,
    projection_text,
    with_network,
)
from moelab.projection.step import expected_maximum, launches, module_times, step_parts_s, work_s
from moelab.projection.uncertainty import gain_interval
from moelab.recommendation import TRIED, answer_lines, better_layout, better_text, recommend, recommendation_text
from moelab.search import CONSIDERED, POLICIES, Space, search
from moelab.titan.arms import named_arms

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
ARMS = ("bf16_standard", "bf16_deepep", "mxfp8_standard", "mxfp8_deepep")
PUBLISHED = named_arms()["dsv3_671b_bf16_standard"]
SMALL: dict[str, Any] = {"model": "16B", "hardware": "h100_node", "gpus_per_node": 8, "ep": 8, "seq_len": 4096}
NODE = Experiment(**SMALL, activation_checkpoint="full", compile="model+loss", routing=Routing.RANDOM_BALANCED)


def faster(cluster: Cluster, figure: str, factor: float) -> Cluster:
    """The cluster with a figure of its GPU or network multiplied."""
    node, owner = cluster.node, cluster.node if figure == "nic_gb_s" else cluster.node.gpu
    number = getattr(owner, figure)
    better: Any = replace(owner, **{figure: replace(number, value=number.value * factor)})
    return replace(cluster, node=better if owner is node else replace(node, gpu=better))


@pytest.mark.parametrize("arm", ARMS)
def test_the_parts_add_up_to_the_step(arm: str) -> None:
    found = project(named_arms()[f"dsv3_671b_{arm}"])
    assert sum(found.breakdown_s.values()) == found.step_time_s
    assert all(seconds >= 0 for seconds in found.breakdown_s.values())
    assert found.tps == pytest.approx(4096 * 8192 / 256 / found.step_time_s)
    low, high = found.interval
    assert low < found.tps < high
    counts = flops_per_token(SHAPES["671B"], 8192), flops_per_token(SHAPES["671B"], 8192, causal=True)
    assert tuple(found.flops.values()) == counts
    for count, flops in found.flops.items():
        assert found.mfu[count] == pytest.approx(flops * found.tps / 2250e12)


def test_a_breakdown_has_no_product_twice_and_none_too_few() -> None:
    """Products of one layer of each kind times their layers are those of the model."""
    for shape in SHAPES.values():
        layers = {"attention": shape.n_layers, "feed_forward": shape.n_dense_layers}
        layers |= {"moe": shape.n_moe_layers, "head": 1}
        weights = weights_by_module(shape, 1, 1)
        mine = sum(
            layers[module] * 6 * 2048 * one.rows * one.n * one.k for module in weights for one in weights[module]
        )
        assert mine == sum(gemm.flops for gemm in gemms(shape, 2048))


def test_what_a_layout_does_not_do_costs_nothing() -> None:
    def parts(**changes: Any) -> dict[str, float]:
        return project(NODE.model_copy(update=changes)).breakdown_s

    plain = parts()
    assert plain["all-to-all"] > 0 == plain["pipeline bubble"] == plain["quantisation"]
    assert parts(ep=1, model="debug")["all-to-all"] == 0
    for axis, part in (("tp", "tensor-parallel collectives"), ("cp", "context-parallel collectives")):
        assert plain[part] == 0 < parts(**{axis: 2}, local_batch=2, ep=4)[part]


@settings(max_examples=20, deadline=None)
@given(
    arm=st.sampled_from(ARMS),
    figure=st.sampled_from(["nic_gb_s", "bf16_tflops", "hbm_tb_s", "nvlink_gb_s"]),
    factor=st.floats(1.01, 1.9),
)
def test_better_hardware_is_never_slower(arm: str, figure: str, factor: float) -> None:
    experiment, cluster = named_arms()[f"dsv3_671b_{arm}"], cluster_of("b200_x256")
    assert project(experiment, faster(cluster, figure, factor)).step_time_s <= project(experiment).step_time_s


def test_an_exchange_takes_its_bytes_over_the_slowest_wire() -> None:
    """Standard, round-robin: 4,096 tokens in 8 copies of 7,168 BF16 features, three of four to other nodes."""
    found = project(PUBLISHED)
    seconds = 4096 * 8 * 7168 * 2 * 0.75 / 50e9
    latency = float(CALIBRATION.collective_s)
    standard_s = seconds / float(CALIBRATION.nccl_network) + latency
    assert exchange_time_s(found.job, CALIBRATION, 2.0) == pytest.approx(standard_s)
    deepep = project(named_arms()["dsv3_671b_bf16_deepep"]).job
    for job, share in (
        (deepep, CALIBRATION.deepep_network),
        (replace(deepep, stack=replace(deepep.stack, deepep_v1=True)), CALIBRATION.deepep_v1_network),
    ):
        latency = float(CALIBRATION.deepep_s)
        assert exchange_time_s(job, CALIBRATION, 2.0) == pytest.approx(seconds / 8 / float(share) + latency)
    quantised: dict[str, Any] = {"precision": Precision.MXFP8, "wgrad": "bf16", "dispatch_precision": "mxfp8"}
    job = project(named_arms()["dsv3_671b_bf16_deepep"].model_copy(update=quantised)).job
    add_exchange(times := nothing(), job, CALIBRATION)
    dispatch_s, combine_s = (exchange_time_s(job, CALIBRATION, one) for one in (33 / 32, 2.0))
    assert times[PASS_INDEX["forward"], INDEX["all-to-all"]] == pytest.approx(dispatch_s + combine_s)


def test_what_plan_refuses_is_refused_with_its_reasons() -> None:
    illegal = PUBLISHED.model_copy(update={"pp": 3})
    with pytest.raises(Refused) as refused:
        project(illegal)
    assert all(reason in str(refused.value) for reason in check(illegal).reasons)
    with pytest.raises(Refused, match=r"does not fit: .* GiB of .* GiB"):
        project(Experiment(model="671B", hardware="b200_node", gpus_per_node=8, ep=8, seq_len=4096))
    with pytest.raises(Refused, match=r"^precision is nvfp4: NVFP4 is numbers only"):
        project(PUBLISHED.model_copy(update={"precision": Precision.NVFP4, "mxfp8_kernels": "auto"}))


def test_hardware_without_figures_and_impossible_figures_are_bad_input() -> None:
    with pytest.raises(BadInput, match="no bf16_tflops, hbm_tb_s, nvlink_gb_s"):
        project(Experiment(hardware="cpu"))
    with pytest.raises(BadInput, match="nic_gb_s"):
        project(PUBLISHED, cluster_of("b200_node"))
    with pytest.raises(BadInput, match="a node of b200_x256 has 8"):
        project(PUBLISHED.model_copy(update={"nodes": 16, "gpus_per_node": 16}))
    for bandwidth in (0.0, -50.0, math.nan, math.inf):
        with pytest.raises(ImpossibleHardware):
            with_network(cluster_of("b200_x256"), bandwidth)
    with pytest.raises(BadInput, match="no constant 'speed'"):
        with_values(speed=1.0)
    for value in (0.0, math.nan, math.inf):
        with pytest.raises(BadInput, match="give a positive number"):
            with_values(nccl_network=value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"nodes": 128, "local_batch": 32}, ["1024 GPUs: validated for TorchTitan on up to 512"]),
        *((change, []) for change in ({"seq_len": 4096}, {"compile": "none"}, {"pp": 4}, {"routing": "learned"})),
        ({"ep": 16, "nodes": 64, "pp": 4, "local_batch": 32}, ["waiting at TorchTitan's exchanges over the network"]),
        ({"shape": {"moe_hidden_dim": 512}}, ["model and expert dimensions 7168 and 512"]),
        ({"model": "16B", "nodes": 4, "tp": 1, "pp": 1, "ep": 8, "local_batch": 4}, []),
    ],
)
def test_what_was_never_seen_is_named(changes: dict[str, Any], said: list[str]) -> None:
    found = project(Experiment(**{**PUBLISHED.model_dump(mode="json"), **changes}))
    assert len(found.outside) == len(said)
    assert all(one.startswith(words) for one, words in zip(found.outside, said, strict=True))
    assert found.label == ("derived, extrapolated" if said else "derived")


def test_a_network_of_another_speed_is_named_and_widens_the_interval() -> None:
    wider = project(PUBLISHED, with_network(cluster_of("b200_x256"), 100.0))
    assert wider.outside == ("network of 100 GB/s: validated at 50",)
    spread = [one.interval[1] / one.tps - 1 for one in (project(PUBLISHED), wider)]
    assert spread[1] > 1.5 * spread[0]


def test_advice_says_what_it_rests_on_that_was_not_seen() -> None:
    """In the sentence itself: of a projection, of arms beside each other, and of a search."""
    waits = "extrapolated from limited evidence: waiting at TorchTitan's exchanges over the network"
    deepep = named_arms()["dsv3_671b_bf16_deepep"]
    assert waits in projection_text(project(deepep))
    first, other = project(PUBLISHED), project(deepep)
    text = arms_text({"a": first, "b": other})
    assert waits in text
    assert f"{other.tps / first.tps - 1:+.1%}" in text
    assert "DeepEP between nodes was never run here" in projection_text(project(deepep))
    inside = deepep.model_copy(update={"ep": 8, "pp": 8, "tp": 1})
    assert not project(inside).rests_on
    assert "never run here" not in projection_text(project(inside))
    text = recommendation_text(recommend(inside, fixed=("cp", "dp_replicate", "pp", "tp", "dp_shard"), limit=2))
    (other,) = [line for line in text.splitlines() if line.startswith("  ep_backend")]
    assert waits not in other
    far = with_network(cluster_of("b200_x256"), 100.0)
    text = recommendation_text(recommend(inside, far, fixed=("cp", "dp_replicate", "pp", "tp"), limit=2))
    (other,) = [line for line in text.splitlines() if line.startswith("  ep_backend")]
    assert other.endswith("(extrapolated *)")
    assert "* extrapolated from limited evidence: network of 100 GB/s" in text


def test_nothing_costs_more_for_having_two_nodes() -> None:
    """Work a GPU and experts inside the node as they are, from one node to sixteen: a public run loses 6 %."""
    one = Experiment(
        model="16B", hardware="b200_x256", gpus_per_node=8, ep=8, seq_len=4096, local_batch=4, compile="model+loss",
        routing=Routing.RANDOM_BALANCED,
    )  # fmt: skip
    tps = [project(one.model_copy(update={"nodes": nodes})).tps for nodes in (1, 2, 4, 16)]
    assert all(0.93 * tps[0] < other < 1.03 * tps[0] for other in tps)


def test_a_group_is_placed_on_the_cluster_that_is_asked_about() -> None:
    """NVLink joins 72 GPUs of the one and 8 of the other, whatever hardware the experiment names."""
    rack, nodes = cluster_of("gb200_nvl72_x4"), cluster_of("b200_x256")
    experiment = NODE.model_copy(update={"hardware": "b200_x256", "gpus_per_node": 4, "nodes": 4, "ep": 16})
    over = {cluster.name: project(experiment, cluster).job.rows_sent.network for cluster in (rack, nodes)}
    assert over[rack.name] == 0 < over[nodes.name]
    assert can_be_placed(experiment, 16, rack.node)
    assert can_be_placed(experiment.model_copy(update={"nodes": 6}), 8, rack.node)
    assert not can_be_placed(experiment.model_copy(update={"nodes": 6, "gpus_per_node": 8}), 12, nodes.node)


def test_gathers_hide_beside_layers_and_not_beside_the_ends() -> None:
    """On two nodes experts are gathered too; only what is longer than a layer's compute shows."""
    job = project(NODE.model_copy(update={"nodes": 2, "hardware": "h100_x1024"})).job

    def exposed(**constants: float) -> float:
        return step_parts_s(job, with_values(**constants))["FSDP collectives"]

    kinds = held_by_kind(job.shape, job.degrees)
    ends = [
        fsdp_time_s(job, CALIBRATION, kinds[kind].dense, 0, size) for kind in ("embedding", "head") for size in (2, 4)
    ]
    known_s = ends[0] + ends[1] + 2 * ends[2] + ends[3]
    assert known_s < exposed() < 1.1 * known_s  # the embedding is too short to hide the first layer's
    slow, slower = (exposed(nccl_network=share) for share in (0.02, 0.01))
    assert slow > 10 * exposed()
    # Everything on the wire takes twice as long and is longer than what it runs beside: all compute of the layers.
    modules, layers = module_times(job, CALIBRATION), {"dense": job.shape.n_dense_layers, "moe": job.shape.n_moe_layers}
    computes = [INDEX[name] for name in CATEGORIES if name != "all-to-all"]
    beside_s = sum(count * modules[kind][:, computes].sum() for kind, count in layers.items())
    assert slower - 2 * slow == pytest.approx(job.microbatches * beside_s, rel=0.1)


def test_replicas_add_up_their_gradients_once_a_step() -> None:
    job = project(PUBLISHED.model_copy(update={"model": "16B", "dp_replicate": 2})).job
    alone = replace(job, degrees=job.degrees._replace(dp_replicate=1))
    both_s, alone_s = (step_parts_s(one, CALIBRATION)["FSDP collectives"] for one in (job, alone))
    sums = [4 * held_by_rank(job, rank).padded for rank in range(job.pp)]  # FP32, to every replica and back
    stride = job.degrees.fsdp * job.work.tp
    assert any(
        both_s - alone_s == pytest.approx(2 * ring_time_s(job, CALIBRATION, one, 2, stride=stride)) for one in sums
    )


def test_launching_shows_where_it_takes_longer_than_what_is_launched() -> None:
    job = project(NODE).job
    waiting = step_parts_s(job, CALIBRATION)["host and waiting"]
    slow = with_values(launch_s=1e-2)
    modules = module_times(job, slow)
    kernels = launches(job, moe=True)
    assert sum(kernels.values()) / kernels["forward"] == pytest.approx(300 / 84, rel=0.02)  # of the traced steps
    busy = [modules["moe"][:, INDEX[name]].sum() for name in CATEGORIES if name != "host and waiting"]
    waits = 2 * float(slow.sync_s)  # forward and again, at each dispatch
    shown = modules["moe"][:, INDEX["host and waiting"]].sum()
    assert shown == pytest.approx(1e-2 * sum(kernels.values()) - sum(busy) + waits, rel=1e-9)
    assert step_parts_s(job, slow)["host and waiting"] > 100 * waiting
    graphs = replace(job, stack=replace(job.stack, host="graphs"))
    assert step_parts_s(graphs, slow)["host and waiting"] == 0


def test_the_expected_maximum_is_that_of_draws() -> None:
    draws = np.random.default_rng(0).standard_normal((20_000, 64)).max(axis=1).mean()
    assert expected_maximum(64) == pytest.approx(draws, abs=0.03)
    assert (expected_maximum(1), expected_maximum(2)) == (0, pytest.approx(1 / math.sqrt(math.pi), abs=0.03))


def test_cost_of_deepseeks_tokens_at_its_own_speed() -> None:
    """2.664 M GPU-hours for 14.8 T tokens are 1,543 tokens/s/GPU (DeepSeek-V3 report)."""
    found: Projection = project(PUBLISHED)
    at = cost(found, price_per_gpu_hour=2.0, watts_per_gpu=1000.0)
    assert at.gpu_hours * found.tps == pytest.approx(2.664e6 * 1543, rel=1e-3)
    assert at.days == pytest.approx(at.gpu_hours / 256 / 24)
    assert at.price == pytest.approx(2 * at.gpu_hours)
    assert at.energy_mwh == pytest.approx(at.gpu_hours / 1000)
    assert cost(found, price_per_gpu_hour=2.0, watts_per_gpu=1e3, tokens=DEEPSEEK_TOKENS / 2).days == at.days / 2
    with pytest.raises(BadInput, match="price_per_gpu_hour is -1"):
        cost(found, price_per_gpu_hour=-1.0, watts_per_gpu=1.0)


def test_a_search_by_speed_is_ordered_and_says_what_a_setting_is_worth() -> None:
    found = recommend(NODE.model_copy(update={"local_batch": 4}), limit=5)
    lows = [one.projection.interval[0] for one in found.ranked]
    assert lows == sorted(lows, reverse=True)
    assert all(project(one.experiment).tps == one.projection.tps for one in found.ranked)
    best = found.ranked[0].projection
    for worth in (one for one in found.worth if one.field in TRIED):  # each value has a layout of its own
        other = Experiment.model_validate({**best.experiment.model_dump(), worth.field: worth.other})
        with suppress(Refused):
            assert worth.other_tps >= project(other).tps
    assert {"compile", "activation_checkpoint"} <= {worth.field for worth in found.worth}
    text = " ".join(recommendation_text(found).split())
    assert f"{found.considered} projected, of which a first estimate ranked the best number {found.place}" in text
    first = found.worth[0]
    told = re.search(rf"{first.field} \S+ instead of \S+: ([+-][\d.]+) %", text)
    assert told is not None
    assert float(told[1]) == pytest.approx(100 * (first.other_tps / first.tps - 1), abs=0.05)


def test_a_search_misses_no_layout_that_is_faster_than_those_it_lists() -> None:
    """Against a projection of every legal layout that fits, with every checkpointing."""
    experiment = NODE.model_copy(update={"local_batch": 16})
    batch, everything = {"global_batch": experiment.global_batch}, []
    for policy in POLICIES:
        one = experiment.model_copy(update={"activation_checkpoint": policy})
        everything += search(one, limit=10**6, headroom_gib=headroom_gib(one), **batch).candidates
    lows = sorted((project(one.experiment).interval[0] for one in everything), reverse=True)
    found = recommend(experiment, limit=10, settings=False)
    assert found.considered < CONSIDERED < len(lows)
    assert {one.experiment.activation_checkpoint for one in found.result.candidates} == set(POLICIES)
    assert [one.projection.interval[0] for one in found.ranked] == pytest.approx(lows[:10])


def test_layouts_that_a_search_prices_alike_take_equally_long_in_all_layers() -> None:
    space, seconds = Space(NODE.model_copy(update={"local_batch": 4})), defaultdict(list)
    for one in space._layouts:
        facts = one.of(facts_of(NODE))
        seconds[one.priced_by].append(work_s(job_of(facts.experiment, resolve(facts), space.cluster.node), CALIBRATION))
    assert max(map(len, seconds.values())) > 10
    assert all(max(some) < 1.001 * min(some) for some in seconds.values())  # FSDP's padding apart


def test_a_gain_has_the_best_layout_on_either_side_and_one_machine_under_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the published EP 32 DeepEP is projected to gain half; with a choice on either side experts stay in a node."""
    standard = named_arms()["dsv3_671b_bf16_standard"]
    found = recommend(standard, fixed=("cp", "dp_replicate", "tp", "pp_schedule"), limit=3, settings=False)
    experts, deepep, both = found.gains
    assert (experts.name, deepep.name, both.name) == ("MXFP8 experts", "DeepEP", "MXFP8 experts with DeepEP")
    there = project(standard.model_copy(update={"ep_backend": EPBackend.DEEPEP})).tps / project(standard).tps - 1
    assert deepep.interval.value < 50 * there
    assert found.own_tps < found.best.tps
    for gain in found.gains:
        assert gain.interval.value == pytest.approx(100 * (gain.with_it.tps / gain.without.tps - 1))
        apart = 100 * (gain.with_it.interval[1] / gain.without.interval[0] - 1)
        assert gain.interval.low < gain.interval.value < gain.interval.high < apart
    assert re.search(r"your experts multiply M = [\d,]+ rows at a time on each GPU; break-even is [\d,]+", experts.why)

    def widths() -> list[float]:
        intervals = [gain_interval(gain.with_it.job, gain.without.job, CALIBRATION) for gain in found.gains]
        return [one.high - one.low for one in intervals]

    own = widths()
    with monkeypatch.context() as alike:  # kernels of another precision or dispatcher err by themselves
        alike.setattr(uncertainty, "OWN_PARTS", dict.fromkeys(uncertainty.OWN_PARTS, ()))
        assert np.less(widths(), own).all()
    nothing = gain_interval(found.best.job, found.best.job, CALIBRATION)
    assert (nothing.low, nothing.value, nothing.high) == (0, 0, 0)
    first, model, *_ = answer_lines(found, "DeepSeek-V3")
    assert f"fits ({found.ranked[0].headroom_gib:.1f} GiB free) · {found.best.tps:,.0f} tokens/s" in first
    assert model.startswith("DeepSeek-V3: 671 G parameters, ")
    for times, told in ((1.5, "50.0 % faster"), (3.09, "3.1 × as fast")):
        lines = answer_lines(replace(found, own_tps=found.best.tps / times))
        assert [line for line in lines if line.startswith("as given: ") and line.endswith(f"the best is {told}")]
    text = better_text({"a": better_layout(project(standard))}, {"a": project(standard)}, "a.yaml")
    assert "this is not the best layout" in text
    assert "moelab plan a.yaml --search" in text


def test_fewer_sequences_than_pipeline_stages_are_searched_too() -> None:
    """GPipe takes four on eight stages, 1F1B does not; without a pipeline the name of a schedule may be anything."""
    few = NODE.model_copy(update={"pp_schedule": "gpipe"})
    found = recommend(few, fixed=["cp"], global_batch=4, limit=200, settings=False)
    assert {(1, "gpipe"), (8, "GPipe")} <= {(one.experiment.pp, one.experiment.pp_schedule) for one in found.ranked}


@pytest.mark.parametrize(
    ("hardware", "other", "backend"),
    [
        ("h200_node", "h100_node", "standard"),
        ("h100_node", "b200_node", "standard"),
        ("cpu", "h200_node", "standard"),
        ("cpu", "h200_node", "deepep"),  # which no layout may have on a CPU
    ],
)
def test_a_search_on_another_cluster_goes_by_the_memory_and_rules_of_its_gpus(
    hardware: str, other: str, backend: str
) -> None:
    experiment = NODE.model_copy(update={"local_batch": 16, "hardware": other, "ep_backend": EPBackend(backend)})
    fixed = ("cp", "dp_replicate", "tp", "pp_schedule")
    expected = recommend(experiment, fixed=fixed, limit=3, settings=False)
    moved = experiment.model_copy(update={"hardware": hardware})
    found = recommend(moved, cluster_of(other), fixed=fixed, limit=3, settings=False)
    assert found.ranked
    assert found.to_json() == expected.to_json()


def test_a_group_that_ends_inside_a_node_is_refused_not_mistaken() -> None:
    odd = Experiment(**{**SMALL, "hardware": "h100_x1024", "gpus_per_node": 6, "nodes": 4, "ep": 8})
    assert check(odd).legal
    with pytest.raises(Refused, match=r"ep is 8 on nodes of 6 GPUs.* ep 1, 2"):
        project(odd)
    assert "inside a node" in answer_lines(recommend(odd, fixed=["ep"]))[0]  # not a matter of memory


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump(PUBLISHED.model_dump(mode="json")))
    assert main(["project", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out).items() >= json.loads(json.dumps(project(PUBLISHED).to_json())).items()
    assert main(["project", str(path), "--set", "ep_backend=deepep"]) == 0
    assert "all-to-all" in capsys.readouterr().out
    assert main(["project", str(path), "--set", "pp=3"]) == 3
    assert "pp is 3" in capsys.readouterr().err
    assert main(["project", str(path), "--set", "hardware=cpu"]) == 2
    assert "has no bf16_tflops" in capsys.readouterr().err
    shared = {**SMALL, "activation_checkpoint": "full"}
    path.write_text(yaml.safe_dump({"experiment": shared, "arms": [{}, {"precision": "fp8"}]}))
    assert main(["project", str(path)]) == 0
    assert re.search(r"high +over the first", capsys.readouterr().out)


def test_a_grouped_product_of_few_rows_reads_its_weights() -> None:
    gpu = cluster_of("b200_x256").node.gpu
    floor_s = 2 * 8 * 2048 * 7168 / (float(gpu.hbm_tb_s or 0) * 1e12)
    rates = rates_of(gpu, CALIBRATION)
    assert gemm_time_s(32, 2048, 7168, 8, rates, grouped=True, low=False, wgrad=False) > floor_s


def fp8_job(**changes: Any) -> Job:
    fields = NODE.model_dump(exclude={"precision", "ep_backend", "dispatch_precision", *changes})
    settings = {"precision": "fp8", "ep_backend": "deepep", "dispatch_precision": "fp8", "compile": "model+loss"}
    experiment = Experiment(**fields | settings | changes)
    layout = check(experiment).layout
    assert layout is not None
    return job_of(experiment, layout, cluster_of(experiment.hardware).node)  # whether it fits is not asked


def test_fp8_experts_have_their_weight_gradients_in_bf16_unless_asked() -> None:
    """Of three products of one size each forward, dgrad and wgrad, BF16's take about twice as long."""
    mixed, low = (fp8_job(activation_checkpoint="none", wgrad=wgrad) for wgrad in ("bf16", "fp8"))
    work = replace(mixed.work, one_pass_experts=False, scaled_products=False)
    jobs = (low, mixed, replace(mixed, work=work, precision=Precision.BF16))
    parts = [step_parts_s(job, CALIBRATION) for job in jobs]
    low_s, mixed_s, high_s = (one["expert GEMMs"] for one in parts)
    assert mixed_s - low_s == pytest.approx((high_s - low_s) / 3, rel=0.2)
    assert 0 < parts[1]["quantisation"] < parts[0]["quantisation"]


def test_selective_checkpointing_computes_no_product_in_8_bits_again() -> None:
    job = fp8_job(activation_checkpoint="selective")
    kept, again = (step_parts_s(one, CALIBRATION) for one in (job, replace(job, checkpointing="full+dispatch")))
    none = step_parts_s(replace(job, checkpointing="none"), CALIBRATION)
    assert kept["expert GEMMs"] == pytest.approx(none["expert GEMMs"])
    assert kept["quantisation"] == pytest.approx(none["quantisation"])
    assert again["expert GEMMs"] > 1.2 * kept["expert GEMMs"]
    assert again["quantisation"] > kept["quantisation"]


def test_a_layer_of_fp8_experts_takes_what_it_was_measured_to_take() -> None:
    """``experts_h200.json``: 65,536 rows, eight experts of 7,168 by 2,048; SwiGLU's traffic is elementwise work."""
    rows = {row["part"]: row for row in json.loads((RESULTS / "experts_h200.json").read_text())["rows"]}
    measured_ms = rows["layer"]["ms"]
    shape = shape_of("671B").thin(dense_layers=0, moe_layers=1, num_experts=16)
    base = fp8_job(local_batch=2, model="671B")
    node = cluster_of("h200_node").node
    for name, job in {"fp8": base, "fp8, wgrad fp8": replace(base, bf16_wgrad=False)}.items():
        one = replace(job, shape=shape, node=node, work=replace(job.work, tokens=8192, ep=2), checkpointing="none")
        times = products_by_module(one, CALIBRATION)["moe"][:, INDEX["expert GEMMs"]].sum()
        casts = nothing()
        add_expert_casts(casts, one, CALIBRATION)
        swiglu_s = 9 * 2 * 65_536 * 2048 / memory_rate(one, CALIBRATION)
        assert 1e3 * (times + casts.sum() + swiglu_s) == pytest.approx(measured_ms[name], rel=0.1), name
