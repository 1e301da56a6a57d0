"""Each notebook runs once with its defaults; all tests of a process look at that run."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
from notebook_support import NO_PICTURES, NOTEBOOKS, Ran, run_by_nbmake


@pytest.fixture(scope="session")
def by_nbmake(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Ran]:
    """Run a notebook as authored, by its name."""

    @functools.cache
    def ran(name: str) -> tuple[Ran, str]:
        (notebook,) = (path for path in NOTEBOOKS if path.stem == name)
        return run_by_nbmake(notebook, tmp_path_factory.mktemp(name))

    def whole(name: str) -> Ran:
        run, failure = ran(name)
        assert not failure, failure
        return run

    return whole


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Notebooks that a test executes; the demo, which a child process runs, has its pictures."""
    for name, value in NO_PICTURES.items():
        monkeypatch.setenv(name, value)
