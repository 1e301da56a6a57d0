"""What differs from the published scripts of the 256-GPU study, and why; ``data/published.yaml`` has the rows.

The scripts are those of the Nebius ml-cookbook, ``pytorch-dsv3-mxfp8``, published with the article of March 2026.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import ConfigDict, TypeAdapter

from moelab.data import read_yaml
from moelab.experiment import Experiment
from moelab.titan.arms import PUBLISHED, SHARED


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

    __pydantic_config__ = ConfigDict(extra="forbid")


DIFFERENCES = TypeAdapter(tuple[Difference, ...]).validate_python(read_yaml("published.yaml")["differences"])
LAYOUT = ("nodes", "gpus_per_node", "pp", "tp", "ep", "seq_len", "local_batch")
"""Fields that make an experiment one of the published size and layout."""


def differences(experiment: Experiment) -> tuple[Difference, ...]:
    """Rows that concern an experiment; empty unless it is one of the published size and layout.

    >>> len(differences(Experiment(model="nano")))
    0
    """
    published = {**SHARED, **PUBLISHED.get(experiment.model, {})}
    if experiment.shape or any(getattr(experiment, field) != published.get(field, 1) for field in LAYOUT):
        return ()
    return tuple(row for row in DIFFERENCES if experiment.model in row.models)
