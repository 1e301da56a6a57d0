"""A trainer that can be asked to stop, saves where it is, and goes on from there in another job; it also records.

Whoever wants it to stop makes the file that ``MOELAB_STOP_FILE`` names, on the node of any one rank. A signal would do
as well for the ranks, but not for the processes that they start (data loaders, compilers), which it would end. Before
each step all ranks agree with one all-reduce of a number whether there is such a file, so they all save the same step;
the first rank then writes ``launch/stopped.json``.

A checkpoint is complete when it has its ``.metadata``, which PyTorch writes last and at once; TorchTitan resumes from
the newest one that has it. It holds the weights, the optimizer, the schedule, the step and each rank's place in the
text. The state of random numbers is not in it: ``routing: random_balanced`` draws others after a resume.

Written against torchtitan 0.3.0: ``Trainer.train`` asks ``should_continue_training`` before each step, and the
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

from moelab.runs.directory import STOP_VARIABLE, STOPPED_FILE
from moelab.runs.files import write_json
from moelab.titan.record import record_expert_load
from moelab.titan.trace import StepTracer


class ResumeCheckpoints(CheckpointManager):
    """TorchTitan's checkpoints for resuming alone: none after the last step, and one whenever it is asked for."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """No settings of its own."""

    saved_step = 0
    _asked_step = -1

    def save_now(self, step: int) -> None:
        """Save a step that has been trained, unless that was done."""
        if self.saved_step != step:
            self._asked_step = step
            self.save(step)
        self.maybe_wait_for_saving()

    def _load(self, step: int = -1) -> bool:
        loaded = super()._load(step)
        if loaded:
            self.saved_step = self.states["train_state"].step
        return loaded

    def _should_save(self, curr_step: int, last_step: bool = False) -> bool:
        # Not after the last step: a run that is done is not resumed.
        return not last_step and (curr_step == self._asked_step or super()._should_save(curr_step))

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        saved = not last_step and super()._save(curr_step)
        self.saved_step = curr_step if saved else self.saved_step
        return saved


class StoppableTrainer(Trainer):
    """TorchTitan's trainer, which also stops when it is asked to, and records its experts' load and a step's trace."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """Of the trace, as the experiment has it (:class:`~moelab.experiment.Experiment`)."""

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
        """As TorchTitan's, traced at the step that is to be."""
        with self._tracer.around(self.step) if self._tracer else nullcontext():
            super().train_step(data_iterator)

    def init_distributed(self) -> ParallelDims:
        """As TorchTitan's; in a job, one collective of all ranks shows at once whether they reach each other."""
        dims = super().init_distributed()
        if STOP_VARIABLE in os.environ:
            start = time.perf_counter()
            ranks = _all_reduced(1, dist.ReduceOp.SUM, self.device)
            logger.info(f"moelab: first all-reduce, of {ranks} ranks, took {time.perf_counter() - start:.2f} s")
        return dims

    def should_continue_training(self) -> bool:
        """Whether there are steps left and nobody asked to stop; if somebody did, the last step has been saved."""
        if not super().should_continue_training():
            return False
        stop_file = os.environ.get(STOP_VARIABLE)
        if stop_file is None or not _all_reduced(Path(stop_file).exists(), dist.ReduceOp.MAX, self.device):
            return True
        if self.step:  # before the first there is nothing that a new start would not have
            self.checkpointer.save_now(self.step)
        logger.info(f"moelab: stopped at step {self.step} as asked, to go on from there")
        if dist.get_rank() == 0:
            write_json(Path(self.config.dump_folder) / STOPPED_FILE, {"step": self.step})
        return False


def _all_reduced(value: int, operation: dist.ReduceOp.RedOpType, device: torch.device) -> int:
    """One whole number of each rank, reduced over all of them."""
    number = torch.tensor(int(value), dtype=torch.int32, device=device)
    dist.all_reduce(number, operation)
    return int(number)
