"""The command line: results on stdout, progress on stderr, exit 0 done, 1 failed, 2 bad input, 3 refused.

A verb is a function of :mod:`moelab.door`: its keywords are the options, and the words under *Args* in its docstring
their help. ``moelab --help`` loads neither torch nor plotly.
"""

from __future__ import annotations

import argparse
import inspect
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import moelab
from moelab import door
from moelab.answers import Answer, Plain
from moelab.errors import BadInput, MoelabError
from moelab.experiment import Experiment
from moelab.experiment_file import parse, parse_overrides
from moelab.privacy import without_secrets

DESCRIPTION = (
    "Plan, run and judge the pre-training of Mixture-of-Experts models with MXFP8 experts and DeepEP, on your hardware."
)
OPTIONS: dict[str, dict[str, Any]] = {
    "bool": {"action": "store_true"},
    "int": {"type": int, "metavar": "N"},
    "int | None": {"type": int, "metavar": "N"},
    "float": {"type": float, "metavar": "X"},
    "float | None": {"type": float, "metavar": "X"},
    "Sequence[int]": {"type": int, "action": "append", "metavar": "N"},
    "Mapping[str, Any] | Sequence[str]": {"action": "append", "metavar": "KEY=VALUE"},
    "Literal['continue', 'stop']": {"choices": ["continue", "stop"]},
}
"""How an option is read, by the annotation of its keyword; any other is a text."""
ONLY_IN_PYTHON = ("wait",)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    options = vars(build_parser().parse_args(arguments))
    # SIGTERM, which schedulers and containers send, acts as Ctrl-C: ranks end in order and the status is written.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    run, as_json = options.pop("run"), options.pop("json")
    try:
        return _show(run(options, as_json), as_json)
    except MoelabError as error:
        _say(str(error))
        return error.exit_code
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        # Python flushes stdout once more when it exits, and would print a traceback there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:  # a full disk, a missing permission: a line for the user, and no traceback
        place = error.filename2 or error.filename  # of a rename, the file that was to be written
        _say(f"{place}: {error.strerror}" if place else str(error))
        return 1
    except KeyboardInterrupt:
        _say("interrupted; what was finished is kept")
        return 1


def _say(text: str) -> None:
    """Print a line on stderr, where it does not mix with the result."""
    print(f"moelab: {without_secrets(text)}", file=sys.stderr)  # noqa: T201 - it may name a file


def _show(answer: Answer | None, as_json: bool) -> int:
    """Print an answer, as JSON if asked; returns the exit code."""
    if answer is None:  # it was printed as it came
        return 0
    for aside in answer.asides:
        _say(aside)
    if as_json:
        answer.write_json(sys.stdout)
    else:
        print(answer)  # noqa: T201 - results go to stdout
    sys.stdout.flush()
    return answer.exit_code


# The verbs that are more than their function


def _plan(o: dict[str, Any], _json: bool) -> Answer:
    function, other = (door.search, door.plan) if o.pop("search") else (door.plan, door.search)
    taken, refused = _keywords(function), _keywords(other)
    for name, one in refused.items():
        if name not in taken and o.pop(name) != one.default:
            applies = "requires --search" if other is door.search else "applies to a single plan; leave out --search"
            raise BadInput(f"--{_dashed(name)} {applies}")
    answer: Answer = _call(function, o)
    return answer


def _status(o: dict[str, Any], as_json: bool) -> Answer | None:
    if not o.pop("follow"):
        answer: Answer = _call(door.status, o)
        return answer
    if as_json:
        raise BadInput("--follow prints text as it comes; leave it out to get one JSON object")
    try:
        door.watch(o["source"])
    except KeyboardInterrupt:
        _say("no longer watching; the runs go on")
    return None


def _report(o: dict[str, Any], _json: bool) -> Answer:
    output = o.pop("output")
    judged = door.report(*o.pop("sources"), **o)
    return replace(judged, page=judged.save(output, with_paths=o["with_paths"]))


def _notebooks(o: dict[str, Any], _json: bool) -> Answer:
    from moelab.notebooks.shipped import write_out

    done = write_out(Path(o["folder"]))
    return Plain(text=done.as_text(), content=done.to_json())


# The parser


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        super().error(without_secrets(message))  # it may quote a name that a shell has filled in


def build_parser() -> argparse.ArgumentParser:
    """The parser with all verbs."""
    parser = _Parser(prog="moelab", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"moelab {moelab.__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    special = {door.plan: _plan, door.status: _status, door.report: _report}

    def verb(function: Callable[..., Answer], *others: Callable[..., Answer]) -> argparse.ArgumentParser:
        text = _first_line(function)
        added: argparse.ArgumentParser = verbs.add_parser(function.__name__, help=text, description=text)
        run = special.get(function) or (lambda options, _json: _call(function, options))
        added.set_defaults(run=run)
        added.add_argument("--json", action="store_true", help="print one JSON object")
        for one in (function, *others):
            _add_options(added, one)
        return added

    verb(door.doctor)
    text = "Write the notebooks, their papermill profiles and the studies to a folder; files you changed are kept."
    notebooks = verbs.add_parser("notebooks", help=text, description=text)
    notebooks.set_defaults(run=_notebooks)
    notebooks.add_argument("folder", metavar="DIR", help="folder to write to; made if it does not exist")
    notebooks.add_argument("--json", action="store_true", help="print one JSON object")
    verb(door.plan, door.search).add_argument("--search", action="store_true", help=_first_line(door.search))
    for function in (door.project, door.explain, door.run, door.submit, door.cancel, door.requeue):
        verb(function)
    follow_help = "keep watching; Ctrl-C does not stop the runs"
    verb(door.status).add_argument("--follow", action="store_true", help=follow_help)
    verb(door.collect)
    verb(door.report)
    return parser


def _add_options(parser: argparse.ArgumentParser, function: Callable[..., Any]) -> None:
    """The arguments of a function; one that another function of the verb has too is added once."""
    texts = _help(function)
    known = {action.dest for action in parser._actions}
    for one in inspect.signature(function).parameters.values():
        if {one.name, "set" if one.kind is one.VAR_KEYWORD else one.name} & {*ONLY_IN_PYTHON, *known}:
            continue
        text = texts.get(one.name, "").replace("%", "%%")  # argparse formats it with %
        if one.kind is one.VAR_KEYWORD:
            help_text = f"override a field {text}"
            parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=help_text)
        elif one.kind in (one.POSITIONAL_ONLY, one.VAR_POSITIONAL):
            several = "+" if one.kind is one.VAR_POSITIONAL else "?" if one.default is None else None
            parser.add_argument(one.name, nargs=several, help=text)
        elif one.default is one.empty:
            parser.add_argument(f"--{_dashed(one.name)}", required=True, help=text)
        else:
            how = OPTIONS.get(str(one.annotation).replace('"', "'"), {})
            default = [] if one.default == () else one.default
            parser.add_argument(f"--{_dashed(one.name)}", default=default, help=text, **how)


def _call(function: Callable[..., Any], options: dict[str, Any]) -> Any:
    """Call a function with the options that its arguments became."""
    fields = parse_overrides(options.pop("set", ()))
    # What is no field would be taken for an option of the function.
    if unknown := {name: value for name, value in fields.items() if name not in door.FIELDS}:
        parse(Experiment, unknown)
    given: list[Any] = []
    for one in inspect.signature(function).parameters.values():
        if one.kind is one.VAR_POSITIONAL:
            given += options.pop(one.name)
        elif one.kind is one.POSITIONAL_ONLY:
            given.append(options.pop(one.name))
    return function(*given, **options, **fields)


def _keywords(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(function).parameters
    return {name: one for name, one in parameters.items() if one.kind is one.KEYWORD_ONLY}


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _first_line(function: Callable[..., Any]) -> str:
    return (function.__doc__ or "").partition("\n")[0]


def _help(function: Callable[..., Any]) -> dict[str, str]:
    """What the docstring of a function says under *Args*, by name."""
    arguments = inspect.getdoc(function).partition("Args:\n")[2].partition("\n\n")[0]  # type: ignore[union-attr]
    found = re.findall(r"^ {4}(\w+): ((?:.+)(?:\n {8}.+)*)", arguments, re.M)
    return {name: " ".join(text.replace("``", "").split()).removesuffix(".") for name, text in found}
