"""The load of experts: what a run writes, what is read of it, and what a plan and a projection make of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pytest
from figure_support import title
from run_support import make_run

from moelab.cli import main
from moelab.errors import BadInput
from moelab.experiment import Experiment
from moelab.experiment_file import write_experiment
from moelab.hardware import cluster_of
from moelab.judge.report import judge_study
from moelab.layout import check
from moelab.planning.memory.measured import measured_constants
from moelab.planning.time.job import job_of
from moelab.planning.time.routing import draw_expert_ids, expected_destinations
from moelab.runs.collect import collect_run
from moelab.runs.directory import RunDir
from moelab.runs.expert_load import FILE, ExpertLoad, ExpertLoadFile, expert_load
from moelab.viz.report import write_study_report
from moelab.viz.study import expert_load_figure

UNEVEN = np.array([[4, 4, 4, 4], [10, 2, 4, 0]])
"""Tokens of four experts in two MoE layers: balance, and one expert with 2.5 times the mean and one with nothing."""


def tokens_of(moe: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """As a trainer counts them: a row for each layer of the model, of which the first is dense."""
    return np.pad(np.asarray(moe, dtype=np.int64), ((1, 0), (0, 0)))


def recorded(run: RunDir, *steps: npt.ArrayLike) -> RunDir:
    file = ExpertLoadFile(run.path)
    for number, moe in enumerate(steps, start=1):
        file.add(number, tokens_of(moe))
    return run


def trained(folder: Path, *steps: npt.ArrayLike, **fields: object) -> RunDir:
    changes = {"shape": {"num_experts": 4}, "steps": 4, **fields}
    return recorded(make_run(folder, Experiment.model_validate(changes), [8.0, 7.9, 7.8, 7.7]), *steps)


def load_of(run: RunDir) -> ExpertLoad:
    load = expert_load(run.path / FILE)
    assert load is not None
    return load


def test_what_is_written_is_read_and_a_repeated_step_has_its_last_count(tmp_path: Path) -> None:
    run = trained(tmp_path)
    older = collect_run(run)
    assert expert_load(run.path / FILE) is older.load is older.to_json()["expert_load"] is None
    assert older.damaged == ()
    recorded(run, np.full((2, 4), 4), UNEVEN)
    table = pd.read_parquet(run.path / FILE)
    assert list(table.columns) == ["step", "layer", "expert", "tokens"]
    assert all(pd.api.types.is_integer_dtype(kind) for kind in table.dtypes)
    assert table.groupby(["step", "layer"])["tokens"].sum().tolist() == [16] * 4
    load = load_of(run)
    assert (load.steps.tolist(), load.layers.tolist(), load.dead_experts) == ([1, 2], [1, 2], 1)
    np.testing.assert_array_equal(load.tokens_SLE[1], UNEVEN)
    np.testing.assert_array_equal(load.busiest_expert_SL, [[1, 1], [1, 2.5]])
    np.testing.assert_array_equal(load.busiest_rank_SL(2), [[1, 1], [1, 1.5]])
    told = collect_run(run).to_json()["expert_load"]
    assert told == {"recorded_steps": 2, "last_step": 2, "layers": 2, "experts": 4, "busiest_expert_over_mean": 2.5,
                    "dead_experts": 1}  # fmt: skip
    restarted = ExpertLoadFile(run.path)
    for step, moe in ((2, np.full((2, 4), 4)), (3, UNEVEN)):
        restarted.add(step, tokens_of(moe))
    load = load_of(run)
    assert (load.steps.tolist(), load.busiest_expert_SL[:, 1].tolist()) == ([1, 2, 3], [1.0, 1.0, 2.5])


def test_a_damaged_file_is_named_hides_nothing_else_and_is_begun_anew(tmp_path: Path) -> None:
    run = trained(tmp_path, UNEVEN, UNEVEN)
    file = run.path / FILE
    table = pd.read_parquet(file)
    without_a_row = table[:-1].to_parquet(index=False)
    unreadable = [
        file.read_bytes()[:-9],
        b"step,layer\n",
        table.rename(columns={"tokens": "n"}).to_parquet(index=False),
    ]
    for content in (without_a_row, *unreadable):
        file.write_bytes(content)
        with pytest.raises(BadInput, match=r"expert_load.parquet is damaged"):
            expert_load(file)
        one = collect_run(run)
        assert (len(one.rows), any(FILE in words for words in one.damaged)) == (4, True)
    # Rows that are far apart would have room for billions of others between them.
    sparse = pd.DataFrame({name: np.arange(3000) for name in table.columns}).astype(table.dtypes.to_dict())
    file.write_bytes(sparse.to_parquet(index=False))
    with pytest.raises(BadInput, match=r"3000 rows, not one for each of \(3000, 3000, 3000\)"):
        expert_load(file)
    for content in unreadable:
        file.write_bytes(content)
        ExpertLoadFile(run.path).add(7, tokens_of(UNEVEN))  # the next launch
        assert load_of(run).steps.tolist() == [7]


def told_by(capsys: pytest.CaptureFixture[str], verb: str, file: Path, load: Path) -> dict[str, Any]:
    assert main([verb, str(file), "--load", str(load), "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out))


def written(folder: Path, experiment: Experiment) -> Path:
    file = folder / "e.yaml"
    file.write_text(write_experiment(experiment))
    return file


def test_a_measured_load_takes_the_place_of_the_assumed_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    balanced = trained(tmp_path / "a", *[np.full((2, 4), 4)] * 4)
    uneven = trained(tmp_path / "b", *[UNEVEN] * 4)
    asked = Experiment(shape={"num_experts": 4}, hardware="h100_node", seq_len=4096, local_batch=16)
    constants = measured_constants(uneven.path, asked)
    assert (constants.routing_imbalance.value, constants.busiest_layer.value) == (1.25, 1.5)
    assert constants.routing_imbalance.label == "measured"
    file = written(tmp_path, asked)
    exchange_s = [told_by(capsys, "project", file, run.path)["breakdown_s"]["all-to-all"] for run in (balanced, uneven)]
    memory_gib = [told_by(capsys, "plan", file, run.path)["memory_gib"] for run in (balanced, uneven)]
    assert exchange_s[1] > exchange_s[0]
    assert memory_gib[1] > memory_gib[0]


def test_a_measured_load_is_the_traffics_routing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Most tokens have both experts on rank 0, so a token reaches fewer ranks than under even routing."""
    run = trained(tmp_path / "a", *[[[56, 56, 8, 8]] * 2] * 4)
    asked = Experiment(shape={"num_experts": 4, "top_k": 2}, hardware="h100_node", ep=2)
    elsewhere = tmp_path / "elsewhere.parquet"
    elsewhere.write_bytes((run.path / FILE).read_bytes())
    layout, node = check(asked).layout, cluster_of("h100_node").node
    assert layout is not None
    assumed = job_of(asked, layout, node)
    even = expected_destinations(assumed.routing, assumed.placement).ranks
    for path in (run.path, run.path / FILE, elsewhere):
        job = job_of(asked, layout, node, constants=measured_constants(path, asked))
        ids_TK = draw_expert_ids(job.routing, job.placement, 20_000)
        drawn_E = np.bincount(ids_TK.ravel(), minlength=4) / ids_TK.size
        assert drawn_E == pytest.approx(np.array([7, 7, 1, 1]) / 16, abs=0.03)
        assert expected_destinations(job.routing, job.placement).ranks < even
    outside = told_by(capsys, "project", written(tmp_path, asked), elsewhere)["outside"]
    assert any("1.75 x the mean" in words for words in outside)
    layers = [[4, 4, 4, 4], [10, 2, 4, 0], [16, 0, 0, 0]]  # the one in the middle stands for all
    assert load_of(trained(tmp_path / "b", *[layers] * 5)).shares_E(2).tolist() == [10 / 16, 2 / 16, 4 / 16, 0]


def test_a_load_that_is_not_of_this_experiment_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained(tmp_path / "a", UNEVEN)
    file = written(tmp_path, Experiment(shape={"num_experts": 4}, hardware="h100_node"))
    forced = trained(tmp_path / "b", UNEVEN, routing="round_robin")
    without = trained(tmp_path / "c")
    for options, told in (
        (["--load", str(forced.path)], "has routing round_robin"),
        (["--load", str(run.path), "--set", "routing=random_balanced"], "this experiment has routing random_balanced"),
        (["--load", str(run.path), "--set", "shape={num_experts: 8}"], "has 4 experts, but the experiment has 8"),
        (["--load", str(without.path)], "has no expert_load.parquet"),
        (["--load", str(tmp_path)], "is not a run directory; give a run"),
    ):
        for verb in ("plan", "project"):
            assert main([verb, str(file), *options]) == 2
            assert told in capsys.readouterr().err
    assert main(["plan", str(file), "--search", "--load", str(run.path)]) == 2


def test_a_figure_says_what_the_load_is_and_a_report_has_it(tmp_path: Path) -> None:
    figure = expert_load_figure(load_of(trained(tmp_path / "a", *[UNEVEN] * 4)), ep=2, name="<b>BF16</b>")
    assert "1 of 8 experts are dead" in title(figure)
    assert "<b>BF16" not in str(figure.layout.title.text)
    cells, worst, median, idle = figure.data
    np.testing.assert_array_equal(cells.z, [[1.0] * 4, [2.5] * 4])
    assert (list(worst.y), list(median.y), list(idle.y)) == ([1.5] * 4, [1.25] * 4, [12.5] * 4)
    even = ExpertLoad(steps=np.array([1]), layers=np.array([0]), tokens_SLE=np.ones((1, 1, 4), dtype=np.int64))
    assert "no expert is dead" in title(expert_load_figure(even, ep=1, name="x"))
    with pytest.raises(BadInput, match="ep is 3, which does not divide the 4 experts"):
        expert_load_figure(even, ep=3, name="x")
    trained(tmp_path / "runs", UNEVEN, name="s")
    trained(tmp_path / "runs", precision="mxfp8", name="s")
    page = write_study_report(judge_study(tmp_path / "runs" / "s"), tmp_path / "r.html").read_text()
    assert page.count("Load of the experts, ") == 1
