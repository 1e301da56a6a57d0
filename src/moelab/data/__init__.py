"""Data that comes with the package."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import yaml


def read_yaml(name: str) -> Any:
    """Content of a YAML file of this folder."""
    text = (resources.files(__name__) / name).read_text()
    # Read where a module is imported; libyaml, which is a SafeLoader too, takes a tenth of the time.
    return yaml.load(text, Loader=yaml.CSafeLoader)


def read_json(name: str) -> dict[str, Any]:
    """Content of a JSON file of this folder: a measurement, or what ``benchmarks.validation`` wrote."""
    content: dict[str, Any] = json.loads((resources.files(__name__) / name).read_text())
    return content


def shipped(folder: str) -> Path:
    """The folder of ``notebooks``, ``papermill_params`` or ``studies`` as they come with this version.

    A wheel has them in here; a clone, which an editable install uses, at its top, where people look for them.
    """
    in_wheel = Path(__file__).parent / folder
    return in_wheel if in_wheel.is_dir() else Path(__file__).parents[3] / folder
