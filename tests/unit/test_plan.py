"""`moelab plan`: the known cases through the command line, bad input, and what it loads."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import nbformat
import pytest
import yaml
from titan_process import in_titan_process, moelab, verified

from moelab.cli import main
from moelab.experiment import EPBackend, Experiment
from moelab.experiment_file import read_experiment, read_study
from moelab.hardware import cluster_of
from moelab.notebooks import ConvergenceParameters, read_parameters
from moelab.plan import PUBLISHED_DIFFERENCES, command, differences, headroom_gib, plan
from moelab.titan.arms import named_arms

BASE = {"model": "671B", "nodes": 32, "gpus_per_node": 8, "local_batch": 64, "seq_len": 8192, "ep": 32}


class Answer(NamedTuple):
    """What one call printed and its exit code."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def call(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("moelab.cli.signal.signal", lambda *_: None)
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump(BASE))

    def run(*arguments: str, file: Path = path) -> Answer:
        code = main(["plan", str(file), *arguments])
        return Answer(code, *capsys.readouterr())

    return run


def overrides(**fields: object) -> list[str]:
    return [part for name, value in fields.items() for part in ("--set", f"{name}={value}")]


def test_a_plan_for_a_program(call: Any) -> None:
    """What is legal is for the tests of layouts; here it has its exit code and its fields."""
    legal, illegal = call(*overrides(tp=2, pp=2), "--json"), call(*overrides(pp=16), "--json")
    assert (legal.code, legal.err, legal.json["legal"], legal.json["reasons"]) == (0, "", True, [])
    layout = legal.json["layout"]
    assert (layout["dp_shard"], layout["efsdp"], layout["microbatches"]) == (64, 4, 64)
    assert ([len(stage) for stage in layout["stages"]], layout["stages_of_rank"]) == ([32, 32], [[0], [1]])
    assert (layout["global_batch"], layout["tokens_per_step"]) == (4096, 33_554_432)
    assert (illegal.code, illegal.err, illegal.json["legal"]) == (3, "", False)
    assert "= 16. Legal ep: 1, 2, 4, 8, 16" in illegal.json["reasons"][0]
    assert [illegal.json[name] for name in ("fits", "memory_gib", "memory_by_rank", "layout")] == [None, None, [], {}]


def test_a_plan_for_a_person(call: Any) -> None:
    out = call(*overrides(tp=2, pp=2, hardware="b200_x256", activation_checkpoint="full")).out
    for part in ("legal, and fits: 671B", "layers 0-30", "33.6 M tokens a step", "--config experiment"):
        assert part in out
    assert "dp_shard 64 · cp 1 · tp 2 · ep 32, experts sharded by 4" in out
    assert "GiB on the fullest GPU of 179.1" in out
    assert "671 G parameters, 37.55 G active per token" in out
    assert "differs from the published scripts:" in out
    assert call(*overrides(nodes=1, ep=8, hardware="b200_node")).out.startswith("legal, but does not fit")
    illegal = call(*overrides(pp=16, ep=48, seq_len=20000, dispatch_precision="fp8"))  # of BF16 experts
    assert (illegal.code, illegal.out[:27]) == (3, "illegal, 4 reasons: 671B, a")
    assert illegal.out.count("\n- ") == 4
    assert "torchrun" not in illegal.out
    assert all(len(line) <= 120 for line in illegal.out.splitlines())


@pytest.mark.parametrize("arguments", [overrides(hardware="b300"), [*overrides(hardware="b300"), "--search"]])
def test_bad_input_is_one_clear_message(call: Any, arguments: list[str]) -> None:
    answer = call(*arguments, "--json")
    assert (answer.code, answer.out) == (2, "")
    assert "there is no such profile" in answer.err
    assert "Traceback" not in answer.err


@pytest.mark.parametrize("option", ["--limit=0", "--global-batch=-1", "--ranks=a,b"])
def test_bad_options(call: Any, option: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        call(option)


def test_the_command_names_a_file_that_holds_the_plan(call: Any, tmp_path: Path) -> None:
    assert f"MOELAB_EXPERIMENT={tmp_path}/experiment.yaml" in call("--json").json["command"]
    assert "MOELAB_EXPERIMENT=experiment.yaml" in call(*overrides(ep=8), "--json").json["command"]
    written = tmp_path / "planned.yaml"
    answer = call(*overrides(ep=8), "--write", str(written), "--json")
    assert f"MOELAB_EXPERIMENT={written}" in answer.json["command"]
    assert read_experiment(written) == Experiment(**{**BASE, "ep": 8})


def test_a_machine_without_a_gpu_says_nothing_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moelab.hardware.gpus", tuple)
    cluster_of.cache_clear()
    planned = plan(Experiment())
    assert planned.fits is headroom_gib(Experiment()) is None
    assert "this machine has no GPU; name a profile" in planned.notes[-1]
    cluster_of.cache_clear()


def test_the_command_starts_every_rank() -> None:
    one = command(Experiment(gpus_per_node=4), Path("a b.yaml"))
    assert "--nproc-per-node=4" in one
    assert "--rdzv-endpoint=localhost:0" in one
    assert "'MOELAB_EXPERIMENT=a b.yaml'" in shlex.join(one)
    many = command(Experiment(**BASE))
    assert "--nnodes=32" in many
    assert "--rdzv-endpoint=HOST:PORT" in many


def test_every_published_arm_is_planned() -> None:
    """Each is started by its name."""
    for name, arm in named_arms().items():
        planned = plan(arm)
        assert planned.command[-2:] == ("--config", name)
        assert planned.command[0] == "torchrun"
        concerning = [row for row in PUBLISHED_DIFFERENCES if arm.model in row.models]
        assert planned.differences == tuple(concerning) or arm.ep_backend is EPBackend.MINIMAL_ASYNC_EP
    assert differences(Experiment(**{**BASE, "tp": 2, "pp": 2, "ep": 16})) == ()


def test_memory_is_that_of_the_estimate_and_the_buffer_of_deepep_follows_the_microbatch(call: Any) -> None:
    fields = {"ep_backend": "deepep", "hardware": "b200_x256", "activation_checkpoint": "full", "tp": 2, "pp": 2}
    answer = call(*overrides(**fields), "--json").json
    planned = plan(Experiment(**{**BASE, **fields})).memory
    assert planned is not None
    totals = [planned.worst.reserved_gib, planned.worst.outside_gib, planned.worst_gib]
    assert [answer[name] for name in ("memory_gib", "outside_gib", "total_gib")] == [round(gib, 2) for gib in totals]
    buffer, memory = answer["dispatch_buffer"], answer["memory_by_rank"]
    assert (buffer["tokens"], buffer["ranks"], buffer["nvlink_ranks"]) == (8192 // 2, 32, 8)
    assert {row["parts_gib"]["dispatch buffers"] for row in memory} == {round(buffer["bytes"] / 2**30, 3)}
    assert f"deepep {buffer['bytes'] / 2**30:.2f} GiB per GPU" in call(*overrides(**fields)).out
    twice = call(*overrides(**fields, microbatch=2), "--json").json["dispatch_buffer"]
    assert twice["tokens"] == 2 * buffer["tokens"]
    assert 1.9 * buffer["bytes"] < twice["bytes"] < 2 * buffer["bytes"]  # counters and slack stay
    assert call(*overrides(tp=2, pp=2), "--json").json["dispatch_buffer"] is None


def test_emulated_deepep_is_said_wherever_the_plan_names_the_arm(call: Any) -> None:
    answer = call(*overrides(ep_backend="deepep", ep_kernels="emulated", tp=2, pp=2))
    assert answer.code == 0
    assert "arm bf16_deepep (DeepEP emulated)" in answer.out.splitlines()[0]
    assert "emulated on plain collectives: its numerics, not its speed" in " ".join(answer.out.split())
    assert "buffer " not in answer.out


def test_search_from_the_command_line(call: Any, tmp_path: Path) -> None:
    options = [*overrides(tp=2, hardware="b200_x256", activation_checkpoint="full"), "--search", "--limit", "4"]
    answer = call(*options, "--json")
    assert (answer.code, len(answer.json["candidates"])) == (0, 4)
    assert {row["set"]["tp"] for row in answer.json["candidates"]} == {2}
    best = answer.json["candidates"][0]
    fields = {**BASE, "hardware": "b200_x256", "activation_checkpoint": "full", **best["set"]}
    assert plan(Experiment(**fields)).fits
    table = call(*options, "--write", str(tmp_path / "best.yaml")).out
    written = read_experiment(tmp_path / "best.yaml")
    assert {field: getattr(written, field) for field in best["set"]} == best["set"]
    assert table.startswith("legal · fits (")


def test_a_search_without_an_answer_is_refused(call: Any) -> None:
    answer = call(*overrides(nodes=1, hardware="b200_node"), "--search")
    assert answer.code == 3
    assert "none fits. The closest" in answer.out
    assert call(*overrides(model="Qwen3-235B-A22B"), "--search").err.count("--from-hf") == 1
    for hardware in ("local", "b200_node"):
        illegal = overrides(dispatch_precision="fp8", hardware=hardware, nodes=1)
        assert call(*illegal, "--search", "--json").json["candidates"] == []
        assert "\ndispatch_precision is fp8: standard sends" in call(*illegal, "--search").out
    for option in (("--global-batch", "8"), ("--ranks", "0")):
        assert f"{option[0]} is of --" in call(*overrides(), *option).err


def test_a_plan_loads_no_torch_and_takes_no_time(tmp_path: Path) -> None:
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump({**BASE, "hardware": "b200_x256"}))
    code = (
        "import sys; from moelab.cli import main\n"
        f"main(['plan', {str(path)!r}, '--json'])\n"
        "heavy = [name for name in ('torch', 'pandas', 'numpy', 'plotly', 'torchtitan') if name in sys.modules]\n"
        f"main(['plan', {str(path)!r}, '--search', '--set', 'pp=2'])\n"
        "heavy += [name for name in ('torch', 'pandas', 'plotly', 'torchtitan') if name in sys.modules]\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr


def test_config_is_what_torchtitan_resolves(tmp_path: Path) -> None:
    path = tmp_path / "experiment.yaml"
    fields = {"model": "16B", "nodes": 4, "gpus_per_node": 8, "ep": 32, "precision": "mxfp8", "dataset": "c4"}
    path.write_text(yaml.safe_dump({**fields, "hardware": "b200_x256", "seq_len": 4096}))
    code, printed = in_titan_process(moelab, "plan", str(path), "--config", "--json")
    assert code == 0, printed
    config = json.loads(printed)["titan_config"]
    assert config["parallelism"]["expert_parallel_degree"] == 32
    assert config["training"]["disable_cuda_graphs"] is True
    dispatcher = config["model_spec"]["model"]["layers"][-1]["moe"]["routed_experts"]["token_dispatcher"]
    assert dispatcher["pad_multiple"] == 128, "what the note on padding says"


def test_verify_builds_what_was_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("moelab.titan.verify._ask_child", lambda request: in_titan_process(verified, request))
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump({"model": "debug", "gpus_per_node": 8, "pp": 2, "ep": 4, "hardware": "h100_node"}))
    assert main(["plan", str(path), "--verify", "--ranks", "0,5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["rank"] for row in found["verify"]["ranks"]] == [0, 5]
    for row in found["verify"]["ranks"]:
        assert row["parameters"] == row["predicted_parameters"]
        assert row["predicted_gib"] > 0
        planned = [found["layout"]["stages"][stage] for stage in found["layout"]["stages_of_rank"][row["pp_rank"]]]
        assert [stage["modules"] for stage in row["stages"]] == planned


ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("study", "arms"),
    [
        # The published 2×2, with the arm that was not published, and the published 16B arms.
        ("671B_b200_x256", ("bf16_standard", "mxfp8_standard", "bf16_deepep", "mxfp8_deepep")),
        ("16B_b200_x256", ("bf16_standard", *(f"mxfp8_standard_wgrad-bf16{sent}" for sent in ("", "_dispatch-mxfp8")))),
    ],
)
def test_every_arm_of_a_study_is_planned(study: str, arms: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(ROOT / "studies" / f"{study}.yaml"), "--json"]) == 0
    plans = json.loads(capsys.readouterr().out)["plans"]
    assert [one["arm"] for one in plans] == [f"{arm}_round-robin" for arm in arms]
    assert all(one["legal"] and one["fits"] for one in plans)


def test_one_arm_of_a_study_is_planned_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    study = str(ROOT / "studies" / "16B_b200_x256.yaml")
    assert main(["plan", study, "--arm", "mxfp8_standard_wgrad-bf16_round-robin"]) == 0
    assert main(["plan", study, "--arm", "mxfp8"]) == 2
    assert "its arms: bf16_standard_round-robin" in capsys.readouterr().err
    assert main(["plan", study, "--search"]) == 2
    assert "--arm" in capsys.readouterr().err


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


def test_a_reader_that_stops_reading_gets_no_traceback() -> None:
    command = f"{sys.executable} -m moelab plan {ROOT}/studies/671B_b200_x256.yaml | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("legal")
    assert done.stderr == ""
