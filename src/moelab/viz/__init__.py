"""Figures, the report of a study and the layout explorer: tables and layouts in, plotly figures and HTML out."""

from moelab.viz.layout import LayoutExplorer, best_layouts, memory_bars, mesh_map, pipeline_schedule, technique_gains
from moelab.viz.report import Figure, Table, write_report
from moelab.viz.study import loss_curves, loss_difference, throughput_bars, verdict_intervals
from moelab.viz.theme import arm_styles, use_in_notebooks

__all__ = [
    "Figure",
    "LayoutExplorer",
    "Table",
    "arm_styles",
    "best_layouts",
    "loss_curves",
    "loss_difference",
    "memory_bars",
    "mesh_map",
    "pipeline_schedule",
    "technique_gains",
    "throughput_bars",
    "verdict_intervals",
    "write_report",
]

use_in_notebooks()
