"""Time of collectives: FSDP's gathers and scatters, tensor parallelism's, and the pipeline's messages.

A ring over P ranks moves (P − 1)/P of the whole over every rank's wire. Inside a node that wire is NVLink; across nodes
every GPU has a network card, and ranks that share a node share their cards.
"""

from __future__ import annotations

from moelab.memory.activations import BF16
from moelab.projection.calibration import Calibration
from moelab.projection.costs import Times, add
from moelab.projection.job import Job


def ring_time_s(job: Job, calibration: Calibration, whole_bytes: float, ranks: int, *, stride: int = 1) -> float:
    """Seconds of a gather or scatter.

    Args:
        job: gives the wires.
        calibration: what of them is reached.
        whole_bytes: of what is gathered or scattered.
        ranks: of the group.
        stride: distance of neighbours in the group, in GPUs.
    """
    if ranks == 1 or whole_bytes == 0:
        return 0.0
    together = max(1, job.node.gpus // stride)
    moved = whole_bytes * (ranks - 1) / ranks
    nvlink = 1e9 * float(calibration.nccl_ring) * float(job.node.gpu.nvlink_gb_s or 1)
    if ranks <= together:
        return moved / nvlink + float(calibration.collective_s)
    network = 1e9 * float(calibration.network) * float(job.node.nic_gb_s or 1) * together
    nodes = ranks / together
    return max(moved / nvlink, whole_bytes * (nodes - 1) / nodes / network) + float(calibration.collective_s)


def gather_parts(job: Job, dense: float, experts: float) -> tuple[tuple[float, int, int], ...]:
    """Elements, ranks and stride of the two FSDP groups."""
    return (
        (dense, job.degrees.fsdp, job.work.tp),
        (experts, job.degrees.efsdp, job.work.ep) if job.work.ep > 1 else (experts, job.degrees.fsdp, job.work.tp),
    )


def fsdp_time_s(job: Job, calibration: Calibration, dense: float, experts: float, element_bytes: float) -> float:
    """Seconds to gather, or scatter, parameters of which ``dense`` and ``experts`` elements are whole on a rank."""
    return sum(
        ring_time_s(job, calibration, elements * element_bytes, ranks, stride=stride)
        for elements, ranks, stride in gather_parts(job, dense, experts)
    )


def add_tensor_parallel(times: Times, job: Job, calibration: Calibration) -> None:
    """Gathers and scatters of the residual stream around attention and around the dense or shared FFN."""
    if job.work.tp == 1:
        return
    whole = BF16 * job.work.tokens * job.shape.dim
    one = ring_time_s(job, calibration, whole, job.work.tp)
    add(times, "forward", "tensor-parallel collectives", 4 * one)
    add(times, "dgrad", "tensor-parallel collectives", 4 * one)
    if job.checkpointing in ("full", "full+dispatch", "selective"):
        add(times, "recompute", "tensor-parallel collectives", 4 * one)


def add_context_parallel(times: Times, job: Job, calibration: Calibration) -> None:
    """Keys and values of attention, gathered over the ranks that share a sequence, and their gradients scattered."""
    if job.work.cp == 1:
        return
    width = job.shape.n_heads / job.work.tp * (job.shape.qk_head_dim + job.shape.v_head_dim)
    whole = BF16 * job.work.tokens * job.work.cp * width
    one = ring_time_s(job, calibration, whole, job.work.cp, stride=job.work.tp)
    add(times, "forward", "context-parallel collectives", one)
    add(times, "dgrad", "context-parallel collectives", one)
    if job.checkpointing in ("full", "full+dispatch", "selective"):
        add(times, "recompute", "context-parallel collectives", one)
