"""Models from Hugging Face configurations: counts against what their authors publish, and against TorchTitan's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torchtitan.models import gpt_oss, qwen3

from moelab.errors import BadInput
from moelab.experiment import Experiment
from moelab.experiment_file import parse, parse_overrides, read_experiment
from moelab.layout.rules import NATIVE_BLOCK
from moelab.model import ModelShape, count_parameters, parameters, shape_for, shape_of
from moelab.model.hugging_face import HuggingFaceModel, published_models, read_model
from moelab.planning.project import project

MODELS = published_models()
QWEN, V3 = MODELS["Qwen3-30B-A3B"]["config"], MODELS["DeepSeek-V3"]["config"]


def shape_from(source: str) -> ModelShape:
    return shape_for(parse(Experiment, parse_overrides(read_model(source).overrides)))


@pytest.fixture
def read(tmp_path: Path) -> Any:
    """The model that a file of this configuration has."""

    def of(config: Any, name: str = "config.json") -> HuggingFaceModel:
        text = config if isinstance(config, str) else json.dumps(config)
        (tmp_path / name).write_text(text)
        return read_model(str(tmp_path / name))

    return of


def beside(name: str) -> float:
    """What a published total has besides, in units of 1e9: each as its source says."""
    shape = shape_from(name)
    if name == "Llama-4-Scout":
        return 0.9  # the vision encoder
    if not name.startswith("GLM-4.5"):
        return 0.0
    prediction = sum(p.numel for p in parameters(shape, f"layers.{shape.n_layers - 1}")) + 2 * shape.dim**2
    # The table's note adds multi-token prediction; the figure for Air is only met without.
    return (prediction * (name == "GLM-4.5") - 2 * shape.vocab_size * shape.dim) / 1e9


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_the_published_ones(name: str) -> None:
    """Within 0.5 %, or one of the last digit published; as active, authors count embedding and head, or not."""
    counts, published = count_parameters(shape_from(name)), MODELS[name]
    assert counts.total / 1e9 + beside(name) == pytest.approx(
        published["total"], rel=0.005, abs=30 if name == "Kimi-K2" else 0
    )  # of which only "1 T" is published
    table, digit = counts.by_part["embedding"], 10.0 ** -len(str(published["active"]).partition(".")[2])
    counted = [(counts.active - tables * table) / 1e9 for tables in (0, 1, 2)]
    assert min(abs(one - published["active"]) for one in counted) <= max(0.005 * published["active"], digit)


@pytest.mark.parametrize(("name", "model"), [("DeepSeek-V3", "671B"), ("DeepSeek-V2-Lite", "16B")])
def test_torchtitans_own_models_are_known_as_such(name: str, model: str) -> None:
    assert read_model(name).shape == {}
    assert shape_from(name) == shape_of(model)


@pytest.mark.parametrize(
    ("name", "family", "flavor"),
    [
        ("Qwen3-30B-A3B", qwen3, "30B-A3B"),
        ("Qwen3-235B-A22B", qwen3, "235B-A22B"),
        ("gpt-oss-20b", gpt_oss, "20b"),  # but for its biases and sinks
    ],
)
def test_grouped_queries_count_as_torchtitans(name: str, family: Any, flavor: str) -> None:
    with torch.device("meta"):
        named = family.model_registry(flavor).model.build().named_parameters()
    weights = [one.numel() for name, one in named if "bias" not in name and "sink" not in name]
    assert count_parameters(shape_from(name)).total == sum(weights)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_experts": None}, "no experts"),
        ({"num_experts": 0}, "no experts: num_experts is 0"),  # Granite 4's dense models
        ({"num_experts": None, "moe_config": {"n": 8}}, "outside of moe_config, which is not read"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0; valid: 1 to"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size is 0; valid: 1 to"),
        ({"num_experts_per_tok": None, "moe_topk": [8] * 48}, "moe_topk is .8, 8,"),
        ({"num_experts_per_tok": None, "moe_topk": 8, "tie_word_embeddings": True}, "tie_word_embeddings is true"),
        (
            {"attention_other_setting": {"num_attention_heads": 96}},
            "attention_other_setting {'num_attention_heads': 96}",
        ),
        ({"num_experts": [64, 64]}, r"num_experts is \[64, 64\]; valid: one whole number"),
        ({"hidden_size": None}, "it lacks hidden_size or dim"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step is 2: dense layers"),
        ({"mlp_only_layers": [1]}, "valid: dense layers first"),
        ({"layer_types": ["linear_attention", "full_attention"] * 24}, r"kind of attention \(linear_attention\)"),
        ({"attn_type_list": [0] * 47 + [1]}, "attn_type_list has 0"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is true"),
        ({"linear_num_key_heads": 16}, "linear_num_key_heads 16: not known"),
        ({"moe_latent_size": 1024}, "moe_latent_size 1024: not known"),
        ({"shared_expert_intermediate_size": 1000}, "valid: a multiple of 768"),
        ({"linear_attn_config": {"kda_layers": [1, 2]}}, "linear_attn_config {'kda_layers'"),  # Kimi-Linear
        ({"full_attention_interval": 4}, "full_attention_interval 4: not known"),  # Qwen3-Next
        ({"attn_layer_period": 8, "mamba_d_state": 16}, "attn_layer_period 8, mamba_d_state 16"),  # Jamba
        ({"hybrid_override_pattern": "MEM*"}, r"hybrid_override_pattern MEM\*: not known"),  # Nemotron-H
        ({"hc_mult": 4, "compress_ratios": [4, 128]}, "hc_mult 4, compress_ratios"),  # DeepSeek-V4
        ({"shared_expert_intermediate_size": [768]}, r"shared_expert_intermediate_size is \[768\]; valid: one whole"),
        ({"mlp_only_layers": 3}, "mlp_only_layers is 3; valid: a list"),
        ({"moe_layer_frequency": 2}, "moe_layer_frequency is 2: dense layers"),  # Arctic
        ({"use_residual": True}, "use_residual True: not known"),  # Arctic: a dense FFN beside the experts
        ({"moe_layer_end_index": 40}, "valid: dense layers first"),  # ERNIE 4.5
        ({"moe_layer_freq": [0, 1, 1]}, "a list says of 3 of 48 layers"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; valid: 1 to 1,000"),
        ({"layer_types": [None] * 48}, r"kind of attention \(None\)"),
    ],
)
def test_what_a_shape_cannot_say_is_refused_by_name(read: Any, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        read(QWEN | changes)


@pytest.mark.parametrize(
    ("config", "left"),
    [
        ({"num_nextn_predict_layers": 1}, "multi-token prediction (num_nextn_predict_layers)"),
        ({"attention_bias": True}, "biases (attention_bias)"),
        ({"index_topk": 2048, "index_n_heads": 64}, "the indexer of sparse attention"),
        ({"layer_types": ["sliding_attention", "full_attention"] * 24}, "windows of attention (sliding_attention)"),
        ({"quantization_config": {"bits": 4}}, "the checkpoint's number format (quantization_config)"),
        ({"use_something_new": True}, "not read: use_something_new"),
        ({"compression_ratio": 1.0, "moe_layer_end_index": 47}, "the rotary embedding (compression_ratio"),  # ERNIE 4.5
    ],
)
def test_what_is_left_out_is_said(read: Any, config: dict[str, Any], left: str) -> None:
    model = read(QWEN | config)
    assert any(left in one for one in model.left), model.left
    assert model.shape == read_model("Qwen3-30B-A3B").shape


def test_housekeeping_is_not_worth_a_word(read: Any) -> None:
    keys = {"bos_token_id": 151643, "eos_token_id": [1, 2], "pad_token_id": 0, "pretraining_tp": 1, "use_cache": True}
    keys |= {"transformers_version": "4.51.0", "rms_norm_eps": 1e-6, "hidden_act": "silu", "initializer_range": 0.02}
    model = read(QWEN | keys | {"shared_expert_intermediate_size": None})
    assert model.left == read_model("Qwen3-30B-A3B").left


def test_layers_of_a_list_and_a_text_model_inside_of_another(read: Any) -> None:
    """Kimi's later releases, transformers 5, Qwen3-Omni and Mistral write configurations so."""
    text = V3 | {"mlp_layer_types": ["dense"] * 3 + ["sparse"] * 58, "first_k_dense_replace": None}
    del text["moe_layer_freq"]
    kimi = read({"model_type": "kimi_k25", "text_config": text, "vision_config": {"hidden_size": 1152}})
    assert (kimi.model, kimi.shape) == ("671B", {})
    assert "other modalities (vision_config)" in kimi.left
    omni = {"model_type": "qwen3_omni_moe", "thinker_config": {"text_config": QWEN, "audio_config": {"d_model": 1280}}}
    assert read(omni).shape == read_model("Qwen3-30B-A3B").shape
    mixtral = {"dim": 4096, "n_layers": 32, "head_dim": 128, "hidden_dim": 14336, "n_heads": 32, "n_kv_heads": 8}
    mixtral |= {"norm_eps": 1e-5, "vocab_size": 32000, "moe": {"num_experts_per_tok": 2, "num_experts": 8}}
    with_mark = "\ufeff" + json.dumps(mixtral)  # some editors begin a file with this sign
    assert read(with_mark, "params.json").shape == read_model("Mixtral-8x7B").shape


@pytest.mark.parametrize(
    ("config", "model", "expected"),
    [
        # Transformers' DeepSeek-V2 does not look at ``n_group`` then.
        (V3 | {"topk_method": "greedy"}, "671B", {"expert_groups": 1, "limited_groups": 1}),
        # Ling names the width of one of its shared experts, Qwen that of its only one.
        (QWEN | {"num_shared_experts": 2, "moe_shared_expert_intermediate_size": 768, "score_function": "sigmoid"},
         "671B", {"num_shared_experts": 2}),
        (QWEN | {"shared_expert_intermediate_size": 3072}, "16B", {"num_shared_experts": 4}),
    ],
)  # fmt: skip
def test_routers_and_shared_experts(
    read: Any, tmp_path: Path, config: dict[str, Any], model: str, expected: dict[str, int]
) -> None:
    assert read(config).model == model
    shape = shape_from(str(tmp_path))
    assert {field: getattr(shape, field) for field in expected} == expected


def test_what_is_no_configuration(read: Any, tmp_path: Path) -> None:
    for text, words in (("{", "cannot be read as JSON"), ("[]", "expected a JSON object")):
        with pytest.raises(BadInput, match=words):
            read(text)
    for path, words in ((tmp_path / "no.json", r"no such file, nor one of the models DeepSeek-V3, .*Qwen3-30B-A3B"),
                        (tmp_path.parent, "a folder without config.json or params.json")):  # fmt: skip
        with pytest.raises(BadInput, match=words):
            read_model(str(path))


def test_plan_says_what_it_took_and_what_it_left(call: Any, tmp_path: Path) -> None:
    written = tmp_path / "qwen.yaml"
    fields = ["gpus_per_node=8", "ep=8", "seq_len=4096", "hardware=b200_node", "activation_checkpoint=full"]
    arguments = ["plan", "--from-hf", "Qwen3-30B-A3B", *(part for one in fields for part in ("--set", one))]
    text = " ".join(call(*arguments, "--write", written).out.split())
    assert "model taken from Qwen3-30B-A3B; everything else as in model=16B" in text
    assert "planned and projected, and not trained" in text
    assert "torchrun" not in text
    assert shape_for(read_experiment(written)) == shape_from("Qwen3-30B-A3B")
    answer = call(*arguments, "--json")
    assert (answer.code, answer.json["legal"], answer.json["fits"]) == (0, True, True)
    assert answer.json["parameters"] == {"total": 30_532_122_624, "active": 3_353_032_704}
    assert "num_key_value_heads" in answer.json["from_hf"]["taken"]


def test_a_study_can_take_its_model_from_elsewhere(call: Any, tmp_path: Path) -> None:
    study = tmp_path / "study.yaml"
    study.write_text("study: s\nexperiment: {model: nano, gpus_per_node: 4, ep: 4}\narms: [{}, {precision: mxfp8}]\n")
    plans = call("plan", study, "--from-hf", "GLM-4.7-Flash", "--json").json["plans"]
    assert [one["parameters"] for one in plans] == [{"total": 29_943_390_976, "active": 3_896_763_136}] * 2


def test_a_model_from_elsewhere_is_projected_without_a_file(call: Any) -> None:
    given = ["hardware=b200_x256", "nodes=2", "gpus_per_node=8", "ep=8", "local_batch=2"]
    pairs = [word for one in given for word in ("--set", one)]
    printed = call("project", "--from-hf", "Qwen3-30B-A3B", *pairs, "--json")
    assert (printed.code, printed.err) == (0, "moelab: assumed, because not given: seq_len=4096\n")
    fields = parse_overrides([*read_model("Qwen3-30B-A3B").overrides, *given, "seq_len=4096"])
    assert printed.json["tps"] == pytest.approx(project(parse(Experiment, fields)).tps)
    assert printed.json["gpus"] == 16


def test_a_model_that_is_only_planned_is_refused_before_it_starts(call: Any, tmp_path: Path) -> None:
    path = tmp_path / "e.yaml"
    path.write_text("{model: nano, hardware: cpu, shape: {attention: gqa, n_kv_heads: 1, head_dim: 64}}")
    refused = call("run", path, "--runs", tmp_path / "runs")
    assert refused.code == 3
    assert "attention is gqa: TorchTitan's DeepSeek-V3 has multi-head latent attention only" in refused.err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", MODELS)
def test_every_published_model_is_planned_and_projected(name: str) -> None:
    """On the newest GPUs too, where the label says that nothing like it was measured; no faster than the datasheet."""
    shape, experts = shape_from(name), shape_from(name).num_experts
    fields = parse_overrides(read_model(name).overrides) | {
        "nodes": 64, "gpus_per_node": 4, "ep": max(ep for ep in (4, 8) if experts % ep == 0), "seq_len": 4096,
        "local_batch": 8, "activation_checkpoint": "full", "compile": "model+loss",
        "precision": "bf16" if shape.dim % NATIVE_BLOCK else "mxfp8",  # gpt-oss is not for torchao's native kernels
    }  # fmt: skip
    on = {"gb300_nvl72_x4": "hybridep", "b300_x256": "hybridep", "mi355x_x256": "standard"}
    for hardware, backend in on.items():
        projection = project(parse(Experiment, {**fields, "hardware": hardware, "ep_backend": backend}))
        assert "extrapolated" in projection.label
        assert 0.01 < projection.mfu["computed"] < 0.6
        assert projection.interval[0] < projection.tps < projection.interval[1]


def test_the_sum_of_a_heads_parts_is_known_and_another_is_not(read: Any) -> None:
    """DeepSeek-V3 as transformers saves it, and GLM-5."""
    saved = V3 | {"qk_head_dim": V3["qk_nope_head_dim"] + V3["qk_rope_head_dim"]}
    assert read(saved).shape == read(V3).shape
    with pytest.raises(BadInput, match="qk_head_dim 191: not known"):
        read(saved | {"qk_head_dim": 191})


def test_dbrx_has_its_dimensions_in_two_parts(read: Any) -> None:
    """databricks/dbrx-base: 132B parameters, of which 36B are active."""
    attention, experts = (
        {"kv_n_heads": 8, "clip_qkv": 8},
        {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
    )
    parts = {"attn_config": attention, "ffn_config": experts}
    model = read({"model_type": "dbrx", "d_model": 6144, "n_heads": 48, "n_layers": 40, "vocab_size": 100352} | parts)
    counts = count_parameters(model.dimensions)
    assert (round(counts.total / 1e9), round(counts.active / 1e9)) == (132, 36)
