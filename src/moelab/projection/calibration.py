"""The constants of the step-time model, with where each comes from; small ones stand where they are used.

*Measured* and *quoted* constants are each read off one figure, or the mean of a few, of kernels and micro-experiments;
the rows of the validation table that hold these figures say so, and tests read them again. ``step_s`` is what one
profiled step had left over. *Fitted* ones (three, of at most five) were chosen so that the model meets the rows that
``fitted_on`` names; ``benchmarks/projection.py --fit`` finds them again, and a test holds it to that. What is *assumed*
says so.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

import numpy as np

from moelab.errors import BadInput

PROFILE = "benchmarks/results/h100_standard_step.json, kernels of '671B MoE-heavy', 2 × H100, November 2026"
A2A = "moelab/data/measured/all_to_all_h100.json, 2 × H100, November 2026"
GEMM = "moelab/data/measured/grouped_gemm_h100.json, H100, November 2026"
DEEPEP = "deepseek-ai/DeepEP, README of 2.1.0, SM90 EP 8×4: 61 GB/s logical, of which 3/4 cross 50 GB/s"
TORCHAO = "pytorch/ao, torchao/prototype/moe_training/README.md, one B200"
How = Literal["measured", "quoted", "fitted", "assumed"]
SIMUMAX_ROW = "SimuMax EP8 PP1, 32 micro-batches"
DEBUG_ROW = "debug bf16_standard, not compiled, selective"
PUBLISHED_ROW = "671B bf16_standard"
"""Names of the rows of the validation table that a constant was fitted on."""


@dataclass(frozen=True, kw_only=True)
class Constant:
    """A number, how it is known, and where from; ``fitted_on`` names the rows of the validation table."""

    value: float
    how: How
    source: str
    fitted_on: tuple[str, ...] = ()

    def __float__(self) -> float:
        return self.value


def _measured(value: float, source: str) -> Constant:
    return Constant(value=value, how="measured", source=source)


def _quoted(value: float, source: str) -> Constant:
    return Constant(value=value, how="quoted", source=source)


def _assumed(value: float, source: str) -> Constant:
    return Constant(value=value, how="assumed", source=source)


def _fitted(value: float, source: str, *rows: str) -> Constant:
    return Constant(value=value, how="fitted", source=source, fitted_on=rows)


@dataclass(frozen=True, kw_only=True, eq=False)
class Calibration:
    """The constants; :func:`with_values` replaces some.

    Attributes:
        hopper_gemm: rate of a large BF16 product in a step, of the datasheet's, below SM100.
        blackwell_gemm: the same from SM100 on.
        hopper_grouped: of ``torch._grouped_mm`` in BF16, below SM100.
        inner: K at which half of a tile's time is its beginning and end.
        blackwell_grouped: of ``torch._grouped_mm`` in BF16 in a step, from SM100 on.
        blackwell_low: of MXFP8 products, forward and dgrad, alone.
        blackwell_low_wgrad: of MXFP8 wgrad, alone.
        blackwell_low_in_step: how much longer MXFP8 kernels take in a step.
        blackwell_cast: casts to MXFP8, of the datasheet's memory bandwidth.
        blackwell_scales_us: layout of scales for one forward and backward, whatever its size, µs.
        hopper_low: of FP8 grouped products, of the FP8 datasheet rate.
        hopper_cast: casts to FP8, of the datasheet's memory bandwidth.
        emulated_cast: casts of emulated MXFP8, from BF16 to BF16, of the datasheet's memory bandwidth.
        flex_forward: FlexAttention's rate on unmasked pairs, of the datasheet's BF16 rate.
        flex_backward: the same, backward.
        fused_forward: fused attention's rate.
        fused_backward: the same, backward.
        copy: memory bandwidth of a copy, of the datasheet's.
        eager_passes: memory traffic of elementwise work that is not fused, of the fused one's.
        nccl_nvlink: all-to-all by NCCL, of NVLink's datasheet rate.
        nccl_ring: gathers and scatters by NCCL inside a node, of NVLink's datasheet rate.
        network: of the network card's rate, for large messages.
        deepep_nvlink: DeepEP on NVLink, of the datasheet's rate, on the wire.
        deepep_s: an exchange of DeepEP beside its bytes: notification and the host's wait, s.
        counts_s: exchange of counts and the host's wait for them, before each dispatch, s.
        collective_s: latency of a collective, s.
        optimizer_bytes: memory traffic of clipping and AdamW for each local parameter, bytes.
        fsdp_copy_bytes: memory traffic of FSDP2 for each gathered parameter and step, bytes.
        step_s: between two steps: data, the wait of clipping, first launches, s.
        host_layer_s: host time of a layer and micro-batch, forward and backward, where nothing is compiled, s.
        host_nodes_s: host time and waiting of a layer and micro-batch under TorchTitan on several nodes, s.
        step_noise: standard deviation of a rank's step time.
    """

    hopper_gemm: Constant
    blackwell_gemm: Constant
    hopper_grouped: Constant
    inner: Constant
    blackwell_grouped: Constant
    blackwell_low: Constant
    blackwell_low_wgrad: Constant
    blackwell_low_in_step: Constant
    blackwell_cast: Constant
    blackwell_scales_us: Constant
    hopper_low: Constant
    hopper_cast: Constant
    emulated_cast: Constant
    flex_forward: Constant
    flex_backward: Constant
    fused_forward: Constant
    fused_backward: Constant
    copy: Constant
    eager_passes: Constant
    nccl_nvlink: Constant
    nccl_ring: Constant
    network: Constant
    deepep_nvlink: Constant
    deepep_s: Constant
    counts_s: Constant
    collective_s: Constant
    optimizer_bytes: Constant
    fsdp_copy_bytes: Constant
    step_s: Constant
    host_layer_s: Constant
    host_nodes_s: Constant
    step_noise: Constant


CALIBRATION = Calibration(
    hopper_gemm=_measured(0.80, f"{GEMM}: 8192³, 792 of 989 TFLOP/s"),
    blackwell_gemm=_fitted(0.4614175, "what SimuMax's step leaves for products that are not grouped", SIMUMAX_ROW),
    hopper_grouped=_measured(0.80, f"{GEMM}: M 16384 to 65536"),
    inner=_assumed(256.0, f"between what K 2048 and 7168 show in {GEMM}"),
    blackwell_grouped=_quoted(884.6 / 2250, f"{TORCHAO}: rows of 8 groups in BF16, less what its benchmark adds"),
    blackwell_low=_quoted(2294.3 / 4500, f"{TORCHAO}: kernels of forward and dgrad"),
    blackwell_low_wgrad=_quoted(1829.6 / 4500, f"{TORCHAO}: kernel of wgrad"),
    blackwell_low_in_step=_quoted(1.1578, f"{TORCHAO}: rows of 8 groups in MXFP8 over what their kernels take alone"),
    blackwell_cast=_quoted(5.6606 / 8, f"{TORCHAO}: kernels that quantise, bytes of all over time of all"),
    blackwell_scales_us=_quoted(483.0, f"{TORCHAO}: kernels that rearrange scales"),
    hopper_low=_measured(1179.3 / 1979, f"{GEMM}: FP8 grouped products alone, median"),
    hopper_cast=_measured(1.2604 / 3.35, f"{GEMM}: casts to FP8, median"),
    emulated_cast=_measured(
        2.795 / 3.35, "benchmarks/results/emulation_h100.json: casts along rows and columns in use, mean of their times"
    ),
    flex_forward=_measured(0.15, PROFILE),
    flex_backward=_measured(0.081, PROFILE),
    fused_forward=_assumed(0.60, "about what FlashAttention-3 reaches on H100, causal (arXiv 2407.08608)"),
    fused_backward=_assumed(0.50, "as fused_forward"),
    copy=_measured(0.90, f"{GEMM}: copy at 3.00 of 3.35 TB/s; torchao's casts reach 0.92 on B200"),
    eager_passes=_assumed(2.0, "an activation of SwiGLU, a cast and a residual are kernels of their own"),
    nccl_nvlink=_measured(0.61, f"{A2A}: 277 of 450 GB/s"),
    nccl_ring=_measured(0.45, f"{PROFILE}: gathers and scatters"),
    network=_quoted(0.91, DEEPEP),
    deepep_nvlink=_quoted(0.677, "deepseek-ai/DeepEP README 2.1.0, SM100 EP 8, mean of four rows, on the wire"),
    deepep_s=_measured(346e-6, f"{A2A}: 'deepep bf16 dense' on the wire, less its bytes"),
    counts_s=_measured(403e-6, f"{A2A}: counts"),
    collective_s=_assumed(20e-6, "NCCL's latency in a node"),
    optimizer_bytes=_measured(55.0, f"{PROFILE}: norm, clip, fused AdamW"),
    fsdp_copy_bytes=_measured(36.5, f"{PROFILE}: casts, copies in and out, division"),
    step_s=_measured(0.041, f"{PROFILE}: step without the kernels' time and what FSDP exposes"),
    host_layer_s=_fitted(0.0386532, "a model so small that the GPU waits for the host", DEBUG_ROW),
    host_nodes_s=_fitted(0.0567193, "what the published 671B step needs that the other terms leave", PUBLISHED_ROW),
    step_noise=_measured(0.007, "benchmarks/results/h100_standard_step.json: steps of one arm"),
)

HOST_COMPILED_S = _measured(0.0, "moelab/data/measured/h100_two_by_two.json: its 16B arms leave no room for any")
"""What ``host_layer_s`` is where layers are compiled, on one node; zero, so that nothing draws or replaces it. The
rows that it was read off are marked as seen."""


def fitted(calibration: Calibration = CALIBRATION) -> dict[str, Constant]:
    """The fitted constants by name."""
    constants = {field.name: getattr(calibration, field.name) for field in fields(calibration)}
    return {name: constant for name, constant in constants.items() if constant.how == "fitted"}


def with_values(calibration: Calibration = CALIBRATION, /, **values: float) -> Calibration:
    """The calibration with other values of some constants.

    Raises:
        BadInput: for a constant that does not exist, or a value that is not positive.
    """
    known = [field.name for field in fields(calibration)]
    for name, value in values.items():
        if name not in known:
            raise BadInput(f"there is no constant {name!r}; they are {', '.join(known)}")
        if not value > 0:
            raise BadInput(f"{name} is {value}; give a positive number")
    changed = {name: replace(getattr(calibration, name), value=value) for name, value in values.items()}
    return replace(calibration, **changed)


SPREAD = {"measured": 0.05, "quoted": 0.10, "fitted": 0.10, "assumed": 0.30}
"""Relative standard deviation of a constant by how it is known."""


def drawn(calibration: Calibration, random: np.random.Generator) -> Calibration:
    """Constants drawn anew around their values, log-normally, each by its :data:`SPREAD`."""
    constants = {field.name: getattr(calibration, field.name) for field in fields(calibration)}
    return with_values(
        calibration,
        **{
            name: constant.value * float(np.exp(random.normal(0, SPREAD[constant.how])))
            for name, constant in constants.items()
        },
    )
