"""The all-to-all experiment: bytes against a count by hand, arms against a sum in closed form, two gloo ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moelab.deepep.benchmark_cases import (
    OPERATIONS,
    ROUTINGS,
    SIZES,
    Size,
    choose_experts,
    plan,
    row_bytes,
    rows_to_ranks,
    traffic,
)
from moelab.model import shape_of
from moelab.mxfp8.quantise import quantise

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


def size(**fields: int) -> Size:
    return Size(name="a size", **{"hidden": 64, "top_k": 4, "experts": 16, "tokens": 32, **fields})


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes left; see ``tests/all_to_all_ranks.py``."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, str(ROOT / "tests" / "all_to_all_ranks.py")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ranks = [
        subprocess.Popen([*command, str(rank), str(folder)], env=environment, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    errors = [rank.communicate()[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(errors)
    return folder


def read(folder: Path, name: str) -> Any:
    return json.loads((folder / f"{name}.json").read_text())


@given(st.sampled_from(ROUTINGS), st.integers(0, 5), st.integers(1, 8), st.sampled_from([8, 16, 32]))
@settings(max_examples=40, deadline=None)
def test_every_token_gets_distinct_experts_and_rows_are_counted(routing: str, rank: int, k: int, experts: int) -> None:
    ids = choose_experts(routing, size(top_k=k, experts=experts), rank=rank, device=CPU)
    assert ids.shape == (32, k)
    assert all(len(set(row)) == k and 0 <= min(row) <= max(row) < experts for row in ids.tolist())
    for ranks in (1, 2, 4, 8):
        counted = rows_to_ranks(ids, experts=experts, ranks=ranks)
        owners = [[expert // (experts // ranks) for expert in row] for row in ids.tolist()]
        assert counted["copies"] == [sum(row.count(one) for row in owners) for one in range(ranks)]
        assert counted["once"] == [sum(one in row for row in owners) for one in range(ranks)]
        assert sum(counted["copies"]) == 32 * k
        assert 32 <= sum(counted["once"]) <= 32 * min(k, ranks)


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


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 99), min_size=3, max_size=3), min_size=3, max_size=3))
def test_physical_bytes_leave_the_own_rank_out_and_take_the_fuller_direction(sent: list[list[int]]) -> None:
    found = traffic(sent, hidden=128, precision="bf16")
    out = [sum(sent[p][q] for q in range(3) if q != p) for p in range(3)]
    into = [sum(sent[q][p] for q in range(3) if q != p) for p in range(3)]
    assert found["physical_bytes"] == max(out + into) * 256
    assert 3 * found["rows_to_others"] == pytest.approx(sum(out))


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


def test_arms_run_the_operators_of_training_and_bring_home_what_they_should(two_ranks: Path) -> None:
    for rank in range(2):
        seen = read(two_ranks, f"seen{rank}")["arms"]
        assert len(seen) == 4 * len(ROUTINGS)
        for name, arm in seen.items():
            assert 0 < arm["error"] < (0.05 if "fp8" in name else 0.01), name
            # Inside of moelab's operators the stand-in sends by c10d's collectives, which are not watched.
            assert arm["operators"] == (STANDARD if "standard" in name else DEEPEP), name


def test_rows_of_the_file(two_ranks: Path) -> None:
    report = read(two_ranks, "good")
    assert report["label"] == "measured"
    assert "no measure of a GPU" in report["device"]
    assert report["complete"] == ["small, random_balanced", "small, round_robin", "small, random_balanced, SM counts"]
    assert list(report["turns"]) == report["complete"]
    assert [len(arms) for arms in report["turns"].values()] == [4, 4, 2]
    rows = report["rows"]
    assert len(rows) == 2 * (2 * 4 + 2) + (4 + 1)
    seen = read(two_ranks, "seen0")["arms"], read(two_ranks, "seen1")["arms"]
    for row in rows:
        assert row["error"] is None
        assert row["repeats"] == 3
        travels = row["precision"] if row["operation"] == "dispatch" else "bf16"
        received = [one[f"{row['routing']} {row['arm'].partition(',')[0]}"]["received"] for one in seen]
        assert row["physical_bytes"] == max(received[0][1], received[1][0]) * row_bytes(256, travels)
        assert row["physical_gb_s"] == pytest.approx(row["physical_bytes"] / row["parts_us"]["wire"] / 1e3, abs=6e-4)
    swept = {(row["sms"], row["sms_chosen_by"]) for row in rows if row["backend"] == "deepep"}
    assert swept == {(1, "library"), (8, "caller")}
    assert {(row["backend"], row["layout"]) for row in rows} == {("standard", "dense"), ("deepep", "expanded")}


@pytest.mark.parametrize("name", ["good", "compiled"])
def test_parts_are_those_of_the_way_to_move_tokens(two_ranks: Path, name: str) -> None:
    report = read(two_ranks, name)
    assert report["compiled"] is (name == "compiled")
    assert read(two_ranks, "seen0")["compiled"] == 4 * ["dispatch", "combine"]
    parts = {(row["arm"], row["operation"]): list(row["parts_us"]) for row in report["rows"] if not row["error"]}
    assert parts["standard bf16", "dispatch"] == ["permute", "counts", "wire"]
    assert {tuple(parts["standard bf16", operation]) for operation in OPERATIONS[1:]} == {("permute", "wire")}
    for operation in OPERATIONS:
        assert parts["deepep bf16 expanded", operation] == ["wire"]
    for precision in ("fp8", "mxfp8"):
        assert parts[f"deepep {precision} expanded", "dispatch"] == ["quantise", "wire"]
    assert all(us > 0 for row in report["rows"] for us in row["parts_us"].values())


def test_a_second_call_measures_only_what_is_missing(two_ranks: Path) -> None:
    assert read(two_ranks, "seen0")["buffers_of_a_second_call"] == 0
    assert not (two_ranks / "late.json").exists()  # the time was over before the first group


def test_every_arm_has_its_own_multiprocessors_in_every_turn(two_ranks: Path) -> None:
    seen = read(two_ranks, "seen1")["sms"]
    assert seen == [8, 24] * (len(seen) // 2)
    assert len(seen) > 2


def test_an_arm_that_fails_becomes_a_row_and_the_others_are_timed(two_ranks: Path) -> None:
    rows = read(two_ranks, "broken")["rows"]
    errors = {row["arm"]: row["error"] for row in rows if row["error"]}
    assert "round trip is wrong" in errors.pop("deepep bf16 expanded, 16 SMs")
    assert "round trip is wrong: relative error 1," in errors.pop("deepep bf16 expanded, 20 SMs")
    assert errors.pop("deepep bf16 expanded, 24 SMs").startswith("rank 1: RuntimeError: an illegal memory access")
    assert not errors
    timed = {row["arm"] for row in rows if not row["error"]}
    assert timed == {"standard bf16", "deepep bf16 expanded, 8 SMs"}
    assert read(two_ranks, "broken")["complete"] == []
