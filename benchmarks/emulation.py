"""Hold the emulated MXFP8 grouped GEMM against torchao's, to the bit, and time it beside torchao's and BF16.

    python benchmarks/emulation.py --device cuda --output benchmarks/results/emulation_h100.json     # under 90 s
    python benchmarks/emulation.py --device cpu --output benchmarks/results/emulation_cpu.json

Parts, each written as it is found:

- ``casts``: every BF16 number as the largest of a block, and numbers of all kinds, against torchao's cast;
- ``identity``: output, dgrad and wgrad against torchao's over many group patterns and at real shapes, eager, and once
  compiled;
- ``cast_speed`` (CUDA): bytes a second of each cast over the tile sizes of the Triton kernel, and of a copy;
- ``layer``: forward and backward of an expert layer (w1, w3, SwiGLU, w2) in BF16, with torchao's emulation and with
  ours, in turns (A B C A B C), compiled with a dynamic number of tokens as in training, and eager.

Emulation is slower than BF16 by construction: the ratios say what it costs, not what MXFP8 gains.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchao.prototype.moe_training.mxfp8_grouped_mm import _to_mxfp8_then_scaled_grouped_mm
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx
from torchao.quantization.quantize_.common import KernelPreference
from torchtitan.components.quantization.mx import _get_mxfp8_grouped_experts_cls
from torchtitan.models.common.moe import GroupedExperts

from moelab.machine import environment
from moelab.micro.clock import Marks
from moelab.mxfp8.converter import MXFP8Experts, op_config
from moelab.mxfp8.experts import grouped_mm
from moelab.mxfp8.quantise import fake_quantise_columns, fake_quantise_rows

RCEIL = ScaleCalculationMode.RCEIL
E4M3 = torch.float8_e4m3fn
WHOLE = [[64, 0, 32, 128], [32], [0, 0, 96], [0, 32, 0, 32, 0, 480], [2048] * 8]
RAGGED = [[37, 0, 1, 64, 26], [1], [0, 0, 5], [1, 1, 1, 1], [100, 200, 3, 0, 0, 7], [31, 33, 32, 0]]
TILES = [(64, 64, 4), (64, 64, 8), (64, 128, 8), (128, 64, 4), (128, 128, 8)]
STRETCHES = [(128, 32, 4), (256, 32, 4), (512, 32, 8)]


@dataclass(frozen=True, kw_only=True)
class Scale:
    """What is run on a device: dimensions of the expert layer, tokens of each row, and turns."""

    dim: int
    hidden: int
    experts: int
    tokens: tuple[int, ...]
    eager_tokens: tuple[int, ...]
    turns: int


SCALES = {
    "cuda": Scale(
        dim=7168, hidden=2048, experts=8, tokens=(131072, 65536, 32768, 16384), eager_tokens=(32768,), turns=7
    ),
    "cpu": Scale(dim=128, hidden=128, experts=4, tokens=(2048,), eager_tokens=(2048,), turns=15),
}


class Result:
    """The JSON file, rewritten after every row."""

    def __init__(self, path: Path, device: torch.device, budget_s: float) -> None:
        self.path, self.begun, self.budget_s = path, time.perf_counter(), budget_s
        self.content: dict[str, Any] = {
            "label": "measured",
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
            "device": torch.cuda.get_device_name() if device.type == "cuda" else environment()["processor"],
            "environment": environment(),
            "errors": [],
        }

    def add(self, part: str, row: dict[str, Any]) -> None:
        self.content.setdefault(part, []).append(row)
        self.content["wall_s"] = round(time.perf_counter() - self.begun, 1)
        self.path.write_text(json.dumps(self.content, indent=1) + "\n")
        shown = {key: value for key, value in row.items() if not key.endswith("_us") and key != "raw"}
        print(f"{self.content['wall_s']:6.1f} s  {part}: {json.dumps(shown)}", flush=True)

    def each(self, part: str, rows: Iterator[dict[str, Any]]) -> None:
        """Add what a part finds; what goes wrong in it is recorded and ends the part alone."""
        try:
            for row in rows:
                self.add(part, row)
                if time.perf_counter() - self.begun > self.budget_s:
                    self.add("errors", {"part": part, "error": f"stopped after {self.budget_s} s"})
                    return
        except Exception as error:  # the other parts are worth having
            self.add("errors", {"part": part, "error": f"{type(error).__name__}: {error}"[:500]})


def same_bits(ours: torch.Tensor, reference: torch.Tensor) -> bool:
    """Equal bit for bit, the sign of zeros included; of a NaN only that it is one."""
    numbers = ~reference.isnan()
    if ours.shape != reference.shape or not torch.equal(ours.isnan(), ~numbers):
        return False
    return torch.equal(ours.view(torch.int16).where(numbers, 0), reference.view(torch.int16).where(numbers, 0))


def torchao_cast(x: torch.Tensor) -> torch.Tensor:
    scale, data = to_mx(x.contiguous(), E4M3, 32, RCEIL)
    blocks = data.unflatten(-1, (-1, 32)).to(torch.bfloat16) * scale.unsqueeze(-1).to(torch.bfloat16)
    return blocks.flatten(-2)


def casts(device: torch.device) -> Iterator[dict[str, Any]]:
    random = torch.Generator(device).manual_seed(0)
    largest = torch.arange(-(2**15), 2**15, device=device).to(torch.int16).view(torch.bfloat16)
    smaller = torch.rand(2**16, 31, device=device, generator=random) * 2 - 1
    any_bits = torch.randint(-(2**15), 2**15, (4096, 512), device=device, generator=random)
    inputs = {
        "every largest magnitude": torch.cat([largest[:, None], (largest[:, None].float() * smaller).bfloat16()], 1),
        "any bits": any_bits.to(torch.int16).view(torch.bfloat16),
        "normal": torch.randn(4096, 1056, device=device, generator=random).bfloat16(),
        "small experts": torch.randn(3, 224, 96, device=device, generator=random).bfloat16(),
    }
    for name, x in inputs.items():
        rows, columns = torchao_cast(x), torchao_cast(x.transpose(-2, -1))
        yield {
            "input": name,
            "rows": same_bits(fake_quantise_rows(x), rows),
            "columns": same_bits(fake_quantise_columns(x), columns),
        }


Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def products(wgrad: str) -> tuple[Product, Product]:
    """Ours and torchao's, each ``(x, weight_GNK, ends)``."""
    arithmetic = "mxfp8_emulated" if wgrad == "bf16" else "mxfp8_emulated_wgrad_mxfp8"
    return (
        lambda x, w, ends: grouped_mm(x, w.transpose(-2, -1), ends, arithmetic),
        lambda x, w, ends: _to_mxfp8_then_scaled_grouped_mm(
            x,
            w.transpose(-2, -1),
            ends,
            kernel_preference=KernelPreference.EMULATED,
            wgrad_with_hp=wgrad == "bf16",
            scale_calculation_mode=RCEIL,
            pad_token_groups_for_grouped_mm=False,
        ),
    )


def operands(groups: list[int], K: int, N: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(len(groups))
    x = torch.randn(sum(groups), K, device=device, dtype=torch.bfloat16)
    weight = torch.randn(len(groups), N, K, device=device, dtype=torch.bfloat16) * K**-0.5
    upstream = torch.randn(sum(groups), N, device=device, dtype=torch.bfloat16) * 1e-3
    return x, weight, upstream, torch.tensor(groups, device=device).cumsum(0).to(torch.int32)


def run(product: Product, x: torch.Tensor, w: torch.Tensor, up: torch.Tensor, ends: torch.Tensor) -> list[torch.Tensor]:
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    output = product(x, w, ends)
    return [output.detach(), *torch.autograd.grad(output, (x, w), up)]


def identical(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> dict[str, bool]:
    return {name: same_bits(a, b) for name, a, b in zip(("output", "dgrad", "wgrad"), ours, theirs, strict=True)}


def identity(device: torch.device, scale: Scale) -> Iterator[dict[str, Any]]:
    D, F, G = scale.dim, scale.hidden, scale.experts
    M = min(scale.tokens)
    share = M // G // 32 * 32
    skewed = [32, 0, share, 2 * share, 64, share]
    real = [[share] * G, [*skewed, *[0] * (G - 7), M - sum(skewed)]] if G > 6 else [[share] * G]
    cases = [(groups, 128, 96, wgrad) for groups in WHOLE for wgrad in ("mxfp8", "bf16")]
    cases += [(groups, 256, 160, "bf16") for groups in RAGGED]
    cases += [(groups, K, N, "mxfp8") for groups in real for K, N in ((D, F), (F, D))]
    cases += [(real[-1], D, F, "bf16")]
    for groups, K, N, wgrad in cases:
        ours, theirs = products(wgrad)
        given = operands(groups, K, N, device)
        named = {"groups": groups, "K": K, "N": N, "wgrad": wgrad}
        yield named | {"ours is torchao": identical(run(ours, *given), run(theirs, *given))}


def identity_compiled(device: torch.device, scale: Scale) -> Iterator[dict[str, Any]]:
    ours, theirs = products("mxfp8")
    given = operands([min(scale.tokens) // scale.experts] * scale.experts, scale.dim, scale.hidden, device)
    compiled = run(torch.compile(ours, fullgraph=True), *given)
    yield {"ours compiled is torchao": identical(compiled, run(theirs, *given))}


def median_us(work: Callable[[], object], device: torch.device, turns: int) -> float:
    times = []
    for turn in range(2 + turns):
        clock = Marks(device)
        clock.start()
        work()
        clock.mark("work")
        if turn > 1:
            times.append(clock.parts_us()["work"])
    return statistics.median(times)


def cast_speed(device: torch.device, scale: Scale) -> Iterator[dict[str, Any]]:
    from moelab.mxfp8 import fake_quantise_cuda as kernel

    x = torch.randn(1, 65536, scale.dim, device=device, dtype=torch.bfloat16)
    rows, columns = torch.empty_like(x), torch.empty_like(x).view(1, scale.dim, 65536)
    copy = median_us(lambda: rows.copy_(x), device, 9)
    yield {"cast": "copy", "median_us": copy, "tb_s": round(4 * x.numel() / copy / 1e6, 3)}
    flat, flat_rows = x.view(1, -1, 32), rows.view(1, -1, 32)
    works: list[tuple[str, tuple[int, int, int], Callable[[], object]]] = []
    works += [("rows", t, lambda t=t: kernel.launch(flat, flat_rows, t, transposed=False)) for t in STRETCHES]
    works += [("columns", t, lambda t=t: kernel.launch(x, columns, t, transposed=True)) for t in TILES]
    for name, tile, work in works:
        us = median_us(work, device, 5)
        in_use = tile == (kernel.ROWS_TILE if name == "rows" else kernel.COLUMNS_TILE)
        row = {"cast": name, "tile": tile, "in_use": in_use, "median_us": us}
        yield row | {"tb_s": round(4 * x.numel() / us / 1e6, 3)}


def layers(scale: Scale, device: torch.device) -> dict[str, nn.Module]:
    shape = {"dim": scale.dim, "hidden_dim": scale.hidden, "num_experts": scale.experts}
    # On a CPU the emulation pads, as in training there; these groups are whole, so it pads nothing but does its work.
    pad_inside = device.type == "cpu"
    torchao = _get_mxfp8_grouped_experts_cls(GroupedExperts).Config(**shape).build()
    torchao._mxfp8_op_config = op_config("emulated", "mxfp8", pad_inside=pad_inside)
    ours = MXFP8Experts.Config(**shape, kernels="emulated", pad_inside=pad_inside).build()
    modules = {"bf16": GroupedExperts.Config(**shape).build(), "torchao": torchao, "ours": ours}
    torch.manual_seed(0)
    for name, module in modules.items():
        modules[name] = module = module.to(device, torch.bfloat16)
        if name == "bf16":
            for parameter in module.parameters():
                nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        module.load_state_dict(modules["bf16"].state_dict())
    return modules


def layer_times(device: torch.device, scale: Scale, compiled: bool) -> Iterator[dict[str, Any]]:
    modules = layers(scale, device)
    if compiled:
        modules = {name: torch.compile(module, fullgraph=True) for name, module in modules.items()}
    for tokens in scale.tokens if compiled else scale.eager_tokens:
        # M is dynamic, as it is behind an all-to-all: one graph serves all sizes.
        x = torch.randn(tokens, scale.dim, device=device, dtype=torch.bfloat16, requires_grad=True)
        upstream = torch.randn_like(x) * 1e-3
        counts = torch.full((scale.experts,), tokens // scale.experts, device=device)
        if compiled:
            torch._dynamo.mark_dynamic(x, 0)
        raw: dict[str, list[float]] = {}
        for name in list(modules):
            try:
                warm_up_us = [step_us(modules[name], x, counts, upstream, device) for _ in range(3)]
            except RuntimeError as error:  # torchao's padding does not compile as a full graph; or too little memory
                del modules[name]
                yield {"tokens": tokens, "compiled": compiled, "left out": name, "because": str(error)[:200]}
            else:
                raw[name] = []
                print(f"          {name}: first step {warm_up_us[0] / 1e6:.1f} s", flush=True)
        for name in list(modules) * scale.turns:
            raw[name].append(round(step_us(modules[name], x, counts, upstream, device), 2))
        yield summary(raw, tokens, compiled, scale)
        del x, upstream


def step_us(
    module: nn.Module, x: torch.Tensor, counts: torch.Tensor, upstream: torch.Tensor, device: torch.device
) -> float:
    x.grad = None
    module.zero_grad(set_to_none=True)
    clock = Marks(device)
    clock.start()
    module(x, counts).backward(upstream)
    clock.mark("step")
    return clock.parts_us()["step"]


def summary(raw: dict[str, list[float]], tokens: int, compiled: bool, scale: Scale) -> dict[str, Any]:
    row: dict[str, Any] = {"tokens": tokens, "compiled": compiled, "dim": scale.dim, "hidden": scale.hidden}
    for name in sorted(raw.keys() - {"bf16"}):
        ratios = [a / b for a, b in zip(raw[name], raw["bf16"], strict=True)]  # of neighbours in time
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        row[f"{name}_over_bf16"] = {"median": round(middle, 4), "iqr": round(high - low, 4)}
    medians = {name: statistics.median(us) for name, us in raw.items()}
    return row | {"bf16_ms": round(medians["bf16"] / 1e3, 3), "raw_us": raw}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=tuple(SCALES), required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--budget-s", type=float, default=85, help="begin nothing new after this many seconds")
    parser.add_argument("--without-fp32-product", action="store_true", help="CPU: multiply BF16 as PyTorch does")
    given = parser.parse_args()
    device, scale = torch.device(given.device), SCALES[given.device]
    result = Result(given.output, device, given.budget_s)
    if given.device == "cpu" and not given.without_fp32_product:
        from moelab.titan import cpu

        if not cpu.has_bf16_instructions():
            cpu.use_fp32_products_for_bf16()
            result.content["bf16_product"] = "FP32, rounded once (moelab.titan.cpu)"
    result.each("casts", casts(device))
    result.each("identity", identity(device, scale))
    result.each("layer", layer_times(device, scale, compiled=True))
    result.each("layer", layer_times(device, scale, compiled=False))
    if given.device == "cuda":
        result.each("cast_speed", cast_speed(device, scale))
    result.each("identity_compiled", identity_compiled(device, scale))
    differing = [row for row in result.content["identity"] if not all(row["ours is torchao"].values())]
    print(f"{len(result.content['identity'])} identity rows, {len(differing)} differ; {result.content['wall_s']} s")
    return 1 if differing or result.content["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
