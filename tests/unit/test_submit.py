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
import stand_in
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import program
from run_support import make_run

from moelab.cli import main
from moelab.errors import Refused
from moelab.experiment import Experiment
from moelab.experiment_file import make_study, read_study
from moelab.launch import local, slurm
from moelab.launch import status as status_module
from moelab.launch.cluster import read_cluster
from moelab.launch.ends import only_launcher
from moelab.launch.local import StudyRun
from moelab.launch.slurm import SCRIPT_FILE, NumberUnknown, Queue, SlurmError, SlurmJob, Ticket, ticket_of
from moelab.launch.status import cancel, refresh, requeue
from moelab.launch.submit import dry_run, submit
from moelab.machine import boot_id
from moelab.planning.project import foresee
from moelab.runs.directory import RunDir, find
from moelab.runs.status import BY_CANCEL, State, Status

PUBLISHED = Path(__file__).parents[2] / "studies" / "671B_b200_x256.yaml"
CLUSTER = read_cluster("slurm_generic", ["gpus_per_node=8", "nodes=64"])
SHARED = {"hardware": "cpu", "steps": 4}
STUDY = make_study("s", SHARED, [{"precision": "bf16"}], [0, 1])
TIMED_OUT = "Slurm: TIMEOUT (TimeLimit); see train.log, or slurm-7_0.out if no rank started"
FORGOTTEN = "Slurm no longer knows job 7_0, and the job did not record its end"
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


def submitted(runs: Path, losses: int, state: State, *, attempts: int = 1, task: int = 0) -> RunDir:
    """A run with so many logged steps of four, whose job is task 0 or another of array 7."""
    run = make_run(runs, Experiment(name="s", seed=task, **SHARED), [8.0] * losses)
    Ticket(comment="moelab:s:1", task=task).write(run)
    run.set_status(Status(state=state, job_id=f"7_{task}", attempts=attempts))
    return run


def job(state: str, **fields: Any) -> SlurmJob:
    return SlurmJob(**{"job_id": "7_0", "state": state, "comment": "moelab:s:1", **fields})


def queue_of(*jobs: SlurmJob) -> str:
    """As ``squeue --json`` shows them."""
    rows = []
    for one in jobs:
        array, _, task = one.job_id.partition("_")
        ids = {"job_id": int(array), "array_job_id": int(array), "array_task_id": int(task)}
        rows.append({**ids, "job_state": one.state, "comment": one.comment})
    return json.dumps({"jobs": rows})


def refreshed(runs: Iterable[RunDir], *jobs: SlurmJob) -> list[Status]:
    """What is believed of runs where the queue holds these jobs, and no other command of Slurm answers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slurm, "queue", lambda: jobs)
        patch.setattr(slurm, "call", Mock(side_effect=SlurmError("no answer")))
        return refresh(list(runs))


def states_of(runs: Iterable[RunDir]) -> list[tuple[State, str | None]]:
    return [(status.state, status.job_id) for status in refresh(list(runs))]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([], "C4 would be streamed by 32 nodes"),
        (["pp=16", "ep=32"], "plan of bf16_standard_round-robin: "),
        (["activation_checkpoint=none"], r"plan of .*: \d+\.\d of 17\d\.\d GiB on the fullest GPU"),
    ],
)
def test_what_cannot_run_there_is_refused_before_anything_is_written(
    tmp_path: Path, site: Site, overrides: list[str], words: str
) -> None:
    with pytest.raises(Refused, match=words) as refused:
        submit(read_study(PUBLISHED, overrides), tmp_path / "runs", CLUSTER, foresee=foresee)
    lines = str(refused.value).splitlines()
    assert len(set(lines)) == len(lines)
    assert not (tmp_path / "runs").exists()
    assert not (tmp_path / "asked").exists()


def test_each_size_is_a_script_of_its_own(tmp_path: Path, site: Site) -> None:
    site(sbatch="7\n")
    study = make_study("s", SHARED, [{}, {"routing": "round_robin", "nodes": 2}], [0, 1])
    done = submit(study, tmp_path / "runs", CLUSTER)
    assert ["--nodes=2 " in script for script in done.scripts] == [False, True]
    for run in done.submitted:
        assert (run.path / SCRIPT_FILE).read_text() == done.scripts[run.experiment.nodes - 1]


def test_a_run_of_which_nobody_knows_the_end_is_not_submitted_beside(tmp_path: Path, site: Site) -> None:
    lost = make_run(tmp_path, STUDY.experiments[0], [8.0, 7.0])
    (lost.path / "status.json").write_text("{")
    for ask in (dry_run, submit):
        with pytest.raises(Refused, match=f"{lost.name}: it is unknown how it ended .* it has 2 of 4 steps"):
            ask(STUDY, tmp_path, CLUSTER)
    assert find(tmp_path) == [lost]


def test_a_killed_launchers_run_is_submitted_anew_and_what_is_left_out_is_told(tmp_path: Path, site: Site) -> None:
    site(sbatch="7\n")
    killed, bad = (make_run(tmp_path, experiment, [8.0, 7.0]) for experiment in STUDY.experiments)
    killed.set_status(Status(state=State.RUNNING, boot_id=boot_id()))
    (bad.path / "experiment.yaml").unlink()
    done = submit(STUDY, tmp_path, CLUSTER)
    assert killed.status.reason == "the launcher was killed"
    assert len({*done.submitted} - {killed, bad}) == 2
    assert done.to_json()["left_out"][0]["run"] == bad.name
    assert done.as_text().startswith(f"{bad.name}: left out: experiment.yaml")


# Here and there


@pytest.fixture
def trained_here(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], StudyRun]:
    """Trains the study on this machine, with a stand-in for torchrun."""
    for name in ("command", "stage_data", "POLL_S"):
        monkeypatch.setattr(local, name, getattr(local, name))  # put back afterwards
    stand_in.install()
    return lambda runs: local.run_study(STUDY, runs, say=lambda line: None)


@pytest.mark.parametrize("word", ["PENDING", "RUNNING", "NEW_WORD"])
def test_what_slurm_has_is_not_trained_here(
    tmp_path: Path, site: Site, trained_here: Callable[[Path], StudyRun], word: str
) -> None:
    site(sbatch="7\n")
    runs = submit(STUDY, tmp_path, CLUSTER).submitted
    comment = str(ticket_of(runs[0]).comment)
    site(squeue=queue_of(*(job(word, comment=comment, job_id=f"7_{task}") for task in (0, 1))))
    with pytest.raises(Refused) as refused:
        trained_here(tmp_path)
    state = job(word).run_state.value
    told = [f"{run.name} is {state} as job {run.status.job_id}" for run in runs]
    assert str(refused.value).splitlines() == [*told, "wait for them, or end them with `moelab cancel`"]
    assert sorted(find(tmp_path), key=lambda run: run.seed) == [*runs]
    assert [run.status.state.value for run in runs] == [state] * 2  # as `status` would have it


def test_what_slurm_has_finished_is_not_trained_again_and_what_it_lost_is(
    tmp_path: Path, site: Site, trained_here: Callable[[Path], StudyRun]
) -> None:
    done = submitted(tmp_path, 4, State.RUNNING)
    failed = submitted(tmp_path, 2, State.RUNNING, task=1)
    site(squeue=queue_of(job("COMPLETED"), job("NODE_FAIL", job_id="7_1")))
    here = trained_here(tmp_path)
    assert (done.status.state, failed.status.state) == (State.COMPLETED, State.FAILED)
    assert (here.trained, here.runs[0]) == (1, done)


def test_a_machine_without_slurm_does_not_train_what_was_last_seen_there(
    tmp_path: Path, site: Site, trained_here: Callable[[Path], StudyRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = submitted(tmp_path, 1, State.RUNNING)
    for command in ("squeue", "scontrol"):
        (tmp_path / "bin" / command).unlink()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(
        Refused, match=f"^{run.name} was running as job 7_0 when last seen, and Slurm cannot be asked: "
    ):
        trained_here(tmp_path)
    run.set_status(Status(state=State.PREPARED, reason="not submitted: sbatch is missing"))
    assert trained_here(tmp_path).trained == 2


def test_what_is_trained_here_is_not_submitted(tmp_path: Path, site: Site) -> None:
    run = make_run(tmp_path, STUDY.experiments[0], [8.0])
    run.set_status(Status(state=State.RUNNING, attempts=1, boot_id="of another machine"))
    with pytest.raises(Refused, match=f"^{run.name} is running by `moelab run`, which ends with Ctrl-C there\n"):
        submit(STUDY, tmp_path, CLUSTER)
    run.set_status(Status(state=State.RUNNING, attempts=1, boot_id=boot_id()))
    with only_launcher(tmp_path / "s"), pytest.raises(Refused, match="another process is launching study 's'"):
        submit(STUDY, tmp_path, CLUSTER)
    assert run.status.state is State.RUNNING
    assert not [line for line in (tmp_path / "asked").read_text().splitlines() if line.startswith("sbatch")]


@pytest.mark.parametrize(
    ("own", "steps", "told", "state", "reason"),
    [
        (State.SUBMITTED, 2, job("PENDING", reason="Priority"), State.SUBMITTED, "Slurm: PENDING (Priority)"),
        (State.SUBMITTED, 2, job("RUNNING"), State.RUNNING, None),
        (State.RUNNING, 2, job("CANCELLED"), State.CANCELLED, "Slurm: CANCELLED"),
        (State.RUNNING, 2, job("TIMEOUT", reason="TimeLimit"), State.FAILED, TIMED_OUT),
        (State.RUNNING, 2, job("PENDING", restarts=1), State.SUBMITTED, "Slurm: PENDING"),
        (State.UNKNOWN, 2, job("RUNNING", restarts=1), State.RUNNING, None),
        (State.UNKNOWN, 2, job("CANCELLED"), State.CANCELLED, "Slurm: CANCELLED"),
        (State.RUNNING, 2, job("NEW_WORD"), State.UNKNOWN, "Slurm: NEW_WORD"),
        (State.FAILED, 2, job("RUNNING"), State.FAILED, None),
        (State.FAILED, 2, job("COMPLETING", restarts=1), State.FAILED, None),
        (State.FAILED, 2, job("PENDING", restarts=1), State.SUBMITTED, "Slurm: PENDING"),
        (State.COMPLETED, 2, job("FAILED"), State.COMPLETED, None),
        (State.COMPLETED, 2, None, State.COMPLETED, None),
        (State.RUNNING, 2, None, State.UNKNOWN, FORGOTTEN),
        # Slurm's word for a script that ended with 0: only the log says whether all steps were trained.
        (State.RUNNING, 4, job("COMPLETED"), State.COMPLETED, None),
        (State.RUNNING, 3, job("COMPLETED"), State.FAILED, "training ended at step 3 of 4"),
        (State.RUNNING, 0, job("COMPLETED"), State.FAILED, "training ended at step 0 of 4"),
    ],
)
def test_what_the_job_wrote_and_what_slurm_says(
    tmp_path: Path, own: State, steps: int, told: SlurmJob | None, state: State, reason: str | None
) -> None:
    run = submitted(tmp_path, steps, own)
    (status,) = refreshed([run], *([told] if told else []))
    assert (status.state, status.reason) == (state, reason)
    assert replace(run.status, updated=0.0) == replace(status, updated=0.0)
    assert (run.path / "results.json").exists() == (state.is_final and state is not own)


@settings(max_examples=30)
@given(
    own=st.sampled_from(list(State)),
    word=st.none() | st.sampled_from(["X", *slurm.STATES]),
    restarts=st.integers(0, 3),
)
def test_completed_is_never_invented(
    tmp_path_factory: pytest.TempPathFactory, own: State, word: str | None, restarts: int
) -> None:
    """Two of four steps were logged: only a job that said so itself is completed."""
    run = submitted(tmp_path_factory.mktemp("run"), 2, own)
    (status,) = refreshed([run], *([job(word, restarts=restarts)] if word else []))
    if status.state is State.COMPLETED:
        assert own is State.COMPLETED
    if word in ("RUNNING", "PENDING") and not own.is_final:
        assert status.state is job(word).run_state


@pytest.mark.parametrize(
    ("accounted", "attempts", "state"),
    [
        ("7_0|7|TIMEOUT|0:0", 1, State.FAILED),
        ("7_0|7|RUNNING|0:0", 1, State.UNKNOWN),  # the controller has forgotten it, so it is gone
        ("7_[0-1]|7|CANCELLED by 54321|0:0", 0, State.CANCELLED),
        ("", 1, State.UNKNOWN),
    ],
)
def test_accounting_is_believed_about_the_ends_that_the_controller_forgot(
    tmp_path: Path, site: Site, accounted: str, attempts: int, state: State
) -> None:
    site(sacct=f"{accounted}\n")
    run = submitted(tmp_path, 1, State.RUNNING if attempts else State.SUBMITTED, attempts=attempts)
    assert states_of([run]) == [(state, "7_0")]


def test_what_slurm_says_is_told_where_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = submitted(tmp_path, 1, State.SUBMITTED)
    monkeypatch.setattr(RunDir, "set_status", Mock(side_effect=OSError(errno.EDQUOT, "Disk quota exceeded")))
    assert refreshed([run], job("RUNNING"))[0].state is State.RUNNING


def test_a_job_in_a_state_that_is_not_known_is_not_submitted_again_and_can_be_cancelled(
    tmp_path: Path, site: Site
) -> None:
    site(squeue=queue_of(job("NEW_WORD")))
    run = submitted(tmp_path, 1, State.RUNNING)
    with pytest.raises(Refused, match="is unknown as job 7_0"):
        submit(make_study("s", SHARED, [{}], [0]), tmp_path, CLUSTER)
    assert [status.state for status in cancel([run])] == [State.CANCELLED]
    assert "scancel 7_0\n" in (tmp_path / "asked").read_text()


def test_a_job_knows_that_it_is_cancelled_before_slurm_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = submitted(tmp_path, 1, State.RUNNING)
    before = run.status
    monkeypatch.setattr(slurm, "queue", lambda: [job("RUNNING")])

    def refuse(job_ids: Iterable[str]) -> None:
        assert list(job_ids) == ["7_0"]
        assert (run.status.state, run.status.reason) == (State.RUNNING, BY_CANCEL)
        raise SlurmError("scancel: error: Access/permission denied")

    monkeypatch.setattr(slurm, "cancel", refuse)
    with pytest.raises(SlurmError, match="denied"):
        cancel([run])
    assert replace(run.status, updated=before.updated) == before


def test_an_end_that_the_job_writes_meanwhile_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = submitted(tmp_path, 4, State.RUNNING)
    after = status_module._after

    def slow(run: RunDir, status: Status, job: SlurmJob | None) -> Status:
        run.set_status(replace(status, state=State.COMPLETED))
        return after(run, status, job)

    monkeypatch.setattr(status_module, "_after", slow)
    assert refreshed([run], job("FAILED"))[0].state is run.status.state is State.COMPLETED


def test_a_job_of_another_run_with_the_same_number_is_not_believed(tmp_path: Path) -> None:
    """Numbers begin again when a cluster is set up anew."""
    run = submitted(tmp_path, 1, State.RUNNING)
    assert Queue([job("RUNNING", comment="moelab:other:2")]).job_of(run) is None
    assert Queue([job("RUNNING", comment="set by the site")]).job_of(run) is not None


def test_slurm_is_not_asked_for_runs_that_are_no_jobs_and_one_that_does_not_answer_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "queue", Mock(side_effect=SlurmError("squeue: no answer in 60 s")))
    no_job = make_run(tmp_path, Experiment(name="s"), [8.0])
    assert refresh([no_job]) == [no_job.status]
    for command in (cancel, requeue):
        with pytest.raises(Refused, match="no run there"):
            command([no_job])
    run, done = submitted(tmp_path, 1, State.RUNNING), submitted(tmp_path, 1, State.FAILED)
    stale = replace(run.status, reason="as last seen; squeue: no answer in 60 s")
    assert refresh([run, done]) == [stale, done.status]
    assert run.status.reason is None


def test_a_job_whose_number_nobody_knows_is_found_by_its_comment_or_given_up(tmp_path: Path, site: Site) -> None:
    folder, unknown = tmp_path / "runs", [(State.SUBMITTED, None)] * 2
    site(sbatch="Welcome to x\n")
    with pytest.raises(NumberUnknown, match=r"'Welcome to x'.*squeue --me --name=s.*submit it again") as refused:
        submit(STUDY, folder, CLUSTER)
    assert refused.value.exit_code == 1
    runs = find(folder)
    assert states_of(runs) == unknown
    assert all("printed no job number: 'Welcome to x'" in str(run.status.reason) for run in runs)
    with pytest.raises(Refused, match=r"is submitted: its job number is unknown"):
        submit(STUDY, folder, CLUSTER)  # it may wait
    before = {run: run.status for run in runs}

    comment = str(ticket_of(runs[0]).comment)
    site(squeue=queue_of(*(job("PENDING", comment=comment, job_id=f"7_{task}") for task in (0, 1))))
    assert states_of(runs) == [(State.SUBMITTED, "7_0"), (State.SUBMITTED, "7_1")]

    for run, status in before.items():
        run.set_status(status)
    site(sbatch="8\n")
    assert {status.state for status in cancel(runs)} == {State.CANCELLED}
    assert "moelab did not find its job" in str(runs[0].status.reason)
    assert "scancel" not in (tmp_path / "asked").read_text()
    assert len(submit(STUDY, folder, CLUSTER).submitted) == 2


@pytest.mark.parametrize("number", ["------", "7; rm -rf /", "-j", "519605_[0-1]"])
def test_a_number_that_is_none_reaches_no_command_and_hides_no_other_run(
    tmp_path: Path, site: Site, number: str, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = (submitted(tmp_path, 1, State.RUNNING, task=task) for task in (0, 1))
    bad.set_status(replace(bad.status, job_id=number))
    site(squeue=queue_of(job("RUNNING")))
    assert main(["status", str(tmp_path), "--json"]) == 0
    rows = {row["run"]: row for row in json.loads(capsys.readouterr().out)["runs"]}
    assert (rows[good.name]["status"], rows[good.name]["job_id"]) == ("running", "7_0")
    assert rows[bad.name]["status"] == "unknown"
    assert main(["cancel", str(tmp_path)]) == 0
    asked = (tmp_path / "asked").read_text()
    assert "scancel 7_0\n" in asked
    assert f" {number}" not in asked


@pytest.mark.parametrize(
    ("file", "content", "word"),
    [
        ("launch/submission.json", "{", "RUNNING"),
        ("launch/submission.json", '{"comment": "moelab:s:1", "task": "x"}', "RUNNING"),
        ("experiment.yaml", "model: [", "COMPLETED"),
    ],
)
def test_a_damaged_record_hides_no_other_run(tmp_path: Path, file: str, content: str, word: str) -> None:
    good, bad = (submitted(tmp_path, 4, State.RUNNING, task=task) for task in (0, 1))
    (bad.path / file).write_text(content)
    jobs = [job(word), *([job(word, job_id="7_1")] if word == "COMPLETED" else [])]
    seen = refreshed([RunDir(bad.path), good], *jobs)
    assert [(status.state, status.job_id) for status in seen] == [
        (State.UNKNOWN, "7_1"),
        (job(word).run_state, "7_0"),
    ]
