"""How tests are shared out between processes, where there are several (``pytest -n 2 --dist loadfile``, ``make test``).

Trainings stay in one process and come first: each takes every core, and two at once would only wait for each other.
The other files, each in one process so that its fixtures are made once, fill the seconds in which a training leaves a
core idle. Notebooks share a process for the runs that their tests look at; those that train do it with the trainings.
"""

from __future__ import annotations

import functools
import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, settings
from notebook_support import notebook_trains

# A machine that also trains draws examples slowly; that is no fault of a test.
settings.register_profile("moelab", suppress_health_check=[HealthCheck.too_slow], deadline=None)
settings.load_profile("moelab")
# In the background (``make test &`` of a script) a shell ignores SIGINT, and so would every program under test.
signal.signal(signal.SIGINT, signal.default_int_handler)


@functools.cache
def trains(file: Path) -> bool:
    """Whether a file's tests are marked as trainings; the process that shares tests out knows no marks."""
    return re.search(r"^pytestmark = pytest\.mark\.training", file.read_text(), re.MULTILINE) is not None


def process_of(root: Path, nodeid: str) -> str:
    """What a test's process is shared with: all trainings, all notebooks, or the tests of its file."""
    file, parameter = nodeid.partition("::")[0], nodeid.partition("[")[2].removesuffix("]")
    notebook = root / "notebooks" / f"{parameter}.ipynb"
    of_notebooks = file.startswith("tests/notebooks/")
    if trains(root / file) or (of_notebooks and notebook.exists() and notebook_trains(notebook)):
        return "trainings"
    return "notebooks" if of_notebooks else file


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("training") is None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """xdist's own groups would do, but are ignored under pytest 9.2 (pytest-xdist issue 1386, 3.8.0)."""
    from xdist.scheduler import LoadFileScheduling

    class TrainingsTogether(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return process_of(config.rootpath, nodeid)

    if config.getoption("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False  # or the file with the most tests would come first
    return TrainingsTogether(config, log)


class Printed(NamedTuple):
    """What one call of the command line printed, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Printed]:
    """``moelab`` in this process."""
    from moelab.cli import main

    monkeypatch.setattr("moelab.cli.signal.signal", lambda *_: None)

    def run(*arguments: object) -> Printed:
        try:
            code = main([str(one) for one in arguments])
        except SystemExit as end:  # of argparse
            code = end.code if isinstance(end.code, int) else -1
        return Printed(code, *capsys.readouterr())

    return run
