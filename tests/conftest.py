"""How tests are shared out between processes, where there are several (``make test``)."""

from __future__ import annotations

import pytest


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep all trainings in one process and first, and each other file in one.

    A training takes every core; two at once would only wait for each other. The other files are what fills the seconds
    in which a training leaves a core idle, and their shared fixtures are made once.
    """
    items.sort(key=lambda item: item.get_closest_marker("training") is None)
    for item in items:
        group = "training" if item.get_closest_marker("training") else item.path.stem
        item.add_marker(pytest.mark.xdist_group(group))
