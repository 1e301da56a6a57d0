"""A trainer that stops on request, saves its state, and resumes in another job; it also records what it runs.

The request is the file that ``MOELAB_STOP_FILE`` names, on the node of any one rank. A signal would reach the ranks as
well, but would also end the processes that they start (data loaders, compilers). Before each step, all ranks agree in
one all-reduce of a number whether the file exists, so they all save the same step; the first rank then writes
``launch/stopped.json``.

A checkpoint is complete when it has its ``.metadata``, which PyTorch writes last and atomically; TorchTitan resumes
from the newest one that has it. It holds the weights, the optimizer, the schedule, the step and each rank's position in
the text, but no random state: with ``routing: random_balanced``, a resumed run draws other experts.

Written for torchtitan 0.3.0: ``Trainer.train`` calls ``should_continue_training`` before each step, and the
checkpointer after it.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.distributed import ParallelDims
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

from moelab.files import write_json
from moelab.runs.directory import STOP_VARIABLE, STOPPED_FILE
from moelab.titan.record import record_expert_load
from moelab.titan.trace import StepTracer


class ResumeCheckpoints(CheckpointManager):
    """TorchTitan's checkpoints, for resuming only: one on request, and none after the last step."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """No settings of its own."""

    saved_step = 0
    _asked_step = -1

    def save_now(self, step: int) -> None:
        """Save the step that was just trained, unless it has been saved."""
        if self.saved_step != step:
            self._asked_step = step
            self.save(step)
        self.maybe_wait_for_saving()  # the process may be killed as soon as this returns

    def _load(self, step: int = -1) -> bool:
        loaded = super()._load(step)
        if loaded:
            self.saved_step = self.states["train_state"].step
        return loaded

    def _should_save(self, curr_step: int, last_step: bool = False) -> bool:
        # Not after the last step: a finished run is never resumed.
        return not last_step and (curr_step == self._asked_step or super()._should_save(curr_step))

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        saved = not last_step and super()._save(curr_step)
        self.saved_step = curr_step if saved else self.saved_step
        return saved


class StoppableTrainer(Trainer):
    """TorchTitan's trainer, which also stops on request, and records its expert load and the trace of a step."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """The experiment's trace settings (:class:`~moelab.experiment.Experiment`)."""

        trace_step: int = 0
        trace_ranks: tuple[int, ...] = (0,)
        memory_snapshot: bool = False

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        record_expert_load(self)
        self._tracer: StepTracer | None = None
        if config.trace_step and (rank := dist.get_rank()) in config.trace_ranks:
            run = Path(config.dump_folder)
            self._tracer = StepTracer(config.trace_step, rank, run, memory_snapshot=config.memory_snapshot)

    def train_step(self, data_iterator: Iterator[tuple[dict[str, Any], torch.Tensor]]) -> None:
        """Train as TorchTitan does, with a trace of the step that the configuration names."""
        with self._tracer.around(self.step) if self._tracer else nullcontext():
            try:
                super().train_step(data_iterator)
            except RuntimeError as error:
                self.metrics_processor.keep_failure(self.step, error)
                raise

    def init_distributed(self) -> ParallelDims:
        """Initialise as TorchTitan does; in a job, an all-reduce then shows at once whether all ranks are connected."""
        dims = super().init_distributed()
        if STOP_VARIABLE in os.environ:
            start = time.perf_counter()
            ranks = _all_reduced(1, dist.ReduceOp.SUM, self.device)
            logger.info(f"moelab: first all-reduce, of {ranks} ranks, took {time.perf_counter() - start:.2f} s")
        return dims

    def should_continue_training(self) -> bool:
        """Whether steps are left and no stop was requested; on a request, the last step has been saved on return."""
        if not super().should_continue_training():
            return False
        stop_file = os.environ.get(STOP_VARIABLE)
        if stop_file is None or not _all_reduced(Path(stop_file).exists(), dist.ReduceOp.MAX, self.device):
            return True
        if self.step:  # before the first step, a new start has the same state
            self.checkpointer.save_now(self.step)
        logger.info(f"moelab: stopped at step {self.step} as asked, to go on from there")
        if dist.get_rank() == 0:  # after the save: the file tells the launcher that the run can be requeued
            write_json(Path(self.config.dump_folder) / STOPPED_FILE, {"step": self.step})
        return False


def _all_reduced(value: int, operation: dist.ReduceOp.RedOpType, device: torch.device) -> int:
    """Each rank's number, reduced over all ranks."""
    number = torch.tensor(int(value), dtype=torch.int32, device=device)  # wide enough to count ranks
    dist.all_reduce(number, operation)
    return int(number)
