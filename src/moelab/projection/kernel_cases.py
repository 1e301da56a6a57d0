"""Parts of steps that were measured alone: products, casts, MoE layers, exchanges."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from moelab.experiment import EPBackend
from moelab.hardware import GPUS
from moelab.hardware.catalogue import NIC_400G
from moelab.memory.activations import BF16
from moelab.model import BYTES_PER_ELEMENT, shape_of
from moelab.mxfp8.grouped_gemm_cases import Case as Size
from moelab.projection.calibration import Calibration
from moelab.projection.deepep_bandwidth import QUOTED, QuotedBandwidth
from moelab.projection.destinations import expected_destinations
from moelab.projection.job import Job
from moelab.projection.measured import ALL_TO_ALL, ALL_TO_ALL_H200, GROUPED_GEMM, Row, load_measured
from moelab.projection.memory_bound import memory_rate
from moelab.projection.moe_exchange import COPIES, exchange_time_s
from moelab.projection.parts import Predict, grouped_job, product_predicted
from moelab.projection.placement import ExpertPlacement
from moelab.projection.routing_model import RoutingModel
from moelab.projection.torchao_cases import torchao_cases
from moelab.projection.validation_row import Case

DEEPEP, H100_KERNELS, ROUTING = "DeepEP", "H100 micro-experiments", "routing, simulated"
H200_EXCHANGES = "H200 exchanges"
HERE = "one H100, first campaign, torchao 0.18, compiled, medians of 8"


def kernel_cases() -> Iterator[Case]:
    """Every part."""
    yield from torchao_cases()
    yield from _destinations()
    yield from _deepep()
    yield from _h100_products()
    yield from _h100_exchanges()
    yield from _h200_exchanges()


REACHED = {
    RoutingModel(kind="round_robin"): (1.0, 1.0),
    RoutingModel(kind="group_limited", groups=8, limited_groups=4): (6.6, 2.93),
    RoutingModel(kind="uniform"): (7.26, 3.62),
}
"""Distinct ranks and nodes of a token: 256 experts, top-8, 32 ranks on four nodes, as a simulation of each routing."""


def _destinations() -> Iterator[Case]:
    placement = ExpertPlacement(experts=256, top_k=8, ep=32, ranks_per_node=8)
    for routing, reached in REACHED.items():
        found = expected_destinations(routing, placement)
        for what, measured, expected in zip(("ranks", "nodes"), reached, (found.ranks, found.nodes), strict=True):
            yield Case(
                source=ROUTING,
                name=f"{what} that a token reaches, {routing.kind}",
                unit=what,
                measured=measured,
                predict=lambda _, expected=expected: expected,  # type: ignore[misc]
                reference="tokens drawn and counted, to two or three digits",
                whole=False,
            )


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
    gpu = GPUS["B200" if row.gpu == "SM100" else row.gpu if row.gpu in GPUS else "H100"]
    if row.wire == "network":
        wire = float(NIC_400G) * float(calibration.network)
    else:
        wire = float(gpu.nvlink_gb_s or 0) * float(calibration.deepep_nvlink)
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
                predict=product_predicted("H100", precision, size, unit_s=1e-3),
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
                predict=product_predicted("H100", row["precision"], size),
                reference=measured.stamp,
                whole=False,
                seen=True,
            )


def _h100_exchanges() -> Iterator[Case]:
    measured = load_measured(ALL_TO_ALL)
    for row in measured.rows:
        job = exchange_job("H100", row)
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


def _h200_exchanges() -> Iterator[Case]:
    """All four directions together; measured when every constant had its value."""
    measured = load_measured(ALL_TO_ALL_H200)
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in measured.rows:
        if row["precision"] == "bf16" and row["sms_chosen_by"] == "library":
            groups.setdefault((row["size"], row["routing"], row["arm"]), []).append(row)
    for name, rows in groups.items():
        parts = [_wire(exchange_job("H200", row), row["layout"], row["operation"]) for row in rows]
        yield Case(
            source=H200_EXCHANGES,
            name=", ".join(name) + ", on the wire",
            unit="µs",
            measured=sum(row["parts_us"]["wire"] for row in rows),
            predict=lambda calibration, parts=parts: sum(part(calibration) for part in parts),  # type: ignore[misc]
            reference=measured.stamp,
            whole=False,
        )


def _wire(job: Job, layout: str, operation: str) -> Predict:
    """Microseconds of an exchange; DeepEP's expanding layout writes every expert's row within it."""
    place = ("dispatch", "combine", "combine_backward", "dispatch_backward").index(operation)
    copies = COPIES["deepep expanded"][place] if layout == "expanded" else 0.0

    def predict(calibration: Calibration) -> float:
        copy_s = 2 * BF16 * job.work.received(job.shape) * job.shape.dim / memory_rate(job, calibration)
        return 1e6 * (exchange_time_s(job, calibration, BYTES_PER_ELEMENT["bf16"]) + copies * copy_s)

    return predict


def exchange_job(gpu: str, row: Row) -> Job:
    """The exchange of a row of ``all_to_all_*.json``."""
    shape = replace(shape_of("671B"), num_experts=row["experts"], dim=row["hidden"], top_k=row["top_k"])
    job = grouped_job(gpu, "bf16", ep=row["ranks"], shape=shape, tokens=row["tokens"])
    work = replace(job.work, backend=EPBackend(row["backend"]))
    return replace(job, work=work, routing=RoutingModel(kind=row["routing"]))
