"""What a kernel does, in the words of the projection.

The operator that launched a kernel says more than the kernel's own name: ``aten::_grouped_mm`` multiplies experts
whatever cutlass calls its kernel. Where a trace has no operators, or they do not tell, the name decides. What neither
tells is *unknown*; nothing is spread over the rest.

Names are those of PyTorch and its inductor, cuBLAS (``nvjet``), CUTLASS, cuDNN, FlashAttention 2 to 4, torchao,
TransformerEngine, Megatron-LM, vLLM, FlashInfer, DeepGEMM, DeepEP (V1, V2 and HybridEP), NCCL, RCCL, NVSHMEM and AMD's
Tensile, hipBLASLt, CK and AITER, as their sources have them in 2026.
"""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

from moelab.explain.trace import Collective

COMPUTE = (
    "expert GEMMs",
    "other GEMMs",
    "attention",
    "quantisation",
    "permutation and padding",
    "optimizer",
    "memory-bound",
    "unknown",
)
COMMUNICATION = (
    "all-to-all",
    "tensor-parallel collectives",
    "context-parallel collectives",
    "FSDP collectives",
    "pipeline transfers",
    "other collectives",
    "imbalance and stragglers",
)
"""Barriers, and all-reduces of a few numbers, move nothing to speak of: their time is the wait for the last rank."""
UNCLASSIFIED = ("unknown", "other collectives")
FEW_ELEMENTS = 1 << 16
PHASES = ("forward", "recompute", "backward", "optimizer", "unknown")


class Context(NamedTuple):
    """Where on the host a kernel was launched from.

    Attributes:
        op: the innermost operator; empty where it is not known.
        around: names of all operators and annotations around it, innermost first.
        phase: one of :data:`PHASES`.
        layer: number of the layer; -1 where it is not told.
    """

    op: str = ""
    around: tuple[str, ...] = ()
    phase: str = "unknown"
    layer: int = -1


def _words(*parts: str) -> re.Pattern[str]:
    return re.compile("|".join(parts), re.IGNORECASE)


_PIPELINE = _words(r"deep_ep::\w+::pp_(?:send|recv)_impl")
_EXCHANGE = _words(
    r"deep_?ep\b|deep_ep::|hybrid_?ep|moelab_deepep|\bmori::|ep_(?:dispatch|combine)",
    r"(?:internode|intranode|low_latency)(?:_ll)?::|(?:^|[^a-z])(?:notify|cached_notify)_(?:dispatch|combine)",
    r"all_to_all_v|to_peer_ptrs|exchange_?(?:row_offsets|SplitAndOffset)|a2a_(?:kernel|dispatch|combine)|alltoall(?:v|_kernel)",
    r"moe_?a2a|moeCommKernel|moeAllToAll",
)
_NCCL = _words(
    r"nccl|rccl|oneccl|oneRankReduce|msccl(?!pp)|^(?:gloo|ucc|mpi):|^_?c10d(?:_functional)?::|^record_param_comms"
)
_TENSOR_PARALLEL = _words(
    r"cross_device_reduce|(?:one|two)_?shot_?all_?reduce|multimem_|allreduce_fusion|trtllm_allreduce|quick_?reduce",
    r"userbuffers|symm_mem|lamport|all_reduce_(?:one|two)shot",
)
_OTHER_COMMUNICATION = _words(r"nvshmem|rocshmem|\bPtoP\b|Peer -> Peer|mscclpp|barrier_(?:kernel|all)")

_ATTENTION = _words(
    r"flash_?(?:fwd|bwd|att|mla|infer)|fmha|flex_attention|flex_decoding|sdpa|scaled_dot_product|paged_?attention|_attn_",
    r"attn_(?:fwd|bwd)|attention_kernel|unified_attention|Batch(?:Prefill|Decode)With|SinglePrefillWith|MLA\w*Kernel",
    r"mla_(?:fwd|bwd|decode|prefill|kernel)|_mla_|splitkv|merge_attn|flash_fprop|flash_bprop|FlashAttention|\bflash::",
    r"efficient_attention|AttentionKernel|(?:compute|convert)_d[oq]_?|aiter_?(?:fmha|pa)|sage_(?:fwd|attn)|lightning_indexer",
    r"bwd_kernel_d[kq]|bwd_dkdv|bwd_preprocess|fused_attn|delta_rule|varlen_metadata",
)
_EXPERT_GEMM = _words(
    r"_?grouped_(?:mm|gemm)|group(?:ed)?_?gemm|GroupProblemShape|PtrArray|m_grouped|k_grouped|MoeProblem",
    r"fused_moe_kernel|moe_gemm|MoeGemm|_moe_mm|contiguous_grouped|groupedGemm|GroupScheduler|gmm_kernel|_?tgmm\b",
    r"prepare_grouped_gemm|bmm_(?:Bfloat16|E4m3|MxE)\w*_sm100|moe::dev::(?!routing)|ck_moe|fmoe|moe_wna16|batched_gemm_masked",
    r"matmul_ogs|scatter2scatter|groupXtY|megablocks",
)
_GEMM = _words(
    r"gemm|nvjet|xmma|cutlass(?!.*(?:quant|norm))\w*|cublas|cijk_|\bgemv|gemv|splitk|split_k|_mm_|triton_tem_fused.*mm",
    r"::mm$|addmm|matmul|epilogue::|linear_kernel|wgrad_kernel|sm\d{2,3}_(?:fp8|bf16)_|tinygemm|hipblas|rocblas|(?<!causal_)conv\d?d|wvSplitK|triton_mm\b",
)
_OPTIMIZER = _words(
    r"adam(?!ard)|sgd|lamb(?!d)|muon|newton_?schulz|FusedOptimizer|LpNorm|l2norm(?!_(?:fwd|bwd))|_foreach_norm|clip_grad|multi_tensor_scale",
    r"DistAdam|multi_tensor_unscale|amp_non_finite|ema_update",
)
_QUANTISATION = _words(
    r"quanti[sz]|mxfp|nvfp4|fp8_(?:row|col|block|per_group)|float8|mx_blocked_layout|to_mx|_scale_and_cast|scaled_fp8|cast_transpose",
    r"transpose_(?:cast|scales)|swizzle_(?:scal|row|col|kernel)|scale(?:s)?_(?:rearrange|blocked|swizzle)|per_token_group",
    r"mx_block|compute_scale|amax|block(?:ed)?_scale|hadamard|_to_fp8|cast_fp8|quant_kernel|to_blocked|scale_rearrange|dequant",
)
_PERMUTATION = _words(
    r"permut|unpermute|moe_(?:align|sum|sort|scatter|gather|permute)|index(?:_put|_kernel|_elementwise|ing|_?select|_copy|_add|Func)|fused_router",
    r"fill_reverse_indices|generate_permute|row_id_map|sort_chunks|expandInputRows|finalizeMoe|topk|top_k|histc|histogram",
    r"_scatter|scatter_|_gather|gather_|radix|onesweep|merge_?sort|bitonic|sort_|searchsorted|bincount|cumsum|repeat_interleave",
    r"compute_cuda_kernel|scan_|DeviceScan|Scan(?:Init)?Kernel|bucketize|count_and_sort|padded_|_pad_|pad_|expert_(?:count|offset)|_routing_|::routing|_indices_kernel|(?:dispatch|combine)_metadata",
)
_TOKENS_MOVE = _words(
    r"all_to_all|(?:^|_)(?:index|index_put|gather|scatter|scatter_add|sort|argsort|searchsorted|histc|bincount)(?:_|$)",
    r"(?:^|_)(?:dispatch|combine|permute_tokens|repeat_interleave|cumsum|topk)(?:_|$)",
)
_MEMORY = _words(
    r"at::native|elementwise|vectorized|unrolled|reduce_kernel|softmax|norm|cat(?:Array|_)|copy|fill|memcpy|memset|cast",
    r"silu|swiglu|gelu|gated|act_and_mul|rope|rotary|embedding|cross_?entropy|nll|dropout|transpose|cub::|rocprim|thrust|add_kernel",
    r"krn_partial|sum_and_scatter|compute_grad_weight|philox|distribution|arange|triton_(?:poi|red|per|for|unk)_|cpp_fused",
    r"reshape_and_cache|concat|bias|residual|residue|aux_loss|score_function|argmax|sample|slice|split|chunk|FillFunctor",
    r"multi_tensor|triton__\d|bounds_check|to_dense|kv_?cache|SubTensorOp|OpTensor|position_kernel|future_token|fused_k?v?_back|reduce_partials",
    r"zero|clamp|mul_|add_|sum_|mean|rsqrt|where|isnan|hip_fill|Im2Col|batched_transpose|spin_kernel|causal_conv",
)
_CPU_WORK = re.compile(r"^(?:aten|prims|c10|inductor|quantized)::")

_BY_OP = (
    (_words(r"_?(?:scaled_)?grouped_(?:mm|gemm)|general_grouped_gemm|_?moe_(?:gemm|mm)|gmm(?:::|$)"), "expert GEMMs"),
    (_words(r"flash_attn|flex_attention|scaled_dot_product|fused_attn|efficient_attention|_attention_"), "attention"),
    (_words(r"^aten::(?:mm|addmm|bmm|baddbmm|linear|matmul|_scaled_mm|addmv|mv|dot|convolution)$"), "other GEMMs"),
    (_words(r"_fused_adam|_foreach_(?:norm|mul_|addcdiv|addcmul|lerp|sqrt)|clip_grad|_amp_foreach"), "optimizer"),
    (_words(r"embedding"), "memory-bound"),
    (
        _words(r"quanti[sz]e(?!d)|triton_(?:fp8|mx)|to_mx|scale_and_cast|fp8_rowwise|cast_(?:to_)?(?:fp8|mx)"),
        "quantisation",
    ),
)
_BY_OP_LAST = (
    (_words(r"^aten::(?:_?index|gather|scatter|sort|argsort|topk|histc|bincount|cumsum|repeat_inter|searchsorted|nonzero)"),
     "permutation and padding"),
    (_words(r"^aten::|^_to_copy|^c10d::|^fsdp::"), "memory-bound"),
)  # fmt: skip

_GROUPS = (  # of the profiler's description of a process group, in this order
    (_words(r"fsdp|dp_|data_?parallel|replicate|(?:^|[^a-z])e?dp(?:$|[^a-z])"), "FSDP collectives"),
    (_words(r"context_?parallel|(?:^|[^a-z])cp(?:$|[^a-z])|ulysses"), "context-parallel collectives"),
    (_words(r"pipeline|embedding_group|(?:^|[^a-z])pp(?:$|[^a-z])"), "pipeline transfers"),
    (_words(r"tensor|(?<!_)model_?parallel_group|(?:^|[^a-z])e?tp(?:$|[^a-z])"), "tensor-parallel collectives"),
    (_words(r"expert|(?:^|[^a-z])ep(?:$|[^a-z])"), "all-to-all"),
)  # fmt: skip


def is_communication(kernel: str) -> bool:
    """Whether a kernel, by its name, moves data between ranks.

    Example:
        >>> is_communication("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"), is_communication("nvjet_sm90")
        (True, False)
    """
    return _communication(kernel) is not None


@functools.lru_cache(maxsize=65536)
def _communication(kernel: str) -> str | None:
    """The library's kind: ``nccl``, or the category that the name alone decides."""
    if _PIPELINE.search(kernel):
        return "pipeline transfers"
    if _EXCHANGE.search(kernel):
        return "all-to-all"
    if _NCCL.search(kernel):
        return "nccl"
    if _TENSOR_PARALLEL.search(kernel):
        return "tensor-parallel collectives"
    return "other collectives" if _OTHER_COMMUNICATION.search(kernel) else None


def category(kernel: str, context: Context, collective: Collective | None) -> str:
    """The part of a step that a kernel belongs to.

    Args:
        kernel: its name; on a CPU that of an operator.
        context: that it was launched from.
        collective: what the profiler says of it, if it is one.

    Example:
        >>> category("nvjet_sm90_tst_192x192_64x3_1x2_h_bz_coopB_NTN", Context(), None)
        'other GEMMs'
        >>> category("ncclDevKernel_SendRecv", Context(), Collective("all_to_allv", 1 << 20, "Half", "mesh_ep", 8, 1))
        'all-to-all'
    """
    kind = _communication(kernel)
    if kind == "nccl" or (kind is None and collective is not None):
        return _of_collective(kernel, context, collective)
    return kind or _compute(kernel, context.op, context.phase == "optimizer")


def _of_collective(kernel: str, context: Context, collective: Collective | None) -> str:
    around = " ".join(context.around).lower()
    name = f"{collective.name if collective else around} {kernel}".lower()
    group = collective.group if collective else ""
    axis = next((part for pattern, part in _GROUPS if pattern.search(group)), None)
    if "barrier" in name:
        return "imbalance and stragglers"
    if "all_to_all" in name or "alltoall" in name:
        return axis if axis == "context-parallel collectives" else "all-to-all"
    if "allreduce" in name.replace("_", "") and collective and collective.elements <= FEW_ELEMENTS:
        return axis if axis == "tensor-parallel collectives" else "imbalance and stragglers"
    if axis:
        return axis
    if "fsdp" in around:
        return "FSDP collectives"
    if re.search(r"\b(?:i?send|i?recv|batch_isend_irecv)\b", name.replace("nccl:", " ")) and "sendrecv" not in around:
        return "pipeline transfers"
    if "sendrecv" in name:  # NCCL has one kernel for both; only a pipeline sends without an all-to-all's name
        return "all-to-all"
    if re.search(r"all_?gather|reduce_?scatter", name):
        return "FSDP collectives"
    if re.search(r"all_?reduce", name) and context.phase == "backward":
        return "FSDP collectives"  # gradients of replicas, as DDP sums them
    if re.search(r"all_?reduce", name) and context.phase == "optimizer":
        return "imbalance and stragglers"  # of a norm or of whether all is finite
    if "distributeddataparallel" in around:
        return "FSDP collectives"
    return "other collectives"


@functools.lru_cache(maxsize=65536)
def _compute(kernel: str, op: str, optimizer: bool) -> str:
    if re.match(r"(?:torch::)?autograd::|\w+Backward\d*$", kernel):  # of a CPU: what autograd itself takes
        return "unknown"
    if fused := re.match(r"triton_(?!tem)[a-z]{3}_fused_|(?:graph_\d+_)?cpp_fused_", kernel):
        name = kernel[fused.end() :]
        if _words(r"fp8|e4m3|mxfp|quantis|to_mx|scale_and_cast|lshift|dispatch_quantised").search(name):
            return "quantisation"
        if optimizer:
            return "optimizer"
        moves = _TOKENS_MOVE.search(name) and not re.search(r"log_softmax|nll_loss|embedding", name)
        return "permutation and padding" if moves else "memory-bound"
    for pattern, part in _BY_OP:
        if pattern.search(op):
            return part
    if re.match(r"(?:Memcpy|Memset|hipMem|Copy(?:Host|Device))", kernel):
        return "optimizer" if optimizer else "memory-bound"
    by_name = (
        (_words("into_ue8m0"), "quantisation"),
        (_ATTENTION, "attention"),
        (_EXPERT_GEMM, "expert GEMMs"),
        (_OPTIMIZER, "optimizer"),
        (_words(r"gemm|nvjet|cijk|matmul"), "other GEMMs"),
        (_QUANTISATION, "quantisation"),
    )
    plain = kernel.replace("(anonymous namespace)::", "")
    short = plain.partition(">(" if "<" in plain else "(")[0]  # without types of its arguments
    for pattern, part in by_name:
        if pattern.search(short):
            return part
    if optimizer:
        return "optimizer"
    if not re.search(r"at::native|elementwise", kernel) and _GEMM.search(short):
        return "other GEMMs"
    if not re.match(r"aten::(?:copy_|cat|clone|fill_)", op) and _PERMUTATION.search(kernel):
        return "permutation and padding"
    for pattern, part in _BY_OP_LAST:
        if pattern.search(op or (kernel if _CPU_WORK.match(kernel) else "")):
            return part
    return "memory-bound" if _MEMORY.search(kernel) else "unknown"
