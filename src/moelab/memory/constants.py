"""Every number of the memory model that is not arithmetic on the model's dimensions, in one place."""

from __future__ import annotations

from dataclasses import dataclass

from moelab.hardware import Figure

ATEN = "aten/src/ATen/native/TensorAdvancedIndexing.cpp and cuda/Indexing.cu at torch 2.14"
TO_BE_FITTED = "to be fitted on measured H100 peaks"


def derived(value: float, source: str) -> Figure:
    """A constant that follows from somebody's code."""
    return Figure(value=value, label="derived", source=source)


@dataclass(frozen=True, kw_only=True)
class MemoryConstants:
    """What :func:`moelab.memory.estimate` takes for granted; replace one to see what it does.

    Attributes:
        scatter_bytes: workspace of TorchTitan's deterministic scatter-add, bytes for each element of the routed outputs
            that are summed into tokens (routed rows times ``dim``).
        loss_bytes: bytes for each logit of the chunk that the loss works on.
        routing_imbalance: received rows of the busiest rank, relative to perfect balance, where the router decides.
        fragmentation: reserved memory relative to the most that is in use at a time.
        context_gib: CUDA context, kernels and NCCL's buffers, outside PyTorch's allocator, GiB.
        communicator_gib: more of the same for each process group that spans more than one GPU, GiB.
    """

    scatter_bytes: Figure = derived(72, f"seven 8-byte integers and the sort's double buffers: {ATEN}")
    loss_bytes: Figure = derived(12, "logits in BF16 and FP32, log-softmax in FP32, gradient in BF16")
    routing_imbalance: Figure = Figure(value=1.1, label="derived", source=TO_BE_FITTED)
    fragmentation: Figure = Figure(value=1.03, label="derived", source=TO_BE_FITTED)
    context_gib: Figure = Figure(value=1.0, label="derived", source=TO_BE_FITTED)
    communicator_gib: Figure = Figure(value=0.25, label="derived", source=TO_BE_FITTED)


memory_constants = MemoryConstants()
