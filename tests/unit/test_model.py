"""Counts of parameters, FLOPs and GEMMs: TorchTitan's own models, built without memory, are the reference."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from moelab.errors import BadInput
from moelab.model import SHAPES, count_parameters, flops_per_token, gemms, parameters, shape_of, token_traffic
from moelab.titan.models import NANO, model_spec

MODELS = sorted(SHAPES)


@functools.cache
def built(model: str) -> tuple[nn.Module, Any]:
    config = model_spec(model, ep_backend="standard").model
    with torch.device("meta"):
        return config.build(), config


@pytest.mark.parametrize("model", MODELS)
def test_every_parameter_has_torchtitans_name_and_shape(model: str) -> None:
    shape = shape_of(model)
    ours = {f"{m}.{p.name}": p.shape for m in shape.modules for p in parameters(shape, m)}
    assert ours == {name: tuple(value.shape) for name, value in built(model)[0].named_parameters()}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("seq_len", [128, 4096, 8192])
def test_parameters_and_flops_are_torchtitans(model: str, seq_len: int) -> None:
    module, config = built(model)
    theirs = config.get_nparams_and_flops(module, seq_len)
    assert (count_parameters(shape_of(model)).total, flops_per_token(shape_of(model), seq_len)) == theirs


@pytest.mark.parametrize("model", MODELS)
def test_routing_and_heads_are_torchtitans(model: str) -> None:
    shape, config = shape_of(model), built(model)[1]
    router, attention = config.layers[-1].moe.router, config.layers[0].attention
    groups = (router.num_expert_groups or 1, router.num_limited_groups or 1)
    assert (shape.top_k, shape.expert_groups, shape.limited_groups) == (router.top_k, *groups)
    assert (shape.n_heads, shape.qk_head_dim, shape.v_head_dim) == (
        attention.n_heads,
        attention.qk_nope_head_dim + attention.qk_rope_head_dim,
        attention.v_head_dim,
    )
    assert shape.n_dense_layers == sum(layer.moe is None for layer in config.layers)


def test_nano_is_the_model_that_is_trained() -> None:
    shape = shape_of("nano")
    assert {name: getattr(shape, name) for name in vars(NANO)} == vars(NANO)


def test_published_flop_counts_of_671b() -> None:
    counts = [round(flops_per_token(shape_of("671B"), 8192, causal=causal) / 1e9, 1) for causal in (False, True)]
    assert counts == [342.6, 281.2]


@pytest.mark.parametrize("model", MODELS)
def test_gemms_add_up_to_the_flop_count(model: str) -> None:
    shape, tokens = shape_of(model), 4096
    norms = 6 * count_parameters(shape).by_part["norms"]  # TorchTitan counts their weights as if they were matrices
    attention = 6 * shape.n_layers * shape.n_heads * (shape.qk_head_dim + shape.v_head_dim) * tokens
    per_token = flops_per_token(shape, tokens) - norms - attention
    assert sum(gemm.flops for gemm in gemms(shape, tokens)) == per_token * tokens


@pytest.mark.parametrize(("tp", "ep"), [(2, 1), (2, 8), (4, 4), (1, 32)])
def test_parallel_axes_share_the_gemms_out(tp: int, ep: int) -> None:
    shape, tokens = shape_of("671B"), 8192
    whole, rank = gemms(shape, tokens), gemms(shape, tokens, tp=tp, ep=ep)
    latent = ("attention.wq_a", "attention.wkv_a")  # whole on every tensor-parallel rank
    router = ("moe.router.gate",) if ep == 1 else ()
    for one, part in zip(whole, rank, strict=True):
        assert part.flops == one.flops if part.name in latent + router else part.flops == one.flops // tp
        assert part.groups == (one.groups // ep if one.part == "routed experts" else 1)


def test_a_thin_model_keeps_every_other_dimension() -> None:
    thin = shape_of("671B").thin(dense_layers=1, moe_layers=2, num_experts=32)
    assert (thin.n_layers, thin.n_dense_layers, thin.n_moe_layers, thin.num_experts) == (3, 1, 2, 32)
    assert (thin.dim, thin.moe_hidden_dim, thin.top_k) == (7168, 2048, 8)


@given(tokens=st.integers(1, 10_000), copies=st.floats(1, 8), model=st.sampled_from(MODELS))
def test_traffic_is_proportional_and_cheaper_when_quantised(tokens: int, copies: float, model: str) -> None:
    shape = shape_of(model)
    bf16 = token_traffic(shape, tokens, copies=copies)
    assert bf16.dispatch_bytes == bf16.combine_bytes == pytest.approx(tokens * copies * shape.dim * 2)
    for precision in ("mxfp8", "fp8"):
        low = token_traffic(shape, tokens, precision=precision, copies=copies)
        assert low.dispatch_bytes == low.combine_gradient_bytes == pytest.approx(bf16.dispatch_bytes * 33 / 64)
        assert low.combine_bytes == low.dispatch_gradient_bytes == bf16.combine_bytes


def test_a_plain_all_to_all_sends_a_token_to_each_of_its_experts() -> None:
    assert token_traffic(shape_of("671B"), 1).dispatch_bytes == 8 * 7168 * 2


def test_an_unknown_model_is_refused_by_name() -> None:
    with pytest.raises(BadInput, match="'70B'; the models are nano, debug, 16B, 671B"):
        shape_of("70B")
