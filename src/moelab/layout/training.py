"""Which fields of an experiment make no difference to what runs, and so which arms are one training.

``quantize`` changes nothing where nothing is quantised, ``microbatch`` nothing without a pipeline. :func:`training_of`
puts what every such value amounts to in its place, so that two experiments train alike exactly where theirs are equal.
What a run records of itself (``capture_step``, ``trace_step``) is a difference: the run does more.
``tests/unit/test_same_training.py`` holds this against the configurations that TorchTitan gets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple

from moelab.errors import BadInput
from moelab.experiment import EPBackend, Experiment, Precision, Routing, ShapeChanges
from moelab.hardware import Gpu, gpu_of
from moelab.layout.mesh import Facts
from moelab.layout.rules import native_mxfp8
from moelab.model import SHAPES


class Idle(NamedTuple):
    """A field that makes no difference as it was given."""

    field: str  # a dimension of ``shape`` as ``shape.n_layers``
    amounts_to: Any  # the value in its place: one for all that do the same, the default where that is one of them
    why: str


def idle_fields(experiment: Experiment, on: Gpu | None = None) -> Iterator[Idle]:
    """The fields that make no difference, but for those that are as if they had not been given.

    ``on`` is what it runs on, of capability 0 for a CPU: then ``hardware``, which plans for a machine, makes none.
    """
    x, default = experiment, _DEFAULT
    precision, backend = x.precision, x.ep_backend
    if precision is Precision.BF16:
        yield Idle("quantize", default.quantize, "precision is bf16, and nothing is quantised")
        yield Idle("wgrad", default.wgrad, "precision is bf16, and nothing is quantised")
    if precision is Precision.FP8 and x.wgrad != "fp8":
        yield Idle("wgrad", default.wgrad, "weight gradients of FP8 experts are in BF16 unless wgrad is fp8")
    if precision is not Precision.MXFP8:
        yield Idle(
            "mxfp8_kernels", default.mxfp8_kernels, f"precision is {precision.value}, which has no MXFP8 kernels"
        )
    elif x.mxfp8_kernels == "auto" and (capability := _capability(x, on)) is not None:
        kernels = "native" if native_mxfp8(x, capability) else "emulated"
        yield Idle("mxfp8_kernels", kernels, f"auto is {kernels} on {on.name if on else x.hardware}")
    if backend is not EPBackend.DEEPEP:
        yield Idle(
            "ep_kernels", default.ep_kernels, f"ep_backend is {backend.value}, and ep_kernels are those of deepep"
        )
    yield from _of_the_layout(x)
    yield from _of_the_shape(x)
    if x.warmup_steps > x.steps:
        yield Idle("warmup_steps", x.steps, f"a warm-up ends with the run, at step {x.steps}")
    if x.validate_every >= x.steps and x.dataset != "c4":
        why = f"held-out text is evaluated after the last step, {x.steps}, in any case"
        yield Idle("validate_every", default.validate_every, why)
    if not x.trace_step:
        yield Idle("trace_ranks", default.trace_ranks, "trace_step is 0, and nothing is traced")
        yield Idle("memory_snapshot", default.memory_snapshot, "trace_step is 0, and nothing is traced")
    if on and not (x.hardware == "cpu" and on.capability != 0):
        yield Idle("hardware", default.hardware, f"it plans for a machine, and both run on {on.name}")


_DEFAULT = Experiment()


def _capability(x: Experiment, on: Gpu | None) -> float | None:
    """Of the GPU that it runs on, as far as it is known; nvidia-smi is not asked."""
    if x.hardware == "cpu":
        return 0.0
    if on or x.hardware == "local":
        return on.capability if on else None
    with suppress(BadInput):  # no such hardware: who plans or runs it says so
        return gpu_of(x.hardware).capability
    return None


def _of_the_layout(x: Experiment) -> Iterator[Idle]:
    default, facts = _DEFAULT, Facts(experiment=x, shape=SHAPES[x.model], capability=None, gpu_in_words="")
    if facts.dp_shard == facts.vary(dp_shard=-1).dp_shard:
        yield Idle("dp_shard", -1, f"the other axes leave {facts.dp_shard} ranks")
    if x.pp == 1:
        yield Idle("pp_schedule", default.pp_schedule, "pp is 1, and there is no pipeline")
        yield Idle("pp_stages_per_rank", 0, "pp is 1, and there is no pipeline")
    elif facts.schedule and x.pp_stages_per_rank == facts.schedule.stages_per_rank:
        yield Idle("pp_stages_per_rank", 0, f"{x.pp_schedule} has {x.pp_stages_per_rank} on each rank by itself")
    if x.pp > 1:
        yield Idle("accumulate_gradients", False, f"pp is {x.pp}, and the pipeline takes the micro-batches")
    elif x.sequences_at_once >= x.local_batch:
        why = f"all {x.local_batch} sequences of local_batch go forward at once"
        yield Idle("microbatch", default.microbatch, why)
        yield Idle("accumulate_gradients", False, why)


def _of_the_shape(x: Experiment) -> Iterator[Idle]:
    own = x.shape or ShapeChanges()
    for name, value in own.changes.items():
        usual = {"attention": "mla", "qk_norm": False}.get(name, getattr(SHAPES[x.model], name, None))
        if value == usual:
            yield Idle(f"shape.{name}", None, f"model {x.model} has {name} {value} by itself")
    if x.routing is not Routing.LEARNED:
        for name in ("expert_groups", "limited_groups"):
            why = f"routing is {x.routing.value}, and the router's choice among groups is discarded"
            yield Idle(f"shape.{name}", None, why)


@lru_cache(maxsize=4096)
def training_of(experiment: Experiment, on: Gpu | None = None) -> Experiment:
    """What an experiment trains, whatever its study, seed and arm are called.

    >>> training_of(Experiment(quantize="experts+linears", seed=3)) == training_of(Experiment(name="mine"))
    True
    """
    idle = {one.field: one.amounts_to for one in idle_fields(experiment, on)}
    own = experiment.shape.changes if experiment.shape else {}
    changes = {name: value for name, value in own.items() if f"shape.{name}" not in idle}
    fields = {field: value for field, value in idle.items() if "." not in field}
    fields |= {"name": _DEFAULT.name, "seed": _DEFAULT.seed, "arm_fields": ()}
    return experiment.model_copy(update={**fields, "shape": ShapeChanges(**changes) if changes else None})


def twins(arms: Iterable[Experiment], on: Gpu | None = None) -> dict[str, str]:
    """The arms that are the same training as one before them, by name, and why no field tells them apart."""
    first: dict[Experiment, Experiment] = {}
    told = {}
    for arm in arms:
        other = first.setdefault(training_of(arm, on), arm)
        if other.arm != arm.arm:
            why = {one.field: one.why for each in (other, arm) for one in idle_fields(each, on)}
            reasons = (f"{field} makes no difference: {why[field]}" for field in other.differences(arm))
            told[arm.arm] = f"it is the same training as {other.arm}: {'; '.join(reasons)}"
    return told
