"""What a step costs before it is run.

:func:`moelab.projection.project.project` predicts a step in one call. ``stack.py`` has what software does, ``job.py``
a step with nothing left to resolve, ``layer_time.py`` the time of a layer from ``product_time.py``, ``attention.py``,
``memory_bound.py``, ``quantisation.py``, ``moe_exchange.py`` and ``collective.py``; ``moelab.layout.schedule`` plays a
schedule and ``step.py`` puts the step together. Every constant is in ``calibration.py``, every measurement that the
model is held against in ``validation.py``, from ``step_cases.py``, ``kernel_cases.py`` and ``torchao_cases.py``;
``arms_projected.py`` has the published two-by-two with its missing arm, ``waterfall.py`` the way to Megatron-Bridge,
``what_if.py`` and ``cost.py`` other clusters and what training costs.

The package itself names the traffic of expert parallelism, from how tokens choose experts.

``placement.py`` says where experts live, ``routing_model.py`` how tokens choose them, ``destinations.py`` how many
ranks and nodes a token reaches, ``traffic.py`` which bytes that puts on NVLink and on the network, ``exchange.py`` what
each rank sends to each other one, counted. Nothing here imports torch.
"""

from moelab.projection.destinations import (
    Destinations,
    distinct_destinations,
    expected_destinations,
    mean_destinations,
)
from moelab.projection.exchange import ExchangeCount, count_rows, simulate_rows
from moelab.projection.placement import ExpertPlacement
from moelab.projection.routing_model import (
    KINDS,
    ExpertIds,
    Kind,
    RoutingModel,
    draw_expert_ids,
    routing_of,
    zipf_weights,
)
from moelab.projection.traffic import LayerTraffic, expected_rows, expected_traffic, layer_bytes
from moelab.projection.wires import METHODS, Method, OnWires, move_time_s

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
    "simulate_rows",
    "zipf_weights",
]
