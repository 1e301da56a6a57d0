"""The packages that torchao's SM100 quantisation kernels are built with at run time, and the versions that work.

torchao 0.18.0 writes these kernels in CuTeDSL. It checks that the packages are there, not their versions, and fails
inside a kernel's first call otherwise; its package description names the versions that it was made with.

Source: torchao 0.18.0, ``prototype/moe_training/kernels/mxfp8/cute_utils.py`` and the installation section of its
package description.
"""

from __future__ import annotations

from collections.abc import Callable

from moelab.machine import version

TESTED = {"nvidia-cutlass-dsl": "4.5.2", "nvidia-cutlass-dsl-libs-base": "4.5.2"}
"""Versions that torchao 0.18.0's description pins."""
INSTALL = (
    "pip install apache-tvm-ffi cuda-python nvidia-cutlass-dsl==4.5.2 nvidia-cutlass-dsl-libs-base==4.5.2 "
    "nvidia-cutlass-dsl-libs-cu13==4.5.2"
)


def missing_packages() -> list[str]:
    """Packages that torchao looks for and does not find."""
    from torchao.prototype.moe_training.kernels.mxfp8.cute_utils import _missing_cutedsl_runtime_packages

    return list(_missing_cutedsl_runtime_packages())


def why_not_cutedsl(
    missing: Callable[[], list[str]] = missing_packages, installed: Callable[[str], str | None] = version
) -> str | None:
    """What is wrong with the packages of the CuTeDSL kernels, or None.

    Args:
        missing: the packages that are not there.
        installed: version of a distribution, None where it is missing.

    Example:
        >>> why_not_cutedsl(list, lambda package: "4.6.0")[:45]
        "too new for torchao 0.18's MXFP8 kernels: nvi"
    """
    if absent := missing():
        return f"torchao's MXFP8 kernels need {', '.join(absent)}, not installed here: {INSTALL}"
    newer = [
        f"{package} {found} (works: {tested})"
        for package, tested in TESTED.items()
        if (found := installed(package)) is not None and _numbers(found) > _numbers(tested)
    ]
    return f"too new for torchao 0.18's MXFP8 kernels: {', '.join(newer)}. {INSTALL}" if newer else None


def _numbers(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: ``4.6.0.dev0`` is (4, 6, 0)."""
    numbers: list[int] = []
    for part in text.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)
