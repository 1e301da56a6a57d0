"""What a report does with a run whose files are missing or damaged: that run is degraded by name, the others judged."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_support import ENVIRONMENT, record_machine, train

from moelab.cli import main
from moelab.experiment import Experiment
from moelab.judge.report import judge_study
from moelab.machine import environment
from moelab.runs.collect import collect_run
from moelab.runs.directory import RunDir
from moelab.runs.side_files import Environment, read_side_files
from moelab.viz import report as page
from moelab.viz.report import provenance

SOUND = (0, 1, 2)


def changed(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[bytes], bytes]:
    return lambda content: json.dumps(change(json.loads(content))).encode()


CONTENT: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "cut": lambda content: content[: len(content) // 2],
    "list": lambda content: b"[]",
    "null": lambda content: b"null",
    "number": lambda content: b"7",
    "mapping": lambda content: b"{}",
    "deep": lambda content: b"[" * 100_000,
    "binary": lambda content: bytes(range(256)) * 4,
    "wrong types": changed(lambda held: {k: [1.5] if isinstance(v, str | int) else "?" for k, v in held.items()}),
    "NaN": changed(lambda held: {**held, next(iter(held)): float("nan")}),
}
DAMAGES = (*CONTENT, "missing", "folder", "unreadable", "dangling link", "link to itself")
RECORDS = ("launch/converted/rank0.json", "launch/dispatcher.json")
JSON_FILES = ("environment.json", *RECORDS, "status.json", "results.json")
OTHER_FILES = ("launch/command.sh", "logs/train.log", "metrics.jsonl", "experiment.yaml")


def damage(file: Path, kind: str) -> None:
    """Leave a file as a kill, a full disk or a hand may leave it."""
    if kind in CONTENT:
        file.write_bytes(CONTENT[kind](file.read_bytes()))
        return
    if kind == "unreadable":
        file.chmod(0)
        return
    file.unlink()
    if kind == "folder":
        file.mkdir()
    elif kind != "missing":
        file.symlink_to(file if kind == "link to itself" else file.with_name("nothing"))


def run_of(study: Path, precision: str, seed: int) -> RunDir:
    """A run of eight steps with every file that there may be."""
    losses = [4.0 + 0.01 * (seed % 3) + (0.001 if precision == "mxfp8" else 0.0)] * 8
    run = train(study, precision, seed, losses, steps=8, warmup_steps=1)
    dispatcher = {"dispatcher": "AllToAllTokenDispatcher", "alignment": 16}
    (run.path / "launch" / "dispatcher.json").write_text(json.dumps(dispatcher))
    (run.path / "results.json").write_text(json.dumps({"steps": 8}))
    return run


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of BF16 and MXFP8, and a further seed of MXFP8 for each damage."""
    study = tmp_path_factory.mktemp("sound") / "s"
    for seed in SOUND:
        run_of(study, "bf16", seed)
    for seed in range(len(SOUND) + len(DAMAGES)):
        run_of(study, "mxfp8", seed)
    return study


def reported(capsys: pytest.CaptureFixture[str], *paths: Path) -> dict[str, Any]:
    """What the command says, whatever it took to write the page too."""
    assert main(["report", *map(str, paths), "--json", "--output", str(paths[0] / "report.html")]) == 0
    return dict(json.loads(capsys.readouterr().out))


@pytest.mark.parametrize("name", [*JSON_FILES, *OTHER_FILES])
def test_a_damaged_file_degrades_its_run_by_name_and_no_other(
    sound: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "report_figures", lambda judged: {})  # most of the time; drawn in the test below
    study = shutil.copytree(sound, tmp_path / "s")
    damaged = {}
    for seed, kind in enumerate(DAMAGES, start=len(SOUND)):
        if kind in ("wrong types", "NaN") and name not in JSON_FILES:
            continue
        if kind == "unreadable" and os.geteuid() == 0:  # nothing is unreadable to root
            continue
        (run,) = (study / "mxfp8_standard" / f"seed{seed}").iterdir()
        damage(run / name, kind)
        damaged[seed] = kind
    as_json = reported(capsys, study)
    rows = {row["seed"]: row for row in as_json["runs"] if row["arm"] == "mxfp8_standard"}
    assert set(rows) == set(range(len(SOUND) + len(DAMAGES)))
    assert tuple(as_json["verdicts"][0]["seeds"]) == SOUND
    assert all(rows[seed]["used"] and not rows[seed]["damaged"] for seed in SOUND)
    for seed, kind in damaged.items():
        words = " ".join([*rows[seed]["damaged"], rows[seed].get("reason", "")])
        _expect(name, kind, rows[seed], words)


def _expect(name: str, kind: str, row: dict[str, Any], words: str) -> None:
    """What becomes of one run, by the file of it that is damaged."""
    about = f"{name}, {kind}: {row}"
    is_judged = name not in ("status.json", "experiment.yaml", "metrics.jsonl")
    assert row["used"] == is_judged, about
    if name in ("results.json", "logs/train.log"):  # never read
        assert words == "", about
    elif name == "metrics.jsonl":
        assert "0 of 8 steps logged" in words or kind == "cut", about
        assert name in words or kind in CONTENT, about
    elif not is_judged:
        assert name in words, about
    else:
        optional = name in ("launch/dispatcher.json", "launch/command.sh") and kind in ("missing", "dangling link")
        reads_anyway = name == "launch/command.sh" and kind in CONTENT and kind != "binary"
        assert optional or reads_anyway or Path(name).name in words or "converted has no record" in words, about
        assert (row["machine"] is None) == (name == "environment.json"), about


def test_a_study_with_every_damage_is_drawn_and_has_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names, study = [*JSON_FILES, *OTHER_FILES], tmp_path / "s"
    for seed in range(len(names) + 1):
        run_of(study, "bf16", seed)
        run = run_of(study, "mxfp8", seed)
        if seed < len(names):
            damage(run.path / names[seed], "binary")
    assert reported(capsys, study)["verdicts"][0]["answer"]
    shown = (study / "report.html").read_text()
    words = "environment.json is damaged: machine and versions unknown"
    assert words in shown
    assert "experiment.yaml: " in shown
    side_by_side = reported(capsys, study, study / "bf16_standard")
    assert words in side_by_side["note"]
    assert len(side_by_side["runs"]) == 3 * len(names) + 3


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=40)
@given(
    changes=st.dictionaries(st.sampled_from(sorted(ENVIRONMENT)), JSON_VALUES, max_size=3),
    dropped=st.sets(st.sampled_from(sorted(ENVIRONMENT)), max_size=2),
    content=st.none() | st.binary(max_size=30),
)
def test_an_environment_is_known_or_unknown_and_says_which(
    tmp_path_factory: pytest.TempPathFactory, changes: dict[str, Any], dropped: set[str], content: bytes | None
) -> None:
    folder = tmp_path_factory.getbasetemp() / "environment"
    folder.mkdir(exist_ok=True)
    kept = {name: value for name, value in {**ENVIRONMENT, **changes}.items() if name not in dropped}
    (folder / "environment.json").write_bytes(json.dumps(kept).encode() if content is None else content)
    files = read_side_files(RunDir(folder), Experiment(), started=True)
    if files.environment is None:
        assert files.damaged == ("environment.json is damaged: machine and versions unknown",)
    else:
        assert (content is None, files.damaged) == (True, ())
        assert files.environment.machine
        assert all(files.environment.versions.values())


def test_what_a_launcher_writes_is_read() -> None:
    written = Environment.model_validate_json(json.dumps(environment(nodes=2)))
    assert written.machine.endswith("on each of 2 hosts")
    assert written.versions["torch"]


def test_ranks_that_disagree_are_told(tmp_path: Path) -> None:
    run = run_of(tmp_path / "s", "mxfp8", 0)
    other = {"kernels": "native", "modules": ["layers.9"]}
    (run.path / "launch" / "converted" / "rank4.json").write_text(json.dumps(other))
    one = collect_run(run)
    assert one.damaged == ("launch/converted: ranks disagree on the MXFP8 kernels (rank0 emulated, rank4 native)",)
    assert one.converted == {"kernels": "emulated and native", "modules": ["layers.1.moe.experts", "layers.9"]}
    assert (one.emulates_products, one.speed_known) == (True, False)


def test_what_is_unknown_makes_no_gain_and_is_told_in_the_provenance(tmp_path: Path) -> None:
    study = tmp_path / "s"
    for seed in SOUND:
        run_of(study, "bf16", seed)
        shutil.rmtree(run_of(study, "mxfp8", seed).path / "launch" / "converted")  # emulated ones would seem real
    last = run_of(study, "bf16", 3).path / "environment.json"
    record_machine(study, gpus=[{"name": "NVIDIA H100"}])
    damage(last, "cut")
    judged = judge_study(study)
    assert judged.gains == []
    assert "one of the arms has no run whose machine and kernels are known" in judged.summary["Faster?"]
    assert "launch/converted has no record: which modules ran in MXFP8 is unknown" in judged.as_text()
    assert provenance(judged)["machine"] == "1 × NVIDIA H100 in 6 runs, unknown in 1 run"
    assert provenance(judged)["torch"] == "2.14.0 in 6 runs, unknown in 1 run"
