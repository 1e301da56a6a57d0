"""Does moelab's DeepEP dispatcher train as the standard one does? The same seeds, step by step.

The debug model learns for 50 steps at equal seeds, with learned routing: twice or more with the standard dispatcher,
whose differences are the run-to-run noise (sums on a GPU have no fixed order), then with DeepEP's. The largest
difference between a DeepEP run and a standard one is reported beside the largest between two standard runs::

    torchrun --nproc-per-node 2 benchmarks/dispatcher_losses.py --output dispatcher_losses.json
    torchrun --nproc-per-node 2 benchmarks/dispatcher_losses.py --output dry.json --dry    # on a CPU, a few steps
"""

from __future__ import annotations

import argparse
import gc
import json
import os
from datetime import UTC, datetime
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torchtitan.tools.logging import init_logger
from torchtitan.trainer import Trainer

from moelab.deepep.elastic import close_exchanges
from moelab.experiment import Experiment
from moelab.machine import environment
from moelab.runs.files import write_json
from moelab.titan import config_registry

ORDER = ("standard", "deepep", "standard", "deepep", "standard")
"""A B A B A."""


class OneMesh:
    """Gives all trainers of this process one device mesh: FSDP2 insists on the mesh object that DTensor has cached."""

    def __init__(self) -> None:
        self.first: Any = None
        self.original = Trainer.init_distributed

    def __call__(self, trainer: Trainer) -> Any:
        """In place of ``Trainer.init_distributed``; every arm has the same degrees."""
        if self.first is None:
            self.first = self.original(trainer)
        return self.first


def losses(arm: str, precision: str, seed: int, options: argparse.Namespace) -> list[float]:
    """Losses of all steps of one run."""
    world = int(os.environ["WORLD_SIZE"])
    dry = {"model": "nano", "seq_len": 64, "ep_kernels": "emulated"} if options.dry else {}
    settings = {"model": "debug", "seq_len": 2048, "local_batch": 4, "steps": options.steps, "warmup_steps": 5}
    experiment = Experiment(
        **{**settings, **dry}, gpus_per_node=world, ep=world, ep_backend=arm, precision=precision, seed=seed, lr=1e-3,
        mxfp8_kernels="emulated",
    )  # fmt: skip
    config = config_registry.trainer_config(experiment)
    config.dump_folder = f"/tmp/dispatcher_losses/{os.getpid()}"
    config.validator.enable = False
    config.metrics.enable_tensorboard = False
    trainer = config.build()
    seen: list[float] = []
    log = trainer.metrics_processor.log

    def keep(step: int, average: float, *rest: Any, **named: Any) -> None:
        seen.append(float(average))
        log(step, average, *rest, **named)

    trainer.metrics_processor.log = keep
    trainer.train()
    trainer.close()
    close_exchanges()
    del trainer
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return seen


def differences(runs: list[dict[str, Any]]) -> dict[str, float | None]:
    """Largest difference of the losses at one step, among standard runs and between standard and DeepEP ones."""
    by_arm = {arm: [run["losses"] for run in runs if run["arm"] == arm] for arm in ("standard", "deepep")}

    def largest(pairs: Any) -> float | None:
        gaps = [max(abs(a - b) for a, b in zip(one, other, strict=True)) for one, other in pairs]
        return max(gaps, default=None)

    return {
        "standard_standard": largest(combinations(by_arm["standard"], 2)),
        "deepep_deepep": largest(combinations(by_arm["deepep"], 2)),
        "standard_deepep": largest((a, b) for a in by_arm["standard"] for b in by_arm["deepep"]),
    }


def main() -> None:
    """Train and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--precisions", nargs="+", default=["bf16"])
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args()
    init_logger()
    one_mesh = OneMesh()
    Trainer.init_distributed = lambda trainer: one_mesh(trainer)  # type: ignore[method-assign]
    content: dict[str, Any] = {"label": "measured", "date": datetime.now(UTC).isoformat(), "environment": environment()}
    content["results"] = []
    for precision in options.precisions:
        for seed in range(options.seeds):
            result: dict[str, Any] = {"precision": precision, "seed": seed, "runs": []}
            content["results"].append(result)
            for arm in ORDER:
                result["runs"].append({"arm": arm, "losses": losses(arm, precision, seed, options)})
                result["largest_difference"] = differences(result["runs"])
                if dist.get_rank() == 0:
                    write_json(options.output, content)
                    print("LOSSES", precision, seed, arm, json.dumps(result["largest_difference"]), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
