"""Which rank or node is slower than the rest, and what can be concluded from which times.

Training is synchronous: a step ends for every rank when the slowest one has come to its last collective, so **step
times and tps are the same on all ranks** and cannot name the slow one. TorchTitan 0.3.0 prints nothing else that is a
rank's own but its memory. What does differ by rank:

- **Data loading.** A batch is fetched before the first collective of a step. With ``time_ranks: true`` in the cluster's
  profile TorchTitan writes each rank's ``fetching_batch`` to ``structured_logs/``, and ``python -m
  moelab.launch.stragglers RUN`` names the slow ones. Its ``fwd_bwd`` and ``optim`` contain collectives (on a GPU they
  are also only the time to queue the work) and are no use for this.
- **Computation.** :mod:`moelab.launch.health` times the same GEMMs on every GPU, without any collective.
- **Communication.** The same program measures the all-reduce of every node and of every pair of nodes.

So a slow *job* is seen in its steps, and a slow *rank* in one of these three. A slow step that comes and goes, such as
one with a checkpoint, is slow for all ranks: :func:`slow_steps`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np

from moelab.errors import BadInput

Times: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
DEVIATIONS: Final = 5.0
"""Robust standard deviations above the median from which on a value is an outlier. A choice."""
LEAST_EXCESS: Final = 0.05
"""Share above the median that an outlier has at least, however alike the others are. A choice."""
MAD_TO_DEVIATION: Final = 1.4826  # of a normal distribution: 1 / Phi^-1(3/4)
LEAST_RANKS: Final = 3  # of two, nobody can say which is the odd one
FETCHING: Final = "fetching_batch"


@dataclass(frozen=True, kw_only=True)
class OwnTimes:
    """What each rank needed by itself.

    Attributes:
        steps: S step numbers, ascending.
        time_s: float64 of shape (S, R), seconds; NaN where a rank said nothing.
        hosts: name of each rank's host, R.
    """

    steps: tuple[int, ...]
    time_s: Times
    hosts: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Stragglers:
    """Who is slow.

    Attributes:
        ranks: slower than the rest, with the median share by which they are.
        nodes: of which every rank is among them.
    """

    ranks: dict[int, float]
    nodes: tuple[str, ...]


def outliers(values: Mapping[str, float]) -> dict[str, float]:
    """Names whose value is far above the median, by the median absolute deviation; with the share above it.

    Args:
        values: a positive number for each name; of fewer than three none is an outlier.

    Example:
        >>> outliers({"a": 1.0, "b": 1.01, "c": 0.99, "d": 1.5})
        {'d': 0.49}
    """
    numbers = np.array([value for value in values.values() if np.isfinite(value)])
    if len(numbers) < LEAST_RANKS:
        return {}
    middle = float(np.median(numbers))
    spread = MAD_TO_DEVIATION * float(np.median(np.abs(numbers - middle)))
    limit = middle + max(DEVIATIONS * spread, LEAST_EXCESS * middle)
    return {name: round(value / middle - 1, 2) for name, value in values.items() if value > limit}


def find_stragglers(own: OwnTimes) -> Stragglers:
    """Ranks whose own time is above the others' in the median step, which single slow steps do not move.

    Args:
        own: times that hold no waiting for other ranks. Step times are not such: see the module's text.
    """
    time_s = own.time_s[np.isfinite(own.time_s).any(axis=1)]
    relative = time_s / np.nanmedian(time_s, axis=1, keepdims=True)
    known = [rank for rank in range(relative.shape[1]) if np.isfinite(relative[:, rank]).any()]
    excess = outliers({str(rank): float(np.nanmedian(relative[:, rank])) for rank in known})
    ranks = {int(name): share for name, share in excess.items()}
    by_host: dict[str, set[int]] = {}
    for rank, host in enumerate(own.hosts):
        by_host.setdefault(host, set()).add(rank)
    return Stragglers(ranks=ranks, nodes=tuple(host for host, held in by_host.items() if held <= ranks.keys()))


def slow_steps(steps: np.ndarray[Any, np.dtype[np.int64]], step_time_s: Times) -> dict[int, float]:
    """Steps that took all ranks longer than the others, with the share by which they did.

    Args:
        steps: int64 of shape (S,).
        step_time_s: float64 of shape (S, R), as :class:`moelab.runs.follow.RankTable` has them.
    """
    known = np.isfinite(step_time_s).any(axis=1)
    whole = np.nanmedian(step_time_s[known], axis=1)
    return {int(step): share for step, share in outliers(dict(zip(map(str, steps[known]), whole, strict=True))).items()}


def read_own_times(folder: Path, span: str = FETCHING) -> OwnTimes:
    """Read a span of TorchTitan's structured logs.

    Args:
        folder: ``structured_logs`` of a run; a rank that was restarted has several files.
        span: one without a collective in it. Of one that repeats within a step the sum is taken.

    Raises:
        BadInput: if no rank logged it.
    """
    totals: dict[int, dict[int, float]] = {}
    hosts: dict[int, str] = {}
    for file in sorted(folder.glob("*.jsonl")):
        for rank, host, step, milliseconds in _spans(file, f"{span}_end"):
            row = totals.setdefault(step, {})
            row[rank] = row.get(rank, 0.0) + milliseconds / 1e3
            hosts[rank] = host
    if not totals:
        raise BadInput(f"{folder} has no {span}; train with time_ranks: true in the cluster's profile")
    ranks = range(max(hosts) + 1)
    rows = [[totals[step].get(rank, np.nan) for rank in ranks] for step in sorted(totals)]
    return OwnTimes(
        steps=tuple(sorted(totals)), time_s=np.array(rows), hosts=tuple(hosts.get(rank, "") for rank in ranks)
    )


def _spans(file: Path, name: str) -> list[tuple[int, str, int, float]]:
    """Rank, host, step and milliseconds of each end of a span; a last line that was cut is left out."""
    found = []
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            if name in line and line.endswith("}\n"):
                entry = json.loads(line)
                if entry.get("log_type_name") == name and "step" in entry:
                    found.append((entry["rank"], entry["host_name"], entry["step"], entry["value"]))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the stragglers of a run directory as JSON."""
    parser = argparse.ArgumentParser(
        description="Name the ranks and nodes of a run whose own time is above the others'."
    )
    parser.add_argument("run", type=Path, help="run directory of a job whose profile has time_ranks: true")
    try:
        found = find_stragglers(read_own_times(parser.parse_args(arguments).run / "structured_logs"))
    except BadInput as error:
        parser.error(str(error))
    print(json.dumps(asdict(found)))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
