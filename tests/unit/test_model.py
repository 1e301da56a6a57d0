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
def test_parameters_flops_routing_and_heads_are_torchtitans(model: str) -> None:
    shape, (module, config) = shape_of(model), built(model)
    ours = {f"{m}.{p.name}": p.shape for m in shape.modules for p in parameters(shape, m)}
    assert ours == {name: tuple(value.shape) for name, value in module.named_parameters()}
    for seq_len in (128, 4096, 8192):
        ours = (count_parameters(shape).total, flops_per_token(shape, seq_len))
        assert ours == config.get_nparams_and_flops(module, seq_len)
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


@pytest.mark.parametrize("model", MODELS)
def test_own_dimensions_change_nothing_else(model: str) -> None:
    """Of one layer less, and of top-1 routing."""
    whole, n_layers = built(model)[1], shape_of(model).n_layers
    less, top_1 = (
        model_spec(model, ep_backend="standard", shape=shape_for(Experiment(model=model, shape=changes))).model
        for changes in ({"n_layers": n_layers - 1}, {"top_k": 1})
    )
    assert repr(less.layers) == repr(whole.layers[:-1])
    assert repr(top_1) == repr(whole).replace(f"top_k={shape_of(model).top_k}", "top_k=1")


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
def test_dimensions_that_do_not_go_together(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        shape_for(Experiment(model="671B", shape=changes))


def test_grouped_queries_cannot_be_built_nor_an_unknown_model() -> None:
    shape = shape_for(Experiment(model="16B", shape={"attention": "gqa", "n_kv_heads": 4, "head_dim": 128}))
    with pytest.raises(Refused, match="attention is gqa"):
        model_spec("16B", ep_backend="standard", shape=shape)
    with pytest.raises(BadInput, match="'70B'; the models are nano, debug, 16B, 671B"):
        shape_of("70B")


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
