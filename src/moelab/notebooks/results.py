"""Results for notebooks: those that come with moelab, which say that they are replayed, and the measured all-to-all."""

from __future__ import annotations

import atexit
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from moelab.answers import Explained, Reported
from moelab.data import read_json
from moelab.door import read_study, report
from moelab.errors import MoelabError
from moelab.experiment_file import Study, write_experiment
from moelab.files import write_json, write_whole
from moelab.launch.torchrun import on_this_machine
from moelab.machine import gpus
from moelab.planning.measured import ALL_TO_ALL, Measurement, load_measured
from moelab.runs.metrics import MetricsWriter
from moelab.traces.against import compare, packaged_steps

CONVERGENCE = "measured/convergence_h200.json"
RANKS = 2
PROGRAM = "moelab.micro.exchange"
"""The all-to-all experiment."""


def replayed_steps() -> Explained:
    """Three traced steps of H200s beside their predictions."""
    packaged = packaged_steps()
    return Explained(
        steps={name: step for name, (step, _) in packaged.items()},
        compared={name: compare(step, ran) for name, (step, ran) in packaged.items()},
        replayed=True,
    )


def replayed_convergence() -> Reported:
    """``studies/convergence_gpu.yaml`` as far as it was trained on an H200, judged as any study is."""
    results, study = read_json(CONVERGENCE), read_study("convergence_gpu")
    folder = tempfile.mkdtemp(prefix="moelab-replayed-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    unfold(Path(folder), results, study)
    judged = report(Path(folder, study.name)).judged
    words = f"replayed: measured on an H200 on {results['date']}, MXFP8 emulated to the bit"
    return Reported(judged=replace(judged, origin=words), asides=(words, _missing(results)))


def _missing(results: Mapping[str, Any]) -> str:
    """Which arms and seeds have no run yet."""
    seeds: dict[str, list[str]] = {}
    for arm, seed in results["missing"]:
        seeds.setdefault(arm, []).append(str(seed))
    named = [f"{arm} (the control)" if arm == results["control"] else arm for arm in seeds]
    each = [f"{arm} with seeds {', '.join(of)}" for arm, of in zip(named, seeds.values(), strict=True)]
    return f"not trained yet: {'; '.join(each)}" if each else ""


def unfold(folder: Path, results: Mapping[str, Any], study: Study) -> None:
    """Make a run directory of each run of the results, for :func:`moelab.report`.

    Tokens/s are left out: these runs shared a GPU.
    """
    experiments = {(one.arm, one.seed): one for one in study.experiments}
    for run in results["runs"]:
        experiment = experiments[run["arm"], run["seed"]]
        path = folder / experiment.name / experiment.arm / f"seed{experiment.seed}" / run["run"]
        write_whole(path / "experiment.yaml", write_experiment(experiment))
        write_json(path / "environment.json", run["environment"])
        write_json(path / "status.json", {"state": run["status"], "reason": run["reason"]})
        if run["in_8_bits"]:
            write_json(path / "launch" / "converted" / "rank0.json", run["in_8_bits"])
        writer, norms, held_out = MetricsWriter(path), dict(run["grad_norm"]), dict(run["held_out"])
        last, ended = run["loss"][-1][0], datetime.fromisoformat(run["ended"]).timestamp()
        for step, loss in run["loss"]:
            time = ended + run["steps_s"] * (step - last) / last
            writer.add_step(step, loss=loss, grad_norm=norms.get(step), memory_gib=run["memory_gib"], time=time)
            if step in held_out:
                writer.add_validation(step, held_out[step], time)


class ExperimentFailed(MoelabError):
    """The all-to-all experiment stopped before it had a result."""


def measure_all_to_all(output: str | Path) -> Measurement:
    """Run the experiment in processes of its own and read what it wrote to a JSON file.

    Without two GPUs its sizes are small and its backend is gloo, and it says so.

    Raises:
        GpusUnknown: if nvidia-smi fails.
        ExperimentFailed: with the last lines that the processes wrote.
    """
    output = Path(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    device = "cuda" if len(gpus()) >= RANKS else "cpu"
    program = ["-m", PROGRAM, "--output", str(output.absolute()), "--device", device]
    done = subprocess.run(
        [*on_this_machine(RANKS), *program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode != 0 or not output.exists():
        last = done.stdout.splitlines()[-100:]  # 40 are torchrun's own, after those of the rank that failed
        raise ExperimentFailed("the all-to-all experiment failed:\n" + "\n".join(last))
    return load_measured(ALL_TO_ALL, output)
