"""The grouped-GEMM experiment: its checks, its timing on a CPU, and its kernels against those that torchao calls."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from grouped_gemm import components, measure
from hypothesis import given
from hypothesis import strategies as st
from torchao.prototype.moe_training import fp8_grouped_mm, kernels, mxfp8_grouped_mm

from moelab.errors import BadInput
from moelab.micro import grouped_gemm_run
from moelab.micro.clock import Marks, median_and_iqr
from moelab.micro.grouped_gemm import (
    DIRECTIONS,
    ROW_BLOCK,
    SHAPE,
    SIZES,
    Case,
    group_sizes,
    obtain,
    parse_case,
    read_result,
    stored,
)
from moelab.micro.grouped_gemm_run import NoKernels, make_operands, product_of, step, take_turns, time_case

CPU = torch.device("cpu")
SMALL = Case(m=96, n=32, k=64, groups=3, sizes="skewed")

# Cases


@given(st.integers(1, 5000), st.integers(1, 40), st.sampled_from(SIZES), st.sampled_from([1, 8, 16, 32, 128]))
def test_every_row_is_in_a_group_and_padding_is_less_than_a_block(m: int, groups: int, sizes: Any, block: int) -> None:
    case = Case(m=m, n=32, k=32, groups=groups, sizes=sizes)
    rows, padded = group_sizes(case), group_sizes(case, block=block)
    assert sum(rows) == m
    assert all(size % block == 0 for size in padded)
    assert all(0 <= more - less < block for less, more in zip(rows, padded, strict=True))  # empty groups stay empty


def test_even_groups_differ_by_one_row_and_skewed_ones_by_more_than_chance() -> None:
    even, random, skewed = (np.std(group_sizes(Case(m=64_000, n=32, k=32, groups=64, sizes=name))) for name in SIZES)
    assert even == 0
    assert random == pytest.approx(np.sqrt(1000), rel=0.4)  # of a multinomial with equal chances
    assert skewed == pytest.approx(500, rel=0.4)  # a Dirichlet of 4: half of the mean


@pytest.mark.parametrize(
    ("text", "precision", "told"),
    [
        ("", "fp8", "M,N,K,G"),
        ("1,2,3", "fp8", "M,N,K,G"),
        ("1,2,3,4,5,6", "fp8", "M,N,K,G"),
        ("64,64,64,-1", "fp8", "M,N,K,G"),
        ("²,32,32,1", "fp8", "M,N,K,G"),
        ("64,64,64,2,odd", "fp8", "'odd'; valid are even, random, skewed"),
        ("0,32,32,1", "fp8", "m is 0; give a whole number of at least 1"),
        ("64,24,64,2", "fp8", "n is 24: fp8 needs a multiple of 16"),
        ("64,64,48,2", "mxfp8", "k is 48: mxfp8 needs a multiple of 32, the nearest is 64"),
        ("64,64,16,2", "mxfp8_wgrad_bf16", "k is 16: .* multiple of 32, the nearest is 32"),
    ],
)
def test_a_shape_that_is_none_or_that_no_kernel_takes(tmp_path: Path, text: str, precision: Any, told: str) -> None:
    with pytest.raises(BadInput, match=told):
        obtain("run", path=str(tmp_path / "file.json"), shapes=f"64,64,64,2;{text}", precision=precision)
    assert not list(tmp_path.iterdir())


# Products and their parts; test_mxfp8.py has what a GPU can time


def by_hand(a_MK: torch.Tensor, b_GNK: torch.Tensor, ends_G: torch.Tensor) -> torch.Tensor:
    groups = zip(itertools.pairwise([0, *ends_G.tolist()]), b_GNK, strict=True)
    return torch.cat([a_MK[start:end] @ weight.T for (start, end), weight in groups])


def test_a_step_and_the_components_of_bf16_are_the_three_products() -> None:
    operands, results = make_operands(SMALL, CPU, block=8), []
    for multiply, dtype in ((by_hand, torch.float64), (product_of("bf16"), torch.bfloat16)):
        wide = {name: getattr(operands, name).to(dtype) for name in ("a_MK", "b_GNK", "grad_MN")}
        results.append([result.detach() for result in step(multiply, replace(operands, **wide))])
    parts, flops = list(components(operands, "bf16")), 2 * len(operands.a_MK) * 64 * 32
    assert [(part.direction, part.size) for part in parts] == [(name, flops) for name in DIRECTIONS]
    for exact, ours, part in zip(*results, parts, strict=True):
        for product in (ours, part.call()):
            assert (product.double() - exact).norm() < 0.005 * exact.norm()


def eight(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float8_e4m3fn)


def column_major(x: torch.Tensor) -> torch.Tensor:
    return eight(x).transpose(-2, -1).contiguous().transpose(-2, -1)


def rows(x: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return eight(x), torch.ones(*x.shape[:-1], x.shape[-1] // 32)


def product(left: torch.Tensor, right: torch.Tensor, *_: Any) -> torch.Tensor:
    groups = () if right.dim() == 3 else (3,)
    return torch.zeros(*groups, left.shape[0], right.shape[-1], dtype=torch.bfloat16)


FP8_KERNELS: dict[str, Callable[..., Any]] = {
    "triton_fp8_rowwise_2d_scale_and_cast": lambda x, *_: (eight(x), torch.ones(len(x), 1)),
    "triton_fp8_colwise_3d_scale_and_cast": lambda x, *_: (column_major(x), torch.ones(3, 1, x.shape[2])),
    "triton_fp8_rowwise_3d_transpose_rhs": lambda x, *_: (column_major(x.mT), torch.ones(3, 1, x.shape[1])),
    "triton_fp8_per_group_colwise_scales_dual": lambda *both: tuple(
        made for x in both[:2] for made in (column_major(x), torch.ones(3 * x.shape[1]))
    ),
}
MXFP8_KERNELS: dict[str, Callable[..., Any]] = {
    "mxfp8_quantize_2d_1x32_cutedsl": rows,
    "triton_to_mxfp8_dim0": rows,
    "mxfp8_quantize_cuda_3d": lambda x, *_: (column_major(x), torch.ones(3, x.shape[1])),
    "_to_mxfp8_dim1_kernel_wrapper": lambda x, *_: SimpleNamespace(
        **dict(zip(("qdata", "scale"), rows(x.T.contiguous()), strict=True))
    ),
    "triton_mx_block_rearrange_per_group_3d": lambda scale: scale,
    "triton_mx_block_rearrange_2d_K_groups": lambda scale, *_: scale,
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> set[tuple[Any, ...]]:
    """Kernels that this machine lacks note what they get, and return tensors of the right shape."""
    seen = set()

    def noting(name: str, make: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            tensors = [(tuple(x.shape), x.stride(), x.dtype) for x in args if isinstance(x, torch.Tensor)]
            seen.add((name, *tensors, *(tuple(options[name].shape) for name in ("offs",) if name in options)))
            return make(*args)

        return call

    monkeypatch.setattr(mxfp8_grouped_mm, "_SM100_KERNELS_AVAILABLE", True)
    for modules, stand_ins in (
        ([torch], {"_scaled_grouped_mm": product}),
        ([kernels, fp8_grouped_mm], FP8_KERNELS),
        ([mxfp8_grouped_mm], MXFP8_KERNELS),
    ):
        for module, (name, make) in itertools.product(modules, stand_ins.items()):
            monkeypatch.setattr(module, name, noting(name, make))
    return seen


@pytest.mark.parametrize("precision", ["fp8", "mxfp8"])
def test_components_are_the_kernels_that_torchao_calls(calls: set[tuple[Any, ...]], precision: Any) -> None:
    operands = make_operands(SMALL, CPU, block=ROW_BLOCK[precision])
    step(product_of(precision), operands)
    of_torchao = calls.copy()
    calls.clear()
    parts = list(components(operands, precision))
    for part in parts:
        part.call()
    assert calls == of_torchao
    # The casts read each operand twice, once along each of its axes, as the model of their time says.
    elements = 2 * (operands.a_MK.numel() + operands.b_GNK.numel() + operands.grad_MN.numel())
    assert sum(part.size for part in parts if part.kind == "quantise") == 3 * elements


# Timing


def test_precisions_take_turns_and_a_part_is_the_time_between_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, now = [], [0.0]
    monkeypatch.setattr(grouped_gemm_run, "WARM_UP", 1)
    monkeypatch.setattr("moelab.micro.clock.time.perf_counter", lambda: now[0])

    def work(name: str, us: float) -> None:
        turns.append(name)
        now[0] += us / 1e6

    times = take_turns({"a": partial(work, "a", 3.0), "b": partial(work, "b", 5.0)}, CPU, repeats=5)
    assert turns == ["a", "b"] * 6
    assert times == {"a": pytest.approx([3.0] * 5), "b": pytest.approx([5.0] * 5)}
    clock = Marks(CPU)
    clock.start()
    for part, us in (("first", 7.0), ("second", 2.0), ("first", 10.0)):
        now[0] += us / 1e6
        clock.mark(part)
    assert clock.parts_us() == {"first": pytest.approx(17.0), "second": pytest.approx(2.0)}


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=40))
def test_the_spread_is_numpys(times: list[float]) -> None:
    low, middle, high = np.quantile(times, [0.25, 0.5, 0.75])
    assert median_and_iqr(times) == pytest.approx((middle, high - low), abs=1e-6)


def test_real_rows_count_as_work_and_padded_ones_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_gemm_run, "product_of", lambda _: product_of("bf16"))
    monkeypatch.setattr(Marks, "parts_us", lambda clock: {clock.marks[-1][0]: 0.003})
    rate = round(3 * 2 * 96 * 32 * 64 / 0.003 / 1e6, 2)
    assert [
        [row[name] for name in ("precision", "pass", "m", "padded_m", "tflops")]
        for row in time_case(SMALL, ["bf16", "fp8"], CPU, compiled=False)
    ] == [
        [name, "forward+backward", 96, sum(group_sizes(SMALL, block=block)), rate]
        for name, block in (("bf16", 8), ("fp8", 16))
    ]


def test_a_run_writes_after_every_case_what_is_read_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(grouped_gemm_run, "require_kernels", lambda _: None)
    monkeypatch.setattr("grouped_gemm.PEAK_SIZE", 32)
    path, seen, real = tmp_path / "deep" / "file.json", [], time_case

    def time_one(*args: Any, **how: Any) -> Any:
        seen.append(len(json.loads(path.read_text())["rows"]) if path.exists() else 0)
        return real(*args, **how)

    monkeypatch.setattr(grouped_gemm_run, "time_case", time_one)
    cases = [SMALL, parse_case("64,32,32,2")]
    content = measure(cases, path, ["bf16"], compiled=False)
    assert seen == [0, 1]
    assert json.loads(path.read_text()) == content
    assert content["label"] == "dry run"  # on a CPU nothing is called measured
    rows = read_result(path).rows
    assert [Case(**{name: row[name] for name in SHAPE}) for row in rows.to_dict("records")] == cases
    # What the benchmark adds: no peak on a CPU, and the products one by one.
    assert content["peaks"]["bf16_error"].startswith("NoKernels: bf16 cannot be timed")
    assert [row["pass"] for row in content["components"]] == ["forward", "dgrad", "wgrad"] * 2


def test_a_run_without_a_gpu_stops_before_it_writes(tmp_path: Path) -> None:
    for shapes in ("", "64,64,64,2; 64,64,64,4,skewed"):
        with pytest.raises(NoKernels, match="no CUDA device"):
            obtain("run", path=str(tmp_path / "file.json"), shapes=shapes)
    assert not list(tmp_path.iterdir())


# Stored results


def test_rates_of_the_stored_rows_follow_from_their_times() -> None:
    table = stored().rows
    flops = 2 * table["m"] * table["n"] * table["k"]
    flops *= table["pass"].map({"forward": 1, "backward": 2, "forward+backward": 3})
    np.testing.assert_allclose(flops / table["median_us"] / 1e6, table["tflops"], rtol=1e-3)


def test_speedups_hold_a_case_against_itself(tmp_path: Path) -> None:
    base = {"n": 32, "k": 32, "groups": 2, "sizes": "even", "pass": "forward+backward", "iqr_us": 1.0, "tflops": 1.0}
    times = [(64, "fp8", 5.0), (32, "bf16", 3.0), (32, "fp8", 4.0), (64, "bf16", 20.0)]
    lines = [{**base, "m": m, "precision": name, "median_us": us} for m, name, us in times]
    path, about = tmp_path / "r.json", {"hardware": {"gpu": "X"}, "versions": {"torch": "2"}, "date": "d"}
    path.write_text(json.dumps({"schema": 1, "label": "measured", "rows": lines, **about}))
    table = read_result(path).speedups("fp8")
    assert dict(zip(table["m"], table["speedup"], strict=True)) == {32: 0.75, 64: 4.0}
    assert read_result(path).speedups("mxfp8").empty


ROW = '{"median_us": 1, "iqr_us": 0, "tflops": 1}'
NO_RESULTS = ["", "{}", "[]", "\0", '{"schema": 2}']
NO_RESULTS += [
    f'{{"schema": 1, "rows": {rows}, "versions": null}}'
    for rows in ("[]", "null", '{"m": 1}', "[1]", '[{"m": 1}]', ROW.replace("1", '"x"').join("[]"), ROW.join("[]"))
]


@pytest.mark.parametrize("text", NO_RESULTS)
def test_a_file_that_is_no_result(tmp_path: Path, text: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(BadInput, match=r"r\.json"):
        read_result(path)
    with pytest.raises(BadInput, match="cannot be read"):
        read_result(tmp_path / "absent.json")
