"""Which runs a study's report is made of: no seed vanishes, and machines and versions are not mixed silently."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from figure_support import title
from run_support import ENVIRONMENT, collect_and_save, make_run

from moelab.analysis.verdict import Answer
from moelab.data.example_logs import EXAMPLE_LOGS
from moelab.errors import BadInput
from moelab.experiment import NUMBERS_ONLY, Experiment
from moelab.experiment_file import make_study
from moelab.runs.collect import collect_run
from moelab.runs.directory import RunDir
from moelab.runs.files import write_json
from moelab.runs.status import State
from moelab.study_report import judge_paths, judge_study, provenance, report_figures, report_tables

STEPS = 8
SEEDS = range(5)
H100 = [{"name": "NVIDIA H100", "capability": 9.0, "driver": "570.1", "memory_mib": 81559}] * 2
ON_H100 = {"gpus": H100, "git_commit": "1111111"}
B200 = [{"name": "NVIDIA B200", "capability": 10.0, "driver": "570.1", "memory_mib": 183359}] * 2


def run_of(runs: Path, precision: str, seed: int, *, shift: float = 0.0, **options: Any) -> RunDir:
    """A run that ends at a known loss; the keywords of ``make_run``, and ``fields`` of its experiment."""
    fields = {"steps": STEPS, "warmup_steps": 1, "precision": precision, "seed": seed} | options.pop("fields", {})
    end = 4.0 + 0.02 * (seed % 3) + shift + (0.002 + 0.001 * (seed % 2) if precision == "mxfp8" else 0.0)
    losses = options.pop("losses", [end] * STEPS)
    return make_run(
        runs, Experiment(name="s", **fields), losses, tps=1000.0 if precision == "bf16" else 9000.0, **options
    )


def study_of(runs: Path, environment: Callable[[str, int], dict[str, Any]] = lambda precision, seed: {}) -> Path:
    """Five seeds of BF16 and MXFP8, each in an environment of its own."""
    for seed in SEEDS:
        for precision in ("bf16", "mxfp8"):
            run = run_of(runs, precision, seed)
            write_json(run.path / "environment.json", ENVIRONMENT | environment(precision, seed))
    return runs / "s"


def packages(**versions: str) -> dict[str, Any]:
    return {"packages": {**ENVIRONMENT["packages"], **versions}}


# No seed vanishes


@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
@pytest.mark.parametrize("stamp", ["20000101T000000Z-aaaaaa", "29990101T000000Z-aaaaaa"])
def test_one_run_of_another_learning_rate_does_not_make_the_others_vanish(
    tmp_path: Path, precision: str, stamp: str
) -> None:
    study = study_of(tmp_path)
    other = run_of(tmp_path, precision, 0, fields={"lr": 2.0e-3})
    other.path.rename(other.path.with_name(stamp))
    judged = judge_study(study)
    (verdict,) = judged.verdicts
    assert (verdict.answer, verdict.n_seeds) == (Answer.EQUIVALENT, 5)
    told = judged.to_json()
    assert (told["finished"], told["judged"], len(told["runs"])) == (11, 10, 11)
    assert "\n11 of 11 runs finished, 10 of them judged\n" in judged.as_text()
    (left_out,) = (row for row in told["runs"] if not row["used"])
    assert (left_out["run"].rsplit("/", 1)[-1], left_out["status"], left_out["seed"]) == (stamp, "completed", 0)
    assert "lr 0.002 instead of 0.003" in left_out["reason"]
    assert "lr 0.002 instead of 0.003" in told["note"]
    assert "The arms also differ" not in verdict.sentence()


def test_the_reference_is_the_group_that_most_runs_agree_with(tmp_path: Path) -> None:
    """Six seeds of BF16 alone at another learning rate, against five of both at one."""
    study = study_of(tmp_path)
    for seed in range(6):
        run_of(tmp_path, "bf16", seed, fields={"lr": 2.0e-3}, shift=1.0)
    judged = judge_study(study)
    assert judged.verdicts[0].answer is Answer.EQUIVALENT
    assert sum(not row["used"] for row in judged.to_json()["runs"]) == 6


def test_of_groups_with_as_many_seeds_the_newer_is_judged_and_the_other_told_of(tmp_path: Path) -> None:
    for seed in SEEDS:
        for precision in ("bf16", "mxfp8"):
            for lr in (0.003, 0.001):
                run_of(tmp_path, precision, seed, fields={"lr": lr})
    judged = judge_study(tmp_path / "s")
    assert judged.verdicts[0].n_seeds == len(SEEDS)
    (note,) = {note.split(": ", 2)[2] for note in judged.notes if "left out" in note}
    assert note.startswith("not the settings of this arm's judged runs: lr 0.00")
    assert note.endswith("(as many seeds as the newer runs, which are judged: give each set a study of its own)")


def test_arms_of_other_settings_are_judged_and_a_gain_is_of_settings_that_speed_does_not_depend_on(
    tmp_path: Path,
) -> None:
    for seed in SEEDS:
        run_of(tmp_path, "bf16", seed)
        run_of(tmp_path, "mxfp8", seed, fields={"lr": 2.0e-3, "dataset": "c4"})
        run_of(tmp_path, "fp8", seed, fields={"local_batch": 8})
        run_of(tmp_path, "nvfp4", seed)
    judged = judge_study(tmp_path / "s")
    fp8, mxfp8, _ = judged.verdicts
    words = "The arms also differ in their settings: lr 0.002 instead of 0.003, dataset c4 instead of python."
    assert words in mxfp8.sentence()
    assert f"MXFP8 + standard all-to-all: {words}" in judged.summary["Same loss?"]
    assert words.removesuffix(".") in judged.to_json()["note"]
    assert "local_batch 8 instead of 4" in fp8.sentence()
    assert [one.arm for one in judged.gains] == ["mxfp8_standard"]
    refused = "no gain of FP8 over BF16 (both standard all-to-all) is claimed: local_batch 8 instead of 4"
    assert refused in judged.as_text()
    assert judged.no_gain["NVFP4 + standard all-to-all"] == NUMBERS_ONLY


def test_a_field_that_makes_an_arm_is_no_other_setting(tmp_path: Path) -> None:
    study = make_study("s", {"steps": STEPS}, [{"compile": "none"}, {"compile": "loss"}], range(3))
    for one in study.experiments:
        make_run(tmp_path, one, [4.0 + 0.02 * one.seed] * STEPS)
    judged = judge_study(tmp_path / "s")
    assert [side.arm for side in judged.sides] == ["bf16_standard", "bf16_standard_compile-loss"]
    assert len(judged.gains) == 1
    assert not any("differ" in note for note in judged.notes)


def test_what_an_arm_must_have_learnt_is_of_the_tokens_that_there_are_and_its_warm_up_is_told(tmp_path: Path) -> None:
    for seed in range(3):
        for precision in ("bf16", "mxfp8"):
            run_of(tmp_path, precision, seed, shift=3.0, fields={"model": "16B", "warmup_steps": STEPS})
    (verdict,) = judge_study(tmp_path / "s").verdicts
    assert verdict.answer is Answer.NOT_TRAINED  # at 7 nats: 16B has rows for ln 102,400 = 11.5, the tokenizer ln 2048
    assert "ended inside its warm-up (step 8 of 8)" in verdict.sentence()


def test_a_seed_that_diverged_is_a_finding(tmp_path: Path) -> None:
    study = study_of(tmp_path)
    run_of(tmp_path, "bf16", 5)
    run_of(tmp_path, "mxfp8", 5, losses=[4.0, math.nan], state=State.COMPLETED)
    run_of(tmp_path, "bf16", 6)
    stopped = run_of(tmp_path, "mxfp8", 6, losses=[4.0], state=State.FAILED, reason="rank 0: Loss is not finite")
    assert collect_run(stopped).diverged == "rank 0: Loss is not finite"
    judged = judge_study(study)
    (verdict,) = judged.verdicts
    assert verdict.answer is Answer.DIFFERENT
    assert "2 of 7 seeds diverged in MXFP8 and not in BF16" in verdict.sentence()
    rows = {(row["arm"], row["seed"]): row for row in judged.to_json()["runs"]}
    assert rows["mxfp8_standard", 5]["reason"] == "diverged: loss is nan at step 2 (segment 0)"
    side_by_side = judge_paths([study, study / "bf16_standard"])
    assert side_by_side.verdicts[0].answer is Answer.DIFFERENT


@pytest.mark.parametrize(
    ("failed", "answer", "words"),
    [
        ("mxfp8", Answer.DIFFERENT, "5 of 5 seeds diverged in MXFP8"),
        ("bf16", Answer.INSUFFICIENT, "5 of 5 seeds diverged in the reference BF16"),
    ],
)
def test_an_arm_of_which_every_seed_diverged_is_judged(tmp_path: Path, failed: str, answer: Answer, words: str) -> None:
    for seed in SEEDS:
        for precision in ("bf16", "mxfp8"):
            run_of(tmp_path, precision, seed, **({"losses": [4.0, math.inf]} if precision == failed else {}))
    judged = judge_study(tmp_path / "s")
    (verdict,) = judged.verdicts
    assert verdict.answer is answer
    assert words in verdict.sentence()
    assert report_figures(judged)


def test_every_run_that_is_not_judged_is_named_with_its_reason(tmp_path: Path) -> None:
    study = study_of(tmp_path)
    for seed in (5, 6, 7, 8):
        run_of(tmp_path, "bf16", seed)
    run_of(tmp_path, "mxfp8", 5, losses=[4.0] * 3, state=State.FAILED, reason="rank 1: killed by SIGKILL")
    run_of(tmp_path, "mxfp8", 7, fields={"gpus_per_node": 4})
    record = run_of(tmp_path, "mxfp8", 8).path / "experiment.yaml"
    record.write_text(record.read_text()[:200])
    run_of(tmp_path, "mxfp8", 0, losses=[4.0, math.nan])
    run_of(tmp_path, "mxfp8", 1, losses=[4.0], state=State.CANCELLED)
    for seed in SEEDS:
        fields = {"ep_backend": "deepep", "ep_kernels": "emulated"}
        run_of(tmp_path, "mxfp8", seed, fields=fields, losses=[4.0], state=State.FAILED, reason="node gpu-12 failed")
    judged = judge_study(study)
    (verdict,) = judged.verdicts
    assert (verdict.arm, verdict.answer, verdict.n_seeds) == ("mxfp8_standard", Answer.EQUIVALENT, 5)
    for words in (
        "seed 5: failed: rank 1: killed by SIGKILL, 3 of 8 steps logged",
        "seed 6: not run",
        "seed 7: not the settings of this arm's judged runs: gpus_per_node 4",
        "seed 8: experiment.yaml: ",
        "assumed to be unrelated",
    ):
        assert words in verdict.sentence()
    assert any("MXFP8 + standard all-to-all, seed 8: experiment.yaml" in note for note in judged.notes)
    lost = "left out: MXFP8 + DeepEP, seeds 0, 1, 2, 3, 4: failed: node gpu-12 failed, 1 of 8 steps logged"
    assert lost in judged.notes
    (table,) = [one for one in report_tables(judged) if one.title == "Runs that are not judged"]
    assert len(table.rows) == len(judged.not_judged)
    note = judged.to_json()["note"]
    assert "this one diverged: loss is nan at step 2 (segment 0)" in note
    assert "seed 1: another attempt" not in note  # replaced by one that finished: in the table alone


def test_a_planned_seed_that_has_no_run_is_named(tmp_path: Path) -> None:
    study_of(tmp_path)
    shared = {"steps": STEPS, "warmup_steps": 1}
    study = make_study("s", shared, [{"precision": "bf16"}, {"precision": "mxfp8"}], [*SEEDS, 9])
    (verdict,) = judge_study(tmp_path / "s", study=study).verdicts
    assert "mxfp8_standard, seed 9: not run" in verdict.excluded
    run_of(tmp_path, "mxfp8", 7)
    rows = judge_study(tmp_path / "s", study=study).to_json()["runs"]
    assert [row["reason"] for row in rows if not row["used"]] == ["seed 7 of this arm is not in the study"]


def test_a_seed_whose_record_is_damaged_and_whose_log_diverged_is_not_assumed_unrelated(tmp_path: Path) -> None:
    study = study_of(tmp_path)
    run = run_of(tmp_path, "mxfp8", 5, losses=[4.0] * 5 + [math.nan] * 3)
    run_of(tmp_path, "bf16", 5)
    (run.path / "experiment.yaml").write_text("x")
    (verdict,) = judge_study(study).verdicts
    assert verdict.answer is Answer.INSUFFICIENT
    assert "1 of 6 seeds of MXFP8 may have diverged (seed 5: experiment.yaml" in verdict.sentence()
    assert "unrelated" not in verdict.sentence()


def test_a_seed_can_be_dropped_and_a_margin_capped(tmp_path: Path) -> None:
    study = study_of(tmp_path)
    for found in (
        judge_study(study, dropped_seeds=[2], margin_cap_nats=0.001),
        judge_paths([study], dropped_seeds=[2], margin_cap_nats=0.001),
        judge_paths([study, study / "bf16_standard"], dropped_seeds=[2], margin_cap_nats=0.001),
    ):
        (verdict, *_) = found.verdicts
        assert (verdict.seeds, verdict.margin_nats) == ((0, 1, 3, 4), 0.001)
        assert any("as requested: seed 2" in note for note in found.notes)
    dropped = judge_study(study, dropped_seeds=[2])
    assert sum(not row["used"] for row in dropped.to_json()["runs"]) == 2
    assert {one.n_seeds for one in (*dropped.throughput, *dropped.gains)} == {4}
    assert "+nan" not in judge_study(study, dropped_seeds=SEEDS).as_text()
    with pytest.raises(BadInput, match="seed 77 cannot be dropped"):
        judge_paths([study], dropped_seeds=[77])


# No machines are mixed silently


def test_no_gain_is_claimed_between_machines(tmp_path: Path) -> None:
    """BF16 on a CPU and MXFP8 on H100s under another torch: nine times the speed of nothing."""
    study = study_of(
        tmp_path, lambda precision, seed: {} if precision == "bf16" else {"gpus": H100, **packages(torch="2.13.0")}
    )
    judged = judge_study(study)
    words = "machine 2 × NVIDIA H100 against A processor, 2 cores, no GPU"
    assert judged.gains == []
    assert "800" not in judged.as_text()
    assert "9,000 tokens/s per rank" in judged.as_text()
    assert f"no gain of MXFP8 over BF16 (both standard all-to-all) is claimed: {words}" in judged.as_text()
    assert judged.comparable_tps.keys() == {"bf16_standard"}
    assert "each rank is a CPU process in BF16 + standard all-to-all" in judged.speed_note
    told = judged.to_json()
    assert (told["gains"][0]["percent"], words in told["gains"][0]["reason"]) == (None, True)
    assert {(row["arm"], row["machine"], row["versions"]["torch"]) for row in told["runs"]} == {
        ("bf16_standard", "A processor, 2 cores, no GPU", "2.14.0"),
        ("mxfp8_standard", "2 × NVIDIA H100", "2.13.0"),
    }
    assert not any(re.search("faster|tokens/s", title(one.figure)) for one in report_figures(judged))


@pytest.fixture(scope="module")
def on_h100(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return study_of(tmp_path_factory.mktemp("h100"), lambda precision, seed: ON_H100)


@pytest.mark.parametrize(
    ("other", "words", "of_the_loss"),
    [
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
def test_what_a_gain_and_a_loss_depend_on(
    on_h100: Path, other: dict[str, Any], words: str | None, of_the_loss: bool
) -> None:
    for run in on_h100.glob("mxfp8_standard/*/*"):
        write_json(run / "environment.json", ENVIRONMENT | ON_H100 | other)
    judged = judge_study(on_h100)
    assert judged.no_gain.get("MXFP8 + standard all-to-all") == words
    assert bool(judged.gains) == (words is None)
    assert ("what computes the loss" in judged.verdicts[0].sentence()) == of_the_loss


def test_one_run_on_another_machine_is_counted_apart(tmp_path: Path) -> None:
    study = study_of(tmp_path, lambda precision, seed: {"gpus": H100} | (packages(torch="2.13.0") if seed == 4 else {}))
    judged = judge_study(study)
    words = "torch 2.14.0 in 4 runs, 2.13.0 in 1 run against 2.14.0 in 4 runs, 2.13.0 in 1 run"
    assert judged.no_gain == {"MXFP8 + standard all-to-all": words}
    assert words in judged.verdicts[0].sentence()
    assert "torch 2.14.0 in 8 runs, 2.13.0 in 2 runs" in provenance(judged)["Software"]
    assert provenance(judged)["Hardware"] == "2 × NVIDIA H100"
    found = judge_paths([study, study / "bf16_standard"])
    assert found.sides[0].settings.values["torch"] == "2.14.0 in 4 runs, 2.13.0 in 1 run"
    beside_a_log = judge_paths([study, EXAMPLE_LOGS[0]]).no_gain["bf16_on_h100"]
    assert "the runs of BF16 + standard all-to-all are not on like machines" in beside_a_log


def test_a_run_that_went_on_elsewhere_or_whose_machine_is_unknown_is_not_in_the_gain(tmp_path: Path) -> None:
    study = study_of(tmp_path, lambda precision, seed: {"gpus": H100})
    for seed, later in ((0, {"gpus": B200, **packages(torch="2.13.0")}), (1, {"gpus": H100})):
        (run,) = (study / "mxfp8_standard" / f"seed{seed}").iterdir()
        write_json(run / "environment-2.json", ENVIRONMENT | later)
    judged = judge_study(study)
    told = "seed 0: environment-2.json: a later start ran on 2 × NVIDIA B200 with a different torch"
    assert f"MXFP8 + standard all-to-all, {told}" in judged.notes
    assert [one.n_seeds for one in judged.gains] == [4]
    (run / "environment.json").unlink()
    judged = judge_study(study)
    assert ([one.n_seeds for one in judged.gains], judged.verdicts[0].n_seeds) == ([3], 5)


def test_hidden_gpus_make_no_gpu_machine(tmp_path: Path) -> None:
    """``hardware: cpu`` hides the GPUs of the machine from its ranks; its record lists them all the same."""
    for seed in SEEDS:
        run = run_of(tmp_path, "bf16", seed, fields={"hardware": "cpu"})
        write_json(run.path / "environment.json", ENVIRONMENT | {"gpus": H100})
    judged = judge_study(tmp_path / "s")
    assert judged.on_cpu
    assert provenance(judged)["Hardware"] == "A processor, 2 cores, no GPU"


def test_gpus_that_nvidia_smi_could_not_name_are_no_cpu(tmp_path: Path) -> None:
    study = study_of(tmp_path, lambda precision, seed: {"gpu_problem": "nvidia-smi fails (exit code 9)"})
    judged = judge_study(study)
    assert (judged.on_cpu, judged.gains) == (False, [])
    assert "GPUs unknown: nvidia-smi fails (exit code 9)" in provenance(judged)["Hardware"]


def test_kernels_that_differ_within_an_arm_give_no_gain(tmp_path: Path) -> None:
    study = study_of(tmp_path, lambda precision, seed: {"gpus": B200})
    (run,) = (study / "mxfp8_standard" / "seed0").iterdir()
    write_json(run / "launch" / "converted" / "rank0.json", {"kernels": "native", "modules": ["layers.1"]})
    judged = judge_study(study)
    assert judged.no_gain == {
        "MXFP8 + standard all-to-all": "MXFP8 or NVFP4 kernels emulated in 4 runs, native in 1 run within one arm"
    }


def test_sides_of_other_machines_have_no_ratio(tmp_path: Path) -> None:
    study = study_of(tmp_path, lambda precision, seed: {"gpus": H100 if precision == "bf16" else B200})
    found = judge_paths([study, study / "bf16_standard"])
    assert found.study is None
    assert list(found.no_gain) == ["MXFP8 + standard all-to-all"]
    assert "machine 2 × NVIDIA B200 against 2 × NVIDIA H100" in found.speed_note
    speed = next(title(one.figure) for one in report_figures(found) if one.caption.startswith("Throughput"))
    assert "logged 9,000 and 1,000 tokens/s, not on like machines: no gain is claimed" in speed
    assert {row["machine"] for row in found.to_json()["runs"]} == {"2 × NVIDIA H100", "2 × NVIDIA B200"}


def test_the_memory_of_repeated_steps_is_the_largest(tmp_path: Path) -> None:
    """Lines without times, those of one rank after those of another: the fullest rank came first."""
    run = run_of(tmp_path, "bf16", 0)
    lines = [line.split(" - INFO - ")[1] for line in run.log.read_text().splitlines()]
    fuller = [line.replace("1.50GiB(0.75%)", "9.25GiB(50.0%)") for line in lines]
    run.log.write_text("\n".join([*fuller, *lines]))
    one = collect_and_save(run)
    assert '"memory_gib_peak": 9.25' in (run.path / "results.json").read_text()
    assert one.finished
