"""Runs side by side, from logs whose numbers are known and from TorchTitan's own."""

from __future__ import annotations

import html
import json
import math
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from figure_support import notes, shown_page, title
from run_support import ENDS, curve, make_run, make_study, train
from stand_in import step_line, titan_line

from moelab.cli import main
from moelab.data.example_logs import EXAMPLE_LOGS
from moelab.experiment import Experiment
from moelab.judge.arms import arm_label
from moelab.judge.report import Report, judge_paths
from moelab.judge.verdict import Answer
from moelab.runs.settings import settings_of
from moelab.runs.status import State
from moelab.viz.report import report_figures, write_study_report

BF16, MXFP8 = "BF16 + standard all-to-all", "MXFP8 + standard all-to-all"
LOSS = "loss_metrics/global_avg_loss"


def compared(*paths: Path, **options: Any) -> Report:
    report = judge_paths(paths, **options)
    assert report.study is None
    return report


def falling(steps: Iterable[int], above: float = 0.0) -> dict[int, float]:
    return {step: 8 + above - step / 1000 for step in steps}


def log_of(path: Path, losses: dict[int, float], *head: str, tps: float = 1000.0, step_s: float = 1.0) -> Path:
    """A TorchTitan log with these losses by step, behind lines of its start."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [step_line(step, loss, tps=tps, seconds=step * step_s) for step, loss in losses.items()]
    path.write_text("".join([*head, *lines]))
    return path


def prepend(log: Path, *head: str) -> None:
    log.write_text("".join([*head, log.read_text()]))


def gpu_lines(gpu: str = "NVIDIA H100 80GB HBM3") -> str:
    peak = titan_line(0, "Peak FLOPS used for computing MFU: 9.890e+14")
    return titan_line(0, f"CUDA capacity: {gpu} with 79.0GiB memory") + peak


def model_line(name: str, parameters: int) -> str:
    return titan_line(0, f"Model deepseek_v3 {name} size: {parameters:,} total parameters")


def plan_line(steps: int) -> str:
    batches = "local batch size 1, global batch size 2, gradient accumulation steps 1, sequence length 8"
    return titan_line(0, f"Trainer is initialized with {batches}, total steps {steps} (warmup 4)")


def export(path: Path, **columns: Any) -> Path:
    """A W&B history of these columns, and as many steps."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pd.DataFrame(columns)
    table.assign(**{"_step": columns.get("_step", range(1, len(table) + 1))}).to_csv(path, index=False)
    return path


# Numbers


def test_long_curves_are_thinned_and_say_so(tmp_path: Path) -> None:
    wave = 8 + np.sin(np.arange(1, 20_001))
    logs = [export(tmp_path / f"{name}.csv", loss=wave + above) for name, above in (("a", 0.0), ("b", 0.5))]
    for figure in report_figures(compared(*logs)).values():
        assert all(len(trace.x) <= 2 * 2402 for trace in figure.data)
        assert "one logged step in 34 is drawn" in title(figure)
        assert {trace.x[-1] for trace in figure.data if trace.name} == {20_000}


def test_a_difference_is_of_the_steps_that_both_logged(tmp_path: Path) -> None:
    shifts = {step: 0.01 * (step // 10 % 3) for step in range(10, 61, 10)}
    every = log_of(tmp_path / "a.log", dict.fromkeys(range(1, 101), 8.0), step_s=2.0)
    tenth = log_of(tmp_path / "b.log", {step: 8 + by for step, by in shifts.items()}, tps=2000, step_s=3.0)
    report = compared(every, tenth, final_fraction=0.5)
    (one,) = report.differences
    window = np.array([shifts[step] for step in (40, 50, 60)])
    mean, sd = window.mean(), window.std(ddof=1)
    assert (one.steps, one.first_step) == ((10, 20, 30, 40, 50, 60), 31)
    assert (one.nats, one.spread_nats) == pytest.approx((mean, sd))
    assert one.sentence() == "b is +0.0100 nats from a over steps 31 to 60, 0.0100 from step to step."
    assert "b: 2,000 tokens/s" in report.as_text()
    assert report.summary["On what?"].endswith("60 to 100 steps, 6 to 100 of them logged, one run each.")
    _, figure, _ = report_figures(report).values()
    drawn = next(trace for trace in figure.data if trace.name == "b")
    assert drawn.y[-1] == pytest.approx(mean)
    # The first logged step of every tenth holds the warm-up.
    assert [side.timed["step"].min() for side in report.sides] == [4, 20]


# Judged as in a study


def test_arms_of_studies_are_judged_together_also_where_a_log_is_beside_them(tmp_path: Path) -> None:
    """Every arm of two studies below a folder, paired by seed with the first arm of the first."""
    first, second = make_study(tmp_path), make_study(tmp_path, "t", dict.fromkeys(ENDS, 0.5))
    alone = judge_paths([first])
    train(first, "mxfp8", 7, [9.0, 9.0], state=State.FAILED, reason="rank 1: ValueError: x")
    train(second, "bf16", 8, curve(9.0))
    newer = train(second, lr=1e-4).path
    newer.rename(newer.with_name("29990101T000000Z-aaaaaa"))
    report, beside = compared(first, second), compared(first, second, EXAMPLE_LOGS[0])
    assert [side.label for side in report.sides] == [f"{study}: {name}" for study in "st" for name in (BF16, MXFP8)]
    assert [[run.seed for run in side.runs] for side in report.sides] == [[*ENDS], [*ENDS], [*ENDS, 8], [*ENDS]]
    near, same, far = report.verdicts
    assert near.interval == alone.verdicts[0].interval
    assert near.mean_difference_nats == pytest.approx(0.0035, abs=1e-6)
    assert (same.mean_difference_nats, far.answer) == (
        0.0,
        Answer.DIFFERENT,
    )  # seed 8 of one arm shifts nothing
    failed = "failed: rank 1: ValueError: x, 2 of 20 steps logged"
    assert f"s: MXFP8, seed 7: {failed}; s: BF16, seed 7: not run." in near.sentence()
    settings = "not the settings of this arm's judged runs: lr 0.0001 instead of 0.003"
    assert [row["reason"] for row in report.to_json()["runs"] if not row["used"]] == [failed, settings]
    assert sum("paired by seed" in caption for caption in report_figures(report)) == 4  # all verdicts in one, then each
    assert [one.sentence() for one in beside.verdicts] == [one.sentence() for one in report.verdicts]
    (log,) = beside.differences
    assert log.words.startswith("bf16_on_h100 is +1.3959 nats from s: BF16 + standard all-to-all over steps 19 to 20")
    assert beside.summary["Same loss?"] == (
        f"{report.summary['Same loss?']} Not decided: {log.words}. "
        "A single run cannot show what another seed would change."
    )
    assert f"Note: left out: t: {BF16}, seed 0: {settings}" in beside.as_text()
    assert beside.no_gain["bf16_on_h100"] == "a CPU process stands in for a GPU"


def test_runs_of_ours_without_a_finished_one_stand_side_by_side(tmp_path: Path) -> None:
    runs = [train(tmp_path / "s", "bf16", 0, [8.0, math.inf], lr=lr, state=State.FAILED) for lr in (1e-3, 2e-3)]
    report = compared(*(run.path for run in runs))
    assert (report.verdicts, report.summary["Same loss?"].startswith("Not decided: ")) == ([], True)
    assert "(2) diverged: loss is inf at step 2" in report.as_text()
    assert report_figures(report)


def test_a_chance_difference_among_many_sides_is_not_different(tmp_path: Path) -> None:
    """Among five arms it is none, in a study and side by side; alone it would be."""
    rng, study, options = np.random.default_rng(0), tmp_path / "s", {"margin_nats": 0.0285}
    ends = {seed: 5.0 + 0.02 * rng.normal() for seed in range(6)}
    worse = [0.030, 0.036, 0.028, 0.034, 0.029, 0.037]
    arms = [("bf16", "standard"), ("fp8", "standard"), ("bf16", "deepep"), ("mxfp8", "deepep"), ("mxfp8", "standard")]
    for precision, backend in arms:
        for seed, end in ends.items():
            near = 0.001 * rng.normal() * ((precision, backend) != arms[0])
            losses = [end + (worse[seed] if precision == "fp8" else near)] * 2
            train(study, precision, seed, losses, steps=2, warmup_steps=1, ep_backend=backend)
    judged = judge_paths([study], **options)
    alone = {arm_label(one.arm): one.answer for one in judged.verdicts}
    assert alone["FP8 + standard all-to-all"] is Answer.INSUFFICIENT
    assert "not after Holm's correction for 4 arms" in judged.as_text()
    beside = compared(study, EXAMPLE_LOGS[0], **options)
    assert {arm_label(one.arm): one.answer for one in beside.verdicts} == alone
    (pair,) = compared(study / "bf16_standard", study / "fp8_standard", **options).verdicts
    assert pair.answer is Answer.DIFFERENT


# Logs of someone else's training


def test_a_log_that_diverged_says_so_and_is_drawn_up_to_there(tmp_path: Path) -> None:
    sound = log_of(tmp_path / "ok.log", falling(range(1, 41)))
    bad = log_of(tmp_path / "bad.log", falling(range(1, 31)) | dict.fromkeys(range(31, 41), math.nan))
    report = compared(sound, bad)
    loss, difference, *_ = report_figures(report).values()
    words = "bad diverged: loss is nan at step 31 (segment 0)"
    assert report.differences[0].sentence() == f"{words}."
    assert report.notes[0] == words
    assert all(words in title(one) for one in (loss, difference))
    drawn = next(trace for trace in loss.data if trace.name == "bad")
    assert (drawn.x[-1], drawn.y[-1]) == (30, pytest.approx(7.97))
    assert notes(loss) == []  # only one of the two has an end to enlarge
    assert notes(report_figures(compared(sound))["Training loss."]) == ["all steps", "the last 10 %"]
    assert [run["final_loss_nats"] is None for run in report.to_json()["runs"]] == [False, True]


def test_a_log_that_ended_before_its_planned_steps(tmp_path: Path) -> None:
    whole = log_of(tmp_path / "whole.log", falling(range(10, 101, 10)), plan_line(105))
    killed = log_of(tmp_path / "killed.log", falling(range(10, 61, 10), 0.1), plan_line(105))
    (one,) = compared(whole, killed).differences
    assert one.sentence() == "killed is +0.1000 nats from whole at step 60."
    cut = tmp_path / "cut.log.gz"  # and of a compressed one what can be read counts
    cut.write_bytes(EXAMPLE_LOGS[1].read_bytes()[:3000])
    (one,) = compared(EXAMPLE_LOGS[0], cut).differences
    assert 1 < len(one.steps) < 40


def test_quantities_that_a_source_lacks(tmp_path: Path) -> None:
    loss_alone = export(tmp_path / "x" / "loss.csv", Step=[1, 2, 3], **{LOSS: [8.0, 7.5, 7.0]})
    speed_alone = export(tmp_path / "y" / "speed.csv", tps=range(101, 110))
    unstarted = make_run(tmp_path, Experiment(name="u"), [], state=State.FAILED, reason="no space")
    report = compared(loss_alone, speed_alone, unstarted.path, EXAMPLE_LOGS[0])
    as_json = json.loads(json.dumps(report.to_json(), allow_nan=False))
    _, second, third, _ = as_json["runs"]
    assert [*as_json["tps"]] == ["bf16_on_h100", "speed"]
    assert (second["final_loss_nats"], third["status"]) == (None, "failed")
    assert [one["common_steps"] for one in as_json["differences"]] == [0, 0, 3]
    assert "loss; speed: no configuration can be read" in report.as_text()
    assert "Training loss." in report_figures(report)  # of those that logged one
    page = write_study_report(report, tmp_path / "r.html").read_text()
    text = re.sub(r"<script.*?</script>", "", page, flags=re.S)
    assert '<td class="number">–</td>' in text
    assert not re.search(r"\bnan\b", text, re.I)
    stills = [export(tmp_path / name / "still.csv", tps=[0] * 9) for name in "ab"]
    still = compared(*stills)
    assert still.summary["Faster?"] == "still (2) and still did not both log tokens/s."
    assert report_figures(still) == {}


def test_bare_logs_are_summed_up(tmp_path: Path) -> None:
    faster, loss, what = compared(*EXAMPLE_LOGS).summary.values()
    assert faster.startswith("Not measured for mxfp8_emulated_on_h100 over bf16_on_h100: emulated kernels are slower")
    words = "Not decided: mxfp8_emulated_on_h100 is -0.0545 nats from bf16_on_h100 over steps 37 to 40."
    assert loss.startswith(words)
    assert what.startswith("debug on NVIDIA H100 80GB HBM3, EP 2, sequences of 2048 tokens, ")
    losses = falling(range(1, 41))
    slow, fast = (log_of(tmp_path / f"{name}.log", losses, tps=tps) for name, tps in (("slow", 1000), ("fast", 1500)))
    faster, _, what = compared(slow, fast).summary.values()
    words = "fast logged 1.5 times the tokens/s per GPU of slow (whether it is the same model and GPU is not known)"
    assert faster == f"{words}."
    assert what == "an unknown model on unknown hardware; 40 steps, one run each."
    alone = compared(slow)
    assert (alone.title, alone.summary["Faster?"]) == ("Run slow", "There is nothing to compare with.")
    cpu = log_of(tmp_path / "cpu.log", losses, gpu_lines().replace("CUDA capacity: NVIDIA", "CPU capacity:"), tps=9)
    words += "; not measured for cpu over slow: a CPU process stands in for a GPU."
    assert compared(slow, fast, cpu).summary["Faster?"] == words
    prepend(slow, gpu_lines("NVIDIA H100"))
    before = slow.read_text()
    prepend(fast, gpu_lines("NVIDIA B200"))
    assert compared(slow, fast).summary["On what?"].startswith("an unknown model on NVIDIA H100 and NVIDIA B200; ")
    assert compared(slow, fast).no_gain == {"fast": "chip NVIDIA B200 against NVIDIA H100"}
    log_of(fast, falling(range(10, 41)), before, gpu_lines("NVIDIA B200"), tps=1500)
    assert compared(slow, fast).no_gain == {"fast": "chip NVIDIA H100, then NVIDIA B200 against NVIDIA H100"}


def test_logs_of_other_steps_are_not_held_against_each_other(tmp_path: Path) -> None:
    tens, fives = [1, *range(10, 1001, 10)], [1, *range(5, 1001, 10)]
    first, second = (log_of(tmp_path / f"{n}.log", falling(steps)) for n, steps in enumerate((tens, fives)))
    report = compared(first, second)
    assert "1 and 0 have no step with a loss in common at the end." in report.as_text()
    assert len(report_figures(report)) == 2  # none of a difference
    seldom = log_of(tmp_path / "seldom.log", falling(range(100, 401, 100), 0.5))
    one_less = log_of(tmp_path / "one-less.log", falling(range(1, 400)))
    assert compared(one_less, seldom).differences[0].words == "seldom is +0.5000 nats from one-less at step 300"
    short = log_of(tmp_path / "short.log", falling(range(1, 51), 0.5))
    assert "short is +0.5000 nats from 0 at step 50" in compared(first, short).summary["Same loss?"]
    goes_on = export(tmp_path / "on.csv", loss=[8.0] * 50 + [None] * 50, tps=[1000.0] * 100)
    report = compared(log_of(tmp_path / "half.log", dict.fromkeys(range(1, 51), 7.5)), goes_on)
    assert "on is +0.5000 nats from half over steps 46 to 50" in report.summary["Same loss?"]


def test_logs_of_other_work_have_no_ratio_of_speeds(tmp_path: Path) -> None:
    losses = falling(range(1, 101))
    debug, other = (log_of(tmp_path / f"{name}.log", losses, model_line(name, 1)) for name in ("debugmodel", "16B"))
    report = compared(debug, other)
    assert report.no_gain == {"16B": "model 16B against debug"}
    assert "(they also differ: model 16B against debug)" in report.summary["Same loss?"]
    claim = "no gain is claimed for 16B over debugmodel: model 16B against debug"
    assert any(claim in title(figure) for figure in report_figures(report).values())
    assert compared(other, log_of(tmp_path / "unknown.log", losses)).no_gain == {}
    assert report_figures(compared(log_of(tmp_path / "zero.log", dict.fromkeys(losses, 0.0))))


@pytest.mark.parametrize("name", ["missing", "empty", "empty.log", "bytes.log", "no_steps.csv", "torn.json"])
def test_what_cannot_be_read_is_named(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    contents = {"empty.log": b"", "bytes.log": bytes(range(256)), "no_steps.csv": b"a,b\n1,2\n", "torn.json": b'[{"_s'}
    for file, content in contents.items():
        (tmp_path / file).write_bytes(content)
    assert main(["report", str(EXAMPLE_LOGS[0]), str(tmp_path / name)]) == 2
    words = "does not exist" if name == "missing" else "cannot be compared: "
    printed = capsys.readouterr().err
    assert printed.startswith(f"moelab: {tmp_path / name} {words}")
    assert "a TorchTitan log, a TensorBoard folder or a W&B export" in printed


# Names and configurations


def test_sides_of_one_name_are_numbered(tmp_path: Path) -> None:
    logs = [log_of(tmp_path / name / "train.log", dict.fromkeys(range(1, 21), 8.0)) for name in ("ada", "eve")]
    report = compared(*logs, logs[0])
    assert [side.label for side in report.sides] == ["train", "train (2)", "train (3)"]
    assert report.differences[1].sentence().endswith("the same at every step: one may be a copy of the other.")
    numbered = compared(log_of(tmp_path / "train (2).log", {1: 8.0, 2: 7.0}), *logs)
    assert [side.label for side in numbered.sides] == ["train (2)", "train", "train (3)"]


def test_what_differs_between_configurations(tmp_path: Path) -> None:
    differing = compared(make_study(tmp_path), *EXAMPLE_LOGS).to_json()["differing_settings"]
    assert differing["precision"] == ["bf16", "mxfp8", None, None]
    assert differing["mxfp8_kernels"] == ["auto", "auto", None, "emulated"]  # of two logs, one says so
    assert differing["seq_len"] == ["256", "256", "2048", "2048"]
    # A log cannot say what tokenizers there are; our dp_shard is -1, the ranks that were left, however many.
    assert not {"tokenizers", "dp_shard"} & differing.keys()


def test_settings_that_are_the_same_in_other_words(tmp_path: Path) -> None:
    said = "Applied {} activation checkpointing to the model"
    fields: dict[str, Any] = {"model": "671B", "steps": 2}
    dispatch = {"activation_checkpoint": "full+dispatch", "shape": {"n_layers": 40}}
    ours = train(tmp_path / "s", "bf16", 0, [8.0], **fields, **dispatch)
    prepend(ours.log, model_line("671B", 1), titan_line(0, said.format("CommunicationSavingFullAC")))
    plain = train(tmp_path / "s", "mxfp8", 1, [8.0], **fields, activation_checkpoint="full", mxfp8_kernels="emulated")
    prepend(plain.log, titan_line(0, said.format("FullAC")))
    report = compared(ours.path, plain.path)
    differing = report.to_json()["differing_settings"]
    assert differing["activation_checkpoint"] == ["full+dispatch", "full"]
    assert differing["shape.n_layers"] == ["40", None]
    assert not {"model", "shape", "dp_shard"} & differing.keys()
    # Kernels of a BF16 arm are none, whatever is asked for.
    bf16 = train(tmp_path / "s", "bf16", 0, [8.0, 7.0], steps=2, mxfp8_kernels="emulated")
    assert [side.emulated for side in compared(bf16.path, plain.path).sides] == [False, True]


def test_a_wandb_configuration_is_read_without_names_and_keys(tmp_path: Path) -> None:
    exports = [export(tmp_path / name / "history.csv", **{LOSS: [8.0, 7.0]}) for name in ("one", "two")]
    first, second = (path.with_name("config.yaml") for path in exports)
    values = "{seq_len: 4096.0, lr: 3e-4, rows: 1_000, layers: [1, 2], dataset_path: /b/c4}"
    training = f"training: {{desc: null, value: {values}}}"
    first.write_text(f"_wandb: {{value: {{x: 1}}}}\n{training}\nuser: {{value: bob}}\napi_key: k\n")
    (side,) = compared(exports[0]).sides
    assert side.settings.values == {
        "seq_len": "4096",
        "training.lr": "0.0003",
        "training.rows": "1000",
        "training.dataset_path": "/b/c4",
        "user": "***",
        "api_key": "***",
    }
    for config, name in ((first, "a"), (second, "b")):  # whoever ran it, and what is held out, is no difference
        held_out = f"validation: {{seq_len: {len(config.parts) + ord(name)}}}"
        config.write_text(f"model: {{tokenizer_path: {name}}}\n{held_out}\nuser: {{value: {name}}}\n")
    assert compared(*exports).differences[0].differing == "model.tokenizer_path b against a"
    export(exports[0].with_name("another.csv"), **{LOSS: [8.0, 7.0]})  # now the configuration may be either's
    assert compared(exports[0]).sides[0].settings.values == {}


def test_settings_hold_no_key_and_no_person(tmp_path: Path) -> None:
    keys = ("wandb_key", "aws.access_key", "auth", "auth.bearer", "credentials", "db_passwd")
    names = (*keys, "author", "job.hostname_list", "notify.email_address", "slurm.account")
    kept = {"num_hosts": "4", "commit": "12345e6"}
    (tmp_path / "config.json").write_text(json.dumps(dict.fromkeys(names, "K") | {"command": "HF_TOKEN=K x"} | kept))
    assert settings_of(tmp_path).values == {**dict.fromkeys(names, "***"), "command": "HF_TOKEN=*** x", **kept}


UNREADABLE = {
    "aliases": "k0: &k0 {x: 1}\n" + "".join(f"k{n + 1}: &k{n + 1} {{x: *k{n}, y: *k{n}}}\n" for n in range(40)),
    "itself": "a: &a {b: *a}",
    "depth": "a: " + "[" * 2_000,
    "values": "\n".join(f"k{n}: 1" for n in range(1_001)),
    "size": "a: " + "x" * 1_000_000,
    "no number": 'a: !!int ""',
    "a list": "- 1",
}


@pytest.mark.parametrize("config", UNREADABLE.values(), ids=UNREADABLE)
def test_a_configuration_that_cannot_be_read_is_none_and_says_so(tmp_path: Path, config: str) -> None:
    (tmp_path / "config.yaml").write_text(config)
    settings = settings_of(tmp_path)
    assert settings.values == {}
    assert settings.source.startswith("config.yaml beside it cannot be read")


@pytest.mark.parametrize("unit", ["Optimizer A ", "CUDA capacity: x "])
@pytest.mark.parametrize("width", [1_900, 1_000_000])
def test_reading_a_log_takes_time_with_its_length(tmp_path: Path, unit: str, width: int) -> None:
    """A tenth of a second; with the square of the length it would be a minute."""
    text = unit * (200_000 // len(unit))
    log = tmp_path / "x.log"
    log.write_text("\n".join(text[start : start + width] for start in range(0, len(text), width)))
    before_s = time.process_time()
    assert settings_of(log).values == {}
    assert time.process_time() - before_s < 5.0


def test_the_command_writes_one_page_and_one_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "c.html"
    command = ["report", str(make_study(tmp_path)), str(EXAMPLE_LOGS[1]), "--output", str(page)]
    assert main([*command, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    labels = dict.fromkeys(run["side"] for run in printed["runs"])
    assert (printed["report"], [*labels]) == (str(page), [BF16, MXFP8, "mxfp8_emulated_on_h100"])
    shown = html.unescape(shown_page(page.read_text()))
    assert "moelab report s mxfp8_emulated_on_h100.log.gz" in shown
    assert "python -m torch.distributed.run" in shown
    assert [word for word in (str(tmp_path), "/home/", "alice", "/tmp/") if word in shown] == []
    assert main([*command, "--with-paths"]) == 0
    assert "/home/alice/.venv/bin/python" in page.read_text()
