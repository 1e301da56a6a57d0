"""Where the time of a step went: a trace of it, read, classified and held against the prediction."""

import lazy_loader

# What notebooks and scripts import from here, loaded on first use.
__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "against": ["compare", "fit", "gemm_rates", "packaged_steps"],
        "explanation": ["explanation_text"],
    },
)
