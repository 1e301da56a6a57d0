"""TorchTitan logs into the metrics table: known cases, ranks, segments, damage, streaming and memory."""

from __future__ import annotations

import bz2
import gzip
import logging
import lzma
import math
import re
import textwrap
import tracemalloc
from collections.abc import Callable, Iterable
from datetime import UTC, timedelta
from itertools import chain, permutations
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stand_in import START
from stand_in import step_text as step
from stand_in import titan_line as stamped

from moelab.errors import BadInput
from moelab.runs.collect import collect
from moelab.runs.log import read_log
from moelab.runs.log_text import NotALog
from moelab.runs.table import COLUMNS
from moelab.runs.tensorboard import read_tensorboard

RESTART = Path(__file__).parents[1] / "cases" / "logs" / "restart.log"


def start(step: int | str) -> str:
    return f"Training starts at step {step}"


def steps(rows: pd.DataFrame) -> list[tuple[int, int, float]]:
    return list(rows[["segment", "step", "loss"]].itertuples(index=False, name=None))


# Lines ---------------------------------------------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_is_a_failure_until_another_launch() -> None:
    for text in ("nan", "inf", "NaN", "Inf"):
        read = read_log(
            [stamped(0, step(10, 7.0)), stamped(60, step(20, f"    {text}")), stamped(60.1, step(20, -4.0))]
        )
        assert not math.isfinite(read.rows["loss"].iloc[1])
        assert read.reason == f"loss is {text.lower()} at step 20 (segment 0)"
    error = "[rank3]: RuntimeError: Loss is not finite (global_avg_loss=nan) at step 12. Stopping training.\n"
    source = '[rank3]:     f"Loss is not finite (global_avg_loss={global_avg_loss}) at "\n'
    lines = [stamped(0, start(1)), stamped(1, step(1, 8.0)), source, error]
    assert read_log(lines).reason == "loss is nan at step 12 (segment 0)"
    read = read_log([*lines, stamped(100, start(11)), stamped(110, step(20, 7.0))])
    assert (read.reason, read.notes) == (None, ("the loss was nan at step 12 (segment 0) and finite afterwards",))
    goes_on = [stamped(at, step(at, "inf" if at in (3, 5) else 8.0)) for at in range(1, 9)]
    assert (read_log(goes_on[:5]).reason, read_log(goes_on[:5]).notes) == ("loss is inf at step 3 (segment 0)", ())
    read = read_log(goes_on)
    words = "the loss was inf at 2 steps from 3 on (segment 0) and finite afterwards"
    assert (read.reason, read.notes) == (None, (words,))


def test_validation_lines() -> None:
    text = "validate step: 20  loss: {:7.4f}  memory: 12.50GiB(7.00%)  tps: {:,}"
    # The loss of a pipeline rank without one: -1 over the number of tokens.
    moments = {0: step(20, 7.0), 5: "\x1b[33m" + text.format(6.5, 9000) + "\x1b[39m", 5.1: text.format(-0.00001, 9100)}
    read = read_log([stamped(at, line) for at, line in moments.items()])
    assert len(read.rows) == 1
    assert read.validation.values.tolist() == [[0, 20, 6.5, 9000, 12.5, START.timestamp() + 5]]


def test_damaged_text(tmp_path: Path) -> None:
    line = stamped(60, step(10, 7.2)).encode()
    good = stamped(120, step(20, 7.1)).encode()
    half = line[: line.index(b"7.20000") + 3]
    log = tmp_path / "train.log"
    log.write_bytes(
        b"\xff\xfe\x80 not UTF-8 \n" + half + b"\n" + half + good  # torn: another rank's whole line follows "7.2"
        + b" 40%|####     |\r" + stamped(180, step(30, 7.0)).encode().rstrip() + b"\r\n"
        + line.replace(b"7.20000", b"7.2.000") + line.rstrip()[:-1]
    )  # fmt: skip
    assert steps(read_log(log).rows) == [(0, 20, 7.1), (0, 30, 7.0)]


# Each form with what it says: those of torchtitan's train.py and components/metrics.py by the date of their commit,
# pytorch/torchtitan#1814 and #1461 (experiments without mfu). MEMORY stands for the usual words.
FORMS: dict[str, tuple[str, dict[str, float]]] = {
    "15 March 2024": ("step:  1  loss: 12.2500  MEMORY  wps: 2,361", {}),
    "20 March 2024": ("step:  1  loss: 12.2500  MEMORY  wps: 2,361  mfu: 13.50%", {"mfu": 13.5}),
    "February 2025": (
        "step:  1  loss: 12.2500  MEMORY  tps: 2,361  tflops: 1,034.50  mfu: 13.50%", {"mfu": 13.5, "tflops": 1034.5}
    ),
    "no mfu": ("step:  1  loss: 12.2500  MEMORY  tps: 2,361", {}),
    "infinite": ("step: 1  loss: 12.25  grad_norm:  INF  MEMORY  tps: 2,361", {"grad_norm": math.inf}),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_a_step_line_of_every_release(form: str) -> None:
    text, more = FORMS[form]
    text = text.replace("MEMORY", "memory: 41.50GiB(43.75%)")
    row = read_log([stamped(0, text), stamped(1, text.replace("step: ", "step: 1"))]).rows.iloc[0]
    expected = {"loss": 12.25, "memory_gib": 41.5, "memory_pct": 43.75, "tps": 2361.0} | more
    assert row[list(expected)].to_dict() == pytest.approx(expected)
    assert row[[name for name in ("grad_norm", "tflops", "mfu", "lr") if name not in more]].isna().all()


def test_a_line_torn_at_its_end_is_dropped_where_others_are_longer_and_kept_where_none_is() -> None:
    short = "step: {}  loss: 7.25000  memory: 1.00GiB(1.00%)  tps: 4,0{}"
    torn = [stamped(n, short.format(n, "00" if n != 2 else "")) for n in (1, 2, 3)]
    assert read_log(torn).rows["step"].tolist() == [1, 3]  # `4,0` is no number with thousands
    longer = [stamped(n, step(n, 7.25)) for n in (3, 4)]
    assert read_log([stamped(2, short.format(2, "00")), *longer]).rows["step"].tolist() == [3, 4]


LOCAL, AS_UTC = START.timestamp() + 5.481, START.replace(tzinfo=UTC).timestamp() + 5.481
# What stands in front of a line, and the moment of the first.
STAMPS = {
    "[rank0]:[rank0]:[titan] %Y-%m-%d %H:%M:%S,481 - root - INFO - ": LOCAL,  # torchrun
    "12: b200-a001: [titan] %Y-%m-%d %H:%M:%S,481 - root - INFO - ": LOCAL,  # srun --label
    "%Y-%m-%dT%H:%M:%S.481123456Z [rank0]: ": AS_UTC,
    "%Y-%m-%dT%H:%M:%S.481+02:00 ": AS_UTC - 7200,
    "[%Y-%m-%d %H:%M:%S,481794][I][components/metrics:437:log] ": LOCAL,  # auroraGPT-ANL/torchtitan, aurora.md
    "": math.nan,
}


@pytest.mark.parametrize(("around", "first"), STAMPS.items(), ids=[*map(str, range(len(STAMPS)))])
def test_time_stamps_and_what_else_stands_before_a_line(around: str, first: float) -> None:
    # A line without its mfu, which has to end where the line does.
    texts = {n: step(n, 8 - n / 10).partition("  tflops")[0] for n in (1, 2, 3)}
    lines = [(START + timedelta(seconds=5 * n)).strftime(around) + text for n, text in texts.items()]
    rows = read_log(lines).rows
    assert steps(rows) == [(0, 1, 7.9), (0, 2, 7.8), (0, 3, 7.7)]
    assert rows["time"].tolist() == pytest.approx([first, first + 5, first + 10], abs=1e-3, nan_ok=True)


# `cat -v` and rsyslog have other signs of a colour, and a paste has none.
@pytest.mark.parametrize("escape", ["\x1b", "^[", "#033", ""])
def test_a_line_in_colour(escape: str) -> None:
    text = "E[31mstep: {}  E[38;2;180;60;0mloss: 7.5  E[33mmemory: 1.00GiB(1.00%)  E[34mtps: 4,000E[39m"
    rows = read_log([stamped(n, text.format(n).replace("E[", f"{escape}[")) for n in (1, 2)]).rows
    assert rows[["step", "loss", "tps"]].values.tolist() == [[1, 7.5, 4000], [2, 7.5, 4000]]
    assert rows["time"].tolist() == [START.timestamp() + n for n in (1, 2)]


# pytorch/torchtitan#3932 and #1902: logs that were pasted and wrapped.
@pytest.mark.parametrize("width", [13, 31, 40, 60, 72, 80, 100, 132, 150])
@pytest.mark.parametrize("end", ["  tflops", "\n"])
def test_wrapped_lines_at_any_width(width: int, end: str) -> None:
    lines = [stamped(n, step(n, 8 - n / 10, tps=13_770, memory_gib=4.9)).partition(end)[0] for n in range(1, 8)]
    expected = read_log(lines).rows
    assert len(expected) == 7
    cut = [line[start : start + width] for line in lines for start in range(0, len(line), width)]
    in_words = [part for line in lines for part in textwrap.wrap(line, width)]
    for wrapped in (cut, [f"> {line}" for line in cut], in_words):
        pd.testing.assert_frame_equal(read_log(wrapped).rows, expected)


def test_lines_and_events_that_torchtitan_itself_writes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = pytest.importorskip("torchtitan.components.metrics")
    from torchtitan.tools.utils import Color

    events = metrics.TensorBoardLogger(str(tmp_path))
    memory = {"max_active_gib": 1.0, "max_active_pct": 1.0, "max_reserved_gib": 151.07, "max_reserved_pct": 84.71}
    peak = SimpleNamespace(**memory, num_alloc_retries=0, num_ooms=0)
    processor = SimpleNamespace(
        num_flops_per_token=80_000_000_000, time_last_log=0.0, ntokens_since_last_log=25_692, has_quantization=False,
        parallel_dims=SimpleNamespace(non_data_parallel_size=1), config=SimpleNamespace(log_freq=10),
        data_loading_times=[0.1], color=Color(), logger=events, gpu_peak_flops=2e15,
        device_memory_monitor=SimpleNamespace(get_peak_stats=lambda: peak, reset_peak_stats=lambda: None),
    )  # fmt: skip
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: 2.0)
    with caplog.at_level(logging.INFO):
        metrics.MetricsProcessor.log(processor, 1200, 3.1842, 3.3, 0.221)
        processor.time_last_log = 0.0
        metrics.MetricsProcessor.log_validation(processor, 3.25, 1200)
    events.close()
    formatter = logging.Formatter("[titan] %(asctime)s - %(name)s - %(levelname)s - %(message)s")
    records = [record for record in caplog.records if "step: " in record.getMessage()]
    names = ["step", "loss", "grad_norm", "memory_gib", "memory_pct", "tps", "tflops", "mfu"]
    for read in (read_log([formatter.format(record) for record in records]), *read_tensorboard(tmp_path)):
        (row,) = read.rows[names].values.tolist()
        assert row == pytest.approx([1200, 3.1842, 0.221, 151.07, 84.71, 12846, 1027.68, 51.384], rel=1e-4)
        assert read.rows["time"][0] == pytest.approx(records[0].created, abs=0.1)
        assert read.validation[["step", "loss", "memory_gib"]].values.tolist() == [[1200, 3.25, pytest.approx(151.07)]]


# Segments ----------------------------------------------------------------------------------------------------------


def test_32_nodes_starting_amid_the_first_rows_are_one_segment_at_each_launch() -> None:
    lines = []
    for at, shift in ((0, 0), (600, 0.01)):
        starts = [stamped(at + node * 0.05, start(1), f"node{node:02}: [rank0]:") for node in range(32)]
        rows = [stamped(at + 0.2, step(1, 8.0 + shift)), stamped(at + 0.9, step(2, 7.9 + shift))]
        lines += [starts[0], rows[0], *starts[1:20], rows[1], *starts[20:]]
    assert steps(read_log(lines).rows) == [(0, 1, 8.0), (0, 2, 7.9), (1, 1, 8.01), (1, 2, 7.91)]


Place = tuple[int, int, float]
RESTARTED: list[Place] = [(0, 90, 5.1), (0, 100, 5.0), (1, 90, 5.2)]
# Moments and texts of a log's lines, and the segment, step and loss of its rows.
LAUNCHES: dict[str, tuple[list[tuple[float | None, str]], list[Place]]] = {
    "no row": ([(0, start(1)), (600, start(1)), (660, step(10, 8.0)), (900, start(11))], [(0, 10, 8.0)]),
    "no step repeated": (
        [(0, start(1)), (9, step(10, 8.0)), (11, start(11)), (20, step(20, 7.0))], [(0, 10, 8.0), (1, 20, 7.0)]
    ),
    "no start, and the newest step again": (
        [(360, step(100, 5.0)), (3720, step(100, 5.1)), (3780, step(110, 4.9))],
        [(0, 100, 5.0), (1, 100, 5.1), (1, 110, 4.9)],
    ),
    "no times": (
        [(None, line) for line in (start(1), step(90, 5.1), step(100, 5.0), start(81), step(90, 5.2))], RESTARTED
    ),
    "no times and no start": (
        [(None, line) for line in (step(90, 5.1), step(90, -4.0), step(100, 5.0), step(90, 5.2))], RESTARTED
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_launch_that_logged_a_step_is_a_segment(name: str) -> None:
    lines, rows = LAUNCHES[name]
    read = read_log([text if seconds is None else stamped(seconds, text) for seconds, text in lines])
    assert (steps(read.rows), read.segments) == (rows, rows[-1][0] + 1)


def pipeline_job(rank: int, *, starts: bool) -> list[str]:
    """Lines of one rank of a job that was requeued at step 50 and resumed from step 20; 1 and 2 have the loss."""
    lines = []
    for launched, first, last in ((0, 1, 50), (3600, 21, 60)):
        if starts:
            lines.append(stamped(launched + 0.3 * rank, start(first)))
        for number in range((first + 9) // 10 * 10, last + 1, 10):
            loss = 9 - number / 100 + launched / 1e6 if rank else -8.0
            moment = launched + number + 0.1 * ((rank * 7 + number) % 5)
            lines.append(stamped(moment, step(number, loss, tps=4000 + rank, memory_gib=12 - rank + number / 10)))
    return lines


@settings(max_examples=30)
@given(data=st.data(), starts=st.booleans())
def test_any_interleaving_of_the_ranks_gives_the_same_rows(data: st.DataObject, starts: bool) -> None:
    ranks = [pipeline_job(rank, starts=starts) for rank in range(3)]
    expected = read_log(sorted(chain(*ranks), key=lambda line: line.split("[titan] ")[1][:23])).rows
    assert steps(expected) == [
        *[(0, n, pytest.approx(9 - n / 100)) for n in range(10, 51, 10)],
        *[(1, n, pytest.approx(9 - n / 100 + 0.0036)) for n in range(30, 61, 10)],
    ]
    assert set(expected["tps"]) == {4001}  # rank 1 prints before rank 2
    fullest = [12 + n / 10 for n in (10, 20, 30, 40, 50, 30, 40, 50, 60)]
    assert expected["memory_gib"].tolist() == fullest
    moments = [
        launched + n for launched, first, last in ((0, 10, 50), (3600, 30, 60)) for n in range(first, last + 1, 10)
    ]
    assert (expected["time"] - START.timestamp()).tolist() == pytest.approx([at + 0.2 for at in moments], abs=1e-3)
    assert expected["memory_pct"].tolist() == [pytest.approx(gib / 2, abs=0.01) for gib in fullest]
    order = data.draw(st.permutations([rank for rank, lines in enumerate(ranks) for _ in lines]))
    queues = [iter(lines) for lines in ranks]
    pd.testing.assert_frame_equal(read_log([next(queues[rank]) for rank in order]).rows, expected)


def test_memory_does_not_depend_on_the_size_of_the_log(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    other = stamped(0, "[GC] Performing periodic GC collection took 0.02 seconds") * 4
    with log.open("w") as file:
        for number in range(10, 1260, 10):
            file.writelines(stamped(number, step(number, 7.0 if rank > 190 else -8.0)) + other for rank in range(200))
    assert log.stat().st_size > 12e6
    tracemalloc.start()
    rows = read_log(log).rows
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert rows["step"].tolist() == list(range(10, 1260, 10))
    assert (rows["loss"] == 7.0).all()
    assert peak < 8e6


# Bad input ---------------------------------------------------------------------------------------------------------


def test_a_file_without_steps_is_an_empty_table_and_a_missing_one_is_refused(tmp_path: Path) -> None:
    empty = read_log(["step by step\n"])
    assert (len(empty.rows), empty.segments, tuple(empty.rows.columns)) == (0, 0, COLUMNS)
    with pytest.raises(NotALog, match="no such file"):
        read_log(tmp_path / "missing.log")


PACKED: dict[str, Callable[[bytes], bytes]] = {
    "xz": lzma.compress, "gz": gzip.compress, "bz2": lambda data: bz2.compress(data, 1)
}  # fmt: skip
WRITTEN: dict[str, Callable[[str], bytes]] = {
    # in two parts, as `cat a.gz b.gz` joins them
    **{kind: lambda text, pack=pack: pack(text[:300].encode()) + pack(text[300:].encode())
       for kind, pack in PACKED.items()},
    "a hole before it": lambda text: bytes(4096) + b"\n" + text.encode(),
}  # fmt: skip


@pytest.mark.parametrize("name", ["train.log", "train.log.gz"])
@pytest.mark.parametrize("kind", WRITTEN)
def test_a_packed_log_and_its_cause_whatever_its_name_says(tmp_path: Path, kind: str, name: str) -> None:
    crash = 'Traceback (most recent call last):\n  File "train.py", line 3\nValueError: no\n'
    path = tmp_path / name
    path.write_bytes(WRITTEN[kind](RESTART.read_text() + crash))
    pd.testing.assert_frame_equal(read_log(path).rows, read_log(RESTART).rows)
    assert [collect(place)[0].status.reason for place in (path, tmp_path)] == ["ValueError: no"] * 2


@pytest.mark.parametrize("kind", PACKED)
def test_a_packed_log_that_was_cut_off_gives_what_it_has_and_says_so(tmp_path: Path, kind: str) -> None:
    lines = [step(n, 9 - n / 2000, tps=4000 + n * n * 7919 % 9973) for n in range(1, 4001)]
    path = tmp_path / "train.log"
    packed = PACKED[kind]("\n".join(lines).encode())
    path.write_bytes(packed[: len(packed) // 2])
    read = read_log(path)
    assert 1000 < len(read.rows) < 4000
    assert read.rows["loss"].tolist() == [round(9 - n / 2000, 5) for n in range(1, len(read.rows) + 1)]
    assert collect(path)[0].notes == read.notes == ("train.log is cut off: its end is missing",)


@pytest.mark.parametrize(
    ("content", "seen"),
    [
        ("", "it is empty"),
        ("[titan] Training starts at step 1.\n", "training started but logged no step"),
        ("step: 1  loss: 7,20000  memory: 1,00GiB(1,00%)  tps: 4.000  mfu: N/A\n", "decimal comma ('loss: 7,20000')"),
        ("step: 1  loss: 7.2  memory: 1.00GiB(1.00%)  tps: 4_000  mfu: N/A\n", "cut off or in another format"),
        ("step:  1  los\nfoo\n", "cut off or in another format"),
        ("step by step\n", "no TorchTitan step line ('step: N  loss: …"),
        (b"PK\x03\x04", "packed as moelab does not read it"),
        (b"\x28\xb5\x2f\xfd", "packed as moelab does not read it"),
        (bytes(range(256)), "it is binary"),
    ],
)
def test_what_is_no_torchtitan_log_says_what_was_seen(tmp_path: Path, content: str | bytes, seen: str) -> None:
    path = tmp_path / "train.log"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(NotALog, match=re.escape(seen)) as caught:
        collect(path)
    assert (caught.value.exit_code, str(path) in str(caught.value)) == (2, True)


@pytest.mark.parametrize("digits", [16, 5_000])
def test_a_step_number_that_no_table_holds_is_damage(digits: int) -> None:
    number = "9" * digits
    damaged = [
        step(1, 7.2).replace(" 1 ", number),
        start(number),
        f"Loss is not finite (global_avg_loss=nan) at step {number}.",
    ]
    read = read_log([step(1, 7.2), *damaged, step(2, 7.2)])
    assert (read.rows["step"].tolist(), read.segments, read.reason) == ([1, 2], 1, None)


# Several runs in one file --------------------------------------------------------------------------------------------


def launch(first: int, last: int, at: float, shift: float = 0.0) -> list[str]:
    lines = [stamped(at + 1, start(first))]
    return lines + [stamped(at + 10 * n, step(n, 9 - n / 10 + shift)) for n in range(first, last + 1)]


def without_times(lines: list[str]) -> list[str]:
    return [line.partition(" - INFO - ")[2] for line in lines]


ONE, OTHER = launch(1, 30, 0), launch(1, 30, 1000, 0.013)
THREE = [launch(1, 12, 0), launch(11, 22, 1000), launch(21, 30, 2000)]


@pytest.mark.parametrize(
    ("lines", "segments", "seen"),
    [
        *[(chain(*launches), 3, [*range(1, 13), *range(11, 23), *range(21, 31)]) for launches in permutations(THREE)],
        (launch(1, 5, 0) + launch(1, 30, 1000, 0.0005), 2, [*range(1, 6), *range(1, 31)]),  # no checkpoint
        (launch(1, 5, 0, math.nan) + launch(1, 30, 1000), 2, [*range(1, 6), *range(1, 31)]),  # one that diverged
    ],
)
def test_a_restart_is_one_run_in_whatever_order_it_was_pasted(
    tmp_path: Path, lines: Iterable[str], segments: int, seen: list[int]
) -> None:
    (tmp_path / "job.log").write_text("".join(lines))
    (run,) = collect(tmp_path / "job.log")
    assert (run.segments, run.rows["step"].tolist()) == (segments, seen)


@pytest.mark.parametrize("lines", [ONE + OTHER, OTHER + ONE, without_times(ONE + OTHER)])
def test_two_runs_one_after_the_other_are_refused(tmp_path: Path, lines: list[str]) -> None:
    (tmp_path / "job.log").write_text("".join(lines))
    with pytest.raises(BadInput, match=r"job\.log: it holds two runs, of which one has a loss of 8\.9"):
        collect(tmp_path / "job.log")


@pytest.mark.parametrize("lag", [2, 95])
def test_two_runs_whose_lines_are_mixed_are_refused(tmp_path: Path, lag: int) -> None:
    mixed = sorted(ONE + launch(1, 30, lag, 0.013), key=lambda line: line[16:39])
    for lines in (mixed, without_times(mixed)):
        (tmp_path / "job.log").write_text("".join(lines))
        with pytest.raises(BadInput, match=r"job\.log: .*two runs"):
            collect(tmp_path / "job.log")


# pytorch/torchtitan#1232, #931, #550 and #547: a loss of -1 under pipeline parallelism
@pytest.mark.parametrize(
    ("line", "rank"),
    [
        ("Building device mesh with parallelism: pp=4, dp_replicate=1, dp_shard=64, cp=1, tp=1, ep=8", "rank 192"),
        ("Pipeline Parallel loss is not visible. Please add \x1b[33mrank 24\x1b[31m to LOG_RANK", "rank 24"),
        ("another", "the first rank of the last stage"),
    ],
)
def test_a_log_without_a_loss_says_which_rank_has_it(tmp_path: Path, line: str, rank: str) -> None:
    path = tmp_path / "train.log"
    path.write_text(stamped(0, line) + "".join(stamped(n, step(n, "-1.0000" if n < 3 else "-2e0")) for n in (1, 2, 3)))
    (one,) = collect(path)
    (note,) = one.to_json()["notes"]
    assert one.rows["loss"].isna().tolist() == [True] * 3
    assert (f"Give the log of {rank}" in note, note in one.summary) == (True, True)
