"""Arms: which dispatcher, precision, compilation and checkpointing go together, and on which GPU.

What a dispatcher can do is written down once, in ``dispatchers.py``; the rules here ask it.
"""

from __future__ import annotations

from moelab.experiment import EPBackend, Precision
from moelab.hardware import has_deepep, has_grouped_fp8, has_native_mxfp8
from moelab.layout.dispatchers import Fault, deepep_fault, dispatch_fault, takes_experts, that_pad
from moelab.layout.facts import Facts
from moelab.layout.rule import Rule
from moelab.titan.corpus import tokenizer_size

_BLOCK = {Precision.FP8: 16, Precision.MXFP8: 32}
"""Features that a quantised grouped GEMM needs in a multiple of, along every dimension of a weight."""


def _deepep(facts: Facts) -> bool:
    return facts.ep_backend is EPBackend.DEEPEP


def _minimal(facts: Facts) -> bool:
    return facts.ep_backend is EPBackend.MINIMAL_ASYNC_EP


def _emulated(facts: Facts) -> bool:
    """DeepEP's contract on plain collectives, which any device has."""
    return _deepep(facts) and facts.ep_kernels == "emulated"


def _dispatch(facts: Facts) -> Fault | None:
    return dispatch_fault(
        facts.ep_backend,
        precision=facts.precision,
        wgrad=facts.experiment.wgrad,
        ep=facts.ep,
        dispatch_precision=facts.dispatch_precision,
    )


def _deepep_limits(facts: Facts) -> Fault | None:
    if not _deepep(facts):
        return None
    return deepep_fault(facts.shape, kernels=facts.ep_kernels, dispatch_precision=facts.dispatch_precision)


def _said(fault: Fault | None) -> str:
    return fault.said if fault else ""


def _keeps_dispatch(facts: Facts) -> bool:
    """Whether an activation checkpoint can keep what came over the network, where it is asked to."""
    if facts.activation_checkpoint != "full+dispatch" or facts.ep_backend is not EPBackend.STANDARD or facts.ep == 1:
        return True
    return facts.compile == "model+loss" or facts.dispatch_precision != "bf16" or not facts.capability


def _unwhole(facts: Facts) -> list[str]:
    """Dimensions of quantised weights that are not whole blocks; others, such as a head's, follow or are fixed."""
    if not facts.quantised:
        return []
    linears = ("q_lora_rank", "kv_lora_rank", "dense_hidden_dim") if facts.quantize != "experts" else ()
    sizes = {name: getattr(facts.shape, name) for name in ("dim", "moe_hidden_dim", *linears)}
    return [f"{name} is {size}" for name, size in sizes.items() if size % _BLOCK[facts.precision]]


def _expert_blocks(facts: Facts) -> bool:
    if facts.ep > 1 or facts.tp == 1 or not facts.quantised:
        return True
    return facts.shape.moe_hidden_dim % (facts.tp * _BLOCK[facts.precision]) == 0


def _fp8_gpu(facts: Facts) -> bool:
    return facts.precision is not Precision.FP8 or facts.capability is None or has_grouped_fp8(facts.capability)


def _native_gpu(facts: Facts) -> bool:
    native = facts.precision is Precision.MXFP8 and facts.experiment.mxfp8_kernels == "native"
    return not native or facts.capability is None or has_native_mxfp8(facts.capability)


def _dispatcher_gpu(facts: Facts) -> bool:
    """Whether the GPU has what the dispatcher needs: CUDA, and for DeepEP's kernels an SM version of theirs."""
    if facts.capability is None or facts.ep_backend is EPBackend.STANDARD or _emulated(facts):
        return True
    return bool(facts.capability) if _minimal(facts) else has_deepep(facts.capability)


def _here(facts: Facts) -> str:
    """The GPU in words."""
    capability, hardware = facts.capability, facts.experiment.hardware
    return f"{hardware} is SM{capability * 10:.0f}" if capability else f"{hardware} has no GPU"


ARM_RULES = (
    Rule(
        name="dispatcher needs ep",
        factor="ep",
        holds=lambda facts: facts.ep > 1 or facts.ep_backend is EPBackend.STANDARD,
        why=lambda facts: (
            f"ep_backend {facts.ep_backend.value} moves tokens between expert-parallel ranks and needs at least 2; "
            "ep_backend=standard runs without expert parallelism"
        ),
    ),
    Rule(
        name="minimal_async_ep is not quantised",
        factor="ep_backend",
        holds=lambda facts: takes_experts(facts.ep_backend, facts.precision),
        why=lambda facts: (
            f"quantised experts (precision {facts.precision.value}) need a dispatcher that pads each expert's tokens, "
            f"and this one does not; those that do: {that_pad()}"
        ),
    ),
    Rule(
        name="DeepEP takes the tokens",
        factor="ep_backend",
        holds=lambda facts: _deepep_limits(facts) is None,
        why=lambda facts: _said(_deepep_limits(facts)),
    ),
    Rule(
        name="minimal_async_ep recomputes",
        factor="activation_checkpoint",
        holds=lambda facts: not _minimal(facts) or facts.activation_checkpoint == "full",
        why=lambda facts: "ep_backend minimal_async_ep reuses one buffer and needs every layer recomputed",
    ),
    Rule(
        name="minimal_async_ep stays in a node",
        factor="ep",
        holds=lambda facts: not _minimal(facts) or facts.experiment.gpus_per_node % facts.ep == 0,
        why=lambda facts: (
            "ep_backend minimal_async_ep writes into its peers' memory over NVLink, so the expert-parallel ranks must "
            f"lie in one node (gpus_per_node {facts.experiment.gpus_per_node})"
        ),
    ),
    Rule(
        name="dispatch is kept",
        factor="activation_checkpoint",
        holds=_keeps_dispatch,
        why=lambda facts: (
            "uncompiled, TorchTitan's standard all-to-all on a GPU is no operator whose result a checkpoint can keep; "
            "compile=model+loss makes it one, and ep_backend=deepep always is"
        ),
    ),
    Rule(
        name="dispatch is quantised as its experts",
        factor="dispatch_precision",
        holds=lambda facts: _dispatch(facts) is None,
        why=lambda facts: _said(_dispatch(facts)),
    ),
    Rule(
        name="fp8 has no linears",
        factor="quantize",
        holds=lambda facts: facts.quantize == "experts" or facts.precision is not Precision.FP8,
        why=lambda facts: "linears are quantised with precision mxfp8 only",
    ),
    Rule(
        name="MXFP8 linears are whole",
        factor="quantize",
        holds=lambda facts: facts.quantize == "experts" or facts.precision is not Precision.MXFP8 or facts.tp == 1,
        why=lambda facts: f"MXFP8 linears are for tp 1 only (tp is {facts.tp})",
    ),
    Rule(
        name="expert blocks are whole",
        factor="tp",
        holds=_expert_blocks,
        why=lambda facts: (
            f"without expert parallelism (ep 1) it cuts the {facts.shape.moe_hidden_dim} hidden features of each "
            f"expert, and {facts.precision.value} needs multiples of {_BLOCK[facts.precision]}"
        ),
    ),
    Rule(
        name="expert blocks are whole",
        factor="precision",
        holds=lambda facts: not _unwhole(facts),
        why=lambda facts: f"it needs multiples of {_BLOCK[facts.precision]} features, and {', '.join(_unwhole(facts))}",
    ),
    Rule(
        name="vocabulary holds the tokenizer",
        factor="dataset",
        holds=lambda facts: facts.shape.vocab_size >= tokenizer_size(facts.experiment),
        why=lambda facts: (
            f"its tokenizer has {tokenizer_size(facts.experiment)} tokens, and vocab_size is {facts.shape.vocab_size}; "
            f"legal vocab_size: {tokenizer_size(facts.experiment)} or more"
        ),
        offers_choices=False,
    ),
    Rule(
        name="GPU has FP8",
        factor="precision",
        holds=_fp8_gpu,
        why=lambda facts: f"FP8 grouped GEMMs need SM90 or SM100, and {_here(facts)}; mxfp8 runs anywhere, emulated",
    ),
    Rule(
        name="GPU has MXFP8",
        factor="mxfp8_kernels",
        holds=_native_gpu,
        why=lambda facts: (
            f"torchao's MXFP8 kernels are for SM100 and SM103, and {_here(facts)}. Legal mxfp8_kernels: auto, emulated"
        ),
        offers_choices=False,
    ),
    Rule(
        name="dispatcher needs CUDA",
        factor="ep_backend",
        holds=_dispatcher_gpu,
        why=lambda facts: (
            f"it needs CUDA{'' if _minimal(facts) else ' and SM90, SM100 or SM103'}, and {_here(facts)}"
            + ("; ep_kernels=emulated has its numerics on any device" if _deepep(facts) else "")
        ),
    ),
)
