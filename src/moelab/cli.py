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
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from moelab import __version__, cli_cluster, cli_plan
from moelab.errors import MoelabError

DESCRIPTION = (
    "How much faster can a Mixture-of-Experts model be pre-trained with MXFP8 experts and DeepEP, on your hardware, "
    "without hurting the loss?"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    options = build_parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, _stop)
    try:
        return int(options.run(options))
    except MoelabError as error:
        print(f"moelab: {error}", file=sys.stderr)  # noqa: T201
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
    doctor = _verb(verbs, "doctor", _doctor, "say what this machine can run and what is missing for the rest")
    doctor.add_argument("--smoke", action="store_true", help="send tokens between two ranks, with DeepEP if it is here")
    doctor.add_argument("--hardware", default="local", metavar="PROFILE", help="profile to hold the network against")
    doctor.add_argument("--cluster", metavar="PROFILE", help="look at a cluster instead, before a study goes there")
    doctor.add_argument("--cluster-set", action="append", default=[], metavar="KEY=VALUE", help="replace its field")
    doctor.add_argument("--file", type=Path, help="with --cluster: YAML of what would run there")
    doctor.add_argument(
        "--runs", type=Path, help="with --cluster: folder of all studies; default: the profile's, or runs"
    )
    doctor.add_argument("--nodes", action="store_true", help="with --cluster: let every node report, by srun")
    plans = cli_plan.add_verbs(functools.partial(_verb, verbs))
    run = _verb(verbs, "run", _run, "train an experiment or study on this machine; a finished one is left alone")
    run.add_argument("file", type=Path, help="YAML of an experiment, a list of experiments, or a study")
    run.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="replace a field everywhere")
    run.add_argument("--on-failure", choices=["continue", "stop"], default="continue")
    of_slurm = cli_cluster.add_verbs(functools.partial(_verb, verbs))
    status = _verb(verbs, "status", _status, "say where the runs at a path are; jobs of Slurm are asked for")
    status.add_argument("path", type=Path, nargs="?", default=Path("runs"))
    status.add_argument("--follow", action="store_true", help="go on showing them; Ctrl-C leaves the runs alone")
    collect = _verb(verbs, "collect", _collect, "read the metrics of a run, a study, a log, TensorBoard or W&B export")
    collect.add_argument("path", type=Path)
    report = _verb(verbs, "report", _report, "judge a study, or compare any runs, and write an HTML report")
    report.add_argument(
        "paths",
        type=Path,
        nargs="+",
        metavar="path",
        help="a study; or several studies, runs, logs, TensorBoard or W&B exports",
    )
    report.add_argument("--reference", default="bf16_standard", help="arm that the others are held against")
    report.add_argument("--margin", type=float, help="equivalence margin in nats, instead of the seeds' own spread")
    report.add_argument(
        "--margin-cap", type=float, help="nats that a margin of the seeds' spread is at most; default: 1 %% of the loss"
    )
    report.add_argument(
        "--drop-seed", type=int, action="append", default=[], metavar="K", help="leave a seed out of all arms; shown"
    )
    report.add_argument("--final-fraction", type=float, default=0.1, help="part of the steps that a final loss is of")
    report.add_argument(
        "--output", type=Path, help="file to write; default: report.html in the study, or comparison.html here"
    )
    report.add_argument("--with-paths", action="store_true", help="keep folders, host and user names in the report")
    for verb in (*plans, run, *of_slurm, status, collect, report):
        verb.add_argument("--json", action="store_true", help="print one JSON object")
    run.add_argument("--runs", type=Path, default=Path("runs"), help="folder that holds all studies")
    return parser


def _verb(verbs: Any, name: str, run: Any, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = verbs.add_parser(name, help=text, description=text)
    parser.set_defaults(run=run)
    if name == "doctor":
        parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _stop(_signal: int, _frame: FrameType | None) -> None:
    """Treat SIGTERM (a scheduler, a container) as Ctrl-C: stop the ranks in order and write the status."""
    raise KeyboardInterrupt


def show(options: argparse.Namespace, as_json: Any, as_text: str) -> None:
    """Print a result, as JSON if that is asked for."""
    text = json.dumps(as_json, indent=1, allow_nan=False) if options.json else as_text
    print(text, flush=True)  # noqa: T201 - results go to stdout


def _line(name: str, status: Any) -> str:
    """Where a run is, for a person."""
    return f"{name}: {status.state}" + (f": {status.reason}" if status.reason else "")


def _row(name: str, status: Any) -> dict[str, str | None]:
    """Where a run is, for a program."""
    return {"run": name, "status": status.state.value, "reason": status.reason, "job_id": status.job_id}


def found_runs(path: Path) -> Any:
    """The runs at a path that a person gave."""
    from moelab.errors import BadInput
    from moelab.runs.directory import discover

    if not path.is_dir():
        raise BadInput(f"{path} is not a folder; give a run, a study or the folder of all studies")
    return discover(path.absolute())


def show_runs(options: argparse.Namespace, found: Any, statuses: Sequence[Any]) -> None:
    """Print where all runs are, and which of them no report will use."""
    both = list(zip(found.all_runs, statuses, strict=True))
    lines = [_line(run.name, status) for run, status in both]
    rows = [_row(run.name, status) for run, status in both]
    show(options, {"runs": rows, **found.to_json()}, "\n".join([*lines, *found.lines]) or f"no runs at {options.path}")


def _doctor(options: argparse.Namespace) -> int:
    from moelab.doctor import examine
    from moelab.errors import BadInput

    if options.cluster:
        return cli_cluster.doctor_of_cluster(options)
    if options.nodes or options.file or options.cluster_set or options.runs:
        raise BadInput("--nodes, --file, --cluster-set and --runs are about a cluster: name it with --cluster")
    found = examine(hardware=options.hardware, smoke=options.smoke)
    show(options, found.to_json(), found.as_text())
    return 1 if found.failed else 0


def chosen_arms(study: Any, wanted: str | None) -> list[Any]:
    """The first experiment of each arm, or of the one that is wanted."""
    from moelab.errors import BadInput

    first = {experiment.arm: experiment for experiment in reversed(study.experiments)}
    longer = [arm for arm in first if wanted is not None and arm.startswith(f"{wanted}_")]
    if wanted not in first and len(longer) == 1:  # bf16_standard is bf16_standard_round-robin in a study of that alone
        wanted = longer[0]
    if wanted is not None and wanted not in first:
        raise BadInput(f"--arm {wanted!r} is not in study {study.name}; its arms: {', '.join(study.arms)}")
    return [first[arm] for arm in study.arms if wanted in (None, arm)]


def _run(options: argparse.Namespace) -> int:
    from moelab.experiment_file import read_study
    from moelab.launch.study import run_study

    study = read_study(options.file, options.set)
    done = run_study(study, options.runs, on_failure=options.on_failure)
    complete = len(done.runs) - len(done.failed)
    lines = [_line(str(run.path), run.status) for run in done.runs]
    summary = f"{study.name}: {complete} of {len(study.experiments)} complete, {done.trained} trained now"
    rows = [_row(run.name, run.status) for run in done.runs]
    as_json = {"study": study.name, "trained": done.trained, "runs": rows, **done.found.to_json()}
    show(options, as_json, "\n".join([*lines, summary]))
    return 0 if complete == len(study.experiments) else 1


def _status(options: argparse.Namespace) -> int:
    from moelab.launch.watch import refresh

    if options.follow:
        return cli_cluster.follow_runs(options)
    found = found_runs(options.path)
    show_runs(options, found, refresh(found.all_runs))
    return 0


def _collect(options: argparse.Namespace) -> int:
    from moelab.runs.collect import collect, collect_run
    from moelab.runs.directory import discover

    found = discover(options.path.absolute())
    runs = [collect_run(run) for run in found.runs] or collect(options.path)
    as_json = {"runs": [run.to_json() for run in runs], **found.to_json()}
    show(options, as_json, "\n".join([*(run.summary for run in runs), *found.lines]))
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
    show(options, {**judged.to_json(), "report": str(path)}, f"{judged.as_text()}\nreport: {path}")
    return 0
