"""Do moelab's dispatcher and FP8 experts train as the standard ones do? The same seeds, step by step.

The debug model learns for 50 steps at equal seeds, with learned routing, under

==================  ==================================================================================================
``standard``        TorchTitan's dispatcher; two runs show its run-to-run noise
``nudged``          the same, with one weight of the router changed by one unit in the last place of BF16: how far apart
                    losses drift on account of rounding alone
``deepep``          moelab's dispatcher; an expert's rows stand in their order of arrival, another one in each run
``deepep_ordered``  the same with DeepEP's ``deterministic`` buffer, which sorts them
``best``            the fastest arm on Hopper: DeepEP, experts and dispatch in FP8, weight gradients too
``best_bf16_wgrad`` the same with weight gradients in BF16
``fp8`` …           the standard dispatcher with FP8 experts, FP8 weight gradients, FP8 linears, emulated MXFP8 experts
==================  ==================================================================================================

The largest difference between the losses of two runs at any step is reported for each pair of kinds::

    torchrun="python -m moelab.launch.loopback --nproc-per-node"
    $torchrun 2 benchmarks/dispatcher_losses.py --output dispatcher_losses.json
    $torchrun 1 benchmarks/dispatcher_losses.py --output one_gpu.json --arms standard nudged fp8
    $torchrun 2 benchmarks/dispatcher_losses.py --output dry.json --dry    # on a CPU, a few steps
"""

from __future__ import annotations

import argparse
import gc
import json
import os
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from itertools import combinations
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import distributed as dist
from torchtitan.tools.logging import init_logger
from torchtitan.trainer import Trainer

from moelab.deepep.buffer import close_exchanges
from moelab.experiment import Experiment
from moelab.files import write_json
from moelab.machine import environment
from moelab.titan import config_registry

ORDER = ("standard", "deepep_ordered", "nudged", "deepep", "standard", "deepep_ordered", "deepep")
BEST = {"ep_backend": "deepep", "precision": "fp8", "dispatch_precision": "fp8", "wgrad": "fp8"}
ARMS: dict[str, dict[str, str]] = {
    "standard": {},
    "nudged": {},
    "deepep": {"ep_backend": "deepep"},
    "deepep_ordered": {"ep_backend": "deepep"},
    "best": BEST,
    "best_bf16_wgrad": {**BEST, "wgrad": "bf16"},
    "fp8": {"precision": "fp8"},
    "fp8_wgrad": {"precision": "fp8", "wgrad": "fp8"},
    "fp8_linears": {"precision": "fp8", "quantize": "experts+linears"},
    "mxfp8": {"precision": "mxfp8"},
}


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
        **{**settings, **dry, "precision": precision, **ARMS[arm]}, gpus_per_node=world, ep=world, seed=seed, lr=1e-3,
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
    if arm == "nudged":
        nudge(trainer)
    with ordered_rows() if arm == "deepep_ordered" and not options.dry else nullcontext():
        trainer.train()
    trainer.close()
    close_exchanges()
    del trainer
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return seen


def ordered_rows() -> AbstractContextManager[Any]:
    """DeepEP buffers that sort their rows, without PyTorch's deterministic mode, which would change the rest too."""
    import deep_ep

    buffer = deep_ep.ElasticBuffer
    return mock.patch.object(
        deep_ep, "ElasticBuffer", lambda *args, **kw: buffer(*args, **{**kw, "deterministic": True})
    )


def nudge(trainer: Trainer) -> None:
    """Change this rank's first weight of the first router by one unit in the last place of BF16."""
    routers = (weight for name, weight in trainer.model_parts[0].named_parameters() if "router.gate" in name)
    weight = next(routers).detach()
    local = weight.to_local() if hasattr(weight, "to_local") else weight
    local.view(-1)[0] *= 1 + 2**-7


def differences(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Largest difference of the losses at one step between runs of each pair of kinds."""
    found: dict[str, float] = {}
    for one, other in combinations(runs, 2):
        pair = " | ".join(sorted((one["arm"], other["arm"])))
        gap = max(abs(a - b) for a, b in zip(one["losses"], other["losses"], strict=True))
        found[pair] = max(gap, found.get(pair, 0.0))
    return found


def main() -> None:
    """Train and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="each arm runs once with each")
    parser.add_argument("--precisions", nargs="+", default=["bf16"], help="of the arms that have none of their own")
    parser.add_argument("--arms", nargs="+", default=ORDER, choices=ARMS, help="one run each, in this order")
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args()
    init_logger()
    one_mesh = OneMesh()
    Trainer.init_distributed = lambda trainer: one_mesh(trainer)  # type: ignore[method-assign]
    content: dict[str, Any] = {"label": "measured", "date": datetime.now(UTC).isoformat(), "environment": environment()}
    content["results"] = []
    for precision in options.precisions:
        for seed in options.seeds:
            result: dict[str, Any] = {"precision": precision, "seed": seed, "runs": []}
            content["results"].append(result)
            for arm in options.arms:
                result["runs"].append({"arm": arm, "losses": losses(arm, precision, seed, options)})
                result["largest_difference"] = differences(result["runs"])
                if dist.get_rank() == 0:
                    write_json(options.output, content)
                    print("LOSSES", precision, seed, arm, json.dumps(result["largest_difference"]), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
