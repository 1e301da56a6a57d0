"""Every arm of the published experiment by name, as Experiments; TorchTitan's configurations are made from this table.

A name is ``dsv3_<model>_<arm>``, with the arm spelt as in run directories: ``dsv3_671b_mxfp8_deepep``,
``dsv3_671b_fp8_deepep_dispatch_fp8``, ``dsv3_16b_mxfp8_standard_linears_wgrad_bf16``. ``deepep`` is moelab's
dispatcher on DeepEP 2.x, which takes quantised experts and ``compile=model+loss``; what goes together is in
:mod:`moelab.layout.dispatchers`. All arms of a model share its published layout, batch, sequence,
learning rate and routing, so that two of them differ in what their names say. The exception is ``minimal_async_ep``,
whose expert parallelism ends where a node does.

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
from math import gcd
from types import MappingProxyType
from typing import Any

from moelab.experiment import EPBackend, Experiment, Precision, Routing
from moelab.layout.dispatchers import Fault, deepep_fault, dispatch_fault, takes_experts, that_pad
from moelab.model import shape_for

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
    arm = experiment.model_copy(update={"routing": Routing.LEARNED, "arm_fields": ()}).arm
    return f"dsv3_{experiment.model.lower()}_{arm}".replace("-", "_")


def refusal(experiment: Experiment) -> str | None:
    """Why no machine can run this arm, and the nearest that can.

    What depends on the machine is asked of :mod:`moelab.launch.capability`.
    """
    fault = _fault(experiment)
    if fault is None:
        return None
    instead = nearest(experiment.model_copy(update=dict(fault.mend)))
    name = config_name(instead)
    named = f"; by name: --config {name}" if experiment.shape is None and name in named_arms() else ""
    return f"{fault.said}. Nearest: {' '.join(f'{field}={value}' for field, value in fault.mend.items())}{named}"


def nearest(experiment: Experiment) -> Experiment:
    """The arm that the refusals of an arm lead to: the same in all that can be kept."""
    while fault := _fault(experiment):
        experiment = experiment.model_copy(update=dict(fault.mend))
    return experiment


def _fault(experiment: Experiment) -> Fault | None:
    """The first thing that cannot be."""
    precision, backend, ep = experiment.precision, experiment.ep_backend, experiment.ep
    asked, standard = experiment.dispatch_precision, {"ep_backend": EPBackend.STANDARD}
    if backend is not EPBackend.STANDARD and ep == 1:
        return Fault(f"ep_backend {backend.value} moves tokens between expert-parallel ranks, and ep is 1", standard)
    if not takes_experts(backend, precision):
        said = f"TorchTitan 0.3.0 refuses {precision.value} experts with the {backend.value} dispatcher"
        return Fault(f"{said}: they need one that pads ({that_pad()})", standard)
    fault = dispatch_fault(backend, precision=precision, wgrad=experiment.wgrad, ep=ep, dispatch_precision=asked)
    if fault:
        return Fault(f"dispatch_precision {asked}: {fault.said}", fault.mend)
    return _deepep_fault(experiment) if backend is EPBackend.DEEPEP else None


def _deepep_fault(experiment: Experiment) -> Fault | None:
    shape, ep = shape_for(experiment), experiment.ep
    if shape.num_experts % ep:
        mend = {"ep": gcd(shape.num_experts, ep)}
        return Fault(f"ep_backend deepep: {shape.num_experts} experts cannot be divided over {ep} ranks", mend)
    kernels, sent = experiment.ep_kernels, experiment.dispatch_precision
    fault = deepep_fault(shape, kernels=kernels, dispatch_precision=sent)
    return Fault(f"ep_backend deepep: {fault.said}", fault.mend) if fault else None


def _arms(model: str) -> Iterator[Experiment]:
    """Every precision with every dispatcher, its variants of quantisation, and quantised dispatch; refused ones too."""
    for precision, backend in product(Precision, EPBackend):
        for variant in _variants(model, precision):
            fields = {"precision": precision, "ep_backend": backend, **variant}
            if backend is EPBackend.MINIMAL_ASYNC_EP:
                fields["ep"] = MINIMAL_ASYNC_EP
            yield Experiment(**{"model": model, **SHARED, **PUBLISHED[model], **fields})


def _variants(model: str, precision: Precision) -> Iterator[dict[str, Any]]:
    if precision is Precision.MXFP8:
        linears = PUBLISHED[model].get("tp", 1) == 1  # MXFP8 linears take no tensor parallelism
        for quantize in ("experts", "experts+linears")[: 1 + linears]:
            yield {"quantize": quantize}
            yield {"quantize": quantize, "wgrad": "bf16"}
            yield {"quantize": quantize, "wgrad": "bf16", "dispatch_precision": "mxfp8"}
        return
    yield {}
    if precision is Precision.FP8:
        yield {"dispatch_precision": "fp8"}
    yield {"dispatch_precision": "mxfp8"}
