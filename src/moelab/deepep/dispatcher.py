"""A DeepEP token dispatcher for TorchTitan that pads, compiles and takes quantised experts.

TorchTitan 0.3.0 refuses quantised experts with its DeepEP dispatcher (it does not pad) and cannot compile it (its
operators have no fake implementation). This one does both, as an override from outside TorchTitan's tree::

    torchrun … -m torchtitan.train … --override.imports 'moelab.deepep.dispatcher.padded={"alignment": 16}'

Path of a token: :func:`moelab.deepep.ops.dispatch` sends it once to each rank of its experts, where rows arrive in
expert-major order, padded. The experts multiply them and apply the routing scores (:mod:`moelab.mxfp8.experts`), and
:func:`moelab.deepep.ops.combine` adds a token's rows on each rank before they travel back. Tokens may travel in 8 bits:
they are quantised once, before the dispatch, and the first GEMMs take them as they arrive
(:mod:`moelab.mxfp8.experts`). Why the shared expert does not compute meanwhile is in ``docs/torchtitan.md``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchtitan.config.override import derive, override
from torchtitan.distributed.spmd_types import maybe_set_sparse_mesh
from torchtitan.models.common.moe import RoutedExperts
from torchtitan.models.common.token_dispatcher import BaseEPTokenDispatcher, DeepEPTokenDispatcher

from moelab.deepep import ops
from moelab.deepep.buffer import open_exchange
from moelab.errors import BadInput
from moelab.layout.rules import PACKED_FEATURES
from moelab.model import DispatchPrecision
from moelab.mxfp8.experts import QuantisedRows, quantised_experts, require_bf16_wgrad, scored
from moelab.mxfp8.kernels import Kernels
from moelab.mxfp8.quantise import quantise

PADDED = "moelab.deepep.dispatcher.padded"
"""Name for TorchTitan's ``override.imports``."""


@dataclass(frozen=True, kw_only=True)
class Dispatched:
    """What a dispatch leaves for the experts and for combine."""

    scores_R: Tensor
    ids_TK: Tensor
    handle: list[Tensor]


class PaddedDispatcher(DeepEPTokenDispatcher):
    """TorchTitan's dispatcher interface over :mod:`moelab.deepep.ops`."""

    @dataclass(kw_only=True, slots=True)
    class Config(DeepEPTokenDispatcher.Config):
        """As TorchTitan's, plus the padding, which buffer, and the multiprocessors that move tokens."""

        alignment: int = 8
        kernels: Kernels = "native"
        num_sms: int = 0
        precision: DispatchPrecision = "bf16"

    def __init__(self, config: Config) -> None:
        # Not TorchTitan's own constructor: it imports deep_ep to register operators that are not used here.
        BaseEPTokenDispatcher.__init__(self, config)
        self.alignment, self.kernels, self.num_sms = config.alignment, config.kernels, config.num_sms
        self.precision = config.precision
        self.num_max_tokens_per_rank, self.hidden_dim = config.num_max_tokens_per_rank, config.hidden_dim
        self.group = ""

    def init_buffer(self) -> None:
        """Open the buffer that all layers share.

        Raises:
            BadInput: without expert parallelism, or for sizes that DeepEP or the format cannot take.
        """
        if self.ep_mesh is None:
            raise BadInput("ep_backend deepep moves tokens between expert-parallel ranks, and ep is 1; use standard")
        assert self.hidden_dim
        assert self.num_max_tokens_per_rank
        if self.precision == "mxfp8" and self.hidden_dim % PACKED_FEATURES:
            raise BadInput(
                f"DeepEP moves MXFP8 scales four at a time, {PACKED_FEATURES} features, and the model has "
                f"{self.hidden_dim}; use dispatch_precision=bf16"
            )
        group = self.ep_mesh.get_group()
        open_exchange(
            group,
            hidden=self.hidden_dim,
            tokens=self.num_max_tokens_per_rank,
            experts=self.num_experts,
            top_k=self.top_k,
            kernels=self.kernels,
            num_sms=self.num_sms,
        )
        self.group = group.group_name

    def dispatch(
        self, x_TD: Tensor, topk_scores_TK: Tensor, topk_expert_ids_TK: Tensor, num_local_tokens_per_expert_E: Tensor
    ) -> tuple[Tensor | QuantisedRows, Tensor, Dispatched]:
        """Send this rank's tokens to their experts; DeepEP counts them itself.

        Returns:
            Rows ``(R, D)`` in expert-major order, in BF16 or quantised; rows of each local expert (padding included)
            ``(e,)``; and what the experts and combine need.

        Raises:
            BadInput: if there are more tokens than the buffer was made for.
        """
        del num_local_tokens_per_expert_E
        if x_TD.shape[0] > (self.num_max_tokens_per_rank or 0):
            raise BadInput(
                f"a rank dispatches {x_TD.shape[0]} tokens at a time, and its DeepEP buffer was made for "
                f"{self.num_max_tokens_per_rank}; it holds one micro-batch: seq_len x microbatch / (tp x cp)"
            )
        # In FP32, as DeepEP sends scores.
        where = (topk_scores_TK.float(), topk_expert_ids_TK, self.group, self.num_experts, self.alignment)
        data_TD = scales_TS = None
        if self.precision != "bf16":
            # Detached: the gradient of the rows goes to x_TD itself, past the rounding (a straight-through estimate).
            data_TD, scales_TS = quantise(x_TD.detach(), self.precision)
            if self.precision == "mxfp8":
                scales_TS = scales_TS.view(torch.int32)  # DeepEP moves scales of four bytes: four exponents
        rows_RD, data_RD, scales_RS, scores_R, *handle = ops.dispatch(x_TD, data_TD, scales_TS, *where)
        rows = rows_RD if data_TD is None else QuantisedRows(rows_RD, data_RD, scales_RS)
        # A compiler cannot see the padding, and grouped GEMMs ask for whole blocks.
        torch._check(scores_R.shape[0] % self.alignment == 0)
        state = Dispatched(scores_R=scores_R, ids_TK=topk_expert_ids_TK, handle=handle)
        # Rows of each local expert with its padding, computed on the device: no second host sync.
        rows_e = (handle[ops.UNALIGNED] + (self.alignment - 1)) // self.alignment * self.alignment
        return rows, rows_e, state

    def combine(self, routed_output_RD: Tensor, metadata: Dispatched, x_TD: Tensor) -> Tensor:
        """Add each token's rows, whose scores are applied already; padding is not read."""
        del x_TD
        return ops.combine(
            routed_output_RD, metadata.ids_TK, metadata.handle, self.group, self.num_experts, self.alignment
        )


class ScoredRoutedExperts(RoutedExperts):
    """Dispatch, scored experts, combine."""

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        """No settings of its own."""

    def forward(
        self,
        x_BLD: Tensor,
        topk_scores_BLK: Tensor,
        topk_expert_ids_BLK: Tensor,
        num_local_tokens_per_expert_E: Tensor,
    ) -> Tensor:
        """As TorchTitan's, ``(B, L, D)``, except that the scores travel with the rows and the experts apply them."""
        B, L, D = x_BLD.shape
        K = topk_scores_BLK.shape[-1]
        x_TD = x_BLD.view(B * L, D)
        rows, counts_e, state = self.token_dispatcher.dispatch(
            x_TD,
            topk_scores_BLK.reshape(B * L, K),
            topk_expert_ids_BLK.reshape(B * L, K),
            num_local_tokens_per_expert_E,
        )
        with maybe_set_sparse_mesh():  # of the experts' weights, as TorchTitan's own forward does
            output_RD = self.inner_experts(rows, counts_e, state.scores_R)
        return self.token_dispatcher.combine(output_RD, state, x_TD).view(B, L, D)


@override(target=RoutedExperts.Config, exact=True, description="DeepEP dispatch that pads, compiles and is quantised")
def padded(
    config: RoutedExperts.Config,
    *,
    alignment: int,
    tokens: int | None = None,
    kernels: Kernels = "native",
    precision: DispatchPrecision = "bf16",
) -> Any:
    """Swap a layer's DeepEP dispatcher and experts.

    Args:
        config: routed experts whose dispatcher is TorchTitan's DeepEP one; others are left alone.
        alignment: see ``hardware.GROUP_PADDING``.
        tokens: most tokens that a rank dispatches at a time, where it is fewer than TorchTitan's count: under pipeline
            parallelism that is a micro-batch and TorchTitan 0.3.0 counts the whole local batch.
        kernels: ``native`` DeepEP or its ``emulated`` stand-in.
        precision: in which tokens travel to their experts; gradients, and outputs on their way home, travel in BF16.
    """
    dispatcher = config.token_dispatcher
    if not isinstance(dispatcher, DeepEPTokenDispatcher.Config):
        return config
    experts: Any = config.inner_experts
    parent: Any = type(experts)._owner
    if precision == "mxfp8":
        require_bf16_wgrad(experts)
    if getattr(parent, "multiplies_in", None) != "fp8":  # FP8 experts take scores, and rows in either form, already
        if precision != "bf16":
            taking = quantised_experts(parent, precision)
        elif getattr(experts, "kernels", None) == "native":
            # Rows that arrive in BF16 are cast once for both of an expert's first products, by torchao's module once
            # for each. Emulated, a compiler sees that both casts are the same one.
            taking = quantised_experts(parent, "mxfp8")
        else:
            taking = scored(parent)
        experts = derive(experts, taking.Config)
    return derive(
        config,
        ScoredRoutedExperts.Config,
        token_dispatcher=derive(
            dispatcher,
            PaddedDispatcher.Config,
            alignment=alignment,
            kernels=kernels,
            precision=precision,
            num_max_tokens_per_rank=tokens or dispatcher.num_max_tokens_per_rank,
        ),
        inner_experts=experts,
    )
