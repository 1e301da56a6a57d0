"""The search: every legal layout of a small space and no other, the fastest first, the same as by brute force."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from moelab.errors import BadInput, Refused
from moelab.experiment import Experiment
from moelab.layout import SCHEDULES, check, facts_of, faults
from moelab.layout.mesh import divisors
from moelab.planning.project import project
from moelab.planning.search import MOST_GPUS, POLICIES, PROJECTED, VARIED, Candidate, certain_tps, search

SMALL = Experiment(model="debug", gpus_per_node=8, local_batch=4, seq_len=1024, hardware="h100_node")
NODE = SMALL.model_copy(
    update={"model": "16B", "seq_len": 4096, "compile": "model+loss", "gpus_per_node": 4, "local_batch": 4}
)
ON_256 = {"nodes": 32, "gpus_per_node": 8, "seq_len": 8192, "activation_checkpoint": "full", "hardware": "b200_x256"}
PUBLISHED = Experiment(model="671B", local_batch=64, compile="model+loss", **ON_256)


def changed(experiment: Experiment, **fields: Any) -> Experiment:
    return Experiment.model_validate({**experiment.model_dump(), **fields})


SPACES = {
    "16B on a node": NODE,
    "16B, 8 bits": changed(NODE, precision="fp8"),
    "16B, DeepEP": changed(NODE, ep_backend="deepep"),
    "16B, short sequences": changed(NODE, seq_len=1024, local_batch=8),
    "16B, not compiled": changed(NODE, compile="none", dataset="c4"),
    "16B on a whole node": changed(NODE, gpus_per_node=8, hardware="b200_node", local_batch=2),
    "16B on two nodes": changed(NODE, nodes=2, gpus_per_node=4, hardware="b200_x256", local_batch=1),
    "16B, forced balance": changed(NODE, routing="round_robin", hardware="h200_node"),
    "small": changed(SMALL, local_batch=2),
    "Qwen3's dimensions": changed(NODE, shape={"dim": 2048, "moe_hidden_dim": 768, "num_experts": 128, "top_k": 8}),
}


def every_layout(experiment: Experiment) -> Iterator[Experiment]:
    """Every combination of divisors, schedules and checkpointing that breaks no rule."""
    given, ranks = facts_of(experiment), divisors(experiment.world_size)
    for pp, tp, cp, replicas, ep in itertools.product(ranks, ranks, ranks, ranks, divisors(128)):
        shard, over = divmod(experiment.world_size, pp * tp * cp * replicas)
        batch, uneven = divmod(experiment.global_batch, replicas * shard) if shard else (0, 1)
        if over or uneven or not batch or tp > 8:
            continue
        schedules = SCHEDULES if pp > 1 else [experiment.pp_schedule]
        for schedule, size, policy in itertools.product(schedules, divisors(batch), POLICIES):
            changes = {"pp": pp, "tp": tp, "cp": cp, "dp_replicate": replicas, "dp_shard": shard, "ep": ep,
                       "pp_schedule": schedule, "microbatch": size, "local_batch": batch,
                       "accumulate_gradients": pp == 1 and size < batch, "activation_checkpoint": policy}  # fmt: skip
            facts = given.vary(**changes)
            if next(faults(facts), None) is None:
                yield facts.experiment


def ranked_tps(layouts: Iterator[Experiment]) -> list[float]:
    """Of those that fit, the highest first."""
    tps = []
    for one in layouts:
        try:
            tps.append(certain_tps(project(one)))
        except Refused:
            continue
    return sorted(tps, reverse=True)


@pytest.mark.parametrize("space", SPACES)
def test_no_layout_is_faster_than_the_first_that_a_search_lists(space: str) -> None:
    found = search(SPACES[space], limit=3)
    assert found.projected <= PROJECTED
    mine = [certain_tps(one.projection) for one in found.candidates if one.projection]
    everything = ranked_tps(every_layout(SPACES[space]))
    assert mine[0] == pytest.approx(everything[0])
    assert mine == sorted(mine, reverse=True)
    assert all(one.headroom_gib >= 0 and check(one.experiment).legal for one in found.candidates)


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


def test_where_nothing_fits_the_plain_layout_that_needs_least_is_named_and_how_many_gpus_would_do() -> None:
    experiment = PUBLISHED.model_copy(update={"nodes": 1, "local_batch": 8})
    result = search(experiment)
    assert (result.candidates, result.projected) == ((), 0)
    near, enough = result.nearest, result.enough
    assert isinstance(near, Candidate)
    assert isinstance(enough, Candidate)
    assert near.headroom_gib < 0 <= enough.headroom_gib
    assert (near.experiment.cp, near.experiment.dp_replicate, near.experiment.microbatch) == (1, 1, 1)
    project(enough.experiment)
    half = search(enough.experiment.model_copy(update={"nodes": enough.experiment.nodes // 2, "dp_shard": -1}), limit=1)
    assert half.candidates == ()
    assert result.to_json()["gpus_that_fit"] == enough.experiment.world_size
    nothing = search(SMALL.model_copy(update={"dispatch_precision": "fp8"}))
    assert (nothing.candidates, nothing.nearest, nothing.legal) == ((), None, 0)


def test_what_was_never_seen_is_widened_in_the_order_too() -> None:
    """671B without a pipeline is faster by the model alone, and comes only where that much wider an interval allows."""
    found = search(PUBLISHED, fixed=("cp", "dp_replicate", "tp"), limit=PROJECTED).candidates
    flat = [one.projection for one in found if one.experiment.pp == 1 and one.projection]
    assert flat
    assert all("without a pipeline" in one.outside[0] for one in flat)
    widths = {bool(one.projection.outside): one.projection.interval[1] / one.projection.tps for one in found}
    assert widths[True] > 1.2 * widths[False]


def test_absurd_sizes_are_refused_at_once() -> None:
    for fields, options, words in (
        ({}, {"limit": 1_000_000}, f"limit is 1000000; a search projects at most {PROJECTED}"),
        ({"nodes": 10**6}, {}, f"at most {MOST_GPUS:,} GPUs, and this has 8,000,000"),
        ({"local_batch": 10**9}, {}, "at most 1,048,576 sequences a step, and this has 8,000,000,000"),
        ({}, {"global_batch": 10**9}, "at most 1,048,576 sequences a step"),
        ({"hardware": "cpu"}, {}, "no bf16_tflops"),
    ):
        with pytest.raises(BadInput, match=words):
            search(SMALL.model_copy(update=fields), **options)


def test_it_judges_the_whole_space_of_256_gpus() -> None:
    """How fast is in benchmarks/search.py and its results."""
    result = search(PUBLISHED)
    assert result.examined > 100_000
    assert len(result.candidates) == 10
    assert all(check(one.experiment).legal and one.experiment.dp_shard > 0 for one in result.candidates)
