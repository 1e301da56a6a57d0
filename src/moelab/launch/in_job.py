"""What a job's script starts once on each node: ``srun … python -m moelab.launch.in_job RUN HOST …``.

Each node starts torchrun for its ranks (:mod:`moelab.launch.node`). SIGUSR1, which Slurm sends before the time limit,
asks the ranks to save a checkpoint and stop; SIGTERM ends them. The first node accounts for the run
(:mod:`moelab.launch.first_node`) and says by its exit code whether the job has to be started again.

Every start appends: all ranks' lines go on in ``logs/train.log``, where each has its global rank; their own logs are in
``logs/<job>-<restart>/node<k>/``; training goes on from the newest complete checkpoint.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from moelab.launch.place import Place, Signals


def main(arguments: Sequence[str] | None = None) -> int:
    """Train on this node until the run is finished, stopped or failed.

    Returns:
        0; :data:`~moelab.launch.place.REQUEUE_CODE` if the job has to be started again; what torchrun or a signal
        ended with.
    """
    signals = Signals()
    options = parse_options(arguments)
    # These load for a second, in which a signal would go unnoticed.
    from moelab.launch.first_node import account_for
    from moelab.launch.node import Start, train
    from moelab.runs.directory import RunDir
    from moelab.runs.status import State

    start = Start(run=RunDir(options.run), place=Place.of(os.environ), options=options, signals=signals)
    if start.run.status.state is State.COMPLETED:  # a job that was started again after its end
        return 0
    return train(start) if start.place.node else account_for(start)


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """What the script says; ``dataset`` and ``tokenizer`` are mappings from names to folders."""
    parser = argparse.ArgumentParser(prog="moelab.launch.in_job", description=__doc__, allow_abbrev=False)
    parser.add_argument("run", type=Path, help="run directory, absolute")
    parser.add_argument("host", help="name or address of the first node")
    parser.add_argument("--ports", type=_ports, required=True, help="FIRST-LAST, of which the ranks meet at one")
    parser.add_argument("--requeues", type=int, required=True, help="most restarts of the job")
    parser.add_argument("--checkpoint-interval", type=int, required=True, help="steps; 0: only when asked to stop")
    parser.add_argument("--checkpoints-kept", type=int, required=True)
    parser.add_argument("--time-ranks", action="store_true", help="every rank logs its own times")
    parser.add_argument("--scratch", type=Path, help="folder of checkpoints, instead of the run directory")
    parser.add_argument("--dataset", type=_named_folder, action="append", default=[], help="NAME=FOLDER, local copy")
    parser.add_argument("--tokenizer", type=_named_folder, action="append", default=[], help="MODEL=FOLDER")
    options = parser.parse_args(arguments)
    options.dataset, options.tokenizer = dict(options.dataset), dict(options.tokenizer)
    return options


def _ports(text: str) -> tuple[int, int]:
    first, last = text.split("-")
    return int(first), int(last)


def _named_folder(text: str) -> tuple[str, Path]:
    name, folder = text.split("=", 1)
    return name, Path(folder)


if __name__ == "__main__":
    sys.exit(main())
