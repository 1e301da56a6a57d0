"""The micro-experiment: grouped GEMMs of routed experts, forward and backward, BF16 against 8-bit precisions.

Each precision is timed as TorchTitan would run it: torchao's differentiable function, compiled, on operands that are
cast anew in every step. Times are CUDA-event medians of precisions that take turns. What would run emulated is refused:
emulated MXFP8 has the numerics of MXFP8 at more than the cost of BF16, so its time says nothing about the format.

Two differences from torchao's own benchmark (``benchmarks/prototype/moe_training/benchmark_scaled_grouped_mm_dq.py``):
there is no loss and gradients are returned, not added to those of the step before. Both cost memory traffic that is the
same in all precisions and brings their ratio nearer to 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from moelab.errors import Refused
from moelab.hardware import has_grouped_fp8
from moelab.mxfp8.grouped_gemm_cases import ROW_BLOCK, SEED, Case, Precision, group_sizes
from moelab.mxfp8.grouped_gemm_components import Operands, components
from moelab.mxfp8.kernels import why_not_native
from moelab.mxfp8.timing import Clock, Spread, Work, interleaved, time_alone

COMPONENT_REPEATS = 8
MIN_REPEATS, MAX_REPEATS, SECONDS_PER_CASE = 8, 30, 0.8

GroupedMM = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(M, K) rows, (G, N, K) weights and (G,) offsets to an (M, N) output."""


class NoKernels(Refused):
    """This machine has no kernels that compute a product in the precision, so its time would say nothing."""


def why_not(precision: Precision) -> str | None:
    """What stands between this process and a true timing of a precision, or None."""
    if not torch.cuda.is_available():
        return "this process has no CUDA device"
    major, minor = torch.cuda.get_device_capability()
    if precision == "bf16":
        return None
    if precision == "fp8":
        if has_grouped_fp8(major):
            return None
        return (
            f"PyTorch's FP8 grouped GEMM is for SM90 and SM100, and {torch.cuda.get_device_name()} is SM{major}{minor}"
        )
    return why_not_native()


def require_kernels(precision: Precision) -> None:
    """Refuse to time what this machine cannot run or would emulate.

    Raises:
        NoKernels: saying what is missing, and what can be done here.
    """
    problem = why_not(precision)
    if problem is None:
        return
    emulated = " It would run emulated, which says nothing about its speed." if precision.startswith("mxfp8") else ""
    timeable = [name for name in ("bf16", "fp8", "mxfp8") if why_not(name) is None]
    instead = f"Here can be timed: {', '.join(timeable)}." if timeable else "Stored results can be replayed instead."
    raise NoKernels(f"{precision} cannot be timed: {problem}.{emulated} {instead}")


def make_operands(case: Case, device: torch.device, *, block: int = 1, seed: int = SEED) -> Operands:
    """Standard normal operands with the case's group sizes, padded to ``block`` rows each."""
    sizes = group_sizes(case, block=block, seed=seed)
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.bfloat16)

    rows, offsets = sum(sizes), torch.tensor(sizes, device=device).cumsum(0).to(torch.int32)
    return Operands(
        a_MK=normal(rows, case.k),
        b_GNK=normal(case.groups, case.n, case.k),
        grad_MN=normal(rows, case.n),
        offsets_G=offsets,
    )


def grouped_mm(precision: Precision) -> GroupedMM:
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

    def forward_and_backward(clock: Clock) -> None:
        output = product(a, b, operands.offsets_G)
        clock.mark("forward")
        torch.autograd.grad(output, (a, b), operands.grad_MN)
        clock.mark("backward")

    return forward_and_backward


def time_case(
    case: Case,
    precisions: Sequence[Precision],
    device: torch.device,
    *,
    compiled: bool = True,
    failed: Callable[[Precision, Exception], None],
) -> Iterator[dict[str, Any]]:
    """Time one case in several precisions that take turns.

    Args:
        case: what to multiply.
        precisions: in which; each is padded to the rows that its kernels need.
        device: where.
        compiled: through ``torch.compile``, as in training.
        failed: is told of a precision that does not run; the others are timed without it.

    Yields:
        A row for each precision and pass (``forward``, ``backward``, ``forward+backward``).
    """
    torch._dynamo.reset()  # or it would stop to compile after some shapes, and say so in a log only
    works: dict[Precision, Work] = {}
    rows: dict[Precision, int] = {}
    once_s = 0.0
    for precision in precisions:
        operands = make_operands(case, device, block=ROW_BLOCK[precision])
        product = grouped_mm(precision)
        work = step(torch.compile(product, dynamic=False) if compiled else product, operands)
        try:
            once_s += interleaved({"once": work}, device, repeats=2)["once"]["total"].median_us / 1e6
        except Exception as error:  # a kernel may fail in any way
            failed(precision, error)
        else:
            works[precision], rows[precision] = work, operands.a_MK.shape[0]
    repeats = min(MAX_REPEATS, max(MIN_REPEATS, int(SECONDS_PER_CASE / (once_s or 1))))
    for precision, parts in interleaved(works, device, repeats=repeats).items():
        for part, products in (("forward", 1), ("backward", 2), ("total", 3)):
            yield {
                **describe(case),
                "precision": precision,
                "padded_m": rows[precision],
                "pass": "forward+backward" if part == "total" else part,
                "compiled": compiled,
                **_rate(parts[part], products * case.flops),
            }


def time_components(case: Case, precision: Precision, device: torch.device) -> Iterator[dict[str, Any]]:
    """Time each kernel of a precision by itself.

    Yields:
        A row for each component, with ``gb_s`` of a cast or ``tflops`` of a GEMM.
    """
    operands = make_operands(case, device, block=ROW_BLOCK[precision])
    for part in components(operands, precision):
        spread = time_alone(part.call, device, repeats=COMPONENT_REPEATS)
        row = {**describe(case), "precision": precision, "component": part.name, "pass": part.direction}
        row |= {"kind": part.kind, "size": part.size}
        if part.kind == "gemm":
            yield row | _rate(spread, part.size)
        else:
            gb_s = round(part.size / spread.median_us / 1e3, 1) if part.size else None
            yield row | {**_spread(spread), "gb_s": gb_s}


def describe(case: Case) -> dict[str, Any]:
    """The columns of a case."""
    return {"m": case.m, "n": case.n, "k": case.k, "groups": case.groups, "sizes": case.sizes}


def _spread(spread: Spread) -> dict[str, Any]:
    return {"median_us": spread.median_us, "iqr_us": spread.iqr_us, "n_times": spread.n}


def _rate(spread: Spread, flops: int) -> dict[str, Any]:
    return {**_spread(spread), "tflops": round(flops / spread.median_us / 1e6, 2)}
