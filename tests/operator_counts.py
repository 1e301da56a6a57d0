"""Counts of the operators that a block of code runs, compiled code and gradients included."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


@contextmanager
def counted_operators(count: Callable[[Any, Any], dict[str, int]]) -> Iterator[Counter[str]]:
    """Add up what ``count(operator, arguments)`` says of every operator."""
    counted: Counter[str] = Counter()

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            counted.update(count(func, args))
            return func(*args, **(kwargs or {}))

    with Count():
        yield counted


def communication(func: Any, _arguments: Any) -> dict[str, int]:
    """1 for each of moelab's operators that communicate and each all-to-all of PyTorch's, by name."""
    namespace, name = func._schema.name.split("::")
    return {name: 1} if namespace == "moelab_deepep" or name == "all_to_all_single" else {}
