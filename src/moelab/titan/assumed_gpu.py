"""Configure as a process on another GPU would, on a machine that has none.

A configuration depends on the GPU in a few places: which MXFP8 kernels exist, whether FP8 experts are allowed, who
pads the experts' groups. Torch, torchao 0.18 and TorchTitan 0.3.0 each ask the device themselves and take no argument,
so within :func:`assume_gpu` they are told what such a device would answer. It is for configuring only: nothing is
launched, and no tensor is on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from torchao.prototype.moe_training import mxfp8_grouped_mm

from moelab.hardware import has_native_mxfp8
from moelab.mxfp8 import kernels


@contextmanager
def assume_gpu(capability: tuple[int, int]) -> Iterator[None]:
    """Answer questions about the device as a GPU of this compute capability would.

    Args:
        capability: such as ``(10, 0)`` for a B200 or ``(9, 0)`` for an H100.

    >>> with assume_gpu((9, 0)):
    ...     torch.cuda.get_device_capability()
    (9, 0)
    """
    major, minor = capability
    with ExitStack() as stack:
        for name, answer in (
            ("is_available", True),
            ("get_device_capability", capability),
            ("get_device_name", f"an assumed SM{major}{minor} GPU"),
        ):
            stack.enter_context(mock.patch.object(torch.cuda, name, lambda *_device, _answer=answer: _answer))
        native = has_native_mxfp8(major)
        stack.enter_context(mock.patch.object(mxfp8_grouped_mm, "_SM100_KERNELS_AVAILABLE", native))
        stack.enter_context(mock.patch.object(kernels, "why_not_cutedsl", return_value=None))  # its packages too
        yield
