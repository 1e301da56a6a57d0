"""moelab's dispatchers on two gloo ranks, which float64, TorchTitan's own dispatcher and torchao judge.

DeepEP's is on DeepEP's stand-in; the MXFP8 all-to-all of the standard backend is torchao's pipeline to the bit. What
activation checkpoints keep of either is counted here, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import dispatcher_ranks as run
import pytest
import torch
from dispatcher_ranks import FEATURES, TOKENS, Case, Ranks, Routed
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torchao.prototype.moe_training import mxfp8_grouped_mm as torchao_mxfp8
from torchao.prototype.moe_training.ep.kernels import generate_permute_indices
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, DeepEPTokenDispatcher

from moelab.deepep.buffer import check_sizes
from moelab.deepep.checkpoint import CommunicationSavingAC, CommunicationSavingFullAC, communication_ops
from moelab.deepep.dispatcher import PaddedDispatcher, padded
from moelab.errors import BadInput
from moelab.mxfp8.converter import MXFP8Experts
from moelab.mxfp8.dispatch import QuantisedDispatcher, cast, padded_rows, places, quantised

BF16_ULP = 2.0**-8
STANDARD = {"deepep": False}
MXFP8: dict[str, Any] = {"mxfp8": True, "precision": "mxfp8", "alignment": 32}
TORCHAO: dict[str, Any] = {**STANDARD, **MXFP8}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Two expert-parallel ranks."""
    with closing(Ranks(2)) as started:
        yield started


CASES = {
    "scores": Case(),
    "scores, top-1": Case(top_k=1, seed=1),
    "round robin": Case(routing="round_robin", alignment=16),
    "random": Case(routing="random", alignment=32),
    "experts without a token": Case(routing="one rank", alignment=8),
    "all tokens on one expert": Case(routing="one rank", top_k=1, alignment=128),
    "an expert with one token": Case(routing="one token", alignment=16),
    "alignment of native MXFP8": Case(alignment=128, top_k=4),
    "as many experts as ranks": Case(experts=2, top_k=2, alignment=32),
    "a whole group of padding on every rank": Case(routing="one token", top_k=1, alignment=128),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_output_and_gradients_are_as_exact_as_the_standard_dispatchers(ranks: Ranks, case: Case) -> None:
    for answer in ranks.ask(run.compared, case, replace(case, deepep=False)):
        for name, error in answer["ours"].items():
            assert error < 3 * BF16_ULP, (name, answer)
            assert error < 1.5 * answer["other"][name] + 1e-3, (name, answer)
            assert answer["between"][name] < 3 * BF16_ULP, (name, answer)


def test_four_ranks() -> None:
    case = Case(top_k=4, alignment=32)
    with closing(Ranks(4)) as started:
        for answer in started.ask(run.compared, case, replace(case, deepep=False)):
            assert max(answer["ours"].values()) < 3 * BF16_ULP, answer


@st.composite
def routings(draw: st.DrawFn) -> tuple[Routed, int]:
    """Experts of each token of two ranks, with any load from none to all, and the number of experts."""
    experts = 2 * draw(st.integers(1, 4))
    top_k = draw(st.integers(1, min(experts, 4)))
    favoured = draw(st.integers(top_k, experts))
    tokens = draw(st.integers(1, 16))
    token = st.lists(st.integers(0, favoured - 1), min_size=top_k, max_size=top_k, unique=True)
    return [draw(st.lists(token, min_size=tokens, max_size=tokens)) for _rank in range(2)], experts


@settings(max_examples=60, deadline=None)
@given(routing=routings(), alignment=st.sampled_from([1, 8, 16, 32, 128]))
def test_no_token_is_lost_or_made(ranks: Ranks, routing: tuple[Routed, int], alignment: int) -> None:
    routed, experts = routing
    answers = ranks.ask(run.conserve, routed, experts, alignment)
    assert all(answer["sums"] and answer["padding"] for answer in answers)
    assert [tokens for answer in answers for tokens in answer["tokens"]] == [
        [16 * rank + token for rank in range(2) for token, ids in enumerate(routed[rank]) if expert in ids]
        for expert in range(experts)
    ]


@pytest.mark.parametrize("alignment", [16, 128])
def test_padding_is_never_read(ranks: Ranks, alignment: int) -> None:
    for answer in ranks.ask(run.poison, Case(alignment=alignment)):
        assert answer == {"combine": True, "collect": True, "resend": True, "undefined": True}
    assert ranks.ask(run.nan_padding, Case(**TORCHAO)) == [(True, True)] * 2


COMPILED = [
    Case(routing="one token", alignment=32),
    Case(routing="one token", alignment=32, precision="fp8"),
    Case(routing="one rank", alignment=32, mxfp8=True, wgrad="mxfp8"),  # a rank receives nothing at all
    Case(routing="one rank", **MXFP8),
    Case(routing="one token", **TORCHAO),
]


@pytest.mark.parametrize("case", COMPILED)
def test_compiled_as_a_full_graph_it_computes_the_same(ranks: Ranks, case: Case) -> None:
    for answer in ranks.ask(run.compiled_and_eager, case):
        assert max(answer.values()) < BF16_ULP, answer


def test_tokens_in_8_bits_are_what_experts_in_8_bits_make_of_them(ranks: Ranks) -> None:
    """Quantised before the dispatch or after it, MXFP8 rows are the same to the bit; those kept for wgrad are not."""
    for deepep in (True, False):
        sent = Case(**MXFP8 | {"deepep": deepep})
        for answer in ranks.ask(run.compared, sent, replace(sent, precision="bf16")):
            between = answer["between"]
            assert between["output"] == between["scores"] == 0.0
            assert between["x"] < (BF16_ULP if deepep else 1e-30)
            assert (
                between["w2_EDF"] == 0.0
            ) == deepep  # the standard backend quantises the gradient that combine sends
            for name in ("w1_EFD", "w3_EFD"):
                assert BF16_ULP < between[name] < 0.05, answer
    # E4M3 has three bits behind the point: an error of up to 1/16 a number, and each product has two such operands.
    for answer in ranks.ask(run.compared, Case(alignment=16, precision="fp8"), Case(alignment=16)):
        for name, error in answer["ours"].items():
            assert answer["other"][name] < error < 1 / 12, (name, answer)


# What is refused


def test_more_tokens_than_the_buffer_holds_are_refused(ranks: Ranks) -> None:
    with pytest.raises(BadInput, match=r"dispatches 48 tokens at a time.*was made for 47; it holds one micro-batch"):
        ranks.ask(run.too_many_tokens, Case())


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (PaddedDispatcher.Config(num_experts=8, top_k=2, hidden_dim=256, num_max_tokens_per_rank=8), "use standard"),
        (QuantisedDispatcher.Config(num_experts=8, top_k=2), "use bf16"),
    ],
)
def test_dispatchers_need_expert_parallelism(config: Any, told: str) -> None:
    with pytest.raises(BadInput, match=f"ep is 1; {told}"):
        config.build().wire_meshes(ep_mesh=None)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"ranks": 1}, "ep is 1"),
        ({"ranks": 3}, "8 experts cannot be divided over 3"),
        ({"top_k": 9}, "with 8 experts DeepEP takes 1 to 8"),
        ({"top_k": 33, "experts": 64}, "top_k is 33; with 64 experts DeepEP takes 1 to 32"),
        ({"tokens": 0}, "would hold 0 tokens"),
        ({"hidden": 384}, "multiple of 256 features, and the model has 384"),
    ],
)
def test_sizes_that_cannot_work_are_named(changed: dict[str, int], told: str) -> None:
    sizes: dict[str, Any] = {"ranks": 2, "hidden": 256, "tokens": 1, "experts": 8, "top_k": 1, "native": True}
    check_sizes(**sizes)
    with pytest.raises(BadInput, match=told):
        check_sizes(**{**sizes, **changed})


def config(dispatcher: Any, experts: Any = MXFP8Experts.Config, **of_experts: Any) -> RoutedExperts.Config:
    room = {"hidden_dim": 64, "num_max_tokens_per_rank": 8} if dispatcher is DeepEPTokenDispatcher else {}
    return RoutedExperts.Config(
        inner_experts=experts(dim=64, hidden_dim=64, num_experts=4, **of_experts),
        token_dispatcher=dispatcher.Config(num_experts=4, top_k=2, **room),
    )


def test_rows_in_mxfp8_are_only_for_experts_and_dispatchers_that_take_them() -> None:
    with pytest.raises(BadInput, match="are GroupedExperts; set precision=mxfp8 and wgrad=bf16"):
        quantised(config(AllToAllTokenDispatcher, GroupedExperts.Config))
    with pytest.raises(BadInput, match="are MXFP8Experts with wgrad mxfp8; set"):
        quantised(config(AllToAllTokenDispatcher))
    with pytest.raises(BadInput, match="are MXFP8Experts with wgrad mxfp8; set"):
        padded(config(DeepEPTokenDispatcher), alignment=128, precision="mxfp8")
    deepep, standard = (config(kind, wgrad="bf16") for kind in (DeepEPTokenDispatcher, AllToAllTokenDispatcher))
    assert quantised(deepep) is deepep
    assert padded(standard, alignment=8) is standard


# The MXFP8 all-to-all of the standard backend

TORCHAO_CASES = {
    "scores": Case(**TORCHAO),
    "one expert a token": Case(**TORCHAO, top_k=1, seed=1),
    "round robin": Case(**TORCHAO, routing="round_robin", top_k=4),
    "experts without a token": Case(**TORCHAO, routing="one rank"),
    "all tokens on one expert": Case(**TORCHAO, routing="one rank", top_k=1),
    "an expert with one token": Case(**TORCHAO, routing="one token"),
    "one expert a rank": Case(**TORCHAO, experts=2),
}


@pytest.mark.parametrize("case", TORCHAO_CASES.values(), ids=TORCHAO_CASES)
def test_outputs_and_gradients_of_the_mxfp8_exchange_are_torchaos_to_the_bit(ranks: Ranks, case: Case) -> None:
    for answer in ranks.ask(run.against_torchao, case):
        between = answer["between"]
        # the sum of a token's gradients is rounded once here, after every addition there
        assert between.pop("x") <= (0.0 if case.top_k <= 2 else BF16_ULP)
        assert set(between.values()) == {0.0}, answer
        for name, error in answer["ours"].items():
            # two operands of up to 1/16 error each; a rank that got no token has no gradient
            assert BF16_ULP < error < 1 / 8 or error == answer["other"][name] == 0.0, (name, answer)


def test_half_the_bytes_travel(ranks: Ranks) -> None:
    case = Case(**TORCHAO)
    mxfp8, bf16 = (ranks.ask(run.bytes_sent, one) for one in (case, replace(case, precision="bf16")))
    rows = 2 * TOKENS * case.top_k * len(mxfp8)  # tokens forward and combine's gradient backward
    for dtype, more in (("int64", 0), ("bfloat16", -rows * 2 * FEATURES), ("uint8", rows * FEATURES * 33 // 32)):
        assert sum(a.get(dtype, 0) - b.get(dtype, 0) for a, b in zip(mxfp8, bf16, strict=True)) == more, dtype


@settings(deadline=None, max_examples=60)
@given(received=st.data(), alignment=st.sampled_from([1, 32, 128]))
def test_rows_go_where_torchaos_permutation_puts_them(received: st.DataObject, alignment: int) -> None:
    """Each row has one place, and the places left are padding."""
    ranks, local = received.draw(st.integers(1, 4)), received.draw(st.integers(1, 4))
    counts = st.lists(st.integers(0, 70), min_size=ranks * local, max_size=ranks * local)
    received_re = torch.tensor(received.draw(counts)).view(ranks, local)
    rows_e = padded_rows(received_re.sum(0), alignment)
    place_R = places(received_re, rows_e, int(received_re.sum()))
    padded = int(rows_e.sum())
    order_P, torchao_rows_e, _ends = generate_permute_indices(
        received_re.flatten(), local, ranks, padded, alignment, use_cpu=True
    )
    assert torch.equal(rows_e.int(), torchao_rows_e)
    ours = torch.full((padded,), -1).index_copy(0, place_R, torch.arange(len(place_R)))
    assert torch.equal(ours.int(), order_P)


def test_native_casts_are_torchaos_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def kernel(x: torch.Tensor, block: int, mode: str) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(x.is_contiguous())
        scales, data = to_mx(x, torch.float8_e4m3fn, block, ScaleCalculationMode(mode))
        return data, scales

    monkeypatch.setattr(torchao_mxfp8, "triton_to_mxfp8_dim0", kernel)
    x = torch.randn(64, 5).bfloat16().t().contiguous().t()[:, :1].expand(64, 64)
    of_kernel = cast(x, "native")
    assert calls == [True]
    for native, emulated in zip(of_kernel, cast(x, "emulated"), strict=True):
        assert torch.equal(native.view(torch.uint8), emulated.view(torch.uint8))
        assert native.dtype is emulated.dtype


# Activation checkpoints

DEEPEP_COUNTS = {"dispatch": 1, "combine": 1, "collect": 1, "resend": 1}
"""What a forward and a backward pass have to communicate."""


@pytest.mark.parametrize(
    ("case", "once", "of_a_forward"),
    [
        (Case(), DEEPEP_COUNTS, {"dispatch": 1, "combine": 1}),
        # counts, rows (scales apart) and outputs; their gradients the other way round
        (Case(**STANDARD, alignment=32), {"all_to_all_single": 3 + 2}, {"all_to_all_single": 3}),
        (Case(**TORCHAO), {"all_to_all_single": 4 + 3}, {"all_to_all_single": 4}),
    ],
)
def test_checkpointing_communicates_again_only_where_it_says_so(
    ranks: Ranks, case: Case, once: dict[str, int], of_a_forward: dict[str, int]
) -> None:
    twice = {name: count + of_a_forward.get(name, 0) for name, count in once.items()}
    for checkpoint in ("none", "selective", "full", "full+dispatch"):
        counted = twice if checkpoint == "full" else once
        assert ranks.ask(run.checkpointed, case, checkpoint) == [(counted, 0.0)] * 2, checkpoint


def test_selective_keeps_what_torchtitans_keeps_moelabs_communication_and_products_in_8_bits() -> None:
    theirs, ours = (made(made.Config()).get_save_ops() for made in (SelectiveAC, CommunicationSavingAC))
    assert ours == theirs | communication_ops() | {torch.ops.aten._scaled_grouped_mm.default}


class RoutedBlock(nn.Module):
    """A block whose output depends on which experts its router chooses."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.gate = nn.Parameter(torch.randn((32, 8), generator=generator))
        self.experts = nn.Parameter(torch.randn((8, 32, 32), generator=generator))

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        scores_TK, ids_TK = torch.topk(torch.softmax(x_TD @ self.gate, dim=1), 2, dim=1)
        return torch.einsum("td,tkdf,tk->tf", torch.sin(x_TD), self.experts[ids_TK], scores_TK)


def gradients(block: nn.Module) -> tuple[Any, dict[str, int]]:
    x_TD = torch.randn((64, 32), generator=torch.Generator().manual_seed(1)).requires_grad_()
    with run.counted_operators(lambda func, _args: {func._schema.name.removeprefix("aten::"): 1}) as counted:
        return torch.autograd.grad(block(x_TD).sin().sum(), (x_TD, *block.parameters())), counted


@pytest.mark.parametrize("policy", [FullAC, CommunicationSavingFullAC], ids=["full", "full+dispatch"])
def test_everything_but_the_choice_of_experts_is_computed_again(policy: Any) -> None:
    """The router's choice is what the rows that are kept belong to, so it is kept too."""
    plain, once = gradients(RoutedBlock())
    checkpointed, counted = gradients(policy(policy.Config())._wrap_block(RoutedBlock()))
    torch.testing.assert_close(checkpointed, plain)
    assert (counted["topk"], counted["sin"]) == (once["topk"] + (policy is FullAC), once["sin"] + 1)
