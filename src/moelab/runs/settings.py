"""What can be read of a run's configuration, ours or from elsewhere, in one vocabulary: that of an experiment's fields.

Our runs have ``experiment.yaml`` and ``environment.json``. A TorchTitan log says its version, model, mesh, batch and
GPU as it starts. A W&B export or a TensorBoard folder may have ``config.yaml`` or ``config.json`` beside it, as W&B
keeps it in a run's ``files/``. Anything else has nothing, and the source says so.

The log's lines are those of torchtitan 0.3.0 (``trainer.py``, ``components/metrics.py``,
``distributed/parallel_dims.py`` and ``activation_checkpoint.py``); a line that another release words otherwise is not
found, and its setting is not known.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from moelab.errors import BadInput
from moelab.experiment_file import read_yaml
from moelab.model import SHAPES
from moelab.privacy import HIDDEN, each_text, is_secret_name, without_secrets
from moelab.runs.directory import RunDir
from moelab.runs.log_text import LogBytes, plain
from moelab.runs.side_files import Environment

_NUMBER: Final = re.compile(r"[-+]?\d{1,3}(\.\d*)?[eE][-+]?\d{1,2}|-?[1-9]\d{0,2}(_\d{3})+")
"""A number that is read as a text: 3e-4 by YAML 1.1 for want of a point, where more digits are a commit, and 1_000."""
_READ_BYTES: Final = 4 << 20  # of a log: everything here is said before the first step
_CONFIG_NAMES: Final = ("config.yaml", "config.json")
_LONGEST_LINE: Final = 2_000  # characters; TorchTitan's own have a few hundred
_MOST_VALUES: Final = 1_000
_PRIVATE: Final = re.compile(
    r"(?i)(^|(?<!num)[._])(user(_?name)?|host(_?name)?s?(_list)?|e?mail(_address)?|entity|author|owner|created_by|account)$"
    r"|(^|[._])(auth|credentials?)(\.|$)"
)
_LINES: Final = (
    re.compile(r"torchtitan version: (?P<torchtitan>\S+)"),
    re.compile(
        r"parallelism: pp=(?P<pp>\d+), dp_replicate=(?P<dp_replicate>\d+), dp_shard=(?P<dp_shard>\d+), "
        r"cp=(?P<cp>\d+), tp=(?P<tp>\d+), ep=(?P<ep>\d+)"
    ),
    re.compile(r"Model (?P<model>\S+ \S+) size: (?P<parameters>[\d,]+) total parameters"),
    re.compile(r"(?:CUDA|GPU) capacity: (?P<gpu>.{1,100}?)(?: \(\d+\))? ?with (?P<gpu_memory_gib>[\d.]+)GiB memory"),
    re.compile(r"CPU capacity: (?P<processor>.{1,100}) with [\d.]+GiB memory"),
    re.compile(r"Peak FLOPS used for computing MFU: (?P<peak_flops>[\d.e+]+)"),
    re.compile(
        r"local batch size (?P<local_batch>\d+), global batch size (?P<global_batch>\d+), .{0,100}"
        r"sequence length (?P<seq_len>\d+), total steps (?P<steps>\d+) \(warmup (?P<warmup_steps>\d+)\)"
    ),
    re.compile(r"Optimizer (?P<optimizer>\w+) .{0,400}?'lr': (?P<lr>[\d.e-]+)"),
    re.compile(r"Applied (?P<activation_checkpoint>\w+) activation checkpointing"),
    re.compile(r"modules multiply in (?:MXFP8|8 bits) \((?P<mxfp8_kernels>\w+) kernels\)"),
    re.compile(r"Converted GroupedExperts to use dynamic (?P<experts_in>\S+)"),
    re.compile(r"Float8 training active with recipe (?P<linears_in>\S+)"),
)
_TITAN: Final = {
    "training.seq_len": "seq_len",
    "training.local_batch_size": "local_batch",
    "training.global_batch_size": "global_batch",
    "training.steps": "steps",
    "lr_scheduler.warmup_steps": "warmup_steps",
    "parallelism.pipeline_parallel_degree": "pp",
    "parallelism.pipeline_parallel_schedule": "pp_schedule",
    "parallelism.data_parallel_replicate_degree": "dp_replicate",
    "parallelism.data_parallel_shard_degree": "dp_shard",
    "parallelism.context_parallel_degree": "cp",
    "parallelism.tensor_parallel_degree": "tp",
    "parallelism.expert_parallel_degree": "ep",
    "debug.seed": "seed",
}
"""TorchTitan's names of what an experiment has, as W&B keeps them."""
_OURS: Final = {
    "SelectiveAC": "selective",
    "CommunicationSavingAC": "selective",
    "FullAC": "full",
    "CommunicationSavingFullAC": "full+dispatch",
    "deepseek_v3 debugmodel": "debug",
    **{f"deepseek_v3 {name}": name for name in SHAPES},
}
"""What a log says and an experiment says otherwise."""
_PLANNED: Final = ("steps", "warmup_steps")
"""How far a restart was to train is what the last one says."""
_UNRESOLVED: Final = {("dp_shard", "-1"), ("global_batch", "-1")}
"""Defaults that TorchTitan replaces when it starts: what they became is not known."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a run was configured to do, as far as is known; ``source`` says where that was read."""

    values: dict[str, str] = field(default_factory=dict)
    source: str = "its configuration is not known"

    def __post_init__(self) -> None:
        """Values are shown as they are: they hold no keys."""
        object.__setattr__(self, "values", each_text(without_secrets, self.values))


def settings_of(path: Path, runs: int = 1) -> Settings:
    """What can be read of the configuration of a source from elsewhere; nothing of several runs that share one."""
    if runs == 1 and path.is_file() and (values := _log_settings(path)):
        return Settings(values=values, source="its log")
    config = _config_beside(path)
    if config is None or runs > 1:
        return Settings()
    try:
        content = read_yaml(config)  # JSON is YAML
    except BadInput:
        content = None
    # Aliases of YAML can make a billion values of a few lines: no more are taken than are allowed, and one.
    pairs = list(itertools.islice(_flat(content), _MOST_VALUES + 1)) if isinstance(content, dict) else []
    if content is None or not isinstance(content, dict) or len(pairs) > _MOST_VALUES:
        must = f"it must be a mapping in YAML or JSON of at most {_MOST_VALUES:,} values"
        return Settings(source=f"{config.name} beside it cannot be read: {must}")
    return Settings(values=dict(pairs), source=f"{config.name} beside it")


def run_settings(run: RunDir, environment: Environment | None) -> Settings:
    """The configuration of one of our runs; what its log says was resolved, such as ``dp_shard``, comes first."""
    fields = run.experiment.model_dump(mode="json", exclude={"name", "seed"})  # which runs of one arm do not share
    values = dict(_flat(fields))
    if environment:
        gpus = {"gpu": environment.chip, "gpus": str(len(environment.gpus)) if environment.gpus else "unknown"}
        values |= {
            # Without its name a whole commit cannot be told from a key of W&B.
            name: re.sub(r"\b([0-9a-f]{12})[0-9a-f]{28}\b", r"\1", text)
            for name, text in environment.versions.items()
        }
        values |= {"processor": environment.processor} if environment.on_cpu else gpus
    try:
        log = _log_settings(run.log)
    except BadInput:  # missing or damaged, which is told where the run is
        log = {}
    return Settings(values=values | log, source="experiment.yaml, environment.json and its log")


def spread(values: Iterable[str]) -> str:
    """Values over runs in words, the most frequent first.

    >>> spread(["2.14.1", "2.13.0", "2.14.1"])
    '2.14.1 in 2 runs, 2.13.0 in 1 run'
    >>> spread(["2.14.1", "2.14.1"])
    '2.14.1'
    """
    counts = Counter(values).most_common()
    if len(counts) < 2:
        return counts[0][0] if counts else ""
    return ", ".join(f"{value} in {count} run{'s' if count > 1 else ''}" for value, count in counts)


def _log_settings(path: Path) -> dict[str, str]:
    """What launches in a TorchTitan log say as they start, as this project spells it.

    A restart may go on elsewhere: then a setting has one value after the other.
    """
    text = plain(LogBytes(path).beginning(_READ_BYTES)).decode(errors="replace")
    lines = "\n".join(line for line in text.splitlines() if len(line) <= _LONGEST_LINE)  # no pattern spans two
    found: dict[str, list[str]] = {}
    for match in itertools.chain(*(pattern.finditer(lines) for pattern in _LINES)):
        for name, value in match.groupdict("").items():
            found.setdefault(name, []).append(value.strip().replace(",", ""))
    values = {name: [*dict.fromkeys(_OURS.get(value, value) for value in every)] for name, every in found.items()}
    return {name: every[-1] if name in _PLANNED else ", then ".join(every) for name, every in values.items()}


def _config_beside(path: Path) -> Path | None:
    """The configuration of a TensorBoard folder, or of the only export in a folder."""
    folder = path if path.is_dir() else path.parent
    exports = [file for file in folder.iterdir() if file.suffix in (".csv", ".parquet") and file != path]
    if path.is_file() and exports:  # it may be of any of them
        return None
    return next((folder / name for name in _CONFIG_NAMES if (folder / name).is_file()), None)


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Single values by dotted name; W&B wraps each top one as ``{"desc": …, "value": …}``."""
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and "value" in value and set(value) <= {"desc", "value"}:
            value = value["value"]
        if isinstance(value, dict) and name != "_wandb":  # W&B's notes about itself
            yield from _flat(value, f"{name}.")
        elif value is not None and not isinstance(value, dict | list):
            name = _TITAN.get(name, name)
            value = float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value
            value = int(value) if isinstance(value, float) and value.is_integer() else value
            if (name, str(value)) not in _UNRESOLVED:
                yield name, HIDDEN if _PRIVATE.search(name) or is_secret_name(name) else str(value)
