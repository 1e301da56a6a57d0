"""The door: `from moelab import …`. What its functions answer is held against references, whatever lies behind it."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import moelab
from moelab import Experiment, Study, doctor, door, explain, plan, project, read_study, search, status, submit
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
