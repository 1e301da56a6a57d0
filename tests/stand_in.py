"""A stand-in for torchrun, so that the launcher is tested in seconds: it logs, fails, hangs and dies as ranks do.

As a module it replaces the launcher's command; as a script it is that command, or ``moelab`` with its command replaced:

    python stand_in.py moelab '{"bf16_standard/seed0": "hang"}' run study.yaml --runs runs
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import datetime, timedelta
from pathlib import Path

from processes import processes

LOST = "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:23"
FAILURE = "  rank      : {rank} (local_rank: {rank})\n  exitcode  : {code} (pid: 12345)\n"
RANK = "import time\nprint('rank', flush=True)\ntime.sleep(600)"
STUBBORN_RANK = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + RANK

START = datetime(2026, 9, 14, 3, 10, 22)


def titan_line(seconds: float, text: str, prefix: str = "[rank0]:") -> str:
    """A line as TorchTitan's logger writes it under torchrun, so many seconds after :data:`START`."""
    time = START + timedelta(seconds=seconds)
    return f"{prefix}[titan] {time:%Y-%m-%d %H:%M:%S},{time.microsecond // 1000:03} - root - INFO - {text}\n"


def step_text(step: int, loss: float | str, *, tps: float = 1000.0, memory_gib: float = 1.5) -> str:
    """What torchtitan 0.3.0 logs of a step."""
    loss = loss if isinstance(loss, str) else f"{loss:8.5f}"
    memory = f"{memory_gib:5.2f}GiB({memory_gib / 2:.2f}%)"
    numbers = f"memory: {memory}  tps: {round(tps):,}  tflops: 0.10  mfu: N/A"
    return f"step: {step:2}  loss: {loss}  grad_norm:  0.2210  {numbers}"


def step_line(step: int, loss: float, *, tps: float = 1000.0, seconds: float | None = None) -> str:
    """One line of a step, which takes a second unless said otherwise."""
    return titan_line(step if seconds is None else seconds, step_text(step, loss, tps=tps))


def validation_line(step: int, loss: float) -> str:
    """The line of a held-out loss."""
    return titan_line(step + 0.5, f"validate step: {step:2}  loss: {loss:7.4f}  memory:  1.50GiB(0.75%)  tps: 2,000")


def install(behaviours: Mapping[str, str] | None = None) -> None:
    """Let the launcher of this process start the stand-in.

    The run of ``<arm>/seed<k>`` behaves as one of the functions below; without a behaviour it trains to its end.
    """
    from moelab.experiment import Experiment
    from moelab.launch import local

    def command(experiment: Experiment, folder: Path) -> local.Command:
        behaviour = (behaviours or {}).get(f"{experiment.arm}/seed{experiment.seed}", "train")
        call = [sys.executable, __file__, behaviour, str(folder), str(experiment.steps)]
        converted = experiment.precision == "mxfp8" and behaviour != "unconverted"
        variables = {"MOELAB_EXPERIMENT": str(folder / "experiment.yaml"), "CONVERTED": "1" if converted else ""}
        return local.Command(arguments=call, variables=variables)

    local.command = command
    local.stage_data = lambda experiment: None
    local.POLL_S = 0.02


def processes_of(runs: Path) -> list[int]:
    """Every living process of the runs below a folder, torchrun and ranks."""
    start = f"{runs.resolve()}/"
    return [one for one, _, variables in processes() if variables.get("MOELAB_EXPERIMENT", "").startswith(start)]


# What a run does


def say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def steps(folder: Path, last: int) -> None:
    for step in range(1, last + 1):
        log_step(folder, step, 8.0 - 0.1 * step)


def log_step(folder: Path, step: int, loss: float) -> None:
    say(step_line(step, loss))
    keep(folder, {"step": step, "loss": loss, "tps": 1000.0, "memory_gib": 1.5, "time": START.timestamp() + step})


def keep(folder: Path, record: Mapping[str, float]) -> None:
    """Without moelab, whose import takes a second."""
    with (folder / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps({"segment": 0, **record}) + "\n")


def record(folder: Path, rank: int, message: str, when: int) -> None:
    place = folder / "logs" / "none_1" / "attempt_0" / str(rank)
    place.mkdir(parents=True)
    extra = {"py_callstack": "…", "timestamp": str(when)}
    (place / "error.json").write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))


def train(folder: Path, last: int) -> int:
    steps(folder, last)
    keep(folder, {"step": last, "validation_loss": 7.0, "time": START.timestamp() + last})
    return 0


unconverted = train


def short(folder: Path, _last: int) -> int:
    steps(folder, 2)
    return 0


def die(folder: Path, _last: int) -> int:
    """Rank 1 raises, and rank 0 loses it."""
    steps(folder, 2)
    record(folder, 0, LOST, 99)
    record(folder, 1, "ValueError: the vocabulary\nis too small", 100)
    say(FAILURE.format(rank=0, code=1) + FAILURE.format(rank=1, code=1))
    return 1


def rank_killed(folder: Path, _last: int) -> int:
    steps(folder, 2)
    record(folder, 0, LOST, 99)
    say(FAILURE.format(rank=0, code=1) + FAILURE.format(rank=1, code=-9))
    return 1


def nan(folder: Path, _last: int) -> int:
    """As torchtitan 0.3.0 ends it."""
    steps(folder, 2)
    keep(folder, {"step": 3, "loss": float("nan")})
    record(folder, 0, "RuntimeError: Loss is not finite (global_avg_loss=nan) at step 3.", 100)
    return 1


def nan_unseen(folder: Path, last: int) -> int:
    steps(folder, last - 1)
    log_step(folder, last, float("nan"))
    return 0


def wordless(_folder: Path, _last: int) -> int:
    return 7


def torn(folder: Path, _last: int) -> int:
    """Killed while the files beside the log were being written."""
    steps(folder, 1)
    converted = folder / "launch" / "converted"
    converted.mkdir(parents=True, exist_ok=True)
    (converted / "rank1.json").write_text('{"kernels": "emul')
    record(folder, 0, "x", 1)
    (folder / "logs" / "none_1" / "attempt_0" / "0" / "error.json").write_text('{"mess')
    return 1


def hang(folder: Path, _last: int, rank: str = RANK) -> int:
    """Log two steps, then wait with two ranks in sessions of their own; end them on SIGTERM, as torchrun does."""

    def ended(*_: object) -> None:
        for child in ranks:
            child.terminate()
        for child in ranks:
            child.wait()
        sys.exit(1)

    ranks = [
        subprocess.Popen([sys.executable, "-c", rank], start_new_session=True, stdout=subprocess.PIPE) for _ in range(2)
    ]
    for child in ranks:
        assert child.stdout is not None
        child.stdout.readline()
    signal.signal(signal.SIGTERM, ended)
    steps(folder, 2)
    time.sleep(600)
    return 0


def stubborn(folder: Path, last: int) -> int:
    """Ranks that ignore SIGTERM."""
    return hang(folder, last, STUBBORN_RANK)


def torchrun_killed(folder: Path, _last: int) -> int:
    """torchrun itself is killed, and its ranks would go on."""
    subprocess.Popen([sys.executable, "-c", RANK], start_new_session=True)
    steps(folder, 2)
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def main() -> int:
    verb, *arguments = sys.argv[1:]
    if verb == "moelab":
        from moelab.cli import main as moelab

        install(json.loads(arguments[0]))
        return moelab(arguments[1:])
    folder, last = Path(arguments[0]), int(arguments[1])
    if os.environ.get("CONVERTED"):
        place = folder / "launch" / "converted" / "rank0.json"
        place.parent.mkdir(parents=True)
        place.write_text(json.dumps({"kernels": "emulated", "modules": ["layers.1.moe.experts"]}))
    return int(globals()[verb](folder, last))


if __name__ == "__main__":
    sys.exit(main())
