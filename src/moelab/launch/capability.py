"""Whether this machine can run an experiment: what it lacks, and what is illegal on its GPUs.

:func:`moelab.layout.check` alone judges legality. Each refusal names what is wrong and what would run; nothing falls
back silently.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from moelab.experiment import EPBackend, Experiment, Precision
from moelab.experiment_file import Study
from moelab.hardware import cluster_of, gpu_from, gpu_of, has_gpus_of, has_native_mxfp8
from moelab.layout import check, twins
from moelab.machine import GpuInfo, GpusUnknown, cores, counted, gpus, has_module
from moelab.model import count_parameters, shape_for
from moelab.mxfp8 import kernels

RANKS_PER_CORE = 4
CPU_PARAMETERS = 1_000_000_000
"""More are refused on a CPU: a step would take minutes."""


def refusals_of(study: Study) -> list[str]:
    """Every reason why this machine cannot run a study: those of each arm, or arms that are one training here."""
    if reasons := [f"{one.arm}: {reason}" for one in study.first_of_arms for reason in refusals(one)]:
        return reasons
    all_on_cpu = all(one.hardware == "cpu" for one in study.experiments)
    here = replace(gpu_of("cpu" if all_on_cpu else "local"), name="this machine")
    return [f"{arm}: {why}" for arm, why in twins(study.first_of_arms, here).items()]


def differs_here(study: Study) -> Iterator[str]:
    """What is not as in a study's hardware where that is a profile, and this machine has its GPU."""
    profiles = dict.fromkeys(one.hardware for one in study.experiments if one.hardware not in ("local", "cpu"))
    for cluster in map(cluster_of, profiles):
        if cluster.gpus != len(gpus_here := gpus()):
            yield (
                f"hardware is {cluster.name}, {cluster.gpus} × {cluster.node.gpu.name}; trained here on "
                f"{counted(gpu.name for gpu in gpus_here)}: the same GPU, so kernels and memory are the same. A plan "
                f"or projection for {cluster.name} counts on its {cluster.gpus} GPUs and what joins them"
            )


def refusals(experiment: Experiment) -> list[str]:
    """Every reason why this machine cannot run an experiment: what it lacks, then those of a plan for its GPUs."""
    try:
        gpus_here = () if experiment.hardware == "cpu" else gpus()
    except GpusUnknown as error:
        return [str(error)]
    # Every kind is checked: on a mixed node the weakest GPU decides, whichever rank gets it.
    kinds = [gpu_from(gpu) for gpu in dict.fromkeys(gpus_here)] or [gpu_of("cpu")]
    illegal = dict.fromkeys(reason for gpu in kinds for reason in check(experiment, gpu=gpu).reasons)
    return [*_lacking(experiment, gpus_here), *illegal]


def _lacking(experiment: Experiment, gpus_here: tuple[GpuInfo, ...]) -> Iterator[str]:
    ranks, most, backend = experiment.gpus_per_node, RANKS_PER_CORE * cores(), experiment.ep_backend
    if not has_module("triton"):
        yield "TorchTitan 0.3.0 cannot be imported without Triton, on a CPU too; on Linux: pip install triton"
    if experiment.nodes > 1:
        yield f"nodes is {experiment.nodes}: `moelab run` starts ranks on this machine only; set nodes=1"
    if gpus_here and ranks > len(gpus_here):
        count = len(gpus_here)
        yield (
            f"gpus_per_node is {ranks}, this machine has {count} GPU{'s' * (count > 1)}; set gpus_per_node={count} or "
            "leave it out, or train processes on its CPU with hardware=cpu"
        )
    if not gpus_here and ranks > most:
        yield f"gpus_per_node is {ranks}: too many processes for {cores()} cores; use at most {most}"
    emulated = backend is EPBackend.DEEPEP and experiment.ep_kernels == "emulated"
    of_deepep = backend in (EPBackend.DEEPEP, EPBackend.HYBRIDEP) and not emulated
    if gpus_here and of_deepep and not has_module("deep_ep"):  # without a GPU, the plan says that it needs one
        or_emulated = ", or ep_kernels=emulated for the numerics of deepep" if backend is EPBackend.DEEPEP else ""
        yield (
            f"ep_backend {backend.value} needs DeepEP, which is not installed. "
            f"Nearest: ep_backend=standard{or_emulated}"
        )
    native = bool(gpus_here) and all(has_native_mxfp8(gpu.capability) for gpu in gpus_here)
    wants_native = experiment.precision is Precision.MXFP8 and experiment.mxfp8_kernels != "emulated"
    missing = [package for module, package in kernels.MODULES.items() if not has_module(module)]
    if native and wants_native and missing:
        yield (
            f"precision is mxfp8: its native kernels need {', '.join(missing)}, not installed here: "
            f"{kernels.INSTALL}; or set mxfp8_kernels=emulated, for the numerics without the speed"
        )
    if not gpus_here and count_parameters(shape_for(experiment)).total > CPU_PARAMETERS:
        label = experiment.model_label
        yield f"model {label} needs GPUs and this machine has none to use. Nearest: model=debug or model=nano"
    if reason := shape_for(experiment).plan_only:
        yield reason
    for target in experiment.overrides:
        # Ranks import from the working folder too.
        if not (
            has_module(module := target.rpartition(".")[0]) or Path(*module.split(".")).with_suffix(".py").exists()
        ):
            yield (
                f"overrides has {target}, and there is no module {module} here; start in the folder that it is in, or "
                "add that folder to PYTHONPATH"
            )
    if experiment.hardware not in ("local", "cpu") and not has_gpus_of(experiment.hardware, gpus_here):
        wanted, here = gpu_of(experiment.hardware).name, counted(gpu.name for gpu in gpus_here) or "no GPU"
        yield (
            f"hardware is {experiment.hardware}, whose GPU is {wanted}: `moelab run` trains on this machine only, "
            f"which has {here}; set hardware=local or hardware=cpu"
        )
