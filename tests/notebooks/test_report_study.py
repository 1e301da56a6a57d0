"""Notebook 10 with its packaged logs, and what it tells its reader to see."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from notebook_support import PLOTLY, Ran

from moelab.data.example_logs import EXAMPLE_LOGS
from moelab.judge.report import judge_paths
from moelab.model import flops_per_token, shape_of
from moelab.viz.report import report_figures

NAME = "10_report_study"


def test_it_compares_the_packaged_logs(by_nbmake: Callable[[str], Ran]) -> None:
    ran = by_nbmake(NAME)
    assert (ran.folder / f"{NAME}.ipynb").stat().st_size < 600_000
    assert len(ran.shown(PLOTLY)) == 3
    shown = "".join(ran.shown("text/plain"))
    assert "Same loss? Not decided: mxfp8_emulated_on_h100 is -0.0545 nats from bf16_on_h100" in shown
    assert "WANDB_API_KEY=*** …/python -m torch.distributed.run --rdzv-endpoint=HOST:29500" in ran.printed
    assert (ran.folder / "report.html").exists()


# What the notebook says that its reader should see


def test_the_pair_is_as_described() -> None:
    pair = judge_paths(EXAMPLE_LOGS)
    assert pair.study is None
    (one,) = pair.differences
    _, mxfp8 = pair.sides
    assert one.nats == pytest.approx(-0.05, abs=0.005)
    assert one.nats + one.spread_nats < 0
    assert pair.verdicts == []
    slow, fast = sorted(arm.tps for arm in pair.throughput)
    assert slow / fast == pytest.approx(0.55, abs=0.005)
    assert (one.curve.iloc[-4:] < 0).all()
    losses = [side.table.set_index("step")["loss"] for side in pair.sides]
    assert (losses[1] - losses[0]).abs().loc[:10].max() < 0.002
    _, figure, _ = report_figures(pair).values()
    curve = next(trace for trace in figure.data if trace.name == mxfp8.label)
    assert np.nanmin(np.asarray(curve.y, dtype=float)) == pytest.approx(-0.17, abs=0.005)


def test_the_two_counts_of_671b_differ_as_is_said() -> None:
    for seq_len, percent in ((2048, 7), (8192, 22)):
        ratio = flops_per_token(shape_of("671B"), seq_len) / flops_per_token(shape_of("671B"), seq_len, causal=True)
        assert round(100 * (ratio - 1)) == percent
