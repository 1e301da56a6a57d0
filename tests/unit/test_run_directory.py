"""The run directory and its files: whole at any instant, found again, and the same name everywhere."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from moelab.errors import BadInput
from moelab.experiment import Experiment
from moelab.experiment_file import make_study
from moelab.files import read_json, write_json, write_whole
from moelab.launch.ends import only_launcher
from moelab.runs import directory
from moelab.runs.directory import RunDir
from moelab.runs.status import RESERVE, RESERVE_BYTES, State, Status

EXPERIMENT = Experiment(name="s", precision="mxfp8", seed=3)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_new_run_has_its_place_its_experiment_and_its_status(tmp_path: Path) -> None:
    run, *others = (directory.create(tmp_path, EXPERIMENT) for _ in range(20))  # within one second
    place, _, stamp = run.name.rpartition("/")
    assert (place, str(run.path)) == ("s/mxfp8_standard/seed3", f"{tmp_path}/{run.name}")
    assert re.fullmatch(r"\d{8}T\d{6}Z-[0-9a-f]{6}", stamp)
    assert names(run.path) == {"experiment.yaml", "status.json", "launch", "logs", "tb", RESERVE}
    assert (run.experiment, run.status.state) == (EXPERIMENT, State.PREPARED)
    assert len({run, *others}) == 20


def test_attempts_are_of_exactly_this_experiment(tmp_path: Path) -> None:
    mine, older = (directory.create(tmp_path, EXPERIMENT) for _ in range(2))
    record = older.path / "experiment.yaml"  # as moelab 0.2 wrote it
    text = record.read_text().replace("validate_every: 0\noverrides: []\n", "")
    record.write_text(re.sub("record_version: .", "record_version: 3", text))
    for changes in ({"steps": 61}, {"lr": 3.1e-3}, {"model": "debug"}, {"seed": 4}, {"precision": "bf16"}):
        directory.create(tmp_path, Experiment(**{**EXPERIMENT.model_dump(), **changes}))
    newer = directory.create(tmp_path, EXPERIMENT.model_copy(update={"steps": 62}))
    (newer.path / "experiment.yaml").write_text("name: s\na_field_of_the_future: 1\n")
    (tmp_path / "experiment.yaml").write_text("study: s\nseeds: [0, 1]\n")  # a person's own is no run
    discovered = directory.discover(tmp_path)
    assert {run.path for run in discovered.attempts(EXPERIMENT)} == {mine.path, older.path}
    assert (len(discovered.runs), [one.run for one in discovered.left_out]) == (7, [newer])
    assert len(directory.find(tmp_path)) == 8


def test_attempts_are_found_whatever_their_arm_is_called(tmp_path: Path) -> None:
    fast, slow = {"lr": 3e-3}, {"lr": 1e-3}
    for one in make_study("s", {}, [fast, slow], [0]).experiments:
        directory.create(tmp_path, one)
    discovered = directory.discover(tmp_path)
    for experiment in make_study("s", {}, [slow, fast], [0]).experiments:
        assert [run.experiment.lr for run in discovered.attempts(experiment)] == [experiment.lr]


def test_a_run_has_one_name_however_it_is_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = directory.create(tmp_path / "runs", EXPERIMENT)
    (tmp_path / "link").symlink_to(tmp_path / "runs")
    monkeypatch.chdir(run.path)
    for path in (Path(), Path("..", run.path.name), Path("../../../../link", run.name)):
        assert RunDir(path).name == run.name


# Which runs are used


def test_a_record_agrees_with_the_folders_of_its_arm_and_seed(tmp_path: Path) -> None:
    study = make_study("s", {}, [{}, {"lr": 1e-3}, {"precision": "mxfp8"}], [0, 1])
    bf16, slow, mxfp8, bf16_1, *_ = runs = [directory.create(tmp_path, one) for one in study.experiments]
    assert directory.discover(tmp_path).runs == tuple(sorted(runs, key=lambda run: run.path))
    assert (slow.arm, slow.seed) == ("bf16_standard_lr-0.001", 0)
    for other in (slow, mxfp8, bf16_1):
        shutil.copy(other.path / "experiment.yaml", bf16.path)
        recorded = f"{other.arm}/seed{other.seed}"
        words = f"experiment.yaml: the record is of {recorded}, but the run is in bf16_standard/seed0"
        discovered = directory.discover(tmp_path)
        assert (discovered.lines, len(discovered.runs)) == ([f"{bf16.name}: left out: {words}"], 5)
        with pytest.raises(BadInput, match="the record is of"):
            _ = RunDir(bf16.path).experiment


def test_a_run_without_a_record_is_named(tmp_path: Path) -> None:
    whole, no_record, cut, empty = (directory.create(tmp_path, EXPERIMENT) for _ in range(4))
    (no_record.path / "experiment.yaml").unlink()
    (cut.path / "experiment.yaml").write_text("record_version: 1\nname: s\n")
    shutil.rmtree(empty.path)
    empty.path.mkdir()
    discovered = directory.discover(tmp_path)
    assert discovered.runs == (whole,)
    assert {one.run: one.reason for one in discovered.left_out} == {
        no_record: "experiment.yaml: the record cannot be read: No such file or directory",
        cut: "experiment.yaml: the record was cut off: its last line is not whole",
        empty: "experiment.yaml: the record cannot be read: No such file or directory",
    }
    assert [(one.run.arm, one.run.seed) for one in discovered.left_out] == [("mxfp8_standard", 3)] * 3
    assert discovered.all_runs == directory.find(tmp_path)
    assert [row["run"] for row in discovered.to_json()["left_out"]] == [one.run.name for one in discovered.left_out]


@pytest.mark.parametrize("broken", ["mkdir", "rename"])
def test_a_run_that_is_being_made_is_not_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    original = getattr(Path, broken)

    def fail(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.name in ("tb", *(one.name for one in tmp_path.glob("*/*/*/.*Z-*") if broken == "rename")):
            raise OSError(28, "No space left on device")
        return original(path, *arguments, **options)

    monkeypatch.setattr(Path, broken, fail)
    with pytest.raises(OSError, match="No space left"):
        directory.create(tmp_path, EXPERIMENT)
    assert directory.find(tmp_path) == []


def test_a_folder_that_may_not_be_looked_into_does_not_disappear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = directory.create(tmp_path, EXPERIMENT)
    scandir = os.scandir

    def closed(path: Any) -> Any:
        if Path(path) == run.path:
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", closed)
    assert directory.find(tmp_path) == [run]


def test_a_run_that_was_moved_is_told(tmp_path: Path) -> None:
    run = directory.create(tmp_path / "runs", EXPERIMENT)
    copied = RunDir(shutil.copytree(run.path, tmp_path / "kept"))
    assert (copied.experiment, copied.arm, copied.seed) == (EXPERIMENT, "mxfp8_standard", 3)
    note = f"{copied.name} is not in the folder of an arm and seed: taken for mxfp8_standard/seed3, as recorded"
    assert directory.discover(copied.path) == directory.Discovery(runs=(copied,), left_out=(), notes=(note,))

    renamed = RunDir((tmp_path / "runs" / "s").rename(tmp_path / "renamed") / run.path.relative_to(tmp_path / "runs/s"))
    note = "folder renamed holds runs that were recorded as study s"
    discovered = directory.discover(tmp_path / "renamed")
    assert discovered == directory.Discovery(runs=(renamed,), left_out=(), notes=(note,))
    assert discovered.attempts(EXPERIMENT.model_copy(update={"name": "renamed"})) == [renamed]

    renamed.path.parent.rename(renamed.path.parents[1] / "seed3 bad")
    (left_out,) = directory.discover(tmp_path / "renamed").left_out
    words = "the record is of mxfp8_standard/seed3, but the run is in mxfp8_standard/seed3 bad"
    assert left_out.reason == f"experiment.yaml: {words}"


def test_links_are_followed_once(tmp_path: Path) -> None:
    both = sorted((directory.create(tmp_path / "store", EXPERIMENT) for _ in range(2)), key=lambda run: run.path)
    other = directory.create(tmp_path / "store", Experiment(name="s"))
    study = tmp_path / "runs" / "s"
    seed = study / "mxfp8_standard" / "seed3"
    seed.mkdir(parents=True)
    for run in both:
        (seed / run.path.name).symlink_to(run.path)
    (study / "bf16_standard").symlink_to(other.path.parents[1])
    (study / "a_copy").symlink_to(study / "mxfp8_standard")  # by name before the arm itself
    (seed / "loop").symlink_to(tmp_path)
    (seed / "nowhere").symlink_to(tmp_path / "nowhere")
    (both[0].path / "logs" / "loop").symlink_to(study)
    (tmp_path / "alias").symlink_to(study)
    for place in (tmp_path / "runs", study, tmp_path / "alias"):
        discovered = directory.discover(place)
        assert [run.path.name for run in discovered.runs] == [run.path.name for run in (other, *both)]
        assert (discovered.left_out, len(discovered.attempts(EXPERIMENT))) == ((), 2)
    linked = directory.discover(seed / both[0].path.name)
    assert [(run.arm, run.seed, run.name) for run in linked.runs] == [("mxfp8_standard", 3, both[0].name)]


# Files


def test_a_status_is_read_as_it_was_written_and_has_space_reserved_until_the_end(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.set_status(Status(state=State.RUNNING))
    assert (tmp_path / RESERVE).stat().st_size == RESERVE_BYTES
    status = Status(state=State.FAILED, reason="rank 1: «ü»\n", exit_code=-9, job_id="12_3", attempts=2)
    run.set_status(status)
    assert names(tmp_path) == {"status.json"}
    assert abs(run.status.updated - time.time()) < 5
    assert {**asdict(run.status), "updated": 0.0} == asdict(status)


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (None, "cannot be read: No such file or directory"),
        ("{", "is damaged: Invalid JSON: EOF while parsing an object at line 1 column 1"),
        ("[]", "is damaged: Input should be an object"),
        ('{"state": "lost"}', "is damaged: state: Input should be 'prepared', "),
        ('{"state": "failed", "x": 1}', "is damaged: x: Unexpected keyword argument"),
    ],
)
def test_a_damaged_status_is_unknown_with_its_fault(tmp_path: Path, content: str | None, fault: str) -> None:
    if content is not None:
        (tmp_path / "status.json").write_text(content)
    status = RunDir(tmp_path).status
    assert (status.state, status.is_lost) == (State.UNKNOWN, True)
    assert (status.reason or "").startswith(f"status.json {fault}")


def test_a_file_is_replaced_and_json_has_no_nan(tmp_path: Path) -> None:
    file = tmp_path / "made" / "on the way" / "a.json"
    write_whole(file, "old")
    write_json(file, {"a": "né"})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(file, {"a": float("nan")})
    assert json.loads(file.read_bytes()) == {"a": "né"}
    assert names(file.parent) == {"a.json"}


@pytest.mark.parametrize("mask", [0o077, 0o027, 0o002])
def test_files_of_a_run_have_the_modes_that_the_umask_leaves(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        run = directory.create(tmp_path / "runs", Experiment())
        (plain := tmp_path / "plain").write_text("")
        (plain_folder := tmp_path / "plain folder").mkdir()
        with only_launcher(run.path.parents[2]):
            pass
        report = run.path / "shared.html"
        write_whole(report, "old")
        report.chmod(0o604)  # as its owner wants it
        write_whole(report, "new")
    finally:
        os.umask(before)
    made = {path: path.stat().st_mode for path in (tmp_path / "runs").rglob("*")}
    assert made.pop(report) & 0o777 == 0o604
    assert len(made) > 5
    for path, mode in made.items():
        assert mode == (plain_folder if path.is_dir() else plain).stat().st_mode, path


def test_a_pipe_is_written_to_and_a_link_is_followed(tmp_path: Path) -> None:
    pipe, link, target = tmp_path / "pipe", tmp_path / "link", tmp_path / "target"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    write_whole(pipe, "x")
    assert (os.read(reader, 9), pipe.is_fifo()) == (b"x", True)
    os.close(reader)
    link.symlink_to(target)
    write_whole(link, "né\n")
    assert (link.is_symlink(), target.read_bytes()) == (True, b"n\xc3\xa9\n")


BROKEN = """
import os, sys
from pathlib import Path
from moelab.files import write_whole
def kill(*_, **__): os.kill(os.getpid(), 9)
def fail(*_, **__): raise OSError(28, "No space left on device")
{} = {}
write_whole(Path(sys.argv[1]), "new")
"""


@pytest.mark.parametrize("moment", ["Path.open", "os.fsync", "Path.chmod", "Path.replace"])
def test_a_kill_inside_of_a_write_keeps_the_old_file_and_a_failure_leaves_no_litter(
    tmp_path: Path, moment: str
) -> None:
    file = tmp_path / "status.json"
    write_whole(file, "old")
    for what, code in (("fail", 1), ("kill", -signal.SIGKILL)):
        ended = subprocess.run(
            [sys.executable, "-c", BROKEN.format(moment, what), str(file)], stderr=subprocess.PIPE, check=False
        )
        assert (ended.returncode, b"No space" in ended.stderr, file.read_text()) == (code, what == "fail", "old")
        assert what == "kill" or names(tmp_path) == {"status.json"}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda file: os.mkfifo(file), "it is not a regular file"),
        (lambda file: file.symlink_to("/dev/zero"), "it is not a regular file"),
        (lambda file: file.mkdir(), "Is a directory"),
        (lambda file: file.write_bytes(b" " * 1_000_001), "it has more than 1,000,000 bytes"),
        (lambda file: file.write_bytes(b"\xff"), "it is not UTF-8 text"),
        (lambda file: file.write_text("[" * 100_000), "it is nested too deeply"),
        (lambda file: file.write_text("{"), "Expecting property name"),
    ],
)
def test_what_is_no_file_to_read_is_said_at_once(tmp_path: Path, make: Callable[[Path], Any], words: str) -> None:
    file = tmp_path / "x.json"
    make(file)
    with pytest.raises((OSError, ValueError), match=words):
        read_json(file)


def test_a_mark_in_front_of_a_text_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert read_json(tmp_path / "x.json") == {"a": 1}


def test_a_pipe_in_the_place_of_a_status_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "status.json")
    assert RunDir(tmp_path).status.reason == "status.json cannot be read: it is not a regular file"
