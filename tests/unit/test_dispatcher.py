"""moelab's dispatchers on two gloo ranks, which float64, TorchTitan's own dispatcher and torchao judge.

DeepEP's is on DeepEP's stand-in; the MXFP8 all-to-all of the standard backend is torchao's pipeline to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import dispatcher_ranks as run
import pytest
import torch
import torchao_ranks
from dispatcher_ranks import FEATURES, TOKENS, Case, Ranks, Routed
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

from moelab.deepep.buffer import check_sizes
from moelab.deepep.dispatcher import PaddedDispatcher, padded
from moelab.errors import BadInput
from moelab.hardware import GROUP_PADDING
from moelab.mxfp8.converter import MXFP8Experts
from moelab.mxfp8.dispatch import QUANTISED, QuantisedDispatcher, cast, padded_rows, places, quantised
from moelab.mxfp8.kernels import resolve
from moelab.titan.config_registry import assume_gpu

BF16_ULP = 2.0**-8
ALIGNED = Case(alignment=32)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Two expert-parallel ranks."""
    started = Ranks(2)
    yield started
    started.close()


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
    "without a host sync": Case(host_sync=False, alignment=16),
    "without a host sync, all tokens on one rank": Case(host_sync=False, routing="one rank", alignment=32),
    "a whole group of padding on every rank": Case(routing="one token", top_k=1, alignment=128),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_output_and_gradients_are_as_exact_as_the_standard_dispatchers(ranks: Ranks, case: Case) -> None:
    for answer in ranks.ask(run.against_both, case):
        for name, error in answer["ours"].items():
            assert error < 3 * BF16_ULP, (name, answer)
            assert error < 1.5 * answer["standard"][name] + 1e-3, (name, answer)
            assert answer["between"][name] < 3 * BF16_ULP, (name, answer)


def test_four_ranks() -> None:
    started = Ranks(4)
    try:
        for answer in started.ask(run.against_both, Case(top_k=4, alignment=32)):
            assert max(answer["ours"].values()) < 3 * BF16_ULP, answer
    finally:
        started.close()


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
    assert all(answer["sums"] and answer["padding"] and answer["aligned"] for answer in answers)
    of_expert = [tokens for answer in answers for tokens in answer["tokens"]]
    for expert in range(experts):
        sent = [16 * rank + token for rank in range(2) for token, ids in enumerate(routed[rank]) if expert in ids]
        assert of_expert[expert] == sorted(sent)
    counts = [count for answer in answers for count in answer["rows"]]
    assert sum(counts) == sum(len(ids) for rank in routed for ids in rank)


@pytest.mark.parametrize("alignment", [16, 128])
def test_padding_is_never_read(ranks: Ranks, alignment: int) -> None:
    case = Case(alignment=alignment)
    assert all(ranks.ask(run.undefined_padding, case))
    for answer in ranks.ask(run.poison, case):
        assert answer == {"combine": True, "collect": True, "resend": True}


@pytest.mark.parametrize(
    ("routing", "deepep", "mxfp8", "precision", "wgrad", "host_sync"),
    [
        ("one token", True, False, "bf16", "bf16", True),
        ("one token", True, False, "fp8", "bf16", True),
        ("one rank", True, True, "bf16", "mxfp8", True),  # a rank receives nothing at all
        ("one rank", True, True, "mxfp8", "bf16", True),
        ("one token", False, True, "mxfp8", "bf16", True),
        ("random", True, False, "bf16", "bf16", False),
        ("random", True, False, "fp8", "bf16", False),
        ("one token", True, True, "mxfp8", "bf16", False),
    ],
)
def test_compiled_as_a_full_graph_it_computes_the_same(
    ranks: Ranks, routing: str, deepep: bool, mxfp8: bool, precision: str, wgrad: str, host_sync: bool
) -> None:
    case = Case(routing=routing, alignment=32, host_sync=host_sync)
    for answer in ranks.ask(run.compiled_and_eager, case, deepep, mxfp8, precision, wgrad):
        assert max(answer.values()) < BF16_ULP, answer


ONCE = {"dispatch": 1, "combine": 1, "collect": 1, "resend": 1}
"""What a forward and a backward pass have to communicate."""


@pytest.mark.parametrize(
    ("checkpoint", "expected"),
    [
        ("none", ONCE),
        ("selective", ONCE),
        ("full+dispatch", ONCE),
        ("full", {**ONCE, "dispatch": 2, "combine": 2}),
    ],
)
def test_checkpointing_communicates_again_only_where_it_says_so(
    ranks: Ranks, checkpoint: str, expected: dict[str, int]
) -> None:
    for counted, found in ranks.ask(run.checkpointed, Case(), checkpoint, True):
        assert counted == expected
        assert set(found.values()) == {0.0}


@pytest.mark.parametrize(
    ("precision", "forward", "backward"),
    [("bf16", 3, 2), ("mxfp8", 4, 3)],  # counts, rows (scales apart) and outputs; their gradients the other way round
)
def test_what_arrived_is_kept_with_the_standard_dispatcher_too(
    ranks: Ranks, precision: str, forward: int, backward: int
) -> None:
    seen = {}
    for checkpoint in ("none", "selective", "full", "full+dispatch"):
        answers = ranks.ask(run.checkpointed, Case(alignment=32), checkpoint, False, precision)
        assert all(set(found.values()) == {0.0} for _counted, found in answers)
        seen[checkpoint] = {counted["all_to_all_single"] for counted, _found in answers}
    once = {forward + backward}
    assert seen == {"none": once, "selective": once, "full": {2 * forward + backward}, "full+dispatch": once}


@pytest.mark.parametrize("deepep", [True, False])
def test_mxfp8_tokens_are_what_mxfp8_experts_make_of_them(ranks: Ranks, deepep: bool) -> None:
    """Quantised before the dispatch or after it, the rows are the same to the bit; what is kept for wgrad is not."""
    for answer in ranks.ask(run.quantised_dispatch, ALIGNED, deepep, "mxfp8"):
        between = answer["between"]
        assert between["output"] == between["scores"] == 0.0
        assert between["x"] < (BF16_ULP if deepep else 1e-30)
        assert (between["w2_EDF"] == 0.0) == deepep  # the standard backend quantises the gradient that combine sends
        for name in ("w1_EFD", "w3_EFD"):
            assert BF16_ULP < between[name] < 0.05, answer


def test_fp8_tokens_cost_what_eight_bits_cost(ranks: Ranks) -> None:
    """E4M3 has three bits behind the point, an error of up to 1/16 a number, and each product has two such operands."""
    for answer in ranks.ask(run.quantised_dispatch, Case(alignment=16), True, "fp8"):
        for name, error in answer["sent"].items():
            assert answer["plain"][name] < error < 1 / 12, (name, answer)


def test_more_tokens_than_the_buffer_holds_are_refused(ranks: Ranks) -> None:
    with pytest.raises(BadInput, match=r"dispatches 48 tokens at a time.*was made for 47; it holds one micro-batch"):
        ranks.ask(run.too_many_tokens, Case())


def test_without_expert_parallelism_it_is_refused_when_the_buffer_would_be_made() -> None:
    config = PaddedDispatcher.Config(num_experts=8, top_k=2, hidden_dim=256, num_max_tokens_per_rank=8)
    with pytest.raises(BadInput, match="ep is 1; use standard"):
        config.build().wire_meshes(ep_mesh=None)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"ranks": 1}, "ep is 1"),
        ({"ranks": 3}, "8 experts cannot be divided over 3"),
        ({"top_k": 9}, "with 8 experts DeepEP takes 1 to 8"),
        ({"top_k": 33, "experts": 64}, "top_k is 33; with 64 experts DeepEP takes 1 to 32"),
        ({"tokens": 0}, "would hold 0 tokens"),
        ({"hidden": 384}, "multiple of 256 features, and the model has 384"),
    ],
)
def test_sizes_that_cannot_work_are_named(changed: dict[str, int], said: str) -> None:
    sizes: dict[str, Any] = {"ranks": 2, "hidden": 256, "tokens": 8, "experts": 8, "top_k": 2, "native": True}
    check_sizes(**sizes)
    with pytest.raises(BadInput, match=said):
        check_sizes(**{**sizes, **changed})


# The MXFP8 all-to-all of the standard backend

TORCHAO_CASES = {
    "scores": ALIGNED,
    "one expert a token": Case(top_k=1, seed=1),
    "round robin": Case(routing="round_robin", top_k=4),
    "experts without a token": Case(routing="one rank"),
    "all tokens on one expert": Case(routing="one rank", top_k=1),
    "an expert with one token": Case(routing="one token"),
    "one expert a rank": Case(experts=2),
}


@pytest.mark.parametrize("case", TORCHAO_CASES.values(), ids=TORCHAO_CASES)
def test_outputs_and_gradients_of_the_mxfp8_exchange_are_torchaos_to_the_bit(ranks: Ranks, case: Case) -> None:
    for answer in ranks.ask(torchao_ranks.against_torchao, case):
        between = answer["between"]
        # the sum of a token's gradients is rounded once here, after every addition there
        assert between.pop("x") <= (0.0 if case.top_k <= 2 else BF16_ULP)
        assert set(between.values()) == {0.0}, answer
        for name, error in answer["ours"].items():
            # two operands of up to 1/16 error each; a rank that got no token has no gradient
            assert BF16_ULP < error < 1 / 8 or error == answer["theirs"][name] == 0.0, (name, answer)


def test_half_the_bytes_travel(ranks: Ranks) -> None:
    answers = ranks.ask(torchao_ranks.bytes_sent, ALIGNED)
    rows = 2 * TOKENS * ALIGNED.top_k * len(answers)  # tokens forward and combine's gradient backward
    for dtype, titans in (("int64", 0), ("bfloat16", -rows * 2 * FEATURES), ("uint8", rows * FEATURES * 33 // 32)):
        changed = sum(answer["mxfp8"].get(dtype, 0) - answer["bf16"].get(dtype, 0) for answer in answers)
        assert changed == titans, dtype


def test_padding_is_never_read_on_the_way_home(ranks: Ranks) -> None:
    assert ranks.ask(torchao_ranks.nan_padding, ALIGNED) == [(True, True)] * 2


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
    rows_e = padded_rows(received_re.sum(0), alignment)
    place_R = places(received_re, rows_e, int(received_re.sum()))
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


@pytest.mark.parametrize(
    ("capability", "sent", "wgrad", "arithmetic"),
    [
        ((10, 0), "bf16", "mxfp8", "mxfp8_native_wgrad_mxfp8"),
        ((10, 0), "bf16", "bf16", "mxfp8_native"),
        ((10, 3), "mxfp8", "bf16", "mxfp8_native"),
        ((9, 0), "mxfp8", "bf16", "mxfp8_emulated"),
        ((9, 0), "bf16", "mxfp8", None),  # TorchTitan's three products, each emulated
    ],
)
def test_the_gpu_and_the_experiment_choose_the_experts_arithmetic(
    capability: tuple[int, int], sent: Any, wgrad: str, arithmetic: str | None
) -> None:
    with assume_gpu(capability):
        kernels = resolve("auto")
    swapped = padded(
        config(dispatcher=DeepEPTokenDispatcher.Config, kernels=kernels, wgrad=wgrad),
        alignment=GROUP_PADDING[f"mxfp8_{kernels}"],
        precision=sent,
    )
    assert swapped.token_dispatcher.alignment == (128 if capability >= (10, 0) else 32)
    with torch.device("meta"):
        assert getattr(swapped.build().inner_experts, "_arithmetic", None) == arithmetic


def test_other_dispatchers_are_left_alone() -> None:
    theirs = config(dispatcher=DeepEPTokenDispatcher.Config, kernels="emulated", wgrad="bf16")
    assert quantised(theirs) is theirs


def test_experts_that_cannot_take_such_rows_are_refused() -> None:
    with pytest.raises(BadInput, match="are GroupedExperts; set precision=mxfp8 and wgrad=bf16"):
        quantised(config(experts=GroupedExperts.Config))
    with pytest.raises(BadInput, match="are MXFP8Experts with wgrad mxfp8; set"):
        quantised(config(kernels="emulated"))
    with pytest.raises(BadInput, match="are MXFP8Experts with wgrad mxfp8; set"):
        padded(config(dispatcher=DeepEPTokenDispatcher.Config, kernels="native"), alignment=128, precision="mxfp8")


def test_without_expert_parallelism_there_is_nothing_to_quantise() -> None:
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
