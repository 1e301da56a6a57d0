"""Notebooks, papermill profiles and studies, written out for a person to run and change: ``moelab notebooks DIR``.

A file that is there already is never written over, whoever wrote it.
"""

from __future__ import annotations

import filecmp
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moelab.data import shipped
from moelab.errors import BadInput
from moelab.files import write_whole

FOLDERS = {"notebooks": "*.ipynb", "papermill_params": "*/*.yaml", "studies": "*.yaml"}
START = "notebooks/00_start_here.ipynb"


@dataclass(frozen=True, kw_only=True)
class WrittenOut:
    """What one call did with each file; names are relative to the folder."""

    folder: str
    written: tuple[str, ...]  # were not there
    kept: tuple[str, ...]  # are not as this version has them: changed by a person, or of another version
    same: tuple[str, ...]  # were there already, as they are here

    def to_json(self) -> dict[str, Any]:
        """Everything, for a program."""
        return asdict(self)

    def as_text(self) -> str:
        """One line for each file that was kept, the counts, and where to begin."""
        lines = [f"kept {name}: it is not as this version has it" for name in self.kept]
        if self.kept:
            lines.append("to get one of these as moelab has it, move yours away and call this again")
        files = {"written": self.written, "kept": self.kept, "there already": self.same}
        counts = ", ".join(f"{len(names)} {what}" for what, names in files.items() if names)
        begin = [f"begin with: jupyter lab {Path(self.folder, START)}"] if self.written else []
        return "\n".join([*lines, f"{self.folder}: {counts}", *begin])


def write_out(folder: Path) -> WrittenOut:
    """Write the notebooks, profiles and studies that come with this version to a folder.

    Raises:
        BadInput: if the folder is a file.
        OSError: if a file cannot be written; those before it are whole, and a second call goes on.
    """
    if folder.exists() and not folder.is_dir():
        raise BadInput(f"{folder} is a file; give the folder that notebooks are written to")
    written, kept, same = [], [], []
    for group, pattern in FOLDERS.items():
        source = shipped(group)
        for file in sorted(source.glob(pattern)):
            name = f"{group}/{file.relative_to(source).as_posix()}"
            target = folder / name
            if target.is_file() and filecmp.cmp(file, target, shallow=False):
                same.append(name)
            elif target.exists() or target.is_symlink():
                kept.append(name)
            else:
                write_whole(target, file.read_bytes())
                written.append(name)
    return WrittenOut(folder=str(folder), written=tuple(written), kept=tuple(kept), same=tuple(same))
