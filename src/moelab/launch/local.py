"""Train on this machine what a study still lacks, one experiment after the other.

A finished study is left as it is; an interrupted one continues with what is missing. Only one launcher at a time works
on a study, so a run that says ``running`` while no launcher holds the study was left behind by one that was killed.

The launcher holds nothing that a kill could lose: ranks append to ``metrics.jsonl``, and the status file is replaced
whole. torchrun ends when the launcher dies, and ranks die with torchrun once they have
loaded enough to ask for it; whatever survives is killed before the next run trains.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Literal

import yaml

from moelab.errors import Refused
from moelab.experiment import Experiment
from moelab.experiment_file import Study
from moelab.files import write_json, write_whole
from moelab.launch.capability import differs_here, refusals_of
from moelab.launch.ends import close, close_orphans, ended, only_launcher
from moelab.launch.progress import Row, Say, progress_of, say_on_stderr
from moelab.launch.status import require_no_jobs
from moelab.launch.torchrun import Command, Process, command
from moelab.machine import boot_id, environment
from moelab.model import TOKENIZERS, shape_for
from moelab.runs import directory
from moelab.runs.collect import Collected, collect_run
from moelab.runs.directory import Discovery, RunDir
from moelab.runs.metrics import FILE as METRICS_FILE
from moelab.runs.metrics import MetricsTail
from moelab.runs.status import FILE as STATUS_FILE
from moelab.runs.status import State, Status

POLL_S = 0.5
LINE_INTERVAL_S = 5.0
MIN_FREE_BYTES = 16 << 20  # the last lines of the log, the status and the metrics still fit
C4 = "allenai/c4"
OnFailure = Literal["continue", "stop"]


@dataclass(frozen=True, kw_only=True)
class StudyRun:
    """What came of a study."""

    runs: tuple[RunDir, ...]  # the latest run of each experiment that has one, in the study's order
    trained: int  # how many were trained now; the others were finished before
    discovered: Discovery  # runs that were there before

    @property
    def failed(self) -> tuple[RunDir, ...]:
        """Runs that did not complete."""
        return tuple(run for run in self.runs if run.status.state is not State.COMPLETED)


def run_study(study: Study, runs: Path, *, on_failure: OnFailure = "continue", say: Say | None = None) -> StudyRun:
    """Train what a study still lacks, on this machine and in the study's order.

    Lines of progress go to ``say``; without it, a terminal and a notebook have bars, and a file has lines.

    Raises:
        Refused: before anything is started, if this machine cannot run one of the experiments, another process or
            Slurm is already working on the study, or it is unknown how one of its runs ended.
    """
    runs = runs.absolute()  # ranks and notebooks may have other working folders
    # Checked before anything is written: a machine that cannot run one arm trains none of the study.
    if reasons := refusals_of(study):
        raise Refused("\n".join(reasons))
    with only_launcher(runs / study.name):
        here = directory.discover(runs / study.name)
        told = say or say_on_stderr
        for line in (*differs_here(study), *here.lines):
            told(line)
        attempts = [here.attempts(experiment) for experiment in study.experiments]
        require_no_jobs([run for tried in attempts if not completed(tried) for run in tried])
        require_known_ends(attempts)
        if killed := close_orphans(here.all_runs):
            told(f"ended {killed} processes that a killed launcher left behind")
        run_of = {index: run for index, tried in enumerate(attempts) if (run := completed(tried))}
        before = len(run_of)
        with progress_of(study, run_of, say) as progress:
            for index, experiment in enumerate(study.experiments):
                if index in run_of:
                    continue
                progress.start(index)
                run_of[index] = _run_experiment(runs, experiment, on_row=progress.row)
                status = run_of[index].status
                progress.end(status.in_words())
                if status.state is not State.COMPLETED and on_failure == "stop":
                    break
        return StudyRun(
            runs=tuple(run_of[index] for index in sorted(run_of)), trained=len(run_of) - before, discovered=here
        )


def completed(attempts: Sequence[RunDir]) -> RunDir | None:
    """The last of the attempts at an experiment that completed."""
    return next((run for run in reversed(attempts) if run.status.state is State.COMPLETED), None)


def require_known_ends(attempts: Iterable[Sequence[RunDir]]) -> None:
    """Make sure that nothing trains again that may have completed, or may still be training.

    Raises:
        Refused: if none of an experiment's runs completed and one has no readable status.
    """
    lost = [run for tried in attempts if not completed(tried) for run in tried if run.status.is_lost]
    if lost:
        raise Refused(
            "\n".join(
                f"{run.name}: it is unknown how it ended ({run.status.reason}); it has {collect_run(run).last_step} "
                f"of {run.experiment.steps} steps"
                for run in lost
            )
            + f'\nto train it again, move its folder out of the study; to keep it, write {{"state": "completed"}} '
            f"into its {STATUS_FILE}"
        )


def _run_experiment(runs: Path, experiment: Experiment, *, on_row: Callable[[Row], None]) -> RunDir:
    """Train one experiment to its end and collect what it left; ``on_row`` gets the newest metric row meanwhile.

    Raises:
        Refused: before anything is started, if there is no room for its logs, or its data cannot be had.
        KeyboardInterrupt: after the ranks were stopped and the status written.
    """
    if problem := no_space(runs):
        raise Refused(problem)
    # Before the run directory is made, so that missing data leaves no failed run behind.
    stage_data(experiment)
    run, left = directory.create(runs, experiment), None
    try:
        write_json(run.path / "environment.json", environment(nodes=experiment.nodes))
        launched = command(experiment, run.path)
        write_whole(run.path / "launch" / "command.sh", f"{launched.as_shell()}\n")
        status, left = _train(run, launched, on_row)
    except OSError as error:
        status = replace(run.status, state=State.FAILED, reason=f"the launcher failed: {error}")
    # SIGTERM arrives as one of these; leaving the block that started the ranks has already ended them.
    except (KeyboardInterrupt, SystemExit):
        close(run, replace(run.status, state=State.CANCELLED, reason="interrupted by the user"))
        raise
    except Exception as error:
        close(run, replace(run.status, state=State.FAILED, reason=f"the launcher failed: {error!r}"))
        raise
    close(run, status, left)
    return run


def _train(run: RunDir, launched: Command, on_row: Callable[[Row], None]) -> tuple[Status, Collected | None]:
    # With the boot, a later process here can tell that this launcher is dead (`close_killed`).
    status = Status(state=State.RUNNING, attempts=1, boot_id=boot_id())
    run.set_status(status)
    follower = MetricsTail(run.path / METRICS_FILE)

    def report() -> None:
        steps = [record for record in follower.poll() if record.get("tps")]  # not one that failed, or held-out text
        if steps:
            on_row(steps[-1])

    with run.log.open("ab") as log, Process(launched, log) as process:
        while process.poll() is None:
            with suppress(TimeoutExpired):
                process.wait(POLL_S)
            report()
            if problem := no_space(run.path):  # ranks would train on, and their logs be lost
                return replace(status, state=State.FAILED, reason=problem), None
    report()  # what was logged since the last look
    return ended(run, replace(status, exit_code=process.returncode), run.log.parent)


def no_space(folder: Path) -> str | None:
    """The message if there is too little space for a run's logs, else None."""
    free = shutil.disk_usage(folder).free
    if free >= MIN_FREE_BYTES:
        return None
    return (
        f"no disk space: the file system of the runs has {free / 2**20:.1f} MiB free, and {MIN_FREE_BYTES >> 20} MiB "
        "are needed; free some, or choose another folder with --runs"
    )


def stage_data(experiment: Experiment, *, dataset: Path | None = None, tokenizer: Path | None = None) -> None:
    """Make the experiment's data ready on this machine.

    Args:
        experiment: what will run.
        dataset: local copy of C4, instead of streaming from the hub.
        tokenizer: folder of the model's tokenizer, instead of where TorchTitan's script puts it.

    Raises:
        Refused: if C4, or the tokenizer that it needs, cannot be had, or a folder of text is none.
        CorpusError: if the default corpus cannot be made.
    """
    from moelab.titan import corpus

    if experiment.dataset == "c4":
        if dataset is None:
            _require_c4()
        elif not dataset.is_dir():
            raise Refused(f"the cluster profile has dataset c4 in {dataset}, which is not a folder on this machine")
        folder = str(tokenizer) if tokenizer else TOKENIZERS.get(experiment.model)
        if folder and not Path(folder, "tokenizer.json").exists():
            raise Refused(
                f"dataset c4 with model {experiment.model} needs a tokenizer in {folder}; fetch it with TorchTitan's "
                "scripts/download_hf_assets.py, or use dataset=python"
            )
        if folder:
            return
    corpus.folder_of(experiment.dataset, shape_for(experiment).vocab_size)


def _require_c4() -> None:
    from httpx import HTTPError  # what huggingface_hub 1.x lets through where there is no network
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        HfApi().dataset_info(C4, timeout=10)
    except (HTTPError, HfHubHTTPError, OfflineModeIsEnabled, OSError, ValueError) as error:
        raise Refused(
            f"dataset c4 cannot be reached from here ({type(error).__name__}): it is streamed from {C4} on the "
            "Hugging Face hub. Check the network, HF_ENDPOINT and HF_HUB_OFFLINE, or use dataset=python, which needs "
            "no download"
        ) from error


def start_in_background(study: Study, runs: Path) -> subprocess.Popen[bytes] | None:
    """Start ``moelab run`` for what a study still lacks, and return as soon as a run has begun.

    Returns:
        The launcher; its ``terminate()`` cancels the run. None if the study is finished or already being trained, as
        after a restart of the kernel.

    Raises:
        Refused: if the launcher did not start a run, with its message.
    """
    folder = runs.absolute() / study.name
    try:
        with only_launcher(folder):
            before = {run.path for run in directory.find(folder)}
    except Refused:
        return None
    file, log = folder / "study.yaml", folder / "launcher.log"
    rows = [experiment.model_dump(mode="json") for experiment in study.experiments]
    # The study with a notebook's values in it, which the file that it came from does not have.
    write_whole(file, yaml.safe_dump(rows, sort_keys=False))
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "moelab", "run", str(file), "--runs", str(runs.absolute())],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # training goes on when the notebook's kernel ends
        )
    while process.poll() is None:
        if {run.path for run in directory.find(folder) if run.status.attempts} - before:  # 0 attempts: not begun
            return process
        time.sleep(0.2)
    if process.returncode:
        raise Refused(f"no run was started: {log.read_text(errors='replace').strip() or f'see {log}'}")
    return None
