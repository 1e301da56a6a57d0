"""The plain text of a log: unpacked, without colours, and joined again where a terminal or a mail broke its lines.

A file's first bytes say how it is packed; its name may say nothing, or something else.
"""

from __future__ import annotations

import bz2
import gzip
import itertools
import lzma
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final, cast

from moelab.errors import BadInput
from moelab.files import open_regular

BLOCK_BYTES: Final = 1 << 20
MOST_UNPACKED_BYTES: Final = 16 << 30
TAIL_BYTES: Final = 16 << 20
_UNPACKERS: Final[dict[bytes, Any]] = {b"\x1f\x8b": gzip.open, b"\xfd7zXZ\0": lzma.open, b"BZh": bz2.open}
_COLOUR: Final = re.compile(rb"(?:\x1b|\^\[|#033)\[[0-9;:?]*[A-Za-z]|\[\d[0-9;:]*m")  # a paste has no escape
_BLANKS: Final = re.compile(rb"[ \t\r]+")
_QUOTED: Final = re.compile(r"^(?:> ?)+", re.M)  # by a mail
#: What the first line of a record starts with; of those that are there, the one that stands furthest in front.
_RECORD_STARTS: Final = [
    re.compile(start)
    for start in (rb"\[[A-Za-z_]*\d+\]:", rb"\[titan\]", rb"\[?\d{4}-\d\d-\d\d", rb"(?:validate)?step:")
]
_BEGINS_A_RECORD: Final = re.compile(r"\[[A-Za-z_]*\d+\]: ?|\[titan\]|\[?\d{4}[-/]\d\d[-/]\d\d|\w+: error: |Traceback ")


class NotALog(BadInput):
    """The file does not exist or has no TorchTitan step line."""


class LogBytes:
    """Blocks of a log's text.

    Raises:
        NotALog: if it is no regular file.
    """

    def __init__(self, path: Path) -> None:
        self.damage: str | None = None  # why its end could not be read, once its blocks were
        self._path = path
        try:
            with open_regular(path) as file:
                head = file.read(8)
        except FileNotFoundError:
            raise NotALog(f"{path}: no such file. Give the path of a log that TorchTitan wrote.") from None
        except OSError as error:
            raise NotALog(f"{path} cannot be read: {error.strerror}") from error
        self._unpack = next((opened for magic, opened in _UNPACKERS.items() if head.startswith(magic)), None)

    def __iter__(self) -> Iterator[bytes]:
        """Yield its blocks; of a packed file whose end was cut off, all that is there."""
        with open_regular(self._path) as raw:
            file = cast("IO[bytes]", raw if self._unpack is None else self._unpack(raw))
            left = MOST_UNPACKED_BYTES
            try:
                while block := (file.read1(BLOCK_BYTES) if self._unpack else file.read(BLOCK_BYTES)):  # type: ignore[attr-defined]
                    yield block
                    left -= len(block)
                    if left < 0 and self._unpack:
                        self.damage = f"{self._path.name} unpacks to more than {MOST_UNPACKED_BYTES >> 30} GiB"
                        return
            except EOFError:
                self.damage = f"{self._path.name} is cut off: its end is missing"
            except (OSError, lzma.LZMAError, zlib.error) as error:
                self.damage = f"{self._path.name} is damaged ({error}): the rest is not read"

    def beginning(self, size: int) -> bytes:
        """Return at most so many bytes of its text."""
        text = bytearray()
        for block in self:
            text += block
            if len(text) >= size:
                break
        return bytes(text[:size])

    def tail(self, size: int, start: int) -> str:
        """Return its last bytes behind ``start``."""
        if self._unpack is None:
            with open_regular(self._path) as file:
                file.seek(max(start, self._path.stat().st_size - size))
                return file.read(size).decode(errors="replace")
        text = bytearray()
        for block in self:  # nothing can be sought in it
            text += block
            if len(text) > 2 * size:  # not with each block: what stays is copied
                del text[:-size]
        return text[-size:].decode(errors="replace")


def tail(file: Path, size: int = TAIL_BYTES, *, start: int = 0) -> str:
    """The last ``size`` bytes of a log behind ``start``; of a packed one, of its text."""
    return LogBytes(file).tail(size, start)


def plain(block: bytes) -> bytes:
    """A text without colours, and with usual blanks for those that web pages put in."""
    if b"[" in block:
        block = _COLOUR.sub(b"", block)
    return block.replace(b"\xc2\xa0", b" ")


def unwrapped(text: bytes) -> bytes:
    r"""Put lines together that were broken at any width, in the middle of a number too.

    A reader of step lines needs no blank, so all are taken out: then it no longer matters whether the break replaced a
    blank or came between two digits.

    >>> unwrapped(b"> [rank0]: step:  1  lo\n> ss: 7.2\n> 5000  tps: 4,0\n> 00\n> [rank0]: step:  2").decode()
    '[rank0]:step:1loss:7.25000tps:4,000\n[rank0]:step:2'
    """
    lines = [_BLANKS.sub(b"", line.lstrip(b"> \t").rstrip()) for line in plain(text).splitlines()]
    records = b"".join(lines).count(b"step:")
    # A start counts if no record lacks it: else some lines merely happen to begin like one.
    starts = next((s for s in _RECORD_STARTS if sum(bool(s.match(line)) for line in lines) >= records), None)
    return b"".join(b"\n" + line if starts and starts.match(line) else line for line in lines).lstrip(b"\n")


def unbroken(text: str) -> str:
    """Put lines together that a terminal broke at its width, in the middle of a word as often as not."""
    lines = _QUOTED.sub("", text).split("\n")
    pairs = [(before, after) for before, after in itertools.pairwise(lines) if _may_go_on(before, after)]
    widths = Counter(len(before) for before, _ in pairs)
    width, count = max(widths.items(), key=lambda item: (item[1], item[0]), default=(0, 0))
    in_a_word = sum(len(before) == width and (before[-1] + after[0]).isalnum() for before, after in pairs)
    if count < 2 or 2 * in_a_word < count:  # lines of one length may stand below each other by themselves
        return text
    follows = (len(before) == width and _may_go_on(before, line) for before, line in itertools.pairwise(lines))
    return lines[0] + "".join(
        ("" if goes_on else "\n") + line for goes_on, line in zip(follows, lines[1:], strict=True)
    )


def _may_go_on(before: str, after: str) -> bool:
    is_alike = before[:16] == after[:16]  # a kernel prints one line from each of its threads
    return 60 <= len(before) <= 250 and after[:1].strip() != "" and not is_alike and not _BEGINS_A_RECORD.match(after)


def what_was_seen(text: bytes) -> str:
    """Say what a file without a step line has instead; empty if nothing is known."""
    if not text.strip():
        return "it is empty"
    if b"\0" in text[:1000] or text.startswith(b"PK\3\4") or text.startswith(b"\x28\xb5\x2f\xfd"):
        return "it is binary, or packed as moelab does not read it: unpack it first"
    text = plain(text)
    if match := re.search(rb"(?:loss|grad_norm):\s*-?\d+,\d+|memory:\s*\d+,\d+", text):
        return f"numbers have a decimal comma ({_quote(match[0])}): write the log with LC_ALL=C"
    if match := re.search(rb"step: *\d[^\r\n]*", text):
        return f"there are step lines, but they are cut off or in another format ({_quote(match[0])})"
    return "training started but logged no step" if b"Training starts at step" in text else ""


def _quote(line: bytes) -> str:
    words = " ".join(line.decode(errors="replace").split())
    return repr(words if len(words) <= 80 else f"{words[:79]}…")
