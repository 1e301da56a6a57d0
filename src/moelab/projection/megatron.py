"""Steps of Megatron-LM that others measured, and the way from TorchTitan's published step to Megatron-Bridge's.

Megatron-Bridge trains 61 layers and one for multi-token prediction, which repeats the vocabulary head; its FLOPs per
token (864 TFLOP/s at 3,328 tokens/s) say so too. Four layers make a stage where there are sixteen stages, two where
there are 32; the embedding begins the first, multi-token prediction and both losses end the last.

Of the way from 918 to 3,328 tokens/s/GPU on the same 256 B200 both ends are quoted; the steps between are the model's,
in the order in which they are listed. Another order would share the total out differently.

Sources: MooreThreads/SimuMax 1.2, ``docs/b200``; Megatron-Bridge, performance summary and
``recipes/deepseek/deepseek_v3.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from moelab.experiment import EPBackend, Precision
from moelab.hardware import Node, cluster_of
from moelab.layout.schedule import SCHEDULES, split_layers, stages_of_rank
from moelab.memory.activations import Work
from moelab.memory.sharding import Degrees, StageModules, stage_modules
from moelab.model import shape_of
from moelab.projection.calibration import CALIBRATION, Calibration
from moelab.projection.job import MEGATRON, Job, Stack
from moelab.projection.published import published_job
from moelab.projection.routing import RoutingModel
from moelab.projection.step import tps_of

SEQ_LEN = 4096
BRIDGE = replace(MEGATRON, name="Megatron-Bridge", low_linears=True, exchange_overlapped=True, host="graphs")
"""All linears in MXFP8, all-to-all beside compute, CUDA graphs."""
B200_NODE = cluster_of("b200_x256").node


def simumax_job(*, ep: int, pp: int, microbatches: int) -> Job:
    """One dense and three MoE layers of DeepSeek-V3 on eight B200, BF16, NCCL's all-to-all, no recomputation."""
    shape = shape_of("671B").thin(dense_layers=1, moe_layers=3)
    stages = tuple(stage_modules(stage, 1) for stage in split_layers(4, pp))
    return _job(
        "1F1B", stages, pp, shape=shape, node=replace(B200_NODE, nic_gb_s=None), stack=MEGATRON,
        work=Work(tokens=SEQ_LEN, ep=ep, scaling_bytes=2), microbatches=microbatches,
        degrees=Degrees(1, 8 // pp, 1, ep, 8 // pp // ep), precision=Precision.BF16,
    )  # fmt: skip


def bridge_job(
    *,
    node: Node = B200_NODE,
    gpus: int = 256,
    pp: int = 8,
    turns: int = 2,
    tp: int = 1,
    ep: int = 32,
    global_batch: int = 4096,
    backend: EPBackend = EPBackend.DEEPEP,
    precision: Precision = Precision.MXFP8,
    stack: Stack = BRIDGE,
    checkpointing: str = "mla+mlp",
) -> Job:
    """DeepSeek-V3 as Megatron-Bridge trains it."""
    dp = gpus // pp // tp
    return _job(
        "Interleaved1F1B" if turns > 1 else "1F1B", _bridge_stages(pp * turns), pp,
        shape=shape_of("671B").thin(dense_layers=3, moe_layers=59), node=node, stack=stack,
        work=Work(tokens=SEQ_LEN, tp=tp, ep=ep, backend=backend, scaling_bytes=2),
        microbatches=global_batch // dp, degrees=Degrees(1, dp, tp, ep, dp * tp // ep), precision=precision,
        checkpointing=checkpointing,
    )  # fmt: skip


def _bridge_stages(number: int) -> tuple[StageModules, ...]:
    each = 64 // number
    first = StageModules(1, min(3, each), each - min(3, each), 0)
    dense_left = 3 - first.dense_layers
    second = StageModules(0, dense_left, each - dense_left, 0)
    last = StageModules(0, 0, 62 - each * (number - 1), 2)
    return (first, second, *[StageModules(0, 0, each, 0)] * (number - 3), last)


def _job(schedule: str, stages: tuple[StageModules, ...], pp: int, **fields: object) -> Job:
    routing = RoutingModel(kind="random_balanced")
    owners = stages_of_rank(SCHEDULES[schedule], pp, len(stages) // pp)
    return Job(
        schedule=schedule, stages=stages, stages_of_rank=owners, seq_len=SEQ_LEN, routing=routing, **fields  # type: ignore[arg-type]
    )  # fmt: skip


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
        ("CUDA graphs, and no waiting between launches", {"host": "graphs"}),
        (
            "permutation fused, loss fused, parameters not gathered",
            {"permutation": "fused", "loss_chunks": 1, "distributed_optimizer": True},
        ),
        ("products one by one, casts fused for both axes", {"expert_gemm": "library"}),
        ("linears in MXFP8 too", {"low_linears": True}),
        ("fused causal attention, but of whole sequences", {"attention": "fused", "document_keys": None}),
        ("all-to-all beside compute", {"exchange_overlapped": True}),
    ):
        stack = replace(stack, **changes)
        yield name, bridge_job(stack=stack)
    assert replace(stack, name=BRIDGE.name) == BRIDGE, "the last step is Megatron-Bridge"
