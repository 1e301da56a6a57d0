"""What a rule is, and all of them in the order in which they are told."""

from __future__ import annotations

from moelab.layout.arm_rules import ARM_RULES
from moelab.layout.mesh_rules import MESH_RULES
from moelab.layout.pipeline_rules import PIPELINE_RULES
from moelab.layout.rule import Rule
from moelab.layout.sequence_rules import SEQUENCE_RULES

RULES: tuple[Rule, ...] = (*MESH_RULES, *PIPELINE_RULES, *SEQUENCE_RULES, *ARM_RULES)

__all__ = ["RULES", "Rule"]
