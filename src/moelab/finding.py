"""One thing that was checked: what was found, why, what follows and what to do."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from moelab.data import read_yaml

Severity = Literal["ok", "note", "warning", "error"]
"""``note``: as it is here, nothing to do. ``warning``: slower or fragile. ``error``: it does not work."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A finding; a warning or an error has a remedy, and either both a cause and a consequence or neither."""

    name: str  # of what was checked
    severity: Severity
    found: str
    cause: str = ""
    consequence: str = ""  # if nothing is done
    remedy: str = ""

    def __post_init__(self) -> None:
        explained = self.remedy and bool(self.cause) == bool(self.consequence)
        if self.severity in ("warning", "error") and not explained:
            raise ValueError(f"finding {self.name!r} is a {self.severity} without cause, consequence and remedy")

    @property
    def ok(self) -> bool:
        """Whether nothing needs to be done."""
        return self.severity in ("ok", "note")

    def to_json(self) -> dict[str, Any]:
        """For a program."""
        return asdict(self)

    def as_lines(self) -> list[str]:
        """For a person."""
        lines = [f"  {'ok ' if self.ok else '-- '} {self.name}: {self.found}"]
        parts = {"because: ": self.cause, "so: ": self.consequence, "do: " if self.cause else "": self.remedy}
        return lines + [f"       {word}{text}" for word, text in parts.items() if text]


def fault(key: str, found: str = "", *, severity: Severity | None = None, **words: object) -> Finding:
    """A known fault: ``data/faults.yaml`` has its cause, consequence and remedy.

    Args:
        key: in the table; also the finding's name, unless the table gives another.
        found: what was found, where that is not always the same.
        severity: where it does not depend on the fault alone.
        words: for the placeholders in the table's texts.
    """
    table = {"name": key, "severity": "error", **known_faults()[key]}  # defaults, which the table may replace
    texts = {name: text.format(**words) for name, text in table.items() if name not in ("sign", "source")}
    return Finding(**{"found": found, **texts, **({"severity": severity} if severity else {})})  # type: ignore[arg-type]


@functools.cache
def known_faults() -> dict[str, dict[str, str]]:
    """The table of faults, by key."""
    content: dict[str, dict[str, str]] = read_yaml("faults.yaml")
    return content


def as_text(groups: Mapping[str, Iterable[Finding]]) -> str:
    """Findings under their titles, for a person; a group without any is left out."""
    shown = {title: [line for one in group for line in one.as_lines()] for title, group in groups.items()}
    return "\n\n".join("\n".join([title, *lines]) for title, lines in shown.items() if lines)


def any_error(findings: Iterable[Finding]) -> bool:
    """Whether any finding is an error."""
    return any(one.severity == "error" for one in findings)
