"""TorchTitan's log lines, from bytes to numbers.

A log of 256 ranks is gigabytes of text of which a few lines matter, so a whole block of the file is searched at once
for the few words that such lines start with, and nothing is decoded or split before that. A line counts only if it is
complete: a step line ends in ``mfu: …%`` or ``mfu: N/A``, and one that was cut or torn in two by another rank's output
would show ``7.2`` where ``7.20000`` was meant. Colour codes may stand between any two fields.

The formats are those of torchtitan 0.3.0 (``components/metrics.py``, ``tools/logging.py``, ``trainer.py``); older
releases, which print neither ``grad_norm`` nor ``tflops``, are read too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from datetime import datetime
from functools import lru_cache
from typing import Final, TypeAlias

from moelab.runs.metric_names import REPORTED_NAN

#: What a step or validation line measures, in the order of :attr:`LogLine.values`; ``time`` is seconds since the epoch.
FIELDS: Final = ("loss", "grad_norm", "tps", "tflops", "mfu", "memory_gib", "memory_pct", "time")
LOSS, TPS, MEMORY_GIB, MEMORY_PCT, TIME = (
    FIELDS.index(name) for name in ("loss", "tps", "memory_gib", "memory_pct", "time")
)
#: Stored in place of the negative number that a pipeline rank without the loss prints.
NO_LOSS: Final = -1.0
#: The rank of a line without a prefix such as ``[rank3]:``.
NO_RANK: Final = -1

_NAN: Final = math.nan
_MINUS, _ESCAPE = b"-\x1b"
# Possessive quantifiers: a torn line must fail at once instead of trying every way to share out its blanks.
_BLANK = rb"[ \t]*+"
_GAP = _BLANK + rb"(?:\x1b\[[0-9;:]*+m" + _BLANK + rb")*+"  # with colours, 24-bit ones too
# Deliberately loose, and twice as fast as an exact pattern; `float` then refuses what is not a number.
_NUMBER = _BLANK + rb"([-\d.,naifNAIF]++)"
_STEP_NUMBER = rb"\d{1,15}+"  # what fits a table; a longer one is damage
_LOSS = _BLANK + rb"(" + _STEP_NUMBER + rb")" + _GAP + rb"loss:" + _NUMBER
_GRAD_NORM = rb"(?:" + _GAP + rb"grad_norm:" + _NUMBER + rb")?+"
_MEMORY = _GAP + rb"memory:" + _NUMBER + rb"GiB\(" + _NUMBER + rb"%\)"
_TPS = _GAP + rb"tps:" + _NUMBER
_TFLOPS = rb"(?:" + _GAP + rb"tflops:" + _NUMBER + rb")?+"
_MFU = _GAP + rb"mfu:(?:" + _NUMBER + rb"%|" + _BLANK + rb"N/A)"
_STEP = re.compile(rb"step:" + _LOSS + _GRAD_NORM + _MEMORY + _TPS + _TFLOPS + _MFU)
_VALIDATION = re.compile(rb"validate step:" + _LOSS + _MEMORY + _TPS + rb"(?=[\s\x1b])")
_START = re.compile(rb"Training starts at step (" + _STEP_NUMBER + rb")(?=[\s.\x1b])")
_NOT_FINITE = re.compile(rb"Loss is not finite \(global_avg_loss=(-?\w++)\) at step (" + _STEP_NUMBER + rb")\.")
_PARAMETERS = re.compile(rb"size:" + _GAP + rb"([\d,]++) total parameters")
_PREFIX = re.compile(rb"\[[A-Za-z_]*+(\d++)\]:")
_LONGEST_PREFIX_BYTES: Final = 160


#: One line that matters: its kind (``step``, ``validation``, ``start`` or ``failure``), its step, the values of its
#: :data:`FIELDS` and the rank in its prefix (that of step and start lines alone). A plain tuple, because millions are
#: made.
LogLine: TypeAlias = tuple[str, int, tuple[float, ...], int]


def scan(block: bytes) -> Iterator[LogLine]:
    """Yield the lines of ``block`` that matter, in the order of the file.

    Args:
        block: whole lines of a log, any encoding that keeps ASCII, with any line ends and rank prefixes.
    """
    position = 0
    for start, line in sorted(_rare_lines(block)):
        yield from _step_lines(block, position, start)
        yield line
        position = start
    yield from _step_lines(block, position, len(block))


def parameter_count(block: bytes) -> int | None:
    """Return the model's total parameters if ``block`` has TorchTitan's line about them."""
    found = _PARAMETERS.search(block) if b" total parameters" in block else None
    return int(found[1].replace(b",", b"")) if found else None


def _step_lines(block: bytes, start: int, end: int) -> Iterator[LogLine]:
    for match in _STEP.finditer(block, start, end):
        step, loss, grad_norm, memory_gib, memory_pct, tps, tflops, mfu = match.groups()
        try:
            values = (
                _loss(loss),
                _reported(float(grad_norm)) if grad_norm else _NAN,
                float(tps.replace(b",", b"")),
                float(tflops.replace(b",", b"")) if tflops else _NAN,
                float(mfu) if mfu else _NAN,
                float(memory_gib),
                float(memory_pct),
                _time(block, match.start()),
            )
        except ValueError:  # torn by another rank's output in the middle of a number
            continue
        yield "step", int(step), values, _rank(block, match.start())


def _rare_lines(block: bytes) -> Iterator[tuple[int, LogLine]]:
    # The substring tests are several times faster than a search for the pattern and nearly always say no.
    if b"Training starts at step" in block:
        for match in _START.finditer(block):
            values = (*[_NAN] * TIME, _time(block, match.start()))
            yield match.start(), ("start", int(match[1]), values, _rank(block, match.start()))
    if b"validate step:" in block:
        for match in _VALIDATION.finditer(block):
            try:
                yield match.start(), ("validation", int(match[1]), _validation_values(block, match), NO_RANK)
            except ValueError:
                continue
    if b"Loss is not finite" in block:
        for match in _NOT_FINITE.finditer(block):
            loss = float(match[1]) if match[1].lower().lstrip(b"-") in (b"nan", b"inf") else _NAN
            yield match.start(), ("failure", int(match[2]), (loss, *[_NAN] * TIME), NO_RANK)


def _validation_values(block: bytes, match: re.Match[bytes]) -> tuple[float, ...]:
    _, loss, memory_gib, memory_pct, tps = match.groups()
    tokens_per_s = float(tps.replace(b",", b""))
    time = _time(block, match.start())
    return (_loss(loss), _NAN, tokens_per_s, _NAN, _NAN, float(memory_gib), float(memory_pct), time)


def _loss(text: bytes) -> float:
    # The sentinel is -1 summed over micro-steps and ranks; a validation divides that by the tokens, hence "-0.0000".
    value = float(text)
    if text[0] != _MINUS:
        return value
    return NO_LOSS if math.isfinite(value) else _NAN


def _reported(grad_norm: float) -> float:
    return REPORTED_NAN if math.isnan(grad_norm) else grad_norm


def _time(block: bytes, position: int) -> float:
    """Return the time stamp that stands just before ``position`` on its line, in seconds since the epoch, or NaN."""
    level = block.rfind(b" - INFO - ", position - 48 if position > 48 else 0, position)
    message = level + 10
    if level < 0 or (message != position and block[message] != _ESCAPE):
        return _NAN
    comma = block.rfind(b",", level - 64 if level > 64 else 0, level)
    try:
        return _second(block[comma - 19 : comma]) + int(block[comma + 1 : comma + 4]) / 1000
    except ValueError:
        return _NAN


def _rank(block: bytes, position: int) -> int:
    """Return the rank in torchrun's prefix of the line at ``position``, or :data:`NO_RANK`."""
    earliest = max(0, position - _LONGEST_PREFIX_BYTES)
    start = max(block.rfind(b"\n", earliest, position), block.rfind(b"\r", earliest, position), earliest - 1) + 1
    found = _PREFIX.findall(block, start, position)
    return int(found[-1]) if found else NO_RANK  # the last: two ranks' output may share a line


@lru_cache(maxsize=256)
def _second(stamp: bytes) -> float:
    # All ranks print a step within a second or two. The stamp is the local time of the machine that trained.
    return datetime.fromisoformat(stamp.decode("ascii", "replace")).timestamp()
