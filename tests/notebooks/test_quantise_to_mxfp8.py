"""Notebook 01 as authored and once more over the captures of that run, and what it tells its reader to see."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from notebook_support import ROOT, WIDGET, Ran, ran

from moelab.experiment import Experiment
from moelab.micro.numerics import GroupedGemm, compare_methods, compare_products, layer_gemms, measure, synthetic
from moelab.model import shape_of
from moelab.mxfp8.capture import Capture, captures_of, read
from moelab.mxfp8.formats import MX, NVFP4
from moelab.notebooks import execute
from moelab.runs.directory import RunDir, find

pytestmark = pytest.mark.training
NOTEBOOK = ROOT / "notebooks" / "01_quantise_to_mxfp8.ipynb"
GAUSSIAN = (512, 1024)
NANO = shape_of("nano")


@pytest.fixture(scope="module")
def run(by_nbmake: Callable[[str], Ran]) -> RunDir:
    """The run that the notebook trains with its defaults: two gloo ranks, EP 2, FSDP2."""
    (made,) = find(by_nbmake(NOTEBOOK.stem).folder)
    return made


@pytest.fixture(scope="module")
def captured(run: RunDir) -> list[Capture]:
    return [read(path) for path in captures_of(run.path)]


def test_the_run_left_what_its_experts_multiplied(run: RunDir, captured: list[Capture]) -> None:
    experiment: Experiment = run.experiment
    assert [one.layer for one in captured] == ["layers.1", "layers.2", "layers.3"]
    assert {(one.step, one.arm) for one in captured} == {(experiment.steps, "bf16_standard")}
    experts = NANO.num_experts // experiment.ep
    for one in captured:
        rows = sum(one.tokens_of_experts)
        assert len(one.tokens_of_experts) == experts
        assert one.offsets.tolist() == torch.tensor(one.tokens_of_experts).cumsum(0).tolist()
        assert one.x.shape == one.grad.shape == (rows, NANO.dim)
        assert one.w1.shape == one.w3.shape == (experts, NANO.moe_hidden_dim, NANO.dim)  # whole, though FSDP shards
        assert one.w2.shape == (experts, NANO.dim, NANO.moe_hidden_dim)
        assert 0 < rows <= experiment.world_size * experiment.local_batch * experiment.seq_len * NANO.top_k
        assert all(tensor.isfinite().all() and tensor.any() for tensor in (one.x, one.w1, one.w2, one.w3, one.grad))
        assert one.x.float().square().mean().sqrt().item() == pytest.approx(1, abs=0.3)  # it was just normalised
    assert not torch.equal(captured[0].w1, captured[1].w1)


def test_papermill_looks_at_the_captures_of_a_run(run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    parameters = {"capture_run": str(run.path), "layer": 2, "outlier_log2": 10}
    copy = ran(execute(NOTEBOOK, tmp_path / "executed.ipynb", parameters))
    assert (len(copy.titles()), len(copy.shown(WIDGET))) == (5, 1)
    assert any("MXFP8 and NVFP4 emulated; layer 3" in title for title in copy.titles())
    assert not any(output.get("name") == "stderr" for output in copy.outputs)
    assert list(tmp_path.iterdir()) == [tmp_path / "executed.ipynb"]  # nothing was trained


# What the notebook says that its reader should see


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_captured_tensors_are_as_described(captured: list[Capture], layer: int) -> None:
    one = captured[layer]
    magnitude = one.x.double().reshape(-1, 32).abs()
    smallest = magnitude.masked_fill(magnitude == 0, math.inf).amin(-1)
    assert torch.log2(magnitude.amax(-1) / smallest).median().item() == pytest.approx(6, abs=1)
    tensors = {"x": one.x, "w2": one.w2, "gradient": one.grad}
    rows = {(row.data, row.method): row for row in compare_methods(tensors, gradients=["gradient"])}
    for name, tensor in tensors.items():
        floor, even, rceil, nvfp4 = (
            rows[name, f"{way}"].sqnr_db for way in ("mxfp8_floor", "mxfp8_even", "mxfp8", "nvfp4")
        )
        assert 0.2 < rceil - floor < 4
        assert floor < even < rceil
        assert measure(tensor, MX(scaling="ceil")).sqnr_db == pytest.approx(rceil, abs=0.01)
        assert rceil - nvfp4 == pytest.approx(11, abs=1)
        assert 0.03 < rows[name, "nvfp4"].underflow_fraction < 0.12
        assert rows[name, "fp8_rowwise"].sqnr_db == pytest.approx(rows[name, "mxfp8"].sqnr_db, abs=0.05)
        assert rows[name, "bf16"].sqnr_db == math.inf
    assert rows["gradient", "mxfp8"].sqnr_db - rows["gradient", "fp8_tensorwise"].sqnr_db == pytest.approx(6, abs=1)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_products_are_as_described(captured: list[Capture], layer: int) -> None:
    one = captured[layer]
    rows = compare_products(layer_gemms(one.x, one.w1, one.w2, one.w3, one.grad, one.offsets))
    by = {(row.weight, row.product, row.method): row.sqnr_db for row in rows}
    for weight in ("w1", "w3", "w2"):
        mxfp8 = {product: by[weight, product, "mxfp8"] for product in ("output", "dgrad", "wgrad")}
        for product, found in mxfp8.items():
            assert 25 < found < 44
            assert by[weight, product, "bf16"] == pytest.approx(56, abs=1.5)
            assert by[weight, product, "fp8_rowwise"] == pytest.approx(found, abs=0.1)
            assert 9 < found - by[weight, product, "nvfp4"] < 17
            if product != "output":
                assert 1 < found - by[weight, product, "fp8_tensorwise"] < 7
        assert by[weight, "wgrad", "mxfp8_wgrad-bf16"] > mxfp8["wgrad"] + 12


def test_a_product_of_random_signs_loses_what_its_operands_lose_together() -> None:
    x, weight, grad = (
        synthetic("gaussian", shape, seed=seed) for seed, shape in enumerate(((256, 512), (1, 256, 512), (256, 256)))
    )
    gemm = GroupedGemm(name="w", x=x, weight=weight, grad=grad, offsets=torch.tensor([256]))
    assert measure(x, MX()).sqnr_db == pytest.approx(31.5, abs=0.1)
    for row in compare_products([gemm]):
        if row.method == "mxfp8":
            assert row.sqnr_db == pytest.approx(28.5, abs=0.2)  # 3 dB below: the energies of two errors


def test_synthetic_tensors_are_as_described() -> None:
    tensors = {
        "easy": synthetic("gaussian", GAUSSIAN),
        "heavy": synthetic("student_t", GAUSSIAN),
        "outliers": synthetic("gaussian", GAUSSIAN, outlier=2.0**14),
    }
    rows = {(row.data, row.method): row for row in compare_methods(tensors)}
    zero = {name: rows["outliers", name].underflow_fraction for name in ("fp8_tensorwise", "fp8_rowwise", "mxfp8")}
    assert zero == pytest.approx({"fp8_tensorwise": 0.12, "fp8_rowwise": 0.09, "mxfp8": 0.016}, rel=0.05)
    for name in ("easy", "heavy"):
        assert rows[name, "mxfp8"].worst_blocks_db == pytest.approx(rows[name, "fp8_rowwise"].worst_blocks_db, abs=0.1)
    assert rows["outliers", "mxfp8"].worst_blocks_db > rows["outliers", "fp8_rowwise"].worst_blocks_db + 5
    assert rows["outliers", "mxfp8"].sqnr_db == pytest.approx(rows["outliers", "fp8_rowwise"].sqnr_db, abs=0.05)
    for name in tensors:
        floor, rceil = (measure(tensors[name], MX(scaling=scaling)).sqnr_db for scaling in ("floor", "rceil"))
        assert 0.3 < rceil - floor < 4
        assert rows[name, "mxfp8"].worst_blocks_db - rows[name, "nvfp4"].worst_blocks_db == pytest.approx(10, abs=1)
    assert rows["outliers", "nvfp4"].underflow_fraction == pytest.approx(0.3, abs=0.02)


def test_the_largest_number_is_as_good_in_nvfp4_as_in_mxfp8() -> None:
    blocks = synthetic("gaussian", GAUSSIAN).reshape(-1, 16)
    largest = blocks.abs().argmax(1, keepdim=True)
    exact, nvfp4, mxfp8 = (
        each.reshape(-1, 16).gather(1, largest)
        for each in (blocks, *(one.cast(blocks.reshape(-1, 32)).values for one in (NVFP4(), MX())))
    )
    assert ((nvfp4 - exact) / exact).abs().max() < 1.001 / 16
    assert ((mxfp8 - exact) / exact).abs().max() < 1.001 / 17
