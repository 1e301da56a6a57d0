"""Sources of rows that a goal or another table is about; those of OWN are this project's own steps."""

from __future__ import annotations

from moelab.planning.tables import ONE_NODE, OWN

PUBLISHED, BRIDGE_SOURCE, NOUS = ("PyTorch and Nebius", "Megatron-Bridge", "NousResearch")
H100_FIRST, H100_LATER, _, NOW, _ = OWN
assert OWN[2] == ONE_NODE
