"""What this machine can run. What it cannot is refused by name, with the nearest arm that it can.

Nothing falls back silently.
"""

from __future__ import annotations

from collections.abc import Callable

from moelab.experiment import EPBackend, Experiment, Precision
from moelab.hardware import has_deepep, has_grouped_fp8, has_native_mxfp8
from moelab.layout import check
from moelab.machine import GpuInfo, GpusUnknown, cores, gpus, has_module
from moelab.model import count_parameters, shape_for
from moelab.titan.arms import refusal

RANKS_PER_CORE = 4
CPU_PARAMETERS = 1_000_000_000
"""More are refused on a CPU: a step would take minutes."""


def refusals(experiment: Experiment, *, devices: tuple[GpuInfo, ...] | None = None) -> list[str]:
    """Every reason why this machine cannot run an experiment; where it has none of its own, those of a plan.

    Args:
        experiment: what would run.
        devices: GPUs to reckon with instead of this node's.
    """
    try:
        found = () if experiment.hardware == "cpu" else gpus() if devices is None else devices
    except GpusUnknown as error:
        return [str(error)]
    checks = (_trainer, _nodes, _ranks, _precision, _backend, _model, _hardware)
    reasons = [reason for one in checks if (reason := one(experiment, found))]
    return reasons or list(check(experiment).reasons)


def _trainer(_experiment: Experiment, _gpus: tuple[GpuInfo, ...]) -> str | None:
    if not has_module("triton"):
        return "TorchTitan 0.3.0 cannot be imported without Triton, on a CPU too; on Linux: pip install triton"
    return None


def _nodes(experiment: Experiment, _gpus: tuple[GpuInfo, ...]) -> str | None:
    if experiment.nodes > 1:
        return f"nodes is {experiment.nodes}: `moelab run` starts ranks on this machine only; set nodes=1"
    return None


def _ranks(experiment: Experiment, found: tuple[GpuInfo, ...]) -> str | None:
    ranks = experiment.gpus_per_node
    if found and ranks > len(found):
        return f"gpus_per_node is {ranks}, this machine has {len(found)} GPUs; set gpus_per_node={len(found)}"
    if not found and ranks > RANKS_PER_CORE * cores():
        most = RANKS_PER_CORE * cores()
        return f"gpus_per_node is {ranks}: {ranks} processes on {cores()} cores would only wait; use at most {most}"
    return None


def _precision(experiment: Experiment, found: tuple[GpuInfo, ...]) -> str | None:
    if experiment.precision is Precision.FP8 and (here := _lacking(found, has_grouped_fp8)):
        return f"precision fp8 needs FP8 grouped GEMMs (SM90 or SM100); {here}. Nearest: precision=mxfp8 (emulated)"
    native = experiment.precision is Precision.MXFP8 and experiment.mxfp8_kernels == "native"
    if native and (here := _lacking(found, has_native_mxfp8)):
        return f"mxfp8_kernels native needs SM100 or SM103; {here}. Nearest: mxfp8_kernels=emulated"
    if experiment.quantize != "experts" and experiment.precision is Precision.FP8:
        return "quantize experts+linears is for precision mxfp8; use quantize=experts with fp8"
    if experiment.precision is Precision.MXFP8 and experiment.quantize != "experts" and experiment.tp > 1:
        return f"quantize experts+linears needs tp=1 (tp is {experiment.tp}); use quantize=experts"
    return None


def _lacking(found: tuple[GpuInfo, ...], has: Callable[[float | None], bool]) -> str | None:
    """The first GPU that is not known to have something, in words; None if all have it."""
    if not found:
        return "this machine has no GPU to use"
    return next((f"{gpu.name} is {gpu.sm}" for gpu in found if not has(gpu.capability)), None)


def _backend(experiment: Experiment, found: tuple[GpuInfo, ...]) -> str | None:
    backend = experiment.ep_backend
    emulated = backend is EPBackend.DEEPEP and experiment.ep_kernels == "emulated"
    instead = "ep_kernels=emulated or ep_backend=standard" if backend is EPBackend.DEEPEP else "ep_backend=standard"
    if backend is not EPBackend.STANDARD and not found and not emulated:
        return f"ep_backend {backend.value} needs CUDA and this machine has no GPU to use. Nearest: {instead}"
    of_deepep = backend in (EPBackend.DEEPEP, EPBackend.HYBRIDEP) and not emulated
    if of_deepep and (here := _lacking(found, has_deepep)):
        return f"ep_backend {backend.value} needs DeepEP (SM90 or SM100); {here}. Nearest: {instead}"
    if reason := refusal(experiment):
        return reason
    if of_deepep and not has_module("deep_ep"):
        return f"ep_backend {backend.value} needs DeepEP, which is not installed. Nearest: ep_backend=standard" + (
            ", or ep_kernels=emulated for the numerics of deepep" if backend is EPBackend.DEEPEP else ""
        )
    return None


def _model(experiment: Experiment, found: tuple[GpuInfo, ...]) -> str | None:
    if count_parameters(shape_for(experiment)).total > CPU_PARAMETERS and not found:
        label = experiment.model_label
        return f"model {label} needs GPUs and this machine has none to use. Nearest: model=debug or model=nano"
    return None


def _hardware(experiment: Experiment, _gpus: tuple[GpuInfo, ...]) -> str | None:
    if experiment.hardware not in ("local", "cpu"):
        return f"hardware {experiment.hardware} is not known to `moelab run`; use hardware=local or hardware=cpu"
    return None
