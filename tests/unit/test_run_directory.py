"""The run directory and its files: whole at any instant, found again, and the same name everywhere."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml

from moelab.errors import BadInput
from moelab.experiment import Experiment
from moelab.experiment_file import make_study
from moelab.runs import directory
from moelab.runs.directory import RunDir
from moelab.runs.files import write_json, write_whole
from moelab.runs.status import RESERVE, RESERVE_BYTES, State, Status

EXPERIMENT = Experiment(name="s", precision="mxfp8", seed=3)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_new_run_has_its_place_its_experiment_and_its_status(tmp_path: Path) -> None:
    run = directory.create(tmp_path, EXPERIMENT)
    study, arm, seed, stamp = run.path.relative_to(tmp_path).parts
    assert (study, arm, seed) == ("s", "mxfp8_standard", "seed3")
    time.strptime(stamp[:16], "%Y%m%dT%H%M%SZ")
    assert len(bytes.fromhex(stamp[17:])) == 3
    assert run.experiment == EXPERIMENT
    assert run.status.state is State.PREPARED
    assert names(run.path) == {"experiment.yaml", "status.json", "launch", "logs", "tb", RESERVE}
    assert run.name == f"s/mxfp8_standard/seed3/{stamp}"


def test_runs_made_in_the_same_second_are_apart(tmp_path: Path) -> None:
    assert len({directory.create(tmp_path, EXPERIMENT).path for _ in range(20)}) == 20


def test_attempts_are_of_exactly_this_experiment(tmp_path: Path) -> None:
    mine, older = (directory.create(tmp_path, EXPERIMENT) for _ in range(2))
    fields = EXPERIMENT.model_dump(mode="json", exclude={"arm_fields"})  # as records of older versions are
    (older.path / "experiment.yaml").write_text(yaml.safe_dump(fields, sort_keys=False))
    for changes in ({"steps": 61}, {"lr": 3.1e-3}, {"model": "debug"}, {"seed": 4}, {"precision": "bf16"}):
        directory.create(tmp_path, Experiment(**{**EXPERIMENT.model_dump(), **changes}))
    other = directory.create(tmp_path, EXPERIMENT.model_copy(update={"steps": 62}))
    (other.path / "experiment.yaml").write_text("name: s\na_field_of_the_future: 1\n")
    discovered = directory.discover(tmp_path)
    assert {run.path for run in discovered.attempts(EXPERIMENT)} == {mine.path, older.path}
    assert (len(discovered.runs), [one.run for one in discovered.left_out]) == (7, [other])
    assert len(directory.find(tmp_path)) == 8


def test_a_persons_own_file_is_no_run(tmp_path: Path) -> None:
    run = directory.create(tmp_path, EXPERIMENT)
    (tmp_path / "experiment.yaml").write_text("study: s\nseeds: [0, 1]\n")
    assert list(directory.find(tmp_path)) == [run]


def test_a_run_has_one_name_however_it_is_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = directory.create(tmp_path / "runs", EXPERIMENT)
    (tmp_path / "link").symlink_to(tmp_path / "runs")
    monkeypatch.chdir(run.path)
    for path in (Path(), Path("..", run.path.name), Path("../../../../link") / run.path.relative_to(tmp_path / "runs")):
        assert RunDir(path).name == run.name


# Which runs are used


def swap(one: Path, other: Path) -> None:
    texts = one.read_text(), other.read_text()
    other.write_text(texts[0])
    one.write_text(texts[1])


def test_a_record_agrees_with_the_folders_of_its_arm_and_seed(tmp_path: Path) -> None:
    study = make_study("s", {}, [{}, {"lr": 1e-3}, {"precision": "mxfp8"}], [0, 1])
    bf16, slow, mxfp8, bf16_1, _, _ = runs = [directory.create(tmp_path, one) for one in study.experiments]
    assert directory.discover(tmp_path).runs == tuple(sorted(runs, key=lambda run: run.path))
    assert (slow.arm, slow.seed) == ("bf16_standard_lr-0.001", 0)
    for one, other in ((bf16, slow), (bf16, mxfp8), (bf16, bf16_1)):
        swap(one.path / "experiment.yaml", other.path / "experiment.yaml")
        discovered = directory.discover(tmp_path)
        assert {left.run for left in discovered.left_out} == {one, other}
        assert len(discovered.runs) == 4
        recorded, folders = ("/".join(run.path.parts[-3:-1]) for run in (other, one))
        words = f"experiment.yaml: the record is of {recorded}, but the run is in {folders}"
        assert f"{one.name}: left out: {words}" in discovered.lines
        with pytest.raises(BadInput, match="the record is of"):
            _ = RunDir(one.path).experiment
        swap(one.path / "experiment.yaml", other.path / "experiment.yaml")


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


def test_a_renamed_study_is_a_note(tmp_path: Path) -> None:
    run = directory.create(tmp_path, EXPERIMENT)
    run.path.parents[2].rename(tmp_path / "renamed")
    discovered = directory.discover(tmp_path / "renamed")
    assert ([one.name for one in discovered.runs], discovered.left_out) == ([run.name.replace("s/", "renamed/", 1)], ())
    assert discovered.notes == ("folder renamed holds runs that were recorded as study s",)
    assert len(discovered.attempts(EXPERIMENT.model_copy(update={"name": "renamed"}))) == 1


def test_a_run_that_was_copied_out_of_its_study_has_its_recorded_place(tmp_path: Path) -> None:
    run = directory.create(tmp_path / "runs", EXPERIMENT)
    copied = RunDir(shutil.copytree(run.path, tmp_path / "kept"))
    assert (copied.experiment, copied.arm, copied.seed) == (EXPERIMENT, "mxfp8_standard", 3)
    discovered = directory.discover(tmp_path / "kept")
    assert discovered.runs == (copied,)
    assert discovered.notes == (
        f"{copied.name} is not in the folder of an arm and seed: taken for mxfp8_standard/seed3, as recorded",
    )


def test_a_seed_that_was_put_aside_is_left_out(tmp_path: Path) -> None:
    run = directory.create(tmp_path, EXPERIMENT)
    run.path.parent.rename(run.path.parents[1] / "seed3 bad")
    (left_out,) = directory.discover(tmp_path).left_out
    told = "the record is of mxfp8_standard/seed3, but the run is in mxfp8_standard/seed3 bad"
    assert left_out.reason == f"experiment.yaml: {told}"


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


def test_attempts_are_found_whatever_their_arm_is_called(tmp_path: Path) -> None:
    fast, slow = {"lr": 3e-3}, {"lr": 1e-3}
    before = make_study("s", {}, [fast, slow], [0]).experiments
    runs = [directory.create(tmp_path, one) for one in before]
    discovered = directory.discover(tmp_path)
    for experiment in make_study("s", {}, [slow, fast], [0]).experiments:
        (run,) = discovered.attempts(experiment)
        assert run.experiment.lr == experiment.lr
        assert run in runs


# Status


def test_a_status_is_read_as_it_was_written(tmp_path: Path) -> None:
    status = Status(state=State.FAILED, reason="rank 1: «ü»\n", exit_code=-9, job_id="12_3", attempts=2)
    RunDir(tmp_path).set_status(status)
    written = RunDir(tmp_path).status
    assert abs(written.updated - time.time()) < 5
    assert {**asdict(written), "updated": 0.0} == asdict(status)


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("", "Invalid JSON: EOF while parsing a value at line 1 column 0"),
        ("{", "Invalid JSON: EOF while parsing an object at line 1 column 1"),
        ("[]", "Input should be an object"),
        ("{}", "state: Field required"),
        ("\xff", "Invalid JSON: "),
        ('{"state": "lost"}', "state: Input should be 'prepared', "),
        ('{"state": "failed", "x": 1}', "x: Unexpected keyword argument"),
        ('{"state": "running", "attempts": "x"}', "attempts: Input should be a valid integer"),
    ],
)
def test_a_damaged_status_is_unknown_with_its_fault(tmp_path: Path, content: str, fault: str) -> None:
    (tmp_path / "status.json").write_bytes(content.encode("latin-1"))
    status = RunDir(tmp_path).status
    assert (status.state, status.is_lost) == (State.UNKNOWN, True)
    assert f"status.json is damaged: {fault}" in (status.reason or "")


def test_a_missing_status_is_unknown(tmp_path: Path) -> None:
    words = "status.json cannot be read: No such file or directory"
    assert RunDir(tmp_path).status == Status(state=State.UNKNOWN, reason=words)


def test_space_is_reserved_until_the_end(tmp_path: Path) -> None:
    RunDir(tmp_path).set_status(Status(state=State.RUNNING))
    assert (tmp_path / RESERVE).stat().st_size == RESERVE_BYTES
    RunDir(tmp_path).set_status(Status(state=State.FAILED))
    assert not (tmp_path / RESERVE).exists()


# Whole files


def test_a_file_is_replaced_and_readable_by_others(tmp_path: Path) -> None:
    file = tmp_path / "made" / "on the way" / "a.txt"
    write_whole(file, "old")
    write_whole(file, "né\n")
    assert file.read_bytes() == b"n\xc3\xa9\n"
    assert names(file.parent) == {"a.txt"}
    assert file.stat().st_mode & 0o777 == 0o644


def test_a_pipe_is_written_to_and_a_link_is_followed(tmp_path: Path) -> None:
    """As for ``--write /dev/stdout``: a rename would put a file in the device's place."""
    pipe, link, target = tmp_path / "pipe", tmp_path / "link", tmp_path / "target"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    write_whole(pipe, "x")
    assert (os.read(reader, 9), pipe.is_fifo()) == (b"x", True)
    os.close(reader)
    link.symlink_to(target)
    write_whole(link, "y")
    assert (link.is_symlink(), target.read_text()) == (True, "y")


@pytest.mark.parametrize(("module", "broken"), [(os, "fsync"), (os, "fdopen"), (Path, "replace")])
def test_a_failure_keeps_the_old_file_and_leaves_no_litter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, broken: str
) -> None:
    file = tmp_path / "status.json"
    write_whole(file, "old")
    monkeypatch.setattr(module, broken, Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        write_whole(file, "new")
    assert (file.read_text(), names(tmp_path)) == ("old", {"status.json"})


def test_what_json_cannot_say_is_not_written(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"a": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "a.json", {"a": float("nan")})
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": 1}


KILLED = """
import os, sys, tempfile
from pathlib import Path
from moelab.runs.files import write_whole
{} = lambda *_, **__: os.kill(os.getpid(), 9)
write_whole(Path(sys.argv[1]), "new")
"""


@pytest.mark.parametrize("moment", ["tempfile.mkstemp", "os.fdopen", "os.fsync", "Path.chmod", "Path.replace"])
def test_a_kill_inside_of_a_write(tmp_path: Path, moment: str) -> None:
    file = tmp_path / "status.json"
    write_whole(file, "old")
    done = subprocess.run([sys.executable, "-c", KILLED.format(moment), str(file)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert file.read_text() == "old"
