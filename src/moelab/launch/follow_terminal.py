"""The live view in a terminal: redrawn in place on a terminal, a line for each change in a file or pipe.

It only reads run directories; the runs do not know that they are watched, and go on when it ends.
"""

from __future__ import annotations

import itertools
import math
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, TextIO

import numpy as np

from moelab.launch.progress import format_seconds
from moelab.launch.watch import refresh
from moelab.runs.directory import RunDir
from moelab.runs.follow import RunFollower, RunNow, StudyFollower
from moelab.runs.status import Status
from moelab.runs.stragglers import slow_steps

INTERVAL_S: Final = 2.0
ASK_INTERVAL_S: Final = 15.0
"""The scheduler is asked this often."""
QUIET_S: Final = 30.0
"""All runs have ended and none began for so long: nothing is left to watch."""
_HOME_AND_CLEAR: Final = "\x1b[H\x1b[J"
_SHOWN_LINES: Final = 6


def follow(
    path: Path,
    stream: TextIO,
    *,
    ask: Callable[[Sequence[RunDir]], Sequence[Status]] = refresh,
    interval_s: float = INTERVAL_S,
    quiet_s: float = QUIET_S,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> StudyFollower:
    """Show the runs at a path until all have ended.

    Args:
        path: a run, a study, or the folder of all studies; it may appear later.
        stream: where the view goes; it is redrawn in place where that is a terminal.
        ask: brings the ``status.json`` of runs up to date from their scheduler.
        interval_s: seconds between two looks.
        quiet_s: seconds without a change after the last run has ended; where all had ended before, it ends at once.
        sleep: waits for a number of seconds.
        clock: monotonic seconds.

    Returns:
        The follower, with all that was read.

    Raises:
        KeyboardInterrupt: the watcher had enough; nothing happens to the runs.
    """
    follower, is_terminal = StudyFollower(path, clock=clock), stream.isatty()
    changed_at, asked_at, problem, said = -math.inf, -math.inf, "", dict[str, str]()
    for look in itertools.count():
        changed = follower.poll()
        if clock() - asked_at >= ASK_INTERVAL_S:
            problem, asked_at = follower.ask(ask), clock()
            changed = [*changed, *follower.poll()]
        changed_at = clock() if changed and look else changed_at
        text = _screen(follower, problem) if is_terminal else _news(changed, said)
        stream.write(f"{_HOME_AND_CLEAR}{text}" if is_terminal else text)
        stream.flush()
        if follower.all_final and clock() - changed_at >= quiet_s:
            break
        sleep(interval_s)
    return follower


def run_line(now: RunNow) -> str:
    """Where a run is, on one line."""
    return " | ".join([_state(now), *_numbers(now)])


def _state(now: RunNow) -> str:
    return f"{now.name}: {now.status.state}" + (f": {now.status.reason}" if now.status.reason else "")


def _numbers(now: RunNow) -> Iterator[str]:
    yield f"step {now.step}/{now.steps}" if now.steps else f"step {now.step}"
    if now.step:
        yield f"loss {now.loss:.3f}"
        yield f"{now.tps:,.0f} tokens/s per rank"
        yield f"{now.memory_gib:.1f} GiB"
    if now.segments > 1:
        yield f"{now.segments} launches"
    if math.isfinite(now.left_s):
        yield f"about {format_seconds(now.left_s)} left"


def _news(changed: Sequence[RunFollower], said: dict[str, str]) -> str:
    """A line for each run of which there is something new to say."""
    lines = {one.now.name: run_line(one.now) for one in changed}
    new = [line for name, line in lines.items() if said.get(name) != line]
    said.update(lines)
    return "".join(f"{line}\n" for line in new)


def _screen(follower: StudyFollower, problem: str) -> str:
    width = shutil.get_terminal_size().columns
    lines = [f"{time.strftime('%H:%M:%S')} | Ctrl-C leaves the runs alone | {follower.path}", ""]
    lines += [problem] if problem else []
    for one in follower.runs:
        lines += [_state(one.now), f"  {' | '.join(_numbers(one.now))}"]
    lines += [] if follower.runs else ["no runs yet"]
    newest = max(follower.runs, key=lambda one: one.now.status.updated, default=None)
    if newest:
        lines += ["", f"{newest.now.name}", *_step_time(newest), *newest.tail[-_SHOWN_LINES:]]
    return "".join(f"{line[:width]}\n" for line in lines)


def _step_time(one: RunFollower) -> Iterator[str]:
    """The step time of the newest steps, and those that took longer."""
    table = one.rank_table
    known = table.step_time_s[np.isfinite(table.step_time_s)]
    if len(known):
        slow = slow_steps(table.steps, table.step_time_s).items()
        longer = f"; longer: {', '.join(f'step {step} {share:+.0%}' for step, share in slow)}" if slow else ""
        yield f"{np.median(known):.3g} s a step over the newest {len(table.steps)}{longer}"
