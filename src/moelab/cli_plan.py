"""The verbs about an experiment that has not run: plan and project. Their results are printed by :mod:`moelab.cli`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_verbs(add: Any) -> list[argparse.ArgumentParser]:
    """Add the parsers of these verbs.

    Args:
        add: called with a verb's name, its function and its help; gives the parser.
    """
    plan = add("plan", _plan, "say whether an experiment is legal, what it holds and how it is started")
    plan.add_argument("file", type=Path, help="YAML of an experiment, or of a study: each of its arms is planned")
    plan.add_argument("--arm", help="plan one arm of a study, such as mxfp8_standard or bf16_deepep_round-robin")
    plan.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="replace a field")
    plan.add_argument("--write", type=Path, metavar="PATH", help="write the experiment, as it is planned, to a file")
    plan.add_argument(
        "--config", action="store_true", help="add the configuration that TorchTitan resolves (loads torch)"
    )
    plan.add_argument("--verify", action="store_true", help="build it with TorchTitan, without a GPU (loads torch)")
    plan.add_argument(
        "--ranks", type=_ranks, metavar="R,R", help="global ranks that --verify builds; default: one a stage"
    )
    plan.add_argument("--search", action="store_true", help="list the best legal layouts; fields given by --set stay")
    plan.add_argument("--limit", type=_positive, default=10, metavar="N", help="layouts that --search lists")
    plan.add_argument("--global-batch", type=_positive, metavar="N", help="sequences a step, kept by --search")
    project = add("project", _project, "predict the time of a step: tokens/s/GPU and where the time goes")
    project.add_argument("file", type=Path, help="YAML of an experiment, or of a study: each of its arms is projected")
    project.add_argument("--arm", help="project one arm of a study, such as mxfp8_standard or bf16_deepep_round-robin")
    project.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="replace a field")
    return [plan, project]


def _plan(options: argparse.Namespace) -> int:
    from moelab.cli import chosen_arms, show
    from moelab.experiment_file import read_study, write_experiment

    arms = chosen_arms(read_study(options.file, options.set), options.arm)
    if len(arms) > 1:
        return _plan_arms(options, arms)
    (experiment,) = arms
    if options.search:
        return _search(options, experiment)
    from moelab.plan import plan, plan_text, titan_config, titan_text, verified, verified_text

    if options.write:
        options.write.write_text(write_experiment(experiment), encoding="utf-8")
    one_in_file = not (options.set or options.arm)
    planned = plan(experiment, path=options.write or (options.file if one_in_file else None))
    as_json, as_text = planned.to_json(), plan_text(planned)
    if planned.verdict.legal and options.config:
        as_json["titan_config"] = titan_config(experiment)
        as_text += f"\n\n{titan_text(as_json['titan_config'])}"
    if planned.verdict.legal and options.verify:
        as_json["verify"] = verified(planned, options.ranks)
        as_text += f"\n\n{verified_text(as_json['verify'])}"
    show(options, as_json, as_text)
    return 0 if planned.verdict.legal else 3


def _plan_arms(options: argparse.Namespace, arms: list[Any]) -> int:
    from moelab.cli import show
    from moelab.errors import BadInput
    from moelab.plan import plan, study_text

    if options.search or options.verify or options.config or options.write:
        names = ", ".join(experiment.arm for experiment in arms)
        raise BadInput(f"{options.file} holds {len(arms)} arms; name one for this with --arm: {names}")
    plans = [plan(experiment) for experiment in arms]
    as_json = {"plans": [{"arm": one.experiment.arm, **one.to_json()} for one in plans]}
    show(options, as_json, study_text(plans))
    return 0 if all(one.verdict.legal for one in plans) else 3


def _search(options: argparse.Namespace, experiment: Any) -> int:
    from moelab.cli import show
    from moelab.experiment_file import parse_overrides
    from moelab.hardware import gpu_of
    from moelab.plan import headroom_gib
    from moelab.search import VARIED, recommend, recommendation_text, search, search_text

    fixed = sorted(parse_overrides(options.set).keys() & set(VARIED))
    if gpu_of(experiment.hardware).bf16_tflops is not None:
        found = recommend(experiment, fixed=fixed, limit=options.limit, global_batch=options.global_batch)
        show(options, found.to_json(), recommendation_text(found))
        return 0 if found.ranked else 3
    plain = search(
        experiment,
        fixed=fixed,
        limit=options.limit,
        headroom_gib=headroom_gib(experiment),
        global_batch=options.global_batch,
    )
    show(options, plain.to_json(), search_text(plain))
    return 0 if plain.candidates else 3


def _project(options: argparse.Namespace) -> int:
    from moelab.cli import chosen_arms, show
    from moelab.experiment_file import read_study
    from moelab.project_text import arms_text, projection_text
    from moelab.projection.project import project

    chosen = chosen_arms(read_study(options.file, options.set), options.arm)
    found = {experiment.arm: project(experiment) for experiment in chosen}
    if len(found) == 1:
        (one,) = found.values()
        show(options, one.to_json(), projection_text(one))
    else:
        show(options, {"arms": {arm: one.to_json() for arm, one in found.items()}}, arms_text(found))
    return 0


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
