"""The shape of a model from its Hugging Face ``config.json``, or from Mistral's ``params.json``.

Every key is one of three kinds (``data/hugging_face.yaml``). Some give a dimension. Some change neither weights nor
products, or are left out, and the answer says so. Any other key that is a number of something, and any arrangement of
layers that is not *dense ones, then those with experts*, is refused by name: a plan that left it out would be of
another model.

``data/models.yaml`` has the configurations of some published models, by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moelab.data import read_yaml
from moelab.errors import BadInput
from moelab.experiment import MOST_LAYERS, Experiment
from moelab.files import read_json
from moelab.model.shape import OF_GROUPED_QUERIES, OF_LATENT_ATTENTION, SHAPES, ModelShape, shape_for

MAY_BE_ZERO = ("n_dense_layers", "num_shared_experts", "q_lora_rank", "expert_groups", "limited_groups")
LARGEST = 10_000_000
"""Of any dimension; vocabularies have a fifth of a million entries."""
NEEDED = ("vocab_size", "dim", "n_layers", "n_heads", "moe_hidden_dim", "top_k")
KEYS: dict[str, Any] = read_yaml("hugging_face.yaml")
TAKEN: dict[str, list[str]] = KEYS["taken"]


def _is(kind: Iterable[str], key: str) -> bool:
    return any(re.fullmatch(pattern, key) for pattern in kind)


def _has(kind: Iterable[str], key: str) -> bool:
    return any(re.search(pattern, key) for pattern in kind)


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
    for key in KEYS["parts"]:
        if isinstance(part := config.get(key), dict):
            config = {**part, **config}  # the kind of model stands outside
    whole = dict(config)
    # Two levels deep in Qwen3-Omni; what stands outside counts where the inside does not say it.
    while inner := next((config[key] for key in KEYS["inside"] if isinstance(config.get(key), dict)), None):
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
        shape["qk_norm"] = bool(config.get("use_qk_norm", kind in KEYS["norms_queries"]))
        shape["attention"] = "gqa"
    others = OF_GROUPED_QUERIES if latent else OF_LATENT_ATTENTION
    scores = next((config[key] for key in ("scoring_func", "score_function", "score_func") if key in config), None)
    sigmoid = scores == "sigmoid" or (scores is None and kind in KEYS["sigmoid"])
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
    for key in KEYS["steps"]:
        if not isinstance(step := config.get(key, 1), list) and step not in (None, 1):
            raise BadInput(f"{key} is {step}: dense layers lie between those with experts; valid: 1")
    kinds = sorted({str(kind) for kind in config.get("layer_types") or ()} - {"full_attention", *KEYS["windows"]})
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
    known = {*(key for keys in TAKEN.values() for key in keys), *KEYS["steps"], *KEYS["inside"], *KEYS["parts"]}
    if config.get("qk_head_dim") == sum(config.get(part) or 0 for part in ("qk_nope_head_dim", "qk_rope_head_dim")):
        known.add("qk_head_dim")  # which transformers writes beside its parts
    rest = [key for key, value in whole.items() if value not in (None, False, 0) and key not in known]
    rest = [key for key in rest if not _is(KEYS["read"], key) and not _is(KEYS["harmless"], key)]
    for words, names in KEYS["left"].items():
        if named := [key for key in rest if _is(names, key)]:
            yield f"{words} ({', '.join(named)})"
        rest = [key for key in rest if key not in named]
    numbers = [key for key in rest if type(config.get(key)) is int and _has(KEYS["number"], key)]
    if unknown := dict.fromkeys([*numbers, *(key for key in rest if _has(KEYS["arrangement"], key))]):
        raise BadInput(
            f"{', '.join(f'{key} {str(whole[key])[:60]}' for key in unknown)}: not known, and may change the "
            "model's weights. If it does not, remove it from a copy of the file"
        )
    if windows := sorted({*KEYS["windows"]} & set(config.get("layer_types") or ())):
        yield f"windows of attention ({', '.join(windows)}): planned as full causal attention"
    if others := [key for key in rest if key in config]:
        yield f"not read: {', '.join(others)}"
