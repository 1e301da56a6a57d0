"""moelab's DeepEP dispatcher on DeepEP's stand-in: two gloo ranks against float64 and TorchTitan's own dispatcher."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import dispatcher_ranks as run
import pytest
from dispatcher_ranks import Case, Ranks, Routed
from hypothesis import given, settings
from hypothesis import strategies as st

from moelab.deepep.buffer import check_sizes
from moelab.deepep.dispatcher import PaddedDispatcher
from moelab.errors import BadInput

BF16_ULP = 2.0**-8


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
    assert all(answer.sums and answer.padding_is_zero and answer.aligned for answer in answers)
    of_expert = [tokens for answer in answers for tokens in answer.tokens_of_expert]
    for expert in range(experts):
        sent = [16 * rank + token for rank in range(2) for token, ids in enumerate(routed[rank]) if expert in ids]
        assert of_expert[expert] == sorted(sent)
    counts = [count for answer in answers for count in answer.rows_of_expert]
    assert sum(counts) == sum(len(ids) for rank in routed for ids in rank)


@pytest.mark.parametrize("alignment", [16, 128])
def test_padding_is_never_read(ranks: Ranks, alignment: int) -> None:
    case = Case(alignment=alignment)
    assert all(ranks.ask(run.undefined_padding, case))
    for answer in ranks.ask(run.poison, case):
        assert answer == {"combine": True, "collect": True, "resend": True}


@pytest.mark.parametrize("routing", ["one token", "one rank"])  # of the second, a rank receives nothing at all
@pytest.mark.parametrize(
    ("mxfp8", "precision", "wgrad"),
    [(False, "bf16", "bf16"), (True, "bf16", "mxfp8"), (True, "mxfp8", "bf16"), (False, "fp8", "bf16")],
)
def test_compiled_as_a_full_graph_it_computes_the_same(
    ranks: Ranks, routing: str, mxfp8: bool, precision: str, wgrad: str
) -> None:
    case = Case(routing=routing, alignment=32)
    for answer in ranks.ask(run.compiled_and_eager, case, mxfp8, precision, wgrad):
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
    for checkpoint in ("none", "full", "full+dispatch"):
        answers = ranks.ask(run.checkpointed, Case(alignment=32), checkpoint, False, precision)
        assert all(set(found.values()) == {0.0} for _counted, found in answers)
        seen[checkpoint] = {counted["all_to_all_single"] for counted, _found in answers}
    once = {forward + backward}
    assert seen == {"none": once, "full": {2 * forward + backward}, "full+dispatch": once}


def test_mxfp8_tokens_are_what_mxfp8_experts_make_of_them(ranks: Ranks) -> None:
    """Quantised before the dispatch or after it, the first two products are the same to the bit."""
    for answer in ranks.ask(run.quantised_dispatch, Case(alignment=32), "mxfp8"):
        between = answer["between"]
        assert between["output"] == between["scores"] == 0.0
        assert between["x"] < BF16_ULP
        assert between["w2_EDF"] == 0.0
        assert max(between["w1_EFD"], between["w3_EFD"]) < 0.05  # of the rows as they came, not as they were


def test_fp8_tokens_cost_what_eight_bits_cost(ranks: Ranks) -> None:
    """E4M3 has three bits behind the point, an error of up to 1/16 a number, and each product has two such operands."""
    for answer in ranks.ask(run.quantised_dispatch, Case(alignment=16), "fp8"):
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
