"""What each dispatcher can do: one table, from which the rules, the refusals and the words for them are made.

=================  =====  ==================  ========================================================================
dispatcher         pads   sends tokens in     made by
=================  =====  ==================  ========================================================================
standard           yes    bf16, mxfp8         TorchTitan; MXFP8 is torchao's all-to-all, put in place by moelab
deepep             yes    bf16, mxfp8, fp8    moelab, on DeepEP 2.x: TorchTitan's own neither pads nor compiles
hybridep           yes    bf16                TorchTitan
minimal_async_ep   no     bf16                TorchTitan
=================  =====  ==================  ========================================================================

Quantised experts need a dispatcher that pads each expert's tokens. Quantised dispatch is for experts of the same
format, and with it the first two GEMMs' weight gradient is BF16: activations that arrive quantised along the features
cannot be scaled along the tokens, which is the axis of that product. MXFP8 asks for it by name (``wgrad=bf16``, as in
the published 16B arm); FP8 has it by construction.

DeepEP's limits are those of DeepEP 2.1.0; :mod:`moelab.deepep.buffer` refuses the same once more before its kernels
run. Nothing here loads torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from moelab.experiment import EPBackend, Precision
from moelab.model import ModelShape

COMBINE_FEATURES = 256
"""DeepEP combines tokens of a multiple of this many BF16 features."""
MAX_TOP_K = 32
"""Experts of a token that DeepEP takes."""
PACKED_FEATURES = 128
"""Features whose MXFP8 scales fill the four bytes that DeepEP moves as one."""


@dataclass(frozen=True, kw_only=True)
class Dispatcher:
    """What a dispatcher can do.

    Attributes:
        pads: whether it pads each expert's tokens, which quantised experts need.
        sends: formats in which tokens can travel; values of ``dispatch_precision``.
    """

    pads: bool
    sends: tuple[str, ...]


class Fault(NamedTuple):
    """What is wrong, and the fewest fields of an experiment that mend it."""

    said: str
    mend: Mapping[str, Any]


DISPATCHERS: Mapping[EPBackend, Dispatcher] = MappingProxyType(
    {
        EPBackend.STANDARD: Dispatcher(pads=True, sends=("bf16", "mxfp8")),
        EPBackend.DEEPEP: Dispatcher(pads=True, sends=("bf16", "mxfp8", "fp8")),
        EPBackend.HYBRIDEP: Dispatcher(pads=True, sends=("bf16",)),
        EPBackend.MINIMAL_ASYNC_EP: Dispatcher(pads=False, sends=("bf16",)),
    }
)


def that_pad() -> str:
    """Names of the dispatchers that quantised experts can have.

    >>> that_pad()
    'standard, deepep, hybridep'
    """
    return ", ".join(backend.value for backend, can in DISPATCHERS.items() if can.pads)


def that_send(dispatch_precision: str) -> str:
    """Names of the dispatchers that send tokens in a format.

    >>> that_send("fp8")
    'deepep'
    """
    return ", ".join(backend.value for backend, can in DISPATCHERS.items() if dispatch_precision in can.sends)


def takes_experts(backend: EPBackend, precision: Precision) -> bool:
    """Whether a dispatcher feeds experts of this precision."""
    return precision is Precision.BF16 or DISPATCHERS[backend].pads


def dispatch_fault(
    backend: EPBackend, *, precision: Precision, wgrad: str, ep: int, dispatch_precision: str
) -> Fault | None:
    """Why tokens cannot travel in this format; None if they can.

    Args:
        backend: the dispatcher.
        precision: of the experts.
        wgrad: precision of the experts' weight gradient, as the experiment gives it.
        ep: expert-parallel degree.
        dispatch_precision: format of a token on its way to its experts.
    """
    plain = {"dispatch_precision": "bf16"}
    if dispatch_precision == "bf16":
        return None
    if dispatch_precision not in DISPATCHERS[backend].sends:
        sends, others = " or ".join(DISPATCHERS[backend].sends), that_send(dispatch_precision)
        return Fault(
            f"{backend.value} sends tokens in {sends} only; those that send {dispatch_precision}: {others}", plain
        )
    if precision.value != dispatch_precision:
        return Fault(f"tokens travel in the experts' own format or in bf16, and precision is {precision.value}", plain)
    if ep == 1:
        return Fault("without expert parallelism (ep 1) no token travels", plain)
    if precision is Precision.MXFP8 and wgrad != "bf16":
        why = "tokens that arrive quantised along their features cannot be scaled along the tokens"
        return Fault(f"{why}, as an MXFP8 weight gradient needs; wgrad=bf16 allows it", {"wgrad": "bf16"})
    return None


def deepep_fault(shape: ModelShape, *, kernels: str, dispatch_precision: str) -> Fault | None:
    """Why DeepEP cannot move the tokens of a model; None if it can.

    Args:
        shape: the model.
        kernels: ``native``, or ``emulated``, which takes BF16 tokens of any size.
        dispatch_precision: format of a token on its way to its experts.
    """
    if shape.top_k > MAX_TOP_K:
        said = f"DeepEP takes at most {MAX_TOP_K} experts of a token, and {shape.name} routes to {shape.top_k}"
        return Fault(said, {"ep_backend": EPBackend.STANDARD})
    if dispatch_precision == "mxfp8" and shape.dim % PACKED_FEATURES:
        said = (
            f"DeepEP moves MXFP8 scales four at a time, of {PACKED_FEATURES} features, and {shape.name} has {shape.dim}"
        )
        return Fault(f"{said}; dispatch_precision=bf16 has no scales", {"dispatch_precision": "bf16"})
    if kernels == "native" and shape.dim % COMBINE_FEATURES:
        said = f"DeepEP combines tokens of a multiple of {COMBINE_FEATURES} features, and {shape.name} has {shape.dim}"
        return Fault(f"{said}; ep_kernels=emulated takes any", {"ep_kernels": "emulated"})
    return None
