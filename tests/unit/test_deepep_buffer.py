"""Which buffer an expert-parallel group gets: one that fits what was asked, and never two at a time."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from moelab.deepep.buffer import close_exchanges, exchange, open_exchange
from moelab.deepep.stand_in import StandInBuffer
from moelab.errors import Refused

MULTIPROCESSORS = 132


class ElasticBuffer:
    """DeepEP's, as far as opening it goes."""

    alive: ClassVar[list[ElasticBuffer]] = []

    def __init__(self, group: Any, **settings: Any) -> None:
        self.group, self.settings = group, settings
        self.alive.append(self)

    def destroy(self) -> None:
        self.alive.remove(self)


class Group:
    """A process group of two ranks that need not be there."""

    group_name = "a group of fakes"

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0


@pytest.fixture
def deep_ep(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[ElasticBuffer]]:
    """DeepEP V2 and a GPU that are not here."""
    package, elastic = ModuleType("deep_ep"), ModuleType("deep_ep.buffers.elastic")
    package.ElasticBuffer, elastic.EPHandle = ElasticBuffer, SimpleNamespace  # type: ignore[attr-defined]
    for name, module in (("deep_ep", package), ("deep_ep.buffers", package), ("deep_ep.buffers.elastic", elastic)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("torch.distributed.all_reduce", lambda *_, **__: None)
    monkeypatch.setattr("torch.zeros", lambda *_, **__: None)
    properties = SimpleNamespace(multi_processor_count=MULTIPROCESSORS)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _device: properties)
    yield ElasticBuffer
    close_exchanges()
    assert not ElasticBuffer.alive


SIZES: dict[str, Any] = {"hidden": 1024, "tokens": 64, "experts": 8, "top_k": 2}


def test_a_buffer_that_is_large_enough_is_shared(deep_ep: type[ElasticBuffer]) -> None:
    first = open_exchange(Group(), **SIZES)  # type: ignore[arg-type]
    assert open_exchange(Group(), **SIZES | {"tokens": 32}) is first  # type: ignore[arg-type]
    assert deep_ep.alive == [first.buffer]


@pytest.mark.parametrize("larger", [{"tokens": 128}, {"hidden": 2048}, {"top_k": 4}])
def test_a_larger_buffer_replaces_a_smaller_one_which_gives_its_memory_back(
    deep_ep: type[ElasticBuffer], larger: dict[str, int]
) -> None:
    open_exchange(Group(), **SIZES | {"tokens": 100})  # type: ignore[arg-type]
    second = open_exchange(Group(), **SIZES | larger)  # type: ignore[arg-type]
    assert deep_ep.alive == [second.buffer]
    assert exchange(Group.group_name) is second
    enough = SIZES | {"tokens": 100} | larger  # who opened the first one still has room
    names = {"tokens": "num_max_tokens_per_rank", "hidden": "hidden", "top_k": "num_topk"}
    assert {name: second.buffer.settings[theirs] for name, theirs in names.items()} == {
        name: enough[name] for name in names
    }


def test_kernels_that_were_not_asked_for_are_never_returned(deep_ep: type[ElasticBuffer]) -> None:
    native = open_exchange(Group(), **SIZES)  # type: ignore[arg-type]
    emulated = open_exchange(Group(), **SIZES, kernels="emulated")  # type: ignore[arg-type]
    assert isinstance(native.buffer, ElasticBuffer)
    assert isinstance(emulated.buffer, StandInBuffer)
    assert not deep_ep.alive
    assert isinstance(open_exchange(Group(), **SIZES).buffer, ElasticBuffer)  # type: ignore[arg-type]


def test_multiprocessors_are_those_that_were_asked_for_last(deep_ep: type[ElasticBuffer]) -> None:
    chosen = open_exchange(Group(), **SIZES)  # type: ignore[arg-type]
    asked = open_exchange(Group(), **SIZES, num_sms=24)  # type: ignore[arg-type]
    assert (chosen.num_sms, asked.num_sms) == (96, 24)  # of an H100's 132: three quarters, in eights
    assert asked.buffer is chosen.buffer
    assert open_exchange(Group(), **SIZES).num_sms == 96  # type: ignore[arg-type]


@pytest.mark.parametrize("package", ["raise ImportError('libnccl.so.2')", "assert None is not None", "VERSION = 1"])
def test_a_machine_without_deepep_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, package: str) -> None:
    """It is not there, it finds no compiler, or it is version 1."""
    (tmp_path / "deep_ep.py").write_text(package)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "deep_ep", None)
    del sys.modules["deep_ep"]  # imported below, and again unknown afterwards
    with pytest.raises(Refused, match=r"cannot be imported: (lib|AssertionError|cannot import name 'ElasticBuffer')"):
        open_exchange(Group(), **SIZES)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="no exchange is open"):
        exchange(Group.group_name)
