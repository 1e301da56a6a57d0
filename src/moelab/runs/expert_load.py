"""How many tokens each expert of each MoE layer got: ``expert_load.parquet`` of a run.

Its columns are ``step, layer, expert, tokens``: the tokens of one step over all ranks, for the first step and about
fifty more, evenly spread. A step that a restarted run repeats has its last count. Runs of older versions have no such
file.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import compute, parquet

from moelab.errors import BadInput
from moelab.runs.directory import RunDir
from moelab.runs.files import write_whole

FILE = "expert_load.parquet"
_COLUMNS = {"step": pa.int32(), "layer": pa.int32(), "expert": pa.int32(), "tokens": pa.int64()}
LATE = 0.2
"""Part of the recorded steps, the last ones, that a trained router is judged by."""


@dataclass(frozen=True, kw_only=True)
class ExpertLoad:
    """Tokens of experts, ``S`` recorded steps, ``L`` MoE layers, ``E`` experts.

    Attributes:
        steps: numbers of the steps ``(S,)``, ascending.
        layers: numbers of the layers ``(L,)``; dense ones are not among them.
        tokens_SLE: tokens that each expert got, over all ranks, ``(S, L, E)``.
    """

    steps: npt.NDArray[np.int64]
    layers: npt.NDArray[np.int64]
    tokens_SLE: npt.NDArray[np.int64]

    @property
    def late_LE(self) -> npt.NDArray[np.int64]:
        """Tokens over the last fifth of the recorded steps ``(L, E)``."""
        late: npt.NDArray[np.int64] = self.tokens_SLE[-max(1, round(LATE * len(self.steps))) :].sum(axis=0)
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
        return _over_mean(self._of_ranks(ep))

    def busiest_rank_of_all_layers(self, ep: int) -> float:
        """Tokens of the rank that gets most over all layers, over the mean of the ranks: the mean over steps."""
        return float(_over_mean(self._of_ranks(ep).sum(axis=1)).mean())

    def _of_ranks(self, ep: int) -> npt.NDArray[np.int64]:
        steps, layers, experts = self.tokens_SLE.shape
        if ep < 1 or experts % ep:
            raise BadInput(f"ep is {ep} and does not divide the {experts} experts whose load was recorded")
        of_ranks: npt.NDArray[np.int64] = self.tokens_SLE.reshape(steps, layers, ep, -1).sum(axis=-1)
        return of_ranks

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
    mean = tokens.mean(axis=-1)
    over: npt.NDArray[np.float64] = np.divide(tokens.max(axis=-1), mean, out=np.ones_like(mean), where=mean > 0)
    return over


class ExpertLoadFile:
    """The file as a run writes it: step after step, whole at any time.

    Args:
        run: the run directory; what an earlier launch of the run wrote is kept.
    """

    def __init__(self, run: Path) -> None:
        self.path = run / FILE
        try:
            self._rows = parquet.read_table(self.path, schema=pa.schema(_COLUMNS))
        except (OSError, pa.ArrowInvalid, pa.ArrowTypeError):  # there is none, or a hand damaged it
            self._rows = pa.schema(_COLUMNS).empty_table()

    def add(self, step: int, tokens_LE: npt.NDArray[np.int64]) -> None:
        """Write one step.

        Args:
            step: in place of what was written of it before.
            tokens_LE: of each expert ``(L, E)``, a row for each layer from 0; dense layers have none.
        """
        layers, experts = np.indices(tokens_LE.shape)[:, tokens_LE.any(axis=1)].reshape(2, -1)
        values = [np.full(len(layers), step), layers, experts, tokens_LE[layers, experts]]
        added = pa.table(dict(zip(_COLUMNS, values, strict=True)), schema=pa.schema(_COLUMNS))
        kept = self._rows.filter(compute.not_equal(self._rows["step"], step))
        self._rows = pa.concat_tables([kept, added]).combine_chunks()
        buffer = io.BytesIO()
        parquet.write_table(self._rows, buffer, compression="zstd")
        write_whole(self.path, buffer.getvalue())


def expert_load(run: RunDir) -> ExpertLoad | None:
    """The load of a run's experts; None where nothing was recorded.

    Raises:
        BadInput: if the file is damaged.
    """
    try:
        table = parquet.read_table(run.path / FILE, use_threads=False)
    except FileNotFoundError:
        return None
    except (OSError, pa.ArrowInvalid) as error:
        raise BadInput(f"{FILE} is damaged: it cannot be read as Parquet") from error
    if {name: table.schema.field(name).type for name in table.schema.names} != _COLUMNS:
        raise BadInput(f"{FILE} is damaged: its columns are not {', '.join(_COLUMNS)} in whole numbers")
    values = [table[name].to_numpy() for name in _COLUMNS]
    (steps, step_N), (layers, layer_N), (experts, expert_N) = (
        np.unique(numbers, return_inverse=True) for numbers in values[:3]
    )
    tokens_SLE = np.zeros(shape := (len(steps), len(layers), len(experts)), dtype=np.int64)
    if table.num_rows != tokens_SLE.size:
        raise BadInput(f"{FILE} is damaged: {table.num_rows} rows, not one for each of {shape} steps, layers, experts")
    tokens_SLE[step_N, layer_N, expert_N] = values[3]
    return ExpertLoad(steps=steps, layers=layers, tokens_SLE=tokens_SLE) if table.num_rows else None
