"""Experiments and studies as YAML, and the words for what is wrong with one.

A file is one experiment, a list of experiments, or a study::

    study: convergence                 # folder under runs/
    experiment: {model: nano, steps: 60}   # what the arms share
    arms: [{precision: bf16}, {precision: mxfp8}]
    seeds: [0, 1, 2]
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from moelab.errors import BadInput
from moelab.experiment import Experiment

Model = TypeVar("Model", bound=BaseModel)
MAX_FILE_BYTES = 1_000_000
STUDY_KEYS = ("study", "experiment", "arms", "seeds")


@dataclass(frozen=True, kw_only=True)
class Study:
    """Experiments that are run and judged together.

    Attributes:
        name: folder under ``runs/``.
        experiments: in the order in which they run; arms alternate within each seed (A B A B), so that a drift of the
            machine falls on all arms alike.
    """

    name: str
    experiments: tuple[Experiment, ...]

    @property
    def arms(self) -> tuple[str, ...]:
        """Names of the arms, in the order of their first experiment."""
        return tuple(dict.fromkeys(experiment.arm for experiment in self.experiments))


def make_study(name: str, shared: Mapping[str, Any], arms: Sequence[Mapping[str, Any]], seeds: Iterable[int]) -> Study:
    """Cross arms with seeds.

    Args:
        name: folder under ``runs/``.
        shared: fields that every experiment has.
        arms: fields of each arm.
        seeds: seeds of each arm.

    Raises:
        BadInput: for a field that is unknown or invalid, or two arms that are one.
    """
    experiments = tuple(
        parse(Experiment, {**shared, **arm, "name": name, "seed": seed}) for seed in seeds for arm in arms
    )
    if len({(experiment.arm, experiment.seed) for experiment in experiments}) < len(experiments):
        raise BadInput(
            f"study {name!r} has the same arm and seed twice: arms must differ in more than their order, "
            "and seeds must be distinct"
        )
    if not experiments:
        raise BadInput(f"study {name!r} is empty: give at least one arm and one seed")
    return Study(name=name, experiments=experiments)


def read_study(path: Path, overrides: Sequence[str] = ()) -> Study:
    """Read any experiment, list of experiments or study.

    Args:
        path: the YAML file.
        overrides: ``key=value`` pairs that replace fields of every experiment; ``seeds`` and ``study`` too.

    Raises:
        BadInput: naming the value, what is valid and what to do.
    """
    content = read_yaml(path)
    changes = parse_overrides(overrides)
    if isinstance(content, list):
        return _study_of_list(path.stem, content, changes)
    if not isinstance(content, dict):
        raise BadInput(f"{path}: expected a mapping of fields, or a list of them, found {_kind(content)}")
    if not {"arms", "seeds", "experiment", "study"} & content.keys():
        experiment = parse(Experiment, {**content, **changes})
        return Study(name=experiment.name, experiments=(experiment,))
    return _study_of_mapping(path, content, changes)


def read_experiment(path: Path, overrides: Sequence[str] = ()) -> Experiment:
    """Read a file that holds exactly one experiment.

    Raises:
        BadInput: as :func:`read_study`, or if the file holds more than one.
    """
    study = read_study(path, overrides)
    if len(study.experiments) != 1:
        raise BadInput(f"{path} holds {len(study.experiments)} experiments; one was expected here")
    return study.experiments[0]


def write_experiment(experiment: Experiment) -> str:
    """The experiment as YAML with every field, so that later defaults do not change it."""
    return yaml.safe_dump(experiment.model_dump(mode="json"), sort_keys=False)


def read_yaml(path: Path) -> Any:
    """Content of a YAML file of at most 1 MB without duplicate keys.

    Raises:
        BadInput: if it cannot be read, is too large or is not YAML.
    """
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise BadInput(f"{path} has {size:,} bytes; an experiment file has at most {MAX_FILE_BYTES:,}")
        return yaml.load(path.read_text(encoding="utf-8"), Loader=_StrictLoader)  # noqa: S506 - a SafeLoader
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not UTF-8 text") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise BadInput(f"{path} is not valid YAML: {' '.join(str(error).split())[:300]}") from error


def parse_overrides(pairs: Sequence[str]) -> dict[str, Any]:
    """``["steps=20", "lr=1.0e-3"]`` as a mapping; values are YAML.

    Raises:
        BadInput: for a pair without ``=`` or with a value that is not YAML.
    """
    changes: dict[str, Any] = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator or not key:
            raise BadInput(f"--set {pair!r}: expected key=value, such as --set steps=20")
        try:
            changes[key.strip()] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise BadInput(f"--set {pair!r}: the value is not valid YAML") from error
    return changes


def parse(model: type[Model], fields: Mapping[str, Any]) -> Model:
    """Validate fields and put what is wrong into one message.

    Raises:
        BadInput: one line for each field at fault: the value, what is valid, and for an unknown field the nearest one.
    """
    try:
        return model(**{str(key): value for key, value in fields.items()})
    except ValidationError as error:
        raise BadInput("\n".join(_explain(model, fault) for fault in error.errors())) from None


def _explain(model: type[BaseModel], fault: Any) -> str:
    name, given = ".".join(str(part) for part in fault["loc"]), repr(fault["input"])[:80]
    if fault["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, model.model_fields, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known fields: {', '.join(model.model_fields)}"
        return f"unknown field {name!r}; {hint}"
    message = fault["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    return f"{name}: got {given}; valid: {message}"


def _study_of_list(name: str, rows: list[Any], changes: dict[str, Any]) -> Study:
    for row in rows:
        if not isinstance(row, dict):
            raise BadInput(f"each entry of the list must be a mapping of fields, found {_kind(row)}")
    experiments = tuple(parse(Experiment, {"name": name, **row, **changes}) for row in rows)
    names = {experiment.name for experiment in experiments}
    if len(names) != 1:
        raise BadInput(f"the experiments of one study share one name, found {', '.join(sorted(names)) or 'none'}")
    return Study(name=names.pop(), experiments=experiments)


def _study_of_mapping(path: Path, content: dict[str, Any], changes: dict[str, Any]) -> Study:
    for key in content.keys() - set(STUDY_KEYS):
        near = difflib.get_close_matches(str(key), STUDY_KEYS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "fields of an experiment go under `experiment` or `arms`"
        raise BadInput(f"{path}: unknown key {key!r} of a study; {hint}")
    merged: dict[str, Any] = {
        **content,
        **{key: changes.pop(key) for key in ("seeds", "arms", "study") if key in changes},
    }
    shared, arms, seeds = merged.get("experiment") or {}, merged.get("arms") or [{}], merged.get("seeds", [0])
    if not isinstance(shared, dict) or not isinstance(arms, list) or not all(isinstance(arm, dict) for arm in arms):
        raise BadInput(f"{path}: `experiment` must be a mapping of fields and `arms` a list of such mappings")
    if not isinstance(seeds, list):
        raise BadInput(f"{path}: seeds: got {seeds!r}; valid: a list of integers, such as [0, 1, 2]")
    return make_study(str(merged.get("study", path.stem)), {**shared, **changes}, arms, seeds)


def _kind(value: object) -> str:
    return "nothing" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"


class _StrictLoader(yaml.SafeLoader):
    """YAML in which a key given twice is an error instead of the later one winning."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.YAMLError(f"key {key!r} is given twice, near line {node.start_mark.line + 1}")
        return super().construct_mapping(node, deep)
