"""Parts of steps that were measured alone: products, casts, MoE layers, exchanges."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from moelab.experiment import EPBackend, Precision
from moelab.hardware import GPUS, Node
from moelab.memory.activations import BF16, Work
from moelab.memory.sharding import Degrees
from moelab.model import BYTES_PER_ELEMENT, Gemm, ModelShape, shape_of
from moelab.mxfp8 import torchao_b200 as b200
from moelab.mxfp8.break_even import CAST_BYTES
from moelab.mxfp8.grouped_gemm_cases import Case as Size
from moelab.projection.calibration import Calibration
from moelab.projection.deepep_bandwidth import QUOTED, QuotedBandwidth
from moelab.projection.gemm_rate import grouped_time_s
from moelab.projection.job import Job
from moelab.projection.measured import ALL_TO_ALL, GROUPED_GEMM, load_measured
from moelab.projection.memory_bound import memory_rate
from moelab.projection.moe_exchange import COPIES, exchange_time_s
from moelab.projection.quantisation import DIRECTIONS, cast_time_s
from moelab.projection.routing_model import RoutingModel
from moelab.projection.stack import Stack
from moelab.projection.validation_row import Case

TORCHAO, DEEPEP, H100_KERNELS = "torchao", "DeepEP", "H100 micro-experiments"
HERE = "one H100, first campaign, torchao 0.18, compiled, medians of 8"
Predict = Callable[[Calibration], float]


def kernel_cases() -> Iterator[Case]:
    """Every part."""
    yield from _torchao_products()
    yield from _torchao_kernels()
    yield from _torchao_layers()
    yield from _deepep()
    yield from _h100_products()
    yield from _h100_exchanges()


def grouped_job(gpu: str, precision: str, *, ep: int = 1, shape: ModelShape | None = None, tokens: int = 1) -> Job:
    """As much of a job as a part of a layer needs."""
    node = Node(gpu=GPUS[gpu], gpus=8)
    return Job(
        shape=shape or shape_of("671B"),
        node=node,
        stack=Stack(name="part", permutation="standard compiled"),
        work=Work(tokens=tokens, ep=ep),
        seq_len=4096,
        microbatches=1,
        schedule="1F1B",
        stages=(),
        stages_of_rank=((0,),),
        degrees=Degrees(1, ep, 1, ep, 1),
        precision=Precision(precision.split("_")[0]),
        bf16_wgrad=precision.endswith("wgrad_bf16"),
        routing=RoutingModel(kind="random_balanced"),
    )


def product_parts_s(job: Job, calibration: Calibration, m: float, n: int, k: int, groups: int) -> dict[str, float]:
    """Seconds by direction of one grouped product, casts included."""
    low = job.precision is not Precision.BF16
    casts = cast_time_s(job, calibration, m, n, k, groups) if low else dict.fromkeys(DIRECTIONS, 0.0)
    rows = int(m)
    sizes = {"forward": (rows, n, k), "dgrad": (rows, k, n), "wgrad": (n, k, rows)}
    found: dict[str, float] = {}
    for name in DIRECTIONS:
        rows_, columns, inner = sizes[name]
        gemm = Gemm(
            name=name, part="routed experts", direction=name, m=rows_, n=columns, k=inner, groups=groups, count=1  # type: ignore[arg-type]
        )  # fmt: skip
        quantised = low and not (job.bf16_wgrad and name == "wgrad")
        gemm_s = grouped_time_s(gemm, job.node.gpu, calibration.products, low=quantised)
        found[name] = gemm_s + (casts[name] if quantised else 0.0)
    return found


def _product(gpu: str, precision: str, size: Size, *, extra_bytes: float = 0.0, unit_s: float = 1e-6) -> Predict:
    job = grouped_job(gpu, precision)

    def predict(calibration: Calibration) -> float:
        parts = product_parts_s(job, calibration, size.m, size.n, size.k, size.groups)
        return (sum(parts.values()) + extra_bytes / memory_rate(job, calibration)) / unit_s

    return predict


def _torchao_products() -> Iterator[Case]:
    for row in b200.ROWS:
        extra = b200.benchmark_extra_bytes(row.case)
        for precision, us in (("bf16", row.bf16_us), ("mxfp8", row.mxfp8_us)):
            yield Case(
                source=TORCHAO,
                name=f"{row.case.name}, {precision}",
                unit="µs",
                measured=us,
                predict=_product("B200", precision, row.case, extra_bytes=extra),
                reference=b200.ROWS_SOURCE,
                whole=False,
                seen=row.case.groups == 8,
            )


def _torchao_kernels() -> Iterator[Case]:
    for name, us in (("dim0 rceil", 220.1), ("dim0 Triton", 138.2), ("dim1 CUDA rceil", 142.3)):
        job = grouped_job("B200", "mxfp8")
        yield Case(
            source=TORCHAO,
            name=f"cast of 16384², {name}",
            unit="µs",
            measured=us,
            predict=lambda calibration, job=job: 1e6 * 16384**2 * _cast_s(job, calibration),  # type: ignore[misc]
            reference=b200.SOURCE,
            whole=False,
        )


def _cast_s(job: Job, calibration: Calibration) -> float:
    return CAST_BYTES["mxfp8"] / (1e12 * float(calibration.blackwell_cast) * float(job.node.gpu.hbm_tb_s or 0))


EP_PIPELINE = {
    (8192, 5120): (18.037, 12.145, 30.485, 21.839),
    (7168, 2048): (9.394, 6.424, 13.762, 10.306),
    (2048, 1408): (3.368, 2.952, 4.982, 3.877),
}
"""Dispatch, permutation, one grouped product, and back, on 8 × B200: ms forward in BF16 and MXFP8, backward in both."""
EP_ROWS = 131_072
LAYERS = {"Llama4, 5120 × 8192": (5120, 8192, 1.431), "DSv3 671B, 7168 × 2048": (7168, 2048, 1.148)}
"""A whole MoE layer with 8 local experts; its rows are not published and taken to be those of the pipeline."""


def _torchao_layers() -> Iterator[Case]:
    for (dim, hidden), values in EP_PIPELINE.items():
        names = [f"{name}, {precision}" for name in ("forward", "backward") for precision in ("bf16", "mxfp8")]
        for name, ms in zip(names, values, strict=True):
            yield Case(
                source=TORCHAO,
                name=f"EP pipeline {dim} × {hidden}, {name}",
                unit="ms",
                measured=ms,
                predict=_pipeline(dim, hidden, name),
                reference=b200.SOURCE,
                whole=False,
            )
    for name, (dim, hidden, speedup) in LAYERS.items():
        yield Case(
            source=TORCHAO,
            name=f"MoE layer {name}",
            unit="speed-up",
            measured=speedup,
            predict=lambda calibration, dim=dim, hidden=hidden: _layer_gain(dim, hidden, calibration),  # type: ignore[misc]
            reference=b200.SOURCE,
            whole=False,
        )


def _pipeline(dim: int, hidden: int, name: str) -> Predict:
    direction, precision = name.split(", ")
    job = grouped_job(
        "B200", "mxfp8_wgrad_bf16" if precision == "mxfp8" else "bf16", ep=8, shape=_wide(dim, hidden), tokens=EP_ROWS
    )

    def predict(calibration: Calibration) -> float:
        low, high = (exchange_time_s(job, calibration, BYTES_PER_ELEMENT[one]) for one in (precision, "bf16"))
        parts = product_parts_s(job, calibration, EP_ROWS, hidden, dim, 8)
        copies = COPIES["fused"]
        copy_s = 2 * BF16 * EP_ROWS * dim / memory_rate(job, calibration)
        if direction == "forward":
            return 1e3 * (low + high + parts["forward"] + sum(copies[:2]) * copy_s)
        return 1e3 * (low + high + parts["dgrad"] + parts["wgrad"] + sum(copies[2:]) * copy_s)

    return predict


def _wide(dim: int, hidden: int) -> ModelShape:
    return replace(shape_of("671B"), dim=dim, moe_hidden_dim=hidden, num_experts=64, top_k=1, expert_groups=1)


def _layer_gain(dim: int, hidden: int, calibration: Calibration) -> float:
    times = []
    for precision in ("bf16", "mxfp8"):
        job = grouped_job("B200", precision)
        products = 2 * sum(product_parts_s(job, calibration, EP_ROWS, hidden, dim, 8).values())
        products += sum(product_parts_s(job, calibration, EP_ROWS, dim, hidden, 8).values())
        moved = BF16 * EP_ROWS * (2 * dim * sum(COPIES["standard compiled"]) + 9 * hidden)
        times.append(products + moved / memory_rate(job, calibration))
    return times[0] / times[1]


H800_NVLINK_GB_S = 200.0
"""Each way, half of NVIDIA's 400 GB/s."""


def _deepep() -> Iterator[Case]:
    for row in QUOTED:
        for operation, value in (("dispatch", row.dispatch_gb_s), ("combine", row.combine_gb_s)):
            yield Case(
                source=DEEPEP,
                name=f"{row.name}{f', {row.sms} SMs' if row.sms else ''}, {operation}",
                unit="logical GB/s",
                measured=value,
                predict=lambda calibration, row=row: _logical_gb_s(row, calibration),  # type: ignore[misc]
                reference=row.source,
                whole=False,
                seen=row.version == "V2" and ((row.gpu == "SM100" and row.nodes == 1) or row.nodes == 4),
            )


def _logical_gb_s(row: QuotedBandwidth, calibration: Calibration) -> float:
    if row.wire == "network":
        wire = 50 * float(calibration.network)
    else:
        wire = float(calibration.deepep_nvlink) * (900 if row.gpu == "SM100" else H800_NVLINK_GB_S)
    return wire / row.on_wire_gb_s(1.0)


WHOLE = "forward+backward"
FIRST_PRODUCTS = (
    (16384, 2048, 7168, 2.474, 3.305),
    (32768, 2048, 7168, 4.530, 5.504),
    (65536, 2048, 7168, 9.532, 9.986),
    (131072, 2048, 7168, 19.959, 19.139),
    (131072, 7168, 2048, 19.193, 17.927),
    (65536, 1408, 2048, 2.610, 3.586),
    (131072, 1408, 2048, 4.123, 5.770),
)
"""M, N, K, and ms in BF16 and FP8, 8 groups, forward and backward."""


def _h100_products() -> Iterator[Case]:
    for m, n, k, *times_ms in FIRST_PRODUCTS:
        size = Size(m=m, n=n, k=k, groups=8)
        for precision, ms in zip(("bf16", "fp8"), times_ms, strict=True):
            yield Case(
                source=H100_KERNELS,
                name=f"first campaign: {size.name}, {precision}",
                unit="ms",
                measured=ms,
                predict=_product("H100", precision, size, unit_s=1e-3),
                reference=HERE,
                whole=False,
            )
    measured = load_measured(GROUPED_GEMM)
    for row in measured.rows:
        if row["pass"] == WHOLE and row["precision"] in ("bf16", "fp8"):
            size = Size(m=row["m"], n=row["n"], k=row["k"], groups=row["groups"], sizes=row["sizes"])
            yield Case(
                source=H100_KERNELS,
                name=f"{size.name}, {row['precision']}",
                unit="µs",
                measured=row["median_us"],
                predict=_product("H100", row["precision"], size),
                reference=measured.stamp,
                whole=False,
                seen=True,
            )


def _h100_exchanges() -> Iterator[Case]:
    measured = load_measured(ALL_TO_ALL)
    for row in measured.rows:
        job = exchange_job(row["backend"])
        yield Case(
            source=H100_KERNELS,
            name=f"{row['arm']}, {row['operation']}, on the wire",
            unit="µs",
            measured=row["parts_us"]["wire"],
            predict=_wire(job, row["layout"], row["operation"]),
            reference=measured.stamp,
            whole=False,
            seen=True,
        )


def _wire(job: Job, layout: str, operation: str) -> Predict:
    """Microseconds of an exchange; DeepEP's expanding layout writes every expert's row within it."""
    place = ("dispatch", "combine", "combine_backward", "dispatch_backward").index(operation)
    copies = COPIES["deepep expanded"][place] if layout == "expanded" else 0.0

    def predict(calibration: Calibration) -> float:
        copy_s = 2 * BF16 * job.work.received(job.shape) * job.shape.dim / memory_rate(job, calibration)
        return 1e6 * (exchange_time_s(job, calibration, BYTES_PER_ELEMENT["bf16"]) + copies * copy_s)

    return predict


def exchange_job(backend: str) -> Job:
    """The exchange of ``all_to_all_h100.json``: 8,192 tokens of 7,168 features on each of two GPUs."""
    shape = replace(shape_of("671B"), num_experts=32)
    job = grouped_job("H100", "bf16", ep=2, shape=shape, tokens=8192)
    return replace(job, work=replace(job.work, backend=EPBackend(backend)))
