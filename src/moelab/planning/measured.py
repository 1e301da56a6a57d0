"""Measurements that come with the package: read where they are, and missed by name where they are not.

``moelab/data/measured/`` has those that notebooks show, as the programs in ``benchmarks/`` wrote them. A file that is
not there was not measured yet; nothing stands in for it. ``h100_full_node_predicted.json`` beside them is what was
expected of one node of eight GPUs before anyone measured it; what is measured later is held against the file, not
against what the model says by then.

The micro-experiments of one node give constants of the step-time model: every row of a measurement asks for one value
of a constant, and the median over rows is taken.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from moelab.analysis.two_by_two import ArmResult, arm_results
from moelab.data import read_json
from moelab.errors import BadInput
from moelab.experiment import EPBackend
from moelab.hardware import GPUS, MODELS, known_gpu
from moelab.model import BYTES_PER_ELEMENT, shape_of
from moelab.planning.time.calibration import Calibration, value_that_meets
from moelab.planning.time.exchange import exchange_job, exchange_time_s
from moelab.planning.time.gemm import grouped_time_s, is_blackwell, rates_of

Row = Mapping[str, Any]
ALL_TO_ALL, TWO_BY_TWO, GROUPED_GEMM = "all_to_all_h100", "h100_two_by_two", "grouped_gemm_h100"
ALL_TO_ALL_H200, FULL_NODE = "all_to_all_h200_training", "h200_full_node"
DRY_RUN = "dry run on CPU, emulated"
"""Label of a file that shows that a program runs, and nothing else."""
FOLDER = "benchmarks/results"
"""Of the repository, with the only copy of these files: the package has links to those that notebooks read, and a wheel
the files themselves."""
COMMANDS = {
    ALL_TO_ALL: f"torchrun --nproc-per-node 2 benchmarks/all_to_all.py --output {FOLDER}/{ALL_TO_ALL}.json",
    TWO_BY_TWO: f"python benchmarks/h100_two_by_two.py --gpus 2 --output {FOLDER}/{TWO_BY_TWO}.json",
    GROUPED_GEMM: f"python benchmarks/grouped_gemm.py --output {FOLDER}/{GROUPED_GEMM}.json",
    ALL_TO_ALL_H200: f"torchrun --nproc-per-node 2 benchmarks/all_to_all.py --output {FOLDER}/{ALL_TO_ALL_H200}.json",
    FULL_NODE: f"python benchmarks/h100_full_node.py --output {FOLDER}/{FULL_NODE}.json",
}
_EXCHANGE = ("size", "routing", "arm", "backend", "hidden", "experts", "top_k", "ranks", "tokens", "parts_us")
COLUMNS = {
    ALL_TO_ALL: _EXCHANGE,
    TWO_BY_TWO: ("shape", "activation_checkpoint", "arm", "routing", "order", "steps", "tps_median", "tps_iqr"),
    GROUPED_GEMM: ("m", "n", "k", "groups", "sizes", "precision", "pass", "median_us"),
    ALL_TO_ALL_H200: _EXCHANGE,
    FULL_NODE: ("ep", "shape", "arm", "routing", "order", "steps", "tps_median", "tps_iqr"),
}
"""What every row of a file must have that has no error."""
GPU_PROFILES = {"NVIDIA H100 80GB HBM3": "h100_node", "NVIDIA H200": "h200_node"}
"""Hardware profiles of the GPUs that steps are predicted for, by the name that nvidia-smi prints."""
PREDICTED = "h100_full_node_predicted"
EP_DEGREES = (2, 4, 8)
ROUTINGS = ("round_robin", "random_balanced")
SCALING = "671B, 8 experts a GPU"
"""The shape whose work stays the same on each GPU, whatever their number, so that only the exchange grows."""
SAME_SHAPE = {"671B MoE-heavy": SCALING}
"""Shapes of the two-by-two that on its two GPUs are those of the full node by another name."""


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


def hardware_of(measured: Measurement) -> str:
    """The hardware profile that a measurement was made on.

    Raises:
        BadInput: if its GPUs are of several kinds or have no profile: they are not held against another's predictions.
    """
    kinds = set(measured.gpu_names)
    if len(kinds) != 1 or not kinds <= GPU_PROFILES.keys():
        names = ", ".join(sorted(kinds)) or "no GPU"
        raise BadInput(f"{measured.name} was measured on {names}; predictions are for {', '.join(GPU_PROFILES)}")
    return GPU_PROFILES[kinds.pop()]


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


def load_predicted() -> dict[str, Any]:
    """The predictions of one node of two to eight GPUs that come with the package."""
    return read_json(f"measured/{PREDICTED}.json")


OPERATIONS = ("dispatch", "combine", "combine_backward", "dispatch_backward")
"""Of rows of exchanges; :mod:`moelab.micro.exchange`, which measures them, loads torch."""


class FourExchanges(NamedTuple):
    """A layer's four exchanges together, ms: of the standard all-to-all, and of the fastest other arm."""

    standard_ms: float
    fastest: str
    fastest_ms: float

    @property
    def ratio(self) -> float:
        """How many times as fast the fastest is."""
        return self.standard_ms / self.fastest_ms


def four_exchanges(rows: Iterable[Row], arms: Collection[str]) -> FourExchanges | None:
    """Medians of one size and routing, added up; None where the standard arm or all others lack an operation."""
    medians = {(row["arm"], row["operation"]): row["us_median"] for row in rows}
    sums_ms = {
        arm: sum(medians[arm, operation] for operation in OPERATIONS) / 1e3
        for arm in arms
        if all((arm, operation) in medians for operation in OPERATIONS)
    }
    standard_ms = sums_ms.pop("standard bf16", None)
    if standard_ms is None or not sums_ms:
        return None
    fastest = min(sums_ms, key=sums_ms.__getitem__)
    return FourExchanges(standard_ms, fastest, sums_ms[fastest])


def payload_gb_s(row: Row) -> float:
    """What of an exchange crosses between ranks, over the time of the whole operation."""
    return float(row["physical_bytes"] / row["us_median"] / 1e3)  # bytes a µs are 1e-3 GB/s


class Place(NamedTuple):
    """What one figure of a full node is of."""

    shape: str
    ep: int
    routing: str
    arm: str


def node_results(full_node: Measurement, two_by_two: Measurement) -> dict[Place, ArmResult]:
    """What was measured at each degree; where the full node was not measured on two GPUs, the two-by-two's figure.

    The two-by-two is left out if its GPUs are others.
    """
    alike = not (full_node.rows and two_by_two.rows) or hardware_of(full_node) == hardware_of(two_by_two)
    # older files do not carry the checkpointing, which all arms of a shape share
    checkpointing = {name: shape["activation_checkpoint"] for name, shape in load_predicted()["shapes"].items()}
    at_two = [{**row, "ep": 2, "shape": SAME_SHAPE.get(row["shape"], row["shape"])} for row in two_by_two.rows if alike]
    at_two = [row for row in at_two if row["activation_checkpoint"] == checkpointing.get(row["shape"])]
    own = [{"activation_checkpoint": checkpointing.get(row["shape"]), **row} for row in full_node.rows]
    results: dict[Place, ArmResult] = {}
    for rows in (at_two, own):  # the later replaces the earlier: the node's own figures come last
        for ep in dict.fromkeys(row["ep"] for row in rows):
            of_degree = arm_results(row for row in rows if row["ep"] == ep)
            results |= {Place(one.shape, ep, one.routing, one.arm): one for one in of_degree}
    return results


Ends = tuple[float, float, float]


@dataclass(frozen=True, kw_only=True)
class NodeGains:
    """Gains over stock at the same degree, each with its ends: predicted before, and measured where that was done."""

    predicted: Mapping[Place, Ends]  # with the 90 % interval
    measured: Mapping[Place, Ends]  # with quartiles over all steps

    @property
    def within(self) -> int:
        """How many of the measured lie in their interval."""
        ends = [(self.predicted[place], gain) for place, (_, gain, _) in self.measured.items()]
        return sum(low <= gain <= high for (low, _, high), gain in ends)


def node_gains(
    predicted: Mapping[str, Any], full_node: Measurement, two_by_two: Measurement, arms: Collection[str]
) -> NodeGains:
    """Gains of arms at :data:`SCALING` on the GPUs of the node or, while none was measured, of the two-by-two.

    ``predicted`` is the content of :data:`PREDICTED`.
    """
    hardware = hardware_of(full_node if full_node.rows else two_by_two)
    expected = {
        Place(row["shape"], row["ep"], row["routing"], row["arm"]): (low, row["gain"], high)
        for row in predicted["rows"]
        if (row["hardware"], row["shape"]) == (hardware, SCALING) and row["arm"] in arms
        for low, high in [row["gain_interval"]]
    }
    results = node_results(full_node, two_by_two).items()
    return NodeGains(
        predicted=expected, measured={at: one.ratio_ends for at, one in results if at in expected and one.ratio}
    )


# Constants of a node


def constants_of_node(grouped_gemm: Measurement, all_to_all: Measurement) -> dict[str, float]:
    """Values of the constants that a node's files decide; none for what a file has no rows of.

    The files are those of notebooks 02 and 04, or of ``benchmarks/grouped_gemm.py`` and ``benchmarks/all_to_all.py``.

    Raises:
        BadInput: if a file is of no GPU whose datasheet is known.
    """
    gpu = _gpu_of(grouped_gemm)
    grouped = "blackwell_grouped" if is_blackwell(GPUS[gpu]) else "hopper_grouped"
    by_row = {
        grouped: _of_products(grouped_gemm, gpu, grouped),
        "nccl_nvlink": _of_exchanges(all_to_all, "standard", "nccl_nvlink"),
        "deepep_nvlink": _of_exchanges(all_to_all, "deepep", "deepep_nvlink"),
    }
    known = {name: [value for value in values if value is not None] for name, values in by_row.items()}
    return {name: statistics.median(values) for name, values in known.items() if values}


def _of_products(measured: Measurement, gpu: str, name: str) -> Iterator[float | None]:
    for row in measured.rows:
        # 8 bits have constants of their own, and forward alone says nothing of the slower wgrad
        if (row["precision"], row["pass"]) == ("bf16", "forward+backward"):

            def predict(calibration: Calibration, row: Row = row) -> float:  # bound now: the loop goes on
                rates = rates_of(GPUS[gpu], calibration)
                return grouped_time_s(row["m"], row["n"], row["k"], row["groups"], "bf16", rates)

            yield value_that_meets(name, 1e-6 * row["median_us"], predict)


def _of_exchanges(measured: Measurement, backend: str, name: str) -> Iterator[float | None]:
    """From the rows whose wire carries BF16 tokens once for each destination and writes nothing else.

    Of DeepEP these are of its dense layout, which files of format 2 have. In the expanding layout of training the wire
    part is bound by the writes, so it does not say what NVLink does.
    """
    gpu = _gpu_of(measured)
    if GPUS[gpu].nvlink_gb_s is None:
        return  # cards without NVLink between all of them have no share of it
    for row in measured.rows:
        if row["arm"] not in ("standard bf16", "deepep bf16 dense") or row["backend"] != backend:
            continue
        sizes = {"dim": row["hidden"], "num_experts": row["experts"], "top_k": row["top_k"], "expert_groups": 1}
        shape = replace(shape_of("671B"), **sizes)
        job = exchange_job(gpu, ep=row["ranks"], shape=shape, tokens=row["tokens"])
        job = replace(job, work=replace(job.work, backend=EPBackend(backend)))

        def predict(calibration: Calibration, job: Any = job) -> float:
            # as the benchmark times it, with the kernel waiting for the host
            return exchange_time_s(job, calibration, BYTES_PER_ELEMENT["bf16"], alone=True)

        yield value_that_meets(name, 1e-6 * row["parts_us"]["wire"], predict)


def _gpu_of(measured: Measurement) -> str:
    """The kind of GPU that a file is of."""
    hardware = (measured.content or {}).get("hardware") or {}  # notebook 02's files have one GPU, under this key
    named = hardware.get("gpu")
    names = list(dict.fromkeys(filter(None, [named, *measured.gpu_names])))
    kind = known_gpu(names[0]) if len(names) == 1 else None
    if kind is None:
        raise BadInput(
            f"{measured.name} was measured on {' and '.join(names) or 'no GPU'}; datasheets are known of "
            f"{', '.join(MODELS)}"
        )
    return kind.name
