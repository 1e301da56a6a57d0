"""Every arm of the published experiment by name, as Experiments; TorchTitan's configurations are made from this table.

A name is ``dsv3_<model>_<arm>``, with the arm spelt as in run directories: ``dsv3_671b_mxfp8_deepep``,
``dsv3_671b_fp8_deepep_dispatch_fp8``, ``dsv3_16b_mxfp8_standard_linears_wgrad_bf16``. ``deepep`` is moelab's
dispatcher for DeepEP 2.x, which supports quantised experts and ``compile=model+loss``; :mod:`moelab.layout.rules` says
what can be combined. All arms of a model share its published layout, batch, sequence, learning rate and routing, so
two of them differ only in what their names say. The exception is ``minimal_async_ep``, whose expert parallelism is
limited to a node.

What the table assumes, because the published scripts leave it to TorchTitan's configuration files of that time:

- **Learning rate**: linear warm-up to ``lr``, then cosine decay to a tenth of it over the last 80 % of the steps. The
  scripts ask for 2000 warm-up steps and train 1500 (16B) or 20 (671B). TorchTitan 0.3.0 shortens a warm-up that is
  longer than the run, and says so in its log: the rate reaches its peak at the last step and never decays.
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
from moelab.layout import check

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
"""Fields in which the published models differ."""
MINIMAL_ASYNC_EP = 8
"""Expert-parallel degree of ``minimal_async_ep``: its symmetric memory spans the NVLink of a node."""


@functools.cache
def named_arms() -> MappingProxyType[str, Experiment]:
    """All arms by the name that ``--config`` takes, illegal ones included."""
    # It is cached, so nobody may change it.
    return MappingProxyType({config_name(arm): arm for model in PUBLISHED for arm in _arms(model)})


def config_name(experiment: Experiment) -> str:
    """Name of an arm's configuration; the routing is not part of it.

    >>> config_name(Experiment(model="671B", precision="mxfp8", ep_backend="deepep"))
    'dsv3_671b_mxfp8_deepep'
    """
    # The published routing would stand in every name, and a study may add fields to an arm's name.
    arm = experiment.model_copy(update={"routing": Routing.LEARNED, "arm_fields": ()}).arm
    return f"dsv3_{experiment.model.lower()}_{arm}".replace("-", "_")


def nearest(name: str) -> str:
    """Name of the legal arm with the most in common with another: its model and precision, then its dispatcher."""
    arm = named_arms()[name]

    def in_common(other: Experiment) -> tuple[bool, bool, int]:
        same = [getattr(arm, field) == getattr(other, field) for field in Experiment.model_fields]
        return arm.precision is other.precision, arm.ep_backend is other.ep_backend, sum(same)

    legal = {other: one for other, one in named_arms().items() if one.model == arm.model and check(one).legal}
    # Of equals the first, which is the plainest variant: the table begins with it.
    return max(legal, key=lambda other: in_common(legal[other]))


def _arms(model: str) -> Iterator[Experiment]:
    """Every precision with every dispatcher, in all variants of quantisation and of dispatch, illegal ones included."""
    # NVFP4 is for numerics only; the published study is about speed.
    fast = [precision for precision in Precision if precision is not Precision.NVFP4]
    for precision, backend in product(fast, EPBackend):
        for variant in _variants(model, precision):
            fields = {"precision": precision, "ep_backend": backend, **variant}
            if backend is EPBackend.MINIMAL_ASYNC_EP:
                fields["ep"] = MINIMAL_ASYNC_EP
            yield Experiment(**{"model": model, **SHARED, **PUBLISHED[model], **fields})


def _variants(model: str, precision: Precision) -> Iterator[dict[str, Any]]:
    if precision is Precision.MXFP8:
        linears = PUBLISHED[model].get("tp", 1) == 1  # MXFP8 linears do not support tensor parallelism
        for quantize in ("experts", "experts+linears")[: 1 + linears]:
            yield {"quantize": quantize}
            yield {"quantize": quantize, "wgrad": "bf16"}
            yield {"quantize": quantize, "wgrad": "bf16", "dispatch_precision": "mxfp8"}
        return
    yield {}
    if precision is Precision.FP8:
        yield {"dispatch_precision": "fp8"}
    yield {"dispatch_precision": "mxfp8"}
