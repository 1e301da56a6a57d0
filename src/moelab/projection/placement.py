"""Where the experts of an expert-parallel group live.

TorchTitan shards the expert weights along their first dimension, so rank r of the group holds experts r·E/EP to
(r + 1)·E/EP − 1, and consecutive ranks share a node.
"""

from __future__ import annotations

from dataclasses import dataclass

from moelab.errors import BadInput


@dataclass(frozen=True, kw_only=True)
class ExpertPlacement:
    """Experts, the ranks that share them out, and the nodes that hold the ranks.

    Attributes:
        experts: routed experts of a layer.
        top_k: experts of each token.
        ep: ranks of the expert-parallel group; a divisor of ``experts``.
        ranks_per_node: consecutive ranks of the group on one node; all of them where the group is smaller.

    Raises:
        BadInput: for a count that is not positive, or one that does not divide.
    """

    experts: int
    top_k: int
    ep: int
    ranks_per_node: int

    def __post_init__(self) -> None:
        for name in ("experts", "top_k", "ep", "ranks_per_node"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise BadInput(f"{name} is {value!r}; give a whole number of at least 1")
        if self.top_k > self.experts:
            raise BadInput(f"top_k is {self.top_k}, but there are {self.experts} experts; valid: 1 to {self.experts}")
        if self.experts % self.ep:
            legal = ", ".join(str(ep) for ep in range(1, self.experts + 1) if self.experts % ep == 0)
            raise BadInput(f"ep is {self.ep} and does not divide {self.experts} experts; valid: {legal}")
        if self.ep > self.ranks_per_node and self.ep % self.ranks_per_node:
            raise BadInput(
                f"ranks_per_node is {self.ranks_per_node} and does not divide ep {self.ep}: the group must fill whole "
                "nodes, or fit in one"
            )

    @property
    def local_ranks(self) -> int:
        """Ranks of the group on each of its nodes."""
        return min(self.ranks_per_node, self.ep)

    @property
    def nodes(self) -> int:
        """Nodes that the group lies on."""
        return self.ep // self.local_ranks

    @property
    def experts_per_rank(self) -> int:
        """Experts that each rank holds."""
        return self.experts // self.ep

    @property
    def experts_per_node(self) -> int:
        """Experts that the ranks of one node hold together."""
        return self.experts // self.nodes
