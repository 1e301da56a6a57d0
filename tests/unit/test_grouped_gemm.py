"""The grouped-GEMM experiment: its checks, its timing on a CPU, and its kernels against those that torchao calls."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchao.prototype.moe_training import fp8_grouped_mm, kernels, mxfp8_grouped_mm
from torchao.prototype.moe_training.kernels.mxfp8 import cute_utils

from moelab.errors import BadInput
from moelab.marks import Marks
from moelab.mxfp8 import grouped_gemm
from moelab.mxfp8 import kernels as mxfp8_kernels
from moelab.mxfp8.grouped_gemm import (
    NoKernels,
    components,
    interleaved,
    make_operands,
    product_of,
    step,
    time_case,
    why_not,
)
from moelab.mxfp8.grouped_gemm_cases import (
    DIRECTIONS,
    PRECISIONS,
    ROW_BLOCK,
    Case,
    Sizes,
    group_sizes,
    parse_case,
    require_divisible,
)
from moelab.mxfp8.grouped_gemm_results import case_of, obtain, read_result, stored

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
SMALL = Case(m=96, n=32, k=64, groups=3, sizes="skewed")


# Cases


@given(
    m=st.integers(1, 5000),
    groups=st.integers(1, 40),
    sizes=st.sampled_from(["even", "random", "skewed"]),
    block=st.sampled_from([1, 8, 16, 32, 128]),
)
def test_every_row_is_in_a_group_and_padding_is_less_than_a_block(
    m: int, groups: int, sizes: Sizes, block: int
) -> None:
    case = Case(m=m, n=32, k=32, groups=groups, sizes=sizes)
    rows, padded = group_sizes(case), group_sizes(case, block=block)
    assert sum(rows) == m
    assert all(size % block == 0 for size in padded)
    assert all(0 <= more - less < block for less, more in zip(rows, padded, strict=True))  # empty groups stay empty


def test_even_groups_differ_by_one_row_and_skewed_ones_by_more_than_chance() -> None:
    base = {"m": 64_000, "n": 32, "k": 32, "groups": 64}
    even, random, skewed = (np.std(group_sizes(Case(**base, sizes=name))) for name in ("even", "random", "skewed"))
    assert even == 0
    assert random == pytest.approx(np.sqrt(1000), rel=0.4)  # of a multinomial with equal chances
    assert skewed == pytest.approx(500, rel=0.4)  # a Dirichlet of 4: half of the mean


@pytest.mark.parametrize(
    "text", ["", "1,2,3", "1,2,3,4,5,6", "a,b,c,d", "64,64,64,-1", "64,64,64,2,odd", "0,32,32,1", "²,32,32,1"]
)
def test_a_shape_that_is_none(text: str) -> None:
    with pytest.raises(BadInput, match=r"M,N,K,G|valid are even, random, skewed|whole number"):
        parse_case(text)


@pytest.mark.parametrize(
    ("case", "precision", "said"),
    [
        ("64,64,48,2", "mxfp8", r"^k is 48: mxfp8 needs a multiple of 32, the nearest is 64$"),
        ("64,64,16,2", "mxfp8_wgrad_bf16", r"^k is 16: .* multiple of 32, the nearest is 32$"),
        ("64,24,64,2", "fp8", r"^n is 24: fp8 needs a multiple of 16"),
    ],
)
def test_dimensions_that_no_kernel_takes(case: str, precision: Any, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        require_divisible(parse_case(case), precision)


# What can be timed


def gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], name: str = "a GPU") -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: name)


@pytest.mark.parametrize(
    ("capability", "timed", "said"),
    [
        ((8, 0), {"bf16"}, {"fp8": "is SM80", "mxfp8": "are for SM100 and SM103"}),
        ((8, 9), {"bf16"}, {"fp8": "is SM89", "mxfp8": "are for SM100 and SM103"}),
        ((9, 0), {"bf16", "fp8"}, {"mxfp8": "are for SM100 and SM103"}),
        ((10, 0), {"bf16", "fp8"}, {"mxfp8": "SM100 kernels"}),  # a CPU build of torchao
        ((12, 1), {"bf16"}, {"fp8": "is SM121", "mxfp8": "are for SM100 and SM103"}),
    ],
)
def test_what_a_gpu_can_time(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], timed: set[str], said: dict[str, str]
) -> None:
    gpu(monkeypatch, capability)
    reasons = {name: why_not(name) for name in PRECISIONS}
    assert {name for name, reason in reasons.items() if reason is None} == timed
    assert all(text in str(reasons[name]) for name, text in said.items())


def test_packages_that_are_missing_or_too_new_are_named_with_the_versions_that_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu(monkeypatch, (10, 0))
    monkeypatch.setattr(mxfp8_grouped_mm, "_SM100_KERNELS_AVAILABLE", True)
    assert "nvidia-cutlass-dsl==4.5.2" in str(why_not("mxfp8"))  # not installed where there is no GPU
    monkeypatch.setattr(cute_utils, "_missing_cutedsl_runtime_packages", list)
    new = {"nvidia-cutlass-dsl": "4.10.0", "nvidia-cutlass-dsl-libs-base": "4.5.2"}
    monkeypatch.setattr(mxfp8_kernels, "version", new.get)
    problem = str(why_not("mxfp8"))
    assert "nvidia-cutlass-dsl 4.10.0 (works: 4.5.2)" in problem
    assert "libs-base 4.5.2 (works" not in problem
    monkeypatch.setattr(mxfp8_kernels, "version", lambda _: "4.5.2")
    assert why_not("mxfp8") is None


def test_the_versions_that_work_are_those_of_torchaos_description() -> None:
    from importlib.metadata import metadata

    described = metadata("torchao").get_payload()
    assert isinstance(described, str)
    assert all(f"{package}=={number}" in described for package, number in mxfp8_kernels.CUTEDSL.items())


# Products and their parts


def by_hand(a_MK: torch.Tensor, b_GNK: torch.Tensor, ends_G: torch.Tensor) -> torch.Tensor:
    groups = zip(itertools.pairwise([0, *ends_G.tolist()]), b_GNK, strict=True)
    return torch.cat([a_MK[start:end] @ weight.T for (start, end), weight in groups])


def test_a_step_and_the_components_of_bf16_are_the_three_products() -> None:
    operands, results = make_operands(SMALL, CPU, block=8), []
    for multiply, dtype in ((by_hand, torch.float64), (product_of("bf16"), torch.bfloat16)):
        a, b = (x.to(dtype, copy=True).requires_grad_() for x in (operands.a_MK, operands.b_GNK))
        output = multiply(a, b, operands.offsets_G)
        results.append([output.detach(), *torch.autograd.grad(output, (a, b), operands.grad_MN.to(dtype))])
    parts = list(components(operands, "bf16"))
    assert [(part.direction, part.size) for part in parts] == [(name, operands.flops) for name in DIRECTIONS]
    for exact, ours, part in zip(*results, parts, strict=True):
        for found in (ours, part.call()):
            assert (found.double() - exact).norm() < 0.005 * exact.norm()  # type: ignore[attr-defined]


class Recorder:
    """Stand-ins for kernels that this machine lacks: they return tensors of the right shape and note what they get."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: set[tuple[Any, ...]] = set()
        self.patch = monkeypatch

    def stand_in(self, where: list[Any], **kernels: Callable[..., Any]) -> None:
        for name, make in kernels.items():

            def call(*args: Any, _name: str = name, _make: Callable[..., Any] = make, **options: Any) -> Any:
                tensors = [(tuple(x.shape), x.stride(), x.dtype) for x in args if isinstance(x, torch.Tensor)]
                tensors += [("offs", tuple(options["offs"].shape))] if "offs" in options else []
                self.calls.add((_name, *tensors))
                return _make(*args)

            for module in where:
                self.patch.setattr(module, name, call)


def eight(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float8_e4m3fn)


def column_major(x: torch.Tensor) -> torch.Tensor:
    return eight(x).transpose(-2, -1).contiguous().transpose(-2, -1)


def product(left: torch.Tensor, right: torch.Tensor, *rest: Any) -> torch.Tensor:
    groups = () if right.dim() == 3 else (3,)
    return torch.zeros(*groups, left.shape[0], right.shape[-1], dtype=torch.bfloat16)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recording = Recorder(monkeypatch)
    recording.stand_in([torch], _scaled_grouped_mm=product)
    recording.stand_in(
        [kernels, fp8_grouped_mm],
        triton_fp8_rowwise_2d_scale_and_cast=lambda x, *_: (eight(x), torch.ones(len(x), 1)),
        triton_fp8_colwise_3d_scale_and_cast=lambda x, *_: (column_major(x), torch.ones(3, 1, x.shape[2])),
        triton_fp8_rowwise_3d_transpose_rhs=lambda x, *_: (column_major(x.mT), torch.ones(3, 1, x.shape[1])),
        triton_fp8_per_group_colwise_scales_dual=lambda *both: tuple(
            made for x in both[:2] for made in (column_major(x), torch.ones(3 * x.shape[1]))
        ),
    )

    def rows(x: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return eight(x), torch.ones(*x.shape[:-1], x.shape[-1] // 32)

    monkeypatch.setattr(mxfp8_grouped_mm, "_SM100_KERNELS_AVAILABLE", True)
    recording.stand_in(
        [mxfp8_grouped_mm],
        mxfp8_quantize_2d_1x32_cutedsl=rows,
        triton_to_mxfp8_dim0=rows,
        mxfp8_quantize_cuda_3d=lambda x, *_: (column_major(x), torch.ones(3, x.shape[1])),
        _to_mxfp8_dim1_kernel_wrapper=lambda x, *_: SimpleNamespace(
            **dict(zip(("qdata", "scale"), rows(x.T.contiguous()), strict=True))
        ),
        triton_mx_block_rearrange_per_group_3d=lambda scale: scale,
        triton_mx_block_rearrange_2d_K_groups=lambda scale, *_: scale,
    )
    return recording


@pytest.mark.parametrize("precision", ["fp8", "mxfp8"])
def test_components_are_the_kernels_that_torchao_calls(recorder: Recorder, precision: Any) -> None:
    operands = make_operands(SMALL, CPU, block=ROW_BLOCK[precision])
    step(product_of(precision), operands)(Marks(CPU))
    of_torchao, recorder.calls = recorder.calls, set()
    parts = list(components(operands, precision))
    for part in parts:
        part.call()
    assert recorder.calls == of_torchao
    # The casts read each operand twice, once along each of its axes, as the model of their time says.
    elements = 2 * (operands.a_MK.numel() + operands.b_GNK.numel() + operands.grad_MN.numel())
    assert sum(part.size for part in parts if part.kind == "quantise") == 3 * elements


# Timing


def test_alternatives_take_turns_and_spread_is_numpys(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, times = [], iter([7.0, 1.0, 4.0, 1.0, 5.0, 9.0] * 2)
    monkeypatch.setattr(grouped_gemm, "WARM_UP", 1)
    monkeypatch.setattr(Marks, "total_us", lambda _: next(times))

    def work(name: str) -> Callable[[Marks], None]:
        def run(clock: Marks) -> None:
            turns.append(name)
            clock.mark("first")
            clock.mark("second")

        return run

    found = interleaved({"a": work("a"), "b": work("b")}, CPU, repeats=5)
    assert turns == ["a", "b"] * 6
    assert all(set(parts) == {"first", "second", "total"} for parts in found.values())
    low, middle, high = np.quantile([4.0, 5.0, 7.0, 4.0, 5.0], [0.25, 0.5, 0.75])
    assert found["a"]["total"] == (middle, high - low, 5)


def test_parts_are_the_times_between_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([1.0, 1.25, 2.0, 4.0])
    monkeypatch.setattr("moelab.marks.time.perf_counter", lambda: next(moments))
    clock = Marks(CPU)
    clock.start()
    for part in ("first", "second", "first"):
        clock.mark(part)
    assert (clock.parts_us(), clock.total_us()) == ({"first": 2.25e6, "second": 0.75e6}, 3e6)


def test_a_precision_that_fails_does_not_cost_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(precision: str) -> Callable[..., torch.Tensor]:
        def fail(*_: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("no such kernel")

        return fail if precision == "fp8" else product_of("bf16")

    monkeypatch.setattr(grouped_gemm, "product_of", broken)
    monkeypatch.setattr(Marks, "parts_us", lambda _: {"forward": 0.001, "backward": 0.002})
    monkeypatch.setattr(Marks, "total_us", lambda _: 0.003)
    failures: dict[str, str] = {}

    def failed(precision: str, problem: Exception) -> None:
        failures[precision] = str(problem)

    rows = list(time_case(SMALL, ["bf16", "fp8"], CPU, compiled=False, failed=failed))
    assert failures == {"fp8": "no such kernel"}
    assert [(row["precision"], row["pass"]) for row in rows] == [
        ("bf16", part) for part in ("forward", "backward", "forward+backward")
    ]
    assert all(row["n_times"] >= grouped_gemm.MIN_REPEATS for row in rows)
    # Real rows count as work, padded ones are noted.
    assert {row["padded_m"] for row in rows} == {sum(group_sizes(SMALL, block=8))}
    assert {row["m"] for row in rows} == {96}
    assert {row["tflops"] for row in rows} == {round(2 * 96 * 32 * 64 / 0.001 / 1e6, 2)}


def test_a_run_writes_after_every_case(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(grouped_gemm, "require_kernels", lambda _: None)
    monkeypatch.setattr(grouped_gemm, "measure_peaks", lambda _: {"bf16_tflops": 2.0})
    path, seen = tmp_path / "deep" / "file.json", []
    real = grouped_gemm.time_components

    def after_the_products(*args: Any) -> Any:
        seen.append(len(json.loads(path.read_text())["rows"]))
        return real(*args)

    monkeypatch.setattr(grouped_gemm, "time_components", after_the_products)
    cases = [SMALL, parse_case("64,32,32,2")]
    content = grouped_gemm.run(cases, path, precisions=["bf16"], compiled=False)
    assert seen == [3, 6]
    assert json.loads(path.read_text()) == content
    assert content["label"] == "dry run"  # on a CPU nothing is called measured
    assert not content["errors"]
    assert [row["pass"] for row in content["components"]] == ["forward", "dgrad", "wgrad"] * 2
    for row in content["rows"]:
        assert row["fraction_of_peak"] == round(row["tflops"] / 2.0, 4)
    assert [case_of(row) for row in read_result(path).rows.to_dict("records")][::3] == cases


def test_a_run_without_a_gpu_stops_before_it_writes(tmp_path: Path) -> None:
    with pytest.raises(NoKernels, match="no CUDA device"):
        obtain("run", path=str(tmp_path / "file.json"), shapes="64,64,64,2; 64,64,64,4,skewed")
    with pytest.raises(BadInput):
        obtain("run", path=str(tmp_path / "file.json"), shapes="64,64,40,2")
    assert not list(tmp_path.iterdir())


# Stored results


def test_rates_of_the_stored_rows_follow_from_their_times() -> None:
    products = {"forward": 1, "backward": 2, "forward+backward": 3}
    rows = stored().rows
    flops = 2 * rows["m"] * rows["n"] * rows["k"] * rows["pass"].map(products)
    np.testing.assert_allclose(flops / rows["median_us"] / 1e6, rows["tflops"], rtol=1e-3)


def test_speedups_hold_a_case_against_itself(tmp_path: Path) -> None:
    base = {"n": 32, "k": 32, "groups": 2, "sizes": "even", "pass": "forward+backward", "iqr_us": 1.0, "tflops": 1.0}
    base["fraction_of_peak"] = None
    rows = [
        {**base, "m": m, "precision": precision, "median_us": us}
        for m, precision, us in [(64, "fp8", 5.0), (32, "bf16", 3.0), (32, "fp8", 4.0), (64, "bf16", 20.0)]
    ]
    path, about = tmp_path / "r.json", {"hardware": {"gpu": "X"}, "versions": {"torch": "2"}, "date": "d"}
    path.write_text(json.dumps({"schema": 1, "label": "measured", "rows": rows, "components": [], **about}))
    table = read_result(path).speedups("fp8")
    assert dict(zip(table["m"], table["speedup"], strict=True)) == {32: 0.75, 64: 4.0}
    assert read_result(path).speedups("mxfp8").empty


ROW = '{"median_us": 1, "iqr_us": 0, "tflops": 1, "fraction_of_peak": null}'
NO_RESULTS = ["", "{}", "[]", "\0", '{"schema": 2}']
NO_RESULTS += [
    f'{{"schema": 1, "components": [], "rows": {rows}, "versions": null}}'
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
