"""The DeepSeek-V3 models by name: TorchTitan's own, unchanged, one for a laptop, and models of your own dimensions.

``nano`` has every part of DeepSeek-V3 that the study is about, at a size where two CPU cores take less than half a
second per step: multi-head latent attention with low-rank queries, one dense layer, sigmoid routing with normalised
scores and auxiliary-loss-free balancing, shared and routed experts. Its dimensions are multiples of 32, MXFP8's block
size, and its query, key and value heads have the same size, which the CPU's fused attention requires.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any
from unittest import mock

import torch
import torchtitan.models.deepseek_v3 as deepseek_v3
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.deepseek_v3 import DeepSeekV3Model
from torchtitan.protocols.model_spec import ModelSpec

from moelab.errors import Refused
from moelab.model.shape import ModelShape, shape_of

TITAN_FLAVORS = {"debug": "debugmodel", "16B": "16B", "671B": "671B"}
NANO_SETTINGS: dict[str, Any] = {
    "mscale": 1.0,
    "router_score_func": "sigmoid",
    "router_route_norm": True,
    "non_blocking_capacity_factor": None,
    "rope": ComplexRoPE.Config(dim=shape_of("nano").qk_rope_head_dim, max_seq_len=4096, theta=10000.0),
}
FLEX_TILES = {
    "fwd_BLOCK_M": 128,
    "fwd_BLOCK_N": 64,
    "fwd_num_warps": 8,
    "fwd_num_stages": 3,
    "bwd_BLOCK_M1": 32,
    "bwd_BLOCK_N1": 128,
    "bwd_BLOCK_M2": 128,
    "bwd_BLOCK_N2": 32,
    "bwd_num_warps": 8,
    "bwd_num_stages": 3,
}
"""Tiles of FlexAttention for heads of 192 and 128 features on Hopper. PyTorch 2.14's own choice is slower there: 4.7
instead of 3.7 ms forward and 24.7 instead of 11.8 backward, for 2 x 4,096 tokens, 128 heads, causal, on an H200.
TorchTitan requests autotuning, but a compile of the whole model ignores its options for this part
(``benchmarks/results/experts_h200.json``)."""
FLASH_BLOCKS = (128, 96)
"""Queries and keys per mask block for flash-attn-4 on Hopper: for heads of 192 features its backward pass takes keys 96
at a time and refuses TorchTitan's 128. With it attention takes 2.6 ms forward and 9.2 backward at the sizes above, and
a step of three MoE layers 1.8 % less than with ``FLEX_TILES`` (``one_h200_steps.json``). All packages of
``flash-attn-4[cu13]`` must be installed: if one is missing, the kernel fails only when the first batch compiles it."""


def model_spec(
    model: str, *, ep_backend: str, attention_backend: str = "flex", shape: ModelShape | None = None
) -> ModelSpec:
    """TorchTitan's specification of a model: ``nano``, ``debug``, ``16B`` or ``671B``.

    Backends have TorchTitan's names; attention can also be ``flex_tiles``. A ``shape`` takes the place of the model's
    own dimensions; its other settings stay.

    Raises:
        Refused: for grouped-query attention, which TorchTitan's DeepSeek-V3 does not have.
    """
    flavor = TITAN_FLAVORS.get(model, "debugmodel")  # nano takes everything but its model from debug
    backends = {"moe_comm_backend": ep_backend, "attn_backend": attention_backend.replace("flex_tiles", "flex")}
    spec = deepseek_v3.model_registry(flavor, **backends)
    shape = shape or shape_of(model)
    if shape.plan_only:
        raise Refused(shape.plan_only)
    # A model of TorchTitan's with its own dimensions stays exactly as TorchTitan made it.
    if model not in TITAN_FLAVORS or shape != shape_of(model):
        spec.flavor = model
        settings = _layer_settings(flavor) if model in TITAN_FLAVORS else NANO_SETTINGS
        rope = dataclasses.replace(settings["rope"], dim=shape.qk_rope_head_dim)
        spec.model = _config(shape, settings | {"rope": rope} | backends)
    if attention_backend == "flex_tiles":
        for _name, attention, *_ in spec.model.traverse(FlexAttention.Config):
            attention.kernel_options = dict(FLEX_TILES)
    if attention_backend == "flex_flash" and torch.cuda.get_device_capability()[0] == 9:
        for _name, attention, *_ in spec.model.traverse(FlexAttention.Config):
            attention.block_size = FLASH_BLOCKS
    return spec


def _layer_settings(flavor: str) -> dict[str, Any]:
    """The arguments with which TorchTitan's flavor calls the builder of layers.

    TorchTitan 0.3.0 has them inside a function for each flavor; this can go when it has a table.
    """
    with mock.patch.object(deepseek_v3, "_build_dsv3_layers", wraps=deepseek_v3._build_dsv3_layers) as build:
        deepseek_v3.model_registry(flavor)
    return dict(build.call_args.kwargs)


def _config(shape: ModelShape, settings: dict[str, Any]) -> DeepSeekV3Model.Config:
    """A model of any shape, built by TorchTitan's DeepSeek-V3 builders with its initialisation."""
    sizes = {
        field.name: getattr(shape, field.name)
        for field in dataclasses.fields(shape)
        if field.name in inspect.signature(deepseek_v3.build_mla_moe_layers).parameters  # only what the builder takes
    }
    grouped = shape.expert_groups > 1
    router = {
        "router_top_k": shape.top_k,
        "router_num_expert_groups": shape.expert_groups if grouped else None,
        "router_num_limited_groups": shape.limited_groups if grouped else None,
    }
    init = deepseek_v3._EMBEDDING_INIT, deepseek_v3._NORM_INIT, deepseek_v3._output_linear_init(shape.dim)
    # In this order: the shape's own sizes win over those of the flavor.
    layers = deepseek_v3._build_dsv3_layers(**(settings | sizes | router))
    for layer in layers:
        if layer.moe is not None and not shape.num_shared_experts:
            layer.moe.shared_experts = None  # the builder's FFN of zero features cannot be initialised
    return DeepSeekV3Model.Config(
        vocab_size=shape.vocab_size,
        dim=shape.dim,
        tok_embeddings=Embedding.Config(num_embeddings=shape.vocab_size, embedding_dim=shape.dim, param_init=init[0]),
        norm=RMSNorm.Config(normalized_shape=shape.dim, param_init=init[1]),
        lm_head=Linear.Config(in_features=shape.dim, out_features=shape.vocab_size, param_init=init[2]),
        layers=layers,
    )
