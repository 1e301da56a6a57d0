"""DeepSeek-V3 as arithmetic: parameters, FLOPs, the GEMMs of a step and the bytes that tokens travel with.

The shapes are TorchTitan's own and every count is exact: the tests build TorchTitan's models without memory (the meta
device) and compare. Nothing here imports torch, so that thousands of layouts can be judged in a second.

``shape.py`` has the dimensions, ``parameters.py`` the weights and what a step does with them.
"""

from moelab.model.parameters import (
    BYTES_PER_ELEMENT,
    DispatchPrecision,
    Parameter,
    count_parameters,
    flops_per_token,
    gemms,
    parameters,
)
from moelab.model.shape import (
    EMBEDDING,
    HEAD,
    NORM,
    SHAPES,
    TOKENIZERS,
    ModelShape,
    shape_for,
    shape_of,
    tokenizer_size,
)

__all__ = [
    "BYTES_PER_ELEMENT",
    "EMBEDDING",
    "HEAD",
    "NORM",
    "SHAPES",
    "TOKENIZERS",
    "DispatchPrecision",
    "ModelShape",
    "Parameter",
    "count_parameters",
    "flops_per_token",
    "gemms",
    "parameters",
    "shape_for",
    "shape_of",
    "tokenizer_size",
]
