"""The verbs about jobs of Slurm: submit, cancel, requeue. Their results are printed by :mod:`moelab.cli`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any


def add_verbs(add: Any) -> list[argparse.ArgumentParser]:
    """Add the parsers of these verbs.

    Args:
        add: called with a verb's name, its function and its help; gives the parser.
    """
    submit = add("submit", _submit, "give an experiment or study to Slurm; what is finished or waiting is left alone")
    submit.add_argument("file", type=Path, help="YAML of an experiment, a list of experiments, or a study")
    submit.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="replace a field everywhere")
    submit.add_argument("--arm", help="submit one arm of a study, such as mxfp8_standard or bf16_deepep_round-robin")
    submit.add_argument("--cluster", required=True, metavar="PROFILE", help="name of a profile, or a path of one")
    submit.add_argument(
        "--cluster-set", action="append", default=[], metavar="KEY=VALUE", help="replace a field of the profile"
    )
    submit.add_argument("--after", metavar="JOB", help="job that has to succeed first, such as 123 or 123_4")
    submit.add_argument("--runs", type=Path, help="folder that holds all studies; default: the profile's, or runs")
    submit.add_argument("--dry-run", action="store_true", help="print the exact script and touch nothing")
    cancel = add("cancel", _cancel, "cancel the jobs of a run, of a study or of all")
    requeue = add("requeue", _requeue, "let jobs that run or failed start again, from their newest checkpoint")
    for parser in (cancel, requeue):
        parser.add_argument("path", type=Path, help="folder of a run, or of a study")
    return [submit, cancel, requeue]


def _submit(options: argparse.Namespace) -> int:
    from moelab.cli import chosen_arms, show
    from moelab.experiment_file import Study, read_study
    from moelab.launch.cluster import read_cluster
    from moelab.launch.submit import dry_run, submit

    study = read_study(options.file, options.set)
    if options.arm:
        (wanted,) = chosen_arms(study, options.arm)
        study = Study(name=study.name, experiments=tuple(one for one in study.experiments if one.arm == wanted.arm))
    cluster = read_cluster(options.cluster, options.cluster_set)
    runs = options.runs or Path(cluster.runs or "runs")
    if options.dry_run:
        done = dry_run(study, runs, cluster, after=options.after)
        show(options, done.to_json(), "\n".join(done.scripts).rstrip("\n"))
    else:
        done = submit(study, runs, cluster, submit=True, after=options.after)
        show(options, done.to_json(), done.as_text())
    return 0


def _cancel(options: argparse.Namespace) -> int:
    from moelab.cli import found_runs, show_runs
    from moelab.launch.status import cancel

    found = found_runs(options.path)
    show_runs(options, found, cancel(found.all_runs))
    return 0


def _requeue(options: argparse.Namespace) -> int:
    from moelab.cli import found_runs, show_runs
    from moelab.launch.status import requeue

    found = found_runs(options.path)
    show_runs(options, found, requeue(found.all_runs))
    return 0


def doctor_of_cluster(options: argparse.Namespace) -> int:
    """``moelab doctor --cluster``."""
    from moelab.cli import show
    from moelab.experiment_file import read_study
    from moelab.health.preflight import preflight
    from moelab.launch.cluster import read_cluster

    cluster = read_cluster(options.cluster, options.cluster_set)
    study = read_study(options.file) if options.file else None
    found = preflight(cluster, study, options.runs or Path(cluster.runs or "runs"), ask_nodes=options.nodes)
    show(options, found.to_json(), found.as_text())
    return found.exit_code


def follow_runs(options: argparse.Namespace) -> int:
    """``moelab status --follow``."""
    from moelab.errors import BadInput
    from moelab.launch.status import follow

    if options.json:
        raise BadInput("--follow shows text as it comes; leave it out to get one JSON object")
    try:
        follow(options.path, sys.stdout)
    except KeyboardInterrupt:
        print("moelab: no longer watching; the runs go on", file=sys.stderr)  # noqa: T201
    return 0
