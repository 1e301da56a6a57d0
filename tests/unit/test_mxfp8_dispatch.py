"""The MXFP8 all-to-all of the standard backend: two gloo ranks against torchao's own pipeline, to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mxfp8_dispatch_ranks as run
import pytest
import torch
from dispatcher_ranks import FEATURES, TOKENS, Case, Ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from torchao.prototype.moe_training import mxfp8_grouped_mm as torchao_mxfp8
from torchao.prototype.moe_training.ep.kernels import generate_permute_indices
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.token_dispatcher import (
    AllToAllTokenDispatcher,
    DeepEPTokenDispatcher,
    TorchAOTokenDispatcher,
)

from moelab.errors import BadInput
from moelab.mxfp8.converter import MXFP8Experts
from moelab.mxfp8.dispatch import QUANTISED, QuantisedDispatcher, _padded, _places, cast, quantised

BF16_ULP = 2.0**-8
ALIGNED = Case(alignment=32)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Two expert-parallel ranks."""
    started = Ranks(2)
    yield started
    started.close()


CASES = {
    "scores": ALIGNED,
    "one expert a token": Case(top_k=1, seed=1),
    "round robin": Case(routing="round_robin", top_k=4),
    "experts without a token": Case(routing="one rank"),
    "all tokens on one expert": Case(routing="one rank", top_k=1),
    "an expert with one token": Case(routing="one token"),
    "one expert a rank": Case(experts=2),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_outputs_and_gradients_are_torchaos_to_the_bit(ranks: Ranks, case: Case) -> None:
    for answer in ranks.ask(run.against_torchao, case):
        between = answer["between"]
        # the sum of a token's gradients is rounded once here, after every addition there
        assert between.pop("x") <= (0.0 if case.top_k <= 2 else BF16_ULP)
        assert set(between.values()) == {0.0}, answer
        for name, error in answer["ours"].items():
            # two operands of up to 1/16 error each; a rank that got no token has no gradient
            assert BF16_ULP < error < 1 / 8 or error == answer["theirs"][name] == 0.0, (name, answer)


def test_the_dispatch_changes_weight_gradients_alone(ranks: Ranks) -> None:
    """Quantised before the dispatch or after it, the rows are the same; what is kept for wgrad is not."""
    for answer in ranks.ask(run.against_bf16_dispatch, ALIGNED):
        between = answer["between"]
        assert between["output"] == between["scores"] == between["x"] == 0.0
        for name in ("w1_EFD", "w2_EDF", "w3_EFD"):
            assert BF16_ULP < between[name] < 0.05, answer


def test_half_the_bytes_travel(ranks: Ranks) -> None:
    answers = ranks.ask(run.bytes_sent, ALIGNED)
    rows = 2 * TOKENS * ALIGNED.top_k * len(answers)  # tokens forward and combine's gradient backward
    for dtype, titans in (("int64", 0), ("bfloat16", -rows * 2 * FEATURES), ("uint8", rows * FEATURES * 33 // 32)):
        changed = sum(answer["mxfp8"].get(dtype, 0) - answer["bf16"].get(dtype, 0) for answer in answers)
        assert changed == titans, dtype


def test_traced_as_one_graph_it_computes_the_same(ranks: Ranks) -> None:
    for answer in ranks.ask(run.compiled_and_eager, Case(routing="one token", alignment=32)):
        assert max(answer.values()) < BF16_ULP, answer


@pytest.mark.parametrize(("checkpoint", "sent"), [("none", 7), ("selective", 7), ("full+dispatch", 7), ("full", 11)])
def test_checkpointing_communicates_again_only_where_it_says_so(ranks: Ranks, checkpoint: str, sent: int) -> None:
    """Counts, data, scales and outputs forward; data, scales and gradients backward."""
    for counted, found in ranks.ask(run.checkpointed, ALIGNED, checkpoint):
        assert counted == sent
        assert set(found.values()) == {0.0}


def test_padding_is_never_read_on_the_way_home(ranks: Ranks) -> None:
    assert ranks.ask(run.nan_padding, ALIGNED) == [(True, True)] * 2


@settings(deadline=None, max_examples=60)
@given(
    received=st.integers(1, 4).flatmap(
        lambda ranks: st.integers(1, 4).flatmap(
            lambda local: st.lists(
                st.lists(st.integers(0, 70), min_size=local, max_size=local), min_size=ranks, max_size=ranks
            )
        )
    ),
    alignment=st.sampled_from([1, 32, 128]),
)
def test_rows_go_where_torchaos_permutation_puts_them(received: list[list[int]], alignment: int) -> None:
    """Each row has one place, and the places left are padding."""
    received_re = torch.tensor(received)
    ranks, local = received_re.shape
    rows_e = _padded(received_re.sum(0), alignment)
    place_R = _places(received_re, rows_e, int(received_re.sum()))
    padded = int(rows_e.sum())
    order_P, torchao_rows_e, _ends = generate_permute_indices(
        received_re.flatten(), local, ranks, padded, alignment, use_cpu=True
    )
    assert torch.equal(rows_e.int(), torchao_rows_e)
    ours = torch.full((padded,), -1).index_copy(0, place_R, torch.arange(len(place_R)))
    assert torch.equal(ours.int(), order_P)


def config(
    *, dispatcher: Any = AllToAllTokenDispatcher.Config, experts: Any = MXFP8Experts.Config, **of_experts: Any
) -> RoutedExperts.Config:
    settings_: dict[str, Any] = {"num_experts": 4, "top_k": 2}
    if dispatcher is TorchAOTokenDispatcher.Config:
        settings_["pad_multiple"] = 32
    if dispatcher is DeepEPTokenDispatcher.Config:
        settings_ |= {"hidden_dim": 64, "num_max_tokens_per_rank": 8}
    shape = {"dim": 64, "hidden_dim": 64, "num_experts": 4}
    return RoutedExperts.Config(inner_experts=experts(**shape, **of_experts), token_dispatcher=dispatcher(**settings_))


@pytest.mark.parametrize("dispatcher", [AllToAllTokenDispatcher.Config, TorchAOTokenDispatcher.Config])
@pytest.mark.parametrize(("kernels", "padding"), [("emulated", 32), ("native", 128)])
def test_the_override_swaps_dispatcher_and_experts(dispatcher: Any, kernels: Any, padding: int) -> None:
    swapped = quantised(config(dispatcher=dispatcher, kernels=kernels, wgrad="bf16", pad_inside=True))
    assert type(swapped) is RoutedExperts.Config
    assert isinstance(swapped.token_dispatcher, QuantisedDispatcher.Config)
    assert (swapped.token_dispatcher.pad_multiple, swapped.token_dispatcher.cast_kernels) == (padding, kernels)
    assert isinstance(swapped.inner_experts, MXFP8Experts.Config)
    assert swapped.inner_experts.pad_inside is False  # the dispatcher pads
    with torch.device("meta"):
        built = swapped.build()
    assert built.inner_experts._arithmetic == f"mxfp8_{kernels}"
    assert f"{quantised.__module__}.{quantised.__name__}" == QUANTISED


def test_other_dispatchers_are_left_alone() -> None:
    theirs = config(dispatcher=DeepEPTokenDispatcher.Config, kernels="emulated", wgrad="bf16")
    assert quantised(theirs) is theirs


def test_experts_that_cannot_take_such_rows_are_refused() -> None:
    with pytest.raises(BadInput, match="are GroupedExperts; set precision=mxfp8 and wgrad=bf16"):
        quantised(config(experts=GroupedExperts.Config))
    with pytest.raises(BadInput, match="are MXFP8Experts with wgrad mxfp8; set"):
        quantised(config(kernels="emulated"))


def test_without_expert_parallelism_it_is_refused() -> None:
    built = quantised(config(kernels="emulated", wgrad="bf16")).build()
    with pytest.raises(BadInput, match=r"dispatch_precision mxfp8 .* ep is 1; use bf16"):
        built.token_dispatcher.wire_meshes(ep_mesh=None)


def test_native_casts_are_torchaos_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(x: torch.Tensor, block: int, mode: str) -> tuple[torch.Tensor, torch.Tensor]:
        assert x.is_contiguous()
        scales, data = to_mx(x, torch.float8_e4m3fn, block, ScaleCalculationMode(mode))
        return data, scales

    monkeypatch.setattr(torchao_mxfp8, "triton_to_mxfp8_dim0", kernel)
    x = torch.randn(64, 5).bfloat16().t().contiguous().t()[:, :1].expand(64, 64)
    for native, emulated in zip(cast(x, "native"), cast(x, "emulated"), strict=True):
        assert torch.equal(native.view(torch.uint8), emulated.view(torch.uint8))
        assert native.dtype is emulated.dtype
