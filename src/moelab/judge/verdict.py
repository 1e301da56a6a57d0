"""Is an arm's loss equivalent to the reference's? Rows in, one loss a seed, and a verdict with its numbers out.

A run's final loss is the mean of its last steps, which averages the noise of single batches. It is one number a run:
successive steps are autocorrelated, so a test on steps would count the same evidence many times. The statistics are in
:mod:`moelab.judge.equivalence`; here the answers are told apart. Before any interval counts:

* A seed that **diverged** in the arm and not in the reference makes the arm *different*: dropping it and averaging the
  rest would call an arm harmless that loses every second training. One that diverged in the reference alone leaves
  nothing to hold the arm against: *insufficient data*. One that diverged in both says nothing about the arm.
* An arm that has **not learnt** yet is as good as any other: *not trained enough*.
* A reference seed that lies **apart** from its others is named, and nothing is decided until it is dropped by name.

Then the interval of the mean paired difference is held against the margin and against zero. An equivalence does not
stand against what these means do not show: a difference that still **changes**, a seed that was **lost** far from where
the judged ones were, a run that was **replaced** by another with another loss. A lost seed whose log shows nothing of
the kind is left out by name.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import numpy as np
import pandas as pd
from statsmodels.stats.multitest import multipletests

from moelab.errors import BadInput
from moelab.files import finite_or_none
from moelab.judge.arms import contrast, seed_names, seeds_words
from moelab.judge.equivalence import (
    MAX_SEEDS_SEARCHED,
    MIN_SEEDS,
    NAN,
    POWER,
    Interval,
    Margin,
    equivalence_margin,
    outlying_seeds,
    paired_tests,
    seeds_needed,
    t_interval,
)
from moelab.runs.table import merge_segments

BLOW_UP_NATS = 0.5
"""A run whose median loss over the final steps is so far above its lowest over as many steps, and above what is usual
in the arm that rises least, diverged, though its loss is finite. A choice."""
SPIKE_NATS = 1.0
"""A step that is so far above those before it is told of, and is a divergence where it is the last. A choice; spikes of
half a nat are usual in rapid trainings."""
LEARNT_FRACTION = 0.1
"""Of the untrained model's loss: an arm has learnt when it is lower by more. A choice: less than that is what frequent
tokens give in the first steps, whatever the arm."""
HELD_OUT = "held-out loss"
_RUN = ["arm", "seed"]


class Answer(StrEnum):
    """What a comparison says."""

    EQUIVALENT = "equivalent"
    DIFFERENT = "different"
    INSUFFICIENT = "insufficient data"
    NOT_TRAINED = "not trained enough"


@dataclass(frozen=True, kw_only=True)
class OtherAttempt:
    """A run that is not judged, held against the other arm's run of its seed where both logs end."""

    arm: str  # that it is of: the judged one, or the reference
    seed: int
    end: str  # how it ended, in words
    is_replaced: bool  # by another run of the same arm and seed
    has_ended: bool  # it finished or diverged
    has_diverged: bool
    loss: float  # over the last steps that both logged; NaN of none
    nats: float  # the arm's − the reference's, there; NaN without a partner
    usual: Interval  # of that difference in one more seed, by the judged ones at the same steps

    def stands_apart(self, bound: float) -> bool:
        """Whether it says something else than the judged runs; NaN does not."""
        return abs(self.nats) > bound and not self.usual.low <= self.nats <= self.usual.high


@dataclass(frozen=True)
class ArmSeeds:
    """What became of each seed of one arm: a finite loss in nats per token, a divergence, or nothing, and why.

    Each seed counts once: a finite loss counts, whatever became of another attempt, and then a divergence.
    """

    losses: Mapping[int, float] = field(default_factory=dict)
    diverged: Mapping[int, str] = field(default_factory=dict)
    lost: Mapping[int, str] = field(default_factory=dict)
    changes: Mapping[int, float] = field(default_factory=dict)  # of a loss within the steps of its mean, by a line
    unmatched: Mapping[int, float] = field(default_factory=dict)  # means of last steps of which the other logged none
    attempts: tuple[OtherAttempt, ...] = ()  # that are not judged, also those of the reference

    def __post_init__(self) -> None:
        finite = {int(seed): float(loss) for seed, loss in self.losses.items() if math.isfinite(loss)}
        failed = {int(seed): f"loss is {loss}" for seed, loss in self.losses.items() if not math.isfinite(loss)}
        failed |= {int(seed): reason for seed, reason in self.diverged.items() if seed not in finite}
        gone = {int(seed): reason for seed, reason in self.lost.items() if seed not in {**finite, **failed}}
        for name, value in (("losses", finite), ("diverged", failed), ("lost", gone)):
            object.__setattr__(self, name, value)

    @property
    def known(self) -> set[int]:
        """Seeds that the arm has or should have."""
        return {*self.losses, *self.diverged, *self.lost, *self.unmatched}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The verdict on one arm, with every number behind it; losses and differences (arm − reference) are in nats.

    ``interval`` lies inside ±``margin_nats`` when the answer is ``equivalent`` and wholly outside when a test made it
    ``different``.
    """

    arm: str
    reference: str
    answer: Answer
    quantity: str
    seeds: tuple[int, ...]
    mean_difference_nats: float
    sd_difference: float
    interval: Interval
    margin_nats: float
    margin_cap_nats: float
    margin_source: str
    reference_sd: float
    beyond_p: float
    arm_losses: dict[int, float]
    reference_losses: dict[int, float]
    arm_diverged: tuple[int, ...]  # and not in the reference
    outlying_seeds: tuple[int, ...]  # of the reference
    dropped_seeds: tuple[int, ...]
    decided_by: str = ""  # the sentence that decided where no interval did
    cautions: tuple[str, ...] = ()  # sentences that qualify the answer, and that no short form of it leaves out
    findings: tuple[str, ...] = ()  # sentences that qualify it too
    unpaired_words: str = ""  # why there is no pair, and how far the means of all seeds are apart
    settled_by: str = ""  # what would turn insufficient data into an answer
    seeds_needed: tuple[int | None, int | None] | None = None
    steps: tuple[int, int] | None  # the first and the last behind the losses; None for a held-out loss

    @property
    def n_seeds(self) -> int:
        """Number of seeds that both arms have."""
        return len(self.seeds)

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval does."""
        return self.interval.exists and not self.interval.low <= 0.0 <= self.interval.high

    @property
    def answer_words(self) -> str:
        """The answer, and for an equivalent arm the shift that it has all the same."""
        if self.answer is Answer.EQUIVALENT and self.excludes_zero:
            return f"{self.answer}, with a shift of {self.mean_difference_nats:+.4f} nats"
        return str(self.answer)

    def sentence(self) -> str:
        """State the verdict in words with the numbers behind it."""
        arm, reference, shared = contrast(self.arm, self.reference)
        both = f" (both {shared})" if shared else ""
        margin = f"margin ±{self.margin_nats:.4f}" if math.isfinite(self.margin_nats) else "no margin"
        if math.isfinite(self.margin_cap_nats):
            is_wider = self.margin_nats > self.margin_cap_nats  # as a person may give it
            margin += f" ({'above the usual cap' if is_wider else 'cap'} {self.margin_cap_nats:.4f})"
        numbers = self.unpaired_words or (
            f"{arm} differs from {reference}{both} by {self.mean_difference_nats:+.4f} nats in {self.quantity} "
            f"({self.interval.words()}), {margin}, n = {seeds_words(self.n_seeds)}"
        )
        if self.decided_by:
            parts = [f"{str(self.answer).capitalize()}: {self.decided_by}", f"{numbers}."]
        else:
            parts = [f"{numbers}: {self.answer_words}."]
        return " ".join([*parts, *self.cautions, *self.findings, self.settled_by]).strip()

    def to_json(self) -> dict[str, Any]:
        """The verdict for a program; what is missing is null."""
        return {
            "arm": self.arm,
            "reference": self.reference,
            "answer": self.answer.value,
            "quantity": self.quantity,
            "seeds": list(self.seeds),
            "difference_nats": finite_or_none(self.mean_difference_nats),
            "interval_nats": [finite_or_none(end) for end in (self.interval.low, self.interval.high)],
            "margin_nats": finite_or_none(self.margin_nats),
            "seeds_needed": list(self.seeds_needed) if self.seeds_needed else None,
            "sentence": self.sentence(),
        }


# From rows to one loss a seed


@dataclass(frozen=True, kw_only=True)
class FinalLosses:
    """Final losses, each a mean over steps ``first_step`` to ``last_step``, or the loss of held-out text."""

    seeds: Mapping[str, ArmSeeds]  # by arm
    first_step: int = 0  # both are 0 where the losses are of held-out text
    last_step: int = 0
    final_fraction: float = 0.1  # of the steps

    @property
    def steps(self) -> tuple[int, int] | None:
        """The first and the last; None of a held-out loss."""
        return (self.first_step, self.last_step) if self.last_step else None

    @property
    def quantity(self) -> str:
        """What the losses are."""
        first, last = self.first_step, self.last_step
        of_steps = f"the loss of step {last}" if first == last else f"the mean loss of steps {first} to {last}"
        return of_steps if last else HELD_OUT


def first_final_step(last_step: int, final_fraction: float) -> int:
    """Where the last part of the steps begins, which is one step at least.

    Raises:
        BadInput: ``final_fraction`` is outside (0, 1].

    Example:
        >>> first_final_step(60, 0.1)
        55
    """
    if not 0.0 < final_fraction <= 1.0:
        raise BadInput(f"final_fraction is {final_fraction}: give a part of the steps above 0 and up to 1, such as 0.1")
    return last_step - max(1, round(final_fraction * last_step)) + 1  # both ends count


def final_losses(table: pd.DataFrame, *, final_fraction: float = 0.1) -> FinalLosses:
    """Mean loss of each run over the last part of training, at the steps that all arms logged.

    Where arms end at different steps, the end is that of the first to end. Left out and named are runs that ended
    before others of their arm or lack some of these steps. A run diverged if its loss ends or stays not finite, or far
    above where it was. A step at which the loss of a run was not finite, and was again afterwards, counts for no run:
    the text of a step is the same in all.

    Raises:
        BadInput: ``final_fraction`` is outside (0, 1], or the table has no loss.
    """
    if table["loss"].notna().sum() == 0:
        raise BadInput("the table has no loss: collect a run that logged at least one step")
    merged = merge_segments(table)  # of a step that a restart repeated the last value counts
    last_step = int(merged.groupby("arm")["step"].max().min())
    first_step = first_final_step(last_step, final_fraction)
    merged = merged[merged["step"] <= last_step].assign(logged=1.0)
    by_run: Any = merged.pivot(index="step", columns=_RUN, values=["loss", "logged"])
    losses_SR, logged_SR = by_run["loss"].where(np.isfinite), by_run["logged"].notna()  # steps by arm and seed
    last_SR, seen_SR = losses_SR.loc[first_step:], logged_SR.loc[first_step:]
    # An arm that logs every tenth step has no gaps: what counts is the steps that most runs of each arm logged.
    shares = seen_SR.loc[:, seen_SR.any()].T.groupby(level="arm").mean()
    counts_S = (shares.reindex(merged["arm"].unique(), fill_value=0.0) >= 0.5).all()
    expected, finite_SR = int(counts_S.sum()), last_SR[counts_S].notna()
    lacks = expected - seen_SR[counts_S].sum()
    recovers = finite_SR.iloc[-1:].all() & (2 * finite_SR.sum() >= expected)
    whole = recovers & (lacks == 0)
    averaged_SR = last_SR[counts_S][finite_SR.loc[:, whole].all(axis=1)]
    means, changes, own_means = averaged_SR.mean(), _fitted_changes(averaged_SR), last_SR.mean()
    blow_ups = _blow_ups(losses_SR.loc[:, whole], first_step) if whole.any() else {}
    ends: Any = merged.groupby(_RUN)["step"].max()
    found: dict[str, dict[str, Any]] = {}
    for key, end in ends.items():
        arm, seed = str(key[0]), int(key[1])
        own = found.setdefault(arm, {name: {} for name in ("losses", "diverged", "lost", "changes", "unmatched")})
        not_finite = last_SR.index[seen_SR[key] & last_SR[key].isna()]
        if len(not_finite) and not recovers[key]:
            own["diverged"][seed] = f"loss is not finite at step {not_finite[0]}"
        elif end < ends[arm].max():
            own["lost"][seed] = f"ended at step {end} of {ends[arm].max()}"
        elif not expected:
            own["unmatched"][seed] = float(own_means[key])
        elif lacks[key]:
            own["lost"][seed] = f"{lacks[key]} of {expected} final steps are not in the log"
        elif key in blow_ups:
            own["diverged"][seed] = blow_ups[key]
        else:
            own["losses"][seed] = means[key]
            own["changes"] |= {seed: changes[key]} if key in changes else {}
    if expected:
        first_step, last_step = int(averaged_SR.index[0]), int(averaged_SR.index[-1])
    seeds = {arm: ArmSeeds(**own) for arm, own in found.items()}
    return FinalLosses(seeds=seeds, first_step=first_step, last_step=last_step, final_fraction=final_fraction)


def recovered_spikes(rows: pd.DataFrame) -> list[int]:
    """Steps of one run whose loss rose by more than :data:`SPIKE_NATS` and came back.

    It is held against the median of the twenty logged steps before, and the run must end below that again.
    """
    losses = merge_segments(rows).set_index("step")["loss"].where(np.isfinite).dropna()
    before = losses.rolling(20, min_periods=1).median().shift()
    spikes = losses.index[(losses > before + SPIKE_NATS) & (losses.iloc[-1:].sum() < before + SPIKE_NATS)]
    return [int(step) for step in spikes]


def _fitted_changes(losses_SR: pd.DataFrame) -> dict[Any, float]:
    """By arm and seed, how far a straight line through the run's losses goes from the first step to the last."""
    steps = losses_SR.index.to_numpy(dtype=float)
    if len(steps) < 2:
        return {}
    centred = steps - steps.mean()
    slopes = centred @ losses_SR.to_numpy() / (centred @ centred)
    return dict(zip(losses_SR.columns, slopes * (steps[-1] - steps[0]), strict=True))


def _blow_ups(losses_SR: pd.DataFrame, first_step: int) -> dict[Any, str]:
    """By arm and seed, the runs that end far above where they were, in words."""
    usual, above, words = math.inf, {}, {}
    for _, of_arm in losses_SR.T.groupby(level="arm"):
        losses = of_arm.T.dropna(how="all").ffill()
        window = len(losses.loc[first_step:])
        # Medians: a spike among the last steps, from which the loss came back, is no end.
        medians = losses.rolling(window, min_periods=(window + 1) // 2).median()
        # Text that becomes harder raises the loss of every arm.
        usual = min(usual, float((medians.iloc[-1] - medians.min()).median()))
        for run in losses:
            low, stays, ends = medians[run].min(), medians[run].iloc[-1], losses[run].iloc[-1]
            above[run] = max(stays - BLOW_UP_NATS, ends - SPIKE_NATS) - low
            step = medians[run].idxmin()
            words[run] = f"loss rose from {low:.2f} nats at step {step} to {ends:.2f} at the end"
    return {run: words[run] for run, nats in above.items() if nats > usual}


# From losses to the verdict


def judge(
    ours: ArmSeeds,
    theirs: ArmSeeds,
    *,
    arm: str,
    reference: str,
    quantity: str = "final loss",
    dropped_seeds: Collection[int] = (),
    untrained_nats: float | None = None,
    lr_warmup_steps: int = 0,
    steps: tuple[int, int] | None = None,
    **margin_options: Any,
) -> Verdict:
    """Judge one arm against the reference from one loss a seed.

    Args:
        ours: What became of the arm's seeds.
        theirs: Of the reference's. Seeds without a partner still count for the spread.
        arm: Name of the arm.
        reference: Name of the reference arm.
        quantity: What the losses are, for the sentence.
        dropped_seeds: Left out of both arms because a person says so. A divergence cannot be dropped.
        untrained_nats: Loss of a model that knows nothing, ln(vocabulary); None does not ask whether arms have learnt.
        lr_warmup_steps: Steps over which the learning rate rises.
        steps: First and last step behind the losses, where they come from training steps.
        **margin_options: ``margin_nats`` and ``margin_cap_nats`` of
            :func:`~moelab.judge.equivalence.equivalence_margin`.

    Returns:
        The verdict; *different* is not corrected for other arms, see :func:`correct_for_arms`.

    Raises:
        BadInput: An option is out of range.

    Example:
        >>> reference = ArmSeeds({0: 3.60, 1: 3.64, 2: 3.57, 3: 3.61})
        >>> arm = ArmSeeds({0: 3.603, 1: 3.645, 2: 3.571, 3: 3.614})
        >>> str(judge(arm, reference, arm="mxfp8_standard", reference="bf16_standard").answer)
        'equivalent'
    """
    dropped = tuple(sorted((ours.known | theirs.known) & {*dropped_seeds}))  # others are of another arm
    ours = replace(ours, attempts=tuple(one for one in ours.attempts if one.seed not in dropped))
    kept, base = ({k: loss for k, loss in one.losses.items() if k not in dropped} for one in (ours, theirs))
    # Also of seeds without a partner: they are as much of the reference as the others.
    margin = equivalence_margin(base, reference=reference, **margin_options)
    seeds = tuple(sorted(kept.keys() & base.keys()))
    verdict = Verdict(
        arm=arm,
        reference=reference,
        quantity=quantity,
        seeds=seeds,
        **_tested([kept[seed] - base[seed] for seed in seeds], margin),
        margin_nats=margin.nats,
        margin_cap_nats=margin.cap_nats,
        margin_source=margin.source,
        reference_sd=margin.reference_sd,
        arm_losses=kept,
        reference_losses=base,
        arm_diverged=tuple(sorted(ours.diverged.keys() - theirs.diverged.keys())),
        outlying_seeds=outlying_seeds(base),  # without dropped ones: the next may have hidden behind them
        dropped_seeds=dropped,
        steps=steps,
    )
    pair = _Pair(verdict=verdict, names=contrast(arm, reference)[:2], ours=ours, theirs=theirs, margin=margin)
    doubts = [*_doubts(pair)]
    # What comes first decides, and the rest is told beside it; the interval comes last.
    before = [*_before_any_interval(pair, untrained_nats)]
    against = [words for contradicts, words in doubts if contradicts and verdict.answer is Answer.EQUIVALENT]
    answer, decided_by = [*before, *((Answer.INSUFFICIENT, words) for words in against), (verdict.answer, "")][0]
    verdict = replace(
        verdict,
        answer=answer,
        decided_by=decided_by,
        cautions=tuple(_capitalised(words) for _, words in doubts if words != decided_by),
        findings=(*(_capitalised(words) for _, words in before[1:]), *_to_be_known(pair, lr_warmup_steps)),
        unpaired_words="" if seeds else _unpaired(pair),
    )
    return _settled_by(verdict, pair) if answer is Answer.INSUFFICIENT and not decided_by else verdict


def correct_for_arms(verdicts: list[Verdict]) -> list[Verdict]:
    """Holm's correction over the arms of one study: with more arms, a chance *different* is more likely.

    Args:
        verdicts: on one quantity, one an arm.

    Returns:
        The verdicts; one whose test does not stand among so many is *insufficient data* and says so.
    """
    # A divergence decided by itself; no p value stands behind it.
    tested = [one for one in verdicts if one.answer is Answer.DIFFERENT and not one.arm_diverged]
    with_p = [one for one in verdicts if math.isfinite(one.beyond_p)]
    if not tested or len(with_p) < 2:
        return verdicts
    level = (1.0 - with_p[0].interval.level) / 2.0  # of one side, as each test was made
    # Also those that are not different count as tests that were made.
    significant = multipletests([one.beyond_p for one in with_p], alpha=level, method="holm")[0]
    stands = {one.arm: stands for one, stands in zip(with_p, significant, strict=True)}
    words = f"Alone it would be different, but not after Holm's correction for {len(with_p)} arms."
    return [
        replace(one, answer=Answer.INSUFFICIENT, findings=(*one.findings, words))
        if one in tested and not stands[one.arm]
        else one
        for one in verdicts
    ]


@dataclass(frozen=True, kw_only=True)
class _Pair:
    """An arm and the reference, what became of their seeds, and what the interval alone says."""

    verdict: Verdict
    names: tuple[str, str]  # of the arm and the reference, in words
    ours: ArmSeeds
    theirs: ArmSeeds
    margin: Margin

    @property
    def bound(self) -> float:
        """The margin, or the widest that there could be."""
        return self.margin.nats if self.margin.exists else self.margin.cap_nats

    @property
    def both(self) -> list[tuple[str, str, ArmSeeds, dict[int, float]]]:
        """Of each arm its name, the name in words, its seeds and their losses."""
        one = self.verdict
        return [
            (one.arm, self.names[0], self.ours, one.arm_losses),
            (one.reference, self.names[1], self.theirs, one.reference_losses),
        ]


def _tested(differences: Sequence[float], margin: Margin) -> dict[str, Any]:
    """What the interval alone says of paired differences, and the numbers behind it."""
    answer, sd, low, high, beyond_p = Answer.INSUFFICIENT, NAN, NAN, NAN, NAN
    if len(differences) > 1:  # two give an interval, and MIN_SEEDS an answer
        # Without a spread there is no margin, but none could be wider than the cap: beyond it is different all the same
        bound = margin.nats if margin.exists else margin.cap_nats
        tests = paired_tests(differences, bound, tost_alpha=margin.tost_alpha)
        sd, low, high, beyond_p = (float(one[0]) for one in (tests.sd, tests.low, tests.high, tests.beyond_p))
        if len(differences) >= MIN_SEEDS and margin.exists and tests.equivalent[0]:
            answer = Answer.EQUIVALENT
        elif len(differences) >= MIN_SEEDS and tests.different[0]:
            answer = Answer.DIFFERENT
    return {
        "answer": answer,
        "mean_difference_nats": float(np.mean(differences)) if differences else NAN,
        "interval": Interval(low=low, high=high, level=1.0 - 2.0 * margin.tost_alpha),
        "sd_difference": sd,
        "beyond_p": beyond_p,
    }


def _unpaired(pair: _Pair) -> str:
    """Why two arms have no pair, and how far the means of all their seeds are apart."""
    is_other_steps = bool(pair.ours.unmatched and pair.theirs.unmatched)
    what = "logged none of their last steps in common" if is_other_steps else "have no finished seed in common"
    words = f"{' and '.join(pair.names)} {what}"
    ours, theirs = ([*(one.unmatched if is_other_steps else losses).values()] for _, _, one, losses in pair.both)
    if not ours or not theirs:
        return words
    nats, counts = float(np.mean(ours) - np.mean(theirs)), f"{len(ours)} against {seeds_words(len(theirs))}"
    return f"{words}; unpaired, the mean of {counts} differs by {nats:+.4f} nats in {pair.verdict.quantity}"


def _before_any_interval(pair: _Pair, untrained_nats: float | None) -> Iterator[tuple[Answer, str]]:
    """What decides whatever the interval says, the first before the others, each with its answer."""
    verdict, ours, theirs, (arm, reference) = pair.verdict, pair.ours, pair.theirs, pair.names
    n = len(ours.known | theirs.known)  # of all seeds that there should be, also those that were lost
    if failed := verdict.arm_diverged:
        words, why = f"{len(failed)} of {n} seeds diverged in {arm} and not in {reference}", ours.diverged
        if any(seed in theirs.losses for seed in failed):  # trained well by the reference
            yield Answer.DIFFERENT, f"{words} ({_reasons(failed, why)})."
        else:  # whether the reference would have kept them is not known
            answer = Answer.DIFFERENT if verdict.answer is Answer.DIFFERENT else Answer.INSUFFICIENT
            yield answer, f"{words}, which has no result for them ({_reasons(failed, why)})."
    if lacking := theirs.diverged.keys() - ours.diverged.keys():
        words = f"{len(lacking)} of {n} seeds diverged in the reference {reference} and not in {arm}"
        yield Answer.INSUFFICIENT, f"{words} ({_reasons(lacking, theirs.diverged)})."
    if untrained_nats is not None and verdict.seeds:
        # A margin that a person gave says what is close, not what is learnt.
        is_derived = pair.margin.exists and not pair.margin.given
        needed = max(LEARNT_FRACTION * untrained_nats, pair.margin.nats if is_derived else 0.0)
        ends = {name: float(np.mean([losses[k] for k in verdict.seeds])) for _, name, _, losses in pair.both}
        if untaught := [name for name, end in ends.items() if end > untrained_nats - needed]:
            each = [f"{name} has not learnt ({ends[name]:.2f} nats in {verdict.quantity})" for name in untaught]
            words = f"{' and '.join(each)}: an untrained model has {untrained_nats:.2f} nats"
            yield Answer.NOT_TRAINED, f"{words}, and an arm must end at least {needed:.2f} below that."
    for seed in verdict.outlying_seeds:
        yield (
            Answer.INSUFFICIENT,
            f"seed {seed} of the reference {reference} lies apart from the others "
            f"({verdict.reference_losses[seed]:.4f} nats): find out why, or leave it out of all arms "
            f"(moelab report … --drop-seed {seed}).",
        )


def _doubts(pair: _Pair) -> Iterator[tuple[bool, str]]:
    """What the interval does not show, each with whether it speaks against an equivalence."""
    yield from ((False, words) for words in _of_one_run(pair))
    yield from _trend(pair)
    yield from _other_runs(pair)


def _of_one_run(pair: _Pair) -> Iterator[str]:
    """Seeds that end as near to each other as one run to itself."""
    near, floor = [], pair.margin.floor_nats
    for _, name, _, losses in pair.both:
        apart = float(np.ptp([*losses.values()])) if len(losses) >= MIN_SEEDS else 0.0
        values = [*losses.values()]
        # A held-out loss is logged to four decimals, which two seeds may well share.
        equal = [seed for seed in losses if values.count(losses[seed]) > 1 and pair.verdict.quantity != HELD_OUT]
        if 0 < apart < floor:
            near.append(f"those of {name} within {apart:.5f} nats")
        elif equal:
            near.append(f"{seed_names(equal)} of {name} to the last digit")
    # Training is not that exact on GPUs: equal digits are more likely one run than two.
    if pair.verdict.answer is Answer.EQUIVALENT and pair.verdict.arm_losses == pair.verdict.reference_losses:
        near.append("both arms to the last digit")
    if near:
        yield (
            f"seeds end closer together than rounding alone moves a loss ({floor:.4f} nats), {' and '.join(near)}: "
            "they may be one run that counts several times."
        )


def _trend(pair: _Pair) -> Iterator[tuple[bool, str]]:
    """A difference that changes within the steps that it is a mean of, by a t interval over seeds."""
    verdict, ours, theirs = pair.verdict, pair.ours.changes, pair.theirs.changes
    if verdict.steps is None or not {*verdict.seeds} <= ours.keys() & theirs.keys():
        return
    # The line through a difference is the difference of the lines.
    change = t_interval([ours[seed] - theirs[seed] for seed in verdict.seeds])
    by, mean = (change.low + change.high) / 2.0, verdict.mean_difference_nats
    smallest = min(pair.margin.floor_nats, pair.bound)
    if not change.exists or change.low <= 0.0 <= change.high or abs(by) < smallest:
        return
    (first, last), (arm, reference) = verdict.steps, pair.names
    # As many steps before or after these, by the same line, the mean would be beyond the bound.
    leaves = abs(mean) + abs(by) > pair.bound
    yield (
        leaves,
        f"the difference of {arm} from {reference} still changes: within steps {first} to {last} it goes from "
        f"{mean - by / 2.0:+.4f} to {mean + by / 2.0:+.4f} nats.",
    )


def _other_runs(pair: _Pair) -> Iterator[tuple[bool, str]]:
    """Runs of which another is judged, if they had finished or diverged, and lost ones whose log ends elsewhere."""
    told = [one for one in pair.ours.attempts if one.stands_apart(pair.bound) or (one.is_replaced and one.has_ended)]
    if not told:
        return
    # Those that diverged or lie farthest are named.
    told.sort(key=lambda one: (not one.has_diverged, -abs(one.nats) if math.isfinite(one.nats) else 0.0, one.seed))
    names = {arm: name for arm, name, _, _ in pair.both}
    words = []
    for one in told[:3]:
        where = f", at {one.loss:.4f} nats, a difference of {one.nats:+.4f}" if math.isfinite(one.nats) else ""
        words.append(f"{names[one.arm]}, seed {one.seed}: {one.end}{'' if one.has_diverged else where}")
    words += [f"and {len(told) - 3} more"] if len(told) > 3 else []
    speaks = any(one.has_diverged or one.stands_apart(pair.bound) for one in told)
    yield speaks, f"other runs of these arms are not judged: {'; '.join(words)}."


def _to_be_known(pair: _Pair, lr_warmup_steps: int) -> Iterator[str]:
    """What qualifies an answer and decides nothing."""
    verdict, margin = pair.verdict, pair.margin
    if verdict.answer is Answer.DIFFERENT and abs(verdict.mean_difference_nats) < margin.widest_nats:
        yield (
            f"The margin is narrow for want of seeds: {seeds_words(len(verdict.reference_losses))} of the reference "
            f"leave room for one of up to ±{margin.widest_nats:.4f}, which would hold this difference."
        )
    if both := pair.ours.diverged.keys() & pair.theirs.diverged.keys():  # it says something of the seed, not of the arm
        yield f"Left out, as it diverged in both: {_reasons(both, pair.ours.diverged)}."
    # One whose log is apart from the judged ones has decided.
    attempts = [one for one in pair.ours.attempts if not one.is_replaced]
    apart = {(one.arm, one.seed) for one in attempts if one.stands_apart(pair.bound)}
    left_out = []
    for side, name, seeds, _ in pair.both:
        lost = [seed for seed in seeds.lost if (side, seed) not in apart]
        left_out += [f"{name}, {_reasons(lost, seeds.lost)}"] if lost else []
    if left_out:
        yield f"Left out, as nothing that they logged speaks against it: {'; '.join(left_out)}."
    if verdict.dropped_seeds:
        yield f"Dropped from all arms as requested: {seed_names(verdict.dropped_seeds)}."
    if verdict.steps is not None and verdict.seeds and verdict.steps[1] <= lr_warmup_steps:
        yield (
            f"Training ended inside its warm-up (step {verdict.steps[1]:,} of {lr_warmup_steps:,}): the learning rate "
            "was still rising."
        )


def _capitalised(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]


def _reasons(seeds: Iterable[int], reasons: Mapping[int, str]) -> str:
    """``seeds 1, 4: loss is nan at step 12; seed 3: …``: seeds of one reason together."""
    groups: dict[str, list[int]] = {}
    for seed in sorted(seeds):
        groups.setdefault(reasons[seed], []).append(seed)
    return "; ".join(f"{seed_names(own)}: {why}" for why, own in groups.items())


def _settled_by(verdict: Verdict, pair: _Pair) -> Verdict:
    """The verdict with what would turn "insufficient data" into an answer, and how many seeds that would take."""
    if pair.ours.unmatched or pair.theirs.unmatched:
        return replace(verdict, settled_by="Train both arms for as many steps, and log the same ones.")
    if verdict.n_seeds < MIN_SEEDS:
        return replace(verdict, settled_by=f"At least {MIN_SEEDS} common seeds are needed.")
    if not pair.margin.exists:
        words = "Give a margin in nats (--margin), or train the reference with different seeds."
        return replace(verdict, settled_by=words)
    needed = seeds_needed(
        n_seeds=verdict.n_seeds,
        sd_difference=verdict.sd_difference,
        n_reference=len(verdict.reference_losses),  # the margin is of all of them, with a partner or without
        margin=pair.margin,
    )
    ends = dict.fromkeys(f"more than {MAX_SEEDS_SEARCHED}" if end is None else str(end) for end in needed)
    words = (
        f"The interval reaches beyond the margin, and zero is not excluded. Were the true difference 0, "
        f"{' to '.join(ends)} common seeds would show it with {100 * POWER:g} % power."
    )
    if verdict.excludes_zero:  # how many seeds show that there is no difference is no question any more
        words = (
            "The interval excludes zero and reaches into the margin: more seeds say whether the difference is larger."
        )
    return replace(verdict, settled_by=words, seeds_needed=needed)
