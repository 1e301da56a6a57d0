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
    device = "cpu" if missing else "cuda"
    with tempfile.TemporaryDirectory(prefix="moelab-smoke-") as name:
        folder = Path(name)
        ranks = [_start(rank, device, folder, program) for rank in range(RANKS)]
        if failure := _first_failure(ranks, timeout_s):
            return _explained(*failure, folder, device, timeout_s)
        results = [json.loads((folder / f"result{rank}.json").read_text()) for rank in range(RANKS)]
    worst = max(float(result["relative_error"]) for result in results)
    moved = f"{RANKS} ranks sent tokens to their experts and back, forward and backward; relative error {worst:.1e}"
    if missing:
        found = f"DeepEP was not run: {'; '.join(missing)}. Over gloo on the CPU {moved}"
        return Finding(name=NAME, severity="note", found=found)
    return Finding(name=NAME, severity="ok", found=f"DeepEP {results[0]['version']}: {moved}")


def _start(rank: int, device: str, folder: Path, program: Sequence[str]) -> subprocess.Popen[bytes]:
    local = {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    # A test on the CPU must not touch a GPU that is here.
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    with (folder / f"stderr{rank}").open("wb") as stderr:
        return subprocess.Popen(
            [*program, str(rank), str(RANKS), str(folder), device],
            env={**os.environ, **local, **hidden, "OMP_NUM_THREADS": "1"},  # the tokens are few
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # a pipe that nobody reads would fill and stop the rank
            stderr=stderr,
            start_new_session=True,  # so that a rank's compilers are killed with it
        )


def _first_failure(ranks: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> tuple[int, int | None] | None:
    """The rank that failed first and its exit code, or one that was late and None; None if all ended well.

    No rank lives on: the others have only lost their peer.
    """
    deadline = time.monotonic() + timeout_s
    try:
        while True:
            codes = [rank.poll() for rank in ranks]
            # Of two at once, a crash, whose code is negative, comes first.
            if failed := sorted((code, rank) for rank, code in enumerate(codes) if code):
                code, rank = failed[0]
                return rank, code
            if None not in codes:
                return None
            if time.monotonic() > deadline:
                return codes.index(None), None
            time.sleep(POLL_S)
    finally:
        for process in ranks:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _explained(rank: int, code: int | None, folder: Path, device: str, timeout_s: float) -> Finding:
    """The finding about the first rank that failed, by how it ended."""
    step_file = folder / f"step{rank}"
    step = step_file.read_text() if step_file.exists() else "starting"
    words = tail(folder / f"stderr{rank}", STDERR_BYTES)
    library = "DeepEP" if device == "cuda" else "gloo"
    if code is None:
        found = f"rank {rank} was still {step} after {timeout_s:g} s"
        cause = "the ranks wait for each other: one is stuck, a link is down, or a compiler is slow"
        remedy = "run it with NCCL_DEBUG=INFO and EP_BUFFER_DEBUG=1, and check the NVLink findings"
    elif code < 0:
        # Real-time signals have a number only.
        ended_by = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        ended_by += f" ({SIGNALS[ended_by]})" if ended_by in SIGNALS else ""
        found = f"rank {rank} was ended by {ended_by} while {step}"
        cause = CRASH_CAUSE.get(step, f"compiled code of {library} or torch crashed, which Python cannot catch")
        remedy = "reinstall torch (pip install --force-reinstall --no-deps torch) and run this again"
        if device == "cuda":
            remedy = "rebuild DeepEP in this environment, against the NCCL that PyTorch loads, and run this again"
    else:
        lines = words.strip().splitlines() or ["no message"]
        raised = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Failed|Refused)\b", line)]
        # The last one: above it stand the exceptions that led to it.
        found = f"rank {rank} failed while {step}: {' '.join((raised or lines)[-1].split())[:300]}"
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
