"""What differs from the published scripts of the 256-GPU study, and why.

The scripts are those of the Nebius ml-cookbook, ``pytorch-dsv3-mxfp8``, published with the article of March 2026.
Faults are named so that nobody copies them; the other rows are what today's TorchTitan 0.3.0 does differently.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moelab.experiment import Experiment
from moelab.titan.arms import PUBLISHED, SHARED

LAYOUT = ("nodes", "gpus_per_node", "pp", "tp", "ep", "seq_len", "local_batch")
"""Fields that make an experiment one of the published size and layout."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One row of the table.

    Attributes:
        topic: what it is about.
        published: what the published scripts do, and what comes of it.
        here: what moelab does instead.
        kind: ``fault`` of a script, or a difference of the ``stack`` since then.
        models: models whose script it concerns.
    """

    topic: str
    published: str
    here: str
    kind: Literal["fault", "stack"] = "fault"
    models: tuple[str, ...] = ("16B", "671B")


DIFFERENCES = (
    Difference(
        topic="batch directives",
        published="`set -euo pipefail` stands before the #SBATCH lines, so sbatch ignores all of them",
        here="`moelab submit` writes the script, directives before any command; tests read and run it",
    ),
    Difference(
        topic="script folder",
        published="it is taken from BASH_SOURCE, which under sbatch is slurmd's spool folder, so `source .env` fails",
        here="the job needs no file beside it: the experiment is one file, and its absolute path is in the script",
    ),
    Difference(
        topic="MXFP8 flags",
        published=(
            "mxfp8_wgrad_with_hp and expert_parallel_a2a_*_precision do not exist at the pinned TorchTitan commit "
            "1a36996b"
        ),
        here=(
            "wgrad=bf16 and dispatch_precision=mxfp8 are fields of the experiment, and an unknown field is refused; "
            "together they are the arm that the article describes"
        ),
        models=("16B",),
    ),
    Difference(
        topic="MXFP8 linears",
        published="filter_fqns is a list of what to skip, and leaves only w1 and w3 of layer 0 in MXFP8",
        here=(
            "quantize=experts+linears converts the linears of attention, dense FFN and shared experts; each run "
            "records which modules were converted, and one that converts none fails"
        ),
    ),
    Difference(
        topic="time limit, requeue, checkpoint",
        published="none is set, so a lost node loses the run",
        here="all three are the cluster profile's: before the limit a job saves its step, is requeued and goes on",
    ),
    Difference(
        topic="seed",
        published="none is set, so arms start from different weights",
        here="seed is a field of the experiment, shared by the arms of a study",
    ),
    Difference(
        topic="network cards",
        published="the scripts of 16B and 671B use different lists of NICs",
        here="network settings belong to the cluster profile, which all arms of a study share",
    ),
    Difference(
        topic="statistics",
        published="throughput is given without a rule for discarding steps and without a variance",
        here="the first steps after each start are discarded, and medians come with intervals",
    ),
    Difference(
        topic="warm-up",
        published="2000 warm-up steps are longer than the run, so the learning rate never reaches its peak",
        here=(
            "the same numbers, but TorchTitan 0.3.0 shortens a warm-up to the run: the peak is reached at the last "
            "step; choose warmup_steps below steps for a real schedule"
        ),
    ),
    Difference(
        topic="routing",
        published="forced balance sends tokens to contiguous experts, which makes DeepEP look cheaper than it is",
        here="routing=round_robin does the same, and a note says so; routing=random_balanced has equal load without it",
    ),
    Difference(
        topic="expert tensor parallelism",
        published="ETP 1 is a setting of its own",
        here="TorchTitan 0.3.0 has none: expert parallelism takes ranks of dp_shard, cp and tp",
        kind="stack",
    ),
    Difference(
        topic="padding",
        published="left to TorchTitan's default, which is 32 tokens of an expert in 0.3.0",
        here="128 on SM100, which torchao 0.18's quantisation kernel needs",
        kind="stack",
    ),
    Difference(
        topic="CUDA graphs",
        published="not mentioned",
        here="off: TorchTitan 0.3.0 has them on and refuses them with pipelines and with dispatch that waits",
        kind="stack",
    ),
    Difference(
        topic="DeepEP arms",
        published="stock DeepEP dispatcher, MXFP8 experts and compile=model+loss together",
        here=(
            "TorchTitan 0.3.0 refuses the three together, so ep_backend=deepep is moelab's dispatcher on DeepEP 2.x, "
            "which pads while it receives, compiles, and applies the scores before the experts' last product"
        ),
        kind="stack",
        models=("671B",),
    ),
)


def differences(experiment: Experiment) -> tuple[Difference, ...]:
    """Rows that concern an experiment; empty unless it is one of the published size and layout.

    >>> len(differences(Experiment(model="nano")))
    0
    """
    published = {**SHARED, **PUBLISHED.get(experiment.model, {})}
    if experiment.shape or any(getattr(experiment, field) != published.get(field, 1) for field in LAYOUT):
        return ()
    return tuple(row for row in DIFFERENCES if experiment.model in row.models)
