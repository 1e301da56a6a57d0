"""Device memory of a layout, predicted without a GPU: exact for what is sharded, modelled for the rest.

- :func:`estimate` gives the peak of every pipeline rank by part, and whether it fits.
- :mod:`moelab.layout.sharding` is the exact part: what a rank holds, as TorchTitan shards it.
- ``activations.py`` lists what a layer keeps for its backward pass and what it needs
  for a moment; ``peak.py`` adds up the fullest moments of a step, and has the dispatchers' buffers and every number
  that is neither. ``benchmarks/validation/memory_megatron.py`` holds the lists against peaks of Megatron-LM on B200.

Nothing here loads torch.
"""

from moelab.planning.memory.peak import (
    PARTS,
    MemoryConstants,
    MemoryEstimate,
    deepep_buffer_bytes,
    estimate,
    memory_constants,
)

__all__ = [
    "PARTS",
    "MemoryConstants",
    "MemoryEstimate",
    "deepep_buffer_bytes",
    "estimate",
    "memory_constants",
]
