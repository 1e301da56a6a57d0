"""A stranger who reaches the ports of a run executes nothing, and on one machine only its own users reach them."""

from __future__ import annotations

import os
import pickle
import socket
from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from processes import processes
from torch.distributed import TCPStore
from training_support import SHARED, ranks_of, steps_logged, wait_for

from moelab.experiment import Experiment
from moelab.launch.in_job import NodeOfJob
from moelab.launch.local import stage_data
from moelab.launch.torchrun import Process, command
from moelab.runs import directory
from moelab.runs.directory import RunDir

pytestmark = pytest.mark.training
SLURM = NodeOfJob(job_id=os.getpid(), label="7", node=0, nodes=1, restarts=0)
C10D = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]


class Payload:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


def listeners(pids: Iterable[int]) -> Iterator[tuple[str, int]]:
    """Address and port of every TCP socket that some processes listen with."""
    links = [link for pid in pids for link in Path(f"/proc/{pid}/fd").iterdir()]
    inodes = set()
    for link in links:
        with suppress(OSError):  # closed meanwhile
            inodes.add(str(link.readlink()))
    for family, table in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for _, local, _, state, *rest in map(str.split, Path("/proc/net", table).read_text().splitlines()[1:]):
            if state == "0A" and f"socket:[{rest[5]}]" in inodes:
                words = bytes.fromhex(local.partition(":")[0])  # of four bytes each, the last one first
                address = b"".join(words[start : start + 4][::-1] for start in range(0, len(words), 4))
                yield socket.inet_ntop(family, address), int(local.partition(":")[2], 16)


def write_pickle(port: int, key: str, payload: bytes) -> None:
    """As a stranger does: into whatever store listens there."""
    with suppress(RuntimeError):  # no store
        TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=2)).set(key, b64encode(payload).decode())


@pytest.mark.parametrize(
    ("rendezvous", "is_executed", "reached_by"),
    [
        ((), False, {"127.0.0.1"}),
        (SLURM.rendezvous("localhost", SLURM.port(20000, 28999)), False, None),
        (C10D, True, None),  # torchrun's own: the pickle does what it is meant to
    ],
    ids=["one machine", "a node of a job", "c10d"],
)
def test_a_pickle_in_the_store_of_a_run(
    tmp_path: Path, rendezvous: Sequence[str], is_executed: bool, reached_by: set[str] | None
) -> None:
    experiment = Experiment(**SHARED, name="tests", gpus_per_node=2, ep=2)
    stage_data(experiment)
    run, executed = directory.create(tmp_path, experiment), tmp_path / "executed"
    launched = command(experiment, run.path, rendezvous=rendezvous)
    with run.log.open("wb") as log, Process(launched, log) as torchrun:
        wait_for(lambda: ranks_of(run.path) or torchrun.poll() is not None)
        id_of_run = variable_of_rank(run, "TORCHELASTIC_RUN_ID")
        for _, port in listeners([torchrun.pid]):
            write_pickle(port, f"torch.rendezvous.{id_of_run}", pickle.dumps(Payload(f"touch {executed}")))
        if is_executed:
            wait_for(executed.exists)
            torchrun.kill()  # what is left of it ends with the block
            return
        wait_for(lambda: steps_logged(tmp_path) >= 1 or torchrun.poll() is not None)
        addresses = {address for address, _ in listeners([torchrun.pid, *ranks_of(run.path).values()])}
        assert reached_by is None or addresses == reached_by
        assert torchrun.wait(180) == 0, run.log.read_text()
    assert not executed.exists()
    assert steps_logged(tmp_path) == SHARED["steps"]


def variable_of_rank(run: RunDir, name: str) -> str:
    mine = str(run.path)
    return next(
        variables[name]
        for _, _, variables in processes()
        if variables.get("MOELAB_EXPERIMENT", "").startswith(mine) and name in variables
    )
