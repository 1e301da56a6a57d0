"""A TorchTitan token dispatcher that sends tokens in MXFP8: the published 16B arm's all-to-all on the standard backend.

An override from outside TorchTitan's tree, for experts that :mod:`moelab.mxfp8.converter` has made MXFP8::

    torchrun … -m torchtitan.train … --override.imports moelab.mxfp8.dispatch.quantised

A token travels to its experts as E4M3 with a scale for 32 features, 33/64 of its bytes in BF16, and enters the first
grouped GEMMs as it arrives (:mod:`moelab.mxfp8.experts`). What arrives quantised along the features cannot be
scaled along the tokens, so the experts' weight gradient is BF16. It is torchao's MXFP8 all-to-all
(``prototype/moe_training/ep``) in plain PyTorch, with its numbers:

=========  =============================================================  ============================================
           forward                                                        backward
=========  =============================================================  ============================================
dispatch   quantise, all-to-all of data and scales, into padded groups    out of the groups, all-to-all in BF16, sum of
                                                                          a token's rows
combine    out of the groups, all-to-all in BF16                          quantise, all-to-all of data and scales, into
                                                                          padded groups, expand
=========  =============================================================  ============================================

It differs from torchao 0.18 in cost, not in numbers. A token is quantised once, not once for each of its experts, and
8-bit rows are gathered instead of BF16 ones. There are as many rows as the padded groups hold, not as many as they
could hold at most. The gradient that arrives at the experts is expanded to BF16, where it is exact. And no tensor
subclass is involved, so that the model compiles as one graph and the products run on any device.

Shape suffixes: T tokens of this rank, K experts of a token, N = T*K rows that leave, R rows that arrive, P the same in
padded groups, D features, S = D/32 scales, E experts, e local experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single
from torchao.prototype.moe_training import mxfp8_grouped_mm as torchao_mxfp8
from torchtitan.config.override import derive, override
from torchtitan.models.common.moe import RoutedExperts
from torchtitan.models.common.token_dispatcher import (
    AllToAllTokenDispatcher,
    LocalDispatchMetadata,
    LocalTokenDispatcher,
)

from moelab.errors import BadInput
from moelab.hardware import GROUP_PADDING
from moelab.mxfp8.experts import QuantisedRows, place, quantised_experts, require_bf16_wgrad
from moelab.mxfp8.kernels import Kernels
from moelab.mxfp8.quantise import BLOCK, E4M3, expand, quantise_mxfp8

QUANTISED = "moelab.mxfp8.dispatch.quantised"
"""Name for TorchTitan's ``override.imports``."""


@override(target=RoutedExperts.Config, exact=True, description="MXFP8 all-to-all: dispatch forward, combine backward")
def quantised(config: RoutedExperts.Config) -> Any:
    """Swap a layer's standard dispatcher for the quantised one, and its experts for those that take such rows.

    Routed experts with another dispatcher than TorchTitan's standard one, padded or not, are left alone. Others must be
    MXFP8 with their weight gradient in BF16, or :class:`BadInput` is raised.
    """
    dispatcher, experts = config.token_dispatcher, config.inner_experts
    if not isinstance(dispatcher, AllToAllTokenDispatcher.Config):
        return config
    require_bf16_wgrad(experts)
    prequantised = quantised_experts(type(experts)._owner)
    return derive(
        config,
        RoutedExperts.Config,
        token_dispatcher=derive(
            dispatcher,
            QuantisedDispatcher.Config,
            pad_multiple=GROUP_PADDING[f"mxfp8_{experts.kernels}"],
            cast_kernels=experts.kernels,
        ),
        inner_experts=derive(experts, prequantised.Config, pad_inside=False),
    )


@dataclass(frozen=True, kw_only=True)
class QuantisedDispatchMetadata(LocalDispatchMetadata):
    """What a dispatch leaves for combine."""

    place_R: Tensor  # where each row that arrived went in the padded groups, int64
    way: tuple[int, list[int], list[int], str, Kernels]
    """Rows of all local experts, padding included; rows to each rank, and from each; the group, and who casts."""


class QuantisedDispatcher(AllToAllTokenDispatcher):
    """TorchTitan's dispatcher interface to the exchange below."""

    @dataclass(kw_only=True, slots=True)
    class Config(AllToAllTokenDispatcher.Config):
        """As TorchTitan's, plus the rows that each expert's group is a multiple of, and who casts to MXFP8."""

        pad_multiple: int = GROUP_PADDING["mxfp8_emulated"]
        cast_kernels: Kernels = "emulated"

    precision = "mxfp8"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.pad_multiple, self.cast_kernels = config.pad_multiple, config.cast_kernels
        self.group, self.ranks = "", 1

    def init_buffer(self) -> None:
        """Find the ranks to send to; :class:`BadInput` without expert parallelism. There is no buffer."""
        if self.ep_mesh is None:
            raise BadInput(
                "dispatch_precision mxfp8 quantises tokens that travel between expert-parallel ranks, and ep is 1; "
                "use bf16"
            )
        self.group, self.ranks = self.ep_mesh.get_group().group_name, self.ep_mesh.size()

    def dispatch(
        self, x_TD: Tensor, topk_scores_TK: Tensor, topk_expert_ids_TK: Tensor, num_local_tokens_per_expert_E: Tensor
    ) -> tuple[QuantisedRows, Tensor, QuantisedDispatchMetadata]:
        """Send this rank's tokens to their experts.

        Returns quantised rows in expert-major order, rows of each local expert (padding included) ``(e,)``, and what
        combine needs.
        """
        order_N = torch.argsort(topk_expert_ids_TK.reshape(-1), stable=True)
        sent_re = num_local_tokens_per_expert_E.view(self.ranks, -1)
        # Without sizes an all-to-all sends equal parts: to each rank the counts of its experts.
        received_re = torch.ops._c10d_functional.wait_tensor(all_to_all_single(sent_re, None, None, self.group))
        rows_e = padded_rows(received_re.sum(0), self.pad_multiple)
        # The one host sync: an all-to-all takes its sizes from the host, and so does the allocation of padded groups.
        on_host = torch.cat([sent_re.sum(1), received_re.sum(1), rows_e.sum()[None]]).to("cpu").tolist()
        sent, received, padded = on_host[: self.ranks], on_host[self.ranks : -1], on_host[-1]
        place_R = places(received_re, rows_e, sum(received))
        way = padded, sent, received, self.group, self.cast_kernels
        metadata = QuantisedDispatchMetadata(
            token_indices_experts_sorted_N=order_N // self.top_k,
            topk_scores_experts_sorted_N=topk_scores_TK.reshape(-1)[order_N],
            place_R=place_R,
            way=way,
        )
        return QuantisedRows(*_Dispatch.apply(x_TD.bfloat16(), order_N, place_R, *way)), rows_e, metadata

    def combine(self, routed_output_RD: Tensor, metadata: QuantisedDispatchMetadata, x_TD: Tensor) -> Tensor:
        """Send outputs home and add each token's, times their scores, ``(T, D)``."""
        output_ND = _Combine.apply(routed_output_RD, metadata.place_R, *metadata.way)
        return LocalTokenDispatcher.combine(self, output_ND, metadata, x_TD)


def padded_rows(tokens_e: Tensor, alignment: int) -> Tensor:
    """Rows of each local expert: a multiple of ``alignment`` above zero, as torchao has it."""
    return (tokens_e.clamp(min=1) + (alignment - 1)) // alignment * alignment


def places(received_re: Tensor, rows_e: Tensor, received: int) -> Tensor:
    """From the order of arrival, by rank and then expert, to padded groups by expert and then rank: int64 ``(R,)``.

    A group has ``rows_e`` rows, padding included; ``received`` is the sum of ``received_re`` on the host.
    """
    # Where the rows from each rank for each expert begin: as they arrive, and in the padded groups.
    arrives_re = received_re.reshape(-1).cumsum(0).view_as(received_re) - received_re
    goes_re = (rows_e.cumsum(0) - rows_e) + received_re.cumsum(0) - received_re
    shift_R = (goes_re - arrives_re).reshape(-1).repeat_interleave(received_re.reshape(-1), output_size=received)
    return shift_R + torch.arange(shift_R.shape[0], device=shift_R.device)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, order_N: Tensor, place_R: Tensor, *way: Any) -> tuple[Tensor, Tensor, Tensor]:
        padded, sent, received, group, kernels = ctx.way = way
        token_N = order_N // (order_N.shape[0] // x_TD.shape[0])  # each token is in the order K times
        ctx.tokens = x_TD.shape[0]
        ctx.save_for_backward(order_N, place_R)
        data_TD, scales_TS = cast(x_TD, kernels)  # once a token, however many experts it has
        leaving = (data_TD.view(torch.uint8)[token_N], scales_TS[token_N])
        data_PD, scales_PS = _exchange_quantised(*leaving, place_R, padded, received, sent, group)
        ctx.mark_non_differentiable(data_PD, scales_PS)  # E4M3 has no BF16 gradient: the place receives it
        return place(x_TD, padded), data_PD, scales_PS

    @staticmethod
    def backward(ctx: Any, grad_PD: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        order_N, place_R = ctx.saved_tensors
        _padded, sent, received, group, _kernels = ctx.way
        grad_ND = _exchange(grad_PD[place_R], sent, received, group)
        # Back to the order of tokens, so that the sum over a token's rows is one reduction and not a scatter.
        home_N = torch.empty_like(order_N).index_copy(0, order_N, torch.arange(len(order_N), device=order_N.device))
        grad_TD = grad_ND[home_N].unflatten(0, (ctx.tokens, -1)).sum(1)
        return grad_TD, None, None, None, None, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_PD: Tensor, place_R: Tensor, *way: Any) -> Tensor:
        _padded, sent, received, group, _kernels = ctx.way = way
        ctx.save_for_backward(place_R)
        return _exchange(y_PD[place_R], sent, received, group)

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor | None, ...]:
        (place_R,) = ctx.saved_tensors
        padded, sent, received, group, kernels = ctx.way
        # From the tokens to the experts again, so that as much arrives as in the dispatch.
        rows = _exchange_quantised(*cast(grad_ND, kernels), place_R, padded, received, sent, group)
        return expand(*rows, "mxfp8"), None, None, None, None, None, None


def cast(x: Tensor, kernels: Kernels) -> tuple[Tensor, Tensor]:
    """MXFP8 of BF16 rows: E4M3 data, and scales as uint8."""
    if kernels == "emulated":
        return quantise_mxfp8(x)
    data, scales = torchao_mxfp8.triton_to_mxfp8_dim0(x.contiguous(), BLOCK, "rceil")
    return data, scales.view(torch.uint8)


def _exchange_quantised(
    data: Tensor, scales: Tensor, place_R: Tensor, padded: int, arriving: list[int], leaving: list[int], group: str
) -> tuple[Tensor, Tensor]:
    """Both halves of quantised rows to the experts and into padded groups; as bytes, which every backend sends."""
    under_way = [all_to_all_single(half, arriving, leaving, group) for half in (data.view(torch.uint8), scales)]
    arrived = [torch.ops._c10d_functional.wait_tensor(half) for half in under_way]
    # Padding is data 0 under the scale 2^-127: zeros, whose products and gradients are zeros.
    data_P, scales_P = (half.new_zeros((padded, half.shape[1])).index_copy(0, place_R, half) for half in arrived)
    return data_P.view(E4M3), scales_P


def _exchange(rows: Tensor, arriving: list[int], leaving: list[int], group: str) -> Tensor:
    # Outside a compiler, torch 2.14's functional collectives return a wrapper that waits on first use.
    return torch.ops._c10d_functional.wait_tensor(all_to_all_single(rows, arriving, leaving, group))
