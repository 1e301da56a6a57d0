"""Where the seconds of a step go: one step part by part until it adds up, and several arms beside each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from moelab.analysis.arms import arm_label
from moelab.viz.theme import INK, MUTED, new_figure, plot_text, wrap

GROUPS: Mapping[str, tuple[str, ...]] = {
    "expert GEMMs": ("expert GEMMs",),
    "attention and other GEMMs": ("attention", "other GEMMs"),
    "quantisation": ("quantisation",),
    "permutation, memory-bound, optimizer": ("permutation and padding", "memory-bound", "optimizer"),
    "all-to-all": ("all-to-all",),
    "TP, CP and FSDP collectives": (
        "tensor-parallel collectives",
        "context-parallel collectives",
        "FSDP collectives",
    ),
    "host, bubble, stragglers": ("host and waiting", "pipeline bubble", "imbalance and stragglers"),
}
"""Parts of a step as the arms' figure adds them up."""
COLORS = ("#0072B2", "#56B4E9", "#CC79A7", "#F0E442", "#D55E00", "#E69F00", "#999999")
DARK = ("#0072B2", "#D55E00")
"""Of the colours, those on which white is legible."""
STRIPES = {"fgcolor": "white", "size": 6, "solidity": 0.15}
PATTERNS = ("", "/", "x", ".", "", "\\", "|")


def step_breakdown(parts_s: Mapping[str, float], *, measured_s: float | None = None, words: str = "") -> go.Figure:
    """One step from zero to its whole, the longest part first.

    Args:
        parts_s: seconds by part.
        measured_s: of the whole step as it was published; drawn as a line.
        words: of what step, for the subtitle.
    """
    parts = sorted(((name, value) for name, value in parts_s.items() if value), key=lambda part: -part[1])
    total_s = sum(parts_s.values())
    largest, seconds = parts[0]
    quoted = f" Dashed: the published step, {measured_s:,.0f} s (quoted)." if measured_s else ""
    figure = new_figure(
        f"{seconds:,.0f} of {total_s:,.0f} s ({seconds / total_s:.0%}) are {largest}",
        subtitle=f"{words} The busiest pipeline rank; every bar begins where the one above ends.{quoted}",
        note="derived: the step-time model, not a profile",
        height=180 + 26 * len(parts),
    )
    ends = [0.0]
    for _, value in parts:
        ends.append(ends[-1] + value)
    rows = [*parts, ("whole step", total_s)]
    figure.add_trace(
        go.Bar(
            y=[name for name, _ in rows],
            x=[value for _, value in rows],
            base=[*ends[:-1], 0.0],
            orientation="h",
            marker={"color": ["#56B4E9"] * len(parts) + ["#dfe3e8"], "line": {"color": MUTED, "width": 1}},
            hovertemplate="%{y}: %{x:.2f} s<extra></extra>",
        )
    )
    figure.add_trace(_labels(rows, [*ends[:-1], 0.0], middle=0.5 * total_s))
    if measured_s:
        figure.add_vline(x=measured_s, line={"color": INK, "dash": "dash", "width": 1.5})
    figure.update_yaxes(autorange="reversed", ticks="", showgrid=False)
    figure.update_xaxes(title_text="seconds of a step", range=[0, 1.16 * max(total_s, measured_s or 0)])
    return figure.update_layout(showlegend=False, bargap=0.25, hovermode="closest")


def _labels(rows: Sequence[tuple[str, float]], starts: Sequence[float], *, middle: float) -> go.Scatter:
    """Seconds beside the bars: left of those that begin beyond the middle, right of the others."""
    left = [start > middle for start in starts]
    ends = [start if before else start + value for (_, value), start, before in zip(rows, starts, left, strict=True)]
    return go.Scatter(
        x=ends,
        y=[name for name, _ in rows],
        mode="text",
        text=[f" {value:,.1f} s " for _, value in rows],
        textposition=["middle left" if before else "middle right" for before in left],
        textfont_size=12,
        hoverinfo="skip",
    )


def arm_breakdowns(
    parts_s: Mapping[str, Mapping[str, float]], *, published_s: Mapping[str, float] | None = None, words: str = ""
) -> go.Figure:
    """Steps of several arms as stacked bars.

    Args:
        parts_s: seconds by arm and part.
        published_s: whole steps as published, by arm; drawn as diamonds.
        words: of what steps, for the subtitle.
    """
    labels = {arm: "<br>".join(wrap(arm_label(arm), 18)) for arm in parts_s}
    totals = {arm: sum(parts.values()) for arm, parts in parts_s.items()}
    shown = {name: [sum(parts[one] for one in GROUPS[name]) for parts in parts_s.values()] for name in GROUPS}
    diamonds = " Diamonds: published (quoted)." if published_s else ""
    figure = new_figure(
        _difference(shown, list(parts_s), totals),
        subtitle=f"{words} The busiest pipeline rank, parts that add up to the step.{diamonds}",
        note="derived: the step-time model, not a profile",
        height=330 + 42 * len(parts_s),
    )
    for (name, values), color, pattern in zip(shown.items(), COLORS, PATTERNS, strict=True):
        figure.add_trace(
            go.Bar(
                y=list(labels.values()),
                x=values,
                name=name,
                orientation="h",
                marker={
                    "color": color,
                    "pattern": {"shape": pattern, "bgcolor": color, **STRIPES},
                },
                text=[f"{value:,.0f}" if value > 0.05 * max(totals.values()) else "" for value in values],
                textposition="inside",
                insidetextanchor="middle",
                textangle=0,
                textfont={"color": "white" if color in DARK else INK, "size": 13},
                hovertemplate=f"{plot_text(name)}: %{{x:.1f}} s<extra></extra>",
            )
        )
    for arm, total in totals.items():
        end = max(total, (published_s or {}).get(arm, 0.0))
        text = f"<b>{total:,.0f} s</b>"
        figure.add_annotation(x=end, y=labels[arm], text=text, showarrow=False, xanchor="left", xshift=12)
    if published_s:
        figure.add_trace(_published(published_s, labels))
    figure.update_yaxes(autorange="reversed", ticks="", showgrid=False)
    figure.update_xaxes(title_text="seconds of a step", range=[0, 1.14 * max(totals.values())])
    return figure.update_layout(barmode="relative", bargap=0.35, hovermode="closest", legend_y=-0.22)


def _published(published_s: Mapping[str, float], labels: Mapping[str, str]) -> go.Scatter:
    return go.Scatter(
        x=list(published_s.values()),
        y=[labels[arm] for arm in published_s],
        mode="markers",
        name="published (quoted)",
        marker={"symbol": "diamond", "size": 11, "color": "white", "line": {"color": INK, "width": 2}},
        hovertemplate="published: %{x:,.1f} s<extra></extra>",
    )


def _difference(shown: Mapping[str, list[float]], arms: list[str], totals: Mapping[str, float]) -> str:
    """What sets the fastest arm apart from the first."""
    fastest = min(totals, key=totals.__getitem__)
    if fastest == arms[0]:
        return f"{arm_label(arms[0])}: {totals[fastest]:,.0f} s a step"
    place = arms.index(fastest)
    saved = {name: values[0] - values[place] for name, values in shown.items()}
    most = max(saved, key=saved.__getitem__)
    return (
        f"{arm_label(fastest)} saves {totals[arms[0]] - totals[fastest]:,.0f} s of {totals[arms[0]]:,.0f} s: "
        f"{saved[most]:,.0f} s of {most}"
    )
