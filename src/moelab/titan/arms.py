"""Every arm of the published experiment by name, as Experiments; TorchTitan's configurations are made from this table.

A name is ``dsv3_<model>_<arm>``, with the arm spelt as in run directories: ``dsv3_671b_mxfp8_hybridep``,
``dsv3_16b_mxfp8_standard_linears_wgrad_bf16``. All arms of a model share its published layout, batch, sequence,
learning rate and routing, so that two of them differ in what their names say. The exceptions are in :func:`_adapted`.

What the table assumes, because the published scripts leave it to TorchTitan's configuration files of the time:

- **Learning rate**: linear warm-up to ``lr``, then cosine decay to a tenth of it over the last 80 % of the steps. The
  scripts ask for 2000 warm-up steps and train 1500 (16B) or 20 (671B). TorchTitan 0.3.0 shortens a warm-up that exceeds
  the run to the run's length, and says so in its log: the rate climbs to its peak at the last step and never decays.
- **Pipeline**: ``Interleaved1F1B`` with micro-batches of one sequence; two ranks then hold four stages.
- **Data**: C4, streamed. Building a configuration needs neither C4 nor a tokenizer; training does.

Source of the figures: Nebius ml-cookbook, ``pytorch-dsv3-mxfp8/train_16b.sh`` and ``train_671b.sh``, and TorchTitan's
``train_configs/deepseek_v3_{16b,671b}.toml`` that they start from.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import product
from types import MappingProxyType
from typing import Any

from moelab.experiment import EPBackend, Experiment, Precision, Routing

SHARED: dict[str, Any] = {
    "hardware": "b200_x256",
    "nodes": 32,
    "gpus_per_node": 8,
    "ep": 32,
    "seq_len": 8192,
    "lr": 1e-4,
    "warmup_steps": 2000,
    "activation_checkpoint": "full",
    "compile": "model+loss",
    "dataset": "c4",
    "routing": Routing.ROUND_ROBIN,
    "mxfp8_kernels": "native",
}
"""What both published models share."""
PUBLISHED: dict[str, dict[str, Any]] = {
    "16B": {"name": "published_16b", "local_batch": 16, "steps": 1500},
    "671B": {
        "name": "published_671b",
        "local_batch": 64,
        "microbatch": 1,
        "steps": 20,
        "tp": 2,
        "pp": 2,
        "pp_schedule": "Interleaved1F1B",
    },
}
"""What each published model has of its own."""
MINIMAL_ASYNC_EP = 8
"""Expert-parallel degree of ``minimal_async_ep``: its symmetric memory ends where a node's NVLink does."""


@functools.cache
def named_arms() -> MappingProxyType[str, Experiment]:
    """All arms by the name that ``--config`` takes, refused ones included."""
    return MappingProxyType({config_name(arm): arm for model in PUBLISHED for arm in _arms(model)})


def config_name(experiment: Experiment) -> str:
    """Name of an arm's configuration; routing is no part of it.

    >>> config_name(Experiment(model="671B", precision="mxfp8", ep_backend="deepep"))
    'dsv3_671b_mxfp8_deepep'
    """
    arm = experiment.model_copy(update={"routing": Routing.LEARNED}).arm
    return f"dsv3_{experiment.model.lower()}_{arm}".replace("-", "_")


def refusal(experiment: Experiment) -> str | None:
    """Why no machine can run this arm with this version of moelab and TorchTitan 0.3.0, and the nearest that can.

    What depends on the machine is asked of :mod:`moelab.launch.capability`.
    """
    precision, backend = experiment.precision.value, experiment.ep_backend.value
    if experiment.dispatch_precision != "bf16":
        return (
            f"dispatch_precision {experiment.dispatch_precision} is not in this version of moelab: it comes with "
            f"moelab's own dispatcher; use bf16. Nearest: dispatch_precision=bf16{_named(experiment)}"
        )
    if experiment.precision is Precision.BF16:
        return _refused_compile(experiment)
    if experiment.ep_backend is EPBackend.DEEPEP:
        return (
            f"TorchTitan 0.3.0 refuses {precision} experts with the deepep dispatcher (it needs one that pads), and "
            "moelab's own padded deepep is not in this version. Nearest: ep_backend=hybridep or ep_backend=standard, "
            f"or precision=bf16{_named(experiment)}"
        )
    if experiment.ep_backend is EPBackend.MINIMAL_ASYNC_EP:
        return (
            f"TorchTitan 0.3.0 refuses {precision} experts with the {backend} dispatcher (it needs one that pads). "
            "Nearest: ep_backend=standard or ep_backend=hybridep, or moelab's own padded deepep in a later version"
            f"{_named(experiment)}"
        )
    return None


def nearest(experiment: Experiment) -> Experiment:
    """The arm that a refusal points to: the same in all that can be kept."""
    changes: dict[str, Any] = {"dispatch_precision": "bf16"}
    if experiment.precision is not Precision.BF16:
        instead = {EPBackend.DEEPEP: EPBackend.HYBRIDEP, EPBackend.MINIMAL_ASYNC_EP: EPBackend.STANDARD}
        changes["ep_backend"] = instead.get(experiment.ep_backend, experiment.ep_backend)
    elif _refused_compile(experiment):
        changes["compile"] = "loss"
    return experiment.model_copy(update=changes)


def _refused_compile(experiment: Experiment) -> str | None:
    """DeepEP's operators have no fake implementation in TorchTitan 0.3.0, so no graph of the model can hold them."""
    if experiment.ep_backend is EPBackend.DEEPEP and experiment.compile == "model+loss":
        return (
            "TorchTitan 0.3.0 cannot compile a model with the deepep dispatcher (its operators have no fake "
            "implementation). Nearest: compile=loss, or ep_backend=hybridep or ep_backend=standard"
        )
    return None


def _named(experiment: Experiment) -> str:
    name = config_name(nearest(experiment))
    return f"; by name: --config {name}" if name in named_arms() else ""


def _arms(model: str) -> Iterator[Experiment]:
    for precision, backend, variant in product(Precision, EPBackend, ("", "wgrad", "dispatch")):
        for quantize in _quantised(model, precision):
            if variant == "wgrad" and precision is not Precision.MXFP8:
                continue
            arm: dict[str, Any] = {"precision": precision, "ep_backend": backend, "quantize": quantize}
            # Activations that arrive in MXFP8 are quantised along the axis of dispatch, not of wgrad.
            if variant and precision is Precision.MXFP8:
                arm["wgrad"] = "bf16"
            if variant == "dispatch":
                arm["dispatch_precision"] = "mxfp8"
            yield _adapted(Experiment(**{"model": model, **SHARED, **PUBLISHED[model], **arm}))


def _quantised(model: str, precision: Precision) -> tuple[str, ...]:
    """What an arm may quantise: MXFP8 linears take no tensor parallelism."""
    if precision is Precision.MXFP8 and PUBLISHED[model].get("tp", 1) == 1:
        return ("experts", "experts+linears")
    return ("experts",)


def _adapted(experiment: Experiment) -> Experiment:
    """What a dispatcher cannot take of the published setting."""
    if experiment.ep_backend is EPBackend.MINIMAL_ASYNC_EP:
        return experiment.model_copy(update={"ep": MINIMAL_ASYNC_EP})
    if experiment.precision is Precision.BF16 and _refused_compile(experiment):
        return experiment.model_copy(update={"compile": "loss"})
    return experiment
