"""The lists of activations against peaks of Megatron-LM on B200 that SimuMax measured and published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from validation.memory_megatron import V2, MegatronMemory, MegatronRun, megatron_memory

from moelab.model import count_parameters, shape_of

QUOTED = json.loads((Path(__file__).parents[2] / "benchmarks" / "results" / "memory_b200_simumax.json").read_text())
SHAPES = {"DeepSeek-V2": V2, "DeepSeek-V3": shape_of("671B")}
WORST, WORST_BEYOND_WEIGHTS = 0.01, 0.10


def predicted(row: dict[str, Any]) -> tuple[MegatronMemory, ...]:
    shape = SHAPES[row["model"]].thin(dense_layers=row["dense_layers"], moe_layers=row["moe_layers"])
    degrees = {name: row[name] for name in ("gpus", "ep", "pp", "microbatches")}
    return megatron_memory(MegatronRun(shape=shape, tokens=row["seq_len"] * row["micro_batch"], **degrees))


@pytest.mark.parametrize("row", QUOTED["rows"], ids=lambda row: row["case"])
def test_quoted_peaks_of_b200(row: dict[str, Any]) -> None:
    for found, peak, theirs in zip(predicted(row), row["max_allocated_gib"], row["simumax_gib"], strict=True):
        assert found.total_gib == pytest.approx(peak, rel=WORST)
        # Nine tenths of the larger peaks are weights, which are arithmetic: the lists are judged by what is left.
        assert found.rest_gib == pytest.approx(peak - found.weights_gib, rel=WORST_BEYOND_WEIGHTS)
        assert abs(found.total_gib - peak) < abs(theirs - peak), "SimuMax is nearer"


def test_deepseek_v2_has_its_published_size() -> None:
    """236 B parameters, 21 B of them active (DeepSeek-V2, arXiv 2405.04434, abstract)."""
    counts = count_parameters(V2)
    assert counts.total / 1e9 == pytest.approx(236, abs=0.5)
    assert counts.active / 1e9 == pytest.approx(21, abs=0.5)


def test_micro_batches_beyond_the_pipelines_depth_change_nothing() -> None:
    """SimuMax reports one measurement for 4, 8 and 32 micro-batches."""
    for row in QUOTED["rows"]:
        assert predicted({**row, "microbatches": 32}) == predicted(row)
