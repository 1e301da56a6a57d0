"""Every number of the memory model that is not arithmetic on the model's dimensions, in one place."""

from __future__ import annotations

from dataclasses import dataclass

from moelab.hardware import Figure

TO_BE_FITTED = "to be fitted on measured H100 peaks"
H100_ROWS = "benchmarks/results/memory_h100.json, 2 x H100, November 2026"


@dataclass(frozen=True, kw_only=True)
class MemoryConstants:
    """What :func:`moelab.memory.estimate` takes for granted; replace one to see what it does.

    Attributes:
        routing_imbalance: received rows of the busiest rank, relative to perfect balance, where the router decides.
        fragmentation: reserved memory relative to what the pools of the allocator are known to need.
        context_gib: CUDA context, kernels and libraries, outside PyTorch's allocator, GiB.
        communicator_gib: NCCL's buffers for each process group of more than one GPU, GiB.
    """

    routing_imbalance: Figure
    fragmentation: Figure
    context_gib: Figure
    communicator_gib: Figure


memory_constants = MemoryConstants(
    routing_imbalance=Figure(value=1.1, label="derived", source=TO_BE_FITTED),
    fragmentation=Figure(value=1.01, label="measured", source=f"{H100_ROWS}, row '16B none'"),
    context_gib=Figure(value=1.23, label="measured", source=f"{H100_ROWS}, row '1 GPU selective'"),
    communicator_gib=Figure(value=0.35, label="measured", source=f"{H100_ROWS}, row '16B selective', two groups"),
)
