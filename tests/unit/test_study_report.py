"""A study judged and reported, from run directories whose numbers are known."""

from __future__ import annotations

import getpass
import html
import json
import math
import re
import shutil
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from figure_support import shown_page
from run_support import ENDS, ENVIRONMENT, STEPS, curve, make_run, make_study
from secret_shapes import SHAPES
from stand_in import validation_line

from moelab import data
from moelab.analysis.verdict import Answer
from moelab.cli import main
from moelab.errors import BadInput
from moelab.experiment import Experiment
from moelab.experiment_file import Study
from moelab.runs.directory import RunDir, find
from moelab.runs.files import write_json
from moelab.runs.status import State
from moelab.study_report import NothingToJudge, judge_study, provenance, report_figures, write_study_report


def run_of(
    folder: Path, precision: str, seed: int, end: float, *, fields: dict[str, Any] | None = None, **options: Any
) -> RunDir:
    experiment = Experiment(name="s", steps=STEPS, precision=precision, seed=seed, **(fields or {}))
    losses = options.pop("losses", curve(end))
    return make_run(folder / "runs", experiment, losses, **options)


@pytest.fixture
def study(tmp_path: Path) -> Path:
    return make_study(tmp_path / "runs")


def report_of(study: Path) -> str:
    path = write_study_report(judge_study(study), study / "report.html")
    return path.read_text(encoding="utf-8")


def test_the_verdict_of_known_numbers(study: Path) -> None:
    judged = judge_study(study)
    (verdict,), (held_out,) = judged.verdicts, judged.held_out
    assert verdict.mean_difference_nats == pytest.approx(0.0035, abs=1e-5)
    assert held_out.mean_difference_nats == pytest.approx(0.0035, abs=1e-4)
    assert "nats in held-out loss (" in held_out.sentence()
    assert verdict.reference_losses == pytest.approx(ENDS, abs=1e-5)
    (gain,) = judged.gains
    assert gain.ratio == pytest.approx(0.5)
    assert judged.speed_note == "each rank is a CPU process; emulated MXFP8 kernels: no measure of speed"
    text = judged.as_text()
    assert "\n8 of 8 runs finished\nMXFP8 differs from BF16 (both standard all-to-all) by +0.0035 nats" in text
    assert "500 tokens/s per rank" in text
    assert "-50.0 %" in text
    data = json.loads(json.dumps(judged.to_json(), allow_nan=False))
    assert (data["study"], data["finished"], data["judged"], len(data["runs"])) == ("s", 8, 8, 8)
    assert [one["answer"] for one in data["verdicts"]] == ["equivalent", "equivalent"]
    assert data["tps"] == {"bf16_standard": pytest.approx(1000), "mxfp8_standard": pytest.approx(500)}


def test_one_arm_only(tmp_path: Path) -> None:
    for seed in (0, 1):
        run_of(tmp_path, "bf16", seed, ENDS[seed])
    study = tmp_path / "runs" / "s"
    judged = judge_study(study)
    assert [side.arm for side in judged.sides] == ["bf16_standard"]
    assert judged.verdicts == judged.gains == judged.held_out == []
    assert "No verdict: no run of an arm besides the reference bf16_standard finished" in judged.as_text()
    assert "Study s" in report_of(study)


def test_a_reference_that_failed(tmp_path: Path) -> None:
    run_of(tmp_path, "bf16", 0, 5.0, losses=[8.0], state=State.FAILED, reason="rank 0: killed by SIGKILL")
    run_of(tmp_path, "mxfp8", 0, 5.0)
    study = tmp_path / "runs" / "s"
    judged = judge_study(study)
    assert ([side.arm for side in judged.sides if side.finished], judged.verdicts) == (["mxfp8_standard"], [])
    assert "No verdict: no run of the reference bf16_standard finished" in judged.as_text()
    assert "killed by SIGKILL" in report_of(study)


def test_nothing_finished(tmp_path: Path) -> None:
    run_of(tmp_path, "bf16", 0, 5.0, losses=[8.0], state=State.FAILED, reason="rank 0: ValueError: x")
    run_of(tmp_path, "mxfp8", 0, 5.0, losses=[*curve(5.0)[:-1], math.nan])
    run_of(tmp_path, "mxfp8", 1, 5.0, losses=curve(5.0)[:-1])
    with pytest.raises(NothingToJudge) as refused:
        judge_study(tmp_path / "runs" / "s")
    assert refused.value.exit_code == 1
    first, *rest = str(refused.value).splitlines()
    assert first == "no run of s finished:"
    assert [line.split(": ", 1)[1] for line in rest] == [
        "failed: rank 0: ValueError: x",
        f"failed: loss is nan at step {STEPS} (segment 0)",
        f"completed: {STEPS - 1} of {STEPS} steps logged",
    ]


def test_a_held_out_loss_that_is_nan_or_missing(tmp_path: Path) -> None:
    for seed in range(4):
        run_of(tmp_path, "bf16", seed, ENDS[seed], held_out=5.5 + seed / 100)
        run_of(tmp_path, "mxfp8", seed, ENDS[seed], held_out=math.nan if seed == 0 else 5.5 + seed / 100)
        run_of(tmp_path / "all", "bf16", seed, ENDS[seed], held_out=math.nan)
        run_of(tmp_path / "all", "mxfp8", seed, ENDS[seed], held_out=5.5)
    run_of(tmp_path, "bf16", 4, 5.0, held_out=5.5)
    run_of(tmp_path, "mxfp8", 4, 5.0)
    short = run_of(tmp_path, "mxfp8", 5, 5.0)
    short.log.write_text(short.log.read_text() + validation_line(STEPS // 2, 7.5))
    (none,) = judge_study(tmp_path / "all" / "runs" / "s").held_out
    assert none.answer is Answer.INSUFFICIENT
    assert "4 of 4 seeds diverged in the reference BF16 and not in MXFP8" in none.sentence()
    judged = judge_study(tmp_path / "runs" / "s")
    (held_out,) = judged.held_out
    assert held_out.seeds == (1, 2, 3)
    assert held_out.answer is Answer.DIFFERENT
    assert "1 of 6 seeds diverged in MXFP8 and not in BF16 (seed 0: the held-out loss is nan)" in held_out.sentence()
    assert f"Left out: MXFP8, seeds 4, 5: no held-out loss was logged at step {STEPS}" in held_out.sentence()
    json.dumps(judged.to_json(), allow_nan=False)
    shown = shown_page(report_of(tmp_path / "runs" / "s")).replace("the held-out loss is nan", "")
    assert not re.search(r"\bnan\b", shown, re.I)


def test_a_study_that_is_given_decides_which_settings_are_judged(study: Path) -> None:
    """All of BF16 was trained again with another learning rate: as many runs, and the study says which are meant."""
    old, new = [run.experiment for run in find(study)], []
    for seed in range(4):
        new.append(run_of(study.parents[1], "bf16", seed, 4.0, fields={"lr": 1.0e-2}).experiment)
    judged = judge_study(study, study=Study(name="s", experiments=tuple(old)))
    assert judged.verdicts[0].reference_losses == pytest.approx(ENDS, abs=1e-5)
    assert not any("differ" in note for note in judged.notes)
    planned = [*new, *(one for one in old if one.precision == "mxfp8")]
    mixed = judge_study(study, study=Study(name="s", experiments=tuple(planned)))
    told = "The arms also differ in their settings: lr 0.003 instead of 0.01."
    assert told in mixed.verdicts[0].sentence()
    assert f"MXFP8 + standard all-to-all: {told}" in mixed.notes
    assert "instead of 0.01; each rank is a CPU process" in mixed.to_json()["note"]
    assert mixed.gains  # a step takes as long at another learning rate


def test_a_study_is_the_same_from_anywhere_and_after_it_moved(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(path: Path) -> tuple[Any, ...]:
        judged = judge_study(path)
        return judged.study, judged.as_text(), judged.to_json(), {**provenance(judged), "Written": "", "Command": ""}

    before = told(study)
    assert [side.arm for side in judge_study(study / "bf16_standard").sides] == ["bf16_standard"]
    (study.parent / "latest").symlink_to(study)
    for folder, path in ((study, "."), (study / "bf16_standard", ".."), (study.parent, "s"), (study.parent, "latest")):
        monkeypatch.chdir(folder)
        assert told(Path(path)) == before
    shutil.move(study, tmp_path / "elsewhere" / "s")
    assert told(tmp_path / "elsewhere" / "s") == before


def test_what_is_no_study(study: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="reference 'fp8_standard' is not an arm of s; its arms: bf16_standard, mxfp8"):
        judge_study(study, reference="fp8_standard")
    for run in find(study / "bf16_standard"):
        (run.path / "experiment.yaml").write_text("")
    with pytest.raises(BadInput, match=r"its arms: mxfp8_standard\n  s/bf16_standard/seed0/.*: left out: experiment"):
        judge_study(study)
    make_run(study.parent, Experiment(name="other", steps=2), [8.0, 7.0])
    with pytest.raises(BadInput, match="holds several studies; give the folder of one: other, s"):
        judge_study(study.parent)
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "missing", study / "bf16_standard" / "missing"):
        with pytest.raises(BadInput):
            judge_study(path)


def summary_of(folder: Path, *, gpu: str | None = None, kernels: str = "emulated") -> dict[str, str]:
    for run in find(folder / "runs" / "s"):
        environment = json.loads((run.path / "environment.json").read_text())
        gpus = [{"name": gpu, "driver": "580.1"}] * 2 if gpu else []
        write_json(run.path / "environment.json", {**environment, "gpus": gpus})
        for converted in (run.path / "launch").glob("converted/*.json"):
            write_json(converted, {"kernels": kernels, "modules": ["layers.1.moe.experts"]})
    return judge_study(folder / "runs" / "s").summary


def test_a_report_answers_three_questions_first(study: Path) -> None:
    faster, loss, what = summary_of(study.parents[1]).values()
    assert not any("hroughput" in figure.caption for figure in report_figures(judge_study(study)))
    assert faster == "Not measured: a CPU process stands in for a GPU here, so its tokens/s say nothing about a GPU's."
    assert loss.startswith("Yes: MXFP8 ends +0.0035 nats from BF16 (95 % interval ")
    assert what == (
        "nano on 2 processes of A processor, EP 2, sequences of 256 tokens, local batch 4, learning rate 0.003; "
        "20 steps, 4 seeds each."
    )
    faster, _, what = summary_of(study.parents[1], gpu="NVIDIA B200", kernels="native").values()
    assert faster.startswith("MXFP8 over BF16 (both standard all-to-all): -50.0 % tokens/s (95 % interval ")
    assert what.startswith("nano on 2 × NVIDIA B200, ")
    captions = [figure.caption.split(":")[0] for figure in report_figures(judge_study(study))]
    assert "Throughput" in captions
    faster, _, _ = summary_of(study.parents[1], gpu="NVIDIA H100", kernels="emulated").values()
    assert faster.startswith("Not measured for MXFP8 + standard all-to-all: emulated kernels are slower")
    assert judge_study(study, reference="mxfp8_standard").summary["Faster?"] == faster
    page = html.unescape(report_of(study))
    places = [page.index(words) for words in ("Faster?", "What differs between", 'id="figures"', 'id="verdicts"')]
    assert places == sorted(places)
    assert "<td>mxfp8</td>" in page
    assert "The same in all: model nano · GPU NVIDIA H100" in page
    assert "sequence length, tokens 256 · local batch, sequences 4 · steps 20 · learning rate 0.003" in page
    run_of(study.parents[1], "fp8", 0, math.nan, losses=[*curve(5.0)[:-1], math.nan])
    assert "No: different: " in judge_study(study).summary["Same loss?"]


def test_a_report_of_sixteen_long_runs_is_below_2_mb(tmp_path: Path) -> None:
    noise = np.random.default_rng(0)
    for seed in range(8):
        for precision in ("bf16", "mxfp8"):
            experiment = Experiment(name="s", steps=1500, precision=precision, seed=seed)
            losses = 3 + 5 * np.exp(-np.arange(1500) / 400) + noise.normal(0, 0.02, 1500)
            make_run(tmp_path / "runs", experiment, losses.tolist())
    page = write_study_report(judge_study(tmp_path / "runs" / "s"), tmp_path / "r.html")
    assert page.stat().st_size < 2_000_000


# What the report must not contain


HOSTILE = "rank 0: ValueError: <script>alert(1)</script>\"'><img src=x onerror=alert(2)> {{ 7 * 7 }}"


def test_a_page_is_private_inert_and_offline(study: Path) -> None:
    full = f"the launcher failed: [Errno 28] No space left on device: '{study}/bf16_standard/x/metrics.parquet'"
    for seed, reason in enumerate((full, HOSTILE, "WANDB_API_KEY=0123abc was refused"), start=7):
        run_of(study.parents[1], "bf16", seed, 5.0, losses=[8.0], state=State.FAILED, reason=reason)
    for run in find(study / "mxfp8_standard"):  # a machine's own words reach the page too
        machine = {"gpus": [{"name": HOSTILE}], "processor": HOSTILE, "packages": {"torch": f"{HOSTILE} /home/alice"}}
        write_json(run.path / "environment.json", ENVIRONMENT | machine)
    page = shown_page(report_of(study))
    assert "<script>alert(1)" not in page
    assert "<img src=x" not in page
    assert not re.search(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//""", page)
    assert page.count("<!DOCTYPE html>") == 1
    text = html.unescape(page)
    assert HOSTILE in text
    assert "emulated MXFP8 kernels: no measure of speed" in text
    assert "No space left on device: '…/metrics.parquet'" in text
    for word in (str(study.parents[1]), str(Path.home()) + "/", "/home/", "alice", "/tmp/", socket.gethostname()):
        assert word not in text
    assert getpass.getuser() == "root" or getpass.getuser() not in text
    path = write_study_report(judge_study(study), study / "report.html", with_paths=True)
    with_paths = html.unescape(shown_page(path.read_text()))
    assert f"--dump_folder {study}/bf16_standard/seed" in with_paths
    assert "WANDB_API_KEY=*** was refused" in with_paths  # keys stay hidden all the same


def test_one_seed_of_two_steps(tmp_path: Path) -> None:
    for precision in ("bf16", "mxfp8"):
        make_run(tmp_path / "runs", Experiment(name="s", steps=2, precision=precision), [5.0, 4.9])
    judged = judge_study(tmp_path / "runs" / "s")
    (verdict,) = json.loads(json.dumps(judged.to_json(), allow_nan=False))["verdicts"]
    assert (verdict["answer"], verdict["interval_nats"]) == ("insufficient data", [None, None])
    assert verdict["margin_nats"] is None
    assert judged.throughput == []
    assert "tokens/s per rank" not in judged.as_text()
    assert "loss" in report_of(tmp_path / "runs" / "s")


def test_the_parts_of_a_traced_step_are_shown(study: Path) -> None:
    before = len(report_figures(judge_study(study)))
    traced, damaged = (next(run for run in find(study) if run.arm.startswith(arm)) for arm in ("bf16", "mxfp8"))
    for run in (traced, damaged):
        (run.path / "traces").mkdir()
    packaged = Path(data.__path__[0]) / "measured" / "trace_two_h200_full_standard.json.gz"
    shutil.copy(packaged, traced.path / "traces" / "rank0.json.gz")
    (damaged.path / "traces" / "rank0.json").write_text("no trace")
    judged = judge_study(study)
    bars = report_figures(judged)[before].figure
    assert [sum(bar.x[0] for bar in bars.data)] == pytest.approx([707.7], abs=0.5)
    assert len(bars.data[0].y) == 1
    (note,) = [note for note in judged.notes if "rank0.json" in note]
    assert "rank0.json is not a Kineto trace" in note
    assert str(study) not in note
    assert "What a traced step is made of." in report_of(study)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("/home/alice/runs/s/arm/seed0/x", "runs/s/arm/seed0/x"),
        ("/home/runs/alice/lab/runs/s/arm/seed0/x", "runs/s/arm/seed0/x"),
        ("--log-dir=/home/alice/runs/s/logs", "--log-dir=runs/s/logs"),
        ("/data/alice/out/s/arm/seed0/x/experiment.yaml", "…/experiment.yaml"),
        ("'/home/alice smith/my runs/out/experiment.yaml'", "…/experiment.yaml"),
        ("'MOELAB_EXPERIMENT=/home/alice smith/runs/s/experiment.yaml'", "MOELAB_EXPERIMENT=runs/s/experiment.yaml"),
        ("/home/alice/.venv/bin/python3.11 -m torch.distributed.run", "python3.11 -m torch.distributed.run"),
        ("--rdzv-endpoint=localhost:0", "--rdzv-endpoint=localhost:0"),
    ],
)
def test_commands_are_shown_without_folders(tmp_path: Path, before: str, after: str) -> None:
    run = run_of(tmp_path, "bf16", 0, 5.0)
    (run.path / "launch" / "command.sh").write_text(before + "\n")
    assert provenance(judge_study(tmp_path / "runs" / "s"))["Command, BF16 + standard all-to-all, seed 0"] == after


def test_no_shape_of_a_secret_in_a_reason_reaches_a_page_or_what_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in range(2):
        make_run(tmp_path, Experiment(name="s", steps=3, seed=seed), [8.0, 7.0, 6.0])
    for seed, (secret, text) in enumerate(SHAPES.values(), start=2):
        run = make_run(tmp_path, Experiment(name="s", steps=3, seed=seed), [8.0], state=State.FAILED)
        reason = text.replace("{}", secret).replace("{{", "{").replace("}}", "}")
        write_json(run.path / "status.json", {"state": "failed", "reason": f"rank 1: {reason}\x1b[31m\u202e"})
    study = str(tmp_path / "s")
    shown = ""
    for command in (["status", study], ["collect", study], ["report", study]):
        for output in ([], ["--json"]):
            assert main([*command, *output]) == 0
            shown += capsys.readouterr().out
    shown += shown_page((tmp_path / "s" / "report.html").read_text())
    assert not [name for name, (secret, _) in SHAPES.items() if secret in shown or html.escape(secret) in shown]
    assert shown.count("rank 1: ") >= 6 * len(SHAPES)
    assert "\x1b" not in shown
    assert "\u202e" not in shown
