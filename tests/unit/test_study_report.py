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
from run_support import ENDS, STEPS, curve, make_run, make_study, record_machine, record_native, train
from secret_shapes import SHAPES
from stand_in import validation_line

from moelab.cli import main
from moelab.errors import BadInput
from moelab.experiment import Experiment
from moelab.experiment_file import Study
from moelab.files import write_json
from moelab.judge.report import NothingToJudge, judge_study
from moelab.runs.directory import find
from moelab.runs.status import State
from moelab.viz.report import provenance, report_figures, write_study_report

FAILED = {"losses": [8.0], "state": State.FAILED, "reason": "rank 0: ValueError: x"}


@pytest.fixture
def study(tmp_path: Path) -> Path:
    return make_study(tmp_path / "runs")


def page_of(study: Path, **options: bool) -> str:
    return write_study_report(judge_study(study), study / "report.html", **options).read_text(encoding="utf-8")


def test_the_verdict_of_known_numbers(study: Path) -> None:
    record_machine(study, gpus=[{"name": "NVIDIA B200", "driver": "580.1"}] * 2)
    record_native(study)
    judged = judge_study(study)
    (verdict,), (held_out,), (gain,) = judged.verdicts, judged.held_out, judged.gains
    assert verdict.mean_difference_nats == pytest.approx(0.0035, abs=1e-5)
    assert held_out.mean_difference_nats == pytest.approx(0.0035, abs=1e-4)
    assert "nats in held-out loss (" in held_out.sentence()
    assert (verdict.reference_losses, gain.ratio) == (pytest.approx(ENDS, abs=1e-5), pytest.approx(0.5))
    text = judged.as_text()
    assert "\n8 of 8 runs finished\nMXFP8 differs from BF16 (both standard all-to-all) by +0.0035 nats" in text
    assert all(words in text for words in ("500 tokens/s per GPU", "-50.0 %"))
    as_json = json.loads(json.dumps(judged.to_json(), allow_nan=False))
    assert (as_json["study"], as_json["finished"], as_json["judged"], len(as_json["runs"])) == ("s", 8, 8, 8)
    assert [one["answer"] for one in as_json["verdicts"]] == ["equivalent", "equivalent"]
    assert as_json["tps"] == {"bf16_standard": pytest.approx(1000), "mxfp8_standard": pytest.approx(500)}


@pytest.mark.parametrize(
    ("runs", "finished", "words"),
    [
        ({"bf16": {}}, ["bf16_standard"], "1 of 1 runs finished"),
        ({"bf16": FAILED, "mxfp8": {}}, ["mxfp8_standard"], "Same loss? Not known: no run of the reference finished."),
    ],
)
def test_a_study_without_a_verdict(tmp_path: Path, runs: dict[str, Any], finished: list[str], words: str) -> None:
    for precision, options in runs.items():
        train(tmp_path / "s", precision, **options)
    judged = judge_study(tmp_path / "s")
    assert [side.name for side in judged.sides if side.finished] == finished
    assert [*judged.verdicts, *judged.gains, *judged.held_out] == []
    assert words in judged.as_text()
    assert len(runs) == 1 or FAILED["reason"] in page_of(tmp_path / "s")


def test_one_seed_of_two_steps(tmp_path: Path) -> None:
    for precision in ("bf16", "mxfp8"):
        train(tmp_path / "s", precision, 0, [5.0, 4.9], steps=2)
    judged = judge_study(tmp_path / "s")
    (verdict,) = json.loads(json.dumps(judged.to_json(), allow_nan=False))["verdicts"]
    numbers = (verdict["answer"], verdict["interval_nats"], verdict["margin_nats"])
    assert numbers == ("insufficient data", [None, None], None)
    assert (judged.throughput, "tokens/s per rank" in judged.as_text()) == ([], False)
    assert "nats in the loss of step 2 (" in judged.as_text()
    words = "Not decided: MXFP8 ends +0.0000 nats from BF16 (1 seed): insufficient data."
    assert judged.summary["Same loss?"] == words
    assert "loss" in page_of(tmp_path / "s")


def test_nothing_finished(tmp_path: Path) -> None:
    train(tmp_path / "s", **FAILED)
    train(tmp_path / "s", "mxfp8", 0, [*curve(5.0)[:-1], math.nan])
    train(tmp_path / "s", "mxfp8", 1, curve(5.0)[:-1])
    with pytest.raises(NothingToJudge) as refused:
        judge_study(tmp_path / "s")
    first, *rest = str(refused.value).splitlines()
    assert (refused.value.exit_code, first) == (1, "no run of s finished:")
    assert [line.split(": ", 1)[1] for line in rest] == [
        f"failed: rank 0: ValueError: x, 1 of {STEPS} steps logged",
        f"diverged: loss is nan at step {STEPS} (segment 0)",
        f"completed, {STEPS - 1} of {STEPS} steps logged",
    ]


def test_a_held_out_loss_that_is_nan_or_missing(tmp_path: Path) -> None:
    some, reference = tmp_path / "some", tmp_path / "reference"
    for seed in range(4):
        train(some, "bf16", seed, held_out=5.5 + seed / 100)
        train(some, "mxfp8", seed, held_out=math.nan if seed == 0 else 5.5 + seed / 100)
        train(reference, "bf16", seed, held_out=math.nan)
        train(reference, "mxfp8", seed, held_out=5.5)
    train(some, "bf16", 4, held_out=5.5)
    train(some, "mxfp8", 4)
    short = train(some, "mxfp8", 5)
    short.log.write_text(short.log.read_text() + validation_line(STEPS // 2, 7.5))
    (none,) = judge_study(reference).held_out
    assert none.sentence().startswith("Insufficient data: 4 of 4 seeds diverged in the reference BF16 and not in MXFP8")
    judged = judge_study(some)
    (held_out,) = judged.held_out
    assert held_out.seeds == (1, 2, 3)
    words = "Different: 1 of 6 seeds diverged in MXFP8 and not in BF16 (seed 0: the held-out loss is nan)"
    assert held_out.sentence().startswith(words)
    assert f"MXFP8, seeds 4, 5: no held-out loss was logged at step {STEPS}" in held_out.sentence()
    json.dumps(judged.to_json(), allow_nan=False)
    shown = shown_page(page_of(some)).replace("the held-out loss is nan", "")
    assert not re.search(r"\bnan\b", shown, re.I)


def test_a_study_that_is_given_decides_which_settings_are_judged(study: Path) -> None:
    """All of BF16 was trained again with another learning rate: as many runs, and the study says which are meant."""
    old = [run.experiment for run in find(study)]
    new = [train(study, "bf16", seed, curve(4.0), lr=1.0e-2).experiment for seed in range(4)]
    judged = judge_study(study, study=Study(name="s", experiments=tuple(old)))
    assert judged.verdicts[0].reference_losses == pytest.approx(ENDS, abs=1e-5)
    planned = [*new, *(one for one in old if one.precision == "mxfp8")]
    mixed = judge_study(study, study=Study(name="s", experiments=tuple(planned)))
    words = "The arms also differ in their settings: lr 0.003 instead of 0.01."
    assert [words in one.verdicts[0].sentence() for one in (judged, mixed)] == [False, True]


def test_a_study_is_the_same_from_anywhere(study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def contents(path: Path) -> tuple[Any, ...]:
        judged = judge_study(path)
        return judged.study, judged.as_text(), judged.to_json(), {**provenance(judged), "Written": "", "Command": ""}

    before = contents(study)
    assert [side.name for side in judge_study(study / "bf16_standard").sides] == ["bf16_standard"]
    (study.parent / "latest").symlink_to(study)
    for folder, path in ((study, "."), (study / "bf16_standard", ".."), (study.parent, "s"), (study.parent, "latest")):
        monkeypatch.chdir(folder)
        assert contents(Path(path)) == before
    shutil.move(study, tmp_path / "elsewhere" / "s")
    assert contents(tmp_path / "elsewhere" / "s") == before


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
        with pytest.raises(BadInput, match=path.name):
            judge_study(path)


def test_a_report_answers_three_questions_first(study: Path) -> None:
    def summary(kernels: str, **environment: Any) -> list[str]:
        record_machine(study, **environment)
        for record in study.glob("*/*/*/launch/converted/*.json"):
            write_json(record, {"kernels": kernels, "modules": ["layers.1.moe.experts"]})
        return list(judge_study(study).summary.values())

    def has_throughput() -> bool:
        return any(caption.startswith("Throughput") for caption in report_figures(judge_study(study)))

    faster, loss, what = summary("emulated")
    over = "Not measured for MXFP8 over BF16 (both standard all-to-all): "
    assert faster == f"{over}a CPU process stands in for a GPU."
    assert loss.startswith("Yes: MXFP8 ends +0.0035 nats from BF16 (95 % interval ")
    work = "EP 2, sequences of 256 tokens, local batch 4, learning rate 0.003; 20 steps, 4 seeds each."
    assert (what, has_throughput()) == (f"nano on 2 processes of A processor, {work}", False)
    faster, _, what = summary("native", gpus=[{"name": "NVIDIA B200", "driver": "580.1"}] * 2)
    assert faster.startswith("MXFP8 over BF16 (both standard all-to-all): -50.0 % tokens/s (95 % interval ")
    assert faster.endswith("n = 4 seeds).")  # and its sign is known
    assert (what, has_throughput()) == (f"nano on 2 × NVIDIA B200, {work}", True)
    faster, _, _ = summary("emulated", gpus=[{"name": "NVIDIA H100", "driver": "580.1"}] * 2)
    assert faster == f"{over}emulated kernels are slower than real ones."
    faster = judge_study(study, reference="mxfp8_standard").summary["Faster?"]
    assert faster.endswith("BF16 over MXFP8 (both standard all-to-all): emulated kernels are slower than real ones.")
    page = html.unescape(page_of(study))
    assert "The same in all: model nano · " in page
    assert all(f" · {words} · " in page for words in ("seq_len 256", "local_batch 4", "gpu NVIDIA H100"))
    train(study, "fp8", 0, [*curve(5.0)[:-1], math.nan])
    assert "No: different: " in judge_study(study).summary["Same loss?"]


def test_a_report_of_sixteen_long_runs_is_below_2_mb(tmp_path: Path) -> None:
    noise = np.random.default_rng(0)
    for seed in range(8):
        for precision in ("bf16", "mxfp8"):
            losses = 3 + 5 * np.exp(-np.arange(1500) / 400) + noise.normal(0, 0.02, 1500)
            train(tmp_path / "s", precision, seed, losses.tolist(), steps=1500)
    assert len(page_of(tmp_path / "s").encode()) < 2_000_000


HOSTILE = "rank 0: ValueError: <script>alert(1)</script>\"'><img src=x onerror=alert(2)> {{ 7 * 7 }}"


def test_a_page_is_private_inert_and_offline(study: Path) -> None:
    full = f"the launcher failed: [Errno 28] No space left on device: '{study}/bf16_standard/x/metrics.parquet'"
    for seed, reason in enumerate((full, HOSTILE, "WANDB_API_KEY=0123abc was refused"), start=7):
        train(study, "bf16", seed, **FAILED | {"reason": reason})
    torch = {"torch": f"{HOSTILE} /home/alice"}  # a machine's own words reach the page too
    record_machine(study, "mxfp8_standard/*", gpus=[{"name": HOSTILE}], processor=HOSTILE, packages=torch)
    (train(study, "bf16", 10).path / "launch" / "command.sh").write_text("'X=/home/alice smith/s/x.yaml' python\n")
    page = shown_page(page_of(study))
    assert "<script>alert(1)" not in page
    assert "<img src=x" not in page
    assert not re.search(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//""", page)
    assert page.count("<!DOCTYPE html>") == 1
    text = html.unescape(page)
    emulated, space = "emulated MXFP8 kernels: no measure of speed", "No space left on device: '…/metrics.parquet'"
    assert all(words in text for words in (HOSTILE, emulated, space))
    names = [str(study.parents[1]), f"{Path.home()}/", "/home/", "alice", "smith", "/tmp/", socket.gethostname()]
    assert [name for name in names if name in text] == []
    assert getpass.getuser() == "root" or getpass.getuser() not in text
    with_paths = html.unescape(shown_page(page_of(study, with_paths=True)))
    assert f"--dump_folder {study}/bf16_standard/seed" in with_paths
    assert "WANDB_API_KEY=*** was refused" in with_paths  # keys stay hidden all the same


def test_no_shape_of_a_secret_in_a_reason_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study, shown = tmp_path / "s", ""
    for seed in range(2):
        train(study, "bf16", seed, [8.0, 7.0, 6.0], steps=3)
    for seed, (secret, text) in enumerate(SHAPES.values(), start=2):
        reason = text.replace("{}", secret).replace("{{", "{").replace("}}", "}")
        run = train(study, "bf16", seed, [8.0], steps=3)
        write_json(run.path / "status.json", {"state": "failed", "reason": f"rank 1: {reason}\x1b[31m\u202e"})
    for command in ("status", "collect", "report"):
        for output in ([], ["--json"]):
            assert main([command, str(study), *output]) == 0
            shown += capsys.readouterr().out
    shown += shown_page((study / "report.html").read_text())
    assert not [name for name, (secret, _) in SHAPES.items() if secret in shown or html.escape(secret) in shown]
    assert shown.count("rank 1: ") >= 6 * len(SHAPES)
    assert not {"\x1b", "\u202e"} & set(shown)
