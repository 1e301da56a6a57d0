"""Device memory of a layout, predicted without a GPU: exact for what is sharded, modelled for the rest.

- :func:`estimate` gives the peak of every pipeline rank by part, and whether it fits.
- :func:`local_numel` gives the parameters that a rank holds, exactly as TorchTitan shards them.
- ``sharding.py`` is the exact part; ``activations.py`` lists what a layer keeps for its backward pass,
  ``working_set.py`` what it needs for a moment, ``inflight.py`` how many micro-batches a pipeline rank holds;
  ``estimate.py`` adds up the fullest moments of a step; every number that is none of these is in ``constants.py``.

Nothing here loads torch.
"""

from moelab.memory.constants import MemoryConstants, memory_constants
from moelab.memory.estimate import PARTS, MemoryEstimate, StageMemory, estimate
from moelab.memory.inflight import in_flight
from moelab.memory.sharding import local_numel

__all__ = [
    "PARTS",
    "MemoryConstants",
    "MemoryEstimate",
    "StageMemory",
    "estimate",
    "in_flight",
    "local_numel",
    "memory_constants",
]
