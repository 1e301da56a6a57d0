"""The device mesh: which degrees multiply to the ranks, and what experts and heads divide by.

TorchTitan 0.3.0 checks the product (``ParallelDims``) and the heads (``Decoder.Config.update_from_config``). It fails
late on the region of expert parallelism and on uneven expert shards, and not at all on experts that do not divide.
"""

from __future__ import annotations

from moelab.layout.facts import Facts
from moelab.layout.rule import Rule

_AXES = ("pp", "dp_replicate", "cp", "tp")


def _product(facts: Facts) -> bool:
    return facts.dp_shard > 0 and facts.outer * facts.dp_shard == facts.world_size


def _axes_divide(facts: Facts) -> bool:
    return facts.world_size % facts.outer == 0


def _axis_at_fault(facts: Facts) -> str:
    """The first axis that does not divide the ranks by itself, else the largest."""
    alone = [axis for axis in _AXES if facts.world_size % getattr(facts, axis)]
    return alone[0] if alone else max(_AXES, key=lambda axis: int(getattr(facts, axis)))


def _axis_rule(axis: str) -> Rule:
    """The rule that the outer axes divide the ranks, told of the axis at fault."""
    return Rule(
        name="axes divide the ranks",
        factor=axis,
        holds=lambda facts: _axes_divide(facts) or _axis_at_fault(facts) != axis,
        why=lambda facts: (
            " * ".join(f"{name} {getattr(facts, name)}" for name in _AXES)
            + f" = {facts.outer} must divide the {facts.world_size} ranks (nodes * gpus_per_node)"
        ),
        shapes_layout=True,
    )


def _shards(facts: Facts) -> bool:
    return _product(facts) or not _axes_divide(facts)


def _why_shards(facts: Facts) -> str:
    left = facts.world_size // facts.outer
    return (
        f"pp {facts.pp} * dp_replicate {facts.dp_replicate} * cp {facts.cp} * tp {facts.tp} leave {left} of the "
        f"{facts.world_size} ranks (nodes * gpus_per_node). Legal dp_shard: {left}, or -1 for the ranks that are left"
    )


def _region(facts: Facts) -> bool:
    return not facts.dp_shard or facts.region % facts.ep == 0


def _region_text(facts: Facts) -> str:
    return f"dp_shard {facts.dp_shard} * cp {facts.cp} * tp {facts.tp} = {facts.region}"


def _experts(facts: Facts) -> bool:
    return facts.shape.num_experts % facts.ep == 0


def _even_shards(facts: Facts) -> bool:
    """FSDP shards experts along their hidden dimension once there are more ranks than experts, and only evenly."""
    if not facts.dp_shard or not _region(facts) or not _experts(facts):
        return True
    ranks, shards = _expert_ranks_and_shards(facts)
    return ranks <= facts.shape.num_experts or not any(size % shards for size in _sharded_sizes(facts))


def _expert_ranks_and_shards(facts: Facts) -> tuple[int, int]:
    """Ranks that TorchTitan compares with the number of experts, and those that FSDP shards the experts over."""
    if facts.ep > 1:
        return facts.region, facts.efsdp
    return facts.dp_replicate * facts.region, facts.dp_shard * facts.cp


def _sharded_sizes(facts: Facts) -> tuple[int, int]:
    """Sizes along the sharded dimension: of the gate and up weights, of the down weight."""
    hidden = facts.shape.moe_hidden_dim if facts.ep > 1 else facts.shape.moe_hidden_dim // facts.tp
    return hidden, facts.shape.dim


def _why_even_shards(facts: Facts) -> str:
    ranks, shards = _expert_ranks_and_shards(facts)
    hidden, dim = _sharded_sizes(facts)
    return (
        f"{ranks} ranks share {facts.shape.num_experts} experts, so FSDP cuts each expert's weights into {shards} "
        f"parts, which must divide their {hidden} hidden features and {dim} outputs"
    )


MESH_RULES = (
    *(_axis_rule(axis) for axis in _AXES),
    Rule(
        name="dp_shard takes the rest",
        factor="dp_shard",
        holds=_shards,
        why=_why_shards,
        shapes_layout=True,
        offers_choices=False,
    ),
    Rule(
        name="tp divides the heads",
        factor="tp",
        holds=lambda facts: facts.shape.n_heads % facts.tp == 0,
        why=lambda facts: f"tensor parallelism must divide the {facts.shape.n_heads} attention heads",
    ),
    Rule(
        name="ep divides its region",
        factor="ep",
        holds=_region,
        why=lambda facts: f"it must divide the ranks it shares out, {_region_text(facts)}",
        shapes_layout=True,
    ),
    Rule(
        name="ep divides the experts",
        factor="ep",
        holds=_experts,
        why=lambda facts: f"it must divide the {facts.shape.num_experts} experts of {facts.shape.name}",
    ),
    Rule(name="expert shards are even", factor="ep", holds=_even_shards, why=_why_even_shards),
)
