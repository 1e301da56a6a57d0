"""Arms: which dispatcher, precision, compilation and checkpointing go together, and on which GPU.

Three things come with moelab's own DeepEP dispatcher, which this version does not have yet: quantised experts with
``ep_backend=deepep``, ``compile=model+loss`` with it, and any ``dispatch_precision`` but BF16. They are declared, so
that a study can be written down, and refused by name.
"""

from __future__ import annotations

from moelab.experiment import EPBackend, Precision
from moelab.layout.facts import Facts
from moelab.layout.rule import Rule

_OWN = "moelab's own DeepEP dispatcher, which comes with a later version"
_BLOCK = {Precision.FP8: 16, Precision.MXFP8: 32}
"""Features that a quantised grouped GEMM needs in a multiple of, along every dimension of a weight."""
FP8_CAPABILITY, MXFP8_CAPABILITY = 8.9, 10.0


def _deepep(facts: Facts) -> bool:
    return facts.ep_backend is EPBackend.DEEPEP


def _minimal(facts: Facts) -> bool:
    return facts.ep_backend is EPBackend.MINIMAL_ASYNC_EP


def _expert_blocks(facts: Facts) -> bool:
    if facts.ep > 1 or not facts.quantised:
        return True
    return facts.shape.moe_hidden_dim % (facts.tp * _BLOCK[facts.precision]) == 0


def _fp8_gpu(facts: Facts) -> bool:
    known = facts.precision is Precision.FP8 and facts.capability is not None
    return not known or float(facts.capability or 0) >= FP8_CAPABILITY


def _native_gpu(facts: Facts) -> bool:
    native = facts.precision is Precision.MXFP8 and facts.experiment.mxfp8_kernels == "native"
    return not native or facts.capability is None or facts.capability >= MXFP8_CAPABILITY


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
        holds=lambda facts: not (_minimal(facts) and facts.quantised),
        why=lambda facts: (
            f"quantised experts (precision {facts.precision.value}) need a dispatcher that pads each expert's tokens, "
            "and this one does not; those that do: standard, hybridep, and moelab's own deepep, which comes with a "
            "later version"
        ),
    ),
    Rule(
        name="deepep is not quantised",
        factor="ep_backend",
        holds=lambda facts: not (_deepep(facts) and facts.quantised),
        why=lambda facts: (
            f"quantised experts (precision {facts.precision.value}) need a dispatcher that pads each expert's tokens; "
            f"TorchTitan's deepep does not, and this arm waits for {_OWN}"
        ),
    ),
    Rule(
        name="deepep is not compiled",
        factor="ep_backend",
        holds=lambda facts: not (_deepep(facts) and facts.compile == "model+loss"),
        why=lambda facts: (
            "TorchTitan's deepep has no fake implementation of its dispatch, so compile=model+loss fails in the first "
            f"step, and this arm waits for {_OWN}; compile=loss runs"
        ),
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
        name="dispatch is BF16",
        factor="dispatch_precision",
        holds=lambda facts: facts.dispatch_precision == "bf16",
        why=lambda facts: f"quantised dispatch waits for {_OWN}",
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
        name="GPU has FP8",
        factor="precision",
        holds=_fp8_gpu,
        why=lambda facts: f"FP8 tensor cores begin with SM89, and {_here(facts)}; mxfp8 runs anywhere, emulated",
    ),
    Rule(
        name="GPU has MXFP8",
        factor="mxfp8_kernels",
        holds=_native_gpu,
        why=lambda facts: (
            f"MXFP8 tensor cores begin with SM100, and {_here(facts)}. Legal mxfp8_kernels: auto, emulated"
        ),
        offers_choices=False,
    ),
    Rule(
        name="dispatcher needs CUDA",
        factor="ep_backend",
        holds=lambda facts: facts.capability != 0 or facts.ep_backend is EPBackend.STANDARD,
        why=lambda facts: f"it needs CUDA, and {_here(facts)}",
    ),
)
