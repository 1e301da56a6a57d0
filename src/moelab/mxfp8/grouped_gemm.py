"""The micro-experiment: grouped GEMMs of routed experts, forward and backward, BF16 against 8-bit precisions.

Each precision is timed as TorchTitan would run it: torchao's differentiable function, compiled, on operands that are
cast anew in every step. Emulation is not timed: it has the numerics of MXFP8 at more than the cost of BF16, so its time
says nothing about the format.

Times are medians, by CUDA events, of alternatives that take turns, A B A B …: a GPU that heats up or lowers its clock
does so for all of them. The GPU sleeps before each measurement, so that the host has queued the work when it starts and
its overhead is not measured. Beside whole steps, each kernel that torchao 0.18.0 calls inside its autograd functions
(``prototype/moe_training/fp8_grouped_mm.py`` and ``mxfp8_grouped_mm.py``) is timed by itself, so that a model can be
fitted to the parts. They are Triton, CUDA or CuTeDSL kernels, so there is nothing for ``torch.compile`` to fuse.

Two differences from torchao's own benchmark (``benchmarks/prototype/moe_training/benchmark_scaled_grouped_mm_dq.py``):
there is no loss and gradients are returned, not added to those of the step before. Both cost memory traffic that is the
same in all precisions and brings their ratio nearer to 1.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch

from moelab.errors import Refused
from moelab.files import write_json
from moelab.hardware import has_grouped_fp8
from moelab.machine import environment
from moelab.marks import Marks, interquartile_range
from moelab.mxfp8.grouped_gemm_cases import (
    PRECISIONS,
    ROW_BLOCK,
    SEED,
    Case,
    Direction,
    GroupedPrecision,
    group_sizes,
    require_divisible,
)
from moelab.mxfp8.grouped_gemm_results import SCHEMA
from moelab.mxfp8.kernels import why_not_native

WARM_UP, MIN_REPEATS, MAX_REPEATS, SECONDS_PER_CASE = 2, 8, 30, 0.8
COMPONENT_REPEATS = 8
PEAK_SIZE = 8192
"""Rows, columns and summed elements of the product that stands for a GPU's peak."""
PEAK_REPEATS = 12


# What can be timed


class NoKernels(Refused):
    """This machine has no kernels that compute a product in the precision, so its time would say nothing."""


def why_not(precision: GroupedPrecision) -> str | None:
    """What stands between this process and a true timing of a precision, or None."""
    if precision.startswith("mxfp8"):
        return why_not_native()
    if not torch.cuda.is_available():
        return "this process has no CUDA device"
    major, minor = torch.cuda.get_device_capability()
    if precision == "fp8" and not has_grouped_fp8(major):
        name = torch.cuda.get_device_name()
        return f"PyTorch's FP8 grouped GEMM is for SM90 and SM100, and {name} is SM{major}{minor}"
    return None


def require_kernels(precision: GroupedPrecision) -> None:
    """Refuse to time what this machine cannot run or would emulate: :class:`NoKernels` says what can be done here."""
    problem = why_not(precision)
    if problem is None:
        return
    emulated = " It would run emulated, which says nothing about its speed." if precision.startswith("mxfp8") else ""
    timeable = [name for name in ("bf16", "fp8", "mxfp8") if why_not(name) is None]
    instead = f"This machine can time {', '.join(timeable)}." if timeable else "Replay stored results instead."
    raise NoKernels(f"{precision} cannot be timed: {problem}.{emulated} {instead}")


# Times


class Spread(NamedTuple):
    """Median and interquartile range of ``n`` times, µs."""

    median_us: float
    iqr_us: float
    n: int

    def columns(self) -> dict[str, Any]:
        """As a row of the result has them."""
        return {"median_us": self.median_us, "iqr_us": self.iqr_us, "n_times": self.n}

    def tflops(self, operations: int, digits: int = 2) -> float:
        """TFLOP/s of so many multiplications and additions."""
        return round(operations / self.median_us / 1e6, digits)


Work = Callable[[Marks], None]
"""Something to time: it queues work and marks the end of each part."""
Name = TypeVar("Name", bound=str)


def interleaved(
    alternatives: Mapping[Name, Work], device: torch.device, *, repeats: int
) -> dict[Name, dict[str, Spread]]:
    """Time alternatives in turns, of which ``repeats``, at least 2, count; ``WARM_UP`` come before them.

    Returns:
        For each alternative, the spread of each part that it marks and of the ``total``.
    """
    times: dict[Name, dict[str, list[float]]] = {name: {} for name in alternatives}
    for turn in range(WARM_UP + repeats):
        for name, work in alternatives.items():
            clock = Marks(device)
            clock.start()
            work(clock)
            for part, us in {**clock.parts_us(), "total": clock.total_us()}.items():
                if turn >= WARM_UP:
                    times[name].setdefault(part, []).append(us)

    def spread(us: list[float]) -> Spread:
        return Spread(round(statistics.median(us), 3), round(interquartile_range(us), 3), len(us))

    return {name: {part: spread(us) for part, us in parts.items()} for name, parts in times.items()}


def time_alone(call: Callable[[], object], device: torch.device, *, repeats: int) -> Spread:
    """Time one call by itself."""

    def work(clock: Marks) -> None:
        call()
        clock.mark("work")

    return interleaved({"alone": work}, device, repeats=repeats)["alone"]["total"]


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
            peaks[f"{name}_tflops"] = time_alone(product, device, repeats=PEAK_REPEATS).tflops(2 * size**3, 3)
        except Exception as error:  # there are no kernels, or one fails, in any way
            peaks |= {f"{name}_tflops": None, f"{name}_error": _first_line(error)[:200]}
    return peaks


# Whole steps


@dataclass(frozen=True, kw_only=True)
class Operands:
    """Inputs of one grouped product, BF16: rows, weights, and the gradient of the output."""

    a_MK: torch.Tensor
    b_GNK: torch.Tensor
    grad_MN: torch.Tensor
    offsets_G: torch.Tensor  # int32, the row after each group's last

    @property
    def flops(self) -> int:
        """Of one of the three products, padded rows included."""
        return 2 * self.a_MK.numel() * self.b_GNK.shape[1]


def make_operands(case: Case, device: torch.device, *, block: int = 1) -> Operands:
    """Standard normal operands with the case's group sizes, padded to ``block`` rows each."""
    sizes = group_sizes(case, block=block)
    generator = torch.Generator(device).manual_seed(SEED)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.bfloat16)

    rows, offsets = sum(sizes), torch.tensor(sizes, device=device).cumsum(0).to(torch.int32)
    return Operands(
        a_MK=normal(rows, case.k),
        b_GNK=normal(case.groups, case.n, case.k),
        grad_MN=normal(rows, case.n),
        offsets_G=offsets,
    )


GroupedMM = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(M, K) rows, (G, N, K) weights and (G,) offsets to an (M, N) output."""


def product_of(precision: GroupedPrecision) -> GroupedMM:
    """The differentiable product of a precision: PyTorch's for BF16, torchao's for the others."""
    if precision == "bf16":
        return lambda a, b, offs: torch._grouped_mm(a, b.transpose(-2, -1), offs=offs)
    if precision == "fp8":
        from torchao.prototype.moe_training.fp8_grouped_mm import _to_fp8_rowwise_then_scaled_grouped_mm as fp8

        return lambda a, b, offs: fp8(a, b.transpose(-2, -1), offs, pad_token_groups_for_grouped_mm=False)
    from torchao.prototype.moe_training.mxfp8_grouped_mm import _to_mxfp8_then_scaled_grouped_mm as mxfp8

    high = precision == "mxfp8_wgrad_bf16"
    return lambda a, b, offs: mxfp8(a, b.transpose(-2, -1), offs, wgrad_with_hp=high)


def step(product: GroupedMM, operands: Operands) -> Work:
    """Forward and backward of a product as something to time."""
    a, b = operands.a_MK.detach().requires_grad_(), operands.b_GNK.detach().requires_grad_()

    def forward_and_backward(clock: Marks) -> None:
        output = product(a, b, operands.offsets_G)
        clock.mark("forward")
        torch.autograd.grad(output, (a, b), operands.grad_MN)
        clock.mark("backward")

    return forward_and_backward


def time_case(
    case: Case,
    precisions: Sequence[GroupedPrecision],
    device: torch.device,
    *,
    compiled: bool = True,
    failed: Callable[[GroupedPrecision, Exception], None],
) -> Iterator[dict[str, Any]]:
    """Time one case in several precisions that take turns, each padded to the rows that its kernels need.

    ``failed`` is called with a precision that does not run; the others are timed without it.

    Yields:
        A row for each precision and pass (``forward``, ``backward``, ``forward+backward``).
    """
    torch._dynamo.reset()  # or it would stop compiling after some shapes, and say so only in a log
    works: dict[GroupedPrecision, Work] = {}
    rows: dict[GroupedPrecision, int] = {}
    once_s = 0.0  # of one turn of all precisions
    for precision in precisions:
        operands = make_operands(case, device, block=ROW_BLOCK[precision])
        product = product_of(precision)
        # One graph for each shape, as fast as a compiler makes it.
        work = step(torch.compile(product, dynamic=False) if compiled else product, operands)
        try:
            once_s += interleaved({"once": work}, device, repeats=2)["once"]["total"].median_us / 1e6
        except Exception as error:  # a kernel may fail in any way
            failed(precision, error)
        else:
            works[precision], rows[precision] = work, operands.a_MK.shape[0]
    # The same number for all, so that they can take turns.
    repeats = min(MAX_REPEATS, max(MIN_REPEATS, int(SECONDS_PER_CASE / (once_s or 1))))
    for precision, parts in interleaved(works, device, repeats=repeats).items():
        for part, products in (("forward", 1), ("backward", 2), ("total", 3)):
            yield {
                **vars(case),
                "precision": precision,
                "padded_m": rows[precision],
                "pass": "forward+backward" if part == "total" else part,
                "compiled": compiled,
                **parts[part].columns(),
                "tflops": parts[part].tflops(products * case.flops),
            }


# Kernels alone


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
        spread = time_alone(part.call, device, repeats=COMPONENT_REPEATS)
        row = {**vars(case), "precision": precision, "component": part.name, "pass": part.direction}
        yield row | {"kind": part.kind, "size": part.size, **spread.columns()}


def components(operands: Operands, precision: GroupedPrecision) -> Iterator[Component]:
    """The kernels of one precision in the order in which a step runs them; later ones use what earlier ones made."""
    return {"bf16": _bf16, "fp8": _fp8}.get(precision, _mxfp8)(operands)


def _gemm(direction: Direction, flops: int, call: Callable[[], object]) -> Component:
    return Component("grouped GEMM", direction, "gemm", flops, call)


def _cast(name: str, direction: Direction, elements: int, call: Callable[[], object]) -> Component:
    # Two bytes are read and one is written; scales are not counted.
    return Component(name, direction, "quantise", 3 * elements, call)


def _scales(name: str, direction: Direction, call: Callable[[], object]) -> Component:
    return Component(f"scales of {name} into blocks", direction, "scales", 0, call)


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


# The result's file


def run(
    cases: Sequence[Case],
    path: Path,
    *,
    precisions: Sequence[GroupedPrecision] | None = None,
    budget_s: float = 220,
    compiled: bool = True,
    with_components: bool = True,
) -> dict[str, Any]:
    """Measure all cases on this GPU; the file is written anew after each, so one that fails costs nothing but itself.

    Args:
        cases: in the order of importance.
        path: of the JSON file.
        precisions: by default BF16 and all that this GPU has kernels for; one that is asked for must be possible.
        budget_s: no case is begun after it.
        compiled: through ``torch.compile``.
        with_components: time the kernels alone, too.

    Raises:
        BadInput: for dimensions that the kernels cannot take.
        NoKernels: where a precision that was asked for, or BF16, cannot be timed.

    Returns:
        What the file has.
    """
    began, device = time.monotonic(), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # Also into the file: a reader sees why a precision has no rows.
    refused = {name: problem for name in PRECISIONS if (problem := why_not(name))}
    possible: list[GroupedPrecision] = [name for name in PRECISIONS if name not in refused] or ["bf16"]
    chosen = list(precisions or possible)
    for case, precision in itertools.product(cases, chosen):
        require_divisible(case, precision)
    for precision in chosen:
        require_kernels(precision)
    here = environment()
    content: dict[str, Any] = {
        "schema": SCHEMA,
        "label": "measured" if device.type == "cuda" else "dry run",
        "what": "grouped GEMM of routed experts, forward and backward",
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "hardware": _hardware(device, here),
        "versions": here["packages"],
        "refused": refused,
        "peaks": measure_peaks(device),
        "rows": [],
        "components": [],
        "errors": [],
    }
    _say(f"{content['hardware']['gpu']}: {content['peaks']}")

    def failed(case: Case, what: str, error: Exception) -> None:
        text = f"{type(error).__name__}: {_first_line(error)}"
        content["errors"].append({**vars(case), "what": what, "error": text})
        _say(f"  {what} failed: {text}")

    for case in cases:
        if time.monotonic() - began > budget_s:
            failed(case, "all", TimeoutError(f"not started: the budget of {budget_s:.0f} s was used up"))
            continue
        _say(case.name)
        for row in time_case(case, chosen, device, compiled=compiled, failed=functools.partial(failed, case)):
            peak = content["peaks"].get(f"{row['precision'].partition('_')[0]}_tflops")
            content["rows"].append({**row, "fraction_of_peak": round(row["tflops"] / peak, 4) if peak else None})
            rate = f"{row['median_us']:>10.1f} µs {row['tflops']:>7.1f} TFLOP/s"
            _say(f"  {row['precision']:>16} {row['pass']:<17} {rate}")
        write_json(path, content)  # what follows may take the process with it
        for precision in chosen if with_components else ():
            try:
                content["components"] += time_components(case, precision, device)
            except Exception as error:  # a kernel may fail in any way
                failed(case, f"components of {precision}", error)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the next case's sizes do not fit into this one's blocks
        write_json(path, content)
        _say(f"  {time.monotonic() - began:.0f} s")
    content["wall_s"] = round(time.monotonic() - began, 1)
    write_json(path, content)
    return content


def _hardware(device: torch.device, here: dict[str, Any]) -> dict[str, Any]:
    if device.type != "cuda":
        return {"gpu": None, "processor": here["processor"]}
    properties = torch.cuda.get_device_properties(device)
    drivers = [gpu["driver"] for gpu in here["gpus"]]
    return {
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "sm_count": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 2),
        "driver": drivers[0] if drivers else None,
    }


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def _say(text: str) -> None:
    """A line of progress, on stderr."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201
