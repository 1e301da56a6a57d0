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

To start it: ``torchrun --nproc-per-node 2 -m moelab.micro.exchange --output FILE.json``.

Shape suffixes: T tokens of this rank, K experts a token, R rows received (a copy for each local expert), D hidden, E
experts, e local experts, P ranks.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

from moelab.deepep.buffer import close_exchanges, exchange
from moelab.deepep.dispatcher import PaddedDispatcher
from moelab.errors import BadInput, MoelabError
from moelab.files import write_json
from moelab.machine import environment
from moelab.micro.clock import Marks, median_and_iqr
from moelab.model import DispatchPrecision, shape_of
from moelab.mxfp8.experts import QuantisedRows
from moelab.mxfp8.kernels import Kernels
from moelab.mxfp8.quantise import expand
from moelab.titan.routing import draw_experts

Backend = Literal["standard", "deepep"]
OPERATIONS = ("dispatch", "combine", "combine_backward", "dispatch_backward")
ROUTINGS = ("random_balanced", "round_robin", "skewed")
SKEW = 0.7
"""Popularity of the r-th most popular expert is r to the power of minus this."""
ALIGNMENT = 128
"""Rows of an expert are padded to this multiple by moelab's dispatcher; the largest that MXFP8 kernels ask for."""
TIMEOUT_S = 150
WARM_UP, REPEATS = 2, 10
TOLERANCE = {"bf16": 0.02, "fp8": 0.06, "mxfp8": 0.06}
"""Relative error (2-norm) of a round trip that is still rounding: BF16 has 8 bits, E4M3 has 4, and both add up."""


class RoundTripFailed(MoelabError):
    """A dispatcher does not bring tokens home as it should."""


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
    def name(self) -> str:
        """Such as ``deepep fp8 expanded, 24 SMs``: *expanded* rows arrive by expert, padded."""
        layout = " expanded" if self.backend == "deepep" else ""
        return f"{self.backend} {self.precision}{layout}" + (f", {self.sms} SMs" if self.sms else "")


STANDARD = ExchangeArm(backend="standard")
DEEPEP = tuple(ExchangeArm(backend="deepep", precision=precision) for precision in ("bf16", "fp8", "mxfp8"))


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
        own = torch.Generator().manual_seed(rank + 1)
        return torch.multinomial((1.0 + order_E).pow(-SKEW).expand(T, E), K, generator=own).to(device)
    raise BadInput(f"there is no routing {routing!r}; the routings are {', '.join(ROUTINGS)}")


def rows_to_ranks(ids_TK: torch.Tensor, *, experts: int, ranks: int, once: bool) -> list[int]:
    """Rows that this rank's tokens send to each rank, itself included; rank ``p`` holds the ``p``-th part of experts.

    A token is sent for each of its experts, or ``once`` to each rank that has any of them.

    Example:
        >>> [rows_to_ranks(torch.tensor([[0, 1], [1, 2]]), experts=4, ranks=2, once=once) for once in (False, True)]
        [[3, 1], [2, 1]]
    """
    rank_TK = ids_TK // (experts // ranks)
    copies_TP = torch.zeros((ids_TK.shape[0], ranks), dtype=torch.int64, device=ids_TK.device)
    copies_TP.scatter_add_(1, rank_TK, torch.ones_like(rank_TK))
    rows_P: list[int] = (copies_TP.clamp(max=1) if once else copies_TP).sum(dim=0).tolist()
    return rows_P


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


@dataclass(kw_only=True)
class World:
    """This process among the ranks."""

    device: torch.device
    group: dist.ProcessGroup

    def __post_init__(self) -> None:
        self.rank, self.ranks = self.group.rank(), self.group.size()

    def everywhere(self, mine: Any) -> list[Any]:
        """A value of every rank."""
        values: list[Any] = [None] * self.ranks
        # Plain data alone: the network does not ask who connects, and a pickle could run anything.
        dist.all_gather_object(values, mine, group=self.group, weights_only=True)
        return values

    def meet(self) -> None:
        """Wait for the other ranks: on a GPU the streams do, and not the hosts."""
        if self.device.type == "cuda":
            dist.all_reduce(torch.zeros(1, device=self.device), group=self.group)
        else:
            dist.barrier(group=self.group)

    def leave(self) -> None:
        """Close the buffers and end the process group. All ranks call it together."""
        close_exchanges()
        dist.barrier(group=self.group)
        dist.destroy_process_group()


def open_world(device: str, **how: Any) -> World:
    """Join the process group, by torchrun's variables or as ``init_process_group`` is told."""
    here = torch.device(device)
    if device == "cuda":
        here = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(here)
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # some small kernels need no pool of processes
        how["device_id"] = here
    else:
        torch.set_num_threads(1)  # both ranks share the processor
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=timedelta(seconds=TIMEOUT_S), **how)
    assert dist.group.WORLD is not None
    # What is not compiled sends by ``spmd_types`` in TorchTitan's other backend, which needs the mesh of a model.
    set_spmd_backend("partial_dtensor")
    return World(device=here, group=dist.group.WORLD)


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


class Layer:
    """An arm's dispatcher, this rank's tokens, and the four operations of one layer.

    The autograd graph is cut where the experts would stand, at the rows and at the scores, so that the gradients of
    combine and of dispatch are two operations.
    """

    def __init__(
        self,
        arm: ExchangeArm,
        size: Size,
        routing: str,
        world: World,
        *,
        kernels: Kernels = "native",
        compiled: bool = False,
    ) -> None:
        self.arm, self.size, self.routing = arm, size, routing
        random: dict[str, Any] = {
            "generator": torch.Generator(device=world.device).manual_seed(world.rank),
            "device": world.device,
        }
        self.ids_TK = choose_experts(routing, size, rank=world.rank, device=world.device)
        self.x_TD = torch.randn((size.tokens, size.hidden), **random).bfloat16().requires_grad_()
        scores_TK = torch.rand((size.tokens, size.top_k), **random) + 0.1
        self.scores_TK = (scores_TK / scores_TK.sum(dim=-1, keepdim=True)).requires_grad_()
        self._counts_E = torch.bincount(self.ids_TK.flatten(), minlength=size.experts)  # the router has them
        layer: dict[str, Any] = {"num_experts": size.experts, "top_k": size.top_k}
        config: Any = AllToAllTokenDispatcher.Config(**layer)
        if arm.backend == "deepep":
            layer |= {"hidden_dim": size.hidden, "num_max_tokens_per_rank": size.tokens, "alignment": ALIGNMENT}
            config = PaddedDispatcher.Config(**layer, kernels=kernels, num_sms=arm.sms, precision=arm.precision)
        self.experts_apply_scores = arm.backend == "deepep"  # TorchTitan multiplies by them at home, in combine
        self._name_of_scores = "scores_R" if self.experts_apply_scores else "topk_scores_experts_sorted_N"
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

    @property
    def sms(self) -> int | None:
        """Multiprocessors that move tokens; None where the library does not say."""
        return exchange(self.dispatcher.group).num_sms if self.arm.backend == "deepep" else None

    @property
    def scores(self) -> torch.Tensor:
        """The scores that came with the rows, or wait at home for combine: one for each row there, ``(R,)``."""
        scores: torch.Tensor = getattr(self.state, self._name_of_scores)
        return scores

    def rows_RD(self) -> torch.Tensor:
        """Rows at the experts in BF16, expanded where they came in 8 bits; padding is zero."""
        if isinstance(self._rows, QuantisedRows):
            assert self.arm.precision != "bf16"
            return expand(self._rows.data_RD, self._rows.scales_RS, self.arm.precision)
        return self._rows.detach()

    def dispatch(self) -> None:
        """Send the tokens to their experts."""
        # The state is the dispatcher's own metadata, of another type for each.
        self._rows, self.counts_e, self.state = self._dispatch(self.x_TD, self.scores_TK, self.ids_TK, self._counts_E)

    def combine(self, outputs_RD: torch.Tensor) -> None:
        """Return the experts' outputs and add those of each token."""
        self._cut = outputs_RD.detach().requires_grad_(), self.scores.detach().requires_grad_()
        state = replace(self.state, **{self._name_of_scores: self._cut[1]})
        self.out_TD: torch.Tensor = self._combine(self._cut[0], state, self.x_TD.detach())

    def combine_backward(self, grad_TD: torch.Tensor) -> None:
        """Gradients of the experts' outputs ``(R, D)``, and of the scores where combine applied them, else zeros."""
        self.gradients = torch.autograd.grad(self.out_TD, self._cut, grad_TD, materialize_grads=True)

    def dispatch_backward(self, grad_RD: torch.Tensor, grad_scores: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Gradients of the tokens ``(T, D)`` and of their scores ``(T, K)``."""
        rows_RD = self._rows.place_RD if isinstance(self._rows, QuantisedRows) else self._rows
        return torch.autograd.grad((rows_RD, self.scores), (self.x_TD, self.scores_TK), (grad_RD, grad_scores))

    def turn(self) -> Iterator[tuple[str, Callable[[], object]]]:
        """The operations to time, in their order, each with its name; call each before the next is taken."""
        self.dispatcher.init_buffer()  # the buffer is shared: its SM count becomes this arm's
        yield "dispatch", self.dispatch
        if self.arm.precision != "bf16":  # after the dispatch, 8-bit arms do what the BF16 arm does
            return
        # Experts and their gradients would come between: what arrived stands for what they make of it.
        yield "combine", partial(self.combine, self.rows_RD())
        yield "combine_backward", partial(self.combine_backward, self.x_TD.detach().flip(0))
        yield "dispatch_backward", partial(self.dispatch_backward, *self.gradients)


def round_trip(layer: Layer, world: World) -> float:
    """The largest relative error of a forward and backward through experts that each multiply by their own number.

    All ranks call it together; if it is more than rounding on one, :class:`RoundTripFailed` is raised on all.
    """
    x_TD, scores_TK = layer.x_TD.detach(), layer.scores_TK.detach()
    grad_TD = x_TD.flip(0)
    factor_E = 1 + torch.arange(layer.size.experts, device=world.device) / layer.size.experts
    layer.dispatch()
    rows_RD = layer.rows_RD()
    # A factor for each expert, so that a row at the wrong one shows.
    local_e = factor_E.view(world.ranks, -1)[world.rank]
    factor_R1 = local_e.repeat_interleave(layer.counts_e.to(world.device)).unsqueeze(-1)
    weight_R1 = factor_R1 * layer.scores.detach().unsqueeze(-1) if layer.experts_apply_scores else factor_R1
    layer.combine((rows_RD.float() * weight_R1).bfloat16())
    layer.combine_backward(grad_TD)
    grad_RD, grad_scores = layer.gradients
    if layer.experts_apply_scores:
        grad_scores = (grad_RD.float() * rows_RD.float() * factor_R1).sum(dim=-1)
    x_grad_TD, scores_grad_TK = layer.dispatch_backward((grad_RD.float() * weight_R1).bfloat16(), grad_scores)
    factor_TK = factor_E[layer.ids_TK]
    expected_T1 = (scores_TK * factor_TK).sum(dim=-1, keepdim=True)
    pairs = (
        (layer.out_TD.detach(), x_TD * expected_T1),
        (x_grad_TD, grad_TD * expected_T1),
        (scores_grad_TK, factor_TK * (x_TD.float() * grad_TD.float()).sum(dim=-1, keepdim=True)),
    )
    mine = [float((result.float() - expected).norm() / expected.norm()) for result, expected in pairs]
    errors = [error for of_rank in world.everywhere(mine) for error in of_rank]
    allowed = TOLERANCE[layer.arm.precision]
    if not all(error < allowed for error in errors):  # NaN is wrong, too
        told = ", ".join(f"{error:.3g}" for error in errors)
        raise RoundTripFailed(f"{layer.arm.name} does not bring tokens home: relative errors {told}, allowed {allowed}")
    return max(errors)


# Time


def ready_layers(size: Size, routing: str, arms: Sequence[ExchangeArm], world: World, **how: Any) -> list[Layer]:
    """The arms' layers, each checked by a round trip, with room in the buffers for this size alone, as in training."""
    close_exchanges()
    layers = []
    for arm in arms:
        layers.append(Layer(arm, size, routing, world, **how))
        round_trip(layers[-1], world)
    return layers


def time_layers(layers: Sequence[Layer], world: World, *, repeats: int = REPEATS) -> list[dict[str, Any]]:
    """Time the operations of layers that take turns; the rows of the file, the same on all ranks."""
    times_us: dict[tuple[str, str], list[float]] = {}
    sms = {}
    clock = Marks(world.device)
    for turn in range(WARM_UP + repeats):
        for layer in layers:
            for operation, call in layer.turn():
                clock.start(world.meet)
                call()
                clock.mark(operation)
                if turn >= WARM_UP:
                    times_us.setdefault((layer.arm.name, operation), []).append(clock.parts_us()[operation])
            sms[layer.arm.name] = layer.sms
    times_of_ranks = world.everywhere(times_us)
    rows = []
    for layer in layers:
        arm, size, deepep = layer.arm, layer.size, layer.arm.backend == "deepep"
        sent_PP = world.everywhere(rows_to_ranks(layer.ids_TK, experts=size.experts, ranks=world.ranks, once=deepep))
        for operation in (name for of_arm, name in times_us if of_arm == arm.name):
            # An operation takes as long as on its slowest rank, which is another one in each turn.
            turns = zip(*(times[arm.name, operation] for times in times_of_ranks), strict=True)
            median_us, iqr_us = median_and_iqr([max(turn_us) for turn_us in turns])
            precision = arm.precision if operation == "dispatch" else "bf16"
            row = {
                "size": size.name,
                "hidden": size.hidden,
                "top_k": size.top_k,
                "experts": size.experts,
                "tokens": size.tokens,
                "ranks": world.ranks,
                "routing": layer.routing,
                "arm": arm.name,
                "backend": arm.backend,
                "precision": arm.precision,
                "layout": "expanded" if deepep else "dense",
                "sms": sms[arm.name],
                "sms_chosen_by": "caller" if arm.sms else "library",
                "operation": operation,
                "us_median": round(median_us, 2),
                "us_iqr": round(iqr_us, 2),
                "repeats": repeats,
            }
            rows.append(row | traffic(sent_PP, hidden=size.hidden, precision=precision))
    return rows


def new_report(world: World, *, deepep: str, compiled: bool) -> dict[str, Any]:
    """What the file says beside its ``rows``; ``deepep`` is the library's version, or why it is not there."""
    here = environment()
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if world.device.type == "cuda" else None
    return {
        "label": "measured",
        "what": "dispatch and combine, forward and backward, of each way to move tokens between expert-parallel ranks",
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "device": "GPUs over NCCL" if nccl else "CPU processes over gloo: a test of the method, no measure of a GPU",
        "compiled": compiled,
        "environment": {name: here[name] for name in ("moelab", "python", "packages", "processor", "cores", "gpus")},
        "libraries": {"nccl_loaded": nccl, "deepep": deepep},
        "ranks": world.ranks,
        "rows": [],
    }


def main() -> None:
    """Measure what this machine has."""
    parser = argparse.ArgumentParser(description="Time dispatch and combine of every way to move tokens.")
    parser.add_argument("--output", type=Path, required=True, help="JSON file")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options = parser.parse_args()
    on_gpus = options.device == "cuda"
    world = open_world(options.device)
    has_deepep, version = find_deepep(options.device)
    report = new_report(world, deepep=version, compiled=on_gpus)
    for size in SIZES if on_gpus else [SMALL]:
        for routing in ROUTINGS:
            if world.rank == 0:
                print(f"{size.name}, {routing}", file=sys.stderr, flush=True)  # noqa: T201
            arms = (STANDARD, *DEEPEP) if has_deepep else (STANDARD,)
            report["rows"] += time_layers(ready_layers(size, routing, arms, world, compiled=on_gpus), world)
    if world.rank == 0:
        write_json(options.output, report)
    world.leave()


if __name__ == "__main__":
    main()
