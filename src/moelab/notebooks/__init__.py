"""What the notebooks share: their parameters, and how they run in batch."""

from moelab.notebooks.batch import NotebookFailed, complete, execute, parameter_names, read_parameters
from moelab.notebooks.parameters import (
    ConvergenceParameters,
    DispatchParameters,
    GroupedGemmParameters,
    PlanParameters,
    QuantiseParameters,
    RouteParameters,
    validated,
)

__all__ = [
    "ConvergenceParameters",
    "DispatchParameters",
    "GroupedGemmParameters",
    "NotebookFailed",
    "PlanParameters",
    "QuantiseParameters",
    "RouteParameters",
    "complete",
    "execute",
    "parameter_names",
    "read_parameters",
    "validated",
]
