"""A TorchTitan token dispatcher that sends tokens in MXFP8: the published 16B arm's all-to-all on the standard backend.

As an override from outside TorchTitan's tree, for experts that :mod:`moelab.mxfp8.converter` has made MXFP8::

    torchrun … -m torchtitan.train … --override.imports moelab.mxfp8.dispatch.quantised

A token travels to its experts as E4M3 with a scale for 32 features, 33/64 of its bytes in BF16, and enters the first
grouped GEMMs as it arrives (:mod:`moelab.mxfp8.prequantised`). Outputs travel home in BF16, their gradient comes back
in MXFP8, and the gradient of the tokens travels in BF16. What arrives quantised along the features cannot be scaled
along the tokens, so the experts' weight gradient is BF16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torchtitan.config.override import derive, override
from torchtitan.models.common.moe import RoutedExperts
from torchtitan.models.common.token_dispatcher import (
    AllToAllTokenDispatcher,
    LocalDispatchMetadata,
    LocalTokenDispatcher,
)

from moelab.errors import BadInput
from moelab.mxfp8.converter import MXFP8Experts
from moelab.mxfp8.dispatch_ops import CastKernels, Route, combine_rows, dispatch_rows, route
from moelab.mxfp8.kernels import EMULATED_PADDING, NATIVE_PADDING
from moelab.mxfp8.prequantised import QuantisedRows, prequantised_experts

QUANTISED = "moelab.mxfp8.dispatch.quantised"
"""Name for TorchTitan's ``override.imports``."""


@dataclass(frozen=True, kw_only=True)
class QuantisedDispatchMetadata(LocalDispatchMetadata):
    """What a dispatch leaves for combine."""

    way: Route


class QuantisedDispatcher(AllToAllTokenDispatcher):
    """TorchTitan's dispatcher interface over :mod:`moelab.mxfp8.dispatch_ops`."""

    @dataclass(kw_only=True, slots=True)
    class Config(AllToAllTokenDispatcher.Config):
        """As TorchTitan's, plus the rows that each expert's group is a multiple of, and who casts to MXFP8."""

        pad_multiple: int = EMULATED_PADDING
        cast_kernels: CastKernels = "emulated"

    precision = "mxfp8"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.pad_multiple, self.cast_kernels = config.pad_multiple, config.cast_kernels
        self.group, self.ranks = "", 1

    def init_buffer(self) -> None:
        """There is no buffer; but there must be ranks to send to.

        Raises:
            BadInput: without expert parallelism.
        """
        if self.ep_mesh is None:
            raise BadInput(
                "dispatch_precision mxfp8 quantises tokens that travel between expert-parallel ranks, and ep is 1; "
                "use bf16"
            )
        self.group, self.ranks = self.ep_mesh.get_group().group_name, self.ep_mesh.size()

    def dispatch(
        self, x_TD: Tensor, topk_scores_TK: Tensor, topk_expert_ids_TK: Tensor, num_local_tokens_per_expert_E: Tensor
    ) -> tuple[QuantisedRows, Tensor, QuantisedDispatchMetadata]:
        """Send tokens to their experts.

        Args:
            x_TD: this rank's tokens.
            topk_scores_TK: routing scores.
            topk_expert_ids_TK: int64.
            num_local_tokens_per_expert_E: of this rank's tokens.

        Returns:
            Quantised rows in expert-major order, rows of each local expert (padding included) ``(e,)``, and what
            combine needs.
        """
        counts_E = num_local_tokens_per_expert_E
        way = route(topk_expert_ids_TK, counts_E, self.group, self.ranks, self.pad_multiple)
        rows = dispatch_rows(x_TD.bfloat16(), way, self.cast_kernels)
        metadata = QuantisedDispatchMetadata(
            token_indices_experts_sorted_N=way.order_N // self.top_k,
            topk_scores_experts_sorted_N=topk_scores_TK.reshape(-1)[way.order_N],
            way=way,
        )
        return rows, way.rows_e, metadata

    def combine(self, routed_output_RD: Tensor, metadata: QuantisedDispatchMetadata, x_TD: Tensor) -> Tensor:
        """Send outputs home and add each token's, times their scores, ``(T, D)``."""
        output_ND = combine_rows(routed_output_RD, metadata.way, self.cast_kernels)
        return LocalTokenDispatcher.combine(self, output_ND, metadata, x_TD)


@override(target=RoutedExperts.Config, exact=True, description="MXFP8 all-to-all: dispatch forward, combine backward")
def quantised(config: RoutedExperts.Config) -> Any:
    """Swap a layer's standard dispatcher for the quantised one, and its experts for those that take such rows.

    Args:
        config: routed experts with TorchTitan's standard dispatcher, padded or not; others are left alone.

    Raises:
        BadInput: if the experts are not MXFP8 with their weight gradient in BF16.
    """
    dispatcher, experts = config.token_dispatcher, config.inner_experts
    if not isinstance(dispatcher, AllToAllTokenDispatcher.Config):
        return config
    if not isinstance(experts, MXFP8Experts.Config) or experts.wgrad != "bf16":
        raise BadInput(
            f"dispatch_precision mxfp8 feeds MXFP8 experts whose weight gradient is BF16, and these are "
            f"{type(experts)._owner.__name__}{_wgrad(experts)}; set precision=mxfp8 and wgrad=bf16, "
            "or dispatch_precision=bf16"
        )
    new = prequantised_experts(type(experts)._owner)
    native = experts.kernels == "native"
    return derive(
        config,
        RoutedExperts.Config,
        token_dispatcher=derive(
            dispatcher,
            QuantisedDispatcher.Config,
            pad_multiple=NATIVE_PADDING if native else EMULATED_PADDING,
            cast_kernels=experts.kernels,
        ),
        inner_experts=derive(experts, new.Config, pad_inside=False),
    )


def _wgrad(experts: Any) -> str:
    return f" with wgrad {experts.wgrad}" if hasattr(experts, "wgrad") else ""
