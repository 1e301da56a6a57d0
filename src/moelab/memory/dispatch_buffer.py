"""The buffer that a dispatcher allocates once for its communication, outside of PyTorch's allocator.

It is made for the most tokens that a rank dispatches at a time: those of one micro-batch under pipeline parallelism, of
the local batch without.

DeepEP's is exact: the arithmetic of ``csrc/elastic/buffer.hpp`` (``get_dispatch_buffer_size``,
``get_combine_buffer_size``) and ``deep_ep/include/deep_ep/common/layout.cuh`` at 2.1.0. A token lies in it with its
features, its experts' numbers and weights, and on its way there where it came from. Ranks that share NVLink are one
*scale-up* domain; between domains (*scale-out*) tokens pass through buffers of their own. Dispatch and combine take
turns with one buffer, so the larger of the two counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from moelab.experiment import EPBackend, Experiment
from moelab.layout import Layout
from moelab.memory.activations import BF16, Work
from moelab.model import ModelShape

TOKEN_ALIGNMENT = 32
"""Bytes to a multiple of which each field of a token is padded (``ptx::kNumTMAAlignBytes``)."""
BUFFER_ALIGNMENT = 2 * 2**20
"""Bytes to a multiple of which the buffer is padded (``symmetric::kNumAlignmentBytes``)."""
CHANNELS = 8 * 160
"""Tokens of slack of each scale-out buffer (``ElasticBuffer::kNumMaxChannels``)."""
WORKSPACE_BYTES = 7 * BUFFER_ALIGNMENT
"""Counters and signals, the same for every model (``layout::WorkspaceLayout``: 12,820,528 bytes, padded)."""


@dataclass(frozen=True, kw_only=True)
class DispatchBuffer:
    """What a dispatcher allocates on each rank.

    Attributes:
        backend: the dispatcher.
        size_bytes: of everything that it allocates.
        tokens: that a rank dispatches at a time.
        ranks: expert-parallel ranks.
        nvlink_ranks: those of them that share a node.
        exact: whether ``size_bytes`` is the dispatcher's own arithmetic.
    """

    backend: EPBackend
    size_bytes: int
    tokens: int
    ranks: int
    nvlink_ranks: int
    exact: bool


def dispatch_buffer(experiment: Experiment, layout: Layout, shape: ModelShape, work: Work) -> DispatchBuffer | None:
    """The buffer of an experiment's dispatcher; None where it has none.

    For ``minimal_async_ep`` it is TorchTitan's arithmetic (``torchtitan/distributed/minimal_async_ep/api.py`` at 0.3.0:
    two buffers for every row that could arrive). For HybridEP one BF16 row for each token of each rank, each way,
    stands in until it has been measured. DeepEP's emulation has no buffer.
    """
    backend, ranks, tokens = experiment.ep_backend, layout.ep, work.routed_tokens
    emulated = backend is EPBackend.DEEPEP and experiment.ep_kernels == "emulated"
    if backend is EPBackend.STANDARD or ranks == 1 or emulated:
        return None
    nvlink_ranks = gcd(ranks, experiment.gpus_per_node)
    rows = ranks * tokens
    if backend is EPBackend.DEEPEP:
        size = WORKSPACE_BYTES + deepep_buffer_bytes(
            tokens=tokens, dim=shape.dim, top_k=shape.top_k, ranks=ranks, nvlink_ranks=nvlink_ranks
        )
    else:
        copies = min(shape.top_k, shape.num_experts // ranks) if backend is EPBackend.MINIMAL_ASYNC_EP else 1
        size = 2 * rows * copies * shape.dim * BF16
    return DispatchBuffer(
        backend=backend,
        size_bytes=size,
        tokens=tokens,
        ranks=ranks,
        nvlink_ranks=nvlink_ranks,
        exact=backend is not EPBackend.HYBRIDEP,
    )


def deepep_buffer_bytes(*, tokens: int, dim: int, top_k: int, ranks: int, nvlink_ranks: int) -> int:
    """Bytes of DeepEP's buffer on one rank, its workspace apart: ``ElasticBuffer.num_bytes`` for BF16 tokens.

    Args:
        tokens: that a rank dispatches at a time.
        dim: features of a token.
        top_k: experts of a token.
        ranks: expert-parallel ranks.
        nvlink_ranks: ranks of one NVLink domain.

    Example:
        >>> deepep_buffer_bytes(tokens=8192, dim=7168, top_k=8, ranks=2, nvlink_ranks=2) // 2**20
        226
    """
    domains, domain = ranks // nvlink_ranks, nvlink_ranks
    features, weights = _aligned(BF16 * dim), 8 * top_k
    sent, returned = features + _aligned(weights + 4 * (1 + top_k)), features + _aligned(weights)
    if domains == 1:
        dispatch_rows, combine_rows = ranks * tokens, min(ranks, top_k) * tokens
    else:
        dispatch_rows = ranks * tokens + tokens + domains * (tokens + CHANNELS)
        combine_rows = (min(domain, top_k) * domains + min(domains, top_k)) * tokens + domains * (tokens + CHANNELS)
    return _aligned(max(sent * dispatch_rows, returned * combine_rows), BUFFER_ALIGNMENT)


def _aligned(size: int, multiple: int = TOKEN_ALIGNMENT) -> int:
    return -(-size // multiple) * multiple
