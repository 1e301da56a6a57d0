"""Expert-parallel ranks as gloo processes, which answer what a test asks of all of them at once.

The reference of every comparison is the same mixture of experts in float64, computed by each rank for its own tokens
with the weights of all experts. Shape suffixes: T tokens, K experts of a token, E experts, e local experts, R rows,
D features, F hidden features.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from operator_counts import communication, counted_operators
from titan_process import _CONTEXT
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, DeepEPTokenDispatcher

from moelab.deepep import ops
from moelab.deepep.buffer import exchange, open_exchange
from moelab.deepep.checkpoint import CommunicationSavingAC, CommunicationSavingFullAC
from moelab.deepep.dispatcher import padded
from moelab.experts import draw_experts
from moelab.model import DispatchPrecision
from moelab.mxfp8.converter import MXFP8Experts
from moelab.mxfp8.dispatch import quantised

TOKENS, FEATURES, HIDDEN = 48, 128, 64
WEIGHTS = ("w1_EFD", "w2_EDF", "w3_EFD")
Wgrad = Literal["mxfp8", "bf16"]
Result = dict[str, torch.Tensor]
"""``output`` and gradients, of ``x``, ``scores`` and the weights, of a layer on one rank."""


class Ranks:
    """Processes of one expert-parallel group."""

    def __init__(self, world: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.ends: list[Connection] = []
        self.processes = []
        for rank in range(world):
            ours, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(target=_serve, args=(theirs, rank, world, f"{self.folder.name}/store"))
            process.start()
            theirs.close()
            self.ends.append(ours)
            self.processes.append(process)

    def ask(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What ``function(mesh, *arguments)`` returns on every rank; an exception of any is raised."""
        for end in self.ends:
            end.send((function, arguments))
        answers = [end.recv() for end in self.ends]
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def close(self) -> None:
        """End the processes."""
        for end in self.ends:
            end.close()
        for process in self.processes:
            process.join()
        self.folder.cleanup()


def _serve(end: Connection, rank: int, world: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=120)
    )
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    set_spmd_backend("partial_dtensor")
    while True:
        try:
            function, arguments = end.recv()
        except EOFError:
            dist.destroy_process_group()
            return
        try:
            end.send(function(mesh, *arguments))
        except Exception as error:  # the test is told
            end.send(error if type(error).__module__.startswith("moelab") else RuntimeError(repr(error)))


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layer and its routing.

    ``routing`` is ``scores`` (the top-k of random scores), ``round_robin``, ``random``, ``one rank`` (every token to
    the first experts of the first rank) or ``one token`` (that, but for one token of each rank).
    """

    routing: str = "scores"
    experts: int = 8
    top_k: int = 2
    alignment: int = 8
    seed: int = 0
    host_sync: bool = True


def choose(case: Case, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts of each token and their scores: int64 and float32 ``(T, K)``."""
    generator = torch.Generator().manual_seed(100 * case.seed + rank)
    probabilities = torch.softmax(torch.randn((TOKENS, case.experts), generator=generator), dim=1)
    if case.routing == "scores":
        ids_TK = probabilities.topk(case.top_k, dim=1).indices
    elif case.routing == "round_robin":
        ids_TK = (torch.arange(TOKENS * case.top_k) % case.experts).view(TOKENS, case.top_k)
    elif case.routing == "random":
        torch.manual_seed(case.seed)
        ids_TK = draw_experts(TOKENS, case.experts, case.top_k, rank=rank, device=torch.device("cpu"))
    else:
        ids_TK = torch.arange(case.top_k).repeat(TOKENS, 1)
        if case.routing == "one token":
            ids_TK[7] += case.experts - case.top_k
    return ids_TK, probabilities.gather(1, ids_TK)


def all_weights(case: Case) -> list[torch.Tensor]:
    """w1, w2 and w3 of all experts in float32, the same on every rank."""
    generator = torch.Generator().manual_seed(case.seed)
    shapes = ((HIDDEN, FEATURES), (FEATURES, HIDDEN), (HIDDEN, FEATURES))
    return [0.1 * torch.randn((case.experts, *shape), generator=generator) for shape in shapes]


def local_weights(mesh: DeviceMesh, case: Case) -> list[torch.Tensor]:
    """w1, w2 and w3 of this rank's experts."""
    return [weight.chunk(mesh.size())[mesh.get_local_rank()].clone() for weight in all_weights(case)]


def tokens_of(case: Case, rank: int) -> torch.Tensor:
    """BF16 ``(T, D)``."""
    return torch.randn(
        (TOKENS, FEATURES), generator=torch.Generator().manual_seed(1 + 10 * case.seed + rank)
    ).bfloat16()


def build(
    mesh: DeviceMesh,
    case: Case,
    *,
    ours: bool,
    mxfp8: bool = False,
    precision: DispatchPrecision = "bf16",
    wgrad: Wgrad = "bf16",
) -> RoutedExperts:
    """TorchTitan's routed experts with its standard dispatcher, or with ours on the stand-in."""
    sizes: dict[str, int] = {"num_experts": case.experts, "top_k": case.top_k}
    shape: dict[str, int] = {"dim": FEATURES, "hidden_dim": HIDDEN, "num_experts": case.experts}
    experts = MXFP8Experts.Config(**shape, kernels="emulated", wgrad=wgrad) if mxfp8 else GroupedExperts.Config(**shape)
    if ours:
        theirs = DeepEPTokenDispatcher.Config(**sizes, hidden_dim=FEATURES, num_max_tokens_per_rank=TOKENS)
        config = padded(
            RoutedExperts.Config(inner_experts=experts, token_dispatcher=theirs),
            alignment=case.alignment,
            kernels="emulated",
            precision=precision,
            host_sync=case.host_sync,
        )
    else:
        config = RoutedExperts.Config(inner_experts=experts, token_dispatcher=AllToAllTokenDispatcher.Config(**sizes))
        config = config if precision == "bf16" else quantised(config)
    module: RoutedExperts = config.build()
    for name, weight in zip(WEIGHTS, local_weights(mesh, case), strict=True):
        setattr(module.inner_experts, name, torch.nn.Parameter(weight))
    module.token_dispatcher.wire_meshes(ep_mesh=mesh)
    return module


def train(mesh: DeviceMesh, case: Case, module: torch.nn.Module, experts: torch.nn.Module | None = None) -> Result:
    """Output and gradients of a layer; the loss weights every feature differently."""
    rank = mesh.get_local_rank()
    ids_TK, scores_TK = choose(case, rank)
    x_TD = tokens_of(case, rank).requires_grad_()
    scores_TK.requires_grad_()
    counts_E = torch.bincount(ids_TK.flatten(), minlength=case.experts)
    rows = (1, TOKENS, -1)
    y_BLD = module(x_TD.view(rows), scores_TK.view(rows), ids_TK.view(rows), counts_E)
    (y_BLD.float() * loss_weights()).sum().backward()
    parameters = list((experts or module.inner_experts).parameters())
    grads = [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]
    for parameter in parameters:
        parameter.grad = None
    return _result(y_BLD.detach().view(TOKENS, FEATURES), x_TD.grad, scores_TK.grad, grads)


def _result(output: torch.Tensor, x: Any, scores: Any, weights: list[torch.Tensor]) -> Result:
    return {"output": output, "x": x, "scores": scores, **dict(zip(WEIGHTS, weights, strict=True))}


def loss_weights() -> torch.Tensor:
    """Gradient of the loss with respect to every token's output, ``(D,)``."""
    return torch.linspace(-1, 1, FEATURES)


def reference(mesh: DeviceMesh, case: Case) -> Result:
    """The same in float64, without a dispatcher."""
    rank, local = mesh.get_local_rank(), case.experts // mesh.size()
    ids_TK, scores_TK = choose(case, rank)
    x_TD, scores_TK = tokens_of(case, rank).double().requires_grad_(), scores_TK.double().requires_grad_()
    weights = [weight.bfloat16().double().requires_grad_() for weight in all_weights(case)]
    w1_TKFD, w2_TKDF, w3_TKFD = (weight[ids_TK] for weight in weights)
    h_TKF = F.silu(torch.einsum("td,tkfd->tkf", x_TD, w1_TKFD)) * torch.einsum("td,tkfd->tkf", x_TD, w3_TKFD)
    y_TD = torch.einsum("tkf,tkdf,tk->td", h_TKF, w2_TKDF, scores_TK)
    (y_TD * loss_weights()).sum().backward()
    grads = []
    for weight in weights:
        assert weight.grad is not None
        dist.all_reduce(weight.grad)
        grads.append(weight.grad[rank * local : (rank + 1) * local])
    return _result(y_TD.detach(), x_TD.grad, scores_TK.grad, grads)


def errors(found: Result, expected: Result) -> dict[str, float]:
    """Relative error of each tensor in the Frobenius norm; absolute where the expected one is zero."""
    wide = {name: (one.double(), expected[name].double()) for name, one in found.items()}
    return {name: float((a - b).norm() / (b.norm() or 1.0)) for name, (a, b) in wide.items()}


def against_both(mesh: DeviceMesh, case: Case) -> dict[str, dict[str, float]]:
    """Errors of both dispatchers against float64, and of ours against the standard one."""
    exact = reference(mesh, case)
    standard, ours = (train(mesh, case, build(mesh, case, ours=which)) for which in (False, True))
    return {
        "standard": errors(standard, exact),
        "ours": errors(ours, exact),
        "between": errors(ours, standard),
    }


def compiled_and_eager(
    mesh: DeviceMesh, case: Case, ours: bool, mxfp8: bool, precision: DispatchPrecision, wgrad: Wgrad
) -> dict[str, float]:
    """Errors of the layer compiled as one graph against itself."""
    module = build(mesh, case, ours=ours, mxfp8=mxfp8, precision=precision, wgrad=wgrad)
    eager = train(mesh, case, module)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        graph = torch.compile(module, fullgraph=True, backend="aot_eager")
        return errors(train(mesh, case, graph, module.inner_experts), eager)


def checkpointed(
    mesh: DeviceMesh, case: Case, checkpoint: str, ours: bool, precision: DispatchPrecision = "bf16"
) -> tuple[dict[str, int], dict[str, float]]:
    """Communication of a forward and a backward pass, and the errors against no checkpointing."""
    module = build(mesh, case, ours=ours, mxfp8=precision == "mxfp8", precision=precision)
    plain = train(mesh, case, module)
    wrapped = module if checkpoint == "none" else _checkpoint(module, checkpoint)
    with counted_operators(communication) as counted:
        found = train(mesh, case, wrapped, module.inner_experts)
    return dict(counted), errors(found, plain)


def _checkpoint(module: torch.nn.Module, kind: str) -> torch.nn.Module:
    policies = {"selective": CommunicationSavingAC, "full+dispatch": CommunicationSavingFullAC}
    if kind == "full":
        return checkpoint_wrapper(module, early_stop=False)
    return policies[kind](policies[kind].Config())._wrap_block(module)


Routed = list[list[list[int]]]
"""Experts of each token, by rank."""


def conserve(mesh: DeviceMesh, routed: Routed, experts: int, alignment: int) -> dict[str, Any]:
    """Dispatch numbered tokens, scale them by their scores, combine them; all sums are exact in BF16.

    Returns:
        Whether combine gave every token the ``sums`` of its scores times itself; the ``rows`` of each local expert;
        whether ``padding`` is zero, data and scores, and groups are ``aligned``; and the sorted numbers of each local
        expert's ``tokens``.
    """
    rank = mesh.get_local_rank()
    ids_TK = torch.tensor(routed[rank])
    tokens, top_k = ids_TK.shape
    group = _open(mesh, tokens=tokens, experts=experts, top_k=top_k)
    x_TD = torch.arange(tokens)[:, None].repeat(1, 8) % 16
    x_TD[:, 0] = 16 * rank + torch.arange(tokens)  # a number of its own, below 256
    scores_TK = 2.0 ** -(ids_TK % 2)
    sent = (x_TD.bfloat16(), None, None, scores_TK)
    rows_RD, _, _, scores_R, *handle = ops.dispatch(*sent, ids_TK, group, experts, alignment)
    counts_e = handle[ops.UNALIGNED].long()
    aligned_e = (counts_e + alignment - 1) // alignment * alignment
    starts_e = aligned_e.cumsum(0) - aligned_e
    real = torch.zeros(rows_RD.shape[0], dtype=torch.bool)
    numbers = []
    for start, count in zip(starts_e.tolist(), counts_e.tolist(), strict=True):
        real[start : start + count] = True
        numbers.append(sorted(rows_RD[start : start + count, 0].long().tolist()))
    y_TD = ops.combine(rows_RD * scores_R[:, None].bfloat16(), ids_TK, handle, group, experts, alignment)
    expected_TD = x_TD[:, 1:] * scores_TK.sum(dim=1, keepdim=True)
    return {
        "sums": torch.equal(y_TD[:, 1:].float(), expected_TD.float()),
        "rows": counts_e.tolist(),
        "padding": not bool(rows_RD[~real].any() or scores_R[~real].any()),
        "aligned": rows_RD.shape[0] == int(aligned_e.sum()),
        "tokens": numbers,
    }


def poison(mesh: DeviceMesh, case: Case) -> dict[str, bool]:
    """Whether the ways home read padding: combine, and the gradient of dispatch, of rows whose padding is NaN."""
    ids_TK, scores_TK = choose(case, mesh.get_local_rank())
    group = _open(mesh, tokens=TOKENS, experts=case.experts, top_k=case.top_k)
    settings = (group, case.experts, case.alignment)
    sent = (tokens_of(case, mesh.get_local_rank()), None, None, scores_TK)
    rows_RD, _, _, scores_R, *handle = ops.dispatch(*sent, ids_TK, *settings)
    empty_R = scores_R == 0
    assert empty_R.any(), "the case has no padding"
    bad_RD, bad_R = rows_RD.clone(), scores_R.clone()
    bad_RD[empty_R], bad_R[empty_R] = float("nan"), float("nan")
    clean = ops.combine(rows_RD, ids_TK, handle, *settings)
    dirty = ops.combine(bad_RD, ids_TK, handle, *settings)
    grads, bad_grads = (
        ops.collect(*pair, ids_TK, handle, *settings) for pair in ((rows_RD, scores_R), (bad_RD, bad_R))
    )
    sent_RD = ops.resend(clean, ids_TK, handle, *settings, rows_RD)
    return {
        "combine": torch.equal(clean, dirty),
        "collect": all(torch.equal(a, b) for a, b in zip(grads, bad_grads, strict=True)),
        "resend": not bool(sent_RD[empty_R].any()),
    }


def undefined_padding(mesh: DeviceMesh, case: Case) -> bool:
    """Whether the stand-in leaves padding undefined where it is not asked for zeros: the other tests rest on it."""
    ids_TK, _scores_TK = choose(case, mesh.get_local_rank())
    group = _open(mesh, tokens=TOKENS, experts=case.experts, top_k=case.top_k)
    rows_RD, *_ = exchange(group).buffer.dispatch(
        tokens_of(case, mesh.get_local_rank()),
        topk_idx=ids_TK,
        num_experts=case.experts,
        num_max_tokens_per_rank=TOKENS,
        expert_alignment=case.alignment,
        do_expand=True,
    )
    return bool(rows_RD.isnan().any())


def _open(mesh: DeviceMesh, *, tokens: int, experts: int, top_k: int) -> str:
    group = mesh.get_group()
    open_exchange(group, hidden=FEATURES, tokens=tokens, experts=experts, top_k=top_k, kernels="emulated")
    return group.group_name


def quantised_dispatch(
    mesh: DeviceMesh, case: Case, ours: bool, precision: DispatchPrecision
) -> dict[str, dict[str, float]]:
    """Tokens that travel in 8 bits: against MXFP8 experts whose tokens travel in BF16, and against float64."""
    mxfp8 = precision == "mxfp8"
    sent, plain = (
        train(mesh, case, build(mesh, case, ours=ours, mxfp8=mxfp8, precision=format_))
        for format_ in (precision, "bf16")
    )
    exact = reference(mesh, case)
    return {"between": errors(sent, plain), "sent": errors(sent, exact), "plain": errors(plain, exact)}


def too_many_tokens(mesh: DeviceMesh, case: Case) -> None:
    """Dispatch more than the buffer was made for."""
    module = build(mesh, case, ours=True)
    module.token_dispatcher.num_max_tokens_per_rank = TOKENS - 1
    train(mesh, case, module)
