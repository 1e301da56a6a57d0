"""Every notebook as authored, to its last cell. Profiles that change something run in the notebooks' own tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from notebook_support import NOTEBOOKS, Ran, notebook_trains


@pytest.mark.parametrize(
    "notebook",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.training] if notebook_trains(path) else [])
        for path in NOTEBOOKS
    ],
)
def test_nbmake_runs_it_with_its_defaults(notebook: Path, by_nbmake: Callable[[str], Ran]) -> None:
    ran = by_nbmake(notebook.stem)
    assert ran.outputs
    assert not any(output.get("name") == "stderr" for output in ran.outputs)
