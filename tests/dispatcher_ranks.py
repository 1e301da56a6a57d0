"""Expert-parallel ranks as gloo processes, which answer what a test asks of all of them at once.

References are the same mixture of experts in float64, computed by each rank for its own tokens with the weights of all
experts, and torchao's own pipeline. Shape suffixes: T tokens, K experts of a token, E experts, e local experts, R rows,
D features, F hidden features.
"""

from __future__ import annotations

import functools
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchao.prototype.moe_training.ep.a2a_combine as torchao_combine
import torchao.prototype.moe_training.ep.a2a_dispatch as torchao_dispatch
import torchao.prototype.moe_training.ep.permute as torchao_permute
import torchao.prototype.moe_training.mxfp8_grouped_mm as torchao_products
from titan_process import _CONTEXT
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torchao.prototype.moe_training.ep import (
    a2a_combine_hp_fwd_mxfp8_bwd,
    a2a_dispatch_mxfp8_fwd_hp_bwd,
    permute_mxfp8_fwd_hp_bwd,
    unpermute_hp_fwd_mxfp8_bwd,
)
from torchao.prototype.moe_training.ep.kernels import generate_permute_indices
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx
from torchao.quantization.quantize_.common import KernelPreference
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, DeepEPTokenDispatcher

from moelab.deepep import ops
from moelab.deepep.buffer import exchange, open_exchange
from moelab.deepep.checkpoint import CommunicationSavingAC, CommunicationSavingFullAC
from moelab.deepep.dispatcher import padded
from moelab.model import DispatchPrecision
from moelab.mxfp8.converter import MXFP8Experts
from moelab.mxfp8.dispatch import quantised
from moelab.mxfp8.quantise import BLOCK, E4M3
from moelab.titan.routing import draw_experts

TOKENS, FEATURES, HIDDEN = 48, 128, 64
WEIGHTS = ("w1_EFD", "w2_EDF", "w3_EFD")
Result = dict[str, Tensor]
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


@contextmanager
def counted_operators(count: Callable[[Any, Any], dict[str, int]]) -> Iterator[Counter[str]]:
    """Add up what ``count(operator, arguments)`` says of every operator, compiled code and gradients included."""
    counted: Counter[str] = Counter()

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            counted.update(count(func, args))
            return func(*args, **(kwargs or {}))

    with Count():
        yield counted


def communication(func: Any, _arguments: Any) -> dict[str, int]:
    """1 for each of moelab's operators that communicate and each all-to-all of PyTorch's, by name."""
    namespace, name = func._schema.name.split("::")
    return {name: 1} if namespace == ops.NAMESPACE or name == "all_to_all_single" else {}


# A layer


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
    deepep: bool = True  # or the standard backend: TorchTitan's dispatcher, or moelab's where tokens travel in MXFP8
    mxfp8: bool = False  # experts
    precision: DispatchPrecision = "bf16"
    wgrad: Literal["mxfp8", "bf16"] = "bf16"


def choose(case: Case, rank: int) -> tuple[Tensor, Tensor]:
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


def all_weights(case: Case) -> list[Tensor]:
    """w1, w2 and w3 of all experts in float32, the same on every rank."""
    generator = torch.Generator().manual_seed(case.seed)
    shapes = ((HIDDEN, FEATURES), (FEATURES, HIDDEN), (HIDDEN, FEATURES))
    return [0.1 * torch.randn((case.experts, *shape), generator=generator) for shape in shapes]


def local_weights(mesh: DeviceMesh, case: Case) -> list[Tensor]:
    """w1, w2 and w3 of this rank's experts."""
    return [weight.chunk(mesh.size())[mesh.get_local_rank()].clone() for weight in all_weights(case)]


def tokens_of(case: Case, rank: int) -> Tensor:
    """BF16 ``(T, D)``."""
    generator = torch.Generator().manual_seed(1 + 10 * case.seed + rank)
    return torch.randn((TOKENS, FEATURES), generator=generator).bfloat16()


def build(mesh: DeviceMesh, case: Case) -> RoutedExperts:
    """TorchTitan's routed experts with the dispatcher and the experts of the case, DeepEP on its stand-in."""
    sizes: dict[str, int] = {"num_experts": case.experts, "top_k": case.top_k}
    shape: dict[str, int] = {"dim": FEATURES, "hidden_dim": HIDDEN, "num_experts": case.experts}
    experts = GroupedExperts.Config(**shape)
    if case.mxfp8:
        experts = MXFP8Experts.Config(**shape, kernels="emulated", wgrad=case.wgrad)
    if case.deepep:
        theirs = DeepEPTokenDispatcher.Config(**sizes, hidden_dim=FEATURES, num_max_tokens_per_rank=TOKENS)
        config = padded(
            RoutedExperts.Config(inner_experts=experts, token_dispatcher=theirs),
            alignment=case.alignment,
            kernels="emulated",
            precision=case.precision,
        )
    else:
        config = RoutedExperts.Config(inner_experts=experts, token_dispatcher=AllToAllTokenDispatcher.Config(**sizes))
        config = config if case.precision == "bf16" else quantised(config)
    module: RoutedExperts = config.build()
    for name, weight in zip(WEIGHTS, local_weights(mesh, case), strict=True):
        setattr(module.inner_experts, name, torch.nn.Parameter(weight))
    module.token_dispatcher.wire_meshes(ep_mesh=mesh)
    return module


def train(mesh: DeviceMesh, case: Case, module: torch.nn.Module) -> Result:
    """Output and gradients of a layer."""
    rank = mesh.get_local_rank()
    ids_TK, scores_TK = choose(case, rank)
    x_TD = tokens_of(case, rank).requires_grad_()
    scores_TK.requires_grad_()
    counts_E = torch.bincount(ids_TK.flatten(), minlength=case.experts)
    rows = (1, TOKENS, -1)
    y_TD = module(x_TD.view(rows), scores_TK.view(rows), ids_TK.view(rows), counts_E).view(TOKENS, FEATURES)
    return _with_gradients(y_TD, x_TD, scores_TK, *module.parameters())


def _with_gradients(y_TD: Tensor, *inputs: Tensor) -> Result:
    """Of a loss that weights every feature differently."""
    loss = (y_TD.float() * torch.linspace(-1, 1, FEATURES)).sum()
    results = (y_TD.detach(), *torch.autograd.grad(loss, inputs))
    return dict(zip(("output", "x", "scores", *WEIGHTS), results, strict=True))


def reference(mesh: DeviceMesh, case: Case) -> Result:
    """The same in float64, without a dispatcher."""
    ids_TK, scores_TK = choose(case, mesh.get_local_rank())
    x_TD, scores_TK = (x.double().requires_grad_() for x in (tokens_of(case, mesh.get_local_rank()), scores_TK))
    weights = [weight.bfloat16().double().requires_grad_() for weight in all_weights(case)]
    w1_TKFD, w2_TKDF, w3_TKFD = (weight[ids_TK] for weight in weights)
    h_TKF = F.silu(torch.einsum("td,tkfd->tkf", x_TD, w1_TKFD)) * torch.einsum("td,tkfd->tkf", x_TD, w3_TKFD)
    y_TD = torch.einsum("tkf,tkdf,tk->td", h_TKF, w2_TKDF, scores_TK)
    results = _with_gradients(y_TD, x_TD, scores_TK, *weights)
    for name in WEIGHTS:
        dist.all_reduce(results[name])
        results[name] = results[name].chunk(mesh.size())[mesh.get_local_rank()]
    return results


# torchao's MXFP8 pipeline, ``prototype/moe_training/ep`` and its grouped GEMM, on the same ranks. Triton kernels are
# replaced by its PyTorch definitions of them, and FP8 is sent as bytes, which gloo knows.


class TorchaoLayer(torch.nn.Module):
    """TorchTitan's routed experts, written with torchao's expert-parallel functions."""

    def __init__(self, mesh: DeviceMesh, case: Case) -> None:
        super().__init__()
        replace_triton()
        self.mesh, self.local = mesh, case.experts // mesh.size()
        self.weights = torch.nn.ParameterList(local_weights(mesh, case))

    def forward(self, x_BLD: Tensor, scores_BLK: Tensor, ids_BLK: Tensor, counts_E: Tensor) -> Tensor:
        """As TorchTitan's ``RoutedExperts.forward``."""
        x_TD, scores_N = x_BLD.flatten(0, 1), scores_BLK.flatten()
        order_N = torch.argsort(ids_BLK.flatten(), stable=True)
        token_N = order_N // ids_BLK.shape[-1]
        ranks, group = self.mesh.size(), self.mesh.get_group().group_name
        received_E = all_to_all_single(counts_E, None, None, group).view(-1)
        sent, received = (counts.view(ranks, -1).sum(1).tolist() for counts in (counts_E, received_E))
        w1, w2, w3 = (weight.bfloat16().mT for weight in self.weights)
        multiply = partial(
            torchao_products._to_mxfp8_then_scaled_grouped_mm,
            kernel_preference=KernelPreference.EMULATED,
            wgrad_with_hp=True,
            scale_calculation_mode=ScaleCalculationMode.RCEIL,
        )
        rows = a2a_dispatch_mxfp8_fwd_hp_bwd(x_TD[token_N], received, sent, group)
        shape, rows, order_P, _rows_e, ends_e = permute_mxfp8_fwd_hp_bwd(rows, received_E, ranks, self.local, BLOCK)
        hidden = F.silu(multiply(rows, w1, ends_e)) * multiply(rows, w3, ends_e)
        output = unpermute_hp_fwd_mxfp8_bwd(multiply(hidden, w2, ends_e), order_P, shape)
        y_ND = a2a_combine_hp_fwd_mxfp8_bwd(output, sent, received, group)
        y_ND = (y_ND.float() * scores_N[order_N, None]).bfloat16()
        return torch.zeros_like(x_TD).index_add(0, token_N, y_ND).view_as(x_BLD)


@functools.cache
def replace_triton() -> None:
    """Replace what cannot run here, for as long as this process lives: the backward runs later."""
    for module, name, stand_in in (
        (torchao_dispatch, "triton_to_mxfp8_dim0", _cast),
        (torchao_combine, "triton_to_mxfp8_dim0", _cast),
        (torchao_dispatch, "all_to_all_single", _send_bytes),
        (torchao_combine, "all_to_all_single", _send_bytes),
        (torchao_permute, "generate_permute_indices", partial(generate_permute_indices, use_cpu=True)),
        (torchao_permute, "_triton_permute_bwd", _permute_backward),
        (torchao_products, "triton_mxfp8_dequant_dim0", _expand),
    ):
        setattr(module, name, stand_in)


def _cast(x: Tensor, inner_block_size: int, scaling_mode: str) -> tuple[Tensor, Tensor]:
    scales, data = to_mx(x, E4M3, inner_block_size, ScaleCalculationMode(scaling_mode))
    return data, scales


def _expand(data: Tensor, scales: Tensor, out_dtype: torch.dtype, scale_block_size: int) -> Tensor:
    return to_dtype(data, scales.view(torch.float8_e8m0fnu), E4M3, scale_block_size, out_dtype)


def _send_bytes(rows: Tensor, *, output_split_sizes: list[int], input_split_sizes: list[int], group: Any) -> Tensor:
    sent = rows.view(torch.uint8) if rows.itemsize == 1 else rows
    return torch.ops._c10d_functional.wait_tensor(
        all_to_all_single(sent.contiguous(), output_split_sizes, input_split_sizes, group)
    ).view(rows.dtype)


def _permute_backward(grad: Tensor, order: Tensor, rows: int, columns: int) -> Tensor:
    """Rows whose place is -1 are padding."""
    out = grad.new_zeros((rows, columns))
    out[order[order >= 0]] = grad[order >= 0]
    return out


# What tests ask


def errors(mine: Result, expected: Result) -> dict[str, float]:
    """Relative error of each tensor in the Frobenius norm; absolute where the expected one is zero."""
    wide = {name: (one.double(), expected[name].double()) for name, one in mine.items()}
    return {name: float((a - b).norm() / (b.norm() or 1.0)) for name, (a, b) in wide.items()}


def compared(mesh: DeviceMesh, case: Case, other: Case) -> dict[str, dict[str, float]]:
    """Errors of two layers of the same routing against float64, ``ours`` and ``other``, and ``between`` them."""
    exact, ours, theirs = reference(mesh, case), *(train(mesh, one, build(mesh, one)) for one in (case, other))
    return {"ours": errors(ours, exact), "other": errors(theirs, exact), "between": errors(ours, theirs)}


def against_torchao(mesh: DeviceMesh, case: Case) -> dict[str, dict[str, float]]:
    """Errors of ``ours`` and of torchao's pipeline (``other``) against float64, and ``between`` them."""
    exact = reference(mesh, case)
    ours, theirs = (train(mesh, case, layer) for layer in (build(mesh, case), TorchaoLayer(mesh, case)))
    return {"between": errors(ours, theirs), "ours": errors(ours, exact), "other": errors(theirs, exact)}


def compiled_and_eager(mesh: DeviceMesh, case: Case) -> dict[str, float]:
    """Errors of the layer compiled as one graph against itself."""
    module = build(mesh, case)
    eager = train(mesh, case, module)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        return errors(train(mesh, case, torch.compile(module, fullgraph=True, backend="aot_eager")), eager)


def checkpointed(mesh: DeviceMesh, case: Case, checkpoint: str) -> tuple[dict[str, int], float]:
    """Communication of a forward and a backward pass, and the largest error against no checkpointing."""
    module = build(mesh, case)
    plain = train(mesh, case, module)
    if checkpoint == "full":
        module = checkpoint_wrapper(module, early_stop=False)
    elif checkpoint != "none":
        policy = {"selective": CommunicationSavingAC, "full+dispatch": CommunicationSavingFullAC}[checkpoint]
        module = policy(policy.Config())._wrap_block(module)
    with counted_operators(communication) as counted:
        wrapped = train(mesh, case, module)
    return dict(counted), max(errors(wrapped, plain).values())


Routed = list[list[list[int]]]
"""Experts of each token, by rank."""


def conserve(mesh: DeviceMesh, routed: Routed, experts: int, alignment: int) -> dict[str, Any]:
    """Dispatch numbered tokens, scale them by their scores, combine them; all sums are exact in BF16.

    Returns:
        Whether combine gave every token the ``sums`` of its scores times itself, and the ``padding`` of aligned groups
        is zero, data and scores; and the sorted numbers of each local expert's ``tokens``.
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
    groups = rows_RD.split(((counts_e + alignment - 1) // alignment * alignment).tolist())  # of all rows, or it fails
    numbers = [sorted(rows[:count, 0].long().tolist()) for rows, count in zip(groups, counts_e.tolist(), strict=True)]
    padding = torch.cat([rows[count:] for rows, count in zip(groups, counts_e.tolist(), strict=True)])
    y_TD = ops.combine(rows_RD * scores_R[:, None].bfloat16(), ids_TK, handle, group, experts, alignment)
    expected_TD = x_TD[:, 1:] * scores_TK.sum(dim=1, keepdim=True)
    return {
        "sums": torch.equal(y_TD[:, 1:].float(), expected_TD.float()),
        "padding": not bool(padding.any()) and int((scores_R != 0).sum()) == int(counts_e.sum()),
        "tokens": numbers,
    }


def poison(mesh: DeviceMesh, case: Case) -> dict[str, bool]:
    """Whether the ways home are right, though padding is NaN: combine, and the gradients of dispatch and of combine.

    All of it rests on ``undefined``: where the stand-in is not asked for zeros, it leaves padding undefined.
    """
    ids_TK, scores_TK = choose(case, mesh.get_local_rank())
    x_TD = tokens_of(case, mesh.get_local_rank())
    group = _open(mesh, tokens=TOKENS, experts=case.experts, top_k=case.top_k)
    settings = (group, case.experts, case.alignment)
    rows_RD, _, _, scores_R, *handle = ops.dispatch(x_TD, None, None, scores_TK, ids_TK, *settings)
    empty_R = scores_R == 0
    assert empty_R.any(), "the case has no padding"
    bad_RD, bad_R = rows_RD.clone(), scores_R.clone()
    bad_RD[empty_R], bad_R[empty_R] = float("nan"), float("nan")
    clean, dirty = (ops.combine(rows, ids_TK, handle, *settings) for rows in (rows_RD, bad_RD))
    grads, bad_grads = (
        ops.collect(*pair, ids_TK, handle, *settings) for pair in ((rows_RD, scores_R), (bad_RD, bad_R))
    )
    how: dict[str, Any] = {"num_experts": case.experts, "expert_alignment": case.alignment, "do_expand": True}
    unasked_RD, *_ = exchange(group).buffer.dispatch(x_TD, topk_idx=ids_TK, num_max_tokens_per_rank=TOKENS, **how)
    return {
        "combine": torch.equal(clean, dirty),
        "collect": all(torch.equal(a, b) for a, b in zip(grads, bad_grads, strict=True)),
        "resend": not bool(ops.resend(clean, ids_TK, handle, *settings, rows_RD)[empty_R].any()),
        "undefined": bool(unasked_RD.isnan().any()),
    }


def _open(mesh: DeviceMesh, *, tokens: int, experts: int, top_k: int) -> str:
    group = mesh.get_group()
    open_exchange(group, hidden=FEATURES, tokens=tokens, experts=experts, top_k=top_k, kernels="emulated")
    return group.group_name


def too_many_tokens(mesh: DeviceMesh, case: Case) -> None:
    """Dispatch more than the buffer was made for."""
    module = build(mesh, case)
    module.token_dispatcher.num_max_tokens_per_rank = TOKENS - 1
    train(mesh, case, module)


def bytes_sent(mesh: DeviceMesh, case: Case) -> dict[str, int]:
    """Bytes that left this rank by dtype, forward and backward."""
    module = build(mesh, case)
    with counted_operators(_bytes) as sent:
        train(mesh, case, module)
    return dict(sent)


def _bytes(func: Any, arguments: Any) -> dict[str, int]:
    if func._schema.name != "_c10d_functional::all_to_all_single":
        return {}
    return {str(arguments[0].dtype).removeprefix("torch."): arguments[0].nbytes}


def nan_padding(mesh: DeviceMesh, case: Case) -> tuple[bool, bool]:
    """Whether outputs and gradients of padding rows stay where they are: NaN there, finite everywhere else."""
    ids_TK, scores_TK = choose(case, mesh.get_local_rank())
    counts_E = torch.bincount(ids_TK.flatten(), minlength=case.experts)
    dispatcher = build(mesh, case).token_dispatcher
    x_TD = torch.ones(TOKENS, FEATURES, dtype=torch.bfloat16, requires_grad=True)
    rows, _rows_e, way = dispatcher.dispatch(x_TD, scores_TK, ids_TK, counts_E)
    real_P = torch.zeros(len(rows.data_RD), dtype=torch.bool).index_fill(0, way.place_R, True)
    assert not real_P.all(), "the case has no padding"
    y_PD = torch.where(real_P[:, None], 1.0, torch.nan).bfloat16().expand(-1, FEATURES)
    rows.place_RD.backward(y_PD)
    sums = torch.full_like(x_TD, float(case.top_k))
    return torch.equal(x_TD.grad, sums), bool(dispatcher.combine(y_PD, way, x_TD).isfinite().all())
