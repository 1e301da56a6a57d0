"""The processes of this machine, which tests know by their variables, and programs that tests put on PATH."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def processes() -> Iterator[tuple[int, str, dict[str, str]]]:
    """Id, command line and variables of every process that can be read, from /proc."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            line, variables = ((folder / name).read_text(errors="replace") for name in ("cmdline", "environ"))
            named = dict(one.split("=", 1) for one in variables.split("\0") if "=" in one)
            yield int(folder.name), line.replace("\0", " "), named


def program(folder: Path, name: str, script: str, shell: str = "/bin/sh") -> Path:
    """Write an executable."""
    file = folder / name
    file.write_text(f"#!{shell}\n{script}\n")
    file.chmod(0o755)
    return file
