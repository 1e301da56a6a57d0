"""The command line: results on stdout, progress on stderr, exit 0 done, 1 failed, 2 bad input, 3 refused.

A verb is a function of :mod:`moelab.door` with its options; here are their parser and the printing of the answer.
Nothing but the standard library is imported before a verb is chosen, so that ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import moelab
from moelab.errors import BadInput, MoelabError

if TYPE_CHECKING:
    from moelab.answers import Answer

DESCRIPTION = (
    "Plan, run and judge the pre-training of Mixture-of-Experts models with MXFP8 experts and DeepEP, on your hardware."
)
STUDY_HELP = "YAML file of an experiment, a list of experiments or a study, or the name of a study such as nano"
RUNS_HELP = "folder of all studies; default: the cluster profile's, $MOELAB_RUNS, or runs of this checkout or folder"
PATH_HELP = "folder of a run, a study or all studies, or the name of a study"
CLUSTER_SET_HELP = "override a field of the cluster profile"
ONE_ARM = "one arm of a study, such as mxfp8_standard or bf16_deepep_round-robin"
Verb = Callable[[argparse.Namespace], "Answer | None"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    options = build_parser().parse_args(arguments)
    # SIGTERM, which schedulers and containers send, acts as Ctrl-C: ranks end in order and the status is written.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return _show(options, options.run(options))
    except MoelabError as error:
        _say(str(error))
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


def _say(text: str) -> None:
    """Print a line on stderr, where it does not mix with the result."""
    from moelab.privacy import without_secrets

    print(f"moelab: {without_secrets(text)}", file=sys.stderr)  # noqa: T201 - it may name a file


def _show(options: argparse.Namespace, answer: Answer | None) -> int:
    """Print an answer, as JSON if asked; returns the exit code."""
    if answer is None:  # it was printed as it came
        return 0
    for aside in answer.asides:
        _say(aside)
    if options.json:
        answer.write_json(sys.stdout)
    else:
        print(answer)  # noqa: T201 - results go to stdout
    sys.stdout.flush()
    return answer.exit_code


# The verbs


def _fields(options: argparse.Namespace) -> dict[str, Any]:
    """Fields of ``--set`` as keywords."""
    from moelab.door import FIELDS
    from moelab.experiment import Experiment
    from moelab.experiment_file import parse, parse_overrides

    fields = parse_overrides(options.set)
    # What is no field would be taken for an option of the function.
    if unknown := {name: value for name, value in fields.items() if name not in FIELDS}:
        parse(Experiment, unknown)
    return fields


def _doctor(o: argparse.Namespace) -> Answer:
    cluster = {"cluster": o.cluster, "cluster_set": o.cluster_set, "runs": o.runs, "nodes": o.nodes}
    return moelab.doctor(o.file, smoke=o.smoke, hardware=o.hardware, **cluster)


def _notebooks(o: argparse.Namespace) -> Answer:
    from moelab.answers import Plain
    from moelab.notebooks.shipped import write_out

    done = write_out(o.folder)
    return Plain(text=done.as_text(), content=done.to_json())


def _plan(o: argparse.Namespace) -> Answer:
    if o.global_batch and not o.search:
        raise BadInput("--global-batch requires --search; a single plan has the sequences that local_batch makes")
    if o.ranks and not o.verify:
        raise BadInput("--ranks requires --verify; without it no rank is built")
    given: dict[str, Any] = {"arm": o.arm, "from_hf": o.from_hf, "write": o.write, **_fields(o)}
    if not o.search:
        return moelab.plan(o.file, load=o.load, config=o.config, verify=o.verify, ranks=o.ranks, **given)
    if o.load:
        raise BadInput("--load applies to a single plan; leave it out with --search")
    return moelab.search(o.file, limit=o.limit, global_batch=o.global_batch, **given)


def _project(o: argparse.Namespace) -> Answer:
    given = {"arm": o.arm, "from_hf": o.from_hf, "load": o.load, "calibration": o.calibration}
    return moelab.project(o.file, document_tokens=o.document_tokens, **given, **_fields(o))


def _explain(o: argparse.Namespace) -> Answer:
    given = {"rank": o.rank, "step": o.step, "arm": o.arm, "calibration": o.calibration, "fit": o.fit}
    return moelab.explain(*o.paths, against=o.against, **given, **_fields(o))


def _run(o: argparse.Namespace) -> Answer:
    return moelab.run(o.file, runs=o.runs, on_failure=o.on_failure, **_fields(o))


def _submit(o: argparse.Namespace) -> Answer:
    given = {"cluster": o.cluster, "cluster_set": o.cluster_set, "after": o.after, "runs": o.runs}
    return moelab.submit(o.file, arm=o.arm, dry_run=o.dry_run, **given, **_fields(o))


def _status(o: argparse.Namespace) -> Answer | None:
    if not o.follow:
        return moelab.status(o.path)
    if o.json:
        raise BadInput("--follow prints text as it comes; leave it out to get one JSON object")
    try:
        moelab.watch(o.path)
    except KeyboardInterrupt:
        _say("no longer watching; the runs go on")
    return None


def _cancel(o: argparse.Namespace) -> Answer:
    from moelab.door import cancel

    return cancel(o.path)


def _requeue(o: argparse.Namespace) -> Answer:
    from moelab.door import requeue

    return requeue(o.path)


def _collect(o: argparse.Namespace) -> Answer:
    return moelab.collect(o.path)


def _report(o: argparse.Namespace) -> Answer:
    given = {"margin": o.margin, "margin_cap": o.margin_cap, "drop_seed": o.drop_seed}
    judged = moelab.report(*o.paths, reference=o.reference, final_fraction=o.final_fraction, **given)
    return dataclasses.replace(judged, page=judged.save(o.output, with_paths=o.with_paths))


# The parser


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        from moelab.privacy import without_secrets

        super().error(without_secrets(message))  # it may quote a name that a shell has filled in


def build_parser() -> argparse.ArgumentParser:
    """The parser with all verbs."""
    parser = _Parser(prog="moelab", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"moelab {moelab.__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)

    def verb(name: str, run: Verb, text: str) -> argparse.ArgumentParser:
        sentence = f"{text[0].upper()}{text[1:]}."
        added: argparse.ArgumentParser = verbs.add_parser(name, help=text, description=sentence)
        added.set_defaults(run=run)
        added.add_argument("--json", action="store_true", help="print one JSON object")
        return added

    _add_doctor(verb("doctor", _doctor, "report what this machine can run, and what it lacks for the rest"))
    text = "write the notebooks, their papermill profiles and the studies to a folder; files you changed are kept"
    notebooks = verb("notebooks", _notebooks, text)
    notebooks.add_argument("folder", type=Path, metavar="DIR", help="folder to write to; made if it does not exist")
    _add_plan(verb("plan", _plan, "check whether an experiment is legal and fits into memory; show how it is launched"))
    _add_project(verb("project", _project, "predict tokens/s/GPU, and where the time of a step goes"))
    text = "show where the time of a traced step went, and why it differs from the prediction"
    _add_explain(verb("explain", _explain, text))
    _add_run(verb("run", _run, "train an experiment or study on this machine; finished runs are left alone"))
    text = "submit an experiment or study to Slurm; finished and queued runs are left alone"
    _add_submit(verb("submit", _submit, text))
    cancel = verb("cancel", _cancel, "cancel the Slurm jobs of a run, a study or all studies")
    requeue = verb("requeue", _requeue, "restart running, failed or cancelled jobs from their newest checkpoint")
    for each in (cancel, requeue):
        each.add_argument("path", type=Path, help=PATH_HELP)
    status = verb("status", _status, "show the state of runs; Slurm is asked about its jobs")
    status.add_argument("path", type=Path, nargs="?", help=f"{PATH_HELP}; default: all studies")
    status.add_argument("--follow", action="store_true", help="keep watching; Ctrl-C does not stop the runs")
    collect = verb("collect", _collect, "read the metrics of runs, TorchTitan logs, TensorBoard folders or W&B exports")
    collect.add_argument("path", type=Path, help="a run, a study, a log, a TensorBoard folder or a W&B export")
    _add_report(verb("report", _report, "judge a study, or compare any runs, and write an HTML report"))
    return parser


def _add_set(parser: argparse.ArgumentParser, of: str = "a field", arm: str = "") -> None:
    if arm:
        parser.add_argument("--arm", help=arm)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=f"override {of}")


def _add_doctor(doctor: argparse.ArgumentParser) -> None:
    smoke_help = "send tokens between two ranks, through DeepEP if possible"
    doctor.add_argument("--smoke", action="store_true", help=smoke_help)
    doctor.add_argument("--hardware", default="local", metavar="PROFILE", help="compare the network with this profile")
    doctor.add_argument("--cluster", metavar="PROFILE", help="check a cluster instead, before a study goes there")
    doctor.add_argument("--cluster-set", action="append", default=[], metavar="KEY=VALUE", help=CLUSTER_SET_HELP)
    doctor.add_argument("--file", type=Path, help=f"with --cluster: {STUDY_HELP}")
    doctor.add_argument("--runs", type=Path, metavar="DIR", help=f"with --cluster: {RUNS_HELP}")
    doctor.add_argument("--nodes", action="store_true", help="with --cluster: check every node too, through srun")


def _add_source(parser: argparse.ArgumentParser, does: str) -> None:
    """The arguments that ``plan`` and ``project`` share."""
    from_hf_help = "take the model from a Hugging Face config.json, its folder, or by name, such as Qwen3-30B-A3B"
    load_help = "a run, or its expert_load.parquet: use the expert load it measured (routing: learned)"
    parser.add_argument("file", type=Path, nargs="?", help=STUDY_HELP)
    parser.add_argument("--from-hf", metavar="CONFIG", help=from_hf_help)
    _add_set(parser, arm=f"{does} {ONE_ARM}")
    parser.add_argument("--load", type=Path, metavar="RUN", help=load_help)


def _add_plan(plan: argparse.ArgumentParser) -> None:
    _add_source(plan, "plan")
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


def _add_project(project: argparse.ArgumentParser) -> None:
    _add_source(project, "project")
    constants_help = "use the constants that moelab explain --fit saved: a name or a path"
    project.add_argument("--calibration", metavar="NAME", help=constants_help)
    documents_help = "mean length of your documents, which attention keeps apart in a sequence; default: the dataset's"
    project.add_argument("--document-tokens", type=float, metavar="N", help=documents_help)


def _add_explain(explain: argparse.ArgumentParser) -> None:
    paths_help = "a Kineto trace (.json, .json.gz), several ranks' traces of one step, their folder, or a run"
    explain.add_argument("paths", type=Path, nargs="+", metavar="path", help=paths_help)
    explain.add_argument("--rank", type=int, metavar="R", help="rank to show; default: the lowest")
    step_help = "profiler step to show, where a trace has several; default: all of them"
    explain.add_argument("--step", type=int, metavar="N", help=step_help)
    against_help = "YAML of what ran, to compare with its prediction; a run brings its own"
    explain.add_argument("--against", type=Path, metavar="FILE", help=against_help)
    _add_set(explain, of="a field of --against", arm="the arm that ran, where --against is a study")
    explain.add_argument("--calibration", metavar="NAME", help="predict with the constants of an earlier --fit")
    explain.add_argument("--fit", metavar="NAME", help="fit the model's constants to this step and save them as NAME")


def _add_run(run: argparse.ArgumentParser) -> None:
    run.add_argument("file", type=Path, help=STUDY_HELP)
    _add_set(run, of="a field of every experiment")
    failure_help = "what to do after a run failed; default: continue with the next one"
    run.add_argument("--on-failure", choices=["continue", "stop"], default="continue", help=failure_help)
    run.add_argument("--runs", type=Path, metavar="DIR", help=RUNS_HELP.replace("the cluster profile's, ", ""))


def _add_submit(submit: argparse.ArgumentParser) -> None:
    submit.add_argument("file", type=Path, help=STUDY_HELP)
    _add_set(submit, of="a field of every experiment", arm=f"submit {ONE_ARM}")
    submit.add_argument("--cluster", required=True, metavar="PROFILE", help="name or path of a cluster profile")
    submit.add_argument("--cluster-set", action="append", default=[], metavar="KEY=VALUE", help=CLUSTER_SET_HELP)
    submit.add_argument("--after", metavar="JOB", help="start only after this job has succeeded, such as 123 or 123_4")
    submit.add_argument("--runs", type=Path, metavar="DIR", help=RUNS_HELP)
    submit.add_argument("--dry-run", action="store_true", help="print the exact script and change nothing")


def _add_report(report: argparse.ArgumentParser) -> None:
    paths_help = "a study; or several studies, runs, logs, TensorBoard folders or W&B exports"
    report.add_argument("paths", type=Path, nargs="+", metavar="path", help=paths_help)
    reference_help = "arm that the others are compared with; default: bf16_standard"
    report.add_argument("--reference", metavar="ARM", help=reference_help)
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
