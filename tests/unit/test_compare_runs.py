"""Runs side by side, from logs whose numbers are known and from TorchTitan's own."""

from __future__ import annotations

import html
import json
import math
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from figure_support import shown_page, title
from run_support import ENDS, STEPS, curve, make_run, make_study
from stand_in import step_line, validation_line

from moelab.analysis.arms import arm_label
from moelab.analysis.compare_runs import difference_curve
from moelab.analysis.side import speed_ratio
from moelab.analysis.verdict import Answer
from moelab.cli import main
from moelab.data.example_logs import EXAMPLE_LOGS
from moelab.errors import BadInput
from moelab.experiment import Experiment
from moelab.model import count_parameters, flops_per_token, shape_of
from moelab.runs.log import read_log
from moelab.runs.settings import launch_settings, settings_of
from moelab.runs.status import State
from moelab.study_report import Report, judge_paths, provenance, report_figures, report_tables, write_study_report

ROOT = Path(__file__).parents[2]
PLAN = (
    "[rank0]:[titan] 2026-09-14 03:10:00,000 - root - INFO - Trainer is initialized with local batch size 1, global "
    "batch size 2, gradient accumulation steps 1, sequence length 8, total steps {steps} (warmup 4)\n"
)
GPU = (
    "[rank0]:[titan] 2026-09-14 03:10:00,000 - root - INFO - CUDA capacity: NVIDIA H100 80GB HBM3 with 79.0GiB memory\n"
    "[rank0]:[titan] 2026-09-14 03:10:00,000 - root - INFO - Peak FLOPS used for computing MFU: 9.890e+14\n"
)
MODEL = "[rank0]:[titan] 2026-09-14 03:10:00,000 - root - INFO - Model deepseek_v3 {} size: {:,} total parameters\n"


def compared(*paths: Path, **options: Any) -> Report:
    found = judge_paths(paths, **options)
    assert found.study is None
    return found


def log_of(path: Path, losses: dict[int, float], *, tps: float = 1000.0, step_s: float = 1.0) -> Path:
    """A TorchTitan log with these losses by step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [step_line(step, loss, tps=tps, seconds=step * step_s) for step, loss in losses.items()]
    path.write_text("".join(lines))
    return path


def history(path: Path, columns: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(columns).to_csv(path, index=False)
    return path


# Numbers


def test_our_count_of_mfu_is_torchtitans_own() -> None:
    """The log of a real run holds TorchTitan's MFU at each step, to two decimals."""
    bf16, mxfp8 = compared(*EXAMPLE_LOGS).sides
    assert bf16.mfu_percent(causal=False) == pytest.approx(bf16.mfu_logged_percent, abs=0.005)
    assert bf16.mfu_percent(causal=True) < 0.7 * bf16.mfu_percent(causal=False)
    assert math.isnan(mxfp8.mfu_logged_percent)
    assert (bf16.emulated, mxfp8.emulated) == (False, True)
    rows = read_log(EXAMPLE_LOGS[0]).rows
    assert bf16.memory_gib == rows["memory_gib"].max()
    assert np.median(bf16.tps) == rows.loc[rows["step"] > 3, "tps"].median()


def test_the_spread_and_the_end_of_a_side(tmp_path: Path) -> None:
    """Twenty-one steps count for speed and take 1 to 21 s; the norm peaks once and ends at 3."""
    norms = [2.0] * 12 + [math.inf, 10.0] + [2.0] * 8 + [3.0, 3.0]
    step = range(1, 25)
    times = np.cumsum([0, 1, 1, *range(1, 22)])
    columns = {"_step": step, "loss": 8.0, "throughput(tps)": [9, 9, 9, *range(100, 121)], "_timestamp": times}
    slow, fast = (
        compared(history(tmp_path / name / "x.csv", {**columns, "grad_norm": norms, "lr": 0.1, **other})).sides[0]
        for name, other in (("slow", {}), ("fast", {"throughput(tps)": 220.0}))
    )
    assert slow.tps_percentiles == (101.0, 105.0, 110.0, 115.0, 119.0)
    assert speed_ratio(fast, slow) == 2.0
    assert slow.step_time_tail == pytest.approx(20 / 11)
    percent, seconds = slow.step_time_shares
    assert {share: seconds[percent.tolist().index(share)] for share in (0, 5, 50, 100)} == {0: 1, 5: 2, 50: 11, 100: 21}
    assert (slow.final_grad_norm, slow.grad_norm_peak) == (3.0, 5.0)
    assert slow.training_means["lr"].tolist() == [0.1] * 24


def test_mfu_is_of_the_shape_that_an_experiment_has(tmp_path: Path) -> None:
    """With four experts a token, not eight, 671B multiplies less; the parameters are as many."""
    shape = replace(shape_of("671B"), top_k=4)
    run = make_run(tmp_path, Experiment(name="s", model="671B", shape={"top_k": 4}, steps=9), [8.0] * 9)
    run.log.write_text(GPU + MODEL.format("671B", count_parameters(shape).total) + run.log.read_text())
    found = compared(run.path, EXAMPLE_LOGS[0])
    expected = 100 * 1000.0 * flops_per_token(shape, 256, causal=True) / 989e12
    assert found.sides[0].mfu_percent(causal=True) == pytest.approx(expected)
    assert provenance(found)["Model, BF16 + standard all-to-all"] == "671B with top_k 4"


@pytest.mark.parametrize(
    ("gpu", "name", "peak"),
    [
        ("NVIDIA H100 PCIe", "debugmodel", 756e12),
        ("NVIDIA H800", "debugmodel", 989e12),  # TorchTitan takes it for an A100
        ("NVIDIA GB10", "debugmodel", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "debugmodel", None),
        ("NVIDIA H100 80GB HBM3", "16B", None),  # with as many parameters as debugmodel
    ],
)
def test_mfu_is_of_the_exact_gpu_and_model_whatever_peak_a_log_names(
    tmp_path: Path, gpu: str, name: str, peak: float | None
) -> None:
    log = log_of(tmp_path / "a.log", dict.fromkeys(range(1, 9), 8.0))
    shape = shape_of("debug")
    head = GPU.replace("NVIDIA H100 80GB HBM3", gpu) + MODEL.format(name, count_parameters(shape).total)
    log.write_text(head + PLAN.format(steps=8) + log.read_text())
    mfu_percent = compared(log).sides[0].mfu_percent(causal=True)
    expected = 100 * 1000.0 * flops_per_token(shape, 8, causal=True) / peak if peak else math.nan
    assert mfu_percent == pytest.approx(expected, nan_ok=True)


def test_exported_speeds_of_zero(tmp_path: Path) -> None:
    columns = {"_step": range(1, 10), "throughput(tps)": [0] * 9}
    found = compared(history(tmp_path / "still.csv", columns), history(tmp_path / "a" / "too.csv", columns))
    assert found.summary["Faster?"] == "too and still did not both log tokens/s."
    assert (report_figures(found), [math.isnan(row[8]) for row in report_tables(found)[0].rows]) == ([], [True] * 2)


def test_long_curves_are_thinned_and_say_so(tmp_path: Path) -> None:
    steps = np.arange(1, 20_001)
    logs = [
        history(tmp_path / f"{name}.csv", {"_step": steps, "loss_metrics/global_avg_loss": 8 + np.sin(steps) + shift})
        for name, shift in (("a", 0.0), ("b", 0.5))
    ]
    for one in report_figures(compared(*logs)):
        assert all(len(trace.x) <= 2 * 2002 for trace in one.figure.data)
        assert "one logged step in 34 is drawn" in one.figure.layout.title.text.replace("<br>", " ")
        ends = [trace.x[-1] for trace in one.figure.data if trace.name]
        assert ends == [20_000] * len(ends)


def test_a_difference_is_of_the_steps_that_both_logged(tmp_path: Path) -> None:
    every = log_of(tmp_path / "a.log", {step: 8 - step / 100 for step in range(1, 101)}, step_s=2.0)
    tenth = log_of(tmp_path / "b.log", {step: 8.05 - step / 100 for step in range(10, 61, 10)}, tps=2000, step_s=3.0)
    found = compared(every, tenth, final_fraction=0.5)
    (one,) = found.differences
    assert (one.steps, one.first_step) == ((10, 20, 30, 40, 50, 60), 31)
    assert one.nats == pytest.approx(0.05, abs=1e-9)
    assert one.spread_nats == pytest.approx(0.0, abs=1e-9)
    assert one.verdict is None
    assert "One run against another" in one.sentence()
    first, second = found.sides
    assert (first.warmup_steps, second.warmup_steps) == (3, 10)  # the first logged step holds the warm-up
    assert [np.median(side.step_time_s) for side in found.sides] == [2.0, 3.0]
    assert len(second.tps) == 5
    band = next(trace for trace in report_figures(found)[1].figure.data if trace.name == "b")
    assert np.nanmax(np.abs(np.asarray(band.y) - 0.05)) < 1e-9


def test_the_curve_of_two_runs_is_one_deviation_wide_over_the_steps_of_its_window(tmp_path: Path) -> None:
    shifts = {step: 0.01 * (step % 3) for step in range(1, 11)}
    first = log_of(tmp_path / "a.log", dict.fromkeys(shifts, 8.0))
    found = compared(
        first, log_of(tmp_path / "b.log", {step: 8 + by for step, by in shifts.items()}), final_fraction=0.5
    )
    last = difference_curve(*found.sides, found.differences[0]).iloc[-1]
    window = np.array([shifts[step] for step in range(6, 11)])
    mean, sd = window.mean(), window.std(ddof=1)
    assert last[["low", "mean", "high"]].tolist() == pytest.approx([mean - sd, mean, mean + sd])
    assert found.differences[0].spread_nats == pytest.approx(sd)


def test_a_clock_that_was_set_back_gives_no_step_time(tmp_path: Path) -> None:
    (side,) = compared(log_of(tmp_path / "a.log", dict.fromkeys(range(1, 9), 8.0), step_s=-1.0)).sides
    assert len(side.step_time_s) == 0


def test_no_step_in_common(tmp_path: Path) -> None:
    found = compared(log_of(tmp_path / "a.log", {1: 8.0, 3: 7.0}), log_of(tmp_path / "b.log", {2: 8.0, 4: 7.0}))
    assert "no step with a loss in common" in found.as_text()
    write_study_report(found, tmp_path / "r.html")


def test_common_seeds_are_judged_as_in_a_study(tmp_path: Path) -> None:
    """Two studies side by side: every arm of both, paired by seed with the first arm of the first."""
    first, second = make_study(tmp_path), make_study(tmp_path, "t", dict.fromkeys(ENDS, 0.5))
    found = compared(first, second)
    names = ("BF16 + standard all-to-all", "MXFP8 + standard all-to-all")
    assert [side.label for side in found.sides] == [f"{study}: {name}" for study in "st" for name in names]
    alone = judge_paths([first])
    assert alone.study is not None
    near, same, far = found.differences
    assert near.verdict is not None
    assert far.verdict is not None
    assert near.verdict.interval == alone.verdicts[0].interval
    assert near.nats == pytest.approx(0.0035, abs=1e-6)
    assert sum("paired by seed" in one.caption for one in report_figures(found)) == 4  # all verdicts in one, then each
    assert same.nats == 0.0
    assert far.verdict.answer is Answer.DIFFERENT
    assert [side["tps"]["median"] for side in found.to_json()["sides"]] == [1000, 500, 1000, 500]
    assert found.speed_note.startswith("each rank is a CPU process in s: BF16 + standard all-to-all, s: MXFP8")


def test_studies_of_different_lengths_are_judged_on_common_steps(tmp_path: Path) -> None:
    for steps in (10, 20):
        for seed, end in ENDS.items():
            experiment = Experiment(name=f"of{steps}", steps=steps, warmup_steps=1, seed=seed)
            make_run(tmp_path, experiment, [end - 0.01 * step for step in range(steps)])
    (one,) = compared(tmp_path / "of10", tmp_path / "of20").differences
    assert one.verdict is not None
    assert (one.verdict.seeds, one.verdict.steps, one.nats) == ((0, 1, 2, 3), (10, 10), 0.0)


def test_a_run_that_failed_is_named_and_not_averaged(tmp_path: Path) -> None:
    study = make_study(tmp_path)
    failed = Experiment(name="s", steps=STEPS, precision="mxfp8", seed=7)
    make_run(tmp_path, failed, [9.0, 9.0], state=State.FAILED, reason="rank 1: ValueError: x")
    found = compared(study, EXAMPLE_LOGS[0])
    assert [run.seed for run in found.sides[1].runs] == [0, 1, 2, 3]
    assert "MXFP8 + standard all-to-all, seed 7: failed: rank 1: ValueError: x, 2 of 20 steps logged" in found.as_text()
    make_study(tmp_path, "t")
    make_run(tmp_path, Experiment(name="t", steps=STEPS, seed=8), curve(9.0))
    one, same, _ = compared(study, tmp_path / "t").differences
    assert same.nats == 0.0  # a seed that only one side has does not shift it
    assert one.verdict is not None
    assert one.verdict.excluded == (
        "s: MXFP8 + standard all-to-all, seed 7: failed: rank 1: ValueError: x, 2 of 20 steps logged",
        "s: BF16 + standard all-to-all, seed 7: not run",
    )


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_an_arm_that_diverged_differs_as_in_a_study(tmp_path: Path, loss: float) -> None:
    """Its first steps are those of the reference, so whoever looked at them alone would call it equivalent."""
    sound = make_study(tmp_path)
    for seed, end in ENDS.items():
        losses = [*curve(end)[:5], loss]
        experiment = Experiment(name="t", steps=STEPS, seed=seed)
        make_run(tmp_path, experiment, losses, state=State.FAILED, reason="rank 0: Loss is not finite")
    found = compared(sound, tmp_path / "t")
    far = found.differences[-1]
    assert far.judged is not None
    assert (far.judged.answer, math.isnan(far.nats)) == (Answer.DIFFERENT, True)
    words = f"4 of 4 seeds diverged in t: BF16 and not in s: BF16 (seeds 0, 1, 2, 3: loss is {loss} at step 6"
    assert words in far.sentence()
    assert [row["answer"] for row in found.to_json()["differences"]] == ["equivalent", "different"]
    assert not any("its loss is not judged" in note for note in found.notes)
    assert math.isnan(found.sides[-1].final_nats(0.1))


def test_a_chance_difference_among_many_sides_is_not_different(tmp_path: Path) -> None:
    """Among five arms it is none, in a study and side by side; alone it would be."""
    rng = np.random.default_rng(0)
    ends = {seed: 5.0 + 0.02 * rng.normal() for seed in range(6)}
    worse = [0.030, 0.036, 0.028, 0.034, 0.029, 0.037]
    arms = [("bf16", "standard"), ("fp8", "standard"), ("bf16", "deepep"), ("mxfp8", "deepep"), ("mxfp8", "standard")]
    for precision, backend in arms:
        for seed, end in ends.items():
            near = 0.001 * rng.normal() * ((precision, backend) != arms[0])
            fields = {"steps": 2, "warmup_steps": 1, "precision": precision, "ep_backend": backend, "seed": seed}
            make_run(
                tmp_path, Experiment(name="s", **fields), [end + (worse[seed] if precision == "fp8" else near)] * 2
            )
    study, options = tmp_path / "s", {"margin_nats": 0.0285}
    judged = judge_paths([study], **options)
    alone = {one.arm: one.answer for one in judged.verdicts}
    beside = {one.arm: one.answer for one in compared(study, EXAMPLE_LOGS[0], **options).verdicts}
    pair = compared(study / "bf16_standard", study / "fp8_standard", **options).verdicts
    assert [one.answer for one in pair] == [Answer.DIFFERENT]
    assert beside == {arm_label(arm): answer for arm, answer in alone.items()}
    assert alone["fp8_standard"] is Answer.INSUFFICIENT
    assert "not after Holm's correction for 4 arms" in judged.as_text()


def test_a_log_that_diverged_says_so_and_is_drawn_up_to_there(tmp_path: Path) -> None:
    sound = log_of(tmp_path / "ok.log", {step: 8 - step / 100 for step in range(1, 41)})
    bad = log_of(tmp_path / "bad.log", {step: math.nan if step > 30 else 8 - step / 100 for step in range(1, 41)})
    found = compared(sound, bad)
    loss, difference, *_ = report_figures(found)
    said = "bad diverged: loss is nan at step 31 (segment 0)"
    assert found.differences[0].sentence() == f"{said}: no verdict."
    assert found.notes[0] == f"{said}: its loss is not judged"
    assert all(said in figure.figure.layout.title.text for figure in (loss, difference))
    curve = next(trace for trace in loss.figure.data if trace.name == "bad")
    assert (curve.x[-1], curve.y[-1]) == (30, pytest.approx(7.7))
    assert "Inset" not in title(loss.figure)  # only one of the two has an end to enlarge
    assert "Inset: the last 10 % of steps." in title(report_figures(compared(sound))[0].figure)
    assert [side["final_loss_nats"] is None for side in found.to_json()["sides"]] == [False, True]


def test_a_log_that_ended_before_its_planned_steps(tmp_path: Path) -> None:
    every_tenth = log_of(tmp_path / "whole.log", {step: 8 - step / 100 for step in range(10, 101, 10)})
    killed = log_of(tmp_path / "killed.log", {step: 8.1 - step / 100 for step in range(10, 61, 10)})
    for log in (every_tenth, killed):
        log.write_text(PLAN.format(steps=105) + log.read_text())
    (one,) = compared(every_tenth, killed).differences
    assert one.sentence().startswith("killed ended at step 60 of 105: no verdict. killed differs from whole by +0.1000")


def test_every_study_below_a_path_has_its_arms(tmp_path: Path) -> None:
    make_study(tmp_path)
    make_study(tmp_path, "t")
    newer = Experiment(name="t", steps=STEPS, seed=0, lr=1e-4)
    kept = make_run(tmp_path, newer, [5.0] * STEPS)
    kept.path.rename(kept.path.with_name("29990101T000000Z-aaaaaa"))
    found = compared(tmp_path, EXAMPLE_LOGS[0])
    assert [len(side.runs) for side in found.sides] == [4, 4, 4, 4, 1]
    words = "not the settings of this arm's judged runs: lr 0.0001 instead of 0.003"
    assert f"Note: left out: t: BF16 + standard all-to-all, seed 0: {words}" in found.as_text()
    assert [row["reason"] for row in found.to_json()["runs"] if not row["used"]] == [words]


# What is missing is a dash


def test_quantities_that_a_source_lacks(tmp_path: Path) -> None:
    loss_alone = history(
        tmp_path / "x" / "loss.csv", {"Step": [1, 2, 3], "loss_metrics/global_avg_loss": [8.0, 7.5, 7.0]}
    )
    speed_alone = history(tmp_path / "y" / "speed.csv", {"_step": range(1, 10), "throughput(tps)": range(101, 110)})
    unstarted = make_run(tmp_path, Experiment(name="u"), [], state=State.FAILED, reason="no space")
    found = compared(loss_alone, speed_alone, unstarted.path, EXAMPLE_LOGS[0])
    data = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert data["sides"][0]["tps"] == {"median": None, "quartiles": [None, None], "n": 0}
    assert data["sides"][1]["final_loss_nats"] is None
    assert (data["sides"][2]["status"], data["sides"][2]["last_step"]) == ("failed: no space", 0)
    assert [one["common_steps"] for one in data["differences"]] == [0, 0, 3]
    assert "loss, speed: no configuration can be read" in found.as_text()
    page = write_study_report(found, tmp_path / "r.html").read_text()
    text = re.sub(r"<script.*?</script>", "", page, flags=re.S)
    assert '<td class="number">–</td>' in text
    assert not re.search(r"\bnan\b", text, re.I)


def test_bare_logs_are_summed_up(tmp_path: Path) -> None:
    faster, loss, what = compared(*EXAMPLE_LOGS).summary.values()
    assert faster.startswith("Not measured for mxfp8_emulated_on_h100: emulated kernels are slower")
    assert loss.startswith(
        "Not decided: mxfp8_emulated_on_h100 ends -0.0545 nats from bf16_on_h100 over steps 37 to 40."
    )
    assert what.startswith("debug on NVIDIA H100 80GB HBM3, EP 2, sequences of 2048 tokens, ")
    losses = {step: 8 - step / 99 for step in range(1, 41)}
    logs = [log_of(tmp_path / f"{name}.log", losses, tps=tps) for name, tps in (("slow", 1000), ("fast", 1500))]
    faster, _, what = compared(*logs).summary.values()
    assert faster == "fast logged 1.5 times the tokens/s per GPU of slow."
    assert what == "an unknown model on unknown hardware; 40 steps, one run each."
    assert compared(logs[0]).summary["Faster?"] == "There is nothing to compare with."
    cpu = log_of(tmp_path / "cpu.log", losses, tps=9)
    cpu.write_text(GPU.replace("CUDA capacity: NVIDIA", "CPU capacity:") + cpu.read_text())
    words = (
        "fast logged 1.5 times the tokens/s per GPU of slow; not measured for cpu: a CPU process stands in for a GPU."
    )
    assert compared(*logs, cpu).summary["Faster?"] == words
    for log, gpu in zip(logs, ("H100", "B200"), strict=True):
        log.write_text(GPU.replace("H100 80GB HBM3", gpu) + log.read_text())
    assert compared(*logs).no_gain == {"fast": "hardware NVIDIA B200 against NVIDIA H100"}
    later = log_of(tmp_path / "later.log", {step: loss for step, loss in losses.items() if step > 9}, tps=1500)
    logs[1].write_text(logs[0].read_text() + GPU.replace("H100 80GB HBM3", "B200") + later.read_text())
    assert compared(*logs).no_gain == {"fast": "hardware NVIDIA H100, then NVIDIA B200 against NVIDIA H100"}


def test_logs_of_other_work_or_other_steps_are_not_held_against_each_other(tmp_path: Path) -> None:
    losses = {step: 8 - step / 999 for step in range(1, 1001)}
    steps = ([1, *range(10, 1001, 10)], [1, *range(5, 1001, 10)])
    logs = [log_of(tmp_path / f"{n}.log", {step: losses[step] for step in own}) for n, own in enumerate(steps)]
    found = compared(*logs)
    assert "1 and 0 have no step with a loss in common at the end." in found.as_text()
    seldom = log_of(tmp_path / "seldom.log", {step: losses[step] + 0.5 for step in range(100, 401, 100)})
    one_less = log_of(tmp_path / "one-less.log", {step: losses[step] for step in range(1, 400)})
    assert (
        compared(one_less, seldom).differences[0].sentence().startswith("seldom differs from one-less by +0.5000 nats")
    )
    short = log_of(tmp_path / "short.log", {step: losses[step] + 0.5 for step in range(1, 51)})
    for log, end in ((logs[0], 1000), (short, 50)):
        log.write_text(log.read_text() + validation_line(end, 7.0))
    found = compared(logs[0], short)
    assert "short is +0.5000 nats from 0 at step 50" in found.summary["Same loss?"]
    assert "the held-out losses are of different steps: 0 step 1,000, short step 50" in found.notes
    found = compared(*logs)
    assert report_figures(found)
    for log, model in zip(logs, ("debugmodel", "16B"), strict=True):
        log_of(log, losses)
        log.write_text(MODEL.format(model, 1) + log.read_text())
    found = compared(*logs)
    assert found.no_gain == {"1": "model 16B against debug"}
    assert "(they also differ in model)" in found.summary["Same loss?"]
    assert compared(logs[1], short).no_gain == {}  # whose model is not known
    titles = [title(one.figure).replace("<br>", " ") for one in report_figures(found)]
    assert any("not of the same work: no gain is claimed" in one for one in titles)
    assert report_figures(compared(log_of(logs[0], dict.fromkeys(losses, 0.0))))


def test_a_difference_is_at_the_end_of_the_losses_whatever_else_goes_on(tmp_path: Path) -> None:
    columns = {"_step": range(1, 101), "loss": [8.0 if step <= 50 else None for step in range(1, 101)], "tps": 1000.0}
    found = compared(log_of(tmp_path / "a.log", dict.fromkeys(range(1, 51), 7.5)), history(tmp_path / "b.csv", columns))
    assert "b ends +0.5000 nats from a over steps 46 to 50" in found.summary["Same loss?"]


def test_a_clock_of_whole_seconds_times_no_shorter_step(tmp_path: Path) -> None:
    columns = {"_step": range(1, 101), "_timestamp": [1_760_000_000 + step // 4 for step in range(100)], "loss": 8.0}
    assert not len(compared(history(tmp_path / "x.csv", columns)).sides[0].step_time_s)


def test_one_log_has_a_report_of_its_own(tmp_path: Path) -> None:
    found = compared(EXAMPLE_LOGS[0])
    assert (found.title, found.differences) == ("Run bf16_on_h100", [])
    assert len(report_figures(found)) == 4  # loss, throughput, step times, gradient norm
    (done,) = report_figures(found)[2].figure.data  # percent of the steps that took at most so long
    seconds = found.sides[0].step_time_s
    assert [done.x[list(done.y).index(100)], done.x[list(done.y).index(0)]] == [max(seconds), min(seconds)]


@pytest.mark.parametrize("name", ["missing", "empty", "empty.log", "bytes.log", "no_steps.csv", "torn.json"])
def test_what_cannot_be_read_is_named(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.log").touch()
    (tmp_path / "bytes.log").write_bytes(bytes(range(256)))
    (tmp_path / "no_steps.csv").write_text("a,b\n1,2\n")
    (tmp_path / "torn.json").write_text('[{"_step": 1')
    assert main(["report", str(EXAMPLE_LOGS[0]), str(tmp_path / name)]) == 2
    told = capsys.readouterr().err
    assert told.startswith(
        f"moelab: {tmp_path / name} {'does not exist' if name == 'missing' else 'cannot be compared: '}"
    )
    assert "a TorchTitan log, a TensorBoard folder or a W&B export" in told


def test_a_final_fraction_out_of_range() -> None:
    for fraction in (0.0, 1.5):
        with pytest.raises(BadInput, match="final_fraction is"):
            compared(*EXAMPLE_LOGS, final_fraction=fraction)


# Names and configurations


def test_sides_of_one_name_are_numbered(tmp_path: Path) -> None:
    logs = [log_of(tmp_path / name / "train.log", dict.fromkeys(range(1, 21), 8.0)) for name in ("ada", "eve")]
    found = compared(*logs, logs[0])
    assert [side.label for side in found.sides] == ["train", "train (2)", "train (3)"]
    assert found.differences[1].sentence().endswith("One may be a copy of the other.")
    numbered = compared(log_of(tmp_path / "train (2).log", {1: 8.0, 2: 7.0}), *logs)
    assert [side.label for side in numbered.sides] == ["train (2)", "train", "train (3)"]


def test_a_bf16_arm_is_not_emulated_whatever_its_mxfp8_kernels_are(tmp_path: Path) -> None:
    for precision in ("bf16", "mxfp8"):
        experiment = Experiment(name="s", steps=2, precision=precision, mxfp8_kernels="emulated")
        make_run(tmp_path, experiment, [8.0, 7.0])
    found = compared(tmp_path / "s", EXAMPLE_LOGS[0])
    assert [side.emulated for side in found.sides] == [False, True, False]


def test_many_sides_keep_their_look_in_every_figure(tmp_path: Path) -> None:
    logs = [log_of(tmp_path / f"{n}.log", dict.fromkeys(range(1, 12), 8.0 - n / 10)) for n in range(12)]
    loss, difference, *_ = report_figures(compared(*logs))
    drawn = {trace.name: trace.line.to_plotly_json() for trace in loss.figure.data}
    assert len({(line["color"], line["dash"]) for line in drawn.values()}) == 11
    assert all(drawn[trace.name] == trace.line.to_plotly_json() for trace in difference.figure.data if trace.name)
    speed_alone = history(tmp_path / "speed.csv", {"_step": range(1, 10), "throughput(tps)": range(101, 110)})
    first, *others = (
        {trace.name: trace.line.color for trace in one.figure.data if trace.type == "scatter" and trace.name in drawn}
        for one in report_figures(compared(speed_alone, *logs[:2]))
    )
    assert first.keys() == {"0", "1"}
    assert [colors for colors in others if colors]
    assert all(first == first | colors for colors in others)


def test_what_differs_between_configurations(tmp_path: Path) -> None:
    ours = make_study(tmp_path)
    found = compared(ours, *EXAMPLE_LOGS).to_json()["differing_settings"]
    assert found["precision"] == ["bf16", "mxfp8", None, None]
    assert found["mxfp8_kernels"] == ["auto", "auto", None, "emulated"]  # of two logs, one says so
    assert found["seq_len"] == ["256", "256", "2048", "2048"]
    assert "tokenizers" not in found  # a log cannot say
    assert "dp_shard" not in found  # ours is -1, the ranks that were left, however many


def test_settings_that_are_the_same_in_other_words(tmp_path: Path) -> None:
    said = "[rank0]:[titan] 2026-09-14 03:10:00,000 - root - INFO - Applied {} activation checkpointing to the model\n"
    fields = {"name": "s", "model": "671B", "steps": 2}
    ours = make_run(
        tmp_path, Experiment(**fields, activation_checkpoint="full+dispatch", shape={"n_layers": 40}), [8.0]
    )
    ours.log.write_text(MODEL.format("671B", 1) + said.format("CommunicationSavingFullAC") + ours.log.read_text())
    plain = make_run(tmp_path, Experiment(**fields, seed=1, precision="mxfp8", activation_checkpoint="full"), [8.0])
    plain.log.write_text(said.format("FullAC") + plain.log.read_text())
    found = compared(ours.path, plain.path).to_json()["differing_settings"]
    assert found["activation_checkpoint"] == ["full+dispatch", "full"]
    assert found["shape.n_layers"] == ["40", None]
    assert not {"model", "shape", "dp_shard"} & found.keys()


def test_a_wandb_configuration_is_read_without_names_and_keys(tmp_path: Path) -> None:
    columns = {"_step": [1, 2], "loss_metrics/global_avg_loss": [8.0, 7.0]}
    export = history(tmp_path / "history.csv", columns)
    training = (
        "training: {desc: null, value: {seq_len: 4096.0, lr: 3e-4, rows: 1_000, layers: [1, 2], dataset_path: /b/c4}}"
    )
    (tmp_path / "config.yaml").write_text(
        f"_wandb: {{value: {{x: 1}}}}\n{training}\nuser: {{value: bob}}\napi_key: k\n"
    )
    (side,) = compared(export).sides
    assert side.settings.values == {
        "seq_len": "4096",
        "training.lr": "0.0003",
        "training.rows": "1000",
        "training.dataset_path": "/b/c4",
        "user": "***",
        "api_key": "***",
    }
    other = history(tmp_path / "other" / "history.csv", columns)
    (other.parent / "config.yaml").write_text(
        "model: {tokenizer_path: b}\nvalidation: {seq_len: 1}\nuser: {value: eve}\n"
    )
    (tmp_path / "config.yaml").write_text("model: {tokenizer_path: a}\nvalidation: {seq_len: 2}\n")
    assert compared(export, other).differences[0].differing == ("model.tokenizer_path",)
    history(tmp_path / "another.csv", columns)  # now the configuration may be either's
    assert compared(export).sides[0].settings.values == {}


def test_settings_hold_no_key_and_no_person(tmp_path: Path) -> None:
    keys = ("wandb_key", "aws.access_key", "auth", "auth.bearer", "credentials", "db_passwd")
    names = (*keys, "author", "job.hostname_list", "notify.email_address", "slurm.account")
    kept = {"num_hosts": "4", "commit": "12345e6"}
    (tmp_path / "config.json").write_text(json.dumps(dict.fromkeys(names, "K") | {"command": "HF_TOKEN=K x"} | kept))
    assert settings_of(tmp_path).values == {**dict.fromkeys(names, "***"), "command": "HF_TOKEN=*** x", **kept}


@pytest.mark.parametrize(
    "config",
    [
        "k0: &k0 {x: 1}\n" + "".join(f"k{n + 1}: &k{n + 1} {{x: *k{n}, y: *k{n}}}\n" for n in range(40)),
        "a: &a {b: *a}",
        "a: " + "[" * 2_000,
        "\n".join(f"k{n}: 1" for n in range(1_001)),
        "a: " + "x" * 1_000_000,
        'a: !!int ""',
        "a: 0x" + "f" * 5_000,
        "- 1",
    ],
    ids=["aliases", "itself", "depth", "values", "size", "no number", "a long number", "a list"],
)
def test_a_configuration_that_cannot_be_read_is_none_and_says_so(tmp_path: Path, config: str) -> None:
    (tmp_path / "config.yaml").write_text(config)
    found = settings_of(tmp_path)
    assert found.values == {}
    assert found.source.startswith("config.yaml beside it cannot be read")


@pytest.mark.parametrize("unit", ["Optimizer A ", "CUDA capacity: x "])
@pytest.mark.parametrize("width", [1_900, 1_000_000])
def test_reading_a_log_takes_time_with_its_length(tmp_path: Path, unit: str, width: int) -> None:
    """A tenth of a second; with the square of the length it would be a minute."""
    text = unit * (200_000 // len(unit))
    log = tmp_path / "x.log"
    log.write_text("\n".join(text[start : start + width] for start in range(0, len(text), width)))
    before_s = time.process_time()
    assert list(launch_settings(log)) == [{}]
    assert time.process_time() - before_s < 5.0


def test_the_command_writes_one_page_and_one_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study, page = make_study(tmp_path), tmp_path / "c.html"
    assert main(["report", str(study), str(EXAMPLE_LOGS[1]), "--output", str(page), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["report"] == str(page)
    assert [side["label"] for side in told["sides"]][-1] == "mxfp8_emulated_on_h100"
    shown = html.unescape(shown_page(page.read_text()))
    assert "moelab report s mxfp8_emulated_on_h100.log.gz" in shown
    assert "python -m torch.distributed.run" in shown
    for word in (str(tmp_path), "/home/", "alice", "/tmp/"):
        assert word not in shown
    assert main(["report", str(study), str(EXAMPLE_LOGS[1]), "--output", str(page), "--with-paths"]) == 0
    assert "/home/alice/.venv/bin/python" in page.read_text()


def test_a_compressed_log_that_was_cut_off_is_compared_by_what_it_has(tmp_path: Path) -> None:
    cut = tmp_path / "cut.log.gz"
    cut.write_bytes(EXAMPLE_LOGS[1].read_bytes()[:3000])
    (difference,) = compared(EXAMPLE_LOGS[0], cut).differences
    assert 1 < len(difference.steps) < 40
    assert "cut ended at step" in difference.unfinished
