"""Files: what a person or a run gives is opened with care here, and what moelab writes is whole or absent.

A path may lead to a pipe that nobody writes to, to ``/dev/zero``, to gigabytes or to a thousand brackets. Every reader
of such a file opens it here; what is wrong with it is an ``OSError`` or a ``ValueError``, with words for a person.
"""

from __future__ import annotations

import errno
import json
import math
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

LARGEST_BYTES = 1_000_000
"""Of a file that a person writes, or a run beside its numbers, unless its reader says otherwise."""


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading that has an end.

    Raises:
        OSError: if it cannot be opened, or is a folder, a pipe or a device.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # or a pipe without a writer would be waited for
    if not stat.S_ISREG(mode := os.fstat(handle).st_mode):
        os.close(handle)
        if stat.S_ISDIR(mode):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return os.fdopen(handle, "rb")


def read_bytes(path: Path, most: int = LARGEST_BYTES) -> bytes:
    """Content of a regular file of at most so many bytes; an ``OSError`` if it is another one."""
    with open_regular(path) as file:
        data = file.read(most + 1)  # and not by its size, which may be 0, as in /proc, or grow
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", str(path))
    return data


def read_text(path: Path, most: int = LARGEST_BYTES) -> str:
    """Text of a regular file in UTF-8, with or without a mark in front; a ``ValueError`` if it is none."""
    try:
        return read_bytes(path, most).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError("it is not UTF-8 text") from error


def read_json(path: Path, most: int = LARGEST_BYTES) -> Any:
    """Content of a JSON file; a ``ValueError`` if it is none, or nested as deep as nothing is that a person writes."""
    try:
        return json.loads(read_text(path, most))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file through a temporary one in the same folder; a device or a pipe, such as /dev/stdout, directly.

    Its mode is the one that ``open`` gives: that of the file before, or what the umask leaves.
    """
    data = content.encode() if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_char_device() or path.is_fifo():  # the rename would put a file in its place
        path.write_bytes(data)
        return
    if path.is_symlink():  # replace what a link leads to, not the link
        path = path.resolve()
    # In the same folder: a rename is atomic on one filesystem only.
    begun = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with begun.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # or a crash after the rename may leave an empty file
        with suppress(FileNotFoundError):
            begun.chmod(path.stat().st_mode & 0o777)
        begun.replace(path)
    except BaseException:  # also a Ctrl-C leaves no temporary file
        begun.unlink(missing_ok=True)
        raise


def write_json(path: Path, content: Any) -> None:
    """Write a whole JSON file."""
    write_whole(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def finite_or_none(value: float) -> float | None:
    """A number as JSON has it: null stands for what is not finite."""
    return float(value) if math.isfinite(value) else None
