"""Data that comes with the package."""

from __future__ import annotations

from importlib import resources
from typing import Any

import yaml


def read_yaml(name: str) -> Any:
    """Content of a YAML file of this folder."""
    return yaml.safe_load((resources.files(__name__) / name).read_text())
