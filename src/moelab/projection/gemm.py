"""Time of matrix products, of the casts around them, and of attention's two.

A product has a rate of the datasheet's, of which its shape leaves some: it is cut into tiles of 128 × 256; the last
wave of tiles rarely fills the GPU, and each tile needs a while to begin and end, which a long K hides. Grouped products
on B200 run at one rate, or as fast as memory is read.

Letters: M rows of the product over all groups, N its columns, K what is summed over; of a grouped wgrad, K is the rows
of all groups, each of which has an M × N output of its own.

What a layer multiplies depends on the model and its degrees alone and is derived once; only rows grow with the tokens.

Casts to 8 bits and the layout of scales are timed for one product forward and backward. The table of casts is
:mod:`moelab.mxfp8.break_even`'s: rows and weights forward, gradient and weights for dgrad, gradient and rows along the
other axis for wgrad.

Attention multiplies pairs of tokens that may see each other. FlexAttention works on blocks of 128 × 128 and skips those
that the mask leaves empty; a mask that keeps packed documents apart leaves few. Backward is five products where forward
has two.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from math import ceil
from typing import NamedTuple

from moelab.experiment import Precision
from moelab.hardware import GPUS, Gpu, Node, has_native_mxfp8
from moelab.memory.activations import Work
from moelab.memory.sharding import Degrees
from moelab.model import ModelShape, gemms, shape_of
from moelab.mxfp8.break_even import CAST_BYTES, OVERHEAD_SHARE
from moelab.projection.calibration import Calibration
from moelab.projection.job import INDEX, Job, PassName, Stack, Times, add, nothing
from moelab.projection.memory_bound import memory_rate
from moelab.projection.routing import RoutingModel

TILE_M, TILE_N = 128, 256
SMS = {8: 108, 9: 132, 10: 148}
"""Streaming multiprocessors by major capability (datasheets of A100, H100 and B200)."""
LAUNCH_S = 4e-6


class Rates(NamedTuple):
    """What decides the time of a GPU's products.

    Attributes:
        bf16: of large BF16 products, FLOP/s.
        grouped: of grouped ones in BF16, FLOP/s.
        low: of 8-bit products, forward and dgrad, FLOP/s.
        low_wgrad: of 8-bit wgrad, FLOP/s.
        memory: bytes a second.
        inner: K at which half of a tile's time is its beginning and end.
        sms: streaming multiprocessors.
        grouped_in_tiles: whether grouped products lose what their shape loses; else ``grouped`` has it.
    """

    bf16: float
    grouped: float
    low: float
    low_wgrad: float
    memory: float
    inner: float
    sms: int
    grouped_in_tiles: bool


def is_blackwell(gpu: Gpu) -> bool:
    """SM100 and SM103; AMD's gfx950, of which no rate was measured, is taken to be like them."""
    return has_native_mxfp8(gpu.capability)


def rates_of(gpu: Gpu, calibration: Calibration) -> Rates:
    """The rates of products in a step on a GPU."""
    c, blackwell = calibration, is_blackwell(gpu)
    bf16, low = (1e12 * float(figure or 0) for figure in (gpu.bf16_tflops, gpu.fp8_tflops))
    if blackwell:
        in_step = float(c.blackwell_low_in_step)
        low_rates = [low * float(share) / in_step for share in (c.blackwell_low, c.blackwell_low_wgrad)]
    else:
        low_rates = [low * float(c.hopper_low)] * 2
    return Rates(
        bf16=bf16 * float(c.blackwell_gemm if blackwell else c.hopper_gemm),
        grouped=bf16 * float(c.blackwell_grouped if blackwell else c.hopper_grouped),
        low=low_rates[0],
        low_wgrad=low_rates[1],
        memory=1e12 * float(gpu.hbm_tb_s or 1) * float(c.copy),
        inner=float(c.inner),
        sms=SMS.get(int(gpu.capability or 0), 132),
        grouped_in_tiles=not blackwell,
    )


def gemm_time_s(m: int, n: int, k: int, groups: int, rates: Rates, *, low: bool, wgrad: bool) -> float:
    """Seconds of a dense product, or of a grouped one at the rate of dense ones; sizes as in the module.

    Args:
        m: see the module.
        n: see the module.
        k: see the module.
        groups: 1 for a dense product.
        rates: of the GPU.
        low: in 8 bits, casts apart.
        wgrad: whether it is a weight gradient.
    """
    rate = (rates.low_wgrad if wgrad else rates.low) if low else rates.bf16
    return _in_tiles_s(m, n, k, groups, rates, rate, low=low, wgrad=wgrad)


def grouped_time_s(m: int, n: int, k: int, groups: int, rates: Rates, *, low: bool, wgrad: bool) -> float:
    """Seconds of a product of ``torch._grouped_mm`` or of torchao's kernels; arguments as :func:`gemm_time_s`."""
    rate = (rates.low_wgrad if wgrad else rates.low) if low else rates.grouped
    if rates.grouped_in_tiles:
        return _in_tiles_s(m, n, k, groups, rates, rate, low=low, wgrad=wgrad)
    return max(2 * m * n * k / rate, _memory_s(m, n, k, groups, rates, low=low, wgrad=wgrad))


def _in_tiles_s(m: int, n: int, k: int, groups: int, rates: Rates, rate: float, *, low: bool, wgrad: bool) -> float:
    """Waves of tiles at ``rate``, or memory, whichever is slower."""
    inner = k / groups if wgrad else k
    rows = m if wgrad else m / groups  # of one group
    tiles = groups * ceil(rows / TILE_M) * ceil(n / TILE_N)
    share = groups * rows * n / (TILE_M * TILE_N * ceil(tiles / rates.sms) * rates.sms)
    compute_s = 2 * m * n * k / (rate * share * inner / (inner + rates.inner))
    return max(compute_s, _memory_s(m, n, k, groups, rates, low=low, wgrad=wgrad)) + LAUNCH_S


def _memory_s(m: int, n: int, k: int, groups: int, rates: Rates, *, low: bool, wgrad: bool) -> float:
    """Seconds to read both operands and to write the BF16 product."""
    of_groups, outputs = (1, groups) if wgrad else (groups, 1)
    moved = (1 if low else 2) * (m * k + of_groups * k * n) + 2 * m * n * outputs
    return moved / rates.memory


RECOMPUTED: dict[str, tuple[str, ...]] = {
    "none": (),
    "selective": ("attention.wq_b", "attention.wo", "feed_forward.w3", "moe.shared_experts.w3", "moe.routed_experts"),
    "full": ("",),
    "full+dispatch": ("",),
    "mla+mlp": ("attention.wq_b", "attention.wkv_b", "feed_forward"),
}
"""Beginnings of the names of products that are computed again in the backward pass; of ``selective``, about every
second one and the routed experts."""
UNQUANTISED = ("head", "router", "routed experts")
"""Parts whose products are not quantised with the linears."""


class Weight(NamedTuple):
    """A weight that multiplies: ``rows`` of tokens by (k, n), once for each of ``groups``.

    ``rows`` are those of ``tp`` tokens, one for each tensor-parallel rank.
    """

    name: str
    part: str
    rows: int
    n: int
    k: int
    groups: int


class ProductKinds(NamedTuple):
    """What decides a product's rate beside its size.

    Attributes:
        low: whether experts multiply in 8 bits.
        bf16_wgrad: of the experts' weight gradients, which are BF16 all the same: ``all``, ``first two`` or ``none``.
        low_linears: whether linears multiply in 8 bits.
        library: whether experts multiply one after the other at the rate of large products.
    """

    low: bool
    bf16_wgrad: str
    low_linears: bool
    library: bool


@functools.lru_cache(maxsize=1024)
def weights_by_module(shape: ModelShape, tp: int, ep: int) -> dict[str, tuple[Weight, ...]]:
    """Weights of one ``attention``, ``moe`` and ``feed_forward``, and of the ``head``, each once."""
    by_module: defaultdict[str, dict[str, Weight]] = defaultdict(dict)
    for one in gemms(shape, tp, tp=tp, ep=ep):
        if one.direction == "forward":
            module = "head" if one.part == "head" else one.name.partition(".")[0]
            by_module[module][one.name] = Weight(one.name, one.part, one.m, one.n, one.k, one.groups)
    return {module: tuple(weights.values()) for module, weights in by_module.items()}


def recomputed(weight: Weight, checkpointing: str) -> bool:
    """Whether its forward product is computed again in the backward pass."""
    return weight.part != "head" and weight.name.startswith(RECOMPUTED[checkpointing])


@functools.lru_cache(maxsize=4096)
def product_times(
    weights: tuple[Weight, ...], share: int, checkpointing: str, kinds: ProductKinds, rates: Rates
) -> Times:
    """Products of one module; not to be written to.

    Args:
        weights: of the module.
        share: tokens of the micro-batch for each tensor-parallel rank.
        checkpointing: says which products are computed again.
        kinds: precision and kernels.
        rates: of the GPU.
    """
    sums: defaultdict[tuple[PassName, str], float] = defaultdict(float)
    for weight in weights:
        category = "expert GEMMs" if weight.part == "routed experts" else "other GEMMs"
        forward, dgrad, wgrad = _forward_dgrad_wgrad_s(weight, share, kinds, rates)
        sums["forward", category] += forward
        sums["dgrad", category] += dgrad
        sums["wgrad", category] += wgrad
        if recomputed(weight, checkpointing):
            sums["recompute", category] += forward
    times = nothing()
    for (pass_name, category), seconds in sums.items():
        add(times, pass_name, category, seconds)
    times.flags.writeable = False
    return times


def _forward_dgrad_wgrad_s(weight: Weight, share: int, kinds: ProductKinds, rates: Rates) -> tuple[float, float, float]:
    m, n, k, groups = weight.rows * share, weight.n, weight.k, weight.groups
    time_s, low, wgrad_in_bf16 = gemm_time_s, kinds.low_linears and weight.part not in UNQUANTISED, False
    if weight.part == "routed experts":
        time_s, low = gemm_time_s if kinds.library else grouped_time_s, kinds.low
        first_two = "w2" not in weight.name
        wgrad_in_bf16 = kinds.bf16_wgrad == "all" or (kinds.bf16_wgrad == "first two" and first_two)
    return (
        time_s(m, n, k, groups, rates, low=low, wgrad=False),
        time_s(m, k, n, groups, rates, low=low, wgrad=False),
        time_s(n, k, m, groups, rates, low=low and not wgrad_in_bf16, wgrad=True),
    )


EMULATED_CAST_BYTES = 4.0
"""Of one element: two read, two written."""
DIRECTIONS: tuple[PassName, ...] = ("forward", "dgrad", "wgrad")


def cast_time_s(job: Job, calibration: Calibration, m: float, n: int, k: int, groups: int) -> dict[str, float]:
    """Seconds by direction of one product of rows ``m``, in a step."""
    if job.stack.expert_gemm == "library":
        return _fused_cast_s(job, calibration, m, n, k, max(groups, 1))
    low = job.precision.value
    cast_bytes, overhead_share = EMULATED_CAST_BYTES if job.emulated else CAST_BYTES[low], OVERHEAD_SHARE[low]
    blackwell = is_blackwell(job.node.gpu)
    share = calibration.blackwell_cast if blackwell else calibration.hopper_cast
    share = calibration.emulated_cast if job.emulated else share
    rate = 1e12 * float(share) * float(job.node.gpu.hbm_tb_s or 0)
    overhead = float(calibration.blackwell_scales_us) / 1e6 if blackwell else 0.0
    elements = {"forward": m * k + groups * n * k, "dgrad": m * n + groups * n * k, "wgrad": m * (n + k)}
    in_step = float(calibration.blackwell_low_in_step) if blackwell else 1.0
    return {
        name: in_step * (elements[name] * cast_bytes / rate + overhead_share[name] * overhead)  # type: ignore[index]
        for name in DIRECTIONS
    }


def _fused_cast_s(job: Job, calibration: Calibration, m: float, n: int, k: int, groups: int) -> dict[str, float]:
    """TransformerEngine's: one kernel reads an operand and writes it for both axes; weights once a step."""
    rate = memory_rate(job, calibration)
    weights = groups * n * k / job.microbatches
    return {"forward": 4 * (m * k + weights) / rate, "dgrad": 4 * m * n / rate, "wgrad": 0.0}


def add_casts(times: Times, seconds: dict[str, float], *, recomputed: bool) -> None:
    """Casts of one product, by direction."""
    for name in DIRECTIONS:
        add(times, name, "quantisation", seconds[name])
    if recomputed:
        add(times, "recompute", "quantisation", seconds["forward"])


def add_expert_casts(times: Times, job: Job, calibration: Calibration) -> None:
    """Casts of the three grouped products of one MoE layer."""
    if job.precision is Precision.BF16:
        return
    shape, work = job.shape, job.work
    rows = work.received(shape)
    groups = shape.num_experts // work.ep
    first, hidden = shape.dim, shape.moe_hidden_dim
    for n, k in ((hidden, first), (hidden, first), (first, hidden)):
        seconds = cast_time_s(job, calibration, rows, n, k, groups)
        arrived = work.quantised_dispatch and k == first
        if arrived:  # rows are quantised already, weights are not
            seconds["forward"] = cast_time_s(job, calibration, 0, n, k, groups)["forward"]
        if job.bf16_wgrad or arrived:
            seconds["wgrad"] = 0.0
        add_casts(times, seconds, recomputed=job.recomputes_layers)


def products_by_module(job: Job, calibration: Calibration) -> dict[str, Times]:
    """Products, and casts of linears, of one ``attention``, ``moe``, ``feed_forward`` and of the ``head``."""
    work, stack = job.work, job.stack
    low = job.precision is not Precision.BF16 and not job.emulated
    bf16_wgrad = "all" if job.bf16_wgrad else "first two" if work.quantised_dispatch else "none"
    kinds = ProductKinds(low, bf16_wgrad, low and stack.low_linears, stack.expert_gemm == "library")
    rates = rates_of(job.node.gpu, calibration)
    times_of = {}
    for module, weights in weights_by_module(job.shape, work.tp, work.ep).items():
        times = product_times(weights, work.residual, job.checkpointing, kinds, rates).copy()
        if module == "moe":  # rows beyond an even share: padding, and the busiest rank's
            times[:, INDEX["expert GEMMs"]] *= work.received(job.shape) / work.sent(job.shape)
        for weight in weights:
            if kinds.low_linears and weight.part not in UNQUANTISED:
                seconds = cast_time_s(job, calibration, weight.rows * work.residual, weight.n, weight.k, 1)
                add_casts(times, seconds, recomputed=recomputed(weight, job.checkpointing))
        times_of[module] = times
    return times_of


FLEX_BLOCK = 128
BACKWARD = 2.5


def add_attention(times: Times, job: Job, calibration: Calibration) -> None:
    """Attention of one layer."""
    shape, work, documents = job.shape, job.work, job.stack.document_keys
    width = shape.n_heads / work.tp * (shape.qk_head_dim + shape.v_head_dim)
    keys = job.seq_len / 2  # that a query meets on average, masked parts of blocks included
    if documents is not None:
        keys = min(keys, documents + FLEX_BLOCK / 2)
    flops = 2 * work.tokens * width * keys
    peak = float(job.node.gpu.bf16_tflops or 0) * 1e12
    flex = job.stack.attention == "flex"
    forward = flops / peak / float(calibration.flex_forward if flex else calibration.fused_forward)
    backward = BACKWARD * flops / peak / float(calibration.flex_backward if flex else calibration.fused_backward)
    add(times, "forward", "attention", forward)
    add(times, "dgrad", "attention", backward)
    if job.checkpointing in ("full", "full+dispatch"):
        add(times, "recompute", "attention", forward)


def grouped_job(gpu: str, precision: str, *, ep: int = 1, shape: ModelShape | None = None, tokens: int = 1) -> Job:
    """As much of a job as a part of a layer needs."""
    node = Node(gpu=GPUS[gpu], gpus=8)
    return Job(
        shape=shape or shape_of("671B"),
        node=node,
        stack=Stack(name="part", permutation="standard compiled"),
        work=Work(tokens=tokens, ep=ep),
        seq_len=4096,
        microbatches=1,
        schedule="1F1B",
        stages=(),
        stages_of_rank=((0,),),
        degrees=Degrees(1, ep, 1, ep, 1),
        precision=Precision(precision.split("_")[0]),
        bf16_wgrad=precision.endswith("wgrad_bf16"),
        routing=RoutingModel(kind="random_balanced"),
    )


def product_parts_s(job: Job, calibration: Calibration, m: float, n: int, k: int, groups: int) -> dict[str, float]:
    """Seconds by direction of one grouped product, casts included."""
    low = job.precision is not Precision.BF16
    casts = cast_time_s(job, calibration, m, n, k, groups) if low else dict.fromkeys(DIRECTIONS, 0.0)
    rows = int(m)
    sizes = {"forward": (rows, n, k), "dgrad": (rows, k, n), "wgrad": (n, k, rows)}
    rates = rates_of(job.node.gpu, calibration)
    seconds: dict[str, float] = {}
    for name in DIRECTIONS:
        wgrad = name == "wgrad"
        quantised = low and not (job.bf16_wgrad and wgrad)
        gemm_s = grouped_time_s(*sizes[name], groups, rates, low=quantised, wgrad=wgrad)
        seconds[name] = gemm_s + (casts[name] if quantised else 0.0)
    return seconds
