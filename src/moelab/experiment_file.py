"""Experiments and studies as YAML, and the words for what is wrong with one.

A file is one experiment, a list of experiments, or a study::

    study: convergence                 # folder under runs/
    experiment: {model: nano, steps: 60}   # what the arms share
    arms: [{precision: bf16}, {precision: mxfp8}]
    seeds: [0, 1, 2]

``hardware`` may be the path of a file of one's own, from the folder of the file that names it; its content takes the
path's place here, so that nothing outside of a run directory is needed later.

What a person leaves out has its default. The file in a run directory is a *record* of what ran, and has no defaults:
its version comes first and its end mark last, so that a cut anywhere shows, and it has every field of its version.
"""

from __future__ import annotations

import dataclasses
import difflib
import errno
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError

from moelab.data import shipped
from moelab.errors import BadInput
from moelab.experiment import EPBackend, Experiment, OwnHardware, Precision, ShapeChanges
from moelab.files import read_text
from moelab.hardware import is_here
from moelab.layout import twins
from moelab.machine import GpusUnknown, ranks_here

Model = TypeVar("Model", bound=BaseModel)
MAX_FILE_BYTES = 1_000_000
MAX_EXPERIMENTS = 10_000
MAX_FAULTS = 10
STUDY_KEYS = ("study", "experiment", "arms", "seeds")
_OF_A_STUDY = {"name": "study", "seed": "seeds"}
"""Fields of an experiment that a study gives to all its experiments, by its own keys."""
VERSION_KEY, END_KEY = "record_version", "end_of_record"
OLDEST_RECORD = 2  # of moelab 0.2
ADDED_FIELDS: Mapping[int, Mapping[str, Any]] = {
    3: {"accumulate_gradients": False},
    4: {"validate_every": 0, "overrides": []},
}
"""Fields that each later version of a record added to the one before, with the value that earlier runs had."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """Experiments that are run and judged together."""

    name: str
    experiments: tuple[Experiment, ...]
    """In the order in which they run; arms alternate within each seed (A B A B), so that a drift of the machine
    falls on all arms alike."""
    path: Path | None = dataclasses.field(default=None, compare=False, repr=False)
    """The file or packaged study that holds these experiments as they are; None of any other study."""

    @classmethod
    def of(
        cls,
        name: str,
        *,
        arms: Sequence[str | Mapping[str, Any]] = ("bf16",),
        seeds: int | Iterable[int] = 1,
        **shared: Any,
    ) -> Study:
        """Make a study in Python.

        Args:
            name: folder of its runs.
            arms: each a precision (``"mxfp8"``), with an all-to-all (``"mxfp8_deepep"``), or fields of an experiment.
            seeds: how many, from 0, or which.
            shared: fields of an experiment that all arms have.

        Raises:
            BadInput: for an arm, a field or a value that an experiment does not take.

        Example:
            >>> print(Study.of("mine", steps=110, arms=["bf16", "mxfp8_deepep"], seeds=3))
            study mine: nano, 110 steps; arms bf16_standard, mxfp8_deepep; seeds 0, 1, 2
        """
        hardware = shared.get("hardware")
        if isinstance(hardware, str | Path):
            shared["hardware"] = read_hardware(str(hardware))
        fields = [arm if isinstance(arm, Mapping) else _fields_of_arm(arm) for arm in arms]
        return make_study(name, shared, fields, range(seeds) if isinstance(seeds, int) else seeds)

    def __str__(self) -> str:
        """The study in a line."""
        models = dict.fromkeys(one.model_label for one in self.experiments)
        steps = dict.fromkeys(f"{one.steps:,}" for one in self.experiments)
        seeds = dict.fromkeys(str(one.seed) for one in self.experiments)
        return (
            f"study {self.name}: {', '.join(models)}, {' or '.join(steps)} steps; arms {', '.join(self.arms)}; "
            f"seed{'s' * (len(seeds) > 1)} {', '.join(seeds)}"
        )

    @property
    def first_of_arms(self) -> tuple[Experiment, ...]:
        """One experiment of each arm, for what does not depend on the seed."""
        # A dict keeps the last of one name: from the end, that is the first.
        return tuple({experiment.arm: experiment for experiment in reversed(self.experiments)}.values())[::-1]

    @property
    def arms(self) -> tuple[str, ...]:
        """Names of the arms, in the order of their first experiment."""
        return tuple(dict.fromkeys(experiment.arm for experiment in self.experiments))


def make_study(name: str, shared: Mapping[str, Any], arms: Sequence[Mapping[str, Any]], seeds: Iterable[int]) -> Study:
    """Cross arms with seeds.

    Raises:
        BadInput: for a field that is unknown or invalid, or two arms that are the same training.
    """
    for key, instead in _OF_A_STUDY.items():
        if any(key in fields for fields in (shared, *arms)):
            raise BadInput(f"{key} is not a field of one arm here: the study gives it to all arms, by `{instead}`")
    seeds = list(seeds)
    _bounded(name, len(seeds) * len(arms))
    return _distinct(name, [_made({**shared, **arm, "name": name, "seed": seed}) for seed in seeds for arm in arms])


def _made(fields: Mapping[str, Any]) -> Experiment:
    """An experiment of these fields, sized for this machine where nobody chose the ranks, or which share experts."""
    made, sizes = parse(Experiment, fields), dict[str, int]()
    with suppress(BadInput, GpusUnknown):  # no such hardware, or a driver that fails: who plans or runs says so
        if "gpus_per_node" not in fields and made.nodes == 1 and is_here(made.hardware):
            sizes["gpus_per_node"] = ranks_here(str(made.hardware))
    if "ep" not in fields:
        sizes["ep"] = math.gcd(made.ep, made.model_copy(update=sizes).world_size)  # 1 of a single rank, or of three
    changed = {name: value for name, value in sizes.items() if value != getattr(made, name)}
    return parse(Experiment, {**fields, **changed}) if changed else made


def _fields_of_arm(arm: str) -> dict[str, str]:
    """Fields of an arm that is called by its precision, or by its precision and all-to-all."""
    precision, _, backend = str(arm).partition("_")
    backend = backend or EPBackend.STANDARD.value
    precisions, backends = [one.value for one in Precision], [one.value for one in EPBackend]
    if precision not in precisions or backend not in backends:
        raise BadInput(
            f"arm {arm!r}: valid: a precision ({', '.join(precisions)}), with _ and an all-to-all "
            f"({', '.join(backends)}) where it is not the standard one, or a mapping of fields such as "
            '{"precision": "mxfp8", "wgrad": "bf16"}'
        )
    return {"precision": precision, "ep_backend": backend}


def read_study(path: str | Path | None, overrides: Sequence[str] | Mapping[str, Any] = ()) -> Study:
    """Read any experiment, list of experiments or study.

    Args:
        path: the YAML file, or the name of a study that comes with moelab; None for the experiment that the overrides
            alone make.
        overrides: replace fields of every experiment, ``seeds`` and ``study`` too: ``key=value`` pairs, or a mapping.

    Raises:
        BadInput: naming the value, what is valid and what to do.
    """
    changes = parse_overrides(overrides)
    if path is None:
        return Study(name=(made := _made(changes)).name, experiments=(made,))
    study = _study_in(_file_of_study(Path(path)), dict(changes))
    return study if changes else replace(study, path=Path(path))


def change(study: Study, changes: Mapping[str, Any]) -> Study:
    """The study with other values in fields of every experiment.

    Raises:
        BadInput: for a field that is unknown or invalid, or two arms that are one then.
    """
    if not changes:
        return study
    changes = parse_overrides(changes)
    name = changes.get("name", study.name)
    return _distinct(name, [parse(Experiment, {**dict(one), **changes}) for one in study.experiments])


def _study_in(path: Path, changes: dict[str, Any]) -> Study:
    text = _text(path, str(path))
    is_record = text.startswith(f"{VERSION_KEY}:")
    content = _fields_of_record(text) if is_record else _with_hardware(_load(text, str(path)), path.parent)
    if isinstance(content, list):
        _bounded(path.stem, len(content))
        for row in content:
            if not isinstance(row, dict):
                raise BadInput(f"each entry of the list must be a mapping of fields, found {_kind(row)}")
        experiments = [_made({"name": path.stem, **row, **changes}) for row in content]
        names = {experiment.name for experiment in experiments}
        if len(names) > 1:
            raise BadInput(f"the experiments of one study share one name, found {', '.join(sorted(names))}")
        return _distinct(next(iter(names), path.stem), experiments)
    if not isinstance(content, dict):
        raise BadInput(f"{path}: expected a mapping of fields, or a list of them, found {_kind(content)}")
    if not {"arms", "seeds", "experiment", "study"} & content.keys():
        experiment = _made({**content, **changes})
        return Study(name=experiment.name, experiments=(experiment,))
    for key in content.keys() - set(STUDY_KEYS):
        near = [_OF_A_STUDY[key]] if key in _OF_A_STUDY else []
        if key not in Experiment.model_fields:
            near = difflib.get_close_matches(str(key), STUDY_KEYS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "fields of an experiment go under `experiment` or `arms`"
        raise BadInput(f"{path}: unknown key {_short(key)} of a study; {hint}")
    merged = content | {key: changes.pop(key) for key in ("seeds", "arms", "study") if key in changes}
    shared, arms, seeds = merged.get("experiment", {}), merged.get("arms", [{}]), merged.get("seeds", [0])
    if not isinstance(shared, dict) or not isinstance(arms, list) or not all(isinstance(arm, dict) for arm in arms):
        raise BadInput(f"{path}: `experiment` must be a mapping of fields and `arms` a list of such mappings")
    if not isinstance(seeds, list):
        raise BadInput(f"{path}: seeds: got {_short(seeds)}; valid: a list of integers, such as [0, 1, 2]")
    name = merged.get("study", path.stem)
    if not isinstance(name, str):
        raise BadInput(f"{path}: study: got {_short(name)}; valid: a name; put a number or date in quotes")
    return make_study(name, shared, [{**arm, **changes} for arm in arms], seeds)


def _file_of_study(path: Path) -> Path:
    """The file that is given, or that of the study whose name is given; a file of that name comes first."""
    is_file = path.exists() and not path.is_dir()  # a pipe is one too
    if is_file or path.suffix or len(path.parts) != 1:
        return path
    studies = {file.stem: file for file in sorted(shipped("studies").glob("*.yaml"))}
    if path.name not in studies:
        raise BadInput(f"{path} is neither a file nor a study that comes with moelab; those are {', '.join(studies)}")
    return studies[path.name]


def read_experiment(path: Path) -> Experiment:
    """Read a file that holds exactly one experiment.

    Raises:
        BadInput: as :func:`read_study`, or if the file holds more than one.
    """
    study = read_study(path)
    if len(study.experiments) != 1:
        raise BadInput(f"{path} holds {len(study.experiments)} experiments; one was expected here")
    return study.experiments[0]


def write_experiment(experiment: Experiment) -> str:
    """The record of an experiment: YAML with every field, so that later defaults do not change it."""
    fields = {VERSION_KEY: max(ADDED_FIELDS), **experiment.model_dump(mode="json"), END_KEY: True}
    return yaml.safe_dump(fields, sort_keys=False)


def read_record(path: Path) -> Experiment:
    """Read what :func:`write_experiment` wrote, by this version or an earlier one.

    Raises:
        BadInput: if it is damaged, was cut off, lacks a field or is of a later version; the path is not named.
    """
    return parse(Experiment, _fields_of_record(_text(path, "the record")))


def read_hardware(value: str, folder: Path = Path()) -> str | OwnHardware:
    """The hardware that a name or the path of a YAML file stands for.

    A path is taken from ``folder``.

    Raises:
        BadInput: if the file cannot be read, or naming each field of it that is wrong.
    """
    if not value.lower().endswith((".yaml", ".yml", ".json")):
        return value
    path = folder / value
    content = read_yaml(path)
    if not isinstance(content, dict):
        raise BadInput(f"{path}: expected a mapping of fields, found {_kind(content)}")
    try:
        return parse(OwnHardware, {"name": path.stem, **content})
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from None


def _with_hardware(content: Any, folder: Path) -> Any:
    """A file's content in which a path of hardware, wherever a study may have one, is what stands there."""
    if isinstance(content, list):
        return [_with_hardware(one, folder) for one in content]
    if not isinstance(content, dict):
        return content
    inner = {key: _with_hardware(content[key], folder) for key in ("experiment", "arms") if key in content}
    own = {"hardware": read_hardware(content["hardware"], folder)} if isinstance(content.get("hardware"), str) else {}
    return {**content, **inner, **own}


def _fields_of_record(text: str) -> dict[str, Any]:
    if not text.startswith(f"{VERSION_KEY}: "):
        raise BadInput(
            "the record has no version: it was cut off, or a moelab before 0.2 wrote it, whose runs need that"
        )
    if not text.endswith(f"\n{END_KEY}: true\n"):  # else `12` may have become `1`
        raise BadInput("the record was cut off: its last line is not whole")
    content = dict(_load(text, "the record"))
    version, newest = content.pop(VERSION_KEY), max(ADDED_FIELDS)
    # `true` would pass as a number.
    if type(version) is not int or not OLDEST_RECORD <= version <= newest:
        raise BadInput(
            f"{VERSION_KEY}: got {_short(version)}; valid: {OLDEST_RECORD} to {newest}, or use the moelab that wrote it"
        )
    del content[END_KEY]
    later = {name: value for added, fields in ADDED_FIELDS.items() if added > version for name, value in fields.items()}
    lacking = [field for field in Experiment.model_fields if field not in content and field not in later]
    if lacking:
        raise BadInput(
            f"the record lacks {', '.join(lacking)}: it was cut off, or a moelab wrote it that did not have them"
        )
    return later | content


def read_yaml(path: Path) -> Any:
    """Content of a YAML file of at most 1 MB without duplicate keys.

    Raises:
        BadInput: if it cannot be read, is too large or is not YAML.
    """
    return _load(_text(path, str(path)), str(path))


def _text(path: Path, source: str) -> str:
    try:
        return read_text(path, MAX_FILE_BYTES)
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise BadInput(f"{source} is too large: an experiment file has at most {MAX_FILE_BYTES:,} bytes") from error
        raise BadInput(f"{source} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise BadInput(f"{source}: {error}") from error


def parse_overrides(pairs: Sequence[str] | Mapping[str, Any]) -> dict[str, Any]:
    """``["steps=20", "lr=1.0e-3"]`` as a mapping; values are YAML. A mapping's values are taken as they are.

    Raises:
        BadInput: for a pair without ``=`` or with a value that is not YAML.
    """
    if isinstance(pairs, Mapping):
        return dict(_with_hardware(dict(pairs), Path()))
    changes: dict[str, Any] = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator or not key:
            raise BadInput(f"--set {pair!r}: expected key=value, such as --set steps=20")
        changes[key.strip()] = _load(value, f"--set {pair[:80]!r}: the value")
    return dict(_with_hardware(changes, Path()))


def parse(model: type[Model], fields: Mapping[str, Any]) -> Model:
    """Validate fields and put what is wrong into one message.

    Raises:
        BadInput: one line for each field at fault: the value, what is valid, and for an unknown field the nearest one.
    """
    # Keys of YAML may be numbers or dates.
    given = {str(key): value for key, value in fields.items()}
    truths = dict(_truths(model, given))
    faults = [
        f"{name}: got {value}; valid: a number, and this is a truth value (as yes, no, on and off are in YAML)"
        for name, value in truths.items()
    ]
    try:
        made = model(**given)
    except ValidationError as error:
        faults += [_explain(model, fault) for fault in error.errors() if _name_of(fault) not in truths]
    if faults:
        # A file of something else may have thousands of keys, and each would list all known fields.
        more = [f"and {len(faults) - MAX_FAULTS:,} more"] if len(faults) > MAX_FAULTS else []
        raise BadInput("\n".join([*faults[:MAX_FAULTS], *more]))
    return made


_INNER: Mapping[str, type[BaseModel]] = {"shape": ShapeChanges, "hardware": OwnHardware}
_KINDS = {"integer": "a whole number", "tuple": "a list", "dictionary": "a mapping of fields", "string": "a name"}


def _truths(model: type[BaseModel], fields: Mapping[Any, Any], within: str = "") -> Iterator[tuple[str, bool]]:
    """Truth values where a number belongs, by the names of their fields: pydantic would take them as 0 and 1."""
    for name, field in model.model_fields.items():
        value = fields.get(name)
        if isinstance(value, bool) and _takes_number(field.annotation):
            yield within + name, value
        elif isinstance(value, dict) and name in _INNER:
            yield from _truths(_INNER[name], value, f"{name}.")


def _takes_number(annotation: Any) -> bool:
    return annotation in (int, float) or any(map(_takes_number, get_args(annotation)))


def _name_of(fault: Any) -> str:
    return ".".join(str(part) for part in fault["loc"] if not str(part).startswith("["))  # not the tags of a union


def _explain(model: type[BaseModel], fault: Any) -> str:
    loc, name = fault["loc"], _name_of(fault)[:80]
    if fault["type"] == "missing":
        return f"{name}: missing; every field needs a value"
    if fault["type"] == "extra_forbidden":
        inner = _INNER.get(str(loc[0])) if model is Experiment and len(loc) > 1 else None
        prefix, known = (f"{loc[0]}.", inner.model_fields) if inner else ("", model.model_fields)
        near = [prefix + one for one in difflib.get_close_matches(name.removeprefix(prefix), known, n=1)]
        hint = f"did you mean {near[0]!r}?" if near else f"known fields: {', '.join(prefix + one for one in known)}"
        return f"unknown field {name!r}; {hint}"
    message = str(fault["msg"]).removeprefix("Value error, ").removeprefix("Input should be ")
    if kind := re.match(r"a valid (\w+)", message):  # pydantic goes on about parsing, which says no more
        message = _KINDS.get(kind[1], f"a {kind[1]}")
    if not name:  # of several fields together: the message names them
        return message
    published = "; a published one comes with --from-hf, and plan --write makes a file of it" if name == "model" else ""
    return f"{name}: got {_short(fault['input'])}; valid: {message}{published}"


def _bounded(name: str, experiments: int) -> None:
    if experiments > MAX_EXPERIMENTS:
        raise BadInput(
            f"study {_short(name)} has {experiments:,} experiments; valid: at most {MAX_EXPERIMENTS:,} (arms × seeds)"
        )


def _distinct(name: str, experiments: Sequence[Experiment]) -> Study:
    """A study in which every arm has a name of its own: of those that would share one, the first listed keeps it."""
    if not experiments:
        raise BadInput(f"study {name!r} is empty: give at least one arm and one seed")
    first: dict[str, Experiment] = {}
    apart = []
    for one in experiments:
        fields = dict.fromkeys((*one.arm_fields, *one.differences(first.setdefault(one.arm, one))))
        apart.append(one.model_copy(update={"arm_fields": tuple(fields)}))
    counts = Counter((one.arm, one.seed) for one in apart)
    ((arm, seed), count), *_ = counts.most_common(1)
    if count > 1:
        raise BadInput(
            f"study {name!r} has the same arm and seed twice ({arm}, seed {seed}): seeds must be distinct, and arms "
            "must differ in a field"
        )
    study = Study(name=name, experiments=tuple(apart))
    if same := twins(study.first_of_arms):
        told = "\n".join(f"arm {arm}: {why}" for arm, why in list(same.items())[:MAX_FAULTS])
        raise BadInput(f"study {name!r} has the same training in two arms; leave one of them out\n{told}")
    return study


def _kind(value: object) -> str:
    return "nothing" if value is None else f"{type(value).__name__} {_short(value)}"


def _short(value: object) -> str:
    return repr(value)[:80]


def _load(text: str, source: str) -> Any:
    try:
        return yaml.load(text, Loader=_StrictLoader)  # noqa: S506 - a SafeLoader
    except (yaml.YAMLError, RecursionError, ValueError, LookupError, AttributeError) as error:
        # The last three: `2024-13-45`, `!!int ""` and `!!timestamp x`.
        lines = re.sub(r'\n?\s*in "<unicode string>",', " at", str(error)).splitlines()
        words = ", ".join(" ".join(line.split()) for line in lines if line)
        raise BadInput(f"{source} is not valid YAML: {words[:300]}") from error


class _StrictLoader(yaml.CSafeLoader):  # libyaml: ten times as fast, and it bounds the nesting
    """YAML in which a key given twice is an error instead of the later one winning, without aliases and merging."""

    def get_single_node(self) -> yaml.Node | None:
        root = super().get_single_node()
        waiting, seen = [root] if root is not None else [], set[int]()
        while waiting:
            node = waiting.pop()
            near = f"near line {node.start_mark.line + 1}"
            if id(node) in seen:  # what they repeat has no bound
                raise yaml.YAMLError(f"an alias of what stands {near} is not supported: write it out")
            seen.add(id(node))
            if isinstance(node, yaml.SequenceNode):
                waiting += node.value
            elif isinstance(node, yaml.MappingNode):
                waiting += itertools.chain(*node.value)
                keys = Counter((key.tag, key.value) for key, _ in node.value if isinstance(key, yaml.ScalarNode))
                if repeated := [key for (_, key), count in keys.items() if count > 1]:
                    raise yaml.YAMLError(f"key {repeated[0]!r} is given twice, {near}")
                if any(tag == "tag:yaml.org,2002:merge" for tag, _ in keys):
                    raise yaml.YAMLError(f"merging with << is not supported, {near}")
            # YAML 1.1 reads 4:00:00 as 14400, 012 as 10 and 2024_01 as 202401; such a text stays as it is written.
            elif isinstance(node, yaml.ScalarNode) and not node.style:  # it is not in quotes
                usual = {"int": r"-?(0|[1-9]\d*)|[^-+\d].*", "float": r"[^:]*"}.get(node.tag.rpartition(":")[2], ".*")
                node.tag = node.tag if re.fullmatch(usual, node.value, re.S) else "tag:yaml.org,2002:str"
        return root
