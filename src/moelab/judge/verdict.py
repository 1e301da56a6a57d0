"""Is an arm's loss equivalent to the reference's? One value a seed in, one verdict with its numbers out.

The statistics are in :mod:`moelab.judge.equivalence`; here the answers are told apart. Before any interval counts:

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
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any

import numpy as np
from statsmodels.stats.multitest import multipletests

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

LEARNT_FRACTION = 0.1
"""Of the untrained model's loss: an arm has learnt when it is lower by more. A choice: less than that is what frequent
tokens give in the first steps, whatever the arm."""
HELD_OUT = "held-out loss"


class Answer(StrEnum):
    """What a comparison says."""

    EQUIVALENT = "equivalent"
    DIFFERENT = "different"
    INSUFFICIENT = "insufficient data"
    NOT_TRAINED = "not trained enough"


class Doubtful(str):
    """Why a seed has no result, where a divergence may be behind it: its loss was not finite, but not who trained."""

    __slots__ = ()


@dataclass(frozen=True, kw_only=True)
class OtherAttempt:
    """A run that is not judged, held against the other arm's run of its seed where both logs end."""

    arm: str  # that it is of: the judged one, or the reference
    seed: int
    end: str  # how it ended, in words
    is_replaced: bool  # by another run of the same arm and seed
    is_finished: bool
    has_diverged: bool
    loss: float  # over the last steps that both logged; NaN of none
    nats: float  # the arm's − the reference's, there; NaN without a partner
    usual: Interval  # of that difference in one more seed, by the judged ones at the same steps


@dataclass(frozen=True, kw_only=True)
class ArmSeeds:
    """What became of each seed of one arm: a finite loss in nats per token, a divergence, or nothing, and why."""

    losses: Mapping[int, float]
    diverged: Mapping[int, str]
    lost: Mapping[int, str]
    changes: Mapping[int, float]  # of a loss within the steps that it is a mean of, by a straight line
    unmatched: Mapping[int, float]  # mean losses of last steps of which the other arm logged none
    attempts: tuple[OtherAttempt, ...] = ()  # that are not judged, also those of the reference

    @classmethod
    def of(
        cls,
        losses: Mapping[int, float] = MappingProxyType({}),
        diverged: Mapping[int, str] = MappingProxyType({}),
        lost: Mapping[int, str] = MappingProxyType({}),
        *,
        changes: Mapping[int, float] = MappingProxyType({}),
        unmatched: Mapping[int, float] = MappingProxyType({}),
        attempts: tuple[OtherAttempt, ...] = (),
    ) -> ArmSeeds:
        """Each seed once: a finite loss counts, whatever became of another attempt, and then a divergence."""
        # A table's numbers are numpy's, which JSON does not know.
        finite = {int(seed): float(loss) for seed, loss in losses.items() if math.isfinite(loss)}
        failed = {int(seed): f"loss is {loss}" for seed, loss in losses.items() if not math.isfinite(loss)}
        failed |= {int(seed): reason for seed, reason in diverged.items() if seed not in finite}
        gone = {int(seed): reason for seed, reason in lost.items() if seed not in finite and seed not in failed}
        apart = {int(seed): float(loss) for seed, loss in unmatched.items()}
        return cls(losses=finite, diverged=failed, lost=gone, changes=changes, unmatched=apart, attempts=attempts)

    @property
    def known(self) -> set[int]:
        """Seeds that the arm has or should have."""
        return {*self.losses, *self.diverged, *self.lost, *self.unmatched}

    @property
    def doubtful(self) -> list[int]:
        """Seeds without a result that may have diverged."""
        return [seed for seed, reason in self.lost.items() if isinstance(reason, Doubtful)]

    def without(self, dropped: Collection[int]) -> dict[int, float]:
        """Losses of the other seeds."""
        return {seed: loss for seed, loss in self.losses.items() if seed not in dropped}


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
    tost_p: float
    beyond_p: float
    t_p: float
    arm_losses: dict[int, float]
    reference_losses: dict[int, float]
    arm_diverged: tuple[int, ...]  # and not in the reference
    reference_diverged: tuple[int, ...]  # and not in the arm
    outlying_seeds: tuple[int, ...]  # of the reference
    dropped_seeds: tuple[int, ...]
    decided_by: str = ""  # the sentence that decided where no interval did
    cautions: tuple[str, ...] = ()  # sentences that qualify the answer, and that no short form of it leaves out
    findings: tuple[str, ...] = ()  # sentences that qualify it too
    excluded: tuple[str, ...]  # each run left out, and why
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
        """The answer, and for an equivalent arm the shift that it has all the same, or that it has none at all."""
        # Training is not that exact on GPUs: equal digits are more likely one run than two.
        if self.answer is Answer.EQUIVALENT and all(self.arm_losses[k] == self.reference_losses[k] for k in self.seeds):
            return f"{self.answer}, and the same to the last digit: both may have run the same, or be copies"
        if self.answer is Answer.EQUIVALENT and self.excludes_zero:
            return f"{self.answer}, with a shift of {self.mean_difference_nats:+.4f} nats"
        return str(self.answer)

    def sentence(self) -> str:
        """State the verdict in words with the numbers behind it."""
        arm, reference, shared = contrast(self.arm, self.reference)
        both = f" (both {shared})" if shared else ""
        if not self.seeds:
            numbers = self.unpaired_words
        else:
            margin = f"margin ±{self.margin_nats:.4f}" if math.isfinite(self.margin_nats) else "no margin"
            is_wider = self.margin_nats > self.margin_cap_nats  # as a person may give it
            cap_words = "as given, wider than the usual cap" if is_wider else "cap"
            cap = f" ({cap_words} {self.margin_cap_nats:.4f})" if math.isfinite(self.margin_cap_nats) else ""
            numbers = (
                f"{arm} differs from {reference}{both} by {self.mean_difference_nats:+.4f} nats in {self.quantity} "
                f"({self.interval.words()}), {margin}{cap}, n = {seeds_words(self.n_seeds)}"
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
            "margin_nats": finite_or_none(self.margin_nats),
            "margin_cap_nats": finite_or_none(self.margin_cap_nats),
            "reference_sd_nats": finite_or_none(self.reference_sd),
            "interval_nats": [finite_or_none(end) for end in (self.interval.low, self.interval.high)],
            "excludes_zero": self.excludes_zero,
            "diverged": {"arm": list(self.arm_diverged), "reference": list(self.reference_diverged)},
            "outlying_seeds": list(self.outlying_seeds),
            "dropped_seeds": list(self.dropped_seeds),
            "seeds_needed": list(self.seeds_needed) if self.seeds_needed else None,
            "left_out": list(self.excluded),
            "sentence": self.sentence(),
        }


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
        >>> reference = ArmSeeds.of({0: 3.60, 1: 3.64, 2: 3.57, 3: 3.61})
        >>> arm = ArmSeeds.of({0: 3.603, 1: 3.645, 2: 3.571, 3: 3.614})
        >>> str(judge(arm, reference, arm="mxfp8_standard", reference="bf16_standard").answer)
        'equivalent'
    """
    dropped = tuple(sorted((ours.known | theirs.known) & {*dropped_seeds}))  # others are of another arm
    ours = replace(ours, attempts=tuple(one for one in ours.attempts if one.seed not in dropped))
    kept, base = ours.without(dropped), theirs.without(dropped)
    # Also of seeds without a partner: they are as much of the reference as the others.
    margin = equivalence_margin(base, reference=reference, **margin_options)
    seeds = tuple(sorted(kept.keys() & base.keys()))
    both = ((arm, ours), (reference, theirs))
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
        reference_diverged=tuple(sorted(theirs.diverged.keys() - ours.diverged.keys())),
        outlying_seeds=outlying_seeds(base),  # without dropped ones: the next may have hidden behind them
        dropped_seeds=dropped,
        excluded=tuple(
            f"{name}, {words}" for name, one in both for words in _reasons(one.known, {**one.diverged, **one.lost})
        ),
        unpaired_words="" if seeds else _unpaired(arm, reference, quantity, (kept, base), (ours, theirs)),
        steps=steps,
    )
    return _decided(verdict, ours, theirs, margin, untrained_nats=untrained_nats, lr_warmup_steps=lr_warmup_steps)


def _decided(
    verdict: Verdict,
    ours: ArmSeeds,
    theirs: ArmSeeds,
    margin: Margin,
    *,
    untrained_nats: float | None,
    lr_warmup_steps: int,
) -> Verdict:
    """The verdict with the answer of what comes first, and with all that qualifies it."""
    doubts = [*_doubts(verdict, ours, theirs, margin)]
    against = [words for contradicts, words in doubts if contradicts and verdict.answer is Answer.EQUIVALENT]
    # What comes first decides, and the rest is told beside it; the interval comes last.
    before = [*_before_any_interval(verdict, ours, theirs, margin, untrained_nats)]
    first = [*before, *((Answer.INSUFFICIENT, words) for words in against), (verdict.answer, "")][0]
    findings = [_capitalised(words) for _, words in before[1:]]
    if verdict.answer is Answer.DIFFERENT and abs(verdict.mean_difference_nats) < margin.widest_nats:
        findings.append(
            f"The margin is narrow for want of seeds: {seeds_words(len(verdict.reference_losses))} of the reference "
            f"leave room for one of up to ±{margin.widest_nats:.4f}, which would hold this difference."
        )
    verdict = replace(
        verdict,
        answer=first[0],
        decided_by=first[1],
        cautions=tuple(_capitalised(words) for _, words in doubts if words != first[1]),
        findings=(*findings, *_to_be_known(verdict, ours, theirs, margin, lr_warmup_steps)),
    )
    if first != (Answer.INSUFFICIENT, ""):
        return verdict
    if ours.unmatched or theirs.unmatched:
        return replace(verdict, settled_by="Train both arms for as many steps, and log the same ones.")
    return _settled_by(verdict, margin)


def _tested(differences: Sequence[float], margin: Margin) -> dict[str, Any]:
    """What the interval alone says of paired differences, and the numbers behind it."""
    numbers = dict.fromkeys(("sd_difference", "tost_p", "beyond_p", "t_p"), NAN)
    answer, low, high = Answer.INSUFFICIENT, NAN, NAN
    if len(differences) > 1:  # two give an interval, and MIN_SEEDS an answer
        # Without a spread there is no margin, but none could be wider than the cap: beyond it is different all the same
        bound = margin.nats if margin.exists else margin.cap_nats
        tests = paired_tests(differences, bound, tost_alpha=margin.tost_alpha)
        low, high = float(tests.low[0]), float(tests.high[0])
        numbers = {
            "sd_difference": float(tests.sd[0]),
            "tost_p": float(tests.tost_p[0]) if margin.exists else NAN,
            "beyond_p": float(tests.beyond_p[0]),
            "t_p": float(tests.t_p[0]),
        }
        if len(differences) >= MIN_SEEDS and margin.exists and tests.equivalent[0]:
            answer = Answer.EQUIVALENT
        elif len(differences) >= MIN_SEEDS and tests.different[0]:
            answer = Answer.DIFFERENT
    return {
        "answer": answer,
        "mean_difference_nats": float(np.mean(differences)) if differences else NAN,
        "interval": Interval(low=low, high=high, level=1.0 - 2.0 * margin.tost_alpha),
        **numbers,
    }


def _unpaired(
    arm: str,
    reference: str,
    quantity: str,
    losses: tuple[Mapping[int, float], Mapping[int, float]],
    seeds: tuple[ArmSeeds, ArmSeeds],
) -> str:
    """Why two arms have no pair, and how far the means of all their seeds are apart."""
    arm_words, reference_words, shared = contrast(arm, reference)
    words = f"{arm_words} and {reference_words}{f' (both {shared})' if shared else ''}"
    ours, theirs = losses
    unmatched = [one.unmatched for one in seeds]
    if all(unmatched):
        ours, theirs = unmatched
        words += " logged none of their last steps in common"
    else:
        words += " have no finished seed in common"
    if not ours or not theirs:
        return words
    nats = float(np.mean([*ours.values()]) - np.mean([*theirs.values()]))
    counts = f"{len(ours)} against {seeds_words(len(theirs))}"
    return f"{words}; unpaired, the mean of {counts} differs by {nats:+.4f} nats in {quantity}"


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


def _before_any_interval(
    verdict: Verdict, ours: ArmSeeds, theirs: ArmSeeds, margin: Margin, untrained_nats: float | None
) -> Iterator[tuple[Answer, str]]:
    """What decides whatever the interval says, the first before the others, each with its answer."""
    arm, reference, _ = contrast(verdict.arm, verdict.reference)
    n = len(ours.known | theirs.known)  # of all seeds that there should be, also those that were lost
    if failed := verdict.arm_diverged:
        words, why = f"{len(failed)} of {n} seeds diverged in {arm} and not in {reference}", ours.diverged
        if any(seed in theirs.losses for seed in failed):  # trained well by the reference
            yield Answer.DIFFERENT, f"{words} ({'; '.join(_reasons(failed, why))})."
        else:  # whether the reference would have kept them is not known
            answer = Answer.DIFFERENT if verdict.answer is Answer.DIFFERENT else Answer.INSUFFICIENT
            yield answer, f"{words}, which has no result for them ({'; '.join(_reasons(failed, why))})."
    if failed := verdict.reference_diverged:
        words = f"{len(failed)} of {n} seeds diverged in the reference {reference} and not in {arm}"
        yield Answer.INSUFFICIENT, f"{words} ({'; '.join(_reasons(failed, theirs.diverged))})."
    for name, one in ((arm, ours), (reference, theirs)):
        if one.doubtful:
            words = f"{len(one.doubtful)} of {n} seeds of {name} may have diverged"
            yield Answer.INSUFFICIENT, f"{words} ({'; '.join(_reasons(one.doubtful, one.lost))})."
    if untrained_nats is not None and verdict.seeds:
        # A margin that a person gave says what is close, not what is learnt.
        needed = max(LEARNT_FRACTION * untrained_nats, margin.nats if margin.exists and not margin.given else 0.0)
        both = {arm: verdict.arm_losses, reference: verdict.reference_losses}
        ends = {name: float(np.mean([losses[seed] for seed in verdict.seeds])) for name, losses in both.items()}
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


def _doubts(verdict: Verdict, ours: ArmSeeds, theirs: ArmSeeds, margin: Margin) -> Iterator[tuple[bool, str]]:
    """What the interval does not show, each with whether it speaks against an equivalence."""
    bound = margin.nats if margin.exists else margin.cap_nats
    yield from ((False, words) for words in _of_one_run(verdict, margin))
    yield from _trend(verdict, ours, theirs, smallest=min(margin.floor_nats, bound), bound=bound)
    yield from _replaced(verdict, ours.attempts, bound)
    yield from ((True, words) for words in _lost_apart(verdict, ours.attempts, bound))


def _of_one_run(verdict: Verdict, margin: Margin) -> Iterator[str]:
    """Seeds that end as near to each other as one run to itself."""
    arm, reference, _ = contrast(verdict.arm, verdict.reference)
    arms = {arm: verdict.arm_losses, reference: verdict.reference_losses}
    # A held-out loss is logged to four decimals, which two seeds may well share.
    for name, losses in arms.items() if verdict.quantity != HELD_OUT else ():
        runs = {loss: [seed for seed in losses if losses[seed] == loss] for loss in losses.values()}
        for same in [seeds for seeds in runs.values() if len(seeds) > 1]:
            yield (
                f"{seed_names(same)} of {name} end at the same loss to the last digit: they may be one run that counts "
                "twice, or the seed had no effect."
            )
    spreads = {name: float(np.ptp([*one.values()])) for name, one in arms.items() if len(one) >= MIN_SEEDS}
    near = [f"those of {name} within {nats:.5f} nats" for name, nats in spreads.items() if 0 < nats < margin.floor_nats]
    if near:
        yield (
            f"the seeds end closer together than rounding alone moves a loss ({margin.floor_nats:.4f} nats), "
            f"{' and '.join(near)}: they may be one run that counts several times."
        )


def _trend(
    verdict: Verdict, ours: ArmSeeds, theirs: ArmSeeds, *, smallest: float, bound: float
) -> Iterator[tuple[bool, str]]:
    """A difference that changes within the steps that it is a mean of, by a t interval over seeds."""
    if not {*verdict.seeds} <= ours.changes.keys() & theirs.changes.keys():
        return
    # The line through a difference is the difference of the lines.
    change = t_interval([ours.changes[seed] - theirs.changes[seed] for seed in verdict.seeds])
    by, mean = (change.low + change.high) / 2.0, verdict.mean_difference_nats
    if not change.exists or change.low <= 0.0 <= change.high or abs(by) < smallest:
        return
    arm, reference, _ = contrast(verdict.arm, verdict.reference)
    start, end = mean - by / 2.0, mean + by / 2.0
    verb = "drifts through zero" if start * end < 0 else "still shrinks" if abs(end) < abs(start) else "still grows"
    steps = "these steps" if verdict.steps is None else f"steps {verdict.steps[0]} to {verdict.steps[1]}"
    nats = f"from {start:+.4f} to {end:+.4f} nats"
    # As many steps before or after these, by the same line, the mean would be beyond the bound.
    leaves = abs(mean) + abs(by) > bound
    yield leaves, f"the difference of {arm} from {reference} {verb}: within {steps} it goes {nats}."


def _replaced(verdict: Verdict, attempts: Iterable[OtherAttempt], bound: float) -> Iterator[tuple[bool, str]]:
    """Runs that finished or diverged, and of whose seed a later run is judged."""
    arm, reference, _ = contrast(verdict.arm, verdict.reference)
    for side, name, against in (
        (verdict.arm, arm, f"from {reference}"),
        (verdict.reference, reference, f"from there to {arm}"),
    ):
        own = [one for one in attempts if one.is_replaced and one.arm == side]
        if diverged := {one.seed: one.end for one in own if one.has_diverged}:
            words = _were_replaced(len(diverged), f"of {name} that diverged")
            yield True, f"{words} ({'; '.join(_reasons(diverged, diverged))})."
        if finished := [one for one in own if one.is_finished and not one.has_diverged]:
            # Those that lie farthest are named.
            finished.sort(key=lambda one: (-abs(one.nats) if math.isfinite(one.nats) else 0.0, one.seed))
            ends = [
                f"seed {one.seed} at {one.loss:.4f} nats" + f", {one.nats:+.4f} {against}" * math.isfinite(one.nats)
                for one in finished
            ]
            ends[3:] = [f"and {len(ends) - 3} more"] if len(ends) > 3 else []
            words = _were_replaced(len(finished), f"of {name} that had finished")
            yield any(_stands_apart(one, bound) for one in finished), f"{words} ({'; '.join(ends)})."


def _lost_apart(verdict: Verdict, attempts: Iterable[OtherAttempt], bound: float) -> Iterator[str]:
    """Runs that did not finish, and whose log ends with another difference than the judged seeds have there."""
    arm, reference, _ = contrast(verdict.arm, verdict.reference)
    apart = [one for one in attempts if not (one.is_finished or one.has_diverged) and _stands_apart(one, bound)]
    if not apart:
        return
    ends = sorted(one.nats for one in apart)
    nats = " to ".join(dict.fromkeys(f"{end:+.4f}" for end in (ends[0], ends[-1])))
    reasons = list[str]()
    for side, name in ((verdict.arm, arm), (verdict.reference, reference)):
        own = {one.seed: one.end for one in apart if one.arm == side}
        reasons += [f"{name}, {words}" for words in _reasons(own, own)]
    logs = "the log of a lost run ends" if len(apart) == 1 else "the logs of lost runs end"
    yield f"{arm} was {nats} nats from {reference} where {logs} ({'; '.join(reasons)})."


def _were_replaced(n: int, which: str) -> str:
    return f"1 run {which} was replaced by another" if n == 1 else f"{n} runs {which} were replaced by others"


def _stands_apart(one: OtherAttempt, bound: float) -> bool:
    """Whether a run that is not judged says something else than the judged ones; NaN does not."""
    return abs(one.nats) > bound and not one.usual.low <= one.nats <= one.usual.high


def _to_be_known(
    verdict: Verdict, ours: ArmSeeds, theirs: ArmSeeds, margin: Margin, lr_warmup_steps: int
) -> Iterator[str]:
    """What qualifies an answer and decides nothing."""
    arm, reference, _ = contrast(verdict.arm, verdict.reference)
    # Of the arm it decides nothing: a seed that goes astray in it alone may be what the arm does.
    for seed in outlying_seeds(verdict.arm_losses):
        yield f"Seed {seed} of {arm} lies apart from the others ({verdict.arm_losses[seed]:.4f} nats)."
    if both := ours.diverged.keys() & theirs.diverged.keys():  # it says something of the seed, not of the arm
        yield f"Left out, as it diverged in both: {'; '.join(_reasons(both, ours.diverged))}."
    # Doubtful seeds have decided, and so has one whose log is apart from the judged ones.
    bound = margin.nats if margin.exists else margin.cap_nats
    logs = {(one.arm, one.seed): one for one in ours.attempts if not one.is_replaced and math.isfinite(one.nats)}
    unknown, alike = list[str](), list[str]()
    for side, name, seeds in ((verdict.arm, arm, ours), (verdict.reference, reference, theirs)):
        gone = seeds.lost.keys() - {*seeds.doubtful}
        logged = {seed for seed in gone if (side, seed) in logs}
        unknown += [f"{name}, {words}" for words in _reasons(gone - logged, seeds.lost)]
        near = [seed for seed in logged if not _stands_apart(logs[side, seed], bound)]
        alike += [f"{name}, {words}" for words in _reasons(near, seeds.lost)]
    if unknown:
        yield f"Left out: {'; '.join(unknown)}; assumed to be unrelated to the loss."
    if alike:
        yield f"Left out: {'; '.join(alike)}; where these logs end, the difference was as usual."
    if verdict.dropped_seeds:
        yield f"Dropped from all arms as requested: {seed_names(verdict.dropped_seeds)}."
    if verdict.steps is not None and verdict.seeds and verdict.steps[1] <= lr_warmup_steps:
        yield (
            f"Training ended inside its warm-up (step {verdict.steps[1]:,} of {lr_warmup_steps:,}): the learning rate "
            "was still rising."
        )


def _capitalised(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]


def _reasons(seeds: Iterable[int], reasons: Mapping[int, str]) -> list[str]:
    """``seeds 1, 4: loss is nan at step 12`` and ``seed 3: …``: seeds of one reason together."""
    groups: dict[str, list[int]] = {}
    for seed in sorted(seeds):
        if seed in reasons:
            groups.setdefault(reasons[seed], []).append(seed)
    return [f"{seed_names(own)}: {why}" for why, own in groups.items()]


def _settled_by(verdict: Verdict, margin: Margin) -> Verdict:
    """The verdict with what would turn "insufficient data" into an answer, and how many seeds that would take."""
    if verdict.n_seeds < MIN_SEEDS:
        return replace(verdict, settled_by=f"At least {MIN_SEEDS} common seeds are needed.")
    if not margin.exists:
        words = "Give a margin in nats (--margin), or train the reference with different seeds."
        return replace(verdict, settled_by=words)
    zero = "zero is excluded" if verdict.excludes_zero else "zero is not excluded"
    needed = low, high = seeds_needed(
        n_seeds=verdict.n_seeds,
        sd_difference=verdict.sd_difference,
        n_reference=len(verdict.reference_losses),  # the margin is of all of them, with a partner or without
        margin=margin,
    )
    if low is None:
        seeds = f"more than {MAX_SEEDS_SEARCHED} common seeds"
    elif high is None:
        seeds = f"{low} to more than {MAX_SEEDS_SEARCHED} common seeds"
    else:
        seeds = f"{low} common seeds" if low == high else f"{low} to {high} common seeds"
    words = (
        f"The interval reaches beyond the margin, and {zero}. {'Were' if verdict.excludes_zero else 'If'} the true "
        f"difference {'' if verdict.excludes_zero else 'is '}0, {seeds} would show it with {100 * POWER:g} % power."
    )
    return replace(verdict, settled_by=words, seeds_needed=needed)
