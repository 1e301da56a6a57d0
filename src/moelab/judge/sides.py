"""What a report is of: arms of our studies, with the runs that are judged, and runs from elsewhere; how two differ.

Runs of ours are grouped by what they are: all fields but the seed and the study's name. One group of each arm is
judged, and every run that is not is named with the reason. Without a study that says what belongs to it, the
reference's group is the one with most seeds, and the others agree with it where they can; the newest decides between
groups with as many.

A verdict and a gain are of two arms alone only where all else is the same, so what differs is always said. What is not
known of a run, such as the machine of one whose ``environment.json`` is damaged, is no difference; it is named where
the run is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, count
from pathlib import Path

import numpy as np
import pandas as pd

from moelab.errors import BadInput
from moelab.experiment import Experiment
from moelab.experiment_file import Study
from moelab.judge.arms import arm_label
from moelab.layout import training_of, twins
from moelab.privacy import each_text, shareable, without_secrets
from moelab.runs import directory
from moelab.runs.collect import WARMUP_STEPS, Collected, collect, collect_runs, newest, numbers_of
from moelab.runs.directory import Discovery, LeftOut
from moelab.runs.settings import Settings, run_settings, settings_of, spread
from moelab.runs.table import joined_rows

ARM_FIELDS = frozenset(
    ("precision", "mxfp8_kernels", "quantize", "wgrad", "ep_backend", "ep_kernels", "dispatch_precision", "routing")
)
"""What sets two arms apart, beside the seed; every other field should be the same in both."""
OF_A_TOKEN = frozenset(("model", "flavor", "parameters", "seq_len"))
"""Settings that say how much is computed for a token: with another, tokens/s are of other work."""
OF_THE_LOSS = OF_A_TOKEN | {"tokenizer", "tokenizer_path", "dataset", "global_batch", "optimizer", "lr"}
OF_THE_LOSS |= {"warmup_steps", "steps"}
"""Settings beside the arms' own that a loss at a step depends on; in a configuration of W&B the last part of a name."""
NOT_FOR_SPEED = frozenset({"lr", "warmup_steps", "steps", "dataset"})
"""Settings that a step's time does not depend on."""
LOSS_FACTS = ("chip", "torch", "torchtitan", "torchao", "triton", "moelab", "git_commit")
"""What rounds a run's loss beside its settings."""
SPEED_PACKAGES = ("torch", "nvidia-nccl-cu13", "torchtitan", "torchao", "triton", "deep_ep")
SPEED_FACTS = ("machine", "processor", "driver", *SPEED_PACKAGES, "moelab")
"""What a run's speed depends on beside its settings."""
SPEED_FACTS_OF_A_LOG = ("chip", "driver", *SPEED_PACKAGES)
ANOTHER_ATTEMPT = "another attempt at this arm and seed is judged"
LABEL_CHARACTERS = 60
VALID = "a study, a run directory, a TorchTitan log, a TensorBoard folder or a W&B export (CSV, Parquet)"

Groups = Mapping[str, Mapping[Experiment, Sequence[Collected]]]
"""Runs by arm and by what they are."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """One side of a report: the runs of one arm, or one run from elsewhere."""

    name: str  # unlike any other side's: the arm's, or of runs from elsewhere the label
    label: str  # the same in words
    attempted: tuple[Collected, ...]  # one run for each seed, however it ended; one alone from elsewhere
    settings: Settings = field(default_factory=Settings)  # of one run of an arm: its seeds share all
    experiment: Experiment | None = None  # of one of its runs; None from elsewhere
    diverged_seeds: Mapping[int, str] = field(default_factory=dict)  # with the reason
    lost_seeds: Mapping[int, str] = field(default_factory=dict)  # that it should have and has no loss of otherwise
    replaced: tuple[Collected, ...] = ()  # attempts at its seeds that are not judged, as others are

    @cached_property
    def finished(self) -> list[Collected]:
        """Those that trained every step; a log from elsewhere does not say that it did."""
        return [run for run in self.attempted if run.finished]

    @property
    def runs(self) -> tuple[Collected, ...]:
        """Those that are shown: the finished ones, or all where none is."""
        return tuple(self.finished) or self.attempted

    @property
    def has_result(self) -> bool:
        """Whether a seed of it can be judged, a divergence being a result."""
        return bool(self.finished or self.diverged_seeds)

    @property
    def seeds(self) -> set[int]:
        """Seeds that it has or should have."""
        return {*(run.seed for run in self.runs if run.seed is not None), *self.diverged_seeds, *self.lost_seeds}

    @cached_property
    def table(self) -> pd.DataFrame:
        """Metrics of the runs that are shown, with ``name`` as the arm; a run of an unknown seed counts as seed 0."""
        rows = joined_rows(self.runs)
        arm = pd.array([self.name] * len(rows), dtype="string")
        return rows.assign(arm=arm, seed=rows["seed"].fillna(0))

    @cached_property
    def facts(self) -> dict[str, list[str]]:
        """Its settings, and what computed its runs: by name the value of each run that says it."""
        known = self.settings.values
        facts = {name: [value] for name, value in known.items()}
        if self.experiment is None:
            chip = known.get("gpu") or known.get("processor")
            return facts | ({"chip": [chip]} if chip else {})
        of_runs: dict[str, list[str]] = {}
        for run in self.runs:
            own: dict[str, str] = {}
            if (where := run.environment) is not None:
                own |= {"machine": where.machine, "processor": where.processor, "chip": where.chip}
                # An older record may not speak of a package at all.
                own |= {name: version or "not installed" for name, version in where.packages.items()} | where.versions
                # A whole commit cannot be told from a key.
                own |= {"git_commit": where.git_commit[:12]} if where.git_commit else {}
            for name, value in own.items():
                of_runs.setdefault(name, []).append(value)
        known_of_all: dict[str, list[str]] = each_text(without_secrets, facts | of_runs)
        return known_of_all

    @cached_property
    def values(self) -> dict[str, str]:
        """Its settings, and how many of its runs have which version where they are not alike."""
        return {name: spread(self.facts[name]) for name in self.settings.values}

    @property
    def emulated(self) -> bool:
        """Whether MXFP8 kernels or DeepEP were emulated in it."""
        if self.experiment is None:
            return self.settings.values.get("mxfp8_kernels") == "emulated"
        return any(run.emulates_products or run.emulates_deepep for run in self.attempted)

    @property
    def on_cpu(self) -> bool:
        """Whether it is known that ranks of it were processes on a CPU."""
        known = [run.environment for run in self.runs if run.environment is not None]
        # Only a log of ranks on a CPU names a processor.
        return any(one.on_cpu for one in known) or "processor" in self.settings.values

    @property
    def last_step(self) -> int:
        """Last step that any of its runs logged."""
        return max(run.last_step for run in self.runs)

    @cached_property
    def steps_logged(self) -> int:
        """How many different steps its runs logged."""
        return int(self.table["step"].nunique())

    @cached_property
    def interval_steps(self) -> int:
        """Steps from one that was logged to the next."""
        steps = np.unique(self.table["step"].to_numpy())
        # The median: TorchTitan logs step 1 too, whatever the interval.
        return int(np.median(np.diff(steps))) if len(steps) > 1 else 1

    @property
    def timed(self) -> pd.DataFrame:
        """Rows of :attr:`table` behind the warm-up; where not every step was logged, that is all before the second."""
        # The first logged step is then a mean over many, the compilation among them.
        warmup_steps = max(WARMUP_STEPS, self.interval_steps if self.interval_steps > 1 else 0)
        return self.table[self.table["step"] > warmup_steps]

    def name_of(self, run: Collected) -> str:
        """What one of its runs is called."""
        return self.label if run.seed is None else f"{self.label}, seed {run.seed}"

    @property
    def diverged(self) -> bool:
        """Whether the loss of one of the shown runs is not finite."""
        return any(run.diverged for run in self.runs)

    @property
    def unfinished(self) -> str:
        """In which way its last loss is none: it diverged, or ended before its planned steps; empty if neither."""
        ends = dict.fromkeys(words for run in self.runs if (words := self._end_of(run)))
        return f"{self.label} {'; '.join(ends)}" if ends else ""

    def _end_of(self, run: Collected) -> str:
        if run.diverged:
            return f"diverged: {run.diverged}"
        steps = self.settings.values.get("steps", "")
        planned = run.steps_planned or (int(steps) if steps.isdecimal() else 0)
        # A log of every tenth step ends up to nine steps before the last.
        if run.finished or (run.steps_planned is None and run.last_step + self.interval_steps > planned):
            return ""
        state = "" if run.steps_planned is None else f" ({run.status.reason or run.status.state})"
        return f"is at step {run.last_step} of {planned}{state}"


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """A run of a report, and why it is not judged."""

    run: str
    arm: str  # empty if nothing says it
    seed: int | None  # None if nothing says it
    reason: str  # empty if it is judged
    collected: Collected | None = None  # what it left; None if its record cannot be read
    has_diverged: bool = False  # of one whose record cannot be read

    @property
    def is_replaced(self) -> bool:
        """Whether another attempt is judged in its place."""
        return self.reason.startswith(ANOTHER_ATTEMPT)


# In what two sides differ


def differing_values(sides: Sequence[Side]) -> dict[str, list[str | None]]:
    """Settings that are not the same in all sides: name to one value a side, None where it is not known.

    What only some sides say counts where others could have said it, their settings being read from the same place: one
    log may speak of MXFP8 modules and another not. What a source cannot say is not a difference.
    """
    differing: dict[str, list[str | None]] = {}
    for name in dict.fromkeys(name for side in sides for name in side.values):
        values = [side.values.get(name) for side in sides]
        pairs = {(side.settings.source, value) for side, value in zip(sides, values, strict=True)}
        silent = any((source, None) in pairs for source, value in pairs if value is not None)
        if silent or len(set(values) - {None}) > 1:
            differing[name] = values
    return differing


def differing_facts(side: Side, reference: Side, names: Iterable[str]) -> list[str]:
    """What is known of both sides and is not one value in all their runs, in words."""
    own, others = side.facts, reference.facts
    return [
        f"{name} {spread(own[name])} against {spread(others[name])}"
        for name in names
        if name in own and name in others and len({*own[name], *others[name]}) > 1
    ]


def differing_of(side: Side, reference: Side, names: Collection[str]) -> list[str]:
    """The same of settings, which a configuration of W&B may call by a longer name."""
    # What is held out changes neither the training loss nor its speed.
    own = [name for name in side.values if not name.startswith(("validat", "eval"))]
    return differing_facts(side, reference, (name for name in own if name.rsplit(".", 1)[-1] in names))


def differing_fields(one: Experiment, other: Experiment) -> dict[str, str]:
    """Fields in which two experiments differ, beside the study's name and the seed: name to words.

    >>> differing_fields(Experiment(lr=2.0e-3), Experiment(lr=3.0e-3, seed=1))
    {'lr': 'lr 0.002 instead of 0.003'}
    """

    def value_of(experiment: Experiment, name: str) -> str:
        if not name.startswith("shape."):
            return str(getattr(experiment, name))
        value = getattr(experiment.shape, name.removeprefix("shape."), None)  # `shape` is None without changes
        return "the model's own" if value is None else str(value)

    return {name: f"{name} {value_of(one, name)} instead of {value_of(other, name)}" for name in one.differences(other)}


def differing_settings(arm: Experiment | None, reference: Experiment | None) -> dict[str, str]:
    """Fields in which two arms differ that make neither of them an arm: name to words; nothing without both."""
    if arm is None or reference is None:
        return {}
    own = ARM_FIELDS | {*arm.arm_fields, *reference.arm_fields}  # a study may vary any other field too
    return {name: words for name, words in differing_fields(arm, reference).items() if name not in own}


def caveats(side: Side, reference: Side) -> tuple[str, ...]:
    """In what two arms' runs differ beside what makes them arms, as sentences."""
    settings = differing_settings(side.experiment, reference.experiment)
    facts = differing_facts(side, reference, LOSS_FACTS)
    sentences = [f"The arms also differ in their settings: {', '.join(settings.values())}."] if settings else []
    return (*sentences, *([f"The runs also differ in what computes the loss: {'; '.join(facts)}."] if facts else []))


# Which runs are read


def sides_at(
    paths: Sequence[Path], *, reference: str, planned: Study | None = None
) -> tuple[list[Side], list[Attempt], list[str]]:
    """Read every path: each arm of a study is a side, and each run from elsewhere.

    Args:
        paths: what to compare, the first being what the others are held against.
        reference: arm that comes first among those of a study.
        planned: the runs of exactly these experiments are judged; None takes the settings of most of the reference's
            seeds, and of each other arm those that agree with them.

    Returns:
        The sides, every run of ours that is in none of them, and what a reader should know of the folders.

    Raises:
        BadInput: naming the path that cannot be read, and what is valid.
    """
    # Resolved, so that a study reached through a link is called by its own name.
    folders = [directory.discover(path.resolve()) if path.is_dir() else None for path in paths]
    several = len({study for one in folders if one for study in studies_in(one)}) > 1
    sides: list[Side] = []
    not_judged: list[Attempt] = []
    notes: list[str] = []
    for path, ours in zip(paths, folders, strict=True):
        if ours is None or not ours.all_runs:
            sides += _sides_from_elsewhere(path)
            continue
        notes += ours.notes
        for study in studies_in(ours):
            own, others = _sides_of_study(ours, study, reference=reference, planned=planned)
            not_judged += others
            for side in own:
                label = _short(f"{study}: {side.label}") if several else side.label
                sides.append(replace(side, name=label if several else side.name, label=label))
    return list(_with_own_names(sides)), not_judged, list(dict.fromkeys(notes))


def studies_in(folder: Discovery) -> list[str]:
    """Names of the studies that the runs at a path are of."""
    return sorted({study_of(run.name) for run in folder.all_runs})


def study_of(run: str) -> str:
    """Folder of the study that a run lies in."""
    return run.split("/")[0]


def end_of(run: Collected) -> str:
    """How a run that did not finish ended, on one line."""
    if run.diverged:
        return f"diverged: {run.diverged}"
    planned = f" of {run.steps_planned}" if run.steps_planned else ""
    damaged = f" ({'; '.join(run.damaged)})" if run.damaged else ""
    return f"{run.status.in_words()}, {run.last_step}{planned} steps logged{damaged}"


def _sides_of_study(
    folder: Discovery, name: str, *, reference: str, planned: Study | None
) -> tuple[list[Side], list[Attempt]]:
    """One side for each arm of a study, the reference's first, and every run that is in none of them."""
    collected = collect_runs(run for run in folder.runs if study_of(run.name) == name)
    runs, not_judged = _runs_to_judge(collected, reference=reference, study=planned)
    not_judged += [_not_judged_by_record(one) for one in folder.left_out if study_of(one.run.name) == name]
    places, others = {run.name: run for run in folder.runs}, {(one.arm, one.seed): one for one in not_judged}
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
            run, other = attempted.get(seed), others.get((arm, seed))
            if run is None:
                (diverged if other and other.has_diverged else lost)[seed] = other.reason if other else "not run"
            elif run.diverged and not run.finished:
                diverged[seed] = run.diverged
            elif not run.finished:
                lost[seed] = end_of(run)
        # One run stands for the arm: its seeds share all settings, and reading thousands of logs takes minutes.
        *_, last = attempted.values()
        replaced = (one.collected for one in not_judged if one.arm == arm and one.is_replaced)
        sides.append(
            Side(
                name=arm,
                label=arm_label(arm),
                attempted=tuple(attempted.values()),
                settings=run_settings(places[last.run], last.environment),
                experiment=last.experiment,
                diverged_seeds=diverged,
                lost_seeds=lost,
                replaced=tuple(one for one in replaced if one),
            )
        )
    return sides, not_judged


def _runs_to_judge(
    collected: Iterable[Collected], *, reference: str, study: Study | None
) -> tuple[list[Collected], list[Attempt]]:
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
            return "not the settings of this arm's judged runs: " + ", ".join(nearest.values())
        if (arm, run.seed) not in by_seed:
            return f"seed {run.seed} of this arm is not in the study"
        own_end = f"; this one diverged: {run.diverged}" if run.diverged else ""
        return f"{ANOTHER_ATTEMPT} ({by_seed[arm, run.seed].run.rsplit('/', 1)[-1]}){own_end}"

    # From what is there, not from what was chosen: so no run can be missing from both lists.
    others = [
        Attempt(run=run.run, arm=run.arm, seed=run.seed, reason=reason(run, group), collected=run)
        for own in groups.values()
        for group, runs in own.items()
        for run in runs
        if by_seed.get((run.arm, run.seed)) is not run
    ]
    return judged, others


def _planned(groups: Groups, study: Study) -> dict[str, list[Experiment]]:
    """The groups of each arm that are a training of the study's."""
    plans = {(plan.arm, training_of(plan)) for plan in study.experiments}
    return {arm: [one for one in own if (arm, training_of(one)) in plans] for arm, own in groups.items()}


def _shared(groups: Groups, reference: str) -> dict[str, list[Experiment]]:
    """One group of each arm: that with most seeds, among those that agree with the reference's if any does."""

    def size(arm: str, group: Experiment) -> tuple[int, int, str]:  # the newest decides where all else is equal
        runs = groups[arm][group]
        ended = {run.seed for run in runs if run.finished or run.diverged}  # a divergence is a result
        return len(ended), len({run.seed for run in runs}), max(run.run.rsplit("/", 1)[-1] for run in runs)

    def best(arm: str, of: Experiment | None) -> Experiment:
        # An arm of which no group agrees is judged all the same: the verdict says in which settings it differs.
        agreeing = [group for group in groups[arm] if of is not None and not differing_settings(group, of)]
        return max(agreeing or groups[arm], key=lambda group: size(arm, group))

    if reference not in groups:
        return {arm: [best(arm, None)] for arm in groups}
    of = best(reference, None)
    return {arm: [of] if arm == reference else [best(arm, of)] for arm in groups}


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


def _not_judged_by_record(one: LeftOut) -> Attempt:
    """A run whose record cannot be trusted; its folder may still say which arm and seed it was to be."""
    try:
        arm, seed = one.run.arm, one.run.seed
    except BadInput:  # it was copied out of its study's folders
        return Attempt(run=one.run.name, arm="", seed=None, reason=one.reason)
    diverged = None
    with suppress(BadInput, OSError):  # without a log nothing hints at a divergence
        diverged = numbers_of(one.run, one.run.status)[0].reason
    reason = f"{one.reason}; {diverged}" if diverged else one.reason
    return Attempt(run=one.run.name, arm=arm, seed=seed, reason=reason, has_diverged=bool(diverged))


def _short(label: str) -> str:
    label = " ".join(shareable(label).split())  # a log may be called by a whole path, with a user's name in it
    return label if len(label) <= LABEL_CHARACTERS else f"{label[: LABEL_CHARACTERS - 1]}…"


def _with_own_names(sides: Sequence[Side]) -> Iterator[Side]:
    """Number sides of one label: two logs may both be called ``train.log``, in folders that are nobody's business."""
    used: set[str] = set()
    for side in sides:
        numbered = (f"{side.label} ({number})" for number in count(2))
        label = next(label for label in chain([side.label], numbered) if label not in used)
        name = side.name if label == side.label else label
        used |= {name, label}
        yield replace(side, name=name, label=label)
