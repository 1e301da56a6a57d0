"""Our verdict on a layout against TorchTitan's own, over 1,700 random ones.

TorchTitan is asked in a process of its own (``tests/titan_judge.py``). It must refuse exactly what our rules refuse,
and its words must be about a rule that we say is broken. What it does not notice is written down in ``UNNOTICED``, and
shown by a case of ``SHOWN`` and a test each.
"""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torchtitan
from titan_judge import Answers, ask
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining.schedules import _check_torch_compile_compatibility
from torch.distributed.pipelining.stage import _PipelineStageBase
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor.experimental._context_parallel._attention import _create_cp_block_mask
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchao.prototype.mx_formats.mx_tensor import to_mx
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import _get_metrics_rank
from torchtitan.distributed.pipeline_parallel import (
    _generate_llm_fqn_per_model_part,
    _get_pp_rank_to_stage_indices_mapping,
)
from torchtitan.models.common.moe import TokenChoiceTopKRouter

from moelab.experiment import EPBackend, Experiment, Precision
from moelab.layout import SCHEDULES, check, facts_of, faults, rules
from moelab.layout.mesh import divisors
from moelab.layout.rules import LOSS_CHUNKS, ROPE_TOKENS
from moelab.layout.schedule import effective_layers, split_layers, stages_of_rank
from moelab.model import shape_of
from moelab.titan.models import model_spec
from moelab.titan.routing import RandomBalancedRouter

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
    "minimal_async_ep recomputes": r"requires full recompute",
    "stages are the schedule's": r"v schedules assume 2 stages per rank|greater than or equal to the number of stages",
    "expert shards are even": r"does not support uneven sharding",
}
"""Rules that TorchTitan checks, and how it says so."""

UNNOTICED = {
    "ep divides its region": "until the device mesh is built, when every rank runs",
    "ep divides the experts": "ever, except with minimal_async_ep: 64 experts on 48 ranks are sharded unevenly",
    "expert shards are even": "until FSDP shards the first MoE layer",
    "mask is cut in blocks": "until the first batch",
    "loss is cut evenly": "until the first batch",
    "stages are the schedule's": "with a schedule of one stage: it runs the first of those that it made",
    "schedule exists": "ever: PipelineScheduleMulti has no order, and in another case of letters a wrong rank logs",
    "no split backward when compiled": "ever: torch looks for wrapped modules, and TorchTitan compiles in place",
    "V schedules do not evaluate": "until the first evaluation, which moelab has after the last step",
    "minimal_async_ep stays in a node": "until the buffers of peers are opened",
    "DeepEP takes the tokens": "until DeepEP compiles its kernels for the first batch",
    "expert blocks are whole": "until the first step",
    "forced routing has plain scores": "until the first batch",
}
"""Rules that TorchTitan 0.3.0 does not notice while it is configured, and until when."""

NOT_TITANS = {"dispatch is kept", "dispatch is quantised as its experts",
              "quantised linears are whole", "NVFP4 is of experts",
              "weight gradients are in FP8 with FP8 experts", "attention runs here",
              "GPU has FP8", "GPU has MXFP8", "dispatcher needs CUDA",
              "context parallelism has FlexAttention", "vocabulary holds the tokenizer",
              "memory snapshots are CUDA's"}  # fmt: skip
"""Rules about settings of moelab, its data and about the GPU, of which TorchTitan's configuration knows nothing."""


UNEVEN = "expert shards are even"
LOOPS = [name for name, one in SCHEDULES.items() if one.style == "loop" and one.stages_per_rank > 1]
SEQUENCES = {"nano": (128, 2048, 4096), "debug": (2048, 8192), "16B": (4096, 8192, 16384), "671B": (4096, 8192)}
WILD = {
    "pp": lambda draw: draw.randint(1, 40),
    "tp": lambda draw: draw.randint(1, 9),
    "cp": lambda draw: draw.choice((2, 3, 4, 16)),
    "dp_replicate": lambda draw: draw.randint(1, 9),
    "dp_shard": lambda draw: draw.randint(1, 64),
    "ep": lambda draw: draw.choice((draw.randint(1, 64), 2 ** draw.randint(0, 9))),
    "pp_schedule": lambda draw: draw.choice(("PipelineScheduleSingle", "ZB1P")),
    "pp_stages_per_rank": lambda draw: draw.randint(0, 5),
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
        "pp_stages_per_rank": draw.choice((0, 2, 3, 4)) if schedule.name in LOOPS else 0,
        "local_batch": microbatch * degrees["pp"] * draw.choice((1, 2, 2, 3, 4)),
        "microbatch": microbatch,
        "seq_len": draw.choice(SEQUENCES[shape.name]),
        "precision": draw.choice((Precision.BF16, Precision.BF16, Precision.FP8, Precision.MXFP8)),
        "ep_backend": EPBackend.STANDARD if ep == 1 else draw.choice((EPBackend.STANDARD, EPBackend.HYBRIDEP)),
        "activation_checkpoint": draw.choice(("none", "selective", "full", "full")),
        "compile": draw.choice(("none", "loss", "model+loss")),
        "dataset": draw.choice(("c4", "c4", "python")),
    }


def broken_rules(experiment: Experiment) -> set[str]:
    """Names of the rules that an experiment breaks."""
    return {fault.rule for fault in faults(facts_of(experiment))}


def disagreement(experiment: Experiment, words: str | None, unnoticed: set[str]) -> str | None:
    """How the two verdicts differ, or None."""
    broken = broken_rules(experiment)
    if words is None:
        missed = broken - unnoticed
        return f"TorchTitan accepts what breaks {sorted(missed)}: {experiment}" if missed else None
    if any(rule in WORDS and re.search(WORDS[rule], words) for rule in broken):
        return None
    return f"TorchTitan says {words!r}, we say {sorted(broken) or 'legal'}: {experiment}"


def draw_experiments(count: int, *, seed: int, accept: Callable[[Experiment], bool]) -> list[Experiment]:
    draw, drawn = random.Random(seed), {}
    while len(drawn) < count:
        experiment = random_experiment(draw)
        if accept(experiment):
            drawn[experiment] = None
    return list(drawn)


def is_cheap_to_shard(experiment: Experiment) -> bool:
    """A small model without a pipeline, on a world where experts are cut in every way that a mesh allows."""
    small = experiment.model in ("nano", "debug") and 8 < experiment.world_size <= 256 and experiment.pp == 1
    plain = experiment.ep_backend is EPBackend.STANDARD and experiment.precision is Precision.BF16
    return small and plain and broken_rules(experiment) <= {UNEVEN, "ep divides the experts"}


def is_uneven(experiment: Experiment) -> bool:
    """One of those that FSDP cannot shard."""
    return is_cheap_to_shard(experiment) and UNEVEN in broken_rules(experiment)


RANDOM = {
    "configure": draw_experiments(1500, seed=1, accept=lambda _: True),
    "mesh": draw_experiments(200, seed=2, accept=lambda experiment: experiment.world_size <= 256),
    "shard": draw_experiments(10, seed=3, accept=is_cheap_to_shard) + draw_experiments(5, seed=4, accept=is_uneven),
}
ON_96 = {"model": "16B", "nodes": 12, "gpus_per_node": 8, "seq_len": 4096}
NANO_PIPELINE = {"model": "nano", "gpus_per_node": 4, "pp": 2, "ep": 1}
SHOWN = {
    "region": Experiment(model="671B", nodes=32, gpus_per_node=8, pp=16, ep=32, local_batch=16, seq_len=4096),
    "experts": Experiment(**ON_96, dp_shard=96, ep=48),
    "uneven shards": Experiment(**ON_96, ep=32),
    "replicas": Experiment(model="nano", gpus_per_node=12, ep=1, dp_replicate=2),
    "mask blocks": Experiment(model="debug", gpus_per_node=4, cp=4, ep=1, seq_len=256),
    "chunks of the loss": Experiment(model="nano", seq_len=132),
    "stages that never run": Experiment(**NANO_PIPELINE, pp_stages_per_rank=2),
    "no order": Experiment(**NANO_PIPELINE, pp_schedule="PipelineScheduleMulti"),
    "another case": Experiment(**NANO_PIPELINE, pp_schedule="zbvzerobubble", dataset="c4"),
    "split backward": Experiment(**NANO_PIPELINE, pp_schedule="InterleavedZeroBubble", compile="model+loss"),
    "evaluation": Experiment(**NANO_PIPELINE, pp_schedule="ZBVZeroBubble"),
    "between nodes": Experiment(model="debug", nodes=2, gpus_per_node=4, ep=8, ep_backend="minimal_async_ep",
                                activation_checkpoint="full"),
    "features of DeepEP": Experiment(model="nano", ep_backend="deepep"),
    "expert blocks": Experiment(model="16B", nodes=2, gpus_per_node=8, ep=1, tp=16, precision="mxfp8", seq_len=4096),
    "scores that are DTensors": Experiment(model="nano", hardware="cpu", gpus_per_node=2, tp=2, seq_len=1024,
                                           routing="random_balanced"),
}  # fmt: skip
"""One experiment for each thing that TorchTitan does not notice while it is configured."""


@pytest.fixture(scope="module")
def titan() -> Answers:
    """TorchTitan's verdicts, asked once for all tests."""
    shown = {"configure": SHOWN, "mesh": ("region", "uneven shards"), "shard": ("experts", "uneven shards", "replicas")}
    return ask({depth: [*RANDOM[depth], *(SHOWN[name] for name in shown[depth])] for depth in RANDOM})


@pytest.mark.parametrize(
    ("depth", "noticed"),
    [
        ("configure", set()),
        ("mesh", {"ep divides its region"}),
        ("shard", {"ep divides its region", UNEVEN}),
    ],
)
def test_verdicts_agree(titan: Answers, depth: str, noticed: set[str]) -> None:
    experiments, unnoticed = RANDOM[depth], set(UNNOTICED) - noticed
    disagreements = [text for row in experiments if (text := disagreement(row, titan[depth][row], unnoticed))]
    assert not disagreements, f"{len(disagreements)} of {len(experiments)} disagree; the first: {disagreements[:3]}"
    refused = sum(titan[depth][row] is not None for row in experiments)
    legal = sum(not broken_rules(row) for row in experiments)
    assert min(refused, legal) > len(experiments) / 8, "too few to compare"


def test_every_rule_is_compared_or_written_down(titan: Answers) -> None:
    names = re.findall(r'Fault\(\s*"([^"]+)"', inspect.getsource(rules))
    assert set(names) == set(WORDS) | set(UNNOTICED) | NOT_TITANS
    assert sorted(rule for row in SHOWN.values() for rule in broken_rules(row)) == sorted([
        *UNNOTICED, "expert shards are even", "schedule exists"])  # fmt: skip
    assert {titan["configure"][row] for row in SHOWN.values()} == {None}


@pytest.mark.parametrize(
    ("depth", "name", "words"),
    [
        ("mesh", "region", "mesh_sizes=(16, 1, 0, 32)"),  # PP 16 leaves 16 ranks for EP 32: an efsdp of 0
        ("mesh", "uneven shards", "None"),
        ("shard", "uneven shards",
         "FSDP does not support uneven sharding on dim 1: torch.Size([2, 1408, 2048]) (world size: 3)"),
        ("shard", "replicas", "FSDP does not support uneven sharding on dim 1"),
        ("shard", "experts", "None"),  # 64 experts over 48 ranks, without a word
    ],
)  # fmt: skip
def test_meshes_and_shards_that_are_noticed_late_or_never(titan: Answers, depth: str, name: str, words: str) -> None:
    assert words in str(titan[depth][SHOWN[name]])


def test_mask_blocks_are_noticed_with_the_first_batch() -> None:
    mesh: Any = SimpleNamespace(size=lambda: 4)
    fields = {"mask_mod": lambda *_: True, "B": 1, "H": 1, "Q_LEN": 256, "KV_LEN": 256, "device_mesh": mesh}
    if "BLOCK_SIZE" in inspect.signature(_create_cp_block_mask).parameters:  # of torch 2.15, which keeps the mask's own
        fields["BLOCK_SIZE"] = (128, 128)
    with pytest.raises(NotImplementedError, match="not divisible by CP mesh world size"):
        _create_cp_block_mask(**fields)


def test_chunks_of_the_loss_are_noticed_with_the_first_batch() -> None:
    loss = ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config()).build()
    assert loss.num_chunks == LOSS_CHUNKS
    loss.set_lm_head(torch.nn.Linear(4, 8))
    with pytest.raises(RuntimeError, match="sequence length must be divisible by num_chunks"):
        loss(torch.zeros(1, 132, 4, requires_grad=True), torch.zeros(1, 132, dtype=torch.long), 1.0)


def test_the_rank_that_logs_is_wrong_after_another_case_of_letters_and_with_dualpipev() -> None:
    """A V has its loss on rank 0, which TorchTitan knows of one V by one spelling."""
    dims: Any = SimpleNamespace(world_size=4, pp=2, pp_enabled=True)
    names = ("ZBVZeroBubble", "zbvzerobubble", "DualPipeV")
    assert [_get_metrics_rank(parallel_dims=dims, pp_schedule=name) for name in names] == [0, 2, 2]
    notes = check(Experiment(**NANO_PIPELINE, pp_schedule="DualPipeV")).notes
    assert any("global rank 0 holds it" in note and "rank 2, which TorchTitan" in note for note in notes)


def test_layers_compiled_in_place_are_not_noticed() -> None:
    layers = torch.nn.Sequential(torch.nn.Linear(2, 2))
    layers[0].compile(backend="eager")  # as TorchTitan compiles each layer
    in_place: Any = [SimpleNamespace(submod=layers)]
    wrapped: Any = [SimpleNamespace(submod=torch.nn.Sequential(torch.compile(torch.nn.Linear(2, 2), backend="eager")))]
    _check_torch_compile_compatibility(in_place, "ZBVZeroBubble")
    with pytest.raises(RuntimeError, match="not supported with stage modules that have used"):
        _check_torch_compile_compatibility(wrapped, "ZBVZeroBubble")


def test_a_v_schedule_hands_gradients_to_itself_without_a_backward_pass_too() -> None:
    evaluating: Any = SimpleNamespace(has_backward=False)
    with pytest.raises(AssertionError, match="if this stage doesn't have backward"):
        _PipelineStageBase.get_local_bwd_output(evaluating, 0)


def test_torchtitan_cannot_compile_its_own_deepep() -> None:
    """Its operators have no fake implementation in 0.3.0, HybridEP's have: why ``deepep`` is moelab's dispatcher."""
    folder = Path(torchtitan.__file__).parent / "distributed" / "deepep"
    fakes = {name: "register_fake" in (folder / f"{name}.py").read_text() for name in ("deepep", "hybridep")}
    assert fakes == {"deepep": False, "hybridep": True}


def test_expert_blocks_are_noticed_with_the_first_step() -> None:
    """TP 16 without expert parallelism leaves 88 of 1408 hidden features, which is no multiple of MXFP8's block."""
    with pytest.raises(AssertionError):
        to_mx(torch.zeros(32, 1408 // 16, dtype=torch.bfloat16), torch.float8_e4m3fn, 32)


@pytest.mark.parametrize("router", [TokenChoiceTopKRouter, RandomBalancedRouter])
def test_forced_routing_is_noticed_with_the_first_batch(router: Any) -> None:
    """The scores are DTensors where TorchTitan shards by them (``partial_dtensor``), the numbers of experts never."""
    fields: Any = SimpleNamespace(num_experts=4, top_k=2, rank=0)
    scores_BLE = torch.rand(1, 8, 4)
    router._debug_force_load_balance_routing(fields, scores_BLE)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        distributed = distribute_tensor(scores_BLE, init_device_mesh("cpu", (2,)), [Replicate()])
        with pytest.raises(RuntimeError, match=r"got mixed torch.Tensor and DTensor"):
            router._debug_force_load_balance_routing(fields, distributed)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("model", ROPE_TOKENS)
def test_stages_and_rotary_embeddings_are_torchtitans(model: str) -> None:
    n_layers = shape_of(model).n_layers
    for n_stages in range(1, effective_layers(n_layers) + 1):
        theirs = _generate_llm_fqn_per_model_part(n_stages, n_layers)
        assert split_layers(n_layers, n_stages) == tuple(map(tuple, theirs))
    assert ROPE_TOKENS[model] == model_spec(model, ep_backend="standard").model.max_seq_len


@pytest.mark.parametrize("name", SCHEDULES)
def test_ranks_hold_torchtitans_stages(name: str) -> None:
    for pp, turns in product((2, 3, 8), (0, 3, 4) if name in LOOPS else (0,)):
        n_stages = pp * (turns or SCHEDULES[name].stages_per_rank)
        theirs = [_get_pp_rank_to_stage_indices_mapping(rank, pp, name, n_stages) for rank in range(pp)]
        assert stages_of_rank(SCHEDULES[name], pp, turns) == tuple(theirs)
