"""Figure 2 of the published study, redrawn: three arms of the two-by-two, and the place of the fourth."""

from __future__ import annotations

import plotly.graph_objects as go

from moelab.analysis.arms import arm_label
from moelab.analysis.published import GAINS, SOURCE, THROUGHPUT, THROUGHPUT_SETUP, published_tps
from moelab.viz.theme import INK, MUTED, arm_styles, new_figure, plot_text, wrap

ARMS = ("bf16_standard", "bf16_deepep", "mxfp8_standard", "mxfp8_deepep")
"""The two-by-two; ``mxfp8_standard`` was not published."""
BASELINE = "bf16_standard"


def published_bars() -> go.Figure:
    """Throughput of the published arms with their published gains; nothing here was measured by moelab."""
    gains = {gain.arm: gain.percent for gain in GAINS if gain.baseline == BASELINE}
    setup = THROUGHPUT_SETUP
    figure = new_figure(
        f"DeepEP gives {gains['bf16_deepep']:+.0f} %, DeepEP with MXFP8 experts {gains['mxfp8_deepep']:+.0f} %; "
        "MXFP8 alone was not published",
        subtitle=f"{setup.model}, {setup.hardware.split(':')[0]}, sequences of {setup.seq_len:,} tokens, "
        f"TP {setup.tp}, PP {setup.pp}, EP {setup.ep}, forced balance. n = 1 run of {setup.steps} steps an arm; no "
        "interval and no rule for discarding steps were published.",
        note=f"quoted: {SOURCE.split(';')[0]}",
        height=430,
    )
    for position, arm in enumerate(ARMS):
        _draw(figure, position, arm, gains.get(arm))
    highest = max(row.tps for row in THROUGHPUT)
    labels = ["<br>".join(wrap(arm_label(arm), 18)) for arm in ARMS]
    figure.update_xaxes(tickvals=list(range(len(ARMS))), ticktext=labels, showgrid=False, ticks="")
    figure.update_xaxes(range=[-0.6, len(ARMS) - 0.4])
    figure.update_yaxes(title_text="tokens/s per GPU", range=[0, 1.18 * highest], tickformat=",")
    return figure.update_layout(showlegend=False, bargap=0.45, hovermode="closest")


def _draw(figure: go.Figure, position: int, arm: str, gain_percent: float | None) -> None:
    published = published_tps(arm)
    if published is None:
        figure.add_annotation(x=position, y=0, text="not<br>published", showarrow=False, yanchor="bottom", yshift=8)
        figure.update_annotations(selector={"text": "not<br>published"}, font_color=MUTED)
        return
    style = arm_styles([arm])[arm]
    figure.add_trace(
        go.Bar(
            x=[position],
            y=[published.tps],
            marker={"color": style.fill(0.35), "line": {"color": style.color, "width": 2}},
            text=[f"<b>{published.tps:,.0f}</b>"],
            textposition="inside",
            insidetextanchor="middle",
            textfont={"color": INK, "size": 16},
            hovertemplate=f"{style.label}: %{{y:,.0f}} tokens/s, {published.label}: "
            f"{plot_text(published.source)}<extra></extra>",
        )
    )
    text = f"<b>{gain_percent:+.1f} %</b>" if gain_percent is not None else "baseline"
    figure.add_annotation(x=position, y=published.tps, text=text, showarrow=False, yanchor="bottom", yshift=6)
