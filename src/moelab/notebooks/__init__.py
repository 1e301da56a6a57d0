"""What the notebooks share: their parameters, and how they run in batch."""

from moelab.data.example_logs import EXAMPLE_LOGS
from moelab.notebooks.batch import NotebookFailed, execute, parameter_names, read_parameters
from moelab.notebooks.parameters import (
    ConvergenceParameters,
    DispatchParameters,
    ExplainParameters,
    GroupedGemmParameters,
    LaunchParameters,
    PlanParameters,
    ProjectParameters,
    QuantiseParameters,
    ReportParameters,
    RouteParameters,
    StartParameters,
    ThroughputParameters,
)

__all__ = [
    "EXAMPLE_LOGS",
    "ConvergenceParameters",
    "DispatchParameters",
    "ExplainParameters",
    "GroupedGemmParameters",
    "LaunchParameters",
    "NotebookFailed",
    "PlanParameters",
    "ProjectParameters",
    "QuantiseParameters",
    "ReportParameters",
    "RouteParameters",
    "StartParameters",
    "ThroughputParameters",
    "execute",
    "parameter_names",
    "read_parameters",
]
