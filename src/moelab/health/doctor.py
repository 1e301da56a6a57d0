"""What this machine can train, and what is missing for the rest."""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moelab.experiment import EPBackend, Experiment, Precision
from moelab.experiment_file import read_hardware
from moelab.finding import Finding, Severity, any_error, as_text
from moelab.hardware import architecture, cluster_of, has_native_mxfp8, known_gpu
from moelab.health.deepep import Build, examine_environment, find_build
from moelab.health.node import check_fabric, check_gpus, read_gpus
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
MODEL = "debug"
"""What arms are asked of: DeepEP takes its 256 features, and no machine runs DeepEP with nano's 128."""
TRAINS = f"What this machine trains (asked of the {MODEL} model)"


@dataclass(frozen=True, kw_only=True)
class ArmAnswer:
    """One arm of a study, and why it does not run here if it does not."""

    name: str
    precision: Precision
    backend: EPBackend
    kernels: str  # how it runs where it does
    reasons: tuple[str, ...]

    @property
    def reason(self) -> str:
        """All reasons; empty if the arm runs."""
        return "; ".join(self.reasons)


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
            "trains": [{"what": what, "runs": runs, "found": found} for runs, what, found in trains(self.arms)],
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
        lines = [f"  {'ok ' if runs else '-- '} {what}: {found}" for runs, what, found in trains(self.arms)]
        findings = as_text({"This machine": self.findings, "DeepEP and what it needs": self.deepep})
        return "\n".join([findings, "", TRAINS, *lines])


def trains(arms: Sequence[ArmAnswer]) -> list[tuple[bool, str, str]]:
    """What runs, what does not, and why, each reason once: whether, what, and how or why not.

    First by precision, with the standard dispatch; then by dispatch, with what stops it beside the precision.
    """
    standard = [arm for arm in arms if arm.backend is EPBackend.STANDARD]
    lines = _by_words([(arm.precision.value.upper(), arm.reasons, arm.kernels) for arm in standard])
    alone = {arm.precision: arm.reasons for arm in standard}
    for backend in dict.fromkeys(arm.backend for arm in arms if arm not in standard):
        own = [arm for arm in arms if arm.backend is backend]
        beside = [(arm.name, [one for one in arm.reasons if one not in alone[arm.precision]], "") for arm in own]
        if running := [arm.name for arm in own if not arm.reasons]:
            lines.append((True, f"{backend.value} dispatch", f"runs in {', '.join(running)}"))
        lines += _by_words([answer for answer in beside if answer[1]])
    return lines


def _by_words(answers: Sequence[tuple[str, Sequence[str], str]]) -> list[tuple[bool, str, str]]:
    """One line for each reason, with all that it stops, and one for all that run in the same way."""
    names_of: dict[tuple[bool, str], list[str]] = {}
    for name, reasons, kernels in answers:
        for words in reasons or [kernels]:
            # What else would be legal, and for which precision, differs between arms that lack the same.
            told = re.sub(r"\. (Legal|No) .*| \(precision \w+\)", "", words)
            names_of.setdefault((not reasons, told), []).append(name)
    return [(runs, ", ".join(names), words) for (runs, words), names in names_of.items()]


def examine(*, hardware: str = "local", smoke: bool = False) -> Examination:
    """Look at hardware, packages and tools. Loads neither torch nor plotly.

    The network is compared with the hardware's profile, or file of one's own. The smoke test takes seconds to minutes.

    Raises:
        BadInput: if there is no such profile.
    """
    # Of `local` no network is known.
    cluster = None if hardware == "local" else cluster_of(read_hardware(hardware))
    nic = cluster.node.nic_gb_s if cluster else None
    nodes = cluster.nodes if cluster else 1
    network = examine_environment(nodes=nodes, nic_gb_s=None if nic is None else float(nic))
    alone = network if nodes == 1 else examine_environment()
    gpus_found = tuple(_gpus())
    stop_all = [gpu_problem() and "nothing is known about this machine's GPUs"]
    stop_all += [f"{one.name}: {one.found}" for one in gpus_found if one.name == "fabric"]
    # An arm with expert parallelism needs two ranks, but on one GPU the second would find none.
    ranks = 2 if gpu_problem() else min(2, ranks_here())
    size = {"model": MODEL, "gpus_per_node": ranks, "ep": ranks, "activation_checkpoint": "full"}
    arms = [
        Experiment(precision=precision, ep_backend=backend, **size) for backend in EPBackend for precision in Precision
    ]
    build = find_build(this_machine())
    return Examination(
        findings=(_processor(), *gpus_found, *map(_package, TESTED), *_tools()),
        arms=tuple(_arm(arm, [why for why in stop_all if why], build, alone) for arm in arms),
        deepep=(*network, smoke_test()) if smoke else network,
    )


def _arm(experiment: Experiment, stop_all: Sequence[str], build: Build, network: Sequence[Finding]) -> ArmAnswer:
    backend = experiment.ep_backend
    gpus_here = () if gpu_problem() else gpus()
    # All of them: ranks of one run must compute the same, so one GPU without native kernels decides for all.
    native = bool(gpus_here) and all(has_native_mxfp8(gpu.capability) for gpu in gpus_here)
    kernels = {
        Precision.BF16: "runs",
        Precision.FP8: "runs with FP8 tensor cores",
        Precision.MXFP8: "runs with native kernels" if native else "runs emulated: MXFP8 numerics, not its speed",
        Precision.NVFP4: "runs emulated: NVFP4 numerics, not its speed",
    }[experiment.precision]
    # Of several reasons about one field the last is the one about this machine's GPUs.
    reasons = list(stop_all) or list({reason.partition(" ")[0]: reason for reason in refusals(experiment)}.values())
    needed = {EPBackend.DEEPEP: "V2", EPBackend.HYBRIDEP: "hybrid-ep"}.get(backend)
    if needed and not any(reason.startswith("ep_backend") for reason in reasons) and not stop_all:
        if build.kind != needed:
            reasons.append(
                f"ep_backend {backend.value} needs another build of DeepEP, {needed}; here: {build.in_words}"
            )
        elif broken := [f"{one.name}: {one.found}" for one in network if one.severity == "error"]:
            reasons.append("; ".join(broken))
    return ArmAnswer(
        name=experiment.arm,
        precision=experiment.precision,
        backend=backend,
        kernels=kernels,
        reasons=tuple(reasons),
    )


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
    """The GPUs that a process sees, and what is wrong with their clocks, memory or fabric."""
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
    # GPUs have had their line: of the rest only what is wrong is news.
    machine = this_machine()
    yield from (one for one in (*check_gpus(read_gpus(machine)), *check_fabric(machine)) if not one.ok)


def _package(name: str) -> Finding:
    installed = version(name)
    lack = "" if is_tested(name, installed) else f"moelab needs {name} {' or '.join(TESTED[name])}: pip install moelab"
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
