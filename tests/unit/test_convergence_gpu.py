"""The convergence study on an H200: judged again from its results, its pieces in order, its text without copies."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import convergence_gpu
import convergence_text
import pytest
from convergence_gpu import RESULTS, STUDY, arm_and_seed, in_order, train

from moelab.cli import main
from moelab.experiment import Experiment
from moelab.experiment_file import read_study
from moelab.notebooks import replayed_convergence
from moelab.notebooks.results import unfold

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "measurements.md").read_text()
ROWS = {"mxfp8_standard": "MXFP8", json.loads(RESULTS.read_text())["control"]: "control"}


def logged(pattern: str) -> dict[tuple[str, int], dict[int, float]]:
    """What the runs' own logs have, by arm and seed and step."""
    found = {}
    for archive in RESULTS.parent.glob(f"{RESULTS.stem}_runs_*.tar.gz"):
        with tarfile.open(archive) as tar:
            for name in tar.getnames():
                if name.endswith("train.log") and (log := tar.extractfile(name)):
                    pairs = re.findall(pattern, log.read().decode())
                    found[arm_and_seed(Path(name).parents[1])] = {int(step): float(loss) for step, loss in pairs}
    return found


def row_of(verdict: dict[str, Any]) -> list[float]:
    """The differences, seed by seed, that docs/measurements.md has."""
    last_steps, held_out = (row for row in PAGE.splitlines() if f"| {ROWS[verdict['arm']]} − BF16 |" in row)
    row = held_out if verdict["quantity"] == "held-out loss" else last_steps
    return [float(one.replace("−", "-")) for one in row.split("|")[2:-1]]


def test_the_results_are_judged_again_as_the_logs_of_the_runs_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unfold(tmp_path, json.loads(RESULTS.read_text()), read_study(STUDY))
    report = str(tmp_path / "report.html")
    assert main(["report", str(tmp_path / "convergence_gpu"), "--output", report, "--json"]) == 0
    judged = json.loads(capsys.readouterr().out)
    steps, held_out = logged(r" step: +(\d+)  loss: +(\S+)  grad"), logged(r"validate step: +(\d+)  loss: +(\S+)")
    finals = {run: statistics.fmean(losses[step] for step in range(1351, 1501)) for run, losses in steps.items()}
    lasts = {run: losses[1500] for run, losses in held_out.items()}
    assert f"> **Same loss?** {judged['summary']['Same loss?']}\n" in (ROOT / "README.md").read_text()
    # The control's difference still changes; what says so names the arm once.
    assert "margin. The difference of BF16 (lr 0.0002835) from BF16 still changes" in judged["summary"]["Same loss?"]
    assert judged["finished"] == len(finals) == len(json.loads(RESULTS.read_text())["runs"])
    assert {verdict["arm"] for verdict in judged["verdicts"]} == {arm for arm, _ in finals} - {"bf16_standard"}
    for verdict in judged["verdicts"]:
        # A log has the held-out loss with four decimals.
        ends, exact = (lasts, 1e-4) if verdict["quantity"] == "held-out loss" else (finals, 1e-6)
        apart = [ends[verdict["arm"], seed] - ends["bf16_standard", seed] for seed in verdict["seeds"]]
        assert len(apart) >= 3
        assert verdict["difference_nats"] == pytest.approx(statistics.fmean(apart), abs=exact)
        assert row_of(verdict) == pytest.approx(apart, abs=exact + 5e-5)
        of_seeds = " | ".join(f"{ends['bf16_standard', seed]:.4f}" for seed in verdict["seeds"])
        assert f" | {of_seeds} |" in PAGE


def test_the_notebook_replays_that_judgement_and_says_where_it_is_from_and_what_lacks() -> None:
    replayed, results = replayed_convergence(), json.loads(RESULTS.read_text())
    verdicts = replayed.to_json()["verdicts"]
    answers = {(one["arm"], one["answer"]) for one in verdicts}
    assert answers == {("mxfp8_standard", "equivalent"), (results["control"], "insufficient data")}
    for verdict in verdicts:
        assert len(row_of(verdict)) == len(verdict["seeds"]) == 5
        assert verdict["difference_nats"] == pytest.approx(statistics.fmean(row_of(verdict)), abs=1e-4)
    assert "replayed: measured on an H200" in replayed.loss_figure().layout.title.text
    for arm, seed in results["missing"]:
        assert re.search(rf"{re.escape(arm)}[^;]*\b{seed}\b", replayed.asides[1])


def test_pieces_go_seed_by_seed_through_the_arms_that_are_judged_first() -> None:
    order = [(one.arm, one.seed) for one in in_order(STUDY)]
    controls = [json.loads(RESULTS.read_text())["control"], "bf16_standard_lr-0.0002205"]
    first = ["bf16_standard", "mxfp8_standard", *controls]
    assert order[:20] == [(arm, seed) for seed in range(5) for arm in first]
    assert order[20:23] == [(order[20][0], seed) for seed in range(3)]
    assert len(order) == len(set(order)) == 20 + 4 * 3


def test_a_piece_trains_what_the_results_lack_and_no_more_than_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    def launch(_folder: Path, experiment: Experiment) -> subprocess.Popen[bytes]:
        started.append((experiment.arm, experiment.seed))
        return subprocess.Popen(["true"])

    monkeypatch.setattr(convergence_gpu, "launch", launch)
    monkeypatch.setattr(convergence_gpu, "POLL_S", 0.01)
    order = [(one.arm, one.seed) for one in in_order(STUDY)]
    have = [{"arm": arm, "seed": seed, "status": "completed"} for arm, seed in order[:2]]
    have.append({"arm": order[2][0], "seed": order[2][1], "status": "failed"})
    (tmp_path / "results.json").write_text(json.dumps({"runs": have}))
    # A run that completed on this machine and is not among the results yet.
    run = tmp_path / "runs" / "own" / "runs" / "s" / order[3][0] / f"seed{order[3][1]}" / "1"
    run.mkdir(parents=True)
    (run / "status.json").write_text('{"state": "completed"}')
    train(tmp_path / "runs", study=STUDY, results=tmp_path / "results.json", at_once=2, most=3)
    assert started == [order[2], *order[4:6]]


def test_a_paragraph_that_stood_before_is_left_out_and_its_document_with_it() -> None:
    def paragraph(name: str) -> str:
        return "\n".join(f"the {name} of line number {line} is told here" for line in range(20))

    one, two, three = map(paragraph, ("tale", "song", "poem"))
    again = one.replace("line number 3", "verse number 3")  # one line is another: a near copy
    documents = [
        ("a", f"{one}\n\n{two}"),
        ("b", f"{again}\n\n{three}\n\n\n{two}"),
        ("c", f"  {three}"),
        ("d", "x" * 600),
    ]
    assert convergence_text._sieved(documents) == [("a", f"{one}\n\n{two}\n"), ("b", f"{three}\n")]
