"""Quantised experts, and linears when asked, as a TorchTitan model converter: MXFP8, NVFP4 and row-wise FP8.

TorchTitan 0.3.0 has such converters and refuses anything below SM100. This one does the same there, with the same
torchao kernels, and emulates elsewhere, so that an experiment means the same on every machine: the linears by torchao's
emulation, the experts by :mod:`moelab.mxfp8.experts`, which has the same numbers.

Quantised kernels need every expert's token group to be a multiple of a block. Where Triton runs, TorchTitan's
TorchAOTokenDispatcher pads inside the permutation; on a CPU it cannot (the permutation is a Triton kernel), so the
plain dispatcher stays and the emulated experts pad.

FP8 experts are moelab's too. TorchTitan 0.3.0's own train in BF16 whenever they are spread over ranks: they quantise
where a weight is torchao's wrapper (``Float8TrainingWeightWrapperTensor``), and TorchTitan's default SPMD backend hands
out plain tensors (``spmd_types.shard`` in ``distributed/spmd_types.py``). No message says so; only the kernels of a
traced step show it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig
from torchao.prototype.moe_training.mxfp8_linear import mx_mm
from torchao.prototype.mx_formats.config import (
    MXFP8Dim0CastKernelChoice,
    MXFP8Dim1CastKernelChoice,
    ScaleCalculationMode,
)
from torchao.quantization.quantize_.common import KernelPreference
from torchtitan.components.quantization import Float8LinearConverter, MXFP8Linear, QuantizationConverter
from torchtitan.components.quantization.float8 import Float8Linear, _float8_experts_cache
from torchtitan.components.quantization.mx import _get_mxfp8_grouped_experts_cls
from torchtitan.components.quantization.utils import swap_token_dispatcher
from torchtitan.config.override import derive
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.common.token_dispatcher import DeepEPTokenDispatcher

from moelab.errors import MoelabError, Refused
from moelab.hardware import GROUP_PADDING
from moelab.mxfp8.dispatch import padded_rows, places
from moelab.mxfp8.experts import grouped_mm, quantised_experts
from moelab.mxfp8.kernels import Kernels
from moelab.mxfp8.quantise import BLOCK

LINEARS = ("attention", "shared_experts", "feed_forward")
"""Parts of the names of the linears that are quantised: never the router, the embedding or the vocabulary head."""
_PREFERENCE = {"native": KernelPreference.AUTO, "emulated": KernelPreference.EMULATED}


class NothingConverted(MoelabError):
    """A quantised arm in which no module was converted would be a BF16 arm under another name."""


# TorchTitan 0.3.0 makes the class in a private function and exports no name for it.
_TitanExperts: Any = _get_mxfp8_grouped_experts_cls(GroupedExperts)


class MXFP8Experts(_TitanExperts):
    """TorchTitan's MXFP8 experts with emulated kernels, also for NVFP4, and with wgrad in BF16 when asked."""

    @dataclass(kw_only=True, slots=True)
    class Config(_TitanExperts.Config):
        """As TorchTitan's, plus what torchao's recipes do not name."""

        kernels: Kernels = "native"
        wgrad: Literal["mxfp8", "bf16"] = "mxfp8"
        pad_inside: bool = False
        precision: Literal["mxfp8", "nvfp4"] = "mxfp8"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.multiplies_in = config.precision
        self._kernels, self._pad_inside = config.kernels, config.pad_inside
        self._product = f"{config.precision}_emulated"
        if config.wgrad != "bf16":
            self._product += f"_wgrad_{config.precision}"
        # What TorchTitan's `_grouped_mm` hands to torchao; its constructor has put a recipe of torchao's there.
        self._mxfp8_op_config = op_config(config.kernels, config.wgrad, pad_inside=config.pad_inside)

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_e: torch.Tensor) -> torch.Tensor:
        """As TorchTitan's; with ``pad_inside`` groups are padded with zeros to whole blocks of rows on the way."""
        if not self._pad_inside:
            return super().forward(x_RD, num_tokens_per_expert_e)
        rows_e = padded_rows(num_tokens_per_expert_e, BLOCK)
        place_R = places(num_tokens_per_expert_e[None], rows_e, len(x_RD))
        # The most that padding can need: to read the exact number would be a host sync. Rows after the last group are
        # not computed.
        most = (len(x_RD) + BLOCK - 1) // BLOCK * BLOCK + BLOCK * len(rows_e)
        x_PD = x_RD.new_zeros((most, x_RD.shape[1])).index_copy(0, place_R, x_RD)
        return super().forward(x_PD, rows_e).index_select(0, place_R)

    def _grouped_mm(self, *, A: torch.Tensor, B_t: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        """Multiply ``A`` (M, K) by ``B_t`` (G, K, N), group by group; groups end at ``offs``."""
        if self._kernels == "emulated":
            return grouped_mm(A, B_t, offs, self._product)
        # TorchTitan's, by torchao's kernels with the settings above.
        return super()._grouped_mm(A=A, B_t=B_t, offs=offs)


def op_config(kernels: str, wgrad: str, *, pad_inside: bool) -> MXFP8TrainingOpConfig:
    """Settings of a quantised grouped GEMM for torchao's native kernels; emulated, torchao's is our reference."""
    return MXFP8TrainingOpConfig(
        kernel_preference=_PREFERENCE[kernels],
        wgrad_with_hp=wgrad == "bf16",
        scale_calculation_mode=ScaleCalculationMode.RCEIL,
        pad_token_groups_for_grouped_mm=pad_inside,
    )


class MXFP8EmulatedLinear(MXFP8Linear):
    """A linear whose three GEMMs are quantised to MXFP8 by torchao, emulated or native, wgrad in BF16 when asked.

    torchao 0.18's ``MXFP8Linear`` names the CUDA kernel for the casts along the other axis even when it emulates, which
    fails without a GPU; this one names the PyTorch casts then, and can go with a torchao that does.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(MXFP8Linear.Config):
        """As TorchTitan's, plus the kernels and the precision of the weight gradient."""

        kernels: str = "emulated"
        wgrad: str = "mxfp8"

    multiplies_in = "mxfp8"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.wgrad_with_hp = config.wgrad == "bf16"
        self.kernel_preference = _PREFERENCE[config.kernels]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Multiply ``(..., in_features)`` to ``(..., out_features)``."""
        if self.kernel_preference is KernelPreference.AUTO:  # native
            return super().forward(input)
        e4m3 = torch.float8_e4m3fn
        output = mx_mm.apply(
            input,
            self.weight,
            e4m3,
            e4m3,
            e4m3,
            BLOCK,
            self.kernel_preference,
            MXFP8Dim0CastKernelChoice.TORCH,
            MXFP8Dim1CastKernelChoice.TORCH,
            self.scale_calculation_mode,
            self.wgrad_with_hp,
        )
        return output if self.bias is None else output + self.bias.to(output.dtype)


class Quantiser(QuantizationConverter):
    """Replaces the experts of a model's configuration, and the linears that are named, by their form in a precision."""

    @dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):
        """``kernels`` are resolved already; FP8's are native, NVFP4's emulated."""

        precision: str = "mxfp8"  # or nvfp4, fp8
        kernels: Kernels = "emulated"
        wgrad: str = "mxfp8"  # or fp8, bf16
        linears: list[str] = field(default_factory=list)  # parts of their names

    def __init__(self, config: Config) -> None:
        self.config = config

    def convert(self, model_config: Any) -> Any:
        """Convert a model's configuration in place; :class:`NothingConverted` if it lacks what should be quantised."""
        precision, kernels, wgrad = self.config.precision, self.config.kernels, self.config.wgrad
        layers = list(model_config.traverse(GroupedExperts.Config))
        if not layers:
            raise NothingConverted(
                f"the model has no routed experts, so {precision.upper()} has nothing to quantise; use precision bf16"
            )
        for _name, experts, routed, attribute in layers:
            # moelab's DeepEP dispatcher, put in place by an override later, pads by itself; TorchTitan's, which pads
            # where it permutes, needs Triton, so that on a CPU the emulated product pads.
            dispatcher_pads = isinstance(routed.token_dispatcher, DeepEPTokenDispatcher.Config)
            pad_inside = kernels == "emulated" and not torch.cuda.is_available() and not dispatcher_pads
            if not pad_inside and not dispatcher_pads:
                swap_token_dispatcher(routed, GROUP_PADDING[f"mxfp8_{kernels}" if precision == "mxfp8" else precision])
            if precision == "fp8":
                parent = type(experts)._owner
                # TorchTitan looks here for quantised experts, whose steps it prints without an MFU.
                _float8_experts_cache[parent] = quantised = quantised_experts(parent, "fp8")
                converted = derive(experts, quantised.Config, wgrad=wgrad)
            else:
                how = {"kernels": kernels, "wgrad": wgrad, "pad_inside": pad_inside, "precision": precision}
                converted = derive(experts, MXFP8Experts.Config, **how)
            setattr(routed, attribute, converted)
        if self.config.linears:
            (self._convert_to_fp8 if precision == "fp8" else self._convert_to_mxfp8)(model_config)
        return model_config

    def _convert_to_mxfp8(self, model_config: Any) -> None:
        parts = self.config.linears
        linears = [row for row in model_config.traverse(Linear.Config) if any(part in row[0] for part in parts)]
        if not linears:
            raise NothingConverted(f"no linear of the model is named like any of {', '.join(parts)}")
        for name, config, parent, attribute in linears:
            for side in ("in_features", "out_features"):  # block axes: of the weight forward, of the gradient backward
                size = getattr(config, side)
                if size % BLOCK:
                    raise Refused(
                        f"{name} cannot be quantised: its {side} is {size}, not a multiple of {BLOCK}, MXFP8's block; "
                        "use quantize=experts or change the model's dimensions"
                    )
            converted = derive(config, MXFP8EmulatedLinear.Config, kernels=self.config.kernels, wgrad=self.config.wgrad)
            if isinstance(parent, list):  # of which the attribute is an index
                parent[attribute] = converted
            else:
                setattr(parent, attribute, converted)

    def _convert_to_fp8(self, model_config: Any) -> None:
        # TorchTitan's converter takes the names of what it leaves alone.
        names = [name for name, *_ in model_config.traverse(Linear.Config)]
        others = [name for name in names if not any(part in name for part in self.config.linears)]
        # Of torchao's recipes the one that keeps wgrad in BF16: with it a linear is cast along one axis alone.
        linears = Float8LinearConverter.Config(
            model_compile_enabled=self.config.model_compile_enabled,
            recipe_name="rowwise_with_gw_hp",
            filter_fqns=others,
        )
        linears.build().convert(model_config)


def converted_modules(model: nn.Module) -> list[str]:
    """Names of the modules of a built model that multiply in 8 bits."""
    return [
        name
        for name, module in model.named_modules()
        if hasattr(module, "multiplies_in") or isinstance(module, Float8Linear)
    ]
