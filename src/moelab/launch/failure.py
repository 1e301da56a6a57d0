"""Why a run failed, on one line: the failing rank's own exception instead of torchrun's wrapper.

When one rank dies the others fail too, with a broken connection, and torchrun reports all of them. The cause is, in
this order: a rank killed by a signal; an exception that is not a lost peer; whatever came first.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LOST_PEER = re.compile(
    r"connection (closed|reset|refused)|timed out waiting|socket timeout|Broken pipe|DistBackendError", re.I
)
_EXCEPTION = re.compile(r"^(?:[A-Za-z_][\w.]*\.)?[A-Za-z_]\w*(?:Error|Exception|Interrupt|Refused|Converted|Exit)\b.*")
_TORCHRUN_FAILURE = re.compile(r"rank\s*:\s*(\d+) \(local_rank: \d+\)\s+exitcode\s*:\s*(-?\d+)")


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


def cause(logs: Path, log_text: str) -> str | None:
    """The cause of a failed run, such as ``rank 1: RuntimeError: Loss is not finite (…)``.

    Args:
        logs: the folder given to torchrun as ``--log-dir``.
        log_text: end of the combined log, with torchrun's own summary.

    Returns:
        One line, or None if nothing was found.
    """
    failures = sorted([*_error_files(logs), *_tracebacks(logs)], key=lambda failure: failure.time)
    own = [failure for failure in failures if not failure.is_lost_peer]
    killed = list(_killed(log_text))
    chosen = killed or own or failures
    return f"rank {chosen[0].rank}: {chosen[0].message}" if chosen else None


def _error_files(logs: Path) -> Iterator[RankFailure]:
    """What ``torch.distributed.elastic``'s ``@record`` wrote."""
    for path in sorted(logs.glob("*/attempt_*/*/error.json")):
        try:
            message = json.loads(path.read_text())["message"]
        except (OSError, ValueError, KeyError):
            continue
        text, when = (
            (message, 0.0) if isinstance(message, str) else (message["message"], message["extraInfo"]["timestamp"])
        )
        yield RankFailure(rank=int(path.parent.name), message=_one_line(text), time=float(when))


def _tracebacks(logs: Path) -> Iterator[RankFailure]:
    """Last exception on each rank's standard error, for failures before the trainer exists."""
    for path in sorted(logs.glob("*/attempt_*/*/stderr.log")):
        if (path.parent / "error.json").exists():
            continue
        text = path.read_text(errors="replace")
        if "Traceback (most recent call last)" not in text:
            continue
        lines = [line for line in text.splitlines() if _EXCEPTION.match(line)]
        if lines:
            yield RankFailure(rank=int(path.parent.name), message=_one_line(lines[-1]), time=path.stat().st_mtime)


def _killed(log_text: str) -> Iterator[RankFailure]:
    """Ranks that torchrun reports as ended by a signal other than its own SIGTERM."""
    for rank, code in _TORCHRUN_FAILURE.findall(log_text):
        if int(code) < 0 and -int(code) != signal.SIGTERM:
            name = signal.Signals(-int(code)).name
            hint = " (often the system running out of memory)" if name == "SIGKILL" else ""
            yield RankFailure(rank=int(rank), message=f"killed by {name}{hint}")


def _one_line(text: str) -> str:
    return " ".join(text.split())[:500]
