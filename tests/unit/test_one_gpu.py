"""What nobody chose is what the machine has: one GPU, several, a CPU, or a GPU of the hardware that is named."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import stand_in
from notebook_support import NOTEBOOKS, ROOT, default_values, parameters_of
from nvidia_smi_support import B200, H100, MISMATCH, forget, nvidia_smi

from moelab import Experiment, Study, read_study
from moelab.errors import Refused
from moelab.hardware import is_here
from moelab.launch import local
from moelab.launch.capability import differs_here, refusals_of
from moelab.launch.torchrun import Command, Process, command
from moelab.notebooks import read_parameters
from moelab.runs import directory

H200 = "NVIDIA H200, 9.0, 580.95.05, 143771"
Machine = Callable[..., None]
TRAIN = [one.stem for one in NOTEBOOKS if {"ranks", "study"} <= default_values(one.stem).keys()]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Machine]:
    """Makes this machine one with these GPUs."""

    def made(*rows: str, **options: Any) -> None:
        nvidia_smi(monkeypatch, tmp_path, *rows, **options)

    yield made
    forget()


def sizes(study: Study) -> set[tuple[int, int]]:
    return {(one.gpus_per_node, one.ep) for one in study.experiments}


@pytest.mark.parametrize(
    ("rows", "fields", "expected"),
    [
        ([H200], {}, (1, 1)),
        ([H200] * 2, {}, (2, 2)),
        ([H200] * 3, {}, (3, 1)),  # two of three ranks share nothing
        ([H200] * 8, {}, (8, 2)),
        ([H200], {"hardware": "cpu"}, (2, 2)),
        ([H200], {"hardware": "h200_node"}, (1, 1)),
        ([H200], {"hardware": "b200_node"}, (2, 2)),  # which is planned for
        ([H200], {"nodes": 2}, (2, 2)),
        ([H200] * 8, {"ep": 4}, (8, 4)),
        ([H200] * 8, {"gpus_per_node": 2}, (2, 2)),
        ([H200], {"gpus_per_node": 2, "ep": 2}, (2, 2)),
    ],
)
def test_a_study_that_leaves_its_ranks_out_takes_those_of_the_machine(
    machine: Machine, tmp_path: Path, rows: list[str], fields: dict[str, Any], expected: tuple[int, int]
) -> None:
    machine(*rows)
    words = ", ".join(f"{name}: {value}" for name, value in {**fields, "steps": 4}.items())
    written = {
        "experiment": f"{{{words}}}",
        "list": f"- {{{words}}}\n- {{{words}, lr: 1.0e-4}}",
        "study": f"experiment: {{{words}}}\narms: [{{}}, {{lr: 1.0e-4}}]",
    }
    for kind, text in written.items():
        (tmp_path / f"{kind}.yaml").write_text(text)
        assert sizes(read_study(tmp_path / f"{kind}.yaml")) == {expected}
    assert sizes(Study.of("mine", steps=4, **fields)) == sizes(read_study(Experiment(steps=4, **fields))) == {expected}


def test_a_machine_without_a_gpu_or_with_a_driver_that_fails_has_two_ranks(machine: Machine) -> None:
    for options in ({"visible": ""}, {"code": 18, "rows": [MISMATCH]}):
        machine(*options.pop("rows", []), **options)
        assert sizes(Study.of("mine")) == {(2, 2)}


@pytest.mark.parametrize(
    ("rows", "hardware", "here"),
    [
        ([H200], "h200_node", True),
        ([H200, H200], "h200_node", True),
        ([H100], "h100_node", True),
        ([H100], "h200_node", False),
        ([H200, H100], "h200_node", False),
        ([H200], "b200_x256", False),
        ([], "h200_node", False),
        ([], "local", True),
        ([B200], "cpu", True),
    ],
)
def test_hardware_is_here_where_all_gpus_are_of_its_kind(
    machine: Machine, rows: list[str], hardware: str, here: bool
) -> None:
    machine(*rows, visible=None if rows else "")
    assert is_here(hardware) == here


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Study], list[str]]:
    """Trains with a stand-in for torchrun; returns the lines of progress."""
    for name in ("command", "stage_data", "POLL_S"):
        monkeypatch.setattr(local, name, getattr(local, name))  # put back afterwards
    stand_in.install()

    def train(study: Study) -> list[str]:
        lines: list[str] = []
        assert not local.run_study(study, tmp_path / "runs", say=lines.append).failed
        return lines

    return train


def test_a_study_for_a_node_of_eight_trains_on_the_gpus_that_are_here(
    machine: Machine, trained: Callable[[Study], list[str]]
) -> None:
    fields = {"hardware": "h200_node", "steps": 2, "warmup_steps": 0}
    machine(H200)
    told, *_ = trained(Study.of("one", **fields))
    assert told.startswith("hardware is h200_node, 8 × H200; trained here on 1 × NVIDIA H200: the same GPU, so kernels")
    machine(*[H200] * 8)
    eight = Study.of("eight", **fields)
    assert (sizes(eight), list(differs_here(eight))) == ({(8, 2)}, [])
    machine(H200)
    with pytest.raises(Refused, match=r"gpus_per_node is 8, this machine has 1 GPU; set gpus_per_node=1 or leave it"):
        trained(eight)
    machine(B200)
    with pytest.raises(
        Refused, match=r"hardware is h200_node, whose GPU is H200: .* which has 1 × NVIDIA B200; set ha"
    ):
        trained(Study.of("one", gpus_per_node=1, ep=1, **fields))


# Notebooks


def test_the_notebooks_that_train_are_found() -> None:
    assert [name[:2] for name in TRAIN] == ["00", "01", "06", "07", "09", "11"]


@pytest.mark.parametrize("name", TRAIN)
@pytest.mark.parametrize("gpus", [0, 1, 2, 3, 8])
def test_a_notebook_runs_as_written_on_any_number_of_gpus(machine: Machine, name: str, gpus: int) -> None:
    machine(*[H200] * gpus, visible=None if gpus else "")
    parameters = parameters_of(name)
    study = parameters.to_study()
    assert refusals_of(study) == []
    ((hardware, ranks),) = {(one.hardware, one.gpus_per_node) for one in study.experiments}
    if name.startswith("07") and gpus == 1:  # half of its arms have DeepEP
        assert (hardware, ranks) == ("cpu", 2)
        told = "2 processes on a CPU, because it takes 2 ranks and this machine has 1 × NVIDIA H200"
    else:
        assert (hardware, ranks) == ("local", 2 if gpus == 0 or (name.startswith("07") and gpus == 3) else gpus)
        told = "2 processes on a CPU" if not gpus else "1 GPU" if gpus == 1 else f"{ranks} GPUs"
    assert parameters.place == told


@pytest.mark.parametrize("name", TRAIN)
def test_the_profile_of_a_cpu_trains_beside_one_gpu_too(machine: Machine, name: str) -> None:
    machine(H200)
    for file in (ROOT / "papermill_params" / name).glob("*.yaml"):
        if file.stem in ("cpu", "smoke", "nvfp4"):
            assert refusals_of(parameters_of(name, **read_parameters(file)).to_study()) == []


@pytest.mark.parametrize(
    ("name", "given", "place"),
    [
        ("09_launch_and_watch_run", {"ep": 2}, "2 processes on a CPU, because it takes 2 ranks"),
        ("09_launch_and_watch_run", {"tp": 2, "pp": 2}, "4 processes on a CPU, because it takes 4 ranks"),
        ("09_launch_and_watch_run", {"ep_backend": "deepep"}, "2 processes on a CPU, because it takes 2 ranks"),
        ("06_compare_convergence", {"hardware": "cpu"}, "2 processes on a CPU"),
        ("00_start_here", {"ranks": 1}, "1 GPU"),
        ("07_compare_throughput", {"ranks": 2}, "2 GPUs"),  # asked for, and refused when it would train
    ],
)
def test_what_takes_more_ranks_than_there_are_gpus_is_on_the_cpu_and_says_so(
    machine: Machine, name: str, given: dict[str, Any], place: str
) -> None:
    machine(H200)
    assert parameters_of(name, **given).place.startswith(place)


def test_a_cluster_has_its_own_ranks(machine: Machine, tmp_path: Path) -> None:
    machine(H200)  # of the login node
    profile = tmp_path / "mine.yaml"
    profile.write_text("name: mine\ndescription: Ours.\nscheduler: slurm\ngpus_per_node: 8\n")
    parameters = parameters_of("07_compare_throughput", cluster=str(profile))
    assert {(one.hardware, one.gpus_per_node, one.ep) for one in parameters.to_study().experiments} == {("local", 8, 2)}


SEES = "import os; from moelab.machine import gpus; print(repr(os.environ['CUDA_VISIBLE_DEVICES']), len(gpus()))"


def test_ranks_on_the_cpu_of_a_machine_with_a_gpu_see_no_gpu(machine: Machine, tmp_path: Path) -> None:
    machine(H200, visible="0")
    for name, seen in (("07_compare_throughput", "'' 0\n"), ("01_quantise_to_mxfp8", "'0' 1\n")):
        experiment = parameters_of(name).to_study().experiments[0]
        run = directory.create(tmp_path, experiment)
        variables = command(experiment, run.path).variables
        with (
            run.log.open("wb") as log,
            Process(Command(arguments=[sys.executable, "-c", SEES], variables=variables), log) as rank,
        ):
            rank.wait(60)
        assert run.log.read_text() == seen
