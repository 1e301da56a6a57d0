"""Grouped GEMMs drawn: speed-ups measured and predicted, a step in its parts, the map of gain, a shape explorer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from moelab.micro.grouped_gemm import Case, GroupedGemmResult, GroupedPrecision
from moelab.planning.gemm_fit import ExpertWork, Fit, break_even, estimate, expert_work, fit_b200, fit_h100
from moelab.planning.time.gemm import Kind, Rates, gain, grouped_parts, grouped_time_s, seconds_by_kind
from moelab.viz.draw import Look, bar_rows, legend_below
from moelab.viz.theme import INK, MUTED, NARROW, ON_LIGHT, WIDE, counted, new_figure
from moelab.viz.widget import Explorer, Menu

LABELS: dict[str, str] = {
    "bf16": "BF16",
    "fp8": "Row-wise FP8",
    "mxfp8": "MXFP8",
    "mxfp8_wgrad_bf16": "MXFP8, wgrad in BF16",
}
_PARTS: Mapping[Kind, tuple[str, Look]] = {
    "gemm": ("GEMM", ("#0072B2", "")),
    "cast rows": ("cast rows", ("#D55E00", "")),
    "cast columns": ("cast columns (wgrad)", ("#E69F00", "")),
    "cast weights": ("cast weights", ("#CC79A7", "")),
    "scales": ("scales into blocks", ("#5f6b7a", "")),
}
_LINES = (
    ("#0072B2", "circle"),
    ("#56B4E9", "diamond"),
    ("#D55E00", "square"),
    ("#E69F00", "triangle-up"),
    ("#009E73", "x"),
    ("#CC79A7", "star"),
)
ROWS_LOG2, WEIGHTS_LOG2 = (10.0, 20.5), (18.0, 27.0)
STEPS_M, STEPS_NK = 64, 46
GAINS, LEVEL = (0.2, 1.8), 0.2
"""Ends of the map's colours, and gain between two contour lines."""
_GAIN_COLORS = [[0.0, "#B2500A"], [0.25, "#E8A87C"], [0.5, "#FFFFFF"], [0.75, "#7FB8DC"], [1.0, "#0072B2"]]


def measured_speedups(result: GroupedGemmResult, precision: GroupedPrecision, *, replayed: bool) -> go.Figure:
    """Measured speed-up over BF16, a line for each weight shape and grouping."""
    table = result.speedups(precision)
    figure = new_figure(
        f"{LABELS[precision]} against BF16: above the line the 8-bit format saves time",
        subtitle="forward + backward of one grouped product; medians, n = "
        f"{int(result.rows['n_times'].min())} or more; experts of even sizes, 8 of them, where nothing else is said",
        note=("replayed: " if replayed else "") + result.stamp,
    )
    lines = table.sort_values("m").groupby(["n", "k", "groups", "sizes"], sort=False)
    for ((n, k, groups, sizes), cases), (color, symbol) in zip(lines, itertools.cycle(_LINES), strict=False):
        of = "" if (groups, sizes) == (8, "even") else f", {groups} {sizes}"
        figure.add_scatter(
            x=cases["m"],
            y=cases["speedup"].round(4),
            name=f"N {n}, K {k}{of}",
            mode="lines+markers",
            line={"color": color, "width": 2},
            marker={"symbol": symbol, "size": 10},
            customdata=cases[["bf16_us", "low_us"]].round(1),
            hovertemplate="M %{x}: %{y:.3f}<br>BF16 %{customdata[0]} µs, 8-bit %{customdata[1]} µs",
        )
    figure.add_hline(y=1, line={"color": INK, "width": 1, "dash": "dash"})
    ticks = sorted(set(table["m"]))
    names = {"tickvals": ticks, "ticktext": [f"{m // 1024}k" for m in ticks]}
    figure.update_xaxes(title_text="rows M of all groups", type="log", **names)
    return legend_below(figure.update_yaxes(title_text="BF16 time / 8-bit time"))


def step_parts(case: Case, rates: Rates) -> go.Figure:
    """Predicted time of forward and backward in its parts, a bar for each precision; as wide as beside controls."""
    precisions: tuple[GroupedPrecision, ...] = (
        ("bf16", "mxfp8", "mxfp8_wgrad_bf16") if rates.low_format == "mxfp8" else ("bf16", "fp8")
    )
    seconds = [seconds_by_kind(grouped_parts(*case.mnkg, precision, rates)) for precision in precisions]
    # Rounded, as the figure is sent at every choice; BF16 casts nothing, and a part that no precision has is none.
    series = {
        name: ([round(1e3 * each.get(kind, 0.0), 4) for each in seconds], look)
        for kind, (name, look) in _PARTS.items()
        if any(kind in each for each in seconds)
    }
    totals_ms = [1e3 * grouped_time_s(*case.mnkg, precision, rates) for precision in precisions]
    figure = bar_rows(
        "Time of forward and backward by part",
        [LABELS[precision] for precision in precisions],
        series,
        "time (ms)",
        unit=":.3f ms",
        subtitle=f"{case.groups} experts of N {case.n:,}, K {case.k:,}, M {case.m:,} rows in all, on a {rates.gpu}; "
        "kernels alone",
        note="predicted by the model, not measured",
        row_px=60,
        ends=[f"{total:.3g} ms" for total in totals_ms],
        width=NARROW,
    )
    return figure.update_xaxes(range=[0, 1.2 * max(totals_ms)])  # room for the milliseconds beside the longest bar


def gain_map(fitted: Fit, works: Sequence[ExpertWork], *, aspect: float = 2.25) -> go.Figure:
    """Predicted gain over rows M and weight size N·K for as many experts on a GPU as the last layout has.

    Args:
        fitted: constants and their spread.
        works: layouts to mark, each with its own gain; one with another number of experts has another map.
        aspect: K / N of the map's weights; gain at equal N·K falls as it moves away from 1.
    """
    groups = works[-1].case.groups
    works = [work for work in works if work.case.groups == groups]
    rates = fitted.rates()
    low_format = rates.low_format.upper()
    rows, weights = np.logspace(*ROWS_LOG2, STEPS_M, base=2), np.logspace(*WEIGHTS_LOG2, STEPS_NK, base=2)
    sides = [(max(1, round(math.sqrt(nk / aspect))), max(1, round(math.sqrt(nk * aspect)))) for nk in weights]  # N, K
    figure = new_figure(
        f"{low_format} saves time only above the bold line",
        subtitle=f"gain = BF16 time / {low_format} time of forward + backward on a {rates.gpu}, "
        f"{counted(groups, 'expert')} on a GPU, K = {aspect:g} N; dashed: 90 % interval of gain 1. Marks have the "
        "number and the colour of their own gain",
        note="predicted, not measured: kernels alone",
        height=520,
        width=WIDE,
    )
    ends = {"start": GAINS[0], "end": GAINS[1], "size": LEVEL}
    figure.add_contour(
        x=[round(m) for m in rows],
        y=[round(nk) for nk in weights],
        z=[[round(gain(m, n, k, groups, rates), 3) for m in rows] for n, k in sides],
        zmin=GAINS[0],
        zmax=GAINS[1],
        colorscale=_GAIN_COLORS,
        contours={**ends, "showlabels": True, "labelfont": {"size": 12, "color": ON_LIGHT}},
        line={"width": 0.6, "color": MUTED},
        colorbar={"title": {"text": "gain"}, "thickness": 14, "tickvals": [0.2, 0.6, 1.0, 1.4, 1.8]},
        hovertemplate="M %{x}, N·K %{y}: %{z:.2f}<extra></extra>",
    )
    evens = [break_even(Case(m=1, n=n, k=k, groups=groups), fitted) for n, k in sides]  # m is what it finds
    least, most = (2**exponent for exponent in ROWS_LOG2)
    for name, field, width, dash in (
        ("low", "low", 1.5, "dash"),
        ("gain 1", "value", 3, "solid"),
        ("high", "high", 1.5, "dash"),
    ):
        # A line that leaves the map would make plotly stretch the axes.
        x = [m if least <= m <= most else None for m in (getattr(even, field) for even in evens)]
        line = {
            "color": ON_LIGHT,
            "width": width,
            "dash": dash,
        }
        figure.add_scatter(x=x, y=weights, mode="lines", line=line, name=name, hoverinfo="skip", showlegend=False)
    scale = {"cmin": GAINS[0], "cmax": GAINS[1], "colorscale": _GAIN_COLORS}
    for work, symbol in zip(works, itertools.cycle(("star", "diamond", "circle", "square")), strict=False):
        case, own, m = work.case, gain(*work.case.mnkg, rates), min(max(work.case.m, least), most)
        # A label to the right of a mark at the right edge would be cut off.
        side = "left" if m > 2 ** (sum(ROWS_LOG2) / 2 + 2) else "center"
        figure.add_scatter(
            x=[m],
            y=[case.n * case.k],
            mode="markers+text",
            marker={"symbol": symbol, "size": 16, "color": [own], "line": {"color": ON_LIGHT, "width": 2}, **scale},
            text=[f"<b>{work.name.split(',')[0]}: {own:.2f}</b>"],
            textfont_color=ON_LIGHT,
            textposition=f"{'top' if own > 1 else 'bottom'} {side}",
            name=work.name,
            hovertemplate=f"{work.name}: {case.name}<br>{work.layout}<extra></extra>",
        )
    m_ticks, nk_ticks = ([2**each for each in exponents] for exponents in (range(10, 21, 2), range(18, 28, 2)))
    m_range, nk_range = ([each * math.log10(2) for each in exponents] for exponents in (ROWS_LOG2, WEIGHTS_LOG2))
    figure.update_xaxes(title_text="rows M of all groups (tokens × top-k of a rank and micro-batch)", range=m_range)
    figure.update_xaxes(type="log", tickvals=m_ticks, ticktext=[f"{m // 1024}k" for m in m_ticks], showgrid=False)
    figure.update_yaxes(title_text="weights of an expert's matrix, N·K", range=nk_range, showgrid=False)
    figure.update_yaxes(type="log", tickvals=nk_ticks, ticktext=[f"{nk / 2**20:g} Mi" for nk in nk_ticks])
    return legend_below(figure)


MODELS = ("671B", "16B", "Qwen3-30B-A3B", "Qwen3-235B-A22B", "GLM-4.5", "Kimi-K2", "gpt-oss-120b")
FITS = {"B200, MXFP8": fit_b200, "H100, row-wise FP8": fit_h100}
_DEGREES = (1, 2, 4, 8, 16, 32, 64)
CONTROLS = {
    "model": Menu.of("model", MODELS),
    "gpu": Menu.of("GPU, format", FITS),
    "tokens": Menu.of("micro-batch", (2**exponent for exponent in range(10, 19)), "{:,} tokens".format),
    "tp": Menu.of("tensor parallel", _DEGREES[:4], "{:,} GPUs".format),
    "ep": Menu.of("expert parallel", _DEGREES, "{:,} GPUs".format),
}


class ExpertExplorer(Explorer):
    """A model, a GPU and a layout as menus; above, the rows of the experts beside the break-even; below, the times.

    The menus begin at the arguments, which are those of :func:`moelab.planning.gemm_fit.expert_work`.
    """

    def __init__(self, model: str, tokens: int, *, tp: int = 1, ep: int = 1) -> None:
        super().__init__(CONTROLS, {"model": model, "gpu": "B200, MXFP8", "tokens": tokens, "tp": tp, "ep": ep})

    def draw(self, chosen: Mapping[str, Any]) -> tuple[str, go.Figure]:
        """Whether the 8-bit format saves time, and why: the rows that the experts have and those that they need."""
        layout = {name: value for name, value in chosen.items() if name != "gpu"}
        case, fitted = expert_work("chosen", **layout).case, FITS[chosen["gpu"]]()
        rates = fitted.rates()
        gained, even = estimate(fitted, lambda drawn: gain(*case.mnkg, drawn)), break_even(case, fitted)
        verdict = "neither saves nor loses time that can be told"
        if gained.low > 1 or gained.high < 1:
            saved = 1 - 1 / gained.value
            verdict = f"{'saves' if saved > 0 else 'loses'} {100 * abs(saved):.0f} % of BF16's time"
            if gained.value < 1 / 1.5:
                verdict = f"takes {1 / gained.value:.1f} × as long as BF16, mostly for scales and casts"
        least, needed, most = (
            "never" if math.isinf(m) else f"{m:,.0f} rows" for m in (even.low, even.value, even.high)
        )
        words = (
            f"<b>{LABELS[rates.low_format]} {verdict}</b> · your M is {case.m:,} rows on {case.groups} experts, "
            f"break-even {needed} ({least} to {most}) · gain {gained.value:.2f} × "
            f"({gained.low:.2f} to {gained.high:.2f}, 90 % interval)"
        )
        return words, step_parts(case, rates)
