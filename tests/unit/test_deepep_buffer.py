"""Which buffer an expert-parallel group gets: one that fits what was asked, and never two at a time."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest

from moelab.deepep.buffer import Exchange, close_exchanges, exchange, open_exchange
from moelab.deepep.stand_in import StandInBuffer
from moelab.errors import Refused

GROUP: Any = SimpleNamespace(group_name="two ranks that need not be there", size=lambda: 2, rank=lambda: 0)


class ElasticBuffer:
    """DeepEP's, as far as opening it goes."""

    alive: ClassVar[list[ElasticBuffer]] = []

    def __init__(self, group: Any, **settings: Any) -> None:
        self.settings = settings
        self.alive.append(self)

    def destroy(self) -> None:
        self.alive.remove(self)


@pytest.fixture
def deep_ep(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """DeepEP V2 and an H100 that are not here."""
    package: Any = ModuleType("deep_ep")
    package.ElasticBuffer, package.EPHandle = ElasticBuffer, SimpleNamespace
    for name in ("deep_ep", "deep_ep.buffers", "deep_ep.buffers.elastic"):
        monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setattr("torch.distributed.all_reduce", lambda *_, **__: None)
    monkeypatch.setattr("torch.zeros", lambda *_, **__: None)
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _device: properties)
    yield
    close_exchanges()
    assert not ElasticBuffer.alive


def opened(**changes: Any) -> Exchange:
    return open_exchange(GROUP, **{"hidden": 1024, "tokens": 64, "experts": 8, "top_k": 2, **changes})


@pytest.mark.usefixtures("deep_ep")
def test_a_buffer_that_is_large_enough_is_shared_with_the_multiprocessors_that_were_asked_for_last() -> None:
    first = opened()
    assert opened(tokens=32) == first
    asked = opened(num_sms=24)
    assert ElasticBuffer.alive == [first.buffer] == [asked.buffer]
    assert (first.num_sms, asked.num_sms, opened().num_sms) == (96, 24, 96)  # of 132: three quarters, in eights


@pytest.mark.usefixtures("deep_ep")
@pytest.mark.parametrize("larger", [{"tokens": 128}, {"hidden": 2048}, {"top_k": 4}])
def test_a_larger_buffer_replaces_a_smaller_one_which_gives_its_memory_back(larger: dict[str, int]) -> None:
    opened(tokens=100)
    second = opened(**larger)
    assert ElasticBuffer.alive == [second.buffer]
    assert exchange(GROUP.group_name) is second
    names = {"tokens": "num_max_tokens_per_rank", "hidden": "hidden", "top_k": "num_topk"}
    enough = {"tokens": 100, "hidden": 1024, "top_k": 2} | larger  # who opened the first one still has room
    assert second.room == {theirs: enough[name] for name, theirs in names.items()}
    assert second.room.items() <= second.buffer.settings.items()


@pytest.mark.usefixtures("deep_ep")
def test_kernels_that_were_not_asked_for_are_never_returned() -> None:
    kinds = []
    for kernels in ("native", "emulated", "native"):
        buffer = opened(kernels=kernels).buffer
        kinds.append((type(buffer), len(ElasticBuffer.alive)))
    assert kinds == [(ElasticBuffer, 1), (StandInBuffer, 0), (ElasticBuffer, 1)]


@pytest.mark.usefixtures("deep_ep")
@pytest.mark.parametrize(("estimate", "sms"), [(16, 16), (ZeroDivisionError, 24)])
def test_between_nodes_deepeps_own_estimate_stands(monkeypatch: pytest.MonkeyPatch, estimate: Any, sms: int) -> None:
    monkeypatch.setattr(ElasticBuffer, "num_scaleout_ranks", 2, raising=False)
    monkeypatch.setattr(ElasticBuffer, "get_theoretical_num_sms", Mock(side_effect=[estimate]), raising=False)
    assert opened().num_sms == sms


@pytest.mark.parametrize(
    ("package", "told"),
    [
        ("raise ImportError('libnccl.so.2')", "libnccl"),
        ("assert None is not None", "AssertionError"),  # it finds no compiler
        ("VERSION = 1", "cannot import name 'ElasticBuffer'"),
    ],
)
def test_a_machine_without_deepep_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, package: str, told: str
) -> None:
    (tmp_path / "deep_ep.py").write_text(package)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "deep_ep", None)
    del sys.modules["deep_ep"]  # imported below, and again unknown afterwards
    with pytest.raises(Refused, match=f"cannot be imported: {told}"):
        opened()
    with pytest.raises(RuntimeError, match="no exchange is open"):
        exchange(GROUP.group_name)
