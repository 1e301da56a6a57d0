"""TorchTitan builds a world of any size in one process, and what each rank holds adds up."""

from __future__ import annotations

import resource
from typing import Any

import pytest
from titan_process import in_titan_process, verified

from moelab.errors import BadInput, MoelabError, Refused
from moelab.experiment import Experiment
from moelab.layout import check
from moelab.titan import verify as module
from moelab.titan.arms import named_arms
from moelab.titan.models import model_spec
from moelab.titan.verify import verify


@pytest.fixture
def loaded_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of the child from a process that has loaded TorchTitan; the layout of 671B starts a real one."""
    monkeypatch.setattr(module, "_ask_child", lambda request: in_titan_process(verified, request))


def nano(**fields: Any) -> Experiment:
    return Experiment(**{"model": "nano", "gpus_per_node": 8, "seq_len": 64, **fields})


def of_ranks(result: dict[str, Any], column: str) -> list[Any]:
    """A column of the rows of the ranks, whose parameters the memory model predicts exactly."""
    assert [row["parameters"] for row in result["ranks"]] == [row["predicted_parameters"] for row in result["ranks"]]
    return [row[column] for row in result["ranks"]]


@pytest.mark.usefixtures("loaded_child")
def test_nano_on_eight_ranks_adds_up() -> None:
    """PP 2, TP 2, EP 2: parameters that are replicated over TP are counted once."""
    experiment = nano(pp=2, tp=2, ep=2, local_batch=4, precision="mxfp8", routing="random_balanced")
    result = verify(experiment, range(8))
    total = sum(parameter.numel() for parameter in model_spec("nano", ep_backend="standard").model.build().parameters())
    assert result["total_parameters"] == total == pytest.approx(sum(of_ranks(result, "unique_parameters")))
    assert sum(of_ranks(result, "parameters")) > total
    assert of_ranks(result, "rank") == list(range(8))
    assert of_ranks(result, "pp_rank") == [0] * 4 + [1] * 4
    assert of_ranks(result, "mxfp8_modules") == [1] * 4 + [2] * 4
    stages = [tuple(stage["modules"]) for row in (result["ranks"][0], result["ranks"][4]) for stage in row["stages"]]
    assert tuple(stages) == check(experiment).layout.stages
    # The configuration is that of the GPU, not of the processor that this runs on.
    assert (result["gpu"], result["spmd_backend"]) == ("SM100", "spmd_types")
    assert result["dispatcher"] == "TorchAOTokenDispatcher(num_experts=8, top_k=2, pad_multiple=128)"
    assert result["overrides"] == ["moelab.titan.routing.random_balanced"]
    assert any("torch.compile is not applied" in line for line in result["not_built"])


@pytest.mark.usefixtures("loaded_child")
def test_published_16b_layout() -> None:
    """Uneven shards: 576 rows over 256 ranks leave the last ones without any."""
    result = verify(named_arms()["dsv3_16b_mxfp8_hybridep_linears"], [0, 63, 64, 255])
    total, held = result["total_parameters"], of_ranks(result, "parameters")
    assert (total, result["world_size"]) == (15_706_484_224, 256)
    assert held == sorted(held, reverse=True)
    assert 256 * held[-1] < total < 256 * held[0]
    assert result["dispatcher"].startswith("HybridEPTokenDispatcher(num_experts=64, top_k=6, pad_multiple=128")
    assert "HybridEPTokenDispatcher is not built: its communication buffer needs GPUs" in result["not_built"]
    assert set(of_ranks(result, "mxfp8_modules")) == {26 + 27 * 4 + 27 * 3}  # experts, attention, FFNs


def children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_published_671b_layout_in_a_minute() -> None:
    """TP 2, PP 2, EP 32 on 256 GPUs: every shard is even, so one rank stands for its whole pipeline rank."""
    before = children_cpu_s()
    result = verify(named_arms()["dsv3_671b_mxfp8_deepep"])
    assert children_cpu_s() - before < 60  # processor time: what the clock says depends on what else runs
    assert of_ranks(result, "rank") == [0, 128]
    assert 128 * sum(of_ranks(result, "unique_parameters")) == result["total_parameters"] == 671_026_404_352
    assert sum(of_ranks(result, "mxfp8_modules")) == 58
    (zero, two), (one, three) = of_ranks(result, "stages")
    assert [stage["stage"] for stage in (zero, one, two, three)] == [0, 1, 2, 3]
    assert (zero["modules"][0], three["modules"][-2:]) == ("tok_embeddings", ["norm", "lm_head"])
    assert result["dispatcher"].startswith("PaddedDispatcher(num_experts=256, top_k=8")
    assert "num_max_tokens_per_rank=4096, hidden_dim=7168, alignment=128" in result["dispatcher"]
    assert "PaddedDispatcher is not built: its communication buffer needs GPUs" in result["not_built"]


@pytest.mark.usefixtures("loaded_child")
def test_emulated_deepep_with_quantised_dispatch_is_built_like_the_rest() -> None:
    fields = {"precision": "mxfp8", "wgrad": "bf16", "dispatch_precision": "mxfp8", "ep": 4, "pp": 2, "local_batch": 4}
    result = verify(nano(**fields, ep_backend="deepep", ep_kernels="emulated"), [0, 4])
    assert sum(of_ranks(result, "mxfp8_modules")) == 3
    assert "PaddedDispatcher is not built: its communication buffer needs peers" in result["not_built"]
    assert "num_max_tokens_per_rank=64" in result["dispatcher"]  # of a micro-batch


@pytest.mark.parametrize("ranks", [[-1], [0, 8]])
def test_a_rank_outside_of_the_world_is_bad_input(ranks: list[int]) -> None:
    with pytest.raises(BadInput, match="valid ranks are 0 to 7"):
        verify(nano(), ranks)


@pytest.mark.usefixtures("loaded_child")
@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"tp": 3}, "Invalid parallel dims"),
        ({"pp": 9}, "TorchTitan does not build this experiment"),  # more stages than ranks
        ({"seq_len": 65, "tp": 2}, "seq_len 65 does not divide"),
    ],
)
def test_what_torchtitan_refuses_is_refused_in_its_words(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(Refused, match=told):
        verify(nano(**fields))


def test_a_child_that_dies_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHILD", "moelab.titan.no_such_module")
    with pytest.raises(MoelabError, match=r"exit code 1: .*no_such_module"):
        verify(nano(), [0])
