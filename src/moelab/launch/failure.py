"""Why a run failed, on one line: the failing rank's own exception instead of torchrun's wrapper.

When one rank dies the others fail too, with a broken connection, and torchrun reports all of them. The cause is, in
this order: a rank killed by a signal; an exception that is not a lost peer; a rank that aborted, as the communication
libraries do when they lose a peer; whatever came first.
"""

from __future__ import annotations

import json
import math
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused)|timed out waiting|socket timeout|socket closed|broken pipe|pair closure|"
    r"DistBackendError|DistNetworkError|DistStoreError|ncclRemoteError|remote process exited|"
    r"collective operation timeout|communicator (was|has been) aborted",
    re.I,
)
STDERR_TAIL_BYTES = 1_000_000
_NODE = re.compile(r"/node(\d+)/[^/]+/attempt_\d+/\d+$")
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?")  # PyTorch's own, where a process group exists
_TORCHRUN_FAILURE = re.compile(r"rank\s*:\s*(\d+) \(local_rank: \d+\)\s+exitcode\s*:\s*(-?\d+)(?: \(pid: (\d+)\))?")
_ENDED_BY_TORCHRUN = re.compile(r"Unable to shutdown process (\d+) via")


@dataclass(frozen=True, kw_only=True)
class RankFailure:
    """What one rank left: its message, and when in seconds since the Unix epoch (0: not known)."""

    rank: int
    message: str
    time: float = 0.0

    @property
    def is_lost_peer(self) -> bool:
        """Whether this is the consequence of another rank's death."""
        return bool(LOST_PEER.search(self.message))


def cause(logs: Path, log_text: str, *, ranks_per_node: int = 0) -> str | None:
    """The cause of a failed run, such as ``rank 1: RuntimeError: Loss is not finite (…)``.

    Args:
        logs: the folder given to torchrun as ``--log-dir``; of several nodes, the one that holds ``node0`` and so on.
        log_text: end of the combined log, with torchrun's own summary.
        ranks_per_node: of a run on several nodes.

    Returns:
        One line, or None if nothing was found.
    """
    failures = sorted(_exceptions(logs, ranks_per_node), key=lambda failure: (failure.time or math.inf, failure.rank))
    own = [failure for failure in failures if not failure.is_lost_peer]
    killed = list(_killed(log_text))
    aborted = [failure for failure in killed if "SIGABRT" in failure.message]
    chosen = [failure for failure in killed if failure not in aborted] or own or aborted or failures
    return f"rank {chosen[0].rank}: {chosen[0].message}" if chosen else None


def _exceptions(logs: Path, ranks_per_node: int) -> Iterator[RankFailure]:
    """What each rank raised: from its error file, else the end of its standard error."""
    for folder in logs.glob("**/attempt_*/[0-9]*"):
        found = _recorded(folder / "error.json") or _printed(folder / "stderr.log")
        if found:
            message, time = found
            node = _NODE.search(folder.as_posix())
            rank = int(folder.name) + (int(node[1]) * ranks_per_node if node else 0)
            yield RankFailure(rank=rank, message=_one_line(message), time=time)


def _recorded(file: Path) -> tuple[str, float] | None:
    """What ``torch.distributed.elastic``'s ``@record`` wrote, in whole seconds; None where that is missing or torn."""
    try:
        message = json.loads(file.read_text())["message"]
        return (message, 0.0) if isinstance(message, str) else (str(message["message"]), _seconds(message))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _seconds(message: dict[str, Any]) -> float:
    return float(message.get("extraInfo", {}).get("timestamp", 0))


def _printed(file: Path) -> tuple[str, float] | None:
    """The exception of the last traceback, for a failure before the trainer exists or without space for its file."""
    if not file.is_file():
        return None
    size = file.stat().st_size
    with file.open("rb") as stream:
        stream.seek(max(0, size - STDERR_TAIL_BYTES))
        text = stream.read(STDERR_TAIL_BYTES).decode(errors="replace")
    last, inside, before = "", False, ""
    for line in (_RANK_PREFIX.sub("", line) for line in text.splitlines()):
        if line.startswith("Traceback (most recent call last)"):
            # Python prints these two kinds for what does not end the process, the first at its very end.
            inside = not before.startswith(("Exception ignored", "Exception in thread"))
        elif inside and line and not line[0].isspace():
            last, inside = line, False
        before = line
    return (last, float(int(file.stat().st_mtime))) if last else None


def _killed(log_text: str) -> Iterator[RankFailure]:
    """Ranks that torchrun reports as ended by a signal which it did not send itself."""
    by_torchrun = set(_ENDED_BY_TORCHRUN.findall(log_text))
    for rank, code, process in _TORCHRUN_FAILURE.findall(log_text):
        number = -int(code)
        if number > 0 and number != signal.SIGTERM and process not in by_torchrun:
            name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
            hint = " (often the system running out of memory)" if name == "SIGKILL" else ""
            yield RankFailure(rank=int(rank), message=f"killed by {name}{hint}")


def _one_line(text: str) -> str:
    return " ".join(text.split())[:500]
