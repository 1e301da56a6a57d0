"""The full node without a machine: what is planned, predicted and read back, on made-up measurements."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import h100_full_node as driver
import pytest
from validation.full_node import ARMS, STOCK, node_job, predictions
from validation.node import EP_DEGREES, SCALING, Place, hardware_of, load_predicted, node_results
from validation.shapes import NODE_SHAPES, SHAPES, SMALL, thin_job, tps_of
from validation.table import full_node_rows
from validation.two_by_two import arm_results

from moelab.errors import BadInput
from moelab.planning.measured import DRY_RUN, FULL_NODE, TWO_BY_TWO, Measurement, load_measured
from moelab.planning.time.calibration import CALIBRATION

ROOT = Path(__file__).parents[2]
SLOWER = 1.1
H200 = {"name": "NVIDIA H200", "capability": 9.0, "driver": "580", "memory_mib": 143771}
LATER = "2099-01-01T00:00:00+00:00"
NOTHING = Measurement(name=FULL_NODE, content=None, packaged=True)
PREDICTED = [row for row in load_predicted()["rows"] if row["hardware"] == "h200_node"]
OPTIONS = Namespace(gpus=8, eps=(8, 4, 2), arms=ARMS, passes=2, steps=10, dry=False, cluster="nebius_soperator_b200")


def measured(
    degrees: tuple[int, ...] = EP_DEGREES, gpus: tuple[str, ...] = ("NVIDIA H200",) * 8, **fields: Any
) -> Measurement:
    """A file of the full node in which every step takes a tenth longer than predicted on H200."""
    rows = [
        {**{name: row[name] for name in ("ep", "shape", "routing", "arm")}, "order": order, "steps": 2,
         "tps_median": row["tps"] / SLOWER, "tps_iqr": 0.0, "step_s": [1.0, 1.0]}
        for row in PREDICTED
        if row["ep"] in degrees
        for order in range(2)
    ]  # fmt: skip
    environment = {"gpus": [{**H200, "name": name} for name in gpus]}
    content = {"label": "measured", "date": LATER, "environment": environment, "world_size": 8, "rows": rows}
    return Measurement(name=FULL_NODE, content=content | fields)


def test_predictions_are_those_of_the_step_model() -> None:
    rows = {(row["hardware"], *(row[name] for name in Place._fields)): row for row in predictions(draws=3)}
    for arm, fields in ((STOCK, {}), ("bf16_deepep", {"ep_backend": "deepep"})):
        job = thin_job(SHAPES["671B MoE-heavy"], {**fields, "routing": "round_robin"}, hardware="h200_node")
        row = rows["h200_node", SCALING, 2, "round_robin", arm]
        assert row["tps"] == pytest.approx(tps_of(job, CALIBRATION), abs=0.1)
    eight = node_job(NODE_SHAPES[SCALING], STOCK, "round_robin", ep=8, hardware="h200_node")
    assert (eight.shape.num_experts, eight.work.ep, eight.gpus) == (64, 8, 8)


def test_a_row_of_the_table_has_both_files() -> None:
    rows = full_node_rows(measured())
    assert len(rows) == len(PREDICTED)
    for row in rows:
        assert row.error == pytest.approx(100 * (SLOWER - 1), abs=0.1)
        assert row.kind == "blind"
        assert load_predicted()["date"][:10] in row.reference
        assert "8 × NVIDIA H200" in row.reference
    assert full_node_rows(NOTHING) == ()


KNOWN = "predictions are for NVIDIA H100 80GB HBM3, NVIDIA H200"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"date": load_predicted()["date"]}, "afterwards is no prediction"),
        ({"gpus": ("NVIDIA GH200 480GB",) * 8}, f"on NVIDIA GH200 480GB; {KNOWN}"),
        ({"gpus": ("NVIDIA H100 PCIe",) * 8}, f"on NVIDIA H100 PCIe; {KNOWN}"),
        ({"gpus": ("NVIDIA H200", "NVIDIA H100 PCIe")}, KNOWN),
        ({"label": DRY_RUN}, "'dry run on CPU, emulated': it is not a measurement"),
    ],
)
def test_what_is_not_held_against_these_predictions(fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    file = tmp_path / "h100_full_node.json"
    file.write_text(json.dumps(measured(**fields).content))
    with pytest.raises(BadInput, match=words):
        full_node_rows(load_measured(FULL_NODE, file))


def test_two_gpus_are_those_of_the_two_by_two_until_the_node_has_them() -> None:
    two = load_measured(TWO_BY_TWO)
    place = Place(SCALING, 2, "round_robin", "bf16_deepep")
    (expected,) = (
        one for one in arm_results(two.rows) if (one.shape, *place[2:]) == ("671B MoE-heavy", one.routing, one.arm)
    )
    assert node_results(NOTHING, two)[place].ratio == expected.ratio
    eight = measured((8,))
    both = node_results(eight, two)
    assert hardware_of(two) == "h200_node"
    assert (both[place].steps, both[place._replace(ep=8)].steps) == (expected.steps, 4)
    assert node_results(measured(), two)[place].steps == 4
    h100 = {"gpus": [{**H200, "name": "NVIDIA H100 80GB HBM3"}] * 2}
    other = Measurement(name=TWO_BY_TWO, content={**(two.content or {}), "environment": h100})
    assert place not in node_results(eight, other)


# The driver


def test_a_further_call_asks_for_what_is_missing_alone() -> None:
    steps = {step.kind: step for step in reversed(driver.plan(OPTIONS))}  # the first of each kind
    done = [{"shape": SCALING, "arm": arm, "order": order} for arm in ARMS[:2] for order in range(2)]
    refused = [{"shape": SCALING, "arm": ARMS[2], "error": []}]
    content = {"rows": [*done, {"shape": SCALING, "arm": ARMS[3], "order": 0}], "refused": refused}
    assert steps["train"].missing({}) == ARMS
    assert steps["train"].missing(content) == ARMS[3:]
    cut = {"rows": [{"routing": routing} for routing in ("random_balanced", "round_robin")]}
    assert steps["all_to_all"].missing(cut) == ("random_balanced", "round_robin")
    assert steps["all_to_all"].missing({**cut, "copies": {}}) == ()


def test_parts_become_one_result_without_this_machines_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = measured().rows
    for ep in EP_DEGREES:
        mine = [{name: row[name] for name in row if name != "ep"} for row in rows if row["ep"] == ep]
        refused = [{"shape": SMALL, "arm": ARMS[-1], "order": 0, "error": [f"{Path.home()}/x.py: no"]}]
        (tmp_path / f"train_ep{ep}.json").write_text(json.dumps({"rows": mine, "refused": refused}))
    results = []
    for name in ("NVIDIA H200", "NVIDIA B200"):
        monkeypatch.setattr(driver, "environment", lambda name=name: {"gpus": [{**H200, "name": name}] * 8})
        results.append(driver.merged(tmp_path, OPTIONS, LATER))
        assert str(Path.home()) not in json.dumps(results[-1])
        assert sorted(map(str, results[-1]["rows"])) == sorted(str({"ep": row["ep"], **row}) for row in rows)
    h200, b200 = results
    assert len(h200["predicted_beside_measured"]) == len(rows) / 2, "two passes a row"
    assert b200["predicted_beside_measured"] == []
    assert "was measured on NVIDIA B200" in b200["not_beside_predictions"]


@pytest.mark.parametrize(
    ("option", "output", "changed", "content", "words"),
    [
        ("--dry", "benchmarks/results/dry.json", "", None, "a dry run is no measurement"),
        ("--dry", "src/moelab/data/measured/dry.json", "", None, "a dry run is no measurement"),
        ("--dry", "elsewhere/h200_full_node.json", "", None, "a dry run is no measurement"),
        ("--predict", "elsewhere/predicted.json", " M src/moelab/x.py", None, "commit first"),
        ("--predict", "elsewhere/predicted.json", "", {}, "is measured"),
    ],
)
def test_a_dry_run_takes_no_measurements_place_and_a_prediction_is_of_committed_code_and_older_than_what_it_is_of(
    option: str, output: str, changed: str, content: dict[str, Any] | None, words: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["h100_full_node.py", option, "--output", str(ROOT / output)])
    monkeypatch.setattr(driver.subprocess, "run", lambda *_args, **_kwargs: Namespace(stdout=changed))
    monkeypatch.setattr(driver, "load_measured", lambda name: Measurement(name=name, content=content))
    monkeypatch.setattr(driver, "write_json", None)  # nothing is written
    with pytest.raises(SystemExit, match="2"):
        driver.main()
    assert words in capsys.readouterr().err
