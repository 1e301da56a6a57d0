"""Megatron-LM's peak memory by moelab's lists of activations, to be held against peaks measured on B200.

TorchTitan's own peaks that are public are rows of ``steps.csv``. SimuMax has published Megatron-LM's, of DeepSeek-V2
and V3 with four layers on eight GPUs (``benchmarks/results/memory_b200_simumax.json``). What a layer keeps for its
backward pass is mostly the same there, and is what these peaks test; the rest of this module is what Megatron-LM does
differently:

- Parameters are BF16 and gradients FP32, both whole on every data-parallel rank; only the FP32 master copy and the two
  moments are sharded (``--use-distributed-optimizer``), those of routed experts over the ranks that share them.
- Scores multiply the experts' hidden features, so that the experts' outputs are not kept
  (``megatron/core/transformer/moe/experts.py``); the router runs in BF16; SwiGLU is fused and recomputed.
- TransformerEngine keeps a BF16 placeholder gradient for each shape of weight (``get_dummy_wgrad``), because the real
  gradients are added up elsewhere; gate and up are one weight.
- Fused cross-entropy writes the gradient of the logits over the logits.

These differences were read from the sources with the measured peaks at hand: this is a check that nothing is missing,
not a blind prediction.

Sources: SimuMax at 4dcaae513ba7, ``simu_tools/megatron_scripts/`` (the flags) and ``docs/b200/``; Megatron-LM,
``megatron/core/tensor_parallel/layers.py``; TransformerEngine, ``pytorch/triton/cross_entropy.py``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod

from moelab.layout.schedule import in_flight
from moelab.model import EMBEDDING, HEAD, NORM, ModelShape, Parameter, parameters, shape_of
from moelab.planning.memory.activations import BF16, FP32, Work, backward_working_set, saved_without_checkpointing

GIB = 2**30
OPTIMIZER_BYTES = 3 * FP32
"""Of each parameter: the master copy and two moments."""
NOT_KEPT = ("outputs to be scaled", "router input in FP32")
"""Tensors of TorchTitan's layers that Megatron-LM's do not keep."""
V2 = replace(
    shape_of("671B"),
    name="236B",
    vocab_size=102_400,
    dim=5120,
    n_layers=60,
    n_dense_layers=1,
    dense_hidden_dim=12_288,
    moe_hidden_dim=1536,
    num_experts=160,
    num_shared_experts=2,
    top_k=6,
)
"""DeepSeek-V2, which TorchTitan has no configuration of (SimuMax, ``configs/models/deepseekv2.json``)."""


@dataclass(frozen=True, kw_only=True)
class MegatronRun:
    """What sets the memory of a Megatron-LM run without tensor or context parallelism and without recomputation.

    Attributes:
        shape: the model.
        gpus: ranks of the whole run.
        ep: ranks that share the experts.
        pp: pipeline ranks, under the 1F1B schedule; layers are shared out evenly.
        tokens: of a micro-batch.
        microbatches: of a step.
    """

    shape: ModelShape
    gpus: int
    ep: int
    pp: int
    tokens: int
    microbatches: int


@dataclass(frozen=True, kw_only=True)
class MegatronMemory:
    """Predicted peak of allocated memory on one pipeline rank, GiB.

    Attributes:
        weights_gib: parameters, gradients and optimizer states: arithmetic.
        rest_gib: activations, placeholders and the fullest moment: what the lists predict.
    """

    weights_gib: float
    rest_gib: float

    @property
    def total_gib(self) -> float:
        """Everything, GiB."""
        return self.weights_gib + self.rest_gib


def megatron_memory(run: MegatronRun) -> tuple[MegatronMemory, ...]:
    """Predict the peak of every pipeline rank.

    Example:
        >>> four_layers = shape_of("671B").thin(dense_layers=1, moe_layers=3)
        >>> run = MegatronRun(shape=four_layers, gpus=8, ep=8, pp=1, tokens=4096, microbatches=4)
        >>> [f"{rank.total_gib:.1f}" for rank in megatron_memory(run)]
        ['104.1']
    """
    return tuple(_rank(run, rank, _modules(run, rank)) for rank in range(run.pp))


def _modules(run: MegatronRun, rank: int) -> list[str]:
    each = run.shape.n_layers // run.pp
    layers = [f"layers.{layer}" for layer in range(rank * each, (rank + 1) * each)]
    return [EMBEDDING] * (rank == 0) + layers + [NORM, HEAD] * (rank == run.pp - 1)


def _rank(run: MegatronRun, rank: int, modules: list[str]) -> MegatronMemory:
    weights = [parameter for module in modules for parameter in parameters(run.shape, module)]
    work = Work(tokens=run.tokens, ep=run.ep, scaling_bytes=BF16)
    ((microbatches,),) = in_flight("1F1B", pp=run.pp, microbatches=run.microbatches, rank=rank)
    layers = [int(name.removeprefix("layers.")) for name in modules if name.startswith("layers.")]
    activations = microbatches * sum(_kept(run.shape, work, layer >= run.shape.n_dense_layers) for layer in layers)
    moments = [backward_working_set(run.shape, moe=True, work=work, compiled=True)]
    if HEAD in modules:
        norm = 2 * BF16 * run.tokens * run.shape.dim  # its input and output
        moments.append(BF16 * run.tokens * run.shape.vocab_size + norm)
    rest = activations + _placeholders(weights) + max(moments)
    return MegatronMemory(weights_gib=_weight_bytes(run, weights) / GIB, rest_gib=rest / GIB)


def _kept(shape: ModelShape, work: Work, moe: bool) -> float:
    tensors = saved_without_checkpointing(shape, moe=moe, work=work, compiled=True)
    return sum(size for name, size in tensors.items() if name not in NOT_KEPT)


def _weight_bytes(run: MegatronRun, weights: Iterable[Parameter]) -> float:
    dense = experts = 0
    for weight in weights:
        if weight.part == "routed experts":
            experts += weight.numel // run.ep
        else:
            dense += weight.numel
    sharers = run.gpus // run.pp
    return (BF16 + FP32) * (dense + experts) + OPTIMIZER_BYTES * (dense / sharers + experts * run.ep / sharers)


def _placeholders(weights: Iterable[Parameter]) -> float:
    """Bytes of one BF16 tensor for each shape of weight; a grouped product has one weight for each expert."""
    shapes = set()
    for weight in weights:
        if weight.part in ("router", "embedding", "norms") or ".w3" in weight.name:  # w3 is one weight with w1
            continue
        out, into = weight.shape[-2:]
        shapes.add((2 * out if ".w1" in weight.name else out, into))
    return float(BF16 * sum(map(prod, shapes)))
