"""Measurements that come with the package: read where they are, and missed by name where they are not.

``moelab/data/measured/`` has those that notebooks show, as the programs in ``benchmarks/`` wrote them. A file that is
not there was not measured yet; nothing stands in for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from moelab.errors import BadInput

Row = Mapping[str, Any]
ALL_TO_ALL, TWO_BY_TWO, GROUPED_GEMM = "all_to_all_h100", "h100_two_by_two", "grouped_gemm_h100"
ALL_TO_ALL_H200, FULL_NODE = "all_to_all_h200_training", "h200_full_node"
DRY_RUN = "dry run on CPU, emulated"
"""Label of a file that shows that a program runs, and nothing else."""
FOLDER = "benchmarks/results"
"""Of the repository, with the only copy of these files: the package has links to those that notebooks read, and a wheel
the files themselves."""
_LAUNCH = "python -m moelab.launch.loopback --nproc-per-node 2"
COMMANDS = {
    ALL_TO_ALL: f"{_LAUNCH} benchmarks/all_to_all.py --output {FOLDER}/{ALL_TO_ALL}.json",
    TWO_BY_TWO: f"python benchmarks/h100_two_by_two.py --gpus 2 --output {FOLDER}/{TWO_BY_TWO}.json",
    GROUPED_GEMM: f"python benchmarks/grouped_gemm.py --output {FOLDER}/{GROUPED_GEMM}.json",
    ALL_TO_ALL_H200: f"{_LAUNCH} benchmarks/all_to_all.py --output {FOLDER}/{ALL_TO_ALL_H200}.json",
    FULL_NODE: f"python benchmarks/h100_full_node.py --output {FOLDER}/{FULL_NODE}.json",
}
_EXCHANGE = ("size", "routing", "arm", "backend", "hidden", "experts", "top_k", "ranks", "tokens")
COLUMNS = {
    ALL_TO_ALL: _EXCHANGE,
    TWO_BY_TWO: ("shape", "activation_checkpoint", "arm", "routing", "order", "steps", "tps_median", "tps_iqr"),
    GROUPED_GEMM: ("m", "n", "k", "groups", "sizes", "precision", "pass", "median_us"),
    ALL_TO_ALL_H200: _EXCHANGE,
    FULL_NODE: ("ep", "shape", "arm", "routing", "order", "steps", "tps_median", "tps_iqr"),
}
"""What every row of a file must have that has no error."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One file of measurements, or the sentence that says how to make it."""

    name: str
    content: Mapping[str, Any] | None  # None where it was not measured yet
    packaged: bool = False  # whether it came with the package, so that showing it is a replay

    @property
    def rows(self) -> Sequence[Row]:
        """Rows without an error; none where nothing was measured."""
        return [] if self.content is None else [row for row in self.content["rows"] if not row.get("error")]

    @property
    def gpu_names(self) -> list[str]:
        """Names of its GPUs; none where it has none or was not measured."""
        gpus = ((self.content or {}).get("environment") or {}).get("gpus") or []
        return [gpu["name"] if isinstance(gpu, Mapping) else str(gpu) for gpu in gpus]

    @property
    def stamp(self) -> str:
        """Hardware and date, or the first and the last, or that there is nothing yet and which command makes it."""
        if self.content is None:
            return (
                f"not measured yet: run `{COMMANDS[self.name]}` on {'eight' if self.name == FULL_NODE else 'two'} GPUs"
            )
        environment = self.content.get("environment") or {}
        names = self.gpu_names
        packages = environment.get("packages", {})
        versions = [f"{name} {packages[name]}" for name in ("torch", "torchtitan", "torchao") if packages.get(name)]
        used = self.content.get("world_size") or self.content.get("ranks") or len(names)
        hardware = f"{used} × {names[0]}" if names else str(environment.get("processor", "unknown processor"))
        dated = [self.content, *(one for one in self.content.get("campaigns") or () if "date" in one)]
        first, *later = sorted({str(one.get("date", "no date"))[:10] for one in dated})
        days = f"{first} to {later[-1]}" if later else first
        return f"measured: {hardware}, {', '.join([*versions, days])}"


def load_measured(name: str, path: Path | None = None) -> Measurement:
    """Read a file of measurements; its ``content`` is None if the package has no such file.

    ``name`` is one of :data:`COMMANDS`, such as ``h100_two_by_two``; ``path`` another file of its kind than the
    package's.

    Raises:
        BadInput: for an unknown name, a path that cannot be read, a file of another kind, or of a dry run.
    """
    if name not in COMMANDS:
        raise BadInput(f"there is no measurement {name!r}; valid: {', '.join(COMMANDS)}")
    if path is None:
        packaged = resources.files("moelab") / "data" / "measured" / f"{name}.json"
        content = _parse(name, packaged.read_bytes()) if packaged.is_file() else None
        return Measurement(name=name, content=content, packaged=True)
    try:
        return Measurement(name=name, content=_parse(name, path.read_bytes(), str(path)))
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}; {COMMANDS[name]} writes such a file") from error


def _parse(name: str, text: bytes, where: str = "the packaged file") -> Mapping[str, Any]:
    try:
        content = json.loads(text)
    except ValueError as error:  # of JSON or of UTF-8
        raise BadInput(f"{where} is not JSON: {error}") from error
    rows = content.get("rows") if isinstance(content, dict) else None
    if not isinstance(rows, list):
        raise BadInput(f"{where} has no list of rows; {COMMANDS[name]} writes such a file")
    if content.get("label", "measured") != "measured":
        raise BadInput(f"{where} is labelled {content['label']!r}: it is not a measurement")
    for row in rows:
        about = row if isinstance(row, dict) else {}
        missing = [column for column in COLUMNS[name] if about.get(column) is None]
        if missing and not about.get("error"):
            raise BadInput(f"{where}: a row has no {', '.join(missing)}; {COMMANDS[name]} writes such a file")
    return dict(content)
