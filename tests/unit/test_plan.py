"""`moelab plan`: what it answers about layouts, memory, commands and searches, and what TorchTitan makes of it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import nbformat
import pytest
import yaml
from titan_process import in_titan_process, moelab, verified

from moelab.experiment import EPBackend, Experiment
from moelab.experiment_file import read_experiment, read_study
from moelab.hardware import cluster_of
from moelab.notebooks import ConvergenceParameters, read_parameters
from moelab.planning.plan import PUBLISHED_DIFFERENCES, command, differences, layout_words, plan
from moelab.titan.arms import named_arms

ROOT = Path(__file__).parents[2]
BASE = {"model": "671B", "nodes": 32, "gpus_per_node": 8, "local_batch": 64, "seq_len": 8192, "ep": 32}
ON_B200 = {"hardware": "b200_x256", "activation_checkpoint": "full", "tp": 2, "pp": 2}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump(BASE))
    return path


def changed(**fields: object) -> list[str]:
    return [part for name, value in fields.items() for part in ("--set", f"{name}={value}")]


def test_a_plan_for_a_program(call: Any, file: Path) -> None:
    legal, illegal = (call("plan", file, *changed(**fields), "--json") for fields in ({"tp": 2, "pp": 2}, {"pp": 16}))
    assert (legal.code, legal.err, legal.json["legal"], legal.json["reasons"]) == (0, "", True, [])
    layout = legal.json["layout"]
    assert ([len(stage) for stage in layout.pop("stages")], layout) == (
        [32, 32],
        {
            **{"world_size": 256, "pp": 2, "dp_replicate": 1, "dp_shard": 64, "cp": 1, "tp": 2, "ep": 32, "efsdp": 4},
            **{"stages_of_rank": [[0], [1]], "microbatches": 64, "microbatch_size": 1},
            **{"global_batch": 4096, "tokens_per_step": 33_554_432, "bubble_fraction": 0.015385},
        },
    )
    assert (illegal.code, illegal.err, illegal.json["legal"]) == (3, "", False)
    assert "= 16. Legal ep: 1, 2, 4, 8, 16" in illegal.json["reasons"][0]
    assert [illegal.json[name] for name in ("fits", "memory_gib", "memory_by_rank", "layout")] == [None, None, [], {}]


def test_a_plan_for_a_person(call: Any, file: Path) -> None:
    out = call("plan", file, *changed(**ON_B200)).out
    for part in (
        "legal, and fits: 671B",
        "layers 0-30",
        "33.6 M tokens a step",
        "--config experiment",
        "dp_shard 64 · cp 1 · tp 2 · ep 32, experts sharded by 4",
        "GiB on the fullest GPU of 179.1",
        "671 G parameters, 37.55 G active per token",
        "differs from the published scripts:",
    ):
        assert part in out
    deep = call("plan", file, *changed(**{**ON_B200, "pp": 8, "ep": 16})).out
    assert [f"rank {rank}: stage {rank} " in deep for rank in (0, 1, 2, 7)] == [True, True, False, True]
    assert call("plan", file, *changed(nodes=1, ep=8, hardware="b200_node")).out.startswith("legal, but does not fit")
    illegal = call("plan", file, *changed(pp=16, ep=48, seq_len=20000, dispatch_precision="fp8"))  # of BF16 experts
    assert (illegal.code, illegal.out[:27]) == (3, "illegal, 4 reasons: 671B, a")
    assert illegal.out.count("\n- ") == 4
    assert "torchrun" not in illegal.out
    assert all(len(line) <= 120 for line in illegal.out.splitlines())


def test_the_command_names_a_file_that_holds_the_plan_and_starts_every_rank(call: Any, file: Path) -> None:
    for arguments, named in (
        ((), file),
        (changed(ep=8), "experiment.yaml"),
        ((*changed(ep=8), "--write", file.with_name("planned.yaml")), file.with_name("planned.yaml")),
    ):
        assert f"MOELAB_EXPERIMENT={named}" in call("plan", file, *arguments, "--json").json["command"]
    assert read_experiment(file.with_name("planned.yaml")) == Experiment(**{**BASE, "ep": 8})
    one = command(Experiment(gpus_per_node=4), Path("a b.yaml"))
    assert {"moelab.launch.loopback", "--nproc-per-node=4"} < set(one)
    assert "'MOELAB_EXPERIMENT=a b.yaml'" in shlex.join(one)
    several = set(command(Experiment(**BASE)))
    assert {"--nnodes=32", "--nproc-per-node=8", "--node-rank=NODE", "--rdzv-endpoint=HOST:PORT"} < several
    assert "--rdzv-backend=static" in several


def test_a_machine_without_a_gpu_says_nothing_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moelab.hardware.gpus", tuple)
    cluster_of.cache_clear()
    planned = plan(Experiment())
    assert planned.fits is None
    assert "this machine has no GPU; name a profile" in planned.notes[-1]
    cluster_of.cache_clear()


def test_every_published_arm_is_planned_and_started_by_its_name() -> None:
    for name, arm in named_arms().items():
        planned = plan(arm)
        assert planned.command[-2:] == ("--config", name)
        assert planned.command[0] == "torchrun"
        concerning = [row for row in PUBLISHED_DIFFERENCES if arm.model in row.models]
        assert planned.differences == tuple(concerning) or arm.ep_backend is EPBackend.MINIMAL_ASYNC_EP
    assert differences(Experiment(**{**BASE, "tp": 2, "pp": 2, "ep": 16})) == ()


def test_memory_is_that_of_the_estimate_and_the_buffer_of_deepep_follows_the_microbatch(call: Any, file: Path) -> None:
    fields = {**ON_B200, "ep_backend": "deepep"}
    answer = call("plan", file, *changed(**fields), "--json").json
    planned = plan(Experiment(**{**BASE, **fields})).memory
    totals = [planned.worst.reserved_gib, planned.worst.outside_gib, planned.worst_gib]
    assert [answer[name] for name in ("memory_gib", "outside_gib", "total_gib")] == [round(gib, 2) for gib in totals]
    buffer, memory = answer["dispatch_buffer"], answer["memory_by_rank"]
    assert (buffer["tokens"], buffer["ranks"], buffer["nvlink_ranks"]) == (8192 // 2, 32, 8)
    assert {row["parts_gib"]["dispatch buffers"] for row in memory} == {round(buffer["bytes"] / 2**30, 3)}
    lines = [line for line in call("plan", file, *changed(**fields)).out.splitlines() if line.startswith("buffer")]
    assert f"DeepEP {buffer['bytes'] / 2**30:.2f} GiB per GPU" in lines[0]
    assert "4,096 tokens of a micro-batch" in lines[0]
    twice = call("plan", file, *changed(**fields, microbatch=2), "--json").json["dispatch_buffer"]
    assert twice["tokens"] == 2 * buffer["tokens"]
    assert 1.9 * buffer["bytes"] < twice["bytes"] < 2 * buffer["bytes"]  # counters and slack stay
    assert call("plan", file, *changed(tp=2, pp=2), "--json").json["dispatch_buffer"] is None
    emulated = call("plan", file, *changed(ep_backend="deepep", ep_kernels="emulated", tp=2, pp=2)).out
    assert "arm bf16_deepep (DeepEP emulated)" in emulated.splitlines()[0]
    assert "emulated on plain collectives: its numerics, not its speed" in " ".join(emulated.split())
    assert "buffer " not in emulated


def test_a_search(call: Any, file: Path) -> None:
    fields = {"tp": 2, "hardware": "b200_x256", "activation_checkpoint": "full"}
    options = [file, *changed(**fields), "--search", "--limit", "4"]
    answer = call("plan", *options, "--json")
    assert (answer.code, len(answer.json["candidates"])) == (0, 4)
    assert {row["set"]["tp"] for row in answer.json["candidates"]} == {2}
    best = answer.json["candidates"][0]["set"]
    assert plan(Experiment(**{**BASE, **fields, **best})).fits
    table = call("plan", *options, "--write", file.with_name("best.yaml")).out
    assert table.startswith("legal · fits (")
    _, _, rows = table.partition("tokens/s/GPU\n")
    free = [float(row.split()[-2]) for row in rows.splitlines()[:4]]
    assert free == pytest.approx([row["headroom_gib"] for row in answer.json["candidates"]], abs=0.06)
    written = read_experiment(file.with_name("best.yaml"))
    assert {field: getattr(written, field) for field in best} == best


def test_a_search_without_an_answer_is_refused(call: Any, file: Path) -> None:
    answer = call("plan", file, *changed(nodes=1, hardware="b200_node"), "--search")
    assert (answer.code, "no layout fits" in answer.out, "GPUs would do: " in answer.out) == (3, True, True)
    illegal = [file, *changed(dispatch_precision="fp8", hardware="b200_node", nodes=1), "--search"]
    assert call("plan", *illegal, "--json").json["candidates"] == []
    assert "\ndispatch_precision is fp8: standard sends" in call("plan", *illegal).out
    unknown = call("plan", file, *changed(hardware="cpu"), "--search")
    assert (unknown.code, "name another with hardware=" in unknown.err) == (2, True)


def test_hardware_from_a_file_gives_a_search_its_size(call: Any, tmp_path: Path) -> None:
    hardware = tmp_path / "mine.yaml"
    hardware.write_text("{gpu: H200, nodes: 1, gpus: 2, memory_gib: 1000, source: ours}")
    answer = call("plan", "--from-hf", "GLM-4.7-Flash", *changed(hardware=hardware), "--search", "--limit", 1)
    assert (answer.code, "2 GPUs (1 × 2) of mine" in answer.out) == (0, True)
    assert answer.err.endswith("local_batch=16, nodes=1, gpus_per_node=2\n")


def test_config_is_what_torchtitan_resolves(file: Path) -> None:
    fields = {"model": "16B", "nodes": 4, "gpus_per_node": 8, "ep": 32, "precision": "mxfp8", "dataset": "c4"}
    file.write_text(yaml.safe_dump({**fields, "hardware": "b200_x256", "seq_len": 4096}))
    code, printed = in_titan_process(moelab, "plan", str(file), "--config", "--json")
    assert code == 0, printed
    config = json.loads(printed)["titan_config"]
    assert config["parallelism"]["expert_parallel_degree"] == 32
    assert config["training"]["disable_cuda_graphs"] is True
    dispatcher = config["model_spec"]["model"]["layers"][-1]["moe"]["routed_experts"]["token_dispatcher"]
    assert dispatcher["pad_multiple"] == 128, "what the note on padding says"


def test_verify_builds_what_was_planned(call: Any, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moelab.titan.verify._ask_child", lambda request: in_titan_process(verified, request))
    file.write_text(yaml.safe_dump({"model": "debug", "gpus_per_node": 8, "pp": 2, "ep": 4, "hardware": "h100_node"}))
    answer = call("plan", file, "--verify", "--json").json
    assert [row["rank"] for row in answer["verify"]["ranks"]] == [0, 4]
    for row in answer["verify"]["ranks"]:
        assert row["parameters"] == row["predicted_parameters"]
        assert row["predicted_gib"] == answer["memory_by_rank"][row["pp_rank"]]["total_gib"]
        planned = [answer["layout"]["stages"][stage] for stage in answer["layout"]["stages_of_rank"][row["pp_rank"]]]
        assert [stage["modules"] for stage in row["stages"]] == planned


@pytest.mark.parametrize(
    ("study", "arms"),
    [
        # The published 2×2, with the arm that was not published, and the published 16B arms.
        ("671B_b200_x256", ("bf16_standard", "mxfp8_standard", "bf16_deepep", "mxfp8_deepep")),
        ("16B_b200_x256", ("bf16_standard", *(f"mxfp8_standard_wgrad-bf16{sent}" for sent in ("", "_dispatch-mxfp8")))),
    ],
)
def test_arms_of_a_study_are_planned_together_or_one_by_its_name(call: Any, study: str, arms: tuple[str, ...]) -> None:
    path = ROOT / "studies" / f"{study}.yaml"
    plans = call("plan", path, "--json").json["plans"]
    assert [(one["arm"], one["legal"], one["fits"]) for one in plans] == [
        (f"{arm}_round-robin", True, True) for arm in arms
    ]
    # A short name will do where it means one arm.
    for name in (arms[0], f"{arms[0]}_round-robin"):
        assert f"arm {arms[0]}_round-robin" in call("plan", path, "--arm", name).out.splitlines()[0]
    several = call("plan", path, "--arm", "mxfp8")
    assert (several.code, "its arms: bf16_standard_round-robin" in several.err) == (2, True)
    assert "choose one with --arm" in call("plan", path, "--search").err


def test_a_layout_in_words() -> None:
    x = Experiment(gpus_per_node=8, pp=2, microbatch=2, ep=4, tp=2)
    words = "PP 2 (1F1B), FSDP 2, TP 2, EP 4, 2 sequences at a time, 2 times, checkpointing none"
    assert layout_words(x) == layout_words(x.model_copy(update={"dp_shard": 2})) == words


def test_notebook_06_names_the_published_16b_run() -> None:
    parameters = read_parameters(ROOT / "papermill_params" / "06_compare_convergence" / "b200_x256.yaml")
    cells = nbformat.read(ROOT / "notebooks" / "06_compare_convergence.ipynb", as_version=4).cells
    defaults: dict[str, object] = {}
    exec(next(cell.source for cell in cells if "parameters" in cell.metadata.get("tags", [])), defaults)
    given = {name: value for name, value in {**defaults, **parameters}.items() if not name.startswith("__")}
    study = ConvergenceParameters(**given).to_study()
    published = read_study(ROOT / "studies" / "16B_b200_x256.yaml").experiments
    for arm, same in zip(study.experiments[:2], published[:2], strict=True):
        assert arm.model_copy(update={"name": same.name, "mxfp8_kernels": same.mxfp8_kernels}) == same
    assert len(study.experiments) == 6
