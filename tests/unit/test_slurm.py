"""What Slurm says of jobs: recorded answers of two versions, and laws of their parsers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import program

from moelab.launch import slurm
from moelab.launch.slurm import SlurmError, parse_sacct, parse_scontrol, parse_squeue
from moelab.runs.status import State

DATA = Path(__file__).parents[1] / "data" / "slurm"
# The session that was recorded: an array of nine on two nodes, of which task 0 exited with 3, task 1 with 0, task 2
# killed itself, task 3 was requeued, task 4 runs, task 5 was cancelled while it waited, the rest waits; and job 6.
EXPECTED = {
    "1_0": ("FAILED", 3, 0),
    "1_1": ("COMPLETED", 0, 0),
    "1_2": ("FAILED", -9, 0),
    "1_3": ("PENDING", 0, 1),
    "1_4": ("RUNNING", 0, 0),
    "1_6": ("PENDING", 0, 0),
    "1_7": ("PENDING", 0, 0),
    "1_8": ("PENDING", 0, 0),
    "6": ("PENDING", 0, 0),
}


NOISE = "Welcome, 3 new messages {today}\n\x1b[31mplugin_load: auth/slurm\x1b[0m\n\n"


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose programs come before all others."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def recorded(name: str) -> str:
    return (DATA / name).read_text()


def shown(jobs: Iterable[slurm.SlurmJob]) -> dict[str, Any]:
    return {job.job_id: (job.state, job.exit_code, job.restarts) for job in jobs}


@pytest.mark.parametrize("before", ["", NOISE], ids=["alone", "among what plugins and wrappers print"])
@pytest.mark.parametrize("version", ["22.05.8", "24.11.5"])
def test_recorded_answers(version: str, before: str) -> None:
    jobs = list(parse_squeue(f"{before}{recorded(f'squeue_{version}.json')}slurm_load_jobs: done\n"))
    assert shown(jobs) == shown(parse_scontrol(before + recorded(f"scontrol_{version}.txt"))) == EXPECTED
    assert {job.comment for job in jobs if job.job_id != "6"} == {"moelab:study:0a1b2c"}
    waits = {job.job_id: job.reason for job in jobs}
    assert (waits["1_3"], waits["1_6"], waits["1_4"]) == ("BeginTime", "Resources", None)


ERRORS = '{"errors": [{"description": "Failed while looking for jobs", "error": "Unspecified error"}], "jobs": []}'


@pytest.mark.parametrize(
    "text", [ERRORS, "", "[]", "{}", "null", '{"jobs": [{}]}', '{"jobs": [7, {"a": 1}]}', '{"jobs": 3}']
)
def test_what_is_no_answer_of_squeue_is_an_error_although_the_exit_code_is_0(text: str) -> None:
    with pytest.raises(SlurmError, match="squeue: Failed while looking for jobs" if text == ERRORS else "not what"):
        list(parse_squeue(text))


@pytest.mark.parametrize(
    ("words", "state"),
    [
        (["CANCELLED", "COMPLETING"], State.RUNNING),
        (["PENDING", "REQUEUED"], State.SUBMITTED),
        (["COMPLETED", "SPECIAL_EXIT"], State.SUBMITTED),
        (["RUNNING", "POWER_UP_NODE"], State.RUNNING),
        (["FAILED", "JOB_WAS_RUNNING"], State.FAILED),
        ("NODE_FAIL", State.FAILED),  # of 22.05
        (["COMPLETED"], State.COMPLETED),
        (["SOMETHING_NEW"], State.UNKNOWN),
        ([], State.UNKNOWN),
    ],
)
def test_several_words_are_what_happens_now(words: list[str] | str, state: State) -> None:
    (job,) = parse_squeue(json.dumps({"jobs": [{"job_id": 1, "job_state": words}]}))
    assert job.run_state is state


@given(code=st.integers(0, 255), signal=st.integers(0, 31))
def test_the_end_of_a_script_is_read_alike_in_all_forms(code: int, signal: int) -> None:
    code = 0 if signal else code
    number = {"set": True, "infinite": False, "number": code}
    forms: list[Any] = [
        code << 8 | signal,
        {"set": True, "infinite": False, "number": code << 8 | signal},
        {"return_code": number, "signal": {"id": {"set": bool(signal), "infinite": False, "number": signal}}},
        {"return_code": code, "signal": {"signal_id": signal, "name": "X"}} if signal else {"return_code": code},
    ]
    rows = [{"job_id": one, "job_state": "FAILED", "exit_code": form} for one, form in enumerate(forms, start=1)]
    (from_sacct,) = parse_sacct(f"1|7|FAILED|{code}:{signal}")
    found = [job.exit_code for job in parse_squeue(json.dumps({"jobs": rows}))]
    assert found == [from_sacct.exit_code] * 4 == [-signal if signal else code] * 4


@given(st.lists(st.integers(0, 40), min_size=1, unique=True), st.integers(1, 9))
def test_a_waiting_array_gives_each_of_its_tasks(tasks: list[int], at_once: int) -> None:
    string = ",".join(map(str, sorted(tasks))) + f"%{at_once}"
    job = {"job_id": 9, "array_job_id": 9, "array_task_id": None, "array_task_string": string, "job_state": "PENDING"}
    found = list(parse_squeue(json.dumps({"jobs": [job]})))
    assert [one.job_id for one in found] == [f"9_{task}" for task in sorted(tasks)]
    same = parse_scontrol(f"JobId=9 ArrayJobId=9 ArrayTaskId={string} JobState=PENDING")
    assert [one.job_id for one in same] == [one.job_id for one in found]


def test_a_comment_cannot_pretend_another_state() -> None:
    line = "JobId=5 JobName=x JobState=FAILED ExitCode=1:0 Comment=moelab JobState=COMPLETED ExitCode=0:0 Restarts=7 "
    (job,) = parse_scontrol(line)
    assert (job.state, job.exit_code) == ("FAILED", 1)
    assert list(parse_scontrol("No jobs in the system")) == []


def test_a_job_or_a_field_that_cannot_be_read_hides_no_other_job() -> None:
    good = {"job_id": 2, "job_state": "RUNNING", "restart_cnt": 1}
    code = {"return_code": "x", "signal": 4}
    odd = {"job_id": 3, "restart_cnt": "?", "exit_code": code, "state_reason": "a\nb\x1b"}
    rows = [None, {}, {"job_id": "x"}, {"job_id": -1}, good, odd, {"job_id": {"set": False}, "job_state": []}]
    two, three = parse_squeue(json.dumps({"jobs": rows}))
    assert (two.job_id, two.state, two.restarts) == ("2", "RUNNING", 1)
    assert (three.state, three.reason, three.exit_code, three.restarts) == ("UNKNOWN", "a b", None, 0)
    lines = "JobId=?? JobState=FAILED\nJobId=7 JobState=FAILED Restarts=many ExitCode=x\n"
    assert [(job.job_id, job.restarts, job.exit_code) for job in parse_scontrol(lines)] == [("7", 0, None)]


@pytest.mark.parametrize(
    ("table", "states"),
    [
        ("12_3|15|CANCELLED by 1000|0:15\n12_4|16|COMPLETED|0:0\n", {"12_3": "CANCELLED", "12_4": "COMPLETED"}),
        ("519605_[0-1]|519605|CANCELLED by 54321|0:0\n", {"519605_0": "CANCELLED", "519605_1": "CANCELLED"}),
        ("9_[0-1%4]|9|CANCELLED|0:0\n", {"9_0": "CANCELLED", "9_1": "CANCELLED"}),
        ("9_[0,3-4]|9|CANCELLED|0:0\n", {"9_0": "CANCELLED", "9_3": "CANCELLED", "9_4": "CANCELLED"}),
        ("9_[0-4:2]|9|CANCELLED|0:0\n", {"9_0": "CANCELLED", "9_2": "CANCELLED", "9_4": "CANCELLED"}),
        ("9_0|10|FAILED|1:0\n9_[0-1]|9|CANCELLED|0:0\n", {"9_0": "FAILED", "9_1": "CANCELLED"}),  # one did start
        ("9_0|10|NODE_FAIL|0:0\n9_0|10|COMPLETED|0:0\n", {"9_0": "COMPLETED"}),  # requeued, with duplicates
        ("9_0|10|TIMEOUT|0:0\n9_0.batch|10.batch|CANCELLED|0:15\n9_0.extern|x|COMPLETED|0:0\n", {"9_0": "TIMEOUT"}),
        ("9+0|9|FAILED|1:0\n9+1|10|FAILED|1:0\n10|10|FAILED|1:0\n", {"10": "FAILED"}),  # of one with components
        ("9|9|FAILED|1:0|\n", {"9": "FAILED"}),
        ("9|9|FAILED||\n", {"9": "FAILED"}),
        ("JobID|JobIDRaw|State|ExitCode\nsacct: a warning | of 9|9|x|1:0\n8|8|FAILED|1:0\r\n", {"8": "FAILED"}),
        ("job|9|9|FAILED|1:0\n|||\n9|9||1:0\n", {"9": "UNKNOWN"}),
        ("", {}),
    ],
)
def test_accounting(table: str, states: dict[str, str]) -> None:
    """The second as in a public audit of accounting: an array that was cancelled while it waited is one row."""
    assert {job.job_id: job.state for job in parse_sacct(table)} == states


def test_an_array_is_asked_for_as_a_whole_by_number_and_only_its_ends_are_believed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call = Mock(return_value="7_[0-1]|7|CANCELLED|0:0\n7_2|9|RUNNING|0:0\n")
    monkeypatch.setattr(slurm, "call", call)
    assert set(slurm.ended(["7_1", "7_0", "Welcome to x", "8;rm", "-j"])) == {"7_0", "7_1"}
    assert call.call_args.args[-2:] == ("-j", "7")
    assert slurm.ended(["Welcome", "?"]) == {}
    assert call.call_count == 1
    monkeypatch.setattr(slurm, "call", Mock(side_effect=SlurmError("sacct: Slurm accounting storage is disabled")))
    assert slurm.ended(["7_1"]) == {}


def test_a_slurm_without_json_is_asked_by_scontrol_and_no_other_failure_is_hidden(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call = Mock(side_effect=[SlurmError("squeue: unrecognized option '--json'"), recorded("scontrol_22.05.8.txt")])
    monkeypatch.setattr(slurm, "call", call)
    assert shown(slurm.queue()) == EXPECTED
    assert call.call_args.args == ("scontrol", "show", "job", "-o")
    monkeypatch.setattr(slurm, "call", Mock(side_effect=SlurmError("squeue: Unable to contact slurm controller")))
    with pytest.raises(SlurmError, match="Unable to contact"):
        slurm.queue()


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo 'squeue: error: first' >&2; echo 'squeue: fatal: second' >&2; exit 1", r"^squeue: first; second$"),
        ("echo 'squeue: fatal: Could not establish a configuration source' >&2; exit 1", "use a login node"),
        ("exit 3", "^squeue: exit code 3$"),
        ("echo 'sbatch: error: retrying' >&2; exec sleep 30", "^squeue: no answer in 1 s: retrying$"),
    ],
)
def test_a_command_that_fails_is_told_in_its_own_words(path: Path, script: str, words: str) -> None:
    program(path, "squeue", script)
    with pytest.raises(SlurmError, match=words):
        slurm.call("squeue", timeout_s=1)


def test_a_person_s_defaults_do_not_reach_slurm_s_commands(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SBATCH_PARTITION", "SQUEUE_STATES", "SLURM_RESTART_COUNT", "SCANCEL_INTERACTIVE", "SLURM_CONF"):
        monkeypatch.setenv(name, "x")
    program(path, "squeue", "env | grep -E '^(SLURM|SBATCH|SQUEUE|SCANCEL)_' | sort")
    assert slurm.call("squeue") == "SLURM_BITSTR_LEN=0\nSLURM_CONF=x\n"  # 0: a long array's tasks are not cut off
    monkeypatch.setenv("PATH", str(path))
    with pytest.raises(slurm.SlurmMissing, match="scontrol is not on PATH"):
        slurm.call("scontrol")


TACC = """
    -----------------------------------------------------------------
              Welcome to the Stampede3 Supercomputer
    -----------------------------------------------------------------

    No reservation for this job
    --> Verifying valid submit host (login4)...OK
    --> Checking available allocation (TG-X)...OK
    519605
"""


@pytest.mark.parametrize(
    ("output", "errors", "job"),
    [
        ("519605\n", "", "519605"),
        ("519605;x\n", "", "519605"),
        (TACC, "", "519605"),
        ("519605\n*** you have used 80 % of 2000 hours ***\n", "", "519605"),
        ("Submitted batch job 519605\n", "", "519605"),
        ("2026\nSubmitted batch job 519605 on cluster cm2_tiny\n", "", "519605"),
        ("\x1b[32mSubmitted batch job 519605\x1b[0m\r\n", "", "519605"),
        ("", "sbatch: Submitted batch job 519605\n", "519605"),
        ("sbatch: lua: using default account 77\n519605\r\n", "sbatch: 4 nodes\n", "519605"),
        ("519605\n519605\n", "", "519605"),
        ("2026\n519605\n", "", None),
        ("Submitted batch job 1\nSubmitted batch job 2\n3\n", "", None),
        ("Welcome to x\n", "", None),
        ("", "", None),
        ("0\n", "", None),
        ("519605_1\n", "", None),
        ("Submitted batch job soon\n", "", None),
        ("99999999999999999999\n", "", None),
    ],
)
def test_the_number_is_found_in_what_sbatch_prints_or_nothing_is_believed(
    path: Path, output: str, errors: str, job: str | None
) -> None:
    """The third is what TACC's prints (maestrowf, issue 441)."""
    (path / "out").write_text(output)
    (path / "err").write_text(errors)
    program(path, "sbatch", f"cat {path}/out; cat {path}/err >&2")
    if job:
        assert slurm.sbatch(path / "script") == job
    else:
        with pytest.raises(slurm.NumberUnknown, match="printed no job number") as told:
            slurm.sbatch(path / "script")
        assert all(word in str(told.value) for word in output.split())


@given(output=st.text(), errors=st.text())
def test_whatever_is_printed_a_number_is_a_number(output: str, errors: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slurm, "_printed", lambda *_: (output, errors))
        with contextlib.suppress(slurm.NumberUnknown):
            number = slurm.sbatch(Path("script"))
            assert slurm.checked(number) == number
            assert number in output + errors


@given(st.text(alphabet="0129_[]-,%|:+ by\nCANELDFI", max_size=60))
def test_whatever_accounting_prints_is_jobs_or_nothing(table: str) -> None:
    assert all(slurm.checked(job.job_id) for job in parse_sacct(table))
