"""In what runs differ: their settings, their machines and software, and how far their losses are apart.

A *side* of a comparison is one run, or the runs of one arm that differ in nothing but the seed. Sides may come from
anywhere: our studies, or logs of someone else's training. So every number may be missing, which is NaN here and a dash
for the reader, and what a difference is worth depends on what is known:

* Where both sides have seeds in common, the difference is paired by seed and judged as in a study, if on the steps that
  both logged. A seed of ours that diverged is a finding here as there.
* Otherwise there is one curve against another. Its spread over the last steps says how noisy the difference is from
  step to step; it is no interval, since another seed might have given another difference.
* A side from elsewhere that diverged, or any that ended before its planned steps, is not judged: what it logged before
  says nothing about the end. The report says which side it was and at which step.

A verdict and a gain are of the arms alone only where all else is the same. What is not known of a run, such as the
machine of one whose ``environment.json`` is damaged, is no difference; it is named where the run is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from moelab.experiment import Experiment
from moelab.files import finite_or_none
from moelab.judge.convergence import FinalLosses, compare_convergence, final_losses, first_final_step
from moelab.judge.curves import arm_curves
from moelab.judge.equivalence import prediction_interval
from moelab.judge.side import Side
from moelab.judge.verdict import ArmSeeds, OtherAttempt, Verdict
from moelab.model import shape_for, tokenizer_size
from moelab.runs.collect import Collected
from moelab.runs.settings import spread
from moelab.runs.side_files import Environment
from moelab.runs.table import merge_segments

ARM_FIELDS = frozenset(
    ("precision", "mxfp8_kernels", "quantize", "wgrad", "ep_backend", "ep_kernels", "dispatch_precision", "routing")
)
"""What sets two arms apart, beside the seed; every other field should be the same in both."""
OF_A_TOKEN = frozenset(("model", "flavor", "parameters", "seq_len"))
"""Settings that say how much is computed for a token: with another, tokens/s are of other work."""
OF_THE_LOSS = OF_A_TOKEN | {
    "tokenizer",
    "tokenizer_path",
    "dataset",
    "global_batch",
    "optimizer",
    "lr",
    "warmup_steps",
    "steps",
}
"""Settings beside the arms' own that a loss at a step depends on; in a configuration of W&B the last part of a name."""
NOT_FOR_SPEED = frozenset({"lr", "warmup_steps", "steps", "dataset"})
"""Settings that a step's time does not depend on."""
SPEED_PACKAGES = ("torch", "nvidia-nccl-cu13", "torchtitan", "torchao", "triton", "deep_ep")
LOSS_PACKAGES = ("torch", "torchtitan", "torchao", "triton")


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Loss of the side ``label`` against that of ``reference``, in nats per token."""

    reference: str
    label: str
    steps: tuple[int, ...]  # that both logged
    first_step: int  # of the last part, which the difference is a mean over
    nats: float  # label − reference; NaN if one diverged
    spread_nats: float  # standard deviation from step to step in that part
    verdict: Verdict | None  # over seeds, where both sides' are known
    unfinished: str = ""  # which of the two diverged or ended before its planned steps
    differing: tuple[str, ...] = ()  # settings that the loss depends on
    verb: str = "ends"  # "is" where one of the two goes on behind these steps

    @property
    def judged(self) -> Verdict | None:
        """The verdict if it says anything: over seeds in common, or for those that diverged."""
        return self.verdict if self.verdict is not None and (self.verdict.seeds or self.unfinished) else None

    @property
    def paired(self) -> bool:
        """Whether there are seeds enough for an interval over them."""
        return self.verdict is not None and self.verdict.n_seeds > 1

    def sentence(self) -> str:
        """State the difference and what it is worth."""
        if self.judged is not None:
            return self.judged.sentence()
        unjudged = f"{self.unfinished}: no verdict. " if self.unfinished else ""
        if not self.steps:
            return f"{unjudged}{self.label} and {self.reference} have no step with a loss in common at the end."
        if math.isnan(self.nats):
            return unjudged.strip() or f"{self.label} has no finite difference from {self.reference} at the end."
        spread = f" ({self.spread_nats:.4f} from step to step)" if math.isfinite(self.spread_nats) else ""
        if self.nats == self.spread_nats == 0.0:
            worth = " One may be a copy of the other."
        elif self.differing:
            worth = f" The two also differ in {', '.join(self.differing)}."
        else:
            worth = "" if unjudged else " One run against another: a change of seed might do as much."
        difference = f"{self.label} differs from {self.reference} by {self.nats:+.4f} nats {self._where}{spread}"
        return f"{unjudged}{difference}.{worth}"

    def ends(self) -> str:
        """The difference alone, without a full stop; its sentence where there is none."""
        if self.unfinished or not math.isfinite(self.nats):
            return self.sentence().removesuffix(".")
        also = f" (they also differ in {', '.join(self.differing)})" if self.differing else ""
        return f"{self.label} {self.verb} {self.nats:+.4f} nats from {self.reference} {self._where}{also}"

    @property
    def _where(self) -> str:
        last = self.steps[-1]
        return f"over steps {self.first_step} to {last}" if math.isfinite(self.spread_nats) else f"at step {last}"

    def to_json(self) -> dict[str, Any]:
        """The difference for a program; what is missing is null."""
        judged = self.judged
        ends = (judged.interval.low, judged.interval.high) if judged else (math.nan, math.nan)
        return {
            "label": self.label,
            "reference": self.reference,
            "common_steps": len(self.steps),
            "difference_nats": finite_or_none(self.nats),
            "step_spread_nats": finite_or_none(self.spread_nats),
            "seeds": list(judged.seeds) if judged else [],
            "interval_nats": [finite_or_none(end) for end in ends],
            "answer": judged.answer.value if judged else None,
            "sentence": self.sentence(),
        }


def judge_sides(
    final: FinalLosses,
    sides: Sequence[Side],
    *,
    name: Callable[[Side], str],
    **options: Any,
) -> list[Verdict]:
    """Judge sides against the first, and say in what else they differ.

    Args:
        final: losses of the runs that finished.
        sides: those to judge, behind the one that they are held against.
        name: of a side in ``final``.
        **options: of :func:`~moelab.judge.convergence.compare_convergence`.
    """
    first, *others = sides
    seeds = {}
    for side in sides:
        known = final.seeds.get(name(side), ArmSeeds.of())
        seeds[name(side)] = ArmSeeds.of(
            known.losses,
            {**side.diverged_seeds, **known.diverged},
            {**side.lost_seeds, **known.lost},
            changes=known.changes,
            attempts=() if side is first else tuple(_other_attempts(side, first, final, name)),
        )
    # One vocabulary for all: an arm changes how a model is trained, not what it predicts.
    model = first.experiment
    verdicts = compare_convergence(
        replace(final, seeds=seeds),
        reference=name(first),
        # Rows of the embedding that no token uses are never predicted, after a few steps.
        untrained_nats=None if model is None else math.log(min(shape_for(model).vocab_size, tokenizer_size(model))),
        lr_warmup_steps=model.warmup_steps if model is not None else 0,
        **options,
    )
    return [
        replace(verdict, findings=(*verdict.findings, *caveats(side, first)))
        for verdict, side in zip(verdicts, others, strict=True)
    ]


def _other_attempts(
    side: Side, reference: Side, final: FinalLosses, name: Callable[[Side], str]
) -> Iterator[OtherAttempt]:
    """Runs of both sides that are not judged, each held against the other side's run of its seed where both end."""
    attempts = [
        (own, other, run, is_replaced)
        for own, other in ((side, reference), (reference, side))
        for is_replaced, runs in enumerate([[run for run in own.attempted if run.seed in own.lost_seeds], own.replaced])
        for run in runs
    ]
    if not attempts:
        return

    def curve(run: Collected) -> pd.Series[float]:
        rows = merge_segments(run.rows) if final.last_step else run.validation.drop_duplicates("step", keep="last")
        return rows.set_index("step")["loss"].where(lambda loss: loss.abs() < math.inf).dropna()

    ours, theirs = ({run.seed: curve(run) for run in one.finished} for one in (side, reference))
    judged = pd.DataFrame({seed: ours[seed] - theirs[seed] for seed in ours.keys() & theirs.keys()})
    for own, other, run, is_replaced in attempts:
        assert run.seed is not None  # of ours, each has one
        partner = next((curve(one) for one in other.attempted if one.seed == run.seed), None)
        losses = curve(run)
        common = losses if partner is None else losses[losses.index.isin(partner.index)]
        common = (
            common.loc[first_final_step(int(common.index.max()), final.final_fraction) :] if len(common) else common
        )
        differences = math.nan if partner is None else (common - partner).dropna() * (1 if own is side else -1)
        yield OtherAttempt(
            arm=name(own),
            seed=run.seed,
            end=run.diverged or own.lost_seeds.get(run.seed) or run.status.in_words(),
            is_replaced=bool(is_replaced),
            is_finished=run.finished,
            has_diverged=run.diverged is not None,
            loss=float(common.mean()),
            nats=float(np.mean(differences)) if len(common) else math.nan,
            usual=prediction_interval(judged.reindex(common.index).mean(skipna=False).dropna().tolist()),
        )


def difference(reference: Side, side: Side, *, final_fraction: float = 0.1, **options: Any) -> Difference:
    """Hold a side's loss against that of the first, on the steps that both logged.

    The final difference is a mean over ``final_fraction`` of these; ``options`` are those of the verdict.
    """
    common = _common_steps(reference, side)
    # Of logs of other steps the first alone may be common, which says nothing about the end.
    logged = [one.table.dropna(subset=["loss"])["step"] for one in (reference, side)]
    ends = [int(steps.max()) for steps in logged] if common else [0]
    # One that logs seldom has its last of them before the other's end.
    both_end = min(max((step for step in steps if step <= min(ends)), default=0) for steps in logged)
    if common and max(common) < first_final_step(both_end, final_fraction):
        common = set()
    goes_on = bool(common) and max(common) < first_final_step(max(ends), final_fraction)
    both = (_mean_loss(side) - _mean_loss(reference)).loc[lambda rows: rows.index.isin(common)]
    steps = tuple(int(step) for step in both.index)
    first_step = first_final_step(steps[-1], final_fraction) if steps else 0
    final = both.loc[first_step:].dropna()
    verdict = _verdict(reference, side, final_fraction=final_fraction, **options)
    diverged = reference.diverged or side.diverged  # what it logged before says nothing about the end
    # Paired by seed where there are pairs: a seed that one side lacks would shift the mean of curves.
    mean = verdict.mean_difference_nats if verdict is not None and verdict.seeds else float(final.mean())
    return Difference(
        reference=reference.label,
        label=side.label,
        steps=steps,
        first_step=first_step,
        nats=math.nan if diverged else mean,
        spread_nats=float(final.std(ddof=1)) if len(final) > 1 and not diverged else math.nan,
        verdict=verdict,
        unfinished="; ".join(one.unfinished for one in (reference, side) if one.unfinished),
        differing=tuple(differing_of((reference, side), OF_THE_LOSS)),
        verb="is" if goes_on else "ends",
    )


def difference_curve(reference: Side, side: Side, one: Difference) -> pd.DataFrame:
    """Difference over the steps that both logged, averaged over a trailing window as long as the final difference's.

    Returns:
        Steps by ``mean``, ``low`` and ``high`` (nats): one standard deviation over the window's steps to either side,
        which is no interval.
    """
    first, other = (arm_curves(each.table, "loss")[each.label].loc[list(one.steps)] for each in (reference, side))
    window = max(1, sum(step >= one.first_step for step in one.steps))  # so the curve ends at the difference itself
    rolling = (other.mean(axis=1) - first.mean(axis=1)).rolling(window)
    mean, spread = rolling.mean(), rolling.std(ddof=1)
    return pd.DataFrame({"mean": mean, "low": mean - spread, "high": mean + spread})


def differing_values(sides: Sequence[Side]) -> dict[str, list[str | None]]:
    """Settings that are not the same in all sides: name to one value a side, None where it is not known.

    What only some sides say counts where others could have said it, their settings being read from the same place: one
    log may speak of MXFP8 modules and another not. What a source cannot say is not a difference.
    """
    differing: dict[str, list[str | None]] = {}
    for name in dict.fromkeys(name for side in sides for name in side.settings.values):
        values = [side.settings.values.get(name) for side in sides]
        pairs = {(side.settings.source, value) for side, value in zip(sides, values, strict=True)}
        # Of one source, what one side says the other could have said.
        silent = any((source, None) in pairs for source, value in pairs if value is not None)
        if silent or len(set(values) - {None}) > 1:
            differing[name] = values
    return differing


def differing_of(sides: Sequence[Side], names: Collection[str]) -> dict[str, list[str | None]]:
    """Those of these settings that are known of all sides and not the same."""
    differing = differing_values(sides).items()
    # What is held out changes neither the training loss nor its speed.
    ours = ((name, own) for name, own in differing if not name.startswith(("validat", "eval")))
    return {name: own for name, own in ours if name.rsplit(".", 1)[-1] in names and None not in own}


def shared_values(sides: Sequence[Side]) -> dict[str, str]:
    """Settings that are known of every side and the same in all."""
    first = sides[0].settings.values.items()
    return {name: value for name, value in first if all(one.settings.values.get(name) == value for one in sides)}


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


def differing_settings(arm: Experiment, reference: Experiment) -> dict[str, str]:
    """Fields in which two arms differ that make neither of them an arm: name to words."""
    own = ARM_FIELDS | {*arm.arm_fields, *reference.arm_fields}  # a study may vary any other field too
    return {name: words for name, words in differing_fields(arm, reference).items() if name not in own}


def caveats(side: Side, reference: Side) -> tuple[str, ...]:
    """In what a side's runs differ from the first's beside what makes them arms, as sentences."""
    settings: dict[str, str] = {}
    if side.experiment is not None and reference.experiment is not None:
        settings = differing_settings(side.experiment, reference.experiment)
    facts = differing_facts(side.attempted, reference.attempted, loss_facts)
    sentences = [f"The arms also differ in their settings: {', '.join(settings.values())}."] if settings else []
    return (*sentences, *([f"The runs also differ in what computes the loss: {'; '.join(facts)}."] if facts else []))


def differing_facts(
    runs: Sequence[Collected], reference: Sequence[Collected], facts: Callable[[Collected], Mapping[str, str]]
) -> list[str]:
    """What is known of both groups of runs and is not one value in all of them, in words.

    ``facts`` are :func:`speed_facts` or :func:`loss_facts`.
    """
    own, others = _by_fact(runs, facts), _by_fact(reference, facts)
    return [
        f"{name} {spread(values)} against {spread(others[name])}"
        for name, values in own.items()
        if name in others and len({*values, *others[name]}) > 1
    ]


def mixed_facts(runs: Sequence[Collected], facts: Callable[[Collected], Mapping[str, str]]) -> list[str]:
    """What is not one value in all runs of an arm, in words."""
    return [f"{name} {spread(own)} within one arm" for name, own in _by_fact(runs, facts).items() if len(set(own)) > 1]


def _by_fact(runs: Iterable[Collected], facts: Callable[[Collected], Mapping[str, str]]) -> dict[str, list[str]]:
    """The value of each run that has one, by name."""
    values: dict[str, list[str]] = {}
    for run in runs:
        for name, value in facts(run).items():
            values.setdefault(name, []).append(value)
    return values


def speed_facts(run: Collected) -> dict[str, str]:
    """What a run's speed depends on beside its settings; nothing for a machine that is not known."""
    known = run.environment
    if known is None:
        return {}
    driver = {"driver": known.versions["driver"]} if "driver" in known.versions else {}
    machine = {"machine": known.machine, "processor": known.processor}
    return {**machine, **driver, **_packages(known, SPEED_PACKAGES), "moelab": known.moelab}


def loss_facts(run: Collected) -> dict[str, str]:
    """What rounds a run's loss beside its settings; nothing for a machine that is not known."""
    known = run.environment
    if known is None:
        return {}
    commit = {"commit": known.git_commit} if known.git_commit else {}
    return {"hardware": known.chip, **_packages(known, LOSS_PACKAGES), "moelab": known.moelab, **commit}


def kernel_facts(run: Collected) -> dict[str, str]:
    """Which kernels of a run were emulated."""
    words = {True: "emulated", False: "native"}
    return {"MXFP8 or NVFP4 kernels": words[run.emulates_products], "DeepEP kernels": words[run.emulates_deepep]}


def speed_differences(side: Side, reference: Side) -> list[str]:
    """Why two sides' tokens/s are not of the same work on like machines, in words, as far as is known."""
    work = differing_of((side, reference), OF_A_TOKEN)
    of_work = [f"{name} {' against '.join(map(str, values))}" for name, values in work.items()]
    return [*of_work, *machine_differences(side, reference)]


def machine_differences(side: Side, reference: Side) -> list[str]:
    """In what two sides' machines and software differ that their speed depends on, in words, as far as is known."""
    if side.experiment is not None and reference.experiment is not None:
        return differing_facts(side.runs, reference.runs, speed_facts)
    values, others = ({**of.settings.values} for of in (side, reference))
    for known in (values, others):
        known["hardware"] = known.get("gpu") or known.get("processor") or ""
    differences = [
        f"{name} {values[name]} against {others[name]}"
        for name in ("hardware", "driver", *SPEED_PACKAGES)
        if values.get(name) and others.get(name) and values[name] != others[name]
    ]
    # Runs from elsewhere are held against their own kind too: one side may be of two machines.
    mixed = [side.label for side in (side, reference) if mixed_facts(side.runs, speed_facts)]
    return [*differences, *(f"the runs of {label} are not on like machines" for label in mixed)]


def _verdict(reference: Side, side: Side, *, final_fraction: float, **options: Any) -> Verdict | None:
    """Judgement of the finished runs on the steps that all of them logged; None where nothing can be judged."""
    both = (reference, side)
    if not all(one.seeds_known and (one.diverged_seeds or not one.unfinished) for one in both):
        return None
    table = pd.concat(
        [one.table[one.table["run"].isin([run.run for run in one.finished])] for one in both], ignore_index=True
    )
    # A longer run would be judged on later steps than the others: only what all logged counts.
    logged = [set(rows["step"]) for _, rows in table.groupby(["arm", "run"])]
    table = table[table["step"].isin(set.intersection(*logged))] if logged else table
    if table["loss"].notna().sum() == 0:
        return None
    final = final_losses(table, final_fraction=final_fraction)
    (verdict,) = judge_sides(final, both, name=lambda one: one.label, **options)
    return verdict


def _common_steps(*sides: Side) -> set[int]:
    """Steps that every run of all sides logged, finite or not; a step that a source gives no loss for is not logged."""
    if not all(side.table["loss"].notna().any() for side in sides):  # an export of throughput alone
        return set()
    tables = [side.table if side.seeds_known or side.diverged else side.table.dropna(subset=["loss"]) for side in sides]
    return set.intersection(*(set(rows["step"]) for table in tables for _, rows in table.groupby("run")))


def _mean_loss(side: Side) -> pd.Series[float]:
    """Mean loss over the side's runs at each step, NaN where one has none or it is not finite."""
    # NaN where one run has none: a mean that loses a run on the way would jump.
    wide = merge_segments(side.table).pivot(index="step", columns="run", values="loss")
    return wide.mean(axis=1, skipna=False).where(lambda mean: mean.abs() < math.inf)


def _packages(environment: Environment, names: Iterable[str]) -> dict[str, str]:
    """Versions that are on record: an older record may not speak of a package at all."""
    packages = environment.packages
    return {name: packages[name] or "not installed" for name in names if name in packages}
