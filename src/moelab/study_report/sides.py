"""The sides of a comparison: whatever lies at several paths, each run or arm with a name of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, count
from pathlib import Path

from moelab.analysis import arm_label
from moelab.analysis.side import Side
from moelab.errors import BadInput
from moelab.privacy import shareable
from moelab.runs import directory
from moelab.runs.collect import collect, collect_run
from moelab.runs.directory import Discovery, RunDir
from moelab.runs.settings import run_settings, settings_of, settings_of_all
from moelab.study_report.judge import left_out_by_record, runs_to_judge
from moelab.study_report.judgement import LeftOut, left_out_unfinished, unfinished_seeds

LABEL_CHARACTERS = 60
VALID = "a study, a run directory, a TorchTitan log, a TensorBoard folder or a W&B export (.csv, .json, .jsonl)"


def sides_of(paths: Sequence[Path], *, reference: str) -> tuple[tuple[Side, ...], tuple[LeftOut, ...]]:
    """Read every path: each arm of a study is a side, and each run from elsewhere.

    Args:
        paths: what to compare, the first being what the others are held against.
        reference: arm that comes first among those of a study.

    Returns:
        The sides, and every run of ours that is in none of them.

    Raises:
        BadInput: naming the path that cannot be read, and what is valid.
    """
    found = [directory.discover(path.resolve()) if path.is_dir() else None for path in paths]
    several = len({_study(run) for one in found if one for run in one.runs}) > 1
    sides: list[Side] = []
    left_out: list[LeftOut] = []
    for path, ours in zip(paths, found, strict=True):
        if ours is None or not ours.runs:
            sides += _sides_from_elsewhere(path)
            continue
        for study in sorted({_study(run) for run in [*ours.runs, *(one.run for one in ours.left_out)]}):
            own, others = _our_sides(ours, study, reference, several=several)
            sides += own
            left_out += others
    return tuple(_with_own_label(sides)), tuple(left_out)


def _sides_from_elsewhere(path: Path) -> Iterator[Side]:
    if not path.exists():
        raise BadInput(f"{path} does not exist; give {VALID}")
    try:
        collected = collect(path)
        if not any(len(run.rows) for run in collected):
            raise BadInput("; ".join(run.status.reason or "" for run in collected) or "no step was logged")
    except BadInput as error:
        told = str(error).removeprefix(f"{path}: ").rstrip(".")
        raise BadInput(f"{path} cannot be compared: {told}; give {VALID}") from error
    settings = settings_of(path, len(collected))
    for run in collected:
        yield Side(label=_short(run.run.removesuffix(".log")), runs=(run,), settings=settings)


def _our_sides(found: Discovery, study: str, reference: str, *, several: bool) -> tuple[list[Side], list[LeftOut]]:
    """One side for each arm of a study at a path, of its finished runs where there are any; and all other runs."""
    places = {run.name: run for run in found.runs if _study(run) == study}
    runs, others = runs_to_judge(map(collect_run, places.values()), reference=reference)
    others += [left_out_by_record(one) for one in found.left_out if _study(one.run) == study]
    diverged, lost = unfinished_seeds(runs, others)
    sides = []
    for arm in sorted({run.arm for run in runs}, key=lambda arm: (arm != reference, arm)):
        own = [run for run in runs if run.arm == arm]
        chosen = [run for run in own if run.finished] or own
        shown = {run.seed for run in chosen}
        others += [left_out_unfinished(run) for run in own if run.seed not in shown]
        label = f"{study}: {arm_label(arm)}" if several else arm_label(arm)
        sides.append(
            Side(
                label=_short(label),
                arm=arm,
                runs=tuple(chosen),
                settings=settings_of_all([run_settings(places[run.run], run.environment) for run in chosen]),
                experiment=chosen[0].experiment,
                diverged_seeds={seed: why for (of, seed), why in diverged.items() if of == arm and seed not in shown},
                lost_seeds={seed: why for (of, seed), why in lost.items() if of == arm and seed not in shown},
            )
        )
    return sides, others


def _study(run: RunDir) -> str:
    return run.name.split("/")[0]


def _short(label: str) -> str:
    label = " ".join(shareable(label).split())
    return label if len(label) <= LABEL_CHARACTERS else f"{label[: LABEL_CHARACTERS - 1]}…"


def _with_own_label(sides: Sequence[Side]) -> Iterator[Side]:
    """Number sides of one name: two logs may both be called ``train.log``, in folders that are nobody's business."""
    used: set[str] = set()
    for side in sides:
        names = chain([side.label], (f"{side.label} ({number})" for number in count(2)))
        label = next(name for name in names if name not in used)
        used.add(label)
        yield replace(side, label=label)
