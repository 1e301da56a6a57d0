"""What TorchTitan 0.3.0 needs to train on a CPU with gloo, piece by piece.

TorchTitan supports accelerators only. Nine small pieces let it train on a laptop, and all of them are here. None of
them changes TorchTitan's source tree, or a process that has CUDA.

====================  =============================================================================================
piece                 why TorchTitan 0.3.0 on torch 2.14 needs it
====================  =============================================================================================
device                without an accelerator it assumes ``cuda``; each module binds the answer when it is imported
memory_statistics     it reads ``memory_stats``, ``get_device_properties`` and an integer ``current_device``, which
                      ``torch.cpu`` does not have; here they describe this process's resident memory
attention             FlexAttention has no backward pass on a CPU, and its block mask is compiled (5 to 20 s before the
                      first step); masked scaled-dot-product attention computes the same function
router_gate           the router's scores are computed under an FP32 autocast, which PyTorch does not have on a CPU:
                      they would silently be BF16 there
initialisation        DTensor has no random numbers for a CPU mesh: each rank would fill its shard with the same ones,
                      and the features and experts of two ranks would start as copies (twin experts with equal
                      scores stay copies forever)
fsdp_sum              FSDP2 with a gradient divide factor of 1 reduces by a pre-multiplied sum, which gloo lacks
mfu                   it would divide by the peak of an A100 that is not there; a CPU has no MFU to report
end                   rank 0 sleeps two seconds for ranks that need its store, which torchrun holds here; and Python's
                      last garbage collection takes two more: much for a run of ten seconds
bf16_gemm             for PyTorch, not TorchTitan: without AVX512-BF16 or AMX its BF16 GEMM runs at about 2 GFLOP/s per
                      core. Ours multiplies the same BF16 operands in FP32 and rounds once, as a tensor core does, at
                      about 15 times the speed. Not used where the CPU has BF16 instructions.
====================  =============================================================================================

The remaining two needs are plain settings and live in ``config_registry.py``: ``spmd_backend="partial_dtensor"`` (the
other path's all-to-all needs equal splits under gloo) and ``disable_cuda_graphs``.

All of this can go when TorchTitan accepts ``cpu`` as a device and FlexAttention has a backward pass on CPUs.
"""

from __future__ import annotations

import atexit
import functools
import gc
import resource
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
import torchtitan.models.common.decoder as titan_decoder
import torchtitan.tools.utils as titan_utils
import torchtitan.trainer as titan_trainer
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torchtitan.config.override import derive, override
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.module import Module

from moelab.machine import memory_bytes, processor_name

OVERRIDES = ("moelab.titan.cpu.masked_sdpa", "moelab.titan.cpu.fp32_gate")
"""Names for TorchTitan's ``override.imports``."""


def enable() -> None:
    """Prepare this process to train with TorchTitan on a CPU. Idempotent.

    Two pieces are applied elsewhere: ``OVERRIDES`` in TorchTitan's configuration (``attention`` and ``router_gate``),
    and :func:`sum_gradients` on the built model (``fsdp_sum``).

    Raises:
        RuntimeError: if this process has CUDA, where none of it may be touched.
    """
    if torch.cuda.is_available():
        raise RuntimeError("moelab.titan.cpu.enable() was called in a process that has CUDA; hide the GPUs first")
    # device, memory_statistics: modules that are loaded already have bound the answer.
    for module in [module for name, module in sys.modules.items() if name.startswith("torchtitan")]:
        if "device_type" in vars(module):
            setattr(module, "device_type", "cpu")  # noqa: B010
        if "device_module" in vars(module):
            setattr(module, "device_module", CpuDevice())  # noqa: B010
    titan_utils.get_device_info = lambda: ("cpu", CpuDevice())  # for modules that are imported from here on
    # mfu: TorchTitan omits it for quantised models; the same switch serves where there is no peak to divide by.
    titan_trainer.has_quantization = lambda _model_config: True
    titan_decoder.create_attention_mask = dense_attention_mask  # attention
    Module._init_param = initialise_whole  # initialisation
    titan_trainer.time = SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda _seconds: None)  # end
    atexit.register(gc.freeze)  # end: what is frozen is not collected at exit
    if not has_bf16_instructions():
        use_fp32_products_for_bf16()


def initialise_whole(module: Module, name: str, parameter: nn.Parameter) -> None:
    """Initialise a parameter as one tensor and keep this rank's shard of it (piece ``initialisation``).

    All ranks of a pipeline stage have the same seed, so they draw the same tensor, and the initial weights do not
    depend on the number of ranks.
    """
    if not isinstance(parameter, DTensor):
        _init_param(module, name, parameter)
        return
    # A plain tensor, because of a DTensor the initialiser would only see the shard.
    whole = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype))
    _init_param(module, name, whole)
    shard = distribute_tensor(whole.detach(), parameter.device_mesh, parameter.placements, src_data_rank=None)
    with torch.no_grad():
        parameter.to_local().copy_(shard.to_local())


_init_param = Module._init_param


def sum_gradients(model: nn.Module) -> None:
    """Let FSDP2 reduce gradients by a plain sum (piece ``fsdp_sum``).

    TorchTitan sets the gradient divide factor to 1 and scales by the global token count itself, so a plain sum is the
    same arithmetic.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


def has_bf16_instructions() -> bool:
    """Whether this CPU multiplies BF16 in hardware (AVX512-BF16 or AMX), so that oneDNN's BF16 GEMM is fast."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


@functools.cache
def use_fp32_products_for_bf16() -> torch.library.Library:
    """Multiply BF16 matrices on the CPU in FP32 and round once (piece ``bf16_gemm``).

    Replaces the CPU kernels of ``aten::mm`` and ``aten::mm.out``, to which every GEMM of the model comes down: linears,
    grouped GEMMs (PyTorch loops over the groups on a CPU), torchao's emulation, and all their backward passes.
    """

    def into(a_MK: torch.Tensor, b_KN: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        return out.resize_((a_MK.shape[0], b_KN.shape[1])).copy_(fp32_product(a_MK, b_KN))

    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
        library.impl("mm", fp32_product, "CPU", allow_override=True)
        library.impl("mm.out", into, "CPU", allow_override=True)
    return library


def fp32_product(a_MK: torch.Tensor, b_KN: torch.Tensor) -> torch.Tensor:
    """``a_MK @ b_KN``; BF16 operands are multiplied and summed in FP32 and the result rounded to BF16 once."""
    wide = torch.float32 if a_MK.dtype is torch.bfloat16 else a_MK.dtype
    product_MN = torch.empty((a_MK.shape[0], b_KN.shape[1]), dtype=wide)
    # addmm with beta 0 is the same GEMM through another operator; mm would call this function again.
    torch.ops.aten.addmm.out(product_MN, a_MK.to(wide), b_KN.to(wide), beta=0, out=product_MN)
    return product_MN.to(a_MK.dtype)


class CpuDevice:
    """Stands in for ``torch.cuda``: ``torch.cpu`` plus the memory statistics of this process."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    @staticmethod
    def current_device() -> int:
        """Index of the device; ``torch.cpu.current_device()`` is the string ``"cpu"``."""
        return 0

    @staticmethod
    def get_device_name(_device: object = None) -> str:
        """Model name of the processor."""
        return processor_name()

    @staticmethod
    def get_device_properties(_device: object = None) -> SimpleNamespace:
        """``total_memory`` in bytes: how much of the machine's memory this process may use."""
        return SimpleNamespace(total_memory=memory_bytes())

    @staticmethod
    def memory_stats(_device: object = None) -> dict[str, int]:
        """Peak resident memory of this process in bytes, under the names of CUDA's allocator."""
        status = Path("/proc/self/status")
        if status.exists():
            line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
            peak = int(line.split()[1]) * 1024
        else:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS
        return {"active_bytes.all.peak": peak, "reserved_bytes.all.peak": peak, "num_alloc_retries": 0, "num_ooms": 0}

    @staticmethod
    def reset_peak_memory_stats() -> None:
        """Start a new peak, where the kernel lets a process do so (Linux)."""
        if Path("/proc/self/clear_refs").exists():
            Path("/proc/self/clear_refs").write_text("5")

    @staticmethod
    def empty_cache() -> None:
        """Do nothing: a CPU has no cache of free blocks."""


def dense_attention_mask(
    mask_mod: Callable[..., torch.Tensor],
    B: int,
    H: int | None,
    q_len: int,
    kv_len: int,
    *,
    device: torch.device,
    **_block_options: object,
) -> torch.Tensor:
    """The mask of FlexAttention's ``mask_mod`` as a dense tensor instead of compiled blocks.

    Returns:
        Boolean ``(B, 1, q_len, kv_len)``, True where a query may look; TorchTitan's masks do not depend on the head.
    """
    b = torch.arange(B, device=device).view(B, 1, 1, 1)
    h = torch.zeros((1, 1, 1, 1), dtype=torch.long, device=device)
    q_idx = torch.arange(q_len, device=device).view(1, 1, q_len, 1)
    kv_idx = torch.arange(kv_len, device=device).view(1, 1, 1, kv_len)
    return mask_mod(b, h, q_idx, kv_idx).expand(B, 1, q_len, kv_len)


class MaskedSDPA(FlexAttention):
    """Scaled-dot-product attention with a dense boolean mask, in FlexAttention's place (piece ``attention``).

    It is a subclass with the same parameter names, because TorchTitan builds masks only for FlexAttention and shards
    attention inputs by those names.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        """No settings of its own."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.widen = not has_bf16_instructions()  # here, because torch.compile cannot trace the call

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: torch.Tensor,
        scale: float | None = None,
        **_flex_options: object,
    ) -> torch.Tensor:
        """Attend as FlexAttention does, with a mask of :func:`dense_attention_mask`: ``(B, L, N, H_v)``."""
        wide = torch.float32 if self.widen else q_BLNH.dtype
        q_BNLH, k_BNLH, v_BNLH = (x.transpose(1, 2).to(wide) for x in (q_BLNH, k_BLNH, v_BLNH))
        out_BNLH = F.scaled_dot_product_attention(q_BNLH, k_BNLH, v_BNLH, attn_mask=attention_masks, scale=scale)
        return out_BNLH.transpose(1, 2).to(q_BLNH.dtype)


@override(target=FlexAttention.Config, exact=True, description="masked SDPA: FlexAttention has no backward on a CPU")
def masked_sdpa(config: FlexAttention.Config) -> MaskedSDPA.Config:
    """Swap FlexAttention for :class:`MaskedSDPA`, keeping its sharding."""
    return derive(config, MaskedSDPA.Config)


class Fp32Gate(Linear):
    """The router's gate, multiplied in FP32 (piece ``router_gate``)."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """No settings of its own."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Scores in FP32, ``(B, L, E)``, from activations ``(B, L, D)``."""
        bias = None if self.bias is None else self.bias.float()
        return F.linear(input.float(), self.weight.float(), bias)


@override(target=Linear.Config, fqns=["*.router.gate"], description="gate in FP32: no FP32 autocast on a CPU")
def fp32_gate(config: Linear.Config) -> Fp32Gate.Config:
    """Swap the router's gate for :class:`Fp32Gate`, keeping its initialisation and sharding."""
    return derive(config, Fp32Gate.Config)
