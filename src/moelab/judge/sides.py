"""Which runs a report is of: the arms of studies, or whatever lies at several paths; and every run that is not judged.

Runs of ours are grouped by what they are: all fields but the seed and the study's name. One group of each arm is
judged, and every run that is not is named with the reason. Without a study that says what belongs to it, the
reference's group is the one that most seeds of all arms agree with; the newest decides only between groups with as
many seeds, and the report says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path
from typing import Any

from moelab.errors import BadInput
from moelab.experiment import Experiment
from moelab.experiment_file import Study
from moelab.judge.arms import arm_label, seed_names
from moelab.judge.side import Side, differing_fields, differing_settings
from moelab.judge.verdict import Doubtful
from moelab.layout import training_of, twins
from moelab.privacy import shareable
from moelab.runs import directory
from moelab.runs.collect import Collected, collect, collect_runs, newest, numbers_of
from moelab.runs.directory import Discovery, RunDir
from moelab.runs.settings import run_settings, settings_of, settings_of_all

ANOTHER_ATTEMPT = "another attempt at this arm and seed is judged"
AS_MANY_SEEDS = "as many seeds as the newer runs, which are judged: give each set a study of its own"
LABEL_CHARACTERS = 60
VALID = "a study, a run directory, a TorchTitan log, a TensorBoard folder or a W&B export (CSV, Parquet)"

Groups = Mapping[str, Mapping[Experiment, Sequence[Collected]]]
"""Runs by arm and by what they are."""


@dataclass(frozen=True, kw_only=True)
class NotJudged:
    """A run that is not judged."""

    run: str
    arm: str  # empty if nothing says it
    seed: int | None  # None if nothing says it
    reason: str
    collected: Collected | None = None  # what it left; None if its record cannot be read

    @classmethod
    def of(cls, run: Collected, reason: str = "") -> NotJudged:
        """A run with the reason, which is how it ended if none is given."""
        return cls(run=run.run, arm=run.arm, seed=run.seed, reason=reason or end_of(run), collected=run)

    @property
    def study(self) -> str:
        """Folder of the study that it lies in."""
        return self.run.split("/")[0]

    @property
    def is_replaced(self) -> bool:
        """Whether another attempt is judged in its place."""
        return self.reason.startswith(ANOTHER_ATTEMPT)

    def to_json(self) -> dict[str, Any]:
        """What :func:`run_json` says of a run that is judged."""
        if self.collected is not None:
            return run_json(self.collected, self.reason)
        unknown: dict[str, Any] = {"status": "unknown", "machine": None, "versions": {}, "damaged": []}
        which = {"run": self.run, "arm": self.arm, "seed": self.seed}
        return {**which, **unknown, "used": False, "reason": self.reason}


def sides_of(paths: Sequence[Path], *, reference: str) -> tuple[list[Side], list[NotJudged], list[str]]:
    """Read every path: each arm of a study is a side, and each run from elsewhere.

    Args:
        paths: what to compare, the first being what the others are held against.
        reference: arm that comes first among those of a study.

    Returns:
        The sides, every run of ours that is in none of them, and what a reader should know of the folders.

    Raises:
        BadInput: naming the path that cannot be read, and what is valid.
    """
    # Resolved, so that a study reached through a link is called by its own name.
    folders = [directory.discover(path.resolve()) if path.is_dir() else None for path in paths]
    several = len({study for one in folders if one for study in studies_in(one)}) > 1
    sides: list[Side] = []
    not_judged: list[NotJudged] = []
    notes: list[str] = []
    for path, ours in zip(paths, folders, strict=True):
        if ours is None or not ours.runs:  # also a folder with broken runs alone: `collect` names them
            sides += _sides_from_elsewhere(path)
            continue
        places = {run.name: run for run in ours.runs}
        notes += ours.notes
        for study in studies_in(ours):
            own, others = sides_of_study(ours, study, reference=reference)
            not_judged += others
            for side in own:
                settings = settings_of_all([run_settings(places[run.run], run.environment) for run in side.runs])
                label = _short(f"{study}: {side.label}") if several else side.label
                sides.append(replace(side, name=label if several else side.name, label=label, settings=settings))
    return list(_with_own_names(sides)), not_judged, list(dict.fromkeys(notes))


def sides_of_study(
    folder: Discovery, name: str, *, reference: str, planned: Study | None = None
) -> tuple[list[Side], list[NotJudged]]:
    """One side for each arm of a study, the reference's first, and every run that is in none of them.

    Args:
        folder: runs at a path.
        name: of the study among them.
        reference: arm whose settings the others should share.
        planned: the runs of exactly these experiments are judged; None takes, for each arm, the settings that most of
            its seeds share with the reference.
    """
    collected = collect_runs(run for run in folder.runs if _study_of(run) == name)
    runs, not_judged = _runs_to_judge(collected, reference=reference, study=planned)
    not_judged += [_not_judged_by_record(one) for one in folder.left_out if _study_of(one.run) == name]
    places, reasons = {run.name: run for run in folder.runs}, {(one.arm, one.seed): one.reason for one in not_judged}
    arms = sorted({run.arm for run in runs}, key=lambda arm: (arm != reference, arm))
    damaged = [(one.arm, one.seed) for one in not_judged if one.collected is None]  # its folders name its seed
    any_seed = {seed for arm, seed in [*((run.arm, run.seed) for run in runs), *damaged] if arm in arms}
    sides = []
    for arm in arms:
        attempted = {run.seed: run for run in runs if run.arm == arm}
        # Without a plan, a seed that any arm has is one that all should have.
        seeds = any_seed if planned is None else {one.seed for one in planned.experiments if one.arm == arm}
        diverged: dict[int, str] = {}
        lost: dict[int, str] = {}
        for seed in sorted(seed for seed in seeds if seed is not None):
            run = attempted.get(seed)
            if run is None:
                lost[seed] = reasons.get((arm, seed), "not run")
            elif run.diverged and not run.finished:
                diverged[seed] = run.diverged
            elif not run.finished:
                lost[seed] = end_of(run)
        # One run stands for the arm: its seeds share all settings, and reading thousands of logs takes minutes.
        *_, last = attempted.values()
        sides.append(
            Side(
                name=arm,
                label=arm_label(arm),
                attempted=tuple(attempted.values()),
                settings=run_settings(places[last.run], last.environment),
                experiment=last.experiment,
                diverged_seeds=diverged,
                lost_seeds=lost,
                replaced=tuple(
                    one.collected for one in not_judged if one.arm == arm and one.collected and one.is_replaced
                ),
            )
        )
    return sides, not_judged


def studies_in(folder: Discovery) -> list[str]:
    """Names of the studies that the runs at a path are of."""
    return sorted({_study_of(run) for run in folder.all_runs})


def end_of(run: Collected) -> str:
    """How a run that did not finish ended, on one line."""
    if run.diverged:
        return f"diverged: {run.diverged}"
    planned = f" of {run.steps_planned}" if run.steps_planned else ""
    damaged = f" ({'; '.join(run.damaged)})" if run.damaged else ""
    return f"{run.status.in_words()}, {run.last_step}{planned} steps logged{damaged}"


def run_json(run: Collected, reason: str | None = None) -> dict[str, Any]:
    """A run for a program: which it is, how it ended, where it ran, and whether it is used or why not."""
    environment = run.environment
    return {
        "run": run.run,
        "arm": run.arm,
        "seed": run.seed,
        "status": run.status.state.value,
        "machine": environment.machine if environment is not None else None,
        "versions": environment.versions if environment is not None else {},
        "damaged": list(run.damaged),
        "used": reason is None,
        **({} if reason is None else {"reason": reason}),
    }


def left_out_words(not_judged: Iterable[NotJudged]) -> list[str]:
    """Which runs are left out and why, those of one arm and reason together.

    An attempt that another one replaced stands in the table of runs alone, unless it diverged.
    """
    seeds: dict[tuple[str, str], list[int]] = {}
    for one in not_judged:
        if one.is_replaced and not (one.collected and one.collected.diverged):
            continue
        if one.arm and one.seed is not None:
            seeds.setdefault((arm_label(one.arm), one.reason), []).append(one.seed)
        else:
            seeds[one.run, one.reason] = []
    return [
        f"{name}, {seed_names(own)}: {reason}" if own else f"{name}: {reason}" for (name, reason), own in seeds.items()
    ]


def _runs_to_judge(
    collected: Iterable[Collected], *, reference: str, study: Study | None
) -> tuple[list[Collected], list[NotJudged]]:
    """Of each arm and seed the run that is judged, and every other run with the reason."""
    groups: dict[str, dict[Experiment, list[Collected]]] = {}
    for run in collected:
        assert run.experiment is not None, f"{run.run} is no run of ours"
        settings = run.experiment.model_copy(update={"name": "study", "seed": 0})  # equal for runs of one group
        groups.setdefault(run.arm, {}).setdefault(settings, []).append(run)
    chosen = _shared(groups, reference) if study is None else _planned(groups, study)
    judged = newest(run for arm, kept in chosen.items() for group in kept for run in groups[arm][group])
    if study is not None:
        planned = {(plan.arm, plan.seed) for plan in study.experiments}
        judged = [run for run in judged if (run.arm, run.seed) in planned]
    # The reference first: of two arms that are one training the later is left out.
    arms = {run.arm: run.experiment for run in sorted(judged, key=lambda run: run.arm != reference) if run.experiment}
    same_training = twins(arms.values())
    judged = [run for run in judged if run.arm not in same_training]
    by_seed = {(run.arm, run.seed): run for run in judged}

    def reason(run: Collected, group: Experiment) -> str:
        arm, mine = run.arm, chosen.get(run.arm, [])
        if not mine:
            return "its arm is not in the study"
        if arm in same_training and group in mine:
            return same_training[arm]
        if group not in mine:
            # An arm may have several groups of a plan: the fewest differences say best what kept this run out.
            nearest = min((differing_fields(group, other) for other in mine), key=len)
            words = "not the settings of this arm's judged runs: " + ", ".join(nearest.values())
            # A tie went to the newer runs, which a person may not have meant.
            as_many = any(_ended(groups[arm][group]) == _ended(groups[arm][other]) for other in mine)
            return f"{words} ({AS_MANY_SEEDS})" if study is None and as_many else words
        if (arm, run.seed) not in by_seed:
            return f"seed {run.seed} of this arm is not in the study"
        own_end = f"; this one diverged: {run.diverged}" if run.diverged else ""
        return f"{ANOTHER_ATTEMPT} ({by_seed[arm, run.seed].run.rsplit('/', 1)[-1]}){own_end}"

    # From what is there, not from what was chosen: so no run can be missing from both lists.
    others = [
        NotJudged.of(run, reason(run, group))
        for own in groups.values()
        for group, runs in own.items()
        for run in runs
        if by_seed.get((run.arm, run.seed)) is not run
    ]
    return judged, others


def _planned(groups: Groups, study: Study) -> dict[str, list[Experiment]]:
    """The groups of each arm that are a training of the study's."""
    return {
        arm: [
            one
            for one in own
            if any(plan.arm == arm and training_of(one) == training_of(plan) for plan in study.experiments)
        ]
        for arm, own in groups.items()
    }


def _shared(groups: Groups, reference: str) -> dict[str, list[Experiment]]:
    """One group of each arm: that with most seeds among those that agree with the reference's, if any does."""

    def size(arm: str, group: Experiment) -> tuple[int, int, str]:  # the newest decides where all else is equal
        runs = groups[arm][group]
        return _ended(runs), len({run.seed for run in runs}), max(run.run.rsplit("/", 1)[-1] for run in runs)

    def best(arm: str, of: Experiment | None) -> Experiment:
        # An arm of which no group agrees is judged all the same: the verdict says in which settings it differs.
        agreeing = [group for group in groups[arm] if of is not None and not differing_settings(group, of)]
        return max(agreeing or groups[arm], key=lambda group: size(arm, group))

    def support(of: Experiment) -> tuple[int, tuple[int, int, str]]:
        nearest = {arm: best(arm, of) for arm in groups.keys() - {reference}}
        seeds = [size(arm, group)[0] for arm, group in nearest.items() if not differing_settings(group, of)]
        return size(reference, of)[0] + sum(seeds), size(reference, of)

    of = max(groups[reference], key=support) if reference in groups else None
    return {arm: [of] if of is not None and arm == reference else [best(arm, of)] for arm in groups}


def _ended(runs: Iterable[Collected]) -> int:
    """How many seeds have a result, a divergence being one."""
    return len({run.seed for run in runs if run.finished or run.diverged})


def _sides_from_elsewhere(path: Path) -> Iterator[Side]:
    if not path.exists():
        raise BadInput(f"{path} does not exist; give {VALID}")
    try:
        collected = collect(path)
        # A job that failed before its first step is a run for `collect`, and nothing to compare here.
        if not any(len(run.rows) for run in collected):
            raise BadInput("; ".join(run.status.reason or "" for run in collected) or "no step was logged")
    except BadInput as error:
        reason = str(error).removeprefix(f"{path}: ").rstrip(".")
        raise BadInput(f"{path} cannot be compared: {reason}; give {VALID}") from error
    settings = settings_of(path, len(collected))
    for run in collected:
        label = _short(run.run or path.name)
        yield Side(name=label, label=label, attempted=(run,), settings=settings)


def _not_judged_by_record(one: directory.LeftOut) -> NotJudged:
    """A run whose record cannot be trusted; its folder may still say which arm and seed it was to be."""
    try:
        arm, seed = one.run.arm, one.run.seed
    except BadInput:  # it was copied out of its study's folders
        return NotJudged(run=one.run.name, arm="", seed=None, reason=one.reason)
    reason = one.reason
    with suppress(BadInput, OSError):  # without a log nothing hints at a divergence
        if diverged := numbers_of(one.run, one.run.status)[0].reason:
            reason = Doubtful(f"{reason}; {diverged}")
    return NotJudged(run=one.run.name, arm=arm, seed=seed, reason=reason)


def _study_of(run: RunDir) -> str:
    return run.name.split("/")[0]


def _short(label: str) -> str:
    label = " ".join(shareable(label).split())  # a log may be called by a whole path, with a user's name in it
    return label if len(label) <= LABEL_CHARACTERS else f"{label[: LABEL_CHARACTERS - 1]}…"


def _with_own_names(sides: Sequence[Side]) -> Iterator[Side]:
    """Number sides of one label: two logs may both be called ``train.log``, in folders that are nobody's business."""
    used: set[str] = set()
    for side in sides:
        labels = chain([side.label], (f"{side.label} ({number})" for number in count(2)))
        label = next(label for label in labels if label not in used)
        name = side.name if label == side.label and side.name not in used else label
        used |= {name, label}
        yield replace(side, name=name, label=label)
