"""The exchange experiment: the trainer's own dispatchers, timed one operation at a time.

Expert parallelism moves tokens four times a layer: *dispatch* to the experts' ranks, *combine* back, and both again for
the gradients (the backward of dispatch is a combine, that of combine is a dispatch). An arm is a token dispatcher as a
training run builds it: ``standard`` is TorchTitan's, ``deepep`` is moelab's (:mod:`moelab.deepep.dispatcher`) on the
buffer and with the SM count of training. Dispatch and combine are called, compiled as TorchTitan compiles a layer, and
autograd runs their gradients. Experts, and the scores that moelab's experts apply, are left out. Arms take turns, and
every arm's tokens are first sent through a round trip whose result is known.

Bytes are counted from the experts that were drawn, and only those that leave a GPU for another one: a plain all-to-all
sends a copy of a token for each of its experts, DeepEP one for each *rank* of its experts. Payload is counted, data and
scales; expert ids, scores and counts are some 1 % more at hidden 7168.

To start it: ``torchrun --nproc-per-node 2 -m moelab.micro.exchange --output FILE.json``. An arm that fails is left out
on all ranks and its error becomes its row.

Shape suffixes: T tokens of this rank, K experts a token, R rows received (a copy for each local expert), D hidden, E
experts, e local experts, P ranks.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, get_args

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from moelab.deepep import ops
from moelab.deepep.buffer import EPKernels, close_exchanges, exchange
from moelab.deepep.dispatcher import PaddedDispatcher
from moelab.errors import BadInput, MoelabError
from moelab.files import write_json
from moelab.machine import environment
from moelab.micro.clock import Marks, interquartile_range
from moelab.model import DispatchPrecision, shape_of
from moelab.mxfp8.experts import QuantisedRows
from moelab.mxfp8.quantise import expand
from moelab.titan.routing import draw_experts

Backend = Literal["standard", "deepep"]
Operation = Literal["dispatch", "combine", "combine_backward", "dispatch_backward"]
OPERATIONS: tuple[Operation, ...] = get_args(Operation)
ROUTINGS = ("random_balanced", "round_robin", "skewed")
SKEW = 0.7
"""Popularity of the r-th most popular expert is r to the power of minus this."""
ALIGNMENT = 128
"""Rows of an expert are padded to this multiple by moelab's dispatcher; the largest that MXFP8 kernels ask for."""
COLLECTIVE_TIMEOUT_S, CONTROL_TIMEOUT_S = 150, 300  # a collective that hangs ends first, and ranks agree on its error
WARM_UP = 2
TOLERANCE = {"bf16": 0.02, "fp8": 0.06, "mxfp8": 0.06}
"""Relative error (2-norm) of a round trip that is still rounding: BF16 has 8 bits, E4M3 has 4, and both add up."""
Result = TypeVar("Result")


class ArmFailed(MoelabError):
    """An arm does not run here, or does not move tokens right."""


# What is measured


@dataclass(frozen=True, kw_only=True)
class Size:
    """One MoE layer's traffic: ``tokens`` of one rank, each to ``top_k`` of ``experts``, as vectors of ``hidden``."""

    name: str
    hidden: int
    top_k: int
    experts: int
    tokens: int


def size_of(model: str, *, experts: int, tokens: int) -> Size:
    """The layer of a model, with so many experts on all ranks."""
    shape = shape_of(model)
    return Size(name=f"{model}, {experts} experts", hidden=shape.dim, top_k=shape.top_k, experts=experts, tokens=tokens)


SIZES = (
    size_of("671B", experts=32, tokens=8192),
    size_of("16B", experts=64, tokens=16384),
    size_of("671B", experts=16, tokens=8192),
)
SMALL = Size(name="small", hidden=256, top_k=4, experts=8, tokens=256)
"""For a laptop and for tests."""


@dataclass(frozen=True, kw_only=True)
class ExchangeArm:
    """One way to move tokens."""

    backend: Backend
    precision: DispatchPrecision = "bf16"  # of the dispatch; the other three operations are in BF16, as in training
    sms: int = 0  # streaming multiprocessors that DeepEP may use; 0 takes as many as training does

    @property
    def layout(self) -> str:
        """``expanded`` if the library delivers rows by expert, padded; ``dense`` if PyTorch sorts them."""
        return "expanded" if self.backend == "deepep" else "dense"

    @property
    def name(self) -> str:
        """Such as ``deepep fp8 expanded, 24 SMs``."""
        layout = f" {self.layout}" if self.backend == "deepep" else ""
        return f"{self.backend} {self.precision}{layout}" + (f", {self.sms} SMs" if self.sms else "")

    @property
    def operations(self) -> tuple[Operation, ...]:
        """What is timed: after the dispatch, 8-bit arms do what the BF16 arm does."""
        return OPERATIONS if self.precision == "bf16" else ("dispatch",)


@dataclass(frozen=True, kw_only=True)
class ArmGroup:
    """Arms that take turns at one size under one routing."""

    size: Size
    routing: str
    arms: tuple[ExchangeArm, ...]


def plan(sizes: Sequence[Size], routings: Sequence[str], backends: Sequence[Backend]) -> list[ArmGroup]:
    """Every size under every routing; DeepEP's dispatch in each precision."""
    arms = [ExchangeArm(backend="standard")] if "standard" in backends else []
    if "deepep" in backends:
        precisions: tuple[DispatchPrecision, ...] = ("bf16", "fp8", "mxfp8")
        arms += [ExchangeArm(backend="deepep", precision=precision) for precision in precisions]
    return [ArmGroup(size=size, routing=routing, arms=tuple(arms)) for size in sizes for routing in routings if arms]


def choose_experts(routing: str, size: Size, *, rank: int, device: torch.device) -> torch.Tensor:
    """Experts of each token, int64 ``(T, K)``, distinct in each row; random ones differ between ranks.

    ``round_robin`` is TorchTitan's forced balance; ``random_balanced`` is :func:`moelab.titan.routing.draw_experts`;
    ``skewed`` draws distinct experts at random by a popularity that falls as a power law and is the same on all ranks.
    The last stands for a router early in training; it is made up, not learned. :class:`BadInput` for another routing.
    """
    T, K, E = size.tokens, size.top_k, size.experts
    if routing == "round_robin":
        return torch.arange(T * K, device=device).view(T, K) % E
    if routing == "random_balanced":
        torch.manual_seed(0)
        return draw_experts(T, E, K, rank=rank, device=device)
    if routing == "skewed":
        order_E = torch.randperm(E, generator=torch.Generator().manual_seed(0))  # popularity is one for all ranks
        logits_E = -SKEW * torch.log1p(order_E.float())
        own = torch.Generator().manual_seed(rank + 1)
        # The top-k of logits plus Gumbel noise is a draw without replacement in proportion to the popularity.
        noise_TE = -torch.log(torch.empty(T, E).exponential_(generator=own))
        return (logits_E + noise_TE).topk(K, dim=-1).indices.to(device)
    raise BadInput(f"there is no routing {routing!r}; the routings are {', '.join(ROUTINGS)}")


def rows_to_ranks(ids_TK: torch.Tensor, *, experts: int, ranks: int) -> dict[str, list[int]]:
    """Rows that this rank's tokens send to each rank, itself included; rank ``p`` holds the ``p``-th part of experts.

    Returns:
        ``copies`` with one for each expert of a token, ``once`` with one for each rank of a token's experts.

    Example:
        >>> rows_to_ranks(torch.tensor([[0, 1], [1, 2]]), experts=4, ranks=2)
        {'copies': [3, 1], 'once': [2, 1]}
    """
    rank_TK = ids_TK // (experts // ranks)
    copies_P = torch.bincount(rank_TK.flatten(), minlength=ranks)
    reached_TP = torch.zeros((ids_TK.shape[0], ranks), dtype=torch.int64, device=ids_TK.device)
    once_P = reached_TP.scatter_(1, rank_TK, 1).sum(dim=0)
    return {"copies": copies_P.tolist(), "once": once_P.tolist()}


def row_bytes(hidden: int, precision: DispatchPrecision) -> int:
    """Bytes of one token's vector on the wire: BF16; FP8 with an FP32 scale a row; MXFP8 with a byte for 32 values.

    Example:
        >>> [row_bytes(7168, precision) for precision in ("bf16", "fp8", "mxfp8")]
        [14336, 7172, 7392]
    """
    return {"bf16": 2 * hidden, "fp8": hidden + 4, "mxfp8": hidden + hidden // 32}[precision]


def traffic(sent_PP: Sequence[Sequence[int]], *, hidden: int, precision: DispatchPrecision) -> dict[str, int | float]:
    """What one operation moves between ranks, from the rows that rank ``p`` (outer) sends to rank ``q`` (inner).

    Returns:
        ``physical_bytes`` of the busiest rank, and ``rows_to_others``, the mean of all ranks.
    """
    ranks = range(len(sent_PP))
    out = [sum(sent_PP[p]) - sent_PP[p][p] for p in ranks]
    into = [sum(sent_PP[q][p] for q in ranks) - sent_PP[p][p] for p in ranks]
    # A link carries both directions at once, so the fuller one takes the time; the way back is as long.
    return {
        "physical_bytes": max(*out, *into) * row_bytes(hidden, precision),
        "rows_to_others": statistics.fmean(out),
    }


# The ranks


@dataclass(frozen=True, kw_only=True)
class World:
    """This process among the ranks: ``group`` moves tokens, ``control`` (gloo) agrees on what to do next."""

    device: torch.device
    group: dist.ProcessGroup
    control: dist.ProcessGroup
    rank: int
    ranks: int

    def everywhere(self, mine: Any) -> list[Any]:
        """A value of every rank."""
        values: list[Any] = [None] * self.ranks
        # Plain data alone: gloo does not ask who connects, and a pickle could run anything.
        dist.all_gather_object(values, mine, group=self.control, weights_only=True)
        return values

    def together(self, call: Callable[[], Result]) -> Result:
        """Do one step on all ranks; if it fails on one, :class:`ArmFailed` is raised on all, with the first error."""
        problem = result = None
        try:
            result = call()
            if self.device.type == "cuda":
                torch.cuda.synchronize()  # kernels fail late
        except Exception as failure:  # whatever a library raises belongs in the row of its arm
            problem = f"rank {self.rank}: {type(failure).__name__}: {failure}"[:500]
        problems = [one for one in self.everywhere(problem) if one]
        if problems:
            raise ArmFailed(problems[0])
        return cast(Result, result)

    def meet(self) -> None:
        """Wait for the other ranks: on a GPU the streams do, and not the hosts."""
        if self.device.type == "cuda":
            dist.all_reduce(torch.zeros(1, device=self.device), group=self.group)
        else:
            dist.barrier(group=self.group)

    def say(self, text: str) -> None:
        """Progress, from the first rank."""
        if self.rank == 0:
            print(text, file=sys.stderr, flush=True)  # noqa: T201

    def leave(self) -> None:
        """Close the buffers and end the process group. All ranks call it together."""
        close_exchanges()
        dist.barrier(group=self.control)
        dist.destroy_process_group()


def open_world(device: str, *, init_method: str | None = None, rank: int = -1, ranks: int = -1) -> World:
    """Join the process group, by torchrun's variables or as the arguments say."""
    from torchtitan.distributed.utils import set_spmd_backend

    here = torch.device("cpu")
    if device == "cuda":
        here = torch.device("cuda", int(os.environ.get("LOCAL_RANK", max(rank, 0))))
        torch.cuda.set_device(here)
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # some small kernels need no pool of processes
    else:
        torch.set_num_threads(1)  # both ranks share the processor
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=init_method,
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
        device_id=here if device == "cuda" else None,
    )
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=CONTROL_TIMEOUT_S))
    assert dist.group.WORLD is not None
    # What is not compiled sends by ``spmd_types`` in TorchTitan's other backend, which needs the mesh of a model.
    set_spmd_backend("partial_dtensor")
    return World(
        device=here, group=dist.group.WORLD, control=control, rank=dist.get_rank(), ranks=dist.get_world_size()
    )


def find_deepep(device: str) -> tuple[bool, str]:
    """Whether DeepEP V2 runs here, and its version or what is missing."""
    if device != "cuda":
        return False, "needs GPUs"
    try:
        library = importlib.import_module("deep_ep")
        library.ElasticBuffer  # noqa: B018 - neither DeepEP V1 nor PyPI's deep-ep has it
    except Exception as error:  # an import of compiled code fails in many ways; each is a finding
        return False, f"not here: {type(error).__name__}: {error}"[:300]
    return True, str(getattr(library, "__version__", "version unknown"))


# A layer's exchange


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """One rank's input: activations ``(T, D)`` BF16, expert ids ``(T, K)`` int64, scores ``(T, K)`` FP32."""

    x_TD: torch.Tensor
    ids_TK: torch.Tensor
    scores_TK: torch.Tensor


def make_tokens(size: Size, routing: str, world: World) -> Tokens:
    """Random activations and scores; experts as the routing chooses them."""
    generator = torch.Generator(device=world.device).manual_seed(world.rank)
    ids_TK = choose_experts(routing, size, rank=world.rank, device=world.device)
    x_TD = torch.randn((size.tokens, size.hidden), generator=generator, device=world.device).to(torch.bfloat16)
    scores_TK = torch.rand((size.tokens, size.top_k), generator=generator, device=world.device) + 0.1
    scores_TK /= scores_TK.sum(dim=-1, keepdim=True)
    return Tokens(x_TD=x_TD, ids_TK=ids_TK, scores_TK=scores_TK)


class Layer:
    """An arm's dispatcher and the four operations of one layer, in the order of :data:`OPERATIONS`."""

    def __init__(
        self, arm: ExchangeArm, size: Size, tokens: Tokens, world: World, *, kernels: EPKernels, compiled: bool
    ) -> None:
        from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

        layer: dict[str, Any] = {"num_experts": size.experts, "top_k": size.top_k}
        config: Any = AllToAllTokenDispatcher.Config(**layer)
        if arm.backend == "deepep":
            room: dict[str, Any] = {"hidden_dim": size.hidden, "num_max_tokens_per_rank": size.tokens}
            config = PaddedDispatcher.Config(
                **layer, **room, alignment=ALIGNMENT, kernels=kernels, num_sms=arm.sms, precision=arm.precision
            )
        self.arm, self.tokens = arm, tokens
        self.experts_apply_scores = arm.backend == "deepep"  # TorchTitan multiplies by them at home, in combine
        self.dispatcher: Any = config.build()
        self.dispatcher.wire_meshes(
            ep_mesh=DeviceMesh.from_group(world.group, world.device.type, mesh_dim_names=("ep",))
        )
        self._dispatch, self._combine = self.dispatcher.dispatch, self.dispatcher.combine
        if compiled:  # as TorchTitan 0.3.0 compiles a layer, in ``torchtitan/distributed/compile.py``
            torch._dynamo.config.capture_scalar_outputs = True  # row counts, which only the data know
            torch._dynamo.config.recompile_limit = 64  # the code of a dispatcher serves all arms and sizes
            self._dispatch, self._combine = (
                torch.compile(call, fullgraph=True) for call in (self._dispatch, self._combine)
            )
        self._x_TD = tokens.x_TD.detach().requires_grad_()
        self._scores_TK = tokens.scores_TK.detach().requires_grad_()
        self._counts_E = torch.bincount(tokens.ids_TK.flatten(), minlength=size.experts)  # the router has them

    @property
    def sms(self) -> int | None:
        """Multiprocessors that move tokens; None where the library does not say."""
        return exchange(self.dispatcher.group).num_sms if self.arm.backend == "deepep" else None

    @property
    def scores(self) -> torch.Tensor:
        """The scores that came with the rows, or wait at home for combine: one for each row there, ``(R,)``."""
        return self._state.scores_R if self.experts_apply_scores else self._state.topk_scores_experts_sorted_N

    def rows_RD(self) -> torch.Tensor:
        """Rows at the experts in BF16, expanded where they came in 8 bits; padding is zero."""
        if self._quantised is None:
            return self._rows_RD.detach()
        assert self.arm.precision != "bf16"
        return expand(self._quantised.data_RD, self._quantised.scales_RS, self.arm.precision)

    def received(self) -> list[int]:
        """Rows that arrived from each rank, by the library's own count."""
        if self.arm.backend == "standard":
            return list(self._state.output_splits)
        ends_P = self._state.handle[ops.HANDLE_TENSORS.index("psum_num_recv_tokens_per_scaleup_rank")]
        counts: list[int] = torch.diff(ends_P, prepend=ends_P.new_zeros(1)).tolist()
        return counts

    def dispatch(self) -> None:
        """Send the tokens to their experts."""
        # The state is the dispatcher's own metadata: of another type for each, which the properties above know.
        rows, self.counts_e, self._state = self._dispatch(
            self._x_TD, self._scores_TK, self.tokens.ids_TK, self._counts_E
        )
        self._quantised = rows if isinstance(rows, QuantisedRows) else None
        self._rows_RD = rows.place_RD if isinstance(rows, QuantisedRows) else rows

    def combine(self, outputs_RD: torch.Tensor) -> None:
        """Return the experts' outputs and add those of each token."""
        self._outputs_RD = outputs_RD.detach().requires_grad_()
        # The graph is cut at the scores, too: the gradients of combine and of dispatch are two operations.
        self._own_scores = self.scores.detach().requires_grad_()
        state = self._state
        if not self.experts_apply_scores:
            state = replace(state, topk_scores_experts_sorted_N=self._own_scores)
        self.out_TD: torch.Tensor = self._combine(self._outputs_RD, state, self.tokens.x_TD)

    def combine_backward(self, grad_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients of the experts' outputs ``(R, D)``, and of the scores where combine applied them, else zeros."""
        if self.experts_apply_scores:
            (grad_RD,) = torch.autograd.grad(self.out_TD, self._outputs_RD, grad_TD)
            return grad_RD, torch.zeros_like(self.scores)
        grad_RD, grad_scores = torch.autograd.grad(self.out_TD, (self._outputs_RD, self._own_scores), grad_TD)
        return grad_RD, grad_scores

    def dispatch_backward(self, grad_RD: torch.Tensor, grad_scores: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Gradients of the tokens ``(T, D)`` and of their scores ``(T, K)``."""
        outputs, inputs = (self._rows_RD, self.scores), (self._x_TD, self._scores_TK)
        return torch.autograd.grad(outputs, inputs, (grad_RD, grad_scores))


def round_trip(layer: Layer, size: Size, world: World) -> float:
    """The largest relative error of a forward and backward through experts that each multiply by their own number.

    All ranks call it together; if a step fails on one, :class:`ArmFailed` is raised on all.
    """
    tokens, grad_TD = layer.tokens, layer.tokens.x_TD.flip(0)
    factor_E = 1 + torch.arange(size.experts, device=world.device) / size.experts
    world.together(layer.dispatch)
    rows_RD = layer.rows_RD()
    # A factor for each expert, so that a row at the wrong one shows.
    local_e = factor_E.view(world.ranks, -1)[world.rank]
    factor_R1 = local_e.repeat_interleave(layer.counts_e.to(world.device)).unsqueeze(-1)
    weight_R1 = factor_R1 * layer.scores.detach().unsqueeze(-1) if layer.experts_apply_scores else factor_R1
    world.together(lambda: layer.combine((rows_RD.float() * weight_R1).to(rows_RD.dtype)))
    grad_RD, grad_scores = world.together(lambda: layer.combine_backward(grad_TD))
    if layer.experts_apply_scores:
        grad_scores = (grad_RD.float() * rows_RD.float() * factor_R1).sum(dim=-1)
    grad_RD = (grad_RD.float() * weight_R1).to(rows_RD.dtype)
    x_grad_TD, scores_grad_TK = world.together(lambda: layer.dispatch_backward(grad_RD, grad_scores))
    factor_TK = factor_E[tokens.ids_TK]
    expected_T1 = (tokens.scores_TK * factor_TK).sum(dim=-1, keepdim=True)
    expected_TK = factor_TK * (tokens.x_TD.float() * grad_TD.float()).sum(dim=-1, keepdim=True)
    pairs = (
        (layer.out_TD.detach(), tokens.x_TD * expected_T1),
        (x_grad_TD, grad_TD * expected_T1),
        (scores_grad_TK, expected_TK),
    )
    return max(float((result.float() - expected).norm() / expected.norm()) for result, expected in pairs)


# Time

Columns = Callable[[Sequence[Layer], World, int], Mapping[tuple[str, str], Mapping[str, Any]]]
"""Measures more of the layers in so many turns: further columns of a row, by arm and operation."""


def one_turn(layer: Layer, do: Callable[..., Any]) -> None:
    """Do the operations of a layer in their order, by ``do(operation, *inputs)``, which calls each and returns it."""
    layer.dispatcher.init_buffer()  # the buffer is shared: its SM count becomes this arm's
    do("dispatch")
    if layer.arm.operations == ("dispatch",):
        return
    # Experts and their gradients would come between: what arrived stands for what they make of it.
    do("combine", layer.rows_RD())
    gradients = do("combine_backward", layer.tokens.x_TD.flip(0))
    do("dispatch_backward", *gradients)


def take_turns(layers: Sequence[Layer], world: World, repeats: int) -> dict[tuple[str, str], list[float]]:
    """Time the operations of every arm, arm after arm in each turn: µs of each turn, by arm and operation."""
    times_us: dict[tuple[str, str], list[float]] = {}
    clock = Marks(world.device)
    for turn in range(WARM_UP + repeats):
        for layer in layers:

            def timed(operation: Operation, *inputs: torch.Tensor, layer: Layer = layer, turn: int = turn) -> Any:
                clock.start(world.meet)
                result = getattr(layer, operation)(*inputs)
                clock.mark(operation)
                if turn >= WARM_UP:
                    times_us.setdefault((layer.arm.name, operation), []).append(clock.total_us())
                return result

            one_turn(layer, timed)
    return times_us


def time_group(
    group: ArmGroup, world: World, *, kernels: EPKernels, compiled: bool, repeats: int, also: Columns | None
) -> list[dict[str, Any]]:
    """Check and time the arms of a group; all ranks call it together and get the same rows of the file."""
    size, tokens = group.size, make_tokens(group.size, group.routing, world)
    sent = world.everywhere(rows_to_ranks(tokens.ids_TK, experts=size.experts, ranks=world.ranks))
    shared = {**asdict(size), "size": size.name, "ranks": world.ranks, "routing": group.routing}
    del shared["name"]
    rows: list[dict[str, Any]] = []
    ready: list[tuple[Layer, list[list[int]], dict[str, Any]]] = []
    for arm in group.arms:
        columns = shared | {"arm": arm.name, "backend": arm.backend, "precision": arm.precision, "layout": arm.layout}
        sent_PP = [one["copies" if arm.backend == "standard" else "once"] for one in sent]
        try:
            layer = world.together(
                lambda arm=arm: Layer(arm, size, tokens, world, kernels=kernels, compiled=compiled)  # type: ignore[misc]
            )
            check(layer, size, sent_PP, world)
        except ArmFailed as failure:
            rows.append({**columns, "error": str(failure)})
            world.say(f"  {arm.name}: {failure}")
        else:
            chosen = {"sms": layer.sms, "sms_chosen_by": "caller" if arm.sms else "library"}
            ready.append((layer, sent_PP, columns | chosen))
    layers = [layer for layer, *_ in ready]
    times_us = take_turns(layers, world, repeats)
    more = also(layers, world, repeats) if also else {}
    for layer, sent_PP, columns in ready:
        for operation in layer.arm.operations:
            # An operation takes as long as on its slowest rank, which is another one in each turn.
            slowest_us = list(map(max, *world.everywhere(times_us[layer.arm.name, operation])))
            precision = layer.arm.precision if operation == "dispatch" else "bf16"
            row = {
                **columns,
                "operation": operation,
                "us_median": round(statistics.median(slowest_us), 2),
                "us_iqr": round(interquartile_range(slowest_us), 2),
                "repeats": repeats,
                **traffic(sent_PP, hidden=size.hidden, precision=precision),
                **more.get((layer.arm.name, operation), {}),
                "error": None,
            }
            rows.append(row)
    return rows


def check(layer: Layer, size: Size, sent_PP: list[list[int]], world: World) -> None:
    """Raise :class:`ArmFailed` on all ranks for a layer that loses or changes tokens on one."""
    error, allowed = max(world.everywhere(round_trip(layer, size, world))), TOLERANCE[layer.arm.precision]
    if not error < allowed:  # NaN is wrong, too
        raise ArmFailed(f"the round trip is wrong: relative error {error:.3g}, allowed {allowed}")
    received, expected = layer.received(), [row[world.rank] for row in sent_PP]
    if not all(world.everywhere(received == expected)):
        raise ArmFailed(f"rows from each rank: {received} by the library, {expected} by the routing")


def run(
    groups: Sequence[ArmGroup],
    world: World,
    output: Path,
    *,
    libraries: dict[str, str],
    kernels: EPKernels = "native",
    compiled: bool = False,
    repeats: int = 10,
    also: Columns | None = None,
) -> dict[str, Any]:
    """Time every group in their order, and write the file after each from the first rank; returns what it has."""
    here = environment()
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if world.device.type == "cuda" else None
    report: dict[str, Any] = {
        "label": "measured",
        "what": "dispatch and combine, forward and backward, of each way to move tokens between expert-parallel ranks",
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "device": "GPUs over NCCL" if nccl else "CPU processes over gloo: a test of the method, no measure of a GPU",
        "compiled": compiled,
        "environment": {name: here[name] for name in ("moelab", "python", "packages", "processor", "cores", "gpus")},
        "libraries": {"nccl_loaded": nccl, **libraries},
        "ranks": world.ranks,
        "rows": [],
    }
    size = None
    for group in groups:
        if group.size != size:
            close_exchanges()  # a training run's buffer is made for one size
            size = group.size
        world.say(f"{group.size.name}, {group.routing}")
        report["rows"] += time_group(group, world, kernels=kernels, compiled=compiled, repeats=repeats, also=also)
        if world.rank == 0:
            write_json(output, report)
    close_exchanges()
    return report


def main() -> None:
    """Measure what this machine has."""
    parser = argparse.ArgumentParser(description="Time dispatch and combine of every way to move tokens.")
    parser.add_argument("--output", type=Path, required=True, help="JSON file, written after each group of arms")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options = parser.parse_args()
    on_gpus = options.device == "cuda"
    world = open_world(options.device)
    has_deepep, version = find_deepep(options.device)
    groups = plan(SIZES if on_gpus else [SMALL], ROUTINGS, ["standard", "deepep"] if has_deepep else ["standard"])
    run(groups, world, options.output, libraries={"deepep": version}, compiled=on_gpus)
    world.leave()


if __name__ == "__main__":
    main()
