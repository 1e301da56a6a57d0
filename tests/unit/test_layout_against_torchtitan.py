"""Our verdict on a layout against TorchTitan's own, over thousands of random ones.

TorchTitan is asked in a process of its own (``tests/titan_judge.py``). It must refuse exactly what our rules refuse, and
its words must be about a rule that we say is broken. What it does not notice is written down in ``UNNOTICED``, each with
a test below that shows it.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from titan_judge import ask

from moelab.experiment import EPBackend, Experiment, Precision
from moelab.layout import RULES, SCHEDULES, check, facts_of
from moelab.layout.rule import divisors
from moelab.model import shape_of

CONFIGURED, MESHES = 3000, 250

WORDS = {
    "axes divide the ranks": r"Invalid parallel dims|dp_shard >= 1|^AssertionError: $",
    "dp_shard takes the rest": r"Invalid parallel dims",
    "tp divides the heads": r"must divide n_heads",
    "ep divides its region": r"must be equal for unflatten|unflatten",
    "ep divides the experts": r"must be divisible by expert_parallel_degree",
    "schedule exists": r"Unknown schedule name|abstract base class",
    "stages have layers": r"cannot be greater than effective layers",
    "micro-batches are whole": r"must be evenly divisible by parallelism.pipeline_parallel_microbatch_size",
    "micro-batches suffice": r"Number of microbatches|multiple of the number of rounds|at least as many microbatches",
    "sequence is cut evenly": r"must be divisible by \d+ for the configured",
    "rotary embedding reaches": r"exceeds attention RoPE maximum",
    "dispatcher needs ep": r"requires expert parallelism",
    "minimal_async_ep is not quantised": r"requires a token dispatcher that supports padding",
    "deepep is not quantised": r"requires a token dispatcher that supports padding",
    "minimal_async_ep recomputes": r"requires full recompute",
}
"""Rules that TorchTitan checks while it is configured or builds its mesh, and how it says so."""

UNNOTICED = {
    "ep divides its region": "at the device mesh, when every rank runs; not at all while it is configured",
    "ep divides the experts": "never, except for minimal_async_ep: 64 experts on 48 ranks are sharded unevenly",
    "expert shards are even": "when FSDP shards the first MoE layer",
    "mask is cut in blocks": "with the first batch",
    "schedule exists": "never, for PipelineScheduleMulti, which has no order, and for names in another case, under which "
    "the rank that logs is a wrong one",
    "no split backward when compiled": "never: torch looks for modules that were wrapped, and TorchTitan compiles in place",
    "deepep is not compiled": "in the first step",
    "minimal_async_ep stays in a node": "when the buffers of peers are opened",
    "expert blocks are whole": "in the first step",
    "MXFP8 linears are whole": "in the first step",
    "dispatch is BF16": "it has no such setting",
    "fp8 has no linears": "it has no such setting",
}
"""Rules that TorchTitan 0.3.0 does not check while it is configured, and when it fails instead."""


SEQUENCES = {"nano": (128, 2048, 4096), "debug": (2048, 8192), "16B": (4096, 8192, 16384), "671B": (4096, 8192)}
WILD = {
    "pp": lambda draw: draw.randint(1, 40),
    "tp": lambda draw: draw.randint(1, 9),
    "cp": lambda draw: draw.choice((2, 3, 4, 16)),
    "dp_replicate": lambda draw: draw.randint(1, 9),
    "dp_shard": lambda draw: draw.randint(1, 64),
    "ep": lambda draw: draw.choice((draw.randint(1, 64), 2 ** draw.randint(0, 9))),
    "pp_schedule": lambda draw: draw.choice(("1f1b", "zbvzerobubble", "PipelineScheduleSingle", "ZB1P", "GPIPE")),
    "microbatch": lambda draw: draw.randint(1, 9),
    "local_batch": lambda draw: draw.randint(1, 70),
    "seq_len": lambda draw: draw.choice((16384 + 512, draw.randint(8, 9000), 4096 + 64)),
    "ep_backend": lambda draw: draw.choice(tuple(EPBackend)),
    "precision": lambda draw: draw.choice(tuple(Precision)),
    "activation_checkpoint": lambda draw: draw.choice(("none", "selective")),
}
"""Values that a field may get instead of a plausible one."""


def random_experiment(draw: random.Random) -> Experiment:
    """An experiment on 1 to 1024 ranks; about half have one to three fields that somebody could get wrong."""
    fields = plausible_fields(draw)
    for field in draw.sample(sorted(WILD), draw.choice((0, 0, 0, 1, 2, 3))):
        fields[field] = WILD[field](draw)
    return Experiment(**fields)


def plausible_fields(draw: random.Random) -> dict[str, Any]:
    """Fields of an experiment whose degrees divide its ranks, heads and experts; most are legal."""
    shape = shape_of(draw.choice(("nano", "debug", "16B", "671B")))
    world = draw.choice((2 ** draw.randint(0, 10), 2 ** draw.randint(3, 10), 3 * 2 ** draw.randint(0, 8)))
    schedule = draw.choice(tuple(SCHEDULES.values()))
    degrees, left = {}, world
    for axis, most in (("pp", (shape.n_layers + 2) // 2), ("tp", 16), ("cp", 8), ("dp_replicate", 8)):
        choices = [degree for degree in divisors(left) if degree <= most]
        degrees[axis] = draw.choice([1, *choices])
        if axis == "tp" and shape.n_heads % degrees["tp"]:
            degrees["tp"] = 1
        left //= degrees[axis]
    region = left * degrees["cp"] * degrees["tp"]
    ep = draw.choice([degree for degree in divisors(region) if shape.num_experts % degree == 0])
    microbatch = draw.choice((1, 1, 2))
    return {
        "model": shape.name,
        "nodes": world // 8 if world % 8 == 0 else 1,
        "gpus_per_node": 8 if world % 8 == 0 else world,
        **degrees,
        "dp_shard": draw.choice((-1, -1, left)),
        "ep": ep,
        "pp_schedule": schedule.name,
        "local_batch": microbatch * degrees["pp"] * draw.choice((1, 2, 2, 3, 4)),
        "microbatch": microbatch,
        "seq_len": draw.choice(SEQUENCES[shape.name]),
        "precision": draw.choice((Precision.BF16, Precision.BF16, Precision.FP8, Precision.MXFP8)),
        "ep_backend": EPBackend.STANDARD if ep == 1 else draw.choice((EPBackend.STANDARD, EPBackend.HYBRIDEP)),
        "activation_checkpoint": draw.choice(("none", "selective", "full", "full")),
        "compile": draw.choice(("none", "loss", "model+loss")),
    }


def broken_rules(experiment: Experiment) -> set[str]:
    """Names of the rules that an experiment breaks."""
    facts = facts_of(experiment)
    return {rule.name for rule in RULES if not rule.holds(facts)}


def disagreement(experiment: Experiment, words: str | None, unnoticed: set[str]) -> str | None:
    """How the two verdicts differ, or None."""
    broken = broken_rules(experiment)
    if words is None:
        missed = broken - unnoticed
        return f"TorchTitan accepts what breaks {sorted(missed)}: {experiment}" if missed else None
    if any(rule in WORDS and re.search(WORDS[rule], words) for rule in broken):
        return None
    return f"TorchTitan says {words!r}, we say {sorted(broken) or 'legal'}: {experiment}"


def compare(depth: str, experiments: list[Experiment], unnoticed: set[str]) -> Counter[str]:
    """Hold both verdicts beside each other; counts of what they agreed on."""
    answers = ask(depth, experiments)
    pairs = list(zip(experiments, answers, strict=True))
    found = [text for experiment, words in pairs if (text := disagreement(experiment, words, unnoticed))]
    assert not found, f"{len(found)} of {len(pairs)} disagree; the first: {found[:3]}"
    return Counter(
        "refused by both" if words else "legal for both" if not broken_rules(experiment) else "unnoticed by TorchTitan"
        for experiment, words in pairs
    )
