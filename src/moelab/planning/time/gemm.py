"""Time of matrix products, of the casts around them, and of attention's two: the only model of either.

A product has a rate of the datasheet's, of which its shape leaves some: it is cut into tiles of 128 × 256; the last
wave of tiles rarely fills the GPU, and each tile needs a while to begin and end, which a long K hides: the faster the
GPU and the format, the longer. Grouped products on B200 run at one rate, or as fast as memory is read.

A grouped product of 8 bits costs more than its GEMMs. Casts take memory time that grows with their elements alone, and
MXFP8's scales are brought into the blocks that tensor cores read:

==========  =====================  ============================  =================================================
product     GEMM                   cast to 8 bits                scales into blocks
==========  =====================  ============================  =================================================
forward     (M, K) × (G, K, N)     M·K rows, G·N·K weights       a fixed time
dgrad       (M, N) × (G, N, K)     M·N gradient, G·N·K weights   the same
wgrad       (N, M) × (M, K)        M·N gradient, M·K rows        a fixed time, and one for each row of a group
==========  =====================  ============================  =================================================

For each row the GEMMs save 6·N·K·(1/R16 − 1/R8) and casts take 6·(N + K)/B, so large N and K win at any large M, while
weights (G·N·K) and scales have to be shared among many rows: that is where the break-even M comes from. With wgrad in
BF16 the last line is one more product in BF16.

Letters: M rows of the product over all groups, N its columns, K what is summed over, G groups (local experts). A
grouped wgrad sums over the rows of all groups, each of which has an output of its own.

What a layer multiplies depends on the model and its degrees alone and is derived once; only rows grow with the tokens.

Attention multiplies pairs of tokens that may see each other. FlexAttention works on blocks of 128 × 128 and skips those
that the mask leaves empty; a mask that keeps packed documents apart leaves few. Backward is five products where forward
has two.

References:
    ``torchao`` 0.18.0, ``prototype/moe_training/mxfp8_grouped_mm.py`` and ``kernels/mxfp8/quant.py``.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable
from math import ceil
from typing import Any, Literal, NamedTuple

from moelab.errors import BadInput
from moelab.experiment import Precision
from moelab.hardware import H100, Gpu, has_native_mxfp8
from moelab.micro.grouped_gemm import DIRECTIONS, Direction, GroupedPrecision
from moelab.model import ModelShape, gemms
from moelab.planning.time.calibration import Calibration
from moelab.planning.time.job import Job, Times, add, add_both_ways, nothing

TILE_M, TILE_N = 128, 256
SMS = {8: 108, 9: 132, 10: 148}
"""Streaming multiprocessors by major capability (datasheets of A100, H100 and B200)."""
LAUNCH_S = 4e-6
TRANSPOSED_BYTES, TURNED_BYTES = 5.6, 8.3
"""Of one element of a weight and of rows that are cast along columns: read twice, written turned round, which is
slower; as if at the rate of casts along rows (``benchmarks/results/experts_h200.json``)."""
CAST_BYTES = {"fp8": 3.0, "mxfp8": 3.0 + 1 / 32, "emulated": 4.0}
"""Of one element that is cast: two read, one written, and MXFP8's share of a scale; emulation writes BF16."""
SEARCHED_ROWS = (1.0, 2.0**26)


class Rates(NamedTuple):
    """What decides the time of a GPU's products."""

    gpu: str
    low_format: Literal["fp8", "mxfp8"]  # the 8-bit format that its kernels of ``low`` are of
    bf16: float  # of large BF16 products, FLOP/s
    low_linear: float  # of large 8-bit products that are not grouped, FLOP/s
    grouped: float  # of grouped ones in BF16, FLOP/s
    low: float  # of grouped 8-bit products but wgrad, FLOP/s
    low_wgrad: float  # of grouped 8-bit wgrad, FLOP/s
    cast: float  # of casts to 8 bits, bytes a second, read and written
    scales_s: float  # to bring the scales of one product into blocks, forward or dgrad
    scales_wgrad_s: float  # of a grouped wgrad, whatever its size
    scales_row_s: float  # of a grouped wgrad, for each row of a group
    memory: float  # of other kernels, bytes a second
    tile_s: float  # of a tile's beginning and end
    sms: int
    grouped_in_tiles: bool  # whether grouped products lose what their shape loses; else ``grouped`` has it


def is_blackwell(gpu: Gpu) -> bool:
    """SM100 and SM103; AMD's gfx950, of which no rate was measured, is taken to be like them."""
    return has_native_mxfp8(gpu.capability)


def sms_of(gpu: Gpu) -> int:
    """Streaming multiprocessors."""
    return SMS.get(int(gpu.capability or 0), 132)


@functools.lru_cache(maxsize=256)
def rates_of(gpu: Gpu, calibration: Calibration, *, alone: bool = False) -> Rates:
    """The rates of products and casts on a GPU.

    ``alone`` means kernels by themselves, as a benchmark of kernels times them, and not beside others in a step.
    """
    c = calibration
    bf16, low, memory = (float(one or 0) for one in (gpu.bf16_tflops, gpu.fp8_tflops, gpu.hbm_tb_s))
    bf16, low, memory = 1e12 * bf16, 1e12 * low, 1e12 * memory
    shared: dict[str, Any] = {"gpu": gpu.name, "memory": memory * c.copy, "tile_s": c.tile_us / 1e6, "sms": sms_of(gpu)}
    if not is_blackwell(gpu):  # Hopper's constants are of a step and of kernels alone alike
        large, eight = bf16 * c.hopper_gemm, low * c.hopper_low
        return Rates(
            low_format="fp8", bf16=large, low_linear=eight, grouped=large, low=eight, low_wgrad=eight,
            cast=memory * c.hopper_cast, scales_s=0.0, scales_wgrad_s=0.0, scales_row_s=0.0, grouped_in_tiles=True,
            **shared,
        )  # fmt: skip
    # BF16 is known best in a step and MXFP8 alone, so each constant is of where it was read, and a factor leads away
    faster, slower = (c.blackwell_bf16_alone, 1.0) if alone else (1.0, c.blackwell_low_in_step)
    return Rates(
        low_format="mxfp8",
        bf16=bf16 * c.blackwell_gemm,
        low_linear=low * c.blackwell_gemm,
        grouped=bf16 * c.blackwell_grouped * faster,
        low=low * c.blackwell_low / slower,
        low_wgrad=low * c.blackwell_low_wgrad / slower,
        cast=memory * c.blackwell_cast / slower,
        scales_s=slower * c.blackwell_scales_us / 1e6,
        scales_wgrad_s=slower * c.blackwell_scales_wgrad_us / 1e6,
        scales_row_s=slower * c.blackwell_scales_us_per_mrow / 1e12,
        grouped_in_tiles=False,
        **shared,
    )


def memory_rate(job: Job, calibration: Calibration) -> float:
    """Bytes a second of a kernel that copies."""
    return rates_of(job.node.gpu, calibration).memory


def gemm_time_s(
    m: float, n: float, k: float, groups: int, rates: Rates, *, grouped: bool, low: bool, wgrad: bool
) -> float:
    """Seconds of one product, casts apart; letters as in the module, a dense product has one group.

    ``grouped`` products are those of ``torch._grouped_mm`` or of torchao's kernels, others run at the rate of dense
    ones; ``low`` is in 8 bits; ``wgrad`` sums over the rows of one group alone.
    """
    if grouped:
        rate = rates.grouped if not low else rates.low_wgrad if wgrad else rates.low
    else:
        rate = rates.low_linear if low else rates.bf16
    weights, outputs = (1, groups) if wgrad else (groups, 1)
    # both operands are read, and the product is written in BF16
    memory_s = ((1 if low else 2) * (m * k + weights * k * n) + 2 * m * n * outputs) / rates.memory
    if grouped and not rates.grouped_in_tiles:
        return max(2 * m * n * k / rate, memory_s)
    inner = k / groups if wgrad else k
    rows = m if wgrad else m / groups  # of one group
    # each group begins a tile of its own, so many small groups leave more of their last tiles empty
    waves = ceil(groups * ceil(rows / TILE_M) * ceil(n / TILE_N) / rates.sms)
    compute_s = waves * (2 * TILE_M * TILE_N * inner * rates.sms / rate + rates.tile_s)
    return max(compute_s, memory_s) + LAUNCH_S


Kind = Literal["gemm", "cast rows", "cast columns", "cast weights", "scales"]


class Part(NamedTuple):
    """A share of the time of a grouped product, forward and backward."""

    direction: Direction
    kind: Kind
    time_s: float


def grouped_parts(m: float, n: int, k: int, groups: int, precision: GroupedPrecision, rates: Rates) -> list[Part]:
    """The pieces of forward and backward of one grouped product; letters as in the module.

    Raises:
        BadInput: for sizes that are not positive, or a precision of which the GPU has no rates.
    """
    if min(m, n, k, groups) <= 0:
        raise BadInput(f"m, n, k and groups are {m}, {n}, {k} and {groups}; give positive numbers")
    if precision != "bf16" and not precision.startswith(rates.low_format):
        raise BadInput(f"precision is {precision!r}; the rates of {rates.gpu} are of bf16 and {rates.low_format}")
    low_directions = DIRECTIONS[: {"bf16": 0, "mxfp8_wgrad_bf16": 2}.get(precision, 3)]
    sizes: dict[Direction, tuple[float, float, float]] = {"forward": (m, n, k), "dgrad": (m, k, n), "wgrad": (n, k, m)}
    parts = []
    for name in DIRECTIONS:
        kind = {"grouped": True, "low": name in low_directions, "wgrad": name == "wgrad"}
        parts.append(Part(name, "gemm", gemm_time_s(*sizes[name], groups, rates, **kind)))
    casts = cast_parts(m, n, k, groups, rates.low_format, rates)
    return parts + [part for part in casts if part.direction in low_directions]


def cast_parts(m: float, n: int, k: int, groups: int, cast: str, rates: Rates, *, grouped: bool = True) -> list[Part]:
    """Casts and scales of one product forward and backward.

    ``cast`` is one of :data:`CAST_BYTES`; where products are ``grouped``, wgrad sums over the rows of each group apart.
    """
    element_s = CAST_BYTES[cast] / rates.cast
    weights_s = groups * n * k * element_s
    parts = [
        Part("forward", "cast rows", m * k * element_s),
        Part("forward", "cast weights", weights_s),
        Part("dgrad", "cast rows", m * n * element_s),
        Part("dgrad", "cast weights", weights_s),
        Part("wgrad", "cast columns", m * (n + k) * element_s),
    ]
    if cast != "mxfp8":  # FP8 has a scale for each row, which no kernel rearranges
        return parts
    # One program of wgrad's kernel takes 128 features of one group and goes through that group's rows in a loop, so its
    # time grows with the rows of a group, not of all: few experts on a rank are slow. Those of the other two do not.
    wgrad_s = rates.scales_wgrad_s + rates.scales_row_s * m / groups if grouped else rates.scales_s
    times_s: dict[Direction, float] = {"forward": rates.scales_s, "dgrad": rates.scales_s, "wgrad": wgrad_s}
    return parts + [Part(name, "scales", time_s) for name, time_s in times_s.items()]


def seconds_by_kind(parts: Iterable[Part]) -> dict[Kind, float]:
    """Seconds of each kind of part, over the directions."""
    seconds: dict[Kind, float] = {}
    for part in parts:
        seconds[part.kind] = seconds.get(part.kind, 0.0) + part.time_s
    return seconds


def grouped_time_s(
    m: float,
    n: int,
    k: int,
    groups: int,
    precision: GroupedPrecision,
    rates: Rates,
    *,
    direction: Direction | None = None,
) -> float:
    """Seconds of :func:`grouped_parts`: forward and backward together, or of one ``direction``."""
    parts = grouped_parts(m, n, k, groups, precision, rates)
    return sum(part.time_s for part in parts if direction in (None, part.direction))


def gain(m: float, n: int, k: int, groups: int, rates: Rates, precision: GroupedPrecision | None = None) -> float:
    """BF16 time over 8-bit time, forward and backward; above 1 the 8-bit format saves time.

    Letters as in the module; without a ``precision`` the 8-bit format is the GPU's own.
    """
    bf16_s, low_s = (grouped_time_s(m, n, k, groups, name, rates) for name in ("bf16", precision or rates.low_format))
    return bf16_s / low_s


def break_even_m(n: int, k: int, groups: int, rates: Rates, precision: GroupedPrecision | None = None) -> float | None:
    """Rows of all groups from which on the 8-bit format saves time; None where it never does.

    The gain grows with M, because all that does not grow with M is time of the 8-bit side. Arguments as :func:`gain`.

    >>> from moelab.hardware import B200
    >>> from moelab.planning.time.calibration import CALIBRATION
    >>> rows = break_even_m(2048, 7168, 8, rates_of(B200, CALIBRATION, alone=True))
    >>> 10_000 < rows < 25_000
    True
    """
    from scipy.optimize import brentq  # a projection has no break-even, and does not wait for scipy

    def above(m: float) -> float:
        return gain(m, n, k, groups, rates, precision) - 1

    low, high = SEARCHED_ROWS
    if above(high) < 0:  # at so many rows weights and fixed times count no more: it never will
        return None
    return low if above(low) >= 0 else float(brentq(above, low, high, rtol=1e-6))


RECOMPUTED: dict[str, tuple[str, ...]] = {
    "none": (),
    "selective": ("attention.wq_b", "attention.wo", "feed_forward.w3", "moe.shared_experts.w3", "moe.routed_experts"),
    "full": ("",),  # every name begins with it
    "full+dispatch": ("",),
    "mla": ("attention.wq_b", "attention.wkv_b"),
    "mla+mlp": ("attention.wq_b", "attention.wkv_b", "feed_forward"),
    "norm+act": (),
}
"""Beginnings of the names of products that are computed again in the backward pass; of ``selective``, about every
second one and the routed experts. The last three are Megatron's."""
STREAMS = 4
"""Products that TransformerEngine has in flight (``transformer_engine/common``, ``multi_stream_cublas_gemm``)."""
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


@functools.lru_cache(maxsize=65_536)
def product_s(
    weight: Weight, share: int, low: bool, low_wgrad: bool, expert_gemm: str, rates: Rates
) -> dict[Direction, float]:
    """Seconds of a weight's products; ``share`` is a micro-batch's tokens for each tensor-parallel rank.

    ``low`` are products in 8 bits, but for wgrad's ``low_wgrad``; ``expert_gemm`` is as :class:`Stack` has it.
    """
    m, n, k, groups, launches = float(weight.rows * share), weight.n, weight.k, weight.groups, 1.0
    experts = weight.part == "routed experts"
    if experts and expert_gemm == "streams" and groups > STREAMS:
        launches = groups / STREAMS
        m, groups = m / launches, STREAMS
    time_s = functools.partial(gemm_time_s, groups=groups, rates=rates, grouped=experts and expert_gemm == "torch")
    return {
        "forward": launches * time_s(m, n, k, low=low, wgrad=False),
        "dgrad": launches * time_s(m, k, n, low=low, wgrad=False),
        "wgrad": launches * time_s(n, k, m, low=low_wgrad, wgrad=True),
    }


def cast_time_s(
    job: Job, calibration: Calibration, m: float, n: int, k: int, groups: int, *, grouped: bool = True
) -> dict[Direction, float]:
    """Seconds by direction of the casts and scales of one product of rows ``m``, in a step."""
    rates = rates_of(job.node.gpu, calibration)
    if job.stack.expert_gemm != "torch":  # TransformerEngine reads an operand once for both axes, weights once a step
        weights = groups * n * k / job.microbatches
        return {"forward": 4 * (m * k + weights) / rates.memory, "dgrad": 4 * m * n / rates.memory, "wgrad": 0.0}
    if job.emulated:  # moelab's own kernels, which are as fast as a copy
        rates = rates._replace(cast=rates.memory)
    cast = "emulated" if job.emulated else job.precision.value
    seconds: dict[Direction, float] = dict.fromkeys(DIRECTIONS, 0.0)
    for part in cast_parts(m, n, k, groups, cast, rates, grouped=grouped):
        seconds[part.direction] += part.time_s
    return seconds


def add_directions(times: Times, category: str, seconds: dict[Direction, float], *, again: bool) -> None:
    """Add what a product takes in each direction, and the forward one ``again`` where the backward pass repeats it."""
    for name in DIRECTIONS:
        add(times, name, category, seconds[name])
    if again:
        add(times, "recompute", category, seconds["forward"])


def add_expert_casts(times: Times, job: Job, calibration: Calibration) -> None:
    """Casts of the three grouped products of one MoE layer."""
    if job.precision is Precision.BF16:
        return
    again = job.recomputes_layers and not job.keeps_products
    if job.precision is Precision.FP8 and job.work.one_pass_experts:
        add_directions(times, "quantisation", _one_pass_cast_s(job, calibration), again=again)
        return
    shape, work = job.shape, job.work
    rows = work.received(shape)
    groups = shape.num_experts // work.ep
    first, hidden = shape.dim, shape.moe_hidden_dim
    for n, k in ((hidden, first), (hidden, first), (first, hidden))[: 3 if job.stack.low_down else 2]:
        seconds = cast_time_s(job, calibration, rows, n, k, groups)
        arrived = work.quantised_dispatch and k == first  # w1 and w3 multiply what was dispatched, w2 what the GPU made
        if arrived:  # rows are quantised already, weights are not
            seconds["forward"] = cast_time_s(job, calibration, 0, n, k, groups)["forward"]
        if job.bf16_wgrad:
            seconds["wgrad"] = 0.0
        add_directions(times, "quantisation", seconds, again=again)


def _one_pass_cast_s(job: Job, calibration: Calibration) -> dict[Direction, float]:
    """FP8 experts of moelab (``moelab/mxfp8/operators_cuda.py``).

    SwiGLU is elementwise work elsewhere; forward its result is written in 8 bits and not in BF16, which is left out.
    """
    shape, work = job.shape, job.work
    rows, hidden = work.received(shape) * shape.dim, work.received(shape) * shape.moe_hidden_dim
    weights = 3 * shape.num_experts // work.ep * shape.dim * shape.moe_hidden_dim
    of_rows = 0.0 if work.quantised_dispatch else CAST_BYTES["fp8"] * rows
    expanded = CAST_BYTES["fp8"] * rows if work.quantised_dispatch else 0.0  # read in 8 bits, written in BF16
    moved: dict[Direction, float] = {
        "forward": of_rows + CAST_BYTES["fp8"] * weights,
        "dgrad": CAST_BYTES["fp8"] * rows + TRANSPOSED_BYTES * weights + 2 * hidden,
        "wgrad": expanded if job.bf16_wgrad else of_rows + 2 * 2 * rows + TURNED_BYTES * 3 * hidden,
    }
    return {name: size / memory_rate(job, calibration) for name, size in moved.items()}


def _gate_beside_up(weights: tuple[Weight, ...]) -> tuple[Weight, ...]:
    """The experts' w1 and w3 as one weight of 2F, whose dgrad sums over all of it."""
    beside = []
    for one in weights:
        if one.part != "routed experts" or ".w2_" in one.name:
            beside.append(one)
        elif ".w1_" in one.name:
            beside.append(one._replace(n=2 * one.n))
    return tuple(beside)


def products_by_module(job: Job, calibration: Calibration) -> dict[str, Times]:
    """Products, and casts of linears, of one ``attention``, ``moe``, ``feed_forward`` and of the ``head``."""
    work, stack, rates = job.work, job.stack, rates_of(job.node.gpu, calibration)
    eight_bits = job.precision is not Precision.BF16 and not job.emulated
    received = work.received(job.shape) / work.sent(job.shape)  # beyond an even share: padding, and the busiest rank's
    times_of = {}
    for module, weights in weights_by_module(job.shape, work.tp, work.ep).items():
        times_of[module] = times = nothing()
        for weight in _gate_beside_up(weights) if work.one_pass_experts else weights:
            experts = weight.part == "routed experts"
            low_linear = eight_bits and stack.low_linears and weight.part not in UNQUANTISED
            low = low_linear or (eight_bits and experts and (stack.low_down or ".w2_" not in weight.name))
            low_wgrad = low and not (experts and job.bf16_wgrad)
            again = recomputed(weight, job.checkpointing)
            seconds = product_s(weight, work.residual, low, low_wgrad, stack.expert_gemm, rates)
            if experts:
                seconds = {name: received * one_s for name, one_s in seconds.items()}
            add_directions(
                times,
                "expert GEMMs" if experts else "other GEMMs",
                seconds,
                again=again and not (experts and job.keeps_products),
            )
            if low_linear:
                rows = weight.rows * work.residual
                casts = cast_time_s(job, calibration, rows, weight.n, weight.k, 1, grouped=False)
                add_directions(times, "quantisation", casts, again=again)
    return times_of


FLEX_BLOCK = 128
BACKWARD = 2.5


def add_attention(times: Times, job: Job, calibration: Calibration) -> None:
    """Attention of one layer."""
    shape, work, stack = job.shape, job.work, job.stack
    width = shape.n_heads / work.tp * (shape.qk_head_dim + shape.v_head_dim)  # queries by keys, and scores by values
    keys = job.seq_len / 2  # that a query meets on average, masked parts of blocks included
    if stack.document_keys is not None:
        keys = min(keys, stack.document_keys + FLEX_BLOCK / 2)  # blocks at a document's edge are computed whole
    flops, peak = 2 * work.tokens * width * keys, float(job.node.gpu.bf16_tflops or 0)
    if stack.fused_attention is not None:
        rates = (stack.fused_attention, stack.fused_attention)
    else:
        faster = calibration.flex_tiles if stack.flex_tiles else 1.0
        rates = (faster * calibration.flex_forward, faster * calibration.flex_backward)
        peak = min(peak, float(H100.bf16_tflops or 0))  # its Triton kernels gain nothing from Blackwell's tensor cores
    forward, backward = (flops / (1e12 * peak * rate) for rate in rates)
    add_both_ways(times, "attention", forward, BACKWARD * backward, again=job.recomputes_attention)
