"""Train ``studies/convergence_gpu.yaml`` in pieces, on a GPU that one has for half an hour at a time.

``moelab run`` trains a study whole where a machine stays. Where it goes away, this trains what still lacks, several
runs side by side on one GPU, and packs the small files of each run that has ended::

    python benchmarks/convergence_gpu.py train FOLDER --at-once 3 --minutes 25     # but for what the results have
    python benchmarks/convergence_gpu.py pack FOLDER runs.tar                      # while it trains, and at the end

Runs go in an order in which every piece can be judged: BF16, MXFP8 and the control seed by seed, then the other arms
with three seeds each, one after the other. A machine that goes away loses the runs in flight and no other. Runs side by
side share the GPU, so their tokens/s say nothing about speed; their losses do not know of each other.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import yaml

from moelab.experiment import Experiment
from moelab.experiment_file import read_study

ROOT = Path(__file__).resolve().parents[1]
STUDY = ROOT / "studies" / "convergence_gpu.yaml"
RESULTS = ROOT / "benchmarks" / "results" / "convergence_h200.json"
FEW_SEEDS = 3
JUDGED_FIRST = 3
"""Arms, the first of the study, that come first and get all seeds; the others get ``FEW_SEEDS``."""
KEPT = ("experiment.yaml", "environment.json", "status.json", "expert_load.parquet", "results.json", "logs/train.log")
POLL_S = 1.0


def in_order(study: Path) -> list[Experiment]:
    """The experiments of the study, in the order in which they train."""
    experiments = read_study(study).experiments
    first = list(dict.fromkeys(one.arm for one in experiments))[:JUDGED_FIRST]
    wanted = [one for one in experiments if one.arm in first or one.seed < FEW_SEEDS]
    # As the study has them, seed by seed; but the others arm by arm, so that each is soon whole.
    arms = list(dict.fromkeys(one.arm for one in experiments))
    return sorted(wanted, key=lambda one: 0 if one.arm in first else arms.index(one.arm))


def finished(results: Path) -> set[tuple[str, int]]:
    """Arms and seeds that the results have."""
    runs = json.loads(results.read_text())["runs"] if results.exists() else []
    return {(run["arm"], run["seed"]) for run in runs if run["status"] == "completed"}


@dataclass(kw_only=True)
class Running:
    """A launcher at work."""

    experiment: Experiment
    process: subprocess.Popen[bytes]
    start: float


def train(folder: Path, *, study: Path, results: Path, at_once: int, minutes: float) -> None:
    """Train what lacks, as long as a run of the usual length still ends in time."""
    folder.mkdir(parents=True, exist_ok=True)
    done = finished(results)
    waiting = [one for one in in_order(study) if (one.arm, one.seed) not in done]
    end, took_s, running = time.monotonic() + 60 * minutes, 0.0, list[Running]()
    while waiting or running:
        for one in [one for one in running if one.process.poll() is not None]:
            running.remove(one)
            took_s = max(took_s, time.monotonic() - one.start)
            say(f"{one.experiment.arm} seed {one.experiment.seed} ended with code {one.process.returncode}")
        if waiting and len(running) < at_once and time.monotonic() + took_s < end:
            experiment = waiting.pop(0)
            say(f"{experiment.arm} seed {experiment.seed} starts")
            running.append(Running(experiment=experiment, process=launch(folder, experiment), start=time.monotonic()))
        elif not running:
            break
        time.sleep(POLL_S)
    say(f"{len(waiting)} runs are left")


def launch(folder: Path, experiment: Experiment) -> subprocess.Popen[bytes]:
    """``moelab run`` of one experiment, in a folder of runs of its own: one launcher at a time works on a study."""
    own = folder / f"{experiment.arm}-{experiment.seed}"
    own.mkdir(exist_ok=True)
    (own / "study.yaml").write_text(yaml.safe_dump([experiment.model_dump(mode="json")], sort_keys=False))
    # Compiled code is kept from run to run, and a few processes side by side do not each start one for every core.
    variables = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TORCHINDUCTOR_COMPILE_THREADS": "4"}
    with (own / "launcher.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "moelab", "run", str(own / "study.yaml"), "--runs", str(own / "runs")],
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def say(words: str) -> None:
    """A line with the time."""
    print(f"{datetime.now(UTC):%H:%M:%S} {words}", flush=True)


def pack(folder: Path, archive: Path) -> None:
    """Put the small files of each run that has ended, well or not, into one archive."""
    with tarfile.open(archive, "w") as tar:
        for status in sorted(folder.glob("*/runs/*/*/seed*/*/status.json")):
            run = status.parent
            state = json.loads(status.read_text())["state"]
            if state in ("completed", "failed"):
                name = run.relative_to(run.parents[3])
                for file in KEPT:
                    if (run / file).exists():
                        tar.add(run / file, arcname=str(name / file))
            say(f"{run.parent.parent.name} {run.parent.name}: {state}")


def main() -> None:
    """Train, or pack."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["train", "pack"])
    parser.add_argument("folder", type=Path, help="of the runs")
    parser.add_argument("archive", type=Path, nargs="?", help="of pack: what to write")
    parser.add_argument("--study", type=Path, default=STUDY)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="runs side by side; default: 1")
    parser.add_argument("--minutes", type=float, default=1e9, help="after which none starts that would end later")
    options = parser.parse_args()
    if options.what == "train":
        train(
            options.folder,
            study=options.study,
            results=options.results,
            at_once=options.at_once,
            minutes=options.minutes,
        )
    elif options.what == "pack":
        pack(options.folder, options.archive)


if __name__ == "__main__":
    main()
