"""What a kernel does, in the words of the projection.

The operator that launched a kernel says more than the kernel's own name: ``aten::_grouped_mm`` multiplies experts
whatever cutlass calls its kernel. Where a trace has no operators, or they do not tell, the name decides. What neither
tells is *unknown*; nothing is spread over the rest.

``data/kernel_names.yaml`` has the names.
"""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

from moelab.data import read_yaml
from moelab.traces.trace import Collective

COMPUTE = (
    "expert GEMMs",
    "other GEMMs",
    "attention",
    "quantisation",
    "permutation and padding",
    "optimizer",
    "memory-bound",
    "unknown",
)
STRAGGLERS = "imbalance and stragglers"
"""Barriers, and all-reduces of a few numbers, move nothing to speak of: their time is the wait for the last rank."""
COMMUNICATION = (
    "all-to-all",
    "tensor-parallel collectives",
    "context-parallel collectives",
    "FSDP collectives",
    "pipeline transfers",
    "other collectives",
    STRAGGLERS,
)
PARTS = (*COMPUTE, *COMMUNICATION)
"""In the order in which an instant belongs to them."""
UNCLASSIFIED = ("unknown", "other collectives")
FEW_ELEMENTS = 1 << 16
PHASES = ("forward", "recompute", "backward", "optimizer", "unknown")


def is_small(collective: Collective | None) -> bool:
    """Whether next to nothing is moved, such as a few numbers: then all of its time is waiting."""
    return collective is not None and collective.elements <= FEW_ELEMENTS


class Context(NamedTuple):
    """Where on the host a kernel was launched from."""

    op: str = ""  # the innermost operator; empty where it is not known
    around: tuple[str, ...] = ()  # names of all operators and annotations around it, innermost first
    phase: str = "unknown"  # one of PHASES
    layer: int = -1  # -1 where it is not told


_NAMES = {
    stage: [(part, re.compile("|".join(names), re.IGNORECASE)) for part, *names in rows]
    for stage, rows in read_yaml("kernel_names.yaml").items()
}

_FUSED = re.compile(r"triton_[a-z]{3}_fused_|(?:graph_\d+_)?cpp_fused_")


def _part(stage: str, name: str) -> str | None:
    """Of the first row of a table that a name fits."""
    return next((part for part, names in _NAMES[stage] if names.search(name)), None)


@functools.lru_cache(maxsize=65536)
def communication(kernel: str) -> str | None:
    """What a kernel that moves data between ranks is by its name alone: ``collective``, or its part; None for others.

    Example:
        >>> communication("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"), communication("nvjet_sm90")
        ('collective', None)
    """
    # the inductor names what a kernel's neighbours did too, such as ``ep_dispatch``
    return None if _FUSED.match(kernel) else _part("communication", kernel)


def category(kernel: str, context: Context, collective: Collective | None) -> str:
    """The part of a step that a kernel belongs to; on a CPU, one that an operator belongs to.

    Example:
        >>> category("nvjet_sm90_tst_192x192_64x3_1x2_h_bz_coopB_NTN", Context(), None)
        'other GEMMs'
        >>> category("ncclDevKernel_SendRecv", Context(), Collective("all_to_allv", 1 << 20, "mesh_ep", 1))
        'all-to-all'
    """
    kind = communication(kernel)
    if kind == "collective" or (kind is None and collective is not None):
        return _of_collective(kernel, context, collective)
    return kind or _compute(kernel, context.op, context.phase == "optimizer")


def _of_collective(kernel: str, context: Context, collective: Collective | None) -> str:
    around = " ".join(context.around).lower()
    name = f"{collective.name if collective else around} {kernel}".lower()
    group = collective.group if collective else ""
    axis = _part("groups", group)
    if "barrier" in name:
        return STRAGGLERS
    if "all_to_all" in name or "alltoall" in name:
        return axis if axis == "context-parallel collectives" else "all-to-all"
    if "allreduce" in name.replace("_", "") and is_small(collective):
        return axis if axis == "tensor-parallel collectives" else STRAGGLERS
    if axis:
        return axis
    if "fsdp" in around:
        return "FSDP collectives"
    if re.search(r"\b(?:i?send|i?recv|batch_isend_irecv)\b", name.replace("nccl:", " ")) and "sendrecv" not in around:
        return "pipeline transfers"
    if "sendrecv" in name:  # NCCL has one kernel for both; only a pipeline sends without an all-to-all's name
        return "all-to-all"
    if re.search(r"all_?gather|reduce_?scatter", name):
        return "FSDP collectives"
    if re.search(r"all_?reduce", name) and context.phase == "backward":
        return "FSDP collectives"  # gradients of replicas, as DDP sums them
    if re.search(r"all_?reduce", name) and context.phase == "optimizer":
        return STRAGGLERS  # of a norm or of whether all is finite
    if "distributeddataparallel" in around:
        return "FSDP collectives"
    return "other collectives"


@functools.lru_cache(maxsize=65536)
def _compute(kernel: str, op: str, optimizer: bool) -> str:
    if re.match(r"(?:torch::)?autograd::|\w+Backward\d*$", kernel):  # of a CPU: what autograd itself takes
        return "unknown"
    if (fused := _FUSED.match(kernel)) and "_tem_" not in fused[0]:
        does = _part("fused", kernel[fused.end() :]) or "memory-bound"
        return "optimizer" if optimizer and does != "quantisation" else does
    if part := _part("operators", op):
        return part
    if re.match(r"Memcpy|Memset", kernel):
        return "optimizer" if optimizer else "memory-bound"
    plain = kernel.replace("(anonymous namespace)::", "")
    short = plain.partition(">(" if "<" in plain else "(")[0]  # without types of its arguments
    if part := _part("kernels", short):
        return part
    if optimizer:
        return "optimizer"
    if not re.search(r"at::native|elementwise", kernel) and (part := _part("products", short)):
        return part
    if not re.match(r"aten::(?:copy_|cat|clone|fill_)", op) and (part := _part("moves", kernel)):
        return part
    of_cpu = kernel if re.match(r"(?:aten|prims|c10|inductor|quantized)::", kernel) else ""
    return _part("other_operators", op or of_cpu) or _part("memory", kernel) or "unknown"
