"""Whatever is shown of a log, a reason or a name on disk has no secret in it, and no sign that acts on its reader."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from run_support import COMMAND, curve, make_run
from secret_shapes import PEM, some
from stand_in import titan_line

from moelab import door
from moelab.errors import BadInput
from moelab.experiment import Experiment
from moelab.judge.report import judge_paths
from moelab.launch.progress import say_on_stderr
from moelab.launch.status import follow
from moelab.runs.collect import collect
from moelab.runs.directory import RunDir, discover, find
from moelab.runs.follow import StudyFollower
from moelab.runs.status import State, Status
from moelab.viz.live import LiveView, dashboard
from moelab.viz.report import write_study_report

TOKEN, KEY = "hf_" + some(34), some(40)
SIGNS = "\x1b[2J\x1b]0;title\x07\x9b31m\u202eevil\u2066\u200b\x00\b".replace("\x00", "\x01")  # a name has no zero
LINES = [
    f"downloading with HF_TOKEN={TOKEN}",
    f"GET /api?next=%2Fx%3Fhf_token%3D{TOKEN}",
    f"{{'Authorization': 'ApiKey {KEY}'}}",
    "x" * 1100 + f" {TOKEN}",
    f"{'.' * 5000}\r 90% {TOKEN} {'#' * 5000}",
    "-----BEGIN PRIVATE KEY-----",
    *PEM,
    "-----END PRIVATE KEY-----",
    f"{SIGNS}: ValueError",
]
SECRETS = (TOKEN, KEY, *PEM)
STUDY = f"s {SIGNS}\nfake: completed HF_TOKEN={TOKEN}"


def harmful(text: str) -> list[str]:
    """Secrets in a text, and signs in it that cannot be seen, beside line ends and tabs."""
    unseen = {sign for sign in text if unicodedata.category(sign) in ("Cc", "Cf", "Cs", "Zl", "Zp")}
    return [*(secret for secret in SECRETS if secret[:16] in text), *map(ascii, unseen - {"\n", "\t"})]


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """A study in a folder that somebody renamed, with a run that trains and one that failed."""
    folder = tmp_path / "runs" / STUDY
    for seed, state in enumerate((State.RUNNING, State.FAILED, State.COMPLETED)):
        experiment = Experiment(name="s", seed=seed, steps=20)
        run = make_run(tmp_path / "runs", experiment, curve(5.0), state=state)
        with run.log.open("a") as log:
            log.writelines(titan_line(30, line) for line in LINES)
        if state is State.FAILED:
            run.set_status(Status(state=state, reason="\n".join(LINES)))
            status = run.path / "status.json"  # by a hand, or by another version of moelab
            status.write_text(json.dumps(json.loads(status.read_text()) | {"reason": "\n".join(LINES)}))
    (tmp_path / "runs" / "s").rename(folder)
    damaged = next(find(folder)[2].path.parent.iterdir()) / "experiment.yaml"
    damaged.write_text(f"name: '{TOKEN}'\n")
    return folder


def test_the_names_of_a_run_stay_on_their_line(study: Path) -> None:
    for run in find(study):
        assert not harmful(run.name)
        assert "\n" not in run.name + run.arm
        assert run.path == study.joinpath(*run.path.parts[-3:])  # and the run is found where it is


@pytest.mark.parametrize("verb", ["status", "collect", "report", "cancel", "explain"])
@pytest.mark.parametrize("options", [(), ("--json",)])
def test_no_command_shows_them(call: Any, study: Path, verb: str, options: tuple[str, ...]) -> None:
    shown = call(verb, study, *options)
    assert shown.out + shown.err
    assert not harmful(shown.out + shown.err)
    if shown.out and options:
        assert not harmful(json.dumps(shown.json, ensure_ascii=False))
    assert not any(line.startswith("fake") for line in shown.out.splitlines())


def test_no_bad_input_shows_them(call: Any, study: Path) -> None:
    for arguments in (("plan", study / "x.yaml"), ("status", study, f"{STUDY}2"), ("run", study / "x.yaml")):
        shown = call(*arguments)
        assert shown.code == 2
        assert not harmful(shown.out + shown.err)
    assert not harmful(str(BadInput(STUDY)))


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_view_of_a_terminal_does_not_show_them(
    study: Path, is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "2000")
    out = StringIO()
    out.isatty = lambda: is_terminal  # type: ignore[method-assign]
    looks = iter(range(2))

    def sleep(_seconds: float) -> None:
        if next(looks, None) is None:
            raise KeyboardInterrupt

    def ask(runs: Any) -> list[Status]:
        return [Status(state=State.RUNNING, reason=f"as last seen; {SIGNS} {TOKEN}") for _ in runs]

    with pytest.raises(KeyboardInterrupt):
        follow(study, out, ask=ask, sleep=sleep)
    shown = out.getvalue()
    assert "ValueError" in shown or not is_terminal
    assert not harmful(shown.replace("\x1b[H\x1b[J", ""))
    assert not any(line.startswith("fake") for line in shown.splitlines())


def texts(value: Any) -> Iterator[str]:
    """Every text in a structure."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from (text for each in value.items() for one in each for text in texts(one))
    elif isinstance(value, list | tuple):
        yield from (text for one in value for text in texts(one))


def test_the_live_view_of_a_notebook_does_not_show_them(study: Path) -> None:
    def ask(runs: list[RunDir]) -> list[Status]:
        raise BadInput(f"no answer: {SIGNS} {TOKEN}")

    view = LiveView(study, ask=lambda runs: [run.status for run in runs], cancel=lambda _: None)
    view.stop()
    states = [view.panel.get_state()]
    for name in view.shown.options:
        view.shown.value = name
        view._ask_to_cancel(None)
        assert "last log lines" in view.tail.value
        states += [one.get_state() for one in (view.tail, view.shown, view.question, view.message)]
    with pytest.raises(BadInput) as error:
        ask([])
    view._say(f"not up to date: {error.value} {SIGNS} {TOKEN}")
    states.append(view.message.get_state())
    follower = StudyFollower(study)
    follower.poll()
    figures = [figure.to_plotly_json() for figure in dashboard(follower).values()]
    for text in texts([states, figures, view._repr_mimebundle_()]):
        assert text == "\u200b" or not harmful(text)  # ipywidgets' own, in an empty label


def test_what_a_notebook_and_a_page_show_of_an_answer_does_not_show_them(study: Path, tmp_path: Path) -> None:
    for answer in (door.status(study), door.collect(study)):
        html = answer._repr_html_()
        assert "***" in html
        assert not harmful(html)
        assert not harmful(repr(answer))
    log = tmp_path / "a.log"
    log.write_text(titan_line(1, "step: 1  loss: 8.0  memory: 1GiB(1%)  tps: 1"))
    hostile = replace(judge_paths([log]), study=STUDY, origin="\n".join(LINES), paths=(Path(COMMAND + STUDY),))
    for with_paths in (True, False):
        page = write_study_report(hostile, tmp_path / "r.html", with_paths=with_paths)
        assert not harmful(page.read_text())


def test_progress_does_not_show_them(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = discover(study).lines
    assert any("left out" in line for line in lines)
    for line in lines:  # as `run` says them, in a terminal or a notebook
        assert not harmful(line)
    for line in [STUDY, "\n".join(LINES)]:
        say_on_stderr(line)
    assert not harmful("".join(capsys.readouterr()))


def test_a_log_from_elsewhere_is_called_what_can_be_seen(tmp_path: Path) -> None:
    log = tmp_path / f"{STUDY}.log"
    log.write_text("".join(titan_line(step, f"step: {step}  loss: 8.0  memory: 1GiB(1%)  tps: 1") for step in (1, 2)))
    (run,) = collect(log)
    assert not harmful(run.summary + "".join(run.rows["run"]))
    assert "\n" not in run.run
