"""All of MXFP8: torchao quantises, this package chooses the kernels and puts them into TorchTitan."""

import logging

import lazy_loader

# torchao 0.18 registers two of its enums in a way that torch 2.14 calls deprecated, and torch says so at import: not
# news for the reader of a notebook. It can go with the next torchao.
logging.getLogger("torch.utils._pytree").addFilter(
    lambda record: "register_constant() on Enum subclasses" not in record.msg
)

# What notebooks and scripts import from here, loaded on first use.
__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "capture": ["captures_of"],
        "formats": ["FP8", "MX", "NVFP4"],
    },
)
