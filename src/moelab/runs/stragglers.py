"""Which rank or node is slower than the rest, and what can be concluded from which times.

Training is synchronous: a step ends for every rank when the slowest one has come to its last collective, so **step
times and tps are the same on all ranks** and cannot name the slow one. TorchTitan 0.3.0 prints nothing else that is a
rank's own but its memory. What does differ by rank:

- **Data loading.** A batch is fetched before the first collective of a step. With ``time_ranks: true`` in the cluster's
  profile TorchTitan writes each rank's ``fetching_batch`` to ``structured_logs/``, and ``python -m
  moelab.runs.stragglers RUN`` names the slow ones. Its ``fwd_bwd`` and ``optim`` contain collectives (on a GPU they
  are also only the time to queue the work) and are no use for this.
- **Computation.** :mod:`moelab.health.measure` times the same GEMMs on every GPU, without any collective.
- **Communication.** The same program measures the all-reduce of every node and of every pair of nodes.

So a slow *job* is seen in its steps, and a slow *rank* in one of these three. A slow step that comes and goes, such as
one with a checkpoint, is slow for all ranks: :func:`slow_steps`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np
import pandas as pd

from moelab.errors import BadInput

Times: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
DEVIATIONS: Final = 5.0
"""Robust standard deviations above the median from which on a value is an outlier. A choice."""
LEAST_EXCESS: Final = 0.05
"""Share above the median that an outlier has at least, however alike the others are. A choice."""
MAD_TO_DEVIATION: Final = 1.4826  # of a normal distribution: 1 / Phi^-1(3/4)
LEAST_RANKS: Final = 3  # of two, nobody can say which is the odd one
FETCHED: Final = "fetching_batch_end"
Name = TypeVar("Name")


def outliers(values: Mapping[Name, float]) -> dict[Name, float]:
    """Names whose value is far above the median, by the median absolute deviation; with the share above it.

    Values are positive; of fewer than three none is an outlier.

    >>> outliers({"a": 1.0, "b": 1.01, "c": 0.99, "d": 1.5})
    {'d': 0.49}
    """
    numbers = np.array([value for value in values.values() if np.isfinite(value)])
    if len(numbers) < LEAST_RANKS:
        return {}
    # Medians, and not a mean and its deviation: a rank that is slow enough would hide itself in both.
    middle = float(np.median(numbers))
    spread = MAD_TO_DEVIATION * float(np.median(np.abs(numbers - middle)))
    limit = middle + max(DEVIATIONS * spread, LEAST_EXCESS * middle)
    return {name: round(value / middle - 1, 2) for name, value in values.items() if value > limit}


def find_stragglers(own: pd.DataFrame) -> tuple[dict[int, float], list[str]]:
    """Ranks whose own time is above the others' in the median step, which single slow steps do not move.

    ``own`` are times without any wait for other ranks. Step times do not qualify: see the module's text.

    Returns:
        The slow ranks with the median share by which they are slower, and the hosts all of whose ranks are slow.
    """
    # With gradient accumulation a step has several batches.
    time_s = own.pivot_table(index="step", columns="rank", values="time_s", aggfunc="sum")
    # First within each step: longer texts make one step longer than another for all ranks.
    relative = time_s.div(time_s.median(axis=1), axis=0).median()
    ranks = outliers(dict(zip(relative.index.astype(int).tolist(), relative.tolist(), strict=True)))
    hosts = own.groupby("rank")["host"].last()
    return ranks, [str(host) for host, held in hosts.groupby(hosts, sort=False) if ranks.keys() >= {*held.index}]


def slow_steps(steps: np.ndarray[Any, np.dtype[np.int64]], step_time_s: Times) -> dict[int, float]:
    """Steps that took all ranks longer than the others, with the share by which they did.

    Shapes are (S,) and (S, R), as :class:`moelab.runs.follow.RankTable` has them.
    """
    known = np.isfinite(step_time_s).any(axis=1)
    whole = np.nanmedian(step_time_s[known], axis=1)
    return outliers(dict(zip(steps[known].tolist(), whole.tolist(), strict=True)))


def read_own_times(folder: Path) -> pd.DataFrame:
    """Read from a run's ``structured_logs`` how long each batch took to fetch; a restarted rank has several files.

    Returns:
        ``step``, ``rank``, ``host`` and ``time_s`` of each batch, of which a step may have several.

    Raises:
        BadInput: if no rank logged it.
    """
    rows = []
    for file in sorted(folder.glob("*.jsonl")):
        with file.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if FETCHED in line:  # a few lines of many, and JSON is slow
                    with suppress(ValueError, LookupError, TypeError):  # a line that was cut or torn
                        entry = json.loads(line)
                        if entry["log_type_name"] == FETCHED:
                            rows.append((entry["step"], entry["rank"], entry["host_name"], entry["value"] / 1e3))
    if not rows:
        raise BadInput(f"{folder} has no times of ranks; train with time_ranks: true in the cluster's profile")
    return pd.DataFrame(rows, columns=["step", "rank", "host", "time_s"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the stragglers of a run directory as JSON."""
    parser = argparse.ArgumentParser(description="Name the ranks and nodes that are slower than the rest of a run.")
    parser.add_argument("run", type=Path, help="run directory of a job whose profile has time_ranks: true")
    try:
        ranks, nodes = find_stragglers(read_own_times(parser.parse_args(arguments).run / "structured_logs"))
    except BadInput as error:
        parser.error(str(error))
    print(json.dumps({"ranks": ranks, "nodes": nodes}))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
