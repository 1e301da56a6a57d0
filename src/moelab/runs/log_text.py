"""The plain text of a log that is compressed, in UTF-16 or wrapped by whoever pasted it, or what the file is instead.

A file's first bytes say how it is packed; its name may say nothing, or something else.
"""

from __future__ import annotations

import bz2
import codecs
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Final

import zstandard

from moelab.errors import BadInput

BLOCK_BYTES: Final = 1 << 20
WRAPPED_BYTES: Final = 16 << 20
"""A longer file is no paste, and is not searched for wrapped lines."""
TAIL_BYTES: Final = 32 << 20
_PACKED_BLOCK_BYTES: Final = 1 << 16
_UNPACKERS: Final[dict[bytes, Callable[[], Any]]] = {
    b"\x1f\x8b": lambda: zlib.decompressobj(zlib.MAX_WBITS | 16),
    b"\xfd7zXZ\0": lzma.LZMADecompressor,
    b"BZh": bz2.BZ2Decompressor,
    b"\x28\xb5\x2f\xfd": lambda: zstandard.ZstdDecompressor().decompressobj(),
}
_REFUSED: Final = {
    b"PK\x03\x04": "a zip archive",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive",
    b"Rar!": "a rar archive",
    b"\x04\x22\x4d\x18": "compressed with lz4",
    b"\x1f\x9d": "compressed with compress (.Z)",
    b"PAR1": "a Parquet file",
    b"%PDF": "a PDF",
    b"\x89PNG": "a picture",
}
_UNPACKING_ERRORS: Final = (OSError, ValueError, lzma.LZMAError, zlib.error, zstandard.ZstdError)
COLOUR: Final = re.compile(
    rb"(?:\x1b|\\u001[bB]|\\x1b|\\033|\^\[|#033)\[[0-9;:?]*[A-Za-z]|\[\d[0-9;:]*m"  # JSON, `cat -v`, rsyslog, a paste
)
_SOURCE_LINE: Final = re.compile(rb"[\w./]+\.py:\d+")  # where rich says a line comes from, behind it
_BLANKS: Final = re.compile(rb"[ \t\r\xa0\xc2]+")
#: What the first line of a record starts with; of those that are there, the one that stands furthest in front.
_RECORD_STARTS: Final = tuple(
    re.compile(start)
    for start in (
        rb"\[[A-Za-z_]*\d+\]:",
        rb"\[titan\]",
        rb"\[?\d\d(?:\d\d)?[-/]\d\d[-/]\d\d",
        rb"\d+:",
        rb"(?:validate)?step:",
    )
)
_OTHERS: Final = {
    "NeMo's": rb"(?:Training epoch \d+, iteration|\[NeMo I |step \d+ \| epoch \d+ \| |reduced_train_loss[=:])[^\n]*",
    "Megatron-LM's": rb"iteration +\d+/ *\d+ *\|[^\n]*",
    "MaxText's": rb"completed step: \d+, seconds[^\n]*",
    "DeepSpeed's": rb"(?:\bsteps?: \d+ loss: [-\d.naif]+ iter time|\[Rank \d+\] step=\d+, skipped=)[^\n]*",
    "the Hugging Face Trainer's": rb"\{['\"]loss['\"]: [^\n]*",
    "torchtune's": rb"(?:Step \d+ \| loss:|\d{1,9}\|\d{1,9}\|Loss: )[^\n]*",
    "nanoGPT's": rb"iter \d+: loss [^\n]*",
    "OLMo-core's": rb"\[step=\d+/\d+[^\n]*",
    "Composer's": rb"\[batch=\d+/\d+\][^\n]*",
    "verl's": rb"step:\d+ - [\w/]+:[^\n]*",
    "Lightning's": rb"Epoch \d+: +\d+%\|[^\n]*",
    "fairseq's": rb"(?:train_inner \||epoch \d+: +\d+ / \d+ loss=)[^\n]*",
}
_DECIMAL_COMMA: Final = re.compile(rb"(?:loss|grad_norm):\s*-?\d+,\d+|memory:\s*\d+,\d+")


class NotALog(BadInput):
    """The file does not exist or has no TorchTitan step line."""


class LogBytes:
    """Blocks of a log's text in an encoding that keeps ASCII.

    Args:
        path: of the log: plain, or packed with gzip, xz, bzip2 or zstd whatever its name is.

    Raises:
        NotALog: naming how it is packed, if that cannot be unpacked here.
    """

    def __init__(self, path: Path) -> None:
        self.damage: str | None = None  # why its end could not be read, once its blocks were
        self._path = path
        with path.open("rb") as file:
            head = file.read(256)
        for magic, kind in _REFUSED.items():
            if head.startswith(magic):
                raise NotALog(f"{path} is {kind}, not a log. Unpack it and give the log itself")
        self._unpacker = next((new for magic, new in _UNPACKERS.items() if head.startswith(magic)), None)
        # Whether its bytes are its text.
        self.is_plain = self._unpacker is None and _utf16(head) is None

    def __iter__(self) -> Iterator[bytes]:
        """Yield its blocks; of a packed file whose end was cut off, all that is there."""
        decoder: codecs.IncrementalDecoder | None = None
        with self._path.open("rb") as file:
            for number, block in enumerate(self._unpacked(file)):
                if not number and (encoding := _utf16(block)):
                    decoder = codecs.getincrementaldecoder(encoding)(errors="replace")
                yield block if decoder is None else decoder.decode(block).encode()

    def _unpacked(self, file: IO[bytes]) -> Iterator[bytes]:
        if self._unpacker is None:
            while block := file.read(BLOCK_BYTES):
                yield block
            return
        unpacker = self._unpacker()
        try:
            while block := file.read(_PACKED_BLOCK_BYTES):
                while block:
                    if unpacker.eof:  # files that were joined, as `cat a.gz b.gz` does
                        unpacker = self._unpacker()
                    yield unpacker.decompress(block)
                    block = unpacker.unused_data.lstrip(b"\0") if unpacker.eof else b""  # a tape's padding
        except _UNPACKING_ERRORS as error:
            self.damage = f"{self._path.name} is damaged ({error}): the rest is not read"
        else:
            if not unpacker.eof:
                self.damage = f"{self._path.name} is cut off: its end is missing"


def tail(file: Path, size: int = TAIL_BYTES, *, start: int = 0) -> str:
    """The last ``size`` bytes of a log behind ``start``; of one that is packed or in UTF-16, of its text."""
    log = LogBytes(file)
    if not log.is_plain:
        text = bytearray()
        for block in log:  # nothing can be sought in it
            text += block
            if len(text) > 2 * size:  # not with each block: what stays is copied
                del text[:-size]
        return text[-size:].decode(errors="replace")
    with file.open("rb") as stream:
        stream.seek(max(start, file.stat().st_size - size))
        return stream.read(size).decode(errors="replace")


def _utf16(block: bytes) -> str | None:
    """Return the encoding of a text of which every second byte is zero; all are in the hole of a file."""
    odd, even = (block[start:200:2].strip(b"\0") for start in (3, 2))  # behind the mark, if there is one
    if len(block) < 4 or bool(odd) == bool(even):
        return None
    return "utf-16-be" if odd else "utf-16-le"


def unwrapped(text: bytes) -> bytes:
    r"""Put lines together that were broken at any width, in the middle of a number too.

    A reader of step lines needs no blank, so all are taken out: then it no longer matters whether the break replaced a
    blank or came between two digits.

    >>> unwrapped(b"> [rank0]: step:  1  lo\n> ss: 7.2\n> 5000  tps: 4,0\n> 00\n> [rank0]: step:  2").decode()
    '[rank0]:step:1loss:7.25000tps:4,000\n[rank0]:step:2'
    """
    lines = []
    for line in COLOUR.sub(b"", text).splitlines():
        head, blank, last = line.lstrip(b"> \t").rstrip(b" \t\\=").rpartition(b"  ")  # a mail's and a shell's marks
        lines.append(_BLANKS.sub(b"", head if blank and _SOURCE_LINE.fullmatch(last) else head + last))
    records = b"".join(lines).count(b"step:")
    # A start counts if no record lacks it: else some lines merely happen to begin like one.
    starts = next((s for s in _RECORD_STARTS if sum(bool(s.match(line)) for line in lines) >= records), None)
    joined = b"".join(b"\n" + line if starts and starts.match(line) else line for line in lines)
    return joined.lstrip(b"\n")


def what_was_seen(text: bytes) -> str:
    """Say what a file without a step line has instead; empty if nothing is known.

    >>> what_was_seen(b" iteration       10/     100 | consumed samples: 80 |")
    "these look like Megatron-LM's lines ('iteration 10/ 100 | consumed samples: 80 |')"
    """
    if not text.strip():
        return "it is empty"
    if b"\0" in text[:1000]:
        return "it is binary"
    text = COLOUR.sub(b"", text)
    for whose, pattern in _OTHERS.items():
        if match := re.search(pattern, text):
            return f"these look like {whose} lines ({_quote(match[0])})"
    if match := _DECIMAL_COMMA.search(text):
        return f"numbers have a decimal comma ({_quote(match[0])}): write the log with LC_ALL=C"
    if match := re.search(rb"step: *\d[^\r\n]*", text):
        return f"there are step lines, but they are cut off or in another format ({_quote(match[0])})"
    if b"Training starts at step" in text:
        return "training started but logged no step"
    return ""


def _quote(line: bytes) -> str:
    words = " ".join(line.decode(errors="replace").split())
    return repr(words if len(words) <= 80 else f"{words[:79]}…")
