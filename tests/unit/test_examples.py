"""Every example of a docstring does what it says."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest

import moelab

ROOT = Path(moelab.__path__[0])
MODULES = [
    one.name
    for one in pkgutil.walk_packages([str(ROOT)], "moelab.")
    if not one.ispkg and ">>> " in (ROOT.parent / f"{one.name.replace('.', '/')}.py").read_text()
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_a_module(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0
