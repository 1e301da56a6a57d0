"""The memory model with the expert load that a run measured; apart from it because it reads a file with numpy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from moelab.errors import BadInput
from moelab.experiment import Experiment, Routing
from moelab.hardware import SourcedNumber
from moelab.model import shape_for
from moelab.planning.memory.peak import MemoryConstants, memory_constants
from moelab.runs.expert_load import FILE, routers_load


def measured_constants(path: Path, experiment: Experiment) -> MemoryConstants:
    """Constants of the memory model, and of a projection, with the load that a run measured in place of assumed ones.

    Time and what is kept go with the mean over layers of the busiest rank at the end of the run; the peak goes with the
    busiest rank of any layer at any recorded step. The load is of all data-parallel ranks together: that of a single
    expert-parallel group can be more uneven.

    The experiment is the one that is planned; the load is shared out over its ``ep`` ranks.

    Raises:
        BadInput: as :func:`~moelab.runs.expert_load.routers_load`, and if this experiment's routing is not learned.
    """
    if experiment.routing is not Routing.LEARNED:
        raise BadInput(
            f"a measured load needs learned routing, but this experiment has routing {experiment.routing.value}"
        )
    load, run = routers_load(path, shape_for(experiment).num_experts)
    busiest_SL = load.busiest_rank_SL(experiment.ep)
    source = f"{FILE} of {run.name}" if run else path.name
    return replace(
        memory_constants,
        routing_imbalance=SourcedNumber(value=float(busiest_SL[load.late].mean()), label="measured", source=source),
        busiest_layer=SourcedNumber(value=float(busiest_SL.max()), label="measured", source=source),
        expert_shares=tuple(load.shares_E(experiment.ep).tolist()),
    )
