"""Counts of parameters, FLOPs and GEMMs: TorchTitan's own models, built without memory, are the reference."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from moelab.errors import BadInput, Refused
from moelab.experiment import Experiment
from moelab.model import SHAPES, count_parameters, flops_per_token, gemms, parameters, shape_for, shape_of
from moelab.titan.models import model_spec

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
    heads = (attention.n_heads, attention.qk_nope_head_dim, attention.qk_rope_head_dim, attention.v_head_dim)
    assert (shape.n_heads, shape.qk_nope_head_dim, shape.qk_rope_head_dim, shape.v_head_dim) == heads


OWN = {"dim": 384, "n_layers": 5, "n_dense_layers": 2, "n_heads": 4, "num_experts": 24, "num_shared_experts": 3}
OWN |= {"moe_hidden_dim": 96, "dense_hidden_dim": 320, "q_lora_rank": 0, "kv_lora_rank": 128, "vocab_size": 130_000}


@pytest.mark.parametrize("more", [{}, {"num_shared_experts": 0}, {"qk_nope_head_dim": 96, "qk_rope_head_dim": 32}])
@pytest.mark.parametrize("model", ["16B", "671B", "nano"])
def test_own_dimensions_train_and_count_alike(model: str, more: dict[str, int]) -> None:
    shape = shape_for(Experiment(model=model, shape={**OWN, "v_head_dim": 192, "top_k": 4, **more}))
    config = model_spec(model, ep_backend="standard", shape=shape).model
    with torch.device("meta"):
        module = config.build()
    assert count_parameters(shape).total == sum(parameter.numel() for parameter in module.parameters())
    assert flops_per_token(shape, 512) == config.get_nparams_and_flops(module, 512)[1]
    assert config.layers[0].attention.rope.dim == shape.qk_rope_head_dim
    router, base = config.layers[-1].moe.router, built(model)[1].layers[-1].moe.router
    assert (router.top_k, router.num_experts, router.gate.out_features) == (4, 24, 24)
    for kept in ("score_func", "route_scale", "num_expert_groups"):
        assert getattr(router, kept) == getattr(base, kept)


@pytest.mark.parametrize("model", ["debug", "16B", "671B"])
def test_own_dimensions_change_nothing_else(model: str) -> None:
    whole, again = (model_spec(model, ep_backend="standard", shape=shape).model for shape in (
        shape_of(model),
        shape_for(Experiment(model=model, shape={"n_layers": shape_of(model).n_layers - 1})),
    ))  # fmt: skip
    assert repr(again.layers) == repr(whole.layers[:-1])


@pytest.mark.parametrize("model", MODELS)
def test_top_k_alone_reaches_every_router(model: str) -> None:
    shape = shape_for(Experiment(model=model, shape={"top_k": 1}))
    own, whole = model_spec(model, ep_backend="standard", shape=shape).model, built(model)[1]
    assert {layer.moe.router.top_k for layer in own.layers if layer.moe} == {1}
    assert repr(own) == repr(whole).replace(f"top_k={shape_of(model).top_k}", "top_k=1")
    assert flops_per_token(shape, 512) == own.get_nparams_and_flops(built(model)[0], 512)[1]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"top_k": 300}, "top_k is 300; valid: at most num_experts, 256"),
        ({"num_experts": 100}, "num_experts is 100; valid: a multiple of expert_groups, 8"),
        ({"n_layers": 3}, "n_dense_layers is 3; valid: fewer than n_layers, 3"),
        ({"limited_groups": 9}, "limited_groups is 9; valid: at most expert_groups, 8"),
        ({"dim": 100}, "dim is 100; valid: a multiple of 8"),
        ({"qk_rope_head_dim": 33}, "qk_rope_head_dim is 33; valid: an even number"),
        ({"n_kv_heads": 4}, "n_kv_heads is 4; attention stays mla, DeepSeek's multi-head latent attention"),
        ({"attention": "gqa", "kv_lora_rank": 64}, "kv_lora_rank is 64; attention is gqa"),
        ({"attention": "gqa", "n_kv_heads": 4}, "attention is gqa, which needs head_dim"),
        ({"attention": "gqa", "n_kv_heads": 5, "head_dim": 8}, "n_kv_heads is 5; valid: a divisor of n_heads, 128"),
    ],
)
def test_dimensions_that_do_not_go_together(changes: dict[str, int], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        shape_for(Experiment(model="671B", shape=changes))


def test_a_published_shape_of_latent_attention() -> None:
    """GLM-4.7-Flash: its heads have other dimensions than DeepSeek's."""
    heads = {"n_heads": 20, "q_lora_rank": 768, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256}
    sizes = {"vocab_size": 154_880, "n_layers": 47, "dense_hidden_dim": 10_240, "moe_hidden_dim": 1536}
    experts = {"num_experts": 64, "num_shared_experts": 1, "top_k": 4}
    counts = count_parameters(shape_for(Experiment(model="16B", shape={**sizes, **heads, **experts})))
    assert (counts.total, counts.active) == (29_943_390_976, 3_896_763_136)


def test_grouped_queries_cannot_be_built() -> None:
    shape = shape_for(Experiment(model="16B", shape={"attention": "gqa", "n_kv_heads": 4, "head_dim": 128}))
    with pytest.raises(Refused, match="attention is gqa"):
        model_spec("16B", ep_backend="standard", shape=shape)


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


def test_an_unknown_model_is_refused_by_name() -> None:
    with pytest.raises(BadInput, match="'70B'; the models are nano, debug, 16B, 671B"):
        shape_of("70B")
