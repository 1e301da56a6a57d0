"""The shape of a model from its Hugging Face ``config.json``, or from Mistral's ``params.json``.

Every key is one of three kinds. Keys in :data:`TAKEN` give a dimension. Keys that change neither weights nor products,
or that :data:`LEFT` has words for, are left out, and the answer says so. Any other key that is a number of something,
and any arrangement of layers that is not *dense ones, then those with experts*, is refused by name: a plan that left
it out would be of another model.

``data/models.yaml`` has the configurations of some published models, by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moelab.data import read_yaml
from moelab.errors import BadInput
from moelab.experiment import MOST_LAYERS, Experiment
from moelab.files import read_json
from moelab.model.shape import OF_GROUPED_QUERIES, OF_LATENT_ATTENTION, SHAPES, ModelShape, shape_for

TAKEN = {
    "vocab_size": ("vocab_size",),
    "dim": ("hidden_size", "dim", "d_model"),
    "n_layers": ("num_hidden_layers", "n_layers"),
    "n_heads": ("num_attention_heads", "n_heads"),
    "n_kv_heads": ("num_key_value_heads", "n_kv_heads", "kv_n_heads"),
    "head_dim": ("head_dim",),
    **{name: (name,) for name in OF_LATENT_ATTENTION},
    "n_dense_layers": ("first_k_dense_replace", "moe_layer_start_index"),
    "dense_hidden_dim": ("intermediate_size_mlp", "intermediate_size", "hidden_dim"),
    "moe_hidden_dim": (
        "moe_intermediate_size",
        "expert_hidden_dim",
        "ffn_hidden_size",
        "intermediate_size",
        "hidden_dim",
    ),
    "num_experts": ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts"),
    "num_shared_experts": ("n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts"),
    "top_k": ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_k", "moe_topk", "moe_top_k"),
    "expert_groups": ("n_group", "num_expert_groups"),
    "limited_groups": ("topk_group", "num_expert_groups_per_tok"),
}
"""Names that configurations have for each dimension; the first that is there counts."""
MAY_BE_ZERO = ("n_dense_layers", "num_shared_experts", "q_lora_rank", "expert_groups", "limited_groups")
LARGEST = 10_000_000
"""Of any dimension; vocabularies have a fifth of a million entries."""
NEEDED = ("vocab_size", "dim", "n_layers", "n_heads", "moe_hidden_dim", "top_k")
READ = (
    r"model_type|architectures|scor(ing|e)_func(tion)?|topk_method|use_qk_norm|tie_word_embeddings|tied_embeddings|"
    r"(moe_)?shared_expert_intermediate_size|"
    r"mlp_only_layers|moe_layers|moe_layer_end_index|mlp_layer_types|layer_types|attn_type_list"
)
"""Keys that are looked at and are no dimension."""
LEFT = {
    "multi-token prediction": r"num_nextn_predict_layers|use_mtp|(num_)?mtp_.*",
    "biases": r".*bias",
    "windows of attention: planned as full causal attention": (
        r"sliding_window.*|use_sliding_window|max_window_layers|attention_chunk_size|no_rope_layer.*"
    ),
    "the indexer of sparse attention: attention is planned as dense": r"index_.*|indexer_.*",
    "other modalities": r".*(vision|image|video|audio|media|speech|mm_|projector).*",
    "the checkpoint's number format": r"quantization.*|compression_config|torch_dtype|dtype",
    "the router's scale, norm and auxiliary loss": (
        r"routed_scal.*|norm_topk_prob|.*aux_loss.*|seq_aux|router_.*|output_router_logits|moe_.*(loss|norm).*"
    ),
    "the rotary embedding": (
        r"rope_.*|rotary_.*|partial_rotary.*|.*max_position_embeddings|initial_context_length|max_seq_len|yarn|"
        r"llama_4_scaling|.*(tuning|floor|attn)_scale.*|attn_temperature.*|compression_ratio"
    ),
}
"""What is left out on purpose, by the names of its keys."""
NUMBER = r".*(_size|_dims?|_heads?|_rank|_experts?|_layers?|_interval|_freq|_step|_period|_offset|_mult)$|(num|n)_"
"""Names of keys that count something."""
ARRANGEMENT = (
    r".*(block_type|pattern|hybrid|mamba|ssm|linear_|kda|conv|compress|use_residual|_enum$|_config$|other_setting)"
)
"""Names of keys that, of whatever type, tell of other layers than attention and experts."""
HARMLESS = (
    r"(num_)?(pad|bos|eos|decoder|sep|cls|begin|end|unk|mask)_.*|num_(labels|beams|beam_groups|return_sequences)|"
    r"chunk_size_feed_forward|pretraining_tp|.*initializer_range|.*no_repeat_ngram_size|transformers_version|use_cache|"
    r".*_eps|hidden_act|auto_map|.*dropout|rms_norm.*|layernorm_.*|_.*|ep_size|id2label|label2id|task_specific_params|"
    r"generation_config|cache_implementation|mlp_intermediate_size"
)
"""Keys that change neither weights nor products, which nobody needs to be told of."""
INSIDE = ("text_config", "language_config", "llm_config", "thinker_config", "moe")
"""Keys under which a model of several modalities has its language model, and Mistral its experts."""
PARTS = ("attn_config", "ffn_config")
"""Keys under which DBRX has the dimensions of its attention and of its experts."""
WINDOWS = ("sliding_attention", "chunked_attention")
STEPS = (
    "moe_layer_freq",
    "moe_layer_frequency",
    "decoder_sparse_step",
    "interleave_moe_layer_step",
    "moe_layer_interval",
    "route_every_n",
)
"""Keys for every how many layers there are experts; a list says it of each layer."""
SIGMOID = ("deepseek_v3", "kimi_k2", "glm4_moe", "glm4_moe_lite", "glm4v_moe_text", "minimax_m2", "llama4_text")
"""Kinds of models whose router is sigmoid without a key that says so."""
NORMS_QUERIES = ("qwen3_moe", "qwen3_vl_moe_text", "olmoe")
"""Kinds of models that norm queries and keys without a key that says so."""


@dataclass(frozen=True, kw_only=True)
class HuggingFaceModel:
    """A model of another system as an experiment names it."""

    source: str
    model: str  # whose router and tokenizer stand in: ``671B`` for sigmoid scores, ``16B`` for softmax
    shape: dict[str, Any]  # dimensions that differ from ``model``'s; fields of an experiment's ``shape``
    taken: tuple[str, ...]  # keys of the configuration that gave a dimension
    left: tuple[str, ...]  # what else the configuration has, in words or by its key

    @property
    def overrides(self) -> tuple[str, str]:
        """The model as ``--set`` takes it."""
        return f"model={self.model}", f"shape={json.dumps(self.shape)}"

    @property
    def dimensions(self) -> ModelShape:
        """All of its dimensions."""
        return shape_for(Experiment(model=self.model, shape=self.shape))

    def to_json(self) -> dict[str, Any]:
        """The fields as one JSON object."""
        return asdict(self)


IN_MENUS = ("DeepSeek-V3", "Kimi-K2", "GLM-4.5", "Qwen3-235B-A22B", "Qwen3-30B-A3B", "DeepSeek-V2-Lite")
"""Published models that the explorers of traffic and of a cluster offer."""


def published_models() -> dict[str, dict[str, Any]]:
    """Published models by name: their configuration, and the parameters that their authors name."""
    models: dict[str, dict[str, Any]] = read_yaml("models.yaml")
    return models


def read_model(source: str) -> HuggingFaceModel:
    """Read a configuration.

    ``source`` is ``config.json`` or ``params.json``, a folder with one, or a name of :func:`published_models`.

    Raises:
        BadInput: if it cannot be read, lacks a dimension, or has something that a shape cannot say.

    >>> qwen = read_model("Qwen3-30B-A3B")
    >>> qwen.model, qwen.shape["n_kv_heads"], qwen.shape["num_experts"]
    ('16B', 4, 128)
    """
    path = Path(source)
    if path.is_dir():
        path = next((path / name for name in ("config.json", "params.json") if (path / name).is_file()), path)
    if path.exists():
        config = _read(path)
    elif source in (presets := published_models()):
        config = presets[source]["config"]
    else:
        raise BadInput(f"{source}: no such file, nor one of the models {', '.join(presets)}")
    for key in PARTS:
        if isinstance(part := config.get(key), dict):
            config = {**part, **config}  # the kind of model stands outside
    whole = dict(config)
    # Two levels deep in Qwen3-Omni; what stands outside counts where the inside does not say it.
    while inner := next((config[key] for key in INSIDE if isinstance(config.get(key), dict)), None):
        config = inner
        whole |= inner
    config = whole
    try:
        return _converted(source, {key: value for key, value in config.items() if not isinstance(value, dict)}, config)
    except BadInput as error:
        raise BadInput(f"{source}: {error}") from None


def _read(path: Path) -> dict[str, Any]:
    if path.is_dir():
        raise BadInput(f"{path}: a folder without config.json or params.json")
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise BadInput(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


def _converted(source: str, config: dict[str, Any], whole: dict[str, Any]) -> HuggingFaceModel:
    kind = config.get("model_type")
    used = {field: next((key for key in keys if config.get(key) is not None), None) for field, keys in TAKEN.items()}
    shape: dict[str, Any] = {field: config[key] for field, key in used.items() if key}
    if not shape.get("num_experts"):  # 0 is what a dense sibling of a family writes
        zero = f"{used['num_experts']} is {shape['num_experts']}" if used["num_experts"] else ""
        lacks = f"it has none of {', '.join(TAKEN['num_experts'])}"
        if parts := [
            key for key, value in whole.items() if isinstance(value, dict) and re.search("moe|ffn|expert", key)
        ]:
            raise BadInput(f"{lacks} outside of {', '.join(parts)}, which is not read; valid: these keys at the top")
        raise BadInput(f"no experts: {zero or lacks}; valid: a mixture of experts")
    if config.get("tie_word_embeddings") or config.get("tied_embeddings"):
        raise BadInput("tie_word_embeddings is true: the head shares the embedding's weights; valid: false")
    latent = "kv_lora_rank" in shape
    left = (*_left(config, whole),)
    needed = (*NEEDED, "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim") if latent else NEEDED
    if lacking := [" or ".join(TAKEN[field]) for field in needed if field not in shape]:
        raise BadInput(f"it lacks {', '.join(lacking)}")
    # A bool is an int too, by `isinstance`.
    if wrong := [f"{used[field]} is {str(value)[:60]}" for field, value in shape.items() if type(value) is not int]:
        raise BadInput(f"{', '.join(wrong)}; valid: one whole number for all layers")
    for field, value in shape.items():
        least, most = int(field not in MAY_BE_ZERO), MOST_LAYERS if field == "n_layers" else LARGEST
        if not least <= value <= most:
            raise BadInput(f"{used[field]} is {value}; valid: {least} to {most:,}")

    shape["n_dense_layers"] = _dense_layers(config, shape)
    if not shape["n_dense_layers"]:
        shape.pop("dense_hidden_dim", None)
    for key in ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"):
        if type(width := config.get(key) or 0) is not int:
            raise BadInput(f"{key} is {width!r}; valid: one whole number for all layers")
        wide = width * shape.get("num_shared_experts", 1)  # Qwen's only one is as wide as several
        if wide % shape["moe_hidden_dim"]:
            raise BadInput(f"{key} is {width}; valid: a multiple of {shape['moe_hidden_dim']}")
        if wide:
            shape["num_shared_experts"] = wide // shape["moe_hidden_dim"]
    # Llama 4 has one shared expert and no key that says so.
    shape.setdefault("num_shared_experts", int(kind == "llama4_text"))
    # Transformers' DeepSeek-V2 does not look at `n_group` then.
    if config.get("topk_method") == "greedy" or "expert_groups" not in shape:
        shape |= {"expert_groups": 1, "limited_groups": 1}
    if latent:
        # DeepSeek-V2-Lite has null: its queries have full rank.
        shape.setdefault("q_lora_rank", 0)
    else:
        shape.setdefault("n_kv_heads", shape["n_heads"])
        shape.setdefault("head_dim", shape["dim"] // shape["n_heads"])
        shape["qk_norm"] = bool(config.get("use_qk_norm", kind in NORMS_QUERIES))
        shape["attention"] = "gqa"
    others = OF_GROUPED_QUERIES if latent else OF_LATENT_ATTENTION
    scores = next((config[key] for key in ("scoring_func", "score_function", "score_func") if key in config), None)
    sigmoid = scores == "sigmoid" or (scores is None and kind in SIGMOID)
    base = SHAPES["671B" if sigmoid else "16B"]
    return HuggingFaceModel(
        source=source,
        model=base.name,
        shape={
            field: value
            for field, value in shape.items()
            if field not in others and getattr(base, field, None) != value
        },
        taken=tuple(dict.fromkeys(key for field, key in used.items() if key and field not in others)),
        left=(*left, f"how the router scores: planned as in {base.name}"),
    )


def _dense_layers(config: dict[str, Any], shape: dict[str, Any]) -> int:
    """How many layers without experts come first.

    Raises:
        BadInput: if layers are arranged in another way, or attention is of several kinds.
    """
    for key in ("mlp_only_layers", "moe_layers", "layer_types", "mlp_layer_types", "attn_type_list"):
        if not isinstance(config.get(key) or [], list):
            raise BadInput(f"{key} is {config[key]!r}; valid: a list")
    for key in STEPS:
        if not isinstance(step := config.get(key, 1), list) and step not in (None, 1):
            raise BadInput(f"{key} is {step}: dense layers lie between those with experts; valid: 1")
    kinds = sorted({str(kind) for kind in config.get("layer_types") or ()} - {"full_attention", *WINDOWS})
    if kinds or 0 in (config.get("attn_type_list") or ()):
        named = ", ".join(kinds) or "attn_type_list has 0"
        raise BadInput(f"layers with another kind of attention ({named}); valid: one kind for all layers")
    layers = range(shape["n_layers"])
    # ERNIE's last one with experts; -1 where that is the last of all
    last = end if type(end := config.get("moe_layer_end_index")) is int and end >= 0 else layers.stop
    experts = [shape.get("n_dense_layers", 0) <= layer <= last for layer in layers]
    if isinstance(config.get("moe_layer_freq"), list):
        experts = [bool(one) for one in config["moe_layer_freq"]]
    elif config.get("mlp_layer_types"):
        experts = [one != "dense" for one in config["mlp_layer_types"]]
    elif config.get("moe_layers"):
        experts = [layer in config["moe_layers"] for layer in layers]
    if len(experts) < len(layers):
        raise BadInput(f"a list says of {len(experts)} of {len(layers)} layers if they have experts; valid: of all")
    # A list may go on beyond the layers: files that were cut to a few layers for a trial keep it.
    dense = config.get("mlp_only_layers") or ()
    experts = [one and layer not in dense for layer, one in zip(layers, experts, strict=False)]
    if experts != sorted(experts):
        raise BadInput("dense layers lie between those with experts; valid: dense layers first")
    return experts.count(False)


def _left(config: dict[str, Any], whole: dict[str, Any]) -> Iterator[str]:
    """What is left out, in words where there are some.

    Raises:
        BadInput: for a number of something that has no place in a shape.
    """
    known = {*(key for keys in TAKEN.values() for key in keys), *STEPS, *INSIDE, *PARTS}
    if config.get("qk_head_dim") == sum(config.get(part) or 0 for part in ("qk_nope_head_dim", "qk_rope_head_dim")):
        known.add("qk_head_dim")  # which transformers writes beside its parts
    rest = [key for key, value in whole.items() if value not in (None, False, 0) and key not in known]
    rest = [key for key in rest if not re.fullmatch(READ, key) and not re.fullmatch(HARMLESS, key)]
    for words, names in LEFT.items():
        if named := [key for key in rest if re.fullmatch(names, key)]:
            yield f"{words} ({', '.join(named)})"
        rest = [key for key in rest if key not in named]
    numbers = [key for key in rest if type(config.get(key)) is int and re.match(NUMBER, key)]
    if unknown := dict.fromkeys([*numbers, *(key for key in rest if re.match(ARRANGEMENT, key))]):
        raise BadInput(
            f"{', '.join(f'{key} {str(whole[key])[:60]}' for key in unknown)}: not known, and may change the "
            "model's weights. If it does not, remove it from a copy of the file"
        )
    if windows := sorted(set(WINDOWS) & set(config.get("layer_types") or ())):
        yield f"windows of attention ({', '.join(windows)}): planned as full causal attention"
    if others := [key for key in rest if key in config]:
        yield f"not read: {', '.join(others)}"
