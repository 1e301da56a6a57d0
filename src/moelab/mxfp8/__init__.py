"""All of MXFP8: torchao quantises, this package chooses the kernels and puts them into TorchTitan."""

import logging

# torchao 0.18 registers two of its enums in a way that torch 2.14 calls deprecated, and torch says so at import: not
# news for the reader of a notebook. It can go with the next torchao.
logging.getLogger("torch.utils._pytree").addFilter(
    lambda record: "register_constant() on Enum subclasses" not in record.msg
)
