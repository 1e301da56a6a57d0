"""DeepEP drawn: times of exchanges, and what it gains."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from moelab.judge.throughput import (
    SHAPE_WORDS,
    ArmResult,
    current_results,
    shape_words,
)
from moelab.planning.measured import Measurement, Row
from moelab.viz.draw import (
    bar_rows,
    nothing_to_draw,
)
from moelab.viz.theme import WIDE
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

GAINS = {
    "stock": ("bf16_standard", "#BBBBBB"),
    "DeepEP": ("bf16_deepep", "#56B4E9"),
    "DeepEP and fused FP8 experts": ("fp8_deepep_wgrad-fp8_dispatch-fp8_flex_tiles", "#009E73"),
}
"""Arms that the figure has beside each other, by their names there, with their colours."""


def measured_gains(results: Sequence[ArmResult], measured: Measurement) -> go.Figure:
    """Throughput over stock's, of both shapes whose step is mostly MoE layers, under full checkpointing."""
    found = {
        (one.shape, one.arm): one
        for one in current_results(results)
        if (one.activation_checkpoint, one.routing) == ("full", "random_balanced") and one.ratio is not None
    }
    shapes = [shape for shape in SHAPE_WORDS if all((shape, arm) in found for arm, _ in GAINS.values())]
    if not shapes:
        return not_measured(measured, "Gains over stock")
    ends = {name: [found[shape, arm].ratio_ends for shape in shapes] for name, (arm, _) in GAINS.items()}
    figure = bar_rows(
        "Throughput over stock TorchTitan's, two thin 671B models",
        [shape_words(shape) for shape in shapes],
        {name: ([middle for _, middle, _ in ends[name]], (color, "")) for name, (_, color) in GAINS.items()},
        "× stock",
        unit=":.2f ×",
        numbers=".2f",
        grouped=True,
        errors={name: [(high - low) / 2 for low, _, high in each] for name, each in ends.items()},
        subtitle="Stock: BF16, standard all-to-all. Both sides have full checkpointing and balanced random routing, "
        f"and beside FP8 experts the same attention tiles. Medians with quartiles. {measured.stamp}.",
        note=replayed(measured),
        row_px=84,
        width=WIDE,
    )
    return figure.update_xaxes(range=[0, 1.5])


def not_measured(measured: Measurement, what: str) -> go.Figure:
    """An empty figure that says what is missing and how to measure it."""
    missing = "not measured yet" if measured.content is None else "not in this measurement"
    return nothing_to_draw(f"{what}: {missing}", subtitle=measured.stamp, height=190)


def replayed(measured: Measurement) -> str:
    """Where the numbers come from, for the title."""
    if str((measured.content or {}).get("device", "")).startswith("CPU"):
        return "CPU processes over gloo: no measure of a GPU"
    return "measured elsewhere, replayed" if measured.packaged else ""
