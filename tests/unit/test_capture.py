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


class Model(nn.Module):
    """Decoder layers as far as their experts, named as TorchTitan names them; layer 0 is dense in DeepSeek-V3."""

    def __init__(self, layers: int = 1, *, recompute: bool = False) -> None:
        super().__init__()
        self.recompute, self.layers = recompute, nn.ModuleDict()
        for index in range(1, layers + 1):
            experts = GroupedExperts.Config(dim=DIM, hidden_dim=HIDDEN, num_experts=EXPERTS).build()
            for weight in experts.parameters():
                nn.init.normal_(weight, std=0.05)
            routed = nn.ModuleDict({"routed_experts": nn.ModuleDict({"inner_experts": experts})})
            self.layers[str(index)] = nn.ModuleDict({"moe": routed})

    def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            experts = layer["moe"]["routed_experts"]["inner_experts"]
            x = x + (checkpoint(experts, x, counts, use_reentrant=False) if self.recompute else experts(x, counts))
        return x


def batch(number: int, rows: int = 16) -> torch.Tensor:
    return torch.randn(rows, DIM, generator=torch.Generator().manual_seed(number)).bfloat16()


def train(model: nn.Module, passes: int, counts: tuple[int, ...] = (5, 0, 7, 4)) -> list[float]:
    losses = []
    for number in range(1, passes + 1):
        loss = model(batch(number, sum(counts)), torch.tensor(counts)).float().square().mean()
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for weight in model.parameters():
                weight -= 0.1 * weight.grad
                weight.grad = None
    return losses


def install(model: nn.Module, folder: Path, **changes: Any) -> list[str]:
    return capture.install(model, Experiment(**{"steps": 5, "capture_step": 2, **changes}), folder)


def only(folder: Path) -> Capture:
    (path,) = captures_of(folder)
    return read(path)


def test_a_capture_is_what_the_experts_multiplied(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Model()
    assert install(model, tmp_path) == ["layers.1"]
    train(model, 1)
    before = {name.rpartition(".")[2]: weight.detach().bfloat16() for name, weight in model.named_parameters()}
    assert not (tmp_path / "captures").exists()
    output = model(batch(2), torch.tensor([5, 0, 7, 4]))
    output.backward(batch(9))  # the residual passes the gradient of the layer on to its experts
    kept = only(tmp_path)
    assert (kept.layer, kept.step, kept.arm, kept.tokens_of_experts) == ("layers.1", 2, "bf16_standard", (5, 0, 7, 4))
    assert torch.equal(kept.x, batch(2))
    assert torch.equal(kept.grad, batch(9))
    assert torch.equal(kept.offsets, torch.tensor([5, 5, 12, 16], dtype=torch.int32))
    for name, weight in (("w1_EFD", kept.w1), ("w2_EDF", kept.w2), ("w3_EFD", kept.w3)):
        assert torch.equal(weight, before[name])


@pytest.mark.parametrize("recompute", [False, True])
def test_a_capture_changes_no_step_and_is_of_its_own_step(tmp_path: Path, recompute: bool) -> None:
    losses = {}
    for step, expected in (
        (0, []),
        (1, ["layers.1", "layers.6", "layers.11"]),
        (3, ["layers.1", "layers.6", "layers.11"]),
    ):
        torch.manual_seed(0)
        model, folder = Model(layers=11, recompute=recompute), tmp_path / str(step)
        assert install(model, folder, capture_step=step) == expected  # first, middle, last
        losses[step] = train(model, 4)
        captures = [read(path) for path in captures_of(folder)] if step else []
        assert [(each.layer, each.step) for each in captures] == [(layer, step) for layer in expected]
        assert folder.exists() == bool(step)
        assert not step or torch.equal(captures[0].x, batch(step))
    assert losses[0] == losses[1] == losses[3]


def test_a_step_has_a_training_pass_for_each_microbatch_of_a_pipeline(tmp_path: Path) -> None:
    model, counts = Model(), torch.tensor([5, 0, 7, 4])
    install(model, tmp_path, pp=2, local_batch=8, microbatch=2)
    train(model, 4)  # step 1
    with torch.no_grad():
        model(batch(7), counts)
    model.eval()
    model(batch(8), counts)  # both are the validator's
    model.train()
    train(model, 2)
    assert torch.equal(only(tmp_path).x, batch(1))


def test_a_capture_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "MAX_ROWS", 8)
    monkeypatch.setattr(capture, "MAX_WEIGHT_BYTES", 2 * 3 * DIM * HIDDEN * 2)  # two experts
    model = Model()
    install(model, tmp_path, capture_step=1)
    train(model, 1, (3, 9, 5, 1))
    kept = only(tmp_path)
    assert (kept.w1.shape, kept.grad.shape) == ((2, HIDDEN, DIM), (7, DIM))
    assert (kept.tokens_of_experts, kept.offsets.tolist()) == ((3, 9, 5, 1), [3, 7])  # at most four each
    assert torch.equal(kept.x, batch(1, 18)[:7])


def test_other_ranks_and_parts_without_experts_capture_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert install(nn.Linear(2, 2), tmp_path) == []
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    assert install(Model(), tmp_path) == []


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
    wrong = [
        (content, "is not a capture of a moelab run") for content in (b"", b"not a torch file", b"PK\x03\x04 broken")
    ]
    for saved, told in (
        ({"x": torch.ones(2)}, "is not a capture of a moelab run"),
        (made | {"x": torch.ones(4)}, "is not a capture of a moelab run"),
        (made | {"w1": 3}, "is not a capture of a moelab run"),
        (made, "shapes of x, w1, w2, w3, grad, offsets do not fit"),
    ):
        torch.save(saved, packed := io.BytesIO())
        wrong.append((packed.getvalue(), told))
    for content, told in wrong:
        file.write_bytes(content)
        with pytest.raises(BadInput, match=told):
            read(file)
