"""What the ranks of :mod:`dispatcher_ranks` are asked about the MXFP8 all-to-all of the standard backend.

The reference is torchao's own pipeline, ``prototype/moe_training/ep`` with its grouped GEMM, on the same gloo ranks.
Its Triton kernels are replaced by torchao's PyTorch definitions of them, and FP8 is sent as bytes, which gloo knows.
"""

from __future__ import annotations

import functools
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import torchao.prototype.moe_training.ep.a2a_combine as torchao_combine
import torchao.prototype.moe_training.ep.a2a_dispatch as torchao_dispatch
import torchao.prototype.moe_training.ep.permute as torchao_permute
import torchao.prototype.moe_training.mxfp8_grouped_mm as torchao_products
from dispatcher_ranks import FEATURES, TOKENS, Case, build, choose, errors, local_weights, reference, train
from operator_counts import counted_operators
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single
from torch.distributed.device_mesh import DeviceMesh
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

E4M3, BLOCK = torch.float8_e4m3fn, 32


def against_torchao(mesh: DeviceMesh, case: Case) -> dict[str, dict[str, float]]:
    """Errors of ours against torchao's pipeline, and of both against float64."""
    ours = train(mesh, case, build(mesh, case, ours=False, mxfp8=True, precision="mxfp8"))
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


def bytes_sent(mesh: DeviceMesh, case: Case) -> dict[str, dict[str, int]]:
    """Bytes that left this rank by dtype, forward and backward, with the quantised dispatcher and TorchTitan's own."""
    found = {}
    for format_ in ("mxfp8", "bf16"):
        module = build(mesh, case, ours=False, mxfp8=True, precision=format_)  # type: ignore[arg-type]
        with counted_operators(_bytes) as sent:
            train(mesh, case, module)
        found[format_] = dict(sent)
    return found


def _bytes(func: Any, arguments: Any) -> dict[str, int]:
    if func._schema.name != "_c10d_functional::all_to_all_single":
        return {}
    return {str(arguments[0].dtype).removeprefix("torch."): arguments[0].nbytes}


def nan_padding(mesh: DeviceMesh, case: Case) -> tuple[bool, bool]:
    """Whether outputs and gradients of padding rows stay where they are: NaN there, finite everywhere else."""
    ids_TK, scores_TK = choose(case, mesh.get_local_rank())
    counts_E = torch.bincount(ids_TK.flatten(), minlength=case.experts)
    dispatcher = build(mesh, case, ours=False, mxfp8=True, precision="mxfp8").token_dispatcher
    x_TD = torch.ones(TOKENS, FEATURES, dtype=torch.bfloat16, requires_grad=True)
    rows, _rows_e, way = dispatcher.dispatch(x_TD, scores_TK, ids_TK, counts_E)
    real_P = torch.zeros(way.padded, dtype=torch.bool).index_fill(0, way.place_R, True)
    assert not real_P.all(), "the case has no padding"
    y_PD = torch.where(real_P[:, None], 1.0, torch.nan).bfloat16().expand(-1, FEATURES)
    rows.place_RD.backward(y_PD)
    assert x_TD.grad is not None
    sums = torch.full_like(x_TD, float(case.top_k))
    return torch.equal(x_TD.grad, sums), bool(dispatcher.combine(y_PD, way, x_TD).isfinite().all())
