"""What a study needs of a cluster, looked at from where it is submitted: plan, memory, data, room."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from moelab.experiment import Experiment
from moelab.experiment_file import Study
from moelab.finding import Finding
from moelab.launch.cluster import ClusterProfile
from moelab.memory.activations import FP32
from moelab.model import count_parameters, shape_for
from moelab.plan import Plan, plan

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
    needed = checkpoint_bytes(study, cluster) if study else 0
    places = {runs: LOG_BYTES, Path(cluster.scratch or runs): needed + (0 if cluster.scratch else LOG_BYTES)}
    for folder, wanted in places.items():
        yield _room(folder, wanted, needed)


def checkpoint_bytes(study: Study, cluster: ClusterProfile) -> int:
    """Bytes of checkpoints at most: those that a run keeps and one that is being written, of every run at once."""
    of_runs = [STATE_BYTES * count_parameters(shape_for(one)).total for one in study.experiments]
    return (cluster.checkpoints_kept + 1) * sum(of_runs)


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


def _room(folder: Path, wanted_bytes: int, checkpoints_bytes: int) -> Finding:
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
    found = f"{free / 1e9:,.0f} GB free, {wanted_bytes / 1e9:,.0f} GB wanted"
    if checkpoints_bytes and wanted_bytes >= checkpoints_bytes:
        found += " (derived: checkpoints of all runs at once, 12 bytes a parameter)"
    if free >= wanted_bytes:
        return Finding(name=name, severity="ok", found=f"{found}; a quota is not seen")
    return Finding(
        name=name,
        severity="error",
        found=found,
        cause="the file system is nearly full, or too small for the checkpoints of this study",
        consequence="a checkpoint would be cut off, and what was trained since the last one lost",
        remedy="free some, set scratch of the profile to a larger file system, or submit fewer arms at once (--arm)",
    )
