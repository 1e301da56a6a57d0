"""Device memory of a layout, predicted without a GPU: exact for what is sharded, modelled for the rest.

- :func:`estimate` gives the peak of every pipeline rank by part, and whether it fits.
- :func:`local_numel` gives the parameters that a rank holds, exactly as TorchTitan shards them.
- ``sharding.py`` is the exact part; ``activations.py`` lists what a layer keeps for its backward pass,
  ``working_set.py`` what it needs for a moment, ``dispatch_buffer.py`` what a dispatcher allocates;
  ``estimate.py`` adds up the fullest moments of a step; every number that is none of these is in ``constants.py``.
- ``megatron.py`` holds the same lists against peaks that others measured on B200 under Megatron-LM.

Nothing here loads torch.
"""

from moelab.memory.constants import MemoryConstants, memory_constants
from moelab.memory.dispatch_buffer import DispatchBuffer, deepep_buffer_bytes, dispatch_buffer
from moelab.memory.estimate import PARTS, MemoryEstimate, StageMemory, estimate
from moelab.memory.sharding import local_numel

__all__ = [
    "PARTS",
    "DispatchBuffer",
    "MemoryConstants",
    "MemoryEstimate",
    "StageMemory",
    "deepep_buffer_bytes",
    "dispatch_buffer",
    "estimate",
    "local_numel",
    "memory_constants",
]
