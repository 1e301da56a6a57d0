"""Whether a cluster has what a study needs, as seen from where it is submitted: layout, memory, data, disk space.

What no launch can know by itself, memory and the time of a step, is handed to it by whoever plans (:data:`Foresee`).
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from moelab.experiment import Experiment
from moelab.experiment_file import Study
from moelab.finding import Finding, fault
from moelab.hardware import Gpu
from moelab.launch.cluster import ClusterProfile
from moelab.layout import check, twins
from moelab.model import TOKENIZERS, count_parameters, shape_for

STREAMING_NODES = 4
"""Most nodes that may stream C4: each rank makes some ten calls to the hub at the start, and a cluster has one address;
the hub answers 500 API calls in 5 minutes (huggingface.co/docs/hub/rate-limits, November 2026)."""
STATE_BYTES = 3 * 4
"""Per parameter in a checkpoint: its FP32 master weight and AdamW's two moments."""
LOG_BYTES = 1 << 30
"""Space for what else a run writes. A choice."""


@dataclass(frozen=True, kw_only=True)
class Foreseen:
    """What planning says of a legal arm before it runs."""

    fits: bool | None = None  # whether its fullest GPU has room; None where that is not known
    memory: str = ""  # of that GPU, in words
    dominant: str = ""  # what takes most of it, and what to do
    slowest_step_s: float | None = None  # at the slow end of the projection's interval; None without a projection


Foresee = Callable[[Experiment], Foreseen]


def foresee_nothing(_experiment: Experiment) -> Foreseen:
    """For a launch that nobody planned: its layout is checked all the same."""
    return Foreseen()


def check_plans(study: Study, cluster: ClusterProfile, foresee: Foresee) -> Iterator[Finding]:
    """Each arm's layout, memory and size. An error here means that submitting is refused."""
    same_training = twins(study.first_of_arms, Gpu(name=f"cluster {cluster.name}", capability=None, memory_gib=None))
    for experiment in study.first_of_arms:  # a seed changes neither layout nor memory
        nodes, gpus, arm = experiment.nodes, experiment.gpus_per_node, experiment.arm
        plan_only = shape_for(experiment).plan_only
        problems = [*check(experiment).reasons, *([plan_only] if plan_only else [])]
        problems += [same_training[arm]] if arm in same_training else []
        if nodes > cluster.nodes:
            raised = f"set `nodes` in a copy of the profile, or use --cluster-set nodes={nodes}"
            problems.append(f"nodes is {nodes}: a job on {cluster.name} may have at most {cluster.nodes}; {raised}")
        if 0 < cluster.gpus_per_node < gpus:
            problems.append(f"gpus_per_node is {gpus}: a node of {cluster.name} has {cluster.gpus_per_node}")
        if problems:
            yield fault("plan", "; ".join(problems), arm=arm)
            continue
        seen = foresee(experiment)
        if seen.fits is None:
            why = "hardware is local" if experiment.hardware == "local" else "its memory was not predicted"
            found = f"legal; {why}, so whether it fits there is unknown"
            yield Finding(name=f"plan of {arm}", severity="note", found=found)
        elif seen.fits:
            yield Finding(name=f"plan of {arm}", severity="ok", found=f"legal; {seen.memory}")
        else:
            yield fault("memory", seen.memory, arm=arm, dominant=seen.dominant)


def check_data(study: Study, cluster: ClusterProfile) -> Iterator[Finding]:
    """Whether the data is where the nodes will look for it."""
    wanted = [one for one in study.first_of_arms if one.dataset == "c4"]
    own = sorted({one.dataset for one in study.first_of_arms} - {"python", "c4"})
    for text in own:
        if Path(text).is_dir():
            yield Finding(name="data", severity="ok", found=f"text in {text}")
        else:
            yield fault("text is not there", folder=text)
    if not wanted and not own:
        yield Finding(name="data", severity="ok", found="made on the nodes from Python's own text, without a download")
        return
    if not wanted:
        return
    folder, nodes = cluster.datasets.get("c4"), max(one.nodes for one in wanted)
    if folder is None and nodes > STREAMING_NODES:
        yield fault("C4 is streamed by many", nodes=nodes, most=STREAMING_NODES)
    elif folder is None:
        yield Finding(name="data", severity="note", found=f"C4 is streamed from the hub by {nodes} nodes")
    elif not Path(folder).is_dir() or not any(Path(folder).iterdir()):
        yield fault("C4 is not there", folder=folder)
    else:
        yield Finding(name="data", severity="ok", found=f"C4 in {folder}")
    for model in sorted({one.model for one in wanted} & TOKENIZERS.keys()):
        tokenizer = Path(cluster.tokenizers.get(model, TOKENIZERS[model]))
        if not (tokenizer / "tokenizer.json").exists():
            yield fault("tokenizer is not there", folder=tokenizer, model=model)


def check_room(study: Study | None, cluster: ClusterProfile, runs: Path, foresee: Foresee) -> Iterator[Finding]:
    """Whether runs and checkpoints can be written, and whether they fit."""
    saves, needed = Path(cluster.scratch or runs), checkpoint_bytes(study, cluster, foresee) if study else 0
    # Without scratch both are one folder, which is then checked once for the sum.
    wanted = {runs: LOG_BYTES, saves: needed + (0 if cluster.scratch else LOG_BYTES)}
    for folder, size in wanted.items():
        existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
        # Try to write a file: a folder's permissions say nothing about quotas and read-only mounts.
        try:
            with tempfile.NamedTemporaryFile(dir=existing, prefix=".moelab-"):
                free = shutil.disk_usage(existing).free
        except OSError as error:
            found, user = f"cannot be written: {error.strerror or error}", os.environ.get("USER", "this user")
            yield fault("room that cannot be written", found, folder=folder, existing=existing, user=user)
            continue
        found = f"{free / 1e9:,.0f} GB free, {size / 1e9:,.0f} GB needed"
        if study and folder == saves:
            found += _checkpoints_in_words(study, cluster, needed, foresee)
        if free < size:
            yield fault("room", found, folder=folder)
        else:
            yield Finding(name=f"disk space in {folder}", severity="ok", found=f"{found}; quotas are not checked")


def checkpoint_bytes(study: Study, cluster: ClusterProfile, foresee: Foresee) -> int:
    """Most bytes of checkpoints, of all runs at once: an array's tasks may run together, and checkpoints stay."""
    return sum(_state_bytes(one) * checkpoints_at_most(one, cluster, foresee) for one in study.experiments)


def checkpoints_at_most(experiment: Experiment, cluster: ClusterProfile, foresee: Foresee) -> int:
    """Most checkpoints of a run at once: those that are kept, and one that is written before an old one is deleted.

    One is due at every interval but not after the last step (:class:`~moelab.titan.preempt.ResumeCheckpoints`), and
    whenever the time limit stops the run: at the slow end of the projection's interval, or never without a projection.
    """
    if cluster.scheduler == "none":  # `moelab run` saves none
        return 0
    interval, steps = cluster.checkpoint_interval_steps, experiment.steps
    due = (steps - 1) // interval if interval else 0
    if (step_s := foresee(experiment).slowest_step_s) is not None:
        # Each job trains until signal_s before its limit; the last one ends by itself.
        stops = math.ceil(steps * step_s / (60 * cluster.time_limit_minutes - cluster.signal_s)) - 1
        due += min(stops, cluster.requeues + 1)
    return min(due, cluster.checkpoints_kept + 1)


def _state_bytes(experiment: Experiment) -> int:
    """Of one checkpoint."""
    return STATE_BYTES * count_parameters(shape_for(experiment)).total


def _checkpoints_in_words(study: Study, cluster: ClusterProfile, needed_bytes: int, foresee: Foresee) -> str:
    if needed_bytes:
        count = sum(checkpoints_at_most(one, cluster, foresee) for one in study.experiments)
        return f" (derived: up to {count} checkpoints of all runs at once, {STATE_BYTES:g} bytes per parameter)"
    if cluster.scheduler == "none":
        return ""
    largest = max(map(_state_bytes, study.experiments))
    return f" (no checkpoint is due; a run that is stopped early would save one of {largest / 1e9:,.1f} GB)"
