"""What one layer costs one rank: everything about it that does not depend on its neighbours."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from moelab.experiment import ActivationCheckpoint, Precision
from moelab.memory.activations import (
    Work,
    arrived,
    attention_saved,
    keeps_arrived,
    saved,
    saved_without_checkpointing,
)
from moelab.memory.sharding import Degrees, Held, module_held
from moelab.memory.working_set import backward_working_set, forward_working_set, quantised_working_set
from moelab.model import ModelShape


@dataclass(frozen=True)
class Mode:
    """What an experiment says about how its layers run."""

    checkpointing: ActivationCheckpoint
    compiled: bool
    loss_compiled: bool
    precision: Precision
    emulated: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCosts:
    """Bytes of one layer on one rank.

    Attributes:
        held: elements of its parameters.
        saved: kept from its forward to its backward pass.
        forward: temporaries of its forward pass.
        recomputed: brought back by its backward pass under activation checkpointing.
        attention: what attention alone keeps without checkpointing.
        backward: temporaries of its backward pass.
        quantised: quantised copies of one product's operands.
    """

    held: Held
    saved: float
    forward: float
    recomputed: float
    attention: float
    backward: float
    quantised: float


@functools.lru_cache(maxsize=65_536)
def layer_costs(shape: ModelShape, *, moe: bool, degrees: Degrees, work: Work, mode: Mode) -> LayerCosts:
    """The costs of a layer with routed experts, or of a dense one."""
    held = module_held(shape, f"layers.{shape.n_dense_layers if moe else 0}", degrees)
    forward = forward_working_set(shape, moe=moe, work=work, compiled=mode.compiled)
    backward = backward_working_set(shape, moe=moe, work=work, compiled=mode.compiled)
    kept = saved(shape, moe=moe, work=work, compiled=mode.compiled, checkpointing=mode.checkpointing)
    tensors = saved_without_checkpointing(shape, moe=moe, work=work, compiled=mode.compiled)
    everything = sum(tensors.values())
    if moe and keeps_arrived(work, compiled=mode.compiled, checkpointing=mode.checkpointing):
        # The recomputation makes the experts' own order of what is kept as it came.
        everything += sum(max(0.0, size - tensors.get(name, 0.0)) for name, size in arrived(shape, work).items())
    quantised = quantised_working_set(
        shape, precision=mode.precision, emulated=mode.emulated, work=work, gathered_experts=held.experts
    )
    return LayerCosts(
        held=held,
        saved=kept,
        forward=forward,
        recomputed=max(0.0, everything - kept),
        attention=attention_saved(shape, work),
        backward=backward if mode.checkpointing == "none" else max(forward, backward),
        quantised=quantised if moe else 0.0,
    )
