"""Train ``studies/convergence_gpu.yaml`` in pieces, on a GPU that one has for half an hour at a time, and judge it.

``moelab run`` trains a study whole where a machine stays. Where it goes away, this trains what still lacks, several
runs side by side on one GPU, and packs the small files of each run that has ended::

    python benchmarks/convergence_gpu.py train FOLDER --at-once 3 --most 9     # but for what the results have
    python benchmarks/convergence_gpu.py pack FOLDER benchmarks/results/convergence_h200_runs_2.tar.gz
    python benchmarks/convergence_gpu.py collect      # archives to benchmarks/results/convergence_h200.json
    python benchmarks/convergence_gpu.py unfold runs && moelab report runs/convergence_gpu

``unfold`` makes run directories of the results alone, and the same ``moelab report`` judges them that judges runs.

Runs go in an order in which every piece can be judged: BF16, MXFP8 and the controls seed by seed, then the other arms
with three seeds each, one after the other. A machine that goes away loses the runs in flight and no other. Runs side by
side share the GPU, so their tokens/s say nothing about speed; their losses do not know of each other.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from moelab.experiment import Experiment
from moelab.experiment_file import read_study
from moelab.notebooks.results import unfold

ROOT = Path(__file__).resolve().parents[1]
STUDY = ROOT / "studies" / "convergence_gpu.yaml"
RESULTS = ROOT / "benchmarks" / "results" / "convergence_h200.json"
FEW_SEEDS = 3
JUDGED_FIRST = 4
"""Arms, the first of the study, that come first and get all seeds; the others get ``FEW_SEEDS``."""
KEPT = (
    "experiment.yaml",
    "environment.json",
    "status.json",
    "metrics.jsonl",
    "expert_load.parquet",
    "launch",
    "logs/train.log",
)
THINNED_TO = 10
"""Of gradient norms each tenth is in the results; of losses all."""
MODULES = re.compile(r"moelab: \d+ modules multiply in 8 bits \((\w+) kernels\): (.+)")
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


def train(folder: Path, *, study: Path, results: Path, at_once: int, most: int) -> None:
    """Train ``most`` of the runs that lack.

    The study is read again whenever a run may start, so that arms can be added and taken out meanwhile.
    """
    folder.mkdir(parents=True, exist_ok=True)
    begun = finished(results) | {arm_and_seed(path) for path in runs_in(folder) if state_of(path) == "completed"}
    running = list[Running]()
    while True:
        for one in [one for one in running if one.process.poll() is not None]:
            running.remove(one)
            say(f"{one.experiment.arm} seed {one.experiment.seed} ended with code {one.process.returncode}")
        waiting = [one for one in in_order(study) if (one.arm, one.seed) not in begun]
        if waiting and len(running) < at_once and most:
            experiment = waiting[0]
            begun.add((experiment.arm, experiment.seed))
            most -= 1
            process = launch(folder, experiment)
            say(f"{experiment.arm} seed {experiment.seed} starts, process {process.pid}")
            running.append(Running(experiment=experiment, process=process))
        elif not running:
            say(f"{len(waiting)} runs are left")
            return
        time.sleep(POLL_S)


def runs_in(folder: Path) -> list[Path]:
    """Run directories that have a status."""
    return sorted(status.parent for status in folder.glob("*/runs/*/*/seed*/*/status.json"))


def state_of(run: Path) -> str:
    """``completed``, ``failed``, ``running`` and so on."""
    return str(json.loads((run / "status.json").read_text())["state"])


def arm_and_seed(run: Path) -> tuple[str, int]:
    """Arm and seed of a run directory."""
    return run.parent.parent.name, int(run.parent.name.removeprefix("seed"))


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
    with tarfile.open(archive, "w:gz") as tar:
        for run in runs_in(folder):
            state, name = state_of(run), run.relative_to(run.parents[3])
            say(f"{name}: {state}")
            for file in KEPT if state in ("completed", "failed") else ():
                if (run / file).exists():
                    tar.add(run / file, arcname=str(name / file))


def collect(results: Path) -> None:
    """Renew what the results say of runs from the archives beside them; their settings and notes stay."""
    kept: dict[str, Any] = json.loads(results.read_text())
    with tempfile.TemporaryDirectory() as folder:
        for archive in sorted(results.parent.glob(f"{results.stem}_runs_*.tar.gz")):
            with tarfile.open(archive) as tar:
                tar.extractall(folder, filter="data")
        runs = [status.parent for status in sorted(Path(folder).glob("*/*/seed*/*/status.json"))]
        found = [facts_of(run) for run in runs]
    # Of a run that failed and was made again, the one that completed.
    of = {(run["arm"], run["seed"]): run for run in sorted(found, key=lambda run: run["status"] == "completed")}
    order = {(one.arm, one.seed): index for index, one in enumerate(in_order(STUDY))}
    kept["runs"] = [of[key] for key in sorted(of, key=lambda key: order.get(key, len(order)))]
    kept["missing"] = [list(key) for key in order if key not in of]
    results.write_text(compact(kept))


def facts_of(run: Path) -> dict[str, Any]:
    """What the results have of one run, from its directory."""
    words = [sys.executable, "-m", "moelab", "collect", str(run), "--json"]
    (read,) = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)["runs"]
    rows, log = read["rows"], (run / "logs" / "train.log").read_text(errors="replace")
    modules = MODULES.search(log)
    tokens = pd.read_parquet(run / "expert_load.parquet")
    last = tokens[tokens["step"] > 0.9 * tokens["step"].max()].groupby(["layer", "expert"])["tokens"].sum().unstack()
    arm, seed = arm_and_seed(run)
    return {
        "arm": arm,
        "seed": seed,
        "run": run.name,
        "status": read["status"],
        "reason": read["reason"],
        "ended": datetime.fromtimestamp(rows[-1]["time"], UTC).isoformat(timespec="seconds"),
        "steps_s": round(rows[-1]["time"] - rows[0]["time"]),
        "environment": json.loads((run / "environment.json").read_text()),
        "in_8_bits": {"kernels": modules[1], "modules": modules[2].split(", ")} if modules else None,
        "loss": [[row["step"], round(row["loss"], 5)] for row in rows],
        "held_out": [[row["step"], round(row["loss"], 5)] for row in read["validation"]],
        "grad_norm": [[row["step"], round(row["grad_norm"], 4)] for row in rows if row["step"] % THINNED_TO == 0],
        "memory_gib": round(max(row["memory_gib"] for row in rows), 2),
        "expert_load": {
            "of": "the recorded steps of the last tenth: share of a layer's tokens that each expert gets",
            "share": {str(layer): (row / row.sum()).round(4).tolist() for layer, row in last.iterrows()},
        },
    }


def compact(results: dict[str, Any]) -> str:
    """JSON with a line for each fact, and for each series of a run."""
    text = json.dumps(results | {"runs": []}, indent=1)
    lines = [",\n".join(f'   "{key}": {json.dumps(value)}' for key, value in run.items()) for run in results["runs"]]
    runs = ",\n".join(f"  {{\n{line}\n  }}" for line in lines)
    return text.replace('"runs": []', f'"runs": [\n{runs}\n ]') + "\n"


def main() -> None:
    """Train, pack, collect or unfold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", type=Path, default=STUDY)
    parser.add_argument("--results", type=Path, default=RESULTS)
    verbs = parser.add_subparsers(dest="verb", required=True)
    training = verbs.add_parser("train", help="train what the results lack")
    training.add_argument("folder", type=Path, help="of the runs")
    training.add_argument("--at-once", type=int, default=1, metavar="N", help="runs side by side; default: 1")
    training.add_argument("--most", type=int, default=1000, metavar="N", help="runs to start; default: all")
    packing = verbs.add_parser("pack", help="put finished runs into an archive")
    packing.add_argument("folder", type=Path, help="of the runs")
    packing.add_argument("archive", type=Path, help="to write")
    verbs.add_parser("collect", help="renew the results from the archives beside them")
    unfolding = verbs.add_parser("unfold", help="make run directories of the results")
    unfolding.add_argument("folder", type=Path, help="for the study's folder")
    options = parser.parse_args()
    if options.verb == "train":
        train(options.folder, study=options.study, results=options.results, at_once=options.at_once, most=options.most)
    elif options.verb == "pack":
        pack(options.folder, options.archive)
    elif options.verb == "collect":
        collect(options.results)
    else:
        unfold(options.folder, json.loads(options.results.read_text()), read_study(options.study))


if __name__ == "__main__":
    main()
