"""The three micro-experiments that notebooks 01, 02 and 04 run on this machine.

``numerics.py`` measures what a number format loses, ``grouped_gemm.py`` the time of the experts' products, and
``exchange.py`` that of moving tokens to the experts and back.
"""

import lazy_loader

# What notebooks and scripts import from here, loaded on first use.
__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "grouped_gemm": ["PRECISIONS", "obtain"],
        "grouped_gemm_run": ["why_not"],
        "numerics": [
            "compare_methods",
            "compare_products",
            "first_numbers",
            "largest_number_errors",
            "layer_gemms",
            "measure",
            "synthetic",
        ],
    },
)
