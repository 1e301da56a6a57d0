"""Notebooks, papermill profiles and studies, written out for a person to run and change: ``moelab notebooks DIR``.

A file that a person changed is never written over. A record in the folder holds the digest of each file as it was
written, by which a later version of moelab knows the files that nobody changed, and renews those alone.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moelab.data import shipped
from moelab.errors import BadInput
from moelab.files import write_json, write_whole

FOLDERS = {"notebooks": "*.ipynb", "papermill_params": "*/*.yaml", "studies": "*.yaml"}
START = "notebooks/00_start_here.ipynb"
RECORD = ".moelab_notebooks.json"


@dataclass(frozen=True, kw_only=True)
class WrittenOut:
    """What one call did with each file; names are relative to the folder."""

    folder: str
    written: tuple[str, ...]  # were not there
    renewed: tuple[str, ...]  # of another version of moelab; nobody had changed them
    kept: dict[str, str]  # are not as this version has them; with the reason why each was left alone
    same: tuple[str, ...]  # were there already, as they are here

    def to_json(self) -> dict[str, Any]:
        """Everything, for a program."""
        return asdict(self)

    def as_text(self) -> str:
        """One line for each file that was kept, the counts, and where to begin."""
        lines = [f"kept {name}: {reason}" for name, reason in self.kept.items()]
        if self.kept:
            lines.append("to get one of these as moelab has it, move yours away and call this again")
        files = {"written": self.written, "renewed": self.renewed, "kept": self.kept, "there already": self.same}
        counts = ", ".join(f"{len(names)} {what}" for what, names in files.items() if names)
        begin = [f"begin with: jupyter lab {Path(self.folder, START)}"] if self.written else []
        return "\n".join([*lines, f"{self.folder}: {counts}", *begin])


def write_out(folder: Path) -> WrittenOut:
    """Write the notebooks, profiles and studies that come with this version to a folder.

    Raises:
        BadInput: if the folder is a file, or its record is damaged; nothing was written.
        OSError: if a file cannot be written; those before it are whole, and a second call goes on.
    """
    if folder.exists() and not folder.is_dir():
        raise BadInput(f"{folder} is a file; give the folder that notebooks are written to")
    left = _record(folder / RECORD)
    written, renewed, kept, same = [], [], {}, []
    digests = {}
    for group, pattern in FOLDERS.items():
        source = shipped(group)
        for file in sorted(source.glob(pattern)):
            name = f"{group}/{file.relative_to(source).as_posix()}"
            content = file.read_bytes()
            digests[name] = _digest(content)
            target = folder / name
            if not (target.exists() or target.is_symlink()):
                write_whole(target, content)
                written.append(name)
                continue
            try:
                there = _digest(target.read_bytes())
            except OSError as error:
                kept[name] = f"cannot be read: {error.strerror}"
                continue
            if there == digests[name]:
                same.append(name)
            elif there == left.get(name):
                write_whole(target, content)
                renewed.append(name)
            elif name not in left:
                kept[name] = "moelab did not write it"
            else:
                newer = "" if left[name] == digests[name] else ", and moelab's is another since"
                kept[name] = f"it was changed here{newer}"
    # A kept file keeps the digest it was written with, so that undoing the change makes it moelab's again.
    record = left | {name: digest for name, digest in digests.items() if name not in kept}
    if record != left and shipped("notebooks") != (folder / "notebooks").resolve():  # a clone is its own record
        write_json(folder / RECORD, record)
    return WrittenOut(folder=str(folder), written=tuple(written), renewed=tuple(renewed), kept=kept, same=tuple(same))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _record(path: Path) -> dict[str, str]:
    """Digest of each file as moelab wrote it."""
    try:
        record = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise BadInput(f"{path} is damaged: delete it; then every file that differs from moelab's is kept")
    return record
