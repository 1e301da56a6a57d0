"""The command line: what it loads, its exit codes, and that stdout holds the result and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import stand_in
from run_support import make_run

import moelab
from moelab.experiment import Experiment
from moelab.experiment_file import read_experiment, read_study
from moelab.launch import local
from moelab.launch.slurm import Ticket
from moelab.runs.status import State

ROOT = Path(__file__).parents[2]
PUBLISHED = f"{ROOT}/studies/671B_b200_x256.yaml"


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("command", "stage_data", "POLL_S"):
        monkeypatch.setattr(local, name, getattr(local, name))


@pytest.fixture
def study(tmp_path: Path) -> Path:
    file = tmp_path / "study.yaml"
    file.write_text("study: s\nexperiment: {steps: 5, hardware: cpu}\narms: [{precision: bf16}, {precision: mxfp8}]\n")
    return file


MAIN = "from moelab.cli import main\nmain({})"
LIGHT = "import moelab.planning.project, moelab.planning.advice, moelab.titan.verify, moelab.privacy"


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("import contextlib\nfrom moelab.cli import main\nwith contextlib.suppress(SystemExit): main(['--help'])",
         "torch torchtitan torchao plotly pandas numpy scipy papermill"),
        (MAIN.format(["doctor"]), "torch torchtitan torchao plotly"),
        (MAIN.format(["run", "/no/such"]), "torch torchtitan torchao plotly"),
        ("import moelab.judge.report, moelab.runs", "torch tensorboard plotly"),
        (LIGHT, "torch torchtitan plotly pandas detect_secrets"),
        (MAIN.format(["plan", PUBLISHED]), "torch pandas numpy plotly torchtitan"),
        (MAIN.format(["plan", PUBLISHED, "--search", "--arm", "bf16_deepep", "--set", "pp=2"]),
         "torch pandas plotly torchtitan"),
    ],
)  # fmt: skip
def test_nothing_heavy_is_loaded(code: str, heavy: str) -> None:
    check = f"import sys\n{code}\nloaded = set({heavy.split()}) & sys.modules.keys()\nassert not loaded, loaded"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr


def test_version_and_a_reader_that_stops_reading() -> None:
    python = f"{sys.executable} -m moelab"
    for command, printed in (
        ("--version", f"moelab {moelab.__version__}\n"),
        (f"plan {PUBLISHED} | head -c 5", "legal"),
    ):
        done = subprocess.run(["bash", "-c", f"{python} {command}"], capture_output=True, text=True, check=True)
        assert (done.stdout, done.stderr) == (printed, "")


WRONG = {
    "": "usage: moelab",
    "fly": "usage: moelab",
    "run": "usage: moelab",
    "report": "usage: moelab",
    "collect": "usage: moelab",
    "run f --on-failure x": "usage: moelab",
    "report f --margin wide": "--margin",
    "plan f --limit=x": "--limit",
    "plan nano --search --limit=0": "moelab: limit: got 0; valid: a whole number of at least 1",
    "plan f --limit 8": "moelab: --limit requires --search",
    "plan f --verify --search": "moelab: --verify applies to a single plan; leave out --search",
    "plan nano --set limit=3": "moelab: unknown field 'limit'",
    "submit nano": "--cluster",
    "plan": "moelab: give the FILE of an experiment or study, a model with --from-hf, or both",
    "project": "moelab: give the FILE of an experiment or study, a model with --from-hf, or both",
    "plan nano --set hardware=b300": "there is no such profile",
    "plan nano --search --arm bf16_standard --set hardware=b300": "there is no such profile",
    "plan nano --set model=Qwen3-235B-A22B": "--from-hf",
    **{f"{verb} /no/where --json": "/no/where" for verb in ("run", "status", "collect", "report", "plan")},
}


@pytest.mark.parametrize("arguments", WRONG)
def test_a_command_line_that_is_wrong(call: Any, arguments: str) -> None:
    done = call(*arguments.split())
    assert (done.code, done.out) == (2, "")
    assert WRONG[arguments] in done.err
    assert done.err.startswith("usage: ") or (done.err.startswith("moelab: ") and done.err.count("\n") == 1)


def test_a_run_prints_its_result_on_stdout_and_its_progress_on_stderr(call: Any, study: Path, tmp_path: Path) -> None:
    stand_in.install({"mxfp8_standard/seed0": "die"})
    done = call("run", study, "--runs", tmp_path / "runs", "--json")
    assert done.code == 1
    first, second = done.json["runs"]
    assert (done.json["study"], done.json["trained"]) == ("s", 2)
    assert (first["status"], first["reason"]) == ("completed", None)
    assert (second["status"], second["reason"]) == ("failed", "rank 1: ValueError: the vocabulary is too small")
    assert first["run"].startswith("s/bf16_standard/seed0/")
    assert "| starting" in done.err
    assert "| completed" in done.err
    stand_in.install()
    done = call("run", study, "--runs", tmp_path / "runs")
    assert done.code == 0
    assert done.out.splitlines()[-1] == "s: 2 of 2 complete, 1 trained now"
    assert " | " not in done.out
    done = call("run", study, "--runs", tmp_path / "runs", "--json")
    assert (done.code, done.json["trained"], done.err) == (0, 0, "")


def test_bad_input_is_2_and_a_refusal_is_3_and_neither_writes(call: Any, study: Path, tmp_path: Path) -> None:
    for arguments, code in ((("--set", "steps=0"), 2), (("--set", "arms=[{precision: fp8}]"), 3)):
        done = call("run", study, "--runs", tmp_path / "runs", "--json", *arguments)
        assert (done.code, done.out) == (code, "")
        assert done.err.startswith("moelab: ")
        assert list(tmp_path.iterdir()) == [study]


def test_an_experiment_is_written_whole_or_not_at_all(call: Any, study: Path, tmp_path: Path) -> None:
    written, folder = tmp_path / "plans" / "one.yaml", tmp_path / "folder"
    arguments = ("plan", study, "--arm", "mxfp8_standard", "--set", "hardware=b200_node", "--write")
    assert call(*arguments, written).code == 0
    before = written.read_text()
    assert read_experiment(written).arm == "mxfp8_standard"
    folder.mkdir()
    assert call(*arguments, folder).err == f"moelab: {folder}: Is a directory\n"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", Mock(side_effect=OSError(28, "No space left on device")))
        assert call(*arguments, written, "--set", "steps=9").code == 1
    assert (written.read_text(), list(written.parent.iterdir())) == (before, [written])


def test_status(call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path, Experiment(name="s"), [8.0], state=State.FAILED, reason="rank 0: ValueError: x")
    done = call("status", tmp_path, "--json")
    assert (done.code, done.err) == (0, "")
    row = {"run": run.name, "status": "failed", "reason": "rank 0: ValueError: x", "job_id": None}
    assert done.json == {"runs": [row], "left_out": [], "notes": []}
    assert call("status", tmp_path).out == f"{run.name}: failed: rank 0: ValueError: x\n"
    monkeypatch.chdir(run.path)
    assert call("status", "..").out.startswith(run.name)
    (run.path / "status.json").unlink()
    assert call("status", tmp_path, "--json").json["runs"][0]["status"] == "unknown"


def test_a_folder_without_runs(call: Any, tmp_path: Path) -> None:
    assert call("status", tmp_path, "--json").json == {"runs": [], "left_out": [], "notes": []}
    assert call("status", tmp_path).out == f"no runs at {tmp_path}\n"
    for verb in ("cancel", "requeue"):  # without asking Slurm
        done = call(verb, tmp_path)
        assert (done.code, done.out, done.err.startswith("moelab: no run there ")) == (3, "", True)


def test_collect(call: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path, Experiment(name="s", steps=3), [8.0, 7.5, float("nan")], held_out=7.25)
    done = call("collect", tmp_path, "--json")
    assert (done.code, done.err) == (0, "")
    (one,) = done.json["runs"]
    assert (one["run"], one["status"], one["reason"]) == (run.name, "failed", "loss is nan at step 3 (segment 0)")
    assert [(row["step"], row["loss"]) for row in one["rows"]] == [(1, 8.0), (2, 7.5), (3, None)]
    assert [row["loss"] for row in one["validation"]] == [7.25]
    text = call("collect", run.path)
    rows = "3 rows to step 3 in 1 segment(s), loss 8.000 to 7.500, 1.5 GiB"
    assert text.out == f"{run.name}: failed, {rows}; {one['reason']}\n"


def test_report(call: Any, tmp_path: Path) -> None:
    for precision in ("bf16", "mxfp8"):
        for seed in range(3):
            losses = [8.0 - 0.2 * step - 0.01 * seed for step in range(10)]
            make_run(tmp_path, Experiment(name="s", steps=10, precision=precision, seed=seed), losses)
    done = call("report", tmp_path / "s", "--margin", "0.05", "--json")
    assert (done.code, done.err) == (0, "")
    assert (done.json["finished"], done.json["verdicts"][0]["answer"]) == (6, "equivalent")
    assert Path(done.json["report"]) == tmp_path / "s" / "report.html"
    assert call("report", tmp_path / "s", "--output", tmp_path / "r.html").out.endswith(f"report: {tmp_path}/r.html\n")
    for arguments in (("--margin", "0"), ("--margin", "nan"), ("--reference", "fp8_standard")):
        wrong = call("report", tmp_path / "s", *arguments)
        assert (wrong.code, wrong.out) == (2, "")
    assert call("report", tmp_path / "s", "--margin", "wide").code == 2


def test_a_study_over_any_field_from_its_plan_to_its_report(call: Any, tmp_path: Path) -> None:
    file = tmp_path / "any.yaml"
    others = {
        "activation_checkpoint: full": "activation-checkpoint-full",
        "compile: loss": "compile-loss",
        "lr: 1e-05": "lr-1e-05",
        "shape: {n_layers: 3}": "n-layers-3",
    }
    arms = "".join(f"- {{{fields}}}\n" for fields in ("", *others))
    file.write_text(f"study: s\nexperiment: {{steps: 5, hardware: cpu}}\nseeds: [0, 1, 2]\narms:\n{arms}")
    names = ["bf16_standard", *(f"bf16_standard_{name}" for name in others.values())]
    assert [plan["arm"] for plan in call("plan", file, "--json").json["plans"]] == names
    call("plan", file, "--arm", names[3], "--write", tmp_path / "one.yaml")
    assert (read_experiment(tmp_path / "one.yaml").arm, read_experiment(tmp_path / "one.yaml").lr) == (names[3], 1e-5)
    for experiment in read_study(file).experiments:
        run = make_run(tmp_path / "runs", experiment, [8.0, 7.0, 6.0, 5.0, 4.0 + 0.01 * experiment.seed])
        assert (run.path.parts[-3], run.arm) == (experiment.arm, experiment.arm)
    report = call("report", tmp_path / "runs" / "s", "--json").json
    assert sorted(verdict["arm"] for verdict in report["verdicts"]) == sorted(names[1:])
    done = call("run", file, "--runs", tmp_path / "runs", "--json")
    assert (done.code, done.json["trained"], len(done.json["runs"])) == (0, 0, 15)


def test_one_bad_record_hides_no_good_one(call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moelab.launch.slurm.queue", list)
    runs = [
        make_run(tmp_path, Experiment(name="s", hardware="cpu", steps=2, seed=seed), [8.0, 7.0], state=state)
        for seed, state in enumerate((State.COMPLETED, State.PREPARED, State.COMPLETED))
    ]
    cut, lost = runs[1:]
    Ticket(comment="moelab:s:1", task=0).write(cut)
    record = cut.path / "experiment.yaml"
    record.write_text(record.read_text()[:200])
    (lost.path / "status.json").write_text("{")
    left_out = [{"run": cut.name, "path": str(cut.path)}]
    for verb in ("status", "collect", "cancel"):
        found = call(verb, tmp_path, "--json").json
        assert [{"run": one["run"], "path": one["path"]} for one in found["left_out"]] == left_out
        assert "experiment.yaml: the record was cut off" in found["left_out"][0]["reason"]
        states = {row["run"]: (row["status"], row["reason"]) for row in found["runs"]}
        assert states[runs[0].name] == ("completed", None)
        assert states[lost.name][0] == "unknown"
        assert "status.json is damaged: Invalid JSON" in states[lost.name][1]
        assert f"{cut.name}: left out: experiment.yaml" in call(verb, tmp_path).out
    assert cut.status.state is State.CANCELLED


def test_one_arm_of_a_study_is_submitted(call: Any, study: Path) -> None:
    done = call("submit", study, "--arm", "mxfp8_standard", "--cluster", "slurm_generic", "--dry-run")
    assert (done.code, "mxfp8_standard" in done.out, "bf16_standard" in done.out) == (0, True, False)
