"""MXFP8 in the experts and linears; the casts that they are held against are torchao's, as test_emulation.py has it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torchtitan.components.quantization.mx import _get_mxfp8_grouped_experts_cls
from torchtitan.components.quantization.utils import has_quantization
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.common.token_dispatcher import (
    AllToAllTokenDispatcher,
    DeepEPTokenDispatcher,
    TorchAOTokenDispatcher,
)

from moelab.errors import Refused
from moelab.model import shape_of
from moelab.mxfp8 import kernels
from moelab.mxfp8.converter import (
    LINEARS,
    MXFP8Converter,
    MXFP8EmulatedLinear,
    MXFP8Experts,
    NothingConverted,
    converted_modules,
    op_config,
)
from moelab.mxfp8.quantise import fake_quantise_columns, fake_quantise_rows
from moelab.titan.models import model_spec

GROUPS = [37, 0, 1, 64, 26]  # tokens of each expert: ragged, none, one, a multiple of the block
DIM, HIDDEN = 64, 96


def close_to_bf16_rounding(ours: torch.Tensor, exact: torch.Tensor) -> None:
    torch.testing.assert_close(ours.double(), exact, rtol=2**-7, atol=2e-2)


@pytest.mark.parametrize("wgrad", ["mxfp8", "bf16"])
def test_experts_are_titans_experts_with_torchaos_emulation(wgrad: str) -> None:
    shape = {"dim": DIM, "hidden_dim": HIDDEN, "num_experts": len(GROUPS)}
    ours = MXFP8Experts.Config(**shape, kernels="emulated", wgrad=wgrad, pad_inside=True).build()
    titans = _get_mxfp8_grouped_experts_cls(GroupedExperts).Config(**shape).build()
    titans._mxfp8_op_config = op_config("emulated", wgrad, pad_inside=True)
    torch.manual_seed(3)
    for parameter in ours.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    titans.load_state_dict(ours.state_dict())
    tokens, results = torch.randn(sum(GROUPS), DIM).bfloat16(), []
    for experts in (ours, titans):
        x = tokens.clone().requires_grad_()
        output = experts(x, torch.tensor(GROUPS))
        output.backward(tokens)
        results.append([output.detach(), x.grad, *(parameter.grad for parameter in experts.parameters())])
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("wgrad", ["mxfp8", "bf16"])
def test_linear_matches_quantise_dequantise_in_float64(wgrad: str) -> None:
    torch.manual_seed(1)
    linear = MXFP8EmulatedLinear.Config(in_features=64, out_features=96, wgrad=wgrad).build()
    torch.nn.init.normal_(linear.weight, std=0.1)
    linear = linear.bfloat16()
    x = torch.randn(2, 32, 64, dtype=torch.bfloat16, requires_grad=True)
    upstream = torch.randn(2, 32, 96, dtype=torch.bfloat16)
    output = linear(x)
    output.backward(upstream)
    rows, gy, w = x.detach().reshape(64, 64), upstream.reshape(64, 96), linear.weight.detach()
    exact = fake_quantise_rows(rows).double() @ fake_quantise_rows(w).double().T
    close_to_bf16_rounding(output.detach().reshape(64, 96), exact)
    assert x.grad is not None
    exact = fake_quantise_rows(gy).double() @ fake_quantise_columns(w).double().T
    close_to_bf16_rounding(x.grad.reshape(64, 64), exact)
    along_tokens = fake_quantise_columns if wgrad == "mxfp8" else torch.t
    close_to_bf16_rounding(linear.weight.grad, along_tokens(gy).double() @ along_tokens(rows).double().T)


def convert(**settings: object) -> object:
    model = model_spec("nano", ep_backend="standard").model
    return MXFP8Converter.Config(**settings).build().convert(model)


def test_experts_alone_are_converted_by_default() -> None:
    with torch.device("meta"):
        model = convert().build()
    nano = shape_of("nano")
    layers = range(nano.n_dense_layers, nano.n_layers)
    assert converted_modules(model) == [f"layers.{n}.moe.routed_experts.inner_experts" for n in layers]
    assert has_quantization(convert())  # TorchTitan then leaves MFU out


def test_linears_are_converted_when_asked_but_never_router_embedding_or_head() -> None:
    with torch.device("meta"):
        names = converted_modules(convert(linears=list(LINEARS)).build())
    assert len(names) == 35  # 4 layers of 5 MLA projections, 4 feed-forwards of 3, 3 layers of experts
    assert not [name for name in names if "gate" in name or "lm_head" in name or "embeddings" in name]
    assert "layers.0.feed_forward.w1" in names
    assert "layers.1.moe.shared_experts.w2" in names


@pytest.mark.parametrize(
    ("backend", "cuda", "kind", "dispatcher", "padding", "inside"),
    [
        ("standard", False, "emulated", AllToAllTokenDispatcher, None, True),
        ("standard", True, "emulated", TorchAOTokenDispatcher, 32, False),
        ("standard", True, "native", TorchAOTokenDispatcher, 128, False),
        ("deepep", False, "emulated", DeepEPTokenDispatcher, None, False),  # moelab's, which takes its place, pads
    ],
)
def test_who_pads_depends_on_the_kernels(
    monkeypatch: pytest.MonkeyPatch, backend: str, cuda: bool, kind: str, dispatcher: Any, padding: Any, inside: bool
) -> None:
    model = model_spec("nano", ep_backend=backend).model
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    MXFP8Converter.Config(kernels=kind).build().convert(model)
    _, experts, parent, _ = next(model.traverse(GroupedExperts.Config))
    assert type(parent.token_dispatcher) is dispatcher.Config
    assert (getattr(parent.token_dispatcher, "pad_multiple", None), experts.pad_inside) == (padding, inside)


def test_nothing_to_convert_is_an_error() -> None:
    with pytest.raises(NothingConverted, match="no routed experts"):
        MXFP8Converter.Config().build().convert(Linear.Config(in_features=32, out_features=32))
    with pytest.raises(NothingConverted, match="no linear"):
        convert(linears=["no_such_part"])


def test_linear_with_a_ragged_block_is_refused_before_any_step() -> None:
    model = model_spec("nano", ep_backend="standard").model
    model.layers[0].attention.wkv_a.out_features = 80
    with pytest.raises(Refused, match=r"layers\.0\.attention\.wkv_a.*80, not a multiple of 32"):
        MXFP8Converter.Config(linears=list(LINEARS)).build().convert(model)


@pytest.mark.parametrize(
    ("capability", "available", "expected"),
    [
        ((9, 0), True, "emulated"),
        ((10, 0), True, "native"),
        ((10, 3), True, "native"),
        ((12, 1), True, "emulated"),
        ((10, 0), False, "emulated"),
    ],
)
def test_kernels_follow_the_hardware(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], available: bool, expected: str
) -> None:
    import torchao.prototype.moe_training.mxfp8_grouped_mm as grouped_mm

    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(grouped_mm, "_SM100_KERNELS_AVAILABLE", True)
    monkeypatch.setattr(kernels, "why_not_cutedsl", lambda: None)
    assert kernels.resolve("auto") == expected
    assert kernels.resolve("emulated") == "emulated"
    if expected == "emulated":
        with pytest.raises(Refused, match=r"mxfp8_kernels is 'native', but .*Use 'emulated'"):
            kernels.resolve("native")
        return
    assert kernels.resolve("native") == "native"
    monkeypatch.setattr(kernels, "why_not_cutedsl", lambda: "nvidia-cutlass-dsl is missing")
    with pytest.raises(Refused, match=r"nvidia-cutlass-dsl is missing.*set mxfp8_kernels=emulated"):
        kernels.resolve("auto")
