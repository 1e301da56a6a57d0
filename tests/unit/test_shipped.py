"""Notebooks, profiles and studies of the package: written out, never over a change, and studies found by name."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from moelab.cli import main
from moelab.errors import BadInput
from moelab.experiment_file import read_study
from moelab.notebooks import shipped
from moelab.notebooks.shipped import FOLDERS, write_out

ROOT = Path(__file__).parents[2]
OWN = {str(file.relative_to(ROOT)) for group in FOLDERS for file in (ROOT / group).rglob("*") if file.is_file()}
A, B, PROFILE = "notebooks/a.ipynb", "notebooks/b.ipynb", "papermill_params/a/cpu.yaml"
Install = Callable[..., None]


def files(folder: Path) -> dict[str, bytes]:
    return {str(one.relative_to(folder)): one.read_bytes() for one in folder.rglob("*") if one.is_file()}


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Installs a version of moelab that has these files with this text."""

    def version(text: str, *names: str) -> None:
        folder = tmp_path / f"version {text}"
        for file in (folder / name for name in names):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        monkeypatch.setattr(shipped, "shipped", folder.joinpath)

    return version


def test_everything_is_written_and_a_second_call_touches_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "a" / "lab"
    assert main(["notebooks", str(folder)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == f"begin with: jupyter lab {folder}/notebooks/00_start_here.ipynb"
    left = files(folder)
    assert left == {name: (ROOT / name).read_bytes() for name in OWN}
    times = {name: (folder / name).stat().st_mtime_ns for name in left}
    assert main(["notebooks", str(folder), "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert (done["written"], done["kept"], set(done["same"])) == ([], [], OWN)
    assert {name: (folder / name).stat().st_mtime_ns for name in files(folder)} == times
    assert set(write_out(ROOT).same) == OWN  # in a clone all is there


def test_what_is_there_is_kept_whoever_wrote_it(tmp_path: Path, install: Install) -> None:
    install("one", A, B, PROFILE)
    folder = tmp_path / "lab"
    (folder / A).mkdir(parents=True)
    (folder / B).write_text("mine")
    (folder / PROFILE).parent.mkdir(parents=True)
    (folder / PROFILE).symlink_to("nowhere")
    done = write_out(folder)
    assert (done.written, done.kept, files(folder)) == ((), (A, B, PROFILE), {B: b"mine"})
    assert "kept notebooks/b.ipynb: it is not as this version has it" in done.as_text()
    (folder / B).unlink()
    assert write_out(folder).written == (B,)
    install("two", A, B, PROFILE)
    assert write_out(folder).kept == (A, B, PROFILE)  # which nobody changed: another version does not know that


def test_a_disk_that_fills_leaves_whole_files_and_the_next_call_goes_on(
    tmp_path: Path, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "lab"
    install("one", A, B)
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", Mock(side_effect=[None, OSError(28, "No space left on device")]))
        with pytest.raises(OSError, match="No space left"):
            write_out(folder)
    assert files(folder) == {A: b"one"}
    assert write_out(folder).written == (B,)


def test_a_study_is_found_by_its_name_and_a_file_of_that_name_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nano").mkdir()  # no file: a run of it, perhaps
    for file in sorted((ROOT / "studies").glob("*.yaml")):
        assert read_study(Path(file.stem)) == read_study(file), file
    Path("own_shape").write_text("name: mine\nmodel: debug\n")
    assert read_study(Path("own_shape")).name == "mine"
    for path in ("nano.yaml", "./x/nano", "/nano"):  # a path is no name
        with pytest.raises(BadInput, match="cannot be read: No such file"):
            read_study(Path(path))


NAMES = "16B_b200_x256, 671B_b200_x256, convergence_gpu, gpu_smoke, gpu_smoke_compiled, nano, own_shape"
NO_STUDY = f"nanoo is neither a file nor a study that comes with moelab; those are {NAMES}"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("notebooks a", "a is a file; give the folder"),
        *((f"{verb} nanoo", NO_STUDY) for verb in ("plan", "project", "run")),
        ("submit nanoo --cluster local", NO_STUDY),
        ("doctor --file nanoo --cluster local", NO_STUDY),
        ("explain t --against nanoo", NO_STUDY),
    ],
)
def test_the_command_line_says_what_it_takes_instead(
    arguments: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").touch()
    assert main(arguments.split()) == 2
    assert words in capsys.readouterr().err
