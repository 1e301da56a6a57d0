"""Data that comes with the package."""

from __future__ import annotations

from importlib import resources
from typing import Any

import yaml


def read_yaml(name: str) -> Any:
    """Content of a YAML file of this folder."""
    text = (resources.files(__name__) / name).read_text()
    # Read where a module is imported; libyaml, which is a SafeLoader too, takes a tenth of the time.
    return yaml.load(text, Loader=yaml.CSafeLoader)
