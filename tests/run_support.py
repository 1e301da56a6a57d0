"""Run directories for tests, made without training: what a launcher and its ranks leave."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stand_in import START, titan_line

from moelab.experiment import Experiment
from moelab.files import write_json
from moelab.judge.verdict import FinalLosses, Verdict, judge
from moelab.runs import directory
from moelab.runs.collect import Collected, collect_run, save_results
from moelab.runs.directory import RunDir
from moelab.runs.metrics import MetricsWriter
from moelab.runs.status import State, Status

ENVIRONMENT = {
    "moelab": "0.1.0",
    "python": "3.11.7",
    "platform": "Linux 6.1 x86_64",
    "packages": {"torch": "2.14.0", "torchtitan": "0.3.0", "torchao": "0.18.0", "plotly": None},
    "processor": "A processor",
    "cores": 2,
    "memory_gib": 8.0,
    "gpus": [],
    "git_commit": None,
    "hosts": 1,
}
COMMAND = (
    "MOELAB_EXPERIMENT={folder}/experiment.yaml {home}/.venv/bin/python -m torch.distributed.run "
    "--nproc-per-node=2 --log-dir={folder}/logs -m torchtitan.train --dump_folder {folder}\n"
)
STEPS = 20
ENDS = {0: 5.00, 1: 5.04, 2: 4.97, 3: 5.01}
"""Final losses of BF16 in :func:`make_study`, by seed."""
SHIFT = {0: 0.003, 1: 0.005, 2: 0.001, 3: 0.005}
"""What MXFP8's are above them."""


def collect_and_save(run: RunDir) -> Collected:
    """Read a run and write what was read, as a launcher does at the end."""
    collected = collect_run(run)
    save_results(run, collected)
    return collected


def make_run(
    runs: Path,
    experiment: Experiment,
    losses: Sequence[float],
    *,
    state: State = State.COMPLETED,
    reason: str | None = None,
    held_out: float | None = None,
    tps: float = 1000.0,
) -> RunDir:
    """A run directory with one step for each loss, a second apart."""
    run = directory.create(runs, experiment)
    run.log.write_text(titan_line(0, "Training starts at step 1"))
    writer = add_launch(run, dict(enumerate(losses, start=1)), tps=tps)
    if held_out is not None:
        writer.add_validation(len(losses), held_out, START.timestamp() + len(losses) + 0.5)
    write_json(run.path / "environment.json", ENVIRONMENT)
    folder = str(run.path.absolute())
    (run.path / "launch" / "command.sh").write_text(COMMAND.format(folder=folder, home="/home/alice"))
    if experiment.precision == "mxfp8":
        converted = run.path / "launch" / "converted" / "rank0.json"
        converted.parent.mkdir()
        converted.write_text(json.dumps({"kernels": "emulated", "modules": ["layers.1.moe.experts"]}))
    run.set_status(Status(state=state, reason=reason, attempts=1))
    return run


def add_launch(
    run: RunDir, losses: Mapping[int, float], *, start_s: float = 0.0, tps: float = 1000.0, **values: Any
) -> MetricsWriter:
    """One more launch of a run, with the loss of each step; ``values`` are a number, or one for each step."""
    usual = {"grad_norm": 0.221, "tflops": 0.1, "memory_gib": 1.5, "memory_pct": 0.75, "tps": tps}
    writer = MetricsWriter(run.path)
    for step, loss in losses.items():
        own = {name: value[step] if isinstance(value, Mapping) else value for name, value in (usual | values).items()}
        writer.add_step(step, **{"loss": loss, "time": START.timestamp() + start_s + step} | own)
    return writer


def curve(end: float) -> list[float]:
    """A straight loss curve whose last two steps, a tenth, average ``end``."""
    return [end + 0.1 * (STEPS - 0.5 - step) for step in range(1, STEPS + 1)]


def train(
    study: Path, precision: str = "bf16", seed: int = 0, losses: Sequence[float] | None = None, **options: Any
) -> RunDir:
    """One more run of a study; without losses it ends where those of :func:`make_study` do.

    ``options`` are those of :func:`make_run` and any field of the experiment.
    """
    is_bf16 = precision == "bf16"
    made: dict[str, Any] = {"tps": 1000.0 if is_bf16 else 500.0}
    made |= {name: options.pop(name) for name in ("state", "reason", "held_out", "tps") if name in options}
    if losses is None:
        losses = curve(ENDS.get(seed, 5.0) + (0.0 if is_bf16 else SHIFT.get(seed, 0.003)))
    experiment = {"name": study.name, "steps": STEPS, "precision": precision, "seed": seed}
    return make_run(study.parent, Experiment(**experiment | options), losses, **made)


def record_machine(study: Path, runs: str = "*/*", **environment: Any) -> None:
    """Let runs of a study, a pattern of their arm and seed, be on a machine that differs in this from the usual one."""
    for run in study.glob(f"{runs}/*"):
        write_json(run / "environment.json", ENVIRONMENT | environment)


def record_native(study: Path) -> None:
    """Let the kernels of a study's MXFP8 runs be real ones."""
    for record in study.glob("*/*/*/launch/converted/*.json"):
        write_json(record, {"kernels": "native", "modules": ["layers.1.moe.experts"]})


def make_study(runs: Path, name: str = "s", shift: Mapping[int, float] = SHIFT) -> Path:
    """BF16 with known final losses, and MXFP8 a few thousandths above, at half the speed."""
    for seed, end in ENDS.items():
        for precision, ours in (("bf16", end), ("mxfp8", end + shift[seed])):
            train(runs / name, precision, seed, curve(ours), held_out=ours + 0.5)
    return runs / name


def verdict_of(final: FinalLosses, **options: Any) -> Verdict:
    """The verdict on the one arm that is beside BF16."""
    (arm,) = final.seeds.keys() - {"bf16_standard"}
    names = {"arm": arm, "reference": "bf16_standard", "quantity": final.quantity, "steps": final.steps}
    return judge(final.seeds[arm], final.seeds["bf16_standard"], **names, **options)
