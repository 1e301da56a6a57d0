"""Times grouped GEMMs of routed experts, forward and backward: BF16 against 8-bit precisions, on this GPU.

Each precision is timed as TorchTitan would run it: torchao's differentiable function, compiled, on operands that are
cast anew in every step. Emulation is not timed: it has the numerics of MXFP8 at more than the cost of BF16, so its time
says nothing about the format.

Times are medians of precisions that take turns, A B A B …: a GPU that heats up or lowers its clock does so for all of
them. Two differences from torchao's own benchmark (``benchmarks/prototype/moe_training/
benchmark_scaled_grouped_mm_dq.py``): there is no loss, and gradients are returned, not added to those of the step
before. Both cost memory traffic that is the same in all precisions and brings their ratio nearer to 1.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from moelab.errors import BadInput, Refused
from moelab.files import write_json
from moelab.hardware import has_grouped_fp8
from moelab.machine import environment
from moelab.micro.clock import Marks, median_and_iqr
from moelab.micro.grouped_gemm import FEATURE_BLOCK, ROW_BLOCK, SCHEMA, SEED, Case, GroupedPrecision, group_sizes
from moelab.mxfp8.kernels import why_not_native

WARM_UP, REPEATS = 2, 20
Name = TypeVar("Name", bound=str)


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


def require_divisible(case: Case, precision: GroupedPrecision) -> None:
    """Refuse dimensions that the kernels of a precision cannot take: :class:`BadInput` names the nearest valid one."""
    block = FEATURE_BLOCK[precision]
    # N counts as K does: backward sums over it.
    for name, value in (("k", case.k), ("n", case.n)):
        if value % block:
            nearest = max(1, round(value / block)) * block
            raise BadInput(f"{name} is {value}: {precision} needs a multiple of {block}, the nearest is {nearest}")


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


def step(product: GroupedMM, operands: Operands) -> tuple[torch.Tensor, ...]:
    """Forward and backward: the output and the gradients of rows and weights."""
    a, b = operands.a_MK.detach().requires_grad_(), operands.b_GNK.detach().requires_grad_()
    output = product(a, b, operands.offsets_G)
    return output, *torch.autograd.grad(output, (a, b), operands.grad_MN)


def take_turns(
    works: Mapping[Name, Callable[[], object]], device: torch.device, *, repeats: int = REPEATS
) -> dict[Name, list[float]]:
    """Microseconds of each work in ``repeats`` turns of all of them, after ``WARM_UP`` more."""
    times_us: dict[Name, list[float]] = {name: [] for name in works}
    clock = Marks(device)
    for turn in range(WARM_UP + repeats):
        for name, work in works.items():
            clock.start()
            work()
            clock.mark(name)
            if turn >= WARM_UP:
                times_us[name].append(clock.parts_us()[name])
    return times_us


def time_case(
    case: Case, precisions: Sequence[GroupedPrecision], device: torch.device, *, compiled: bool = True
) -> list[dict[str, Any]]:
    """Time one case in several precisions, each padded to the rows that its kernels need; a row for each."""
    torch._dynamo.reset()  # or it would stop compiling after some shapes, and say so only in a log
    works: dict[GroupedPrecision, Callable[[], object]] = {}
    for precision in precisions:
        product, operands = product_of(precision), make_operands(case, device, block=ROW_BLOCK[precision])
        # One graph for each shape, as fast as a compiler makes it.
        works[precision] = partial(step, torch.compile(product, dynamic=False) if compiled else product, operands)
    rows = []
    for precision, times_us in take_turns(works, device).items():
        median_us, iqr_us = median_and_iqr(times_us)
        rows.append(
            {
                **vars(case),
                "precision": precision,
                "padded_m": sum(group_sizes(case, block=ROW_BLOCK[precision])),
                "pass": "forward+backward",
                "compiled": compiled,
                "median_us": round(median_us, 3),
                "iqr_us": round(iqr_us, 3),
                "n_times": len(times_us),
                "tflops": round(6 * case.m * case.n * case.k / median_us / 1e6, 2),
            }
        )
    return rows


def run(
    cases: Sequence[Case], path: Path, precisions: Sequence[GroupedPrecision], *, compiled: bool = True
) -> dict[str, Any]:
    """Measure all cases on this GPU, and write the file after each; returns what it has.

    :class:`BadInput` for dimensions that the kernels cannot take, :class:`NoKernels` for a precision that cannot be
    timed here.
    """
    for case, precision in itertools.product(cases, precisions):
        require_divisible(case, precision)
    for precision in precisions:
        require_kernels(precision)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    content: dict[str, Any] = {
        "schema": SCHEMA,
        "label": "measured" if device.type == "cuda" else "dry run",
        "what": "grouped GEMM of routed experts, forward and backward",
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "hardware": {"gpu": torch.cuda.get_device_name() if device.type == "cuda" else None},
        "versions": environment()["packages"],
        "rows": [],
    }
    for case in cases:
        print(case.name, file=sys.stderr, flush=True)  # noqa: T201
        content["rows"] += time_case(case, precisions, device, compiled=compiled)
        write_json(path, content)
    return content
