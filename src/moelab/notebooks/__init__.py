"""What the notebooks share: their parameters, and how they run in batch."""

from moelab.notebooks.batch import NotebookFailed, complete, execute, parameter_names, read_parameters
from moelab.notebooks.parameters import ConvergenceParameters, validated

__all__ = [
    "ConvergenceParameters",
    "NotebookFailed",
    "complete",
    "execute",
    "parameter_names",
    "read_parameters",
    "validated",
]
