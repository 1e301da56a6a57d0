"""What the ranks of :mod:`dispatcher_ranks` are asked about the MXFP8 all-to-all of the standard backend.

The reference is torchao's own pipeline, ``prototype/moe_training/ep`` with its grouped GEMM, on the same gloo ranks.
Its Triton kernels are replaced by torchao's PyTorch definitions of them, and FP8 is sent as bytes, which gloo knows.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import torchao.prototype.moe_training.ep.a2a_combine as torchao_combine
import torchao.prototype.moe_training.ep.a2a_dispatch as torchao_dispatch
import torchao.prototype.moe_training.ep.permute as torchao_permute
import torchao.prototype.moe_training.mxfp8_grouped_mm as torchao_products
from dispatcher_ranks import (
    FEATURES,
    HIDDEN,
    WEIGHTS,
    Case,
    _checkpoint,
    all_weights,
    choose,
    errors,
    reference,
    train,
)
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single
from torch.distributed.device_mesh import DeviceMesh
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
from torchtitan.models.common.moe import RoutedExperts
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

from moelab.mxfp8.converter import MXFP8Experts
from moelab.mxfp8.dispatch import combine_rows, dispatch_rows, quantised, route

E4M3, BLOCK = torch.float8_e4m3fn, 32


def build_mxfp8(mesh: DeviceMesh, case: Case, *, sent: str) -> RoutedExperts:
    """MXFP8 experts with the standard dispatcher, tokens ``sent`` in ``mxfp8`` or ``bf16``."""
    experts = MXFP8Experts.Config(
        dim=FEATURES,
        hidden_dim=HIDDEN,
        num_experts=case.experts,
        kernels="emulated",
        wgrad="bf16",
        pad_inside=True,
    )
    dispatcher = AllToAllTokenDispatcher.Config(num_experts=case.experts, top_k=case.top_k)
    config = RoutedExperts.Config(inner_experts=experts, token_dispatcher=dispatcher)
    module: RoutedExperts = (quantised(config) if sent == "mxfp8" else config).build()
    for name, weight in zip(WEIGHTS, local_weights(mesh, case), strict=True):
        setattr(module.inner_experts, name, torch.nn.Parameter(weight))
    module.token_dispatcher.wire_meshes(ep_mesh=mesh)
    return module


def local_weights(mesh: DeviceMesh, case: Case) -> list[Tensor]:
    """w1, w2 and w3 of this rank's experts."""
    local = case.experts // mesh.size()
    first = mesh.get_local_rank() * local
    return [weight[first : first + local].clone() for weight in all_weights(case)]


def against_torchao(mesh: DeviceMesh, case: Case) -> dict[str, dict[str, float]]:
    """Errors of ours against torchao's pipeline, and of both against float64."""
    ours = train(mesh, case, build_mxfp8(mesh, case, sent="mxfp8"))
    layer = TorchaoLayer(mesh, case)
    theirs = train(mesh, case, layer, layer)
    exact = reference(mesh, case)
    return {"between": errors(ours, theirs), "ours": errors(ours, exact), "theirs": errors(theirs, exact)}


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


def against_bf16_dispatch(mesh: DeviceMesh, case: Case) -> dict[str, dict[str, float]]:
    """The same MXFP8 experts with TorchTitan's own dispatcher, and float64."""
    sent = train(mesh, case, build_mxfp8(mesh, case, sent="mxfp8"))
    plain = train(mesh, case, build_mxfp8(mesh, case, sent="bf16"))
    exact = reference(mesh, case)
    return {"between": errors(sent, plain), "sent": errors(sent, exact), "plain": errors(plain, exact)}


def compiled_and_eager(mesh: DeviceMesh, case: Case) -> dict[str, float]:
    """Errors of the layer traced as one graph against itself."""
    module = build_mxfp8(mesh, case, sent="mxfp8")
    eager = train(mesh, case, module)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        graph = torch.compile(module, fullgraph=True, backend="aot_eager")
        return errors(train(mesh, case, graph, module.inner_experts), eager)


def checkpointed(mesh: DeviceMesh, case: Case, checkpoint: str) -> tuple[int, dict[str, float]]:
    """All-to-alls of a forward and a backward pass, and the errors against no checkpointing."""
    module = build_mxfp8(mesh, case, sent="mxfp8")
    plain = train(mesh, case, module)
    wrapped = module if checkpoint == "none" else _checkpoint(module, checkpoint)
    with sent_bytes() as sent:
        found = train(mesh, case, wrapped, module.inner_experts)
    return sum(sent["count"].values()), errors(found, plain)


def bytes_sent(mesh: DeviceMesh, case: Case) -> dict[str, dict[str, int]]:
    """Bytes that left this rank by dtype, forward and backward, with the quantised dispatcher and TorchTitan's own."""
    found = {}
    for format_ in ("mxfp8", "bf16"):
        module = build_mxfp8(mesh, case, sent=format_)
        with sent_bytes() as sent:
            train(mesh, case, module)
        found[format_] = dict(sent["bytes"])
    return found


@contextmanager
def sent_bytes() -> Iterator[dict[str, Counter[str]]]:
    """Count all-to-alls and their bytes by dtype."""
    counted: dict[str, Counter[str]] = {"count": Counter(), "bytes": Counter()}

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func._schema.name == "_c10d_functional::all_to_all_single":
                dtype = str(args[0].dtype).removeprefix("torch.")
                counted["count"][dtype] += 1
                counted["bytes"][dtype] += args[0].nbytes
            return func(*args, **(kwargs or {}))

    with Count():
        yield counted


def nan_padding(mesh: DeviceMesh, case: Case) -> tuple[bool, bool]:
    """Whether outputs and gradients of padding rows stay where they are: NaN there, finite everywhere else."""
    ids_TK, _scores = choose(case, mesh.get_local_rank())
    counts_E = torch.bincount(ids_TK.flatten(), minlength=case.experts)
    way = route(ids_TK, counts_E, mesh.get_group().group_name, mesh.size(), case.alignment)
    x_TD = torch.ones(ids_TK.shape[0], BLOCK, dtype=torch.bfloat16, requires_grad=True)
    rows = dispatch_rows(x_TD, way)
    real_P = torch.zeros(way.padded, dtype=torch.bool).index_fill(0, way.place_R, True)
    assert not real_P.all(), "the case has no padding"
    rows.place_RD.backward(torch.where(real_P[:, None], 1.0, torch.nan).bfloat16().expand(-1, BLOCK))
    assert x_TD.grad is not None
    y_PD = torch.where(real_P[:, None], 1.0, torch.nan).bfloat16().expand(-1, BLOCK)
    sums = torch.full_like(x_TD, float(case.top_k))
    return torch.equal(x_TD.grad, sums), bool(combine_rows(y_PD, way).isfinite().all())
