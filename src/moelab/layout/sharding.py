"""What a rank holds of every parameter, exactly: TorchTitan's meshes and PyTorch's FSDP2 as arithmetic.

A weight is cut first by tensor parallelism (or, if it belongs to routed experts, by expert parallelism) and then by
FSDP along dimension 0, each time as ``torch.chunk`` cuts: equal pieces, with a smaller or empty one at the end. FSDP
keeps each piece padded to the size of the first. Experts are cut along dimension 1 instead where there are more ranks
than experts; without expert parallelism TorchTitan counts replicating and tensor-parallel ranks among those ranks too.

Sources: ``torchtitan/distributed/{parallel_dims,fsdp}.py`` at 0.3.0, ``torch/distributed/fsdp/_fully_shard`` at 2.14.
"""

from __future__ import annotations

import functools
from math import prod
from typing import NamedTuple

from moelab.layout import Layout
from moelab.layout.mesh import coordinates
from moelab.model import EMBEDDING, HEAD, ModelShape, Parameter, parameters


class Degrees(NamedTuple):
    """The degrees of a layout that shard parameters."""

    dp_replicate: int
    fsdp: int
    tp: int
    ep: int
    efsdp: int


class Coordinates(NamedTuple):
    """Where a rank stands on those axes; the first rank holds the most."""

    tp: int = 0
    fsdp: int = 0
    ep: int = 0
    efsdp: int = 0


class Held(NamedTuple):
    """Elements of some parameters on one rank.

    ``local`` is what TorchTitan's parameters show, ``padded`` what they occupy. ``dense`` and ``experts`` are gathered
    sizes: what is there while the parameters are in use, of everything but routed experts and of those.
    """

    local: int
    padded: int
    dense: int
    experts: int

    def plus(self, other: Held, times: int = 1) -> Held:
        """With so many of another."""
        return Held(*(one + times * more for one, more in zip(self, other, strict=True)))

    @property
    def gathered(self) -> int:
        """Elements while the parameters are in use."""
        return self.dense + self.experts


class StageModules(NamedTuple):
    """What a pipeline stage is made of."""

    embedding: int = 0
    dense_layers: int = 0
    moe_layers: int = 0
    head: int = 0


NOTHING = Held(0, 0, 0, 0)
FIRST = Coordinates()
"""The rank that holds the most."""


def degrees_of(layout: Layout) -> Degrees:
    """The degrees that shard parameters."""
    return Degrees(layout.dp_replicate, layout.dp_shard * layout.cp, layout.tp, layout.ep, layout.efsdp)


def local_numel(shape: ModelShape, layout: Layout, rank: int) -> int:
    """Elements of all parameters that a global rank holds, as TorchTitan's sharded model has them."""
    at = coordinates(layout, rank)
    fsdp = at["dp_shard"] * layout.cp + at["cp"]
    # Without expert parallelism there is no expert mesh, and no such coordinates.
    where = Coordinates(tp=at["tp"], fsdp=fsdp, ep=at.get("ep", 0), efsdp=at.get("efsdp", 0))
    stages = [stage_modules(layout.stages[stage], shape.n_dense_layers) for stage in layout.stages_of_rank[at["pp"]]]
    return sum(held(shape, modules, degrees_of(layout), where).local for modules in stages)


def held(shape: ModelShape, modules: StageModules, degrees: Degrees, where: Coordinates = FIRST) -> Held:
    """Elements of one stage's parameters on a rank; by default on the one that holds the most."""
    parts = (
        (modules.embedding, EMBEDDING),
        (modules.dense_layers, "layers.0"),
        (modules.moe_layers, f"layers.{shape.n_dense_layers}"),
        (modules.head, HEAD),
        (modules.head, "norm"),
    )
    total = NOTHING
    for count, module in parts:
        if count:
            total = total.plus(module_held(shape, module, degrees, where), count)
    return total


@functools.lru_cache(maxsize=4096)
def stage_modules(stage: tuple[str, ...], n_dense_layers: int) -> StageModules:
    """Count a stage's modules by kind."""
    layers = [int(name.removeprefix("layers.")) for name in stage if name.startswith("layers.")]
    dense = sum(layer < n_dense_layers for layer in layers)
    return StageModules(int(EMBEDDING in stage), dense, len(layers) - dense, int(HEAD in stage))


@functools.lru_cache(maxsize=65_536)
def module_held(shape: ModelShape, module: str, degrees: Degrees, where: Coordinates = FIRST) -> Held:
    """Elements of one top module's parameters on a rank."""
    total = NOTHING
    for parameter in parameters(shape, module):
        total = total.plus(_parameter_held(parameter, degrees, where))
    return total


def _parameter_held(parameter: Parameter, degrees: Degrees, where: Coordinates) -> Held:
    sizes = list(parameter.shape)
    experts = parameter.part == "routed experts"
    if experts and degrees.ep > 1:
        sizes[0] = chunk(sizes[0], degrees.ep, where.ep)
        ranks, place = degrees.efsdp, where.efsdp
        # TorchTitan cuts along the hidden dimension once there are more ranks than experts.
        axis = 1 if degrees.efsdp * degrees.ep > parameter.shape[0] else 0
    else:
        if parameter.tp_dim is not None:
            sizes[parameter.tp_dim] = chunk(sizes[parameter.tp_dim], degrees.tp, where.tp)
        ranks, place = degrees.fsdp, where.fsdp
        crowded = degrees.dp_replicate * degrees.fsdp * degrees.tp > parameter.shape[0]
        axis = 1 if experts and crowded else 0
    others = prod(size for dim, size in enumerate(sizes) if dim != axis)
    padded = chunk(sizes[axis], ranks, 0) * others
    # FSDP gathers pieces of one size: their padding is gathered too.
    gathered = padded * ranks
    return Held(
        chunk(sizes[axis], ranks, place) * others, padded, 0 if experts else gathered, gathered if experts else 0
    )


def chunk(size: int, pieces: int, index: int) -> int:
    """Size of one of ``torch.chunk``'s pieces; 0 where the pieces ran out.

    >>> [chunk(10, 4, index) for index in range(4)]
    [3, 3, 3, 1]
    """
    # Rounded up, as in torch: the last pieces are smaller, or there are none.
    full = -(-size // pieces)
    return max(0, min(full, size - index * full))
