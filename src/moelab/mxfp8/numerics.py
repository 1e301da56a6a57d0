"""What MXFP8 does to numbers: casts, error measures, data to try them on, and the three GEMMs of a layer.

The parts have modules of their own; this one names what notebooks and tests use of them.

Example:
    >>> errors = measure(synthetic("gaussian", (64, 128)), MX(scaling="rceil"))
    >>> 25 < errors.sqnr_db < 35
    True
"""

from moelab.mxfp8.comparison import (
    ErrorRow,
    GemmRow,
    compare_methods,
    compare_products,
    compare_scalings,
    largest_number_errors,
)
from moelab.mxfp8.data import DISTRIBUTIONS, Distribution, synthetic
from moelab.mxfp8.errors import (
    TensorErrors,
    block_range_bits,
    block_sqnr_db,
    measure,
    relative_error,
    sqnr_db,
)
from moelab.mxfp8.fake_quantise import BLOCK, NotWholeBlocks
from moelab.mxfp8.formats import (
    BF16,
    E4M3,
    E5M2,
    ELEMENTS,
    FP8,
    MX,
    SCALINGS,
    Cast,
    Element,
    Format,
    NotFinite,
    Scaling,
)
from moelab.mxfp8.gemm_errors import METHODS, PRODUCTS, GroupedGemm, Method, Product, gemm_errors, layer_gemms
from moelab.mxfp8.one_block import OneBlock, one_block

__all__ = [
    "BF16",
    "BLOCK",
    "DISTRIBUTIONS",
    "E4M3",
    "E5M2",
    "ELEMENTS",
    "FP8",
    "METHODS",
    "MX",
    "PRODUCTS",
    "SCALINGS",
    "Cast",
    "Distribution",
    "Element",
    "ErrorRow",
    "Format",
    "GemmRow",
    "GroupedGemm",
    "Method",
    "NotFinite",
    "NotWholeBlocks",
    "OneBlock",
    "Product",
    "Scaling",
    "TensorErrors",
    "block_range_bits",
    "block_sqnr_db",
    "compare_methods",
    "compare_products",
    "compare_scalings",
    "gemm_errors",
    "largest_number_errors",
    "layer_gemms",
    "measure",
    "one_block",
    "relative_error",
    "sqnr_db",
    "synthetic",
]
