"""The command line: results on stdout, progress on stderr, exit 0 done, 1 failed, 2 bad input, 3 refused.

Nothing but the standard library is imported before a verb is chosen, so that ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import signal
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from moelab import __version__
from moelab.errors import BadInput, MoelabError

DESCRIPTION = (
    "How much faster can a Mixture-of-Experts model be pre-trained with MXFP8 experts and DeepEP, on your hardware, "
    "without hurting the loss?"
)

ASSUMED_SEQ_LEN = 4096
"""Of a model from elsewhere: an experiment's own default is for a laptop."""
ASSUMED_TOKENS = 65_536
"""Of a step for each GPU, where a search is given a model alone: as in published runs on hundreds of GPUs."""
FROM_HF_HELP = "take the model from a Hugging Face config.json, a folder with one, or by name, such as Qwen3-30B-A3B"
LOAD_HELP = "run, or its expert_load.parquet, whose measured load takes the place of an assumed one; learned routing"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    options = build_parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, _stop)
    try:
        return int(options.run(options))
    except MoelabError as error:
        from moelab.privacy import without_secrets

        print(f"moelab: {without_secrets(str(error))}", file=sys.stderr)  # noqa: T201 - it may quote a file
        return error.exit_code
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        print(f"moelab: {error}", file=sys.stderr)  # noqa: T201
        return 1
    except KeyboardInterrupt:
        print("moelab: interrupted; what was finished is kept", file=sys.stderr)  # noqa: T201
        return 1


def build_parser() -> argparse.ArgumentParser:
    """The parser with all verbs."""
    parser = argparse.ArgumentParser(prog="moelab", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"moelab {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)

    def verb(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        added: argparse.ArgumentParser = verbs.add_parser(name, help=text, description=text)
        added.set_defaults(run=run)
        added.add_argument("--json", action="store_true", help="print one JSON object")
        return added

    def fields(*parsers: argparse.ArgumentParser, of: str = "a field", arm: str = "") -> None:
        for each in parsers:
            if arm:
                each.add_argument("--arm", help=arm)
            each.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=f"replace {of}")

    one_arm = "one arm of a study, such as mxfp8_standard or bf16_deepep_round-robin"
    doctor = verb("doctor", _doctor, "say what this machine can run and what is missing for the rest")
    doctor.add_argument("--smoke", action="store_true", help="send tokens between two ranks, with DeepEP if it is here")
    doctor.add_argument("--hardware", default="local", metavar="PROFILE", help="profile to hold the network against")
    doctor.add_argument("--cluster", metavar="PROFILE", help="look at a cluster instead, before a study goes there")
    doctor.add_argument("--cluster-set", action="append", default=[], metavar="KEY=VALUE", help="replace its field")
    doctor.add_argument("--file", type=Path, help="with --cluster: YAML of what would run there")
    runs_help = "with --cluster: folder of all studies; default: the profile's, or runs"
    doctor.add_argument("--runs", type=Path, help=runs_help)
    doctor.add_argument("--nodes", action="store_true", help="with --cluster: let every node report, by srun")

    text = "write the notebooks, their papermill profiles and studies to a folder; what you changed there is kept"
    verb("notebooks", _notebooks, text).add_argument("folder", type=Path, metavar="DIR")

    plan = verb("plan", _plan, "say whether an experiment is legal, what it holds and how it is started")
    file_help = "YAML of an experiment, or of a study, or a study's name: each of its arms is planned"
    plan.add_argument("file", type=Path, nargs="?", help=file_help)
    plan.add_argument("--from-hf", metavar="CONFIG", help=FROM_HF_HELP)
    fields(plan, arm=f"plan {one_arm}")
    write_help = "write the experiment to a file, as it is planned or, with --search, in the best layout"
    plan.add_argument("--write", type=Path, metavar="PATH", help=write_help)
    config_help = "add the configuration that TorchTitan resolves (loads torch)"
    plan.add_argument("--config", action="store_true", help=config_help)
    plan.add_argument("--verify", action="store_true", help="build it with TorchTitan, without a GPU (loads torch)")
    ranks_help = "global ranks that --verify builds; default: one a stage"
    plan.add_argument("--ranks", type=_ranks, metavar="R,R", help=ranks_help)
    plan.add_argument(
        "--search",
        action="store_true",
        help="say which layout is best, how fast, and what each technique gains; fields given by --set stay",
    )
    plan.add_argument("--limit", type=_positive, default=10, metavar="N", help="layouts that --search lists")
    plan.add_argument("--global-batch", type=_positive, metavar="N", help="sequences a step, kept by --search")
    plan.add_argument("--load", type=Path, metavar="RUN", help=LOAD_HELP)

    project = verb("project", _project, "predict the time of a step: tokens/s/GPU and where the time goes")
    file_help = "YAML of an experiment, or of a study, or a study's name: each of its arms is projected"
    project.add_argument("file", type=Path, nargs="?", help=file_help)
    project.add_argument("--from-hf", metavar="CONFIG", help=FROM_HF_HELP)
    fields(project, arm=f"project {one_arm}")
    constants_help = "constants of moelab explain --fit: their name, or a path"
    project.add_argument("--calibration", metavar="NAME", help=constants_help)
    project.add_argument("--load", type=Path, metavar="RUN", help=LOAD_HELP)

    text = "say where the time of a traced step went, and why it is not what was predicted"
    explain = verb("explain", _explain, text)
    paths_help = "a Kineto trace (.json, .json.gz), several of one step, a run"
    explain.add_argument("paths", type=Path, nargs="+", metavar="path", help=paths_help)
    explain.add_argument("--rank", type=int, metavar="R", help="rank that is shown; default: the lowest")
    step_help = "the profiler's step, of a trace of several; default: all"
    explain.add_argument("--step", type=int, metavar="N", help=step_help)
    against_help = "YAML of what ran, to predict it; a run has its own"
    explain.add_argument("--against", type=Path, metavar="FILE", help=against_help)
    fields(explain, of="a field of --against", arm="of a study in --against")
    explain.add_argument("--calibration", metavar="NAME", help="predict with the constants of an earlier --fit")
    explain.add_argument("--fit", metavar="NAME", help="keep constants with which the model meets this step, as NAME")

    run = verb("run", _run, "train an experiment or study on this machine; a finished one is left alone")
    submit = verb("submit", _submit, "give an experiment or study to Slurm; what is finished or waiting is left alone")
    file_help = "YAML of an experiment, a list of experiments or a study, or the name of a study such as nano"
    for each in (run, submit):
        each.add_argument("file", type=Path, help=file_help)
    fields(run, submit, of="a field everywhere")
    run.add_argument("--on-failure", choices=["continue", "stop"], default="continue")
    run.add_argument("--runs", type=Path, default=Path("runs"), help="folder that holds all studies")
    submit.add_argument("--arm", help=f"submit {one_arm}")
    submit.add_argument("--cluster", required=True, metavar="PROFILE", help="name of a profile, or a path of one")
    profile_help = "replace a field of the profile"
    submit.add_argument("--cluster-set", action="append", default=[], metavar="KEY=VALUE", help=profile_help)
    submit.add_argument("--after", metavar="JOB", help="job that has to succeed first, such as 123 or 123_4")
    submit.add_argument("--adopt", metavar="JOB", help="say as which job runs were submitted whose number is not known")
    submit.add_argument("--runs", type=Path, help="folder that holds all studies; default: the profile's, or runs")
    submit.add_argument("--dry-run", action="store_true", help="print the exact script and touch nothing")

    cancel = verb("cancel", _on_runs, "cancel the jobs of a run, of a study or of all")
    requeue = verb("requeue", _on_runs, "let jobs that run or failed start again, from their newest checkpoint")
    status = verb("status", _on_runs, "say where the runs at a path are; jobs of Slurm are asked for")
    for each, name in ((cancel, "cancel"), (requeue, "requeue"), (status, "refresh")):
        each.set_defaults(what=name, follow=False)
    for each in (cancel, requeue):
        each.add_argument("path", type=Path, help="folder of a run, or of a study")
    status.add_argument("path", type=Path, nargs="?", default=Path("runs"))
    status.add_argument("--follow", action="store_true", help="go on showing them; Ctrl-C leaves the runs alone")
    collect = verb("collect", _collect, "read the metrics of a run, a study, a log, TensorBoard or W&B export")
    collect.add_argument("path", type=Path)

    report = verb("report", _report, "judge a study, or compare any runs, and write an HTML report")
    paths_help = "a study; or several studies, runs, logs, TensorBoard or W&B exports"
    report.add_argument("paths", type=Path, nargs="+", metavar="path", help=paths_help)
    report.add_argument("--reference", default="bf16_standard", help="arm that the others are held against")
    report.add_argument("--margin", type=float, help="equivalence margin in nats, instead of the seeds' own spread")
    cap_help = "nats that a margin of the seeds' spread is at most; default: 1 %% of the loss"
    report.add_argument("--margin-cap", type=float, help=cap_help)
    drop_help = "leave a seed out of all arms; shown"
    report.add_argument("--drop-seed", type=int, action="append", default=[], metavar="K", help=drop_help)
    report.add_argument("--final-fraction", type=float, default=0.1, help="part of the steps that a final loss is of")
    output_help = "file to write; default: report.html in the study, or comparison.html here"
    report.add_argument("--output", type=Path, help=output_help)
    report.add_argument("--with-paths", action="store_true", help="keep folders, host and user names in the report")
    return parser


def _positive(text: str) -> int:
    """A count; argparse says what is wrong and exits with 2."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _ranks(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of ranks such as 0,128")
    return [int(part) for part in parts]


def _stop(_signal: int, _frame: FrameType | None) -> None:
    """Treat SIGTERM (a scheduler, a container) as Ctrl-C: stop the ranks in order and write the status."""
    raise KeyboardInterrupt


def _show(options: argparse.Namespace, as_json: Any, as_text: str, *, exact: bool = False) -> None:
    """Print a result, as JSON if that is asked for; it may quote logs, and holds no keys and moves no cursor.

    ``exact`` is for what is run as it stands, such as a script: its cluster profile was refused if it held a key.
    """
    from moelab.privacy import each_text, without_secrets

    if options.json:
        cleaned = str if exact else functools.cache(without_secrets)  # of thousands of runs most words are the same
        text = json.dumps(each_text(cleaned, as_json), indent=1, allow_nan=False)
    else:
        text = as_text if exact else without_secrets(as_text)
    print(text, flush=True)  # noqa: T201 - results go to stdout


def _line(name: str, status: Any) -> str:
    """Where a run is, for a person."""
    return f"{name}: {status.state}" + (f": {status.reason}" if status.reason else "")


def _row(name: str, status: Any) -> dict[str, str | None]:
    """Where a run is, for a program."""
    return {"run": name, "status": status.state.value, "reason": status.reason, "job_id": status.job_id}


def _doctor(options: argparse.Namespace) -> int:
    from moelab.doctor import examine

    if not options.cluster:
        if options.nodes or options.file or options.cluster_set or options.runs:
            raise BadInput("--nodes, --file, --cluster-set and --runs are about a cluster: name it with --cluster")
        examined = examine(hardware=options.hardware, smoke=options.smoke)
        _show(options, examined.to_json(), examined.as_text())
        return 1 if examined.failed else 0
    from moelab.experiment_file import read_study
    from moelab.health.preflight import preflight
    from moelab.launch.cluster import read_cluster

    cluster = read_cluster(options.cluster, options.cluster_set)
    study = read_study(options.file) if options.file else None
    flight = preflight(cluster, study, options.runs or Path(cluster.runs or "runs"), ask_nodes=options.nodes)
    _show(options, flight.to_json(), flight.as_text())
    return flight.exit_code


def _notebooks(options: argparse.Namespace) -> int:
    from moelab.notebooks.shipped import write_out

    done = write_out(options.folder)
    _show(options, done.to_json(), done.as_text())
    return 0


def _chosen_arms(study: Any, wanted: str | None) -> list[Any]:
    """The first experiment of each arm, or of the one that is wanted."""
    first = {experiment.arm: experiment for experiment in study.first_of_arms}
    longer = [arm for arm in first if wanted is not None and arm.startswith(f"{wanted}_")]
    if wanted not in first and len(longer) == 1:  # bf16_standard is bf16_standard_round-robin in a study of that alone
        wanted = longer[0]
    if wanted is not None and wanted not in first:
        raise BadInput(f"--arm {wanted!r} is not in study {study.name}; its arms: {', '.join(study.arms)}")
    return [experiment for arm, experiment in first.items() if wanted in (None, arm)]


def _constants(options: argparse.Namespace, experiment: Any) -> Any:
    """What a plan or projection knows of how uneven the router is."""
    from moelab.memory import memory_constants

    if options.load is None:
        return memory_constants
    from moelab.runs.expert_load import measured_constants

    return measured_constants(options.load, experiment)


def _arms_and_model(options: argparse.Namespace) -> tuple[list[Any], Any]:
    """The arms that a plan or projection is of, and the model of ``--from-hf``; None without it."""
    from moelab.experiment_file import parse_overrides, read_study
    from moelab.model.hugging_face import read_model

    if not (options.file or options.from_hf):
        raise BadInput("give the FILE of an experiment or study, a model with --from-hf, or both")
    model = read_model(options.from_hf) if options.from_hf else None
    overrides = [*(model.overrides if model else ()), *options.set]
    if model and not options.file and not any(one.startswith("seq_len=") for one in options.set):
        overrides.append(f"seq_len={ASSUMED_SEQ_LEN}")
        print(f"moelab: seq_len is not given; {ASSUMED_SEQ_LEN} tokens are assumed", file=sys.stderr)  # noqa: T201
    if model and not options.file and getattr(options, "search", False):
        assumed = _searched_like(overrides, given=parse_overrides(options.set).keys())
        overrides += assumed
        print(f"moelab: assumed, because they are not given: {', '.join(assumed)}", file=sys.stderr)  # noqa: T201
    return _chosen_arms(read_study(options.file, overrides), options.arm), model


def _searched_like(overrides: Sequence[str], *, given: Collection[str]) -> list[str]:
    """Of a model without a file, what a search takes: the whole cluster, and what a training there would set."""
    from moelab.experiment_file import parse_overrides, read_hardware
    from moelab.hardware import cluster_of

    known = parse_overrides(overrides)
    assumed = {"compile": "model+loss", "dataset": "c4"}
    assumed["local_batch"] = str(max(1, ASSUMED_TOKENS // int(known["seq_len"])))
    if "hardware" in known:
        cluster = cluster_of(read_hardware(str(known["hardware"])))
        assumed |= {"nodes": str(cluster.nodes), "gpus_per_node": str(cluster.node.gpus)}
    return [f"{field}={value}" for field, value in assumed.items() if field not in given]


def _plan(options: argparse.Namespace) -> int:
    from moelab.experiment_file import write_experiment

    arms, model = _arms_and_model(options)
    if options.search and len(arms) == 1:
        return _search(options, arms[0])
    from moelab.plan import model_text, plan, plan_text, study_text, titan_config, titan_text, verified, verified_text

    if len(arms) > 1:
        if options.search or options.verify or options.config or options.write:
            names = ", ".join(experiment.arm for experiment in arms)
            raise BadInput(f"{options.file} holds {len(arms)} arms; name one for this with --arm: {names}")
        plans = [plan(experiment, constants=_constants(options, experiment)) for experiment in arms]
        _show(options, {"plans": [{"arm": one.experiment.arm, **one.to_json()} for one in plans]}, study_text(plans))
        return 0 if all(one.verdict.legal for one in plans) else 3
    (experiment,) = arms
    if options.write:
        options.write.write_text(write_experiment(experiment), encoding="utf-8")
    one_in_file = not (model or options.set or options.arm)
    path = options.write or (options.file if one_in_file else None)
    planned = plan(experiment, path=path, constants=_constants(options, experiment))
    as_json, as_text = planned.to_json(), plan_text(planned)
    if model:
        as_json["from_hf"] = model.to_json()
        as_text += f"\n\n{model_text(model)}"
    if planned.verdict.legal and options.config:
        as_json["titan_config"] = titan_config(experiment)
        as_text += f"\n\n{titan_text(as_json['titan_config'])}"
    if planned.verdict.legal and options.verify:
        as_json["verify"] = verified(planned, options.ranks)
        as_text += f"\n\n{verified_text(as_json['verify'])}"
    _show(options, as_json, as_text)
    return 0 if planned.verdict.legal else 3


def _search(options: argparse.Namespace, experiment: Any) -> int:
    from moelab.experiment_file import parse_overrides, write_experiment
    from moelab.hardware import gpu_of
    from moelab.plan import headroom_gib
    from moelab.search import VARIED, recommend, recommendation_text, search, search_text

    if options.load:
        raise BadInput("--load is of one plan; leave it out with --search")
    given = parse_overrides(options.set).keys()
    fixed = sorted(given & set(VARIED))
    sizes = {"limit": options.limit, "global_batch": options.global_batch}
    if gpu_of(experiment.hardware).bf16_tflops is not None:
        fixed += sorted(given & {"activation_checkpoint"})
        by_speed = recommend(experiment, fixed=fixed, **sizes)
        name = options.from_hf or ""
        as_json, as_text, found = by_speed.to_json(name), recommendation_text(by_speed, name), by_speed.ranked
    else:
        plain = search(experiment, fixed=fixed, headroom_gib=headroom_gib(experiment), **sizes)
        as_json, as_text, found = plain.to_json(), search_text(plain), plain.candidates
    if found and options.write:
        options.write.write_text(write_experiment(found[0].experiment), encoding="utf-8")
    _show(options, as_json, as_text)
    return 0 if found else 3


def _project(options: argparse.Namespace) -> int:
    from moelab.projection.calibration import CALIBRATION, read_calibration
    from moelab.projection.project import arms_text, project, projection_text
    from moelab.search import better_layout, better_text, chosen_fields

    chosen, _ = _arms_and_model(options)
    calibration = read_calibration(options.calibration) if options.calibration else CALIBRATION
    projections = {
        experiment.arm: project(experiment, calibration=calibration, constants=_constants(options, experiment))
        for experiment in chosen
    }
    better = {arm: better_layout(one, calibration) for arm, one in projections.items()}
    as_json = {
        arm: one.to_json() | {"better": found and {"tps": found.tps, "set": chosen_fields(found.experiment)}}
        for (arm, one), found in zip(projections.items(), better.values(), strict=True)
    }
    told = better_text(better, projections, str(options.file or f"--from-hf {options.from_hf}"))
    if len(projections) == 1:
        ((arm, one),) = projections.items()
        _show(options, as_json[arm], projection_text(one) + told)
    else:
        _show(options, {"arms": as_json}, arms_text(projections) + told)
    return 0


def _explain(options: argparse.Namespace) -> int:
    from moelab.explain.explanation import explain, explanation_text

    experiment = _traced_experiment(options)  # before a file of gigabytes is read
    if experiment is None and (options.fit or options.calibration):
        raise BadInput("--fit and --calibration need to know what ran: give its YAML with --against")
    explained = explain(options.paths, rank=options.rank, step=options.step)
    as_json, as_text = {**explained.to_json(), "predicted_ms": {}}, explanation_text(explained)
    if experiment is not None:
        try:
            more_json, more_text = _against(options, explained, experiment)
        except MoelabError as error:
            if options.against:
                raise
            more_text = f"note: not compared with the run's own prediction: {error}"
            more_json = {"notes": [*explained.notes, more_text.removeprefix("note: ")]}
        as_json |= more_json
        as_text += f"\n\n{more_text}"
    _show(options, as_json, as_text)
    return 0


def _against(options: argparse.Namespace, explained: Any, experiment: Any) -> tuple[dict[str, Any], str]:
    """An explanation beside the prediction, as JSON and as text; keeps a calibration if one is asked for."""
    from moelab.explain.against import compare, comparison_text, fit
    from moelab.projection.calibration import CALIBRATION, read_calibration, with_values, write_calibration

    calibration = read_calibration(options.calibration) if options.calibration else CALIBRATION
    if not options.fit:
        compared = compare(explained, experiment, calibration)
        return compared.to_json(), comparison_text(compared)
    values = fit(explained, experiment)
    compared = compare(explained, experiment, with_values(**values))
    source = f"{', '.join(explained.files)}: {experiment.model_label}, {experiment.arm}, {explained.gpu}"
    path = write_calibration(options.fit, values, source)
    said = f"fitted {', '.join(values)}; use it with --calibration {options.fit} ({path})"
    as_json = {**compared.to_json(), "fit": {"file": str(path), "constants": values}}
    return as_json, f"{comparison_text(compared)}\n\n{said}"


def _traced_experiment(options: argparse.Namespace) -> Any:
    """What ran: of the file that is given, else of the run that the trace lies in; None where neither says."""
    from moelab.experiment_file import read_study
    from moelab.runs.directory import EXPERIMENT_FILE

    if options.against:
        arms = _chosen_arms(read_study(options.against, options.set), options.arm)
        if len(arms) > 1:
            names = ", ".join(experiment.arm for experiment in arms)
            raise BadInput(
                f"{options.against} holds {len(arms)} arms; name the one that was traced with --arm: {names}"
            )
        return arms[0]
    if options.arm or options.set:
        raise BadInput("--arm and --set are about --against: give the YAML of what ran")
    own = options.paths[0] / EXPERIMENT_FILE
    return _chosen_arms(read_study(own), None)[0] if own.is_file() else None


def _run(options: argparse.Namespace) -> int:
    from moelab.experiment_file import read_study
    from moelab.launch.local import run_study

    study = read_study(options.file, options.set)
    done = run_study(study, options.runs, on_failure=options.on_failure)
    complete = len(done.runs) - len(done.failed)
    lines = [_line(str(run.path), run.status) for run in done.runs]
    summary = f"{study.name}: {complete} of {len(study.experiments)} complete, {done.trained} trained now"
    rows = [_row(run.name, run.status) for run in done.runs]
    as_json = {"study": study.name, "trained": done.trained, "runs": rows, **done.found.to_json()}
    _show(options, as_json, "\n".join([*lines, summary]))
    return 0 if complete == len(study.experiments) else 1


def _submit(options: argparse.Namespace) -> int:
    from moelab.experiment_file import Study, read_study
    from moelab.launch.cluster import read_cluster
    from moelab.launch.submit import adopt, dry_run, submit

    study = read_study(options.file, options.set)
    if options.arm:
        (wanted,) = _chosen_arms(study, options.arm)
        study = Study(name=study.name, experiments=tuple(one for one in study.experiments if one.arm == wanted.arm))
    cluster = read_cluster(options.cluster, options.cluster_set)
    runs = options.runs or Path(cluster.runs or "runs")
    if options.dry_run:
        done = dry_run(study, runs, cluster, after=options.after)
        _show(options, done.to_json(), "\n".join(done.scripts).rstrip("\n"), exact=True)
    else:
        as_job, after = options.adopt, options.after
        done = adopt(study, runs, as_job) if as_job else submit(study, runs, cluster, submit=True, after=after)
        _show(options, done.to_json(), done.as_text())
    return 0


def _on_runs(options: argparse.Namespace) -> int:
    """Ask for the runs at a path, cancel or requeue them; then say where they are, and which no report will use."""
    from moelab.launch import status
    from moelab.runs.directory import discover

    if options.follow:
        if options.json:
            raise BadInput("--follow shows text as it comes; leave it out to get one JSON object")
        try:
            status.follow(options.path, sys.stdout)
        except KeyboardInterrupt:
            print("moelab: no longer watching; the runs go on", file=sys.stderr)  # noqa: T201
        return 0
    if not options.path.is_dir():
        raise BadInput(f"{options.path} is not a folder; give a run, a study or the folder of all studies")
    folder = discover(options.path.absolute())
    both = list(zip(folder.all_runs, getattr(status, options.what)(folder.all_runs), strict=True))
    lines = [*(_line(run.name, status) for run, status in both), *folder.lines]
    rows = [_row(run.name, status) for run, status in both]
    _show(options, {"runs": rows, **folder.to_json()}, "\n".join(lines) or f"no runs at {options.path}")
    return 0


def _collect(options: argparse.Namespace) -> int:
    from moelab.privacy import each_text, without_secrets
    from moelab.runs.collect import collect, collect_runs
    from moelab.runs.directory import discover

    discovered = discover(options.path.absolute())
    runs = collect_runs(discovered.runs) or collect(options.path)
    if not options.json:
        _show(options, None, "\n".join([*(run.summary for run in runs), *discovered.lines]))
        return 0
    print('{"runs": [', end="\n ")  # noqa: T201 - one run at a time: all rows are hundreds of MB
    for number, run in enumerate(runs):
        print(",\n " * bool(number) + run.json_text(), end="")  # noqa: T201
    others = each_text(without_secrets, discovered.to_json())
    print(f"\n],{json.dumps(others, indent=1)[1:]}")  # noqa: T201
    return 0


def _report(options: argparse.Namespace) -> int:
    from moelab.study_report import judge_paths, write_study_report

    judged = judge_paths(
        options.paths,
        reference=options.reference,
        final_fraction=options.final_fraction,
        margin_nats=options.margin,
        margin_cap_nats=options.margin_cap,
        dropped_seeds=options.drop_seed,
    )
    usual = Path("comparison.html") if judged.study is None else options.paths[0] / "report.html"
    path = write_study_report(judged, options.output or usual, with_paths=options.with_paths)
    _show(options, {**judged.to_json(), "report": str(path)}, f"{judged.as_text()}\nreport: {path}")
    return 0
