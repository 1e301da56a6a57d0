"""Projected arms of the two-by-two beside measured or published ones, their gains, and whether these compose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from moelab.analysis.arms import arm_label, contrast
from moelab.projection.published import Estimate, TwoByTwo
from moelab.viz.theme import INK, MUTED, arm_styles, new_figure, wrap

SYMBOLS, LEVEL = ("square", "triangle-up", "star"), "90 %"
BASELINE = "bf16_standard"


def arms_beside_projection(
    known: Mapping[str, float], projected: Mapping[str, Mapping[str, Estimate]], *, known_words: str, words: str
) -> go.Figure:
    """Throughput of arms as it is known, and as it is projected.

    Args:
        known: tokens/s per GPU by arm; an arm that was never measured is not in it.
        projected: estimates by arm, for each condition by name; the first condition is that of ``known``.
        known_words: what ``known`` is, such as "published (quoted)".
        words: of which runs, for the subtitle.
    """
    arms = list(dict.fromkeys([*(arm for found in projected.values() for arm in found), *known]))
    figure = new_figure(
        _worst(known, next(iter(projected.values()))),
        subtitle=f"{words} {f'Circles: {known_words}. ' if known else ''}Projections with their {LEVEL} interval.",
        note=f"{known_words} against derived" if known else "derived: the step-time model",
    )
    figure.add_trace(
        go.Scatter(
            x=[arms.index(arm) - 0.22 for arm in known],
            y=list(known.values()),
            mode="markers+text",
            name=known_words,
            text=[f"{tps:,.0f}" for tps in known.values()],
            textposition="middle left",
            marker={"size": 12, "color": "white", "line": {"color": INK, "width": 2}},
            hovertemplate="%{y:,.0f} tokens/s<extra></extra>",
        )
    )
    for number, (condition, found) in enumerate(projected.items()):
        _draw_condition(figure, arms, condition, found, number)
    labels = ["<br>".join(wrap(arm_label(arm), 18)) for arm in arms]
    highest = max([*known.values(), *(one.high for found in projected.values() for one in found.values())])
    figure.update_xaxes(tickvals=list(range(len(arms))), ticktext=labels, showgrid=False, ticks="")
    figure.update_xaxes(range=[-0.6, len(arms) - 0.4])
    figure.update_yaxes(title_text="tokens/s per GPU", range=[0, 1.1 * highest], tickformat=",")
    return figure.update_layout(hovermode="closest", legend_y=-0.24)


def gains_and_interaction(found: Sequence[TwoByTwo]) -> go.Figure:
    """Projected gains over BF16 with the standard all-to-all, and what is left when the product of two is divided out.

    Args:
        found: a two-by-two for each routing.
    """
    arms = list(arm_styles(found[0].gains))
    labels = [*("<br>".join(wrap(arm_label(arm), 20)) for arm in arms), "interaction"]
    headed = new_figure(
        _composition(found),
        subtitle=f"Left: gain over {arm_label(BASELINE)}. Right: gain of both over the product of the gains of each. "
        f"{LEVEL} intervals over draws of the model's constants, each of which meets the published baseline.",
        note="derived: MXFP8 + standard all-to-all was never published",
        height=390,
    )
    figure = make_subplots(rows=1, cols=2, column_widths=[0.66, 0.34], horizontal_spacing=0.17)
    figure.update_layout(headed.layout)
    for number, one in enumerate(found):
        color, symbol = _LOOKS[number]
        name = one.routing.value.replace("_", " ")
        gains = [_percent(one.gains[arm]) for arm in arms]
        _draw_estimates(figure, gains, labels[:-1], name, color, symbol, column=1, shift=number)
        _draw_estimates(figure, [_change(one.interaction)], [labels[-1]], name, color, symbol, column=2, shift=number)
    figure.add_vline(x=0, line={"color": MUTED, "width": 1.5}, row=1, col=2)
    figure.update_xaxes(title_text="gain (%)", rangemode="tozero", row=1, col=1)
    figure.update_xaxes(title_text="interaction (%)", row=1, col=2)
    figure.update_yaxes(autorange="reversed", ticks="", showgrid=False)
    return figure.update_layout(hovermode="closest", scattermode="group", legend_y=-0.22)


_LOOKS = (("#0072B2", "circle"), ("#D55E00", "square"))


def _draw_condition(
    figure: go.Figure, arms: Sequence[str], condition: str, found: Mapping[str, Estimate], number: int
) -> None:
    color = ("#0072B2", "#D55E00", "#009E73")[number]
    figure.add_trace(
        go.Scatter(
            x=[arms.index(arm) - 0.08 + 0.3 * number for arm in found],
            y=[one.value for one in found.values()],
            error_y={
                "array": [one.high - one.value for one in found.values()],
                "arrayminus": [one.value - one.low for one in found.values()],
                "symmetric": False,
                "thickness": 1.5,
                "width": 5,
            },
            mode="markers+text",
            text=[f"{one.value:,.0f}" for one in found.values()],
            textposition="middle right",
            textfont={"color": color, "size": 12},
            name=f"projected, {condition}",
            marker={"size": 10, "color": color, "symbol": SYMBOLS[number]},
            hovertemplate="%{y:,.0f} tokens/s<extra></extra>",
        )
    )


def _draw_estimates(
    figure: go.Figure,
    found: Sequence[Estimate],
    labels: Sequence[str],
    name: str,
    color: str,
    symbol: str,
    *,
    column: int,
    shift: int,
) -> None:
    figure.add_trace(
        go.Scatter(
            y=list(labels),
            x=[one.value for one in found],
            error_x={
                "array": [one.high - one.value for one in found],
                "arrayminus": [one.value - one.low for one in found],
                "symmetric": False,
                "thickness": 1.5,
                "width": 5,
            },
            orientation="h",
            offsetgroup=str(shift),
            mode="markers",
            name=name,
            legendgroup=name,
            showlegend=column == 1,
            marker={"size": 10, "color": color, "symbol": symbol},
            hovertemplate="%{x:.2f} %<extra></extra>",
        ),
        row=1,
        col=column,
    )


def _percent(ratio: Estimate) -> Estimate:
    return Estimate(value=100 * (ratio.value - 1), low=100 * (ratio.low - 1), high=100 * (ratio.high - 1))


def _change(share: Estimate) -> Estimate:
    return Estimate(value=100 * share.value, low=100 * share.low, high=100 * share.high)


def _worst(known: Mapping[str, float], projected: Mapping[str, Estimate]) -> str:
    """The largest error where something is known, and what is said of arms that are not."""
    errors = {arm: projected[arm].value / tps - 1 for arm, tps in known.items() if arm in projected}
    if not errors:
        best = max(projected, key=lambda arm: projected[arm].value)
        return f"{arm_label(best)} is projected to make most: {_with_bounds(projected[best])} tokens/s"
    worst = max(errors, key=lambda arm: abs(errors[arm]))
    said = [f"The projection is {errors[worst]:+.1%} off at worst ({arm_label(worst)})"]
    said += [
        f"{arm_label(arm)} is not identified: {_with_bounds(one)} by this model's constants"
        for arm, one in projected.items()
        if arm not in known
    ]
    return "; ".join(said)


def _with_bounds(one: Estimate) -> str:
    return f"{one.value:,.0f} ({one.low:,.0f} to {one.high:,.0f})"


def _composition(found: Sequence[TwoByTwo]) -> str:
    first = found[0]
    compose = all(one.interaction.low <= 0 <= one.interaction.high for one in found)
    alone, _, _ = contrast("mxfp8_standard", BASELINE)
    gain = _percent(first.gains["mxfp8_standard"])
    said = "no interaction is shown" if compose else "the two gains do not simply multiply"
    return (
        f"By this model's constants {alone} alone gains {gain.value:.1f} % ({gain.low:.1f} to {gain.high:.1f}) and "
        f"{said}; the published rows identify neither"
    )
