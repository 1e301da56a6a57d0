"""The door of what is shown: a text leaves without secrets, and before it is shared without machine and person.

Whatever a terminal, a notebook, a page or JSON shows of a log, of a file or of a name on disk goes through
:func:`without_secrets`, or through :func:`one_line` where it stands on a line of ours.

Reports and executed notebooks go to colleagues, into issues and repositories. Their readers do not need to know where
the home folder is, what the host is called or which key was in the environment. Replacements keep a command readable:
``/home/ada/lab/.venv/bin/python`` becomes ``$VENV/bin/python``.

:func:`without_places` replaces what it knows of this machine and nothing else, so it is safe on any text, HTML and
source included; :func:`each_text` applies it to the strings of JSON and leaves the keys.
:func:`shareable` also removes folders of any other machine from plain text, such as a line of a log.
"""

from __future__ import annotations

import functools
import getpass
import os
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
"""Names that identify nobody and occur in ordinary text."""

_BEGUN = (
    r"(?:hf|api_org|gh[oprsu]|github_pat|gl[a-z]{2,4}t|xox[a-z]|xapp|wandb_v1|nvapi|sk|npm|pypi|dckr_pat|gsk|xai|pplx|hvs"
    r"|tgp_v1|KGAT|GOCSPX|ya29)[_.-][\w-]{20,}|AIza[\w-]{30,}|A[KS]IA[0-9A-Z]{12,}|MUNGE:[\w+/=]{16,}"
    r"|eyJ[\w=-]{8,}(?:\.[\w=+/-]*){1,4}"
)
"""Tokens with their issuers' prefixes, whole or truncated, which detect-secrets would only know whole: of hubs of
models and code, of W&B, NVIDIA and other services, of AWS, MUNGE and JSON web tokens."""
_QUOTE = r"\\{0,2}['\"]"  # with backslashes in JSON that is quoted in a text
_SUFFIX = r"(?-i:(?:_[A-Z0-9]{1,16}){0,2})"  # HF_TOKEN_READ, but not token_dispatcher
_COUNTED = r"(?<!(?:per|[be]os|pad|unk|cls|sep|one|the)[_-]token)(?<!(?:mask|next|last|each)[_-]token)(?<!_a_token)"
_NUMBER = r"\d[\d.,]*(?:e[+-]?\d+)?(?![\w.+/=-])"
_TOKEN = (  # of a login, not of a model's text: hf_token, ?token, TOKEN, and "token" only with a value in quotes
    rf"token(?:(?<=[\w?&=-]token)|(?<=\b(?-i:TOKEN))|(?<=['\"]token)(?={_QUOTE} ?[:=] ?{_QUOTE}))"
    rf"{_COUNTED}{_SUFFIX}(?![^\w\n]{{1,8}}{_NUMBER})"
)
_NAMED = (
    r"(?:(?:secret(?:[ _-]?key)?|passw(?:or)?d|passphrase|sshpass"
    r"|(?:api|access|account|private|auth)[ _-]?key(?:[_-]?id)?"
    rf"|shared[ _-]?access[ _-]?(?:key|signature)|client[ _-]?secret|(?<=_)(?:jwt|pwd)|(?<=[a-z0-9_-])secret"
    rf"|(?-i:(?<=[A-Z0-9]_)(?:KEY|PAT|PASS|AUTH))(?![^\w\n]{{1,8}}{_NUMBER})){_SUFFIX}|{_TOKEN})"
)
_BARE = r"['\"]?(?:(?!</|\\['\"])[^\s'\"])+(?<![,;.)\]}])"
_VALUE = rf"(?:(?P<quote>{_QUOTE})(?:(?!(?P=quote))(?:\\.|[^\n])){{1,4096}}+(?P=quote)|{_BARE})"
_KEPT = rf"\1\g<quote>{HIDDEN}\g<quote>"
_SCHEME = r"(?:[a-z][\w-]{0,30} (?=[^\s'\"]))?"
_TAKE_P = r"sshpass|(?:docker|podman) login|mysql\w*|mariadb[\w-]*|mongo\w*"
_SECRETS = (
    (  # over several lines, on one with a literal \n, or with its end cut off
        re.compile(
            r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----"
            r"(?:(?:(?!-----)[\s\S]){0,20000}?-----END [A-Z0-9 ]{0,40}-----|[\w+/=\\\s]*)"
        ),
        HIDDEN,
    ),
    (re.compile(rf"(?:(?<![A-Za-z0-9])|(?<=%[0-9A-F]{{2}}))(?:{_BEGUN})"), HIDDEN),  # %3D is =
    # NAME=value, name: value, "name": "value"; and not name == value, which is code.
    (re.compile(rf"(?i)({_NAMED}(?:{_QUOTE})?\]?[ \t]{{0,4}}[:=](?!=)[ \t]{{0,4}}){_VALUE}"), _KEPT),
    # --name value, also as a list of arguments: '--name', 'value'.
    (re.compile(rf"(?i)((?<![\w-])--[\w-]{{0,64}}{_NAMED}(?:{_QUOTE},)?[ \t]{{1,4}})(?!-){_VALUE}"), _KEPT),
    (  # of a signed URL
        re.compile(
            r"(?i)((?:[?&]|&amp;)(?:x-(?:amz|goog|ms|oss)-[\w-]{1,40}|signature|sig|awsaccesskeyid|googleaccessid|key"
            r"|key-pair-id|policy|code_verifier|refresh_token|auth)=)[^\s&'\"<>#]+"
        ),
        rf"\1{HIDDEN}",
    ),
    # HTTP's header of any scheme, as the value of a name in quotes or on a line; then a lone one. A sentence about the
    # bearer of something is none.
    (
        re.compile(
            rf"(?i)((?<![a-z])authorization{_QUOTE} ?[:=,] ?(?P<quote>{_QUOTE}){_SCHEME})(?:(?!(?P=quote))[^\n])+"
        ),
        rf"\1{HIDDEN}",
    ),
    (
        re.compile(
            rf"(?i)((?<![a-z])authorization ?[:=](?!=) ?(?:{_QUOTE})?{_SCHEME})"
            rf"{_BARE}"
        ),
        rf"\1{HIDDEN}",
    ),
    (re.compile(rf"(?i)(\bbearer (?-i:(?![a-z]+ ))){_BARE}"), rf"\1{HIDDEN}"),
    # The password behind -p, as clients of databases, sshpass and a login to a registry of containers take it.
    (re.compile(rf"(\b(?:{_TAKE_P})\b[^\n|;&]{{0,200}}?[ '\"]-p(?:{_QUOTE},)? ?){_VALUE}"), _KEPT),
    # curl's user:password.
    (re.compile(r"(\s(?:-u|--user|--proxy-user)[ =]?['\"]?[^\s:'\"]{1,100}:)[^\s'\"]+"), rf"\1{HIDDEN}"),
    (re.compile(r"://(?!git@|\$\w+@)[^\s/?#'\"<>]+@"), f"://{HIDDEN}@"),  # user and password of a URL
)
"""Every repetition is bounded or cannot start inside itself, so the time is linear in the length of the text."""
_HEX = re.compile(r"(?<![A-Za-z0-9_])[0-9a-f]{40}(?![A-Za-z0-9_])")
_OF_A_KEY = re.compile(r"(?i)wandb|w&b|api|key|login|token|secret|passw|auth|credential")
_OF_A_COMMIT = re.compile(
    r"(?i)commit|git|\bsha|revision|\brev\b|hash|digest|checksum|merge|snapshot|blob|tree|\bref|head|branch|@$|\+$"
)
"""A W&B key and a commit both have 40 hexadecimal digits: the words before them decide."""
_SECRET_NAME = re.compile(
    r"(?i)(?:(?:^|[_.-])(?:key|token|secret|pat|jwt|pass|auth|auth_config|sas|credentials?)|_pwd|passw(?:or)?d|passphrase"
    r"|sshpass|apikey|accesskey|secretkey|connection_string)(?:_(?:read|write|ro|rw|id|prod|dev|b64|base64|json|\d+))?$"
)
_SHORTEST_VALUE = 8
"""Values of variables shorter than this are not searched for: they are words such as ``true``."""
_OF_NO_WIDTH = re.compile(  # colours and characters without width, also in JSON's escapes
    r"(?:\x1b|\\(?:u001[bB]|x1b|033))(?:\[[0-?]{0,64}[ -/]{0,8}[@-~]|\][^\x07\x1b\n]{0,1000}(?:\x07|\x1b\\)|[@-Z\\^_])"
    "|[\u200b-\u200d\u2060\ufeff]|" + r"\\u(?:200[b-d]|2060|feff)"
)
_INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2061-\u206f\ufff9-\ufffb\ud800-\udfff"
    "\U000e0000-\U000e007f]"
)
_HOME = re.compile(r"(?:(?<![\w.])|(?<=[\s\"']-[ILF]))/(?:home|Users)/[^\s/'\"\\:<>,;)]+")
_INDUCTOR = re.compile(r"(?<=/torchinductor_)[\w.-]+")  # whose folder has its user's name
_ADDRESS = re.compile(  # of mail or of a login, and no product of matrices
    r"(?<![\w.+/-])(?!git@)[\w.+-]{1,64}+@(?:[\w-]{1,63}\.){1,8}"
    r"(?:(?!py|so|cu)[a-z]{2}|com|org|net|edu|gov|mil|info|dev|cloud|local|internal|lan|cluster|corp|hpc)(?![\w(-]|\.\w)"
)
_ENDPOINT = re.compile(r"(?i)\b(rdzv[-_]endpoint|master[-_]addr)([=: ]+)(?!localhost)[^\s:'\"]+")

_ENDINGS = r"\w*log|txt|json|ya?ml|parquet|py|out|err|sh|csv|gz|pt|html|ipynb|sbatch"
_FILE = re.compile(rf"[\w.+-]+\.(?:{_ENDINGS})|python[\d.]*")
_FOLDERS = re.compile(
    r"""(?<=['"])/[^/'"\n<>]+/[^'"\n<>]+(?=['"])"""  # in quotes, where a name may have blanks
    r"""|(?:(?<![\w./~…)\]}%])|(?<=[\s"']-[ILF]))/(?:(?<!:/)/)?[^\s/'":<>,;]+(?:/[^\s/'":<>,;)]*)+"""
)


_QUOTED_VALUE = re.compile(r"""(?<=(['"]))([\w-]+=)(/[^'"\n<>]+)(?=\1)""")
"""A folder as the value of a variable, both in quotes, where its name may have blanks."""


def without_places(text: str) -> str:
    """A text without this machine's folders, user name and host name, and without secrets.

    The virtual environment becomes ``$VENV``, the folder for temporary files ``$TMPDIR``, the working folder ``.``,
    moelab's own ``$MOELAB``, any home folder ``~``, names ``USER`` and ``HOST``, and a key or password ``***``.

    >>> without_places("HF_TOKEN=hf_abc /home/ada/run.py --rdzv-endpoint=gpu-17:29500")
    'HF_TOKEN=*** ~/run.py --rdzv-endpoint=HOST:29500'
    """
    text = without_secrets(text)
    for place, name in _places(Path.cwd(), sys.prefix, tempfile.gettempdir(), os.environ.get("HOME")):
        text = place.sub(name, text)
    text = _INDUCTOR.sub("USER", _ENDPOINT.sub(r"\1\2HOST", _HOME.sub("~", text)))
    for word, name in _names():
        text = re.sub(rf"(?<![\w-]){re.escape(word)}(?![\w-])", name, text)
    return text


def without_secrets(text: str) -> str:
    """A text without recognisable keys, tokens and passwords, and without invisible characters.

    This removes the patterns of :data:`_SECRETS` and of detect-secrets, what follows a name such as ``HF_TOKEN=``, and
    the values of this process's environment variables with such names. Forty hexadecimal digits are a W&B key unless a
    word such as *commit* or *sha* precedes them. It cannot recognise any other secret.

    >>> without_secrets("WANDB_API_KEY=abc moelab run x.yaml")
    'WANDB_API_KEY=*** moelab run x.yaml'
    >>> without_secrets("at commit 0123456789abcdef0123456789abcdef01234567")
    'at commit 0123456789abcdef0123456789abcdef01234567'
    """
    text = visible(text)
    secret = [value for name, value in os.environ.items() if len(value) >= _SHORTEST_VALUE and is_secret_name(name)]
    for value in sorted(secret, key=len, reverse=True):  # a value may be a part of a longer one
        text = text.replace(value, HIDDEN)
    for pattern, replacement in (*_SECRETS, *_detected()):
        text = pattern.sub(replacement, text)
    return _HEX.sub(_commit_or_hidden, text)


shown = functools.lru_cache(maxsize=10_000)(without_secrets)
"""As :func:`without_secrets`, for labels and cells, of which thousands are the same."""


def one_line(text: str) -> str:
    r"""As :func:`without_secrets`, with line ends and tabs written out: a name stays on the line that it is shown on.

    >>> print(one_line("study\nbf16: completed"))
    study\nbf16: completed
    """
    return without_secrets(text).replace("\n", r"\n").replace("\t", r"\t")


@functools.lru_cache(maxsize=1024)  # called for every variable and every text
def is_secret_name(name: str) -> bool:
    """Whether a variable of this name holds a key, token or password.

    >>> [is_secret_name(name) for name in ("WANDB_API_KEY", "PGPASSWORD", "TOKENIZERS_PARALLELISM", "PWD")]
    [True, True, False, False]
    """
    return bool(_SECRET_NAME.search(name))


def holds_secret(text: str) -> bool:
    """Whether :func:`without_secrets` removes anything from a text, other than the user name of a URL.

    >>> [holds_secret(one) for one in ("docker://ada@nvcr.io#x", "https://ada:pass@host.org")]
    [False, True]
    """
    text = re.sub(r"(://[^\s/:@]+)@", r"\1 ", text)
    return without_secrets(text) != text


def visible(text: str) -> str:
    r"""A text without colours and characters of no width, and with escapes for all other invisible characters.

    Line ends and tabs stay.

    >>> print(visible("\x1b[31mred\x1b[0m\r\nleft\u202eright\x00"))
    red
    left\u202eright\x00
    """
    return _INVISIBLE.sub(lambda sign: ascii(sign[0])[1:-1], _OF_NO_WIDTH.sub("", text).replace("\r\n", "\n"))


def each_text(clean: Callable[[str], str], value: Any) -> Any:
    """A structure with all its strings cleaned; keys, numbers and plotly's packed arrays (``bdata``) stay.

    >>> each_text(without_secrets, {"password": ["HF_TOKEN=abc", 4096]})
    {'password': ['HF_TOKEN=***', 4096]}
    """
    if type(value) is str:
        return clean(value)
    if isinstance(value, dict):
        if "bdata" in value:
            return value
        return {
            # A commit stays under its name.
            key: one if _OF_A_COMMIT.search(str(key)) and _HEX.fullmatch(str(one)) else each_text(clean, one)
            for key, one in value.items()
        }
    return [each_text(clean, one) for one in value] if isinstance(value, list | tuple) else value


def shareable(text: str) -> str:
    """A plain text without what :func:`without_places` removes, the folders of any other machine and mail addresses.

    It is for people: a reason, a command, a name. Of an absolute path, the file's own name stays.

    >>> shareable("No space left on device: '/scratch/ada/runs/metrics.parquet'")
    "No space left on device: '…/metrics.parquet'"
    """
    text = _QUOTED_VALUE.sub(lambda found: found[2] + _file_alone(found[3]), text)
    return _ADDRESS.sub("USER@HOST", without_places(_FOLDERS.sub(lambda found: _file_alone(found[0]), text)))


@functools.cache
def _detected() -> tuple[tuple[re.Pattern[str], str], ...]:
    """Patterns of detect-secrets, imported on first use because that takes a quarter of a second."""
    from detect_secrets.plugins import aws, azure_storage_key, discord, sendgrid, slack, square_oauth, stripe, twilio

    # The other plugins go by names, as _NAMED does, miss a token that a log has truncated, or take time quadratic in
    # the length.
    detectors = (
        *(aws.AWSKeyDetector, azure_storage_key.AzureStorageKeyDetector, discord.DiscordBotTokenDetector),
        *(sendgrid.SendGridDetector, slack.SlackDetector, square_oauth.SquareOAuthDetector),
        *(stripe.StripeDetector, twilio.TwilioKeyDetector),
    )
    return tuple((pattern, HIDDEN) for detector in detectors for pattern in detector.denylist)


def _commit_or_hidden(digits: re.Match[str]) -> str:
    before, after = digits.string[max(0, digits.start() - 300) : digits.start()], digits.string[digits.end() :][:12]
    line = before.rsplit("\n", 1)[-1]
    commits, keys = ([one.end() for one in words.finditer(line)] for words in (_OF_A_COMMIT, _OF_A_KEY))
    is_commit = max(commits, default=0) > max(keys, default=0) or re.match(r"-dirty|\s+(?:refs/|\(?HEAD)", after)
    return digits[0] if is_commit or len(set(digits[0])) < 6 else HIDDEN


def _file_alone(path: str) -> str:
    last = path.rsplit("/", 1)[-1]
    return f"…/{last}" if _FILE.fullmatch(last) else "…"


@functools.lru_cache(maxsize=8)  # a page has thousands of texts, and resolving links takes longer than cleaning one
def _places(here: Path, prefix: str, temporary: str, _home: str | None) -> list[tuple[re.Pattern[str], str]]:
    """Folders of this machine and what replaces each, longest first, without the root of the file system."""
    own, environment = Path(__file__).parents[2], Path(prefix)
    folders = [(here, "."), (Path(temporary), "$TMPDIR")]
    if prefix != sys.base_prefix:
        folders.append((environment, "$VENV"))
    if not own.is_relative_to(environment):
        folders.append((own, "$MOELAB"))
    with suppress(RuntimeError):  # a user without a home
        folders.append((Path.home(), "~"))
    named = {str(path): name for folder, name in folders[::-1] for path in (folder, folder.resolve()) if path.parts[1:]}
    longest_first = sorted(named, key=len, reverse=True)
    return [(re.compile(rf"(?<![\w.]){re.escape(place)}(?![\w-])"), named[place]) for place in longest_first]


def _names() -> Iterator[tuple[str, str]]:
    """Names of this machine's user and host that identify them."""
    host = socket.gethostname()
    words = [(host, "HOST"), (host.split(".")[0], "HOST")]
    with suppress(OSError, KeyError, ImportError):  # a user without an entry
        words.append((getpass.getuser(), "USER"))
    yield from ((word, name) for word, name in words if len(word) > 2 and word.lower() not in _NOBODY)
