"""One node of a job: its torchrun, and how its ranks are asked to stop."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from moelab.experiment import Experiment
from moelab.launch.place import TERMINATED, Place, Signals
from moelab.launch.staging import stage_data
from moelab.launch.torchrun import NODE_VARIABLE, Command, Process, command
from moelab.runs.directory import STOP_VARIABLE, RunDir

POLL_S = 0.2
COLLECTIVE_TIMEOUT_S = 1800  # ranks wait for the slowest one's part of a checkpoint


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start of a run, on this node.

    Attributes:
        run: its directory.
        place: of this node in the job.
        options: of the command line.
        signals: that came.
    """

    run: RunDir
    place: Place
    options: argparse.Namespace
    signals: Signals

    @property
    def logs(self) -> Path:
        """Folder of the ranks' own logs, of all nodes."""
        return self.run.log.parent / self.place.start

    @property
    def stop_file(self) -> Path:
        """What asks the ranks of this node to save and stop."""
        return Path(tempfile.gettempdir(), f"moelab-stop-{self.place.start}-{self.place.node}")

    def command(self, experiment: Experiment) -> Command:
        """Torchrun for this node's ranks."""
        launched = command(
            experiment,
            self.run.path,
            rendezvous=self.place.rendezvous(self.options.host, self.port),
            logs=f"{self.logs.relative_to(self.run.path)}/node{self.place.node}",
            titan=self._titan(experiment),
        )
        own = {NODE_VARIABLE: f"{self.place.start}-{self.place.node}", STOP_VARIABLE: str(self.stop_file)}
        return replace(launched, variables={**launched.variables, **own})

    @property
    def port(self) -> int:
        """Where the ranks meet on the first node."""
        first, last = self.options.ports
        return self.place.port(first, last)

    def _titan(self, experiment: Experiment) -> list[str]:
        """What TorchTitan is told beyond the experiment: checkpoints, and where this cluster keeps its data."""
        options, folder = self.options, self.run.path
        if options.scratch:
            folder = options.scratch / self.run.name
        arguments = [
            "--checkpoint.enable",
            f"--checkpoint.folder={folder}/checkpoint",
            f"--checkpoint.interval={options.checkpoint_interval or experiment.steps + 1}",
            f"--checkpoint.keep_latest_k={options.checkpoints_kept}",
            f"--comm.train_timeout_seconds={COLLECTIVE_TIMEOUT_S}",
        ]
        if options.time_ranks:
            arguments.append("--debug.enable_structured_logging")
        if dataset := self.dataset(experiment):
            arguments.append(f"--dataloader.dataset_path={dataset}")
        if tokenizer := self.tokenizer(experiment):
            arguments.append(f"--hf_assets_path={tokenizer}")
        return arguments

    def dataset(self, experiment: Experiment) -> Path | None:
        """The cluster's copy of the experiment's dataset, if it has one."""
        folder: Path | None = self.options.dataset.get(experiment.dataset)
        return folder

    def tokenizer(self, experiment: Experiment) -> Path | None:
        """The cluster's copy of the model's tokenizer; the default text has its own."""
        folder: Path | None = self.options.tokenizer.get(experiment.model)
        return folder if experiment.dataset != "python" else None


def train(start: Start, is_over: Callable[[], object] | None = None) -> int:
    """Run this node's ranks.

    Args:
        start: this one.
        is_over: asked several times a second whether to end the ranks; by default, when SIGTERM came.

    Returns:
        The exit code of torchrun, or :data:`~moelab.launch.place.TERMINATED` if it was ended here.
    """
    experiment = start.run.experiment
    stage_data(experiment, dataset=start.dataset(experiment), tokenizer=start.tokenizer(experiment))
    try:
        with Process(start.command(experiment), None) as process:
            while process.poll() is None:
                if start.signals.save:
                    start.stop_file.touch()
                if is_over() if is_over else start.signals.end:
                    return TERMINATED
                time.sleep(POLL_S)
        return process.returncode
    finally:
        start.stop_file.unlink(missing_ok=True)
