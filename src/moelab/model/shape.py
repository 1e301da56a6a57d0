"""The dimensions of the DeepSeek-V3 models (``data/shapes.yaml``), and their modules by TorchTitan's names."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from moelab.data import read_yaml
from moelab.errors import BadInput
from moelab.experiment import Experiment, ShapeChanges

EMBEDDING, NORM, HEAD = "tok_embeddings", "norm", "lm_head"
TOKENIZERS = {"16B": "assets/hf/deepseek-moe-16b-base", "671B": "assets/hf/DeepSeek-V3.1-Base"}
"""Where TorchTitan's ``download_hf_assets.py`` puts the tokenizers that 16B and 671B need for C4."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Dimensions of a model like DeepSeek-V3, under TorchTitan's names. ``q_lora_rank`` 0 means full-rank queries.

    ``expert_groups`` and ``limited_groups`` are those of group-limited routing; both 1 where routing is free.
    ``n_kv_heads`` above 0 means grouped-query attention in place of multi-head latent attention: the ranks and
    ``qk_rope_head_dim`` are 0 then, and the other two head dimensions are ``head_dim``, so that whatever counts heads
    counts both kinds alike. ``qk_norm`` is its norm of each query and key head.
    """

    name: str
    vocab_size: int
    dim: int
    n_layers: int
    n_dense_layers: int
    n_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    dense_hidden_dim: int
    moe_hidden_dim: int
    num_experts: int
    num_shared_experts: int
    top_k: int
    expert_groups: int = 1
    limited_groups: int = 1
    n_kv_heads: int = 0
    qk_norm: bool = False

    @property
    def grouped_queries(self) -> bool:
        """Whether attention is grouped-query attention, which TorchTitan's DeepSeek-V3 cannot build."""
        return self.n_kv_heads > 0

    @property
    def plan_only(self) -> str | None:
        """Why TorchTitan cannot train the shape; None where it can."""
        if not self.grouped_queries:
            return None
        return (
            "attention is gqa: TorchTitan's DeepSeek-V3 has multi-head latent attention only, so a model with "
            "grouped-query attention is planned and projected, and not trained"
        )

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values; latent attention expands its latents to as many as there are queries."""
        return self.n_kv_heads or self.n_heads

    @property
    def n_moe_layers(self) -> int:
        """Layers with routed experts; they come after the dense ones."""
        return self.n_layers - self.n_dense_layers

    @property
    def qk_head_dim(self) -> int:
        """Dimension of a query or key head: the part without position and the rotary part."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def shared_hidden_dim(self) -> int:
        """Hidden dimension of all shared experts together; TorchTitan fuses them into one FFN."""
        return self.num_shared_experts * self.moe_hidden_dim

    @property
    def modules(self) -> tuple[str, ...]:
        """TorchTitan's names of the top modules in order: what a pipeline stage is made of."""
        return (EMBEDDING, *(f"layers.{layer}" for layer in range(self.n_layers)), NORM, HEAD)

    def thin(self, *, dense_layers: int, moe_layers: int, num_experts: int | None = None) -> ModelShape:
        """The same model with fewer layers, and fewer experts if asked: what fits on a small machine."""
        return replace(
            self,
            n_layers=dense_layers + moe_layers,
            n_dense_layers=dense_layers,
            num_experts=num_experts or self.num_experts,
        )


SHAPES = {name: ModelShape(name=name, **row) for name, row in read_yaml("shapes.yaml").items()}


def shape_of(model: str) -> ModelShape:
    """The shape of a model by the name that an experiment gives it.

    Raises:
        BadInput: if there is no such model.
    """
    if model not in SHAPES:
        raise BadInput(f"there is no model {model!r}; the models are {', '.join(SHAPES)}")
    return SHAPES[model]


def shape_for(experiment: Experiment) -> ModelShape:
    """The shape of an experiment's model: that of its name, with the experiment's own dimensions.

    Raises:
        BadInput: if the dimensions do not go together.

    >>> shape_for(Experiment(model="671B", shape={"n_layers": 40})).n_moe_layers
    37
    """
    return _with_changes(experiment.model, experiment.shape)


@functools.lru_cache(maxsize=256)
def _with_changes(model: str, own: ShapeChanges | None) -> ModelShape:
    shape = shape_of(model)
    if own is None:
        return shape
    changes = own.changes
    attention = changes.pop("attention", "mla")
    others = OF_LATENT_ATTENTION if attention == "gqa" else OF_GROUPED_QUERIES
    faults = [f"{name} is {changes[name]}; {_WHOSE[attention]}" for name in others if name in changes]
    if attention == "gqa" and not faults:
        if lacking := [name for name in ("n_kv_heads", "head_dim") if name not in changes]:
            raise BadInput(f"shape: attention is gqa, which needs {' and '.join(lacking)}")
        size = changes.pop("head_dim")
        changes |= {"q_lora_rank": 0, "kv_lora_rank": 0}
        changes |= {"qk_nope_head_dim": size, "qk_rope_head_dim": 0, "v_head_dim": size}
    if not faults:
        shape = replace(shape, **changes)
        faults = [text for wrong, text in _faults(shape) if wrong]
    if faults:
        raise BadInput("\n".join(f"shape: {text}" for text in faults))
    return shape


OF_LATENT_ATTENTION = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
OF_GROUPED_QUERIES = ("n_kv_heads", "head_dim", "qk_norm")
_WHOSE = {
    "mla": "attention stays mla, DeepSeek's multi-head latent attention, which has none. attention=gqa, grouped-query "
    "attention, has it, to plan and project, not to train",
    "gqa": "attention is gqa, grouped-query attention, which has none; valid: n_kv_heads, head_dim and qk_norm",
}


def _faults(shape: ModelShape) -> list[tuple[bool, str]]:
    experts, groups, limited = shape.num_experts, shape.expert_groups, shape.limited_groups
    products = (("dim", shape.dim), ("moe_hidden_dim", shape.moe_hidden_dim))  # of grouped GEMMs, in rows of 16 bytes
    return [
        (
            shape.n_dense_layers >= shape.n_layers,
            f"n_dense_layers is {shape.n_dense_layers}; valid: fewer than n_layers, {shape.n_layers}",
        ),
        (shape.top_k > experts, f"top_k is {shape.top_k}; valid: at most num_experts, {experts}"),
        (experts % groups != 0, f"num_experts is {experts}; valid: a multiple of expert_groups, {groups}"),
        (limited > groups, f"limited_groups is {limited}; valid: at most expert_groups, {groups}"),
        (
            shape.top_k > limited * (experts // groups),
            f"top_k is {shape.top_k}; valid: at most the experts of {limited} of {groups} groups",
        ),
        # Group-limited routing ranks groups by their two best experts.
        (experts < 2 * groups, f"num_experts is {experts}; valid: at least 2 in each of {groups} expert_groups"),
        *((size % 8 != 0, f"{name} is {size}; valid: a multiple of 8") for name, size in products),
        (
            shape.qk_rope_head_dim % 2 != 0,
            f"qk_rope_head_dim is {shape.qk_rope_head_dim}; valid: an even number, for rotations of pairs",
        ),
        (
            shape.n_heads % shape.kv_heads != 0,
            f"n_kv_heads is {shape.n_kv_heads}; valid: a divisor of n_heads, {shape.n_heads}",
        ),
    ]


def tokenizer_size(experiment: Experiment) -> int:
    """Entries of the tokenizer that an experiment's text is read with.

    16B and 671B read C4 with their own, which their vocabulary holds. The default text is read with nano's, so a model
    with a larger vocabulary soon learns that most of its tokens never come. A folder of text has its own, which may be
    elsewhere: here it fills the vocabulary, and a run refuses one that is larger.

    >>> tokenizer_size(Experiment(model="16B", dataset="c4")), tokenizer_size(Experiment(model="16B"))
    (102400, 2048)
    """
    if experiment.dataset not in ("python", "c4"):
        return shape_for(experiment).vocab_size
    own = experiment.dataset == "c4" and experiment.model in TOKENIZERS
    return shape_of(experiment.model).vocab_size if own else SHAPES["nano"].vocab_size
