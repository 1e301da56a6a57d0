"""Operations on the metrics table, and W&B exports, against answers worked out by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from moelab.errors import BadInput
from moelab.runs.log import read_log
from moelab.runs.table import COLUMNS, combine, merge_segments, metrics_table, separate_runs, throughput_rows
from moelab.runs.wandb_export import read_wandb

CASES = Path(__file__).parents[1] / "cases" / "logs"


def picked(table: pd.DataFrame, *columns: str) -> list[tuple[object, ...]]:
    return list(table[list(columns)].itertuples(index=False, name=None))


def test_table_has_the_schema_even_when_empty() -> None:
    for table in (
        metrics_table({"segment": [], "step": []}),
        metrics_table({"segment": [0], "step": [1], "lr": [0.1]}),
    ):
        assert tuple(table.columns) == COLUMNS
        assert table.dtypes.astype(str).tolist() == ["string", "string", "Int64", "int64", "int64", *["float64"] * 9]
    assert metrics_table({"segment": [0], "step": [1]}, run="a")["run"].tolist() == ["a"]


def test_merge_keeps_runs_apart_and_the_last_of_three_segments() -> None:
    one = metrics_table({"segment": [2, 0, 1, 0], "step": [20, 10, 20, 20], "loss": [3.0, 9.0, 2.0, 1.0]})
    two = metrics_table({"segment": [0], "step": [20], "loss": [7.0]})
    table = pd.concat([one.assign(seed=0), two.assign(seed=1)]).astype({"seed": "Int64"})
    assert picked(merge_segments(table), "seed", "step", "loss") == [(0, 10, 9.0), (0, 20, 3.0), (1, 20, 7.0)]


def test_throughput_leaves_out_warm_up_and_the_first_row_after_a_restart() -> None:
    rows = read_log(CASES / "restart.log").rows
    assert throughput_rows(rows, warmup_steps=0)["tps"].tolist() == [9000, 9010, 9005]
    assert throughput_rows(rows, warmup_steps=90)["tps"].tolist() == [9010, 9005]
    steps = metrics_table(
        {"segment": [0] * 20, "step": range(1, 21), "tps": [math.nan if s == 9 else s for s in range(1, 21)]}
    )
    assert throughput_rows(steps, warmup_steps=5)["step"].tolist() == [6, 7, 8, *range(10, 21)]


def table(
    segment: list[int], step: list[int], loss: list[float], time: list[float], **more: list[float]
) -> dict[str, np.ndarray]:
    given = {"segment": segment, "step": step, "loss": loss, "time": time, **more}
    return {
        name: np.array(values, dtype="int64" if name in ("segment", "step") else "float64")
        for name, values in given.items()
    }


def test_combine_is_the_union_and_prefers_full_precision() -> None:
    log = table([0, 0], [10, 20], [7.12346, 7.0], [100.0, 200.0], memory_gib=[131.0, 120.01], tps=[4000.0, 4001.0])
    tb = table([0, 0], [1, 10], [8.0, 7.123456], [10.0, 100.001], memory_gib=[90.0, 120.004], lr=[1e-5, 1e-4])
    both = metrics_table(combine(log, tb))
    assert picked(both, "segment", "step", "loss") == [(0, 1, 8.0), (0, 10, 7.123456), (0, 20, 7.0)]
    assert both["memory_gib"].tolist() == [90.0, 131.0, 120.01]
    assert both["lr"].tolist()[:2] == [1e-5, 1e-4]
    assert both["tps"].tolist()[1:] == [4000.0, 4001.0]
    assert math.isnan(both["lr"][2])
    assert math.isnan(both["tps"][0])


def test_combine_keeps_rounded_memory_out_where_full_precision_is_known() -> None:
    log, tb = (table([0], [10], [7.0], [0.0], memory_gib=[gib]) for gib in (151.07, 151.0689))
    assert combine(log, tb)["memory_gib"].tolist() == [151.0689]


def test_combine_finds_the_segment_when_tensorboard_lost_the_first_launch() -> None:
    log = table([0, 0, 1, 1], [10, 20, 10, 20], [8.0, 7.0, 8.1, 7.1], [10, 20, 1000, 1010])
    tb = table([0, 0], [10, 20], [8.1000001, 7.1000001], [1000, 1010])
    assert picked(metrics_table(combine(log, tb)), "segment", "step", "loss") == [
        (0, 10, 8.0), (0, 20, 7.0), (1, 10, 8.1000001), (1, 20, 7.1000001)
    ]  # fmt: skip


def test_combine_goes_by_time_where_the_loss_is_the_same_or_unknown() -> None:
    zone = 7 * 3600.0  # the log was written seven hours west of where it is read
    log = table([0, 1, 1], [10, 10, 20], [math.nan] * 3, [10, 3700, 3800])
    tb = table([0], [10], [8.0], [3700 + zone])
    both = metrics_table(combine(log, tb))
    assert picked(both, "segment", "step")[1] == (1, 10)
    assert both["loss"].tolist()[1] == 8.0
    assert both["time"].tolist() == [10 + zone, 3700 + zone, 3800 + zone]


def test_combine_inserts_a_launch_that_the_log_lost() -> None:
    log = table([0], [10], [8.1], [1000.0])
    tb = table([0, 1], [10, 10], [8.0, 8.1], [10.0, 1000.0])
    assert picked(metrics_table(combine(log, tb)), "segment", "loss") == [(0, 8.0), (1, 8.1)]


def test_combine_with_an_empty_side() -> None:
    empty, full = table([], [], [], []), table([0], [10], [8.0], [0.0])
    for both in (combine(empty, full), combine(full, empty)):
        pd.testing.assert_frame_equal(metrics_table(both), metrics_table(full))


LOSS_NAME = "loss_metrics/global_avg_loss"
HISTORY = [
    {"_step": 1, "_timestamp": 100.5, "loss_metrics/global_avg_loss": 8.25, "throughput(tps)": 4000.5, "mfu(%)": None,
     "memory/max_reserved(GiB)": 12.5, "lr/AdamW/0": 0.001, "lr/AdamW/1": 0.002},
    {"_step": 1, "_timestamp": 101.0, "validation_metrics/loss": 8.5, "validation_metrics/throughput(tps)": 9000.0},
    {"_step": 10, "_timestamp": 200.0, "loss_metrics/global_avg_loss": 7.5, "throughput(tps)": 4100.0},
]  # fmt: skip


@pytest.mark.parametrize("kind", ["csv", "json", "jsonl", "json by column", "parquet"])
def test_wandb_history(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"history.{kind.split()[0]}"
    frame = pd.DataFrame(HISTORY)
    lines = "\n".join(map(json.dumps, HISTORY))
    texts = {"csv": frame.to_csv(), "json": json.dumps(HISTORY), "jsonl": lines, "json by column": frame.to_json()}
    path.write_text(texts.get(kind, ""))
    if kind == "parquet":
        frame.set_index("_step").to_parquet(path)
    (read,) = read_wandb(path)
    assert tuple(read.rows.columns) == COLUMNS
    assert picked(read.rows, "segment", "step", "loss", "tps", "time") == [
        (0, 1, 8.25, 4000.5, 100.5), (0, 10, 7.5, 4100.0, 200.0)
    ]  # fmt: skip
    assert read.rows[["lr", "memory_gib"]].iloc[0].tolist() == [0.002, 12.5]
    assert read.rows["mfu"].isna().all()
    assert read.rows["run"].isna().all()
    assert read.validation.iloc[0].tolist()[:4] == [0, 1, 8.5, 9000.0]
    assert (len(read.validation), read.segments, read.reason) == (1, 1, None)


def test_wandb_chart_of_two_runs(tmp_path: Path) -> None:
    path = tmp_path / "chart.csv"
    columns = f'"Step","bf16 - a - {LOSS_NAME}","bf16 - a - {LOSS_NAME}__MIN","mxfp8 - {LOSS_NAME}"'
    path.write_text(f'{columns}\n10,"7.5","0.1","7.25"\n20,"7.0","0.1",""\n')
    first, second = read_wandb(path)
    assert picked(first.rows, "run", "step", "loss") == [("bf16 - a", 10, 7.5), ("bf16 - a", 20, 7.0)]
    assert picked(second.rows, "run", "step", "loss") == [("mxfp8", 10, 7.25)]


@pytest.mark.parametrize("value", ["NaN", math.nan, "Infinity"])
def test_wandb_reported_nan_is_a_failure_and_a_missing_value_is_not(tmp_path: Path, value: object) -> None:
    path = tmp_path / "history.json"
    path.write_text(json.dumps([*HISTORY, {"_step": 20, LOSS_NAME: value, "tflops": 1.0}]))
    (read,) = read_wandb(path)
    assert read.reason == f"loss is {float(value)} at step 20 (segment 0)"  # type: ignore[arg-type]
    assert read.rows["step"].tolist() == [1, 10, 20]


def history(shift: float = 0.0, first: int = 1, last: int = 30, at: float = 1e9, **more: str) -> pd.DataFrame:
    steps = range(first, last + 1)
    losses = [9 - step / 10 + shift for step in steps]
    return pd.DataFrame({"_step": steps, "_timestamp": [at + 5 * step for step in steps], LOSS_NAME: losses, **more})


def runs(path: Path, table: pd.DataFrame) -> list[tuple[object, int, list[int]]]:
    """Write a table and return each run with its launches and steps."""
    if path.suffix == ".parquet":
        table.to_parquet(path)
    elif path.suffix == ".csv":
        table.to_csv(path, index=False)
    else:
        table.to_json(path, orient="records", lines=path.suffix == ".jsonl")
    reads = read_wandb(path)
    return [
        (read.rows["run"][0] if read.name is None else read.name, read.segments, [*read.rows["step"]]) for read in reads
    ]


ALL_STEPS = [*range(1, 31)]


@pytest.mark.parametrize("name", ["run", "run_id", "run_name", "run.name", "Name", "display_name"])
@pytest.mark.parametrize("kind", ["csv", "json", "jsonl", "parquet"])
def test_wandb_histories_of_several_runs_under_each_other(tmp_path: Path, name: str, kind: str) -> None:
    table = pd.concat([history(**{name: "bf16"}), history(0.02, at=1e9 + 60, **{name: "mxfp8"})])
    path = tmp_path / f"history.{kind}"
    assert runs(path, table) == [("bf16", 1, ALL_STEPS), ("mxfp8", 1, ALL_STEPS)]
    assert sorted(runs(path, table.sample(frac=1, random_state=1))) == runs(path, table)


def test_wandb_runs_of_one_name_are_told_apart_by_their_ids(tmp_path: Path) -> None:
    table = pd.concat([history(run_id="a1", run_name="r"), history(0.02, run_id="b2", run_name="r")])
    assert [run for run, *_ in runs(tmp_path / "h.csv", table)] == ["r (a1)", "r (b2)"]
    table = pd.concat([history(arm=arm, seed=seed) for arm in ("bf16", "mxfp8") for seed in "01"])
    assert [run for run, *_ in runs(tmp_path / "h.csv", table)] == ["bf16 0", "bf16 1", "mxfp8 0", "mxfp8 1"]
    by_run = {run: history(shift).to_dict("records") for run, shift in (("one", 0.0), ("two", 0.1))}
    (tmp_path / "h.json").write_text(json.dumps(by_run))
    assert [read.rows["run"][0] for read in read_wandb(tmp_path / "h.json")] == ["one", "two"]


def test_wandb_exports_joined_without_a_name(tmp_path: Path) -> None:
    path = tmp_path / "history.csv"
    again = history(0.001, first=11, at=1e9 + 1000)
    restart = pd.concat([again, history(last=20)])
    assert [(launches, steps) for _, launches, steps in runs(path, restart)] == [(2, [*range(1, 21), *range(11, 31)])]
    for other in (history(0.02, at=1e9 + 1000), history(0.02, at=1e9 + 1)):  # later, and at the same time
        both = pd.concat([history(), other])
        for table in (both, both.drop(columns="_timestamp")):
            assert runs(path, table) == [("run 1 of 2", 1, ALL_STEPS), ("run 2 of 2", 1, ALL_STEPS)]
    for order in (history()[::-1], history().sample(frac=1, random_state=1).drop(columns="_timestamp")):
        assert [(launches, steps) for _, launches, steps in runs(path, order)] == [(1, ALL_STEPS)]


def test_wandb_of_2024(tmp_path: Path) -> None:
    seconds = [1793000001, 1793000002, 1793000003]
    table = pd.DataFrame({"_step": [0, 1, 2], "step": [1, 10, 20], "wps": [5000.0, 5100, 5200], LOSS_NAME: [9.0, 8, 7]})
    table.assign(_timestamp=[1000 * second for second in seconds]).to_csv(tmp_path / "h.csv", index=False)
    (read,) = read_wandb(tmp_path / "h.csv")
    assert read.rows["time"].tolist() == seconds  # where its server counted them, in milliseconds
    assert picked(read.rows, "step", "tps", "loss") == [(1, 5000.0, 9.0), (10, 5100.0, 8.0), (20, 5200.0, 7.0)]


def test_wandb_chart_as_its_page_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "chart.csv.gz"
    table = pd.DataFrame(
        {"Step": [1, 2], "a - _step": [1, 2], "a - loss": [9.0, 8], "a - loss__MIN": 1, "b - loss": [8, 7]}
    )
    table.to_csv(path, index=False)
    assert [picked(read.rows, "run", "loss") for read in read_wandb(path)] == [
        [("a", 9), ("a", 8)],
        [("b", 8), ("b", 7)],
    ]


@pytest.mark.parametrize(
    ("name", "text", "losses", "note"),
    [
        ("a.csv", "_step;loss\n1;8,99\n2;8\n", [math.nan, 8], "1 of 2 values of loss are no numbers, such as '8,99'"),
        ("a.csv", "_step,loss,tps\n1,9, \n2,##,N/A\n", [9, math.nan], "1 of 2 values of loss are no numbers"),
        ("a.csv", "_step,loss\n1,9\n2,8,7,7\n", [9], "Skipping line 3: expected 2 fields, saw 4"),
        ("a.csv", "_step,loss\n1,9,\n2,8,\n", [9, 8], "Length of header or names"),
        ("a.csv", "_step,loss\nr1,1,9\nr2,2,##\n", [9, math.nan], "1 of 2 values of loss are no numbers"),  # by R
        ("a.jsonl", '{"_step": 1, "loss": 9}\n{"_step": 2, "lo', [9], "1 of 2 lines are damaged or cut off"),
    ],
)  # fmt: skip
def test_wandb_says_what_it_could_not_read(
    tmp_path: Path, name: str, text: str, losses: list[float], note: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    (read,) = read_wandb(path)
    assert read.rows["loss"].tolist() == pytest.approx(losses, nan_ok=True)
    assert [one[: len(note)] for one in read.notes] == [note]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "epoch,loss\n1,2\n", "looked for a step column"),
        ("a.json", "{not json", "export of a W&B run"),
        ("a.json", "[1, 2]", "export of a W&B run"),
        ("a.json", "3", "export of a W&B run"),
        ("a.json", '{"losses": [1, 2]}', "export of a W&B run"),
        ("a.csv", "", "export of a W&B run"),
    ],
)
def test_file_that_is_no_wandb_export(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(BadInput, match=message):
        read_wandb(path)


def test_a_launch_goes_on_with_the_run_whose_loss_it_starts_from() -> None:
    losses = {"loss": np.array([8.11, 8.0, 8.13, 6.0, 5.9, 5.8])}  # two runs of two steps, and a restart of the second
    launches = {"segment": np.array([0, 0, 1, 1, 2, 2]), "step": np.array([1, 2, 1, 2, 3, 4]), **losses}
    none = {name: values[:0] for name, values in launches.items()}
    reads = separate_runs(launches, none, {}, source=Path("two.log"))
    assert [read.columns["loss"].tolist() for read in reads] == [[8.11, 8.0], [8.13, 6.0, 5.9, 5.8]]
