"""One rank of one case of ``memory_h100.py``: train a thin DeepSeek-V3 for a few steps and write down what memory did.

Started by ``memory_h100.py``, never by hand::

    python -m moelab.launch.loopback --nproc-per-node 2 memory_h100_case.py --case case.json --folder results/

The steps serve different questions, because asking one disturbs another:

=========  ==========================================================================================================
step       what is recorded
=========  ==========================================================================================================
1          nothing: compilation, lazy buffers, the optimizer's first states
2 and 3    TorchTitan's own peaks of reserved and active memory, undisturbed
4          the bytes allocated at the start, after the forward pass, after the loss, after the backward pass and after
           the optimizer, with the peak of each of these parts (the counters are reset in between, so that the peaks
           which TorchTitan reports of this step mean nothing)
5          the allocator's history, condensed to what was alive at the highest point and after the forward pass
=========  ==========================================================================================================
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torchtitan.tools.logging import init_logger
from torchtitan.trainer import Trainer

from moelab.experiment import Experiment
from moelab.titan import config_registry

STEPS = 5
PARTS_STEP, HISTORY_STEP = 4, 5
PEAKS = ("allocated_bytes.all", "active_bytes.all", "requested_bytes.all", "reserved_bytes.all")
FRAMES_SHOWN = 7
GROUPS_SHOWN = 60


def thin_shape(*, dense_layers: int, moe_layers: int, experts: int) -> dict[str, int]:
    """An experiment's ``shape``: fewer layers and experts; every other dimension is kept."""
    return {"n_layers": dense_layers + moe_layers, "n_dense_layers": dense_layers, "num_experts": experts}


def build_config(case: dict[str, Any], dump_folder: Path) -> Trainer.Config:
    """The experiment's configuration as ``moelab run`` would make it, with the thin model in place of the whole one."""
    experiment = Experiment(**case["experiment"], shape=thin_shape(**case["thin"]), steps=STEPS, warmup_steps=1)
    config = config_registry.trainer_config(experiment)
    config.dump_folder = str(dump_folder)
    config.validator.enable = False
    config.metrics.enable_tensorboard = False
    return config


class Recorder:
    """Hooks on a built trainer that read the allocator's counters and change nothing else."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.reported: list[dict[str, float]] = []
        self.parts: list[dict[str, Any]] = []
        self.live: dict[str, Any] = {}
        self.seconds: list[float] = []
        self._hook()

    def _hook(self) -> None:
        trainer = self.trainer
        monitor = trainer.metrics_processor.device_memory_monitor
        monitor.get_peak_stats = self._keeping(monitor.get_peak_stats)
        trainer.train_step = self._step(trainer.train_step)
        trainer.fwd_bwd_fn = self._marking(trainer.fwd_bwd_fn, before=None, after="backward")
        trainer.optimizers.step = self._marking(trainer.optimizers.step, before="clip", after="optimizer")
        if not trainer.parallel_dims.pp_enabled:
            trainer.loss_fn = self._marking(trainer.loss_fn, before="forward", after="loss")

    def _keeping(self, get_peak_stats: Callable[[], Any]) -> Callable[[], Any]:
        def wrapped() -> Any:
            stats = get_peak_stats()
            self.reported.append({"step": self.trainer.step, **stats._asdict()})
            return stats

        return wrapped

    def _step(self, train_step: Callable[[Any], None]) -> Callable[[Any], None]:
        def wrapped(data_iterator: Any) -> None:
            start = time.perf_counter()
            if self.trainer.step == HISTORY_STEP and self._watches:
                torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=400_000)
            self._mark("start")
            train_step(data_iterator)
            self._mark("end")
            self.seconds.append(round(time.perf_counter() - start, 3))
            if self.trainer.step == HISTORY_STEP and self._watches:
                self.live["peak"] = condensed(live_at_peak)
                torch.cuda.memory._record_memory_history(enabled=None)

        return wrapped

    def _marking(self, function: Callable[..., Any], *, before: str | None, after: str) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            if before:
                self._mark(before)
            result = function(*arguments, **named)
            self._mark(after)
            return result

        return wrapped

    @property
    def _watches(self) -> bool:
        return torch.cuda.is_available() and torch.distributed.get_rank() == 0

    def _mark(self, name: str) -> None:
        """Memory at this point of the step, and the peaks since the point before."""
        if self.trainer.step == HISTORY_STEP and name == "forward" and self._watches:
            self.live["forward"] = condensed(live_at_end)
        if self.trainer.step != PARTS_STEP:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            stats = torch.cuda.memory_stats()
            torch.cuda.reset_peak_memory_stats()
        else:
            stats = {}
        counters = {f"{peak}.{kind}": stats.get(f"{peak}.{kind}", 0) for peak in PEAKS for kind in ("current", "peak")}
        self.parts.append({"part": name, **counters})


def history() -> list[dict[str, Any]]:
    """The allocator's events on this device since recording began."""
    return torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]


def condensed(how: Callable[[list[dict[str, Any]]], dict[str, Any]]) -> dict[str, Any]:
    """A reading of the history; the format is PyTorch's own affair, so a surprise in it must not cost the case."""
    try:
        return how(history())
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        return {"error": repr(error)}


def live_at_peak(trace: list[dict[str, Any]]) -> dict[str, Any]:
    """What was allocated since recording began and alive when that was most."""
    total, peak, peak_index, sizes = 0, 0, 0, {}
    for index, event in enumerate(trace):
        if event["action"] == "alloc":
            sizes[event["addr"]] = event["size"]
            total += event["size"]
        elif event["action"] == "free_completed":
            total -= sizes.pop(event["addr"], 0)
        if total > peak:
            peak, peak_index = total, index
    return live_at_end(trace[: peak_index + 1])


def live_at_end(trace: list[dict[str, Any]]) -> dict[str, Any]:
    """What was allocated since recording began and is still alive, grouped by size and by the code that asked."""
    alive: dict[int, dict[str, Any]] = {}
    freed_before = 0
    for event in trace:
        if event["action"] == "alloc":
            alive[event["addr"]] = event
        elif event["action"] == "free_completed" and alive.pop(event["addr"], None) is None:
            freed_before += event["size"]
    groups = Counter((event["size"], where(event)) for event in alive.values())
    rows = [{"bytes": size, "count": count, "where": place} for (size, place), count in groups.items()]
    rows.sort(key=lambda row: -row["bytes"] * row["count"])
    return {
        "bytes": sum(event["size"] for event in alive.values()),
        "freed_from_before": freed_before,
        "events": len(trace),
        "last": [{"action": event["action"], "bytes": event["size"], "where": where(event)} for event in trace[-3:]],
        "groups": rows[:GROUPS_SHOWN],
    }


def where(event: dict[str, Any]) -> str:
    """The innermost Python frames of an allocation; none means that the C++ autograd engine asked."""
    frames = [
        f"{Path(frame['filename']).name}:{frame['line']} {frame['name']}"
        for frame in event.get("frames", [])
        if frame["filename"].endswith(".py") and "/nn/modules/" not in frame["filename"]
    ]
    return " < ".join(frames[:FRAMES_SHOWN])


def outside_the_allocator() -> int:
    """Bytes in use on this GPU that PyTorch's allocator does not hold: the CUDA context, NCCL, cuBLAS, loaded code."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def local_sizes(trainer: Trainer) -> dict[str, int]:
    """Elements that this rank holds of parameters, gradients' shards and the optimizer's states."""

    def elements(tensor: Any) -> int:
        return int(getattr(tensor, "_local_tensor", tensor).numel())

    parameters = [parameter for part in trainer.model_parts for parameter in part.parameters()]
    states = [
        value
        for optimizer in trainer.optimizers.optimizers
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.dim() > 0
    ]
    return {"parameters": sum(map(elements, parameters)), "optimizer_states": sum(map(elements, states))}


def main() -> None:
    """Train, and leave ``rank<k>.json`` whatever happens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    arguments = parser.parse_args()
    case = json.loads(arguments.case.read_text())
    init_logger()
    result: dict[str, Any] = {"error": None}
    recorder: Recorder | None = None
    try:
        trainer = build_config(case, arguments.folder).build()
        recorder = Recorder(trainer)
        trainer.train()
        result["local"] = local_sizes(trainer)
        trainer.close()
    except torch.OutOfMemoryError as error:
        result["error"] = f"out of memory: {str(error).splitlines()[0]}"
    except Exception as error:
        result["error"] = f"{type(error).__name__}: {error}"[:2000]
        raise
    finally:
        if recorder is not None:
            watched = ("reported", "parts", "live", "seconds")
            result |= {name: getattr(recorder, name) for name in watched}
        result["outside_allocator_bytes"] = outside_the_allocator()
        if torch.cuda.is_available():
            result["gpu"] = torch.cuda.get_device_name()
            result["gpu_bytes"] = torch.cuda.get_device_properties(0).total_memory
        path = arguments.folder / f"rank{os.environ.get('RANK', '0')}.json"
        path.write_text(json.dumps(result, default=dataclasses.asdict))
    os._exit(1 if result["error"] else 0)  # a rank whose peer ran out of memory would wait in NCCL's teardown


if __name__ == "__main__":
    main()
