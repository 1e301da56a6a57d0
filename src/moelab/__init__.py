"""moelab: how much faster can a Mixture-of-Experts model be pre-trained, on your hardware, without hurting the loss?

Each verb of the command line is a function here. ``import moelab`` loads neither torch nor plotly: a name below is
loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moelab.door import (
        collect,
        doctor,
        explain,
        plan,
        project,
        read_study,
        report,
        run,
        search,
        status,
        submit,
        watch,
    )
    from moelab.experiment import Experiment
    from moelab.experiment_file import Study

__version__ = "0.3.0"
__all__ = [
    "Experiment",
    "Study",
    "collect",
    "doctor",
    "explain",
    "plan",
    "project",
    "read_study",
    "report",
    "run",
    "search",
    "status",
    "submit",
    "watch",
]
_ELSEWHERE = {"Experiment": "moelab.experiment", "Study": "moelab.experiment_file"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module(_ELSEWHERE.get(name, "moelab.door")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
