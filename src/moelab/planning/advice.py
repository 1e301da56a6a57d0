"""Which layout to take, how fast it is, and whether MXFP8 and DeepEP are worth it: the answer, and its words.

``recommend`` asks :mod:`moelab.planning.search` for the layouts whose intervals begin highest. Both sides of a
comparison, the other value of a setting or a technique, are priced at a best layout of their own: what
DeepEP gains at a layout that nobody should choose is no advice.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from moelab.errors import Refused
from moelab.experiment import EPBackend, Experiment, Precision
from moelab.hardware import Cluster, has_native_mxfp8
from moelab.layout import check
from moelab.planning.plan import layout_words, parameters_text, rows, tokens_text
from moelab.planning.project import Projection, aligned, extrapolated, gain_over, project, speed_text
from moelab.planning.search import MOST_TOKENS_AT_ONCE, ORDER, VARIED, Candidate, SearchResult, Space, chosen_fields
from moelab.planning.time.calibration import CALIBRATION, Calibration
from moelab.planning.time.job import Job
from moelab.planning.time.step import expert_s
from moelab.planning.uncertainty import Estimate

ORDER_BY_SPEED = "low end of the 90 % interval of tokens/s per GPU, so what nobody has measured must be clearly faster"
BREAK_EVEN_STEP = 1.05
"""To which factor a break-even is looked for."""
MUCH_WAITING = 0.2
"""Share of a step that the GPU is idle, from which on the answer names it beside the gain of faster products."""
TRIED: Mapping[str, tuple[Any, ...]] = {
    "precision": (Precision.BF16, Precision.MXFP8, Precision.FP8),
    "quantize": ("experts", "experts+linears"),
    "ep_backend": (EPBackend.STANDARD, EPBackend.DEEPEP),
    "dispatch_precision": ("bf16", "mxfp8", "fp8"),
    "wgrad": ("mxfp8", "bf16"),
    "activation_checkpoint": ("none", "selective", "full+dispatch", "full"),
    "compile": ("none", "model+loss"),
}
"""Settings beside the layout, with the values that are tried."""
PLAIN: Mapping[str, Any] = {"precision": Precision.BF16, "ep_backend": EPBackend.STANDARD, "dispatch_precision": "bf16"}
"""Neither technique."""
QUICK_GPUS = 512
"""Up to so many a projection looks for a better layout by itself."""
BETTER = 1.02
"""How much faster a layout must be for a projection of another to name it."""


@dataclass(frozen=True, kw_only=True)
class TechniqueGain:
    """What a setting is worth, with the best layout of either side."""

    name: str
    with_it: Projection | None  # fastest projection with it; None where no legal layout has it and fits
    without: Projection  # fastest projection without it
    interval: Estimate  # percent; both sides err by the same constants, because they are the same machine
    why: str = ""  # what it comes from, where the model can say so, or why there is no layout

    @property
    def rests_on(self) -> tuple[str, ...]:
        """What was never seen of either side."""
        sides = (self.without, *((self.with_it,) if self.with_it else ()))
        return tuple(dict.fromkeys(reason for side in sides for reason in side.rests_on))

    @property
    def percent_text(self) -> str:
        """The gain with its interval."""
        low, high = self.interval.low, self.interval.high
        return f"{self.interval.value:+.1f} % ({low:+.1f} to {high:+.1f} %)"

    def to_json(self) -> dict[str, Any]:
        """The gain as one JSON object."""
        sides = {"with": self.with_it, "without": self.without}
        return {
            "technique": self.name,
            "percent": self.interval.value if self.with_it else None,
            "interval": [self.interval.low, self.interval.high] if self.with_it else None,
            "why": self.why,
            "extrapolated": list(self.rests_on),
            **{name: side and {"tps": side.tps, "set": chosen_fields(side.experiment)} for name, side in sides.items()},
        }


@dataclass(frozen=True, kw_only=True)
class Worth:
    """A setting of the best layout: ``value`` instead of ``other``, tokens/s/GPU of the best layout with each."""

    field: str
    value: Any
    other: Any
    tps: float
    other_tps: float
    rests_on: tuple[str, ...] = ()

    @property
    def percent(self) -> float:
        """How much faster the best is than with the other value."""
        return 100 * (self.tps / self.other_tps - 1)


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """A search by predicted speed."""

    experiment: Experiment
    cluster: Cluster
    result: SearchResult  # the search; its candidates are those that were projected, in the order of the estimate
    ranked: tuple[Candidate, ...]  # the best layouts first, each with its projection; empty where none fits
    gains: tuple[TechniqueGain, ...]  # of the techniques, each side with its own best layout
    worth: tuple[Worth, ...]  # of settings of the best; negative where another value is faster
    own_tps: float | None  # tokens/s/GPU with the layout that was given; None where it is illegal or does not fit

    @property
    def considered(self) -> int:
        """Layouts that were projected."""
        return len(self.result.candidates)

    @property
    def place(self) -> int:
        """Of the best in the order of the estimate, from 1; 0 where none fits."""
        return self.result.candidates.index(self.ranked[0]) + 1 if self.ranked else 0

    @property
    def best(self) -> Projection | None:
        """Of the first layout; None where none fits."""
        return self.ranked[0].projection if self.ranked else None

    def to_json(self, name: str = "") -> dict[str, Any]:
        """The search as one JSON object, the best first; ``name`` as in :func:`answer_lines`."""
        return {
            "answer": answer_lines(self, name),
            **self.result.to_json(),
            "order": [ORDER_BY_SPEED],
            "candidates": [one.to_json() for one in self.ranked],
            "gains": [gain.to_json() for gain in self.gains],
            "given_tps": self.own_tps,
            "worth": [
                {name: getattr(one, name) for name in ("field", "value", "other", "percent")} for one in self.worth
            ],
            "considered": self.considered,
            "place": self.place,
        }


def recommend(
    experiment: Experiment,
    cluster: Cluster | None = None,
    *,
    fixed: Collection[str] = (),
    limit: int = 10,
    global_batch: int | None = None,
    calibration: Calibration = CALIBRATION,
    settings: bool = True,
) -> Recommendation:
    """Search layouts and order them by predicted speed.

    Args:
        experiment: model, batch and all that is not varied; its nodes and GPUs of a node.
        cluster: another one than the experiment's ``hardware``, such as one with another network.
        fixed: fields that keep the experiment's value.
        limit: layouts to return.
        global_batch: sequences of a step; None keeps the experiment's own.
        calibration: constants of the model.
        settings: whether each setting is priced too, which takes most of the time.

    Raises:
        BadInput: if the hardware lacks a figure that a projection needs, or a fixed field is not varied.
    """
    space = Space(experiment, cluster, fixed=fixed, global_batch=global_batch, calibration=calibration)
    result, ranked = space.search(limit)
    best = ranked[0].projection if ranked else None
    own = None
    # Illegal or too large, the layout that was given has no speed to compare with.
    with suppress(Refused):
        own = project(experiment, space.cluster, calibration=calibration).tps
    return Recommendation(
        experiment=experiment,
        cluster=space.cluster,
        result=result,
        ranked=ranked,
        gains=tuple(_gains(space)) if best else (),
        worth=tuple(_worth(space, best)) if best and settings else (),
        own_tps=own,
    )


def _gains(space: Space) -> Iterator[TechniqueGain]:
    """Of 8-bit experts, of DeepEP and of both, over neither; nothing where no layout fits with neither."""
    if (without := space.best(**PLAIN)) is None:
        return
    low = Precision.MXFP8 if has_native_mxfp8(space.cluster.node.gpu.capability) else Precision.FP8
    experts, dispatcher = {"precision": low}, {"ep_backend": EPBackend.DEEPEP}
    techniques: dict[str, dict[str, Any]] = {f"{low.upper()} experts": experts, "DeepEP": dispatcher}
    techniques[" with ".join(techniques)] = experts | dispatcher
    for name, fields in techniques.items():
        with_it, interval = space.best(**{**PLAIN, **fields}), Estimate(value=0.0, low=0.0, high=0.0)
        if with_it is None:
            reasons = check(Experiment.model_validate({**without.experiment.model_dump(), **fields})).reasons
            why = reasons[0] if reasons else "no layout with it fits"
        else:
            interval = gain_over(with_it, without, space.calibration)
            why = _rows_and_break_even(with_it.job, space.calibration) if fields == experts else ""
            waits = with_it.breakdown_s["host and waiting"] / with_it.step_time_s
            if why and waits > MUCH_WAITING:
                why += f"; the GPU waits {waits:.0%} of the step, mostly for the host: 8 bits do not shorten that"
        yield TechniqueGain(name=name, with_it=with_it, without=without, interval=interval, why=why)


def _worth(space: Space, best: Projection) -> list[Worth]:
    """What single settings of the best layout are worth, the most valuable first; each other value has its own."""
    x, given = best.experiment, space.experiment
    layout = [field for field in VARIED if field not in ("dp_shard", "dp_replicate")]
    others = [(field, getattr(given, field)) for field in layout if getattr(given, field) != getattr(x, field)]
    native = has_native_mxfp8(space.cluster.node.gpu.capability)
    unknown = "fp8" if native else "mxfp8"  # no rate of it was ever measured there
    others += [(name, value) for name, tried in TRIED.items() for value in tried if value != unknown]
    worth = []
    for field, other in others:
        value = getattr(x, field)
        changed = None if value == other else space.best(**{field: other})
        # What means nothing beside the other settings, as the weight gradient of BF16 experts, changes nothing.
        if changed and changed.tps != best.tps:
            rests_on = tuple(dict.fromkeys((*best.rests_on, *changed.rests_on)))
            worth.append(
                Worth(field=field, value=value, other=other, tps=best.tps, other_tps=changed.tps, rests_on=rests_on)
            )
    return sorted(worth, key=lambda one: -abs(one.percent))


def _rows_and_break_even(job: Job, calibration: Calibration) -> str:
    """Rows that the experts of a GPU multiply at a time, beside those from which on 8 bits save time in a layer."""

    def saves(tokens: float) -> bool:
        low, bf16 = (
            expert_s(replace(job, precision=precision, work=replace(work, tokens=round(tokens))), calibration)
            for precision, work in (
                (job.precision, job.work),
                (Precision.BF16, replace(job.work, one_pass_experts=False, scaled_products=False, pad_multiple=1)),
            )
        )
        return low < bf16

    tokens, rows_of_token = job.work.tokens, job.work.received(job.shape) / job.work.tokens
    least, most = 2.0**8, 2.0**22
    if not saves(most):
        even = "8 bits save no time at any number of rows on this GPU"
    else:
        while most / least > BREAK_EVEN_STEP:
            middle = math.sqrt(least * most)  # of their logarithms: rows span four powers of ten
            least, most = (least, middle) if saves(middle) else (middle, most)
        even = f"break-even is {most * rows_of_token:,.0f}"
    return f"your experts multiply M = {tokens * rows_of_token:,.0f} rows at a time on each GPU; {even}"


def better_layout(given: Projection, calibration: Calibration = CALIBRATION) -> Projection | None:
    """A layout that the model prices higher than the one given, with its settings and batch; None if there is none.

    A quick look: CP, replicas, schedule and checkpointing stay, and so do the sequences of a step.
    """
    x = given.experiment
    fixed = ("cp", "dp_replicate", "activation_checkpoint", *(("pp_schedule",) if x.pp > 1 else ()))
    if x.world_size > QUICK_GPUS:
        return None
    best = Space(x, given.cluster, fixed=fixed, calibration=calibration).best()
    return best if best and best.tps > BETTER * given.tps else None


def better_text(better: Mapping[str, Projection | None], given: Mapping[str, Projection], file: str) -> str:
    """Better layouts beside those that were projected, by arm, and what the gains over the first arm then are.

    Better layouts are those of :func:`better_layout`; ``file`` is named in the command that lists more.
    """
    if not any(better.values()):
        return ""
    best = {arm: better[arm] or given[arm] for arm in given}
    first, *others = best
    lines = ["this is not the best layout for this model on this cluster; each arm at a better one:"]
    for arm, one in best.items():
        gain = ""
        if arm in others:
            gains = [100 * (side[arm].tps / side[first].tps - 1) for side in (best, given)]
            gain = f", {gains[0]:+.1f} % over the first instead of {gains[1]:+.1f} %"
        change = f" ({100 * (one.tps / given[arm].tps - 1):+.1f} %)"
        name = f"{arm}: " if others else ""
        lines.append(f"{name}{one.tps:,.0f} tokens/s/GPU{change}{gain}: {layout_words(one.experiment)}")
        lines[-1] += _resting(one.rests_on)
    lines.append(f"more layouts, and the settings: moelab plan {file} --search")
    return "\n".join(["", *rows("", lines)])


def search_text(result: SearchResult) -> str:
    """The layouts of a search as a table, with the order that it is in."""
    shown = result.candidates or result.nearest
    counts = f"{result.examined:,} layouts checked, {result.legal:,} legal"
    if not shown:
        return counts
    lines = _table(shown)
    if result.candidates:
        counts += f"; {result.too_large:,} that rank higher do not fit."
        why = "This hardware has no figures to predict speed from: name a profile, such as hardware=b200_x256."
        return "\n".join([*lines, "", counts, *rows("", [f"Order: {', '.join(ORDER)}. {why}"])])
    return "\n".join([f"{counts}, and none fits. The closest:", *lines])


def _table(candidates: Sequence[Candidate]) -> list[str]:
    """Layouts as aligned lines, with their speeds where these were projected."""
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
            "free GiB": "?" if one.headroom_gib is None else f"{one.headroom_gib:.1f}",
        }
        if one.projection:
            cells["tokens/s/GPU"] = f"{one.projection.tps:,.0f}" + "*" * bool(one.projection.rests_on)
        table.append(cells)
    return aligned([list(table[0]), *([str(cell) for cell in cells.values()] for cells in table)])


def answer_lines(advice: Recommendation, name: str = "") -> list[str]:
    """The answer to *which layout, does it fit, how fast, and is a technique worth it*, one sentence a line.

    ``name`` is the model's, where the experiment's own would be a list of dimensions.
    """
    x = advice.experiment
    sequences = (advice.best.experiment if advice.best else x).global_batch
    model = (
        f"{name or x.model_label}: {parameters_text(x)}; "
        f"{x.world_size} GPUs ({x.nodes} × {x.gpus_per_node}) of {advice.cluster.name}, arm {x.arm}, "
        f"{sequences:,} sequences of {x.seq_len:,} tokens ({tokens_text(sequences * x.seq_len)}) a step"
    )
    if not advice.best:
        if not advice.result.legal:
            return ["no layout is legal", model, *check(x).reasons]
        if not advice.result.nearest:
            why = f"EP groups begin or end inside a node, or a micro-batch exceeds {MOST_TOKENS_AT_ONCE:,} tokens"
            return [f"legal · no layout can be projected: {why}", model]
        over = -(advice.result.nearest[0].headroom_gib or 0.0)
        return [f"legal · no layout fits: the closest is {over:.1f} GiB short on its fullest GPU", model]
    lines = [
        f"legal · fits ({advice.ranked[0].headroom_gib:.1f} GiB free) · {speed_text(advice.best)}",
        model,
        f"best layout: {layout_words(advice.best.experiment)}{_resting(advice.best.rests_on)}",
    ]
    seen = next((one.projection for one in advice.ranked if one.projection and not one.projection.rests_on), None)
    if advice.best.rests_on and seen:
        lines.append(f"best of what was seen: {layout_words(seen.experiment)}: {speed_text(seen)}")
    if advice.own_tps is not None and advice.own_tps < advice.best.tps:
        times = advice.best.tps / advice.own_tps
        faster = f"the best is {100 * (times - 1):.1f} % faster" if times < 2 else f"the best is {times:.1f} × as fast"
        lines.append(f"as given: {layout_words(x)}: {advice.own_tps:,.0f} tokens/s per GPU; {faster}")
    return [*lines, *(gain_text(gain, said=advice.best.rests_on) for gain in advice.gains)]


def gain_text(gain: TechniqueGain, *, said: Sequence[str] = ()) -> str:
    """A gain in a sentence, with what either side's best layout is and what it rests on, unless that was ``said``."""
    if gain.with_it is None:
        return f"{gain.name}: {gain.why}"
    text = f"{gain.name}: {gain.percent_text}, "
    text += f"{gain.with_it.tps:,.0f} instead of {gain.without.tps:,.0f} tokens/s per GPU, each at its best layout: "
    if chosen_fields(gain.with_it.experiment) == chosen_fields(gain.without.experiment):
        text += "the same for both"
    else:
        text += f"{layout_words(gain.with_it.experiment)}; without it {layout_words(gain.without.experiment)}"
    return text + (f"; {gain.why}" if gain.why else "") + _resting(gain.rests_on, said)


def _resting(reasons: Sequence[str], said: Sequence[str] = ()) -> str:
    """What a figure rests on, in full the first time."""
    if not reasons:
        return ""
    return " (extrapolated *)" if reasons[0] in said else f" ({extrapolated(reasons[0])})"


def recommendation_text(advice: Recommendation, name: str = "") -> str:
    """The answer, the layouts as a table, the best first, and what settings of the best are worth."""
    lines = rows("", answer_lines(advice, name))
    if not advice.ranked:
        return "\n".join([*lines, "", search_text(advice.result)])
    counts = (
        f"{advice.result.examined:,} layouts checked, {advice.result.legal:,} legal; {advice.considered:,} projected"
    )
    counts += f", of which a first estimate ranked the best number {advice.place:,}"
    if advice.result.left_out:
        counts += f"; over all checkpointings it found {advice.result.left_out:,} more too slow"
    best = advice.best
    assert best is not None
    label = "Speeds are derived" + (f"; * {extrapolated(best.rests_on[0])}" if best.rests_on else "")
    lines += ["", *_table(advice.ranked), ""]
    lines += [*rows("", [f"{counts}.", f"Order: {ORDER_BY_SPEED}.", f"{label}."]), *best.notes]
    lines += ["", "other settings, each with its own best layout:"] if advice.worth else []
    for one in advice.worth:
        value, other = (getattr(setting, "value", setting) for setting in (one.value, one.other))
        change = 100 * (one.other_tps / one.tps - 1)
        lines.append(
            f"  {one.field} {other} instead of {value}: {change:+.1f} %{_resting(one.rests_on, best.rests_on)}"
        )
    return "\n".join(lines)
