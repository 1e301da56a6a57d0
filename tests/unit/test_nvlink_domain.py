"""Where NVLink ends: at a host, or at a rack of hosts; and hardware that a file of one's own describes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from moelab import cli
from moelab.errors import BadInput
from moelab.experiment import Experiment, OwnHardware
from moelab.experiment_file import parse, read_experiment, read_record, read_study, write_experiment
from moelab.hardware import Gpu, Node, cluster_of, gpu_of
from moelab.layout import check
from moelab.layout.mesh import nvlink_ranks
from moelab.planning.advice import recommend
from moelab.planning.memory import estimate
from moelab.planning.project import project

TRAY = Node(gpu=Gpu(name="GB200", capability=10.0, memory_gib=None), gpus=4, nvlink_gpus=72)
HOST = Node(gpu=Gpu(name="B200", capability=10.0, memory_gib=None), gpus=8)
PUBLISHED = Experiment(  # 256 GB200 as public DeepSeek-V3 recipes use them: PP 4, EP 64
    model="671B", nodes=64, gpus_per_node=4, pp=4, ep=64, pp_schedule="Interleaved1F1B", seq_len=4096, local_batch=32,
    activation_checkpoint="full", compile="model+loss", routing="round_robin", hardware="gb200_nvl72_x4", dataset="c4",
)  # fmt: skip


def published(**changes: Any) -> Experiment:
    return Experiment(**{**PUBLISHED.model_dump(), **changes})


@pytest.mark.parametrize(
    ("node", "nodes", "gpus", "ep", "joined"),
    [
        (TRAY, 64, 4, 64, 64),
        (TRAY, 72, 4, 8, 72),
        (TRAY, 18, 4, 72, 72),
        (TRAY, 36, 4, 48, 48),  # of 72, each second group would lie in two racks
        (TRAY, 32, 2, 64, 32),  # two of a tray's four GPUs: 18 trays have 36
        (TRAY, 4, 64, 64, 64),  # a rack counted as one node
        (TRAY, 64, 4, 128, 64),
        (TRAY, 19, 4, 4, 4),  # 19 trays are in two racks, and no equal part of more than one is in each
        (HOST, 4, 8, 32, 8),
        (HOST, 8, 4, 8, 4),  # half a host each: NVLink does not join two hosts
    ],
)
def test_what_nvlink_joins(node: Node, nodes: int, gpus: int, ep: int, joined: int) -> None:
    assert node.nvlink_ranks(nodes=nodes, gpus_per_node=gpus, ep=ep) == joined


@given(nodes=st.integers(1, 80), gpus=st.integers(1, 8), ep=st.integers(1, 80), tray=st.sampled_from([TRAY, HOST]))
def test_domains_are_equal_and_hold_whole_nodes(nodes: int, gpus: int, ep: int, tray: Node) -> None:
    joined = tray.nvlink_ranks(nodes=nodes, gpus_per_node=gpus, ep=ep)
    assert joined % gpus == 0
    assert nodes * gpus % joined == 0
    assert joined == gpus or joined <= tray.domain


def test_trays_of_a_rack_are_a_rack_to_the_projection_the_plan_deepeps_buffer_and_a_search() -> None:
    as_trays, on_hosts = project(PUBLISHED), published(hardware="b200_x256")
    assert as_trays.breakdown_s == project(published(nodes=4, gpus_per_node=64)).breakdown_s
    assert (as_trays.job.rows_sent.network, project(on_hosts).job.rows_sent.network > 0) == (0, True)
    assert as_trays.job.rows_sent.nvlink > 0
    (note,) = [note for note in check(PUBLISHED).notes if note.startswith("traffic: ep")]
    assert note.endswith("within NVLink where the job has 16 nodes of each NVLink domain of 72 (sbatch --segment=16)")
    assert any("does not fit into a node of 4" in note for note in check(on_hosts).notes)
    for hardware, joined in (("gb200_nvl72_x4", 64), ("b200_x256", 4)):
        placed = published(ep_backend="deepep", hardware=hardware)
        layout = check(placed).layout
        assert layout is not None
        buffer = estimate(placed, layout, gpu_of(hardware)).buffer
        assert buffer is not None
        assert buffer.nvlink_ranks == joined
    x = Experiment(model="671B", hardware="b200_x256", nodes=64, gpus_per_node=4, local_batch=4, ep=64)
    (best,) = recommend(x, cluster_of("gb200_nvl72_x4"), fixed=("ep", "tp", "cp", "dp_replicate"), limit=1).ranked
    assert best.projection is not None
    assert best.projection.job.rows_sent.network == 0  # 16 hosts of four GPUs that NVLink joins


def test_hybridep_is_priced_as_deepep_and_says_that_it_is_not_modelled() -> None:
    hybrid, deepep = (project(published(ep_backend=one, routing="random_balanced")) for one in ("hybridep", "deepep"))
    assert hybrid.tps == pytest.approx(deepep.tps, rel=0.02)
    assert "hybridep is not modelled: it is taken to be as fast as DeepEP" in hybrid.outside


# --- a file of one's own


MINE: dict[str, Any] = {"gpu": "B200", "nodes": 16, "gpus": 8, "nic_gb_s": 25, "memory_gib": 170, "source": "my\nbill"}


def files(folder: Path, hardware: dict[str, Any] | str, **fields: Any) -> Path:
    """An experiment, and in a folder beside it the hardware that it names."""
    (folder / "machines").mkdir(exist_ok=True)
    text = hardware if isinstance(hardware, str) else yaml.safe_dump(hardware)
    (folder / "machines" / "mine.yaml").write_text(text)
    file = folder / "e.yaml"
    file.write_text(yaml.safe_dump({"hardware": "machines/mine.yaml", **fields}))
    return file


def test_a_file_describes_hardware_and_a_record_needs_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = read_experiment(files(tmp_path, MINE))
    assert experiment.hardware == OwnHardware(name="mine", **MINE)
    cluster = cluster_of(experiment.hardware)
    gpu, nic = cluster.node.gpu, cluster.node.nic_gb_s
    assert (cluster.name, cluster.nodes, cluster.node.gpus, gpu.capability) == ("mine", 16, 8, 10.0)
    assert gpu.bf16_tflops == gpu_of("b200_node").bf16_tflops
    assert [(float(one), one.source) for one in (gpu.memory_gib, nic) if one] == [(170, "my bill"), (25, "my bill")]
    monkeypatch.chdir(tmp_path)  # on the command line a path is the shell's
    assert read_study(tmp_path / "e.yaml", ["hardware=machines/mine.yaml"]).experiments == (experiment,)
    study = tmp_path / "s.yaml"
    study.write_text("study: s\narms: [{hardware: machines/mine.yaml}, {hardware: b200_x256}]\n")
    assert read_study(study).arms == ("bf16_standard", "bf16_standard_hardware-b200-x256")
    record = tmp_path / "run" / "experiment.yaml"
    record.parent.mkdir()
    record.write_text(write_experiment(experiment))
    (tmp_path / "machines" / "mine.yaml").unlink()
    assert read_record(record) == read_experiment(record) == experiment


def test_plan_and_projection_take_it_and_a_run_does_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = {"gpu": "GB200", "gpus": 4, "nodes": 64, "nvlink_gpus": 64, "nic_gb_s": 50}
    file = files(tmp_path, mine, **PUBLISHED.model_dump(mode="json", exclude={"hardware"}))
    assert cli.main(["plan", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"]
    assert cli.main(["project", str(file), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["hardware"], told["tps"]) == ("mine", pytest.approx(project(PUBLISHED).tps))
    assert cli.main(["run", str(file)]) == 3
    assert "hardware is mine, whose GPU is GB200: `moelab run` trains on this machine only" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("hardware", "words"),
    [
        ({**MINE, "bf16_tflops": -3}, r"mine\.yaml: bf16_tflops: got -3; valid: greater than 0"),
        ({**MINE, "nodes": "many"}, r"mine\.yaml: nodes: got 'many'"),
        ({**MINE, "nic_gb_s": float("inf")}, r"mine\.yaml: nic_gb_s: got inf"),
        ({**MINE, "hbm_tbs": 8}, r"unknown field 'hbm_tbs'; did you mean 'hbm_tb_s'\?"),
        ({**MINE, "nvlink_gpus": 4}, r"nvlink_gpus: got 4; valid: at least the 8 GPUs of a node"),
        ({"nodes": 2}, r"mine\.yaml: gpu: missing"),
        ({**MINE, "gpu": "B2000"}, r"'B2000', which is not in the catalogue \(A100 SXM, .*GB300"),
        ("- 1\n", r"mine\.yaml: expected a mapping of fields, found list"),
        ("gpu: [", r"mine\.yaml is not valid YAML"),
    ],
)
def test_what_is_wrong_in_the_file_is_named(tmp_path: Path, hardware: dict[str, Any] | str, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        check(read_experiment(files(tmp_path, hardware)))


def test_what_is_wrong_in_a_record_is_named_with_its_place_and_an_unknown_gpu_needs_its_figures(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"hardware\.nodes: got 0; valid: .*\n.*did you mean 'hardware\.bf16_tflops'\?"):
        parse(Experiment, {"hardware": {"name": "m", "gpu": "B200", "nodes": 0, "bf16_tflop": 1}})
    with pytest.raises(BadInput, match="hardware: got"):
        parse(Experiment, {"hardware": [1]})
    file = files(tmp_path, {"gpu": "X9", "capability": 9.0, "memory_gib": 64})
    own = read_experiment(file)
    assert (cluster_of(own.hardware).node.gpu.name, nvlink_ranks(own)) == ("X9", own.gpus_per_node)
    with pytest.raises(BadInput, match=r"other\.yaml cannot be read: No such file"):
        read_study(file, ["hardware=other.yaml"])


def test_a_gpu_of_amd_is_planned_and_projected_and_said_to_be_extrapolated() -> None:
    own = {"model": "16B", "gpus_per_node": 8, "ep": 8, "seq_len": 4096, "local_batch": 4}
    own |= {"activation_checkpoint": "full", "hardware": "mi355x_node"}
    amd = Experiment(**own, precision="mxfp8")
    assert check(amd).legal
    assert any("gfx950 is AMD's, on ROCm; torchao 0.18.0 has MXFP8 kernels" in note for note in check(amd).notes)
    projected = project(amd)
    assert not projected.job.emulated
    assert any(reason.startswith("MI355X: its ROCm kernels are assumed") for reason in projected.outside)
    for changes in ({"precision": "fp8"}, {"ep_backend": "deepep"}, {"ep_backend": "minimal_async_ep"}):
        (reason,) = check(Experiment(**own, **changes)).reasons
        assert "mi355x_node is gfx950" in reason
