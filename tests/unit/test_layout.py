"""Legality of layouts: what each rule refuses and offers instead, what is legal, and what is said of that."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moelab.deepep.buffer import check_sizes
from moelab.errors import BadInput, Refused
from moelab.experiment import Experiment
from moelab.layout import check, facts_of, faults, rules
from moelab.model import shape_for
from moelab.mxfp8.converter import LINEARS, Quantiser
from moelab.mxfp8.experts import grouped_mm
from moelab.mxfp8.quantise import NotWholeBlocks
from moelab.titan.models import model_spec

ON_256 = {"model": "671B", "ep": 8, "nodes": 32, "gpus_per_node": 8, "local_batch": 64, "seq_len": 8192}
NANO = {"model": "nano", "nodes": 1, "seq_len": 1024}
ON_96 = {"model": "16B", "nodes": 12}
MINIMAL = {"ep_backend": "minimal_async_ep", "activation_checkpoint": "full"}
DEEPEP = {"ep_backend": "deepep", "compile": "model+loss", "hardware": "b200_x256"}
KEPT = {"activation_checkpoint": "full+dispatch", "hardware": "b200_x256"}
SENT = {"precision": "mxfp8", "wgrad": "bf16", "dispatch_precision": "mxfp8"}
LINEAR = {"quantize": "experts+linears"}
GQA = {"attention": "gqa", "n_kv_heads": 4, "head_dim": 128}
NO_EP = "No ep is legal while the other fields stay as they are"
ONLY_BF16 = "Legal dispatch_precision: bf16"
NO_V = "Legal pp_schedule: 1F1B, GPipe, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble"
BROKEN: dict[str, list[tuple[dict[str, Any], str]]] = {
    "axes divide the ranks": [
        ({"pp": 3}, "Legal pp: 1, 2, 4, 8, 16, 32"),
        ({"tp": 2, "pp": 2, "cp": 2, "dp_replicate": 64, "ep": 1}, "Legal dp_replicate: 1, 2, 4, 8, 16, 32"),
    ],
    "dp_shard takes the rest": [({"dp_shard": 128}, "Legal dp_shard: 256, or -1 for the ranks that are left")],
    "tp divides the heads": [
        ({**NANO, "tp": 8}, "Legal tp: 1, 2"),
        ({"shape": GQA, "tp": 8}, "the 4 key and value heads. Legal tp: 1, 2, 4"),
    ],
    "ep divides its region": [
        ({"pp": 16, "ep": 32}, "= 16. Legal ep: 1, 2, 4, 8, 16"),
        ({"dp_replicate": 4, "ep": 128}, "= 64. Legal ep: 1, 2, 4, 8, 16, 32, 64"),
    ],
    "ep divides the experts": [({**ON_96, "ep": 48}, NO_EP)],
    "expert shards are even": [({**ON_96, "ep": 32}, NO_EP)],  # whatever ep is, 1408 features are cut by 3
    "schedule exists": [({"pp": 2, "pp_schedule": "1f1b"}, NO_V)],
    "stages are the schedule's": [
        ({"pp": 2, "pp_stages_per_rank": 4}, "Legal pp_stages_per_rank: 1, or 0 for the schedule's own"),
        ({"pp": 2, "pp_schedule": "LoopedBFS", "pp_stages_per_rank": 1}, "2 and more, or 0 for the schedule's own"),
    ],
    "stages have layers": [({"pp": 32, "pp_schedule": "Interleaved1F1B"}, "Legal pp: 1, 2, 4, 8, 16")],
    "micro-batches are whole": [
        ({"pp": 2, "microbatch": 3}, "Legal microbatch: 1, 2, 4, 8, 16, 32"),
        ({"accumulate_gradients": True, "microbatch": 3}, "Legal microbatch: 1, 2, 4, 8, 16, 32, 64"),
    ],
    "micro-batches suffice": [
        ({"pp": 32, "local_batch": 31}, "Legal local_batch: 32 and more"),
        ({"pp": 4, "local_batch": 18, "microbatch": 2, "pp_schedule": "Interleaved1F1B"},
         "Legal local_batch: any multiple of 8, such as 16 or 24"),
    ],
    "no split backward when compiled": [
        ({"pp": 2, "pp_schedule": "InterleavedZeroBubble", "compile": "model+loss"}, NO_V.rpartition(", ")[0]),
    ],
    "V schedules do not evaluate": [
        ({"pp": 2, "pp_schedule": "DualPipeV"}, NO_V),
        ({"pp": 2, "pp_schedule": "DualPipeV", "dataset": "c4", "validate_every": 9}, NO_V),
    ],
    "sequence is cut evenly": [({"tp": 16, "seq_len": 8200}, "16 equal parts; nearest legal seq_len: 8192 or 8208")],
    "mask is cut in blocks": [({"cp": 2, "seq_len": 8320}, "nearest legal seq_len: 8192 or 8448")],
    "loss is cut evenly": [({"seq_len": 8188}, "nearest legal seq_len: 8184 or 8192")],
    "rotary embedding reaches": [({"seq_len": 16392}, "legal seq_len: up to 16384")],
    "context parallelism has FlexAttention": [({"cp": 2, "hardware": "cpu"}, "Legal cp: 1")],
    "forced routing has plain scores": [
        ({**NANO, "tp": 2, "hardware": "cpu", "routing": "round_robin"}, "Legal tp: 1"),
    ],
    "dispatcher needs ep": [({"ep": 1, "ep_backend": "hybridep"}, "Legal ep: 2, 4, 8, 16, 32, 64, 128, 256")],
    "minimal_async_ep is not quantised": [
        ({**MINIMAL, "precision": "fp8"}, "Legal ep_backend: standard, deepep, hybridep"),
    ],
    "minimal_async_ep recomputes": [({"ep_backend": "minimal_async_ep"}, "Legal activation_checkpoint: full")],
    "minimal_async_ep stays in a node": [({**MINIMAL, "ep": 16}, "Legal ep: 2, 4, 8")],
    "DeepEP takes the tokens": [
        ({**NANO, "ep_backend": "deepep"}, "ep_kernels=emulated takes any. Legal ep_backend: standard, hybridep"),
    ],
    "dispatch is kept": [
        (KEPT, "Legal activation_checkpoint: none, selective, full"),
        ({**KEPT, "ep_backend": "hybridep"}, "Legal activation_checkpoint: none, selective, full"),
    ],
    "dispatch is quantised as its experts": [
        ({"dispatch_precision": "mxfp8"}, f"precision is bf16. {ONLY_BF16}"),
        ({**SENT, "ep_backend": "deepep", "dispatch_precision": "fp8"}, f"precision is mxfp8. {ONLY_BF16}, mxfp8"),
        ({**SENT, "wgrad": "mxfp8"}, f"wgrad=bf16 allows it. {ONLY_BF16}"),
        ({"precision": "fp8", "dispatch_precision": "fp8"}, f"those that send fp8: deepep. {ONLY_BF16}"),
        ({**SENT, "ep_backend": "hybridep"}, f"those that send mxfp8: standard, deepep. {ONLY_BF16}"),
        ({**SENT, "ep": 1}, f"(ep 1) no token travels. {ONLY_BF16}"),
    ],
    "weight gradients are in FP8 with FP8 experts": [
        ({"precision": "mxfp8", "wgrad": "fp8"}, "Legal wgrad: mxfp8, bf16"),
    ],
    "attention runs here": [
        ({"attention_backend": "flex_flash", "hardware": "cpu"}, "Legal attention_backend: flex"),
        ({"attention_backend": "varlen", "hardware": "b200_x256", "cp": 2},
         "Legal attention_backend: flex, flex_tiles, flex_flash"),
    ],
    "quantised linears are whole": [({**LINEAR, "precision": "mxfp8", "tp": 2}, "Legal quantize: experts")],
    "NVFP4 is of experts": [({**LINEAR, "precision": "nvfp4"}, "Legal quantize: experts")],
    "expert blocks are whole": [
        ({"model": "16B", "nodes": 8, "ep": 1, "tp": 16, "precision": "mxfp8"}, "multiples of 32. Legal tp: 1, 2, 4"),
    ],
    "vocabulary holds the tokenizer": [
        ({"dataset": "c4", "shape": {"vocab_size": 129_279}}, "legal vocab_size: 129280 or more"),
        ({"shape": {"vocab_size": 2047}}, "legal vocab_size: 2048 or more"),
        ({"model": "nano", "dataset": "c4", "seq_len": 4096, "shape": {"vocab_size": 2047}}, "2048 or more"),
    ],
    "GPU has FP8": [({"precision": "fp8", "hardware": "cpu"}, "Legal precision: bf16, mxfp8, nvfp4")],
    "GPU has MXFP8": [
        ({"precision": "mxfp8", "mxfp8_kernels": "native", "hardware": "h100_node"}, "mxfp8_kernels: auto, emulated"),
    ],
    "memory snapshots are CUDA's": [
        ({"memory_snapshot": True, "trace_step": 9, "hardware": "cpu"}, "trace_step alone works on a CPU too"),
        ({"memory_snapshot": True}, "set trace_step to a step of this run"),
    ],
    "dispatcher needs CUDA": [({"ep_backend": "deepep", "hardware": "cpu"}, "Legal ep_backend: standard")],
}  # fmt: skip
"""Of each rule what breaks it and no other, and how the reason ends: with what is valid."""
LEGAL: list[dict[str, Any]] = [
    {**ON_96, "ep": 32, "dp_replicate": 3},
    {"tp": 16, "seq_len": 8208},  # what BROKEN's seq_len of 8200 is advised to be
    {"shape": GQA, "tp": 4},
    {"dataset": "c4", "shape": {"vocab_size": 129_280}},
    {"shape": {"vocab_size": 2048}},
    {**KEPT, "compile": "model+loss"},
    {**KEPT, **SENT},
    {"activation_checkpoint": "full+dispatch", "hardware": "cpu"},  # whose all-to-all is an operator
    {**SENT, "ep_backend": "deepep"},
    {"precision": "fp8", "dispatch_precision": "fp8", "ep_backend": "deepep"},
    *({**DEEPEP, "precision": precision, "activation_checkpoint": policy} for precision, policy in product(
        ("bf16", "fp8", "mxfp8"), ("none", "selective", "full", "full+dispatch"))),
]  # fmt: skip


def experiment(**fields: Any) -> Experiment:
    return Experiment(**{**ON_256, **fields})


@pytest.mark.parametrize(("rule", "fields", "valid"), [(rule, *row) for rule, rows in BROKEN.items() for row in rows])
def test_a_broken_rule_names_what_is_valid_and_that_mends_it(rule: str, fields: dict[str, Any], valid: str) -> None:
    facts = facts_of(experiment(**fields))
    (fault,) = faults(facts)
    (reason,) = check(facts.experiment).reasons
    assert fault.rule == rule
    assert reason == fault.reason(facts)
    assert reason.startswith(f"{fault.factor} is ")
    assert reason.endswith(valid)
    assert not re.search(r"[<>{}\[\]]|Precision\.|EPBackend\.|None", reason), "a trace of Python"
    for value in fault.choices(facts) if fault.offers_choices else ():
        assert list(faults(facts.vary(**{fault.factor: value}))) == []


def test_every_rule_has_a_case() -> None:
    assert set(BROKEN) == set(re.findall(r'Fault\(\s*"([^"]+)"', inspect.getsource(rules)))


@pytest.mark.parametrize("fields", LEGAL)
def test_what_is_legal(fields: dict[str, Any]) -> None:
    assert check(experiment(**fields)).reasons == ()


def test_every_reason_is_told_with_choices_that_break_nothing_more() -> None:
    verdict = check(experiment(tp=3, pp=5, dp_shard=7, cp=2, seq_len=8190, local_batch=63, microbatch=2, ep=32,
                               precision="mxfp8", ep_backend="minimal_async_ep"))  # fmt: skip
    assert verdict.layout is None
    assert [(reason.split(" is ")[0], re.split(r"[:.] ", reason)[-1]) for reason in verdict.reasons] == [
        ("pp", "No pp is legal while the other fields stay as they are"),
        ("tp", "1, 2, 4, 8, 16, 32, 64, 128"),
        ("ep", "2"),
        ("microbatch", "1, 3, 7, 9"),
        ("seq_len", "7680 or 8448"),
        ("seq_len", "7680 or 8448"),
        ("ep_backend", "standard, deepep, hybridep"),
        ("activation_checkpoint", "full"),
        ("ep", "2"),
    ]


@settings(max_examples=150)
@given(
    degrees=st.fixed_dictionaries(dict.fromkeys(("pp", "dp_replicate", "cp", "tp", "ep", "nodes"), st.integers(1, 12))),
    microbatch=st.integers(1, 4),
    accumulates=st.booleans(),
)
def test_a_resolved_layout_multiplies_to_its_ranks_and_sequences(
    degrees: dict[str, int], microbatch: int, accumulates: bool
) -> None:
    batch = {"local_batch": 12, "microbatch": microbatch, "accumulate_gradients": accumulates}
    x = Experiment(model="debug", gpus_per_node=8, **degrees, **batch)
    layout = (verdict := check(x)).layout
    assert layout is not None or verdict.reasons
    if layout is not None:
        assert x.pp * x.dp_replicate * layout.dp_shard * x.cp * x.tp == layout.world_size == x.nodes * 8
        assert layout.efsdp * x.ep == layout.dp_shard * x.cp * x.tp
        assert len(layout.stages_of_rank) == x.pp
        assert sum(map(len, layout.stages_of_rank)) == len(layout.stages)
        assert layout.microbatch_size == (microbatch if x.pp > 1 or accumulates else 12)
        assert layout.microbatches * layout.microbatch_size == 12


@pytest.mark.parametrize("size", [96, 136, 144, 160])
@pytest.mark.parametrize("dimension", ["dim", "moe_hidden_dim"])
@pytest.mark.parametrize("ep", [1, 2])
def test_experts_are_whole_where_the_product_takes_them(ep: int, dimension: str, size: int) -> None:
    verdict = check(Experiment(precision="mxfp8", ep=ep, shape={dimension: size}))
    k, n = (size, 128) if dimension == "dim" else (128, size)
    x, weights = torch.zeros(32, k, dtype=torch.bfloat16), torch.zeros(1, n, k, dtype=torch.bfloat16)
    try:
        grouped_mm(x, weights.transpose(-2, -1), torch.tensor([32], dtype=torch.int32), "mxfp8_emulated")
    except NotWholeBlocks:
        (reason,) = verdict.reasons
        assert f"it needs features in multiples of 32, and {dimension} is {size}" in reason
    else:
        assert verdict.legal
    assert check(Experiment(precision="fp8", ep=ep, shape={dimension: size})).legal == (size % 16 == 0)


@pytest.mark.parametrize(
    ("hardware", "kernels", "block"),
    [
        ("b200_node", "auto", 128),
        ("local", "native", 128),
        ("b200_node", "emulated", 32),
        ("h200_node", "auto", 32),
        ("mi355x_node", "auto", 32),
    ],
)
def test_native_mxfp8_takes_the_features_that_torchao_does(hardware: str, kernels: str, block: int) -> None:
    """gpt-oss has 2,880; a kernel of torchao's asserts multiples of 128 on SM100 alone."""
    fields = {"precision": "mxfp8", "mxfp8_kernels": kernels, "hardware": hardware}
    for name, size in (("dim", 2880), ("moe_hidden_dim", 160), ("dim", 256)):
        assert check(Experiment(**fields, shape={name: size})).legal == (size % block == 0)
    kernel = Path(find_spec("torchao.prototype.moe_training").origin).parent / "kernels/mxfp8"
    assert f"assert K % {rules.NATIVE_BLOCK} == 0" in (kernel / "cutedsl_quantize_2d_1x32.py").read_text()


@pytest.mark.parametrize("size", [80, 96])
@pytest.mark.parametrize(
    "dimension", ["dim", "moe_hidden_dim", "q_lora_rank", "kv_lora_rank", "dense_hidden_dim", "n_heads"]
)
def test_linears_are_whole_where_the_converter_takes_them(dimension: str, size: int) -> None:
    own = Experiment(precision="mxfp8", quantize="experts+linears", shape={dimension: size})
    model = model_spec("nano", ep_backend="standard", shape=shape_for(own)).model
    try:
        Quantiser.Config(kernels="emulated", linears=list(LINEARS)).build().convert(model)
    except Refused:
        assert f"{dimension} is {size}" in check(own).reasons[0]
    else:
        assert check(own).legal


@given(
    ranks=st.integers(1, 12),
    experts=st.integers(1, 48),
    top_k=st.integers(1, 40),
    dim=st.sampled_from([64, 128, 256, 384, 512, 7168]),
    kernels=st.sampled_from(["native", "emulated"]),
)
def test_the_rules_refuse_what_the_buffer_refuses(
    ranks: int, experts: int, top_k: int, dim: int, kernels: Literal["native", "emulated"]
) -> None:
    if top_k > experts:
        return
    facts = facts_of(Experiment(model="16B", ep_backend="deepep", ep_kernels=kernels, ep=ranks, gpus_per_node=ranks))
    facts = replace(facts, shape=replace(facts.shape, dim=dim, num_experts=experts, top_k=top_k))
    of_the_buffer = {"dispatcher needs ep", "ep divides the experts", "DeepEP takes the tokens"}
    legal = of_the_buffer.isdisjoint(fault.rule for fault in faults(facts))
    try:
        check_sizes(ranks=ranks, hidden=dim, tokens=8, experts=experts, top_k=top_k, native=kernels == "native")
    except BadInput:
        assert not legal
    else:
        assert legal


MXFP8 = {"precision": "mxfp8"}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({**MXFP8, "hardware": "b200_x256"}, "padding: 32 tokens raised to 128"),
        ({**MXFP8, "mxfp8_kernels": "native"}, "padding: 32 tokens raised to 128"),
        ({**MXFP8, "hardware": "h100_node"}, "multiple of 32, emulated"),
        ({**MXFP8, "hardware": "local"}, "multiple of 32 where MXFP8 is emulated"),
        ({**MXFP8, "hardware": "b200_x256", "mxfp8_kernels": "emulated"}, "multiple of 32"),
        ({"hardware": "b200_x256", "precision": "fp8"}, "multiple of 16"),
        ({"ep_backend": "deepep"}, "multiple of 8"),
        ({"pp": 2}, "loss: global rank 128 holds it"),
        ({"pp": 8}, "loss: global rank 224 holds it"),
        ({"pp": 2, "pp_schedule": "ZBVZeroBubble"}, "loss: global rank 0 holds it"),
        ({"pp": 2, "pp_schedule": "DualPipeV"}, "rank 128, which TorchTitan 0.3.0 takes for TensorBoard and W&B"),
        ({"pp": 2}, "cuda graphs: off; TorchTitan 0.3.0 does not support them with pipeline parallelism"),
        ({"ep": 2}, "cuda graphs: off; TorchTitan 0.3.0 does not support them with ep_backend standard"),
        ({"ep": 32}, "does not fit into a node of 8"),
        ({"ep": 32, "routing": "round_robin"}, "a token's 8 copies to 1 of 32 ranks"),
        ({"ep": 32, "routing": "round_robin", "model": "16B"}, "a token's 6 copies to 3 of 32 ranks"),
        ({"warmup_steps": 2000, "steps": 1500}, "shortens warmup_steps 2000 to the 1500 steps"),
        ({"hardware": "b200_node"}, "b200_node has 8 GPUs, and this takes 256"),
        ({"hardware": "gb200_nvl72_x4"}, "a node of gb200_nvl72_x4 has 4 GPUs, and gpus_per_node is 8"),
        ({}, "the 64 sequences of local_batch go forward at once"),
        ({"shape": GQA}, "planned and projected, and not trained"),
    ],
)
def test_notes(fields: dict[str, Any], expected: str) -> None:
    notes = check(experiment(**fields)).notes
    assert any(expected in note for note in notes), notes
