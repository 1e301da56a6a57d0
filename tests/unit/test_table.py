"""Operations on the metrics table, and W&B exports, against answers worked out by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from moelab.errors import BadInput
from moelab.runs.log import read_log
from moelab.runs.table import COLUMNS, metrics_table, throughput_rows
from moelab.runs.wandb import read_wandb

CASES = Path(__file__).parents[1] / "cases" / "logs"
NAN = math.nan


def picked(table: pd.DataFrame, *columns: str) -> list[tuple[object, ...]]:
    return list(table[list(columns)].itertuples(index=False, name=None))


def test_throughput_leaves_out_warm_up_and_the_first_row_after_a_restart() -> None:
    rows = read_log(CASES / "restart.log").rows
    assert throughput_rows(rows, warmup_steps=0)["tps"].tolist() == [9000, 9010, 9005]
    assert throughput_rows(rows, warmup_steps=90)["tps"].tolist() == [9010, 9005]
    tps = [NAN if step == 9 else step for step in range(1, 21)]
    steps = metrics_table({"segment": [0] * 20, "step": range(1, 21), "tps": tps})
    assert throughput_rows(steps, warmup_steps=5)["step"].tolist() == [6, 7, 8, *range(10, 21)]


# W&B

LOSS_NAME = "loss_metrics/global_avg_loss"
HISTORY = [
    {"_step": 1, "_timestamp": 100.5, "loss_metrics/global_avg_loss": 8.25, "throughput(tps)": 4000.5, "mfu(%)": None,
     "memory/max_reserved(GiB)": 12.5, "lr/AdamW/0": 0.001, "lr/AdamW/1": 0.002},
    {"_step": 1, "_timestamp": 101.0, "validation_metrics/loss": 8.5, "validation_metrics/throughput(tps)": 9000.0},
    {"_step": 10, "_timestamp": 200.0, "loss_metrics/global_avg_loss": 7.5, "throughput(tps)": 4100.0},
]  # fmt: skip


def written(path: Path, table: pd.DataFrame) -> Path:
    """A table in the format of the path's ending."""
    if ".parquet" in path.suffixes:
        table.to_parquet(path)
    else:
        table.to_csv(path, index=False)
    return path


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_wandb_history(tmp_path: Path, kind: str) -> None:
    path, frame = tmp_path / f"history.{kind.split()[0]}", pd.DataFrame(HISTORY)
    written(path, frame.set_index("_step") if kind == "parquet" else frame)
    (read,) = read_wandb(path)
    assert tuple(read.rows.columns) == COLUMNS
    rows = [(0, 1, 8.25, 4000.5, 100.5), (0, 10, 7.5, 4100.0, 200.0)]
    assert picked(read.rows, "segment", "step", "loss", "tps", "time") == rows
    assert picked(read.rows, "lr", "memory_gib")[0] == (0.002, 12.5)
    assert read.rows[["mfu", "run"]].isna().all(axis=None)
    assert read.validation.iloc[:, :4].to_numpy().tolist() == [[0, 1, 8.5, 9000.0]]
    assert (read.segments, read.reason) == (1, None)


@pytest.mark.parametrize("value", ["NaN", "Infinity"])
def test_wandb_reported_nan_is_a_failure_and_a_missing_value_is_not(tmp_path: Path, value: str) -> None:
    table = pd.DataFrame([*HISTORY, {"_step": 20, LOSS_NAME: value, "tflops": 1.0}])
    (read,) = read_wandb(written(tmp_path / "history.csv", table))
    assert read.reason == f"loss is {float(value)} at step 20 (segment 0)"
    assert read.rows["step"].tolist() == [1, 10, 20]


@pytest.mark.parametrize(
    ("columns", "runs"),
    [
        (
            {
                "Step": [10, 20],
                f"bf16 - a - {LOSS_NAME}": ["7.5", "7.0"],
                f"bf16 - a - {LOSS_NAME}__MIN": ["0.1", "0.1"],
            }
            | {f"mxfp8 - {LOSS_NAME}": ["7.25", ""]},
            {"bf16 - a": [(10, 7.5), (20, 7.0)], "mxfp8": [(10, 7.25)]},
        ),
        (
            {"Step": [1, 2], "a - _step": [1, 2], "a - loss": [9.0, 8], "a - loss__MIN": 1, "b - loss": [8, 7]},
            {"a": [(1, 9), (2, 8)], "b": [(1, 8), (2, 7)]},
        ),
    ],
)
def test_wandb_chart_of_two_runs(tmp_path: Path, columns: dict[str, Any], runs: dict[str, Any]) -> None:
    reads = read_wandb(written(tmp_path / "chart.csv.gz", pd.DataFrame(columns)))
    assert {read.rows["run"][0]: picked(read.rows, "step", "loss") for read in reads} == runs


def history(shift: float = 0.0, first: int = 1, last: int = 30, at: float = 1e9, **more: str) -> pd.DataFrame:
    steps = range(first, last + 1)
    losses = [9 - step / 10 + shift for step in steps]
    return pd.DataFrame({"_step": steps, "_timestamp": [at + 5 * step for step in steps], LOSS_NAME: losses, **more})


def runs_of(path: Path, *tables: pd.DataFrame) -> list[tuple[object, int, list[int]]]:
    """Each run of a file of these tables under each other, with its launches and steps."""
    reads = read_wandb(written(path, pd.concat(tables)))
    return [(read.rows["run"][0], read.segments, [*read.rows["step"]]) for read in reads]


ALL_STEPS = [*range(1, 31)]


@pytest.mark.parametrize("name", ["run", "run_id", "run_name", "run.name", "Name", "display_name"])
@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_wandb_histories_of_several_runs_under_each_other(tmp_path: Path, name: str, kind: str) -> None:
    table = pd.concat([history(**{name: "bf16"}), history(0.02, at=1e9 + 60, **{name: "mxfp8"})])
    path = tmp_path / f"history.{kind}"
    expected = [("bf16", 1, ALL_STEPS), ("mxfp8", 1, ALL_STEPS)]
    assert runs_of(path, table) == sorted(runs_of(path, table.sample(frac=1, random_state=1))) == expected


def test_wandb_exports_joined_without_a_name(tmp_path: Path) -> None:
    path = tmp_path / "history.csv"
    restart = [history(0.001, first=11, at=1e9 + 1000), history(last=20)]
    assert [run[1:] for run in runs_of(path, *restart)] == [(2, [*range(1, 21), *range(11, 31)])]
    in_two_rows = [  # of a step the loss, then the throughput: W&B makes a row of each call
        pd.concat([one, one.drop(columns=LOSS_NAME).assign(**{"throughput(tps)": 100.0})]).sort_values(
            "_step", kind="stable"
        )
        for one in restart[::-1]
    ]
    assert [run[1:] for run in runs_of(path, *in_two_rows)] == [(2, [*range(1, 21), *range(11, 31)])]
    for other in (history(0.02, at=1e9 + 1000), history(0.02, at=1e9 + 1)):  # later, and at the same time
        both = pd.concat([history(), other])
        for table in (both, both.drop(columns="_timestamp")):
            with pytest.raises(BadInput, match=r"history\.csv: it holds two runs"):
                runs_of(path, table)
    for order in (history()[::-1], history().sample(frac=1, random_state=1).drop(columns="_timestamp")):
        assert [run[1:] for run in runs_of(path, order)] == [(1, ALL_STEPS)]


def test_wandb_of_2024(tmp_path: Path) -> None:
    seconds = [1793000001, 1793000002, 1793000003]
    table = pd.DataFrame({"_step": [0, 1, 2], "step": [1, 10, 20], "wps": [5000.0, 5100, 5200], LOSS_NAME: [9.0, 8, 7]})
    (read,) = read_wandb(written(tmp_path / "h.csv", table.assign(_timestamp=[1000 * second for second in seconds])))
    assert read.rows["time"].tolist() == seconds  # where its server counted them, in milliseconds
    assert picked(read.rows, "step", "tps", "loss") == [(1, 5000.0, 9.0), (10, 5100.0, 8.0), (20, 5200.0, 7.0)]


@pytest.mark.parametrize(
    ("name", "text", "losses", "note"),
    [
        ("a.csv", "_step;loss\n1;8,99\n2;8\n", [8], "1 of 2 values of loss are no numbers, such as '8,99'"),
        ("a.csv", "_step,loss,tps\n1,9, \n2,##,4\n", [9, NAN], "1 of 2 values of loss are no numbers"),
    ],
)
def test_wandb_names_what_is_lost(tmp_path: Path, name: str, text: str, losses: list[float], note: str) -> None:
    (tmp_path / name).write_text(text)
    (read,) = read_wandb(tmp_path / name)
    assert read.rows["loss"].tolist() == pytest.approx(losses, nan_ok=True)
    assert [one[: len(note)] for one in read.notes] == [note]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "epoch,loss\n1,2\n"),
        ("a.json", "[1, 2]"),
        ("a.csv", ""),
        ("a.csv", "_step,loss\n1,9\n2,8,7,7\n"),
    ],
)
def test_file_that_is_no_wandb_export(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(BadInput, match=f"{name}.*(looked for a step column|export of a W&B run)"):
        read_wandb(tmp_path / name)
