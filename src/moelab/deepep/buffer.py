"""The buffer that moves tokens: DeepEP's ``ElasticBuffer``, or its stand-in, one for each expert-parallel group.

PyTorch operators take tensors, numbers and strings only, so the operators of :mod:`moelab.deepep.ops` find the buffer
by the name of its process group, in a table that is process-wide as the buffer itself is: all layers share one, because
only one exchange is under way at a time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed as dist

from moelab.deepep.stand_in import StandInBuffer
from moelab.errors import BadInput, Refused
from moelab.layout.rules import COMBINE_FEATURES, MAX_TOP_K
from moelab.machine import INFINIBAND
from moelab.mxfp8.kernels import Kernels


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """An open buffer, what it has room for, and how to rebuild a handle of it from tensors."""

    buffer: Any
    kernels: Kernels
    handle_type: Callable[..., Any]
    room: Mapping[str, int]  # in the words of ``ElasticBuffer``
    num_sms: int


_OPEN: dict[str, Exchange] = {}


def exchange(group_name: str) -> Exchange:
    """The open exchange of a process group; ``RuntimeError`` if none was opened."""
    try:
        return _OPEN[group_name]
    except KeyError:
        raise RuntimeError(f"no exchange is open for process group {group_name!r}; call open_exchange first") from None


def open_exchange(
    group: dist.ProcessGroup,
    *,
    hidden: int,
    tokens: int,
    experts: int,
    top_k: int,
    kernels: Kernels = "native",
    num_sms: int = 0,
) -> Exchange:
    """Open the buffer of an expert-parallel group, or reuse it if it fits. All ranks call it together.

    A buffer of other kernels, or one that is too small, is destroyed first: two would not fit into a GPU's memory. Its
    replacement is large enough for both requests, because earlier layers share it.

    Args:
        group: the expert-parallel ranks.
        hidden: features of a token.
        tokens: most tokens that a rank dispatches at a time: of a micro-batch, not of the local batch.
        experts: of all ranks.
        top_k: experts of a token.
        kernels: ``native`` is DeepEP, :class:`Refused` where V2 is not installed; ``emulated`` its stand-in.
        num_sms: streaming multiprocessors of a dispatch or combine; 0 chooses (:func:`chosen_sms`).
    """
    check_sizes(
        ranks=group.size(), hidden=hidden, tokens=tokens, experts=experts, top_k=top_k, native=kernels == "native"
    )
    room = {"num_max_tokens_per_rank": tokens, "hidden": hidden, "num_topk": top_k}
    # Taken out first: if its replacement cannot be opened, nobody finds the old one.
    opened = _OPEN.pop(group.group_name, None)
    if opened and opened.kernels == kernels:
        # Never smaller than before: layers that opened the earlier one still dispatch as much.
        room = {name: max(size, opened.room[name]) for name, size in room.items()}
    if opened is None or (opened.kernels, opened.room) != (kernels, room):
        if opened:
            opened.buffer.destroy()
        if kernels == "native":
            buffer, handle_type = _deepep_buffer(group, **room)
        else:
            buffer, handle_type = StandInBuffer(group, **room), SimpleNamespace
        opened = Exchange(buffer=buffer, kernels=kernels, handle_type=handle_type, room=room, num_sms=0)
    # Not fixed with the buffer: the exchange experiment times several SM counts on one.
    num_sms = num_sms or chosen_sms(opened.buffer, experts, top_k, native=kernels == "native")
    _OPEN[group.group_name] = opened = replace(opened, num_sms=num_sms)
    return opened


def check_sizes(*, ranks: int, hidden: int, tokens: int, experts: int, top_k: int, native: bool) -> None:
    """Refuse what DeepEP cannot do, before its kernels do it on a GPU: :class:`BadInput`."""
    if ranks < 2:
        raise BadInput(f"DeepEP moves tokens between at least 2 expert-parallel ranks, and ep is {ranks}")
    if experts % ranks:
        raise BadInput(f"{experts} experts cannot be divided over {ranks} expert-parallel ranks")
    if not 1 <= top_k <= min(experts, MAX_TOP_K):
        raise BadInput(f"top_k is {top_k}; with {experts} experts DeepEP takes 1 to {min(experts, MAX_TOP_K)}")
    if tokens < 1:
        raise BadInput(f"the buffer would hold {tokens} tokens; it needs at least 1")
    if native and hidden % COMBINE_FEATURES:
        raise BadInput(
            f"DeepEP combines tokens of a multiple of {COMBINE_FEATURES} features, and the model has {hidden}; "
            "use ep_backend=standard, or ep_kernels=emulated for the numerics"
        )


def _deepep_buffer(group: dist.ProcessGroup, **room: int) -> tuple[Any, Callable[..., Any]]:
    network = Path(INFINIBAND)
    if not (network.is_dir() and any(network.iterdir())):  # neither InfiniBand nor RoCE
        # DeepEP 2.1.0 asks NCCL for GPU-initiated networking even within a node, and NCCL has none without a NIC.
        os.environ.setdefault("EP_DISABLE_GIN", "1")
    try:
        from deep_ep import ElasticBuffer
        from deep_ep.buffers.elastic import EPHandle
    except Exception as error:  # compiled code: DeepEP also looks for CUDA's compiler when it is imported
        raise Refused(
            "ep_backend is deepep, but DeepEP V2 (ElasticBuffer) cannot be imported: "
            f"{str(error) or type(error).__name__}. Build it from github.com/deepseek-ai/DeepEP (PyPI's `deep-ep` is "
            "not it), or use ep_backend=standard"
        ) from error
    # DeepEP takes over the group's NCCL communicator, which its first collective creates.
    dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
    buffer = ElasticBuffer(
        group,
        **room,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        explicitly_destroy=True,  # by all ranks together, not whenever Python collects it
    )
    return buffer, EPHandle


def chosen_sms(buffer: Any, experts: int, top_k: int, *, native: bool) -> int:
    """Multiprocessors that move tokens.

    Between nodes the network is the limit, and DeepEP's estimate stands, which leaves the rest to computation. Inside a
    node a combine reads every row of every expert, which a few multiprocessors cannot do at the memory's speed, and
    nothing else computes meanwhile: it gets three quarters. Measured on two H100s at 671B's sizes (65,536 rows): 22
    take 1.16 ms, 96 take 0.76 ms. It does not get all: DeepEP's kernels wait for their peers and need every block
    resident at once, beside FSDP's collectives; with 132 of 132 they hung.
    """
    if not native:
        return int(buffer.get_theoretical_num_sms(experts, top_k))
    multiprocessors = torch.cuda.get_device_properties("cuda").multi_processor_count
    if getattr(buffer, "num_scaleout_ranks", 1) == 1:
        return max(2, multiprocessors * 3 // 4 // 8 * 8)
    try:
        return int(buffer.get_theoretical_num_sms(experts, top_k))
    except ZeroDivisionError:  # DeepEP 2.1.0 reads a bandwidth of zero from some networks
        return min(24, multiprocessors)


def close_exchanges() -> None:
    """Close every buffer of this process and give its memory back. All ranks call it together."""
    for opened in _OPEN.values():
        opened.buffer.destroy()
    _OPEN.clear()
