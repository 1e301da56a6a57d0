"""From the published 918 tokens/s/GPU to Megatron-Bridge's 3,328 on the same 256 B200, one change at a time.

Both ends are quoted; the steps between are the model's, in the order in which they are listed. Another order would
share the total out differently.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from moelab.projection.calibration import CALIBRATION, Calibration
from moelab.projection.job import Job
from moelab.projection.megatron_jobs import BRIDGE, bridge_job
from moelab.projection.step_cases import published_job, tps_of


@dataclass(frozen=True, kw_only=True)
class Change:
    """One step of the waterfall: what changes, and the projected tokens/s/GPU after it."""

    name: str
    tps: float


def waterfall(calibration: Calibration = CALIBRATION) -> tuple[Change, ...]:
    """Every step, the published arm first, Megatron-Bridge's last."""
    return tuple(Change(name=name, tps=tps_of(job, calibration)) for name, job in _jobs())


def _jobs() -> Iterator[tuple[str, Job]]:
    published = published_job("mxfp8_deepep")
    yield "published: MXFP8 experts + DeepEP", published
    old = replace(published.stack, distributed_optimizer=False)
    job = bridge_job(stack=old, checkpointing="full")
    yield "layout: PP 8 in two turns, no TP, sequences of 4096", job
    stack = old
    for name, changes in (
        ("activations: only MLA's up-projections and the MLP are recomputed", {}),
        ("CUDA graphs, and no waiting between launches", {"host": False}),
        (
            "permutation fused, loss fused, parameters not gathered",
            {"permutation": "fused", "loss_chunks": 1, "distributed_optimizer": True},
        ),
        ("products one by one, casts fused for both axes", {"expert_gemm": "library"}),
        ("linears in MXFP8 too", {"low_linears": True}),
        ("fused causal attention, but of whole sequences", {"attention": "fused", "document_keys": None}),
        ("all-to-all beside compute", {"exchange_hidden": 1.0}),
    ):
        stack = replace(stack, **changes)
        yield name, bridge_job(stack=stack)
    assert replace(stack, name=BRIDGE.name) == BRIDGE, "the last step is Megatron-Bridge"
