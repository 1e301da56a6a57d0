"""Why a run failed: the failing rank's own exception, out of what torchrun and its ranks leave."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from moelab.runs import failure


def cause(logs: Path, *texts: str) -> str | None:
    found = failure.cause(logs, *texts)
    return None if found is None else str(found)


LOST = "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1"
TORCHRUN = """
E1128 01:00:00 torch/distributed/elastic/multiprocessing/api.py:988] failed (exitcode: {code}) local_rank: {rank}
============================================================
torchtitan.train FAILED
------------------------------------------------------------
Failures:
{others}
------------------------------------------------------------
Root Cause (first observed failure):
{root}
============================================================
"""
ENTRY = """[{index}]:
  time      : 2026-11-28_01:00:00
  host      : somewhere
  rank      : {rank} (local_rank: {rank})
  exitcode  : {code} (pid: {pid})
  error_file: /x/error.json
  traceback : Signal 9 (SIGKILL) received by PID {pid}
"""


def entry(rank: int, code: int) -> str:
    return ENTRY.format(index=rank, rank=rank, code=code, pid=1000 + rank)


def summary(root: tuple[int, int], *others: tuple[int, int]) -> str:
    """The end of torchrun's output; (rank, exit code) of the first failure that it saw and of the others."""
    listed = "".join(entry(*one) for one in others) or "  <NO_OTHER_FAILURES>"
    return TORCHRUN.format(rank=root[0], code=root[1], root=entry(*root), others=listed)


def rank_folder(logs: Path, rank: int) -> Path:
    folder = logs / "none_abc123" / "attempt_0" / str(rank)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def recorded(logs: Path, rank: int, message: str, *, when: int = 100) -> None:
    """What ``torch.distributed.elastic``'s ``record_exception`` writes in torch 2.14."""
    extra = {"py_callstack": "Traceback (most recent call last):\n…", "timestamp": str(when)}
    content = {"message": {"message": message, "extraInfo": extra}}
    (rank_folder(logs, rank) / "error.json").write_text(json.dumps(content))


def printed(logs: Path, rank: int, text: str, *, when: float = 100.0) -> None:
    file = rank_folder(logs, rank) / "stderr.log"
    file.write_text(text)
    os.utime(file, (when, when))


def traceback(*last: str, prefix: str = "") -> str:
    lines = ["Traceback (most recent call last):", '  File "train.py", line 3, in <module>', "    main()", *last]
    return "".join(f"{prefix}{line}\n" for line in lines)


def test_torch_writes_error_files_as_the_tests_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(rank_folder(tmp_path, 3) / "error.json"))
    try:
        raise KeyError("x")
    except KeyError as error:
        ErrorHandler().record_exception(error)
    found = cause(tmp_path, "") or ""
    assert found.startswith("rank 3: KeyError: 'x' (unit/test_failure.py:")
    assert found.endswith('raise KeyError("x"))')


def test_the_rank_that_failed_first_among_peers_that_lost_it(tmp_path: Path) -> None:
    for rank in (0, 1, 3):
        recorded(tmp_path, rank, LOST, when=90 + rank)
    recorded(tmp_path, 2, "ValueError: the vocabulary is too small", when=95)
    assert cause(tmp_path, summary((0, 1), (1, 1), (2, 1), (3, 1))) == "rank 2: ValueError: the vocabulary is too small"


@pytest.mark.parametrize(
    "noise",
    [
        LOST,
        "RuntimeError: Connection reset by peer",
        "torch.distributed.DistNetworkError: The client socket has timed out after 600000ms",
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3690, remote process exited",
        "RuntimeError: Application timeout caused pair closure",
        "RuntimeError: Timed out waiting 1800000ms for recv operation to complete",
        "BrokenPipeError: [Errno 32] Broken pipe",
        "ConnectionRefusedError: [Errno 111] Connection refused",
        "RuntimeError: NCCL communicator was aborted on rank 0",
        "RuntimeError: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)",
    ],
)
def test_a_lost_peer_is_a_consequence(tmp_path: Path, noise: str) -> None:
    recorded(tmp_path, 0, noise, when=1)
    recorded(tmp_path, 1, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", when=2)
    assert cause(tmp_path, "") == "rank 1: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"


def test_lost_peers_alone_are_still_reported(tmp_path: Path) -> None:
    recorded(tmp_path, 1, LOST, when=2)
    recorded(tmp_path, 0, "BrokenPipeError: [Errno 32] Broken pipe", when=3)
    assert cause(tmp_path, "") == f"rank 1: {LOST}"


def test_the_earlier_of_two_causes_and_the_lower_rank_in_a_tie(tmp_path: Path) -> None:
    recorded(tmp_path, 10, "ValueError: ten", when=50)
    recorded(tmp_path, 2, "ValueError: two", when=51)
    assert cause(tmp_path, "") == "rank 10: ValueError: ten"
    recorded(tmp_path, 2, "ValueError: two", when=50)
    assert cause(tmp_path, "") == "rank 2: ValueError: two"
    printed(tmp_path, 1, traceback("ValueError: one"), when=50.9)
    assert cause(tmp_path, "") == "rank 1: ValueError: one"
    assert cause(tmp_path, summary((10, 1), (1, 1), (2, 1))) == "rank 10: ValueError: ten"  # as torchrun saw them


def test_a_killed_rank_comes_before_what_its_peers_say(tmp_path: Path) -> None:
    recorded(tmp_path, 0, "RuntimeError: some words of a communication library that nobody has seen yet", when=1)
    found = cause(tmp_path, summary((0, 1), (1, -9)))
    assert found == "rank 1: killed by SIGKILL (often the system running out of memory)"
    assert cause(tmp_path, summary((1, -11))) == "rank 1: killed by SIGSEGV"
    assert cause(tmp_path / "no_errors", summary((0, -40))) == "rank 0: killed by signal 40"


def test_ranks_that_torchrun_ended_are_not_the_cause(tmp_path: Path) -> None:
    recorded(tmp_path, 1, "ValueError: mine")
    assert cause(tmp_path, summary((1, 1), (0, -15))) == "rank 1: ValueError: mine"
    # Rank 0 ignored SIGTERM, so torchrun killed it and lists it with exit code -9.
    forced = "W1128 api.py:1049] Unable to shutdown process 1000 via 15, forcefully exiting via 9\n"
    assert cause(tmp_path, forced + summary((1, 1), (0, -9))) == "rank 1: ValueError: mine"


def test_an_abort_may_be_the_watchdog_of_a_peer(tmp_path: Path) -> None:
    recorded(tmp_path, 1, "ValueError: mine", when=5)
    assert cause(tmp_path, summary((1, 1), (0, -6))) == "rank 1: ValueError: mine"
    recorded(tmp_path, 1, LOST)
    assert cause(tmp_path, summary((1, 1), (0, -6))) == "rank 0: killed by SIGABRT"


@pytest.mark.parametrize(
    "line",
    [
        "torch.OutOfMemoryError: CUDA out of memory.",
        "ValueError: too small",
        "KeyError: 'x'",
        "AssertionError",
        "moelab.mxfp8.converter.NothingConverted: no module of the built model multiplies in MXFP8",
        "moelab.errors.BadInput: unknown field 'x'",
        "subprocess.TimeoutExpired: Command 'x' timed out",
        "filelock._error.Timeout: The file lock could not be acquired",
        "StopIteration",
        "KeyboardInterrupt",
        "torch._dynamo.exc.Unsupported: builtin: print",
    ],
)
def test_any_exception_on_standard_error(tmp_path: Path, line: str) -> None:
    noise = "W1128 import.py: UserWarning: an Error: nothing\nRuntimeError: only a message of a logger\n"
    printed(tmp_path, 0, noise + traceback(line) + "some more output\nValueError: not an exception either\n")
    found = cause(tmp_path, "") or ""
    assert found.removesuffix(" (train.py:3 in <module>: main())") == f"rank 0: {line}"
    # Without words of its own it says where it was raised.
    without_words = ("AssertionError", "StopIteration", "KeyError: 'x'", "KeyboardInterrupt")
    assert found.endswith("main())") == (line in without_words)


def test_exceptions_that_end_nothing_are_ignored(tmp_path: Path) -> None:
    late = "Exception ignored in: <function Pool.__del__>\n" + traceback("ImportError: sys.meta_path is None")
    thread = "Exception in thread Thread-1:\n" + traceback("ConnectionResetError: reset")
    printed(tmp_path, 0, traceback("ValueError: mine") + thread + late)
    assert cause(tmp_path, "") == "rank 0: ValueError: mine"
    printed(tmp_path, 0, thread + late)
    assert cause(tmp_path, "") is None


def test_many_lines_become_one(tmp_path: Path) -> None:
    recorded(tmp_path, 0, "RuntimeError: CUDA error:\n  device-side assert\n\nCompile with `TORCH_USE_CUDA_DSA`\t.")
    found = cause(tmp_path, "")
    assert found == "rank 0: RuntimeError: CUDA error: device-side assert"
    recorded(tmp_path, 0, "ValueError: " + "x" * 10_000)
    assert len(cause(tmp_path, "") or "") < 300
    printed(tmp_path, 1, traceback("ValueError: first", "second line", "", "third line"), when=1.0)
    assert cause(tmp_path, "") == "rank 1: ValueError: first"


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "3", "null", "{}", '{"message": {}}', '{"message": {"extraInfo": {}}}', '{"message": 5}',
     '{"message": {"message": "x", "extraInfo": {"timestamp": "soon"}}}', "\udcff"],
)  # fmt: skip
def test_a_torn_error_file_falls_back_to_standard_error(tmp_path: Path, content: str) -> None:
    file = rank_folder(tmp_path, 0) / "error.json"
    file.write_text(content, errors="surrogateescape")
    assert cause(tmp_path, "") is None
    printed(tmp_path, 0, traceback("OSError: [Errno 28] No space left on device"))
    assert cause(tmp_path, "") == "rank 0: OSError: [Errno 28] No space left on device"


def test_an_error_file_with_a_message_alone(tmp_path: Path) -> None:
    (rank_folder(tmp_path, 0) / "error.json").write_text('{"message": "it broke"}')
    assert cause(tmp_path, "") == "rank 0: it broke"
    recorded(tmp_path, 1, "ValueError: with a time", when=5)
    assert cause(tmp_path, "") == "rank 1: ValueError: with a time"


def test_nothing_at_all(tmp_path: Path) -> None:
    assert cause(tmp_path, "") is None
    assert cause(tmp_path / "missing", "an unrelated end\n") is None
    printed(tmp_path, 0, "a warning\n")
    assert cause(tmp_path, "") is None


def test_a_huge_standard_error_and_a_huge_log_are_read_from_their_end(tmp_path: Path) -> None:
    for file in (rank_folder(tmp_path / "logs", 0) / "stderr.log", tmp_path / "train.log"):
        with file.open("wb") as stream:
            stream.write(traceback("ValueError: long ago").encode())
            stream.truncate(40 * 2**30)  # sparse: 40 GiB that would not fit in memory
            stream.seek(0, os.SEEK_END)
            stream.write(b"\n" + b"noise \xff\n" * 1000 + traceback("ValueError: the cause").encode())
    assert cause(tmp_path / "logs", "") == "rank 0: ValueError: the cause"
    assert str(failure.cause(None, failure.tail(file))) == "ValueError: the cause"
    assert max(failure.RANK_TAIL_BYTES, failure.LOG_TAIL_BYTES) < 2**26
