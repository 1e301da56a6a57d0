"""What the functions of :mod:`moelab.door` answer.

An answer holds what the room behind it made: a plan, a projection, a report. It prints as the command prints, shows
itself in a notebook, and has ``to_json()``, a pandas ``frame()`` and figures. Nothing is computed here, and what draws
is imported when it is needed, so that a plan in a terminal loads neither plotly nor torch.
"""

from __future__ import annotations

import functools
import html
import importlib
import json
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TextIO, TypeVar

from moelab.errors import BadInput, Refused
from moelab.privacy import each_text, one_line, without_secrets

if TYPE_CHECKING:
    import subprocess

    import pandas as pd
    import plotly.graph_objects as go

    from moelab.experiment import Experiment
    from moelab.experiment_file import Study
    from moelab.judge.report import Report
    from moelab.launch.submit import Submission
    from moelab.layout.mesh import Layout
    from moelab.model.hugging_face import HuggingFaceModel
    from moelab.planning.advice import Recommendation
    from moelab.planning.plan import Plan
    from moelab.planning.project import Projection
    from moelab.planning.trust import Estimate
    from moelab.runs.collect import Collected
    from moelab.runs.directory import Discovery, RunDir
    from moelab.runs.status import Status
    from moelab.traces.against import Comparison
    from moelab.traces.explanation import Explanation
    from moelab.viz.table import TableView


class _OnFirstUse:
    """A module that is loaded when something of it is used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)


pages: Any = _OnFirstUse("moelab.viz.report")
planning: Any = _OnFirstUse("moelab.planning.plan")
projecting: Any = _OnFirstUse("moelab.planning.project")
viz: Any = _OnFirstUse("moelab.viz")
if not TYPE_CHECKING:
    pd = _OnFirstUse("pandas")
T = TypeVar("T")
Json = dict[str, Any]
HEADINGS = {
    "total_gib": "needs (GiB)",
    "capacity_gib": "of (GiB)",
    "tps": "tokens/s per GPU",
    "step_time_s": "seconds of a step",
    "mfu": "MFU",
    "label": "how it is known",
    "ms": "time (ms)",
    "share": "share (%)",
    "predicted_ms": "predicted (ms)",
    "remedy": "what to do",
}
"""Columns of ``frame()`` in words."""
DECIMALS = {"needs (GiB)": 1, "of (GiB)": 1, "tokens/s per GPU": 0, "low": 0, "high": 0, "MFU": 3, "time (ms)": 1}
DECIMALS |= {"predicted (ms)": 1, "share (%)": 1, "over the first (%)": 1, "loss": 4, "tokens/s per rank": 0}


@dataclass(frozen=True, kw_only=True, repr=False)
class Answer:
    """A text, JSON and a view for a notebook."""

    asides: tuple[str, ...] = ()  # that a command says on stderr

    @property
    def exit_code(self) -> int:
        """What the command exits with: 0 done, 1 failed, 3 refused."""
        return 0

    def _text(self) -> str:
        raise NotImplementedError

    def _json(self) -> Json:
        raise NotImplementedError

    def frame(self) -> pd.DataFrame:
        """The answer as a pandas table."""
        raise NotImplementedError

    def _view(self) -> Iterator[str | TableView]:
        """What a notebook shows above the text, which it folds."""
        yield _table(self.frame())

    def check(self) -> Self:
        """This answer, where the command would exit with 0.

        Raises:
            Refused: with the answer's text, where it would not.
        """
        if self.exit_code:
            raise Refused(str(self))
        return self

    def __str__(self) -> str:
        """What the command prints."""
        return without_secrets(self._text())

    def __repr__(self) -> str:
        return str(self)

    def to_json(self) -> Json:
        """What the command prints with ``--json``."""
        cleaned = functools.cache(without_secrets)  # of thousands of runs most words are the same
        content: Json = each_text(cleaned, self._json())
        return content

    def write_json(self, stream: TextIO) -> None:
        """Write :meth:`to_json` to a stream."""
        print(json.dumps(self.to_json(), indent=1, allow_nan=False), file=stream)

    def _repr_html_(self) -> str:
        text, parts = str(self), (one for one in (*self.asides, *self._view()) if one)
        shown = [
            f"<p>{html.escape(without_secrets(one))}</p>" if isinstance(one, str) else one._repr_html_()
            for one in parts
        ]
        # Of what failed the reader needs every word.
        folded = "" if self.exit_code else viz.Folded(summary="In full", text=text)._repr_html_()
        return f"<div class='moelab'>{''.join(shown)}{folded or f'<pre>{html.escape(text)}</pre>'}</div>"


def _table(rows: Iterable[Mapping[str, Any]] | pd.DataFrame, summary: str = "") -> TableView:
    frame = rows if isinstance(rows, pd.DataFrame) else pd.DataFrame(list(rows), dtype=object)
    shown = frame.dropna(axis=1, how="all").rename(columns=HEADINGS)
    table: TableView = viz.as_table(shown, summary, decimals=DECIMALS)
    return table


def of_arm(by_arm: Mapping[str, T], arm: str | None) -> T:
    """The value of an arm, by its name or a beginning that only one has; of the first if none is named.

    Raises:
        BadInput: if there is no such arm.
    """
    if arm is None:
        return next(iter(by_arm.values()))
    named = [name for name in by_arm if name == arm] or [name for name in by_arm if name.startswith(arm)]
    if len(named) != 1:
        raise BadInput(f"--arm {arm!r} names {len(named)} arms of the study, not one; its arms: {', '.join(by_arm)}")
    return by_arm[named[0]]


@dataclass(frozen=True, kw_only=True, repr=False)
class Plain(Answer):
    """An answer whose text and JSON are at hand."""

    text: str
    content: Json

    def _text(self) -> str:
        return self.text

    def _json(self) -> Json:
        return self.content


# plan, project, search


@dataclass(frozen=True, kw_only=True, repr=False)
class Planned(Answer):
    """The plans of arms."""

    plans: tuple[Plan, ...]
    model: HuggingFaceModel | None = None
    config: Mapping[str, Any] | None = None  # of TorchTitan
    verified: Mapping[str, Any] | None = None  # what TorchTitan built

    @property
    def legal(self) -> bool:
        """Whether every arm's layout is legal."""
        return all(one.verdict.legal for one in self.plans)

    @property
    def fits(self) -> bool | None:
        """Whether every arm fits into memory; None where that is not known."""
        each = [one.fits for one in self.plans]
        return False if False in each else None if None in each else True

    @property
    def exit_code(self) -> int:
        """3 if an arm is illegal."""
        return 0 if self.legal else 3

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why arms are illegal, each reason once."""
        return tuple(dict.fromkeys(reason for one in self.plans for reason in one.verdict.reasons))

    @property
    def layout(self) -> Layout:
        """The degrees of the first arm and what follows from them.

        Raises:
            Refused: if it is illegal.
        """
        return self._legal(None)[1]

    def _legal(self, arm: str | None) -> tuple[Plan, Layout]:
        one = of_arm({one.experiment.arm: one for one in self.plans}, arm)
        if one.verdict.layout is None:
            raise Refused("\n- ".join([f"{one.experiment.arm} is illegal:", *one.verdict.reasons]))
        return one, one.verdict.layout

    def _text(self) -> str:
        if len(self.plans) > 1:
            return str(planning.study_text(self.plans))
        texts = [planning.plan_text(self.plans[0])]
        texts += [planning.model_text(self.model)] if self.model else []
        texts += [planning.titan_text(self.config)] if self.config else []
        texts += [planning.verified_text(self.verified)] if self.verified else []
        return "\n\n".join(texts)

    def _json(self) -> Json:
        if len(self.plans) > 1:
            return {"plans": [{"arm": one.experiment.arm, **one.to_json()} for one in self.plans]}
        more = {"from_hf": self.model.to_json() if self.model else None, "titan_config": self.config}
        more["verify"] = self.verified
        return self.plans[0].to_json() | {name: dict(one) for name, one in more.items() if one}

    def frame(self) -> pd.DataFrame:
        """A row for each arm: whether it is legal and fits, its memory in GiB, its layout."""
        of_plan = ("legal", "fits", "total_gib", "capacity_gib")
        of_layout = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "global_batch", "tokens_per_step")
        rows = []
        for one in self.plans:
            content = one.to_json()
            layout = {name: content["layout"].get(name) for name in of_layout}
            rows.append({"arm": one.experiment.arm, **{name: content[name] for name in of_plan}, **layout})
        return pd.DataFrame(rows)

    def _view(self) -> Iterator[str | TableView]:
        yield self._text().partition("\n")[0] if len(self.plans) == 1 else f"{len(self.plans)} arms"
        yield from super()._view()

    def memory_figure(self, arm: str | None = None) -> go.Figure:
        """Memory of each pipeline rank of an arm, by part, against what the GPU has.

        Args:
            arm: the first, if none is named; as in the other figures.

        Raises:
            BadInput: if there is no such arm.
            Refused: if it is illegal; as of the other figures.
        """
        from moelab.hardware import gpu_of

        one, layout = self._legal(arm)
        return viz.memory_bars(one.memory, layout, gpu_of(one.experiment.hardware))

    def mesh_figure(self, rank: int = 0, *, arm: str | None = None) -> go.Figure:
        """Who talks to whom: the groups of ranks that a global rank belongs to."""
        from moelab.layout.mesh import nvlink_ranks

        one, layout = self._legal(arm)
        joined, per_node = nvlink_ranks(one.experiment), one.experiment.gpus_per_node
        return viz.mesh_map(layout, gpus_per_node=per_node, nvlink_ranks=joined, rank=rank)

    def schedule_figure(self, arm: str | None = None) -> go.Figure:
        """What each pipeline rank does when, and how long it waits."""
        one, layout = self._legal(arm)
        return viz.pipeline_schedule(layout, one.experiment.pp_schedule)


@dataclass(frozen=True, kw_only=True, repr=False)
class Projected(Answer):
    """Predicted steps of arms."""

    arms: Mapping[str, Projection]
    refused: Mapping[str, str]  # arms that cannot be projected, with the reason
    name: str  # in a command that finds other layouts

    @property
    def _projected(self) -> Mapping[str, Projection]:
        if not self.arms:
            raise Refused("\n".join(self._refusals()))
        return self.arms

    def _refusals(self) -> list[str]:
        return [f"{arm} is not projected: {why}" for arm, why in self.refused.items()]

    @property
    def _first(self) -> Projection:
        return next(iter(self._projected.values()))

    @property
    def exit_code(self) -> int:
        """3 if no arm can be projected."""
        return 0 if self.arms else 3

    @property
    def tps(self) -> float:
        """Tokens per second per GPU of the first arm."""
        return self._first.tps

    @property
    def interval(self) -> tuple[float, float]:
        """Between which :attr:`tps` lies with 90 % confidence."""
        return self._first.interval

    def gain(self, arm: str | None = None) -> Estimate:
        """Speed of an arm over the first one's, a ratio with its interval; of the last arm if none is named."""
        gain: Estimate = projecting.gain_over(of_arm(self._projected, arm or list(self.arms)[-1]), self._first)
        return gain

    def _text(self) -> str:
        alone = len(self.arms) == 1 and not self.refused
        text = projecting.projection_text(self._first) if alone else projecting.arms_text(self.arms, self.refused)
        return f"{text}\nother layouts: moelab plan {self.name} --search" if self.arms else str(text)

    def _json(self) -> Json:
        each = {arm: one.to_json() for arm, one in self.arms.items()}
        if len(each) == 1 and not self.refused:
            return next(iter(each.values()))
        return {"arms": each, "refused": dict(self.refused)}

    def frame(self) -> pd.DataFrame:
        """A row for each arm: tokens/s per GPU with its interval, gain over the first arm, seconds of a step."""
        return pd.DataFrame(
            {
                "arm": arm,
                "tps": one.tps,
                "low": one.interval[0],
                "high": one.interval[1],
                "over the first (%)": 100 * (one.tps / self.tps - 1),
                "step_time_s": one.step_time_s,
                "mfu": one.mfu["computed"],
                "label": one.label,
            }
            for arm, one in self.arms.items()
        )

    def _view(self) -> Iterator[str | TableView]:
        yield from super()._view()
        yield from dict.fromkeys(words for one in self.arms.values() for words in projecting.remarks(one))
        yield from self._refusals()

    def _words(self) -> str:
        first = self._first
        return f"{first.experiment.model_label} on {first.job.gpus} GPUs of {first.cluster.name}."

    def breakdown_figure(self, arm: str | None = None) -> go.Figure:
        """Where the time of a step goes: of all arms beside each other, or of one arm part by part."""
        if arm is None and len(self.arms) > 1:
            return viz.arm_breakdowns({name: one.breakdown_s for name, one in self.arms.items()}, words=self._words())
        one = of_arm(self._projected, arm)
        return viz.step_breakdown(one.breakdown_s, words=f"{one.experiment.arm}: {self._words()}")

    def speed_figure(self, measured: Mapping[str, float] | None = None) -> go.Figure:
        """Tokens/s per GPU of each arm with its interval, beside what was measured by arm where that is given."""
        from moelab.planning.trust import Estimate

        each = {
            arm: Estimate(value=one.tps, low=one.interval[0], high=one.interval[1]) for arm, one in self.arms.items()
        }
        return viz.arms_beside_projection(measured or {}, each, known_words="measured here", words=self._words())

    def cost_table(self, *, tokens: float, price_per_gpu_hour: float, watts_per_gpu: float) -> TableView:
        """Speed and gain of each arm, and what a training on so many tokens takes without restarts and failures."""
        spent = {"price_per_gpu_hour": price_per_gpu_hour, "watts_per_gpu": watts_per_gpu}
        costs = {arm: projecting.cost(one, tokens=tokens, **spent) for arm, one in self.arms.items()}
        words = f"{self._words()[:-1]}; {tokens / 1e12:g} T tokens at {price_per_gpu_hour:g} USD for a GPU-hour and "
        words += f"{watts_per_gpu:,.0f} W for a GPU, without restarts and failures (derived)"
        gains = {arm: self.gain(arm) for arm in list(self.arms)[1:]}
        table: TableView = viz.arm_table(self.arms, gains, costs, words)
        return table


@dataclass(frozen=True, kw_only=True, repr=False)
class Found(Answer):
    """The best layouts."""

    advice: Recommendation
    name: str = ""  # of a model of Hugging Face

    @property
    def layouts(self) -> tuple[Experiment, ...]:
        """The experiment in each layout, the best first; empty where none fits."""
        return tuple(one.experiment for one in self.advice.ranked)

    @property
    def best(self) -> Experiment:
        """The experiment in its best layout, to be planned, projected or run.

        Raises:
            BadInput: if no layout is legal and fits.
        """
        if not self.layouts:
            raise BadInput(f"no layout is legal and fits:\n{self}")
        return self.layouts[0]

    @property
    def exit_code(self) -> int:
        """3 if no layout is legal and fits."""
        return 0 if self.layouts else 3

    def _text(self) -> str:
        from moelab.planning.advice import recommendation_text

        return recommendation_text(self.advice, self.name)

    def _json(self) -> Json:
        return self.advice.to_json(self.name)

    def frame(self) -> pd.DataFrame:
        """A row for each layout, the best first: its fields, and its speed where that is predicted."""
        content = self._json()
        return pd.DataFrame({**one.pop("set"), **one} for one in (content["candidates"] or content["nearest"]))

    def _view(self) -> Iterator[str | TableView]:
        from moelab.planning.advice import answer_lines

        yield from answer_lines(self.advice, self.name)[: -len(self.advice.gains) or None]
        if self.advice.ranked:
            yield viz.technique_gains(self.advice)
            yield viz.best_layouts(self.advice)


# explain


@dataclass(frozen=True, kw_only=True, repr=False)
class Explained(Answer):
    """Where the time of traced steps went."""

    steps: Mapping[str, Explanation]  # by the names that figures show
    compared: Mapping[str, Comparison] = field(default_factory=dict)  # with the prediction
    fitted: Mapping[str, Any] | None = None  # constants, and the file that they were saved to
    not_compared: str = ""  # why there is no prediction, where the run has one
    replayed: bool = False  # from a file that comes with moelab

    @property
    def step(self) -> Explanation:
        """The first step."""
        return next(iter(self.steps.values()))

    def _text(self) -> str:
        from moelab.traces.against import comparison_text
        from moelab.traces.explanation import explanation_text

        texts = []
        for name, one in self.steps.items():
            texts.append(explanation_text(one))
            texts += [comparison_text(self.compared[name])] if name in self.compared else []
        texts += [f"note: {self.not_compared}"] if self.not_compared else []
        if self.fitted:
            file, names = self.fitted["file"], ", ".join(self.fitted["constants"])
            texts.append(f"fitted {names}; use them with --calibration {self.fitted['name']} ({file})")
        return "\n\n".join(texts)

    def _json(self) -> Json:
        each = {
            name: {**one.to_json(), "predicted_ms": {}}
            | (self.compared[name].to_json() if name in self.compared else {})
            for name, one in self.steps.items()
        }
        if len(each) > 1:
            return {"steps": each}
        content = next(iter(each.values()))
        content |= {"notes": [*self.step.notes, self.not_compared]} if self.not_compared else {}
        if self.fitted:
            content["fit"] = {name: self.fitted[name] for name in ("file", "constants")}
        return content

    def frame(self) -> pd.DataFrame:
        """A row for each part of the span: milliseconds, share, and what was predicted of it."""
        rows = []
        for name, one in self.steps.items():
            predicted = {row.part: row.predicted_ms for row in self.compared[name].rows} if self.compared else {}
            rows += [
                {"step": name, "part": part, "ms": ms, "share": ms / one.span_ms, "predicted_ms": predicted.get(part)}
                for part, ms in sorted(one.parts_ms.items(), key=lambda item: -item[1])
            ]
        unused = {"step": len(self.steps) == 1, "predicted_ms": not self.compared}
        return pd.DataFrame(rows).drop(columns=[name for name, drop in unused.items() if drop])

    def _view(self) -> Iterator[str | TableView]:
        yield _table(viz.answer_table(self.steps), "what to look at first" + ", replayed" * self.replayed)
        if len(self.steps) == 1:
            yield _table(self.frame().assign(share=lambda frame: 100 * frame["share"]))
            yield from (*self.step.notes, self.not_compared)
        alone = len(self.compared) == 1
        yield from (one.sentence if alone else f"{name}: {one.sentence}" for name, one in self.compared.items())

    def step_figure(self) -> go.Figure:
        """What each step is made of."""
        return viz.step_bars(self.steps, replayed=self.replayed)

    def communication_table(self) -> TableView:
        """Communication by group, without barriers of tracing: what compute does not hide, and what is waiting."""
        rows = [
            {
                "step": name,
                "group": one.group,
                "ms": one.ms,
                "exposed (ms)": one.exposed_ms,
                "waiting for other ranks (ms)": one.waiting_ms,
            }
            for name, step in self.steps.items()
            for one in step.step_communication
        ]
        return _table(pd.DataFrame(rows).round(1), "communication of a step")

    def idle_table(self) -> TableView:
        """The longest idle times of each step by their cause and by what the host did, without barriers of tracing."""
        rows = [
            {"step": name, "cause": gap.cause, "the host": gap.where, "gaps": gap.count, "idle (ms)": gap.idle_ms}
            for name, step in self.steps.items()
            for gap in step.gaps[:5]
        ]
        return _table(pd.DataFrame(rows).round(1), "why the GPU is idle, the longest first")

    def timeline_figure(self, layer: int | None = None, phase: str | None = None) -> go.Figure:
        """Kernels of the first step over time in lanes.

        Args:
            layer: whose time is shown; the whole step if it is not given.
            phase: ``forward``, ``recompute`` or ``backward`` of it.

        Raises:
            BadInput: if the trace does not tell layers, or has no such layer or pass.
        """
        return viz.timeline(self.step, layer=layer, phase=phase, replayed=self.replayed)

    def prediction_figure(self) -> go.Figure:
        """Each part of the first step, measured and predicted.

        Raises:
            BadInput: if there is no prediction.
        """
        if not self.compared:
            raise BadInput(f"no prediction of this step: {self.not_compared or 'name what ran with against'}")
        return viz.beside_predicted(next(iter(self.compared.values())), replayed=self.replayed)


# run, submit, status, collect


@dataclass(frozen=True, kw_only=True, repr=False)
class States(Answer):
    """Where the runs of a folder are."""

    path: Path
    states: tuple[tuple[RunDir, Status], ...]
    found: Discovery | None  # None where there is no such folder yet
    launcher: subprocess.Popen[bytes] | None = None  # that trains them in the background

    @property
    def going(self) -> bool:
        """Whether a run waits or trains."""
        return any(status.state.value in ("submitted", "running") for _, status in self.states)

    @property
    def traced(self) -> tuple[Path, ...]:
        """Runs that left a trace, to be explained."""
        from moelab.runs.directory import TRACES_FOLDER

        return tuple(run.path for run, _ in self.states if (run.path / TRACES_FOLDER).is_dir())

    def _lines(self) -> list[str]:
        return self.found.lines if self.found else []

    def _text(self) -> str:
        lines = [*(f"{run.name}: {status.in_words()}" for run, status in self.states), *self._lines()]
        if self.going:
            lines.append(f"to keep watching: moelab status {shlex.quote(one_line(str(self.path)))} --follow")
        return "\n".join(lines) or f"no runs at {self.path}"

    def _json(self) -> Json:
        rows = [
            {"run": run.name, "status": status.state.value, "reason": status.reason, "job_id": status.job_id}
            for run, status in self.states
        ]
        return {"runs": rows, **(self.found.to_json() if self.found else {})}

    def frame(self) -> pd.DataFrame:
        """A row for each run: its name, state, reason and job."""
        return pd.DataFrame(self._json()["runs"], columns=["run", "status", "reason", "job_id"], dtype=object)

    def _view(self) -> Iterator[str | TableView]:
        yield _table(self.frame()) if self.states else f"no runs at {self.path}"
        yield from self._lines()


@dataclass(frozen=True, kw_only=True, repr=False)
class Trained(States):
    """What came of a study that was trained here; :attr:`states` are of the newest run of each experiment."""

    study: Study
    trained: int  # how many were trained now

    @property
    def complete(self) -> int:
        """How many of the study's experiments have a completed run."""
        return sum(status.state.value == "completed" for _, status in self.states)

    @property
    def exit_code(self) -> int:
        """1 if an experiment has no completed run."""
        return 0 if self.complete == len(self.study.experiments) else 1

    @property
    def paths(self) -> tuple[Path, ...]:
        """The newest run of each experiment that has one, in the study's order."""
        return tuple(run.path for run, _ in self.states)

    @property
    def _summary(self) -> str:
        total = len(self.study.experiments)
        return f"{self.study.name}: {self.complete} of {total} complete, {self.trained} trained now"

    def _text(self) -> str:
        lines = [f"{one_line(str(run.path))}: {status.in_words()}" for run, status in self.states]
        return "\n".join([*lines, self._summary])

    def _json(self) -> Json:
        return {"study": self.study.name, "trained": self.trained, **super()._json()}

    def _view(self) -> Iterator[str | TableView]:
        yield self._summary
        yield from super()._view()


@dataclass(frozen=True, kw_only=True, repr=False)
class Submitted(Answer):
    """What was given to Slurm, or would be."""

    path: Path  # of the study's runs
    done: Submission
    dry_run: bool
    complete: int  # how many of the study's experiments had a completed run before

    @property
    def script(self) -> str:
        """The exact script, or several one after the other."""
        return "\n".join(self.done.scripts).rstrip("\n")

    def _text(self) -> str:
        return self.script if self.dry_run else self.done.as_text()

    def _json(self) -> Json:
        return self.done.to_json()

    def __str__(self) -> str:
        """What the command prints; a script is run as it stands, and a profile with a key in it is refused."""
        return self.script if self.dry_run else super().__str__()

    def to_json(self) -> Json:
        """What the command prints with ``--json``."""
        return self._json() if self.dry_run else super().to_json()

    def frame(self) -> pd.DataFrame:
        """A row for each run: what was done with it, and its job."""
        return pd.DataFrame(self._json()["runs"], columns=["run", "path", "did", "job_id"], dtype=object)

    def _view(self) -> Iterator[str | TableView]:
        yield "nothing submitted: dry_run is True" if self.dry_run else self.done.as_text().splitlines()[-1]
        if not self.done.scripts:
            yield "nothing to submit: every run of the study is complete or with Slurm"
        if not self.dry_run:
            yield _table(self.frame().drop(columns="path"))


@dataclass(frozen=True, kw_only=True, repr=False)
class Collection(Answer):
    """The metrics of runs."""

    runs: tuple[Collected, ...]
    found: Discovery

    def _text(self) -> str:
        return "\n".join([*(run.summary for run in self.runs), *self.found.lines])

    def _json(self) -> Json:
        return {"runs": [run.to_json() for run in self.runs], **self.found.to_json()}

    def write_json(self, stream: TextIO) -> None:
        """Write :meth:`to_json` to a stream one run at a time: all rows are hundreds of MB."""
        print('{"runs": [', end="\n ", file=stream)
        for number, run in enumerate(self.runs):
            print(",\n " * bool(number) + run.json_text(), end="", file=stream)
        # The list of runs is closed by hand, so the rest of the object follows without its opening brace.
        others = each_text(without_secrets, self.found.to_json())
        print(f"\n],{json.dumps(others, indent=1)[1:]}", file=stream)

    def frame(self) -> pd.DataFrame:
        """The metrics table: a row for each logged step of each run."""
        from moelab.runs.table import joined_rows

        return joined_rows(self.runs)

    def _view(self) -> Iterator[str | TableView]:
        from moelab.runs.collect import WARMUP_STEPS
        from moelab.runs.table import throughput_rows

        yield _table(
            {
                "run": run.run,
                "state": run.status.state.value,
                "step": run.last_step,
                "launches": run.segments,
                "loss": next(iter(run.rows["loss"].dropna()[::-1]), None),
                "tokens/s per rank": throughput_rows(run.rows, warmup_steps=WARMUP_STEPS)["tps"].median(),
                "reason": run.status.reason,
            }
            for run in self.runs
        )
        yield f"tokens/s: medians after {WARMUP_STEPS} steps"
        yield from self.found.lines


# report, doctor


@dataclass(frozen=True, kw_only=True, repr=False)
class Reported(Answer):
    """What a study, or runs side by side, say."""

    judged: Report
    page: Path | None = None  # that it was written to

    @property
    def summary(self) -> Mapping[str, str]:
        """What a reader asks first, each question with its answer."""
        return self.judged.summary

    @property
    def tps(self) -> dict[str, float]:
        """Measured tokens/s per GPU by arm of a study; empty where CPUs or emulated kernels stand in."""
        measured = {} if self.judged.on_cpu else {one.arm: one.tps for one in self.judged.throughput}
        emulated = {side.name for side in self.judged.sides if side.emulated}
        return {arm: tps for arm, tps in measured.items() if arm not in emulated}

    def _text(self) -> str:
        return self.judged.as_text() + (f"\nreport: {self.page}" if self.page else "")

    def _json(self) -> Json:
        return {**self.judged.to_json(), "report": str(self.page) if self.page else None}

    def save(self, path: str | Path | None = None, *, with_paths: bool = False) -> Path:
        """Write the report as one HTML file.

        Args:
            path: file to write; where the command writes it if it is not given, in the folder of a study or here.
            with_paths: keep folder, host and user names.
        """
        usual = Path("comparison.html") if self.judged.study is None else self.judged.paths[0] / "report.html"
        page = Path(path or usual)
        pages.write_study_report(self.judged, page, with_paths=with_paths)
        return page

    def frame(self) -> pd.DataFrame:
        """A row for each verdict: arm, reference, answer, difference with its interval, margin."""
        verdicts = self.judged.to_json().get("verdicts", [])
        columns = ["arm", "reference", "quantity", "answer", "difference_nats", "interval_nats", "margin_nats"]
        return pd.DataFrame(verdicts, columns=columns)

    def loss_figure(self) -> go.Figure:
        """Training loss of every arm, or of runs side by side."""
        return pages.loss_figure(self.judged)

    def verdict_figure(self) -> go.Figure:
        """The verdict on every arm: an interval and a margin a row."""
        return pages.verdicts_figure(self.judged)

    def throughput_figure(self) -> go.Figure:
        """Tokens per second of every arm with the gains that are claimed, or of runs side by side."""
        return pages.throughput_figure(self.judged)

    def figures(self) -> dict[str, go.Figure]:
        """Every figure of the report by its caption."""
        return dict(pages.report_figures(self.judged))

    def tables(self) -> list[TableView]:
        """Every table of the report."""
        return [pages.runs_table(self.judged)]

    def composition(self) -> str:
        """Whether the gains of a two-by-two, whose arms are in the order of a study's, multiply: a sentence."""
        from moelab.judge.throughput import interaction

        arms = [side.name for side in self.judged.sides]
        own = self.judged.comparable_tps
        if self.judged.on_cpu:
            return "no interaction: a CPU's tokens per second are those of an emulation and of what else it did"
        if len(arms) != 4 or not set(arms) <= own.keys():
            return "no interaction: it needs a finished run of all four arms, on machines that are alike"
        baseline, first, second, both = arms
        return interaction(own, baseline=baseline, first=first, second=second, both=both).sentence()

    def _view(self) -> Iterator[str | TableView]:
        yield _table([{"question": one, "answer": answer} for one, answer in self.summary.items()])
        yield from self.tables()


@dataclass(frozen=True, kw_only=True, repr=False)
class Examined(Answer):
    """What a machine can run, or what was found before a study goes to a cluster."""

    found: Any  # an Examination or a Preflight

    @property
    def exit_code(self) -> int:
        """1 if a check failed, 3 if the study would be refused."""
        failed = getattr(self.found, "failed", None)
        code: int = self.found.exit_code if failed is None else int(failed)
        return code

    def _text(self) -> str:
        return str(self.found.as_text())

    def _json(self) -> Json:
        return dict(self.found.to_json())

    def frame(self) -> pd.DataFrame:
        """A row for each finding: where it belongs, its name, severity, what was found and what to do."""
        content, groups = self._json(), ("findings", "deepep", "study", "here", "nodes")
        rows = [{"group": group, **one} for group in groups for one in content.get(group, ())]
        return pd.DataFrame(rows, columns=["group", "name", "severity", "found", "remedy"])

    def _view(self) -> Iterator[str | TableView]:
        words = {"ok": "ok", "note": "note", "warning": "look here", "error": "does not work"}
        titles = {"findings": "This machine", "deepep": "DeepEP and what it needs", "study": "The study"}
        titles |= {"here": "From here", "nodes": "The nodes"}
        for group, rows in self.frame().groupby("group", sort=False):
            shown = rows.drop(columns="group").assign(severity=rows["severity"].map(words))
            yield _table(shown.rename(columns={"name": "what", "severity": ""}), titles[str(group)])
        if trains := self._json().get("trains"):
            lines = [{"what": one["what"], "here": ("" if one["runs"] else "no: ") + one["found"]} for one in trains]
            yield _table(lines, "What this machine trains")
