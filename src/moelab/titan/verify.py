"""Build an experiment with TorchTitan itself, for a world of any size, in a process without a GPU.

A child process (``verify_rank.py``) uses the fake backend of ``torch.distributed`` (any world size, no peers), builds
the model on the meta device (shapes without storage), has TorchTitan split it into pipeline stages and shard it as one
rank of that world, and counts what that rank holds. It configures the model for the experiment's GPU, so the
dispatcher, the MXFP8 kernels and the SPMD backend are those of the real run. The result lists what cannot be built
without a GPU.

This module does not load torch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from moelab.errors import BadInput, MoelabError, Refused
from moelab.experiment import Experiment
from moelab.hardware import gpu_of
from moelab.layout import check
from moelab.layout.sharding import local_numel
from moelab.model import shape_for

CAPABILITY = 10.0
"""Compute capability to assume where the experiment's hardware has no GPU: a B200's."""
CHILD = "moelab.titan.verify_rank"


def verify(experiment: Experiment, ranks: Sequence[int] | None = None) -> dict[str, Any]:
    """Build some global ranks of an experiment, by default the first of every pipeline rank; report what they hold.

    Returns:
        ``seconds``, ``world_size``, ``gpu`` (what it was configured for), ``total_parameters``, ``spmd_backend``,
        ``dispatcher``, ``overrides``, ``not_built`` (what needs a GPU, in words) and ``ranks``. For each: ``rank``,
        ``pp_rank``, ``stages`` (number and modules), ``parameters`` (elements of its shards), ``expert_parameters``,
        ``unique_parameters`` (each element divided by the number of ranks with a copy, so that all ranks sum up to the
        total), ``mxfp8_modules``, ``predicted_parameters`` (by :mod:`moelab.planning.memory`) and ``seconds``.

    Raises:
        BadInput: for a rank outside of the world.
        Refused: with TorchTitan's own words, if it does not build.
    """
    started = time.monotonic()
    # The pipeline is TorchTitan's outermost axis.
    firsts = [stage * (experiment.world_size // experiment.pp) for stage in range(experiment.pp)]
    chosen = firsts if ranks is None else list(ranks)
    if wrong := [rank for rank in chosen if not 0 <= rank < experiment.world_size]:
        raise BadInput(f"rank {wrong[0]} does not exist here; valid ranks are 0 to {experiment.world_size - 1}")
    capability = gpu_of(experiment.hardware).capability or CAPABILITY
    major_minor = divmod(round(10 * capability), 10)
    request = {"experiment": experiment.model_dump(mode="json"), "ranks": chosen, "capability": major_minor}
    answer = _ask_child(request)
    for error in [row["error"] for row in answer["ranks"] if "error" in row]:
        raise Refused(f"TorchTitan does not build this experiment: {error}")
    layout = check(experiment).layout
    for row in answer["ranks"]:
        # An illegal layout has no prediction, even if TorchTitan builds it.
        row["predicted_parameters"] = layout and local_numel(shape_for(experiment), layout, row["rank"])
    return {"seconds": round(time.monotonic() - started, 1), "world_size": experiment.world_size, **answer}


def _ask_child(request: dict[str, Any]) -> dict[str, Any]:
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",  # a GPU that is here must not answer for the one that is assumed
        "HF_HUB_OFFLINE": "1",  # nothing is downloaded to count parameters
        "OMP_NUM_THREADS": "1",  # ranks are built side by side, one to a core
    }
    done = subprocess.run(
        [sys.executable, "-m", CHILD],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise MoelabError(f"verification ended with exit code {done.returncode}: {last[:500]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])  # libraries may print before it
    return answer
