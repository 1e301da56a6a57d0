"""The way from TorchTitan's published step to Megatron-Bridge's, on the same 256 B200.

Both ends of the way from 918 to 3,328 tokens/s/GPU are quoted; the steps between are the model's, in the order in which
they are listed. Another order would share the total out differently.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from moelab.planning.tables import Change
from moelab.planning.time.calibration import CALIBRATION
from moelab.planning.time.job import Job

from .shapes import tps_of
from .sources import BRIDGE_SOURCE, PUBLISHED
from .steps import FUSED, MEGATRON, Step


def waterfall(steps: tuple[Step, ...]) -> list[Change]:
    """Every change, the published arm first, Megatron-Bridge's last."""
    jobs = {(step.row.source, step.row.name): step.job for step in steps}
    published = jobs[PUBLISHED, "671B mxfp8_deepep"]
    bridge = jobs[BRIDGE_SOURCE, "DSv3, 256 × B200, PP8 VP2 EP32, DeepEP"]
    return [Change(name=name, tps=tps_of(job, CALIBRATION)) for name, job in _jobs(published, bridge)]


def _jobs(published: Job, bridge: Job) -> Iterator[tuple[str, Job]]:
    yield "published: MXFP8 experts + DeepEP", published
    stack = replace(published.stack, distributed_optimizer=False)
    job = replace(bridge, stack=stack, checkpointing="full")
    yield "layout: PP 8 in two turns, no TP, sequences of 4096", job
    for name, changes in (
        ("activations: only MLA's up-projections and the MLP are recomputed", {}),
        ("CUDA graphs, and no waiting between launches", {"launch_s": 0.0}),
        (
            "permutation fused, loss fused, parameters not gathered",
            {"permutation": FUSED, "loss_chunks": 1, "distributed_optimizer": True},
        ),
        ("experts multiplied by a library, casts fused for both axes", {"expert_gemm": "library"}),
        ("linears in MXFP8 too", {"low_linears": True}),
        (
            "fused causal attention, but of whole sequences",
            {"fused_attention": MEGATRON.fused_attention, "document_keys": None},
        ),
        ("all-to-all beside compute", {"exchange_overlapped": True}),
    ):
        stack = replace(stack, **changes)
        yield name, replace(bridge, stack=stack)
    assert replace(stack, name=bridge.stack.name) == bridge.stack, "the last step is Megatron-Bridge"
