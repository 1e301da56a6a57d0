"""What the host did when it launched a kernel: the operators and annotations around a call.

A call lies within the operators of its thread that began before it and end after it. Their names say whether it is
forward, backward or the optimizer; annotations of FSDP and of PyTorch say which layer.
"""

from __future__ import annotations

import re
from array import array

import numpy as np
import numpy.typing as npt

from moelab.explain.categories import Context
from moelab.explain.trace import Rows, Trace

_LAYER = re.compile(r"(?:layers?|blocks?|\bh)[._](\d+)")
_LAYER_BEGINS = re.compile(r"FSDP::pre_(?:forward|backward)\b")
_LAYER_ENDS = re.compile(r"FSDP::(?:post_forward|post_backward_reduce)\b")
_OPTIMIZER = re.compile(r"Optimizer\.(?:step|zero_grad)|clip_grad|(?:optimizer|optim)[-_. ]step", re.I)
_BACKWARD = re.compile(r"autograd::engine::evaluate_function|Backward\d*$|^_?backward$")
COMPILED_FORWARD, COMPILED_BACKWARD = "CompiledFunction", "CompiledFunctionBackward"


class Host:
    """The operators of one trace as trees, one a thread."""

    def __init__(self, trace: Trace) -> None:
        self.names, self.ops, self.calls = trace.names, trace.ops, trace.calls
        threads, first = np.unique(trace.ops["thread"], return_index=True)
        last = [*first[1:].tolist(), len(trace.ops)][: len(first)]
        self._of_thread = {int(one): slice(int(a), b) for one, a, b in zip(threads, first, last, strict=True)}
        self._start, self._end = (np.ascontiguousarray(trace.ops[name]) for name in ("start", "end"))
        self.parent, self.own_segments = _tree(trace.ops)
        self._alike: dict[Context, Context] = {}  # a long trace has few that differ
        says = [index for index, name in enumerate(self.names) if _LAYER_BEGINS.match(name) or _LAYER_ENDS.match(name)]
        self._says_layer = np.isin(trace.ops["name"], says)
        self._layers = {thread: self._layer_changes(thread) for thread in self._of_thread}
        by_correlation = np.argsort(trace.calls["correlation"], kind="stable")
        self._correlations, self._by_correlation = trace.calls["correlation"][by_correlation], by_correlation
        order = np.argsort(trace.ops["external"], kind="stable")
        self._externals, self._by_external = trace.ops["external"][order], order

    def calls_of(self, events: Rows) -> npt.NDArray[np.int64]:
        """Row of the call that launched each event; -1 where none is recorded."""
        return _found(self._correlations, self._by_correlation, events["correlation"])

    def op_of(self, event: np.void, call: int) -> int:
        """Row of the innermost operator that an event was launched from, or -1."""
        if call >= 0:
            row = self.at(int(self.calls["thread"][call]), float(self.calls["start"][call]))
            if row >= 0:
                return row
        if event["external"] < 0:
            return -1
        return int(_found(self._externals, self._by_external, np.asarray([event["external"]]))[0])

    def at(self, thread: int, time_us: float) -> int:
        """Row of the innermost operator of a thread at a time, or -1."""
        there = self._of_thread.get(thread, slice(0, 0))
        row: int = there.start + int(np.searchsorted(self._start[there], time_us, side="right")) - 1
        if row < there.start:
            return -1
        while row >= 0 and self._end[row] < time_us:
            row = int(self.parent[row])
        return row

    def around(self, row: int) -> list[int]:
        """An operator and all around it, innermost first."""
        rows = []
        while row >= 0:
            rows.append(row)
            row = int(self.parent[row])
        return rows

    def name(self, row: int) -> str:
        """Name of an operator."""
        return str(self.names[self.ops["name"][row]])

    def context(self, row: int) -> Context:
        """The context of what an operator launches."""
        if row < 0:
            return Context()
        rows = self.around(row)
        names = tuple(self.name(one) for one in rows)
        phase = "forward"
        for one, name in zip(reversed(rows), reversed(names), strict=True):
            # an operator of the backward pass that itself records a gradient computes the forward pass again
            forward_op = self.ops["sequence"][one] >= 0 and self.ops["forward_thread"][one] == 0
            if _OPTIMIZER.search(name):
                phase = "optimizer"
            elif _BACKWARD.search(name):
                phase = "backward"
            elif phase == "backward" and forward_op:
                phase = "recompute"
        layer = next((int(found[1]) for name in names if (found := _LAYER.search(name))), None)
        if layer is None:
            times, layers = self._layers[int(self.ops["thread"][row])]
            place = int(np.searchsorted(times, self.ops["start"][row], side="right")) - 1
            layer = layers[place] if place >= 0 else -1
        op = next((name for one, name in zip(rows, names, strict=True) if not self.ops["annotation"][one]), "")
        context = Context(op=op, around=names, phase=phase, layer=layer)
        return self._alike.setdefault(context, context)

    def _layer_changes(self, thread: int) -> tuple[npt.NDArray[np.float64], list[int]]:
        """Times at which a thread goes on to a layer, or leaves it (-1), by what FSDP announces."""
        there, changes = self._of_thread[thread], []
        for row in np.flatnonzero(self._says_layer[there]) + there.start:
            name = self.name(int(row))
            begins = _LAYER_BEGINS.match(name)
            layer = _LAYER.search(name)
            changes.append(
                (float(self.ops["start" if begins else "end"][row]), int(layer[1]) if layer and begins else -1)
            )
        changes.sort()
        return np.asarray([time for time, _ in changes]), [layer for _, layer in changes]

    def caller(self, row: int) -> str:
        """The operator that a person knows: the outermost of PyTorch's own around it, never compiled code's digest."""
        rows = [one for one in self.around(row) if not self.name(one).startswith("## Call")]
        if not rows:
            return "Python"
        best = rows[0]
        for one in rows[1:]:
            if not (self.name(best).startswith("aten::") and self.name(one).startswith("aten::")):
                break
            best = one
        return self.name(best)


def _found(keys: Rows, rows: npt.NDArray[np.int64], wanted: Rows) -> npt.NDArray[np.int64]:
    if not len(keys):
        return np.full(len(wanted), -1)
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where((keys[place] == wanted) & (wanted >= 0), rows[place], -1)


def _tree(ops: Rows) -> tuple[npt.NDArray[np.int32], tuple[array[float], array[float], array[int]]]:
    """Each operator's parent, and the stretches of time that are an operator's own: start, end, row."""
    parent = np.full(len(ops), -1, np.int32)
    stack: list[int] = []
    starts, ends, rows, since = array("d"), array("d"), array("l"), 0.0
    start, end, thread = (
        array(code, ops[name].tobytes()) for code, name in (("d", "start"), ("d", "end"), ("i", "thread"))
    )

    def leave(until: float) -> None:
        nonlocal since
        while stack and end[stack[-1]] <= until:
            top = stack.pop()
            if end[top] > since:
                starts.append(since)
                ends.append(end[top])
                rows.append(top)
                since = end[top]

    for row in range(len(ops)):
        if stack and thread[row] != thread[stack[-1]]:
            leave(float("inf"))
        leave(start[row])
        if stack:
            parent[row] = stack[-1]
            if start[row] > since:
                starts.append(since)
                ends.append(start[row])
                rows.append(stack[-1])
        stack.append(row)
        since = start[row]
    leave(float("inf"))
    return parent, (starts, ends, rows)
