"""What this machine can run, and what is missing for the rest."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moelab import finding as deepep
from moelab.experiment import EPBackend, Experiment, Precision
from moelab.hardware import cluster_of, has_native_mxfp8, known_gpu
from moelab.health.deepep import examine_environment
from moelab.health.links import Expected
from moelab.health.smoke import NAME as SMOKE_TEST
from moelab.health.smoke import smoke_test
from moelab.launch.capability import refusals
from moelab.machine import (
    cores,
    environment,
    find_chromium,
    gpu_problem,
    gpus,
    has_module,
    memory_bytes,
    version,
)

PINNED = {"torch": "2.14", "torchtitan": "0.3.0", "torchao": "0.18.0"}
MIN_MEMORY_GIB, MIN_DISK_GIB = 4, 2
GPUS = "GPUs"
GPUS_ADVICE = (
    "what the GPUs can do is not known until nvidia-smi works: after an upgrade of the driver reboot or reload its "
    "modules; in a container pass the GPUs on; hardware=cpu uses the processor meanwhile"
)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing looked at: ``ok``, what was found, and what follows from it or what to do."""

    name: str
    ok: bool
    found: str
    advice: str = ""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One arm of a study and whether it runs here: ``reason`` is empty if it does."""

    name: str
    kernels: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Examination:
    """What :func:`examine` found."""

    findings: tuple[Finding, ...]
    arms: tuple[Arm, ...]
    deepep: tuple[deepep.Finding, ...]

    def to_json(self) -> dict[str, Any]:
        """For a program."""
        return {
            "findings": [vars(finding) for finding in self.findings],
            "arms": [
                {"arm": arm.name, "runs": not arm.reason, "kernels": arm.kernels, "reason": arm.reason}
                for arm in self.arms
            ],
            "deepep": [finding.to_json() for finding in self.deepep],
            "environment": environment(),
        }

    @property
    def failed(self) -> bool:
        """Whether nvidia-smi fails, or the smoke test ran and did."""
        broken = any(one.name == GPUS and not one.ok for one in self.findings)
        return broken or any(one.name == SMOKE_TEST and not one.ok for one in self.deepep)

    def as_text(self) -> str:
        """For a person."""
        lines = ["This machine"]
        for finding in self.findings:
            lines.append(f"  {'ok ' if finding.ok else '-- '} {finding.name}: {finding.found}")
            lines += [f"       {finding.advice}"] if finding.advice else []
        lines += ["", "DeepEP and what it needs"]
        lines += [line for one in self.deepep for line in one.as_lines()]
        lines += ["", "Arms of a study (nano model)"]
        for arm in self.arms:
            lines.append(f"  {'ok ' if not arm.reason else '-- '} {arm.name}: {arm.reason or arm.kernels}")
        return "\n".join(lines)


def examine(*, hardware: str = "local", smoke: bool = False) -> Examination:
    """Look at hardware, packages and tools. Loads neither torch nor plotly.

    Args:
        hardware: profile that the network is held against, such as ``b200_x256``.
        smoke: start two ranks that send tokens to experts and back, some seconds to minutes.

    Raises:
        BadInput: if there is no such profile.
    """
    expected = None if hardware == "local" else Expected.of(cluster_of(hardware))  # of local no network is known
    network = examine_environment(expected=expected)
    findings = (_processor(), _gpus(), *map(_package, PINNED), _disk(), _lab(), _pictures(), _slurm())
    arms = [Experiment(precision=precision, ep_backend=backend) for backend in EPBackend for precision in Precision]
    ranks = 1 if gpu_problem() is None and len(gpus()) == 1 else 2
    here = {"gpus_per_node": ranks, "ep": ranks, "activation_checkpoint": "full"}  # every backend takes full
    fitted = [arm.model_copy(update=here) for arm in arms]
    return Examination(
        findings=findings,
        arms=tuple(_arm(experiment) for experiment in fitted),
        deepep=(*network, smoke_test()) if smoke else network,
    )


def _arm(experiment: Experiment) -> Arm:
    found = () if gpu_problem() else gpus()
    native = bool(found) and all(has_native_mxfp8(gpu.capability) for gpu in found)
    kernels = {
        Precision.BF16: "runs",
        Precision.FP8: "runs with FP8 tensor cores",
        Precision.MXFP8: "runs with native kernels" if native else "runs emulated: MXFP8 numerics, not its speed",
    }[experiment.precision]
    reasons = ["nvidia-smi fails, so what runs here is not known"] if gpu_problem() else refusals(experiment)
    # Of several about one field the last is the one about this machine's GPUs.
    of_fields = {reason.partition(" ")[0]: reason for reason in reasons}
    return Arm(name=experiment.arm, kernels=kernels, reason="; ".join(of_fields.values()))


def _processor() -> Finding:
    gib = memory_bytes() / 2**30
    found = f"{environment()['processor']}, {cores()} cores, {gib:.0f} GiB"
    advice = "" if gib >= MIN_MEMORY_GIB else f"two ranks of nano need about {MIN_MEMORY_GIB} GiB"
    return Finding(name="processor and memory", ok=not advice, found=found, advice=advice)


def _gpus() -> Finding:
    if problem := gpu_problem():
        return Finding(name=GPUS, ok=False, found=problem, advice=GPUS_ADVICE)
    if not gpus():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hidden = "" if visible is None else f" that CUDA_VISIBLE_DEVICES={visible!r} leaves"
        return Finding(name=GPUS, ok=True, found=f"none{hidden}; ranks are processes on the CPU, MXFP8 is emulated")
    kinds = Counter((gpu.name, gpu.sm, gpu.driver) for gpu in gpus())
    listed = [f"{count} × {name}, {sm}, driver {driver}" for (name, sm, driver), count in kinds.items()]
    unknown = [name for name, _sm, _driver in kinds if known_gpu(name) is None]
    advice = f"peak rates of {' and '.join(unknown)} are not known: no MFU, no projection" if unknown else ""
    return Finding(name=GPUS, ok=True, found="; ".join(listed), advice=advice)


def _package(name: str) -> Finding:
    found = version(name)
    release = (found or "").partition("+")[0]  # without the build, as in 0.18.0+cu130
    fits = release == PINNED[name] or release.startswith(f"{PINNED[name]}.")
    advice = "" if fits else f"moelab is written against {name} {PINNED[name]}; reinstall with pip install moelab"
    return Finding(name=name, ok=fits, found=found or "not installed", advice=advice)


def _disk() -> Finding:
    free = shutil.disk_usage(Path.cwd()).free / 2**30
    advice = (
        "" if free >= MIN_DISK_GIB else f"a study writes up to {MIN_DISK_GIB} GiB of logs and metrics; free some space"
    )
    return Finding(name="free disk here", ok=not advice, found=f"{free:.0f} GiB", advice=advice)


def _lab() -> Finding:
    missing = [module for module in ("jupyterlab", "kaleido") if not has_module(module)]
    advice = "`make lab`, or pip install -e '.[lab]' in the clone, brings both" if missing else ""
    return Finding(
        name="JupyterLab",
        ok=not missing,
        found=f"missing {', '.join(missing)}" if missing else "installed",
        advice=advice,
    )


def _pictures() -> Finding:
    browser, kaleido = find_chromium(), has_module("kaleido")
    advice = (
        ""
        if browser and kaleido
        else "without kaleido and Chromium figures are interactive only, with no PNG beside them"
    )
    found = f"kaleido {'installed' if kaleido else 'missing'}, Chromium {'found' if browser else 'not found'}"
    return Finding(name="PNG figures", ok=not advice, found=found, advice=advice)


def _slurm() -> Finding:
    found = shutil.which("sbatch") is not None
    return Finding(name="Slurm", ok=True, found="sbatch found" if found else "no sbatch: this is not a login node")
