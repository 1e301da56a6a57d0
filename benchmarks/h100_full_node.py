"""Expert parallelism over the eight GPUs of one node: how dispatchers and precisions scale from EP 2 to EP 8.

One command, repeated until it says that nothing is left, most wanted first; each call ends by itself within
``--budget-s``, and what a cut call had measured is kept::

    python benchmarks/h100_full_node.py --output benchmarks/results/h200_full_node.json
    python benchmarks/h100_full_node.py --output four.json --gpus 4             # a machine of four GPUs
    python benchmarks/h100_full_node.py --output /tmp/dry.json --dry            # on a CPU, tiny, ten minutes
    python benchmarks/h100_full_node.py --predict --output benchmarks/results/h100_full_node_predicted.json

What it does, in this order: the all-reduce health check against its floor; the exchange alone at EP 8; all arms of the
671B shape (eight experts on each GPU) and of the 16B shape at EP 8; the 671B shape with as many MoE layers as fit; then
EP 4, and the exchange alone at EP 4 and EP 2. Some 30 minutes on eight H200. ``--eps`` asks for some of the degrees;
EP 2, of which ``h100_two_by_two.json`` has the trainings, is trained only if it names 2. The programs:
``moelab.health.measure``, ``all_to_all.py`` and ``h100_two_by_two.py``, which say how they measure; the folder
``<output>.parts`` holds what each wrote, and is what a further call goes on from. The result holds every row with its
degree, and the predictions of
``h100_full_node_predicted.json`` beside it. Raw logs are in ``<output>.log.gz``, without this machine's paths and name.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from validation.full_node import ARMS, predicted_file
from validation.node import EP_DEGREES, SCALING
from validation.shapes import DEEPEST, SMALL
from validation.table import full_node_rows

from moelab.errors import BadInput
from moelab.files import write_json
from moelab.health.slow import judge
from moelab.launch.cluster import read_cluster
from moelab.launch.torchrun import on_this_machine
from moelab.machine import environment, git_commit, gpus
from moelab.planning.measured import DRY_RUN, FULL_NODE, Measurement, load_measured
from moelab.privacy import each_text, without_places

HERE = Path(__file__).parent
DRY_ARMS = ("bf16_standard", "bf16_deepep", "mxfp8-emulated_deepep")
"""Those that a CPU trains."""
FEW_ARMS = ("bf16_standard", "bf16_deepep", "fp8_deepep_dispatch-fp8")
BIG_GPU_MIB = 100_000
BESIDE = (SCALING, SMALL)
"""Shapes of which a big GPU holds two passes at a time."""
PASS_S = 100
"""What a pass that has begun, and the one that loads meanwhile, may need after the time is over."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One program on ``ep`` GPUs; ``least_s`` is the time below which it is not started."""

    kind: Literal["health", "all_to_all", "train"]
    ep: int
    least_s: float
    shape: str = ""
    arms: tuple[str, ...] = ()
    passes: int = 2
    steps: int = 10

    @property
    def part(self) -> str:
        """Name of its file; all trainings of one degree share one."""
        return f"{self.kind}_ep{self.ep}"

    def missing(self, content: dict[str, Any]) -> tuple[str, ...]:
        """Arms (of a training) or routings that its file lacks; a refused arm is not asked again."""
        if self.kind == "health":
            return () if content.get("stage") == "finished" else ("all",)
        if self.kind == "all_to_all":
            return () if "copies" in content else self.arms  # the last that the program writes
        rows = [(row["shape"], row["arm"], row["order"]) for row in content.get("rows", ())]
        refused = {(one["shape"], one["arm"]) for one in content.get("refused", ())}
        return tuple(
            arm
            for arm in self.arms
            if (self.shape, arm) not in refused and any((self.shape, arm, i) not in rows for i in range(self.passes))
        )


def plan(options: argparse.Namespace) -> list[Step]:
    """All steps of the degrees that are asked for, most wanted first."""
    eps = options.eps or [ep for ep in EP_DEGREES[::-1] if ep <= options.gpus]
    deepest = DEEPEST["h200_node" if big_gpus() else "h100_node"]
    training = {"least_s": PASS_S + 50, "passes": options.passes, "steps": options.steps}
    routings = ("random_balanced", "round_robin")

    def train(ep: int, shape: str, arms: tuple[str, ...], **changes: int) -> Step:
        return Step(kind="train", ep=ep, shape=DRY_RUN if options.dry else shape, arms=arms, **{**training, **changes})  # type: ignore[arg-type]

    def exchange(ep: int) -> Step:
        return Step(kind="all_to_all", ep=ep, arms=routings, least_s=70)

    few = tuple(arm for arm in options.arms if arm in FEW_ARMS)
    steps = [
        Step(kind="health", ep=options.gpus, least_s=40),
        exchange(8),
        train(8, SCALING, options.arms),
        train(8, SMALL, options.arms),
        train(8, deepest, options.arms, passes=1, steps=max(1, options.steps // 2)),
        train(4, SCALING, few),
        *(exchange(ep) for ep in (4, 2)),
        train(4, SMALL, few),
        train(4, SCALING, options.arms),
        train(4, SMALL, options.arms),
        *(train(2, shape, options.arms) for shape in (SCALING, SMALL) if options.eps),
    ]
    if options.dry:
        steps = [step for step in steps if step.kind != "train"] + [train(ep, DRY_RUN, options.arms) for ep in eps]
    return [step for step in steps if step.kind == "health" or step.ep in eps]


def command(step: Step, part: Path, left_s: float, options: argparse.Namespace) -> list[str]:
    """How to start it."""
    torchrun = on_this_machine(step.ep)
    if step.kind == "health":
        return [*torchrun, "-m", "moelab.health.measure", "--output", str(part), "--cluster", options.cluster]
    wanted = step.missing(read(part))
    if step.kind == "all_to_all":
        sizes = ["small"] if options.dry else [f"671B, {8 * step.ep} experts", "16B, 64 experts"]
        program = [str(HERE / "all_to_all.py"), "--output", str(part), "--sizes", *sizes, "--routings", *wanted]
        program += ["--sms"]
        return [*torchrun, *program, *(["--device", "cpu", "--repeats", "2"] if options.dry else [])]
    program = [sys.executable, str(HERE / "h100_two_by_two.py"), "--gpus", str(step.ep), "--output", str(part)]
    program += ["--arms", *wanted, "--passes", str(step.passes), "--steps", str(step.steps)]
    program += ["--budget-s", str(left_s - PASS_S)]
    if options.dry:
        return [*program, "--dry", "--eager", "--timeout-s", "1500"]
    return [*program, "--shapes", step.shape, "--beside", "2" if big_gpus() and step.shape in BESIDE else "1"]


def big_gpus() -> bool:
    """Whether the GPUs have the memory of an H200."""
    return bool(gpus()) and all((gpu.memory_mib or 0) > BIG_GPU_MIB for gpu in gpus())


def run(step: Step, folder: Path, left_s: float, options: argparse.Namespace) -> None:
    """Start it, show and keep what it prints."""
    part = folder / f"{step.part}.json"
    environ = os.environ | ({"OMP_NUM_THREADS": "1"} if options.dry else {})
    with (folder / f"{step.part}.out").open("a") as log:
        with subprocess.Popen(
            command(step, part, left_s, options), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", env=environ,
        ) as process:  # fmt: skip
            assert process.stdout is not None
            for line in process.stdout:
                log.write(line)
                print(line, end="", flush=True)
        log.write(f"# exit code {process.returncode}\n")


def read(file: Path) -> dict[str, Any]:
    """What a program wrote, if it did."""
    content: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return content


def merged(folder: Path, options: argparse.Namespace, date: str) -> dict[str, Any]:
    """One result of all parts, each row with its degree, and the predictions beside it."""
    content: dict[str, Any] = {
        "label": DRY_RUN if options.dry else "measured",
        "date": date,
        "environment": environment(),
    }
    content |= {"world_size": options.gpus, "rows": [], "refused": [], "summary": [], "all_to_all": {}}
    for ep in EP_DEGREES[::-1]:
        part = read(folder / f"train_ep{ep}.json")
        for name in ("rows", "refused", "summary"):
            content[name] += [{"ep": ep, **row} for row in part.get(name, ())]
        if exchange := read(folder / f"all_to_all_ep{ep}.json"):
            content["all_to_all"][str(ep)] = exchange | {"label": content["label"]}
    if health := read(folder / f"health_ep{options.gpus}.json"):
        floor = read_cluster(options.cluster).all_reduce_floor_gb_s
        lines = [line for one in judge(health, floor) for line in one.as_lines()]
        content["health"] = {**health, "floor_gb_s": floor, "findings": lines}
    if not options.dry:
        try:
            beside = full_node_rows(Measurement(name=FULL_NODE, content=content))
            content["predicted_beside_measured"] = [{**asdict(row), "error_percent": row.error} for row in beside]
        except BadInput as error:  # a measurement all the same
            content["predicted_beside_measured"] = []
            content["not_beside_predictions"] = str(error)
    found: dict[str, Any] = each_text(without_places, content)
    return found


def write(folder: Path, options: argparse.Namespace, date: str) -> None:
    """The result and the raw logs."""
    write_json(options.output, merged(folder, options, date))
    logs = sorted([*folder.glob("*.out"), *folder.glob("*.log")])
    text = "".join(f"# {log.name}\n{log.read_text(errors='replace')}\n" for log in logs)
    packed = gzip.compress(without_places(text).encode(), mtime=0)
    options.output.with_suffix(".log.gz").write_bytes(packed)


def main() -> int:
    """Do what is missing, as far as the time goes."""
    options = parse()
    if options.predict:
        found = predicted_file(date=datetime.now(UTC).isoformat(), git_commit=git_commit())
        write_json(options.output, found)
        return 0
    end = time.monotonic() + options.budget_s
    folder = options.output.with_suffix(".parts")
    folder.mkdir(parents=True, exist_ok=True)
    date = read(options.output).get("date", datetime.now(UTC).isoformat())
    if any(folder.iterdir()):
        write(folder, options, date)  # the call before may have been cut off inside a step
    print(f"{DRY_RUN}: nothing here is a measurement" if options.dry else "measuring", flush=True)
    for step in left(plan(options), folder):
        left_s = end - time.monotonic()
        name = " ".join([step.kind, f"EP {step.ep}", step.shape])
        if left_s < step.least_s:
            print(f"LATER {name}: {left_s:.0f} s are left", flush=True)
            continue
        print(f"STEP {name}", flush=True)
        run(step, folder, left_s, options)
        write(folder, options, date)
    for row in read(options.output).get("predicted_beside_measured", ()):
        error = f"{row['error_percent']:+.1f} %"
        print(f"{row['name']}: measured {row['measured']:,.0f}, predicted {row['predicted']:,.0f}, {error}")
    if why := read(options.output).get("not_beside_predictions"):
        print(f"NOT BESIDE PREDICTIONS: {why}")
    for one in read(options.output).get("refused", ()):
        print(f"REFUSED EP {one['ep']} {one['shape']} {one['arm']}: {one['error']}"[:300])
    open_ = [f"{step.kind} EP {step.ep} {step.shape}" for step in left(plan(options), folder)]
    print(f"LEFT for another call: {'; '.join(open_)}" if open_ else "nothing is left", flush=True)
    return 0


def no_prediction() -> str | None:
    """Why what would be written down now is none: its commit has other code, or the measurement is older."""
    asked = ["git", "-C", str(HERE.parent), "status", "--porcelain", "--", "src", "benchmarks"]
    changed = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    if changed:
        return f"commit first, so that the predictions name the code that made them:\n{changed.rstrip()}"
    if load_measured(FULL_NODE).content is not None:
        return "the full node is measured: what is written down now is no prediction"
    return None


def left(steps: list[Step], folder: Path) -> Iterator[Step]:
    """Steps that lack something, looked up when they are asked for."""
    return (step for step in steps if step.missing(read(folder / f"{step.part}.json")))


def parse() -> argparse.Namespace:
    """Options, and what must not be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--gpus", type=int, default=8, choices=EP_DEGREES, help="of this machine")
    parser.add_argument(
        "--eps", type=int, nargs="+", choices=EP_DEGREES, help="degrees; default: all, not trained at 2"
    )
    parser.add_argument("--arms", nargs="+", choices=ARMS, help="default: all, or those that a CPU trains")
    parser.add_argument("--passes", type=int, default=2, help="times that each arm runs, in turn")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each routing in each pass")
    parser.add_argument("--budget-s", type=float, default=570, help="of this call")
    parser.add_argument("--cluster", default="nebius_soperator_b200", help="profile with the floor of the health check")
    parser.add_argument("--dry", action="store_true", help=f"{DRY_RUN}: shows that it runs, and nothing else")
    parser.add_argument("--predict", action="store_true", help="write down what the projection expects, and stop")
    options = parser.parse_args()
    options.arms = tuple(options.arms or (DRY_ARMS if options.dry else ARMS))
    if options.eps and max(options.eps) > options.gpus:
        parser.error(f"--eps {max(options.eps)}: --gpus is {options.gpus}")
    if options.predict and (why := no_prediction()):
        parser.error(f"--predict: {why}")
    kept = not {HERE / "results", HERE.parent / "src/moelab/data/measured"}.isdisjoint(options.output.resolve().parents)
    if options.dry and (kept or FULL_NODE in options.output.name):
        parser.error(f"--output {options.output}: a dry run is no measurement and takes no measurement's place or name")
    if not options.dry and not options.predict and len(gpus()) < options.gpus:
        parser.error(f"{len(gpus())} GPUs are here, --gpus is {options.gpus}; --dry runs on a CPU")
    if options.output.exists() and not options.predict:
        label = json.loads(options.output.read_text()).get("label")
        if label != (DRY_RUN if options.dry else "measured"):
            parser.error(f"--output {options.output} is labelled {label!r}: take another file")
    return options


if __name__ == "__main__":
    sys.exit(main())
