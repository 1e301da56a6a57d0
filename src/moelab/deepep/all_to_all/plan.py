"""What is measured: sizes of real models, ways to move tokens, and the order in which they take turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from moelab.model import shape_of

Backend = Literal["standard", "deepep", "hybridep"]
Operation = Literal["dispatch", "combine", "combine_backward", "dispatch_backward"]
OPERATIONS: tuple[Operation, ...] = ("dispatch", "combine", "combine_backward", "dispatch_backward")
ROUTINGS = ("random_balanced", "round_robin", "skewed")
SM_COUNTS = (8, 16, 24, 32, 64)


@dataclass(frozen=True, kw_only=True)
class Size:
    """One MoE layer's traffic: ``tokens`` of one rank, each to ``top_k`` of ``experts``, as vectors of ``hidden``."""

    name: str
    hidden: int
    top_k: int
    experts: int
    tokens: int


def _size(model: str, *, experts: int, tokens: int) -> Size:
    shape = shape_of(model)
    return Size(name=f"{model}, {experts} experts", hidden=shape.dim, top_k=shape.top_k, experts=experts, tokens=tokens)


SIZES = (
    _size("671B", experts=32, tokens=8192),
    _size("16B", experts=64, tokens=16384),
    _size("671B", experts=16, tokens=8192),
)
NODE_SIZE = _size("671B", experts=64, tokens=8192)
"""Eight experts on each of eight GPUs; on request."""
SMALL = Size(name="small", hidden=256, top_k=4, experts=8, tokens=256)
"""For a laptop and for tests."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to move tokens.

    Attributes:
        backend: who moves them.
        precision: of the rows that travel in dispatch and in the backward of combine; combine is always BF16.
        layout: ``expanded`` if DeepEP delivers rows by expert, padded; ``dense`` if it delivers each token once and
            PyTorch gathers them by expert.
        sms: streaming multiprocessors that DeepEP may use; 0 leaves the choice to it.
    """

    backend: Backend
    precision: Literal["bf16", "fp8"] = "bf16"
    layout: Literal["dense", "expanded"] = "dense"
    sms: int = 0

    @property
    def name(self) -> str:
        """Such as ``deepep fp8 expanded, 24 SMs``."""
        layout = f" {self.layout}" if self.backend == "deepep" else ""
        return f"{self.backend} {self.precision}{layout}" + (f", {self.sms} SMs" if self.sms else "")

    @property
    def operations(self) -> tuple[Operation, ...]:
        """What is timed: an FP8 arm's combines are those of the BF16 arm."""
        return OPERATIONS if self.precision == "bf16" else ("dispatch", "combine_backward")


@dataclass(frozen=True, kw_only=True)
class Group:
    """Arms that take turns at one size under one routing; ``what`` tells two groups of both apart."""

    size: Size
    routing: str
    arms: tuple[Arm, ...]
    what: str = ""

    @property
    def name(self) -> str:
        """Such as ``671B, 32 experts, round_robin``."""
        return f"{self.size.name}, {self.routing}" + (f", {self.what}" if self.what else "")


def plan(
    sizes: Sequence[Size], routings: Sequence[str], backends: Sequence[Backend], sms: Sequence[int]
) -> list[Group]:
    """The groups in the order of importance: the time may end before they do.

    Args:
        sizes: traffic to measure.
        routings: of :data:`ROUTINGS`.
        backends: those that are installed.
        sms: counts to sweep, in a group of its own at the first size under the first routing.
    """
    base = [Arm(backend="standard")] if "standard" in backends else []
    sweep: list[Arm] = []
    if "deepep" in backends:
        base += [Arm(backend="deepep", precision="bf16"), Arm(backend="deepep", precision="bf16", layout="expanded")]
        base += [Arm(backend="deepep", precision="fp8"), Arm(backend="deepep", precision="fp8", layout="expanded")]
        sweep = [
            Arm(backend="deepep", precision=precision, layout="expanded", sms=count)
            for count in sms
            for precision in ("bf16", "fp8")
        ]
    if "hybridep" in backends:
        base.append(Arm(backend="hybridep"))
    groups = [Group(size=size, routing=routing, arms=tuple(base)) for size in sizes for routing in routings if base]
    if sweep:
        # Before the last size: DeepEP compiles three to five kernels for each count, a second or two each.
        swept = Group(size=sizes[0], routing=routings[0], arms=tuple(sweep), what="SM counts")
        groups.insert(max(1, len(sizes) - 1) * len(routings), swept)
    return groups
