"""Projections as text for a terminal."""

from __future__ import annotations

from collections.abc import Mapping

from moelab.projection.project import Projection
from moelab.search import aligned


def projection_text(found: Projection) -> str:
    """One projection: speed, interval, FLOPs, and the parts of the step."""
    low, high = found.interval
    lines = [
        f"{found.tps:,.0f} tokens/s/GPU ({low:,.0f} to {high:,.0f} with 90 % confidence; {found.label}), "
        f"{found.step_time_s:.3f} s a step",
        f"{found.experiment.model_label}, arm {found.experiment.arm}, {found.job.gpus} GPUs, "
        f"hardware {found.cluster.name}",
    ]
    for count, tflops in found.tflops.items():
        counted = f"{found.flops[count] / 1e9:.1f} GFLOP a token"
        lines.append(f"{tflops:.0f} TFLOP/s/GPU, MFU {found.mfu[count]:.1%} by the {count} count, {counted}")
    lines += [f"outside of what the model was held against: {one}" for one in found.outside]
    rows = [
        (part, f"{seconds:.3f} s", f"{seconds / found.step_time_s:.1%}")
        for part, seconds in sorted(found.breakdown_s.items(), key=lambda item: -item[1])
        if seconds > 0
    ]
    return "\n".join([*lines, "", *aligned(rows)])


def arms_text(found: Mapping[str, Projection]) -> str:
    """Arms beside each other; gains are over the first."""
    first = next(iter(found.values())).tps
    rows = [("arm", "tokens/s/GPU", "low", "high", "over the first", "")]
    for arm, one in found.items():
        low, high = one.interval
        rows.append((arm, f"{one.tps:,.0f}", f"{low:,.0f}", f"{high:,.0f}", f"{one.tps / first - 1:+.1%}", one.label))
    return "\n".join(aligned(rows))
