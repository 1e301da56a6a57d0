"""Whole steps that were measured: the published 671B runs, others' systems, SimuMax's six, and moelab's H100 arms."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from moelab.analysis.published import GAINS, SOURCE, THROUGHPUT
from moelab.analysis.two_by_two import arm_results, checkpointing_words
from moelab.experiment import EPBackend, Experiment, Precision
from moelab.hardware import cluster_of
from moelab.layout import check
from moelab.model import shape_of
from moelab.projection.calibration import DEBUG_ROW, Calibration
from moelab.projection.job import Job, job_of
from moelab.projection.measured import TWO_BY_TWO, hardware_of, load_measured
from moelab.projection.megatron_jobs import BRIDGE, H100_NODE, H800_NODE, NVL72, bridge_job, simumax_job
from moelab.projection.stack import as_published
from moelab.projection.step import step_time
from moelab.projection.validation_row import Case
from moelab.titan.arms import named_arms

PUBLISHED, MXFP8_ALL_TO_ALL, BRIDGE_SOURCE, SIMUMAX, H100_FIRST, H100_LATER = (
    "PyTorch and Nebius",
    "torchao, tutorial",
    "other systems",
    "SimuMax",
    "H100 arms, first campaign",
    "H100 arms, later",
)
SUMMARY = "Megatron-Bridge, performance summary"


def step_cases() -> Iterator[Case]:
    """Every whole step."""
    yield from _published()
    yield from _mxfp8_all_to_all()
    yield from _systems()
    yield from _simumax()
    yield from _first_campaign()
    yield from _later()


def tps_of(job: Job, calibration: Calibration) -> float:
    """Tokens per second per GPU."""
    return job.tokens_per_gpu / step_time(job, calibration).total_s


def published_job(arm: str) -> Job:
    """A published 671B arm, or the one that was not, with the software of the time."""
    return _as_published_job(named_arms()[f"dsv3_671b_{arm}"])


def _as_published_job(experiment: Experiment) -> Job:
    layout = check(experiment).layout
    assert layout is not None, "the published layouts are legal"
    node = cluster_of(experiment.hardware).node
    return job_of(experiment, layout, node, stack=as_published(experiment))


def _tps_case(source: str, name: str, tps: float, job: Job, reference: str, *, seen: bool = False) -> Case:
    return Case(
        source=source,
        name=name,
        unit="tokens/s/GPU",
        measured=tps,
        predict=lambda calibration: tps_of(job, calibration),
        reference=reference,
        seen=seen,
        job=job,
    )


def _published() -> Iterator[Case]:
    jobs = {row.arm: published_job(row.arm) for row in THROUGHPUT}
    for row in THROUGHPUT:
        yield _tps_case(PUBLISHED, f"671B {row.arm}", row.tps, jobs[row.arm], row.source)
    for gain in GAINS[:2]:
        yield Case(
            source=PUBLISHED,
            name=f"gain of {gain.arm}",
            unit="% gain",
            measured=gain.percent,
            predict=_gain(jobs[gain.arm], jobs[gain.baseline]),
            reference=SOURCE,
        )


def _gain(arm: Job, baseline: Job) -> Callable[[Calibration], float]:
    return lambda calibration: 100 * (tps_of(arm, calibration) / tps_of(baseline, calibration) - 1)


TUTORIAL = (
    "pytorch/ao, tutorial on MXFP8 expert parallelism, February 2026; its batch is not published and taken to be that "
    "of the article's 16B run, several nodes to be its 32"
)
QUANTISED = {"precision": Precision.MXFP8, "wgrad": "bf16", "dispatch_precision": "mxfp8"}


def _mxfp8_all_to_all() -> Iterator[Case]:
    """MXFP8 experts and all-to-all over BF16 ones, 16B on B200."""
    base = named_arms()["dsv3_16b_bf16_standard"]
    for name, sizes, percent in (("one node", {"nodes": 1, "ep": 8}, 10.0), ("several nodes", {}, 25.0)):
        bf16, mxfp8 = (_as_published_job(base.model_copy(update=sizes | changes)) for changes in ({}, QUANTISED))
        yield Case(
            source=MXFP8_ALL_TO_ALL,
            name=f"16B, MXFP8 experts and all-to-all, {name} of 8 × B200",
            unit="% gain",
            measured=percent,
            predict=_gain(mxfp8, bf16),
            reference=TUTORIAL,
        )


def _systems() -> Iterator[Case]:
    plain = replace(BRIDGE, exchange_hidden=0.0)
    hybrid = {"backend": EPBackend.HYBRIDEP}
    yield _tps_case(BRIDGE_SOURCE, "256 × B200, PP8 VP2 EP32, DeepEP", 3328, bridge_job(), f"{SUMMARY} 26.04.01")
    job = bridge_job(pp=16, turns=1, ep=8, stack=plain, **hybrid)  # type: ignore[arg-type]
    yield _tps_case(BRIDGE_SOURCE, "256 × B200, PP16 EP8, HybridEP", 2815, job, f"{SUMMARY} 26.04")
    job = bridge_job(node=NVL72["GB300"], pp=2, turns=8, global_batch=15360, stack=plain, **hybrid)  # type: ignore[arg-type]
    yield _tps_case(BRIDGE_SOURCE, "256 × GB300, PP2 VP8 EP32, HybridEP", 6422, job, f"{SUMMARY} 26.06")
    job = bridge_job(node=NVL72["GB200"], pp=4, turns=4, ep=64, stack=plain, **hybrid)  # type: ignore[arg-type]
    yield _tps_case(BRIDGE_SOURCE, "256 × GB200, PP4 VP4 EP64", 4912, job, f"{SUMMARY} 26.08")
    hopper = {"node": H100_NODE, "ep": 64, "precision": Precision.FP8, "stack": replace(plain, host=True)}
    job = bridge_job(gpus=1024, tp=2, turns=4, global_batch=8192, **hopper)  # type: ignore[arg-type]
    yield _tps_case(BRIDGE_SOURCE, "1024 × H100, TP2 PP8 VP4 EP64, FP8", 1297, job, f"{SUMMARY} 25.09")
    overlapped = {**hopper, "node": H800_NODE, "stack": replace(BRIDGE, name="DeepSeek")}
    job = bridge_job(gpus=2048, pp=16, turns=1, global_batch=15360, checkpointing="mla+mlp", **overlapped)  # type: ignore[arg-type]
    yield _tps_case(BRIDGE_SOURCE, "2048 × H800, PP16 EP64, FP8", 1543, job, "DeepSeek-V3 report: GPU-hours of 14.8 T")


def _simumax() -> Iterator[Case]:
    measured = {(8, 1): (603.2, 1101.7, 4141.2), (4, 2): (452.2, 771.6, 2718.6)}
    for (ep, pp), times_ms in measured.items():
        for microbatches, time_ms in zip((4, 8, 32), times_ms, strict=True):
            job = simumax_job(ep=ep, pp=pp, microbatches=microbatches)
            yield Case(
                source=SIMUMAX,
                name=f"SimuMax EP{ep} PP{pp}, {microbatches} micro-batches",
                unit="ms",
                measured=time_ms,
                predict=lambda calibration, job=job: 1e3 * step_time(job, calibration).total_s,  # type: ignore[misc]
                reference="MooreThreads/SimuMax 1.2, docs/b200: 8 × B200, BF16, four layers of DeepSeek-V3",
                job=job,
            )


class Thin(NamedTuple):
    """A model with few layers; ``batch`` is of sequences of 4,096 tokens on each GPU."""

    dense: int
    moe: int
    experts: int
    batch: int
    checkpointing: Literal["none", "full"]


THIN = {
    "16B": Thin(1, 4, 64, 4, "none"),
    "671B": Thin(1, 2, 32, 2, "none"),
    "671B MoE-heavy": Thin(0, 5, 16, 2, "full"),
    "671B, 10 MoE layers": Thin(0, 10, 16, 2, "full"),
}
"""Thin models of the H100 and H200 arms, each on two GPUs."""


def thin_job(name: str, arm: Mapping[str, Any], *, compiled: bool = True, hardware: str = "h100_node") -> Job:
    """A thin model on two H100 or H200."""
    thin = THIN[name]
    fields = {"compile": "model+loss" if compiled else "none", "activation_checkpoint": thin.checkpointing, **arm}
    sizes = {"gpus_per_node": 2, "ep": 2, "seq_len": 4096, "local_batch": thin.batch}
    experiment = Experiment(model=name.split()[0].rstrip(","), hardware=hardware, **sizes, **fields)
    layout = check(experiment).layout
    assert layout is not None, "one node and no pipeline"
    shape = shape_of(experiment.model).thin(dense_layers=thin.dense, moe_layers=thin.moe, num_experts=thin.experts)
    return job_of(experiment, layout, cluster_of(hardware).node, shape=shape)


FIRST_CAMPAIGN: tuple[tuple[str, dict[str, str], bool, float | None, float | None], ...] = (
    ("bf16_standard", {}, True, 61_900, 16_250),
    ("fp8_standard", {"precision": "fp8"}, True, 61_300, 16_500),
    ("mxfp8 emulated_standard", {"precision": "mxfp8"}, True, 52_500, None),
    ("bf16_standard", {}, False, 45_000, 14_240),
    ("bf16_deepep", {"ep_backend": "deepep"}, False, 44_700, 15_680),
    ("fp8_deepep", {"precision": "fp8", "ep_backend": "deepep"}, False, None, 15_430),
    ("bf16_deepep", {"ep_backend": "deepep"}, True, None, 16_280),
    ("fp8_deepep", {"precision": "fp8", "ep_backend": "deepep"}, True, None, 16_510),
)
"""Tokens/s/GPU of the 16B and the 671B shape on two H100, by TorchTitan's own clock, medians of steps 4 to 12."""


def _first_campaign() -> Iterator[Case]:
    for arm, changes, compiled, *found in FIRST_CAMPAIGN:
        for model, tps in zip(("16B", "671B"), found, strict=True):
            if tps is not None:
                name = f"{model} {arm}, {'' if compiled else 'not '}compiled"
                job = thin_job(model, {**changes, "routing": "round_robin"}, compiled=compiled)
                yield _tps_case(H100_FIRST, name, tps, job, "2 × H100 80 GB, EP 2, seq 4096, forced balance, 2026")
    experiment = Experiment(
        model="debug", hardware="h100_node", seq_len=2048, local_batch=8, activation_checkpoint="selective"
    )
    layout = check(experiment).layout
    assert layout is not None, "one node and no pipeline"
    job = job_of(experiment, layout, cluster_of("h100_node").node)
    yield _tps_case(H100_FIRST, DEBUG_ROW, 58_096, job, "benchmarks/results/h100_moelab_run.json")


STANDARD_STEP = {("671B", "round_robin"): 18_569.0, ("671B", "random_balanced"): 18_609.7} | {
    ("671B MoE-heavy", "round_robin"): 11_341.7,
    ("671B MoE-heavy", "random_balanced"): 11_491.9,
}
"""``benchmarks/results/h100_standard_step.json``."""


def _later() -> Iterator[Case]:
    for (shape, routing), tps in STANDARD_STEP.items():
        job = thin_job(shape, {"routing": routing})
        reference = "benchmarks/results/h100_standard_step.json, 2 × H100, November 2026"
        profiled = shape == "671B MoE-heavy"  # constants were read off the kernels of this step
        yield _tps_case(H100_LATER, f"{shape} bf16_standard, {routing}", tps, job, reference, seen=profiled)
    measured = load_measured(TWO_BY_TWO)
    for result in arm_results(measured.rows):
        if result.retries:  # short of memory, see NOT_PREDICTED of validation.py
            continue
        arm = {**arm_of(result.arm), "routing": result.routing, "activation_checkpoint": result.activation_checkpoint}
        name = f"two by two: {result.shape} {result.arm}, {result.routing}"
        if result.activation_checkpoint not in (THIN[result.shape].checkpointing, "full+dispatch"):
            name += f", {checkpointing_words(result.activation_checkpoint)}"
        job = thin_job(result.shape, arm, hardware=hardware_of(measured))
        seen = result.shape == "16B"  # HOST_COMPILED_S was read off these
        yield _tps_case(H100_LATER, name, result.tps, job, measured.stamp, seen=seen)


def arm_of(name: str) -> dict[str, str]:
    """Fields of an experiment from the name of an arm of ``h100_two_by_two.json``.

    Example:
        >>> arm_of("bf16_deepep_full+dispatch")
        {'precision': 'bf16', 'ep_backend': 'deepep', 'activation_checkpoint': 'full+dispatch'}
    """
    precision, backend, *more = name.split("_")
    fields = {"precision": precision.split("-")[0], "ep_backend": backend}
    for one in more:
        if one.startswith("dispatch-"):
            fields["dispatch_precision"] = one.removeprefix("dispatch-")
        else:
            fields["activation_checkpoint"] = one
    if fields["precision"] == "mxfp8" and "dispatch_precision" in fields:
        fields["wgrad"] = "bf16"
    return fields
