"""The all-to-all experiment: bytes against a count by hand, arms against a sum in closed form, two gloo ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import all_to_all_ranks
import pytest
import torch
from dispatcher_ranks import Ranks
from figure_support import title

from moelab.micro.exchange import OPERATIONS, ROUTINGS, SIZES, Size, choose_experts, row_bytes
from moelab.model import shape_of
from moelab.mxfp8.quantise import quantise
from moelab.notebooks.results import measure_all_to_all
from moelab.viz import operation_times


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the experiment leaves its files."""
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def seen(folder: Path) -> list[dict[str, Any]]:
    """What two ranks saw, which have written those files; see ``tests/all_to_all_ranks.py``."""
    with closing(Ranks(2)) as ranks:
        return ranks.ask(all_to_all_ranks.experiment, folder)


@pytest.fixture
def read(folder: Path, seen: Any) -> Callable[[str], Any]:
    """A file of the experiment."""
    return lambda name: json.loads((folder / f"{name}.json").read_text())


def test_loads_are_even_but_for_the_skewed_routing() -> None:
    size = Size(name="a size", hidden=64, top_k=8, experts=32, tokens=4096)
    chosen = {
        (name, rank): choose_experts(name, size, rank=rank, device=torch.device("cpu")).flatten()
        for name in ROUTINGS
        for rank in (0, 1)
    }
    loads = {name: torch.bincount(chosen[name, 1], minlength=32).tolist() for name in ROUTINGS}
    assert loads["round_robin"] == loads["random_balanced"] == [1024] * 32
    assert max(loads["skewed"]) > 1.5 * 1024
    first, second = (chosen["skewed", rank] for rank in (0, 1))
    assert not torch.equal(first, second)
    assert first.mode().values == second.mode().values  # popularity is one for all ranks


@pytest.mark.parametrize("hidden", [128, 2048, 7168])
def test_bytes_of_a_row_are_those_of_the_tensors_that_the_dispatcher_sends(hidden: int) -> None:
    x = torch.randn(1, hidden).to(torch.bfloat16)
    assert row_bytes(hidden, "bf16") == x.nbytes
    for precision in ("fp8", "mxfp8"):
        assert row_bytes(hidden, precision) == sum(part.nbytes for part in quantise(x, precision))


def test_sizes_are_those_of_the_models() -> None:
    for size in SIZES:
        shape = shape_of(size.name.split(",")[0])
        assert (size.hidden, size.top_k) == (shape.dim, shape.top_k)


def test_arms_run_the_operators_of_training_and_bring_home_what_they_should(seen: Any) -> None:
    standard = {"all_to_all_single": 5}  # counts, and the rows of each operation
    deepep = {"dispatch": 1, "combine": 1, "resend": 1, "collect": 1}
    for arms in (rank["arms"] for rank in seen):
        assert len(arms) == 4 * len(ROUTINGS)
        for name, arm in arms.items():
            assert 0 < arm["error"] < (0.05 if "fp8" in name else 0.01), name
            # Inside of moelab's operators the stand-in sends by c10d's collectives, which are not watched.
            assert arm["operators"] == (standard if "standard" in name else deepep), name


def test_rows_of_the_file(read: Any, seen: Any) -> None:
    report = read("good")
    assert report["label"] == "measured"
    assert "no measure of a GPU" in report["device"]
    rows = report["rows"]
    assert len(rows) == 2 * (2 * 4 + 2)
    for row in rows:
        assert row["repeats"] == 3
        travels = row["precision"] if row["operation"] == "dispatch" else "bf16"
        arm = f"{row['routing']} {row['arm'].partition(',')[0]}"
        received = [rank["arms"][arm]["received"] for rank in seen]
        assert row["physical_bytes"] == max(received[0][1], received[1][0]) * row_bytes(256, travels)
    assert {tuple(row[name] for name in ("backend", "layout", "sms", "sms_chosen_by")) for row in rows} == {
        ("standard", "dense", None, "library"),
        ("deepep", "expanded", 1, "library"),
    }


@pytest.mark.parametrize("name", ["good", "compiled"])
def test_parts_are_those_of_the_way_to_move_tokens(read: Any, seen: Any, name: str) -> None:
    report = read(name)
    assert report["compiled"] is (name == "compiled")
    assert seen[0]["compiled"] == 4 * ["dispatch", "combine"]
    parts = {(row["arm"], row["operation"]): list(row["parts_us"]) for row in report["rows"] if "SMs" not in row["arm"]}
    assert parts == {
        ("standard bf16", "dispatch"): ["permute", "counts", "wire"],
        **{("standard bf16", operation): ["permute", "wire"] for operation in OPERATIONS[1:]},
        **{("deepep bf16 expanded", operation): ["wire"] for operation in OPERATIONS},
        ("deepep fp8 expanded", "dispatch"): ["quantise", "wire"],
        ("deepep mxfp8 expanded", "dispatch"): ["quantise", "wire"],
    }
    assert all(us > 0 for row in report["rows"] for us in row["parts_us"].values())


def test_every_turn_has_its_own_multiprocessors(seen: Any, read: Any) -> None:
    sms = seen[1]["sms"]
    assert sms == [8, 24] * (len(sms) // 2)
    assert len(sms) > 2
    chosen = {(row["sms"], row["sms_chosen_by"]) for row in read("sweep")["rows"] if row["backend"] == "deepep"}
    assert chosen == {(8, "caller"), (24, "caller")}


def test_wrong_tokens_on_any_rank_fail_on_all(seen: Any) -> None:
    for rank in seen:
        doubled, lost = rank["broken"]
        assert doubled.startswith("deepep bf16 expanded, 16 SMs does not bring tokens home: relative errors 1,")
        assert lost.endswith("nan, allowed 0.02")


def test_the_experiment_as_the_notebook_starts_it(tmp_path: Path) -> None:
    """On a CPU: the standard all-to-all at a small size."""
    measured = measure_all_to_all(tmp_path / "mine.json")
    operations = [(row["routing"], row["arm"], row["operation"]) for row in measured.rows]
    assert operations == [(routing, "standard bf16", name) for routing in ROUTINGS for name in OPERATIONS]
    assert "no measure of a GPU" in title(operation_times(measured))
