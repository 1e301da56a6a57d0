"""The DeepSeek-V3 models by name: TorchTitan's own, unchanged, and one made for a laptop.

``nano`` has every part of DeepSeek-V3 that the study is about, at a size where two CPU cores take a step in less than
half a second: multi-head latent attention with low-rank queries, one dense layer, sigmoid routing with normalised
scores and auxiliary-loss-free balancing, shared and routed experts. Its dimensions are multiples of 32, the block of
MXFP8, and the query, key and value heads have one size so that the CPU's fused attention takes them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torchtitan.models.deepseek_v3 as deepseek_v3
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.deepseek_v3 import DeepSeekV3Model
from torchtitan.protocols.model_spec import ModelSpec

TITAN_FLAVORS = {"debug": "debugmodel", "16B": "16B", "671B": "671B"}


@dataclass(frozen=True, kw_only=True)
class NanoShape:
    """Dimensions of ``nano``."""

    vocab_size: int = 2048
    dim: int = 128
    n_layers: int = 4
    n_dense_layers: int = 1
    n_heads: int = 2
    q_lora_rank: int = 64
    kv_lora_rank: int = 64
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 32
    v_head_dim: int = 64
    dense_hidden_dim: int = 256
    moe_hidden_dim: int = 128
    num_experts: int = 8
    num_shared_experts: int = 1
    top_k: int = 2


NANO = NanoShape()


def model_spec(model: str, *, ep_backend: str) -> ModelSpec:
    """TorchTitan's specification of a model.

    Args:
        model: ``nano``, ``debug``, ``16B`` or ``671B``.
        ep_backend: TorchTitan's name of the token dispatcher, such as ``standard``.
    """
    if model in TITAN_FLAVORS:
        return deepseek_v3.model_registry(TITAN_FLAVORS[model], moe_comm_backend=ep_backend)
    spec = deepseek_v3.model_registry("debugmodel", moe_comm_backend=ep_backend)
    spec.flavor = "nano"
    spec.model = nano_config(NANO, ep_backend=ep_backend)
    return spec


def nano_config(shape: NanoShape, *, ep_backend: str) -> DeepSeekV3Model.Config:
    """The nano model, built by TorchTitan's DeepSeek-V3 builders with its initialisation."""
    layers = deepseek_v3._build_dsv3_layers(
        n_layers=shape.n_layers,
        n_dense_layers=shape.n_dense_layers,
        dim=shape.dim,
        n_heads=shape.n_heads,
        q_lora_rank=shape.q_lora_rank,
        kv_lora_rank=shape.kv_lora_rank,
        qk_nope_head_dim=shape.qk_nope_head_dim,
        qk_rope_head_dim=shape.qk_rope_head_dim,
        v_head_dim=shape.v_head_dim,
        mscale=1.0,
        dense_hidden_dim=shape.dense_hidden_dim,
        moe_hidden_dim=shape.moe_hidden_dim,
        num_experts=shape.num_experts,
        num_shared_experts=shape.num_shared_experts,
        router_top_k=shape.top_k,
        router_score_func="sigmoid",
        router_route_norm=True,
        attn_backend="flex",
        moe_comm_backend=ep_backend,
        non_blocking_capacity_factor=None,
        rope=ComplexRoPE.Config(dim=shape.qk_rope_head_dim, max_seq_len=4096, theta=10000.0),
    )
    init = deepseek_v3._EMBEDDING_INIT, deepseek_v3._NORM_INIT, deepseek_v3._output_linear_init(shape.dim)
    return DeepSeekV3Model.Config(
        vocab_size=shape.vocab_size,
        dim=shape.dim,
        tok_embeddings=Embedding.Config(num_embeddings=shape.vocab_size, embedding_dim=shape.dim, param_init=init[0]),
        norm=RMSNorm.Config(normalized_shape=shape.dim, param_init=init[1]),
        lm_head=Linear.Config(in_features=shape.dim, out_features=shape.vocab_size, param_init=init[2]),
        layers=layers,
    )
