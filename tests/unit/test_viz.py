"""The theme, the figures of a study against its verdicts, and the report that holds them."""

from __future__ import annotations

import html
import json
import math
import os
import pkgutil
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from figure_support import assert_says, notes, title, unpacked
from run_support import make_study, verdict_of

import moelab.viz
from moelab.errors import BadInput
from moelab.judge.report import judge_paths
from moelab.judge.throughput import arm_throughput, gain
from moelab.judge.verdict import ArmSeeds, FinalLosses, Verdict, final_losses
from moelab.runs.table import metrics_table
from moelab.viz import arm_styles, loss_curves, loss_difference, throughput_bars
from moelab.viz.draw import drawn_seeds, joined_lines, legend_below, panels
from moelab.viz.report import report_figures, write_study_report
from moelab.viz.study import verdict_examples, verdict_intervals
from moelab.viz.table import TableView
from moelab.viz.theme import MUTED, STUDY_ARMS, new_figure, wrap

PAIR = ("bf16_standard", "mxfp8_standard")
HOSTILE = "</script><script>alert(1)</script><b>x"


def study(arms: tuple[str, ...] = PAIR, seeds: int = 4, steps: int = 80) -> pd.DataFrame:
    """Losses from 7.6 to about 3.6: batches shared by the arms, a seed spread of 0.03, a small paired difference."""
    rng = np.random.default_rng(0)
    step = np.arange(1, steps + 1)
    base = 3.6 + 4.0 * np.exp(-6.0 * step / steps)
    shared = rng.normal(0, 0.03, (seeds, 1)) + rng.normal(0, 0.02, (seeds, steps))
    rows = []
    for index, arm in enumerate(arms):
        for seed in range(seeds):
            loss = base + shared[seed] + index * 0.004 + bool(index) * rng.normal(0, 0.004, steps)
            tps = 1000.0 * (1 + 0.3 * index) * rng.normal(1, 0.02, steps)
            row = {"arm": [arm] * steps, "seed": [seed] * steps, "segment": [0] * steps, "step": step}
            rows.append(metrics_table(row | {"loss": loss, "tps": tps}, run=f"20261101T00000{index}{seed}Z-abcdef"))
    return pd.concat(rows, ignore_index=True)


def first_verdict(table: pd.DataFrame) -> Verdict:
    return verdict_of(final_losses(table))


# The theme


def test_arms_keep_their_look_and_variants_take_that_of_their_base() -> None:
    together = arm_styles(reversed(STUDY_ARMS))
    assert list(together) == list(STUDY_ARMS)
    assert {arm: arm_styles([arm])[arm] for arm in STUDY_ARMS} == together
    for aspect in ("color", "dash", "symbol"):
        assert len({getattr(style, aspect) for style in together.values()}) == len(STUDY_ARMS)
    styles = arm_styles(["bf16_standard", "mxfp8_standard_wgrad-bf16", "one", "two"])
    assert styles["mxfp8_standard_wgrad-bf16"].color == together["mxfp8_standard"].color
    assert len({(style.color, style.dash) for style in styles.values()}) == 4
    both = arm_styles(["mxfp8_standard", "mxfp8_standard_wgrad-bf16"]).values()
    assert len({style.color for style in both}) == 2, "a variant has another look where its base is drawn too"
    assert together["bf16_standard"].fill(0.5) == "rgba(0,114,178,0.5)"


def test_importing_the_figures_leaves_plotly_alone_and_loads_neither_torch_nor_ipywidgets() -> None:
    """Each of these takes seconds to load."""
    modules = [f"moelab.viz.{module.name}" for module in pkgutil.iter_modules(moelab.viz.__path__)]
    code = f"import sys, plotly.io, {', '.join(modules)}; assert plotly.io.templates.default == 'plotly'\n"
    code += "assert not {'torch', 'ipywidgets', 'anywidget'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    figure = new_figure("A", subtitle="B")
    assert title(figure) == f"<b>A</b> <span style='font-size:13px;color:{MUTED}'>B</span>"
    assert panels("A", ["a", "b"], subtitle="").layout.template == figure.layout.template


def test_titles_break_into_lines_of_like_length_and_legends_have_their_room() -> None:
    lines = wrap("Six of eight rows are predicted within ten percent: the goal of all is missed", 74).split("<br>")
    assert [len(line) > 30 for line in lines] == [True, True], "no lone word"
    assert max(map(len, wrap("a_name_without_a_space", 8).split("<br>"))) == 8, "a name that is too long is broken"
    figures = [new_figure("A", subtitle="") for _ in range(2)]
    for figure, count in zip(figures, (2, 12), strict=True):
        for number in range(count):
            figure.add_bar(y=[1], name=f"one of a dozen names, {number}")
        legend_below(figure)
    few, many = (figure.layout for figure in figures)
    assert many.height - few.height == many.margin.b - few.margin.b >= 3 * 20


DRAWN = """
import sys, warnings
import base64, IPython
import plotly.graph_objects as go, plotly.io as pio
IPython.get_ipython = lambda: type("Shell", (), {"kernel": None})
from moelab.viz import theme
theme.FIRST_PICTURE_S = float(sys.argv[1])
assert pio.renderers.default == sys.argv[2]
if sys.argv[2] == "moelab":
    pio.renderers["moelab"].to_mimebundle({"data": []})
    warnings.simplefilter("error", UserWarning)  # whoever resets the filters sees no warning with each picture
    shown = go.Figure(go.Bar(y=[1, 2]))._repr_mimebundle_(None, None)
    assert ("image/png" in shown) == (sys.argv[3] == "png"), list(shown)
    assert "application/vnd.plotly.v1+json" in shown
    assert base64.b64decode(shown.get("image/png", "iVBORw==")).startswith(b"\\x89PNG")
from moelab.viz.widget import as_picture
beside = as_picture(theme.new_figure("A", subtitle="B"))
assert ("image/png" in beside) == (sys.argv[3] == "png"), list(beside)
"""


@pytest.mark.parametrize(
    ("given", "seconds", "renderer", "picture"),
    [
        ({}, 60, "moelab", "png"),  # Debian's Chromium
        ({"BROWSER_PATH": "/nowhere/chromium"}, 60, "moelab", "none"),
        ({"BROWSER_PATH": "/bin/false"}, 5, "moelab", "none"),  # a browser that fails to start
        ({"PLOTLY_RENDERER": "json"}, 60, "json", "none"),
    ],
)
def test_pictures_are_drawn_where_a_browser_draws(
    given: dict[str, str], seconds: int, renderer: str, picture: str
) -> None:
    command = [sys.executable, "-c", DRAWN, str(seconds), renderer, picture]
    done = subprocess.run(command, env=os.environ | given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# Figures of a study


def test_an_unfinished_seed_is_drawn_but_not_averaged() -> None:
    table = study()
    verdict = first_verdict(table)
    assert_says(loss_curves(table), "Training loss", "n = 4 seeds each")
    assert_says(loss_curves(study(seeds=2, steps=1500)), "smoothed over 15 logged steps")
    cut = table[(table["arm"] != verdict.arm) | (table["seed"] != 1) | (table["step"] <= 60)]
    figure = loss_curves(cut)
    assert_says(figure, "n = 3 to 4 seeds each")
    thin, bold = figure.data[1], figure.data[3]
    others = cut[(cut["arm"] == verdict.arm) & (cut["seed"] != 1)].groupby("step")["loss"].mean()
    np.testing.assert_allclose(bold.y, others)
    assert len(thin.x) == 3 * 81 + 61
    assert first_verdict(cut).seeds == (0, 2, 3)


def test_of_many_seeds_a_hundred_at_most_are_drawn_evenly() -> None:
    assert [len(drawn_seeds(seeds)) for seeds in (7, 100, 101, 250)] == [7, 100, 51, 84]
    curves = pd.DataFrame(np.ones((30, 250)))
    x, y = joined_lines(curves)
    assert np.isnan(x).sum() == np.isnan(y).sum() == 84


def test_the_last_tenth_stands_beside_all_steps() -> None:
    figure = loss_curves(study())
    last = [trace for trace in figure.data if trace.xaxis == "x2" and trace.hovertemplate]
    assert [list(trace.x) for trace in last] == [list(range(73, 81))] * 2
    assert notes(figure) == ["all steps", "the last 10 %"]
    few = loss_curves(study(steps=5))
    assert {trace.xaxis for trace in few.data} == {"x"}


def test_the_last_point_of_the_difference_is_the_verdict() -> None:
    table = study()
    verdict = first_verdict(table)
    figure = loss_difference(table, verdict)
    band, _, mean, final = figure.data
    high = pytest.approx(verdict.interval.high)
    assert (mean.y[-1], final.y[0]) == (pytest.approx(verdict.mean_difference_nats),) * 2
    assert (final.y[0] + final.error_y.array[0], band.y[list(band.x).index(80)]) == (high, high)
    (margin,) = [(shape.y0, shape.y1) for shape in figure.layout.shapes if shape.type == "rect"]
    assert margin == pytest.approx((-verdict.margin_nats, verdict.margin_nats))
    assert_says(figure, "equivalent")


def test_what_cannot_be_drawn_is_refused_or_said() -> None:
    held_out = FinalLosses(seeds={arm: ArmSeeds({seed: 3.6 + 0.01 * seed for seed in range(3)}) for arm in PAIR})
    with pytest.raises(BadInput, match="held-out"):
        loss_difference(study(), verdict_of(held_out))
    table = study()
    table.loc[table["step"] == 80, "loss"] = math.nan
    with pytest.raises(BadInput, match="no seed in common"):
        loss_difference(table, first_verdict(table))
    one, pair = study(PAIR[:1], seeds=1), study(seeds=1)
    for table in (one, pair):
        assert_says(loss_curves(table), "One run")
        assert_says(throughput_bars(arm_throughput(table)), "no interval")
    assert_says(throughput_bars(arm_throughput(one)), "Throughput by arm")
    assert_says(loss_difference(pair, first_verdict(pair)), "insufficient data", "n = 1 seed, so no interval")
    assert "logged step in" not in title(loss_curves(study())), "all are drawn"


def test_bars_show_values_and_a_gain_that_is_resolved() -> None:
    table = study()
    faster = gain(table, baseline="bf16_standard", arm="mxfp8_standard")
    figure = throughput_bars(arm_throughput(table), gains=[faster])
    assert f"{faster.percent:+.1f} % ({faster.interval.percent.low:+.1f} to " in notes(figure)[1]
    arms = {arm.arm: arm for arm in arm_throughput(table)}
    bars, intervals = figure.data
    assert list(bars.x) == list(intervals.x) == [arms[arm].tps for arm in PAIR]
    highs = [x + reach for x, reach in zip(intervals.x, intervals.error_x.array, strict=True)]
    assert highs == pytest.approx([arms[arm].interval.high for arm in PAIR])
    assert figure.layout.xaxis.range[1] > max(highs)
    assert figure.layout.yaxis.ticktext == ("BF16 + standard all-to-all", "MXFP8 + standard all-to-all")
    assert not any("%" in note for note in notes(throughput_bars(arm_throughput(table))))


def test_verdicts_stand_in_rows_on_their_margins() -> None:
    figure = verdict_examples()
    assert_says(figure, "constructed losses of four seeds, no measurement")
    answers = ("equivalent", "insufficient data", "different", "insufficient data")
    assert notes(figure) == [f"<b>{answer}</b>" for answer in answers]
    margins = [shape.x1 for shape in figure.layout.shapes if shape.type == "rect"]
    reach = [(one.x[0] - one.error_x.arrayminus[0], one.x[0] + one.error_x.array[0]) for one in figure.data]
    assert [-m < low and high < m for m, (low, high) in zip(margins, reach, strict=True)] == [True, False, False, False]
    table = study((PAIR[0],))
    same = first_verdict(pd.concat([table, table.assign(arm=PAIR[1])]))
    figure = verdict_intervals({"a & b": same}, "Copies")
    assert figure.layout.yaxis.ticktext == ("a &amp; b",)
    assert notes(figure)[0] == "<b>equivalent</b>"
    assert figure.layout.margin.r < 500  # of 1000 px


def test_notes_stand_in_every_title_and_names_are_text() -> None:
    table, note = study(("bf16_standard", HOSTILE)), f"emulated {HOSTILE}"
    figures = [loss_curves(table, note=note), throughput_bars(arm_throughput(table), note=note)]
    for figure in (*figures, loss_difference(table, first_verdict(table), note=note)):
        assert "emulated &lt;/script&gt;" in title(figure)
        assert "<script" not in json.dumps(figure.to_plotly_json(), default=str)


# The report


def test_a_report_has_its_numbers_as_text_and_plotly_once_and_asks_no_network(tmp_path: Path) -> None:
    judged = replace(judge_paths([make_study(tmp_path)]), origin=HOSTILE)
    page = write_study_report(judged, tmp_path / "new folder" / "report.html").read_text()
    assert page.count("<script") == 4  # plotly.js, the figures' data, what draws them, what unfolds a table
    assert "default-src 'none'" in page
    assert all(link.startswith("#") for link in re.findall(r'\s(?:src|href|srcset|data|action|poster)="([^"]*)', page))
    assert re.match(r"/\*\*\s+\* plotly\.js v\d", unpacked(page, "plotlyjs"))
    drawings = json.loads(unpacked(page, "drawings"))["figures"]
    assert len(drawings) == page.count('class="drawing" id="figure-') == 3
    (drawn, *_), (given, *_) = drawings[0]["data"][::-1], report_figures(judged)["Training loss."].data[::-1]
    assert (drawn["x"], drawn["y"]) == (list(given.x), pytest.approx(given.y, rel=1e-4))
    (verdict,) = judged.verdicts
    numbers = (verdict.reference_sd, verdict.sd_difference, verdict.margin_nats, verdict.arm_losses[0])
    interval = f"{verdict.interval.low:+.4f} to {verdict.interval.high:+.4f}"
    card = [verdict.sentence(), *(f"{number:.4f}" for number in numbers), interval, "0, 1, 2, 3", "19 to 20"]
    cells = ['<td class="number">1,000</td>', '<td class="number">5.0000</td>', 'class="card equivalent"']
    assert [one for one in (*card, *cells) if one not in html.unescape(page)] == []
    assert not re.search(r"\bnan\b", re.sub(r"(?s)<script.*?</script>", "", page))
    assert page.count("&lt;script&gt;alert(1)") == 1


def test_a_table_has_a_dash_for_what_is_missing_and_aligns_numbers() -> None:
    rows = [[HOSTILE, 2026, math.nan, None], ["bf16_standard", None, 3.61, None]]
    frame = pd.DataFrame(rows, columns=["arm", "steps", "loss", "note"], dtype=object)
    table = TableView(frame=frame, summary="Runs", decimals={"loss": 4})
    assert str(table).split("\n")[-1].split() == ["bf16_standard", "–", "3.6100", "–"]
    assert table.is_number == [False, True, True, False]
    assert "<script" not in table._repr_html_()
