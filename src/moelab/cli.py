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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from moelab import __version__
from moelab.errors import BadInput, MoelabError

DESCRIPTION = (
    "How much faster can a Mixture-of-Experts model be pre-trained with MXFP8 experts and DeepEP, on your hardware, "
    "without hurting the loss?"
)

ASSUMED_SEQ_LEN = 4096
"""Of a Hugging Face model: an experiment's own default is for a laptop."""
ASSUMED_TOKENS = 65_536
"""Tokens per GPU and step, where a search is given a model alone: as in published runs on hundreds of GPUs."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    options = build_parser().parse_args(arguments)
    # SIGTERM, which schedulers and containers send, acts as Ctrl-C: ranks end in order and the status is written.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return int(options.run(options))
    except MoelabError as error:
        from moelab.privacy import without_secrets

        _say(without_secrets(str(error)))  # it may quote a file
        return error.exit_code
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        # Python flushes stdout once more when it exits, and would print a traceback there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:  # a full disk, a missing permission: a line for the user, and no traceback
        place = error.filename2 or error.filename  # of a rename, the file that was to be written
        _say(f"{place}: {error.strerror}" if place else str(error))
        return 1
    except KeyboardInterrupt:
        _say("interrupted; what was finished is kept")
        return 1


def build_parser() -> argparse.ArgumentParser:
    """The parser with all verbs."""
    parser = argparse.ArgumentParser(prog="moelab", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"moelab {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)

    def verb(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        sentence = f"{text[0].upper()}{text[1:]}."
        added: argparse.ArgumentParser = verbs.add_parser(name, help=text, description=sentence)
        added.set_defaults(run=run)
        added.add_argument("--json", action="store_true", help="print one JSON object")
        return added

    def fields(parser: argparse.ArgumentParser, of: str = "a field", arm: str = "") -> None:
        if arm:
            parser.add_argument("--arm", help=arm)
        parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=f"override {of}")

    one_arm = "one arm of a study, such as mxfp8_standard or bf16_deepep_round-robin"
    study_help = "YAML file of an experiment, a list of experiments or a study, or the name of a study such as nano"
    runs_help = "folder of all studies; default: the cluster profile's, or runs"
    load_help = "a run, or its expert_load.parquet: use the expert load it measured (routing: learned)"
    doctor = verb("doctor", _doctor, "report what this machine can run, and what it lacks for the rest")
    doctor.add_argument(
        "--smoke", action="store_true", help="send tokens between two ranks, through DeepEP if possible"
    )
    doctor.add_argument("--hardware", default="local", metavar="PROFILE", help="compare the network with this profile")
    doctor.add_argument("--cluster", metavar="PROFILE", help="check a cluster instead, before a study goes there")
    override_help = "override a field of the cluster profile"
    doctor.add_argument("--cluster-set", action="append", default=[], metavar="KEY=VALUE", help=override_help)
    doctor.add_argument("--file", type=Path, help=f"with --cluster: {study_help}")
    doctor.add_argument("--runs", type=Path, metavar="DIR", help=f"with --cluster: {runs_help}")
    doctor.add_argument("--nodes", action="store_true", help="with --cluster: check every node too, through srun")

    text = "write the notebooks, their papermill profiles and the studies to a folder; files you changed are kept"
    notebooks = verb("notebooks", _notebooks, text)
    notebooks.add_argument("folder", type=Path, metavar="DIR", help="folder to write to; made if it does not exist")

    plan = verb("plan", _plan, "check whether an experiment is legal and fits into memory; show how it is launched")
    project = verb("project", _project, "predict tokens/s/GPU, and where the time of a step goes")
    for each, does in ((plan, "plan"), (project, "project")):
        each.add_argument("file", type=Path, nargs="?", help=study_help)
        from_hf_help = "take the model from a Hugging Face config.json, its folder, or by name, such as Qwen3-30B-A3B"
        each.add_argument("--from-hf", metavar="CONFIG", help=from_hf_help)
        fields(each, arm=f"{does} {one_arm}")
        each.add_argument("--load", type=Path, metavar="RUN", help=load_help)
    write_help = "write the experiment to a file, as planned or, with --search, in the best layout"
    plan.add_argument("--write", type=Path, metavar="PATH", help=write_help)
    config_help = "also print the configuration that TorchTitan resolves (loads torch)"
    plan.add_argument("--config", action="store_true", help=config_help)
    plan.add_argument("--verify", action="store_true", help="build it with TorchTitan, without a GPU (loads torch)")
    ranks_help = "global ranks that --verify builds; default: the first of each pipeline rank"
    plan.add_argument("--ranks", type=_ranks, metavar="R,R", help=ranks_help)
    search_help = (
        "find the best layout, its speed and what each technique gains; fields given by --set stay as they are"
    )
    plan.add_argument("--search", action="store_true", help=search_help)
    plan.add_argument("--limit", type=_positive, default=10, metavar="N", help="how many layouts --search lists")
    plan.add_argument("--global-batch", type=_positive, metavar="N", help="sequences per step that --search keeps")
    constants_help = "use the constants that moelab explain --fit saved: a name or a path"
    project.add_argument("--calibration", metavar="NAME", help=constants_help)

    text = "show where the time of a traced step went, and why it differs from the prediction"
    explain = verb("explain", _explain, text)
    paths_help = "a Kineto trace (.json, .json.gz), several ranks' traces of one step, their folder, or a run"
    explain.add_argument("paths", type=Path, nargs="+", metavar="path", help=paths_help)
    explain.add_argument("--rank", type=int, metavar="R", help="rank to show; default: the lowest")
    step_help = "profiler step to show, where a trace has several; default: all of them"
    explain.add_argument("--step", type=int, metavar="N", help=step_help)
    against_help = "YAML of what ran, to compare with its prediction; a run brings its own"
    explain.add_argument("--against", type=Path, metavar="FILE", help=against_help)
    fields(explain, of="a field of --against", arm="the arm that ran, where --against is a study")
    explain.add_argument("--calibration", metavar="NAME", help="predict with the constants of an earlier --fit")
    explain.add_argument("--fit", metavar="NAME", help="fit the model's constants to this step and save them as NAME")

    run = verb("run", _run, "train an experiment or study on this machine; finished runs are left alone")
    submit = verb("submit", _submit, "submit an experiment or study to Slurm; finished and queued runs are left alone")
    for each in (run, submit):
        each.add_argument("file", type=Path, help=study_help)
    fields(run, of="a field of every experiment")
    fields(submit, of="a field of every experiment", arm=f"submit {one_arm}")
    failure_help = "what to do after a run failed; default: continue with the next one"
    run.add_argument("--on-failure", choices=["continue", "stop"], default="continue", help=failure_help)
    run.add_argument("--runs", type=Path, default=Path("runs"), metavar="DIR", help="folder of all studies")
    submit.add_argument("--cluster", required=True, metavar="PROFILE", help="name or path of a cluster profile")
    submit.add_argument("--cluster-set", action="append", default=[], metavar="KEY=VALUE", help=override_help)
    submit.add_argument("--after", metavar="JOB", help="start only after this job has succeeded, such as 123 or 123_4")
    submit.add_argument("--adopt", metavar="JOB", help="tell moelab the number of a job that sbatch did not report")
    submit.add_argument("--runs", type=Path, metavar="DIR", help=runs_help)
    submit.add_argument("--dry-run", action="store_true", help="print the exact script and change nothing")

    cancel = verb("cancel", _on_runs, "cancel the Slurm jobs of a run, a study or all studies")
    requeue = verb("requeue", _on_runs, "restart running, failed or cancelled jobs from their newest checkpoint")
    status = verb("status", _on_runs, "show the state of runs; Slurm is asked about its jobs")
    for each, name in ((cancel, "cancel"), (requeue, "requeue"), (status, "refresh")):
        each.set_defaults(what=name, follow=False)
    path_help = "folder of a run, a study or all studies"
    for each in (cancel, requeue):
        each.add_argument("path", type=Path, help=path_help)
    status.add_argument("path", type=Path, nargs="?", default=Path("runs"), help=f"{path_help}; default: runs")
    status.add_argument("--follow", action="store_true", help="keep watching; Ctrl-C does not stop the runs")
    collect = verb("collect", _collect, "read the metrics of runs, TorchTitan logs, TensorBoard folders or W&B exports")
    collect.add_argument("path", type=Path, help="a run, a study, a log, a TensorBoard folder or a W&B export")

    report = verb("report", _report, "judge a study, or compare any runs, and write an HTML report")
    paths_help = "a study; or several studies, runs, logs, TensorBoard folders or W&B exports"
    report.add_argument("paths", type=Path, nargs="+", metavar="path", help=paths_help)
    reference_help = "arm that the others are compared with; default: bf16_standard"
    report.add_argument("--reference", default="bf16_standard", metavar="ARM", help=reference_help)
    margin_help = "equivalence margin in nats; default: from the spread between seeds"
    report.add_argument("--margin", type=float, metavar="NATS", help=margin_help)
    # argparse formats its help with %, so that a sign of percent is two.
    cap_help = "upper limit of a margin that comes from the seeds; default: 1 %% of the loss"
    report.add_argument("--margin-cap", type=float, metavar="NATS", help=cap_help)
    drop_help = "leave a seed out of all arms; the report says so"
    report.add_argument("--drop-seed", type=int, action="append", default=[], metavar="K", help=drop_help)
    fraction_help = "share of the steps, at the end, that the final loss is averaged over; default: 0.1"
    report.add_argument("--final-fraction", type=float, default=0.1, metavar="SHARE", help=fraction_help)
    output_help = "file to write; default: report.html in the study's folder, or comparison.html here"
    report.add_argument("--output", type=Path, metavar="FILE", help=output_help)
    report.add_argument("--with-paths", action="store_true", help="keep folder, host and user names in the report")
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


def _say(text: str) -> None:
    """Print a line on stderr, where it does not mix with the result."""
    print(f"moelab: {text}", file=sys.stderr)  # noqa: T201


def _show(options: argparse.Namespace, as_json: Any, as_text: str, *, exact: bool = False) -> None:
    """Print a result, as JSON if asked; since it may quote logs, it is cleaned of keys and of control characters.

    ``exact`` is for what is run as it stands, such as a script: a cluster profile with a key in it is refused.
    """
    from moelab.privacy import each_text, without_secrets

    if options.json:
        cleaned = str if exact else functools.cache(without_secrets)  # of thousands of runs most words are the same
        text = json.dumps(each_text(cleaned, as_json), indent=1, allow_nan=False)
    else:
        text = as_text if exact else without_secrets(as_text)
    print(text, flush=True)  # noqa: T201 - results go to stdout


def _row(name: str, status: Any) -> dict[str, str | None]:
    """The state of a run, for a program."""
    return {"run": name, "status": status.state.value, "reason": status.reason, "job_id": status.job_id}


def _doctor(options: argparse.Namespace) -> int:
    from moelab.health.doctor import examine

    if not options.cluster:
        if options.nodes or options.file or options.cluster_set or options.runs:
            raise BadInput("--nodes, --file, --cluster-set and --runs check a cluster: name it with --cluster")
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
    """The first experiment of each arm, or only of the one that is asked for."""
    first = {experiment.arm: experiment for experiment in study.first_of_arms}
    longer = [arm for arm in first if wanted is not None and arm.startswith(f"{wanted}_")]
    # A short name will do where it means one arm.
    if wanted not in first and len(longer) == 1:  # bf16_standard is bf16_standard_round-robin in a study of that alone
        wanted = longer[0]
    if wanted is not None and wanted not in first:
        raise BadInput(f"--arm {wanted!r} is not in study {study.name}; its arms: {', '.join(study.arms)}")
    return [experiment for arm, experiment in first.items() if wanted in (None, arm)]


def _constants(options: argparse.Namespace, experiment: Any) -> Any:
    """The constants for how unevenly the router loads experts, measured with ``--load``."""
    from moelab.planning.memory import memory_constants

    if options.load is None:
        return memory_constants
    from moelab.planning.memory.measured import measured_constants

    return measured_constants(options.load, experiment)


def _arms_and_model(options: argparse.Namespace) -> tuple[list[Any], Any]:
    """The arms to plan or project, and the model of ``--from-hf``; None without it."""
    from moelab.experiment_file import parse_overrides, read_study
    from moelab.model.hugging_face import read_model

    if not (options.file or options.from_hf):
        raise BadInput("give the FILE of an experiment or study, a model with --from-hf, or both")
    model = read_model(options.from_hf) if options.from_hf else None
    overrides = [*(model.overrides if model else ()), *options.set]
    if model and not options.file:
        known = parse_overrides(overrides)
        fields = _assumed(known, for_search=getattr(options, "search", False))
        if assumed := [f"{field}={value}" for field, value in fields.items() if field not in known]:
            _say(f"assumed, because not given: {', '.join(assumed)}")
        overrides += assumed
    return _chosen_arms(read_study(options.file, overrides), options.arm), model


def _assumed(known: Mapping[str, Any], *, for_search: bool) -> dict[str, Any]:
    """What a model without an experiment takes; a search also takes the whole cluster and usual training settings."""
    from moelab.experiment import OwnHardware
    from moelab.hardware import cluster_of

    if not for_search:
        return {"seq_len": ASSUMED_SEQ_LEN}
    local_batch = max(1, ASSUMED_TOKENS // int(known.get("seq_len", ASSUMED_SEQ_LEN)))
    fields = {"seq_len": ASSUMED_SEQ_LEN, "compile": "model+loss", "dataset": "c4", "local_batch": local_batch}
    if "hardware" in known:
        hardware = known["hardware"]  # a file of one's own has been read already
        cluster = cluster_of(hardware if isinstance(hardware, OwnHardware) else str(hardware))
        fields |= {"nodes": cluster.nodes, "gpus_per_node": cluster.node.gpus}
    return fields


def _plan(options: argparse.Namespace) -> int:
    if options.global_batch and not options.search:
        raise BadInput("--global-batch is of --search; a single plan has the sequences that local_batch makes")
    if options.ranks and not options.verify:
        raise BadInput("--ranks is of --verify; without it no rank is built")
    arms, model = _arms_and_model(options)
    if options.search and len(arms) == 1:
        return _search(options, arms[0])
    from moelab.planning.plan import (
        model_text,
        plan,
        plan_text,
        study_text,
        titan_config,
        titan_text,
        verified,
        verified_text,
    )

    if len(arms) > 1:
        if options.search or options.verify or options.config or options.write:
            names = ", ".join(experiment.arm for experiment in arms)
            raise BadInput(f"{options.file} holds {len(arms)} arms; choose one with --arm: {names}")
        plans = [plan(experiment, constants=_constants(options, experiment)) for experiment in arms]
        _show(options, {"plans": [{"arm": one.experiment.arm, **one.to_json()} for one in plans]}, study_text(plans))
        return 0 if all(one.verdict.legal for one in plans) else 3
    (experiment,) = arms
    if options.write:
        _write_experiment(options.write, experiment)
    # The launch command names a file only where the file alone is this experiment.
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


def _write_experiment(path: Path, experiment: Any) -> None:
    from moelab.experiment_file import write_experiment
    from moelab.files import write_whole

    write_whole(path, write_experiment(experiment))


def _search(options: argparse.Namespace, experiment: Any) -> int:
    from moelab.experiment_file import parse_overrides
    from moelab.hardware import gpu_of
    from moelab.layout import check
    from moelab.planning.advice import recommend, recommendation_text, search_text
    from moelab.planning.plan import headroom_gib
    from moelab.planning.search import VARIED, search

    if options.load:
        raise BadInput("--load applies to a single plan; leave it out with --search")
    given = parse_overrides(options.set).keys()
    fixed = sorted(given & set(VARIED))
    sizes = {"limit": options.limit, "global_batch": options.global_batch}
    # Without the GPU's peak rates there is no speed to rank layouts by, only their legality and memory.
    if gpu_of(experiment.hardware).bf16_tflops is not None:
        fixed += sorted(given & {"activation_checkpoint"})
        by_speed = recommend(experiment, fixed=fixed, **sizes)
        name = options.from_hf or ""
        as_json, as_text, layouts = by_speed.to_json(name), recommendation_text(by_speed, name), by_speed.ranked
    else:
        plain = search(experiment, fixed=fixed, headroom_gib=headroom_gib(experiment), **sizes)
        as_json, as_text, layouts = plain.to_json(), search_text(plain), plain.candidates
        if not plain.legal:
            as_text = "\n".join([as_text, *check(experiment).reasons])
    if layouts and options.write:
        _write_experiment(options.write, layouts[0].experiment)
    _show(options, as_json, as_text)
    return 0 if layouts else 3


def _project(options: argparse.Namespace) -> int:
    from moelab.planning.advice import better_layout, better_text
    from moelab.planning.project import arms_text, project, projection_text
    from moelab.planning.search import chosen_fields
    from moelab.planning.time.calibration import CALIBRATION, read_calibration

    chosen, _ = _arms_and_model(options)
    calibration = read_calibration(options.calibration) if options.calibration else CALIBRATION
    projections = {
        experiment.arm: project(experiment, calibration=calibration, constants=_constants(options, experiment))
        for experiment in chosen
    }
    better = {arm: better_layout(one, calibration) for arm, one in projections.items()}
    as_json = {
        arm: one.to_json() | {"better": layout and {"tps": layout.tps, "set": chosen_fields(layout.experiment)}}
        for (arm, one), layout in zip(projections.items(), better.values(), strict=True)
    }
    advice = better_text(better, projections, str(options.file or f"--from-hf {options.from_hf}"))
    if len(projections) == 1:
        ((arm, one),) = projections.items()
        _show(options, as_json[arm], projection_text(one) + advice)
    else:
        _show(options, {"arms": as_json}, arms_text(projections) + advice)
    return 0


def _explain(options: argparse.Namespace) -> int:
    from moelab.traces.explanation import explain, explanation_text

    experiment = _traced_experiment(options)  # before a file of gigabytes is read
    if experiment is None and (options.fit or options.calibration):
        raise BadInput("--fit and --calibration need the experiment that ran: give its YAML with --against")
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
    """An explanation beside the prediction, as JSON and as text; saves a calibration with ``--fit``."""
    from moelab.planning.time.calibration import CALIBRATION, read_calibration, with_values, write_calibration
    from moelab.traces.against import compare, comparison_text, fit

    calibration = read_calibration(options.calibration) if options.calibration else CALIBRATION
    if not options.fit:
        compared = compare(explained, experiment, calibration)
        return compared.to_json(), comparison_text(compared)
    values = fit(explained, experiment)
    compared = compare(explained, experiment, with_values(**values))
    source = f"{', '.join(explained.files)}: {experiment.model_label}, {experiment.arm}, {explained.gpu}"
    path = write_calibration(options.fit, values, source)
    fitted = f"fitted {', '.join(values)}; use them with --calibration {options.fit} ({path})"
    as_json = {**compared.to_json(), "fit": {"file": str(path), "constants": values}}
    return as_json, f"{comparison_text(compared)}\n\n{fitted}"


def _traced_experiment(options: argparse.Namespace) -> Any:
    """What ran: by ``--against``, or by the run that holds the trace; None if neither is there."""
    from moelab.experiment_file import read_study
    from moelab.runs.directory import EXPERIMENT_FILE

    if options.against:
        arms = _chosen_arms(read_study(options.against, options.set), options.arm)
        if len(arms) > 1:
            names = ", ".join(experiment.arm for experiment in arms)
            raise BadInput(f"{options.against} holds {len(arms)} arms; name the traced one with --arm: {names}")
        return arms[0]
    if options.arm or options.set:
        raise BadInput("--arm and --set modify --against: give the YAML of what ran")
    own = options.paths[0] / EXPERIMENT_FILE
    return _chosen_arms(read_study(own), None)[0] if own.is_file() else None


def _run(options: argparse.Namespace) -> int:
    from moelab.experiment_file import read_study
    from moelab.launch.local import run_study

    study = read_study(options.file, options.set)
    done = run_study(study, options.runs, on_failure=options.on_failure)
    complete = len(done.runs) - len(done.failed)
    lines = [f"{run.path}: {run.status.in_words()}" for run in done.runs]
    summary = f"{study.name}: {complete} of {len(study.experiments)} complete, {done.trained} trained now"
    rows = [_row(run.name, run.status) for run in done.runs]
    as_json = {"study": study.name, "trained": done.trained, "runs": rows, **done.discovered.to_json()}
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
        done = adopt(study, runs, as_job) if as_job else submit(study, runs, cluster, after=after)
        _show(options, done.to_json(), done.as_text())
    return 0


def _on_runs(options: argparse.Namespace) -> int:
    """Update, cancel or requeue the runs at a path; then show their states, and which ones no report will use."""
    from moelab.launch import status
    from moelab.runs.directory import discover

    if options.follow:
        if options.json:
            raise BadInput("--follow prints text as it comes; leave it out to get one JSON object")
        try:
            status.follow(options.path, sys.stdout)
        except KeyboardInterrupt:
            _say("no longer watching; the runs go on")
        return 0
    if not options.path.is_dir():
        raise BadInput(f"{options.path} is not a folder; give a run, a study or the folder of all studies")
    folder = discover(options.path.absolute())
    # `refresh`, `cancel` or `requeue` of launch/status.py, as the parser set it.
    both = list(zip(folder.all_runs, getattr(status, options.what)(folder.all_runs), strict=True))
    lines = [*(f"{run.name}: {now.in_words()}" for run, now in both), *folder.lines]
    rows = [_row(run.name, now) for run, now in both]
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
    # The list of runs is closed by hand, so the rest of the object follows without its opening brace.
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
    # Only a study has a folder that its page belongs in.
    usual = Path("comparison.html") if judged.study is None else options.paths[0] / "report.html"
    path = write_study_report(judged, options.output or usual, with_paths=options.with_paths)
    _show(options, {**judged.to_json(), "report": str(path)}, f"{judged.as_text()}\nreport: {path}")
    return 0
