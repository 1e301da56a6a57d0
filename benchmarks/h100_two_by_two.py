"""Which dispatcher and which precision trains a thin DeepSeek-V3 fastest on the GPUs of one node.

Every arm is the whole training step of TorchTitan as moelab configures it, compiled, of a model whose layers have the
real dimensions but are few. Arms follow one another in A B A B order, so that a drift of the clocks meets all of them;
under each arm, blocks of steps of both routings follow each other. Each pass of an arm has processes of its own: a
second trainer in one process finds the memory of the first still taken. ``--beside 2`` compiles and warms up two passes
at a time, where the memory suffices for two; they are timed one after the other, while the other's processes wait
without a kernel on the GPU. Needs two or more GPUs (SM90 for FP8) and DeepEP V2 for its arms; an arm that cannot run is
recorded with its reason and costs only itself::

    python benchmarks/h100_two_by_two.py --gpus 2 --output two_by_two.json
    python benchmarks/h100_two_by_two.py --gpus 2 --output x.json --shapes 671B --arms bf16_standard bf16_deepep
    python benchmarks/h100_two_by_two.py --gpus 2 --output y.json --shapes "671B MoE-heavy" "671B, 10 MoE layers" \\
        --checkpointing full selective none --arms bf16_standard fp8_deepep_dispatch-fp8 --routings random_balanced
    python benchmarks/h100_two_by_two.py --gpus 2 --output dry.json --dry --eager   # on a CPU, tiny

``benchmarks/h100_full_node.py`` starts this on four and eight GPUs.

Routing is forced and read from a table that is refilled before each step: *round robin* is TorchTitan's forced
balance (neighbouring experts, which share a rank), *random* loads the experts equally too and sends each token to
random ones. The cost of choosing experts is the same in all rows. Two arms are compared under the same activation
checkpointing: it decides how often an exchange is paid. Two depths of one shape give the time of a MoE layer, without
the embedding, the head and the optimizer, which weigh more in a thin model than in a whole one.

The file is written after every pass, and a second call with the same file goes on with what its last campaign lacks;
``--campaign`` begins another. An arm that runs out of memory is a row with that error, and its further passes are left
out; an arm that was refused for another reason is left alone for the rest of the call. The raw log is beside the file.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
from memory_h100_case import thin_shape
from torch import distributed as dist
from torchtitan.config.override import derive, override
from torchtitan.models.common.moe import TokenChoiceTopKRouter
from torchtitan.tools.logging import init_logger
from torchtitan.trainer import Trainer
from validation.shapes import BIG_SHAPES, NODE_SHAPES, SHAPES, Shape
from validation.two_by_two import layer_rows

from moelab.experiment import Experiment
from moelab.files import write_json
from moelab.judge.throughput import CODE, STOCK, STOCK_CHECKPOINTING
from moelab.launch.torchrun import on_this_machine
from moelab.machine import environment, gpus
from moelab.planning.measured import DRY_RUN
from moelab.privacy import without_places
from moelab.titan import config_registry, routing

ROUTINGS = ("round_robin", "random_balanced")
WARM_STEPS = 2
BLOCK_WARM_STEPS = 1
CHECKPOINTING = ("full", "selective", "none")
OUT_OF_MEMORY = "out of memory"
READY_S, COMPILE_S = 17, 30
"""Seconds from the start of a pass to its first timed step, and what its first compilation adds, on two H200."""


DRY_SHAPE = Shape(model="nano", dense=1, moe=2, experts=8, local_batch=2, seq_len=64)
ALL_SHAPES = SHAPES | BIG_SHAPES | NODE_SHAPES | {DRY_RUN: DRY_SHAPE}
ARMS: dict[str, dict[str, Any]] = {
    "bf16_standard": {},
    "bf16_deepep": {"ep_backend": "deepep"},
    "fp8_standard": {"precision": "fp8"},
    "fp8_standard_wgrad-fp8": {"precision": "fp8", "wgrad": "fp8"},
    "fp8_standard_linears": {"precision": "fp8", "quantize": "experts+linears"},
    "fp8_standard_wgrad-fp8_linears": {"precision": "fp8", "wgrad": "fp8", "quantize": "experts+linears"},
    "mxfp8-emulated_standard": {"precision": "mxfp8", "mxfp8_kernels": "emulated"},
    "fp8_deepep": {"precision": "fp8", "ep_backend": "deepep"},
    "fp8_deepep_dispatch-fp8": {"precision": "fp8", "ep_backend": "deepep", "dispatch_precision": "fp8"},
    "fp8_deepep_wgrad-fp8_dispatch-fp8": {
        "precision": "fp8",
        "wgrad": "fp8",
        "ep_backend": "deepep",
        "dispatch_precision": "fp8",
    },
    "fp8_deepep_linears_dispatch-fp8": {
        "precision": "fp8",
        "quantize": "experts+linears",
        "ep_backend": "deepep",
        "dispatch_precision": "fp8",
    },
    "mxfp8-emulated_deepep": {"precision": "mxfp8", "mxfp8_kernels": "emulated", "ep_backend": "deepep"},
    "mxfp8-emulated_deepep_dispatch-mxfp8": {
        "precision": "mxfp8",
        "mxfp8_kernels": "emulated",
        "wgrad": "bf16",
        "ep_backend": "deepep",
        "dispatch_precision": "mxfp8",
    },
}
ARMS |= {
    "fp8_deepep_wgrad-fp8_linears_dispatch-fp8": {
        **ARMS["fp8_deepep_wgrad-fp8_dispatch-fp8"],
        "quantize": "experts+linears",
    },
}
DEFAULT_ARMS = [
    arm
    for arm in ARMS
    if "linears" not in arm
    and arm not in ("fp8_standard_wgrad-fp8", "mxfp8-emulated_standard", "mxfp8-emulated_deepep_dispatch-mxfp8")
]
ARMS |= {
    f"bf16_{backend}_full+dispatch": {"ep_backend": backend, "activation_checkpoint": "full+dispatch"}
    for backend in ("standard", "deepep")
} | {
    f"{arm}_{attention}": {**settings, "attention_backend": attention}
    for arm, settings in list(ARMS.items())
    for attention in ("flex_tiles", "flex_flash")
}


class Key(NamedTuple):
    """One pass of one arm."""

    shape: str
    activation_checkpoint: str
    arm: str
    order: int


class TableRouter(TokenChoiceTopKRouter):
    """A router whose experts are read from a table; scores, and their gradients, stay the gate's."""

    @dataclass(kw_only=True, slots=True)
    class Config(TokenChoiceTopKRouter.Config):
        """``tokens`` of this rank and micro-batch."""

        tokens: int = 0

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._debug_force_load_balance = True
        self.register_buffer("ids_TK", torch.zeros((config.tokens, config.top_k), dtype=torch.int64), persistent=False)

    def _debug_force_load_balance_routing(self, scores_BLE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The table's experts and the gate's scores of them."""
        ids_BLK = self.ids_TK.view(*scores_BLE.shape[:2], self.top_k)
        return ids_BLK, scores_BLE.gather(dim=-1, index=ids_BLK)

    def _init_self_buffers(self, *, buffer_device: torch.device | None = None) -> None:
        self.ids_TK = torch.zeros_like(self.ids_TK, device=buffer_device or self.ids_TK.device)

    def fill(self, kind: str) -> None:
        """Choose the experts of the next step."""
        tokens, top_k = self.ids_TK.shape
        if kind == "round_robin":
            ids = torch.arange(tokens * top_k, device=self.ids_TK.device).view(tokens, top_k) % self.num_experts
        else:
            rank, device = dist.get_rank(), self.ids_TK.device
            ids = routing.draw_experts(tokens, self.num_experts, top_k, rank=rank, device=device)
        self.ids_TK.copy_(ids)


@override(target=TokenChoiceTopKRouter.Config, exact=True, description="experts read from a table")
def table_router(config: TokenChoiceTopKRouter.Config, *, tokens: int, fp32_gate: bool) -> TableRouter.Config:
    """Swap the router; on a CPU its gate too, as moelab does for every model there."""
    from moelab.titan import cpu

    changes = {"gate": cpu.fp32_gate(config.gate)} if fp32_gate else {}
    return derive(config, TableRouter.Config, tokens=tokens, **changes)


def build(shape: Shape, arm: dict[str, Any], *, compile_: str) -> Trainer:
    """The trainer of an arm, as ``moelab run`` would make it, with a thin model and the table router."""
    world = int(os.environ["WORLD_SIZE"])
    experts = shape.thin(world).num_experts
    experiment = Experiment(
        model=shape.model, gpus_per_node=world, ep=world, seq_len=shape.seq_len, local_batch=shape.local_batch,
        steps=1000, warmup_steps=10, lr=1e-4, compile=compile_, routing="learned",
        shape=thin_shape(dense_layers=shape.dense, moe_layers=shape.moe, experts=experts),
        **{"activation_checkpoint": shape.activation_checkpoint, **arm},
    )  # fmt: skip
    config = config_registry.trainer_config(experiment)
    on_cpu = not torch.cuda.is_available()
    imports = [entry for entry in config.override.imports if not (on_cpu and entry == "moelab.titan.cpu.fp32_gate")]
    tokens = shape.local_batch * shape.seq_len
    router = f"{table_router.__module__}.{table_router.__name__}"
    config.override.imports = [*imports, (router, {"tokens": tokens, "fp32_gate": on_cpu})]
    config.dump_folder = f"/tmp/two_by_two/{os.getpid()}"
    config.validator.enable = False
    config.metrics.enable_tensorboard = False
    return config.build()


class Runner:
    """Steps of one trainer."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        trainer.ntokens_seen = 0
        self.batches: Iterator[Any] = trainer.batch_generator(trainer.dataloader)
        self.routers = [module for part in trainer.model_parts for module in part.modules() if hasattr(module, "fill")]

    def step(self, kind: str) -> float:
        """Seconds of one step."""
        for router in self.routers:
            router.fill(kind)
        synchronize()
        start = time.perf_counter()
        self.trainer.step += 1
        self.trainer.train_step(self.batches)
        synchronize()
        return time.perf_counter() - start


def synchronize() -> None:
    """Wait for the GPU and for the other ranks' GPUs."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()


def measure(shape: Shape, arm: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Times of both routings under one arm; this process is one rank of it."""
    on_gpu, folder = torch.cuda.is_available(), options.child_folder
    wait_for(folder / "prepare")
    begun = time.perf_counter()
    runner = Runner(build(shape, arm, compile_="none" if options.eager else "model+loss"))
    for kind in [options.routings[0]] * WARM_STEPS:
        runner.step(kind)
    result: dict[str, Any] = {"seconds": {}, "ready_s": round(time.perf_counter() - begun, 1)}
    if on_gpu:
        torch.cuda.empty_cache()
    (folder / f"ready.{dist.get_rank()}").touch()
    wait_for(folder / "time")
    for kind in options.routings:
        for _ in range(BLOCK_WARM_STEPS):
            runner.step(kind)
        if on_gpu and not result["seconds"]:
            torch.cuda.reset_peak_memory_stats()
            retries = torch.cuda.memory_stats()["num_alloc_retries"]
        result["seconds"][kind] = [round(runner.step(kind), 5) for _ in range(options.steps)]
    if on_gpu:
        result["peak_reserved_gib"] = round(torch.cuda.max_memory_reserved() / 2**30, 2)
        result["peak_active_gib"] = round(torch.cuda.memory_stats()["active_bytes.all.peak"] / 2**30, 2)
        result["allocator_retries"] = torch.cuda.memory_stats()["num_alloc_retries"] - retries
    return result


def wait_for(file: Path) -> None:
    """Wait for a file without the GPU."""
    while not file.exists():
        time.sleep(0.02)


def rows_of(key: Key, measured: dict[str, Any]) -> list[dict[str, Any]]:
    """One row for each routing."""
    shape = ALL_SHAPES[key.shape]
    tokens = shape.local_batch * shape.seq_len
    rows = []
    for kind, seconds in measured["seconds"].items():
        rates = sorted(tokens / second for second in seconds)
        quarters = statistics.quantiles(rates, n=4) if len(rates) > 1 else [rates[0]] * 3
        rows.append(
            {**key._asdict(), "routing": kind, "steps": len(seconds),
             "tps_median": round(statistics.median(rates), 1), "tps_iqr": round(quarters[2] - quarters[0], 1),
             "step_s": seconds, "peak_reserved_gib": measured.get("peak_reserved_gib"),
             "peak_active_gib": measured.get("peak_active_gib"), "ready_s": measured["ready_s"],
             "expandable_segments": True,  # older rows have none: their allocator fragmented, and was short earlier
             "allocator_retries": measured.get("allocator_retries")}
        )  # fmt: skip
    return rows


def no_memory_rows(key: Key, routings: Iterable[str]) -> list[dict[str, Any]]:
    """Rows of a pass that ran out of memory."""
    nothing = {"steps": 0, "tps_median": None, "tps_iqr": None, "step_s": [], "error": OUT_OF_MEMORY}
    return [{**key._asdict(), "routing": kind, **nothing} for kind in routings]


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All passes of an arm together, and its ratio to the faster stock of its campaign under the same checkpointing."""
    groups: dict[tuple[str, ...], dict[tuple[str, str], list[float]]] = {}
    for row in rows:
        if not row.get("error"):
            names = (row["shape"], row["routing"], row.get("campaign", ""), row.get("code", ""))
            arms = groups.setdefault(names, {})
            arms.setdefault((row["activation_checkpoint"], row["arm"]), []).extend(row["step_s"])
    result = []
    for (shape, kind, campaign, code), arms in sorted(groups.items()):
        for (checkpointing, arm), seconds in arms.items():
            alike = STOCK_CHECKPOINTING.get(checkpointing, checkpointing)
            stocks = {name: statistics.median(arms[alike, name]) for name in STOCK if (alike, name) in arms}
            stock = min(stocks, key=stocks.__getitem__, default=None)
            row = {"shape": shape, "activation_checkpoint": checkpointing, "routing": kind, "arm": arm}
            row |= {"steps": len(seconds), "stock": stock}
            row |= {"ratio": stock and round(stocks[stock] / statistics.median(seconds), 4)}
            result.append(row | {name: value for name, value in (("campaign", campaign), ("code", code)) if value})
    return result


class Pass:
    """One pass of one arm in processes of its own, which go on at a word: ``prepare``, then ``time``."""

    def __init__(self, key: Key, options: argparse.Namespace) -> None:
        self.key = key
        self.options, self.folder = options, Path(tempfile.mkdtemp(prefix="two_by_two."))
        command = [*on_this_machine(options.gpus), __file__, *sys.argv[1:]]
        command += ["--child", *map(str, key), "--child-folder", str(self.folder)]
        variables = os.environ | {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}  # as TorchTitan's own launcher
        with (self.folder / "log.txt").open("wb") as sink:
            self.process = subprocess.Popen(command, stdout=sink, stderr=sink, env=variables)

    def say(self, word: str) -> None:
        """Let the processes go on."""
        (self.folder / word).touch()

    def wait(self, *names: str) -> None:
        """Until these files are there, or the processes have ended, or the time is over."""
        end = time.monotonic() + self.options.timeout_s
        while self.process.poll() is None and not all((self.folder / name).exists() for name in names):
            if time.monotonic() > end:
                self.process.terminate()
                self.process.wait()
            time.sleep(0.05)

    def finish(self, content: dict[str, Any]) -> None:
        """Record the result, or why there is none."""
        self.wait("never")
        lines = (self.folder / "log.txt").read_text(errors="replace").splitlines()
        with self.options.output.with_suffix(".log").open("a") as log:
            log.write(without_places("\n".join([f"# {self.key}", *lines, ""])))
        result = self.folder / "result.json"
        if result.exists():
            add(content, rows_of(self.key, json.loads(result.read_text())), self.options)
        elif any(OUT_OF_MEMORY in line for line in lines):  # of PyTorch, CUDA or NCCL
            add(content, no_memory_rows(self.key, self.options.routings), self.options)
        else:
            errors = [without_places(line) for line in lines if "Error" in line][-3:]
            content["refused"].append({**self.key._asdict(), "exit_code": self.process.returncode, "error": errors})
            print("REFUSED", json.dumps(content["refused"][-1])[:600], flush=True)
        write_json(self.options.output, content)
        shutil.rmtree(self.folder)


def main() -> None:
    """Run what is missing of every shape, arm and pass, and write after each."""
    options = parse()
    if options.child:
        child(options)
    content = read(options)
    options.campaign = campaign_of(content, options)
    begun = len(content["refused"])
    missing = missing_keys(content, options, begun)
    print(f"ESTIMATE {estimate_s(missing, options) / 60:.1f} minutes for {len(missing)} passes", flush=True)
    groups = batched((key for key in missing if key in missing_keys(content, options, begun)), options.beside)
    end = time.monotonic() + options.budget_s
    following = [Pass(key, options) for key in next(groups, ())]
    while following:
        group = following
        more = next(groups, ()) if time.monotonic() < end else ()
        following = [Pass(key, options) for key in more]  # they load their libraries while the group compiles
        run_together(group, content, options)
    for row in content.get("summary", []):
        print("SUMMARY", json.dumps(row), flush=True)
    print(pd.DataFrame(layer_rows(content["rows"])).to_string(index=False), flush=True)
    late = missing_keys(content, options, begun)
    print(f"LEFT for another call: {len(late)} passes" if late else "nothing is left", flush=True)


def campaign_of(content: dict[str, Any], options: argparse.Namespace) -> str | None:
    """The campaign that is asked for, or the one that the file ends with, or a new file's own."""
    if options.campaign or not content["rows"]:
        return str(options.campaign or content["date"][:16])
    last: str | None = content["rows"][-1].get("campaign")
    return last


def missing_keys(content: dict[str, Any], options: argparse.Namespace, begun: int) -> list[Key]:
    """Passes that the campaign lacks, the arms of a shape and checkpointing in turn.

    Arms that ran out of memory, and those that this call saw refused (from the ``begun``-th on), lack nothing.
    """
    mine = [row for row in content["rows"] if row.get("campaign") == options.campaign]
    done = {tuple(row[name] for name in Key._fields) for row in mine}
    failed = [row for row in mine if row.get("error")] + content["refused"][begun:]
    hopeless = {tuple(row[name] for name in Key._fields[:3]) for row in failed}
    keys = dict.fromkeys(
        Key(shape, ARMS[arm].get("activation_checkpoint", checkpointing), arm, order)
        for shape in ([DRY_RUN] if options.dry else options.shapes)
        for checkpointing in options.checkpointing or [ALL_SHAPES[shape].activation_checkpoint]
        for order in range(options.passes)
        for arm in options.arms
    )
    return [key for key in keys if key not in done and key[:3] not in hopeless]


def estimate_s(keys: list[Key], options: argparse.Namespace) -> float:
    """Seconds that these passes take on two H200; the time of a step is that of a 671B shape."""
    steps = len(options.routings) * (options.steps + BLOCK_WARM_STEPS)
    shapes = [ALL_SHAPES[key.shape] for key in keys]
    timed_s = sum(steps * (0.15 + 0.1 * (shape.dense + shape.moe)) for shape in shapes)
    return timed_s + READY_S * len(keys) + COMPILE_S * len({key[1:3] for key in keys})


def batched(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Up to ``size`` at a time, taken when they are asked for."""
    rest = iter(items)
    return iter(lambda: list(islice(rest, size)), [])


def run_together(group: list[Pass], content: dict[str, Any], options: argparse.Namespace) -> None:
    """Compile and warm up some passes at a time, and time them one after the other."""
    for one in group:
        one.say("prepare")
    for one in group:
        one.wait(*(f"ready.{rank}" for rank in range(options.gpus)))
    for one in group:
        one.say("time")
        one.finish(content)


def read(options: argparse.Namespace) -> dict[str, Any]:
    """What an earlier call left, or an empty result."""
    if options.output.exists():
        content: dict[str, Any] = json.loads(options.output.read_text())
        return content
    options.output.parent.mkdir(parents=True, exist_ok=True)
    label = DRY_RUN if options.dry else "measured"
    content = {"label": label, "date": datetime.now(UTC).isoformat(), "environment": environment()}
    return content | {"rows": [], "refused": []}


def child(options: argparse.Namespace) -> None:
    """Measure one pass as one rank of it, and leave; rank 0 writes."""
    name, checkpointing, arm, _order = options.child
    init_logger()
    settings = ARMS[arm] | ({"ep_kernels": "emulated"} if options.dry and "deepep" in arm else {})
    measured = measure(replace(ALL_SHAPES[name], activation_checkpoint=checkpointing), settings, options)
    if dist.get_rank() == 0:
        write_json(options.child_folder / "result.json", measured)
    dist.barrier()
    os._exit(0)  # nothing is left to tear down, and NCCL's teardown takes its time


def add(content: dict[str, Any], rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Add rows of this campaign."""
    for row in rows:
        content["rows"].append(row | {"code": CODE} | ({"campaign": options.campaign} if options.campaign else {}))
        print("ROW", json.dumps({name: row[name] for name in row if name != "step_s"}), flush=True)
    content["summary"] = summary(content["rows"])


def parse() -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--gpus", type=int, default=2, help="ranks; all of them share the experts")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES | BIG_SHAPES | NODE_SHAPES), default=list(SHAPES))
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=DEFAULT_ARMS)
    parser.add_argument(
        "--checkpointing", nargs="+", choices=CHECKPOINTING, help="activation checkpointing; default: each shape's own"
    )
    parser.add_argument("--campaign", help="name of its rows; default: the file's last, or its date")
    parser.add_argument("--routings", nargs="+", choices=ROUTINGS, default=list(ROUTINGS))
    parser.add_argument("--passes", type=int, default=2, help="times that each arm runs, in turn")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each routing in each pass")
    parser.add_argument("--beside", type=int, default=1, help="passes that are compiled and warmed up at a time")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="start no arm after this many seconds")
    parser.add_argument("--dry", action="store_true", help="tiny, on a CPU: shows that it runs, and nothing else")
    parser.add_argument("--timeout-s", type=float, default=300, help="of one pass of one arm")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--child-folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    kept = (Path(__file__).parent / "results", Path(__file__).parents[1] / "src/moelab/data/measured")
    if options.dry and not set(kept).isdisjoint(options.output.resolve().parents):
        parser.error(f"--output {options.output}: a dry run is no measurement")
    if not options.dry and not options.child and options.output.exists():
        before = {gpu["name"] for gpu in json.loads(options.output.read_text())["environment"]["gpus"]}
        if before != (here := {gpu.name for gpu in gpus()}):
            parser.error(f"--output {options.output} is of {before}, here are {here}: take another file")
    return options


if __name__ == "__main__":
    main()
