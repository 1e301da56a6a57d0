"""Which MXFP8 kernels this process can run: torchao's native ones on SM100 and SM103, the emulation anywhere else.

Native means real MXFP8 tensor-core GEMMs. Emulated means that every operand is quantised to MXFP8, expanded again and
multiplied in BF16 (:mod:`moelab.mxfp8.experts`): the numerics of MXFP8 at more than the cost of BF16, so an emulated
run says nothing about speed.

torchao 0.18.0 writes the quantisation kernels of SM100 in CuTeDSL and builds them at run time. It checks that the
packages for that are there, not their versions, and fails inside a kernel's first call otherwise; its package
description names the versions that it was made with (``prototype/moe_training/kernels/mxfp8/cute_utils.py`` and the
description's section on installation).
"""

from __future__ import annotations

import re
from typing import Literal

from moelab.errors import Refused
from moelab.hardware import has_native_mxfp8
from moelab.machine import version

Kernels = Literal["native", "emulated"]
MODULES = {"cutlass": "nvidia-cutlass-dsl", "tvm_ffi": "apache-tvm-ffi", "cuda.bindings": "cuda-python"}
"""What torchao's check looks for, with the package of each. Here for those who ask before torch is loaded."""
CUTEDSL = {"nvidia-cutlass-dsl": "4.5.2", "nvidia-cutlass-dsl-libs-base": "4.5.2"}
"""Packages and versions that torchao 0.18.0's description pins; its check looks for the packages alone."""
INSTALL = (
    "pip install apache-tvm-ffi cuda-python nvidia-cutlass-dsl==4.5.2 nvidia-cutlass-dsl-libs-base==4.5.2 "
    "nvidia-cutlass-dsl-libs-cu13==4.5.2"
)


def resolve(requested: Literal["auto", "native", "emulated"]) -> Kernels:
    """The kernels of this process; ``auto`` takes native ones where they exist.

    Raises:
        Refused: for ``native`` where it cannot run, and for ``auto`` where only packages are missing: a GPU with the
            tensor cores does not fall back to emulation silently.
    """
    if requested == "emulated":
        return "emulated"
    problem = why_not_native()
    if problem is None:
        return "native"
    if requested == "native":
        raise Refused(
            f"mxfp8_kernels is 'native', but {problem}. Use 'emulated' (the numerics of MXFP8, slower than BF16) "
            "or 'auto' (native where it exists)."
        )
    import torch

    # Emulated on a GPU that has the tensor cores, a run would look like one of the hardware.
    if torch.cuda.is_available() and has_native_mxfp8(torch.cuda.get_device_capability()[0]):
        raise Refused(
            f"this GPU has MXFP8 tensor cores, but {problem}. Fix that, or set mxfp8_kernels=emulated, which says "
            "nothing about speed"
        )
    return "emulated"


def why_not_native() -> str | None:
    """What stands between this process and native kernels, or None."""
    import torch

    if not torch.cuda.is_available():
        return "this process has no CUDA device"
    major, minor = torch.cuda.get_device_capability()
    if not has_native_mxfp8(major):
        return f"{torch.cuda.get_device_name()} is SM{major}{minor}; torchao's MXFP8 kernels are for SM100 and SM103"
    # Imported only where the GPU could run them: it takes a while.
    from torchao.prototype.moe_training.mxfp8_grouped_mm import _SM100_KERNELS_AVAILABLE

    if not _SM100_KERNELS_AVAILABLE:
        return "this build of torchao has no SM100 kernels (it needs CUDA 12.8 or later and Triton)"
    return why_not_cutedsl()


def why_not_cutedsl() -> str | None:
    """What is wrong with the packages of the CuTeDSL kernels, or None."""
    from torchao.prototype.moe_training.kernels.mxfp8.cute_utils import _missing_cutedsl_runtime_packages

    # Asked before a run: torchao itself fails inside a kernel's first call.
    if missing := _missing_cutedsl_runtime_packages():
        return f"torchao's MXFP8 kernels need {', '.join(missing)}, not installed here: {INSTALL}"
    newer = [
        f"{package} {installed} (works: {works})"
        for package, works in CUTEDSL.items()
        if _numbers(installed := version(package) or "") > _numbers(works)
    ]
    return f"too new for torchao 0.18's MXFP8 kernels: {', '.join(newer)}. {INSTALL}" if newer else None


def _numbers(version_text: str) -> list[int]:
    """The leading numbers of a version: ``4.10.0.dev0`` is above ``4.5.2``."""
    return [int(number) for number in re.findall(r"\d+", version_text)[:3]]
