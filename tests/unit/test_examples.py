"""Every example of a docstring does what it says."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import moelab

SRC = Path(moelab.__path__[0]).parent
MODULES = [file.relative_to(SRC) for file in sorted(SRC.glob("moelab/**/*.py")) if ">>> " in file.read_text()]


@pytest.mark.parametrize("file", MODULES, ids=str)
def test_examples_of_a_module(file: Path) -> None:
    assert doctest.testmod(importlib.import_module(".".join(file.with_suffix("").parts))).failed == 0
