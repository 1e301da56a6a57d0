"""Two ranks send tokens to experts and back, in processes of their own: a crash there becomes a sentence here.

With GPUs and DeepEP V2 the ranks use DeepEP. Elsewhere the same processes run over gloo on the CPU, and the finding
says that DeepEP was not run.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moelab.deepep.build import find_build
from moelab.finding import Finding
from moelab.machine import Machine, gpus, this_machine

NAME = "smoke test"
RANKS = 2
TIMEOUT_S = 240.0
"""DeepEP compiles some six kernels on the way, each for seconds."""
RANK_PROGRAM = (sys.executable, "-X", "faulthandler", "-m", "moelab.deepep.smoke_rank")
GRACE_S = 5.0
"""What the other ranks get to end by themselves after one has failed."""
POLL_S, STDERR_BYTES = 0.05, 20_000


@dataclass(frozen=True, kw_only=True)
class Known:
    """A failure that has been seen: where it says so, why, and what helps."""

    sign: str
    cause: str
    remedy: str


KNOWN = (
    Known(
        sign=r"NCCL GIN is unavailable",
        cause="DeepEP asked NCCL for GPU-initiated networking, and there is none",
        remedy="export EP_DISABLE_GIN=1 where all ranks share a node; between nodes bring an RDMA port up",
    ),
    Known(
        sign=r"Duplicate NCCL runtime|Invalid NCCL versions|compile-time and runtime versions must be the same",
        cause="DeepEP was built against another NCCL than PyTorch loads",
        remedy="rebuild DeepEP against that NCCL (EP_NCCL_ROOT_DIR)",
    ),
    Known(
        sign=r"NVCC compilation failed|nvcc.*(not found|No such file)|cuda_home is not None|exists\(nvcc_path\)",
        cause="DeepEP V2 compiles its kernels when it runs, and that failed",
        remedy="install the CUDA toolkit of PyTorch's CUDA version and set CUDA_HOME",
    ),
    Known(
        sign=r"out of memory",
        cause="another process holds the GPU's memory",
        remedy="nvidia-smi shows which; end it, or choose other GPUs with CUDA_VISIBLE_DEVICES",
    ),
    Known(
        sign=r"no kernel image is available|invalid device function",
        cause="DeepEP was built for another GPU architecture",
        remedy="rebuild it with TORCH_CUDA_ARCH_LIST of this GPU",
    ),
    Known(
        sign=r"undefined symbol|cannot open shared object file",
        cause="DeepEP was built against another PyTorch, CUDA or NVSHMEM than is installed",
        remedy="rebuild DeepEP in this environment",
    ),
)
CRASH_CAUSE = {
    "opening the buffer": "DeepEP used a communicator that is not there, or an NCCL that is laid out differently",
    "importing DeepEP": "its extension module was built against another PyTorch, CUDA or NCCL",
}


def smoke_test(
    *,
    machine: Machine | None = None,
    gpu_count: int | None = None,
    program: Sequence[str] = RANK_PROGRAM,
    timeout_s: float = TIMEOUT_S,
) -> Finding:
    """Run two ranks and say what happened to them.

    Args:
        machine: where DeepEP is looked for; this one by default.
        gpu_count: GPUs to reckon with; asked of nvidia-smi by default.
        program: of one rank; it is given the rank, the number of ranks, a folder and ``cuda`` or ``cpu``.
        timeout_s: after which the ranks are ended.

    Returns:
        One finding: ``ok`` where DeepEP moved tokens right, ``note`` where only gloo did, else an ``error``.
    """
    build = find_build(machine or this_machine())
    count = len(gpus()) if gpu_count is None else gpu_count
    missing = [f"{count} GPU{'s' if count != 1 else ''}, {RANKS} are needed"] if count < RANKS else []
    missing += [] if build.kind == "V2" and build.compiled else ["DeepEP V2 is not installed"]
    device: Literal["cuda", "cpu"] = "cpu" if missing else "cuda"
    with tempfile.TemporaryDirectory(prefix="moelab-smoke-") as folder:
        ranks = [_Rank(rank, device, Path(folder), program) for rank in range(RANKS)]
        failed = _wait(ranks, timeout_s)
        if failed:
            return _failure(failed[0], device, timeout_s)
        results = [json.loads((Path(folder) / f"result{rank}.json").read_text()) for rank in range(RANKS)]
    return _success(results, missing)


class _Rank:
    """A process, where it is, and what it left."""

    def __init__(self, rank: int, device: str, folder: Path, program: Sequence[str]) -> None:
        self.rank, self.folder = rank, folder
        self.stderr = folder / f"stderr{rank}"
        local = {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS), "RANK": str(rank), "LOCAL_RANK": str(rank)}
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
        with self.stderr.open("wb") as stderr:
            self.process = subprocess.Popen(
                [*program, str(rank), str(RANKS), str(folder), device],
                env={**os.environ, **local, **hidden, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,
            )
        self.ended_by_us = False

    @property
    def code(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        return self.process.poll()

    @property
    def step(self) -> str:
        """What the rank was doing, in its own words."""
        file = self.folder / f"step{self.rank}"
        return file.read_text() if file.exists() else "starting"

    def end(self) -> None:
        """Kill it and what it started, such as a compiler."""
        if self.code is None:
            self.ended_by_us = True
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def last_words(self) -> str:
        """End of its standard error."""
        with self.stderr.open("rb") as file:
            file.seek(max(0, self.stderr.stat().st_size - STDERR_BYTES))
            return file.read().decode(errors="replace")


def _wait(ranks: Sequence[_Rank], timeout_s: float) -> list[_Rank]:
    """Wait for all ranks, but only a little after one has failed; those that failed, the first to do so first."""
    deadline, failed = time.monotonic() + timeout_s, list[_Rank]()
    try:
        while any(rank.code is None for rank in ranks) and time.monotonic() < deadline:
            new = [rank for rank in ranks if rank.code and rank not in failed]
            if new and not failed:
                deadline = min(deadline, time.monotonic() + GRACE_S)
            failed += sorted(new, key=lambda rank: rank.code or 0)  # of two at once, the one that crashed
            time.sleep(POLL_S)
    finally:
        for rank in ranks:
            rank.end()
    late = [rank for rank in ranks if rank.code and rank not in failed]
    return failed + sorted(late, key=lambda rank: (rank.ended_by_us, rank.code or 0))


def _success(results: Sequence[dict[str, float | str]], missing: Sequence[str]) -> Finding:
    error = max(float(result["relative_error"]) for result in results)
    moved = f"{RANKS} ranks sent tokens to their experts and back, forward and backward; relative error {error:.1e}"
    if missing:
        found = f"DeepEP was not run: {'; '.join(missing)}. Over gloo on the CPU {moved}"
        return Finding(name=NAME, severity="note", found=found)
    return Finding(name=NAME, severity="ok", found=f"DeepEP {results[0]['version']}: {moved}; GIN {results[0]['gin']}")


def _failure(rank: _Rank, device: str, timeout_s: float) -> Finding:
    """What the first rank that failed says; the others only lost their peer."""
    words = rank.last_words()
    found, cause, remedy = _explain(rank, words, device, timeout_s)
    known = next((one for one in KNOWN if re.search(one.sign, words, re.I)), None)
    return Finding(
        name=NAME,
        severity="error",
        found=found,
        cause=known.cause if known else cause,
        consequence="a training run with ep_backend=deepep would end the same way"
        if device == "cuda"
        else "processes cannot talk to each other on this machine: no run of several ranks works",
        remedy=known.remedy if known else remedy,
    )


def _explain(rank: _Rank, words: str, device: str, timeout_s: float) -> tuple[str, str, str]:
    """What was seen, its usual cause and what to try, by the way in which a rank ended."""
    name, code = f"rank {rank.rank}", rank.code or 0
    library = "DeepEP" if device == "cuda" else "gloo"
    if rank.ended_by_us:
        return (
            f"{name} was still {rank.step} after {timeout_s:g} s",
            "the ranks wait for each other: one lost its way, a link is down, or a compiler is slow",
            "run it with NCCL_DEBUG=INFO and EP_BUFFER_DEBUG=1, and look at the NVLink findings",
        )
    if code < 0:
        return (
            f"{name} was ended by {_signal_name(-code)} while {rank.step}",
            CRASH_CAUSE.get(rank.step, f"compiled code of {library} or torch crashed, which Python cannot catch"),
            "rebuild DeepEP in this environment, against the NCCL that PyTorch loads, and run this again"
            if device == "cuda"
            else "reinstall torch (pip install --force-reinstall --no-deps torch) and run this again",
        )
    return (
        f"{name} failed while {rank.step}: {_exception(words)}",
        f"{library} raised this",
        "see the other findings, then look the message up in DeepEP's issues",
    )


def _signal_name(number: int) -> str:
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    meaning = {"SIGSEGV": "segmentation fault", "SIGABRT": "abort", "SIGKILL": "often out of memory"}.get(name)
    return f"{name} ({meaning})" if meaning else name


def _exception(words: str) -> str:
    """The last exception of a traceback, on one line."""
    lines = [line for line in words.splitlines() if re.match(r"^[\w.]+(Error|Exception|Failed|Refused)\b", line)]
    return " ".join((lines or words.split("\n")[-3:] or ["no message"])[-1].split())[:300] or "no message"
