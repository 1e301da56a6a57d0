"""Two ranks send tokens to experts and back, in processes of their own, so that a crash there is a finding here.

With GPUs and DeepEP V2 the ranks use DeepEP. Elsewhere the same processes run over gloo on the CPU, and the finding
says that DeepEP was not run. Each rank runs this module as ``python -m moelab.health.smoke``; it writes what it is
doing to ``step<rank>``, and its result to ``result<rank>.json``.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from moelab.errors import Refused
from moelab.finding import Finding, fault, known_faults
from moelab.health.deepep import find_build
from moelab.machine import GpusUnknown, Machine, gpus, this_machine
from moelab.runs.log_text import tail

NAME = "smoke test"
RANKS = 2
TIMEOUT_S = 240.0
"""DeepEP compiles about six kernels on the way, each for seconds."""
# With faulthandler, a segmentation fault leaves a stack on standard error.
RANK_PROGRAM = (sys.executable, "-X", "faulthandler", "-m", "moelab.health.smoke")
GRACE_S = 5.0
"""How long the other ranks may take to end by themselves after one has failed."""
POLL_S, STDERR_BYTES = 0.05, 20_000


CRASH_CAUSE = {
    "opening the buffer": "DeepEP used a communicator that does not exist, or an NCCL with another layout",
    "importing DeepEP": "its extension module was built against a different PyTorch, CUDA or NCCL",
}
SIGNALS = {"SIGSEGV": "segmentation fault", "SIGABRT": "abort", "SIGKILL": "often out of memory"}


def smoke_test(
    *,
    machine: Machine | None = None,
    gpu_count: int | None = None,
    program: Sequence[str] = RANK_PROGRAM,
    timeout_s: float = TIMEOUT_S,
) -> Finding:
    """Run two ranks and report what happened to them.

    The machine is this one unless another is given, and nvidia-smi counts its GPUs. The program of a rank is given the
    rank, the number of ranks, a folder, and ``cuda`` or ``cpu``; it is killed after ``timeout_s``.

    Returns:
        One finding: ``ok`` if DeepEP moved tokens correctly, ``note`` if only gloo did, else an ``error``.
    """
    build = find_build(machine or this_machine())
    try:
        count = len(gpus()) if gpu_count is None else gpu_count
    except GpusUnknown as error:
        return fault("smoke test without a driver", error.found)
    missing = [f"{count} GPU{'s' if count != 1 else ''} where {RANKS} are needed"] if count < RANKS else []
    missing += [] if build.kind == "V2" and build.compiled else ["DeepEP V2 is not installed"]
    device: Literal["cuda", "cpu"] = "cpu" if missing else "cuda"
    with tempfile.TemporaryDirectory(prefix="moelab-smoke-") as folder:
        ranks = [_Rank(rank, device, Path(folder), program) for rank in range(RANKS)]
        failed = _wait(ranks, timeout_s)
        if failed:
            return _failure(failed[0], device, timeout_s)
        results = [json.loads((Path(folder) / f"result{rank}.json").read_text()) for rank in range(RANKS)]
    worst = max(float(result["relative_error"]) for result in results)
    moved = f"{RANKS} ranks sent tokens to their experts and back, forward and backward; relative error {worst:.1e}"
    if missing:
        found = f"DeepEP was not run: {'; '.join(missing)}. Over gloo on the CPU {moved}"
        return Finding(name=NAME, severity="note", found=found)
    return Finding(name=NAME, severity="ok", found=f"DeepEP {results[0]['version']}: {moved}")


class _Rank:
    """A rank's process, what it is doing, and what it left."""

    def __init__(self, rank: int, device: str, folder: Path, program: Sequence[str]) -> None:
        self.rank, self.folder = rank, folder
        self.stderr = folder / f"stderr{rank}"
        local = {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS), "RANK": str(rank), "LOCAL_RANK": str(rank)}
        # A test on the CPU must not touch a GPU that is here.
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
        with self.stderr.open("wb") as stderr:
            self.process = subprocess.Popen(
                [*program, str(rank), str(RANKS), str(folder), device],
                env={**os.environ, **local, **hidden, "OMP_NUM_THREADS": "1"},  # the tokens are few
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # a pipe that nobody reads would fill and stop the rank
                stderr=stderr,
                start_new_session=True,  # so that `end` kills a rank's compilers with it
            )
        self.ended_by_us = False

    @property
    def code(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        return self.process.poll()

    @property
    def step(self) -> str:
        """What the rank is doing, in its own words."""
        file = self.folder / f"step{self.rank}"
        return file.read_text() if file.exists() else "starting"

    def end(self) -> None:
        """Kill it and its children, such as a compiler."""
        if self.code is None:
            self.ended_by_us = True
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()  # so that its exit code is known, and no zombie is left


def _wait(ranks: Sequence[_Rank], timeout_s: float) -> list[_Rank]:
    """Wait for all ranks, or only briefly once one has failed; returns those that failed, in the order of failing."""
    deadline, failed = time.monotonic() + timeout_s, list[_Rank]()
    try:
        while any(rank.code is None for rank in ranks) and time.monotonic() < deadline:
            new = [rank for rank in ranks if rank.code and rank not in failed]  # 0 is no failure
            if new and not failed:
                deadline = min(deadline, time.monotonic() + GRACE_S)
            failed += sorted(new, key=lambda rank: rank.code or 0)  # of two at once, a crash (negative) comes first
            time.sleep(POLL_S)
    finally:
        for rank in ranks:
            rank.end()
    late = [rank for rank in ranks if rank.code and rank not in failed]
    return failed + sorted(late, key=lambda rank: (rank.ended_by_us, rank.code or 0))


def _failure(rank: _Rank, device: str, timeout_s: float) -> Finding:
    """The finding about the first rank that failed, by how it ended; the others only lost their peer."""
    name, code, words = f"rank {rank.rank}", rank.code or 0, tail(rank.stderr, STDERR_BYTES)
    library = "DeepEP" if device == "cuda" else "gloo"
    if rank.ended_by_us:
        found = f"{name} was still {rank.step} after {timeout_s:g} s"
        cause = "the ranks wait for each other: one is stuck, a link is down, or a compiler is slow"
        remedy = "run it with NCCL_DEBUG=INFO and EP_BUFFER_DEBUG=1, and check the NVLink findings"
    elif code < 0:
        # Real-time signals have a number only.
        ended_by = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        ended_by += f" ({SIGNALS[ended_by]})" if ended_by in SIGNALS else ""
        found = f"{name} was ended by {ended_by} while {rank.step}"
        cause = CRASH_CAUSE.get(rank.step, f"compiled code of {library} or torch crashed, which Python cannot catch")
        remedy = "reinstall torch (pip install --force-reinstall --no-deps torch) and run this again"
        if device == "cuda":
            remedy = "rebuild DeepEP in this environment, against the NCCL that PyTorch loads, and run this again"
    else:
        lines = words.strip().splitlines() or ["no message"]
        raised = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Failed|Refused)\b", line)]
        # The last one: above it stand the exceptions that led to it.
        found = f"{name} failed while {rank.step}: {' '.join((raised or lines)[-1].split())[:300]}"
        cause = f"{library} raised this"
        remedy = "check the other findings, then search DeepEP's issues for this message"
    follows = "processes on this machine cannot communicate, so no run with several ranks works"
    if device == "cuda":
        follows = "a training run with ep_backend=deepep would end the same way"
    if key := sign_of(words):
        return fault(key, found, follows=follows)
    return Finding(name=NAME, severity="error", found=found, cause=cause, consequence=follows, remedy=remedy)


def sign_of(words: str) -> str | None:
    """Key of the first known fault whose sign is in a process's output."""
    signs = {key: known["sign"] for key, known in known_faults().items() if "sign" in known}
    return next((key for key, sign in signs.items() if re.search(sign, words, re.I)), None)


def run_rank() -> None:
    """One rank: exchange a few tokens and write the result."""
    rank, ranks, folder, device = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]

    def step(doing: str) -> None:
        (folder / f"step{rank}").write_text(doing)

    step("loading torch")
    # Imported after the step is written: what crashes here is torch or DeepEP, and the finding says which.
    from moelab.micro.exchange import DEEPEP, SMALL, STANDARD, Layer, find_deepep, open_world, round_trip

    step("joining the process group")
    world = open_world(device, init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    step("importing DeepEP")
    has_deepep, version = find_deepep(device)
    if device == "cuda" and not has_deepep:
        raise Refused(version)
    step("opening the buffer")
    layer = Layer(DEEPEP[0] if has_deepep else STANDARD, SMALL, "round_robin", world)
    step("dispatching and combining")
    error = round_trip(layer, world)
    result = {"relative_error": error, "version": version}
    (folder / f"result{rank}.json").write_text(json.dumps(result))
    # A crash from here on still fails the test, by the exit code.
    step("closing the buffer")
    world.leave()


if __name__ == "__main__":
    run_rank()
