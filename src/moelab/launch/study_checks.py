"""What a study needs of a cluster, looked at from where it is submitted: plan, memory, data, room."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from moelab.errors import BadInput, Refused
from moelab.experiment import Experiment
from moelab.experiment_file import Study
from moelab.finding import Finding
from moelab.launch.cluster import ClusterProfile
from moelab.memory.activations import FP32
from moelab.model import count_parameters, shape_for
from moelab.plan import Plan, plan
from moelab.projection.project import project

STREAMING_NODES = 4
"""Nodes that may stream C4: each rank asks the hub for itself, some ten times at the start, and a cluster has one
address; 500 calls of its API are answered in 5 minutes (huggingface.co/docs/hub/rate-limits, November 2026)."""
STATE_BYTES = 3 * FP32
"""Of a parameter in a checkpoint: its FP32 master weight and AdamW's two moments."""
LOG_BYTES = 1 << 30
"""Room for what else a run writes. A choice."""


def check_plans(study: Study, cluster: ClusterProfile) -> Iterator[Finding]:
    """Each arm's layout, memory and size. An error here is a refusal: submitting would be one too."""
    for experiment in first_of_arms(study):
        planned = plan(experiment)
        problems = [*planned.verdict.reasons, *_too_big(experiment, cluster)]
        if problems:
            yield Finding(
                name=f"plan of {experiment.arm}",
                severity="error",
                found="; ".join(problems),
                cause="the experiment asks for what TorchTitan or the cluster does not have",
                consequence="the run would fail when it starts",
                remedy="`moelab plan FILE --search` lists legal layouts",
            )
            continue
        yield _memory(planned)


def check_data(study: Study, cluster: ClusterProfile) -> Iterator[Finding]:
    """Whether the data is where the nodes will look for it."""
    wanted = [one for one in first_of_arms(study) if one.dataset == "c4"]
    if not wanted:
        yield Finding(name="data", severity="ok", found="made on the nodes from Python's own text: no download")
        return
    folder, nodes = cluster.datasets.get("c4"), max(one.nodes for one in wanted)
    if folder is None and nodes > STREAMING_NODES:
        yield _refused(
            f"C4 would be streamed by {nodes} nodes",
            f"the hub limits requests by address, and more than {STREAMING_NODES} nodes go beyond it",
            "download C4 once to a shared folder and set datasets.c4 of the cluster's profile to it",
        )
    elif folder is None:
        yield Finding(name="data", severity="note", found=f"C4 is streamed from the hub by {nodes} nodes")
    elif not Path(folder).is_dir() or not any(Path(folder).iterdir()):
        yield _refused(
            f"datasets.c4 is {folder}: no folder here, or empty",
            "C4 was not downloaded to it, or it is not mounted here",
            "download it there, or correct datasets.c4 of the cluster's profile",
        )
    else:
        yield Finding(name="data", severity="ok", found=f"C4 in {folder}")
    yield from _tokenizers(wanted, cluster)


def check_room(study: Study | None, cluster: ClusterProfile, runs: Path) -> Iterator[Finding]:
    """Whether runs and checkpoints can be written here, and fit."""
    saves, needed = Path(cluster.scratch or runs), checkpoint_bytes(study, cluster) if study else 0
    wanted = {runs: LOG_BYTES, saves: needed + (0 if cluster.scratch else LOG_BYTES)}
    for folder, size in wanted.items():
        yield _room(folder, size, _checkpoints_in_words(study, cluster, needed) if study and folder == saves else "")


def checkpoint_bytes(study: Study, cluster: ClusterProfile) -> int:
    """Bytes of checkpoints at most, of every run at once: a job array has no order, and a finished run's stay."""
    return sum(_state_bytes(one) * checkpoints_at_most(one, cluster) for one in study.experiments)


def checkpoints_at_most(experiment: Experiment, cluster: ClusterProfile) -> int:
    """Checkpoints of a run that are there at once: those that are kept, and one that is written before an old one goes.

    One is due at every interval but not after the last step (:class:`~moelab.titan.preempt.ResumeCheckpoints`), and
    whenever the time limit stops the run: by the slow end of the projection, or never where there is none.
    """
    if cluster.scheduler == "none":  # `moelab run` saves none
        return 0
    interval, steps = cluster.checkpoint_interval_steps, experiment.steps
    due = (steps - 1) // interval if interval else 0
    with suppress(BadInput, Refused):  # of hardware without figures, or a plan that is refused with its own reason
        projection = project(experiment)
        slowest_s = steps * projection.tokens_per_gpu / projection.interval[0]
        stops = math.ceil(slowest_s / (60 * cluster.time_limit_minutes - cluster.signal_s)) - 1
        due += min(stops, cluster.requeues + 1)
    return min(due, cluster.checkpoints_kept + 1)


def first_of_arms(study: Study) -> Sequence[Experiment]:
    """One experiment of each arm: its seeds differ in nothing that is looked at here."""
    return tuple({one.arm: one for one in reversed(study.experiments)}.values())[::-1]


def _too_big(experiment: Experiment, cluster: ClusterProfile) -> Iterator[str]:
    if experiment.nodes > cluster.nodes:
        yield f"nodes is {experiment.nodes}: a job of {cluster.name} gets up to {cluster.nodes}"
    if 0 < cluster.gpus_per_node < experiment.gpus_per_node:
        yield f"gpus_per_node is {experiment.gpus_per_node}: a node of {cluster.name} has {cluster.gpus_per_node}"


def _memory(planned: Plan) -> Finding:
    name, memory = f"plan of {planned.experiment.arm}", planned.memory
    assert memory is not None, "only a legal plan has memory"
    if planned.fits is None:
        return Finding(name=name, severity="note", found="legal; whether it fits is not known: hardware is local")
    found = f"{memory.worst_gib:.1f} of {memory.capacity_gib:.1f} GiB on the fullest GPU (predicted)"
    if planned.fits:
        return Finding(name=name, severity="ok", found=f"legal; {found}")
    return Finding(
        name=name,
        severity="error",
        found=found,
        cause=memory.dominant,
        consequence="the run would end with: CUDA out of memory",
        remedy="`moelab plan FILE --search` lists layouts that fit",
    )


def _tokenizers(wanted: Sequence[Experiment], cluster: ClusterProfile) -> Iterator[Finding]:
    from moelab.titan.corpus import TOKENIZERS

    for model in sorted({one.model for one in wanted} & TOKENIZERS.keys()):
        folder = Path(cluster.tokenizers.get(model, TOKENIZERS[model]))
        if not (folder / "tokenizer.json").exists():
            yield _refused(
                f"no tokenizer.json in {folder}, for model {model}",
                "TorchTitan's scripts/download_hf_assets.py has not put it there",
                f"fetch it, and set tokenizers.{model} of the cluster's profile to its folder",
            )


def _refused(found: str, cause: str, remedy: str) -> Finding:
    consequence = "ranks would fail while they load data, and the others wait for them"
    return Finding(name="data", severity="error", found=found, cause=cause, consequence=consequence, remedy=remedy)


def _state_bytes(experiment: Experiment) -> int:
    """Of one checkpoint."""
    return STATE_BYTES * count_parameters(shape_for(experiment)).total


def _checkpoints_in_words(study: Study, cluster: ClusterProfile, needed_bytes: int) -> str:
    if needed_bytes:
        count = sum(checkpoints_at_most(one, cluster) for one in study.experiments)
        return f" (derived: up to {count} checkpoints of all runs at once, 12 bytes a parameter)"
    if cluster.scheduler == "none":
        return ""
    largest = max(map(_state_bytes, study.experiments))
    return f" (no checkpoint is due; a run that is stopped before its end would save one of {largest / 1e9:,.1f} GB)"


def _room(folder: Path, wanted_bytes: int, checkpoints: str) -> Finding:
    name = f"room in {folder}"
    existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".moelab-"):
            free = shutil.disk_usage(existing).free
    except OSError as error:
        return Finding(
            name=name,
            severity="error",
            found=f"cannot be written: {error.strerror or error}",
            cause=f"{existing} is read-only, full, over quota, no folder, or not {os.environ.get('USER', 'yours')}'s",
            consequence="no run directory can be made",
            remedy="choose another folder with --runs, or set runs and scratch of the cluster's profile",
        )
    found = f"{free / 1e9:,.0f} GB free, {wanted_bytes / 1e9:,.0f} GB wanted{checkpoints}"
    if free >= wanted_bytes:
        return Finding(name=name, severity="ok", found=f"{found}; a quota is not seen")
    return Finding(
        name=name,
        severity="error",
        found=found,
        cause="the file system is nearly full, or too small for the checkpoints of this study",
        consequence="a checkpoint would be cut off, and what was trained since the last one lost",
        remedy="free some, set scratch of the profile to a larger file system, or submit fewer arms (--arm) and delete "
        "their checkpoints before the others",
    )
