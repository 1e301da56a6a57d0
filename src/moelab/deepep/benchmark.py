"""The all-to-all experiment: the trainer's own dispatchers, timed one operation at a time.

An arm is a token dispatcher as a training run builds it: ``standard`` is TorchTitan's, ``deepep`` is moelab's
(:mod:`moelab.deepep.dispatcher`) on the buffer and with the SM count of training (:mod:`moelab.deepep.buffer`).
Dispatch and combine are called, compiled as TorchTitan compiles a layer, and autograd runs their gradients, as in a
step. Experts, and the scores that moelab's experts apply, are left out.

The whole of an operation is timed in turns of their own. In every second turn its parts are watched, too:

``wire``
    NCCL's or gloo's all-to-all; of DeepEP all but the quantisation, because its kernels write the rows in order.
``counts``
    the exchange of counts and their read-back by the host, which the standard all-to-all needs before its sizes are
    known. Compiled code may gather the rows meanwhile, which then counts here and not as ``permute``.
``permute``
    gathers, scatters, scores, in PyTorch.
``quantise``
    BF16 to 8 bits with scales.

``benchmarks/all_to_all.py`` starts this module under torchrun. The file is replaced after each group of arms, so that a
run that is cut off keeps what it measured. An arm that fails is left out on all ranks and its error becomes its row.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from moelab.deepep import ops
from moelab.deepep.benchmark_cases import (
    NODE_SIZE,
    ROUTINGS,
    SIZES,
    SM_COUNTS,
    SMALL,
    ArmGroup,
    Backend,
    ExchangeArm,
    Operation,
    Size,
    choose_experts,
    plan,
    rows_to_ranks,
    traffic,
)
from moelab.deepep.buffer import EPKernels, close_exchanges, exchange
from moelab.deepep.dispatcher import PaddedDispatcher
from moelab.errors import MoelabError
from moelab.files import write_json
from moelab.machine import environment
from moelab.micro.clock import Marks, interquartile_range
from moelab.mxfp8.quantise import expand
from moelab.mxfp8.quantised_experts import QuantisedRows

# Shape suffixes: T tokens of this rank, K experts a token, R rows received (a copy for each local expert), D hidden,
# E experts, e local experts, P ranks.

FORMAT = 4
"""A file of another format is overwritten."""
ALIGNMENT = 128
"""Rows of an expert are padded to this multiple by moelab's dispatcher; the largest that MXFP8 kernels ask for."""
COLLECTIVE_TIMEOUT_S, CONTROL_TIMEOUT_S = 150, 300  # a collective that hangs ends first, and ranks agree on its error
WARM_UP = 2
COPY_BYTES, COPY_REPEATS = 512 << 20, 8
TOLERANCE = {"bf16": 0.02, "fp8": 0.06, "mxfp8": 0.06}
"""Relative error (2-norm) of a round trip that is still rounding: BF16 has 8 bits, E4M3 has 4, and both add up."""
EXCHANGE = torch.ops._c10d_functional.all_to_all_single.default
Result = TypeVar("Result")


class ArmFailed(MoelabError):
    """An arm does not run here, or does not move tokens right."""


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
        dist.all_gather_object(values, mine, group=self.control)
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


class Watch(TorchDispatchMode):
    """Marks a clock around every operator that communicates, in compiled code and in gradients, too."""

    def __init__(self, clock: Marks, arm: ExchangeArm) -> None:
        super().__init__()
        self.clock = clock
        self.around = "permute" if arm.backend == "standard" else "wire"
        self.part = self.around if arm.precision == "bf16" else "quantise"

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code stays compiled under this mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator; end the part before it and its own if it communicates."""
        if func is not EXCHANGE and func.namespace != ops.NAMESPACE:
            return func(*args, **(kwargs or {}))
        self.clock.mark(self.part)
        result = func(*args, **(kwargs or {}))
        counts = func is EXCHANGE and not args[0].is_floating_point()
        if func is EXCHANGE:
            result = torch.ops._c10d_functional.wait_tensor(result)  # it has only been queued
        self.clock.mark("counts" if counts else "wire")
        self.part = "counts" if counts else self.around  # until the sizes are known on the host
        return result


def take_turns(
    layers: Sequence[Layer], world: World, repeats: int
) -> dict[tuple[str, str], tuple[list[float], list[dict[str, float]]]]:
    """Time the operations of every arm, arm after arm in each turn.

    Returns:
        By arm and operation: microseconds of the whole in each turn, and of the parts in as many turns that are
        watched.
    """
    times: dict[tuple[str, str], tuple[list[float], list[dict[str, float]]]] = {}
    clock = Marks(world.device)

    def timed(layer: Layer, operation: Operation, watched: bool, *inputs: torch.Tensor) -> Any:
        watch = Watch(clock, layer.arm)
        clock.start(world.meet)
        with watch if watched else nullcontext():
            result = getattr(layer, operation)(*inputs)
        clock.mark(watch.part)
        whole, parts = times.setdefault((layer.arm.name, operation), ([], []))
        if watched:
            parts.append(clock.parts_us())
        else:
            whole.append(clock.total_us())
        return result

    for _ in range(WARM_UP + repeats):
        for watched in (False, True):
            for layer in layers:
                layer.dispatcher.init_buffer()  # the buffer is shared: its SM count becomes this arm's
                timed(layer, "dispatch", watched)
                if layer.arm.operations == ("dispatch",):
                    continue
                # Experts and their gradients would come between: what arrived stands for what they make of it.
                timed(layer, "combine", watched, layer.rows_RD())
                gradients = timed(layer, "combine_backward", watched, layer.tokens.x_TD.flip(0))
                timed(layer, "dispatch_backward", watched, *gradients)
    return {name: (whole[WARM_UP:], parts[WARM_UP:]) for name, (whole, parts) in times.items()}


def measure_copies(world: World) -> dict[str, Any]:
    """Bandwidth of a plain copy from each rank to the next while all others do the same.

    Returns:
        ``between_ranks_gb_s``, GB/s of bytes that are copied (each is read once and written once), the median of the
        slowest rank; ``how`` in words; ``bytes`` and ``repeats``.
    """
    group, rank, ranks = world.group, world.rank, world.ranks
    nbytes = COPY_BYTES if world.device.type == "cuda" else COPY_BYTES >> 6
    source = torch.ones(nbytes, dtype=torch.uint8, device=world.device)
    target = torch.empty_like(source)

    def exchange_with_neighbours() -> None:
        send = dist.P2POp(dist.isend, source, group=group, group_peer=(rank + 1) % ranks)
        receive = dist.P2POp(dist.irecv, target, group=group, group_peer=(rank - 1) % ranks)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()

    copy: Callable[[], object] = exchange_with_neighbours
    how = "send to the next rank, receive from the one before, all ranks at once"
    if world.device.type == "cuda" and torch.cuda.device_count() >= ranks:
        other = torch.device("cuda", (torch.cuda.current_device() + 1) % torch.cuda.device_count())
        if torch.cuda.can_device_access_peer(world.device, other):  # the copy engines need no NCCL
            there = torch.empty(source.shape, dtype=source.dtype, device=other)
            copy, how = lambda: there.copy_(source, non_blocking=True), "peer copies, all GPUs at once"
    clock, times_us = Marks(world.device), []
    for _ in range(COPY_REPEATS + WARM_UP):
        clock.start(world.meet)
        copy()
        clock.mark("copy")
        times_us.append(clock.total_us())
    slowest_us = max(world.everywhere(statistics.median(times_us[WARM_UP:])))
    gb_s = round(nbytes / slowest_us / 1e3, 3)
    return {"between_ranks_gb_s": gb_s, "bytes": nbytes, "repeats": COPY_REPEATS, "how": how}


def time_group(
    group: ArmGroup,
    world: World,
    *,
    kernels: EPKernels,
    compiled: bool,
    repeats: int,
    until: float,
) -> list[dict[str, Any]]:
    """Check and time the arms of a group; all ranks call it together and get the same rows of the file.

    No further arm is prepared when ``time.monotonic()`` is past ``until``.
    """
    size, tokens = group.size, make_tokens(group.size, group.routing, world)
    sent = world.everywhere(rows_to_ranks(tokens.ids_TK, experts=size.experts, ranks=world.ranks))
    shared = {
        "group": group.name,
        "size": size.name,
        **{name: value for name, value in asdict(size).items() if name != "name"},
        "ranks": world.ranks,
        "routing": group.routing,
    }
    layers: list[tuple[Layer, list[list[int]], dict[str, Any]]] = []
    rows: list[dict[str, Any]] = []
    for arm in group.arms:
        columns = shared | {"arm": arm.name, "backend": arm.backend, "precision": arm.precision, "layout": arm.layout}
        sent_PP = [one["copies" if arm.backend == "standard" else "once"] for one in sent]
        began = time.monotonic()
        try:
            if any(world.everywhere(began > until)):
                raise ArmFailed("not run: the time was over")
            layer = world.together(
                lambda arm=arm: Layer(arm, size, tokens, world, kernels=kernels, compiled=compiled)  # type: ignore[misc]
            )
            error, allowed = max(world.everywhere(round_trip(layer, size, world))), TOLERANCE[arm.precision]
            if not error < allowed:  # NaN is wrong, too
                raise ArmFailed(f"the round trip is wrong: relative error {error:.3g}, allowed {allowed}")
            received, expected = layer.received(), [row[world.rank] for row in sent_PP]
            if not all(world.everywhere(received == expected)):
                raise ArmFailed(f"rows from each rank: {received} by the library, {expected} by the routing")
        except ArmFailed as failure:
            rows.append({**columns, "error": str(failure)})
            world.say(f"  {arm.name}: {failure}")
            continue
        world.say(f"  {arm.name}: ready after {time.monotonic() - began:.1f} s")
        chosen = {"sms": layer.sms, "sms_chosen_by": "caller" if arm.sms else "library"}
        layers.append((layer, sent_PP, columns | chosen))
    times = take_turns([layer for layer, *_ in layers], world, repeats)
    for layer, sent_PP, columns in layers:
        for operation in layer.arm.operations:
            by_rank = world.everywhere(times[layer.arm.name, operation])
            # An operation takes as long as on its slowest rank, which is another one in each turn.
            whole_us = [max(turn) for turn in zip(*(whole for whole, _ in by_rank), strict=True)]
            turns = zip(*(parts for _, parts in by_rank), strict=True)
            slowest = [max(turn, key=lambda one: sum(one.values())) for turn in turns]
            names = dict.fromkeys(name for one in slowest for name in one)
            precision = layer.arm.precision if operation == "dispatch" else "bf16"
            moved = traffic(sent_PP, hidden=size.hidden, precision=precision)
            parts_us = {name: round(statistics.median(one[name] for one in slowest), 2) for name in names}
            wire_us = parts_us["wire"] if moved["physical_bytes"] else 0.0  # round-robin may stay on its own rank
            row = {
                **columns,
                "operation": operation,
                "us_median": round(statistics.median(whole_us), 2),
                "us_iqr": round(interquartile_range(whole_us), 2),
                "parts_us": parts_us,
                "repeats": repeats,
                **moved,
                "error": None,
                "physical_gb_s": round(moved["physical_bytes"] / wire_us / 1e3, 3) if wire_us else None,
            }
            rows.append(row)
    return rows


# The file


def run(
    groups: Sequence[ArmGroup],
    world: World,
    output: Path,
    *,
    libraries: dict[str, str],
    kernels: EPKernels = "native",
    compiled: bool = False,
    repeats: int,
    budget_s: float,
    began: float,
) -> None:
    """Time every group that the file does not have yet, in their order, and write it after each from the first rank.

    No arm is prepared when more than ``budget_s`` have passed since ``began``, by ``time.monotonic()``.
    """
    # The first rank's, which alone reads the file; together, or the others would wait for one that cannot.
    mine = world.together(lambda: _content(world, libraries, compiled, output))
    report: dict[str, Any] = world.everywhere(mine)[0]
    report["copies"] = report["copies"] or measure_copies(world)
    world.say(f"copies: {report['copies']}")
    size = None
    for group in groups:
        if group.name in report["complete"]:
            world.say(f"{group.name}: already measured")
            continue
        if any(world.everywhere(time.monotonic() - began > budget_s)):
            world.say(f"{group.name}: left for the next run, the time budget is used up")
            continue
        if group.size != size:
            close_exchanges()  # a training run's buffer is made for one size
            size = group.size
        world.say(f"{group.name} ({time.monotonic() - began:.0f} s)")
        settings: Any = {"kernels": kernels, "compiled": compiled, "repeats": repeats, "until": began + budget_s}
        rows = time_group(group, world, **settings)
        report["rows"] = [row for row in report["rows"] if row["group"] != group.name] + rows
        if not any(row["error"] for row in rows):
            report["complete"].append(group.name)
        report["turns"][group.name] = [arm.name for arm in group.arms]
        report["seconds"] = round(time.monotonic() - began, 1)
        if world.rank == 0:
            write_json(output, report)
    close_exchanges()


def _content(world: World, libraries: dict[str, str], compiled: bool, output: Path) -> dict[str, Any]:
    """The file's frame, or the file itself where it is of the same machine and libraries."""
    here = environment()
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if world.device.type == "cuda" else None
    frame: dict[str, Any] = {
        "format": FORMAT,
        "label": "measured",
        "what": "dispatch and combine, forward and backward, of each way to move tokens between expert-parallel ranks",
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "device": "GPUs over NCCL" if nccl else "CPU processes over gloo: a test of the method, no measure of a GPU",
        "compiled": compiled,
        "environment": {name: here[name] for name in ("moelab", "python", "packages", "processor", "cores", "gpus")},
        "libraries": {"nccl_loaded": nccl, **libraries},
        "ranks": world.ranks,
        "units": "us: microseconds of the slowest rank; gb_s: 1e9 bytes a second; bytes: payload of one rank",
        "copies": None,
        "complete": [],
        "turns": {},
        "rows": [],
    }
    if world.rank == 0 and output.exists():
        old: dict[str, Any] = json.loads(output.read_text())
        same = ("format", "environment", "libraries", "ranks", "device", "compiled")
        if all(old.get(key) == frame[key] for key in same):
            return old
    return frame


# The program


def main() -> None:
    """Measure what the options name."""
    parser = argparse.ArgumentParser(description="Time dispatch and combine of every way to move tokens.")
    parser.add_argument("--output", type=Path, required=True, help="JSON file, updated after each group of arms")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    names = [size.name for size in (*SIZES, SMALL, NODE_SIZE)]
    parser.add_argument("--sizes", nargs="*", choices=names, help="default: all on GPUs, small on a CPU")
    parser.add_argument("--routings", nargs="*", choices=ROUTINGS, default=list(ROUTINGS))
    of_backends = "default: what is installed; on a CPU, deepep is a stand-in"
    parser.add_argument("--backends", nargs="*", choices=get_args(Backend), help=of_backends)
    parser.add_argument("--sms", nargs="*", type=int, default=list(SM_COUNTS), help="SM counts to give DeepEP")
    parser.add_argument("--eager", action="store_true", help="do not compile (never done on a CPU)")
    parser.add_argument("--repeats", type=int, default=10, help="timed turns of each arm")
    parser.add_argument("--budget-s", type=float, default=110, help="start no further arm after this many seconds")
    options = parser.parse_args()
    began, on_gpus = time.monotonic(), options.device == "cuda"
    world = open_world(options.device)
    has_deepep, version = find_deepep(options.device)
    kernels: EPKernels = "native"
    if not on_gpus and "deepep" in (options.backends or ()):
        has_deepep, kernels = True, "emulated"
        version = "moelab's stand-in on collectives: no measure of DeepEP"
    world.say(f"DeepEP: {version}")
    here: tuple[Backend, ...] = ("standard", "deepep") if has_deepep else ("standard",)
    sizes = [size for size in (*SIZES, SMALL, NODE_SIZE) if size.name in (options.sizes or ())]
    sizes = sizes or (list(SIZES) if on_gpus else [SMALL])
    chosen = [backend for backend in here if options.backends is None or backend in options.backends]
    run(
        plan(sizes, options.routings, chosen, options.sms),
        world,
        options.output,
        libraries={"deepep": version},
        kernels=kernels,
        compiled=on_gpus and not options.eager,
        repeats=options.repeats,
        budget_s=options.budget_s,
        began=began,
    )
    world.leave()


if __name__ == "__main__":
    main()
