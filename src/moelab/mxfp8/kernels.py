"""Which MXFP8 kernels this process can run: torchao's native ones on SM100 and SM103, the emulation anywhere else.

Native means real MXFP8 tensor-core GEMMs. Emulated means that every operand is quantised to MXFP8, expanded again and
multiplied in BF16 (:mod:`moelab.mxfp8.emulation`): the numerics of MXFP8 at more than the cost of BF16, so an emulated
run says nothing about speed.
"""

from __future__ import annotations

from typing import Literal

import torch

from moelab.errors import Refused
from moelab.hardware import has_native_mxfp8
from moelab.mxfp8.cutedsl import why_not_cutedsl

Kernels = Literal["native", "emulated"]
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
    if problem and torch.cuda.is_available() and has_native_mxfp8(torch.cuda.get_device_capability()[0]):
        raise Refused(
            f"this GPU has MXFP8 tensor cores, but {problem}. Mend that, or ask for mxfp8_kernels=emulated by name: it "
            "says nothing about speed"
        )
    return "emulated" if problem else "native"


def why_not_native() -> str | None:
    """What stands between this process and native kernels, or None."""
    if not torch.cuda.is_available():
        return "this process has no CUDA device"
    major, minor = torch.cuda.get_device_capability()
    if not has_native_mxfp8(major):
        return f"{torch.cuda.get_device_name()} is SM{major}{minor}; torchao's MXFP8 kernels are for SM100 and SM103"
    from torchao.prototype.moe_training.mxfp8_grouped_mm import _SM100_KERNELS_AVAILABLE

    if not _SM100_KERNELS_AVAILABLE:
        return "this build of torchao has no SM100 kernels (it needs CUDA 12.8 or later and Triton)"
    return why_not_cutedsl()
