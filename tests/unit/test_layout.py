"""Legality of layouts: the known cases, every rule, what a reason says, and the pipeline's stages."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moelab.deepep.buffer import check_sizes
from moelab.errors import BadInput, Refused
from moelab.experiment import Experiment
from moelab.layout import SCHEDULES, check, facts_of, faults, rules
from moelab.model import shape_for
from moelab.mxfp8.converter import LINEARS, MXFP8Converter
from moelab.mxfp8.emulation import grouped_mm
from moelab.mxfp8.quantise import NotWholeBlocks
from moelab.titan.models import model_spec

ON_256 = {"nodes": 32, "gpus_per_node": 8, "local_batch": 64, "seq_len": 8192}


def experiment(**fields: Any) -> Experiment:
    return Experiment(**{"model": "671B", "ep": 8, **ON_256, **fields})


def reasons(**fields: Any) -> tuple[str, ...]:
    return check(experiment(**fields)).reasons


CASES = {
    "region": ({"pp": 16, "ep": 32}, "= 16. Legal ep: 1, 2, 4, 8, 16"),
    "one expert-FSDP rank": ({"pp": 16, "ep": 16}, None),
    "replicated region": ({"dp_replicate": 4, "ep": 128}, "cp 1 * tp 1 = 64. Legal ep: 1, 2, 4, 8, 16, 32, 64"),
    "replicated": ({"dp_replicate": 4, "ep": 64}, None),
    "region of context-parallel ranks too": ({"cp": 4, "ep": 256}, None),
    "experts": ({"model": "16B", "nodes": 12, "dp_shard": 96, "ep": 48}, "ep is 48: it must divide the 64 experts"),
    "stages": ({"pp": 32, "pp_schedule": "Interleaved1F1B"}, "64 stages for 63 effective layers"),
    "32 stages": ({"pp": 32}, None),
    "32 micro-batches": ({"pp": 32, "local_batch": 32}, None),
    "31 micro-batches": ({"pp": 32, "local_batch": 31}, "needs at least 32"),
    "published": ({"tp": 2, "pp": 2, "ep": 32}, None),
}


@pytest.mark.parametrize(("fields", "expected"), CASES.values(), ids=CASES)
def test_known_cases(fields: dict[str, Any], expected: str | None) -> None:
    verdict = check(experiment(**fields))
    assert verdict.legal == (expected is None), verdict.reasons
    if expected:
        assert len(verdict.reasons) == 1
        assert expected in verdict.reasons[0]


def test_without_a_pipeline_the_whole_batch_is_one_microbatch() -> None:
    layout = check(experiment(pp_schedule="Interleaved1F1B")).layout
    assert layout is not None
    assert (layout.microbatches, layout.microbatch_size, layout.stages_of_rank) == (1, 64, ((0,),))
    accumulated = check(experiment(accumulate_gradients=True, microbatch=2))
    assert accumulated.layout is not None
    assert (accumulated.layout.microbatches, accumulated.layout.microbatch_size) == (32, 2)
    (reason,) = check(experiment(accumulate_gradients=True, microbatch=3)).reasons
    assert reason.startswith("microbatch is 3: gradient accumulation cuts local_batch 64")
    assert layout.stages[0][0] == "tok_embeddings"
    assert layout.stages[0][-2:] == ("norm", "lm_head")


def test_every_reason_is_told_and_names_its_factor_first() -> None:
    told = reasons(tp=3, pp=5, dp_shard=7, cp=2, seq_len=8190, local_batch=63, microbatch=2, precision="mxfp8",
                   ep_backend="minimal_async_ep", ep=32)  # fmt: skip
    factors = ["pp", "tp", "ep", "microbatch", "seq_len", "seq_len", "ep_backend", "activation_checkpoint", "ep"]
    assert [reason.split(" is ")[0] for reason in told] == factors
    assert check(experiment(tp=3)).layout is None


BROKEN = {
    "axes divide the ranks": {"pp": 3},
    "dp_shard takes the rest": {"dp_shard": 100},
    "tp divides the heads": {"model": "nano", "nodes": 1, "tp": 8, "seq_len": 1024},
    "ep divides its region": {"pp": 64, "ep": 8, "pp_schedule": "GPipe", "model": "671B"},
    "ep divides the experts": {"model": "16B", "nodes": 12, "ep": 48},
    "expert shards are even": {"model": "16B", "nodes": 12, "ep": 32},
    "schedule exists": {"pp": 2, "pp_schedule": "1f1b"},
    "stages are the schedule's": {"pp": 2, "pp_schedule": "1F1B", "pp_stages_per_rank": 4},
    "stages have layers": {"model": "nano", "pp": 8, "seq_len": 1024},
    "micro-batches are whole": {"pp": 2, "microbatch": 3},
    "micro-batches suffice": {"pp": 16, "local_batch": 8},
    "no split backward when compiled": {"pp": 2, "pp_schedule": "InterleavedZeroBubble", "compile": "model+loss"},
    "V schedules do not evaluate": {"pp": 2, "pp_schedule": "DualPipeV", "dataset": "python"},
    "sequence is cut evenly": {"tp": 2, "seq_len": 8191},
    "mask is cut in blocks": {"cp": 2, "seq_len": 8192 + 128},
    "loss is cut evenly": {"seq_len": 8188},
    "context parallelism has FlexAttention": {"cp": 2, "hardware": "cpu"},
    "forced routing has plain scores": {"model": "nano", "nodes": 1, "tp": 2, "seq_len": 1024, "hardware": "cpu",
                                        "routing": "round_robin"},
    "rotary embedding reaches": {"seq_len": 16385},
    "dispatcher needs ep": {"ep": 1, "ep_backend": "hybridep"},
    "minimal_async_ep is not quantised": {"precision": "fp8", "ep_backend": "minimal_async_ep"},
    "DeepEP takes the tokens": {"model": "nano", "ep_backend": "deepep", "nodes": 1, "seq_len": 1024},
    "minimal_async_ep recomputes": {"ep_backend": "minimal_async_ep"},
    "minimal_async_ep stays in a node": {"ep_backend": "minimal_async_ep", "ep": 16, "activation_checkpoint": "full"},
    "dispatch is kept": {"activation_checkpoint": "full+dispatch", "hardware": "b200_x256"},
    "dispatch is quantised as its experts": {"dispatch_precision": "mxfp8"},
    "weight gradients are in FP8 with FP8 experts": {"precision": "mxfp8", "wgrad": "fp8"},
    "attention runs here": {"attention_backend": "flex_flash", "hardware": "cpu"},
    "quantised linears are whole": {"precision": "mxfp8", "quantize": "experts+linears", "tp": 2},
    "NVFP4 is of experts": {"precision": "nvfp4", "quantize": "experts+linears"},
    "expert blocks are whole": {"model": "16B", "ep": 1, "tp": 16, "precision": "mxfp8", "nodes": 8},
    "vocabulary holds the tokenizer": {"dataset": "c4", "shape": {"vocab_size": 2048}},
    "GPU has FP8": {"precision": "fp8", "hardware": "cpu"},
    "GPU has MXFP8": {"precision": "mxfp8", "mxfp8_kernels": "native", "hardware": "h100_node"},
    "memory snapshots are CUDA's": {"memory_snapshot": True, "trace_step": 9, "hardware": "cpu"},
    "dispatcher needs CUDA": {"ep_backend": "deepep", "hardware": "cpu"},
}  # fmt: skip


def test_every_rule_has_a_case_and_a_name_of_its_own() -> None:
    assert set(BROKEN) == set(re.findall(r'Fault\(\s*"([^"]+)"', inspect.getsource(rules)))


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_told_and_its_choices_mend_it(name: str) -> None:
    broken = experiment(**BROKEN[name])
    facts = facts_of(broken)
    told = [fault for fault in faults(facts) if fault.rule == name]
    assert told, check(broken).reasons
    for fault in told:
        assert fault.reason(facts) in check(broken).reasons
        assert fault.reason(facts).startswith(f"{fault.factor} is ")
        for value in fault.choices(facts) if fault.offers_choices else ():
            still_broken = {one.rule for one in faults(facts.vary(**{fault.factor: value}))}
            assert still_broken <= {one.rule for one in faults(facts)} - {name}


def test_where_no_value_helps_that_is_said() -> None:
    """96 ranks over 64 experts: whatever ep is, FSDP would cut 1408 hidden features into a multiple of 3 parts."""
    (reason,) = reasons(model="16B", nodes=12, ep=32)
    assert "No ep is legal while the other fields stay as they are" in reason
    assert check(experiment(model="16B", nodes=12, ep=32, dp_replicate=3)).legal


def test_grouped_queries_are_cut_by_their_keys_and_said_to_be_planned_only() -> None:
    shape = {"attention": "gqa", "n_kv_heads": 4, "head_dim": 128}
    (reason,) = reasons(shape=shape, tp=8)
    assert reason == "tp is 8: tensor parallelism must divide the 4 key and value heads. Legal tp: 1, 2, 4"
    verdict = check(experiment(shape=shape, tp=4))
    assert verdict.legal
    assert "not trained" in verdict.notes[0]


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_loops_of_several_stages_take_more(schedule: str, stages: int) -> None:
    fields = {"pp": 2, "pp_schedule": schedule, "pp_stages_per_rank": stages, "dataset": "c4", "compile": "none"}
    verdict = check(experiment(**fields))
    own = SCHEDULES[schedule].stages_per_rank
    assert verdict.legal == (stages == own or (stages > 1 < own and SCHEDULES[schedule].style == "loop"))
    if verdict.legal:
        assert verdict.layout is not None
        assert {len(held) for held in verdict.layout.stages_of_rank} == {stages}
        assert check(experiment(**{**fields, "pp_stages_per_rank": 0})).legal
    else:
        assert verdict.reasons[0].startswith(f"pp_stages_per_rank is {stages}: {schedule} does not put that many")


@pytest.mark.parametrize("precision", ["bf16", "fp8", "mxfp8"])
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full", "full+dispatch"])
def test_deepep_takes_every_precision_compiled_and_checkpointed(precision: str, checkpointing: str) -> None:
    fields = {"ep_backend": "deepep", "compile": "model+loss", "hardware": "b200_x256"}
    assert reasons(**fields, precision=precision, activation_checkpoint=checkpointing) == ()


@pytest.mark.parametrize("size", [96, 136, 144, 160])
@pytest.mark.parametrize("dimension", ["dim", "moe_hidden_dim"])
@pytest.mark.parametrize("ep", [1, 2])
def test_experts_are_whole_where_the_product_takes_them(ep: int, dimension: str, size: int) -> None:
    verdict = check(Experiment(precision="mxfp8", ep=ep, shape={dimension: size}))
    k, n = (size, 128) if dimension == "dim" else (128, size)
    x, weights = torch.zeros(32, k, dtype=torch.bfloat16), torch.zeros(1, n, k, dtype=torch.bfloat16)
    try:
        grouped_mm(x, weights.transpose(-2, -1), torch.tensor([32], dtype=torch.int32))
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
    for shape in ({"dim": 2880}, {"moe_hidden_dim": 160}, {"dim": 256}):
        ((name, size),) = shape.items()
        verdict = check(Experiment(precision="mxfp8", mxfp8_kernels=kernels, hardware=hardware, shape=shape))
        assert verdict.legal == (size % block == 0)
        told = "128 with native kernels, and of 32 with mxfp8_kernels=emulated" if block == 128 else "multiples of 32"
        assert verdict.legal or f"{told}, and {name} is {size}" in verdict.reasons[0]
    package = find_spec("torchao.prototype.moe_training")
    assert package is not None
    kernel = Path(str(package.origin)).parent / "kernels" / "mxfp8" / "cutedsl_quantize_2d_1x32.py"
    assert f"assert K % {rules.NATIVE_BLOCK} == 0" in kernel.read_text()


@pytest.mark.parametrize("size", [80, 96])
@pytest.mark.parametrize(
    "dimension", ["dim", "moe_hidden_dim", "q_lora_rank", "kv_lora_rank", "dense_hidden_dim", "n_heads"]
)
def test_linears_are_whole_where_the_converter_takes_them(dimension: str, size: int) -> None:
    own = Experiment(precision="mxfp8", quantize="experts+linears", shape={dimension: size})
    model = model_spec("nano", ep_backend="standard", shape=shape_for(own)).model
    try:
        MXFP8Converter.Config(kernels="emulated", linears=list(LINEARS)).build().convert(model)
    except Refused:
        assert f"{dimension} is {size}" in check(own).reasons[0]
    else:
        assert check(own).legal


def test_the_vocabulary_holds_the_tokenizer_that_the_dataset_uses() -> None:
    for model, dataset, tokens in (("671B", "c4", 129_280), ("671B", "python", 2048), ("nano", "c4", 2048)):
        for size in (tokens - 1, tokens):
            own = Experiment(model=model, dataset=dataset, shape={"vocab_size": size})
            told = [reason for reason in check(own).reasons if f"legal vocab_size: {tokens} or more" in reason]
            assert len(told) == (size < tokens)


DISPATCH = {
    "published 16B arm": ({"precision": "mxfp8", "wgrad": "bf16"}, "mxfp8", None),
    "DeepEP": ({"precision": "mxfp8", "wgrad": "bf16", "ep_backend": "deepep"}, "mxfp8", None),
    "DeepEP, FP8": ({"precision": "fp8", "ep_backend": "deepep"}, "fp8", None),
    "MXFP8 weight gradient": ({"precision": "mxfp8"}, "mxfp8", "wgrad=bf16 allows it"),
    "BF16 experts": ({}, "mxfp8", "precision is bf16"),
    "other experts": ({"precision": "mxfp8", "wgrad": "bf16", "ep_backend": "deepep"}, "fp8", "precision is mxfp8"),
    "standard, FP8": ({"precision": "fp8"}, "fp8", "those that send fp8: deepep"),
    "HybridEP": ({"precision": "mxfp8", "wgrad": "bf16", "ep_backend": "hybridep"}, "mxfp8", "mxfp8: standard, deepep"),
    "nobody to send to": ({"precision": "mxfp8", "wgrad": "bf16", "ep": 1}, "mxfp8", "(ep 1)"),
}


@pytest.mark.parametrize(("fields", "sent", "expected"), DISPATCH.values(), ids=DISPATCH)
def test_quantised_dispatch(fields: dict[str, Any], sent: str, expected: str | None) -> None:
    told = reasons(**fields, dispatch_precision=sent)
    assert len(told) == (expected is not None), told
    if expected:
        assert told[0].startswith(f"dispatch_precision is {sent}: ")
        assert expected in told[0]
        assert "Legal dispatch_precision: bf16" in told[0]


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
    fields: dict[str, Any] = {"ep_backend": "deepep", "ep_kernels": kernels, "ep": ranks, "gpus_per_node": ranks}
    facts = facts_of(Experiment(model="16B", **fields))
    facts = replace(facts, shape=replace(facts.shape, dim=dim, num_experts=experts, top_k=top_k))
    told = {"dispatcher needs ep", "ep divides the experts", "DeepEP takes the tokens"}
    legal = told.isdisjoint(fault.rule for fault in faults(facts))
    try:
        check_sizes(ranks=ranks, hidden=dim, tokens=8, experts=experts, top_k=top_k, native=kernels == "native")
    except BadInput:
        assert not legal
    else:
        assert legal


def test_an_uncompiled_all_to_all_on_a_gpu_cannot_be_kept() -> None:
    fields = {"activation_checkpoint": "full+dispatch", "hardware": "b200_x256"}
    (reason,) = reasons(**fields)
    assert reason.endswith("Legal activation_checkpoint: none, selective, full")
    assert reasons(**fields, compile="model+loss") == reasons(**fields, ep_backend="hybridep") == ()
    assert reasons(**fields, precision="mxfp8", wgrad="bf16", dispatch_precision="mxfp8") == ()
    assert check(Experiment(hardware="cpu", activation_checkpoint="full+dispatch")).legal


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
        ({"pp": 2, "pp_schedule": "DualPipeV"}, "takes for TensorBoard and W&B, is one of them"),
        ({"pp": 2}, "cuda graphs: off; TorchTitan 0.3.0 does not support them with pipeline parallelism"),
        ({"ep": 2}, "cuda graphs: off; TorchTitan 0.3.0 does not support them with ep_backend standard"),
        ({"ep": 32}, "does not fit into a node of 8"),
        ({"ep": 32, "routing": "round_robin"}, "a token's 8 copies to 1 of 32 ranks"),
        ({"ep": 32, "routing": "round_robin", "model": "16B"}, "a token's 6 copies to 3 of 32 ranks"),
        ({"warmup_steps": 2000, "steps": 1500}, "shortens warmup_steps 2000 to the 1500 steps"),
        ({"hardware": "b200_node"}, "b200_node has 8 GPUs, and this takes 256"),
        ({"hardware": "gb200_nvl72_x4"}, "a node of gb200_nvl72_x4 has 4 GPUs, and gpus_per_node is 8"),
        ({}, "the 64 sequences of local_batch go forward at once"),
    ],
)
def test_notes(fields: dict[str, Any], expected: str) -> None:
    notes = check(experiment(**fields)).notes
    assert any(expected in note for note in notes), notes


degrees = st.integers(1, 12)


@settings(max_examples=150, deadline=None)
@given(pp=degrees, dp_replicate=degrees, cp=degrees, tp=degrees, ep=degrees, nodes=degrees, gpus=degrees)
def test_a_resolved_layout_multiplies_to_its_ranks(
    pp: int, dp_replicate: int, cp: int, tp: int, ep: int, nodes: int, gpus: int
) -> None:
    axes = {"pp": pp, "dp_replicate": dp_replicate, "cp": cp, "tp": tp, "ep": ep}
    verdict = check(Experiment(model="debug", **axes, nodes=nodes, gpus_per_node=gpus))
    layout = verdict.layout
    assert layout is not None or verdict.reasons
    if layout is None:
        return
    assert pp * dp_replicate * layout.dp_shard * cp * tp == layout.world_size == nodes * gpus
    assert layout.efsdp * ep == layout.dp_shard * cp * tp
    assert len(layout.stages_of_rank) == pp
    assert sum(len(held) for held in layout.stages_of_rank) == len(layout.stages)


def test_a_reason_has_no_trace_of_python() -> None:
    for name, fields in BROKEN.items():
        for reason in reasons(**fields):
            assert not re.search(r"[<>{}\[\]]|Precision\.|EPBackend\.|None", reason), (name, reason)
