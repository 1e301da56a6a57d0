"""What ``from moelab import …`` gives: each verb of the command line as a function.

A function takes a study, an experiment, the path of a YAML file or the name of a study that comes with moelab, and the
command's options as keywords. Fields of an experiment are keywords too: ``plan("nano", steps=20)``. It returns an
object of :mod:`moelab.answers`. ``BadInput`` names a value that is wrong and what is valid, ``Refused`` what a machine
or a layout cannot do.

The command line is made from these functions: their keywords are its options, and the words under *Args* its help.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

from moelab import experiment_file
from moelab.answers import (
    Collection,
    Examined,
    Explained,
    Found,
    Planned,
    Projected,
    Reported,
    States,
    Submitted,
    Trained,
    of_arm,
)
from moelab.errors import BadInput, MoelabError, Refused
from moelab.experiment import Experiment, OwnHardware
from moelab.experiment_file import Study, parse_overrides

if TYPE_CHECKING:
    from moelab.launch.cluster import ClusterProfile
    from moelab.model.hugging_face import HuggingFaceModel
    from moelab.traces.explanation import Explanation
    from moelab.viz.live import LiveView

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
LINES_VARIABLE = "MOELAB_PROGRESS_LINES"
"""Set where a notebook runs in batch, whose log takes lines of progress and no bars."""
SIDE_BY_SIDE = ("notebooks", "papermill_params")
"""Folders of a checkout, and of what ``moelab notebooks`` wrote."""


# What is given


def verb(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function refuse a keyword that it does not take with the name that was probably meant."""
    parameters = inspect.signature(function).parameters.values()
    takes_fields = any(one.kind is one.VAR_KEYWORD for one in parameters)
    options = [one.name for one in parameters if one.kind in (one.KEYWORD_ONLY, one.POSITIONAL_OR_KEYWORD)]
    known = [*options, *(FIELDS if takes_fields else ())]

    @functools.wraps(function)
    def checked(*given: P.args, **named: P.kwargs) -> R:
        for name in named.keys() - {*known}:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(options)}"
            raise BadInput(f"{function.__name__} does not take {name}; {hint}")
        return function(*given, **named)

    return checked


@verb
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


def _in_runs(source: Source, runs: str | Path | None = None) -> Path:
    """The folder of a study's runs; of a path that is not there, the one of that name among the runs."""
    runs = Path(runs or runs_folder())
    if isinstance(source, Study | Experiment):
        return runs / source.name
    path = Path(source)
    if path.exists() or path.is_absolute():
        return path
    # `runs/nano` is said in a folder below too.
    return next((one for one in (runs / path, runs.parent / path) if one.exists()), path)


def _arms(study: Study, wanted: str | None) -> list[Experiment]:
    """The first experiment of each arm, or only of the one that is wanted."""
    first = {experiment.arm: experiment for experiment in study.first_of_arms}
    return list(first.values()) if wanted is None else [of_arm(first, wanted)]


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
    from moelab.model.hugging_face import published_models, read_model

    if isinstance(source, str | Path) and from_hf is None:
        path = Path(source)
        if path.is_dir() or path.name in ("config.json", "params.json") or str(source) in published_models():
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


def _assumed(known: Mapping[str, Any], *, searches: bool) -> dict[str, Any]:
    """What a model without an experiment takes; a search also takes the whole cluster and usual training settings."""
    from moelab.hardware import cluster_of

    fields: dict[str, Any] = {"seq_len": ASSUMED_SEQ_LEN}
    if not searches:
        return fields
    # What is no length is for the experiment to refuse.
    seq_len = known.get("seq_len", ASSUMED_SEQ_LEN)
    local_batch = max(1, ASSUMED_TOKENS // seq_len) if isinstance(seq_len, int) and seq_len > 0 else 1
    fields |= {"compile": "model+loss", "dataset": "c4", "local_batch": local_batch}
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


# plan, project, search


@verb
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
    **fields: Any,
) -> Planned:
    """Check whether experiments are legal and fit into memory, and show how they are launched.

    Args:
        source: YAML file of an experiment, a list of experiments or a study, the name of a study such as nano, or a
            model of Hugging Face.
        arm: plan one arm of a study, such as mxfp8_standard or bf16_deepep_round-robin.
        from_hf: take the model from a Hugging Face config.json, its folder, or by name, such as Qwen3-30B-A3B.
        load: a run, or its expert_load.parquet: use the expert load it measured (routing: learned).
        write: file to write the experiment to.
        config: also give the configuration that TorchTitan resolves (loads torch).
        verify: build it with TorchTitan, without a GPU (loads torch).
        fields: of every experiment.

    Example:
        >>> plan("671B_b200_x256", arm="mxfp8_deepep").fits
        True
    """
    from moelab.planning import plan as planning

    chosen = _chosen(source, from_hf, arm, fields)
    if write or config or verify:
        _ = chosen.only
    if write:
        _write(write, chosen.only)
    path = Path(write) if write else chosen.path if len(chosen.arms) == 1 else None
    plans = tuple(planning.plan(one, path=path, constants=_constants(load, one)) for one in chosen.arms)
    legal = plans[0].verdict.legal
    return Planned(
        plans=plans,
        model=chosen.model,
        config=planning.titan_config(chosen.only) if legal and config else None,
        verified=planning.verified(plans[0]) if legal and verify else None,
        asides=chosen.assumed,
    )


@verb
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
        source: YAML file of an experiment, a list of experiments or a study, the name of a study such as nano, or a
            model of Hugging Face.
        arm: project one arm of a study.
        from_hf: take the model from a Hugging Face config.json, its folder, or by name.
        load: a run, or its expert_load.parquet: use the expert load it measured (routing: learned).
        calibration: use the constants that moelab explain --fit saved: a name or a path.
        document_tokens: mean length of your documents, which attention keeps apart; the dataset's if it is not given.
        fields: of every experiment.

    Raises:
        Refused: if the only arm cannot be projected; of several, those that cannot are named in the answer.

    Example:
        >>> project("671B_b200_x256", arm="mxfp8_deepep").frame()["arm"][0]
        'mxfp8_deepep_round-robin'
    """
    from moelab.planning import project as planning

    chosen = _chosen(source, from_hf, arm, fields)
    options = {"calibration": _calibration(calibration), "document_tokens": document_tokens}
    arms, refused = {}, {}
    for one in chosen.arms:
        try:
            arms[one.arm] = planning.project(one, constants=_constants(load, one), **options)
        except Refused as error:
            if len(chosen.arms) == 1:
                raise
            refused[one.arm] = str(error)
    return Projected(arms=arms, refused=refused, name=chosen.name, asides=chosen.assumed)


@verb
def search(
    source: Source | None = None,
    /,
    *,
    arm: str | None = None,
    from_hf: str | None = None,
    gpus: int | None = None,
    limit: int = 10,
    calibration: str | None = None,
    write: str | Path | None = None,
    **fields: Any,
) -> Found:
    """Find the best layout of a model on a cluster, its speed, and what each technique gains.

    Args:
        source: what to search for, as of plan.
        arm: one arm of a study.
        from_hf: a model of Hugging Face.
        gpus: how many GPUs --search takes, in nodes of the hardware.
        limit: how many layouts --search lists.
        calibration: use the constants that moelab explain --fit saved.
        write: file for the experiment in its best layout.
        fields: of the experiment; a layout's field that is given stays as it is.

    Example:
        >>> found = search("Qwen3-30B-A3B", gpus=16, hardware="h200_node")
        >>> found.best.world_size
        16
    """
    from moelab.planning.advice import recommend
    from moelab.planning.search import VARIED

    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise BadInput(f"limit: got {limit!r}; valid: a whole number of at least 1")
    of_gpus, asides = ({}, ()) if gpus is None else _cluster_of_gpus(gpus, fields)
    chosen = _chosen(source, from_hf, arm, fields | of_gpus, searches=True)
    fixed = (fields | of_gpus).keys() & {*VARIED, "activation_checkpoint"}
    found = Found(
        advice=recommend(chosen.only, fixed=fixed, limit=limit, calibration=_calibration(calibration)),
        name=chosen.model.source if chosen.model else "",
        asides=(*asides, *chosen.assumed),
    )
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
    # A profile of one node has no network; a cluster of such nodes has.
    alike = [one.name for one in CLUSTERS.values() if one.node.gpu == cluster.node.gpu and one.node.nic_gb_s]
    if nodes <= 1 or cluster.node.nic_gb_s is not None or not alike:
        return found, ()
    aside = f"assumed, because {cluster.name} is one node: the network of hardware={alike[0]}"
    return found | {"hardware": alike[0]}, (aside,)


# explain


@verb
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
        paths: a Kineto trace (.json, .json.gz), several ranks' traces of one step, their folder, or a run.
        rank: rank to show; default: the lowest.
        step: profiler step to show, where a trace has several; default: all of them.
        against: YAML of what ran, to compare with its prediction; a run brings its own.
        arm: the arm that ran, where --against is a study.
        calibration: predict with the constants of an earlier --fit.
        fit: fit the model's constants to this step and save them under this name.
        fields: of --against.

    Raises:
        BadInput: if a trace cannot be read, or is not of what is named as having run.
    """
    from moelab.runs.directory import EXPERIMENT_FILE
    from moelab.traces.explanation import explain as explain_traces

    if not paths:
        raise BadInput("give a trace (.json, .json.gz), several ranks' traces of one step, their folder, or a run")
    found = [_in_runs(path) for path in paths]
    record = found[0] / EXPERIMENT_FILE
    if against is None and (arm or fields):
        raise BadInput("--arm and --set modify --against: give the YAML of what ran")
    # Before a file of gigabytes is read.
    ran = read_study(against, **fields) if against else read_study(record) if record.is_file() else None
    arms = _arms(ran, arm) if ran else []
    if not arms and (fit or calibration):
        raise BadInput("--fit and --calibration need the experiment that ran: give its YAML with --against")
    explained = explain_traces(found, rank=rank, step=step)
    answer = Explained(steps={Path(explained.files[0]).name.removesuffix(".gz").removesuffix(".json"): explained})
    if not arms:
        return answer
    try:
        experiment = _traced(explained, arms)
        told = f"compared with {experiment.arm}, which quantises and exchanges as the trace does"
        return replace(_compared(answer, experiment, calibration, fit), asides=(told,) if len(arms) > 1 else ())
    except MoelabError as error:
        if against is not None and (fit or not isinstance(error, Refused)):
            raise
        return replace(answer, not_compared=f"not compared with a prediction: {error}")


def _traced(explained: Explanation, arms: Sequence[Experiment]) -> Experiment:
    """The arm that a trace is of: of several, the one that quantises and exchanges as the trace does."""
    if len(arms) == 1:
        return arms[0]
    quantises = explained.kernels_ms.get("quantisation") is not None
    exchanges_by_deepep = any("deep_ep" in name for name in explained.labels["name"])
    alike = [
        one
        for one in arms
        if (one.precision != "bf16") == quantises and (one.ep_backend != "standard") == exchanges_by_deepep
    ]
    if len(alike) != 1:
        names = ", ".join(one.arm for one in alike or arms)
        may_be = "may be of several arms" if alike else "quantises and exchanges as no arm"
        raise BadInput(f"the trace {may_be} of {arms[0].name}; name the traced one with --arm: {names}")
    return alike[0]


def _compared(answer: Explained, experiment: Experiment, calibration: str | None, fit: str | None) -> Explained:
    """A step beside its prediction, with constants that are fitted to it and saved where ``fit`` names them."""
    from moelab.planning.time.calibration import with_values, write_calibration
    from moelab.traces import against

    constants, fitted = _calibration(calibration), None
    if fit:
        values = against.fit(answer.step, experiment)
        constants = with_values(**values)
        files = ", ".join(answer.step.files)
        origin = f"{files}: {experiment.model_label}, {experiment.arm}, {answer.step.gpu}"
        fitted = {"name": fit, "file": str(write_calibration(fit, values, origin)), "constants": values}
    compared = {name: against.compare(step, experiment, constants) for name, step in answer.steps.items()}
    return replace(answer, compared=compared, fitted=fitted)


# run, submit, status, watch


@verb
def run(
    source: Source,
    /,
    *,
    runs: str | Path | None = None,
    on_failure: Literal["continue", "stop"] = "continue",
    wait: bool = True,
    **fields: Any,
) -> States:
    """Train on this machine what a study still lacks; finished runs are left alone.

    Args:
        source: YAML file of an experiment, a list of experiments or a study, or the name of a study such as nano.
        runs: folder of all studies; default: $MOELAB_RUNS, or runs of this checkout or folder.
        on_failure: what to do after a run failed: continue with the next one, or stop.
        wait: return when the study has ended, with :class:`~moelab.answers.Trained`; else as soon as a run has begun,
            and training goes on in a process of its own.
        fields: of every experiment.

    Raises:
        Refused: before anything is started, if this machine cannot run one of the experiments, or another process
            trains the study.
    """
    from moelab.launch.local import run_study, start_in_background

    if on_failure not in ("continue", "stop"):
        raise BadInput(f"on_failure: got {on_failure!r}; valid: 'continue' or 'stop'")
    study, folder = read_study(source, **fields), Path(runs or runs_folder())
    if not wait:
        launcher = start_in_background(study, folder)
        return replace(status(folder / study.name), launcher=launcher)
    say = print if os.environ.get(LINES_VARIABLE) else None
    done = run_study(study, folder, on_failure=on_failure, say=say)
    return Trained(
        path=folder / study.name,
        states=tuple((one, one.status) for one in done.runs),
        found=done.discovered,
        study=study,
        trained=done.trained,
    )


@verb
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
        source: YAML file of an experiment, a list of experiments or a study, or the name of a study such as nano.
        cluster: name or path of a cluster profile.
        cluster_set: override a field of the cluster profile.
        arm: submit one arm of a study.
        after: start only after this job has succeeded, such as 123 or 123_4.
        runs: folder of all studies; default: the cluster profile's, $MOELAB_RUNS, or runs of this checkout or folder.
        dry_run: give the exact script and change nothing.
        fields: of every experiment.

    Raises:
        Refused: if the cluster or Slurm cannot take the study, or a run of it is queued already.

    Example:
        >>> done = submit("671B_b200_x256", cluster="nebius_soperator_b200", dry_run=True)
        >>> "#SBATCH --nodes=32" in done.script
        True
    """
    from moelab.launch import submit as launch
    from moelab.launch.local import completed
    from moelab.planning.project import foresee

    study = read_study(source, **fields)
    if arm:
        (wanted,) = _arms(study, arm)
        study = replace(study, experiments=tuple(one for one in study.experiments if one.arm == wanted.arm))
    place, folder = _cluster(cluster, cluster_set, runs)
    send = launch.dry_run if dry_run else launch.submit
    done = send(study, folder, place, foresee=foresee, after=after)
    complete = sum(completed(done.discovered.attempts(one)) is not None for one in study.experiments)
    return Submitted(path=folder / study.name, done=done, dry_run=dry_run, complete=complete)


def _cluster(
    name: str, changes: Mapping[str, Any] | Sequence[str], runs: str | Path | None
) -> tuple[ClusterProfile, Path]:
    """A cluster's profile, and the folder of all studies there."""
    from moelab.launch.cluster import read_cluster

    place = read_cluster(name, changes)
    return place, Path(runs or place.runs or runs_folder())


@verb
def status(source: Source | None = None, /, *, runs: str | Path | None = None) -> States:
    """Show the state of runs; Slurm is asked about its jobs.

    Args:
        source: folder of a run, a study or all studies, or a study, which may have no run yet; default: all studies.
        runs: folder of all studies, where the source is a study.

    Raises:
        BadInput: if there is no such folder.
    """
    return _on_runs(source, "refresh", runs)


def cancel(source: Source, /) -> States:
    """Cancel the Slurm jobs of a run, a study or all studies.

    Args:
        source: folder of a run, a study or all studies, or the name of a study.
    """
    return _on_runs(source, "cancel")


def requeue(source: Source, /) -> States:
    """Restart running, failed or cancelled jobs from their newest checkpoint.

    Args:
        source: folder of a run, a study or all studies, or the name of a study.
    """
    return _on_runs(source, "requeue")


def _on_runs(
    source: Source | None, action: Literal["refresh", "cancel", "requeue"], runs: str | Path | None = None
) -> States:
    from moelab.launch import status as launch
    from moelab.runs.directory import discover

    path = _in_runs(runs_folder() if source is None else source, runs)
    if not path.is_dir():
        if isinstance(source, Study | Experiment):
            return States(path=path, states=(), found=None)
        raise BadInput(f"{path} is not a folder; give a run, a study or the folder of all studies")
    found = discover(path.absolute())
    states = getattr(launch, action)(found.all_runs)
    return States(path=path, states=tuple(zip(found.all_runs, states, strict=True)), found=found)


@verb
def watch(source: Source | States | Submitted | None = None, /, *, interval_s: float = 5.0) -> LiveView | None:
    """Follow runs: in a notebook a live view, to be kept in a variable; in a terminal lines until all have ended.

    Args:
        source: as of status, or what run or submit answered; it may appear later.
        interval_s: seconds between two looks at least.
    """
    from moelab.launch import status as launch
    from moelab.launch.progress import in_notebook

    if isinstance(source, States | Submitted):
        path = source.path
    else:
        path = runs_folder() if source is None else _in_runs(source)
    if not in_notebook():
        launch.follow(path, sys.stdout)
        return None
    from moelab.viz.live import LiveView

    launcher = getattr(source, "launcher", None)
    return LiveView(
        path, cancel=lambda run: launcher.terminate() if launcher else launch.cancel([run]), interval_s=interval_s
    )


# collect, report, doctor


@verb
def collect(source: Source, /) -> Collection:
    """Read the metrics of runs, TorchTitan logs, TensorBoard folders or W&B exports.

    Args:
        source: a study, a run, a log, a TensorBoard folder or a W&B export.
    """
    from moelab.runs.collect import collect as collect_anything
    from moelab.runs.collect import collect_runs
    from moelab.runs.directory import discover

    path = _in_runs(source)
    found = discover(path.absolute())
    return Collection(runs=tuple(collect_runs(found.runs) or collect_anything(path)), found=found)


@verb
def report(
    *sources: Source,
    runs: str | Path | None = None,
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
        runs: folder of all studies; default: $MOELAB_RUNS, or runs of this checkout or folder.
        reference: arm that the others are held against; default: bf16_standard, or a study's first arm.
        margin: equivalence margin in nats; default: from the spread between seeds.
        margin_cap: upper limit of a margin that comes from the seeds; default: 1 % of the loss.
        drop_seed: leave a seed out of all arms; the report says so.
        final_fraction: share of the steps, at the end, that the final loss is averaged over; default: 0.1.
        output: file to write the report to; the command's default: report.html in the study's folder, or
            comparison.html here.
        with_paths: keep folder, host and user names in the report.

    Raises:
        NothingToJudge: if no run of a study finished.
    """
    from moelab.judge.report import judge_paths, judge_study

    options: dict[str, Any] = {
        "final_fraction": final_fraction,
        "margin_nats": margin,
        "margin_cap_nats": margin_cap,
        "dropped_seeds": list(drop_seed),
    }
    study = _planned_study(sources[0], runs) if len(sources) == 1 else None
    if study is not None:
        usual = next((arm for arm in study.arms if arm == "bf16_standard"), study.arms[0])
        folder = _in_runs(study, runs)
        if not folder.is_dir():
            raise BadInput(f"study {study.name} has no run in {folder.parent}: train it with moelab run, or run(…)")
        answer = Reported(judged=judge_study(folder, study=study, reference=reference or usual, **options))
    else:
        paths = [_in_runs(one, runs) for one in sources]
        answer = Reported(judged=judge_paths(paths, reference=reference or "bf16_standard", **options))
    return replace(answer, page=answer.save(output, with_paths=with_paths)) if output else answer


def _planned_study(source: Source, runs: str | Path | None) -> Study | None:
    """The study that a source names, by itself or by its YAML; None of a path to runs or logs."""
    if isinstance(source, Study | Experiment) or Path(source).suffix in (".yaml", ".yml"):
        return read_study(source)
    if _in_runs(source, runs).exists():
        return None
    try:
        return read_study(source)
    except BadInput:
        return None  # no study's name either: the message for a path is the better one


@verb
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
    """Report what this machine can run and what it lacks for the rest; or check a cluster before a study goes there.

    Args:
        file: with --cluster: the study that is to go there.
        smoke: send tokens between two ranks, through DeepEP if possible.
        hardware: compare the network with this profile.
        cluster: name or path of a cluster profile to check instead.
        cluster_set: override a field of the cluster profile.
        runs: with --cluster: folder of all studies.
        nodes: with --cluster: check every node too, through srun.
    """
    if not cluster:
        if nodes or file or cluster_set or runs:
            raise BadInput("--nodes, --file, --cluster-set and --runs check a cluster: name it with --cluster")
        from moelab.health.doctor import examine

        return Examined(found=examine(hardware=hardware, smoke=smoke))
    from moelab.health.preflight import preflight
    from moelab.planning.project import foresee

    place, folder = _cluster(cluster, cluster_set, runs)
    study = read_study(file) if file else None
    return Examined(found=preflight(place, study, folder, ask_nodes=nodes, foresee=foresee))
