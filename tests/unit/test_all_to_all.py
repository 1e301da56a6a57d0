"""The all-to-all experiment: bytes against a count by hand, arms against a sum in closed form, two gloo ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import all_to_all_ranks
import pytest
import torch
from dispatcher_ranks import Ranks

from moelab.deepep.benchmark_cases import (
    OPERATIONS,
    ROUTINGS,
    SIZES,
    Size,
    choose_experts,
    plan,
    row_bytes,
)
from moelab.model import shape_of
from moelab.mxfp8.quantise import quantise

CPU = torch.device("cpu")


def size(**fields: int) -> Size:
    return Size(name="a size", **{"hidden": 64, "top_k": 4, "experts": 16, "tokens": 32, **fields})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the experiment leaves its files."""
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def seen(folder: Path) -> list[dict[str, Any]]:
    """What two ranks saw, which have written those files; see ``tests/all_to_all_ranks.py``."""
    ranks = Ranks(2)
    try:
        return ranks.ask(all_to_all_ranks.measure, folder)
    finally:
        ranks.close()


def read(folder: Path, name: str) -> Any:
    return json.loads((folder / f"{name}.json").read_text())


def test_loads_are_even_but_for_the_skewed_routing() -> None:
    one = size(experts=32, top_k=8, tokens=4096)
    loads = {
        name: torch.bincount(choose_experts(name, one, rank=1, device=CPU).flatten(), minlength=32).tolist()
        for name in ROUTINGS
    }
    assert loads["round_robin"] == loads["random_balanced"] == [1024] * 32
    assert max(loads["skewed"]) > 1.5 * 1024
    first, second = (choose_experts("skewed", one, rank=rank, device=CPU) for rank in (0, 1))
    assert not torch.equal(first, second)
    assert first.flatten().mode().values == second.flatten().mode().values  # popularity is one for all ranks


def test_bytes_of_a_row_are_those_of_the_tensors_that_the_dispatcher_sends() -> None:
    for hidden in (128, 2048, 7168):
        x = torch.randn(3, hidden).to(torch.bfloat16)
        assert row_bytes(hidden, "bf16") == x[0].nbytes
        for precision in ("fp8", "mxfp8"):
            data, scales = quantise(x, precision)
            assert row_bytes(hidden, precision) == data[0].nbytes + scales[0].nbytes


def test_the_plan_sweeps_once_and_names_each_group_and_arm_once() -> None:
    groups = plan(SIZES, ROUTINGS, ["standard", "deepep"], [8, 24])
    assert len({group.name for group in groups}) == len(groups) == len(SIZES) * len(ROUTINGS) + 1
    for group in groups:
        assert len({arm.name for arm in group.arms}) == len(group.arms) == 4
    assert {arm.operations for arm in groups[0].arms if arm.precision == "bf16"} == {OPERATIONS}
    for one in SIZES:
        shape = shape_of(one.name.split(",")[0])
        assert (one.hidden, one.top_k) == (shape.dim, shape.top_k)


STANDARD = {"all_to_all_single": 5}  # counts, and the rows of each operation
DEEPEP = {"dispatch": 1, "combine": 1, "resend": 1, "collect": 1}


def test_arms_run_the_operators_of_training_and_bring_home_what_they_should(seen: Any) -> None:
    for arms in (rank["arms"] for rank in seen):
        assert len(arms) == 4 * len(ROUTINGS)
        for name, arm in arms.items():
            assert 0 < arm["error"] < (0.05 if "fp8" in name else 0.01), name
            # Inside of moelab's operators the stand-in sends by c10d's collectives, which are not watched.
            assert arm["operators"] == (STANDARD if "standard" in name else DEEPEP), name


def test_rows_of_the_file(folder: Path, seen: Any) -> None:
    report = read(folder, "good")
    assert report["label"] == "measured"
    assert "no measure of a GPU" in report["device"]
    assert report["complete"] == ["small, random_balanced", "small, round_robin", "small, random_balanced, SM counts"]
    assert list(report["turns"]) == report["complete"]
    assert [len(arms) for arms in report["turns"].values()] == [4, 4, 2]
    rows = report["rows"]
    assert len(rows) == 2 * (2 * 4 + 2) + (4 + 1)
    for row in rows:
        assert row["error"] is None
        assert row["repeats"] == 3
        travels = row["precision"] if row["operation"] == "dispatch" else "bf16"
        arm = f"{row['routing']} {row['arm'].partition(',')[0]}"
        received = [rank["arms"][arm]["received"] for rank in seen]
        assert row["physical_bytes"] == max(received[0][1], received[1][0]) * row_bytes(256, travels)
        assert row["physical_gb_s"] == pytest.approx(row["physical_bytes"] / row["parts_us"]["wire"] / 1e3, abs=6e-4)
    swept = {(row["sms"], row["sms_chosen_by"]) for row in rows if row["backend"] == "deepep"}
    assert swept == {(1, "library"), (8, "caller")}
    assert {(row["backend"], row["layout"]) for row in rows} == {("standard", "dense"), ("deepep", "expanded")}


@pytest.mark.parametrize("name", ["good", "compiled"])
def test_parts_are_those_of_the_way_to_move_tokens(folder: Path, seen: Any, name: str) -> None:
    report = read(folder, name)
    assert report["compiled"] is (name == "compiled")
    assert seen[0]["compiled"] == 4 * ["dispatch", "combine"]
    parts = {(row["arm"], row["operation"]): list(row["parts_us"]) for row in report["rows"] if not row["error"]}
    assert parts["standard bf16", "dispatch"] == ["permute", "counts", "wire"]
    assert {tuple(parts["standard bf16", operation]) for operation in OPERATIONS[1:]} == {("permute", "wire")}
    for operation in OPERATIONS:
        assert parts["deepep bf16 expanded", operation] == ["wire"]
    for precision in ("fp8", "mxfp8"):
        assert parts[f"deepep {precision} expanded", "dispatch"] == ["quantise", "wire"]
    assert all(us > 0 for row in report["rows"] for us in row["parts_us"].values())


def test_a_second_call_measures_only_what_is_missing(folder: Path, seen: Any) -> None:
    assert seen[0]["buffers_of_a_second_call"] == 0
    assert all(rank["refused"].startswith("rank 0: JSONDecodeError") for rank in seen)  # none waits for the first
    assert not (folder / "late.json").exists()  # the time was over before the first group


def test_every_arm_has_its_own_multiprocessors_in_every_turn(seen: Any) -> None:
    sms = seen[1]["sms"]
    assert sms == [8, 24] * (len(sms) // 2)
    assert len(sms) > 2


def test_an_arm_that_fails_becomes_a_row_and_the_others_are_timed(folder: Path, seen: Any) -> None:
    rows = read(folder, "broken")["rows"]
    errors = {row["arm"]: row["error"] for row in rows if row["error"]}
    assert "round trip is wrong" in errors.pop("deepep bf16 expanded, 16 SMs")
    assert "round trip is wrong: relative error 1," in errors.pop("deepep bf16 expanded, 20 SMs")
    assert errors.pop("deepep bf16 expanded, 24 SMs").startswith("rank 1: RuntimeError: an illegal memory access")
    assert not errors
    timed = {row["arm"] for row in rows if not row["error"]}
    assert timed == {"standard bf16", "deepep bf16 expanded, 8 SMs"}
    assert read(folder, "broken")["complete"] == []
