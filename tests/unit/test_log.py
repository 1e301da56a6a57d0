"""TorchTitan logs into the metrics table: known cases, ranks, segments, damage, streaming and memory."""

from __future__ import annotations

import gzip
import logging
import math
import tracemalloc
from datetime import datetime, timedelta
from itertools import chain, pairwise
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moelab.runs import COLUMNS, LogFollower, NotALog, merge_segments, read_log

CASES = Path(__file__).parents[1] / "cases" / "logs"
MIDNIGHT = datetime(2026, 9, 14)


def stamped(seconds: float, text: str, prefix: str = "[rank0]:") -> str:
    moment = MIDNIGHT + timedelta(seconds=seconds)
    return f"{prefix}[titan] {moment:%Y-%m-%d %H:%M:%S},{moment.microsecond // 1000:03} - root - INFO - {text}\n"


def step(step: int, loss: float | str, tps: str = "4,000", memory: float = 10.0) -> str:
    loss = loss if isinstance(loss, str) else f"{loss:8.5f}"
    return (
        f"step: {step:2}  loss: {loss}  grad_norm:  1.1000  memory: {memory:5.2f}GiB({memory / 2:.2f}%)  "
        f"tps: {tps}  tflops: 900.00  mfu: N/A"
    )


def start(step: int) -> str:
    return f"Training starts at step {step}"


def steps(rows: pd.DataFrame) -> list[tuple[int, int, float]]:
    return list(rows[["segment", "step", "loss"]].itertuples(index=False, name=None))


def test_colour_case() -> None:
    read = read_log(CASES / "colour.log")
    first, second = (read.rows.iloc[index] for index in (0, 1))
    assert first[["step", "loss", "grad_norm", "memory_gib", "memory_pct", "tps", "tflops"]].tolist() == [
        1200, 3.1842, 0.221, 151.07, 84.71, 12846, 1034.57
    ]  # fmt: skip
    assert math.isnan(first["mfu"])
    assert second["mfu"] == 46.18
    assert first["time"] == datetime(2026, 9, 14, 3, 10, 22, 481000).timestamp()
    assert (read.segments, read.reason) == (1, None)


def test_restart_case() -> None:
    read = read_log(CASES / "restart.log")
    assert steps(read.rows) == [(0, 90, 5.1), (0, 100, 5.0), (1, 90, 5.102), (1, 100, 5.001)]
    assert read.segments == 2
    assert steps(merge_segments(read.rows)) == [(1, 90, 5.102), (1, 100, 5.001)]


def test_pipeline_case_in_both_orders() -> None:
    lines = (CASES / "pipeline_two_nodes.log").read_text().splitlines()
    for order in (lines, lines[::-1]):
        rows = read_log(order).rows
        assert rows[["step", "loss", "memory_gib", "memory_pct"]].values.tolist() == [[10, 7.2, 131.0, 73.46]]
        assert rows["time"].tolist() == [datetime(2026, 9, 14, 6, 0, 1, 140000).timestamp()]


def test_memory_of_a_rank_without_the_loss_counts() -> None:
    rows = read_log([stamped(0, step(10, 7.2, memory=11)), stamped(0, step(10, -8.0, memory=12))]).rows
    assert rows[["loss", "memory_gib", "memory_pct"]].values.tolist() == [[7.2, 12.0, 6.0]]


def test_loss_that_no_rank_printed_is_missing_but_no_failure() -> None:
    read = read_log([stamped(0, step(10, -8.0)), stamped(0.1, step(10, -8.0, memory=12))])
    assert read.rows["loss"].isna().tolist() == [True]
    assert (len(read.rows), read.reason) == (1, None)


@pytest.mark.parametrize(
    ("text", "shown"), [("    nan", "nan"), ("    inf", "inf"), ("    NaN", "nan"), ("    Inf", "inf")]
)
def test_reported_loss_that_is_not_finite_is_a_failure(text: str, shown: str) -> None:
    read = read_log([stamped(0, step(10, 7.0)), stamped(60, step(20, text)), stamped(60.1, step(20, -4.0))])
    assert not math.isfinite(read.rows["loss"].iloc[1])
    assert read.reason == f"loss is {shown} at step 20 (segment 0)"


def test_error_of_torchtitan_about_the_loss() -> None:
    error = "[rank3]: RuntimeError: Loss is not finite (global_avg_loss=nan) at step 12. Stopping training.\n"
    source = '[rank3]:     f"Loss is not finite (global_avg_loss={global_avg_loss}) at "\n'
    lines = [stamped(0, start(1)), stamped(1, step(1, 8.0)), source, error]
    assert read_log(lines).reason == "loss is nan at step 12 (segment 0)"
    assert read_log([*lines, stamped(100, start(11)), stamped(110, step(20, 7.0))]).reason is None


def test_validation_lines() -> None:
    text = "validate step: 20  loss: {:7.4f}  memory: 12.50GiB(7.00%)  tps: {:,}"
    lines = [
        stamped(0, step(20, 7.0)),
        stamped(5, "\x1b[33m" + text.format(6.5, 9000) + "\x1b[39m"),
        stamped(5.1, text.format(-0.00001, 9100)),  # a pipeline rank: -1 over the number of tokens
    ]
    read = read_log(lines)
    assert len(read.rows) == 1
    assert read.validation.values.tolist() == [[0, 20, 6.5, 9000, 12.5, MIDNIGHT.timestamp() + 5]]


PREFIXES = ["", "[rank0]:", "[rank0]:[rank0]:", "b200-a001: [rank0]:", "12: b200-a001: ", "2026-09-14T01:00:00.000Z "]


@pytest.mark.parametrize("prefix", PREFIXES)
def test_prefixes(prefix: str) -> None:
    rows = read_log([stamped(90, step(10, 7.2), prefix)]).rows
    assert steps(rows) == [(0, 10, 7.2)]
    assert rows["time"].tolist() == [MIDNIGHT.timestamp() + 90]


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


def test_older_release_without_grad_norm_and_tflops() -> None:
    line = stamped(0, "step:  1  loss: 12.2721  memory: 41.50GiB(43.68%)  tps: 2,361  mfu: 13.79%")
    row = read_log([line]).rows.iloc[0]
    assert row[["loss", "memory_gib", "memory_pct", "tps", "mfu"]].tolist() == [12.2721, 41.5, 43.68, 2361, 13.79]
    assert row[["grad_norm", "tflops"]].isna().all()


def test_line_that_torchtitan_itself_writes(caplog: pytest.LogCaptureFixture) -> None:
    metrics = pytest.importorskip("torchtitan.components.metrics")
    from torchtitan.tools.utils import Color

    memory = SimpleNamespace(
        max_active_gib=1.0, max_active_pct=1.0, max_reserved_gib=151.07, max_reserved_pct=84.71,
        num_alloc_retries=0, num_ooms=0,
    )  # fmt: skip
    processor = SimpleNamespace(
        num_flops_per_token=80_000_000_000, time_last_log=0.0, ntokens_since_last_log=0, has_quantization=True,
        parallel_dims=SimpleNamespace(non_data_parallel_size=1), config=SimpleNamespace(log_freq=10),
        data_loading_times=[0.1], color=Color(), logger=SimpleNamespace(log=lambda *_: None), gpu_peak_flops=1.0,
        device_memory_monitor=SimpleNamespace(get_peak_stats=lambda: memory, reset_peak_stats=lambda: None),
    )  # fmt: skip
    with caplog.at_level(logging.INFO):
        metrics.MetricsProcessor.log(processor, 1200, 3.1842, 3.3, 0.221)
        metrics.MetricsProcessor.log_validation(processor, 3.25, 1200)
    formatter = logging.Formatter("[titan] %(asctime)s - %(name)s - %(levelname)s - %(message)s")
    records = [record for record in caplog.records if "step: " in record.getMessage()]
    read = read_log([formatter.format(record) for record in records])
    row = read.rows.iloc[0]
    assert row[["step", "loss", "grad_norm", "memory_gib", "memory_pct"]].tolist() == [
        1200, 3.1842, 0.221, 151.07, 84.71
    ]  # fmt: skip
    assert row["time"] == pytest.approx(records[0].created, abs=0.0011)
    assert read.validation[["step", "loss", "memory_gib"]].values.tolist() == [[1200, 3.25, 151.07]]


# Segments ----------------------------------------------------------------------------------------------------------


def test_32_nodes_starting_amid_the_first_rows_are_one_segment() -> None:
    starts = [stamped(node * 0.05, start(1), f"node{node:02}: [rank0]:") for node in range(32)]
    rows = [stamped(0.2, step(1, 8.0)), stamped(0.9, step(2, 7.9))]
    read = read_log([starts[0], rows[0], *starts[1:20], rows[1], *starts[20:]])
    assert read.segments == 1
    assert steps(read.rows) == [(0, 1, 8.0), (0, 2, 7.9)]


def test_restart_of_many_nodes_is_one_more_segment() -> None:
    launch = [stamped(node * 0.05, start(1)) for node in range(32)] + [stamped(60, step(10, 8.0))]
    again = [stamped(600 + node * 0.05, start(1)) for node in range(32)] + [stamped(660, step(10, 8.1))]
    assert steps(read_log(launch + again).rows) == [(0, 10, 8.0), (1, 10, 8.1)]


def test_launch_without_a_row_is_no_segment() -> None:
    lines = [stamped(0, start(1)), stamped(600, start(1)), stamped(660, step(10, 8.0)), stamped(900, start(11))]
    read = read_log(lines)
    assert (read.segments, steps(read.rows)) == (1, [(0, 10, 8.0)])


def test_resume_that_repeats_no_step_is_a_segment() -> None:
    lines = [stamped(0, start(1)), stamped(9, step(10, 8.0)), stamped(11, start(11)), stamped(20, step(20, 7.0))]
    assert steps(read_log(lines).rows) == [(0, 10, 8.0), (1, 20, 7.0)]


def test_restart_without_start_lines() -> None:
    lines = [stamped(300, step(90, 5.1)), stamped(360, step(100, 5.0)), stamped(3720, step(90, 5.102))]
    assert steps(read_log(lines).rows) == [(0, 90, 5.1), (0, 100, 5.0), (1, 90, 5.102)]
    same = [stamped(360, step(100, 5.0)), stamped(3720, step(100, 5.001)), stamped(3780, step(110, 4.9))]
    assert steps(read_log(same).rows) == [(0, 100, 5.0), (1, 100, 5.001), (1, 110, 4.9)]


def test_late_line_of_a_rank_opens_no_segment() -> None:
    lines = [stamped(300, step(90, 5.1)), stamped(360, step(100, 5.0)), stamped(300.4, step(90, -4.0, memory=20))]
    read = read_log(lines)
    assert read.segments == 1
    assert read.rows["memory_gib"].tolist() == [20, 10]


def test_late_line_of_the_previous_launch_goes_back_to_it() -> None:
    lines = [
        stamped(0, start(1)), stamped(360, step(100, -4.0)), stamped(3600, start(81)), stamped(360.2, step(100, 5.0)),
        stamped(3720, step(90, 5.102)),
    ]  # fmt: skip
    assert steps(read_log(lines).rows) == [(0, 100, 5.0), (1, 90, 5.102)]


def test_without_time_stamps_the_order_of_the_file_decides() -> None:
    lines = [start(1), step(90, 5.1), step(100, 5.0), start(81), step(90, 5.102)]
    assert steps(read_log(lines).rows) == [(0, 90, 5.1), (0, 100, 5.0), (1, 90, 5.102)]
    lines = [step(90, 5.1), step(90, -4.0), step(100, 5.0), step(90, 5.102)]
    read = read_log(lines)
    assert steps(read.rows) == [(0, 90, 5.1), (0, 100, 5.0), (1, 90, 5.102)]
    assert read.rows["time"].isna().all()


def pipeline_job(rank: int, *, starts: bool) -> list[str]:
    """Lines of one rank of a job that was requeued at step 50 and resumed from step 20; rank 1 has the loss."""
    lines = []
    for launched, first, last in ((0, 1, 50), (3600, 21, 60)):
        if starts:
            lines.append(stamped(launched + 0.3 * rank, start(first)))
        for number in range((first + 9) // 10 * 10, last + 1, 10):
            loss = 9 - number / 100 + launched / 1e6 if rank == 1 else -8.0
            moment = launched + number + 0.1 * ((rank * 7 + number) % 5)
            lines.append(stamped(moment, step(number, loss, tps=f"{4000 + rank:,}", memory=10 + rank + number / 10)))
    return lines


@settings(deadline=None, max_examples=60)
@given(data=st.data(), starts=st.booleans())
def test_any_interleaving_of_the_ranks_gives_the_same_rows(data: st.DataObject, starts: bool) -> None:
    ranks = [pipeline_job(rank, starts=starts) for rank in range(3)]
    expected = read_log(sorted(chain(*ranks), key=lambda line: line.split("[titan] ")[1][:23])).rows
    assert steps(expected) == [
        *[(0, n, pytest.approx(9 - n / 100)) for n in range(10, 51, 10)],
        *[(1, n, pytest.approx(9 - n / 100 + 0.0036)) for n in range(30, 61, 10)],
    ]
    assert expected["memory_gib"].tolist() == [12 + n / 10 for n in (10, 20, 30, 40, 50, 30, 40, 50, 60)]
    order = data.draw(st.permutations([rank for rank, lines in enumerate(ranks) for _ in lines]))
    queues = [iter(lines) for lines in ranks]
    pd.testing.assert_frame_equal(read_log([next(queues[rank]) for rank in order]).rows, expected)


# Streaming ---------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(cuts=st.lists(st.integers(0, 3000), max_size=12), end=st.sampled_from(["", "\n"]))
def test_follower_polled_anywhere_gives_what_one_read_gives(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int], end: str
) -> None:
    log = tmp_path_factory.mktemp("follow") / "train.log"
    content = "".join(chain(*zip(*(pipeline_job(r, starts=True) for r in range(2)), strict=True)))
    content = content.rstrip("\n") + end
    follower = LogFollower(log)
    polls = [follower.poll()]
    bounds = sorted({0, *(min(cut, len(content)) for cut in cuts), len(content)})
    for begin, stop in pairwise(bounds):
        with log.open("a") as file:
            file.write(content[begin:stop])
        polls.append(follower.poll())
    expected = read_log(log).rows
    assert len(expected) == 9
    pd.testing.assert_frame_equal(follower.result().rows, expected)
    joined = pd.concat(polls).drop_duplicates(["segment", "step"], keep="last").sort_values(["segment", "step"])
    pd.testing.assert_frame_equal(joined.reset_index(drop=True), expected)
    assert follower.poll().empty


def test_follower_waits_for_the_file_and_for_the_end_of_a_line(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    follower = LogFollower(log)
    assert follower.poll().empty
    line = stamped(0, step(10, 7.25))
    log.write_text(line[:75])
    assert follower.poll().empty
    with log.open("a") as file:
        file.write(line[75:])
    assert steps(follower.poll()) == [(0, 10, 7.25)]
    assert follower.poll().empty
    assert follower.offset == len(line)


def test_follower_survives_truncation_and_replacement(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    follower = LogFollower(log)
    log.write_text(stamped(0, start(1)) + stamped(100, step(10, 7.0)) + stamped(200, step(20, 6.9)))
    assert len(follower.poll()) == 2
    log.write_text(stamped(900, start(11)) + stamped(1000, step(20, 6.8)))
    assert steps(follower.poll()) == [(1, 20, 6.8)]
    other = tmp_path / "new.log"
    other.write_text("x" * 1000 + "\n" + stamped(1100, step(30, 6.7)))
    other.replace(log)
    assert steps(follower.poll()) == [(1, 30, 6.7)]
    assert steps(follower.result().rows) == [(0, 10, 7.0), (0, 20, 6.9), (1, 20, 6.8), (1, 30, 6.7)]


def test_memory_does_not_depend_on_the_size_of_the_log(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    other = stamped(0, "[GC] Performing periodic GC collection took 0.02 seconds") * 4
    with log.open("w") as file:
        for number in range(10, 2510, 10):
            file.writelines(stamped(number, step(number, 7.0 if rank > 190 else -8.0)) + other for rank in range(200))
    assert log.stat().st_size > 25e6
    tracemalloc.start()
    rows = read_log(log).rows
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert rows["step"].tolist() == list(range(10, 2510, 10))
    assert (rows["loss"] == 7.0).all()
    assert peak < 8e6


# Bad input ---------------------------------------------------------------------------------------------------------


def test_file_that_is_no_log(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("step by step\n")
    with pytest.raises(NotALog, match=r"notes\.txt: no TorchTitan step line .*from the rank that logs") as caught:
        read_log(path)
    assert caught.value.exit_code == 2
    empty = read_log(path, allow_empty=True)
    assert (len(empty.rows), empty.segments, tuple(empty.rows.columns)) == (0, 0, COLUMNS)
    with pytest.raises(NotALog, match="no such file"):
        read_log(tmp_path / "missing.log", allow_empty=True)


def test_compressed_log(tmp_path: Path) -> None:
    path = tmp_path / "restart.log.gz"
    path.write_bytes(gzip.compress((CASES / "restart.log").read_bytes()))
    pd.testing.assert_frame_equal(read_log(path).rows, read_log(CASES / "restart.log").rows)


def test_a_compressed_log_that_was_cut_off_gives_what_it_has(tmp_path: Path) -> None:
    lines = [
        f"step: {n}  loss: {9 - n / 1000:.5f}  memory: 1.00GiB(1.00%)  tps: {4000 + n * 37 % 999:,}  mfu: N/A"
        for n in range(1, 3001)
    ]
    whole = tmp_path / "whole.log.gz"
    whole.write_bytes(gzip.compress("\n".join(lines).encode()))
    cut = tmp_path / "cut.log.gz"
    cut.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    rows = read_log(cut).rows
    assert 500 < len(rows) < 3000
    pd.testing.assert_frame_equal(rows, read_log(whole).rows.iloc[: len(rows)])


@pytest.mark.parametrize("digits", [16, 25, 5_000])
def test_a_step_number_that_no_table_holds_is_damage(digits: int) -> None:
    line = "step: {}  loss:  7.20000  memory: 1.00GiB(1.00%)  tps: 4,000  mfu: N/A"
    lines = [
        line.format(1),
        line.format("9" * digits),
        f"Training starts at step {'9' * digits}",
        f"Loss is not finite (global_avg_loss=nan) at step {'9' * digits}.",
        line.format(2),
    ]
    found = read_log(lines)
    assert (found.rows["step"].tolist(), found.segments, found.reason) == ([1, 2], 1, None)
