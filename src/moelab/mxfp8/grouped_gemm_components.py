"""The kernels that a grouped product is made of, each by itself: casts, scale layouts, and the three GEMMs.

The same calls that torchao 0.18.0 makes inside its autograd functions (``prototype/moe_training/fp8_grouped_mm.py`` and
``mxfp8_grouped_mm.py``), so that times of whole products can be split and a model of them fitted to its parts. They are
Triton, CUDA or CuTeDSL kernels, so there is nothing for ``torch.compile`` to fuse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from moelab.mxfp8.grouped_gemm_cases import Precision

Kind = Literal["quantise", "scales", "gemm"]
Direction = Literal["forward", "dgrad", "wgrad"]


@dataclass(frozen=True, kw_only=True)
class Operands:
    """Inputs of one grouped product, BF16.

    Attributes:
        a_MK: rows, (M, K).
        b_GNK: weights, (G, N, K).
        grad_MN: gradient of the output, (M, N).
        offsets_G: int32, the row after each group's last.
    """

    a_MK: torch.Tensor
    b_GNK: torch.Tensor
    grad_MN: torch.Tensor
    offsets_G: torch.Tensor

    @property
    def flops(self) -> int:
        """Of one of the three products, padded rows included."""
        return 2 * self.a_MK.numel() * self.b_GNK.shape[1]


@dataclass(frozen=True, kw_only=True)
class Component:
    """One kernel call.

    Attributes:
        name: what it does.
        direction: the product that needs it.
        kind: what it is.
        size: bytes that a cast cannot avoid (two read and one written for each element), or the FLOPs of a GEMM; 0
            where neither says anything.
        call: runs it.
    """

    name: str
    direction: Direction
    kind: Kind
    size: int
    call: Callable[[], object]


def components(operands: Operands, precision: Precision) -> Iterator[Component]:
    """The kernels of one precision in the order in which a step runs them; later ones use what earlier ones made."""
    if precision == "bf16":
        return _bf16(operands)
    return _fp8(operands) if precision == "fp8" else _mxfp8(operands)


def _gemm(direction: Direction, flops: int, call: Callable[[], object]) -> Component:
    return Component(name="grouped GEMM", direction=direction, kind="gemm", size=flops, call=call)


def _cast(name: str, direction: Direction, elements: int, call: Callable[[], object]) -> Component:
    return Component(name=name, direction=direction, kind="quantise", size=3 * elements, call=call)


def _bf16(x: Operands) -> Iterator[Component]:
    a, b, grad, offs = x.a_MK, x.b_GNK, x.grad_MN, x.offsets_G
    yield _gemm("forward", x.flops, lambda: torch._grouped_mm(a, b.transpose(-2, -1), offs=offs))
    yield _gemm("dgrad", x.flops, lambda: torch._grouped_mm(grad, b, offs=offs))
    yield _gemm("wgrad", x.flops, lambda: torch._grouped_mm(grad.t(), a, offs=offs))


def _fp8(x: Operands) -> Iterator[Component]:
    from torchao.prototype.moe_training import kernels as ao

    a, b_t, grad, offs = x.a_MK, x.b_GNK.transpose(-2, -1), x.grad_MN, x.offsets_G
    e4m3 = torch.float8_e4m3fn

    def scaled(left: torch.Tensor, right: torch.Tensor, *scales: torch.Tensor) -> torch.Tensor:
        inverse = [scale.reciprocal() for scale in scales]
        return torch._scaled_grouped_mm(left, right, *inverse, offs, out_dtype=torch.bfloat16, use_fast_accum=True)

    def cast_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return ao.triton_fp8_rowwise_2d_scale_and_cast(rows, output_dtype=e4m3, round_scales_to_power_of_2=True)

    def cast_columns() -> tuple[torch.Tensor, ...]:
        return ao.triton_fp8_per_group_colwise_scales_dual(grad, a, offs, e4m3, round_scales_to_power_of_2=True)

    def cast_weights(cast: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
        return cast(b_t, output_dtype=e4m3, round_scales_to_power_of_2=True)

    yield _cast("rows by row", "forward", a.numel(), lambda: cast_rows(a))
    yield _cast(
        "weights by column", "forward", b_t.numel(), lambda: cast_weights(ao.triton_fp8_colwise_3d_scale_and_cast)
    )
    a8, a_scale = cast_rows(a)
    b8, b_scale = cast_weights(ao.triton_fp8_colwise_3d_scale_and_cast)
    yield _gemm("forward", x.flops, lambda: scaled(a8, b8, a_scale.squeeze(-1), b_scale.squeeze(1)))
    yield _cast("gradient by row", "dgrad", grad.numel(), lambda: cast_rows(grad))
    yield _cast("weights by row", "dgrad", b_t.numel(), lambda: cast_weights(ao.triton_fp8_rowwise_3d_transpose_rhs))
    g8, g_scale = cast_rows(grad)
    r8, r_scale = cast_weights(ao.triton_fp8_rowwise_3d_transpose_rhs)
    yield _gemm("dgrad", x.flops, lambda: scaled(g8, r8, g_scale.squeeze(-1), r_scale.squeeze(1)))
    yield _cast("gradient and rows by column", "wgrad", grad.numel() + a.numel(), cast_columns)
    gc8, gc_scale, ac8, ac_scale = cast_columns()
    yield _gemm("wgrad", x.flops, lambda: scaled(gc8.t(), ac8, gc_scale.t(), ac_scale))


def _mxfp8(x: Operands) -> Iterator[Component]:
    from torchao.prototype.moe_training import mxfp8_grouped_mm as ao

    a, b, grad, offs = x.a_MK, x.b_GNK, x.grad_MN, x.offsets_G

    def scaled(left: torch.Tensor, right: torch.Tensor, *scales: torch.Tensor) -> torch.Tensor:
        return torch._scaled_grouped_mm(left, right, *scales, offs=offs, out_dtype=torch.bfloat16)

    def cast_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return ao.mxfp8_quantize_2d_1x32_cutedsl(rows, scaling_mode="rceil", offs=offs)

    def cast_weights() -> tuple[torch.Tensor, torch.Tensor]:
        return ao.triton_to_mxfp8_dim0(b, 32, "rceil")

    def cast_weights_for_dgrad() -> tuple[torch.Tensor, torch.Tensor]:
        return ao.mxfp8_quantize_cuda_3d(b, 32, scale_block_dim1=32, scale_block_dim2=1, scaling_mode="rceil")

    def cast_columns(rows: torch.Tensor) -> torch.Tensor:
        return ao._to_mxfp8_dim1_kernel_wrapper(
            rows,
            32,
            elem_dtype=torch.float8_e4m3fn,
            hp_dtype=rows.dtype,
            kernel_preference=ao.KernelPreference.AUTO,
            cast_kernel_choice=ao.MXFP8Dim1CastKernelChoice.CUDA,
            scale_calculation_mode=ao.ScaleCalculationMode.RCEIL,
        )

    def scales_for_wgrad(cast: torch.Tensor) -> torch.Tensor:
        return ao.triton_mx_block_rearrange_2d_K_groups(cast.scale, offs // 32)

    yield _cast("rows by row", "forward", a.numel(), lambda: cast_rows(a))
    yield _cast("weights by row", "forward", b.numel(), cast_weights)
    (a8, a_scale), (b8, b_scale) = cast_rows(a), cast_weights()
    yield _scales("weights", "forward", lambda: ao.triton_mx_block_rearrange_per_group_3d(b_scale))
    b_blocked = ao.triton_mx_block_rearrange_per_group_3d(b_scale)
    yield _gemm("forward", x.flops, lambda: scaled(a8, b8.transpose(-2, -1), a_scale, b_blocked))
    yield _cast("gradient by row", "dgrad", grad.numel(), lambda: cast_rows(grad))
    yield _cast("weights by column", "dgrad", b.numel(), cast_weights_for_dgrad)
    (g8, g_scale), (r8, r_scale) = cast_rows(grad), cast_weights_for_dgrad()
    yield _gemm("dgrad", x.flops, lambda: scaled(g8, r8, g_scale, r_scale))
    yield _cast("gradient by column", "wgrad", grad.numel(), lambda: cast_columns(grad))
    yield _cast("rows by column", "wgrad", a.numel(), lambda: cast_columns(a))
    gc, ac = cast_columns(grad), cast_columns(a)
    yield _scales("gradient", "wgrad", lambda: scales_for_wgrad(gc))
    yield _scales("rows", "wgrad", lambda: scales_for_wgrad(ac))
    gc_scale, ac_scale = scales_for_wgrad(gc), scales_for_wgrad(ac)
    yield _gemm("wgrad", x.flops, lambda: scaled(gc.qdata, ac.qdata.transpose(-2, -1), gc_scale, ac_scale))


def _scales(name: str, direction: Direction, call: Callable[[], object]) -> Component:
    return Component(name=f"scales of {name} into blocks", direction=direction, kind="scales", size=0, call=call)
