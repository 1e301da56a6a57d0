"""Sequence length: what sequence and context parallelism cut it into, and what the rotary embedding reaches.

TorchTitan 0.3.0 checks evenness when the trainer starts; torch checks the blocks of the attention mask under context
parallelism with the first batch.
"""

from __future__ import annotations

import math

from moelab.layout.facts import Facts
from moelab.layout.rule import Rule

FLEX_BLOCK = 128
"""Tokens of a block of FlexAttention's mask (``_DEFAULT_SPARSE_BLOCK_SIZE`` of torch 2.14)."""

ROPE_TOKENS = {"nano": 4096, "debug": 16384, "16B": 16384, "671B": 16384}
"""Tokens that the rotary embedding of each model reaches: ``max_seq_len`` of its ``RoPE.Config``."""


def _even_multiple(facts: Facts) -> int:
    """Tokens that TorchTitan's sequence and context parallelism need: two chunks a rank for load balance."""
    return facts.tp * (2 * facts.cp if facts.cp > 1 else 1)


def _mask_multiple(facts: Facts) -> int:
    return FLEX_BLOCK * facts.cp if facts.cp > 1 else 1


def _why_even(facts: Facts) -> str:
    chunks = f"tp {facts.tp}" + (f" * 2 * cp {facts.cp}" if facts.cp > 1 else "")
    return (
        f"sequence and context parallelism cut it into {chunks} = {_even_multiple(facts)} equal parts; {_near(facts)}"
    )


def _why_mask(facts: Facts) -> str:
    return (
        f"context parallelism shards FlexAttention's mask in blocks of {FLEX_BLOCK} tokens, so it must be a multiple "
        f"of {FLEX_BLOCK} * cp {facts.cp} = {_mask_multiple(facts)}; {_near(facts)}"
    )


def _near(facts: Facts) -> str:
    """The nearest lengths that keep both rules."""
    multiple = math.lcm(_even_multiple(facts), _mask_multiple(facts))
    below = facts.seq_len // multiple * multiple
    values = [value for value in (below, below + multiple) if 8 <= value <= ROPE_TOKENS[facts.shape.name]]
    return f"nearest legal seq_len: {' or '.join(map(str, values))}" if values else "reduce tp or cp"


SEQUENCE_RULES = (
    Rule(
        name="sequence is cut evenly",
        factor="seq_len",
        holds=lambda facts: facts.seq_len % _even_multiple(facts) == 0,
        why=_why_even,
        offers_choices=False,
    ),
    Rule(
        name="mask is cut in blocks",
        factor="seq_len",
        holds=lambda facts: facts.seq_len % _mask_multiple(facts) == 0,
        why=_why_mask,
        offers_choices=False,
    ),
    Rule(
        name="rotary embedding reaches",
        factor="seq_len",
        holds=lambda facts: facts.seq_len <= ROPE_TOKENS[facts.shape.name],
        why=lambda facts: (
            f"the rotary embedding of {facts.shape.name} reaches {ROPE_TOKENS[facts.shape.name]} tokens; "
            f"legal seq_len: up to {ROPE_TOKENS[facts.shape.name]}"
        ),
        offers_choices=False,
    ),
)
