"""Which parallel layouts are legal, what TorchTitan makes of them, and what is wrong with the others.

- :func:`check` judges an experiment: every reason, every note, and the resolved :class:`Layout`.
- ``facts.py`` holds what the rules look at; ``mesh_rules.py``, ``pipeline_rules.py``, ``sequence_rules.py`` and
  ``arm_rules.py`` hold the rules, and ``notes.py`` what is worth knowing of a legal layout.
- ``schedule.py`` knows the pipeline schedules: their stages, and the order in which each rank computes.

A rule is written once: a predicate, which the search evaluates thousands of times a second, and an explanation, which
is put into words only for a rule that is broken. Nothing here loads torch.
"""

from moelab.layout.facts import Facts, facts_of
from moelab.layout.rules import RULES, Rule
from moelab.layout.schedule import SCHEDULES, Schedule, bubble_fraction
from moelab.layout.verdict import Layout, LayoutCheck, check, resolve

__all__ = [
    "RULES",
    "SCHEDULES",
    "Facts",
    "Layout",
    "LayoutCheck",
    "Rule",
    "Schedule",
    "bubble_fraction",
    "check",
    "facts_of",
    "resolve",
]
