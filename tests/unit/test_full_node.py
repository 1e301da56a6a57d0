"""The full node without a machine: what is planned, predicted and read back, on made-up measurements."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h100_full_node as driver
import plotly.graph_objects as go
import pytest
from validation.full_node import ARMS, STOCK, node_job, predictions
from validation.shapes import NODE_SHAPES, SHAPES, SMALL, thin_job
from validation.table import full_node_rows

from moelab.analysis.two_by_two import arm_results
from moelab.errors import BadInput
from moelab.projection.calibration import CALIBRATION
from moelab.projection.measured import (
    DRY_RUN,
    EP_DEGREES,
    FULL_NODE,
    SCALING,
    TWO_BY_TWO,
    Measurement,
    Place,
    hardware_of,
    load_measured,
    load_predicted,
    node_results,
)
from moelab.projection.step import tps_of
from moelab.viz.deepep import scaling

ROOT = Path(__file__).parents[2]
SLOWER = 1.1
H200 = {"name": "NVIDIA H200", "capability": 9.0, "driver": "580", "memory_mib": 143771}
NOTHING = Measurement(name=FULL_NODE, content=None, packaged=True)


def made_up(degrees: tuple[int, ...] = EP_DEGREES, *, date: str = "2099-01-01T00:00:00+00:00") -> dict[str, Any]:
    """A file of the full node in which every step takes a tenth longer than predicted on H200."""
    rows = [
        {**{name: row[name] for name in ("ep", "shape", "routing", "arm")}, "order": order, "steps": 2,
         "tps_median": row["tps"] / SLOWER, "tps_iqr": 0.0, "step_s": [1.0, 1.0]}
        for row in load_predicted()["rows"]
        if row["hardware"] == "h200_node" and row["ep"] in degrees
        for order in range(2)
    ]  # fmt: skip
    return {"label": "measured", "date": date, "environment": {"gpus": [H200] * 8}, "world_size": 8, "rows": rows}


def read(content: Mapping[str, Any], folder: Path) -> Measurement:
    file = folder / "h100_full_node.json"
    file.write_text(json.dumps(content))
    return load_measured(FULL_NODE, file)


# --- predictions -----------------------------------------------------------------------------------------------------


def test_predictions_are_those_of_the_step_model() -> None:
    rows = {(row["hardware"], *(row[name] for name in Place._fields)): row for row in predictions(draws=3)}
    for arm, fields in ((STOCK, {}), ("bf16_deepep", {"ep_backend": "deepep"})):
        job = thin_job(SHAPES["671B MoE-heavy"], {**fields, "routing": "round_robin"}, hardware="h200_node")
        row = rows["h200_node", SCALING, 2, "round_robin", arm]
        assert row["tps"] == pytest.approx(tps_of(job, CALIBRATION), abs=0.1)
    eight = node_job(NODE_SHAPES[SCALING], STOCK, "round_robin", ep=8, hardware="h200_node")
    assert (eight.shape.num_experts, eight.work.ep, eight.gpus) == (64, 8, 8)


# --- predicted beside measured ---------------------------------------------------------------------------------------


def test_a_row_of_the_table_has_both_files(tmp_path: Path) -> None:
    rows = full_node_rows(read(made_up(), tmp_path))
    assert len(rows) == sum(row["hardware"] == "h200_node" for row in load_predicted()["rows"])
    for row in rows:
        assert row.error == pytest.approx(100 * (SLOWER - 1), abs=0.1)
        assert row.kind == "blind"
        assert load_predicted()["date"][:10] in row.reference
        assert "8 × NVIDIA H200" in row.reference
    assert full_node_rows(NOTHING) == ()


def test_what_was_written_down_afterwards_is_no_prediction(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="afterwards is no prediction"):
        full_node_rows(read(made_up(date=load_predicted()["date"]), tmp_path))


@pytest.mark.parametrize("name", ["NVIDIA GH200 480GB", "NVIDIA H100 PCIe"])
def test_other_gpus_are_not_held_against_these_predictions(name: str, tmp_path: Path) -> None:
    other = {"environment": {"gpus": [{**H200, "name": name}] * 8}}
    with pytest.raises(BadInput, match=f"on {name}; predictions are for NVIDIA H100 80GB HBM3, NVIDIA H200"):
        full_node_rows(read(made_up() | other, tmp_path))
    mixed = {"environment": {"gpus": [H200, {**H200, "name": name}]}}
    with pytest.raises(BadInput, match="predictions are for"):
        full_node_rows(read(made_up() | mixed, tmp_path))


def test_a_dry_run_is_never_read_as_a_measurement(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="'dry run on CPU, emulated': it is not a measurement"):
        read(made_up() | {"label": DRY_RUN}, tmp_path)


def test_two_gpus_are_those_of_the_two_by_two_until_the_node_has_them(tmp_path: Path) -> None:
    two = load_measured(TWO_BY_TWO)
    place = Place(SCALING, 2, "round_robin", "bf16_deepep")
    (expected,) = (
        one for one in arm_results(two.rows) if (one.shape, *place[2:]) == ("671B MoE-heavy", one.routing, one.arm)
    )
    assert node_results(NOTHING, two)[place].ratio == expected.ratio
    eight = read(made_up((8,)), tmp_path)
    both = node_results(eight, two)
    assert hardware_of(two) == "h200_node"
    assert place in both
    h100 = {"gpus": [{**H200, "name": "NVIDIA H100 80GB HBM3"}] * 2}
    other = Measurement(name=TWO_BY_TWO, content={**(two.content or {}), "environment": h100})
    assert place not in node_results(eight, other)
    assert both[place._replace(ep=8)].steps == 4
    own = node_results(read(made_up(), tmp_path), two)[place]
    assert own.steps == 4


def marks(figure: go.Figure, words: str) -> list[go.Scatter]:
    return [trace for trace in figure.data if trace.name.endswith(words)]


def test_scaling_draws_predictions_open_and_measurements_filled(tmp_path: Path) -> None:
    two = load_measured(TWO_BY_TWO)
    today = scaling(load_predicted(), NOTHING, two)
    assert "EP 4, EP 8 not measured yet" in str(today.layout.title.text).replace("<br>", " ")
    assert [len(trace.x) for trace in marks(today, "predicted")] == [3] * 4
    assert [len(trace.x) for trace in marks(today, "measured")] == [1] * 4
    assert all("open" in trace.marker.symbol for trace in marks(today, "predicted"))
    later = scaling(load_predicted(), read(made_up(), tmp_path), two)
    assert "not measured yet" not in str(later.layout.title.text)
    gains = [row for row in load_predicted()["rows"] if (row["hardware"], row["shape"]) == ("h200_node", SCALING)]
    drawn = sorted(value for trace in marks(later, "measured") for value in trace.y)
    arms = ("bf16_deepep", "fp8_deepep_dispatch-fp8")
    assert drawn == pytest.approx(sorted(row["gain"] for row in gains if row["arm"] in arms), abs=1e-4)


# --- the driver ------------------------------------------------------------------------------------------------------


def options(*, gpus: int = 8, eps: tuple[int, ...] | None = (8, 4, 2), dry: bool = False) -> Namespace:
    cluster = "nebius_soperator_b200"
    return Namespace(gpus=gpus, eps=eps, arms=ARMS, passes=2, steps=10, dry=dry, cluster=cluster)


def test_a_further_call_asks_for_what_is_missing_alone() -> None:
    step = next(step for step in driver.plan(options()) if step.kind == "train")
    done = [{"shape": SCALING, "arm": arm, "order": order} for arm in ARMS[:2] for order in range(2)]
    refused = [{"shape": SCALING, "arm": ARMS[2], "error": []}]
    content = {"rows": [*done, {"shape": SCALING, "arm": ARMS[3], "order": 0}], "refused": refused}
    assert step.missing({}) == ARMS
    assert step.missing(content) == ARMS[3:]
    exchange = next(step for step in driver.plan(options()) if step.kind == "all_to_all")
    late = {"routing": "round_robin", "error": "not run: the time was over"}
    turns = {"671B, 64 experts, random_balanced": [], "671B, 64 experts, round_robin": []}
    assert exchange.missing({"turns": turns, "rows": []}) == ()
    assert exchange.missing({"turns": turns, "rows": [late]}) == ("round_robin",)


def test_parts_become_one_result_without_this_machines_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "environment", lambda: {"gpus": [H200] * 8})
    rows = made_up()["rows"]
    for ep in EP_DEGREES:
        mine = [{name: row[name] for name in row if name != "ep"} for row in rows if row["ep"] == ep]
        refused = [{"shape": SMALL, "arm": ARMS[-1], "order": 0, "error": [f"{Path.home()}/x.py: no"]}]
        (tmp_path / f"train_ep{ep}.json").write_text(json.dumps({"rows": mine, "refused": refused}))
    found = driver.merged(tmp_path, options(), "2099-01-01T00:00:00+00:00")
    assert sorted(json.dumps(row, sort_keys=True) for row in found["rows"]) == sorted(
        json.dumps(row, sort_keys=True) for row in rows
    )
    assert str(Path.home()) not in json.dumps(found)
    assert read(found, tmp_path).rows
    assert len(found["predicted_beside_measured"]) == len(rows) / 2, "two passes a row"
    monkeypatch.setattr(driver, "environment", lambda: {"gpus": [{**H200, "name": "NVIDIA B200"}] * 8})
    other = driver.merged(tmp_path, options(), "2099-01-01T00:00:00+00:00")
    assert (len(other["rows"]), other["predicted_beside_measured"]) == (len(rows), [])
    assert "was measured on NVIDIA B200" in other["not_beside_predictions"]


@pytest.mark.parametrize(
    "output", ["benchmarks/results/dry.json", "src/moelab/data/measured/dry.json", "elsewhere/h200_full_node.json"]
)
def test_a_dry_run_takes_no_measurements_place(
    output: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["h100_full_node.py", "--dry", "--output", str(ROOT / output)])
    with pytest.raises(SystemExit, match="2"):
        driver.main()
    assert "a dry run is no measurement" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changed", "measured", "said"),
    [(" M src/moelab/x.py", NOTHING, "commit first"), ("", Measurement(name=FULL_NODE, content={}), "is measured")],
)
def test_a_prediction_is_of_committed_code_and_older_than_the_measurement(
    changed: str, measured: Measurement, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    output = tmp_path / "predicted.json"
    monkeypatch.setattr(sys, "argv", ["h100_full_node.py", "--predict", "--output", str(output)])
    monkeypatch.setattr(driver.subprocess, "run", lambda *_args, **_kwargs: Namespace(stdout=changed))
    monkeypatch.setattr(driver, "load_measured", lambda _name: measured)
    monkeypatch.setattr(driver, "predicted_file", lambda **_: {"rows": []})
    with pytest.raises(SystemExit, match="2"):
        driver.main()
    assert said in capsys.readouterr().err
    assert not output.exists()
