"""MXFP8 in the experts and linears, and which kernels compute it; test_emulation.py holds the casts against torchao."""

from __future__ import annotations

from contextlib import nullcontext
from importlib.metadata import metadata

import pytest
import torch
from torchao.prototype.moe_training import mxfp8_grouped_mm
from torchao.prototype.moe_training.kernels.mxfp8 import cute_utils
from torchtitan.components.quantization import MXFP8Linear
from torchtitan.components.quantization.mx import _get_mxfp8_grouped_experts_cls
from torchtitan.components.quantization.utils import has_quantization
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, DeepEPTokenDispatcher

from moelab.errors import Refused
from moelab.micro.grouped_gemm import PRECISIONS
from moelab.micro.grouped_gemm_run import NoKernels, require_kernels, why_not
from moelab.mxfp8 import kernels
from moelab.mxfp8.converter import (
    LINEARS,
    MXFP8EmulatedLinear,
    MXFP8Experts,
    NothingConverted,
    Quantiser,
    converted_modules,
    op_config,
)
from moelab.mxfp8.quantise import fake_quantise_columns, fake_quantise_rows
from moelab.titan.config_registry import assume_gpu
from moelab.titan.models import model_spec

GROUPS = [37, 0, 1, 64, 26]  # tokens of each expert: ragged, none, one, a multiple of the block
DIM, HIDDEN = 64, 96


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
        results.append([output, *torch.autograd.grad(output, (x, *experts.parameters()), tokens)])
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("wgrad", ["mxfp8", "bf16"])
def test_linear_matches_quantise_dequantise_in_float64(wgrad: str) -> None:
    torch.manual_seed(1)
    linear = MXFP8EmulatedLinear.Config(in_features=64, out_features=96, bias=True, wgrad=wgrad).build()
    for parameter in linear.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    linear = linear.bfloat16()
    x = torch.randn(2, 32, 64, dtype=torch.bfloat16, requires_grad=True)
    upstream = torch.randn(2, 32, 96, dtype=torch.bfloat16)
    output = linear(x)
    ours = output, *torch.autograd.grad(output, (x, linear.weight), upstream)
    rows, grad, w = x.detach().reshape(64, 64), upstream.reshape(64, 96), linear.weight.detach()
    along_tokens = fake_quantise_columns if wgrad == "mxfp8" else torch.t
    exact = (
        fake_quantise_rows(rows).double() @ fake_quantise_rows(w).double().T + linear.bias.double(),
        fake_quantise_rows(grad).double() @ fake_quantise_columns(w).double().T,
        along_tokens(grad).double() @ along_tokens(rows).double().T,
    )
    for mine, expected in zip(ours, exact, strict=True):
        torch.testing.assert_close(mine.double().view_as(expected), expected, rtol=2**-7, atol=2e-2)


def test_native_linears_are_torchaos_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MXFP8Linear, "forward", lambda _linear, x: x + 1)
    linear = MXFP8EmulatedLinear.Config(in_features=64, out_features=64, kernels="native").build()
    assert torch.equal(linear(torch.zeros(1, 64)), torch.ones(1, 64))


# The model's configuration; test_config_registry.py has it on GPUs


@pytest.mark.parametrize(
    ("backend", "dispatcher", "pads_inside"),
    # The emulated product pads where TorchTitan's padding permutation, a Triton kernel, cannot run.
    [("standard", AllToAllTokenDispatcher, True), ("deepep", DeepEPTokenDispatcher, False)],
)
def test_on_a_processor_experts_alone_are_converted_by_default(
    backend: str, dispatcher: type, pads_inside: bool
) -> None:
    model = Quantiser.Config().build().convert(model_spec("nano", ep_backend=backend).model)
    layers = [routed for _, routed, _, _ in model.traverse(RoutedExperts.Config)]
    made = [(type(routed.token_dispatcher), routed.inner_experts.pad_inside) for routed in layers]
    assert made == [(dispatcher.Config, pads_inside)] * 3
    assert has_quantization(model)  # TorchTitan then leaves MFU out
    if backend == "standard":
        with torch.device("meta"):
            names = converted_modules(model.build())
        assert names == [f"layers.{n}.moe.routed_experts.inner_experts" for n in (1, 2, 3)]


def test_linears_are_converted_when_asked_but_never_router_embedding_or_head() -> None:
    model = model_spec("nano", ep_backend="standard").model
    with torch.device("meta"):
        names = converted_modules(Quantiser.Config(linears=list(LINEARS)).build().convert(model).build())
    assert len(names) == 35  # 4 layers of 5 MLA projections, 4 feed-forwards of 3, 3 layers of experts
    assert not [name for name in names if "gate" in name or "lm_head" in name or "embeddings" in name]
    assert {"layers.0.feed_forward.w1", "layers.1.moe.shared_experts.w2"} < set(names)


def test_what_cannot_be_converted_is_named() -> None:
    model = model_spec("nano", ep_backend="standard").model
    with pytest.raises(NothingConverted, match="no routed experts"):
        Quantiser.Config().build().convert(Linear.Config(in_features=32, out_features=32))
    with pytest.raises(NothingConverted, match=r"no linear .*no_such_part"):
        Quantiser.Config(linears=["no_such_part"]).build().convert(model)
    model.layers[0].attention.wkv_a.out_features = 80
    with pytest.raises(Refused, match=r"layers\.0\.attention\.wkv_a.*80, not a multiple of 32"):
        Quantiser.Config(linears=list(LINEARS)).build().convert(model)


# Kernels


@pytest.mark.parametrize(
    ("capability", "timed", "told"),
    [
        (None, set(), "no CUDA device"),
        ((8, 0), {"bf16"}, "is SM80"),
        ((8, 9), {"bf16"}, "is SM89"),
        ((9, 0), {"bf16", "fp8"}, "is SM90; .* for SM100 and SM103"),
        ((10, 0), set(PRECISIONS), None),
        ((10, 3), set(PRECISIONS), None),
        ((12, 1), {"bf16"}, "is SM121"),
    ],
)
def test_kernels_follow_the_hardware(capability: tuple[int, int] | None, timed: set[str], told: str | None) -> None:
    with assume_gpu(capability) if capability else nullcontext():
        for name in PRECISIONS:
            assert (why_not(name) is None) == (name in timed), name
            if name not in timed:
                with pytest.raises(NoKernels, match=f"{name} cannot be timed.*{', '.join(sorted(timed))}"):
                    require_kernels(name)
        assert kernels.resolve("emulated") == "emulated"
        assert kernels.resolve("auto") == ("emulated" if told else "native")
        if told is None:
            assert kernels.resolve("native") == "native"
            return
        with pytest.raises(Refused, match=f"mxfp8_kernels is 'native', but .*{told}.*Use 'emulated'"):
            kernels.resolve("native")


def test_a_gpu_with_tensor_cores_for_mxfp8_never_emulates_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao built for a processor, and packages that are missing or too new, named with the versions that work."""
    missing, check = cute_utils._missing_cutedsl_runtime_packages, kernels.why_not_cutedsl
    with assume_gpu((10, 0)):
        monkeypatch.setattr(kernels, "why_not_cutedsl", check)
        for sm100, packages, versions, told in (
            (False, missing, {}, "SM100 kernels"),
            (True, missing, {}, "nvidia-cutlass-dsl==4.5.2"),  # not installed where there is no GPU
            (
                True,
                list,
                {"nvidia-cutlass-dsl": "4.10.0"},
                r"MXFP8 kernels: nvidia-cutlass-dsl 4\.10\.0 \(works: 4\.5\.2\)\. ",
            ),
        ):
            monkeypatch.setattr(mxfp8_grouped_mm, "_SM100_KERNELS_AVAILABLE", sm100)
            monkeypatch.setattr(cute_utils, "_missing_cutedsl_runtime_packages", packages)
            monkeypatch.setattr(kernels, "version", lambda name, versions=versions: versions.get(name, "4.5.2"))
            with pytest.raises(Refused, match=f"{told}.*set mxfp8_kernels=emulated"):
                kernels.resolve("auto")
        monkeypatch.setattr(kernels, "version", lambda _: "4.5.2")
        assert kernels.resolve("auto") == "native"
    described = metadata("torchao").get_payload()
    assert all(f"{package}=={number}" in described for package, number in kernels.CUTEDSL.items())
