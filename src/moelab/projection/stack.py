"""What a training stack does with a layer: the facts about the software that decide its time, apart from sizes.

TorchTitan's are read from an experiment; Megatron's are those of its published command lines.

Sources: ``torchtitan`` 0.3.0, ``models/common/decoder.py`` (FlexAttention with a causal mask of packed documents),
``components/loss.py`` (eight chunks, each of which adds to the FP32 gradient of the head), ``distributed/fsdp.py``
(parameters stay gathered from one micro-batch to the next under a pipeline); Megatron-LM and Megatron-Bridge,
performance guides.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from moelab.experiment import EPBackend, Experiment

C4_KEYS = 427.0
"""Keys that a token of C4 meets where documents are kept apart: their mean length, as if lengths were exponentially
distributed; 156 G tokens in 365 M documents (Dodge et al. 2021, arXiv 2104.08758, table 1)."""
CORPUS_KEYS = 325.0
"""The same of moelab's own corpus: half of a passage of 2,000 characters, about three of them to a token."""


@dataclass(frozen=True, kw_only=True)
class Stack:
    """A training stack.

    Attributes:
        name: for tables.
        attention: ``flex`` (Triton) or ``fused`` (cuDNN or FlashAttention).
        document_keys: keys that a token meets where packed documents are kept apart; None where they are not.
        fused: whether elementwise work between products is fused, by torch.compile or by hand.
        expert_gemm: ``torch`` (``torch._grouped_mm``, torchao) or ``library`` (one product after the other at the
            rate of large ones).
        low_linears: whether attention, dense FFN and shared experts multiply in the experts' precision.
        permutation: whose kernels bring rows into the experts' order.
        loss_chunks: pieces in which the head's gradient is added up; 1 for a fused loss.
        exchange_hidden: share of the all-to-all that runs beside compute.
        host: whether Python launches each kernel; without it CUDA graphs do.
        distributed_optimizer: Megatron's, with whole parameters on every rank; else FSDP2.
    """

    name: str
    attention: Literal["flex", "fused"] = "flex"
    document_keys: float | None = None
    fused: bool = True
    expert_gemm: Literal["torch", "library"] = "torch"
    low_linears: bool = False
    permutation: Literal["standard", "standard compiled", "deepep dense", "deepep expanded", "fused"] = "standard"
    loss_chunks: int = 8
    exchange_hidden: float = 0.0
    host: bool = True
    distributed_optimizer: bool = False


def titan(experiment: Experiment) -> Stack:
    """TorchTitan 0.3.0 with moelab's dispatchers, as an experiment sets it up."""
    compiled = experiment.compile == "model+loss"
    deepep = experiment.ep_backend in (EPBackend.DEEPEP, EPBackend.HYBRIDEP)
    return Stack(
        name="TorchTitan",
        document_keys=C4_KEYS if experiment.dataset == "c4" else CORPUS_KEYS,
        fused=compiled,
        low_linears=experiment.quantize == "experts+linears",
        permutation="deepep expanded" if deepep else "standard compiled" if compiled else "standard",
    )


def as_published(experiment: Experiment) -> Stack:
    """TorchTitan of early 2026 with its own dispatchers, whose permutation was not compiled."""
    deepep = experiment.ep_backend is EPBackend.DEEPEP
    return replace(
        titan(experiment), name="TorchTitan, March 2026", permutation="deepep dense" if deepep else "standard"
    )


MEGATRON = Stack(
    name="Megatron-LM",
    attention="fused",
    expert_gemm="library",
    permutation="fused",
    loss_chunks=1,
    distributed_optimizer=True,
)
"""With TransformerEngine, fused permutation and fused cross-entropy; full sequences, no document mask."""
