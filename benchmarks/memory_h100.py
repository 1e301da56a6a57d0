"""Measure the memory of thin DeepSeek-V3 models on one or two Hopper GPUs, to hold the memory model against.

Every case trains five steps under torchrun in processes of its own and is written to ``--output`` as soon as it ends,
so that a case that fails, runs out of memory or is cut off costs nothing but itself; a second call goes on with what is
missing. On two GPUs, cases of one GPU run side by side. Nothing is downloaded:

    python benchmarks/memory_h100.py --list
    python benchmarks/memory_h100.py --budget-s 530
    python benchmarks/memory_h100.py --table                # measured beside predicted, and B200 peaks from elsewhere
    python benchmarks/memory_h100.py --dry --output /tmp/memory_dry.json      # tiny cases on a CPU, a minute

``experiment`` of a case is what ``moelab run`` takes; ``thin`` says how many layers (and experts) of that model are
kept. The rows have, for each rank: the peaks that TorchTitan reports, memory at the seams of a step, and what PyTorch's
allocator does not see. What was alive at the highest point goes into ``<output>_live.json`` beside it, for those who
want to know why.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from validation.memory_megatron import V2, MegatronRun, megatron_memory

from moelab.experiment import Experiment
from moelab.files import write_json
from moelab.hardware import H100
from moelab.launch.torchrun import on_this_machine
from moelab.layout import check
from moelab.layout.schedule import split_layers
from moelab.machine import environment
from moelab.model import shape_of
from moelab.planning.memory import estimate
from moelab.titan import corpus

HERE = Path(__file__).parent
LOG_LINES = 12
SHORTEST_S = 30
"""A case started with less time than this would only be cut off."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One measured run: ``experiment`` as ``moelab run`` takes it, of a model with only these layers and experts."""

    name: str
    gpus: int
    thin: dict[str, int]
    experiment: dict[str, Any]
    expandable_segments: bool = True
    timeout_s: int = 150


def case(
    name: str, model: str, gpus: int, thin: tuple[int, int, int], *, expandable: bool = True, **experiment: Any
) -> Case:
    """A case with the settings that all of them share; ``thin`` counts dense layers, MoE layers and experts."""
    dense, sparse, experts = thin
    shared = {"model": model, "gpus_per_node": gpus, "ep": gpus, "seq_len": 4096, "routing": "round_robin"}
    return Case(
        name=name,
        gpus=gpus,
        thin={"dense_layers": dense, "moe_layers": sparse, "experts": experts},
        experiment={**shared, **experiment},
        expandable_segments=expandable,
    )


T16, T671 = (1, 4, 64), (1, 2, 32)
COMPILED = {"compile": "model+loss"}
SELECTIVE = {"activation_checkpoint": "selective"}
TILES = {"attention_backend": "flex_tiles"}
CASES = [
    # The order is that of importance: the budget may end before the list does.
    case("16B none", "16B", 2, T16, local_batch=4, activation_checkpoint="none"),
    case("16B selective", "16B", 2, T16, local_batch=4, activation_checkpoint="selective"),
    case("16B full", "16B", 2, T16, local_batch=8, activation_checkpoint="full"),
    case("671B full", "671B", 2, T671, local_batch=1, activation_checkpoint="full"),
    case("16B none compiled", "16B", 2, T16, local_batch=4, activation_checkpoint="none", **COMPILED),
    case("1 GPU none", "16B", 1, T16, local_batch=1, activation_checkpoint="none"),
    case("1 GPU full", "16B", 1, T16, local_batch=2, activation_checkpoint="full"),
    case("671B none", "671B", 2, T671, local_batch=2, activation_checkpoint="none"),
    case("16B mxfp8", "16B", 2, T16, local_batch=4, activation_checkpoint="full", precision="mxfp8"),
    case("16B fp8 compiled", "16B", 2, T16, local_batch=4, activation_checkpoint="full", precision="fp8", **COMPILED),
    case("16B EP 1", "16B", 2, T16, ep=1, local_batch=2, activation_checkpoint="none"),
    case("16B PP 2", "16B", 2, T16, ep=1, pp=2, local_batch=8, activation_checkpoint="full"),
    case("671B none compiled", "671B", 2, T671, local_batch=2, activation_checkpoint="none", **COMPILED),
    case("16B TP 2", "16B", 2, T16, tp=2, local_batch=4, activation_checkpoint="none"),
    case("1 GPU selective", "16B", 1, T16, local_batch=2, activation_checkpoint="selective"),
    case("1 GPU none compiled", "16B", 1, T16, local_batch=2, activation_checkpoint="none", **COMPILED),
    case("16B mxfp8 compiled", "16B", 2, T16, local_batch=4, precision="mxfp8", **COMPILED),
    case("671B fp8 compiled", "671B", 2, T671, local_batch=2, precision="fp8", **COMPILED),
    case("671B selective", "671B", 2, T671, local_batch=1, activation_checkpoint="selective"),
    case("16B learned routing", "16B", 2, T16, local_batch=4, routing="learned"),
    case("671B full compiled", "671B", 2, T671, local_batch=2, activation_checkpoint="full", **COMPILED),
    case("16B none, fixed segments", "16B", 2, T16, local_batch=4, activation_checkpoint="none", expandable=False),
    case("671B full, fixed segments", "671B", 2, T671, local_batch=1, activation_checkpoint="full", expandable=False),
    case("16B full compiled", "16B", 2, T16, local_batch=8, activation_checkpoint="full", **COMPILED),
    case("16B selective compiled", "16B", 2, T16, local_batch=4, activation_checkpoint="selective", **COMPILED),
    # Layers as those of h100_two_by_two.py, for GPUs of 141 GB: where prediction and its one-GPU rows differed.
    *(
        case(f"671B EP 1 {name}", "671B", 1, (0, layers, 16), local_batch=2, **TILES, **COMPILED, **settings)
        for name, layers, settings in (
            ("selective, 3 layers", 3, SELECTIVE),
            ("selective, 3 layers, fp8", 3, SELECTIVE | {"precision": "fp8"}),
            ("selective, 2 layers", 2, SELECTIVE),
            ("selective, 2 layers, fp8", 2, SELECTIVE | {"precision": "fp8"}),
            ("full, 3 layers", 3, {"activation_checkpoint": "full"}),
            ("none, 2 layers", 2, {"activation_checkpoint": "none"}),
        )
    ),
    case("671B EP 2 selective, 5 layers", "671B", 2, (0, 5, 16), local_batch=2, **TILES, **COMPILED, **SELECTIVE),
    case("671B CP 2 selective", "671B", 2, T671, cp=2, local_batch=2, **COMPILED, **SELECTIVE),
    case("671B CP 2 none", "671B", 2, T671, cp=2, local_batch=2, activation_checkpoint="none", **COMPILED),
]
DRY_CASES = [
    case("dry none", "nano", 2, (1, 2, 8), seq_len=128, local_batch=2, hardware="cpu"),
    case("dry full", "nano", 1, (1, 1, 4), seq_len=128, local_batch=2, activation_checkpoint="full", hardware="cpu"),
    case("dry mxfp8", "nano", 1, (1, 1, 4), seq_len=128, local_batch=2, precision="mxfp8", hardware="cpu"),
]


class Running:
    """A case under torchrun on chosen GPUs."""

    def __init__(self, chosen: Case, gpus: list[int], *, timeout_s: float) -> None:
        self.case, self.gpus, self.timeout_s = chosen, gpus, timeout_s
        self.folder = Path(tempfile.mkdtemp(prefix="memory-"))
        self.started = time.monotonic()
        (self.folder / "case.json").write_text(json.dumps(asdict(chosen)))
        variables = {
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)) if chosen.experiment.get("hardware") != "cpu" else "",
            "OMP_NUM_THREADS": "4",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
            "PYTORCH_ALLOC_CONF": f"expandable_segments:{chosen.expandable_segments}",
        }
        command = [*on_this_machine(chosen.gpus), str(HERE / "memory_h100_case.py")]
        command += ["--case", str(self.folder / "case.json"), "--folder", str(self.folder)]
        self.log = (self.folder / "log.txt").open("wb")
        self.process = subprocess.Popen(
            command, env={**os.environ, **variables}, stdout=self.log, stderr=self.log, start_new_session=True
        )

    def ended(self) -> bool:
        """Whether it has ended, by itself or because its time is over."""
        if self.process.poll() is not None:
            return True
        if time.monotonic() - self.started < self.timeout_s:
            return False
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        return True

    def row(self) -> dict[str, Any]:
        """What the ranks left, and the end of the log where one of them failed."""
        ranks = [json.loads(path.read_text()) for path in sorted(self.folder.glob("rank*.json"))]
        errors = [rank["error"] for rank in ranks if rank["error"]]
        if not errors and len(ranks) < self.case.gpus:
            errors = [f"ended with {self.process.returncode} or was stopped after {self.timeout_s:.0f} s"]
        row = {"case": asdict(self.case), "error": errors[0] if errors else None, "ranks": ranks}
        row["wall_s"] = round(time.monotonic() - self.started, 1)
        if errors:
            lines = (self.folder / "log.txt").read_text(errors="replace").splitlines()
            row["log"] = "\n".join([line for line in lines if "Error" in line][-LOG_LINES:])
        return row


def run_cases(cases: list[Case], *, gpus: int, budget_s: float, report: Report) -> None:
    """Run cases in order, as many at a time as the GPUs hold, and stop what runs when the budget ends."""
    began, waiting, running = time.monotonic(), list(cases), list[Running]()
    while waiting or running:
        for done in [one for one in running if one.ended()]:
            running.remove(done)
            report.add(done.row())
        free = sorted(set(range(gpus)) - {gpu for one in running for gpu in one.gpus})
        left = budget_s - (time.monotonic() - began)
        # A case of one GPU may overtake one of two that waits for the second GPU.
        fitting = next((one for one in waiting if one.gpus <= len(free) and left > SHORTEST_S), None)
        if fitting is not None:
            waiting.remove(fitting)
            running.append(Running(fitting, free[: fitting.gpus], timeout_s=min(fitting.timeout_s, left)))
        elif not running:
            print(f"{len(waiting)} cases left for another call", file=sys.stderr)
            return
        time.sleep(0.3)


class Report:
    """The output file, replaced whole after every case."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content: dict[str, Any] = {
            "label": "measured",
            "what": "device memory of thin DeepSeek-V3 models under TorchTitan, five steps each",
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
            "environment": {name: environment()[name] for name in ("moelab", "python", "packages", "gpus")},
            "rows": [],
        }
        self.live_path = path.with_name(f"{path.stem}_live.json")
        self.live: dict[str, Any] = {}
        if path.exists():
            self.content["rows"] = json.loads(path.read_text())["rows"]
        if self.live_path.exists():
            self.live = json.loads(self.live_path.read_text())

    @property
    def measured(self) -> set[str]:
        """Names of cases that were measured or ran out of memory, which is a result too."""
        rows = self.content["rows"]
        return {row["case"]["name"] for row in rows if not row["error"] or "out of memory" in row["error"]}

    def add(self, row: dict[str, Any]) -> None:
        """Add a row, in the place of an earlier failure of the same case."""
        rows = [old for old in self.content["rows"] if old["case"]["name"] != row["case"]["name"]]
        self.live[row["case"]["name"]] = [rank.pop("live", {}) for rank in row["ranks"]]
        self.content["rows"] = [*rows, row]
        write_json(self.path, self.content)
        write_json(self.live_path, self.live)
        peaks = [
            max((step["max_reserved_gib"] for step in rank["reported"]), default=0.0)
            for rank in row["ranks"]
            if "reported" in rank
        ]
        print(row["case"]["name"], f"{row['wall_s']} s", peaks, row["error"] or "", file=sys.stderr, flush=True)


def table(path: Path) -> str:
    """Measured rows beside the model's prediction, as Markdown; a pipeline has a line for each of its ranks."""
    lines = ["| case | measured GiB | predicted GiB | error | fullest moment |", "|---|---|---|---|---|"]
    for row in json.loads(path.read_text())["rows"]:
        experiment, thin = Experiment(**row["case"]["experiment"]), row["case"]["thin"]
        layers = {"dense_layers": thin["dense_layers"], "moe_layers": thin["moe_layers"]}
        shape = shape_of(experiment.model).thin(**layers, num_experts=thin["experts"])
        layout = check(experiment).layout
        assert layout is not None
        layout = replace(layout, stages=split_layers(shape.n_layers, len(layout.stages)))
        for stage in estimate(experiment, layout, H100, shape=shape).by_stage:
            ranks = row["ranks"][stage.rank :: layout.pp] if layout.pp > 1 else row["ranks"]
            peaks = [step["max_reserved_gib"] for rank in ranks for step in rank.get("reported", [])]
            peak = max(peaks, default=float("nan"))
            error = f"{stage.reserved_gib / peak - 1:+.1%}" if not row["error"] else row["error"][:40]
            name = row["case"]["name"] + (f", rank {stage.rank}" if layout.pp > 1 else "")
            lines.append(f"| {name} | {peak:.1f} | {stage.reserved_gib:.1f} | {error} | {stage.moment} |")
    return "\n".join(lines)


def megatron_table(path: Path) -> str:
    """Peaks of Megatron-LM on B200, quoted from SimuMax, beside this package's lists and SimuMax's own prediction."""
    lines = ["| case, pipeline rank | quoted GiB | predicted GiB | error | beyond weights | SimuMax |"]
    lines += ["|---|---|---|---|---|---|"]
    for row in json.loads(path.read_text())["rows"]:
        thin = {"dense_layers": row["dense_layers"], "moe_layers": row["moe_layers"]}
        shape = {"DeepSeek-V2": V2, "DeepSeek-V3": shape_of("671B")}[row["model"]].thin(**thin)
        degrees = {name: row[name] for name in ("gpus", "ep", "pp", "microbatches")}
        predicted = megatron_memory(MegatronRun(shape=shape, tokens=row["micro_batch"] * row["seq_len"], **degrees))
        for rank, found in enumerate(predicted):
            peak, theirs = row["max_allocated_gib"][rank], row["simumax_gib"][rank]
            errors = found.total_gib / peak - 1, found.rest_gib / (peak - found.weights_gib) - 1, theirs / peak - 1
            case = f"{row['model']}, EP {row['ep']}, PP {row['pp']}, {rank}"
            columns = [case, f"{peak:.1f}", f"{found.total_gib:.1f}", *(f"{error:+.1%}" for error in errors)]
            lines.append(f"| {' | '.join(columns)} |")
    return "\n".join(lines)


def main() -> None:
    """Choose cases and run them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "memory_h100.json")
    parser.add_argument(
        "--gpus", type=int, default=2, help="GPUs of this machine to use; cases that need more are left"
    )
    parser.add_argument("--budget-s", type=float, default=530, help="stop after this many seconds")
    parser.add_argument("--only", nargs="*", help="names of cases")
    parser.add_argument("--dry", action="store_true", help="tiny models on a CPU instead")
    parser.add_argument("--list", action="store_true", help="print the cases and end")
    parser.add_argument("--table", action="store_true", help="print measured beside predicted and end")
    arguments = parser.parse_args()
    if arguments.table:
        print(table(arguments.output), megatron_table(HERE / "results" / "memory_b200_simumax.json"), sep="\n\n")
        return
    cases = [one for one in (DRY_CASES if arguments.dry else CASES) if one.gpus <= arguments.gpus]
    cases = [one for one in cases if not arguments.only or one.name in arguments.only]
    if arguments.list:
        print(json.dumps([asdict(one) for one in cases], indent=1))
        return
    began = time.monotonic()
    report = Report(arguments.output)
    corpus.prepare()  # once, before ranks would wait for each other
    cases = [one for one in cases if one.name not in report.measured]
    run_cases(cases, gpus=arguments.gpus, budget_s=arguments.budget_s - (time.monotonic() - began), report=report)


if __name__ == "__main__":
    main()
