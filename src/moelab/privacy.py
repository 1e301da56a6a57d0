"""What a text says about the machine and the person behind it, taken out before the text is shared.

Reports and executed notebooks go to colleagues, to issues, into a repository. None of their readers needs to know where
the home folder is, what the host is called or which key was in the environment. What is replaced keeps its place, so
that a command is still one that can be read: ``/home/ada/lab/.venv/bin/python`` becomes ``$VENV/bin/python``.

:func:`without_places` knows this machine, and touches nothing else: it is safe on any text, HTML and source included;
of JSON, :func:`each_text` cleans the texts in it and leaves the keys.
:func:`shareable` also takes out the folders of whatever machine a plain text came from, such as a line of a log.
"""

from __future__ import annotations

import getpass
import re
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

HIDDEN = "***"

_NOBODY = frozenset({"root", "user", "ubuntu", "runner", "admin", "nobody", "jovyan", "localhost", "localdomain"})
"""Names that identify no one, and that are words of ordinary text."""

_BEGUN = (
    r"hf_\w{20,}|gh[oprsu]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|xox[abp]-[\w-]{10,}|wandb_v1_\w{20,}"
    r"|sk-[\w-]{20,}|AKIA[0-9A-Z]{16}"
)
"""Tokens that begin as their makers chose: Hugging Face, GitHub, GitLab, Slack, W&B, OpenAI and Anthropic, AWS."""
_QUOTE = r"\\{0,2}['\"]"  # in JSON within a text it has backslashes
_SUFFIX = r"(?-i:(?:_[A-Z0-9]{1,16}){0,2})"  # HF_TOKEN_READ, and no token_dispatcher
_COUNTED = r"(?<!(?:per|[be]os|pad|unk|cls|sep|one|the)[_-]token)(?<!(?:mask|next|last|each)[_-]token)(?<!_a_token)"
_NUMBER = r"\d[\d.,]*(?:e[+-]?\d+)?(?![\w.+/=-])"
_TOKEN = (  # of a login, not of a text: hf_token, ?token, TOKEN, and "token" if its value is in quotes too
    rf"token(?:(?<=[\w?&-]token)|(?<=\b(?-i:TOKEN))|(?<=['\"]token)(?={_QUOTE} ?[:=] ?{_QUOTE}))"
    rf"{_COUNTED}{_SUFFIX}(?![^\w\n]{{1,8}}{_NUMBER})"
)
_NAMED = rf"(?:(?:secret(?:[_-]?key)?|passw(?:or)?d|passphrase|(?:api|access|private)[_-]?key){_SUFFIX}|{_TOKEN})"
_BARE = r"['\"]?(?:(?!</|\\['\"])[^\s'\"])+(?<![,;.)\]}])"
_VALUE = rf"(?:(?P<quote>{_QUOTE})(?:(?!(?P=quote))(?:\\.|[^\n])){{1,4096}}+(?P=quote)|{_BARE})"
_KEPT = rf"\1\g<quote>{HIDDEN}\g<quote>"
_SECRETS = (
    (re.compile(rf"(?<![A-Za-z0-9])(?:{_BEGUN})"), HIDDEN),
    (re.compile(rf"(?i)({_NAMED}(?:{_QUOTE})?\]?[ \t]{{0,4}}[:=](?!=)[ \t]{{0,4}}){_VALUE}"), _KEPT),
    (re.compile(rf"(?i)((?<![\w-])--[\w-]{{0,64}}{_NAMED}(?:{_QUOTE},)?[ \t]{{1,4}})(?!-){_VALUE}"), _KEPT),
    (
        re.compile(
            rf"(?i)\b(authorization(?:{_QUOTE})? ?[:=] ?(?:{_QUOTE})?(?:(?:bearer|basic|token) )?|bearer ){_BARE}"
        ),
        rf"\1{HIDDEN}",
    ),
    (re.compile(r"://(?!git@)[^\s/?#'\"<>]+@"), f"://{HIDDEN}@"),  # the user of an address, and the password
)
"""What is repeated is bounded, or cannot begin inside itself: the time goes with the length of the text."""
_HOME = re.compile(r"(?<![\w.])/(?:home|Users)/[^\s/'\"\\:<>,;)]+")
_ENDPOINT = re.compile(r"(?i)\b(rdzv[-_]endpoint|master[-_]addr)([=: ]+)(?!localhost)[^\s:'\"]+")

_ENDINGS = r"\w*log|txt|json|ya?ml|parquet|py|out|err|sh|csv|gz|pt|html|ipynb|sbatch"
_FILE = re.compile(rf"[\w.+-]+\.(?:{_ENDINGS})|python[\d.]*")
_FOLDERS = re.compile(
    r"""(?<=['"])/[^/'"\n<>]+/[^'"\n<>]+(?=['"])"""  # in quotes, where a name may have blanks
    r"""|(?<![\w./~…)\]}%])/[^\s/'":<>,;]+(?:/[^\s/'":<>,;)]*)+"""
)


def without_places(text: str) -> str:
    """A text without this machine's folders, its user's and its host's name, and without secrets.

    The virtual environment becomes ``$VENV``, the folder for temporary files ``$TMPDIR``, the working folder ``.``,
    moelab's own ``$MOELAB``, any home folder ``~``, names ``USER`` and ``HOST``, and a key or password ``***``.

    Args:
        text: any text, of a notebook or a page too; pictures in base64 are better left out.

    Example:
        >>> without_places("HF_TOKEN=hf_abc /home/ada/run.py --rdzv-endpoint=gpu-17:29500")
        'HF_TOKEN=*** ~/run.py --rdzv-endpoint=HOST:29500'
    """
    text = without_secrets(text)
    for place, name in sorted(_places(), key=lambda pair: -len(pair[0])):
        text = re.sub(rf"(?<![\w.]){re.escape(place)}(?![\w-])", lambda _, name=name: name, text)  # type: ignore[misc]
    text = _ENDPOINT.sub(r"\1\2HOST", _HOME.sub("~", text))
    for word, name in _names():
        text = re.sub(rf"(?<![\w-]){re.escape(word)}(?![\w-])", name, text)
    return text


def without_secrets(text: str) -> str:
    """A text without keys, tokens and passwords, whatever else it says.

    Example:
        >>> without_secrets("WANDB_API_KEY=abc moelab run x.yaml")
        'WANDB_API_KEY=*** moelab run x.yaml'
    """
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    return text


def each_text(clean: Callable[[str], str], value: Any) -> Any:
    """A structure with every text in it cleaned; keys, markup, numbers and plotly's packed arrays stay.

    Example:
        >>> each_text(without_secrets, {"password": ["HF_TOKEN=abc", 4096]})
        {'password': ['HF_TOKEN=***', 4096]}
    """
    if type(value) is str:
        return clean(value)
    if isinstance(value, dict):
        return value if "bdata" in value else {key: each_text(clean, one) for key, one in value.items()}
    return [each_text(clean, one) for one in value] if isinstance(value, list | tuple) else value


def shareable(text: str) -> str:
    """A plain text without what :func:`without_places` takes out, and without the folders of any other machine.

    Args:
        text: words for people: a reason, a command, a name. Of an absolute path the file's own name stays.

    Example:
        >>> shareable("No space left on device: '/scratch/ada/runs/metrics.parquet'")
        "No space left on device: '…/metrics.parquet'"
    """
    return without_places(_FOLDERS.sub(_file_alone, text))


def _file_alone(path: re.Match[str]) -> str:
    last = path[0].rsplit("/", 1)[-1]
    return f"…/{last}" if _FILE.fullmatch(last) else "…"


def _places() -> Iterator[tuple[str, str]]:
    """Folders of this machine and what stands for each; the root of the file system is no place."""
    yield from _both(Path.cwd(), ".")
    own = Path(__file__).parents[2]
    environment = Path(sys.prefix)
    if sys.prefix != sys.base_prefix:
        yield from _both(environment, "$VENV")
    if not own.is_relative_to(environment):
        yield from _both(own, "$MOELAB")
    yield from _both(Path(tempfile.gettempdir()), "$TMPDIR")
    with suppress(RuntimeError):  # a user without a home
        yield from _both(Path.home(), "~")


def _both(folder: Path, name: str) -> Iterator[tuple[str, str]]:
    """A folder as it was given and without symbolic links."""
    for path in {folder, folder.resolve()}:
        if len(path.parts) > 1:
            yield str(path), name


def _names() -> Iterator[tuple[str, str]]:
    """Names of this machine's user and host that say who or which it is."""
    host = socket.gethostname()
    words = [(host, "HOST"), (host.split(".")[0], "HOST")]
    with suppress(OSError, KeyError, ImportError):  # a user without an entry
        words.append((getpass.getuser(), "USER"))
    yield from ((word, name) for word, name in words if len(word) > 2 and word.lower() not in _NOBODY)
