"""Submitting and watching where there is no Slurm: what is refused, what is written, and what is believed."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import program
from run_support import make_run

from moelab.cli import main
from moelab.errors import Refused
from moelab.experiment import Experiment
from moelab.experiment_file import make_study, read_study
from moelab.launch import slurm
from moelab.launch import status as status_module
from moelab.launch.cluster import ClusterProfile, read_cluster
from moelab.launch.slurm import (
    SCRIPT_FILE,
    NumberUnknown,
    Queue,
    SlurmError,
    SlurmJob,
    Ticket,
    state_of,
    ticket_of,
)
from moelab.launch.status import cancel, refresh
from moelab.launch.submit import adopt, dry_run, submit
from moelab.machine import boot_id
from moelab.runs.directory import RunDir, find
from moelab.runs.status import BY_CANCEL, State, Status

STUDIES = Path(__file__).parents[2] / "studies"
TIMED_OUT = "Slurm: TIMEOUT (TimeLimit); see train.log, or slurm-7_0.out if no rank started"
FINAL_OF_SLURM = ["COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"]


def of_671b(*overrides: str) -> Any:
    return read_study(STUDIES / "671B_b200_x256.yaml", overrides)


def small(**shared: Any) -> Any:
    return make_study("s", {"hardware": "cpu", "steps": 4, **shared}, [{"precision": "bf16"}], [0, 1])


@pytest.fixture
def cluster() -> ClusterProfile:
    return read_cluster("slurm_generic", ["gpus_per_node=8", "nodes=64"])


def submitted(runs: Path, losses: list[float], status: Status, **fields: Any) -> RunDir:
    """A run whose job is 7_0."""
    run = make_run(runs, Experiment(name="s", hardware="cpu", steps=4, **fields), losses)
    Ticket(comment="moelab:s:1", task=0).write(run)
    run.set_status(replace(status, job_id="7_0"))
    return run


Site = Callable[..., None]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """Writes a site's commands: each prints its text, and adds its arguments to ``asked``."""
    commands = tmp_path / "bin"
    commands.mkdir()
    monkeypatch.setenv("PATH", f"{commands}:/usr/bin:/bin")

    def write(**texts: str) -> None:
        usual = {"sbatch": "", "squeue": '{"jobs": []}', "sacct": "", "scancel": "", "scontrol": ""}
        for name, text in {**usual, **texts}.items():
            (commands / f"{name}.txt").write_text(text)
            program(commands, name, f'echo "{name} $*" >>{tmp_path}/asked; cat {commands}/{name}.txt')

    write()
    return write


def queue_of(*jobs: SlurmJob) -> str:
    """As ``squeue --json`` shows them."""
    rows = []
    for one in jobs:
        array, _, task = one.job_id.partition("_")
        ids = {"job_id": int(one.raw_id), "array_job_id": int(array), "array_task_id": int(task or 0)}
        rows.append({**ids, "job_state": one.state, "comment": one.comment})
    return json.dumps({"jobs": rows})


def job(state: str, **fields: Any) -> SlurmJob:
    return SlurmJob(**{"job_id": "7_0", "raw_id": "7", "state": state, "comment": "moelab:s:1", **fields})


@pytest.mark.parametrize(
    ("study", "words"),
    [
        (of_671b(), "C4 would be streamed by 32 nodes"),
        (of_671b("pp=16", "ep=32"), "plan of bf16_standard_round-robin: "),
        (of_671b("activation_checkpoint=none"), r"plan of .*: \d+\.\d of 17\d\.\d GiB on the fullest GPU"),
    ],
)
def test_what_cannot_run_there_is_refused_before_anything_is_written(
    tmp_path: Path, site: Site, cluster: ClusterProfile, study: Any, words: str
) -> None:
    with pytest.raises(Refused, match=words) as refused:
        submit(study, tmp_path / "runs", cluster)
    assert len(set(str(refused.value).splitlines())) == len(str(refused.value).splitlines())
    assert not (tmp_path / "runs").exists()
    assert not (tmp_path / "asked").exists()


def test_what_slurm_did_not_take_stays_prepared_with_its_script_and_ticket(
    tmp_path: Path, site: Site, cluster: ClusterProfile
) -> None:
    program(tmp_path / "bin", "sbatch", "echo 'sbatch: error: closed' >&2; exit 1")
    with pytest.raises(Refused, match=r"^sbatch: closed\n.* its runs stay prepared$"):
        submit(small(), tmp_path / "runs", cluster)
    left = find(tmp_path / "runs")
    assert [(status.state, status.reason) for status in refresh(left)] == [
        (State.PREPARED, "not submitted: sbatch: closed")
    ] * 2
    assert [ticket_of(run).task for run in left] == [0, 1]
    site(sbatch="7\n")
    done = submit(small(), tmp_path / "runs", cluster)
    assert done.submitted == tuple(left)
    assert {(run.path / SCRIPT_FILE).read_text() for run in left} == set(done.scripts)


def test_each_size_is_a_script_of_its_own(tmp_path: Path, site: Site, cluster: ClusterProfile) -> None:
    site(sbatch="7\n")
    study = make_study("s", {"hardware": "cpu", "steps": 4}, [{}, {"routing": "round_robin", "nodes": 2}], [0, 1])
    done = submit(study, tmp_path / "runs", cluster)
    assert [script.count("--nodes=1 ") + 2 * script.count("--nodes=2 ") for script in done.scripts] == [1, 2]
    for run in done.submitted:
        assert (run.path / SCRIPT_FILE).read_text() == done.scripts[run.experiment.nodes - 1]


def test_a_run_of_which_nobody_knows_the_end_is_not_submitted_beside(
    tmp_path: Path, site: Site, cluster: ClusterProfile
) -> None:
    lost = make_run(tmp_path, small().experiments[0], [8.0, 7.0])
    (lost.path / "status.json").write_text("{")
    for ask in (dry_run, submit):
        with pytest.raises(Refused, match=f"{lost.name}: it is unknown how it ended .* it has 2 of 4 steps"):
            ask(small(), tmp_path, cluster)
    assert find(tmp_path) == [lost]


def test_a_killed_launchers_run_is_submitted_anew_and_what_is_left_out_is_told(
    tmp_path: Path, site: Site, cluster: ClusterProfile
) -> None:
    site(sbatch="7\n")
    killed, bad = (make_run(tmp_path, experiment, [8.0, 7.0]) for experiment in small().experiments)
    killed.set_status(Status(state=State.RUNNING, boot_id=boot_id()))
    (bad.path / "experiment.yaml").unlink()
    done = submit(small(), tmp_path, cluster)
    assert killed.status.reason == "the launcher was killed"
    assert len({*done.submitted} - {killed, bad}) == 2
    assert done.to_json()["left_out"][0]["run"] == bad.name
    assert done.as_text().startswith(f"{bad.name}: left out: experiment.yaml")


@pytest.mark.parametrize(
    ("own", "said", "state", "reason"),
    [
        (State.SUBMITTED, job("PENDING", reason="Priority"), State.SUBMITTED, "Slurm: PENDING (Priority)"),
        (State.SUBMITTED, job("RUNNING"), State.RUNNING, None),
        (State.RUNNING, job("CANCELLED"), State.CANCELLED, "Slurm: CANCELLED"),
        (State.RUNNING, job("TIMEOUT", reason="TimeLimit"), State.FAILED, TIMED_OUT),
        (State.RUNNING, job("PENDING", reason="BeginTime", restarts=1), State.SUBMITTED, "Slurm: PENDING (BeginTime)"),
        (State.UNKNOWN, job("RUNNING", restarts=1), State.RUNNING, None),
        (State.UNKNOWN, job("CANCELLED"), State.CANCELLED, "Slurm: CANCELLED"),
        (State.RUNNING, job("NEW_WORD"), State.UNKNOWN, "Slurm: NEW_WORD"),
        (State.FAILED, job("RUNNING"), State.FAILED, None),
        (State.FAILED, job("COMPLETING", restarts=1), State.FAILED, None),
        (State.FAILED, job("PENDING", restarts=1), State.SUBMITTED, "Slurm: PENDING"),
        (State.COMPLETED, job("FAILED"), State.COMPLETED, None),
        (State.COMPLETED, None, State.COMPLETED, None),
        (State.RUNNING, None, State.UNKNOWN, "Slurm no longer knows job 7_0, and the job did not record its end"),
    ],
)
def test_what_the_job_wrote_and_what_slurm_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: State, said: SlurmJob | None, state: State, reason: str | None
) -> None:
    monkeypatch.setattr(slurm, "queue", lambda: [said] if said else [])
    monkeypatch.setattr(slurm, "ended_by_accounting", lambda *_: {})
    run = submitted(tmp_path, [8.0, 7.0], Status(state=own, attempts=1))
    (status,) = refresh([run])
    assert (status.state, status.reason) == (state, reason)
    assert replace(run.status, updated=0.0) == replace(status, updated=0.0)


@pytest.mark.parametrize("steps", [4, 3, 0])
def test_slurm_s_completed_is_completed_only_with_every_step_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    monkeypatch.setattr(slurm, "queue", lambda: [job("COMPLETED")])
    run = submitted(tmp_path, [8.0] * steps, Status(state=State.RUNNING, attempts=1))
    (status,) = refresh([run])
    failed = (State.FAILED, f"training ended at step {steps} of 4")
    assert (status.state, status.reason) == ((State.COMPLETED, None) if steps == 4 else failed)
    assert (run.path / "results.json").exists()


@settings(max_examples=30)
@given(
    own=st.sampled_from(list(State)),
    words=st.none() | st.sampled_from([*FINAL_OF_SLURM, "RUNNING", "PENDING", "X"]),
    restarts=st.integers(0, 3),
)
def test_completed_is_never_invented(
    tmp_path_factory: pytest.TempPathFactory, own: State, words: str | None, restarts: int
) -> None:
    """Two of four steps were logged: only a job that said so itself is completed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slurm, "queue", lambda: [job(words, restarts=restarts)] if words else [])
        patch.setattr(slurm, "ended_by_accounting", lambda *_: {})
        run = submitted(tmp_path_factory.mktemp("run"), [8.0, 7.0], Status(state=own, attempts=1))
        (status,) = refresh([run])
    if status.state is State.COMPLETED:
        assert own is State.COMPLETED
    if words in ("RUNNING", "PENDING") and not own.is_final:
        assert status.state is state_of(job(words))


@pytest.mark.parametrize(
    ("accounted", "state"), [("7_0|7|TIMEOUT|0:0", State.FAILED), ("7_0|7|RUNNING|0:0", State.UNKNOWN)]
)
def test_accounting_is_believed_about_the_ends_that_the_controller_forgot(
    tmp_path: Path, site: Site, accounted: str, state: State
) -> None:
    site(sacct=f"{accounted}\n")
    run = submitted(tmp_path, [8.0], Status(state=State.RUNNING, attempts=1))
    assert refresh([run])[0].state is state
    (tmp_path / "bin" / "sacct").unlink()
    assert refresh([submitted(tmp_path, [8.0], Status(state=State.RUNNING, attempts=1))])[0].state is State.UNKNOWN


def test_what_slurm_says_is_told_where_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = submitted(tmp_path, [8.0], Status(state=State.SUBMITTED, attempts=0))
    monkeypatch.setattr(slurm, "queue", lambda: [job("RUNNING")])
    monkeypatch.setattr(RunDir, "set_status", Mock(side_effect=OSError(errno.EDQUOT, "Disk quota exceeded")))
    assert refresh([run])[0].state is State.RUNNING


def test_a_job_in_a_state_that_is_not_known_is_not_submitted_again_and_can_be_cancelled(
    tmp_path: Path, site: Site, cluster: ClusterProfile
) -> None:
    site(squeue=queue_of(job("NEW_WORD")))
    run = submitted(tmp_path, [8.0], Status(state=State.RUNNING, attempts=1))
    with pytest.raises(Refused, match="is unknown as job 7_0"):
        submit(make_study("s", {"hardware": "cpu", "steps": 4}, [{}], [0]), tmp_path, cluster)
    assert [status.state for status in cancel([run])] == [State.CANCELLED]
    assert "scancel 7_0\n" in (tmp_path / "asked").read_text()


def test_a_job_knows_that_it_is_cancelled_before_slurm_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = submitted(tmp_path, [8.0], before := Status(state=State.RUNNING, job_id="7_0", attempts=1))
    monkeypatch.setattr(slurm, "queue", lambda: [job("RUNNING")])

    def refuse(jobs: Iterable[SlurmJob]) -> None:
        assert [one.job_id for one in jobs] == ["7_0"]
        assert (run.status.state, run.status.reason) == (State.RUNNING, BY_CANCEL)
        raise SlurmError("scancel: error: Access/permission denied")

    monkeypatch.setattr(slurm, "cancel", refuse)
    with pytest.raises(SlurmError, match="denied"):
        cancel([run])
    assert replace(run.status, updated=0) == before


def test_an_end_that_the_job_writes_meanwhile_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = submitted(tmp_path, [8.0] * 4, Status(state=State.RUNNING, attempts=1))
    after = status_module._after

    def slow(run: RunDir, status: Status, job: SlurmJob | None) -> Status:
        run.set_status(Status(state=State.COMPLETED, job_id="7_0", attempts=1, exit_code=0))
        return after(run, status, job)

    monkeypatch.setattr(status_module, "_after", slow)
    monkeypatch.setattr(slurm, "queue", lambda: [job("FAILED")])
    assert refresh([run])[0].state is State.COMPLETED
    assert run.status.state is State.COMPLETED


def test_a_job_of_another_run_with_the_same_number_is_not_believed(tmp_path: Path) -> None:
    """Numbers begin again when a cluster is set up anew."""
    run = submitted(tmp_path, [8.0], Status(state=State.RUNNING, attempts=1))
    assert Queue([job("RUNNING", comment="moelab:other:2")]).job_of(run) is None
    assert Queue([job("RUNNING", comment="set by the site")]).job_of(run) is not None


def test_slurm_is_not_asked_for_runs_that_are_no_jobs_and_one_that_does_not_answer_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "queue", Mock(side_effect=SlurmError("squeue: no answer in 60 s")))
    no_job = make_run(tmp_path, Experiment(name="s"), [8.0])
    assert refresh([no_job]) == [no_job.status]
    run = submitted(tmp_path, [8.0], Status(state=State.RUNNING, attempts=1))
    done = submitted(tmp_path, [8.0], Status(state=State.FAILED, reason="x", attempts=1))
    running, failed = refresh([run, done])
    assert (running.state, running.reason) == (State.RUNNING, "as last seen; squeue: no answer in 60 s")
    assert (failed.state, failed.reason) == (State.FAILED, "x")
    assert run.status.reason is None


def states_of(runs: Iterable[RunDir]) -> list[tuple[State, str | None]]:
    return [(status.state, status.job_id) for status in refresh(runs)]


def test_an_array_that_was_cancelled_while_it_waited_is_cancelled_for_each_of_its_tasks(
    tmp_path: Path, site: Site, cluster: ClusterProfile
) -> None:
    site(
        sbatch="\n  ------\n  Welcome to the Stampede3 Supercomputer\n  ------\n  --> (login4)...OK\n  519605\n",
        sacct="519605_[0-1]|519605|CANCELLED by 54321|0:0\n",
    )
    done = submit(small(), tmp_path / "runs", cluster)
    assert states_of(done.submitted) == [(State.CANCELLED, "519605_0"), (State.CANCELLED, "519605_1")]
    assert {run.status.reason for run in done.submitted} == {"Slurm: CANCELLED"}


@pytest.mark.parametrize(("attempts", "state"), [(0, State.CANCELLED), (1, State.UNKNOWN)])
def test_the_completion_log_has_one_entry_for_an_array_that_never_started(
    tmp_path: Path, site: Site, attempts: int, state: State
) -> None:
    """As real Slurm 22.05 without accounting writes it; of a task that began, that entry may be another one's."""
    site(sacct="7|CANCELLED|0:0\n")
    run = submitted(tmp_path, [], Status(state=State.SUBMITTED, attempts=attempts))
    assert states_of([run]) == [(state, "7_0")]


def test_a_job_whose_number_nobody_knows_is_told_and_adopted(
    tmp_path: Path, site: Site, cluster: ClusterProfile
) -> None:
    runs, study = tmp_path / "runs", small()
    site(sbatch="Welcome to x\n")
    with pytest.raises(NumberUnknown, match=r"'Welcome to x'.*squeue --me --name=s.*--adopt NUMBER") as told:
        submit(study, runs, cluster)
    assert told.value.exit_code == 1
    assert states_of(find(runs)) == [(State.SUBMITTED, None)] * 2
    assert all("printed no job number: 'Welcome to x'" in str(run.status.reason) for run in find(runs))
    with pytest.raises(Refused, match=r"is submitted: its job number is unknown"):
        submit(study, runs, cluster)  # it may wait
    with pytest.raises(Refused, match="--adopt 7: Slurm knows no such job"):
        adopt(study, runs, "7")
    site(squeue=queue_of(job("PENDING", comment="moelab:other:1")))
    with pytest.raises(Refused, match="--adopt 7: that job was submitted for something else: moelab:other:1"):
        adopt(study, runs, "7")
    site(squeue=queue_of(job("PENDING", comment="the site's"), job("RUNNING", comment="", job_id="7_1", raw_id="8")))
    adopted = adopt(study, runs, "7")
    assert [run.status.job_id for run in adopted.adopted] == ["7_0", "7_1"]
    assert [run.status.state for run in adopted.adopted] == [State.SUBMITTED, State.RUNNING]
    with pytest.raises(Refused, match="must lack its job number: no submission does"):
        adopt(study, runs, "7")


def test_a_job_whose_number_nobody_knows_is_found_by_its_comment_or_given_up(
    tmp_path: Path, site: Site, cluster: ClusterProfile
) -> None:
    site(sbatch="Welcome\n")
    with pytest.raises(NumberUnknown):
        submit(small(), tmp_path / "runs", cluster)
    runs = find(tmp_path / "runs")
    statuses = [run.status for run in runs]
    comment = str(ticket_of(runs[0]).comment)
    site(squeue=queue_of(*(job("PENDING", comment=comment, job_id=f"7_{task}") for task in (0, 1))))
    assert states_of(runs) == [(State.SUBMITTED, "7_0"), (State.SUBMITTED, "7_1")]
    for run, status in zip(runs, statuses, strict=True):
        run.set_status(status)
    site(sbatch="8\n")
    assert {status.state for status in cancel(runs)} == {State.CANCELLED}
    assert "moelab did not find its job" in str(runs[0].status.reason)
    assert "scancel" not in (tmp_path / "asked").read_text()
    assert len(submit(small(), tmp_path / "runs", cluster).submitted) == 2


@pytest.mark.parametrize("number", ["------", "7; rm -rf /", "-j", "519605_[0-1]"])
def test_a_number_that_is_none_hides_no_other_run(
    tmp_path: Path, site: Site, number: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As an earlier version stored it."""
    good = submitted(tmp_path, [8.0], Status(state=State.RUNNING, attempts=1))
    bad = submitted(tmp_path, [8.0], Status(state=State.RUNNING, attempts=1), seed=1)
    Ticket(comment="moelab:s:2", task=0).write(bad)
    bad.set_status(replace(bad.status, job_id=number))
    site(squeue=queue_of(job("RUNNING")))
    assert main(["status", str(tmp_path), "--json"]) == 0
    rows = {row["run"]: row for row in json.loads(capsys.readouterr().out)["runs"]}
    assert (rows[good.name]["status"], rows[good.name]["job_id"]) == ("running", "7_0")
    assert (rows[bad.name]["status"], rows[bad.name]["job_id"]) == ("submitted", None)
    assert repr(number) in rows[bad.name]["reason"]
    assert main(["collect", str(tmp_path / "s")]) == 0
    assert main(["cancel", str(tmp_path)]) == 0
    assert [run.status.state for run in (good, bad)] == [State.CANCELLED] * 2
    asked = (tmp_path / "asked").read_text()
    assert "scancel 7_0\n" in asked
    assert f" {number}" not in asked


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("launch/submission.json", "{", job("RUNNING")),
        ("launch/submission.json", '{"comment": "moelab:s:1", "task": "x", "raw_id": "--help"}', job("RUNNING")),
        ("experiment.yaml", "model: [", job("COMPLETED")),
    ],
)
def test_a_damaged_record_hides_no_other_run(
    tmp_path: Path, site: Site, file: str, content: str, said: SlurmJob
) -> None:
    good = submitted(tmp_path, [8.0] * 4, Status(state=State.RUNNING, attempts=1))
    bad = submitted(tmp_path, [8.0] * 4, Status(state=State.RUNNING, attempts=1), seed=1)
    Ticket(comment="moelab:s:1", task=1).write(bad)
    bad.set_status(replace(bad.status, job_id="7_1"))
    (bad.path / file).write_text(content)
    site(squeue=queue_of(said, *([replace(said, job_id="7_1")] if said.state == "COMPLETED" else [])))
    assert states_of([RunDir(bad.path), good]) == [(State.UNKNOWN, "7_1"), (state_of(said), "7_0")]


def test_a_job_of_another_cluster_is_asked_for_there(tmp_path: Path, site: Site, cluster: ClusterProfile) -> None:
    site(sbatch="Submitted batch job 7 on cluster cm2\n")
    runs = submit(small(), tmp_path / "runs", cluster).submitted
    assert [run.status.job_id for run in runs] == ["7_0", "7_1"]
    comment = str(ticket_of(runs[0]).comment)
    site(squeue=queue_of(job("RUNNING", comment=comment)), sacct="7_[0-1]|7|CANCELLED|0:0\n")
    (tmp_path / "asked").unlink()
    assert states_of(runs) == [(State.RUNNING, "7_0"), (State.CANCELLED, "7_1")]
    site(sacct="7_0|7|RUNNING|0:0\n")
    assert states_of(runs[:1]) == [(State.RUNNING, "7_0")]
    cancel(runs)
    asked = (tmp_path / "asked").read_text().splitlines()
    assert "squeue --clusters=cm2 --json --states=all" in asked
    assert any(line.startswith("sacct --clusters=cm2 -X") for line in asked)
    assert "scancel --clusters=cm2 7_0" in asked
