"""Who is slow: robustly over ranks and steps, from TorchTitan's own structured logs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moelab.runs.stragglers import find_stragglers, main, outliers, read_own_times, slow_steps

LOGGING = """
import os, sys, time
from torchtitan.observability import structured_logger as sl

for rank, seconds in enumerate(map(float, sys.argv[2:])):
    if os.fork() == 0:  # a process for each rank, with torchtitan loaded once
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        sl.init_structured_logger(source="training", output_dir=sys.argv[1], enable=True)
        for step in (1, 2, 3):
            sl.set_step(step, relative_step=step)
            with sl.log_trace_span("step"):
                for batch in range(2):
                    with sl.log_trace_span("fetching_batch"):
                        time.sleep(seconds)
        os._exit(0)
    os.wait()
"""


def own(time_s: np.ndarray) -> pd.DataFrame:
    rows = [(step, rank, f"n{rank // 8}", seconds) for (step, rank), seconds in np.ndenumerate(time_s)]
    return pd.DataFrame(rows, columns=["step", "rank", "host", "time_s"]).dropna()


def noisy(steps: int, ranks: int, seed: int) -> np.ndarray:
    """About a second each, with 1 % of noise, and every step as much longer as its text is."""
    random = np.random.default_rng(seed)
    return random.normal(1.0, 0.01, (steps, ranks)) * random.uniform(1.0, 2.0, (steps, 1))


@settings(max_examples=40)
@given(st.integers(4, 64), st.integers(3, 20), st.integers(0, 2**32 - 1), st.data())
def test_slow_ranks_are_named_and_no_other(ranks: int, steps: int, seed: int, data: st.DataObject) -> None:
    slow = data.draw(st.sets(st.integers(0, ranks - 1), max_size=(ranks - 1) // 3))
    time_s = noisy(steps, ranks, seed)
    time_s[:, sorted(slow)] *= 1.5
    assert find_stragglers(own(time_s))[0].keys() == slow


def test_a_node_is_named_if_all_its_ranks_are_slow_and_nobody_for_one_bad_step_or_a_missing_line() -> None:
    time_s = noisy(10, 32, 0)
    time_s[4, 3] *= 20
    time_s[7, :5] = np.nan
    time_s[:, 26] = np.nan
    assert find_stragglers(own(time_s)) == ({}, [])
    time_s[:, 8:16] *= 1.3
    assert find_stragglers(own(time_s))[1] == ["n1"]
    time_s[:, 30] *= 1.3
    ranks, nodes = find_stragglers(own(time_s))
    assert (nodes, ranks) == (["n1"], {rank: pytest.approx(0.3, abs=0.03) for rank in (*range(8, 16), 30)})


@pytest.mark.parametrize(
    ("values", "slow"),
    [
        ([], {}),
        ([1.0, 9.0], {}),  # of two nobody is the odd one
        ([1.0, 1.0, 1.0, 0.5], {}),  # faster is no fault
        ([1.0, 1.0, 1.0, 1.0, 1.0, 1.04], {}),  # equal ones are within a few per cent
        ([1.0, 1.0, 1.0, 1.0, 1.0, 1.06], {5: 0.06}),
        ([0.98, 1.0, 1.02, 1.14], {}),  # five deviations of 0.02 * 1.4826 above 1.01
        ([0.98, 1.0, 1.02, 1.17], {3: 0.16}),
    ],
)
def test_outliers(values: list[float], slow: dict[int, float]) -> None:
    assert outliers(dict(enumerate(values))) == slow


def test_slow_steps_are_slow_for_all_ranks() -> None:
    step_time_s = np.random.default_rng(0).normal(2.0, 0.01, (20, 8))
    step_time_s[[6, 13]] += 1.0  # two checkpoints
    step_time_s[0] = np.nan  # the first line of a launch has no time
    assert slow_steps(np.arange(1, 21), step_time_s).keys() == {7, 14}


def test_times_come_from_the_files_that_torchtitan_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path)])
    assert "time_ranks: true" in capsys.readouterr().err
    arguments = [sys.executable, "-c", LOGGING, str(tmp_path), "0.002", "0.002", "0.04", "0.002"]
    subprocess.run(arguments, check=True, capture_output=True)
    first, *_ = sorted((tmp_path / "structured_logs").glob("*.jsonl"))
    torn = b'{"log_type_name": "fetching_batch_end", "ste\xff\n[1] fetching_batch_end\n'
    first.write_bytes(torn + first.read_bytes())
    times = read_own_times(tmp_path / "structured_logs")
    places = sorted(zip(times["step"], times["rank"], strict=True))
    assert places == [(step, rank) for step in (1, 2, 3) for rank in range(4) for _ in range(2)]
    assert (times.loc[times["rank"] == 2, "time_s"] >= 0.04).all()
    assert main([str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)["ranks"].keys() == {"2"}
