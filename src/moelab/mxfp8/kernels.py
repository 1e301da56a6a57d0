"""Which MXFP8 kernels this process can run: torchao's native ones on SM100, the emulation anywhere else.

Native means real MXFP8 tensor-core GEMMs. Emulated means that every operand is quantised to MXFP8, expanded again and
multiplied in BF16 (:mod:`moelab.mxfp8.emulation`): the numerics of MXFP8 at more than the cost of BF16, so an emulated
run says nothing about speed.
"""

from __future__ import annotations

from typing import Literal

import torch

from moelab.errors import Refused
from moelab.mxfp8.cutedsl import why_not_cutedsl

Kernels = Literal["native", "emulated"]
NATIVE_CAPABILITY = (10, 0)
NATIVE_PADDING = 128
"""Tokens; what torchao 0.18's CuTeDSL quantisation kernel needs each expert's group to be a multiple of on SM100."""
EMULATED_PADDING = 32
"""Tokens; one MXFP8 block."""


def resolve(requested: Literal["auto", "native", "emulated"]) -> Kernels:
    """Choose the kernels for this process.

    Args:
        requested: ``auto`` takes native kernels where they exist.

    Raises:
        Refused: if ``native`` was asked for where it cannot run, or ``auto`` where only packages are missing.
    """
    if requested != "auto":
        problem = why_not_native() if requested == "native" else None
        if problem:
            raise Refused(
                f"mxfp8_kernels is 'native', but {problem}. Use 'emulated' (the numerics of MXFP8, slower than BF16) "
                "or 'auto' (native where it exists)."
            )
        return requested
    problem = why_not_native()
    if problem and torch.cuda.is_available() and torch.cuda.get_device_capability() >= NATIVE_CAPABILITY:
        raise Refused(
            f"this GPU has MXFP8 tensor cores, but {problem}. Mend that, or ask for mxfp8_kernels=emulated by name: it "
            "says nothing about speed"
        )
    return "emulated" if problem else "native"


def why_not_native() -> str | None:
    """What stands between this process and native kernels, or None."""
    if not torch.cuda.is_available():
        return "this process has no CUDA device"
    capability = torch.cuda.get_device_capability()
    if capability < NATIVE_CAPABILITY:
        name = torch.cuda.get_device_name()
        return f"{name} is SM{capability[0]}{capability[1]}; MXFP8 tensor cores begin with SM100 (Blackwell)"
    from torchao.prototype.moe_training.mxfp8_grouped_mm import _SM100_KERNELS_AVAILABLE

    if not _SM100_KERNELS_AVAILABLE:
        return "this build of torchao has no SM100 kernels (it needs CUDA 12.8 or later and Triton)"
    return why_not_cutedsl()
