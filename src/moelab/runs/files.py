"""Files that are whole or absent: a kill at any instant leaves either the old content or the new one."""

from __future__ import annotations

import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file through a temporary one in the same folder; a device or a pipe, such as /dev/stdout, directly."""
    data = content.encode() if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_char_device() or path.is_fifo():  # the rename would put a file in its place
        path.write_bytes(data)
        return
    if path.is_symlink():  # replace what a link leads to, not the link
        path = path.resolve()
    # In the same folder: a rename is atomic on one filesystem only.
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # or a crash after the rename may leave an empty file
        Path(name).chmod(0o644)  # mkstemp makes it readable by its owner alone
        Path(name).replace(path)
    except BaseException:  # also a Ctrl-C leaves no temporary file
        Path(name).unlink(missing_ok=True)
        raise


def write_json(path: Path, content: Any) -> None:
    """Write a whole JSON file."""
    write_whole(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def finite_or_none(value: float) -> float | None:
    """A number as JSON has it: null stands for what is not finite."""
    return float(value) if math.isfinite(value) else None
