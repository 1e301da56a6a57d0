"""What an experiment would do: is it legal, does it fit, how long does a step take, and which layout is best.

``plan.py`` joins the layout's verdict with ``memory/`` (bytes at the fullest moment of each pipeline rank).
``project.py`` predicts a step and what training costs; ``trust.py`` says how far to trust it.
``search.py`` does both for the legal layouts, ``advice.py`` says the best of them and what each technique gains there.

``time/`` is the arithmetic of a step: ``job.py`` a step with nothing left to resolve and what its software does,
``step.py`` its time, from ``gemm.py`` (products, casts, attention) and ``exchange.py`` (all-to-alls and collectives);
:mod:`moelab.layout.schedule` plays the pipeline.
``routing.py`` says where experts live, how tokens choose them and how many ranks and nodes a token reaches,
``traffic.py`` which bytes that puts on NVLink and on the network. Every constant is in ``calibration.py``.

``tables.py`` reads the finished tables that ``benchmarks/validation`` makes, ``gemm_fit.py`` the draws of the constants
of products, and ``measured.py`` the measurements that notebooks replay. Nothing here imports torch.
"""

import lazy_loader

# What notebooks and scripts import from here, loaded on first use.
__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "advice": ["answer_lines", "layout_table", "recommend", "recommendation_text"],
        "gemm_fit": [
            "break_even",
            "expert_work",
            "fit_b200",
            "fit_h100",
            "gain_table",
            "leave_one_out",
            "published_work",
            "rows_text",
        ],
        "measured": ["ALL_TO_ALL_H200", "FULL_NODE", "TWO_BY_TWO", "load_measured"],
        "memory": ["estimate"],
        "plan": ["layout_lines", "plan_text"],
        "project": ["cluster_like", "cost", "foresee", "gain_over", "on"],
        "tables": [
            "ONE_NODE",
            "error_table",
            "left_open",
            "projected_two_by_two",
            "row_table",
            "validation_table",
            "waterfall",
        ],
        "time.calibration": ["CALIBRATION", "CONSTANTS", "read_calibration", "with_values"],
        "time.exchange": ["QUOTED"],
        "time.gemm": ["gain", "grouped_time_s", "rates_of"],
        "time.routing": ["ExpertPlacement", "RoutingModel", "expected_destinations"],
        "time.traffic": ["METHODS", "count_rows", "expected_rows", "expected_traffic", "gather_passes", "padded_rows"],
    },
)
