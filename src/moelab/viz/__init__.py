"""Figures and the report of a study: a metrics table in, a plotly figure or one HTML file out."""

from moelab.viz.difference import loss_difference
from moelab.viz.loss import gradient_norm, loss_curves, loss_tail
from moelab.viz.report import Figure, Table, write_report
from moelab.viz.theme import arm_styles, use_renderer
from moelab.viz.throughput import throughput_bars

__all__ = [
    "Figure",
    "Table",
    "arm_styles",
    "gradient_norm",
    "loss_curves",
    "loss_difference",
    "loss_tail",
    "throughput_bars",
    "use_renderer",
    "write_report",
]
