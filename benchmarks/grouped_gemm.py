"""Time grouped GEMMs of routed experts on this GPU: BF16 against every 8-bit precision that it has kernels for.

    python benchmarks/grouped_gemm.py --output FILE.json                                      # under 4 minutes
    python benchmarks/grouped_gemm.py --output FILE.json --quick                              # two shapes
    python benchmarks/grouped_gemm.py --output FILE.json --shapes 8192,2048,7168,8 8192,2048,7168,8,skewed

Whole steps are timed by notebook 02's experiment (``moelab.micro.grouped_gemm_run``). Beside them, each kernel that
torchao 0.18.0 calls inside its autograd functions (``prototype/moe_training/fp8_grouped_mm.py`` and
``mxfp8_grouped_mm.py``) is timed by itself, so that a model can be fitted to the parts, and a large square product of
each precision, which stands for the GPU's peak. These kernels are Triton, CUDA or CuTeDSL, so there is nothing for
``torch.compile`` to fuse.

Nothing is downloaded. The file is replaced after every shape. Without a GPU it says why there is nothing to time. What
``notebooks/02_find_grouped_gemm_break_even.ipynb`` replays is ``benchmarks/results/grouped_gemm_h100.json``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from moelab.errors import MoelabError
from moelab.files import write_json
from moelab.micro.clock import median_and_iqr
from moelab.micro.grouped_gemm import (
    CASES,
    PRECISIONS,
    ROW_BLOCK,
    Case,
    Direction,
    GroupedPrecision,
    parse_case,
)
from moelab.micro.grouped_gemm_run import Operands, make_operands, require_kernels, run, take_turns, why_not

QUICK = (CASES[0], CASES[5])
COMPONENT_REPEATS = 8
PEAK_SIZE = 8192
"""Rows, columns and summed elements of the product that stands for a GPU's peak."""
PEAK_REPEATS = 12


def time_alone(call: Callable[[], object], device: torch.device, *, repeats: int) -> dict[str, float]:
    """Time one call by itself: the columns of its times."""
    median_us, iqr_us = median_and_iqr(take_turns({"alone": call}, device, repeats=repeats)["alone"])
    return {"median_us": round(median_us, 3), "iqr_us": round(iqr_us, 3), "n_times": repeats}


def error_text(error: Exception) -> str:
    """An exception's type and first line."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def measure_peaks(device: torch.device) -> dict[str, Any]:
    """What this GPU reaches on a large square product of each precision.

    Returns:
        ``bf16_tflops``, ``fp8_tflops`` and ``mxfp8_tflops`` (None with ``<name>_error`` where there is no such kernel),
        and how they were measured.
    """
    size = PEAK_SIZE
    # Random values: a GPU multiplies zeros or ones at a higher clock.
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    one = torch.ones((), device=device)
    # Scales of 1 in any order are scales of 1 in the order of tensor cores.
    blocks = torch.ones(size * size // 32, device=device).to(torch.float8_e8m0fnu)
    products: dict[GroupedPrecision, Callable[[], object]] = {
        "bf16": lambda: torch.mm(a, b.t()),
        "fp8": lambda: torch._scaled_mm(a8, b8.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True),
        "mxfp8": lambda: torch._scaled_mm(a8, b8.t(), blocks, blocks, out_dtype=torch.bfloat16),
    }
    peaks: dict[str, Any] = {"product": size, "repeats": PEAK_REPEATS}
    for name, product in products.items():
        try:
            require_kernels(name)
            took_us = time_alone(product, device, repeats=PEAK_REPEATS)["median_us"]
            peaks[f"{name}_tflops"] = round(2 * size**3 / took_us / 1e6, 3)
        except Exception as error:  # there are no kernels, or one fails, in any way
            peaks |= {f"{name}_tflops": None, f"{name}_error": error_text(error)[:200]}
    return peaks


class Component(NamedTuple):
    """One kernel call."""

    name: str  # what it does
    direction: Direction  # the product that needs it
    kind: Literal["quantise", "scales", "gemm"]
    size: int  # bytes that a cast cannot avoid, or the FLOPs of a GEMM; 0 where neither says anything
    call: Callable[[], object]


def time_components(case: Case, precision: GroupedPrecision, device: torch.device) -> Iterator[dict[str, Any]]:
    """Time each kernel of a precision by itself; a row for each."""
    operands = make_operands(case, device, block=ROW_BLOCK[precision])
    for part in components(operands, precision):
        row = {**vars(case), "precision": precision, "component": part.name, "pass": part.direction}
        times = time_alone(part.call, device, repeats=COMPONENT_REPEATS)
        yield row | {"kind": part.kind, "size": part.size, **times}


def components(operands: Operands, precision: GroupedPrecision) -> Iterator[Component]:
    """The kernels of one precision in the order in which a step runs them; later ones use what earlier ones made."""
    return {"bf16": _bf16, "fp8": _fp8}.get(precision, _mxfp8)(operands)


def flops_of(x: Operands) -> int:
    """Of one of the three products, padded rows included."""
    return 2 * x.a_MK.numel() * x.b_GNK.shape[1]


def _gemm(direction: Direction, flops: int, call: Callable[[], object]) -> Component:
    return Component("grouped GEMM", direction, "gemm", flops, call)


def _cast(name: str, direction: Direction, elements: int, call: Callable[[], object]) -> Component:
    # Two bytes are read and one is written; scales are not counted.
    return Component(name, direction, "quantise", 3 * elements, call)


def _scales(name: str, direction: Direction, call: Callable[[], object]) -> Component:
    return Component(f"scales of {name} into blocks", direction, "scales", 0, call)


def _bf16(x: Operands) -> Iterator[Component]:
    a, b, grad, offs = x.a_MK, x.b_GNK, x.grad_MN, x.offsets_G
    yield _gemm("forward", flops_of(x), lambda: torch._grouped_mm(a, b.transpose(-2, -1), offs=offs))
    yield _gemm("dgrad", flops_of(x), lambda: torch._grouped_mm(grad, b, offs=offs))
    yield _gemm("wgrad", flops_of(x), lambda: torch._grouped_mm(grad.t(), a, offs=offs))


def _fp8(x: Operands) -> Iterator[Component]:
    from torchao.prototype.moe_training import kernels as ao

    a, b_t, grad, offs = x.a_MK, x.b_GNK.transpose(-2, -1), x.grad_MN, x.offsets_G
    e4m3 = torch.float8_e4m3fn

    def scaled(left: torch.Tensor, right: torch.Tensor, *scales: torch.Tensor) -> torch.Tensor:
        # torchao's casts return what they multiplied by, and the product takes what expands again.
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
    yield _gemm("forward", flops_of(x), lambda: scaled(a8, b8, a_scale.squeeze(-1), b_scale.squeeze(1)))
    yield _cast("gradient by row", "dgrad", grad.numel(), lambda: cast_rows(grad))
    yield _cast("weights by row", "dgrad", b_t.numel(), lambda: cast_weights(ao.triton_fp8_rowwise_3d_transpose_rhs))
    g8, g_scale = cast_rows(grad)
    r8, r_scale = cast_weights(ao.triton_fp8_rowwise_3d_transpose_rhs)
    yield _gemm("dgrad", flops_of(x), lambda: scaled(g8, r8, g_scale.squeeze(-1), r_scale.squeeze(1)))
    yield _cast("gradient and rows by column", "wgrad", grad.numel() + a.numel(), cast_columns)
    gc8, gc_scale, ac8, ac_scale = cast_columns()
    yield _gemm("wgrad", flops_of(x), lambda: scaled(gc8.t(), ac8, gc_scale.t(), ac_scale))


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
    yield _gemm("forward", flops_of(x), lambda: scaled(a8, b8.transpose(-2, -1), a_scale, b_blocked))
    yield _cast("gradient by row", "dgrad", grad.numel(), lambda: cast_rows(grad))
    yield _cast("weights by column", "dgrad", b.numel(), cast_weights_for_dgrad)
    (g8, g_scale), (r8, r_scale) = cast_rows(grad), cast_weights_for_dgrad()
    yield _gemm("dgrad", flops_of(x), lambda: scaled(g8, r8, g_scale, r_scale))
    yield _cast("gradient by column", "wgrad", grad.numel(), lambda: cast_columns(grad))
    yield _cast("rows by column", "wgrad", a.numel(), lambda: cast_columns(a))
    gc, ac = cast_columns(grad), cast_columns(a)
    yield _scales("gradient", "wgrad", lambda: scales_for_wgrad(gc))
    yield _scales("rows", "wgrad", lambda: scales_for_wgrad(ac))
    gc_scale, ac_scale = scales_for_wgrad(gc), scales_for_wgrad(ac)
    yield _gemm("wgrad", flops_of(x), lambda: scaled(gc.qdata, ac.qdata.transpose(-2, -1), gc_scale, ac_scale))


def measure(
    cases: Sequence[Case],
    path: Path,
    precisions: Sequence[GroupedPrecision],
    *,
    compiled: bool = True,
    with_components: bool = True,
) -> Any:
    """The experiment's file, with peaks and components."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    content = run(cases, path, precisions, compiled=compiled)
    content |= {"peaks": measure_peaks(device), "components": []}
    for row in content["rows"]:
        peak = content["peaks"].get(f"{row['precision'].partition('_')[0]}_tflops")
        row["fraction_of_peak"] = round(row["tflops"] / peak, 4) if peak else None
    for case in cases if with_components else ():
        for precision in precisions:
            try:
                content["components"] += time_components(case, precision, device)
            except Exception as error:  # a kernel may fail in any way
                failed = {**vars(case), "precision": precision, "component": "all", "error": error_text(error)}
                content["components"].append(failed)
        write_json(path, content)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the next case's sizes do not fit into this one's blocks
    write_json(path, content)
    return content


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--shapes", nargs="*", help="M,N,K,G with even groups, or M,N,K,G,random or M,N,K,G,skewed")
    parser.add_argument("--precisions", nargs="*", choices=PRECISIONS, help="by default all that can be timed here")
    parser.add_argument("--quick", action="store_true", help="two shapes")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--no-components", action="store_true", help="leave out the kernels alone")
    given = parser.parse_args()
    try:
        cases = [parse_case(text) for text in given.shapes] if given.shapes else QUICK if given.quick else CASES
        how = {"compiled": not given.no_compile, "with_components": not given.no_components}
        precisions = given.precisions or [name for name in PRECISIONS if name == "bf16" or not why_not(name)]
        result = measure(cases, given.output, precisions, **how)
    except MoelabError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    failed = [row["error"] for row in result["components"] if row.get("error")]
    print(f"{len(result['rows'])} rows, {len(failed)} errors: {given.output}", *failed, sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
