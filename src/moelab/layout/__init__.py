"""Which parallel layouts are legal, what TorchTitan makes of them, and what is wrong with the others.

- :func:`check` judges an experiment: every reason, every note, and the resolved :class:`Layout`.
- :func:`training_of` and :func:`twins` say which experiments are one training, whatever their fields are.
- ``rules.py`` holds the rules, ``mesh.py`` what they look at and the layout, ``schedule.py`` the pipeline schedules,
  ``sharding.py`` what a rank holds of every parameter, ``training.py`` which fields make no difference.

Nothing here loads torch.
"""

from moelab.layout.mesh import Facts, Layout, facts_of, resolve
from moelab.layout.rules import LayoutCheck, check, faults
from moelab.layout.schedule import SCHEDULES, bubble_fraction
from moelab.layout.training import training_of, twins

__all__ = [
    "SCHEDULES",
    "Facts",
    "Layout",
    "LayoutCheck",
    "bubble_fraction",
    "check",
    "facts_of",
    "faults",
    "resolve",
    "training_of",
    "twins",
]
