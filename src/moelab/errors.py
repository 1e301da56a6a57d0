"""The errors that moelab raises on purpose, each with the exit code that the command line gives it."""

from __future__ import annotations


class MoelabError(Exception):
    """Something failed and the message says what, why and what to do."""

    exit_code = 1


class BadInput(MoelabError):
    """A value that a person gave is wrong: the message names it, says what is valid and what to do."""

    exit_code = 2


class Refused(MoelabError):
    """A legal request that this machine, layout or installation cannot carry out; nothing was started."""

    exit_code = 3
