"""Slurm's lists of nodes: known answers, a round trip, and scontrol itself in ``slurm/test_node_list.py``."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelab.errors import BadInput
from moelab.launch.slurm.node_list import expand, node_names

KNOWN = {
    "gpu[001-003,007]": ["gpu001", "gpu002", "gpu003", "gpu007"],
    "gpu[001-002],login1": ["gpu001", "gpu002", "login1"],
    "rack[0-1]n[08-10]": ["rack0n08", "rack0n09", "rack0n10", "rack1n08", "rack1n09", "rack1n10"],
    "b200-a[098-101]": ["b200-a098", "b200-a099", "b200-a100", "b200-a101"],
    "a[1-010]": [f"a{number}" for number in range(1, 11)],
    "a[08-11]": ["a08", "a09", "a10", "a11"],
    "n0": ["n0"],
    "": [],
    "(null)": [],
    "(Priority)": [],
}
WRONG = (
    "gpu[003-001]",
    "gpu[001",
    "a[]",
    "a[x]",
    "a[1-2-3]",
    "a[-1]",
    "a[1-]",
    "a[1-70000]",
    "a]",
    "a,",
    "a,,b",
    "a b",
)


@pytest.mark.parametrize("text", KNOWN)
def test_known_answers(text: str) -> None:
    assert list(expand(text)) == KNOWN[text]


@pytest.mark.parametrize("text", WRONG)
def test_what_is_not_a_list(text: str) -> None:
    with pytest.raises(BadInput, match="node list: got"):
        expand(text)


def test_without_slurm_the_rules_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert list(node_names("gpu[001-003,007]")) == KNOWN["gpu[001-003,007]"]


@st.composite
def lists(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A list as Slurm writes one, and its names."""
    text, names = [], []
    for _ in range(draw(st.integers(1, 4))):
        prefix = draw(st.from_regex(r"[a-z][a-z0-9.-]{0,5}[a-z]", fullmatch=True))
        width = draw(st.integers(1, 4))
        ranges = draw(st.lists(st.tuples(st.integers(0, 10**width - 1), st.integers(0, 20)), max_size=3))
        shown = [f"{first:0{width}}" + (f"-{first + more:0{width}}" if more else "") for first, more in ranges]
        text.append(prefix + (f"[{','.join(shown)}]" if shown else ""))
        numbers = [number for first, more in ranges for number in range(first, first + more + 1)]
        names += [f"{prefix}{number:0{width}}" for number in numbers] if ranges else [prefix]
    return ",".join(text), names


@given(lists())
def test_a_round_trip(case: tuple[str, list[str]]) -> None:
    text, names = case
    assert list(expand(text)) == names


@given(st.text(alphabet="ab[]01-,() ", max_size=12))
def test_any_text_is_names_or_an_error(text: str) -> None:
    try:
        names = expand(text)
    except BadInput:
        return
    assert all(name and not set(name) & set("[](), ") for name in names)
