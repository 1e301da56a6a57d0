"""What moelab puts under TorchTitan on a CPU computes what it replaces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchtitan.tools.utils as titan_utils
from hypothesis import given, settings
from hypothesis import strategies as st
from titan_process import in_titan_process
from torch.nn.attention.flex_attention import and_masks, create_block_mask, flex_attention
from torchtitan.models.common.attention import (
    FlexAttention,
    get_causal_mask_mod,
    get_efficient_causal_mask_mod_for_packed_document,
)
from torchtitan.models.common.linear import Linear

from moelab.titan import cpu


def test_masked_sdpa_is_flex_attention() -> None:
    torch.manual_seed(0)
    # Two documents in each sequence, of other lengths.
    positions_BL = torch.stack([torch.cat([torch.arange(cut), torch.arange(256 - cut)]) for cut in (100, 30)])
    mask_mod = and_masks(get_causal_mask_mod(), get_efficient_causal_mask_mod_for_packed_document(positions_BL))
    q, k, v = (torch.randn(2, 256, 3, features) for features in (32, 32, 48))  # MLA's values have their own size
    block_mask = create_block_mask(mask_mod, 2, None, 256, 256, device="cpu")
    with pytest.warns(UserWarning, match="flex_attention called without torch.compile"):
        expected = flex_attention(*(x.transpose(1, 2) for x in (q, k, v)), block_mask=block_mask, scale=0.2)
    dense = cpu.dense_attention_mask(mask_mod, 2, None, 256, 256, device=q.device)
    ours = cpu.MaskedSDPA.Config().build()(q, k, v, attention_masks=dense, scale=0.2)
    assert isinstance(cpu.MaskedSDPA.Config(), FlexAttention.Config)
    torch.testing.assert_close(ours, expected.transpose(1, 2), rtol=1e-5, atol=1e-5)


sizes = st.integers(0, 70)


@given(sizes, st.integers(1, 70), sizes, st.booleans(), st.sampled_from([torch.bfloat16, torch.float64]))
@settings(max_examples=50, deadline=None)
def test_fp32_product_rounds_the_exact_product_once(m: int, k: int, n: int, transposed: bool, dtype: Any) -> None:
    torch.manual_seed(m * 5041 + k * 71 + n)
    a = torch.randn(m, k, dtype=dtype)
    b = torch.randn(n, k, dtype=dtype).t() if transposed else torch.randn(k, n, dtype=dtype)
    exact = a.double() @ b.double()
    ours = cpu.fp32_product(a, b)
    assert ours.dtype is dtype
    # Half a unit in the last place of BF16 (8 significant bits: 2^-8), and the error of an FP32 sum over k terms.
    rounding, terms = (2.0**-8, 2.0**-22 * k) if dtype is torch.bfloat16 else (0.0, 2.0**-52 * k)
    slack = rounding * exact.abs() + terms * (a.double().abs() @ b.double().abs())
    assert bool(((ours.double() - exact).abs() <= slack).all())


def test_it_takes_the_place_of_pytorchs_products_of_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    product, calls = cpu.fp32_product, []
    monkeypatch.setattr(cpu, "fp32_product", lambda a, b: calls.append(a.dtype) or product(a, b))
    a, out = torch.randn(8, 8).bfloat16(), torch.empty(8, 8, dtype=torch.bfloat16)
    library = cpu.use_fp32_products_for_bf16.__wrapped__()
    try:
        assert torch.equal(a @ a, torch.mm(a, a, out=out))
    finally:
        library._destroy()
    assert calls == [torch.bfloat16] * 2


def test_fp32_gate_scores_in_fp32() -> None:
    gate = cpu.fp32_gate(Linear.Config(in_features=16, out_features=4)).build()
    torch.nn.init.normal_(gate.weight)
    gate = gate.bfloat16()
    x = torch.randn(2, 5, 16, dtype=torch.bfloat16)
    scores = gate(x)
    assert scores.dtype is torch.float32
    torch.testing.assert_close(scores.double(), F.linear(x.double(), gate.weight.double()), rtol=1e-6, atol=1e-6)


def test_nothing_is_touched_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    before = titan_utils.device_type
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RuntimeError, match="hide the GPUs"):
        cpu.enable()
    assert titan_utils.device_type == before


ENABLED = """
import torch
torch.manual_seed(0)
a, b = torch.randn(64, 96).bfloat16(), torch.randn(96, 32).bfloat16().requires_grad_()
from moelab.titan import cpu
cpu.enable(); cpu.enable()
from torchtitan.tools import utils
from torchtitan.components.metrics import build_device_memory_monitor
assert utils.device_type == "cpu"
import time, torchtitan.trainer
start = torchtitan.trainer.time.perf_counter()
torchtitan.trainer.time.sleep(2)
assert time.perf_counter() - start < 1
out = a @ b
out.sum().backward()
assert torch.equal(out, cpu.fp32_product(a, b.detach())) or cpu.has_bf16_instructions()
peak = build_device_memory_monitor().get_peak_stats()
assert 0.05 < peak.max_reserved_gib < 16 and 0 < peak.max_reserved_pct < 100, peak
"""


def test_enabled_in_a_process_of_its_own() -> None:
    in_titan_process(exec, ENABLED, {})


def initial_experts(rank: int, ranks: int) -> list[list[float]]:
    """This rank's experts of a nano layer as TorchTitan shards and moelab initialises them, ``(e, …)``."""
    from torch import distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from moelab.titan.models import model_spec

    cpu.enable()
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",))
    layer = next(layer for layer in model_spec("nano", ep_backend="standard").model.layers if layer.moe is not None)
    experts = layer.moe.routed_experts.inner_experts.build()
    for name, whole in list(experts.named_parameters()):
        shard = distribute_tensor(whole.detach(), mesh, [Shard(0)], src_data_rank=None)
        setattr(experts, name, torch.nn.Parameter(shard))
    torch.manual_seed(7)  # the same on all ranks, as TorchTitan does it
    with torch.no_grad():
        experts.init_states()
    local = torch.cat([parameter.to_local().flatten(1)[:, :64] for parameter in experts.parameters()], dim=1)
    dist.destroy_process_group()
    return local.detach().tolist()


@pytest.mark.parametrize("ranks", [2, 4])
def test_shards_are_those_of_one_process(ranks: int) -> None:
    whole = torch.tensor(in_titan_process(initial_experts, 0, 1))
    shards = [torch.tensor(in_titan_process(initial_experts, rank, ranks)) for rank in range(ranks)]
    assert torch.equal(torch.cat(shards), whole)
    assert len(torch.unique(whole, dim=0)) == len(whole)
    assert float(whole.std()) > 0.001
