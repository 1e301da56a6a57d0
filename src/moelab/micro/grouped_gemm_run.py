"""Times grouped GEMMs of routed experts, forward and backward: BF16 against 8-bit precisions, on this GPU.

Each precision is timed as TorchTitan would run it: torchao's differentiable function, compiled, on operands that are
cast anew in every step. Emulation is not timed: it has the numerics of MXFP8 at more than the cost of BF16, so its time
says nothing about the format.

Times are medians of alternatives that take turns, A B A B …: a GPU that heats up or lowers its clock does so for all of
them. Two differences from torchao's own benchmark (``benchmarks/prototype/moe_training/
benchmark_scaled_grouped_mm_dq.py``): there is no loss, and gradients are returned, not added to those of the step
before. Both cost memory traffic that is the same in all precisions and brings their ratio nearer to 1.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from moelab.errors import Refused
from moelab.files import write_json
from moelab.hardware import has_grouped_fp8
from moelab.machine import environment
from moelab.micro.clock import Marks, interquartile_range
from moelab.micro.grouped_gemm import (
    PRECISIONS,
    ROW_BLOCK,
    SCHEMA,
    SEED,
    Case,
    GroupedPrecision,
    group_sizes,
    require_divisible,
)
from moelab.mxfp8.kernels import why_not_native

WARM_UP, MIN_REPEATS, MAX_REPEATS, SECONDS_PER_CASE = 2, 8, 30, 0.8


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

    def columns(self, flops: int) -> dict[str, Any]:
        """As a row of the result has them, with the rate of so many operations."""
        tflops = round(flops / self.median_us / 1e6, 2)
        return {"median_us": self.median_us, "iqr_us": self.iqr_us, "n_times": self.n, "tflops": tflops}


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


# Whole steps


@dataclass(frozen=True, kw_only=True)
class Operands:
    """Inputs of one grouped product, BF16: rows, weights, and the gradient of the output."""

    a_MK: torch.Tensor
    b_GNK: torch.Tensor
    grad_MN: torch.Tensor
    offsets_G: torch.Tensor  # int32, the row after each group's last


def make_operands(case: Case, device: torch.device, *, block: int = 1) -> Operands:
    """Standard normal operands with the case's group sizes, padded to ``block`` rows each."""
    sizes = group_sizes(case, block=block)
    generator = torch.Generator(device).manual_seed(SEED)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.bfloat16)

    return Operands(
        a_MK=normal(sum(sizes), case.k),
        b_GNK=normal(case.groups, case.n, case.k),
        grad_MN=normal(sum(sizes), case.n),
        offsets_G=torch.tensor(sizes, device=device).cumsum(0).to(torch.int32),
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

    in_bf16 = precision == "mxfp8_wgrad_bf16"
    return lambda a, b, offs: mxfp8(a, b.transpose(-2, -1), offs, wgrad_with_hp=in_bf16)


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
    case: Case, precisions: Sequence[GroupedPrecision], device: torch.device, *, compiled: bool = True
) -> Iterator[dict[str, Any]]:
    """Time one case in several precisions that take turns, each padded to the rows that its kernels need.

    Yields:
        A row for each precision and pass (``forward``, ``backward``, ``forward+backward``); of a precision that does
        not run one row with its ``error``, and the others are timed without it.
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
            yield {**vars(case), "precision": precision, "error": error_text(error)}
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
                **parts[part].columns(products * case.flops),
            }


def error_text(error: Exception) -> str:
    """An exception's type and first line."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def run(
    cases: Sequence[Case], path: Path, *, precisions: Sequence[GroupedPrecision] | None = None, compiled: bool = True
) -> dict[str, Any]:
    """Measure all cases on this GPU, and write the file anew after each, so that one that crashes costs but itself.

    ``precisions`` are by default BF16 and all that this GPU has kernels for; one that is asked for must be possible.

    Raises:
        BadInput: for dimensions that the kernels cannot take.
        NoKernels: where a precision that was asked for, or BF16, cannot be timed.

    Returns:
        What the file has.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen = list(precisions or [name for name in PRECISIONS if name == "bf16" or not why_not(name)])
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
        "hardware": {"gpu": torch.cuda.get_device_name() if device.type == "cuda" else None},
        "versions": here["packages"],
        "rows": [],
    }
    for case in cases:
        for row in time_case(case, chosen, device, compiled=compiled):
            content["rows"].append(row)
            what = row.get("error") or f"{row['pass']:<17} {row['median_us']:>10.1f} µs {row['tflops']:>7.1f} TFLOP/s"
            print(f"{case.name}: {row['precision']:>16} {what}", file=sys.stderr, flush=True)  # noqa: T201
        write_json(path, content)
    return content
