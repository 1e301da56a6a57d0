"""How many tokens each expert of each MoE layer got: ``expert_load.parquet`` of a run.

Its columns are ``step, layer, expert, tokens``: the tokens of one step over all ranks, for the first step and about
fifty more, evenly spread. A step that a restarted run repeats has its last count. Runs of older versions have no such
file.
"""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import compute, parquet

from moelab.errors import BadInput
from moelab.experiment import Routing
from moelab.files import open_regular, write_whole
from moelab.runs.directory import RunDir, is_run

FILE = "expert_load.parquet"
_MOST_ROWS = 50_000_000  # a thousand layers of a thousand experts at fifty steps
_COLUMNS = {"step": pa.int32(), "layer": pa.int32(), "expert": pa.int32(), "tokens": pa.int64()}


@dataclass(frozen=True, kw_only=True)
class ExpertLoad:
    """Tokens that each expert got over all ranks: ``S`` recorded steps, ``L`` MoE layers, ``E`` experts.

    ``steps`` (ascending) and ``layers`` hold their numbers; dense layers are not among them.
    """

    steps: npt.NDArray[np.int64]
    layers: npt.NDArray[np.int64]
    tokens_SLE: npt.NDArray[np.int64]

    @property
    def late(self) -> slice:
        """The last fifth of the recorded steps, which a trained router is judged by."""
        return slice(-max(1, len(self.steps) // 5), None)

    @property
    def late_LE(self) -> npt.NDArray[np.int64]:
        """Tokens over the last fifth of the recorded steps ``(L, E)``."""
        late: npt.NDArray[np.int64] = self.tokens_SLE[self.late].sum(axis=0)
        return late

    @property
    def busiest_expert_SL(self) -> npt.NDArray[np.float64]:
        """Tokens of the busiest expert over the layer's mean ``(S, L)``; 1 is balance."""
        return _over_mean(self.tokens_SLE)

    @property
    def dead_experts(self) -> int:
        """Experts of all layers that got no token in the last fifth of the recorded steps."""
        return int((self.late_LE == 0).sum())

    def busiest_rank_SL(self, ep: int) -> npt.NDArray[np.float64]:
        """Tokens of the busiest of ``ep`` ranks over their mean ``(S, L)``.

        Rank r of an expert-parallel group holds experts r·E/ep to (r + 1)·E/ep − 1.

        Raises:
            BadInput: if ``ep`` does not divide the experts.
        """
        steps, layers, experts = self.tokens_SLE.shape
        if experts % ep:
            raise BadInput(f"ep is {ep}, which does not divide the {experts} experts whose load was recorded")
        return _over_mean(self.tokens_SLE.reshape(steps, layers, ep, -1).sum(axis=-1))

    def busiest_rank_over_layers(self, ep: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """:meth:`busiest_rank_SL` of the worst layer of each step and of the median one, each ``(S,)``."""
        ranks_SL = self.busiest_rank_SL(ep)
        return ranks_SL.max(axis=1), np.median(ranks_SL, axis=1)

    @property
    def idle_percent_S(self) -> npt.NDArray[np.float64]:
        """Experts of all layers that got no token in a step, of all experts, in percent ``(S,)``."""
        idle: npt.NDArray[np.float64] = 100 * (self.tokens_SLE == 0).mean(axis=(1, 2))
        return idle

    def shares_E(self, ep: int) -> npt.NDArray[np.float64]:
        """Share of a layer's rows that each expert got in the last fifth of the recorded steps ``(E,)``.

        It is the layer in the middle, by the load of its busiest of ``ep`` ranks: popular experts have other numbers in
        each layer, so a mean over layers would be more even than any of them.

        Raises:
            BadInput: if ``ep`` does not divide the experts.
        """
        busiest_L = self.busiest_rank_SL(ep)[self.late].mean(axis=0)
        # Of two in the middle the lower: a mean of layers would be none of them.
        tokens_E = self.late_LE[np.argsort(busiest_L, kind="stable")[(len(busiest_L) - 1) // 2]]
        shares_E: npt.NDArray[np.float64] = tokens_E / tokens_E.sum()
        return shares_E

    def to_json(self) -> dict[str, float | int]:
        """In short: of the last fifth of the recorded steps, the worst layer's busiest expert and the dead experts."""
        steps, layers, experts = self.tokens_SLE.shape
        return {
            "recorded_steps": steps,
            "last_step": int(self.steps[-1]),
            "layers": layers,
            "experts": experts,
            "busiest_expert_over_mean": round(float(_over_mean(self.late_LE).max()), 4),
            "dead_experts": self.dead_experts,
        }


def _over_mean(tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """The largest over the mean along the last axis; 1 where there is nothing."""
    mean = tokens.mean(axis=-1)  # 0 in a layer whose tokens were not counted
    over: npt.NDArray[np.float64] = np.divide(tokens.max(axis=-1), mean, out=np.ones_like(mean), where=mean > 0)
    return over


class ExpertLoadFile:
    """The file as a run writes it: step after step, whole at any time; what an earlier launch wrote is kept."""

    def __init__(self, run: Path) -> None:
        self.path = run / FILE
        try:
            rows = _read(self.path)
        except BadInput:
            rows = None
        self._rows = pa.schema(_COLUMNS).empty_table() if rows is None else rows

    def add(self, step: int, tokens_LE: npt.NDArray[np.int64]) -> None:
        """Write one step in place of what was written of it before.

        ``tokens_LE`` are those of each expert, a row for each layer of the model; dense layers have none.
        """
        # Indices of the rows of MoE layers only, which have any token.
        layers, experts = np.indices(tokens_LE.shape)[:, tokens_LE.any(axis=1)].reshape(2, -1)
        values = [np.full(len(layers), step), layers, experts, tokens_LE[layers, experts]]
        added = pa.table(dict(zip(_COLUMNS, values, strict=True)), schema=pa.schema(_COLUMNS))
        # All rows are written again: fifty steps of 58 layers and 256 experts are a few MB.
        kept = self._rows.filter(compute.not_equal(self._rows["step"], step))
        self._rows = pa.concat_tables([kept, added]).combine_chunks()
        buffer = io.BytesIO()
        parquet.write_table(self._rows, buffer, compression="zstd")
        write_whole(self.path, buffer.getvalue())


def expert_load(file: Path) -> ExpertLoad | None:
    """The load of a run's experts from its ``expert_load.parquet``; None where nothing was recorded.

    Raises:
        BadInput: if the file is damaged.
    """
    table = _read(file)
    if table is None:
        return None
    values = [table[name].to_numpy() for name in _COLUMNS]
    (steps, step_N), (layers, layer_N), (experts, expert_N) = (
        np.unique(numbers, return_inverse=True) for numbers in values[:3]
    )
    shape = (len(steps), len(layers), len(experts))
    if table.num_rows != math.prod(shape):  # before there is room for all of them
        raise BadInput(f"{FILE} is damaged: {table.num_rows} rows, not one for each of {shape} steps, layers, experts")
    tokens_SLE = np.zeros(shape, dtype=np.int64)
    tokens_SLE[step_N, layer_N, expert_N] = values[3]
    return ExpertLoad(steps=steps, layers=layers, tokens_SLE=tokens_SLE) if table.num_rows else None


def routers_load(path: Path, experts: int) -> tuple[ExpertLoad, RunDir | None]:
    """The load that a router gave to experts, and the run that it is of, unless the file is elsewhere by now.

    The path is that of a run with learned routing, or its ``expert_load.parquet``, wherever that is now.

    Raises:
        BadInput: if nothing was recorded there, experts were not chosen by a router, or there are others.
    """
    file = (path if path.is_file() else path / FILE).absolute()
    run = RunDir(file.parent) if is_run(file.parent) else None
    if run is None and not path.is_file():
        raise BadInput(f"{path} is not a run directory; give a run that has {FILE}, or that file")
    name = f"run {run.name}" if run else path.name
    if run and run.experiment.routing is not Routing.LEARNED:
        raise BadInput(f"a measured load needs learned routing, but {name} has routing {run.experiment.routing.value}")
    load = expert_load(file)
    if load is None:
        raise BadInput(f"{name} has no {FILE}: an older moelab trained it, or it logged no step; give another run")
    if load.tokens_SLE.shape[2] != experts:
        raise BadInput(f"{name} has {load.tokens_SLE.shape[2]} experts, but the experiment has {experts}")
    return load, run


def _read(path: Path) -> pa.Table | None:
    """The file's rows; None if there is no file.

    Raises:
        BadInput: if it is something else.
    """
    try:
        # Not read_table, which looks for a dataset first and takes four times as long.
        with open_regular(path) as raw, parquet.ParquetFile(raw) as file:
            if file.metadata.num_rows > _MOST_ROWS:
                raise BadInput(f"{FILE} is damaged: it has {file.metadata.num_rows:,} rows")
            table = file.read(use_threads=False)
    except FileNotFoundError:
        return None
    except (OSError, pa.ArrowException) as error:
        raise BadInput(f"{FILE} is damaged: it cannot be read as Parquet") from error
    # Text or floating-point numbers would only fail where they are used as places in an array.
    types = {name: table.schema.field(name).type for name in table.schema.names}
    if types != _COLUMNS or any(column.null_count for column in table.columns):
        raise BadInput(f"{FILE} is damaged: its columns are not {', '.join(_COLUMNS)} in whole numbers")
    return table.replace_schema_metadata()
