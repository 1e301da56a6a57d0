"""Time of dispatch and combine in one MoE layer: what travels, and what brings rows into order on either side.

What travels is :mod:`moelab.projection.traffic`'s, wire by wire; NVLink and network work at the same time, so the
slower one counts. TorchTitan's standard dispatcher first exchanges counts and waits for them on the host. Permutation
is measured in copies: one copy reads and writes every row that the experts multiply.

=====================  =====================================================================
permutation            copies of dispatch, combine, combine's gradient, dispatch's gradient
=====================  =====================================================================
standard               not compiled (``all_to_all_h100.json``)
standard compiled      TorchTitan's, compiled (kernels of ``h100_standard_step.json``)
deepep dense           stock DeepEP: permuted by PyTorch (``all_to_all_h100.json``)
deepep expanded        moelab's: DeepEP writes rows in order (the same file)
fused                  one copy each (TransformerEngine's fused permutation)
=====================  =====================================================================
"""

from __future__ import annotations

from moelab.experiment import EPBackend
from moelab.memory.activations import BF16
from moelab.model import BYTES_PER_ELEMENT
from moelab.projection.calibration import Calibration
from moelab.projection.costs import PASS_INDEX, PassName, Times, add
from moelab.projection.job import Job
from moelab.projection.memory_bound import memory_rate

COPIES = {
    "standard": (2.48, 11.8, 8.2, 5.4),
    "standard compiled": (1.5, 3.0, 4.0, 3.3),
    "deepep dense": (2.55, 7.95, 7.25, 1.73),
    "deepep expanded": (0.5, 0.7, 0.5, 0.8),
    "fused": (1.0, 1.0, 1.0, 1.0),
}


def exchange_time_s(job: Job, calibration: Calibration, element_bytes: float) -> float:
    """Seconds that one exchange is on its wires."""
    if job.work.ep == 1:
        return 0.0
    standard = job.work.backend is EPBackend.STANDARD
    row_bytes = job.work.routed_tokens * job.shape.dim * element_bytes * job.work.imbalance
    nvlink, network = job.rows_sent.nvlink * row_bytes, job.rows_sent.network * row_bytes
    share = calibration.nccl_nvlink if standard else calibration.deepep_nvlink
    nvlink_s = nvlink / (1e9 * float(share) * float(job.node.gpu.nvlink_gb_s or 1))
    network_s = network / (1e9 * float(calibration.network) * float(job.node.nic_gb_s or 1)) if network else 0.0
    latency = calibration.deepep_s if not standard and job.stack.host else calibration.collective_s
    return max(nvlink_s, network_s) + float(latency)


def add_exchange(times: Times, job: Job, calibration: Calibration) -> None:
    """Dispatch and combine of one layer, there and back."""
    low = exchange_time_s(job, calibration, BYTES_PER_ELEMENT[job.dispatch])
    high = exchange_time_s(job, calibration, BYTES_PER_ELEMENT["bf16"])
    both = low + high
    forward, back = (_exposed_s(times, job, passes, both) for passes in (("forward",), ("dgrad", "wgrad")))
    counts = float(calibration.counts_s) * (
        job.work.backend is EPBackend.STANDARD and job.work.ep > 1 and job.stack.host
    )
    copy_s = 2 * BF16 * job.work.received(job.shape) * job.shape.dim / memory_rate(job, calibration)
    dispatch, combine, combine_back, dispatch_back = (copies * copy_s for copies in COPIES[job.stack.permutation])
    add(times, "forward", "all-to-all", forward + counts)
    add(times, "dgrad", "all-to-all", back)
    add(times, "forward", "permutation and padding", dispatch + combine)
    add(times, "dgrad", "permutation and padding", combine_back + dispatch_back)
    if job.checkpointing in ("none", "mla+mlp"):
        return
    add(times, "recompute", "permutation and padding", dispatch + combine)
    if not job.keeps_exchange:
        add(times, "recompute", "all-to-all", forward + counts)


def _exposed_s(times: Times, job: Job, passes: tuple[PassName, ...], exchange_s: float) -> float:
    """What computation of the same passes does not hide of an exchange, where a stack runs them side by side."""
    compute_s = sum(float(times[PASS_INDEX[name]].sum()) for name in passes)
    return exchange_s - min(job.stack.exchange_hidden * exchange_s, compute_s)
