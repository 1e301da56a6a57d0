"""What a report opens with: hand-made studies of every kind, each with what a careful reader would say first."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from run_support import train

from moelab.judge.report import Report, judge_paths
from moelab.judge.verdict import Answer
from moelab.runs.directory import RunDir, find
from moelab.runs.status import State

Array = NDArray[np.float64]
STEPS = 100
ENDS = {0: 3.30, 1: 3.34, 2: 3.27, 3: 3.31}
"""Mean loss of BF16's last ten steps."""
SHIFT = {0: 0.002, 1: -0.001, 2: 0.003, 3: 0.001}
"""What MXFP8's is above it."""
STEP = np.arange(1, STEPS + 1)


def curve(end: float, seed: int) -> Array:
    """A loss that falls and scatters, as text does, alike in all arms of a seed; its last ten steps average ``end``."""
    losses = 4.0 * np.exp(-STEP / 12) + 0.004 * np.random.default_rng([seed, 7]).normal(size=STEPS)
    return losses - losses[-10:].mean() + end


def unchanged(seed: int, losses: Array) -> Array:
    return losses


def at(steps: Any, loss: float, seed: int = 1) -> Callable[[int, Array], Array]:
    """One seed has this loss at these steps."""
    return lambda own, losses: np.where(np.isin(STEP, steps) & (own == seed), loss, losses)


def older(run: RunDir) -> None:
    """Let a run be the first attempt at its arm and seed."""
    run.path.rename(run.path.with_name(f"20000101T000000Z-aaaaa{run.experiment.seed}"))


def make(
    runs: Path,
    *,
    ends: Mapping[int, float] = ENDS,
    arm_ends: Mapping[int, float] | None = None,
    bf16: Callable[[int, Array], Array] = unchanged,
    mxfp8: Callable[[int, Array], Array] = unchanged,
    held_out: Mapping[int, float] | None = None,
    **fields: Any,
) -> Path:
    """BF16 and MXFP8, a thousandth or two apart; ``held_out`` is what MXFP8's held-out loss is above BF16's."""
    arm_ends = arm_ends or {seed: end + SHIFT[seed] for seed, end in ends.items()}
    for seed, end in ends.items():
        of_text = {} if held_out is None else {"held_out": end + 0.4}
        train(runs / "s", "bf16", seed, bf16(seed, curve(end, seed)).tolist(), steps=STEPS, **of_text)
    for seed, end in arm_ends.items():
        of_text = {} if held_out is None else {"held_out": ends[seed] + 0.4 + held_out[seed]}
        train(runs / "s", "mxfp8", seed, mxfp8(seed, curve(end, seed)).tolist(), steps=STEPS, **of_text, **fields)
    return runs / "s"


def judged(path: Path) -> Report:
    return judge_paths([path])


def above(nats: float) -> dict[int, float]:
    return {seed: end + nats for seed, end in ENDS.items()}


THREE = {seed: ENDS[seed] for seed in range(3)}
TIGHT = {0: 3.3000, 1: 3.3005, 2: 3.3010, 3: 3.2995}
END = STEP > STEPS - 10
RISING = np.where(STEP > 80, 0.3 * (STEP - 80), 0.0)
TEN = dict.fromkeys(ENDS, 0.10)
NUMBERS = r"MXFP8 ends \+0\.001\d nats from BF16 \(95 % interval .*, 4 seeds, margin ±0\.03"

KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "equal": ({}, rf"Yes: {NUMBERS}\d\d\)\.$"),
    "equal, and on held-out text": ({"held_out": SHIFT}, rf"Yes: {NUMBERS}\d\d\), and \+0\.001\d in held-out loss\.$"),
    "far": ({"arm_ends": above(0.3)}, r"No: MXFP8 ends \+0\.3000 nats from BF16 \(.*\): different\.$"),
    # What was judged beside the training loss
    "far on held-out text": (
        {"held_out": {seed: 0.10 + by for seed, by in SHIFT.items()}},
        r"No: MXFP8 ends \+0\.101\d nats from BF16 in held-out loss \(.*\): different, though its training loss is "
        r"equivalent \(\+0\.0013 nats\)\.$",
    ),
    "NaN on held-out text": (
        {"held_out": SHIFT | {2: math.nan}},
        r"No: different in held-out loss: 1 of 4 seeds diverged in MXFP8 and not in BF16 \(seed 2: the held-out loss "
        r"is nan\), though its training loss is equivalent",
    ),
    "open on held-out text": (
        {"held_out": {0: 0.05, 1: -0.045, 2: 0.03, 3: 0.06}},
        r"Not decided: MXFP8 ends \+0\.023\d nats from BF16 in held-out loss \(.*though its training loss is equiv",
    ),
    "better on held-out text": (
        {"arm_ends": above(0.3), "held_out": SHIFT},
        r"No: MXFP8 ends \+0\.3000 .*: different, though its held-out loss is equivalent \(\+0\.001\d nats\)\.$",
    ),
    # What recovers, and what does not
    "NaN once": ({"mxfp8": at(5, math.nan)}, f"Yes: {NUMBERS}"),
    "infinity once near the end": ({"mxfp8": at(95, math.inf)}, "Yes: MXFP8 ends "),
    "a spike": ({"mxfp8": at([51, 52, 53], 9.0)}, f"Yes: {NUMBERS}"),
    "a spike near the end": (
        {"mxfp8": at([94, 95], 9.0)},
        r"Not decided: MXFP8 ends \+0\.28\d\d .*: insufficient data",
    ),
    "a spike at the end": ({"mxfp8": at([99, 100], 9.0)}, r"No: .*\(seed 1: loss rose from 3\.3\d nats .* to 9\.00 at"),
    "NaN from a step on": ({"mxfp8": at(range(61, 101), math.nan)}, r"No: different: 1 of 4 .*seed 1: loss is nan at"),
    "NaN at the last step": ({"mxfp8": at(100, math.nan)}, r"No: different: 1 of 4 .*seed 1: loss is nan at step 100"),
    "NaN at most last steps": ({"mxfp8": at(range(92, 100), math.nan)}, r"No: .*seed 1: loss is not finite at step 92"),
    "a blow-up": (
        {"mxfp8": lambda seed, losses: losses + RISING * (seed == 1)},
        r"No: different: 1 of 4 seeds diverged in MXFP8 and not in BF16 \(seed 1: loss rose from 3\.3\d nats at step "
        r"\d\d to 9\.3\d at the end\)",
    ),
    "a blow-up of the reference": (
        {"bf16": lambda seed, losses: losses + RISING * (seed == 1)},
        r"Not decided: insufficient data: 1 of 4 seeds diverged in the reference BF16 .*seed 1: loss rose from",
    ),
    "harder text in all runs": (dict.fromkeys(("bf16", "mxfp8"), lambda _, losses: losses + RISING / 6), "Yes: "),
    # How near is one run
    "tight seeds": (
        {"ends": TIGHT, "arm_ends": {seed: end + 0.002 + 0.0001 * seed for seed, end in TIGHT.items()}},
        r"Yes, with a caution: MXFP8 ends \+0\.002\d nats .*, margin ±0\.0033\).*closer together than rounding alone "
        r"moves a loss \(0\.0033 nats\), .*those of BF16 within 0\.00150 nats: they may be one run",
    ),
    "tight seeds, and half a percent": (
        {"ends": TIGHT, "arm_ends": {seed: end + 0.016 for seed, end in TIGHT.items()}},
        r"No: MXFP8 ends \+0\.0160 .*they may be one run",
    ),
    "copies of one run": (
        {
            "ends": (copies := {0: 3.30000, 1: 3.30001, 2: 3.29999, 3: 3.30002}),
            "arm_ends": {seed: end + 0.00001 * (seed % 2) for seed, end in copies.items()},
        },
        r"Not decided: MXFP8 ends \+0\.0000 .*insufficient data\..*they may be one run that counts several times",
    ),
    # What changes within the steps
    "drift through zero": (
        {"mxfp8": lambda _, losses: losses + np.where(END, (STEP - 95.5) / 9 * 0.2, -0.1)},
        r"Not decided: insufficient data: the difference of MXFP8 from BF16 still changes: within steps 91 to "
        r"100 it goes from -0\.09\d\d to \+0\.10\d\d nats",
    ),
    "still catching up": (
        {"mxfp8": lambda _, losses: losses + 0.8 * (STEPS - STEP) / STEPS - 0.03},
        r"Not decided: insufficient data: the difference .* still changes",
    ),
    "catching up slowly": (
        {"mxfp8": lambda _, losses: losses + 0.1 * (STEPS - STEP) / STEPS},
        r"Yes, with a caution: MXFP8 ends .*The difference of MXFP8 from BF16 still changes: within steps 91 to 100 it "
        r"goes from \+0\.01",
    ),
    "a change that rounding might make": (
        {"mxfp8": lambda _, losses: losses + 0.0002 * (STEP - 95.5) * END},
        rf"Yes: {NUMBERS}\d\d\)\.$",
    ),
    # What an arm alone does is not known
    "other seeds": (
        {"arm_ends": {seed + 10: end + 1.0 for seed, end in ENDS.items()}},
        r"Not decided: MXFP8 and BF16 have no finished seed in common; unpaired, the mean of 4 against 4 "
        r"seeds differs by \+1\.0000 nats in the mean loss of steps 91 to 100\.$",
    ),
    "another learning rate": (
        {"lr": 2e-3},
        rf"Not decided: {NUMBERS}\d\d\): equivalent, but not at equal settings\. The .* lr 0\.002 instead of 0\.003\.$",
    ),
    "another learning rate, and far": ({"lr": 2e-3, "arm_ends": above(0.3)}, r"No: .*different\. The .* lr 0\.002"),
    "three seeds": ({"ends": THREE}, r"Yes, as a study of three seeds suggests: MXFP8 ends "),
    "three seeds that differ": (
        {"ends": THREE, "arm_ends": {seed: end + 0.3 for seed, end in THREE.items()}},
        r"No, as a study of three seeds suggests: MXFP8 ends \+0\.3000 .*: different\.$",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_opening_of_a_study(tmp_path: Path, kind: str) -> None:
    study, words = KINDS[kind]
    assert re.match(words, judged(make(tmp_path, **study)).summary["Same loss?"])


@pytest.mark.parametrize(
    ("steps", "loss", "note"),
    [
        (5, math.nan, "the loss was nan at step 5 (segment 0) and finite afterwards"),
        ([95, 97], math.inf, "the loss was inf at 2 steps from 95 on (segment 0) and finite afterwards"),
        ([51, 52, 53], 9.0, "the loss had a spike at step 51, 52, 53, from which it recovered"),
    ],
)
def test_what_recovered_is_a_note_with_its_steps(tmp_path: Path, steps: Any, loss: float, note: str) -> None:
    report = judged(make(tmp_path, mxfp8=at(steps, loss)))
    assert f"MXFP8 + standard all-to-all, seed 1: {note}" in report.notes
    assert sum("finite" in one or "spike" in one for one in report.notes) == 1
    (verdict,) = report.verdicts
    # A step that one run has no loss for counts for none, so that all are means over the same text.
    assert verdict.mean_difference_nats == pytest.approx(np.mean([*SHIFT.values()]), abs=1e-5)


def test_what_stays_has_not_recovered(tmp_path: Path) -> None:
    report = judged(make(tmp_path, mxfp8=lambda seed, losses: losses + RISING * (seed == 1)))
    assert not [one for one in report.notes if "recovered" in one]


def rerun(runs: Path, by: float, precision: str = "mxfp8", **options: Any) -> Report:
    """Each seed of an arm was trained before, and ended this far above the reference as it is judged."""
    study = make(runs, arm_ends=above(0.0))
    for seed, end in ENDS.items():
        older(train(study, precision, seed, curve(end + by, seed).tolist(), steps=STEPS, **options))
    return judged(study)


OTHERS = "Not decided: insufficient data: other runs of these arms are not judged: "


def test_an_arm_that_was_trained_again_until_it_was_equal(tmp_path: Path) -> None:
    report = rerun(tmp_path, 1.0)
    words = rf"{OTHERS}MXFP8, seed \d: finished, at 4\.\d+ nats, a difference of \+1\.0000; .*; and 1 more\."
    assert re.match(words, report.summary["Same loss?"])
    (verdict,) = report.verdicts
    assert (verdict.answer, verdict.n_seeds) == (Answer.INSUFFICIENT, 4)


def test_a_reference_that_was_trained_again_until_it_was_as_bad(tmp_path: Path) -> None:
    opening = rerun(tmp_path, -0.3, "bf16").summary["Same loss?"]
    assert opening.startswith(f"{OTHERS}BF16, seed ")
    assert "BF16, seed 1: finished, at 3.0400 nats, a difference of +0.3000" in opening


def test_a_run_that_was_trained_again_with_the_same_end_is_told_of(tmp_path: Path) -> None:
    opening = rerun(tmp_path, 0.004).summary["Same loss?"]
    assert opening.startswith("Yes, with a caution: MXFP8 ends +0.0000 nats from BF16")
    assert "MXFP8, seed 0: finished, at 3.3040 nats, a difference of +0.0040; " in opening


def test_a_divergence_is_not_undone_by_another_attempt(tmp_path: Path) -> None:
    study = make(tmp_path)
    older(train(study, "mxfp8", 0, [*curve(3.3, 0)[:40], math.nan], steps=STEPS))
    words = "MXFP8, seed 0: diverged: loss is nan at step 41 (segment 0)."
    assert judged(study).summary["Same loss?"] == f"{OTHERS}{words}"


def test_what_another_attempt_at_a_dropped_seed_says_is_dropped_too(tmp_path: Path) -> None:
    study = make(tmp_path)
    older(train(study, "mxfp8", 0, curve(4.3, 0).tolist(), steps=STEPS))
    assert judged(study).verdicts[0].answer is Answer.INSUFFICIENT
    assert judge_paths([study], dropped_seeds=[0]).summary["Same loss?"].startswith("Yes, as a study of three seeds")


LOST = {"state": State.FAILED, "reason": "Slurm: TIMEOUT"}


@pytest.mark.parametrize("precision", ["mxfp8", "bf16"])
@pytest.mark.parametrize("by", [0.3, 0.004, -0.3])
def test_the_log_of_a_lost_seed_is_held_against_the_reference(tmp_path: Path, precision: str, by: float) -> None:
    """At step 60 the judged seeds are as far from each other as at the end."""
    study = make(tmp_path)
    for seed in (4, 5):
        for own in ("bf16", "mxfp8"):
            losses = curve(3.3 + seed / 200 + by * (own == "mxfp8"), seed)
            is_lost = own == precision
            train(
                study, own, seed, losses[: 60 if is_lost else STEPS].tolist(), steps=STEPS, **(LOST if is_lost else {})
            )
    report = judged(study)
    name = {"mxfp8": "MXFP8", "bf16": "BF16"}[precision]
    reason = f"{name}, seeds 4, 5: failed: Slurm: TIMEOUT, 60 of 100 steps logged"
    if abs(by) < 0.1:
        assert report.summary["Same loss?"].startswith("Yes: ")
        assert f"Left out, as nothing that they logged speaks against it: {reason}." in report.as_text()
    else:
        ends = rf"{name}, seed \d: failed: Slurm: TIMEOUT, 60 of 100 steps logged, at 3\.\d+ nats, a difference of "
        words = f"{OTHERS}{ends}{re.escape(f'{by:+.4f}')}; {ends}{re.escape(f'{by:+.4f}')}\\."
        assert re.fullmatch(words, report.summary["Same loss?"])


def test_a_lost_seed_is_apart_only_where_the_judged_ones_are_not(tmp_path: Path) -> None:
    """At step 60 the judged seeds are 0.2 and 0.4 nats apart, to either side; so is the lost one."""
    early = {seed: by * (STEP < 80) for seed, by in zip(ENDS, (0.2, -0.4, 0.4, -0.2), strict=True)}
    study = make(tmp_path, mxfp8=lambda seed, losses: losses + early[seed])
    train(study, "bf16", 4, curve(3.29, 4).tolist(), steps=STEPS)
    train(study, "mxfp8", 4, curve(3.59, 4)[:60].tolist(), steps=STEPS, **LOST)
    assert judged(study).summary["Same loss?"].startswith("Yes: ")


def test_an_attempt_that_was_killed_and_made_again_is_held_against_the_reference_too(tmp_path: Path) -> None:
    study = make(tmp_path)
    older(train(study, "mxfp8", 0, curve(3.6, 0)[:60].tolist(), steps=STEPS, state=State.CANCELLED))
    words = "MXFP8, seed 0: cancelled, 60 of 100 steps logged, at 3.6"
    assert judged(study).summary["Same loss?"].startswith(f"{OTHERS}{words}")


def log_only(study: Path, arm: str, keeps: Callable[[int], bool]) -> None:
    """Let the runs of an arm have logged these steps alone."""
    for run in find(study):
        if run.arm.startswith(arm):
            metrics = run.path / "metrics.jsonl"
            lines = metrics.read_text().splitlines(keepends=True)
            metrics.write_text("".join(line for line in lines if keeps(json.loads(line)["step"])))


@pytest.mark.parametrize("seldom", ["bf16", "mxfp8"])
@pytest.mark.parametrize(("by", "words"), [(0.0, "Yes: "), (1.0, r"No: MXFP8 ends \+1\.0000 ")])
def test_arms_that_log_other_steps_are_judged_on_those_that_both_have(
    tmp_path: Path, seldom: str, by: float, words: str
) -> None:
    study = make(tmp_path, arm_ends={seed: end + by + SHIFT[seed] * (not by) for seed, end in ENDS.items()})
    log_only(study, seldom, lambda step: step % 10 == 0)
    report = judged(study)
    assert re.match(words, report.summary["Same loss?"])
    assert ([one.steps for one in report.verdicts], "in the loss of step 100" in report.as_text()) == (
        [(100, 100)],
        True,
    )


def test_an_arm_that_logs_seldom_takes_no_step_from_the_others(tmp_path: Path) -> None:
    study = make(tmp_path)
    for seed, end in ENDS.items():
        train(study, "nvfp4", seed, curve(end, seed).tolist(), steps=STEPS)
    log_only(study, "nvfp4", lambda step: step % 10 == 0)
    assert {one.arm.split("_")[0]: one.steps for one in judged(study).verdicts} == {
        "mxfp8": (91, 100),
        "nvfp4": (100, 100),
    }


def test_arms_of_other_lengths_are_judged_where_the_shorter_ends(tmp_path: Path) -> None:
    """Not on the last step of each, and never with a plain Yes; without a common step there, unpaired."""
    for seed, end in ENDS.items():
        losses = curve(end, seed)
        train(tmp_path / "s", "bf16", seed, losses.tolist(), steps=STEPS)
        train(tmp_path / "s", "mxfp8", seed, (losses[:97] + 0.5).tolist(), steps=97)
    report = judged(tmp_path / "s")
    assert report.verdicts[0].steps == (88, 97)
    settings = "The arms also differ in their settings: steps 97 instead of 100."
    assert re.match(r"No: MXFP8 ends \+0\.5000 nats .*: different\. ", report.summary["Same loss?"])
    assert report.summary["Same loss?"].endswith(settings)
    log_only(tmp_path / "s", "bf16", lambda step: step % 10 == 0)
    log_only(tmp_path / "s", "mxfp8", lambda step: step in (91, 97))
    report = judged(tmp_path / "s")
    words = "logged none of their last steps in common; unpaired, the mean of 4 against 4 seeds differs by +0.5"
    assert report.summary["Same loss?"].startswith(f"Not decided: MXFP8 and BF16 {words}")
    (verdict,) = report.verdicts
    assert verdict.answer is Answer.INSUFFICIENT
    assert verdict.settled_by == "Train both arms for as many steps, and log the same ones."


@pytest.mark.parametrize(
    ("by", "seen"),
    [
        (0.3, ": different, so this study sees a change of this size."),
        (0.032, ": insufficient data, so this study sees the change, but not that it is larger than the margin."),
        (0.001, "so a change of this size is within the"),
    ],
)
def test_a_control_says_what_the_study_would_see_and_does_not_answer_for_the_others(
    tmp_path: Path, by: float, seen: str
) -> None:
    """An arm that trains with another learning rate on purpose, beside the one that the study asks about."""
    study = make(tmp_path)
    for seed, end in ENDS.items():
        losses = curve(end + by + SHIFT[seed], seed).tolist()
        train(study, "bf16", seed, losses, steps=STEPS, lr=2e-3, arm_fields=["lr"])
    opening = judged(study).summary["Same loss?"]
    control = rf"As a control, BF16 \(lr 0\.002\) ends \+{by:.2f}\d+ nats from BF16 \("
    assert re.match(rf"Yes: {NUMBERS}\d\d\)\. {control}", opening)
    assert seen in opening


def test_the_worst_arm_comes_first(tmp_path: Path) -> None:
    study = make(tmp_path)
    for seed, end in ENDS.items():
        train(study, "fp8", seed, curve(end + SHIFT[seed], seed).tolist(), steps=STEPS)
        train(study, "nvfp4", seed, curve(end + 0.3, seed).tolist(), steps=STEPS)
    words = r"No: NVFP4 ends \+0\.3000 .*: different\. Yes: FP8 ends .*; MXFP8 ends \+0\.0013 nats"
    assert re.match(words, judged(study).summary["Same loss?"])


def test_held_out_text_counts_side_by_side_too(tmp_path: Path) -> None:
    for name, by in (("one", 0.0), ("other", 0.10)):
        make(tmp_path / name, held_out=dict.fromkeys(ENDS, by))
    report = judge_paths([tmp_path / "one" / "s" / "bf16_standard", tmp_path / "other" / "s" / "mxfp8_standard"])
    assert report.study is None
    opening = report.summary["Same loss?"]
    assert re.match(r"No: MXFP8 ends \+0\.1000 nats from BF16 in held-out loss \(.*\): different, though", opening)
    assert "\nHeld-out text: " in report.as_text()
    assert [one["answer"] for one in report.to_json()["verdicts"]] == ["equivalent", "different"]
