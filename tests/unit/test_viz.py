import html
import json
import math
import os
import pkgutil
import re
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from figure_support import title, unpacked

import moelab.viz
from moelab.analysis.convergence import FinalLosses, compare_convergence, final_losses
from moelab.analysis.throughput import arm_throughput, gain
from moelab.analysis.verdict import ArmSeeds, Verdict
from moelab.errors import BadInput
from moelab.runs.table import metrics_table
from moelab.viz import Figure, Table, arm_styles, loss_curves, loss_difference, throughput_bars, write_report
from moelab.viz.draw import panels
from moelab.viz.study import verdict_examples, verdict_intervals
from moelab.viz.theme import new_figure

PAIR = ("bf16_standard", "mxfp8_standard")
HOSTILE = "</script><script>alert(1)</script><b>x"


def study(arms: tuple[str, ...] = PAIR, seeds: int = 4, steps: int = 80, shift: float = 0.004) -> pd.DataFrame:
    """Losses from 7.6 to about 3.6: batches shared by the arms, a seed spread of 0.03, a small paired difference."""
    rng = np.random.default_rng(0)
    step = np.arange(1, steps + 1)
    base = 3.6 + 4.0 * np.exp(-6.0 * step / steps)
    shared = rng.normal(0, 0.03, (seeds, 1)) + rng.normal(0, 0.02, (seeds, steps))
    rows = []
    for index, arm in enumerate(arms):
        for seed in range(seeds):
            loss = base + shared[seed] + index * shift + bool(index) * rng.normal(0, 0.004, steps)
            tps = 1000.0 * (1 + 0.3 * index) * rng.normal(1, 0.02, steps)
            row = {"arm": [arm] * steps, "seed": [seed] * steps, "segment": [0] * steps, "step": step}
            row |= {"loss": loss, "grad_norm": np.exp(rng.normal(size=steps)), "tps": tps}
            rows.append(metrics_table(row, run=f"20261101T00000{index}{seed}Z-abcdef"))
    return pd.concat(rows, ignore_index=True)


def first_verdict(table: pd.DataFrame) -> Verdict:
    return compare_convergence(final_losses(table), reference="bf16_standard")[0]


# --- theme -----------------------------------------------------------------------------------------------------------


def test_arms_keep_their_look_and_variants_take_that_of_their_base():
    arms = ["bf16_standard", "mxfp8_standard", "bf16_deepep", "mxfp8_deepep", "fp8_standard", "fp8_deepep"]
    together = arm_styles(arms)
    assert list(together) == arms
    assert all(arm_styles([arm])[arm] == together[arm] for arm in arms)
    for aspect in ("color", "dash", "symbol"):
        assert len({getattr(style, aspect) for style in together.values()}) == len(arms)
    styles = arm_styles(["bf16_standard", "mxfp8_standard_wgrad-bf16", "one", "two"])
    assert styles["mxfp8_standard_wgrad-bf16"].color == together["mxfp8_standard"].color
    assert len({(style.color, style.dash) for style in styles.values()}) == 4
    both = arm_styles(["mxfp8_standard", "mxfp8_standard_wgrad-bf16"]).values()
    assert len({style.color for style in both}) == 2, "a variant has another look where its base is drawn too"


def test_importing_the_figures_leaves_plotly_alone_and_loads_neither_torch_nor_ipywidgets():
    """Each of these takes seconds to load."""
    modules = [f"moelab.viz.{module.name}" for module in pkgutil.iter_modules(moelab.viz.__path__)]
    code = f"import sys, plotly.io, {', '.join(modules)}; assert plotly.io.templates.default == 'plotly'\n"
    code += "assert not {'torch', 'ipywidgets', 'anywidget'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_panels_have_the_theme_and_nothing_of_plotlys_own() -> None:
    assert panels("A", ["a", "b"], subtitle="").layout.template == new_figure("A", subtitle="").layout.template


DRAWN = """
import sys, warnings
import plotly.graph_objects as go, plotly.io as pio
from moelab.viz import theme, use_renderer
theme.FIRST_PICTURE_S = float(sys.argv[1])
assert use_renderer() == sys.argv[2] == pio.renderers.default
if sys.argv[2].endswith("png"):
    warnings.simplefilter("error", UserWarning)  # whoever resets the filters sees no warning with each picture
    assert pio.to_image(go.Figure(go.Bar(y=[1, 2])), format="png").startswith(b"\\x89PNG")
"""


@pytest.mark.parametrize(
    ("given", "seconds", "renderer"),
    [
        ({}, 60, "plotly_mimetype+png"),  # Debian's Chromium
        ({"BROWSER_PATH": "/nowhere/chromium"}, 60, "plotly_mimetype"),
        ({"BROWSER_PATH": "/bin/false"}, 5, "plotly_mimetype"),  # a browser that fails to start
        ({"PLOTLY_RENDERER": "json"}, 60, "json"),
    ],
)
def test_pictures_are_drawn_where_a_browser_draws(given, seconds, renderer):
    found = os.environ | given
    command = [sys.executable, "-c", DRAWN, str(seconds), renderer]
    done = subprocess.run(command, env=found, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# --- figures ---------------------------------------------------------------------------------------------------------


def test_loss_title_states_the_final_losses_of_the_data():
    table = study()
    verdict = first_verdict(table)
    low, high = sorted(np.mean(list(losses.values())) for losses in (verdict.arm_losses, verdict.reference_losses))
    for said in (f"{high - low:.4f} nats apart", f"{low:.3f}", "n = 4 seeds each"):
        assert said in title(loss_curves(table))
    assert "smoothed over 15 logged steps" in title(loss_curves(study(seeds=2, steps=1500)))
    one_less = table[(table["arm"] != verdict.arm) | (table["seed"] != 0)]
    paired = abs(first_verdict(one_less).mean_difference_nats)
    said = title(loss_curves(one_less)).replace("<br>", " ")
    assert f"{paired:.4f} nats apart" in said
    assert "on the seeds that all have" in said


@pytest.mark.parametrize("fall", [4.0, 0.3, 0.0])
def test_inset_shows_the_last_tenth_and_lies_above_the_curves(fall):
    table = study()
    table["loss"] -= (4.0 - fall) * np.exp(-6.0 * table["step"] / 80)
    figure = loss_curves(table)
    inset = [trace for trace in figure.data if trace.xaxis == "x2" and trace.hovertemplate]
    assert [list(trace.x) for trace in inset] == [list(range(73, 81))] * 2
    left, bottom = figure.layout.xaxis2.domain[0], figure.layout.yaxis2.domain[0]
    low, high = figure.layout.yaxis.range
    under = table.loc[table["step"] >= left * figure.layout.xaxis.range[1], "loss"].max()
    assert (under - low) / (high - low) < bottom <= 0.6


def test_the_last_point_of_the_difference_is_the_verdict():
    table = study()
    verdict = first_verdict(table)
    figure = loss_difference(table, verdict)
    band, _, mean, final = figure.data
    assert mean.y[-1] == pytest.approx(verdict.mean_difference_nats)
    assert final.y[0] + final.error_y.array[0] == pytest.approx(verdict.interval.high)
    assert band.y[list(band.x).index(80)] == pytest.approx(verdict.interval.high)
    (margin,) = [shape for shape in figure.layout.shapes if shape.type == "rect"]
    assert (margin.y0, margin.y1) == pytest.approx((-verdict.margin_nats, verdict.margin_nats))
    assert "equivalent" in title(figure)


def test_what_cannot_be_drawn_is_refused():
    held_out = FinalLosses(seeds={arm: ArmSeeds.of({seed: 3.6 + 0.01 * seed for seed in range(3)}) for arm in PAIR})
    with pytest.raises(BadInput, match="held-out"):
        loss_difference(study(), compare_convergence(held_out, reference="bf16_standard")[0])
    with pytest.raises(BadInput, match="rows without seed"):
        loss_curves(study().assign(seed=pd.NA))
    with pytest.raises(BadInput, match="two runs of bf16_standard, seed 0"):
        loss_curves(study().assign(seed=0), finding="Of attempts too")


def test_bars_show_values_and_gain():
    table = study()
    found = gain(table, baseline="bf16_standard", arm="mxfp8_standard")
    figure = throughput_bars(table, gains=[found])
    assert f"{found.percent:.1f} % faster" in title(figure)
    assert f"{found.percent:+.1f} %" in figure.layout.annotations[0].text
    arms = {arm.arm: arm for arm in arm_throughput(table)}
    bars, seeds = figure.data[::2], figure.data[1::2]
    for arm, bar, points in zip(PAIR, bars, seeds, strict=True):
        assert (bar.y[0], bar.y[0] + bar.error_y.array[0]) == (arms[arm].tps, arms[arm].interval.high)
        assert sorted(points.y) == sorted(arms[arm].tps_by_seed.values())


def test_an_unresolved_gain_is_not_called_faster():
    table = study(seeds=3)
    speed = {("bf16_standard", seed): 1000.0 for seed in range(3)}
    speed |= {("mxfp8_standard", 0): 1000.0, ("mxfp8_standard", 1): 900.0, ("mxfp8_standard", 2): 1150.0}
    table["tps"] = [speed[key] for key in zip(table["arm"], table["seed"], strict=True)]
    found = gain(table, baseline="bf16_standard", arm="mxfp8_standard")
    assert "no difference is shown" in title(throughput_bars(table, gains=[found]))
    assert not throughput_bars(table).layout.annotations


@pytest.mark.parametrize("arms", [("bf16_standard",), PAIR])
def test_one_seed_and_one_arm(arms):
    table = study(arms, seeds=1)
    assert "One run" in title(loss_curves(table))
    assert "no interval" in title(throughput_bars(table))
    for verdict in compare_convergence(final_losses(table), reference="bf16_standard"):
        assert "insufficient data" in title(loss_difference(table, verdict))


def test_an_unfinished_seed_is_drawn_but_not_averaged():
    table = study()
    table = table[(table["arm"] != "mxfp8_standard") | (table["seed"] != 1) | (table["step"] <= 60)]
    figure = loss_curves(table)
    thin, bold = figure.data[1], figure.data[3]
    assert "n = 3 to 4 seeds each" in title(figure)
    others = table[(table["arm"] == "mxfp8_standard") & (table["seed"] != 1)].groupby("step")["loss"].mean()
    np.testing.assert_allclose(bold.y, others)
    assert len(thin.x) == 3 * 81 + 61
    assert first_verdict(table).seeds == (0, 2, 3)


def test_missing_values_and_no_common_seed():
    table = study()
    table.loc[table["step"] == 80, "loss"] = math.nan
    verdict = first_verdict(table)
    assert "no finished seed in common" in title(loss_difference(table, verdict))
    assert "No run reached" in title(loss_curves(table))


def test_notes_stand_in_every_title_and_names_are_text():
    table, note = study(("bf16_standard", HOSTILE)), f"emulated {HOSTILE}"
    figures = (loss_curves(table, note=note), throughput_bars(table, note=note))
    for figure in (*figures, loss_difference(table, first_verdict(table), note=note)):
        assert "emulated" in title(figure)
        assert "<script" not in json.dumps(figure.to_plotly_json(), default=str)


# --- report ----------------------------------------------------------------------------------------------------------


def test_verdicts_stand_in_rows_on_their_margins() -> None:
    figure = verdict_examples()
    assert "constructed losses of four seeds, no measurement" in title(figure)
    answers = [str(note.text) for note in figure.layout.annotations]
    assert answers == [f"<b>{one}</b>" for one in ("equivalent", "insufficient data", "different", "insufficient data")]
    margins = [shape.x1 for shape in figure.layout.shapes if shape.type == "rect"]
    reach = [(one.x[0] - one.error_x.arrayminus[0], one.x[0] + one.error_x.array[0]) for one in figure.data]
    assert [-m < low and high < m for m, (low, high) in zip(margins, reach, strict=True)] == [True, False, False, False]
    table = study((PAIR[0],))
    same = first_verdict(pd.concat([table, table.assign(arm=PAIR[1])]))
    figure = verdict_intervals({"a & b": same}, "Copies")
    assert figure.layout.yaxis.ticktext == ("a &amp; b",)
    assert "to the last digit:<br>both" in figure.layout.annotations[0].text
    assert figure.layout.margin.r < 500  # of 1000 px


ROWS = [[HOSTILE, 2026, math.nan, 1234.4], ["bf16_standard", None, 3.61, None]]


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> str:
    table = study(("bf16_standard", HOSTILE))
    figures = [
        Figure(caption=HOSTILE, figure=loss_curves(table)),
        Figure(caption="Published throughput.", figure=throughput_bars(table), label="quoted"),
    ]
    runs = Table(title="Runs", columns=["Arm", "Steps", "Loss", "Tokens/s"], rows=ROWS, decimals={"Tokens/s": 0})
    assert "|".join(str(runs.in_notebook()).split("\n")[-1].split()) == "bf16_standard|–|3.6100|–"
    assert "2,026" in str(runs.in_notebook())
    path = write_report(
        tmp_path_factory.mktemp("report") / "new folder" / "report.html",
        title=f"A study {HOSTILE}",
        verdicts=compare_convergence(final_losses(table), reference="bf16_standard"),
        figures=figures,
        tables=[runs],
        provenance={"Command": HOSTILE},
        notes=[HOSTILE],
    )
    return path.read_text(encoding="utf-8")


def test_report_shows_names_as_text_asks_no_network_and_holds_plotly_once(page):
    assert page.count("<script") == 4  # plotly.js, the figures' data, what draws them, what unfolds a table
    assert page.count("&lt;script&gt;alert(1)") >= 5
    assert all(link.startswith("#") for link in re.findall(r'\s(?:src|href|srcset|data|action|poster)="([^"]*)', page))
    assert "default-src 'none'" in page
    assert not any(asked in page.split("<script>")[0] for asked in ("@import", "url("))
    assert re.match(r"/\*\*\s+\* plotly\.js v\d", unpacked(page, "plotlyjs"))
    assert len(json.loads(unpacked(page, "drawings"))["figures"]) == page.count('class="drawing" id="figure-') == 2


def test_report_states_the_verdict_with_its_numbers_and_tables_with_badges_and_dashes(page):
    verdict = first_verdict(study(("bf16_standard", HOSTILE)))
    low, high, text = verdict.interval.low, verdict.interval.high, html.unescape(page)
    assert verdict.sentence() in text
    numbers = (verdict.reference_sd, verdict.sd_difference, verdict.margin_nats, verdict.arm_losses[0])
    for said in (*(f"{number:.4f}" for number in numbers), f"{low:+.4f} to {high:+.4f}", "0, 1, 2, 3", "73 to 80"):
        assert said in text
    assert 'class="card equivalent"' in page
    assert '<th scope="col" class="number"><button type="button" title="sort">Tokens/s</button></th>' in page
    assert '<th scope="row">bf16_standard</th>' in page
    assert '<td class="number">1,234</td>' in page
    assert page.count('<td class="number">–</td>') == 3
    assert '<span class="badge quoted">quoted</span>' in page
