"""What the notebooks share: their parameters, and how they run in batch."""

from moelab.notebooks.batch import NotebookFailed, complete, execute, parameter_names, read_parameters
from moelab.notebooks.parameters import ConvergenceParameters, PlanParameters, validated

__all__ = [
    "ConvergenceParameters",
    "NotebookFailed",
    "PlanParameters",
    "complete",
    "execute",
    "parameter_names",
    "read_parameters",
    "validated",
]
