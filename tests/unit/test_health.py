"""The health check: schedules of pairs, who is blamed, what a node says of itself, and ranks over gloo."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nvidia_smi_support import with_files

from moelab.finding import Finding
from moelab.health import measure
from moelab.health.links import check_rdma
from moelab.health.measure import Seat, rounds
from moelab.health.node import check_gpus, check_kernel_log, check_node, parse_gpus
from moelab.health.slow import Blame, blame, judge
from moelab.machine import Machine

DATA = Path(__file__).parent.parent / "data" / "health"
FAST, SLOW = 350.0, 90.0
GPU = "{}, 00000000:{}:00.0, {} MHz, 55, 0, 0x{:016x}"


def names(count: int) -> list[str]:
    return [f"n{number:02}" for number in range(count)]


def measured(nodes: Sequence[str], slow: Callable[[str, str], bool], noise: Sequence[float] = (0.0,)) -> Any:
    """Bandwidth of every pair, GB/s, with some per cent of noise."""
    pairs = list(combinations(nodes, 2))
    return {pair: (SLOW if slow(*pair) else FAST) * (1 + noise[i % len(noise)]) for i, pair in enumerate(pairs)}


def by_name(found: Any) -> dict[str, Finding]:
    return {one.name: one for one in found}


@given(st.integers(2, 40))
def test_all_nodes_meet_once_and_are_busy_all_the_time(count: int) -> None:
    made = rounds(count)
    assert len(made) == count - 1 + count % 2
    assert sorted(pair for met in made for pair in met) == list(combinations(range(count), 2))
    for met in made:
        busy = [node for pair in met for node in pair]
        assert len(set(busy)) == len(busy) == count - count % 2


@given(st.integers(4, 32), st.data())
def test_slow_nodes_are_named_and_no_other(count: int, data: st.DataObject) -> None:
    nodes = names(count)
    slow = set(data.draw(st.lists(st.sampled_from(nodes), min_size=1, max_size=2, unique=True)))
    noise = data.draw(st.lists(st.floats(-0.08, 0.08), min_size=1, max_size=7))
    found = blame(measured(nodes, lambda a, b: bool({a, b} & slow), noise))
    assert found == Blame(nodes=tuple(sorted(slow)))


@given(st.integers(2, 16), st.integers(2, 16))
def test_a_slow_trunk_between_two_halves_is_no_nodes_fault(first: int, second: int) -> None:
    nodes = names(first + second)
    left, right = nodes[:first], nodes[first:]
    found = blame(measured(nodes, lambda a, b: (a in left) != (b in left)))
    assert found == Blame(groups=(tuple(left), tuple(right)))


EIGHT = names(8)


@pytest.mark.parametrize(
    ("gb_s", "floor", "expected"),
    [
        (measured(EIGHT, lambda a, b: bool({a, b} & set(EIGHT[4:]))), None, Blame(nodes=tuple(EIGHT[4:]))),
        # two slow nodes, of which each had a lucky measurement
        (
            {**measured(EIGHT, lambda a, b: bool({a, b} & {"n03", "n05"})), ("n02", "n03"): FAST, ("n02", "n05"): FAST},
            None,
            Blame(nodes=("n03", "n05")),
        ),
        (measured(EIGHT, lambda a, b: (a, b) == ("n02", "n05")), None, Blame(pairs=(("n02", "n05"),))),
        (measured(EIGHT, lambda a, b: True), 300.0, Blame(all_slow=True)),
        (measured(EIGHT, lambda a, b: True), None, Blame()),  # without a floor they are all alike
        ({("a", "b"): SLOW}, 300.0, Blame(all_slow=True)),  # which of the two, nobody can say
        ({}, None, Blame()),
    ],
)
def test_who_is_blamed(gb_s: Any, floor: float | None, expected: Blame) -> None:
    assert blame(gb_s, floor) == expected


def result(**fields: Any) -> dict[str, Any]:
    nodes = names(8)
    well = [Finding(name="GPU clocks", severity="ok", found="well").to_json()]
    return {
        **{"backend": "nccl", "device": "NVIDIA B200", "ranks": 64, "nodes": nodes, "stage": "finished"},
        "gemm_ms": {f"{nodes[rank // 8]} rank {rank}": 0.70 + 0.001 * (rank % 8) for rank in range(64)},
        "node_findings": dict.fromkeys(nodes, well),
        "inside_gb_s": dict.fromkeys(nodes, 700.0),
        "pairs_gb_s": [(*pair, FAST) for pair in combinations(nodes, 2)],
        "all_gb_s": 340.0,
        **fields,
    }


def test_a_healthy_cluster() -> None:
    found = judge(result(), 320.0)
    assert all(one.ok for one in found)
    assert by_name(found)["all-reduce of all ranks"].found == "340 GB/s with 64 ranks"
    assert "no all_reduce_floor_gb_s" in judge(result())[0].found


def test_a_slow_node_a_slow_gpu_and_a_node_that_complains() -> None:
    slow = result(
        pairs_gb_s=[(a, b, SLOW if "n06" in (a, b) else FAST) for a, b in combinations(names(8), 2)],
        inside_gb_s={**dict.fromkeys(names(8), 700.0), "n02": 200.0},
        all_gb_s=90.0,
    )
    slow["gemm_ms"]["n04 rank 35"] = 1.4
    explained = {"cause": "a", "consequence": "b", "remedy": "c"}
    slow["node_findings"]["n04"] = [{"name": "heat", "severity": "error", "found": "GPU 3", **explained}]
    faults = {one.name: one.found for one in judge(slow, 320.0) if not one.ok}
    assert faults == {
        "n04: heat": "GPU 3",
        "GEMM time": "n04 rank 35 99 % above the median",
        "all-reduce in a node": "n02 200 GB/s; the profile's floor is 320 GB/s",
        "all-reduce of pairs": "n06 with all others: below 320 GB/s; all pairs: 90 to 350 GB/s",
        "all-reduce of all ranks": "90 GB/s with 64 ranks; the profile's floor is 320 GB/s",
    }


def test_gloo_is_never_held_against_a_floor_for_gpus() -> None:
    found = judge(result(backend="gloo", device="CPU"), 10_000.0)
    assert all(one.ok for one in found)
    assert "is not compared with the profile's 10000 GB/s" in found[0].found
    below = by_name(judge(result(), 10_000.0))
    assert below["all-reduce of pairs"].found.startswith("every pair")


def test_a_check_that_ended_early_says_where() -> None:
    reached = {name: result()[name] for name in ("backend", "device", "ranks", "nodes")}
    (only,) = judge({**reached, "stage": "reducing pairs of nodes"}, 320.0)
    assert only.severity == "error"
    assert "ended while reducing pairs of nodes" in only.found


def test_a_throttled_gpu_and_bad_memory() -> None:
    rows = [GPU.format(gpu, f"{gpu:02X}", 1965, 0x4) for gpu in range(8)]
    assert all(one.ok for one in check_gpus(list(parse_gpus("\n".join(rows)))))
    for gpu, bit in enumerate((0x02, 0x08, 0x20, 0x40, 0x80)):  # nvml.h: NvmlClocksEventReasons
        rows[gpu] = GPU.format(gpu, f"{gpu:02X}", 975 if gpu == 3 else 1965, bit)
    rows[5] = rows[5].replace("55, 0,", "55, 2,")
    remapped = "00000000:05:00.0, Yes, No\n00000000:06:00.0, 0, 1\n"
    found = list(check_gpus(list(parse_gpus("\n".join(rows), remapped))))
    assert [(one.name, one.severity, one.found) for one in found if not one.ok] == [
        ("applications clocks", "warning", "GPU 0"),
        ("hardware slowdown", "error", "GPU 1"),
        ("software thermal slowdown", "warning", "GPU 2"),
        ("hardware thermal slowdown", "error", "GPU 3"),
        ("hardware power brake", "error", "GPU 4"),
        ("GPU clock", "warning", "GPU 3 975 MHz; median 1965 MHz"),
        ("ECC errors", "error", "GPU 5: 2 uncorrected"),
        ("row remapping", "error", "GPU 6: failed"),
        ("row remapping", "warning", "GPU 5: pending"),
    ]


def test_gpus_that_say_little() -> None:
    row = "0, 00000000:01:00.0, [N/A], 41, [N/A], [Not Supported]"
    (gpu,) = parse_gpus(f"Failed to initialize NVML, or so, it says\n{row}\n")
    assert (gpu.clock_mhz, gpu.uncorrected_errors, gpu.reasons, gpu.idle) == (None, None, None, False)
    assert all(one.ok for one in check_gpus([gpu]))


def node(root: Path, answers: Mapping[str, str | None], **files: str) -> Machine:
    """A node with these answers to commands and these files, whose names have ``__`` for ``/``."""
    with_files(root, {name.replace("__", "/"): text for name, text in files.items()})

    def run(command: Sequence[str]) -> str | None:
        return answers.get(" ".join(command[:2]))

    return Machine(root=root, env={}, run=run, search=(), memlock_bytes=None)


def test_recorded_answers_of_two_h200s_at_their_power_limit() -> None:
    remapped = (DATA / "nvidia_smi_remapped.csv").read_text()
    busy, rested = (
        list(parse_gpus((DATA / f"nvidia_smi_{state}.csv").read_text(), remapped)) for state in ("load", "idle")
    )
    states = [(gpu.clock_mhz, gpu.uncorrected_errors, gpu.remap_pending) for gpu in busy]
    assert states == [(1485, 0, False), (1635, 0, False)]
    found = by_name(check_gpus(busy))
    assert found["GPU clocks"].found == "2 GPUs under load, 1485 to 1635 MHz, up to 54 °C"
    assert found["software power cap"].severity == "note"
    assert by_name(check_gpus(rested)).keys() == {"GPU clocks"}


def test_xids_of_a_recorded_kernel_log(tmp_path: Path) -> None:
    log = (DATA / "dmesg_xid.txt").read_text()
    found = by_name(check_kernel_log(node(tmp_path, {"dmesg": None, "journalctl --dmesg": log})))
    assert found.keys() == {"Xid 13", "Xid 109"}
    assert found["Xid 13"].severity == "warning"
    assert found["Xid 13"].found.startswith("2 since the node booted, on 0000:cb:00; last: Xid (PCI:0000:cb:00): 13")
    assert found["Xid 109"].severity == "error"
    assert "CTX SWITCH TIMEOUT" in found["Xid 109"].found


def test_a_kernel_log_without_and_one_that_may_not_be_read(tmp_path: Path) -> None:
    (clean,) = check_kernel_log(node(tmp_path / "a", {"dmesg": "EXT4-fs (vda): mounted filesystem"}))
    assert clean.severity == "ok"
    (denied,) = check_kernel_log(node(tmp_path / "b", {}, proc__sys__kernel__dmesg_restrict="1\n"))
    assert denied.severity == "note"
    assert "permission denied (kernel.dmesg_restrict is 1)" in denied.found
    (absent,) = check_kernel_log(node(tmp_path / "c", {}))
    assert "do not answer" in absent.found


def card(name: str, state: str, link: str, rate: str, layer: str = "InfiniBand\n") -> dict[str, str]:
    port = {"state": state, "phys_state": link, "rate": rate, "link_layer": layer}
    return {f"sys__class__infiniband__{name}__ports__1__{file}": text for file, text in port.items()}


def test_links_of_network_cards(tmp_path: Path) -> None:
    """Without a profile the fastest card is what the others are held against."""
    up = ("4: ACTIVE\n", "5: LinkUp\n", "400 Gb/sec (4X NDR)\n")
    down = card("mlx5_b", "1: DOWN\n", "3: Disabled\n", "10 Gb/sec (4X SDR)\n")
    slow = card("mlx5_c", "4: ACTIVE\n", "5: LinkUp\n", "200 Gb/sec (4X HDR)\n")
    slow |= card("mlx5_an0", *up[:2], "40 Gb/sec (4X QDR)\n", layer="Ethernet\n")
    found = by_name(check_rdma(node(tmp_path / "b", {}, **card("mlx5_a", *up), **down, **slow)))
    assert found["RDMA devices"].severity == "warning"
    assert "mlx5_b (1: DOWN, 3: Disabled)" in found["RDMA devices"].found
    assert found["RDMA rate"].found == "mlx5_c 25 GB/s"  # and not the Ethernet card, as of Azure's ND H100 v5
    assert found["RDMA rate"].cause.startswith("the others have 50 GB/s")
    unmanaged = card("mlx5_a", "2: INIT\n", "5: LinkUp\n", "400 Gb/sec (4X NDR)\n")
    (alone,) = check_rdma(node(tmp_path / "c", {}, **unmanaged))
    assert alone.severity == "error"
    assert "subnet manager" in alone.cause


def test_a_laptop_has_nothing_to_complain_about(tmp_path: Path) -> None:
    assert all(one.ok for one in check_node(node(tmp_path, {})))


def test_a_seat_of_torchrun_and_of_srun() -> None:
    torchrun = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "SLURMD_NODENAME": "gpu7"}
    assert Seat.of(torchrun) == Seat(rank=3, ranks=4, local_rank=1, node="gpu7", meeting="env://")
    task = {"SLURM_PROCID": "9", "SLURM_NTASKS": "16", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "1201"}
    step = {"SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "1"}
    assert Seat.of({**task, **step}).meeting == "tcp://gpu07:20608"


RANKS = """
import contextlib, os, sys
from moelab.health.measure import main

ranks = []
for rank in range(3):  # a process for each, with torch loaded once
    ranks.append(os.fork())
    if not ranks[-1]:
        os.environ |= {"RANK": str(rank), "SLURMD_NODENAME": f"n{rank}"}
        with open(f"{sys.argv[1]}/said{rank}", "w") as said, contextlib.redirect_stdout(said):
            main(sys.argv[2:])  # 1 where the machine is busy, and one's GEMMs are slow
        os._exit(0)
for rank in ranks:
    os.waitpid(rank, 0)
"""


def test_three_nodes_over_gloo(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    output = tmp_path / "health.json"
    shared = {**os.environ, "WORLD_SIZE": "3", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    arguments = [f"--output={output}", "--cluster=nebius_soperator_b200"]
    subprocess.run([sys.executable, "-c", RANKS, str(tmp_path), *arguments], env=shared, check=True)
    printed = [(tmp_path / f"said{rank}").read_text() for rank in range(3)]
    written = json.loads(output.read_text())
    assert (written["stage"], written["backend"]) == ("finished", "gloo")
    assert written["inside_gb_s"] == {}  # one rank on each
    assert written["gemm_ms"].keys() == {f"n{rank} rank {rank}" for rank in range(3)}
    assert written["node_findings"].keys() == {"n0", "n1", "n2"}
    assert {tuple(sorted(pair)) for *pair, _ in written["pairs_gb_s"]} == {*combinations(("n0", "n1", "n2"), 2)}
    assert all(gb_s > 0 for gb_s in (written["all_gb_s"], *(gb_s for *_, gb_s in written["pairs_gb_s"])))
    assert "is not compared with the profile's 320 GB/s" in printed[0]
    assert printed[1:] == ["", ""]


def test_nobody_to_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    for more, words in (([], "start this with torchrun, or srun"), (["--cluster=nope"], "the profiles are")):
        assert measure.main([f"--output={tmp_path}/h.json", *more]) == 2
        assert words in capsys.readouterr().err
