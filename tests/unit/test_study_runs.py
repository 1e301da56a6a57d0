"""Which runs a study's report is made of: no seed vanishes, and machines and versions are not mixed silently."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
from figure_support import title
from run_support import (
    ENDS,
    ENVIRONMENT,
    STEPS,
    curve,
    make_run,
    make_study,
    record_machine,
    record_native,
    train,
)

from moelab import experiment_file
from moelab.data.example_logs import EXAMPLE_LOGS
from moelab.errors import BadInput
from moelab.files import write_json
from moelab.judge.report import judge_paths, judge_study
from moelab.judge.verdict import Answer
from moelab.runs.status import State
from moelab.viz.report import provenance, report_figures, runs_table

MXFP8 = "MXFP8 + standard all-to-all"
H100 = [{"name": "NVIDIA H100", "capability": 9.0, "driver": "570.1", "memory_mib": 81559}] * 2
B200 = [{"name": "NVIDIA B200", "capability": 10.0, "driver": "570.1", "memory_mib": 183359}] * 2


@pytest.fixture
def study(tmp_path: Path) -> Path:
    return make_study(tmp_path)


def packages(**versions: str) -> dict[str, Any]:
    return {"packages": {**ENVIRONMENT["packages"], **versions}}


def test_no_seed_vanishes_and_every_run_that_is_not_judged_has_its_reason(study: Path) -> None:
    nan, lost = [*curve(5.0)[:4], math.nan], {"state": State.FAILED, "reason": "node gpu-12 failed"}
    for seed in range(5, 12):
        train(study, "bf16", seed)
    train(study, "mxfp8", 5, [4.0] * 3, **lost)
    train(study, "mxfp8", 7, gpus_per_node=4)
    for seed, losses in ((8, None), (9, nan)):
        record = train(study, "mxfp8", seed, losses).path / "experiment.yaml"
        record.write_text(record.read_text()[:200])
    train(study, "mxfp8", 10, nan)
    train(study, "mxfp8", 11, [4.0], state=State.FAILED, reason="rank 0: Loss is not finite")
    train(study, "mxfp8", 0, nan)
    train(study, "mxfp8", 1, [4.0], state=State.CANCELLED)
    train(study, "bf16", 3, lr=2.0e-3)  # newer than the others
    old = train(study, "mxfp8", 2, lr=2.0e-3).path
    old.rename(old.with_name("20000101T000000Z-aaaaaa"))
    for seed in (0, 1):
        train(study, "mxfp8", seed, [4.0], ep_backend="deepep", ep_kernels="emulated", **lost)
    judged = judge_study(study)
    bf16, deepep, mxfp8 = judged.sides
    other, another = "not the settings of this arm's judged runs: ", "another attempt at this arm and seed is judged"
    assert mxfp8.lost_seeds.pop(8).startswith("experiment.yaml: ")
    assert re.match(r"experiment\.yaml: .*; loss is nan at step 5 ", mxfp8.diverged_seeds.pop(9))
    assert mxfp8.lost_seeds == {
        5: "failed: node gpu-12 failed, 3 of 20 steps logged",
        6: "not run",
        7: f"{other}gpus_per_node 4 instead of 2",
    }
    assert mxfp8.diverged_seeds == {10: "loss is nan at step 5 (segment 0)", 11: "rank 0: Loss is not finite"}
    assert (bf16.lost_seeds, bf16.diverged_seeds) == ({}, {})
    replaced = {(one.arm, one.seed): re.sub(r" \(2\d{7}T\w+-\w+\)", "", one.reason) for one in judged.not_judged}
    assert {seed: reason for seed, reason in replaced.items() if seed[1] < 5} == {
        ("bf16_standard", 3): f"{other}lr 0.002 instead of 0.003",
        ("mxfp8_standard", 0): f"{another}; this one diverged: loss is nan at step 5 (segment 0)",
        ("mxfp8_standard", 1): another,
        ("mxfp8_standard", 2): f"{other}lr 0.002 instead of 0.003",
    }
    (verdict,) = judged.verdicts  # none of DeepEP, which is named instead
    assert (verdict.arm, verdict.answer, verdict.seeds) == ("mxfp8_standard", Answer.DIFFERENT, (0, 1, 2, 3))
    assert "The arms also differ" not in verdict.sentence()
    notes = [note.removeprefix("left out: ") for note in judged.notes if note.startswith("left out: ")]
    assert notes[0] == f"{deepep.label}, seeds 0, 1: failed: node gpu-12 failed, 1 of 20 steps logged"
    assert len(notes) == 6  # two of one reason are one, and whatever was replaced is in the table alone
    reasons = runs_table(judged).frame["reason"]
    assert reasons.tolist()[-len(judged.not_judged) :] == [one.reason for one in judged.not_judged]
    as_json = judged.to_json()
    assert (as_json["finished"], as_json["judged"], len(as_json["runs"])) == (18, 15, 27)
    assert "\n18 of 27 runs finished, 15 of them judged\n" in judged.as_text()
    assert [row["used"] for row in as_json["runs"]].count(False) == len(judged.not_judged) + 3 + 2


def test_of_groups_with_as_many_seeds_the_newer_is_judged_and_the_other_told_of(study: Path) -> None:
    for seed in ENDS:
        for precision in ("bf16", "mxfp8"):
            newer = train(study, precision, seed, lr=1.0e-3).path
            newer.rename(newer.with_name("29990101T000000Z-aaaaaa"))
    judged = judge_study(study)
    (note,) = {note.split(": ", 3)[3] for note in judged.notes if "left out" in note}
    assert (judged.verdicts[0].n_seeds, note) == (len(ENDS), "lr 0.003 instead of 0.001")


def test_other_settings_are_told_and_a_gain_is_of_those_that_speed_depends_on(tmp_path: Path) -> None:
    for seed in ENDS:
        train(tmp_path / "s", "bf16", seed)
        train(tmp_path / "s", "mxfp8", seed, lr=2.0e-3, dataset="c4")
        train(tmp_path / "s", "fp8", seed, local_batch=8)
        train(tmp_path / "s", "nvfp4", seed)
    record_machine(tmp_path / "s", gpus=H100)
    record_native(tmp_path / "s")
    judged = judge_study(tmp_path / "s")
    words = "The arms also differ in their settings: lr 0.002 instead of 0.003, dataset c4 instead of python."
    assert judged.verdicts[1].findings[-1] == words
    assert f"{MXFP8}: {words}" in judged.summary["Same loss?"]
    assert [one.arm for one in judged.gains] == ["mxfp8_standard"]
    assert judged.no_gain == {
        "FP8 + standard all-to-all": "local_batch 8 instead of 4",
        "NVFP4 + standard all-to-all": "emulated kernels are slower than real ones",
    }


def test_a_field_that_makes_an_arm_is_no_other_setting(tmp_path: Path) -> None:
    planned = experiment_file.make_study("s", {"steps": STEPS}, [{"compile": "none"}, {"compile": "loss"}], range(3))
    for one in planned.experiments:
        make_run(tmp_path, one, curve(ENDS[one.seed]))
    record_machine(tmp_path / "s", gpus=H100)
    judged = judge_study(tmp_path / "s")
    assert [side.name for side in judged.sides] == ["bf16_standard", "bf16_standard_compile-loss"]
    assert (len(judged.gains), any("differ" in note for note in judged.notes)) == (1, False)


def test_what_an_arm_must_have_learnt_is_of_the_tokens_that_there_are_and_its_warm_up_is_told(tmp_path: Path) -> None:
    for seed in range(3):
        for precision in ("bf16", "mxfp8"):
            train(tmp_path / "s", precision, seed, curve(7.0 + 0.02 * seed), model="16B", warmup_steps=STEPS)
    (verdict,) = judge_study(tmp_path / "s").verdicts
    assert verdict.answer is Answer.NOT_TRAINED  # at 7 nats: 16B has rows for ln 102,400 = 11.5, the tokenizer ln 2048
    assert "ended inside its warm-up (step 20 of 20)" in verdict.sentence()


@pytest.mark.parametrize(("failed", "answer"), [("mxfp8", Answer.DIFFERENT), ("bf16", Answer.INSUFFICIENT)])
def test_an_arm_of_which_every_seed_diverged_is_judged_and_drawn(tmp_path: Path, failed: str, answer: Answer) -> None:
    for seed in ENDS:
        for precision in ("bf16", "mxfp8"):
            train(tmp_path / "s", precision, seed, [4.0, math.inf] if precision == failed else None)
    judged = judge_study(tmp_path / "s")
    assert [verdict.answer for verdict in judged.verdicts] == [answer]
    assert report_figures(judged)


def test_a_plan_says_which_seeds_there_should_be(study: Path) -> None:
    arms = [{"precision": "bf16"}, {"precision": "mxfp8"}]
    train(study, "mxfp8", 7)
    judged = judge_study(study, study=experiment_file.make_study("s", {"steps": STEPS}, arms, [*ENDS, 9]))
    assert [side.lost_seeds for side in judged.sides] == [{9: "not run"}] * 2
    assert [one.reason for one in judged.not_judged] == ["seed 7 of this arm is not in the study"]


def test_a_seed_can_be_dropped_and_a_margin_capped(study: Path) -> None:
    options: dict[str, Any] = {"dropped_seeds": [2], "margin_cap_nats": 0.001}
    dropped = judge_study(study, **options)
    for report in (dropped, judge_paths([study, study / "bf16_standard"], **options)):
        assert (report.verdicts[0].seeds, report.verdicts[0].margin_nats) == ((0, 1, 3), 0.001)
        assert any("as requested: seed 2" in note for note in report.notes)
    assert sum(not row["used"] for row in dropped.to_json()["runs"]) == 2
    assert {one.n_seeds for one in (*dropped.throughput, *dropped.gains)} == {3}
    assert "+nan" not in judge_study(study, dropped_seeds=[*ENDS]).as_text()
    for path, refused, words in (
        (study, {"dropped_seeds": [77]}, "seed 77 cannot be dropped: the seeds of these runs are 0, 1, 2, 3"),
        (EXAMPLE_LOGS[0], {"dropped_seeds": [77]}, "seed 77 cannot be dropped: the seeds of these runs are not known"),
        (study, {"final_fraction": 0.0}, "final_fraction is 0"),
        (EXAMPLE_LOGS[0], {"final_fraction": 1.5}, "final_fraction is 1.5"),
    ):
        with pytest.raises(BadInput, match=words):
            judge_paths([path], **refused)


@pytest.fixture(scope="module")
def on_h100(tmp_path_factory: pytest.TempPathFactory) -> Path:
    study = make_study(tmp_path_factory.mktemp("h100"))
    record_native(study)
    return study


@pytest.mark.parametrize(
    ("other", "words", "of_the_loss"),
    [
        ({"gpus": []}, "a CPU process stands in for a GPU", True),
        ({"gpus": B200}, "machine 2 × NVIDIA B200 against 2 × NVIDIA H100", True),
        ({"gpus": H100 * 4}, "machine 8 × NVIDIA H100 against 2 × NVIDIA H100", False),
        ({"gpus": [H100[0] | {"driver": "580.2"}] * 2}, "driver 580.2 against 570.1", False),
        ({"hosts": 2}, "machine 2 × NVIDIA H100 on each of 2 hosts against 2 × NVIDIA H100", False),
        ({"processor": "Another"}, "processor Another against A processor", False),
        (packages(torch="2.13.0"), "torch 2.13.0 against 2.14.0", True),
        (packages(torchao="0.17.0"), "torchao 0.17.0 against 0.18.0", True),
        (packages(torchtitan="0.2.0"), "torchtitan 0.2.0 against 0.3.0", True),
        ({"moelab": "0.2.0"}, "moelab 0.2.0 against 0.1.0", True),
        ({"git_commit": "2222222"}, None, True),
        (packages(triton="3.3", **{"nvidia-nccl-cu13": "2.30"}), None, False),  # the other record does not speak of it
    ],
)
def test_what_gain_and_loss_depend_on(
    on_h100: Path, other: dict[str, Any], words: str | None, of_the_loss: bool
) -> None:
    usual = {"gpus": H100, "git_commit": "1111111"}
    record_machine(on_h100, "bf16_standard/*", **usual)
    record_machine(on_h100, "mxfp8_standard/*", **usual | other)
    judged = judge_study(on_h100)
    assert (judged.no_gain.get(MXFP8, "")).split("; ")[0] == (words or "")
    assert bool(judged.gains) == (words is None)
    assert ("what computes the loss" in judged.verdicts[0].sentence()) == of_the_loss


def test_no_gain_is_claimed_between_machines_in_words_numbers_or_figures(study: Path) -> None:
    record_native(study)
    record_machine(study, gpus=B200)
    record_machine(study, "mxfp8_standard/*", gpus=H100)
    judged = judge_study(study)
    words = "machine 2 × NVIDIA H100 against 2 × NVIDIA B200"
    assert f"no gain is claimed for MXFP8 over BF16 (both standard all-to-all): {words}" in judged.as_text()
    assert "-50" not in judged.as_text()
    assert "500 tokens/s per GPU" in judged.as_text()
    assert judged.comparable_tps.keys() == {"bf16_standard"}
    assert (judged.to_json()["gains"], judged.to_json()["no_gain"]) == ([], {MXFP8: words})
    assert {(row["arm"], row["machine"]) for row in judged.to_json()["runs"]} == {
        ("bf16_standard", "2 × NVIDIA B200"),
        ("mxfp8_standard", "2 × NVIDIA H100"),
    }
    assert not any(re.search("faster|tokens/s", title(one)) for one in report_figures(judged).values())


def test_a_gain_whose_sign_is_not_known_says_so(tmp_path: Path) -> None:
    for seed, tps in enumerate((950.0, 1000.0, 1060.0)):
        train(tmp_path / "s", "bf16", seed)
        train(tmp_path / "s", "fp8", seed, tps=tps)
    record_machine(tmp_path / "s", gpus=H100)
    assert judge_study(tmp_path / "s").summary["Faster?"].endswith("n = 3 seeds): no difference is shown.")


def test_runs_of_an_arm_that_are_not_alike_have_no_gain_and_are_counted(study: Path) -> None:
    record_machine(study, gpus=H100)
    record_machine(study, "*/seed3", gpus=H100, **packages(torch="2.13.0"))
    record_native(study)
    judged = judge_study(study)
    own = "2.14.0 in 3 runs, 2.13.0 in 1 run"
    assert judged.no_gain == {MXFP8: f"torch {own} against {own}"}
    assert f"torch {own} against {own}" in judged.verdicts[0].sentence()
    assert "500 tokens/s per GPU" in judged.as_text()
    software = {"machine": "2 × NVIDIA H100", "torch": "2.14.0 in 6 runs, 2.13.0 in 2 runs", "driver": "570.1"}
    assert software.items() <= provenance(judged).items()
    report = judge_paths([study, EXAMPLE_LOGS[0]])
    assert report.sides[0].values["torch"] == own
    assert report.no_gain["bf16_on_h100"].endswith("chip NVIDIA H100 80GB HBM3 against NVIDIA H100")
    (run,) = (study / "mxfp8_standard" / "seed0").iterdir()
    write_json(run / "launch" / "converted" / "rank0.json", {"kernels": "emulated", "modules": ["layers.1"]})
    assert judge_study(study).no_gain == {MXFP8: "emulated kernels are slower than real ones"}


def test_a_run_that_went_on_elsewhere_or_whose_machine_is_unknown_is_not_in_the_gain(study: Path) -> None:
    record_machine(study, gpus=H100)
    record_native(study)
    for seed, later in ((0, {"gpus": B200, **packages(torch="2.13.0")}), (1, {"gpus": H100})):
        (run,) = (study / "mxfp8_standard" / f"seed{seed}").iterdir()
        write_json(run / "environment-2.json", ENVIRONMENT | later)
    judged = judge_study(study)
    words = "seed 0: environment-2.json: a later start ran on 2 × NVIDIA B200 with a different torch"
    assert f"{MXFP8}, {words}" in judged.notes
    assert [one.n_seeds for one in judged.gains] == [3]
    (run / "environment.json").unlink()
    judged = judge_study(study)
    assert ([one.n_seeds for one in judged.gains], judged.verdicts[0].n_seeds) == ([2], 4)


@pytest.mark.parametrize(
    ("environment", "fields", "on_cpu", "hardware"),
    [
        # The record lists the GPUs that `hardware: cpu` hides from the ranks.
        ({"gpus": H100}, {"hardware": "cpu"}, True, "A processor, 2 cores, no GPU"),
        ({"gpu_problem": "nvidia-smi fails"}, {}, False, "A processor, 2 cores, GPUs unknown: nvidia-smi fails"),
    ],
)
def test_a_machine_is_one_of_gpus_unless_its_ranks_saw_none(
    tmp_path: Path, environment: dict[str, Any], fields: dict[str, Any], on_cpu: bool, hardware: str
) -> None:
    train(tmp_path / "s", "bf16", 0, **fields)
    record_machine(tmp_path / "s", **environment)
    judged = judge_study(tmp_path / "s")
    assert (judged.on_cpu, judged.gains, provenance(judged)["machine"]) == (on_cpu, [], hardware)
