"""Real Slurm clusters for the tests here; without Slurm they are skipped, which CI does not accept."""

from __future__ import annotations

import pytest
from slurm_cluster import missing


@pytest.fixture(scope="session", autouse=True)
def _slurm_is_here() -> None:
    if reason := missing():
        pytest.skip(reason)


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker("slurm")
