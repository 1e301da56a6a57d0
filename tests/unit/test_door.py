"""The door: `from moelab import …`. What its functions answer is held against references, whatever lies behind it."""

from __future__ import annotations

import ast
import contextlib
import gzip
import io
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import moelab
from moelab import (
    Experiment,
    Study,
    collect,
    doctor,
    door,
    explain,
    plan,
    project,
    read_study,
    report,
    search,
    status,
    submit,
)
from moelab.cli import main
from moelab.errors import BadInput, Refused

ROOT = Path(__file__).parents[2]
STUDIES = sorted((ROOT / "studies").glob("*.yaml"))
NAMES = [
    *("Study", "Experiment", "read_study", "plan", "project", "search", "run", "submit", "status", "collect", "report"),
    *("explain", "doctor", "watch"),
]


def test_the_door_has_the_names_of_the_design_and_loads_them_on_first_use() -> None:
    assert sorted(moelab.__all__) == sorted(NAMES)
    assert set(NAMES) <= set(dir(moelab))
    code = (
        "import moelab, sys; heavy = ('torch', 'numpy', 'pandas', 'plotly', 'pydantic'); "
        "assert not [one for one in heavy if one in sys.modules]; "
        f"print([getattr(moelab, name).__name__ for name in {NAMES}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(NAMES)
    with pytest.raises(AttributeError, match="has no attribute 'plann'; it has Experiment, Study"):
        _ = moelab.plann


def commanded(*arguments: str) -> tuple[int, str]:
    """Exit code and stdout of a command."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = main(arguments)
    return code, printed.getvalue()


TRACE = str(ROOT / "src/moelab/data/measured/trace_two_h200_full_standard.json.gz")
SAME: dict[str, Callable[[], Any]] = {
    **{f"plan {file.stem}": lambda name=file.stem: plan(name) for file in STUDIES},  # type: ignore[misc]
    "plan 671B_b200_x256 --arm mxfp8_deepep --set tp=3": lambda: plan("671B_b200_x256", arm="mxfp8_deepep", tp=3),
    "plan --from-hf Qwen3-30B-A3B --set hardware=h200_x256": lambda: plan("Qwen3-30B-A3B", hardware="h200_x256"),
    "project 16B_b200_x256": lambda: project("16B_b200_x256"),
    "project 671B_b200_x256 --arm bf16_standard": lambda: project(Path("671B_b200_x256"), arm="bf16_standard"),
    "plan own_shape --search --arm bf16_standard --limit 2": lambda: search("own_shape", arm="bf16_standard", limit=2),
    "plan nano --search --arm bf16 --set hardware=h200_node": lambda: search("nano", arm="bf16", hardware="h200_node"),
    "submit 671B_b200_x256 --cluster nebius_soperator_b200 --dry-run": lambda: submit(
        "671B_b200_x256", cluster="nebius_soperator_b200", dry_run=True
    ),
    f"explain {TRACE}": lambda: explain(TRACE),
    "doctor": doctor,
}


@pytest.mark.parametrize("command", SAME)
def test_a_function_and_its_command_say_the_same(command: str) -> None:
    answer, arguments = SAME[command](), command.split()
    as_json = answer.to_json()
    for printed, told in ((commanded(*arguments), str(answer)), (commanded(*arguments, "--json"), as_json)):
        code, text = printed
        assert code == answer.exit_code
        # A job's own mark and the free space of a disk differ from call to call.
        assert comparable(json.loads(text) if isinstance(told, dict) else text.removesuffix("\n")) == comparable(told)
    assert answer._repr_html_().startswith("<div class='moelab'>")


def comparable(told: Any) -> str:
    return re.sub(r"moelab:\w+:[0-9a-f]{12}|\d{8}T\d{6}Z-[0-9a-f]{6}|\d+ GiB", "…", json.dumps(told))


def test_a_study_is_made_in_python_as_a_file_makes_it(tmp_path: Path) -> None:
    study = Study.of(
        "mine", model="nano", ep=2, steps=110, arms=["bf16", "mxfp8_deepep", {"precision": "fp8"}], seeds=2
    )
    file = tmp_path / "mine.yaml"
    file.write_text(
        "study: mine\nexperiment: {model: nano, ep: 2, steps: 110}\nseeds: [0, 1]\n"
        "arms: [{precision: bf16}, {precision: mxfp8, ep_backend: deepep}, {precision: fp8}]\n"
    )
    assert study == read_study(file)
    assert str(study) == "study mine: nano, 110 steps; arms bf16_standard, mxfp8_deepep, fp8_standard; seeds 0, 1"
    assert [one.steps for one in read_study(study, steps=7).experiments] == [7] * 6
    assert read_study(Experiment(steps=7), lr=1.0e-3).experiments == (Experiment(steps=7, lr=1.0e-3),)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: plan("nano", stepz=3), "plan does not take stepz; did you mean steps?"),
        (lambda: search("nano", limt=3), "search does not take limt; did you mean limit?"),
        (lambda: doctor(hardwre="cpu"), "doctor does not take hardwre; did you mean hardware?"),
        (lambda: plan("nanno"), "nanno is neither a file nor a study that comes with moelab"),
        (lambda: plan("nano", steps="many"), "steps: got 'many'; valid: a"),
        (lambda: Study.of("mine", arms=["mxfp9"]), "arm 'mxfp9': valid: a precision (bf16, fp8, mxfp8, nvfp4)"),
        (lambda: search("Qwen3-30B-A3B", gpus=12, hardware="h200_node"), "at most the 8 GPUs of a node of h200_node"),
        (lambda: project("nano"), "name another with hardware="),
    ],
)
def test_what_is_wrong_is_named_as_the_command_names_it(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(BadInput) as refused:
        call()
    assert words in str(refused.value)
    # IPython shows this in place of a traceback.
    assert refused.value._render_traceback_() == [f"BadInput: {refused.value}"]


def test_a_refusal_is_an_exception() -> None:
    with pytest.raises(Refused, match="illegal layout:\n- tp"):
        project("671B_b200_x256", arm="mxfp8_deepep", tp=3)


# Runs and their progress


def test_on_a_cpu_a_study_is_planned_and_each_arm_says_why_it_is_not_projected() -> None:
    study = Study.of("mine", model="nano", ep=2, gpus_per_node=2, arms=["bf16", "mxfp8"], seeds=3)
    assert plan(study).legal
    answer = project(study)
    assert (answer.exit_code, answer.arms, list(answer.refused)) == (3, {}, ["bf16_standard", "mxfp8_standard"])
    for words in (str(answer), answer._repr_html_(), json.dumps(answer.to_json())):
        assert words.count("hardware=, such as b200_x256") >= 2
    with pytest.raises(Refused, match="bf16_standard is not projected: this machine"):
        answer.breakdown_figure()
    assert project(study, hardware="h200_node").tps > 0


def test_notebooks_and_the_shell_have_one_runs_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("notebooks", "papermill_params", "runs/00_start_here", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)
    for here, runs in ((".", Path("runs")), ("notebooks", tmp_path / "runs")):
        monkeypatch.chdir(tmp_path / here)
        assert door.runs_folder() == runs
        # What a notebook trained is found from both, by its name and as the documentation writes it.
        for told in ("00_start_here", "runs/00_start_here"):
            assert status(told).path.resolve() == tmp_path / "runs/00_start_here"
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setenv("MOELAB_RUNS", str(tmp_path / "mine"))
    assert door.runs_folder() == tmp_path / "mine"
    monkeypatch.delenv("MOELAB_RUNS")
    (tmp_path / "papermill_params").rmdir()
    assert door.runs_folder() == Path("runs")


# What the answers are, against what others published, what a file says, and sums by hand

# Tokens/s per GPU that PyTorch and Nebius published for 256 B200 GPUs (March 2026), by arm.
PUBLISHED_TPS = {"bf16_standard": 651, "bf16_deepep": 859, "mxfp8_deepep": 918}
MEASURED = ROOT / "src/moelab/data/measured"
LOGS = sorted((ROOT / "src/moelab/data/example_logs").glob("*_on_h100.log.gz"))


def steps_in(log: Path) -> dict[int, float]:
    """Loss by step as rank 0 printed it."""
    lines = re.findall(r"\[rank0\].*INFO - step: +(\d+) +loss: +([\d.]+)", gzip.decompress(log.read_bytes()).decode())
    return {int(step): float(loss) for step, loss in lines}


def test_the_published_throughputs_lie_in_their_intervals_and_the_parts_add_up_to_the_step() -> None:
    projected = project("671B_b200_x256")
    rows = projected.frame().set_index("arm")
    for arm, tps in PUBLISHED_TPS.items():
        row = rows.loc[f"{arm}_round-robin"]
        assert row["low"] < tps < row["high"], arm
        # 4096 sequences of 8192 tokens on 256 GPUs.
        assert row["step_time_s"] * row["tps"] * 256 == pytest.approx(4096 * 8192)
    figure = projected.breakdown_figure("mxfp8_deepep_round-robin")
    (bars,) = [trace for trace in figure.data if trace.type == "bar"]
    *parts, whole = bars.x
    assert sum(parts) == pytest.approx(whole) == pytest.approx(rows.loc["mxfp8_deepep_round-robin", "step_time_s"])
    assert figure.layout.xaxis.title.text == "seconds of a step"
    together = projected.breakdown_figure()
    by_arm = zip(*(trace.x for trace in together.data if trace.type == "bar"), strict=True)
    assert sorted(map(sum, by_arm)) == pytest.approx(sorted(rows["step_time_s"]))


def test_a_plan_of_the_published_runs_has_their_layout_and_what_its_figure_stacks() -> None:
    planned = plan("671B_b200_x256")
    assert planned.legal
    assert planned.fits
    frame = planned.frame()
    # pp 2 * tp 2 leaves 64 ranks to FSDP; 64 sequences on each of 64 data-parallel ranks.
    assert frame[["pp", "tp", "dp_shard", "ep"]].drop_duplicates().to_numpy().tolist() == [[2, 2, 64, 32]]
    assert set(frame["tokens_per_step"]) == {4096 * 8192}
    total, active = 671_026_404_352, 37.55e9  # TorchTitan builds 671.0 G; DeepSeek-V3's report says 671 B and 37 B
    counts = planned.to_json()["plans"][0]["parameters"]
    assert counts["total"] == total
    assert counts["active"] == pytest.approx(active, rel=1e-3)
    figure = planned.memory_figure("bf16_standard")
    assert planned.memory_figure() == figure, "of the first arm"
    stacked = [sum(values) for values in zip(*(bar.x for bar in figure.data if bar.type == "bar"), strict=True)]
    assert max(stacked) == pytest.approx(frame["total_gib"][0], abs=0.1)  # parts of some MB are not drawn
    assert "GiB" in figure.layout.xaxis.title.text


@pytest.mark.parametrize("study", STUDIES, ids=lambda file: file.stem)
def test_every_study_of_moelab_is_legal(study: Path) -> None:
    planned = plan(study)
    assert planned.legal
    assert planned.frame()["arm"].tolist() == list(read_study(study).arms)
    assert planned._repr_html_().count("<tr>") == 1 + len(read_study(study).arms)


def profiles() -> Iterator[Any]:
    """Every papermill profile with its notebook's own parameters below."""
    for file in sorted((ROOT / "papermill_params").glob("*/*.yaml")):
        notebook = json.loads((ROOT / f"notebooks/{file.parent.name}.ipynb").read_text())
        tagged = [one for one in notebook["cells"] if "parameters" in one["metadata"].get("tags", [])]
        assigned = ast.parse("".join(tagged[0]["source"])).body
        own = {one.targets[0].id: ast.literal_eval(one.value) for one in assigned}  # type: ignore[attr-defined]
        values = {**own, **(yaml.safe_load(file.read_text()) or {})}
        if {"model", "local_batch"} <= values.keys():
            yield pytest.param(values, id=f"{file.parent.name}/{file.stem}")


@pytest.mark.parametrize("values", list(profiles()))
def test_what_every_profile_trains_is_legal(values: dict[str, Any]) -> None:
    taken = {name: one for name, one in values.items() if name in Experiment.model_fields and name != "shape"}
    taken = {name: one for name, one in taken.items() if one or name != "ep"}  # which nobody chose
    ranks = {"gpus_per_node": values["ranks"]} if values.get("ranks") else {}
    if values["model"] not in ("nano", "debug", "16B", "671B"):
        pytest.skip("a model of Hugging Face, which is planned and not trained")
    assert plan(Experiment(), **taken, **ranks).legal


@pytest.mark.parametrize("trace", sorted(MEASURED.glob("trace_*.json.gz")), ids=lambda file: file.name)
def test_the_parts_of_every_packaged_trace_add_up_to_its_span(trace: Path) -> None:
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    on_gpu = [one for one in events if one.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    first = min(float(one["ts"]) for one in on_gpu)
    span_ms = (max(float(one["ts"]) + float(one["dur"]) for one in on_gpu) - first) / 1e3
    explained = explain(trace)
    assert explained.to_json()["span_ms"] == pytest.approx(span_ms, abs=1e-3)
    assert explained.frame()["ms"].sum() == pytest.approx(span_ms, abs=1e-3)
    figure = explained.timeline_figure(layer=2)
    assert figure.layout.xaxis.title.text == "ms after the first event"
    assert 0 <= figure.layout.xaxis.range[0] < figure.layout.xaxis.range[1] <= span_ms
    drawn = sum(sum(bar.x) for bar in explained.step_figure().data)
    assert drawn == pytest.approx(span_ms, rel=1e-3)


def test_a_trace_finds_the_arm_that_it_is_of() -> None:
    """Five layers of 671B ran on two H200s, with BF16 experts, and with FP8 experts, DeepEP and its FP8 dispatch."""
    shape = {"n_layers": 5, "n_dense_layers": 0, "expert_groups": 1, "limited_groups": 1, "num_experts": 16}
    study = Study.of(
        "traced",
        **{"model": "671B", "shape": shape, "hardware": "h200_node", "gpus_per_node": 2, "ep": 2, "seq_len": 4096},
        **{"local_batch": 2, "activation_checkpoint": "full", "compile": "model+loss", "routing": "random_balanced"},
        arms=["bf16", {"precision": "fp8", "ep_backend": "deepep", "dispatch_precision": "fp8"}],
    )
    for trace, arm in (("two_h200_full_standard", "bf16_standard"), ("two_h200_full_fp8_deepep", "fp8_deepep")):
        file = MEASURED / f"trace_{trace}.json.gz"
        found = explain(file, against=study)
        assert found.to_json() == explain(file, against=study, arm=arm).to_json()
        assert f"compared with {arm}" in found.asides[0]
        # Trained by the same stack on the same day, the step is predicted to within a third.
        measured, predicted = found.to_json()["span_ms"], found.to_json()["predicted_step_ms"]
        assert predicted == pytest.approx(measured, rel=1 / 3)
    both = Study.of("traced", **{"hardware": "h200_node"}, arms=["bf16", {"lr": 1.0e-4}])
    with pytest.raises(BadInput, match="may be of several arms of traced; name the traced one with --arm: "):
        explain(MEASURED / "trace_two_h200_full_standard.json.gz", against=both)
    with pytest.raises(BadInput, match="exchanges as no arm of traced"):
        explain(MEASURED / "trace_two_h200_full_fp8_deepep.json.gz", against=both)


@pytest.mark.parametrize("log", LOGS, ids=lambda file: file.name)
def test_a_packaged_log_is_read_as_it_was_printed(log: Path) -> None:
    collected, printed = collect(log), steps_in(log)
    assert len(printed) == 40
    assert dict(collected.frame()[["step", "loss"]].itertuples(index=False)) == printed
    assert [row["loss"] for row in collected.to_json()["runs"][0]["rows"]] == list(printed.values())
    assert commanded("collect", str(log))[1] == f"{collected}\n"
    assert json.loads(commanded("collect", str(log), "--json")[1]) == collected.to_json()


def test_two_logs_are_compared_by_the_mean_of_their_last_steps(tmp_path: Path) -> None:
    compared = report(*LOGS, output=tmp_path / "page.html")
    bf16, mxfp8 = (list(steps_in(log).values())[-4:] for log in LOGS)  # a tenth of 40 steps
    (row,) = compared.to_json()["differences"]
    assert row["difference_nats"] == pytest.approx(statistics.fmean(mxfp8) - statistics.fmean(bf16), abs=1e-9)
    assert compared.summary.keys() == {"Faster?", "Same loss?", "On what?"}
    last = [trace.y[-1] for trace in compared.loss_figure().data if len(trace.y) == 40]
    assert sorted(last) == pytest.approx(sorted([bf16[-1], mxfp8[-1]]))
    code, text = commanded("report", *map(str, LOGS), "--output", str(tmp_path / "page.html"))
    assert (code, text) == (0, f"{compared}\n")
    assert (tmp_path / "page.html").read_text().lower().startswith("<!doctype html>")


# Public cases with their right answers

TITAN = "[rank0]:[titan] 2026-09-14 0{}:00,000 - root - INFO - "
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "colours of 24 bits; a missing MFU is neither zero nor an error": (
        TITAN.format("3:10") + "\x1b[31mstep: 1200  \x1b[32mloss:  3.18420  \x1b[38;2;180;60;0mgrad_norm:  0.2210  "
        "\x1b[38;2;54;234;195mmemory: 151.07GiB(84.71%)  \x1b[34mtps: 12,846  \x1b[36mtflops: 1,034.57  "
        "\x1b[35mmfu: N/A\x1b[39m\n",
        {"step": [1200], "loss": [3.1842], "memory_gib": [151.07], "tps": [12846], "tflops": [1034.57], "mfu": [None]},
    ),
    "a restart repeats steps, whose later values stay": (
        "\n".join(
            TITAN.format(clock) + words
            for clock, words in (
                ("4:00", "Training starts at step 1"),
                ("4:05", "step: 90  loss:  5.10000  grad_norm:  0.9000  memory: 90.00GiB(50.47%)  tps: 9,000"),
                ("4:06", "step: 100  loss:  5.00000  grad_norm:  0.8500  memory: 90.00GiB(50.47%)  tps: 9,010"),
                ("5:00", "Training starts at step 81"),
                ("5:02", "step: 90  loss:  5.10200  grad_norm:  0.9010  memory: 90.10GiB(50.52%)  tps: 8,100"),
                ("5:03", "step: 100  loss:  5.00100  grad_norm:  0.8510  memory: 90.10GiB(50.52%)  tps: 9,005"),
            )
        ),
        {"step": [90, 100], "loss": [5.102, 5.001], "grad_norm": [0.901, 0.851]},
    ),
    "of a pipeline's ranks one has the loss, and the fullest the memory": (
        "b200-a001: [rank0]:[titan] 2026-09-14 06:00:01,100 - root - INFO - step: 10  loss: -32.00000  "
        "grad_norm:  1.1000  memory: 120.00GiB(67.29%)  tps: 4,000\n"
        "b200-a029: [rank0]:[titan] 2026-09-14 06:00:01,140 - root - INFO - step: 10  loss:  7.20000  "
        "grad_norm:  1.1000  memory: 131.00GiB(73.46%)  tps: 4,000\n",
        {"step": [10], "loss": [7.2], "memory_gib": [131.0]},
    ),
    "lines of 2024, with wps and without a gradient norm": (
        "[rank0]:2024-10-03 08:05:04,001 - root - INFO - step:  1  loss:  11.9500  memory: 44.53GiB(46.87%)  "
        "wps: 5,783  mfu: 33.82%\n",
        {"step": [1], "loss": [11.95], "tps": [5783], "mfu": [33.82], "grad_norm": [None]},
    ),
    "lines that a terminal wrapped": (
        TITAN.format("1:20") + "step:  1  loss:\n7.60000  grad_norm:  3.6000  memory:  3.87GiB(2.17%)  tps: 90,013\n"
        "tflops: 52.50  mfu: N/A\n",
        {"step": [1], "loss": [7.6], "grad_norm": [3.6], "tps": [90013], "tflops": [52.5]},
    ),
}
"""Logs of public reports with other numbers: what is printed, and columns of the rows that it has."""


@pytest.mark.parametrize("name", CASES)
def test_a_public_log_is_read_as_its_report_says(tmp_path: Path, name: str) -> None:
    text, columns = CASES[name]
    (tmp_path / "train.log").write_text(text)
    (run,) = collect(tmp_path / "train.log").to_json()["runs"]
    rows = {row["step"]: row for row in run["rows"]}.values()  # a repeated step is in a later segment
    assert {column: [row[column] for row in rows] for column in columns} == columns


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        # 256 experts, 61 layers, 256 GPUs; worked out by hand from TorchTitan's mesh
        ({"pp": 16, "tp": 1, "ep": 32}, "16"),  # the region dp_shard x cp x tp has 16 ranks
        ({"pp": 16, "tp": 1, "ep": 16}, ""),
        ({"pp": 1, "tp": 1, "dp_replicate": 4, "ep": 128}, "64"),
        ({"pp": 1, "tp": 1, "dp_replicate": 4, "ep": 64}, ""),
        ({"pp": 32, "tp": 1, "ep": 8, "pp_schedule": "Interleaved1F1B"}, "64 stages"),
        ({"pp": 32, "tp": 1, "ep": 8, "pp_schedule": "1F1B"}, ""),
        ({}, ""),  # the published layout
    ],
)
def test_a_layout_is_legal_or_says_why_not(fields: dict[str, Any], words: str) -> None:
    answer = plan("671B_b200_x256", arm="bf16_standard", **fields)
    assert answer.legal == (not words), answer.reasons
    assert words in " ".join(answer.reasons)


def test_the_published_layout_has_64_shards_and_four_of_experts() -> None:
    layout = plan("671B_b200_x256", arm="bf16_standard").to_json()["layout"]
    assert (layout["dp_shard"], layout["ep"], layout["efsdp"]) == (64, 32, 4)


def test_a_backend_that_cannot_pad_names_those_that_can() -> None:
    experiment = Experiment(precision="mxfp8", ep_backend="minimal_async_ep", ep=2, gpus_per_node=2)
    assert any("those that do: standard, deepep, hybridep" in reason for reason in plan(experiment).reasons)


def test_a_study_s_file_is_the_study_and_documents_are_taken(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("study: mine\nexperiment: {steps: 5, hardware: cpu}\narms: [{precision: bf16}]\n")
    with pytest.raises(BadInput, match="study mine has no run in"):
        report(file, runs=tmp_path)
    own, long = (project("671B_b200_x256", arm="bf16_standard", document_tokens=one) for one in (None, 8192))
    assert long.tps < own.tps  # longer documents, more attention
