"""Figures, the report of a study and the explorers: tables and layouts in, plotly figures and HTML out."""

import lazy_loader

from moelab.viz.theme import use_in_notebooks

use_in_notebooks()

# What notebooks and scripts import from here, loaded on first use.
__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "deepep": [
            "operation_times",
            "measured_gains",
        ],
        "explain": [
            "answer_table",
            "beside_predicted",
            "step_bars",
            "timeline",
        ],
        "grouped_gemm": ["ExpertExplorer", "LABELS", "gain_map", "measured_speedups"],
        "layout": ["LayoutExplorer", "best_layouts", "memory_bars", "mesh_map", "pipeline_schedule", "technique_gains"],
        "live": ["LiveView", "simulated_view"],
        "mxfp8": [
            "Choice",
            "QuantisationExplorer",
            "largest_number_error",
            "method_errors",
            "number_line",
            "product_errors",
            "stored_figure",
        ],
        "projection": [
            "ProjectionExplorer",
            "arm_breakdowns",
            "arm_table",
            "arms_beside_projection",
            "step_breakdown",
        ],
        "study": [
            "loss_curves",
            "loss_difference",
            "published_bars",
            "throughput_bars",
            "verdict_examples",
            "verdict_intervals",
        ],
        "table": ["Folded", "as_table"],
        "theme": ["arm_styles"],
        "traffic": [
            "METHOD_LABELS",
            "ROUTING_LABELS",
            "TrafficExplorer",
            "bytes_by_ep",
            "token_flow",
            "traffic_matrix",
        ],
    },
)
