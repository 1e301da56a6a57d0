"""What ``from moelab import …`` gives: each verb of the command line as a function that answers with an object.

A function takes a study, an experiment, the path of a YAML file or the name of a study that comes with moelab, and the
command's options as keywords. Fields of an experiment are keywords too: ``plan("nano", steps=20)``.

An answer shows itself in a notebook, prints as the command prints it, and has ``to_json()``. What draws is imported
when it is needed, so that a plan in a terminal loads neither plotly nor torch.
"""

from __future__ import annotations

import difflib
import functools
import html
import inspect
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TextIO, TypeVar

from moelab import experiment_file
from moelab.errors import BadInput, MoelabError, Refused
from moelab.experiment import Experiment
from moelab.experiment_file import Study, parse_overrides
from moelab.privacy import each_text, one_line, without_secrets

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

    from moelab.judge.report import Report
    from moelab.launch.local import StudyRun
    from moelab.launch.submit import Submission
    from moelab.model.hugging_face import HuggingFaceModel
    from moelab.planning.advice import Recommendation
    from moelab.planning.plan import Plan
    from moelab.planning.project import Projection
    from moelab.runs.collect import Collected
    from moelab.runs.directory import Discovery, RunDir
    from moelab.runs.status import Status
    from moelab.traces.against import Comparison
    from moelab.traces.explanation import Explanation
    from moelab.viz.live import LiveView
    from moelab.viz.table import Folded, TableView

P = ParamSpec("P")
R = TypeVar("R")
Source = Study | Experiment | Path | str
FIELDS = (*Experiment.model_fields, "study", "arms", "seeds")
"""What a function takes as keywords besides its own options."""
ASSUMED_SEQ_LEN = 4096
"""Of a Hugging Face model: an experiment's own default is for a laptop."""
ASSUMED_TOKENS = 65_536
"""Tokens per GPU and step, where a search is given a model alone: as in published runs on hundreds of GPUs."""
RUNS_VARIABLE = "MOELAB_RUNS"
SIDE_BY_SIDE = ("notebooks", "papermill_params")
"""Folders of a checkout, and of what ``moelab notebooks`` wrote."""


# What is given


def _refusing_unknown_names(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function refuse a keyword that it does not take with the name that was probably meant."""
    parameters = inspect.signature(function).parameters.values()
    takes_fields = any(one.kind is one.VAR_KEYWORD for one in parameters)
    options = [one.name for one in parameters if one.kind in (one.KEYWORD_ONLY, one.POSITIONAL_OR_KEYWORD)]
    known = [*options, *(FIELDS if takes_fields else ())]

    @functools.wraps(function)
    def checked(*given: P.args, **named: P.kwargs) -> R:
        for name in named:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                fields = ", and fields of an experiment" if takes_fields else ""
                hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(options)}{fields}"
                raise BadInput(f"{function.__name__} does not take {name}; {hint}")
        return function(*given, **named)

    return checked


@_refusing_unknown_names
def read_study(source: Source, /, **fields: Any) -> Study:
    """Read a study, or change fields of one.

    Args:
        source: a study, an experiment, a YAML file, or the name of a study that comes with moelab.
        fields: of every experiment, and ``seeds``, ``arms`` or ``study`` of a file.

    Raises:
        BadInput: naming the value, what is valid and what to do.

    Example:
        >>> print(read_study("nano", steps=40, seeds=[0]))
        study nano: nano, 40 steps; arms bf16_standard, mxfp8_standard; seed 0
    """
    if isinstance(source, Study):
        return experiment_file.change(source, fields)
    if isinstance(source, Experiment):
        # Only what was given: the rest is for the file's reader to fill in, as the ranks of this machine.
        given = {name: getattr(source, name) for name in source.model_fields_set}
        return experiment_file.read_study(None, {**given, **fields})
    return experiment_file.read_study(source, fields)


def runs_folder(name: str | Path = "runs") -> Path:
    """The folder of all studies.

    ``MOELAB_RUNS`` names it; else it is ``runs`` at the top of the checkout that the working folder is in, or of what
    ``moelab notebooks`` wrote, so that notebooks and the shell share it; anywhere else it is ``./runs``. Another
    ``name`` stands for a folder in the same place.
    """
    named = os.environ.get(RUNS_VARIABLE)
    if named and str(name) == "runs":
        return Path(named)
    here = Path.cwd()
    tops = [top for top in (here, *here.parents) if all((top / folder).is_dir() for folder in SIDE_BY_SIDE)]
    # Relative where it can be, as people write it.
    return Path(name) if not tops or tops[0] == here else tops[0] / name


def _in_runs(source: Source) -> Path:
    """The folder of a study's runs; of a path that is not there, the one of that name among the runs."""
    if isinstance(source, Study | Experiment):
        return runs_folder() / source.name
    path, runs = Path(source), runs_folder()
    if path.exists() or path.is_absolute():
        return path
    # `runs/nano` is said in a folder below too.
    return next((one for one in (runs / path, runs.parent / path) if one.exists()), path)


def _arms(study: Study, wanted: str | None) -> list[Experiment]:
    """The first experiment of each arm, or only of the one that is wanted."""
    first = {experiment.arm: experiment for experiment in study.first_of_arms}
    longer = [arm for arm in first if wanted is not None and arm.startswith(f"{wanted}_")]
    # A short name will do where it means one arm: bf16_standard is bf16_standard_round-robin in a study of that alone.
    if wanted not in first and len(longer) == 1:
        wanted = longer[0]
    if wanted is not None and wanted not in first:
        raise BadInput(f"--arm {wanted!r} is not in study {study.name}; its arms: {', '.join(study.arms)}")
    return [experiment for arm, experiment in first.items() if wanted in (None, arm)]


@dataclass(frozen=True, kw_only=True)
class _Chosen:
    """What to plan, project or search."""

    arms: list[Experiment]
    model: HuggingFaceModel | None  # that gave the shape
    name: str  # of the model, the file or the study, as it is given on a command line
    path: Path | None  # of a file that holds exactly these arms
    assumed: tuple[str, ...]  # what to tell the reader

    @property
    def only(self) -> Experiment:
        """The arm.

        Raises:
            BadInput: if there are several.
        """
        if len(self.arms) > 1:
            names = ", ".join(experiment.arm for experiment in self.arms)
            raise BadInput(f"{self.name} holds {len(self.arms)} arms; choose one with --arm: {names}")
        return self.arms[0]


def _chosen(
    source: Source | None, from_hf: str | None, arm: str | None, fields: Mapping[str, Any], *, searches: bool = False
) -> _Chosen:
    from moelab.model.hugging_face import read_model

    if isinstance(source, str | Path) and from_hf is None and _is_model(source):
        source, from_hf = None, str(source)
    if source is None and not from_hf:
        raise BadInput("give the FILE of an experiment or study, a model with --from-hf, or both")
    model, told = (read_model(from_hf) if from_hf else None), ""
    if model:
        fields = {**parse_overrides(model.overrides), **fields}
    if source is None:
        assumed = {key: one for key, one in _assumed(fields, searches=searches).items() if key not in fields}
        told = ", ".join(f"{key}={one}" for key, one in assumed.items())
        study = experiment_file.read_study(None, {**fields, **assumed})
    else:
        study = read_study(source, **fields)
    given = study.path or (source if isinstance(source, str | Path) else None)
    return _Chosen(
        arms=_arms(study, arm),
        model=model,
        name=str(given) if given else f"--from-hf {from_hf}" if source is None else "FILE.yaml",
        # The launch command names a file only where the file alone is this experiment.
        path=None if model or arm else study.path,
        assumed=(f"assumed, because not given: {told}",) if told else (),
    )


def _is_model(source: str | Path) -> bool:
    """Whether a source is a model of Hugging Face: its ``config.json``, a folder with one, or a published name."""
    from moelab.model.hugging_face import published_models

    path = Path(source)
    return path.is_dir() or path.name in ("config.json", "params.json") or str(source) in published_models()


def _assumed(known: Mapping[str, Any], *, searches: bool) -> dict[str, Any]:
    """What a model without an experiment takes; a search also takes the whole cluster and usual training settings."""
    from moelab.experiment import OwnHardware
    from moelab.hardware import cluster_of

    if not searches:
        return {"seq_len": ASSUMED_SEQ_LEN}
    # What is no length is for the experiment to refuse.
    seq_len = known.get("seq_len", ASSUMED_SEQ_LEN)
    local_batch = max(1, ASSUMED_TOKENS // seq_len) if isinstance(seq_len, int) and seq_len > 0 else 1
    fields = {"seq_len": ASSUMED_SEQ_LEN, "compile": "model+loss", "dataset": "c4", "local_batch": local_batch}
    if "hardware" in known:
        hardware = known["hardware"]  # a file of one's own has been read already
        cluster = cluster_of(hardware if isinstance(hardware, OwnHardware) else str(hardware))
        fields |= {"nodes": cluster.nodes, "gpus_per_node": cluster.node.gpus}
    return fields


def _constants(load: str | Path | None, experiment: Experiment) -> Any:
    """The constants for how unevenly the router loads experts, as a run measured it or as they are."""
    from moelab.planning.memory import memory_constants

    if load is None:
        return memory_constants
    from moelab.planning.memory.measured import measured_constants

    return measured_constants(_in_runs(load), experiment)


def _calibration(name: str | None) -> Any:
    from moelab.planning.time.calibration import CALIBRATION, read_calibration

    return read_calibration(name) if name else CALIBRATION


def _write(path: str | Path, experiment: Experiment) -> None:
    from moelab.files import write_whole

    write_whole(Path(path), experiment_file.write_experiment(experiment))


# What is answered


@dataclass(frozen=True, kw_only=True, repr=False)
class Answer:
    """What a function answers: a text, JSON, and a view for a notebook."""

    asides: tuple[str, ...] = ()  # that a command says on stderr

    @property
    def exit_code(self) -> int:
        """What the command exits with: 0 done, 1 failed, 3 refused."""
        return 0

    @property
    def _text(self) -> str:
        raise NotImplementedError

    @property
    def _json(self) -> dict[str, Any]:
        raise NotImplementedError

    def _parts(self) -> Iterator[str | TableView | Folded]:
        """The view's paragraphs, tables and folded texts."""
        raise NotImplementedError

    def __str__(self) -> str:
        """What the command prints."""
        return without_secrets(self._text)

    __repr__ = __str__

    def to_json(self) -> dict[str, Any]:
        """What the command prints with ``--json``."""
        cleaned = functools.cache(without_secrets)  # of thousands of runs most words are the same
        content: dict[str, Any] = each_text(cleaned, self._json)
        return content

    def write_json(self, stream: TextIO) -> None:
        """Write :meth:`to_json` to a stream."""
        print(json.dumps(self.to_json(), indent=1, allow_nan=False), file=stream)

    def _repr_html_(self) -> str:
        parts = [*self.asides, *self._parts()]
        shown = [
            f"<p>{html.escape(without_secrets(one))}</p>" if isinstance(one, str) else one._repr_html_()
            for one in parts
            if one
        ]
        return f"<div class='moelab'>{''.join(shown)}</div>"


@dataclass(frozen=True, kw_only=True, repr=False)
class Plain(Answer):
    """An answer whose text and JSON are at hand."""

    text: str
    content: dict[str, Any]

    @property
    def _text(self) -> str:
        return self.text

    @property
    def _json(self) -> dict[str, Any]:
        return self.content

    def _parts(self) -> Iterator[str | TableView | Folded]:
        yield from self.text.splitlines()


def _table(
    rows: Iterable[Mapping[str, Any]] | pd.DataFrame, summary: str = "", decimals: Mapping[str, int] | None = None
) -> TableView:
    import pandas as pd

    from moelab.viz.table import as_table

    frame = rows if isinstance(rows, pd.DataFrame) else pd.DataFrame(list(rows), dtype=object)
    return as_table(frame, summary, decimals=decimals or {})


def _folded(summary: str, text: str) -> Folded:
    from moelab.viz.table import Folded

    return Folded(summary=summary, text=text)


def _yes_no(value: bool | None) -> str:
    return {True: "yes", False: "no", None: "not known"}[value]


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
    def _text(self) -> str:
        from moelab.planning.plan import model_text, plan_text, study_text, titan_text, verified_text

        if len(self.plans) > 1:
            return study_text(self.plans)
        texts = [plan_text(self.plans[0])]
        texts += [model_text(self.model)] if self.model else []
        texts += [titan_text(self.config)] if self.config else []
        texts += [verified_text(self.verified)] if self.verified else []
        return "\n\n".join(texts)

    @property
    def _json(self) -> dict[str, Any]:
        if len(self.plans) > 1:
            return {"plans": [{"arm": one.experiment.arm, **one.to_json()} for one in self.plans]}
        content = self.plans[0].to_json()
        content |= {"from_hf": self.model.to_json()} if self.model else {}
        content |= {"titan_config": dict(self.config)} if self.config else {}
        return content | ({"verify": dict(self.verified)} if self.verified else {})

    def frame(self) -> pd.DataFrame:
        """A row for each arm: whether it is legal and fits, its memory in GiB, its layout."""
        import pandas as pd

        rows = []
        for one in self.plans:
            content = one.to_json()
            layout = {
                name: content["layout"].get(name) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
            }
            numbers = {name: content[name] for name in ("legal", "fits", "memory_gib", "total_gib", "capacity_gib")}
            batch = {name: content["layout"].get(name) for name in ("global_batch", "tokens_per_step")}
            rows.append({"arm": one.experiment.arm, **numbers, **layout, **batch})
        return pd.DataFrame(rows)

    def memory_figure(self, arm: str | None = None) -> go.Figure:
        """Memory of each pipeline rank of an arm, by part, against what the GPU has; of the first arm if none is named.

        Raises:
            BadInput: if there is no such arm, or its layout is illegal.
        """
        from moelab.hardware import gpu_of
        from moelab.viz.layout import memory_bars

        one = _of_arm({one.experiment.arm: one for one in self.plans}, arm)
        if one.memory is None or one.verdict.layout is None:
            raise BadInput(f"{one.experiment.arm} is illegal, so nothing is known of its memory")
        return memory_bars(one.memory, one.verdict.layout, gpu_of(one.experiment.hardware))

    def _parts(self) -> Iterator[str | TableView | Folded]:
        from moelab.planning.plan import layout_words

        one_arm = len(self.plans) == 1
        yield self._text.partition("\n")[0] if one_arm else f"{len(self.plans)} arms"
        frame = self.frame()
        yield _table(
            frame[["arm"]].assign(
                legal=frame["legal"].map(_yes_no),
                fits=frame["fits"].map(_yes_no),
                **{"needs (GiB)": frame["total_gib"], "of (GiB)": frame["capacity_gib"]},
                layout=[layout_words(one.experiment) for one in self.plans],
            ),
            decimals={"needs (GiB)": 1, "of (GiB)": 1},
        )
        for one in self.plans:
            prefix = "" if one_arm else f"{one.experiment.arm}: "
            yield from (f"{prefix}{reason}" for reason in one.verdict.reasons)
        yield from dict.fromkeys(note for one in self.plans for note in one.notes if "memory" in note)
        yield _folded("The plan in full", self._text)


def _of_arm(by_arm: Mapping[str, R], arm: str | None) -> R:
    """The value of an arm, of the first if none is named."""
    names = list(by_arm)
    longer = [name for name in names if arm and name.startswith(arm)]
    if arm is not None and arm not in by_arm and len(longer) != 1:
        raise BadInput(f"arm {arm!r} is not there; the arms are {', '.join(names)}")
    return by_arm[names[0] if arm is None else arm if arm in by_arm else longer[0]]


@_refusing_unknown_names
def plan(
    source: Source | None = None,
    /,
    *,
    arm: str | None = None,
    from_hf: str | None = None,
    load: str | Path | None = None,
    write: str | Path | None = None,
    config: bool = False,
    verify: bool = False,
    ranks: Sequence[int] | None = None,
    **fields: Any,
) -> Planned:
    """Check whether experiments are legal and fit into memory.

    Args:
        source: what to plan: a study, an experiment, a file, the name of a study, or a model of Hugging Face.
        arm: plan one arm of a study.
        from_hf: take the model from a ``config.json``, its folder, or by name.
        load: a run whose measured expert load is used.
        write: file for the experiment.
        config: also give the configuration that TorchTitan resolves; loads torch.
        verify: also build it with TorchTitan, without a GPU; loads torch.
        ranks: global ranks that ``verify`` builds; the first of each pipeline rank if they are not given.
        fields: of every experiment.

    Raises:
        BadInput: for an unknown or invalid value.

    Example:
        >>> plan("671B_b200_x256", arm="mxfp8_deepep").fits
        True
    """
    if ranks and not verify:
        raise BadInput("--ranks requires --verify")
    from moelab.planning import plan as planning

    chosen = _chosen(source, from_hf, arm, fields)
    if len(chosen.arms) > 1:
        if write or config or verify:
            _ = chosen.only
        plans = tuple(planning.plan(one, constants=_constants(load, one)) for one in chosen.arms)
        return Planned(plans=plans, asides=chosen.assumed)
    experiment = chosen.only
    if write:
        _write(write, experiment)
    path = Path(write) if write else chosen.path
    planned = planning.plan(experiment, path=path, constants=_constants(load, experiment))
    legal = planned.verdict.legal
    return Planned(
        plans=(planned,),
        model=chosen.model,
        config=planning.titan_config(experiment) if legal and config else None,
        verified=planning.verified(planned, ranks) if legal and verify else None,
        asides=chosen.assumed,
    )


@dataclass(frozen=True, kw_only=True, repr=False)
class Projected(Answer):
    """Predicted steps of arms."""

    arms: Mapping[str, Projection]
    refused: Mapping[str, str]  # arms that cannot be projected, with the reason
    name: str  # in a command that finds other layouts

    @property
    def tps(self) -> float:
        """Tokens per second per GPU of the first arm."""
        return next(iter(self.arms.values())).tps

    @property
    def interval(self) -> tuple[float, float]:
        """Between which :attr:`tps` lies with 90 % confidence."""
        return next(iter(self.arms.values())).interval

    @property
    def _text(self) -> str:
        from moelab.planning.project import arms_text, projection_text

        (first, *others) = self.arms.values()
        text = arms_text(self.arms, self.refused) if others or self.refused else projection_text(first)
        return f"{text}\nother layouts: moelab plan {self.name} --search"

    @property
    def _json(self) -> dict[str, Any]:
        each = {arm: one.to_json() for arm, one in self.arms.items()}
        if len(each) == 1 and not self.refused:
            return next(iter(each.values()))
        return {"arms": each, "refused": dict(self.refused)}

    def frame(self) -> pd.DataFrame:
        """A row for each arm: tokens/s per GPU with its interval, gain over the first arm, seconds of a step."""
        import pandas as pd

        rows = [
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
        ]
        return pd.DataFrame(rows)

    def breakdown_figure(self, arm: str | None = None) -> go.Figure:
        """Where the time of a step goes: of all arms beside each other, or of one arm part by part."""
        from moelab.viz.projection import arm_breakdowns, step_breakdown

        first = next(iter(self.arms.values()))
        words = f"{first.experiment.model_label} on {first.job.gpus} GPUs of {first.cluster.name}."
        if arm is None and len(self.arms) > 1:
            return arm_breakdowns({name: one.breakdown_s for name, one in self.arms.items()}, words=words)
        one = _of_arm(self.arms, arm)
        return step_breakdown(one.breakdown_s, words=f"{one.experiment.arm}: {words}")

    def _parts(self) -> Iterator[str | TableView | Folded]:
        first, *others = self.arms.values()
        low, high = first.interval
        if not others:
            yield f"{first.tps:,.0f} tokens/s per GPU ({low:,.0f} to {high:,.0f} with 90 % confidence; {first.label})"
        columns = {
            "tps": "tokens/s per GPU",
            "step_time_s": "seconds of a step",
            "mfu": "MFU",
            "label": "how it is known",
        }
        shown = self.frame().rename(columns=columns)
        rates = ("tokens/s per GPU", "low", "high")
        yield _table(shown, decimals=dict.fromkeys(rates, 0) | {"over the first (%)": 1, "MFU": 3})
        if not others:
            parts = sorted(first.breakdown_s.items(), key=lambda part: -part[1])
            rows = [{"part": name, "seconds": s, "share (%)": 100 * s / first.step_time_s} for name, s in parts if s]
            yield _table(rows, "parts of the step", {"share (%)": 1})
        from moelab.planning.project import remarks

        yield from dict.fromkeys(words for one in self.arms.values() for words in remarks(one))
        yield from (f"{arm} is not projected: {why}" for arm, why in self.refused.items())


@_refusing_unknown_names
def project(
    source: Source | None = None,
    /,
    *,
    arm: str | None = None,
    from_hf: str | None = None,
    load: str | Path | None = None,
    calibration: str | None = None,
    document_tokens: float | None = None,
    **fields: Any,
) -> Projected:
    """Predict tokens/s per GPU and where the time of a step goes.

    Args:
        source: as of :func:`plan`.
        arm: project one arm of a study.
        from_hf: as of :func:`plan`.
        load: as of :func:`plan`.
        calibration: constants that ``explain(…, fit=NAME)`` saved: a name or a path.
        document_tokens: mean length of the documents in a sequence; the dataset's if it is not given.
        fields: of every experiment.

    Raises:
        BadInput: for an unknown or invalid value, or hardware without the figures that a projection needs.
        Refused: if no arm can be projected; of several, those that cannot are named in the answer.

    Example:
        >>> project("671B_b200_x256", arm="mxfp8_deepep").frame()["arm"][0]
        'mxfp8_deepep_round-robin'
    """
    from moelab.planning import project as planning

    chosen = _chosen(source, from_hf, arm, fields)
    options = {"calibration": _calibration(calibration), "document_tokens": document_tokens}
    arms: dict[str, Projection] = {}
    refused: dict[str, str] = {}
    for one in chosen.arms:
        try:
            arms[one.arm] = planning.project(one, constants=_constants(load, one), **options)
        except Refused as error:
            if len(chosen.arms) == 1:
                raise
            refused[one.arm] = str(error)
    if not arms:
        raise Refused("\n".join(f"{arm}: {why}" for arm, why in refused.items()))
    return Projected(arms=arms, refused=refused, name=chosen.name, asides=chosen.assumed)


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

    @property
    def _text(self) -> str:
        from moelab.planning.advice import recommendation_text

        return recommendation_text(self.advice, self.name)

    @property
    def _json(self) -> dict[str, Any]:
        return self.advice.to_json(self.name)

    def frame(self) -> pd.DataFrame:
        """A row for each layout, the best first: its fields, and its speed where that is predicted."""
        import pandas as pd

        content = self._json
        rows = [{**one.pop("set"), **one} for one in (content["candidates"] or content["nearest"])]
        return pd.DataFrame(rows)

    def _parts(self) -> Iterator[str | TableView | Folded]:
        from moelab.planning.advice import answer_lines
        from moelab.viz.layout import best_layouts, technique_gains

        yield from answer_lines(self.advice, self.name)
        if self.advice.ranked:
            yield best_layouts(self.advice)
            yield technique_gains(self.advice)


@_refusing_unknown_names
def search(
    source: Source | None = None,
    /,
    *,
    arm: str | None = None,
    from_hf: str | None = None,
    gpus: int | None = None,
    limit: int = 10,
    global_batch: int | None = None,
    write: str | Path | None = None,
    **fields: Any,
) -> Found:
    """Find the best layout of a model on a cluster, its speed, and what each technique gains.

    Args:
        source: as of :func:`plan`.
        arm: search for one arm of a study.
        from_hf: as of :func:`plan`.
        gpus: how many, in nodes of the hardware.
        limit: how many layouts to list.
        global_batch: sequences of a step; the experiment's own if they are not given.
        write: file for the experiment in its best layout.
        fields: of the experiment; a layout's field that is given stays as it is.

    Raises:
        BadInput: for an unknown or invalid value.

    Example:
        >>> found = search("Qwen3-30B-A3B", gpus=16, hardware="h200_node")
        >>> found.best.world_size
        16
    """
    from moelab.planning.advice import recommend
    from moelab.planning.search import VARIED

    for name, number in {"limit": limit, "global_batch": global_batch}.items():
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
            raise BadInput(f"{name}: got {number!r}; valid: a whole number of at least 1")
    asides: tuple[str, ...] = ()
    if gpus is not None:
        of_gpus, asides = _cluster_of_gpus(gpus, fields)
        fields |= of_gpus
    chosen = _chosen(source, from_hf, arm, fields, searches=True)
    fixed = fields.keys() & {*VARIED, "activation_checkpoint"}
    advice = recommend(chosen.only, fixed=fixed, limit=limit, global_batch=global_batch)
    name = chosen.model.source if chosen.model else ""
    asides += chosen.assumed
    found = Found(advice=advice, name=name, asides=asides)
    if found.layouts and write:
        _write(write, found.best)
    return found


def _cluster_of_gpus(gpus: int, fields: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Fields for so many GPUs of the hardware, in whole nodes or a part of one, and what was assumed for them."""
    from moelab.hardware import CLUSTERS, cluster_of

    if {"nodes", "gpus_per_node"} & fields.keys():
        raise BadInput("gpus gives nodes and gpus_per_node: leave them out, or leave out gpus")
    if "hardware" not in fields:
        raise BadInput("gpus counts the GPUs of a cluster: name it with hardware, such as hardware='h200_node'")
    cluster = cluster_of(parse_overrides(fields)["hardware"])
    nodes, rest = divmod(gpus, cluster.node.gpus)
    if gpus < 1 or (nodes and rest):
        what = f"the {cluster.node.gpus} GPUs of a node of {cluster.name}"
        raise BadInput(f"gpus is {gpus}: valid: at most {what}, or a multiple of them")
    found: dict[str, Any] = {"nodes": max(1, nodes), "gpus_per_node": min(gpus, cluster.node.gpus)}
    if nodes <= 1 or cluster.node.nic_gb_s is not None:
        return found, ()
    # A profile of one node has no network; a cluster of such nodes has.
    alike = [one.name for one in CLUSTERS.values() if one.node.gpu == cluster.node.gpu and one.node.nic_gb_s]
    if not alike:
        return found, ()
    aside = f"assumed, because {cluster.name} is one node: the network of hardware={alike[0]}"
    return found | {"hardware": alike[0]}, (aside,)


# explain


@dataclass(frozen=True, kw_only=True, repr=False)
class Explained(Answer):
    """Where the time of a traced step went."""

    step: Explanation
    compared: Comparison | None = None  # with the prediction
    fitted: Mapping[str, Any] | None = None  # constants, and the file that they were saved to
    not_compared: str = ""  # why there is no prediction, where the run has one

    @property
    def _text(self) -> str:
        from moelab.traces.against import comparison_text
        from moelab.traces.explanation import explanation_text

        texts = [explanation_text(self.step)]
        texts += [comparison_text(self.compared)] if self.compared else []
        texts += [f"note: {self.not_compared}"] if self.not_compared else []
        if self.fitted:
            file, names = self.fitted["file"], ", ".join(self.fitted["constants"])
            texts.append(f"fitted {names}; use them with --calibration {self.fitted['name']} ({file})")
        return "\n\n".join(texts)

    @property
    def _json(self) -> dict[str, Any]:
        content = {**self.step.to_json(), "predicted_ms": {}}
        content |= self.compared.to_json() if self.compared else {}
        content |= {"notes": [*self.step.notes, self.not_compared]} if self.not_compared else {}
        if self.fitted:
            content["fit"] = {name: self.fitted[name] for name in ("file", "constants")}
        return content

    def frame(self) -> pd.DataFrame:
        """A row for each part of the span: milliseconds, share, and what was predicted of it."""
        import pandas as pd

        predicted = {row.part: row.predicted_ms for row in self.compared.rows} if self.compared else {}
        rows = [
            {"part": part, "ms": ms, "share": ms / self.step.span_ms, "predicted_ms": predicted.get(part)}
            for part, ms in self.step.parts_ms.items()
        ]
        frame = pd.DataFrame(rows).sort_values("ms", ascending=False, ignore_index=True)
        return frame if self.compared else frame.drop(columns="predicted_ms")

    @property
    def _named(self) -> dict[str, Explanation]:
        return {Path(self.step.files[0]).name.removesuffix(".gz").removesuffix(".json"): self.step}

    def step_figure(self) -> go.Figure:
        """What the step is made of."""
        from moelab.viz.explain import step_bars

        return step_bars(self._named)

    def communication_figure(self) -> go.Figure:
        """Communication by group: what compute hides of it, and what it does not."""
        from moelab.viz.explain import communication_bars

        return communication_bars(self._named)

    def idle_figure(self) -> go.Figure:
        """Idle time by its cause and by what the host did."""
        from moelab.viz.explain import idle_bars

        return idle_bars(self._named)

    def timeline_figure(self, layer: int | None = None, phase: str | None = None) -> go.Figure:
        """Kernels over time in lanes.

        Args:
            layer: whose time is shown; the whole step if it is not given.
            phase: ``forward``, ``recompute`` or ``backward`` of it.

        Raises:
            BadInput: if the trace does not tell layers, or has no such layer or pass.
        """
        from moelab.viz.explain import timeline

        return timeline(self.step, layer=layer, phase=phase)

    def prediction_figure(self) -> go.Figure:
        """Each part of the step, measured and predicted.

        Raises:
            BadInput: if there is no prediction.
        """
        from moelab.viz.explain import beside_predicted

        if self.compared is None:
            raise BadInput(f"no prediction of this step: {self.not_compared or 'name what ran with against'}")
        return beside_predicted(self.compared)

    def _parts(self) -> Iterator[str | TableView | Folded]:
        yield self._text.partition("\n")[0]
        first, lost_ms = self.step.longest_loss
        yield f"Look first at {first}: {lost_ms:.1f} ms" if lost_ms else ""
        shown = self.frame()
        shown["share"] *= 100
        headings = {"ms": "time (ms)", "share": "share of the span (%)", "predicted_ms": "predicted (ms)"}
        yield _table(shown.rename(columns=headings), decimals=dict.fromkeys(headings.values(), 1))
        yield self.compared.sentence if self.compared else ""
        yield from (*self.step.notes, self.not_compared)
        yield _folded("The step in full", self._text)


@_refusing_unknown_names
def explain(
    *paths: Source,
    rank: int | None = None,
    step: int | None = None,
    against: Source | None = None,
    arm: str | None = None,
    calibration: str | None = None,
    fit: str | None = None,
    **fields: Any,
) -> Explained:
    """Show where the time of a traced step went, and why it differs from the prediction.

    Args:
        paths: a Kineto trace, several ranks' traces of one step, their folder, or a run.
        rank: rank to show; the lowest if it is not given.
        step: profiler step to show, where a trace has several; all of them if it is not given.
        against: what ran, to compare with its prediction; a run brings its own.
        arm: the arm that ran, where ``against`` is a study.
        calibration: predict with the constants of an earlier fit.
        fit: fit the model's constants to this step and save them under this name.
        fields: of ``against``.

    Raises:
        BadInput: if a trace cannot be read, or is not of what is named as having run.
    """
    from moelab.traces.explanation import explain as explain_traces

    if not paths:
        raise BadInput("give a trace (.json, .json.gz), several ranks' traces of one step, their folder, or a run")
    found = [_in_runs(path) for path in paths]
    arms = _ran(found[0], against, arm, fields)  # before a file of gigabytes is read
    if not arms and (fit or calibration):
        raise BadInput("--fit and --calibration need the experiment that ran: give its YAML with --against")
    explained = explain_traces(found, rank=rank, step=step)
    if not arms:
        return Explained(step=explained)
    try:
        experiment = _traced(explained, arms)
        told = f"compared with {experiment.arm}, which quantises and exchanges as the trace does"
        answer = _compared(explained, experiment, calibration, fit)
        return replace(answer, asides=(told,) if len(arms) > 1 else ())
    except MoelabError as error:
        if against is not None:
            raise
        return Explained(step=explained, not_compared=f"not compared with the run's own prediction: {error}")


def _ran(path: Path, against: Source | None, arm: str | None, fields: Mapping[str, Any]) -> list[Experiment]:
    """What may have run: as it is named, or by the run that holds the trace; nothing if neither is there."""
    from moelab.runs.directory import EXPERIMENT_FILE

    if against is not None:
        return _arms(read_study(against, **fields), arm)
    if arm or fields:
        raise BadInput("--arm and --set modify --against: give the YAML of what ran")
    own = path / EXPERIMENT_FILE
    return [experiment_file.read_study(own).experiments[0]] if own.is_file() else []


def _traced(explained: Explanation, arms: Sequence[Experiment]) -> Experiment:
    """The arm that a trace is of: of several, the one that quantises and exchanges as the trace does."""
    quantises = explained.kernels_ms.get("quantisation") is not None
    exchanges_by_deepep = any("deep_ep" in name for name in explained.labels["name"])
    alike = [
        one
        for one in arms
        if (one.precision != "bf16") == quantises and (one.ep_backend != "standard") == exchanges_by_deepep
    ]
    if len(arms) > 1 and len(alike) != 1:
        names = ", ".join(one.arm for one in alike or arms)
        may_be = "may be of several arms" if alike else "quantises and exchanges as no arm"
        raise BadInput(f"the trace {may_be} of {arms[0].name}; name the traced one with --arm: {names}")
    return arms[0] if len(arms) == 1 else alike[0]


def _compared(explained: Explanation, experiment: Experiment, calibration: str | None, fit: str | None) -> Explained:
    """A step beside its prediction, with constants that are fitted to it and saved where ``fit`` names them."""
    from moelab.planning.time.calibration import with_values, write_calibration
    from moelab.traces.against import compare
    from moelab.traces.against import fit as fit_constants

    if not fit:
        return Explained(step=explained, compared=compare(explained, experiment, _calibration(calibration)))
    values = fit_constants(explained, experiment)
    compared = compare(explained, experiment, with_values(**values))
    origin = f"{', '.join(explained.files)}: {experiment.model_label}, {experiment.arm}, {explained.gpu}"
    file = write_calibration(fit, values, origin)
    return Explained(step=explained, compared=compared, fitted={"name": fit, "file": str(file), "constants": values})


# run, submit, status, watch


@dataclass(frozen=True, kw_only=True, repr=False)
class Trained(Answer):
    """What came of a study that was trained here."""

    study: Study
    done: StudyRun

    @property
    def complete(self) -> int:
        """How many of the study's experiments have a completed run."""
        return len(self.done.runs) - len(self.done.failed)

    @property
    def exit_code(self) -> int:
        """1 if an experiment has no completed run."""
        return 0 if self.complete == len(self.study.experiments) else 1

    @property
    def paths(self) -> tuple[Path, ...]:
        """The newest run of each experiment that has one, in the study's order."""
        return tuple(run.path for run in self.done.runs)

    @property
    def _summary(self) -> str:
        total = len(self.study.experiments)
        return f"{self.study.name}: {self.complete} of {total} complete, {self.done.trained} trained now"

    @property
    def _text(self) -> str:
        lines = [f"{one_line(str(run.path))}: {run.status.in_words()}" for run in self.done.runs]
        return "\n".join([*lines, self._summary])

    @property
    def _json(self) -> dict[str, Any]:
        rows = [_row(run, run.status) for run in self.done.runs]
        found = self.done.discovered.to_json()
        return {"study": self.study.name, "trained": self.done.trained, "runs": rows, **found}

    def frame(self) -> pd.DataFrame:
        """A row for each run: its name, state, reason and job."""
        return _states(self._json)

    def _parts(self) -> Iterator[str | TableView | Folded]:
        yield self._summary
        yield _state_table(self.frame())
        yield from self.done.discovered.lines


def _row(run: RunDir, status: Status) -> dict[str, str | None]:
    """The state of a run, for a program."""
    return {"run": run.name, "status": status.state.value, "reason": status.reason, "job_id": status.job_id}


def _states(content: Mapping[str, Any]) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame(content["runs"], columns=["run", "status", "reason", "job_id"], dtype=object)


def _state_table(frame: pd.DataFrame) -> TableView:
    """States as a table, without columns that are empty."""
    return _table(frame.dropna(axis=1, how="all"))


@_refusing_unknown_names
def run(
    source: Source,
    /,
    *,
    runs: str | Path | None = None,
    on_failure: Literal["continue", "stop"] = "continue",
    **fields: Any,
) -> Trained:
    """Train on this machine what a study still lacks; finished runs are left alone.

    Args:
        source: a study, an experiment, a file or the name of a study.
        runs: folder of all studies; :func:`runs_folder` if it is not given.
        on_failure: what to do after a run failed.
        fields: of every experiment.

    Raises:
        BadInput: for an unknown or invalid value.
        Refused: before anything is started, if this machine cannot run one of the experiments, or another process
            trains the study.
    """
    from moelab.launch.local import run_study

    if on_failure not in ("continue", "stop"):
        raise BadInput(f"on_failure: got {on_failure!r}; valid: 'continue' or 'stop'")
    study = read_study(source, **fields)
    return Trained(study=study, done=run_study(study, Path(runs or runs_folder()), on_failure=on_failure))


@dataclass(frozen=True, kw_only=True, repr=False)
class Submitted(Answer):
    """What was given to Slurm, or would be."""

    done: Submission
    dry_run: bool

    @property
    def script(self) -> str:
        """The exact script, or several one after the other."""
        return "\n".join(self.done.scripts).rstrip("\n")

    @property
    def _text(self) -> str:
        return self.script if self.dry_run else self.done.as_text()

    @property
    def _json(self) -> dict[str, Any]:
        return self.done.to_json()

    def __str__(self) -> str:
        """What the command prints; a script is run as it stands, and a profile with a key in it is refused."""
        return self.script if self.dry_run else super().__str__()

    __repr__ = __str__

    def to_json(self) -> dict[str, Any]:
        """What the command prints with ``--json``."""
        return self._json if self.dry_run else super().to_json()

    def _parts(self) -> Iterator[str | TableView | Folded]:
        if not self.dry_run:
            yield self.done.as_text().splitlines()[-1]
            yield _table(self._json["runs"])
        if not self.done.scripts:
            yield "nothing to submit: every run of the study is complete or with Slurm"
        for script in self.done.scripts:
            yield _folded("The script as sbatch gets it", script.rstrip("\n"))


@_refusing_unknown_names
def submit(
    source: Source,
    /,
    *,
    cluster: str,
    cluster_set: Mapping[str, Any] | Sequence[str] = (),
    arm: str | None = None,
    after: str | None = None,
    runs: str | Path | None = None,
    dry_run: bool = False,
    **fields: Any,
) -> Submitted:
    """Submit to Slurm what a study still lacks; finished and queued runs are left alone.

    Args:
        source: as of :func:`run`.
        cluster: name or path of a cluster profile.
        cluster_set: fields of the profile to replace.
        arm: submit one arm.
        after: start only after this job has succeeded.
        runs: folder of all studies; the profile's, or :func:`runs_folder`, if it is not given.
        dry_run: give the exact script and change nothing.
        fields: of every experiment.

    Raises:
        BadInput: for an unknown or invalid value.
        Refused: if the cluster or Slurm cannot take the study.

    Example:
        >>> done = submit("671B_b200_x256", cluster="nebius_soperator_b200", dry_run=True)
        >>> "#SBATCH --nodes=32" in done.script
        True
    """
    from moelab.launch import submit as launch
    from moelab.launch.cluster import read_cluster
    from moelab.planning.project import foresee

    study = read_study(source, **fields)
    if arm:
        (wanted,) = _arms(study, arm)
        study = replace(study, experiments=tuple(one for one in study.experiments if one.arm == wanted.arm))
    place = read_cluster(cluster, cluster_set)
    folder = Path(runs or place.runs or runs_folder())
    if dry_run:
        done = launch.dry_run(study, folder, place, foresee=foresee, after=after)
    else:
        done = launch.submit(study, folder, place, foresee=foresee, after=after)
    return Submitted(done=done, dry_run=dry_run)


@dataclass(frozen=True, kw_only=True, repr=False)
class States(Answer):
    """Where runs are."""

    path: Path
    states: tuple[tuple[RunDir, Status], ...]
    found: Discovery

    @property
    def _hint(self) -> str:
        from moelab.runs.status import State

        going = any(status.state in (State.SUBMITTED, State.RUNNING) for _, status in self.states)
        return f"to keep watching: moelab status {shlex.quote(one_line(str(self.path)))} --follow" if going else ""

    @property
    def _text(self) -> str:
        lines = [*(f"{run.name}: {status.in_words()}" for run, status in self.states), *self.found.lines]
        return "\n".join(filter(None, [*lines, self._hint])) or f"no runs at {self.path}"

    @property
    def _json(self) -> dict[str, Any]:
        return {"runs": [_row(run, status) for run, status in self.states], **self.found.to_json()}

    def frame(self) -> pd.DataFrame:
        """A row for each run: its name, state, reason and job."""
        return _states(self._json)

    def _parts(self) -> Iterator[str | TableView | Folded]:
        if not self.states:
            yield f"no runs at {self.path}"
            return
        yield _state_table(self.frame())
        yield from self.found.lines
        yield "to keep watching: watch(…)" if self._hint else ""


@_refusing_unknown_names
def status(source: Source | None = None, /) -> States:
    """Show the state of runs; Slurm is asked about its jobs.

    ``source`` is a study, a run, or the folder of all studies; :func:`runs_folder` if it is not given.

    Raises:
        BadInput: if there is no such folder.
    """
    return _on_runs(source, "refresh")


def cancel(source: Source, /) -> States:
    """Cancel the Slurm jobs of a run, a study or all studies; raises as :func:`moelab.launch.status.cancel`."""
    return _on_runs(source, "cancel")


def requeue(source: Source, /) -> States:
    """Restart jobs from their newest checkpoint; raises as :func:`moelab.launch.status.requeue`."""
    return _on_runs(source, "requeue")


def _on_runs(source: Source | None, action: Literal["refresh", "cancel", "requeue"]) -> States:
    from moelab.launch import status as launch
    from moelab.runs.directory import discover

    path = runs_folder() if source is None else _in_runs(source)
    if not path.is_dir():
        raise BadInput(f"{path} is not a folder; give a run, a study or the folder of all studies")
    found = discover(path.absolute())
    states = getattr(launch, action)(found.all_runs)
    return States(path=path, states=tuple(zip(found.all_runs, states, strict=True)), found=found)


@_refusing_unknown_names
def watch(source: Source | None = None, /, *, interval_s: float = 5.0) -> LiveView | None:
    """Follow runs: in a notebook a live view, to be kept in a variable; in a terminal lines until all have ended.

    Args:
        source: as of :func:`status`; it may appear later.
        interval_s: seconds between two looks at least.
    """
    path = runs_folder() if source is None else _in_runs(source)
    from moelab.launch.progress import in_notebook

    if not in_notebook():
        from moelab.launch.status import follow

        follow(path, sys.stdout)
        return None
    from moelab.launch.status import cancel as cancel_jobs
    from moelab.viz.live import LiveView

    return LiveView(path, cancel=lambda run: cancel_jobs([run]), interval_s=interval_s)


# collect, report


@dataclass(frozen=True, kw_only=True, repr=False)
class Collection(Answer):
    """The metrics of runs."""

    runs: tuple[Collected, ...]
    found: Discovery

    @property
    def _text(self) -> str:
        return "\n".join([*(run.summary for run in self.runs), *self.found.lines])

    @property
    def _json(self) -> dict[str, Any]:
        return {"runs": [json.loads(run.json_text()) for run in self.runs], **self.found.to_json()}

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

    def _parts(self) -> Iterator[str | TableView | Folded]:
        rows = [
            {
                "run": run.run,
                "state": run.status.state.value,
                "step": run.last_step,
                "loss": run.rows["loss"].dropna().iloc[-1] if run.rows["loss"].notna().any() else None,
                "reason": run.status.reason or "",
            }
            for run in self.runs
        ]
        yield _table(rows)
        yield from self.found.lines


@_refusing_unknown_names
def collect(source: Source, /) -> Collection:
    """Read the metrics of runs, TorchTitan logs, TensorBoard folders or W&B exports.

    ``source`` is a study, a run, a log, a TensorBoard folder or a W&B export.

    Raises:
        BadInput: if it is none of them.
    """
    from moelab.runs.collect import collect as collect_anything
    from moelab.runs.collect import collect_runs
    from moelab.runs.directory import discover

    path = _in_runs(source)
    found = discover(path.absolute())
    return Collection(runs=tuple(collect_runs(found.runs) or collect_anything(path)), found=found)


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
    def _text(self) -> str:
        return self.judged.as_text() + (f"\nreport: {self.page}" if self.page else "")

    @property
    def _json(self) -> dict[str, Any]:
        return {**self.judged.to_json(), "report": str(self.page) if self.page else None}

    @property
    def usual_page(self) -> Path:
        """Where the command writes: into the folder of a study, else here."""
        return Path("comparison.html") if self.judged.study is None else self.judged.paths[0] / "report.html"

    def save(self, path: str | Path | None = None, *, with_paths: bool = False) -> Path:
        """Write the report as one HTML file.

        Args:
            path: file to write; :attr:`usual_page` if it is not given.
            with_paths: keep folder, host and user names.
        """
        from moelab.viz.report import write_study_report

        return write_study_report(self.judged, Path(path or self.usual_page), with_paths=with_paths)

    def frame(self) -> pd.DataFrame:
        """A row for each verdict: arm, reference, answer, difference with its interval, margin."""
        import pandas as pd

        verdicts = self.judged.to_json().get("verdicts", [])
        columns = ["arm", "reference", "quantity", "answer", "difference_nats", "interval_nats", "margin_nats"]
        return pd.DataFrame(verdicts, columns=columns)

    def loss_figure(self) -> go.Figure:
        """Training loss of every arm, or of runs side by side."""
        from moelab.viz.report import loss_figure

        return loss_figure(self.judged)

    def throughput_figure(self) -> go.Figure:
        """Tokens per second of every arm with the gains that are claimed, or of runs side by side."""
        from moelab.viz.report import throughput_figure

        return throughput_figure(self.judged)

    def figures(self) -> dict[str, go.Figure]:
        """Every figure of the report by its caption."""
        from moelab.viz.report import report_figures

        return {one.caption: one.figure for one in report_figures(self.judged)}

    def tables(self) -> list[TableView]:
        """Every table of the report."""
        from moelab.viz.report import report_tables

        return [one.in_notebook() for one in report_tables(self.judged)]

    def _parts(self) -> Iterator[str | TableView | Folded]:
        yield _table([{"question": one, "answer": answer} for one, answer in self.summary.items()])
        yield from self.tables()
        yield _folded("All findings in words", self._text)


@_refusing_unknown_names
def report(
    *sources: Source,
    reference: str | None = None,
    margin: float | None = None,
    margin_cap: float | None = None,
    drop_seed: Sequence[int] = (),
    final_fraction: float = 0.1,
    output: str | Path | None = None,
    with_paths: bool = False,
) -> Reported:
    """Judge a study, or compare any runs.

    Args:
        sources: a study; or several studies, runs, logs, TensorBoard folders or W&B exports.
        reference: arm that the others are held against; ``bf16_standard`` if it is not given, or the first arm of a
            study that has none of that name.
        margin: equivalence margin in nats; from the spread between seeds if it is not given.
        margin_cap: upper limit of a margin that comes from the seeds; 1 % of the loss if it is not given.
        drop_seed: seeds to leave out of all arms; the report says so.
        final_fraction: share of the steps, at the end, that the final loss is averaged over.
        output: file to write the report to; :meth:`Reported.save` does so later.
        with_paths: keep folder, host and user names in the report.

    Raises:
        BadInput: if a source cannot be read, or there is no such arm.
        NothingToJudge: if no run of a study finished.
    """
    from moelab.judge.report import judge_paths, judge_study
    from moelab.traces.explanation import explain as explain_traces

    options = {
        "explain": explain_traces,
        "final_fraction": final_fraction,
        "margin_nats": margin,
        "margin_cap_nats": margin_cap,
        "dropped_seeds": list(drop_seed),
    }
    study = _planned_study(sources[0]) if len(sources) == 1 else None
    if study is not None:
        usual = next((arm for arm in study.arms if arm == "bf16_standard"), study.arms[0])
        folder = _in_runs(study)
        if not folder.is_dir():
            raise BadInput(f"study {study.name} has no run in {folder.parent}: train it with moelab run, or run(…)")
        judged = judge_study(folder, study=study, reference=reference or usual, **options)
    else:
        judged = judge_paths([_in_runs(one) for one in sources], reference=reference or "bf16_standard", **options)
    answer = Reported(judged=judged)
    return replace(answer, page=answer.save(output, with_paths=with_paths)) if output else answer


def _planned_study(source: Source) -> Study | None:
    """The study that a source names, by itself or by its YAML; None of a path to runs or logs."""
    if isinstance(source, Study | Experiment):
        return read_study(source)
    if Path(source).suffix in (".yaml", ".yml"):
        return read_study(source)
    if _in_runs(source).exists():
        return None
    try:
        return read_study(source)
    except BadInput:
        return None  # no study's name either: the message for a path is the better one


# doctor


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

    @property
    def _text(self) -> str:
        text: str = self.found.as_text()
        return text

    @property
    def _json(self) -> dict[str, Any]:
        content: dict[str, Any] = self.found.to_json()
        return content

    def frame(self) -> pd.DataFrame:
        """A row for each finding: where it belongs, its name, severity, what was found and what to do."""
        import pandas as pd

        content = self._json
        groups = [group for group in ("findings", "deepep", "study", "here", "nodes") if group in content]
        rows = [{"group": group, **one} for group in groups for one in content[group]]
        return pd.DataFrame(rows, columns=["group", "name", "severity", "found", "remedy"])

    def arms(self) -> pd.DataFrame:
        """A row for each arm of a study: whether it runs here, with which kernels, or why not."""
        import pandas as pd

        return pd.DataFrame(self._json.get("arms", []), columns=["arm", "runs", "kernels", "reason"])

    def _parts(self) -> Iterator[str | TableView | Folded]:
        words = {"ok": "ok", "note": "note", "warning": "look here", "error": "does not work"}
        titles = {"findings": "This machine", "deepep": "DeepEP and what it needs", "study": "The study"}
        titles |= {"here": "From here", "nodes": "The nodes"}
        for group, rows in self.frame().groupby("group", sort=False):
            shown = rows.drop(columns="group").set_axis(["what", "", "found", "what to do"], axis=1)
            yield _table(shown.assign(**{"": shown[""].map(words)}), titles[str(group)])
        arms = self.arms()
        if len(arms):
            here = arms["kernels"].where(arms["runs"].astype(bool), "refused: " + arms["reason"])
            yield _table(arms[["arm"]].assign(here=here), "Arms of a study (nano model)")


@_refusing_unknown_names
def doctor(
    file: Source | None = None,
    *,
    smoke: bool = False,
    hardware: str = "local",
    cluster: str | None = None,
    cluster_set: Mapping[str, Any] | Sequence[str] = (),
    runs: str | Path | None = None,
    nodes: bool = False,
) -> Examined:
    """Report what this machine can run and what it lacks for the rest; or check a cluster.

    Args:
        file: with ``cluster``, the study that is to go there.
        smoke: send tokens between two ranks, through DeepEP if possible.
        hardware: profile that the network is compared with.
        cluster: name or path of a cluster profile to check instead.
        cluster_set: fields of the profile to replace.
        runs: with ``cluster``, folder of all studies.
        nodes: with ``cluster``, check every node too, through srun.

    Raises:
        BadInput: for an unknown profile or study.
    """
    if not cluster:
        if nodes or file or cluster_set or runs:
            raise BadInput("--nodes, --file, --cluster-set and --runs check a cluster: name it with --cluster")
        from moelab.health.doctor import examine

        return Examined(found=examine(hardware=hardware, smoke=smoke))
    from moelab.health.preflight import preflight
    from moelab.launch.cluster import read_cluster
    from moelab.planning.project import foresee

    place = read_cluster(cluster, cluster_set)
    study = read_study(file) if file else None
    return Examined(
        found=preflight(place, study, Path(runs or place.runs or runs_folder()), ask_nodes=nodes, foresee=foresee)
    )
