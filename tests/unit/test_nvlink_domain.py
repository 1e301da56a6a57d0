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
from moelab.experiment import EPBackend, Experiment, OwnHardware
from moelab.experiment_file import parse, read_experiment, read_record, read_study, write_experiment
from moelab.hardware import Gpu, Node, cluster_of, gpu_of
from moelab.layout import check
from moelab.layout.mesh import nvlink_ranks
from moelab.memory import estimate
from moelab.projection.exchange import hybridep_shares
from moelab.projection.project import project
from moelab.recommendation import recommend

TRAY = Node(gpu=Gpu(name="GB200", capability=10.0, memory_gib=None), gpus=4, nvlink_gpus=72)
HOST = Node(gpu=Gpu(name="B200", capability=10.0, memory_gib=None), gpus=8)
PUBLISHED = Experiment(  # 256 GB200 as public DeepSeek-V3 recipes use them: PP 4, EP 64
    model="671B", nodes=64, gpus_per_node=4, pp=4, ep=64, pp_schedule="Interleaved1F1B", seq_len=4096, local_batch=32,
    activation_checkpoint="full", compile="model+loss", routing="round_robin", hardware="gb200_nvl72_x4", dataset="c4",
)  # fmt: skip


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


def test_trays_of_a_rack_are_projected_as_the_rack() -> None:
    rack = PUBLISHED.model_copy(update={"nodes": 4, "gpus_per_node": 64})
    as_trays, as_racks = project(PUBLISHED), project(rack)
    assert as_trays.breakdown_s == as_racks.breakdown_s
    assert as_trays.job.rows_sent.network == 0
    assert as_trays.job.rows_sent.nvlink > 0
    verdict = check(PUBLISHED)
    assert verdict.legal
    (note,) = [note for note in verdict.notes if note.startswith("traffic: ep")]
    assert note.endswith("within NVLink where the job has 16 nodes of each NVLink domain of 72 (sbatch --segment=16)")
    on_hosts = PUBLISHED.model_copy(update={"hardware": "b200_x256"})
    assert any("does not fit into a node of 4" in note for note in check(on_hosts).notes)
    assert project(on_hosts).job.rows_sent.network > 0


def test_hybridep_has_rates_of_its_own() -> None:
    """By hand: among 16 ranks 522.5 GB/s, of which 15/16 leave the rank, of 900; 4 hosts 49.9, of which 3/4 leave."""
    assert hybridep_shares(16, 72)[0] == pytest.approx((523.48 + 521.55) / 2 * 15 / 16 / 900)
    assert hybridep_shares(32, 8)[1] == pytest.approx((47.36 + 52.53) / 2 * 3 / 4 / 50)
    assert hybridep_shares(64, 72) == hybridep_shares(36, 72), "beyond its table, as at its end"
    slow, fast = (
        project(Experiment(**{**PUBLISHED.model_dump(), "ep_backend": one, "routing": "random_balanced"})).breakdown_s[
            "all-to-all"
        ]
        for one in (EPBackend.HYBRIDEP, EPBackend.DEEPEP)
    )
    assert slow > fast, "64 ranks on NVLink, of which HybridEP reaches half and DeepEP two thirds"


def test_deepeps_buffer_counts_domains() -> None:
    for hardware, joined in (("gb200_nvl72_x4", 64), ("b200_x256", 4)):
        placed = PUBLISHED.model_copy(update={"ep_backend": EPBackend.DEEPEP, "hardware": hardware})
        layout = check(placed).layout
        assert layout is not None
        buffer = estimate(placed, layout, gpu_of(hardware)).buffer
        assert buffer is not None
        assert buffer.nvlink_ranks == joined


# A file of one's own

MINE: dict[str, Any] = {"gpu": "B200", "nodes": 16, "gpus": 8, "nic_gb_s": 25, "memory_gib": 170, "source": "my\nbill"}


def files(folder: Path, hardware: dict[str, Any] | str, **fields: Any) -> Path:
    """An experiment, and in a folder beside it the hardware that it names."""
    (folder / "machines").mkdir(exist_ok=True)
    text = hardware if isinstance(hardware, str) else yaml.safe_dump(hardware)
    (folder / "machines" / "mine.yaml").write_text(text)
    file = folder / "e.yaml"
    file.write_text(yaml.safe_dump({"hardware": "machines/mine.yaml", **fields}))
    return file


def test_a_file_describes_hardware(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = read_experiment(files(tmp_path, MINE))
    assert experiment.hardware == OwnHardware(name="mine", **MINE)
    cluster = cluster_of(experiment.hardware)
    assert (cluster.name, cluster.nodes, cluster.node.gpus) == ("mine", 16, 8)
    gpu, nic = cluster.node.gpu, cluster.node.nic_gb_s
    assert (gpu.capability, gpu.bf16_tflops) == (10.0, gpu_of("b200_node").bf16_tflops)
    assert [(float(one), one.source) for one in (gpu.memory_gib, nic) if one] == [(170, "my bill"), (25, "my bill")]
    monkeypatch.chdir(tmp_path)  # on the command line a path is the shell's
    assert read_study(tmp_path / "e.yaml", ["hardware=machines/mine.yaml"]).experiments == (experiment,)


def test_a_record_needs_no_other_file(tmp_path: Path) -> None:
    file = files(tmp_path, MINE)
    experiment = read_experiment(file)
    record = tmp_path / "run" / "experiment.yaml"
    record.parent.mkdir()
    record.write_text(write_experiment(experiment))
    (tmp_path / "machines" / "mine.yaml").unlink()
    assert read_record(record) == experiment
    assert read_experiment(record) == experiment


def test_arms_may_differ_in_hardware(tmp_path: Path) -> None:
    files(tmp_path, MINE)
    study = tmp_path / "s.yaml"
    study.write_text("study: s\narms: [{hardware: machines/mine.yaml}, {hardware: b200_x256}]\n")
    assert read_study(study).arms == ("bf16_standard", "bf16_standard_hardware-b200-x256")


def test_plan_and_projection_take_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = PUBLISHED.model_dump(mode="json", exclude={"hardware", "nodes", "gpus_per_node"})
    mine = {"gpu": "GB200", "gpus": 4, "nodes": 64, "nvlink_gpus": 64, "nic_gb_s": 50}
    file = files(tmp_path, mine, **shape, nodes=64, gpus_per_node=4)
    assert cli.main(["plan", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"]
    assert cli.main(["project", str(file), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["hardware"] == "mine"
    assert told["tps"] == pytest.approx(project(PUBLISHED).tps)
    assert cli.main(["run", str(file)]) == 3
    assert "hardware is mine: `moelab run` trains on this machine only" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("hardware", "words"),
    [
        ({**MINE, "bf16_tflops": -3}, r"mine\.yaml: bf16_tflops: got -3; valid: greater than 0"),
        ({**MINE, "nodes": "many"}, r"mine\.yaml: nodes: got 'many'"),
        ({**MINE, "nic_gb_s": float("inf")}, r"mine\.yaml: nic_gb_s: got inf"),
        ({**MINE, "hbm_tbs": 8}, r"unknown field 'hbm_tbs'; did you mean 'hbm_tb_s'\?"),
        ({**MINE, "nvlink_gpus": 4}, r"nvlink_gpus: got 4; valid: at least the 8 GPUs of a node"),
        ({"nodes": 2}, r"mine\.yaml: gpu: missing"),
        ("- 1\n", r"mine\.yaml: expected a mapping of fields, found list"),
        ("gpu: [", r"mine\.yaml is not valid YAML"),
    ],
)
def test_what_is_wrong_in_the_file_is_named(tmp_path: Path, hardware: dict[str, Any] | str, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        read_experiment(files(tmp_path, hardware))


def test_what_is_wrong_in_a_record_is_named_with_its_place() -> None:
    with pytest.raises(BadInput, match=r"hardware\.nodes: got 0; valid: .*\n.*did you mean 'hardware\.bf16_tflops'\?"):
        parse(Experiment, {"hardware": {"name": "m", "gpu": "B200", "nodes": 0, "bf16_tflop": 1}})
    with pytest.raises(BadInput, match="hardware: got"):
        parse(Experiment, {"hardware": [1]})


def test_a_missing_file_and_an_unknown_gpu_are_named(tmp_path: Path) -> None:
    file = files(tmp_path, {**MINE, "gpu": "B2000"})
    with pytest.raises(BadInput, match=r"'B2000', which is not in the catalogue \(A100 SXM, .*GB300"):
        check(read_experiment(file))
    own = read_experiment(files(tmp_path, {"gpu": "X9", "capability": 9.0, "memory_gib": 64}))
    assert cluster_of(own.hardware).node.gpu.name == "X9"
    assert nvlink_ranks(own) == own.gpus_per_node
    with pytest.raises(BadInput, match=r"other\.yaml cannot be read: No such file"):
        read_study(file, ["hardware=other.yaml"])


# AMD's GPUs: planned and projected, and said to be extrapolated


def test_a_gpu_of_amd() -> None:
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


def test_a_search_for_another_cluster_has_its_domains() -> None:
    x = Experiment(model="671B", hardware="b200_x256", nodes=64, gpus_per_node=4, local_batch=4, ep=64)
    (best,) = recommend(x, cluster_of("gb200_nvl72_x4"), fixed=("ep", "tp", "cp", "dp_replicate"), limit=1).ranked
    assert best.ep_nodes == 1  # 16 hosts of four GPUs that NVLink joins
