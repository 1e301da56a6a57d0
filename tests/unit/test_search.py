"""The search: complete, in the stated order, the same twice, and fast."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any

import pytest

from moelab.errors import BadInput
from moelab.experiment import Experiment, Precision
from moelab.layout import SCHEDULES, Layout, check
from moelab.layout.mesh import divisors
from moelab.planning.advice import recommend
from moelab.planning.plan import headroom_gib
from moelab.planning.search import ORDER, VARIED, Candidate, search
from moelab.planning.sweep import PROFILES, on
from moelab.planning.time.calibration import CALIBRATION
from moelab.planning.time.step import expert_s

SMALL = Experiment(model="debug", gpus_per_node=8, local_batch=4, seq_len=1024, hardware="h100_node")
ON_256 = {"nodes": 32, "gpus_per_node": 8, "seq_len": 8192, "activation_checkpoint": "full", "hardware": "b200_x256"}
PUBLISHED = Experiment(model="671B", local_batch=64, compile="model+loss", **ON_256)


def key(candidate: Candidate) -> tuple[Any, ...]:
    """The stated order, written out again."""
    x = candidate.experiment
    sequence, nodes = x.tp * x.cp, max(1, -(-x.ep // x.gpus_per_node))
    bubble = candidate.bubble_fraction
    return (not candidate.fits, int(bubble / 0.05), sequence, nodes, bubble, -(candidate.headroom_gib or 0.0))


def fields_of(experiment: Experiment) -> tuple[Any, ...]:
    """What a search varies; the schedule means nothing without a pipeline."""
    x = experiment
    pipeline = (x.pp_schedule,) if x.pp > 1 else ()
    return (x.pp, x.dp_replicate, x.dp_shard, x.cp, x.tp, x.ep, x.sequences_at_once, *pipeline)


def brute_force(experiment: Experiment) -> set[tuple[Any, ...]]:
    """Every legal layout, by asking :func:`check` about every combination of divisors."""
    legal = set()
    degrees = divisors(experiment.world_size)
    batches = divisors(experiment.local_batch)
    for pp, tp, cp, dp_replicate, ep in itertools.product(degrees, degrees, degrees, degrees, divisors(8)):
        dp_shard, over = divmod(experiment.world_size, pp * tp * cp * dp_replicate)
        if over:
            continue
        for schedule, microbatch in itertools.product(SCHEDULES if pp > 1 else ["1F1B"], batches):
            changes = {"pp": pp, "tp": tp, "cp": cp, "dp_replicate": dp_replicate, "dp_shard": dp_shard, "ep": ep,
                       "pp_schedule": schedule, "microbatch": microbatch, "accumulate_gradients": True}  # fmt: skip
            one = experiment.model_copy(update=changes)
            if check(one).legal:
                legal.add(fields_of(one))
    return legal


def test_it_finds_every_legal_layout_and_no_other() -> None:
    result = search(SMALL, limit=10**6)
    mine = [fields_of(candidate.experiment) for candidate in result.candidates]
    assert result.legal == len(mine) == len(set(mine))
    assert set(mine) == brute_force(SMALL)


def test_the_order_is_the_stated_one() -> None:
    """Without a known GPU it has no memory."""
    result = search(SMALL, limit=10**6, headroom_gib=headroom_gib(SMALL))
    keys = [key(candidate) for candidate in result.candidates]
    assert keys == sorted(keys)
    assert len(ORDER) == len(keys[0])
    assert {candidate.fits for candidate in result.candidates} == {True}
    assert [row["headroom_gib"] for row in search(SMALL, limit=3).to_json()["candidates"]] == [None] * 3


def test_lazy_memory_changes_nothing() -> None:
    """Memory is estimated only as far as the answer reaches; the answer is that of estimating everything."""
    estimate, estimated = headroom_gib(PUBLISHED), []

    def counted(experiment: Experiment, layout: Layout) -> float:
        estimated.append(experiment)
        return estimate(experiment, layout)

    fixed = ("microbatch", "dp_replicate")
    short = search(PUBLISHED, fixed=fixed, limit=5, headroom_gib=counted)
    assert len(estimated) < short.legal
    everything = search(PUBLISHED, fixed=fixed, limit=10**6, headroom_gib=counted)
    assert short.candidates == everything.candidates[:5]
    assert everything.too_large + len(everything.candidates) == everything.legal


@pytest.mark.parametrize("field", VARIED)
def test_a_fixed_field_keeps_its_value(field: str) -> None:
    value = {"pp_schedule": "GPipe", "ep": 4}.get(field, 2)
    result = search(SMALL.model_copy(update={field: value}), fixed=[field], limit=50)
    assert {getattr(candidate.experiment, field) for candidate in result.candidates} == {value}
    with pytest.raises(BadInput, match=f"seq_len: a search does not vary this; it varies .*{field}"):
        search(SMALL, fixed=["seq_len"])


@pytest.mark.parametrize("cp", [1, 2])
def test_the_global_batch_is_kept(cp: int) -> None:
    experiment = PUBLISHED.model_copy(update={"cp": cp})
    result = search(experiment, global_batch=4096, fixed=("microbatch", "pp_schedule", "cp"), limit=100)
    assert len(result.candidates) == 100
    for candidate in result.candidates:
        x = candidate.experiment
        assert x.local_batch * x.dp_replicate * x.dp_shard == x.global_batch == 4096
    assert search(SMALL, global_batch=7).candidates, "one data-parallel rank can take any batch"


def test_where_nothing_fits_the_nearest_are_named_and_where_nothing_is_legal_none() -> None:
    experiment = PUBLISHED.model_copy(update={"nodes": 1, "local_batch": 8})
    result = search(experiment, headroom_gib=headroom_gib(experiment), limit=3)
    assert result.candidates == ()
    assert result.too_large == result.legal > 3
    missing = [candidate.headroom_gib for candidate in result.nearest]
    assert missing == sorted(missing, reverse=True)
    assert [candidate.fits for candidate in result.nearest] == [False] * 3
    by_speed = recommend(experiment, settings=False, limit=3).result
    assert [candidate.headroom_gib for candidate in by_speed.nearest] == missing
    nothing = search(SMALL.model_copy(update={"dispatch_precision": "fp8"}))
    assert (nothing.candidates, nothing.nearest, nothing.legal, nothing.examined > 0) == ((), (), 0, True)


def test_it_judges_the_whole_space_of_256_gpus() -> None:
    """How fast is in benchmarks/search.py and its results."""
    result = search(PUBLISHED, headroom_gib=headroom_gib(PUBLISHED))
    assert result.examined > 100_000
    assert len(result.candidates) == 10
    assert all(check(one.experiment).legal and one.experiment.dp_shard > 0 for one in result.candidates)


def test_an_answer_says_from_which_rows_on_8_bits_save_time_and_how_long_the_gpu_waits() -> None:
    small = {"model": "16B", "gpus_per_node": 8, "ep": 8, "seq_len": 4096, "hardware": "b200_node", "dataset": "c4"}
    fixed = ("pp", "pp_schedule", "cp", "dp_replicate", "activation_checkpoint")
    experts = recommend(Experiment(**small), settings=False, limit=3, fixed=fixed).gains[0]
    projection = experts.with_it
    waits = projection.breakdown_s["host and waiting"] / projection.step_time_s
    assert f"the GPU waits {waits:.0%} of the step" in experts.why
    job, even = projection.job, int(re.search(r"break-even is ([\d,]+)", experts.why)[1].replace(",", ""))
    for rows, saves in ((0.9 * even, False), (1.1 * even, True)):
        work = replace(job.work, tokens=round(rows * job.work.tokens / job.work.received(job.shape)))
        plain = replace(work, one_pass_experts=False, scaled_products=False, pad_multiple=1)
        bf16_s = expert_s(replace(job, precision=Precision.BF16, work=plain), CALIBRATION)
        assert (expert_s(replace(job, work=work), CALIBRATION) < bf16_s) == saves


def test_a_sweep_takes_the_8_bit_format_that_each_gpu_multiplies() -> None:
    formats = {
        kind: on(kind, PUBLISHED.model_copy(update={"precision": Precision.MXFP8})).precision for kind in PROFILES
    }
    assert formats == {"H100": "fp8", "H200": "fp8", "B200": "mxfp8", "GB200": "mxfp8"}
    assert on("H100", PUBLISHED).precision == "bf16"
