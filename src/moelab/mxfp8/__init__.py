"""All of MXFP8: torchao quantises, this package chooses the kernels and puts them into TorchTitan."""
