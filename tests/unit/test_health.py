"""The health check: schedules of pairs, who is blamed, what a node says of itself, and ranks over gloo."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nvidia_smi_support import made_machine

from moelab.finding import Finding
from moelab.health import measure
from moelab.health.measure import Seat, rounds
from moelab.health.node import check_gpus, check_kernel_log, check_node, parse_gpus
from moelab.health.slow import Blame, blame, judge

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
    nodes = EIGHT
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


EXPLAINED = {"cause": "a", "consequence": "b", "remedy": "c"}
SCOPE = "64 ranks on 8 nodes, NVIDIA B200, nccl"
WELL = {
    "health check": SCOPE,
    "single nodes": "8 of 8 without a fault",
    "GEMM time": "64 ranks within 1 %",
    "all-reduce in a node": "700 to 700 GB/s",
    "all-reduce of pairs": "350 to 350 GB/s",
    "all-reduce of all ranks": "340 GB/s with 64 ranks",
}


def test_a_healthy_cluster_and_processes_on_cpus_that_are_not_held_against_a_floor_for_gpus() -> None:
    unknown = "the profile has no all_reduce_floor_gb_s, so nodes are only compared with each other"
    cpus = "64 ranks on 8 nodes, CPU, gloo: processes on CPUs, whose bandwidth says nothing about GPUs"
    for changes, floor, scope in (
        ({}, 320.0, SCOPE),
        ({}, None, f"{SCOPE}; {unknown}"),
        ({"backend": "gloo", "device": "CPU"}, 1e4, f"{cpus} and is not compared with the profile's 10000 GB/s"),
    ):
        found = judge(result(**changes), floor)
        assert all(one.ok for one in found)
        assert {one.name: one.found for one in found} == {**WELL, "health check": scope}


def test_a_slow_node_a_slow_gpu_a_node_that_complains_and_an_early_end() -> None:
    slow = result(
        pairs_gb_s=[(a, b, SLOW if "n06" in (a, b) else FAST) for a, b in combinations(EIGHT, 2)],
        inside_gb_s={**dict.fromkeys(EIGHT, 700.0), "n02": 200.0},
        all_gb_s=90.0,
    )
    slow["gemm_ms"]["n04 rank 35"] = 1.4
    slow["node_findings"]["n04"] = [{"name": "heat", "severity": "error", "found": "GPU 3", **EXPLAINED}]
    assert {one.name: one.found for one in judge(slow, 320.0)} == {
        "health check": SCOPE,
        "single nodes": "7 of 8 without a fault",
        "n04: heat": "GPU 3",
        "GEMM time": "n04 rank 35 99 % above the median",
        "all-reduce in a node": "n02 200 GB/s; the profile's floor is 320 GB/s",
        "all-reduce of pairs": "n06 with all others: below 320 GB/s; all pairs: 90 to 350 GB/s",
        "all-reduce of all ranks": "90 GB/s with 64 ranks; the profile's floor is 320 GB/s",
        "for an operator": "scontrol update nodename=n04,n06 state=drain reason=moelab.health.measure",
    }
    early = {name: slow[name] for name in ("backend", "device", "ranks", "nodes")}
    (only,) = judge({**early, "stage": "timing GEMMs"}, 320.0)
    assert (only.severity, only.found) == ("error", f"{SCOPE}; it ended while timing GEMMs")


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
    found = by_name(check_kernel_log(made_machine(tmp_path, answers={"journalctl --dmesg": log})))
    assert {name: one.severity for name, one in found.items()} == {"Xid 13": "warning", "Xid 109": "error"}
    assert found["Xid 13"].found.startswith("2 since the node booted, on 0000:cb:00; last: Xid (PCI:0000:cb:00): 13")
    assert "CTX SWITCH TIMEOUT" in found["Xid 109"].found


@pytest.mark.parametrize(
    ("answers", "files", "severity", "words"),
    [
        ({"dmesg": "EXT4-fs (vda): mounted filesystem"}, {}, "ok", "none in the kernel log"),
        ({}, {"proc/sys/kernel/dmesg_restrict": "1\n"}, "note", "permission denied (kernel.dmesg_restrict is 1)"),
        ({}, {}, "note", "dmesg and journalctl do not answer"),
    ],
)
def test_a_kernel_log_without_xids_and_one_that_may_not_be_read(
    tmp_path: Path, answers: dict[str, str], files: dict[str, str], severity: str, words: str
) -> None:
    clocks, log, cards = check_node(made_machine(tmp_path, files, answers))
    assert (log.severity, clocks.ok, cards.ok) == (severity, True, True)
    assert words in log.found


def test_a_seat_of_torchrun_of_srun_and_of_neither(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torchrun = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "SLURMD_NODENAME": "gpu7"}
    assert Seat.of(torchrun) == Seat(rank=3, ranks=4, local_rank=1, node="gpu7", meeting="env://")
    task = {"SLURM_PROCID": "9", "SLURM_NTASKS": "16", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "1201"}
    step = {"SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "1"}
    assert Seat.of({**task, **step}).meeting == "tcp://gpu07:20608"
    for name in ("RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    for more, words in (([], "start this with torchrun, or srun"), (["--cluster=nope"], "the profiles are")):
        assert measure.main([f"--output={tmp_path}/h.json", *more]) == 2
        assert words in capsys.readouterr().err


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
