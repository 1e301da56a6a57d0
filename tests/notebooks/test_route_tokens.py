"""What notebook 03 refuses, and what it tells its reader to see."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from notebook_support import ROOT, parameters_of
from run_support import make_run

from moelab.errors import BadInput
from moelab.experiment import Experiment
from moelab.hardware import cluster_of
from moelab.notebooks import execute
from moelab.notebooks.batch import NotebookFailed
from moelab.planning.time.routing import ExpertPlacement, RoutingModel, expected_destinations
from moelab.planning.time.traffic import METHODS, expected_rows, expected_traffic, move_time_s, simulate_rows
from moelab.runs.expert_load import ExpertLoadFile
from moelab.viz.traffic import TrafficExplorer

NAME = "03_route_tokens"
NOTEBOOK = ROOT / "notebooks" / f"{NAME}.ipynb"
PLACEMENT = ExpertPlacement(experts=256, top_k=8, ep=32, ranks_per_node=8)
RANDOM, FORCED = RoutingModel(kind="random_balanced"), RoutingModel(kind="round_robin")


def test_a_group_that_cannot_be_stops_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NotebookFailed, match=r"BadInput: ep is 24 and does not divide 256 experts; valid: 1, 2, 4"):
        execute(NOTEBOOK, tmp_path / "executed.ipynb", {"ep": 24})


# What the notebook says that its reader should see


def test_destinations_and_savings_are_as_described() -> None:
    limited = RoutingModel(kind="group_limited", groups=8, limited_groups=4)
    by_score = RoutingModel(kind="group_by_score", groups=8, limited_groups=4)
    for routing, ranks, nodes in ((RANDOM, 7.27, 3.61), (limited, 6.60, 2.93), (by_score, 6.86, 3.12)):
        found = expected_destinations(routing, PLACEMENT)
        assert (found.ranks, found.nodes) == (pytest.approx(ranks, abs=0.02), pytest.approx(nodes, abs=0.02))
    factors = {}
    for routing in (FORCED, limited, RANDOM, parameters_of(NAME, routing="skewed").to_routing()):
        found = expected_destinations(routing, PLACEMENT)
        standard, _, hybrid = (expected_rows(found, PLACEMENT, method).network for method in METHODS)
        assert standard == 6.0
        factors[routing.kind] = standard / hybrid
    assert factors.pop("round_robin") == pytest.approx(8.0)
    assert 2.15 < min(factors.values()) < max(factors.values()) < 2.75


def test_skewed_routing_loads_some_ranks_more() -> None:
    skewed = parameters_of(NAME, routing="skewed").to_routing()
    received_R = simulate_rows(skewed, PLACEMENT, "standard", tokens=256).rows_SR.sum(axis=0)
    even_R = simulate_rows(RANDOM, PLACEMENT, "standard", tokens=256).rows_SR.sum(axis=0)
    assert received_R.max() > 1.5 * received_R.mean()
    assert even_R.max() < 1.05 * even_R.mean()


def test_a_measured_load_is_compared_and_drawn(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="give load, a run directory"):
        parameters_of(NAME, routing="measured").to_routing()
    model = Experiment(model="671B", shape={"n_layers": 5})  # its router is limited to 4 of 8 groups
    run = make_run(tmp_path, model, [8.0])
    tokens_LE = np.tile(np.arange(1, 257), (2, 1)) ** 2
    ExpertLoadFile(run.path).add(1, tokens_LE)
    parameters = parameters_of(NAME, routing="measured", load=str(run.path))
    routing = parameters.to_routing()
    assert [one.kind for one in parameters.to_compared()][3:] == ["skewed", "measured"]
    assert expected_destinations(routing, PLACEMENT).nodes < expected_destinations(RANDOM, PLACEMENT).nodes - 0.5
    received_R = simulate_rows(routing, PLACEMENT, "standard", tokens=256).rows_SR.sum(axis=0)
    shares_R = tokens_LE[0].reshape(32, -1).sum(axis=1) / tokens_LE[0].sum()
    assert received_R / received_R.sum() == pytest.approx(shares_R, abs=0.01)
    explorer = TrafficExplorer(parameters.measured, **parameters.model_dump(exclude={"seed", "load"}))
    assert explorer.figure
    (tmp_path / "nothing").mkdir()
    with pytest.raises(BadInput, match="is not a run directory"):
        parameters_of(NAME, load=str(tmp_path / "nothing")).to_compared()


def test_times_are_as_described() -> None:
    node = cluster_of("b200_x256").node
    bounds = {}
    for name, routing, method in (
        ("standard", RANDOM, "standard"),
        ("hybrid", RANDOM, "deepep_hybrid"),
        ("forced", FORCED, "deepep_hybrid"),
    ):
        sent = expected_traffic(routing, PLACEMENT, method, tokens=4096, hidden=7168).total  # type: ignore[arg-type]
        nvlink_s, network_s = move_time_s(sent, node)
        assert network_s > 7.5 * nvlink_s
        bounds[name] = 1e3 * network_s
    assert bounds == pytest.approx({"standard": 28, "hybrid": 13, "forced": 3.5}, rel=0.03)
