"""Captures of what experts multiply: against the module itself, at the right step, bounded, whole or absent."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torchtitan.models.common.moe import GroupedExperts

from moelab.errors import BadInput
from moelab.experiment import Experiment
from moelab.experiment_file import parse
from moelab.mxfp8 import capture
from moelab.mxfp8.capture import Capture, captures_of, read

EXPERTS, DIM, HIDDEN = 4, 32, 64


class Layer(nn.Module):
    """A decoder layer as far as its experts, named as TorchTitan names them."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = nn.Module()
        self.moe.routed_experts = nn.Module()
        config = GroupedExperts.Config(dim=DIM, hidden_dim=HIDDEN, num_experts=EXPERTS)
        self.moe.routed_experts.inner_experts = GroupedExperts(config)
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.05)

    def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        return x + self.moe.routed_experts.inner_experts(x, counts)


class Model(nn.Module):
    """Layers under the names that TorchTitan gives them; layer 0 is dense in DeepSeek-V3."""

    def __init__(self, layers: int = 3, *, recompute: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(index + 1): Layer() for index in range(layers)})
        self.recompute = recompute

    def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = checkpoint(layer, x, counts, use_reentrant=False) if self.recompute else layer(x, counts)
        return x


def batch(step: int, rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(rows, DIM, generator=generator).bfloat16()


def train(model: nn.Module, steps: int, counts: torch.Tensor) -> list[float]:
    losses = []
    for step in range(1, steps + 1):
        loss = model(batch(step, int(counts.sum())), counts).float().square().mean()
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for weight in model.parameters():
                weight -= 0.1 * weight.grad
                weight.grad = None
    return losses


def experiment(**changes: Any) -> Experiment:
    return Experiment(**{"steps": 5, "capture_step": 2, **changes})


def only(folder: Path) -> Capture:
    (path,) = captures_of(folder)
    return read(path)


def test_a_capture_is_what_the_experts_multiplied(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Model(layers=1)
    experts = model.layers["1"].moe.routed_experts.inner_experts
    counts = torch.tensor([5, 0, 7, 4])
    assert capture.install(model, experiment(), tmp_path) == ["layers.1"]
    train(model, 1, counts)
    before = {name: weight.detach().bfloat16() for name, weight in experts.named_parameters()}
    assert not (tmp_path / "captures").exists()

    x = batch(2, 16)
    output = model(x, counts)
    grad = torch.randn(16, DIM, generator=torch.Generator().manual_seed(9)).bfloat16()
    output.backward(grad)  # the residual passes the gradient of the layer on to its experts
    found = only(tmp_path)
    assert (found.layer, found.step, found.arm) == ("layers.1", 2, "bf16_standard")
    assert torch.equal(found.x, x)
    assert torch.equal(found.grad, grad)
    assert torch.equal(found.offsets, torch.tensor([5, 5, 12, 16], dtype=torch.int32))
    assert found.tokens_of_experts == (5, 0, 7, 4)
    for name, kept in (("w1_EFD", found.w1), ("w2_EDF", found.w2), ("w3_EFD", found.w3)):
        assert torch.equal(kept, before[name])


@pytest.mark.parametrize("recompute", [False, True])
def test_a_capture_changes_no_step_and_is_of_its_own_step(tmp_path: Path, recompute: bool) -> None:
    losses = {}
    for step in (0, 1, 3):
        torch.manual_seed(0)
        model = Model(layers=11, recompute=recompute)
        layers = capture.install(model, experiment(capture_step=step), tmp_path / str(step))
        losses[step] = train(model, 4, torch.tensor([8, 8, 8, 8]))
        if step:
            assert layers == ["layers.1", "layers.6", "layers.11"]  # first, middle, last
            found = [read(path) for path in captures_of(tmp_path / str(step))]
            assert [each.layer for each in found] == layers
            assert torch.equal(found[0].x, batch(step, 32))
            assert {each.step for each in found} == {step}
        else:
            assert layers == []
    assert losses[0] == losses[1] == losses[3]
    assert not (tmp_path / "0").exists()


def test_validation_passes_are_no_steps(tmp_path: Path) -> None:
    model = Model(layers=1)
    capture.install(model, experiment(), tmp_path)
    counts = torch.tensor([4, 4, 4, 4])
    train(model, 1, counts)
    model.eval()
    with torch.no_grad():
        model(batch(7, 16), counts)
    model.train()
    model(batch(2, 16), counts).square().mean().backward()
    assert torch.equal(only(tmp_path).x, batch(2, 16))


def test_under_a_pipeline_a_step_has_a_pass_for_each_microbatch(tmp_path: Path) -> None:
    model = Model(layers=1)
    capture.install(model, experiment(pp=2, local_batch=8, microbatch=2), tmp_path)
    train(model, 6, torch.tensor([4, 4, 4, 4]))
    assert torch.equal(only(tmp_path).x, batch(5, 16))  # passes 1 to 4 are step 1


def test_a_capture_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "MAX_ROWS", 8)
    monkeypatch.setattr(capture, "MAX_WEIGHT_BYTES", 2 * 3 * DIM * HIDDEN * 2)  # two experts
    model = Model(layers=1)
    capture.install(model, experiment(capture_step=1), tmp_path)
    train(model, 1, torch.tensor([3, 9, 5, 1]))
    found = only(tmp_path)
    assert found.w1.shape == (2, HIDDEN, DIM)
    assert found.tokens_of_experts == (3, 9, 5, 1)
    assert found.offsets.tolist() == [3, 7]  # at most four each
    assert torch.equal(found.x, batch(1, 18)[:7])
    assert found.grad.shape == (7, DIM)


def test_other_ranks_and_parts_without_experts_capture_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert capture.install(nn.Linear(2, 2), experiment(), tmp_path) == []
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    assert capture.install(Model(), experiment(), tmp_path) == []


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"capture_step": 6}, "got 6; valid: 0 .* 1 to 5"),
        ({"capture_step": -1}, "got -1; valid: "),
        ({"compile": "model+loss"}, "got 2; valid: 0 with compile=model"),
    ],
)
def test_a_capture_that_cannot_be_is_refused_when_it_is_read(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(BadInput, match=f"^capture_step: {told}"):
        parse(Experiment, {"steps": 5, "capture_step": 2, **changes})


def test_what_is_no_capture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"no captures below .*; train with capture_step"):
        captures_of(tmp_path)
    file = tmp_path / "layers.1.pt"
    with pytest.raises(BadInput, match="cannot be read: No such file"):
        read(file)
    shapes = {"x": (4, 32), "w1": (2, 64, 32), "w2": (2, 32, 64), "w3": (2, 64, 16), "grad": (4, 32), "offsets": (2,)}
    made: dict[str, Any] = {name: torch.zeros(shape) for name, shape in shapes.items()}
    made |= {"layer": "layers.1", "step": 1, "arm": "a", "tokens_of_experts": (2, 2)}
    wrong = [b"", b"not a torch file", b"PK\x03\x04 broken"]
    for saved in ({"x": torch.ones(2)}, made | {"x": torch.ones(4)}, made | {"w1": 3}):
        torch.save(saved, packed := io.BytesIO())
        wrong.append(packed.getvalue())
    for content in wrong:
        file.write_bytes(content)
        with pytest.raises(BadInput, match="is not a capture of a moelab run"):
            read(file)
    torch.save(made, file)
    with pytest.raises(BadInput, match="shapes of x, w1, w2, w3, grad, offsets do not fit"):
        read(file)
