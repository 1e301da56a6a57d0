"""What this machine can run, and what is missing for the rest."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moelab.experiment import EPBackend, Experiment, Precision
from moelab.experiment_file import read_hardware
from moelab.finding import Finding, Severity, any_error, as_text
from moelab.hardware import architecture, cluster_of, has_native_mxfp8, known_gpu
from moelab.health.deepep import examine_environment
from moelab.health.node import check_gpus, read_gpus
from moelab.health.smoke import NAME as SMOKE_TEST
from moelab.health.smoke import smoke_test
from moelab.launch.capability import refusals
from moelab.machine import (
    TESTED,
    GpusUnknown,
    cores,
    environment,
    find_chromium,
    gpu_problem,
    gpus,
    has_module,
    is_tested,
    memory_bytes,
    physical_memory_bytes,
    ranks_here,
    this_machine,
    version,
)

MIN_MEMORY_GIB, MIN_DISK_GIB = 4, 2


@dataclass(frozen=True, kw_only=True)
class ArmAnswer:
    """One arm of a study and whether it runs here: ``reason`` is empty if it does."""

    name: str
    kernels: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Examination:
    """What :func:`examine` found."""

    findings: tuple[Finding, ...]
    arms: tuple[ArmAnswer, ...]
    deepep: tuple[Finding, ...]

    def to_json(self) -> dict[str, Any]:
        """For a program."""
        return {
            "findings": [{**finding.to_json(), "ok": finding.ok} for finding in self.findings],
            "arms": [
                {"arm": arm.name, "runs": not arm.reason, "kernels": arm.kernels, "reason": arm.reason}
                for arm in self.arms
            ],
            "deepep": [finding.to_json() for finding in self.deepep],
            "environment": environment(),
        }

    @property
    def failed(self) -> bool:
        """Whether the GPUs do not work, or the smoke test ran and failed."""
        # Of DeepEP's findings the smoke test alone counts: a machine without DeepEP trains the standard arms.
        return any_error(self.findings) or any_error(one for one in self.deepep if one.name == SMOKE_TEST)

    def as_text(self) -> str:
        """For a person."""
        arms = [f"  {'-- ' if arm.reason else 'ok '} {arm.name}: {arm.reason or arm.kernels}" for arm in self.arms]
        findings = as_text({"This machine": self.findings, "DeepEP and what it needs": self.deepep})
        return "\n".join([findings, "", "Arms of a study (nano model)", *arms])


def examine(*, hardware: str = "local", smoke: bool = False) -> Examination:
    """Look at hardware, packages and tools. Loads neither torch nor plotly.

    The network is compared with the hardware's profile, or file of one's own. The smoke test takes seconds to minutes.

    Raises:
        BadInput: if there is no such profile.
    """
    # Of `local` no network is known.
    cluster = None if hardware == "local" else cluster_of(read_hardware(hardware))
    nic = cluster.node.nic_gb_s if cluster else None
    network = examine_environment(nodes=cluster.nodes if cluster else 1, nic_gb_s=None if nic is None else float(nic))
    findings = (_processor(), *_gpus(), *map(_package, TESTED), *_tools())
    arms = [Experiment(precision=precision, ep_backend=backend) for backend in EPBackend for precision in Precision]
    # An arm with expert parallelism needs two ranks, but on one GPU the second would find none.
    ranks = 2 if gpu_problem() else min(2, ranks_here())
    here = {"gpus_per_node": ranks, "ep": ranks, "activation_checkpoint": "full"}  # every backend takes full
    return Examination(
        findings=findings,
        arms=tuple(_arm(arm.model_copy(update=here)) for arm in arms),
        deepep=(*network, smoke_test()) if smoke else network,
    )


def _arm(experiment: Experiment) -> ArmAnswer:
    gpus_here = () if gpu_problem() else gpus()
    # All of them: ranks of one run must compute the same, so one GPU without native kernels decides for all.
    native = bool(gpus_here) and all(has_native_mxfp8(gpu.capability) for gpu in gpus_here)
    kernels = {
        Precision.BF16: "runs",
        Precision.FP8: "runs with FP8 tensor cores",
        Precision.MXFP8: "runs with native kernels" if native else "runs emulated: MXFP8 numerics, not its speed",
        Precision.NVFP4: "runs emulated: NVFP4 numerics, not its speed",
    }[experiment.precision]
    reasons = ["nothing is known about this machine's GPUs"] if gpu_problem() else refusals(experiment)
    # Of several reasons about one field the last is the one about this machine's GPUs.
    of_fields = {reason.partition(" ")[0]: reason for reason in reasons}
    return ArmAnswer(name=experiment.arm, kernels=kernels, reason="; ".join(of_fields.values()))


def _seen(name: str, found: str, lack: str = "", severity: Severity = "warning") -> Finding:
    """A finding that is fine unless something lacks; ``lack`` says what follows from that, or what to do."""
    return Finding(name=name, severity=severity if lack else "ok", found=found, remedy=lack)


def _processor() -> Finding:
    gib, machine_gib = memory_bytes() / 2**30, physical_memory_bytes() / 2**30
    limited = f" of the machine's {machine_gib:.0f}, by the limit of this container or job" if gib < machine_gib else ""
    found = f"{environment()['processor']}, {cores()} cores, {gib:.0f} GiB{limited}"
    lack = "" if gib >= MIN_MEMORY_GIB else f"two ranks of nano need about {MIN_MEMORY_GIB} GiB"
    return _seen("processor and memory", found, lack)


def _gpus() -> Iterator[Finding]:
    """The GPUs that a process sees, and which of them are throttled or have memory errors."""
    name = "GPUs"
    try:
        listed = gpus()
    except GpusUnknown as error:
        advice = f"nothing is known about the GPUs: {error.remedy}; until then, hardware=cpu uses the processor"
        yield _seen(name, error.found, advice, "error")
        return
    if not listed:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hidden = "" if visible is None else f" left by CUDA_VISIBLE_DEVICES={visible!r}"
        yield _seen(name, f"none{hidden}; ranks run as processes on the CPU, and MXFP8 is emulated")
        return
    kinds = Counter((gpu.name, architecture(gpu.capability), gpu.driver) for gpu in listed)
    unknown = [model for model, _sm, _driver in kinds if known_gpu(model) is None]
    lacks = [f"the peak rates of {' and '.join(unknown)} are unknown: no MFU, no projection"] if unknown else []
    if len(kinds) > 1:
        lacks.append("a run on several kinds of GPU is as slow as the slowest; choose one with CUDA_VISIBLE_DEVICES")
    yield _seen(
        name,
        "; ".join(f"{count} × {model}, {sm}, driver {driver}" for (model, sm, driver), count in kinds.items()),
        "; ".join(lacks),
        "note",  # such GPUs train as well
    )
    # GPUs have had their line: of their clocks and memory only what is wrong is news.
    yield from (one for one in check_gpus(read_gpus(this_machine())) if not one.ok)


def _package(name: str) -> Finding:
    installed = version(name)
    lack = "" if is_tested(name, installed) else f"moelab needs {name} {TESTED[name]}: pip install moelab"
    # The CPU build is not on PyPI: someone chose PyTorch's own index for it.
    if name == "torch" and installed and installed.endswith("+cpu") and not gpu_problem() and gpus():
        lack = "this build has no CUDA and cannot see the GPUs: reinstall it with pip install moelab"
    return _seen(name, installed or "not installed", lack)


def _tools() -> Iterator[Finding]:
    """Disk, notebooks, pictures and Slurm."""
    free = shutil.disk_usage(Path.cwd()).free / 2**30
    room = f"a study writes up to {MIN_DISK_GIB} GiB of logs and metrics: free some space"
    yield _seen("free disk here", f"{free:.0f} GiB", "" if free >= MIN_DISK_GIB else room)
    missing = [module for module in ("jupyterlab", "kaleido") if not has_module(module)]
    yield _seen(
        "JupyterLab",
        f"missing {', '.join(missing)}" if missing else "installed",
        "`make lab`, or pip install -e '.[lab]' in the clone, brings both" if missing else "",
    )
    # Since its release 1, kaleido brings no browser of its own.
    browser, kaleido = find_chromium(), has_module("kaleido")
    yield _seen(
        "PNG figures",
        f"kaleido {'installed' if kaleido else 'missing'}, Chromium {'found' if browser else 'not found'}",
        "" if browser and kaleido else "without both, notebooks have interactive figures only, and no PNGs",
    )
    yield _seen(
        "Slurm", "sbatch found" if shutil.which("sbatch") else "no sbatch: jobs cannot be submitted from this machine"
    )
