"""Write the log of a run of 256 ranks that never was, for the live view: ``data/example_logs/simulated_671b.log.gz``.

    python benchmarks/simulate_log.py

Nothing in it is measured. Step time is the projection's of the published MXFP8 + DeepEP layout, with 1 % of noise from
step to step, and memory the memory model's of each pipeline stage. The loss is a made-up curve, and so are the
events: a checkpoint every ten steps, a throttled GPU from step 24 to 27, and a node that dies in step 34, so that the
job goes on from the checkpoint of step 30.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
from validation.published import published_job
from validation.shapes import tps_of

from moelab.data.example_logs import SIMULATED, SIMULATED_LOG
from moelab.experiment import Experiment
from moelab.model import flops_per_token, shape_for
from moelab.planning.plan import plan
from moelab.planning.time.calibration import CALIBRATION

RUN = Experiment(**SIMULATED)
FLOPS = flops_per_token(shape_for(RUN), RUN.seq_len)
BEGIN = datetime(2026, 11, 29, 6, tzinfo=UTC)
CHECKPOINT_STEPS, CHECKPOINT_S = 10, 75.0
THROTTLED, SLOWER = range(24, 28), 1.18
DIES, RESTART_S = 34, 420.0
HEAD = "[rank{rank}]:[titan] {stamp} - root - INFO - "
STEP = (
    "step: {step:2}  loss: {loss:8.5f}  grad_norm:  {norm:.4f}  memory: {gib:.2f}GiB({percent:.2f}%)  tps: {tps:,.0f}  "
    "tflops: {tflops:,.2f}  mfu: {mfu:.2f}%\n"
)


def stage_memory() -> list[tuple[float, float]]:
    """GiB that PyTorch reserves on a GPU of each stage, and its share of the GPU's in percent."""
    memory = plan(RUN).memory
    assert memory is not None
    own = [sum(gib for part, gib in stage.parts.items() if part != "CUDA and NCCL") for stage in memory.by_stage]
    return [(gib, 100 * gib / memory.capacity_gib) for gib in own]


def log_lines() -> Iterator[str]:
    """All ranks' lines, step by step."""
    noise, ranks = np.random.default_rng(0), RUN.world_size
    tokens = RUN.local_batch * RUN.seq_len / (RUN.tp * RUN.pp)  # of a step and GPU
    step_s = tokens / tps_of(published_job("mxfp8_deepep"), CALIBRATION)
    memory, last_stage = stage_memory(), ranks // RUN.pp * (RUN.pp - 1)
    now, step, died = BEGIN, 0, False

    def head(rank: int) -> str:
        stamp = now + timedelta(milliseconds=rank % 8)
        return HEAD.format(rank=rank, stamp=f"{stamp:%Y-%m-%d %H:%M:%S},{stamp.microsecond // 1000:03}")

    yield f"{head(0)}This log is simulated by benchmarks/simulate_log.py: nothing in it was measured\n"
    yield f"{head(0)}Pipeline Parallel loss is not visible. Add rank {last_stage} to LOG_RANK\n"
    yield f"{head(0)}Training starts at step 1\n"
    while step < RUN.steps:
        if step + 1 == DIES and not died:
            died, step = True, step // CHECKPOINT_STEPS * CHECKPOINT_STEPS
            now += timedelta(seconds=RESTART_S)
            yield from (f"{head(rank)}Training starts at step {step + 1}\n" for rank in range(ranks))
        step += 1
        seconds = step_s * (1 + 0.01 * noise.standard_normal()) * (SLOWER if step in THROTTLED else 1.0)
        now += timedelta(seconds=seconds)
        tps = tokens / seconds
        loss = 12.3 - 1.1 * (1 - np.exp(-step / 15)) + 0.01 * noise.standard_normal()
        for rank in range(ranks):
            gib, percent = memory[rank * RUN.pp // ranks]
            known = {"step": step, "loss": loss if rank >= last_stage else -1.0, "norm": 3.1, "gib": gib}
            tflops = tps * FLOPS / 1e12
            yield head(rank) + STEP.format(**known, percent=percent, tps=tps, tflops=tflops, mfu=100 * tflops / 2250)
        if step % CHECKPOINT_STEPS == 0:
            now += timedelta(seconds=CHECKPOINT_S)
            yield f"{head(0)}Finished saving the checkpoint in {CHECKPOINT_S:.2f} seconds\n"


if __name__ == "__main__":
    packed = gzip.compress("".join(log_lines()).encode(), mtime=0)
    Path(SIMULATED_LOG).write_bytes(packed)
    print(f"{SIMULATED_LOG}: {len(packed):,} bytes")
