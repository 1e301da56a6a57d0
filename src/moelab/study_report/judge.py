"""Find the runs of a study that belong together, and judge them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from moelab.errors import BadInput, MoelabError
from moelab.experiment_file import Study
from moelab.runs import directory
from moelab.runs.collect import Collected, collect, newest
from moelab.runs.directory import RunDir
from moelab.study_report.judgement import StudyJudgement


class NothingToJudge(MoelabError):
    """No run of the study finished."""


def judge_study(
    path: Path,
    *,
    study: Study | None = None,
    reference: str = "bf16_standard",
    final_fraction: float = 0.1,
    margin_nats: float | None = None,
) -> StudyJudgement:
    """Collect a study's runs and judge them.

    Args:
        path: the study's folder.
        study: judge the runs of exactly these experiments; None takes, for each arm, those of its newest settings.
        reference: arm that the others are held against.
        final_fraction: part of the steps that the final loss is a mean of.
        margin_nats: equivalence margin, or None to take it from the reference's own seed-to-seed spread.

    Raises:
        BadInput: if the path is not a study's folder or has no run of the reference.
        NothingToJudge: if no run finished, with the reason of each.
    """
    if not path.is_dir():
        raise BadInput(f"{path} is not a folder; give a study, such as runs/06_compare_convergence")
    places = {run.name: run for run in directory.find(path)}
    studies = sorted({name.split("/")[0] for name in places})
    if len(studies) > 1:
        raise BadInput(f"{path} holds several studies; give the folder of one: {', '.join(studies)}")
    collected = collect(path)
    if study is None:
        collected = of_latest_experiment(collected, places)
    else:
        collected = [run for run in collected if run.run in places and places[run.run].experiment in study.experiments]
    runs = newest(collected)
    finished = [run for run in runs if run.finished]
    if not finished:
        reasons = "\n".join(f"  {run.run}: {run.status.state}: {run.status.reason}" for run in runs)
        raise NothingToJudge(f"no run of {path.name} finished:\n{reasons}")
    arms = sorted({run.arm for run in runs})
    if reference not in arms:
        raise BadInput(f"reference {reference!r} is not an arm of {path.name}; its arms: {', '.join(arms)}")
    folders = {run.arm: places[run.run].path for run in finished}
    return StudyJudgement(
        name=studies[0],
        reference=reference,
        runs=tuple(runs),
        environment=json.loads((next(iter(folders.values())) / "environment.json").read_text()),
        settings={run.arm: places[run.run].experiment for run in finished},
        commands={arm: (folder / "launch" / "command.sh").read_text().strip() for arm, folder in folders.items()},
        final_fraction=final_fraction,
        margin_nats=margin_nats,
    )


def of_latest_experiment(collected: list[Collected], places: Mapping[str, RunDir]) -> list[Collected]:
    """Leave out finished runs from before a field of their study's arm changed: seeds must differ in nothing else."""
    finished = [run for run in collected if run.finished and run.run in places]
    experiments = {run.run: places[run.run].experiment.model_copy(update={"seed": 0}) for run in finished}
    by_time = sorted(finished, key=lambda run: run.run.rsplit("/", 1)[-1])
    latest = {_study_and_arm(run): experiments[run.run] for run in by_time}
    return [
        run for run in collected if run.run not in experiments or experiments[run.run] == latest[_study_and_arm(run)]
    ]


def _study_and_arm(run: Collected) -> tuple[str, str]:
    return run.run.split("/")[0], run.arm
