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
from moelab.runs.collect import Collected, collect, newest
from moelab.runs.directory import RunDir
from moelab.runs.settings import run_settings, settings_of
from moelab.study_report.judge import of_latest_experiment

LABEL_CHARACTERS = 60
VALID = "a study, a run directory, a TorchTitan log, a TensorBoard folder or a W&B export (.csv, .json, .jsonl)"


def sides_of(paths: Sequence[Path], *, reference: str) -> tuple[Side, ...]:
    """Read every path: each arm of a study is a side, and each run from elsewhere.

    Args:
        paths: what to compare, the first being what the others are held against.
        reference: arm that comes first among those of a study.

    Raises:
        BadInput: naming the path that cannot be read, and what is valid.
    """
    ours = {run.path: run.name.split("/")[0] for path in paths if path.is_dir() for run in directory.find(path)}
    several = len(set(ours.values())) > 1
    found = [side for path in paths for side in _sides_at(path, reference, several=several)]
    return tuple(_with_own_label(found))


def _sides_at(path: Path, reference: str, *, several: bool) -> Iterator[Side]:
    if not path.exists():
        raise BadInput(f"{path} does not exist; give {VALID}")
    try:
        collected = collect(path)
        places = {run.name: run for run in directory.find(path)} if path.is_dir() else {}
        if not collected:
            raise BadInput("no step was logged")
    except BadInput as error:
        told = str(error).removeprefix(f"{path}: ").rstrip(".")
        raise BadInput(f"{path} cannot be compared: {told}; give {VALID}") from error
    if places:
        yield from _our_sides(collected, places, reference, several=several)
        return
    settings = settings_of(path, len(collected))
    for run in collected:
        yield Side(label=_short(run.run.removesuffix(".log")), runs=(run,), settings=settings)


def _our_sides(
    collected: list[Collected], places: dict[str, RunDir], reference: str, *, several: bool
) -> Iterator[Side]:
    """One side for each study and arm at a path, of its finished runs where there are any."""
    runs = of_latest_experiment(collected, places)
    kept = {run.run for run in runs}
    keys = sorted(
        {(run.run.split("/")[0], run.arm) for run in runs}, key=lambda key: (key[0], key[1] != reference, key[1])
    )
    for study, arm in keys:
        own = [run for run in collected if run.arm == arm and run.run.startswith(f"{study}/")]
        attempts = newest(run for run in own if run.run in kept)
        chosen = [run for run in attempts if run.finished] or attempts
        left_out = [
            f"seed {run.seed} ({run.status.reason or run.status.state})" for run in attempts if run not in chosen
        ]
        left_out += [f"seed {run.seed} (earlier, with other settings)" for run in own if run.run not in kept]
        launched = places[chosen[0].run].path / "launch" / "command.sh"
        yield Side(
            label=_short(f"{study}: {arm_label(arm)}" if several else arm_label(arm)),
            arm=arm,
            runs=tuple(chosen),
            settings=run_settings(places[chosen[0].run]),
            experiment=places[chosen[0].run].experiment,
            left_out=tuple(left_out),
            command=launched.read_text().strip() if launched.is_file() else "",
        )


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
