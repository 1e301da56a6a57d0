"""Which layout to take, how fast it is, and whether MXFP8 and DeepEP are worth it: the answer, and its words.

Both sides of a comparison are at a best layout of their own: what DeepEP gains at a layout that nobody should choose
is no advice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from moelab.errors import Refused
from moelab.experiment import EPBackend, Experiment, Precision
from moelab.hardware import Cluster, cluster_of, has_native_mxfp8
from moelab.layout import check
from moelab.planning.plan import layout_words, parameters_text, rows, tokens_text
from moelab.planning.project import (
    Projection,
    aligned,
    documents_text,
    extrapolated,
    gain_over,
    on_cluster,
    project,
    speed_text,
)
from moelab.planning.search import Candidate, SearchResult, chosen_fields, search
from moelab.planning.time.calibration import CALIBRATION, Calibration
from moelab.planning.trust import Estimate

ORDER = "tokens/s per GPU; of what is extrapolated, the low end of its 90 % interval"
MUCH_WAITING = 0.2
"""Share of a step that the GPU is idle, from which on the answer names it beside the gain of faster products."""
PLAIN: Mapping[str, Any] = {"precision": Precision.BF16, "ep_backend": EPBackend.STANDARD, "dispatch_precision": "bf16"}
"""Neither technique."""


@dataclass(frozen=True, kw_only=True)
class TechniqueGain:
    """What a technique is worth, with the best layout of either side."""

    name: str
    with_it: Projection | None  # fastest projection with it; None where no legal layout has it and fits
    without: Projection  # fastest projection without it
    interval: Estimate | None  # percent; both sides err by the same constants, because they are the same machine
    why: str = ""  # why there is no layout with it, or what stands against a larger gain

    @property
    def outside(self) -> tuple[str, ...]:
        """What was never seen of either side."""
        sides = (self.without, *((self.with_it,) if self.with_it else ()))
        return tuple(dict.fromkeys(reason for side in sides for reason in side.outside))

    @property
    def percent_text(self) -> str:
        """The gain with its interval."""
        if self.interval is None:
            return "–"
        return f"{self.interval.value:+.1f} % ({self.interval.low:+.1f} to {self.interval.high:+.1f} %)"

    def to_json(self) -> dict[str, Any]:
        """The gain as one JSON object."""
        sides = {"with": self.with_it, "without": self.without}
        return {
            "technique": self.name,
            "percent": self.interval and self.interval.value,
            "interval": self.interval and [self.interval.low, self.interval.high],
            "why": self.why,
            "extrapolated": list(self.outside),
            **{name: side and {"tps": side.tps, "set": chosen_fields(side.experiment)} for name, side in sides.items()},
        }


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """A search and what it says of the techniques."""

    experiment: Experiment
    cluster: Cluster
    result: SearchResult
    gains: tuple[TechniqueGain, ...]  # each side with its own best layout; none where no layout fits without them
    own_tps: float | None  # tokens/s/GPU with the layout that was given; None where it is illegal or does not fit

    @property
    def ranked(self) -> tuple[Candidate, ...]:
        """The layouts that fit, the best first."""
        return self.result.candidates

    @property
    def best(self) -> Projection | None:
        """Of the first layout; None where none fits."""
        return self.ranked[0].projection if self.ranked else None

    def to_json(self, name: str = "") -> dict[str, Any]:
        """The search as one JSON object; ``name`` as in :func:`answer_lines`."""
        return {
            "answer": answer_lines(self, name),
            **self.result.to_json(),
            "order": ORDER,
            "gains": [gain.to_json() for gain in self.gains],
            "given_tps": self.own_tps,
        }


def recommend(
    experiment: Experiment,
    cluster: Cluster | None = None,
    *,
    fixed: Collection[str] = (),
    limit: int = 10,
    global_batch: int | None = None,
    calibration: Calibration = CALIBRATION,
) -> Recommendation:
    """The best layouts of an experiment, and what 8-bit experts and DeepEP gain there; arguments as :func:`search`.

    Raises:
        BadInput: as :func:`search`.
    """
    cluster = cluster or cluster_of(experiment.hardware)
    result = search(experiment, cluster, fixed=fixed, limit=limit, global_batch=global_batch, calibration=calibration)
    own = None
    with suppress(Refused):  # illegal or too large, the layout that was given has no speed to compare with
        own = project(experiment, cluster, calibration=calibration).tps
    best = result.candidates[0].experiment if result.candidates else None
    gains = _gains(best, cluster, {*fixed, "cp", "dp_replicate"}, calibration) if best else ()
    return Recommendation(experiment=experiment, cluster=cluster, result=result, gains=tuple(gains), own_tps=own)


def _gains(
    best: Experiment, cluster: Cluster, fixed: Collection[str], calibration: Calibration
) -> Iterator[TechniqueGain]:
    """Of 8-bit experts, of DeepEP and of both, over neither, with the context parallelism and replicas of the best."""

    def fastest(**fields: Any) -> Projection | None:
        changed = best.model_copy(update={**PLAIN, **fields})
        found = search(changed, cluster, fixed=fixed, limit=1, calibration=calibration).candidates
        return found[0].projection if found else None

    if (without := fastest()) is None:
        return
    low = Precision.MXFP8 if has_native_mxfp8(cluster.node.gpu.capability) else Precision.FP8
    experts, dispatcher = {"precision": low}, {"ep_backend": EPBackend.DEEPEP}
    techniques: dict[str, dict[str, Any]] = {f"{low.upper()} experts": experts, "DeepEP": dispatcher}
    techniques[" with ".join(techniques)] = experts | dispatcher
    for name, fields in techniques.items():
        with_it, interval, why = fastest(**fields), None, ""
        if with_it is None:
            reasons = check(on_cluster(without.experiment.model_copy(update=fields), cluster)).reasons
            why = reasons[0] if reasons else "no layout with it fits"
        else:
            interval = gain_over(with_it, without)
            waits = with_it.breakdown_s["host and waiting"] / with_it.step_time_s
            if fields == experts and waits > MUCH_WAITING:
                why = f"the GPU waits {waits:.0%} of the step, mostly for the host: 8 bits do not shorten that"
        yield TechniqueGain(name=name, with_it=with_it, without=without, interval=interval, why=why)


def answer_lines(advice: Recommendation, name: str = "") -> list[str]:
    """The answer to *which layout, does it fit, how fast, and is a technique worth it*, one sentence a line.

    ``name`` is the model's, where the experiment's own would be a list of dimensions.
    """
    x, best = advice.experiment, advice.best
    sequences = (best.experiment if best else x).global_batch
    model = (
        f"{name or x.model_label}: {parameters_text(x)}; "
        f"{x.world_size} GPUs ({x.nodes} × {x.gpus_per_node}) of {advice.cluster.name}, arm {x.arm}, "
        f"{sequences:,} sequences of {x.seq_len:,} tokens ({tokens_text(sequences * x.seq_len)}) a step"
    )
    if best is None:
        return [*_nothing_fits(advice), model]
    lines = [
        f"legal · fits ({advice.ranked[0].headroom_gib:.1f} GiB free) · {speed_text(best)}",
        model,
        f"best layout: {layout_words(best.experiment)}{_resting(best.outside)}",
    ]
    seen = next((one.projection for one in advice.ranked if one.projection and not one.projection.outside), None)
    if best.outside and seen:
        lines.append(f"best of what was seen: {layout_words(seen.experiment)}: {speed_text(seen)}")
    if advice.own_tps is not None and advice.own_tps < best.tps:
        times = best.tps / advice.own_tps
        faster = f"the best is {100 * (times - 1):.1f} % faster" if times < 2 else f"the best is {times:.1f} × as fast"
        lines.append(f"as given: {layout_words(x)}: {advice.own_tps:,.0f} tokens/s per GPU; {faster}")
    return [*lines, *(_gain_text(gain, said=best.outside) for gain in advice.gains)]


def _nothing_fits(advice: Recommendation) -> list[str]:
    """Why there is no layout: what is illegal, or how much memory is missing and how many GPUs have it."""
    result = advice.result
    if not result.legal:
        reasons = check(on_cluster(advice.experiment, advice.cluster)).reasons
        why = "its sequences do not divide over the ranks, or every EP group begins or ends inside a node"
        return ["no layout is legal and can be projected", *(reasons or [why])]
    lines = ["legal · no layout fits"]
    if near := result.nearest:
        lines.append(
            f"the closest is {-near.headroom_gib:.1f} GiB short on its fullest GPU: {layout_words(near.experiment)}"
        )
    if enough := result.enough:
        more = enough.experiment
        lines.append(
            f"{more.world_size} GPUs would do: {layout_words(more)}, {enough.headroom_gib:.1f} GiB free, "
            f"{more.global_batch:,} sequences a step"
        )
    return lines


def _gain_text(gain: TechniqueGain, *, said: Sequence[str]) -> str:
    """A gain in a sentence, with either side's best layout and what it rests on, unless that was ``said``."""
    if gain.with_it is None:
        return f"{gain.name}: {gain.why}"
    text = f"{gain.name}: {gain.percent_text}, "
    text += f"{gain.with_it.tps:,.0f} instead of {gain.without.tps:,.0f} tokens/s per GPU, each at its best layout: "
    if chosen_fields(gain.with_it.experiment) == chosen_fields(gain.without.experiment):
        text += "the same for both"
    else:
        text += f"{layout_words(gain.with_it.experiment)}; without it {layout_words(gain.without.experiment)}"
    return text + (f"; {gain.why}" if gain.why else "") + _resting(gain.outside, said)


def _resting(reasons: Sequence[str], said: Sequence[str] = ()) -> str:
    """What a figure rests on, in full the first time."""
    if not reasons:
        return ""
    return " (extrapolated *)" if set(reasons) <= set(said) else f" ({extrapolated('; '.join(reasons))})"


def recommendation_text(advice: Recommendation, name: str = "") -> str:
    """The answer, and the layouts as a table, the best first."""
    lines = rows("", answer_lines(advice, name))
    result, best = advice.result, advice.best
    counts = f"{result.examined:,} layouts checked, {result.legal:,} legal, {result.projected:,} projected."
    if best is None:
        return "\n".join([*lines, "", counts])
    label = "Speeds are derived." + (" * is extrapolated." if any(map(_is_extrapolated, advice.ranked)) else "")
    documents = documents_text(best)
    words = [counts, f"Order: {ORDER}.", label, *([documents] if documents else []), *best.notes]
    return "\n".join([*lines, "", *layout_table(advice.ranked), "", *rows("", words)])


def _is_extrapolated(candidate: Candidate) -> bool:
    return bool(candidate.projection and candidate.projection.outside)


def layout_table(candidates: Sequence[Candidate]) -> list[str]:
    """Layouts as aligned lines, with their speeds where they fit."""
    table = []
    for one in candidates:
        x = one.experiment
        cells = {
            "pp": x.pp,
            "schedule": x.pp_schedule if x.pp > 1 else "-",
            "micro": x.sequences_at_once,
            "dp_rep": x.dp_replicate,
            "dp_shard": x.dp_shard,
            "cp": x.cp,
            "tp": x.tp,
            "ep": x.ep,
            "local": x.local_batch,
            "global": x.global_batch,
            "checkpointing": x.activation_checkpoint,
            "bubble": f"{one.bubble_fraction:.1%}",
            "free GiB": f"{one.headroom_gib:.1f}",
            "tokens/s/GPU": f"{one.projection.tps:,.0f}" + "*" * _is_extrapolated(one) if one.projection else "?",
        }
        table.append(cells)
    return aligned([list(table[0]), *([str(cell) for cell in cells.values()] for cells in table)])
