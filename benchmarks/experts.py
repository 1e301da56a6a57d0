"""Quantised experts and attention on one GPU, outside of a step: kernels' bits and times, a layer, attention.

    python benchmarks/experts.py --output benchmarks/results/experts_h200.json     # under five minutes on an H200
    python benchmarks/experts.py --output dry.json --dry                           # tiny, on a CPU: shows that it runs

Parts, each written as it is found; one that fails is an error in the file and costs only itself:

- ``bits``: each Triton kernel of :mod:`moelab.mxfp8.experts` against its definition in PyTorch, with rows of
  zeros, a NaN and an infinity among them: the share of values that differ and the largest difference;
- ``kernels``: their milliseconds, and GB/s of what each must read and write once;
- ``layer``: forward and backward of the three products of eight experts at 671B's sizes, compiled, in turns: BF16,
  moelab's FP8, and the same with weight gradients in FP8. Beside it the error of the output and of each gradient, as
  the norm of its difference to BF16's relative to that norm;
- ``attention``: FlexAttention of 128 heads of 192 and 128 features by tiles and flash-attn-4, under a causal mask and
  one of documents.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import silu

from moelab.files import write_json
from moelab.machine import environment
from moelab.mxfp8 import experts, operators
from moelab.mxfp8.quantise import Precision8, quantise, quantise_fp8
from moelab.planning.measured import DRY_RUN
from moelab.titan.models import FLASH_BLOCKS, FLEX_TILES

Row = dict[str, Any]
DOCUMENT_TOKENS = 1500
NAMES = ("output", "rows", "w1", "w3", "w2", "scores")


LARGE = SimpleNamespace(rows=65_536, dim=7168, hidden=2048, groups=8, heads=128, keys=4096, turns=12)
"""Rows of ``groups`` experts of ``hidden`` by ``dim``; sequences of ``keys`` tokens with ``heads``; timed turns."""
TINY = SimpleNamespace(rows=256, dim=128, hidden=64, groups=2, heads=2, keys=256, turns=2)


def drawn(*shape: int) -> Tensor:
    """BF16 values of a normal distribution."""
    return torch.randn(*shape).bfloat16()


def times_ms(functions: Mapping[str, Callable[[], Any]], turns: int) -> dict[str, float]:
    """Median milliseconds of each, in turns; a kernel before it hides its launch. On a CPU each runs once, for 0 ms."""
    if not torch.cuda.is_available():
        return {name: 0.0 for name, function in functions.items() if function() is not None}
    taken = {name: list[float]() for name in functions}
    for turn in range(turns + 3):
        for name, function in functions.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            torch.cuda._sleep(2_000_000)
            begin.record()
            function()
            end.record()
            torch.cuda.synchronize()
            if turn >= 3:
                taken[name].append(begin.elapsed_time(end))
    return {name: round(statistics.median(all_ms), 4) for name, all_ms in taken.items()}


def bits(sizes: SimpleNamespace) -> Iterator[Row]:
    """Every kernel at sizes that no tile divides."""
    formats: tuple[Precision8, ...] = ("fp8", "mxfp8")
    cases: dict[str, tuple[str, Any, Any]] = {}
    for precision, hidden, scored in itertools.product(formats, (2048, 1408), (False, True)):
        gate_up, grad, scores = drawn(513, 2 * hidden), drawn(513, hidden), torch.rand(513) if scored else None
        gate_up[3], grad[3], gate_up[5, 7], grad[6, 1] = 0, 0, torch.nan, torch.inf
        name = f"{precision}, F {hidden}, {'scores' if scored else 'no scores'}"
        found: Any = operators.quantised_swiglu(gate_up, scores, precision)
        cases[f"swiglu, {name}"] = ("data scales", found, quantise(operators.swiglu(gate_up, scores), precision))
        found = operators.quantised_swiglu_backward(gate_up, grad, scores, precision)
        wide, h, scores_grad = operators.swiglu_backward(gate_up, grad, scores)
        expected = (wide, *quantise(wide, precision), h, scores_grad)
        cases[f"swiglu_backward, {name}"] = ("grad data scales hidden scores", found, expected)
    x, weights = drawn(333, sizes.dim), [drawn(3, 700, 1000), 3 * drawn(3, 400, 1000)]
    x[1], x[2, 5], x[4, 6] = 0, torch.nan, torch.inf
    for name, found, wide in (
        ("fp8_rows", operators.fp8_rows(x), x),
        ("fp8_weights", operators.fp8_weights(weights, False), torch.cat(weights, 1)),
        ("fp8_weights, transposed", operators.fp8_weights(weights, True), torch.cat(weights, 1).mT.contiguous()),
    ):
        data, scales = quantise_fp8(wide)
        cases[name] = ("data scales", found, (data, scales[..., 0]))
    ends = torch.tensor([2048, 0, 512, 16, 1520]).cumsum(0).int()
    x, factors = drawn(int(ends[-1]), 1000), 2.0 ** torch.randint(-4, 4, (int(ends[-1]),)).float()
    expected = operators.fp8_turned(x.cpu(), factors.cpu(), ends.cpu())
    cases["fp8_turned"] = ("data factors", operators.fp8_turned(x, factors, ends), expected)
    data = drawn(777, 1000).to(torch.float8_e4m3fn)
    cases["turned"] = ("data", [operators.turned(data)], [data.t().contiguous()])
    for kernel, (names, found, expected) in cases.items():
        for name, one, other in zip(names.split(), found, expected, strict=True):
            if one.numel():
                ours, theirs = one.float().cpu(), other.float().cpu()
                share = ((ours != theirs) & ~(ours.isnan() & theirs.isnan())).float().mean().item()
                largest = (ours - theirs).abs().nan_to_num().max().item()
                yield {
                    "part": "bits",
                    "kernel": kernel,
                    "result": name,
                    "differing": share,
                    "largest_difference": largest,
                }


def kernels(sizes: SimpleNamespace) -> Iterator[Row]:
    """Times at the layer's sizes."""
    R, D, F, e = sizes.rows, sizes.dim, sizes.hidden, sizes.groups
    gate_up, grad, x, scores = drawn(R, 2 * F), drawn(R, F), drawn(R, D), torch.rand(R)
    weights = [drawn(e, F, D), drawn(e, F, D)]
    ends, data = torch.arange(1, e + 1).int() * (R // e), x.to(torch.float8_e4m3fn)
    cases: dict[str, tuple[Callable[[], Any], int]] = {
        "swiglu": (lambda: operators.quantised_swiglu(gate_up, scores, "fp8"), 5 * R * F),
        "swiglu_backward": (lambda: operators.quantised_swiglu_backward(gate_up, grad, scores, "fp8"), 14 * R * F),
        "fp8_rows": (lambda: operators.fp8_rows(x), 3 * R * D),
        "fp8_weights, w1 and w3": (lambda: operators.fp8_weights(weights, False), 6 * e * F * D),
        "fp8_weights, transposed": (lambda: operators.fp8_weights(weights, True), 10 * e * F * D),
        "fp8_turned, 2F": (lambda: operators.fp8_turned(gate_up, scores, ends), 10 * R * F),
        "turned, D": (lambda: operators.turned(data), 2 * R * D),
    }
    taken = times_ms({name: function for name, (function, _) in cases.items()}, sizes.turns)
    for name, ms in taken.items():
        yield {"part": "kernels", "kernel": name, "ms": ms, "gb_s": ms and round(cases[name][1] / ms / 1e6)}


def layer(sizes: SimpleNamespace) -> Iterator[Row]:
    """Forward and backward, and errors against BF16."""
    R, D, F, e = sizes.rows, sizes.dim, sizes.hidden, sizes.groups
    x, scores, upstream = drawn(R, D), torch.rand(R).requires_grad_(), drawn(R, D)
    ends = torch.arange(1, e + 1).int() * (R // e)
    weights = [(drawn(e, *shape) / shape[1] ** 0.5).requires_grad_() for shape in ((F, D), (F, D), (D, F))]
    data, scales = quantise(x, "fp8")
    where = experts.place(x, R).requires_grad_()

    def bf16(x: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, scores: Tensor) -> Tensor:
        gate, up = (torch._grouped_mm(x, weight.mT, offs=ends) for weight in (w1, w3))
        return torch._grouped_mm(operators.times_scores(silu(gate) * up, scores), w2.mT, offs=ends)

    def one_pass(arithmetic: str) -> Callable[..., Tensor]:
        return lambda x, w1, w3, w2, scores: experts.expert_rows(
            experts.QuantisedRows(x, data, scales), w1, w3, w2, ends, scores, arithmetic
        )

    results, functions, fp8 = {}, {}, {"fp8": one_pass("fp8"), "fp8, wgrad fp8": one_pass("fp8_wgrad_fp8")}
    for name, function in {"bf16": bf16, **fp8}.items():
        rows = where if name in fp8 else x.clone().requires_grad_()
        compiled, inputs = torch.compile(function, fullgraph=True), (rows, *weights, scores)
        functions[name] = lambda run=compiled, inputs=inputs: torch.autograd.grad(run(*inputs), inputs, upstream)
        results[name] = [compiled(*inputs).detach(), *functions[name]()]
    errors = {
        name: {
            what: round(float((one.float() - other.float()).norm() / other.float().norm()), 5)
            for what, one, other in zip(NAMES, found, results["bf16"], strict=True)
        }
        for name, found in results.items()
        if name != "bf16"
    }
    results.clear()
    yield {"part": "layer", "rows": R, "ms": times_ms(functions, sizes.turns), "error": errors}


def attention(sizes: SimpleNamespace) -> Iterator[Row]:
    """PyTorch's own tiles, moelab's, and flash-attn-4's kernels where they are installed."""
    batch, keys = 2, sizes.keys
    inputs = [drawn(batch, keys, sizes.heads, width).transpose(1, 2).requires_grad_() for width in (192, 192, 128)]
    upstream = drawn(batch, sizes.heads, keys, 128)
    document = (torch.rand(batch, keys) < 1 / DOCUMENT_TOKENS).cumsum(1)
    masks: dict[str, Callable[..., Tensor]] = {
        "causal": lambda b, h, i, j: i >= j,
        "documents": lambda b, h, i, j: (i >= j) & (document[b, i] == document[b, j]),
    }
    for mask, allowed in masks.items():
        for tiles, options, blocks in (
            ("default", {}, 128),
            ("flex_tiles", FLEX_TILES, 128),
            *([("flex_flash", {"BACKEND": "FLASH"}, FLASH_BLOCKS)] if find_spec("flash_attn") else []),
        ):
            torch.compiler.reset()
            block_mask = create_block_mask(allowed, batch, None, keys, keys, device=upstream.device, BLOCK_SIZE=blocks)
            compiled: Any = torch.compile(flex_attention)

            def forward(run: Any = compiled, block_mask: Any = block_mask, options: Any = options) -> Any:
                return run(*inputs, block_mask=block_mask, kernel_options=options)

            output = forward()
            both = {
                "forward": forward,
                "backward": lambda output=output: torch.autograd.grad(output, inputs, upstream, retain_graph=True),
            }
            yield {"part": "attention", "tiles": tiles, "mask": mask, "ms": times_ms(both, sizes.turns // 2)}


def main() -> None:
    """Each part, written as it is found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument(
        "--dry", action="store_true", help="tiny, on a CPU, which has no backward of attention: shows that it runs"
    )
    given = parser.parse_args()
    if not given.dry:
        torch.set_default_device("cuda")
    sizes = TINY if given.dry else LARGE
    content: Row = {"label": DRY_RUN if given.dry else "measured", "date": datetime.now(UTC).isoformat()}
    content |= {"environment": environment(), "rows": [], "errors": []}
    for name in given.parts:
        torch.manual_seed(0)
        try:
            for row in PARTS[name](sizes):
                content["rows"].append(row)
                print(row, flush=True)
        except Exception as error:  # other parts go on
            content["errors"].append({"part": name, "error": f"{type(error).__name__}: {error}"[:600]})
            print(content["errors"][-1], flush=True)
        write_json(given.output, content)


PARTS = {part.__name__: part for part in (bits, kernels, layer, attention)}

if __name__ == "__main__":
    main()
