"""Real operands: what the experts of a model in training multiply at one step, saved with the run.

With ``capture_step`` above zero an experiment's routed experts get hooks. At that step rank 0 keeps, for its first,
middle and last MoE layer, the routed input, the three weights as the experts use them (this rank's, gathered by FSDP),
the gradient of their output and where each expert's tokens end; all in BF16, as they enter the grouped GEMMs. The step
itself computes what it would have computed anyway.

Each layer is one file ``captures/<layer>.pt`` in the run directory, whole or absent. It is bounded: at most
``MAX_ROWS`` tokens, evenly over the experts, and as many experts as fit into ``MAX_WEIGHT_BYTES`` (at least one).

Steps are counted from the start of the process, by training passes through the model.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchtitan.models.common.moe import GroupedExperts

from moelab.errors import BadInput
from moelab.experiment import Experiment
from moelab.files import write_whole
from moelab.mxfp8.experts import local

FOLDER = "captures"
MAX_ROWS = 4096
MAX_WEIGHT_BYTES = 128 << 20
_TENSORS = ("x", "w1", "w2", "w3", "grad", "offsets")


@dataclass(frozen=True, kw_only=True)
class Capture:
    """Operands of the experts of one MoE layer at one training step, in BF16."""

    layer: str  # such as ``layers.1``
    step: int  # from 1
    arm: str
    x: torch.Tensor  # routed input (M, D); tokens of one expert after those of another
    w1: torch.Tensor  # (G, F, D)
    w2: torch.Tensor  # (G, D, F)
    w3: torch.Tensor  # (G, F, D)
    grad: torch.Tensor  # of the experts' output (M, D); the routing score is in it
    offsets: torch.Tensor  # where each expert's tokens end, int32 (G,)
    tokens_of_experts: tuple[int, ...]  # of each local expert before anything was cut: G numbers or more


def install(model: nn.Module, experiment: Experiment, dump_folder: Path) -> list[str]:
    """Hook the experts of a model, so that ``capture_step`` leaves its operands in the run directory ``dump_folder``.

    Call it once for each model part, after it was parallelised: FSDP's own hooks then run first, and the captured
    weights are whole.

    Returns:
        Names of the layers that will be captured: none without a ``capture_step``, or on ranks other than the first.
    """
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    experts = [(name, module) for name, module in model.named_modules() if isinstance(module, GroupedExperts)]
    if not experiment.capture_step or rank != 0 or not experts:
        return []
    # A step passes through the model once for each micro-batch; the first of them is taken.
    passes_of_a_step = experiment.local_batch // experiment.sequences_at_once
    passes_before = (experiment.capture_step - 1) * passes_of_a_step
    chosen = [experts[index] for index in sorted({0, len(experts) // 2, len(experts) - 1})]
    layers = {name.partition(".moe.")[0]: module for name, module in chosen}

    def count_pass(part: nn.Module, _arguments: object) -> None:
        nonlocal passes_before
        if not (part.training and torch.is_grad_enabled()):  # a pass of the validator
            return
        if passes_before == 0:
            counting.remove()
            for layer, module in layers.items():
                about = {"layer": layer, "step": experiment.capture_step, "arm": experiment.arm}
                _take_next_pass(module, about, dump_folder / FOLDER / f"{layer}.pt")
        passes_before -= 1

    counting = model.register_forward_pre_hook(count_pass)
    return list(layers)


def _take_next_pass(experts: nn.Module, about: Mapping[str, Any], path: Path) -> None:
    """Keep the input and weights of the next forward, and write them with the gradient that its output gets."""
    kept: dict[str, Any] = {}

    def take_operands(_experts: nn.Module, arguments: tuple[torch.Tensor, torch.Tensor]) -> None:
        forward.remove()  # activation checkpointing runs the layer again in the backward pass
        # Detached first: what autograd saved here would be missing in that second run, and checkpointing would fail.
        x, counts = (local(argument).detach() for argument in arguments)
        weights = {name[:2]: local(getattr(experts, name)).detach() for name in ("w1_EFD", "w2_EDF", "w3_EFD")}
        bytes_per_expert = sum(2 * weight[0].numel() for weight in weights.values())
        count = min(len(counts), max(1, MAX_WEIGHT_BYTES // bytes_per_expert))
        sizes = counts[:count].cpu().clamp(max=MAX_ROWS // count)
        # Of all experts: the rows of those that are kept are cut out of the whole input.
        starts = (counts.cumsum(0) - counts).tolist()
        rows = torch.cat([torch.arange(start, start + size) for start, size in zip(starts, sizes, strict=False)])
        kept.update({name: _on_host(weight[:count]) for name, weight in weights.items()})
        kept.update(rows=rows, offsets=sizes.cumsum(0).to(torch.int32))
        kept.update(x=_on_host(x[rows.to(x.device)]), tokens_of_experts=tuple(counts.tolist()))

    def await_gradient(_experts: nn.Module, _arguments: object, output: torch.Tensor) -> None:
        backward.remove()
        # Of the experts' output, before combine or the sum over a token's experts.
        output.register_hook(take_gradient)

    def take_gradient(grad: torch.Tensor) -> None:
        rows = kept.pop("rows").to(grad.device)
        packed = io.BytesIO()
        torch.save(vars(Capture(**about, **kept, grad=_on_host(local(grad)[rows]))), packed)
        write_whole(path, packed.getvalue())
        kept.clear()

    forward = experts.register_forward_pre_hook(take_operands)
    backward = experts.register_forward_hook(await_gradient)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in BF16 on the host; a copy, because FSDP frees what it gathered."""
    return tensor.to("cpu", torch.bfloat16, copy=True)


def read(path: Path) -> Capture:
    """Read one layer's capture; :class:`BadInput` if the file is none."""
    try:
        content = torch.load(path, weights_only=True)
        capture = Capture(**content)
        shapes = [getattr(capture, name).shape for name in _TENSORS]
        (m, d), (g, f, _) = shapes[0], shapes[1]
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror or error}") from error
    except (RuntimeError, pickle.UnpicklingError, EOFError, TypeError, AttributeError, ValueError) as error:
        raise BadInput(f"{path} is not a capture of a moelab run: {' '.join(str(error).split())[:200]}") from error
    if shapes != [(m, d), (g, f, d), (g, d, f), (g, f, d), (m, d), (g,)]:
        raise BadInput(f"{path}: shapes of {', '.join(_TENSORS)} do not fit: {[tuple(shape) for shape in shapes]}")
    return capture


def captures_of(run: Path) -> list[Path]:
    """Files of the layers that runs in or below a folder captured, first layer first; :class:`BadInput` if none did."""
    # By length first, so that ``layers.10`` comes after ``layers.2``.
    files = sorted(run.rglob(f"{FOLDER}/*.pt"), key=lambda path: (path.parent, len(path.stem), path.stem))
    if not files:
        raise BadInput(f"no captures below {run}; train with capture_step set to a step, such as --set capture_step=20")
    return files
