"""A notebook's study: train it here or give it to Slurm, judge what is there, project its arms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from moelab.errors import BadInput, Refused
from moelab.experiment_file import Study
from moelab.judge.report import NothingToJudge, StudyReport, judge_study
from moelab.launch.cluster import ClusterProfile
from moelab.planning.project import foresee, project
from moelab.planning.trust import Estimate
from moelab.runs import directory
from moelab.runs.status import State
from moelab.traces.explanation import explain

Say = Callable[[str], None]


def will_submit(study: Study, runs: Path, cluster: ClusterProfile, *, submit: bool) -> bool:
    """Whether :func:`bring_forward` would give Slurm anything: not while runs are with it, nor after all have ended."""
    from moelab.launch.status import ACTIVE, refresh

    if not submit or cluster.scheduler == "none":
        return submit
    folder = directory.discover(runs / study.name)
    states = [{status.state for status in refresh(folder.attempts(one))} for one in study.experiments]
    # Another submission while one is queued would train the same seeds twice.
    with_slurm = any(tried & set(ACTIVE) for tried in states)
    return not with_slurm and any(State.COMPLETED not in tried for tried in states)


def bring_forward(
    study: Study,
    runs: Path,
    cluster: ClusterProfile,
    *,
    submit: bool,
    say: Say,
    on_failure: Literal["continue", "stop"] = "continue",
) -> None:
    """Do the next thing that a study needs; called again, it goes on where the study stands.

    Without Slurm, what is missing is trained here. With Slurm, jobs are looked at and what is missing is submitted,
    if ``submit`` allows it.

    ``runs`` is the folder that holds all studies, ``say`` receives lines for the reader, and ``on_failure`` tells
    whether to go on here with the next experiment after one failed.

    Raises:
        Refused: if this machine or the plan cannot run it, or ``submit`` asks for Slurm on a cluster without it.
    """
    from moelab.launch.local import run_study
    from moelab.launch.status import ACTIVE, refresh
    from moelab.launch.submit import submit as submit_to_slurm

    if submit and cluster.scheduler == "none":
        raise Refused(f"submit is True, and cluster {cluster.name} has no Slurm; set submit = False to train here")
    if cluster.scheduler == "none":
        # A failed run is told and not raised: the notebook shows what the others did.
        for run in run_study(study, runs, on_failure=on_failure, say=say).failed:
            say(f"{run.name}: {run.status.in_words()}")
        return
    folder = directory.discover(runs / study.name)
    for line in folder.lines:
        say(line)
    tried = [run for one in study.experiments for run in folder.attempts(one)]
    # All at once: Slurm is asked in one call, however many runs there are.
    states = refresh(tried)
    for run, status in zip(tried, states, strict=True):
        say(f"{run.name}: {status.state}" + (f", job {status.job_id}" if status.job_id else ""))
    if any(status.state in ACTIVE for status in states):
        say("Slurm has runs of this study: run the notebook again when they have ended")
    elif submit:
        say(submit_to_slurm(study, runs, cluster, foresee=foresee).as_text())
    else:
        say("nothing submitted: submit is False")


def judged_so_far(folder: Path, study: Study, *, reference: str, say: Say, **rules: Any) -> StudyReport | None:
    """What the finished runs of a study say; None while there are none and one may still finish.

    Exactly the study's experiments are judged, by further rules of :func:`~moelab.judge.report.judge_study`; ``say``
    receives why there is nothing to judge.

    Raises:
        NothingToJudge: if all runs have ended and none finished, with the reason of each.
    """
    if not any(directory.find(folder)):
        say(f"no run of {study.name} yet: nothing of this machine to judge")
        return None
    try:
        return judge_study(folder, study=study, reference=reference, explain=explain, **rules)
    except NothingToJudge as nothing:
        if all(run.status.state.is_final for run in directory.find(folder)):
            raise
        say(str(nothing))
        return None


CLUSTER_FIELDS = {
    "partition": "Slurm's partition of the GPU nodes",
    "account": "what is charged; most clusters refuse a job without one",
    "qos": "quality of service, where the cluster has several",
    "time_limit_minutes": "of one job; a run that is not finished then is saved and requeued",
    "nodes": "most nodes of one job",
    "container": "image with moelab, and mounts outside:inside (needs pyxis); or venv, conda_env or python",
    "venv": "absolute path, on every node",
    "runs": "folder of all runs, on a file system that all nodes share",
    "scratch": "shared folder for checkpoints; none: in the run directory",
    "datasets": "local copy of C4: {c4: /path}",
    "tokenizers": "by model: {671B: /path of DeepSeek-V3.1-Base}",
    "variables": "network of this cluster: NCCL_IB_HCA, NCCL_SOCKET_IFNAME, UCX_NET_DEVICES",
}
"""Fields of a cluster's profile that no two clusters share, and what goes there."""


def fields_to_edit(cluster: ClusterProfile) -> pd.DataFrame:
    """What to check in a cluster's profile before the first submission: field, value now, what goes there."""
    values = cluster.model_dump(mode="json")
    words = {name: "not set" if values[name] in (None, {}, []) else values[name] for name in CLUSTER_FIELDS}
    shown = {
        name: ", ".join(f"{k}={v}" for k, v in one.items()) if isinstance(one, dict) else str(one)
        for name, one in words.items()
    }
    return pd.DataFrame({"field": list(shown), "now": list(shown.values()), "what goes there": CLUSTER_FIELDS.values()})


def projected_arms(study: Study, *, say: Say) -> Mapping[str, Estimate]:
    """Projection of each arm of a study that can be projected; where none can, the reason is said once."""
    estimates = {}
    refusals: dict[str, list[str]] = {}
    for experiment in study.first_of_arms:
        try:
            one = project(experiment)
        except (BadInput, Refused) as error:
            refusals.setdefault(str(error), []).append(experiment.arm)
            continue
        low, high = one.interval
        estimates[experiment.arm] = Estimate(value=one.tps, low=low, high=high)
    # Arms of one layout fail for one reason; it is said once with all their names.
    for reason, arms in refusals.items():
        say(f"{', '.join(arms)} cannot be projected: {reason}")
    return estimates
