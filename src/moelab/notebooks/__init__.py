"""What the notebooks share: their parameters, results that they replay, and how they run in batch."""

import lazy_loader

# What notebooks and scripts import from here, loaded on first use.
__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "all_to_all": ["measure_all_to_all"],
        "batch": ["NotebookFailed", "execute", "parameter_names", "read_parameters"],
        "map": ["markdown_table"],
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
        "replayed": ["replayed_convergence", "replayed_steps"],
    },
)
