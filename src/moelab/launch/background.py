"""Train a study on this machine beside what one is doing: ``moelab run`` as a process of its own.

It is nobody's child in spirit: the notebook's kernel may restart or end, and training goes on; what is known of it
stands in the run directories.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import yaml

from moelab.errors import Refused
from moelab.experiment_file import Study
from moelab.launch.study import only_launcher
from moelab.runs import directory
from moelab.runs.files import write_whole

_LOOK_S = 0.2


def start_in_background(study: Study, runs: Path) -> subprocess.Popen[bytes] | None:
    """Start what is missing of a study, and return as soon as a run of it has begun.

    Args:
        study: its experiments run one after the other.
        runs: the folder that holds all studies.

    Returns:
        The launcher, which ``terminate()`` stops with its run cancelled; None if the study is being trained already,
        as after a restart of the kernel, or is finished.

    Raises:
        Refused: if the launcher did not start a run, with its words.
    """
    folder = runs.absolute() / study.name
    try:
        with only_launcher(runs, study):
            before = {run.path for run in directory.find(folder)}
    except Refused:
        return None
    file, log = folder / "study.yaml", folder / "launcher.log"
    rows = [experiment.model_dump(mode="json") for experiment in study.experiments]
    write_whole(file, yaml.safe_dump(rows, sort_keys=False))
    with log.open("wb") as output:
        command = [sys.executable, "-m", "moelab", "run", str(file), "--runs", str(runs.absolute())]
        options = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, start_new_session=True, **options)  # type: ignore[call-overload]
    while process.poll() is None:
        if {run.path for run in directory.find(folder) if run.status.attempts} - before:
            return process  # type: ignore[no-any-return]
        time.sleep(_LOOK_S)
    if process.returncode:
        raise Refused(f"no run was started: {log.read_text(errors='replace').strip() or f'see {log}'}")
    return None
