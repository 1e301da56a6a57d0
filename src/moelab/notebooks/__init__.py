"""What the notebooks share: their parameters, results that they replay, and how they run in batch."""

import lazy_loader

# What notebooks and scripts import from here, loaded on first use.
__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "batch": ["NotebookFailed", "execute", "parameter_names", "read_parameters"],
        "parameters": [
            "ConvergenceParameters",
            "DispatchParameters",
            "EXAMPLE_LOGS",
            "ExplainParameters",
            "GroupedGemmParameters",
            "LaunchParameters",
            "PlanParameters",
            "ProjectParameters",
            "QuantiseParameters",
            "ReportParameters",
            "RouteParameters",
            "StartParameters",
            "ThroughputParameters",
        ],
        "results": ["measure_all_to_all", "replayed_convergence", "replayed_steps"],
        "shipped": ["markdown_table"],
    },
)
