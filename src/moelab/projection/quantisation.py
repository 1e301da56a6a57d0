"""Time of casts to 8 bits and of the layout of scales, for one grouped or dense product forward and backward.

The table of casts is :mod:`moelab.mxfp8.break_even`'s: rows and weights forward, gradient and weights for dgrad,
gradient and rows along the other axis for wgrad.
"""

from __future__ import annotations

from moelab.experiment import Precision
from moelab.mxfp8.break_even import CAST_BYTES, OVERHEAD_SHARE
from moelab.projection.calibration import Calibration
from moelab.projection.costs import PassName, Times, add
from moelab.projection.gemm_rate import is_blackwell
from moelab.projection.job import Job
from moelab.projection.memory_bound import memory_rate
from moelab.projection.product_time import Weight

EMULATED_CAST_BYTES = 4.0
"""Of one element: two read, two written."""
DIRECTIONS: tuple[PassName, ...] = ("forward", "dgrad", "wgrad")


def cast_time_s(job: Job, calibration: Calibration, m: float, n: int, k: int, groups: int) -> dict[str, float]:
    """Seconds by direction of one product of rows ``m``, in a step."""
    if job.stack.expert_gemm == "library":
        return _fused_cast_s(job, calibration, m, n, k, max(groups, 1))
    low = job.precision.value
    cast_bytes, overhead_share = EMULATED_CAST_BYTES if job.emulated else CAST_BYTES[low], OVERHEAD_SHARE[low]
    blackwell = is_blackwell(job.node.gpu)
    share = calibration.blackwell_cast if blackwell else calibration.hopper_cast
    share = calibration.emulated_cast if job.emulated else share
    rate = 1e12 * float(share) * float(job.node.gpu.hbm_tb_s or 0)
    overhead = float(calibration.blackwell_scales_us) / 1e6 if blackwell else 0.0
    elements = {"forward": m * k + groups * n * k, "dgrad": m * n + groups * n * k, "wgrad": m * (n + k)}
    in_step = float(calibration.blackwell_low_in_step) if blackwell else 1.0
    return {
        name: in_step * (elements[name] * cast_bytes / rate + overhead_share[name] * overhead)  # type: ignore[index]
        for name in DIRECTIONS
    }


def _fused_cast_s(job: Job, calibration: Calibration, m: float, n: int, k: int, groups: int) -> dict[str, float]:
    """TransformerEngine's: one kernel reads an operand and writes it for both axes; weights once a step."""
    rate = memory_rate(job, calibration)
    weights = groups * n * k / job.microbatches
    return {"forward": 4 * (m * k + weights) / rate, "dgrad": 4 * m * n / rate, "wgrad": 0.0}


def add_expert_casts(times: Times, job: Job, calibration: Calibration, *, recomputed: bool) -> None:
    """Casts of the three grouped products of one MoE layer."""
    if job.precision is Precision.BF16:
        return
    shape, work = job.shape, job.work
    rows = work.received(shape)
    groups = shape.num_experts // work.ep
    first, hidden = shape.dim, shape.moe_hidden_dim
    for n, k in ((hidden, first), (hidden, first), (first, hidden)):
        seconds = cast_time_s(job, calibration, rows, n, k, groups)
        arrived = work.quantised_dispatch and k == first
        if arrived:  # rows are quantised already, weights are not
            seconds["forward"] = cast_time_s(job, calibration, 0, n, k, groups)["forward"]
        if job.bf16_wgrad or arrived:
            seconds["wgrad"] = 0.0
        for name in DIRECTIONS:
            add(times, name, "quantisation", seconds[name])
        if recomputed:
            add(times, "recompute", "quantisation", seconds["forward"])


def add_linear_casts(times: Times, job: Job, calibration: Calibration, weight: Weight, *, recomputed: bool) -> None:
    """Casts of one dense product, where linears are quantised too; one cast serves both axes there."""
    if job.precision is Precision.BF16 or not job.stack.low_linears:
        return
    seconds = cast_time_s(job, calibration, weight.rows * job.work.residual, weight.n, weight.k, 1)
    for name in DIRECTIONS:
        add(times, name, "quantisation", seconds[name])
    if recomputed:
        add(times, "recompute", "quantisation", seconds["forward"])
