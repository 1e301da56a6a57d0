"""What a step costs before it is run.

``project.py`` predicts a step in one call, with what training costs; ``uncertainty.py`` says how far to trust it.
``job.py`` has a step with nothing left to resolve and what its software does, ``step.py`` puts its time together from
``gemm.py`` (products, casts, attention), ``exchange.py`` (all-to-alls and collectives) and ``memory_bound.py`` (the
rest of a layer, and the optimizer); :mod:`moelab.layout.schedule` plays the pipeline. Every constant is in
``calibration.py``; ``gemm_fit.py`` has the intervals of what follows from those of products and casts.
``published.py`` has the published two-by-two with its missing arm, ``measured.py`` the measurements of the package and
the constants of a node, ``validation.py`` the table of all errors, which ``benchmarks/validation`` makes.

The package itself names the traffic of expert parallelism: ``routing.py`` says where experts live, how tokens choose
them and how many ranks and nodes a token reaches, ``traffic.py`` which bytes that puts on NVLink and on the network, as
a formula and counted. Nothing here imports torch.
"""

from moelab.projection.routing import (
    KINDS,
    Destinations,
    ExpertIds,
    ExpertPlacement,
    Kind,
    RoutingModel,
    distinct_destinations,
    draw_expert_ids,
    expected_destinations,
    mean_destinations,
    routing_of,
    routing_of_load,
    zipf_weights,
)
from moelab.projection.traffic import (
    METHODS,
    ExchangeCount,
    LayerTraffic,
    Method,
    OnWires,
    count_rows,
    expected_rows,
    expected_traffic,
    layer_bytes,
    move_time_s,
    simulate_rows,
)

__all__ = [
    "KINDS",
    "METHODS",
    "Destinations",
    "ExchangeCount",
    "ExpertIds",
    "ExpertPlacement",
    "Kind",
    "LayerTraffic",
    "Method",
    "OnWires",
    "RoutingModel",
    "count_rows",
    "distinct_destinations",
    "draw_expert_ids",
    "expected_destinations",
    "expected_rows",
    "expected_traffic",
    "layer_bytes",
    "mean_destinations",
    "move_time_s",
    "routing_of",
    "routing_of_load",
    "simulate_rows",
    "zipf_weights",
]
