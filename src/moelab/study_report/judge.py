"""Find the runs of a study that belong together, and judge them.

Runs are grouped by what they are: all fields but the seed and the study's name. One group of each arm is judged, and
every run that is not is named with the reason. Without a study that says what belongs to it, the reference's group is
the one that most seeds of all arms agree with, and the newest run never decides by itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from moelab.analysis.comparable import differing_fields, differing_settings
from moelab.errors import BadInput, MoelabError
from moelab.experiment import Experiment
from moelab.experiment_file import Study
from moelab.runs import directory
from moelab.runs.collect import Collected, collect_run, newest
from moelab.runs.directory import RunDir
from moelab.study_report.judgement import ANOTHER_ATTEMPT, LeftOut, StudyJudgement


class NothingToJudge(MoelabError):
    """No run of the study finished."""


def judge_study(
    path: Path,
    *,
    study: Study | None = None,
    reference: str = "bf16_standard",
    final_fraction: float = 0.1,
    margin_nats: float | None = None,
    margin_cap_nats: float | None = None,
    dropped_seeds: Collection[int] = (),
) -> StudyJudgement:
    """Collect a study's runs and judge them.

    Args:
        path: the study's folder.
        study: judge the runs of exactly these experiments; None takes, for each arm, the settings that most of its
            seeds share with the reference.
        reference: arm that the others are held against.
        final_fraction: part of the steps that the final loss is a mean of.
        margin_nats: equivalence margin, or None to take it from the reference's own seed-to-seed spread.
        margin_cap_nats: what that margin may be at most, or None for 1 % of the reference's mean loss.
        dropped_seeds: left out in both arms, and shown.

    Raises:
        BadInput: if the path is not a study's folder or has no run of the reference.
        NothingToJudge: if no run finished, with the reason of each.
    """
    if not path.is_dir():
        raise BadInput(f"{path} is not a folder; give a study, such as runs/06_compare_convergence")
    found = directory.discover(path.resolve())
    studies = sorted({run.name.split("/")[0] for run in [*found.runs, *(one.run for one in found.left_out)]})
    if not studies:
        raise BadInput(f"{path} holds no run; give a study, such as runs/06_compare_convergence")
    if len(studies) > 1:
        raise BadInput(f"{path} holds several studies; give the folder of one: {', '.join(studies)}")
    collected = [collect_run(run) for run in found.runs]
    runs, left_out = runs_to_judge(collected, reference=reference, study=study)
    left_out += [left_out_by_record(one) for one in found.left_out]
    if not any(run.finished for run in runs):
        ends = [run.status.reason or f"{run.last_step} of {run.steps_planned} steps logged" for run in runs]
        lines = [f"{run.run}: {run.status.state}: {end}" for run, end in zip(runs, ends, strict=True)]
        lines += [f"{one.run}: left out: {one.reason}" for one in left_out]
        raise NothingToJudge("\n  ".join([f"no run of {studies[0]} finished:", *lines]))
    arms = sorted({run.arm for run in runs})
    if reference not in arms:
        lines = [f"{one.run}: left out: {one.reason}" for one in left_out if one.arm in ("", reference)]
        told = f"reference {reference!r} is not an arm of {studies[0]}; its arms: {', '.join(arms)}"
        raise BadInput("\n  ".join([told, *lines]))
    return StudyJudgement(
        name=studies[0],
        reference=reference,
        runs=tuple(runs),
        left_out=tuple(left_out),
        planned=None if study is None else frozenset((one.arm, one.seed) for one in study.experiments),
        discovery_notes=found.notes,
        final_fraction=final_fraction,
        margin_nats=margin_nats,
        margin_cap_nats=margin_cap_nats,
        dropped_seeds=tuple(sorted(dropped_seeds)),
    )


def runs_to_judge(
    collected: Iterable[Collected], *, reference: str, study: Study | None = None
) -> tuple[list[Collected], list[LeftOut]]:
    """Of each arm and seed the run that is judged, and every other run with the reason.

    Args:
        collected: runs of one study.
        reference: arm whose settings the others should share.
        study: what was planned, or None.
    """
    groups: dict[str, dict[Experiment, list[Collected]]] = {}
    for run in collected:
        groups.setdefault(run.arm, {}).setdefault(_identity(run), []).append(run)
    chosen = _planned(groups, study) if study is not None else _shared(groups, reference)
    judged = newest(run for arm, kept in chosen.items() for group in kept for run in groups[arm][group])
    if study is not None:
        seeds = {(one.arm, one.seed) for one in study.experiments}
        judged = [run for run in judged if (run.arm, run.seed) in seeds]
    by_seed = {(run.arm, run.seed): run for run in judged}
    kept = {run.run for run in judged}
    left_out = []
    for arm, own in groups.items():
        for group, runs in own.items():
            for run in runs:
                if run.run in kept:
                    continue
                same = by_seed.get((arm, run.seed))
                if group not in chosen.get(arm, ()):
                    reason = _other_settings(group, chosen.get(arm, ()))
                elif same is None:
                    reason = f"seed {run.seed} of this arm is not in the study"
                else:
                    own_end = f"; this one diverged: {run.diverged}" if run.diverged else ""
                    reason = f"{ANOTHER_ATTEMPT} ({same.run.rsplit('/', 1)[-1]}){own_end}"
                left_out.append(LeftOut(run=run.run, arm=arm, seed=run.seed, reason=reason, collected=run))
    return judged, left_out


def left_out_by_record(one: directory.LeftOut) -> LeftOut:
    """A run whose record cannot be trusted; its folder may still say which arm and seed it was to be."""
    arm, seed = _place(one.run)
    return LeftOut(run=one.run.name, arm=arm, seed=seed, reason=one.reason)


def _place(run: RunDir) -> tuple[str, int | None]:
    try:
        return run.arm, run.seed
    except BadInput:
        return "", None


def _identity(run: Collected) -> Experiment:
    assert run.experiment is not None, f"{run.run} is no run of ours"
    return run.experiment.model_copy(update={"name": "study", "seed": 0})


def _planned(groups: dict[str, dict[Experiment, list[Collected]]], study: Study) -> dict[str, list[Experiment]]:
    """Groups of each arm that the study has."""
    return {
        arm: [group for group in own if any(one.arm == arm and not group.differences(one) for one in study.experiments)]
        for arm, own in groups.items()
    }


def _shared(groups: dict[str, dict[Experiment, list[Collected]]], reference: str) -> dict[str, list[Experiment]]:
    """One group of each arm: that with most seeds among those that agree with the reference's, if any does."""

    def size(arm: str, group: Experiment) -> tuple[int, int, str]:
        runs = groups[arm][group]
        ended = {run.seed for run in runs if run.finished or run.diverged}
        return len(ended), len({run.seed for run in runs}), max(run.run.rsplit("/", 1)[-1] for run in runs)

    def best(arm: str, of: Experiment | None) -> Experiment:
        agreeing = [group for group in groups[arm] if of is not None and not differing_settings(group, of)]
        return max(agreeing or groups[arm], key=lambda group: size(arm, group))

    def support(of: Experiment) -> tuple[int, tuple[int, int, str]]:
        own, seeds = size(reference, of), 0
        for arm in groups.keys() - {reference}:
            group = best(arm, of)
            seeds += 0 if differing_settings(group, of) else size(arm, group)[0]
        return own[0] + seeds, own

    of = max(groups[reference], key=support) if reference in groups else None
    return {arm: [of] if of is not None and arm == reference else [best(arm, of)] for arm in groups}


def _other_settings(group: Experiment, judged: Sequence[Experiment]) -> str:
    if not judged:
        return "its arm is not in the study"
    nearest = min((differing_fields(group, other) for other in judged), key=len)
    return f"other settings than the runs of this arm that are judged: {', '.join(nearest.values())}"
