"""DeepEP drawn: quoted bandwidths, the memory that the gather costs, exchanges, the two-by-two."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from moelab.judge.two_by_two import (
    BASELINE,
    CODE,
    SHAPE_WORDS,
    STOCK,
    STOCK_CHECKPOINTING,
    ArmResult,
    checkpointing_words,
    current_results,
    shape_words,
    two_by_two_label,
)
from moelab.planning.measured import Measurement, Row
from moelab.viz.draw import (
    bar_rows,
    interval_marks,
    legend_below,
    list_rows,
    nothing_to_draw,
    write_beside,
)
from moelab.viz.theme import MUTED, WIDE, new_figure, plot_text, span
from moelab.viz.traffic import ROUTING_LABELS

OPERATIONS = ("dispatch", "combine", "combine_backward", "dispatch_backward")
"""Of rows of exchanges; :mod:`moelab.micro.exchange`, which measures them, loads torch."""
_OPERATIONS = dict(zip(OPERATIONS, ("dispatch fwd", "combine fwd", "combine bwd", "dispatch bwd"), strict=True))
ARM_LOOKS = {
    "standard bf16": ("standard, BF16", "#0072B2"),
    "deepep bf16 expanded": ("DeepEP expanding", "#009E73"),
    "deepep fp8 expanded": ("DeepEP expanding, FP8 dispatch", "#E69F00"),
    "deepep mxfp8 expanded": ("DeepEP expanding, MXFP8 dispatch", "#D55E00"),
}


# --- measured exchanges ----------------------------------------------------------------------------------------------


def operation_times(measured: Measurement, *, size: str = "") -> go.Figure:
    """Time of the four operations of a layer by way to move tokens, a panel for each routing."""
    # Multiprocessors that the caller chose are the sweep's; an arm without a look is another version's.
    rows = [row for row in _of_size(measured, size) if row.get("sms_chosen_by") != "caller" and row["arm"] in ARM_LOOKS]
    if not rows:
        return not_measured(measured, "Dispatch and combine")
    known = {(row["routing"], row["operation"], row["arm"]): row for row in rows}
    routings = dict.fromkeys(row["routing"] for row in rows)
    places = [(each, one) for each in routings for one in OPERATIONS if any((each, one) == key[:2] for key in known)]
    arms = {arm: look for arm, look in ARM_LOOKS.items() if any(arm == key[2] for key in known)}
    none = {"us_median": 0.0, "us_iqr": 0.0}
    of_arms = {label: [known.get((*place, arm), none) for place in places] for arm, (label, _) in arms.items()}
    return bar_rows(
        "Time of a layer's four exchanges",
        [[f"{ROUTING_LABELS[each]}<br>routing" for each, _ in places], [_OPERATIONS[one] for _, one in places]],
        {label: ([row["us_median"] / 1e3 for row in of_arms[label]], (color, "")) for label, color in arms.values()},
        "ms",
        unit=":.2f ms",
        grouped=True,
        errors={label: [row["us_iqr"] / 2e3 for row in of_arm] for label, of_arm in of_arms.items()},
        subtitle=f"{_size_words(rows[0])}. Median of {rows[0]['repeats']} turns, slowest rank; bars of half an "
        f"interquartile range each way. {measured.stamp}.",
        note=replayed(measured),
        row_px=20 + 11 * len(arms),
    )


def _of_size(measured: Measurement, size: str) -> list[Row]:
    chosen = size or next((row["size"] for row in measured.rows), "")
    return [row for row in measured.rows if row["size"] == chosen]


def _size_words(row: Row) -> str:
    return (
        f"{row['tokens']:,} tokens per rank, hidden {row['hidden']:,}, {row['experts']} experts, top-{row['top_k']}, "
        f"EP {row['ranks']}"
    )


# --- measured arms ---------------------------------------------------------------------------------------------------

_ROUTING_MARKS = {"random_balanced": (-0.17, "#0072B2", "circle"), "round_robin": (0.17, "#D55E00", "diamond")}
"""How far from the middle of its row a routing's mark is, its colour and its symbol."""


def two_by_two_dots(results: Sequence[ArmResult], measured: Measurement) -> go.Figure:
    """Throughput over stock's under the same checkpointing: a row for each arm, below the shape that it trained.

    Of the results, the current ones with stock at their side are drawn.
    """
    drawn = [one for one in current_results(results) if one.ratio is not None and one.arm not in STOCK]
    if not drawn:
        return not_measured(measured, "The two-by-two")
    drawn.sort(key=lambda one: -(one.ratio or 0.0))
    best = min(drawn, key=lambda one: one.stock_short)  # the first of those with enough memory on both sides
    # A line for the name of each shape, and below it one for each of its arms, the fastest first.
    rows: dict[tuple[str, str | None], dict[str, ArmResult]] = {}
    for one in drawn:
        rows.setdefault((one.shape, _row_words(one)), {})[one.routing] = one
    order = [*SHAPE_WORDS, *(one.shape for one in drawn)]  # shapes without a name come last
    shapes = sorted({one.shape for one in drawn}, key=order.index)
    lines = [line for shape in shapes for line in ((shape, None), *(row for row in rows if row[0] == shape))]
    figure = new_figure(
        f"{_arm_words(best)} is {best.ratio:.2f} times as fast as stock ({shape_words(best.shape)}; "
        f"{checkpointing_words(best.activation_checkpoint)} on both sides)",
        subtitle="Tokens/s over those of stock (BF16, standard all-to-all) under the same checkpointing and routing; "
        f"thin models with real layer sizes. Marks: median of {span(one.steps for one in drawn)} steps; bars: "
        f"quartiles; numbers: {' / '.join(map(ROUTING_LABELS.__getitem__, _ROUTING_MARKS))}; * one pass only, not "
        f"A B A B; † stock was short of memory. {measured.stamp}.",
        note=replayed(measured),
        height=130 + 21 * len(lines),
        width=WIDE,
    )
    for routing, (aside, color, symbol) in _ROUTING_MARKS.items():
        here = [one for one in drawn if one.routing == routing]
        places = [lines.index((one.shape, _row_words(one))) + aside for one in here]
        marks = interval_marks(places, [one.ratio_ends for one in here], color=color)
        figure.add_trace(
            marks.update(
                name=ROUTING_LABELS[routing],
                marker={"color": color, "symbol": symbol, "size": 9},
                customdata=[[one.label, one.tps, " and ".join(f"{each:,.0f}" for each in one.passes)] for one in here],
                hovertemplate="%{customdata[0]}: %{x:.3f} ×<br>%{customdata[1]:,.0f} tokens/s per GPU; passes "
                "%{customdata[2]}",
            )
        )
    most = max(one.ratio_ends[2] for one in drawn)
    for place, line in enumerate(lines):
        if by_routing := rows.get(line):
            ratios = [f"{by_routing[routing].ratio:.2f}" for routing in _ROUTING_MARKS if routing in by_routing]
            star = "*" if any(len(one.passes) == 1 for one in by_routing.values()) else ""
            star += "†" if any(one.stock_short for one in by_routing.values()) else ""
            write_beside(figure, most, place, f"{' / '.join(ratios)} ×{star}", px=14)
    figure.add_vline(x=1, line={"color": MUTED, "width": 1.5, "dash": "dot"})
    list_rows(figure, "× stock", names=[f"<b>{shape_words(shape)}</b>" if row is None else row for shape, row in lines])
    figure.update_yaxes(ticklabelstandoff=6, tickfont_size=13, showgrid=True)
    return legend_below(figure.update_xaxes(range=[0.99, most + 0.14], dtick=0.1, tickformat=".1f"))


def _arm_words(result: ArmResult) -> str:
    """The arm; attention's tiles go unsaid where stock has them too."""
    words = two_by_two_label(result.arm.removesuffix("_flex_tiles") if result.stock != BASELINE else result.arm)
    return plot_text(words.replace("FP8 +", "Fused FP8 +") if result.code == CODE else words)


def _row_words(result: ArmResult) -> str:
    """The arm with its checkpointing, which its name has already where it is not TorchTitan's own."""
    kind = result.activation_checkpoint
    return _arm_words(result) + ("" if kind in STOCK_CHECKPOINTING else f", {checkpointing_words(kind)}")


def not_measured(measured: Measurement, what: str) -> go.Figure:
    """An empty figure that says what is missing and how to measure it."""
    missing = "not measured yet" if measured.content is None else "not in this measurement"
    return nothing_to_draw(f"{what}: {missing}", subtitle=measured.stamp, height=190)


def replayed(measured: Measurement) -> str:
    """Where the numbers come from, for the title."""
    if str((measured.content or {}).get("device", "")).startswith("CPU"):
        return "CPU processes over gloo: no measure of a GPU"
    return "measured elsewhere, replayed" if measured.packaged else ""
