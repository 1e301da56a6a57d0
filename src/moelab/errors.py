"""The errors that moelab raises on purpose, each with the exit code that the command line gives it."""

from __future__ import annotations


class MoelabError(Exception):
    """Something failed and the message says what, why and what to do."""

    exit_code = 1

    def __str__(self) -> str:
        """The message as it may be shown: it may quote a file, a log or a name."""
        from moelab.privacy import without_secrets

        return without_secrets(super().__str__())

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in place of a traceback: the message is meant for the reader, our code is not."""
        return [f"{type(self).__name__}: {self}"]


class BadInput(MoelabError):
    """A value that a person gave is wrong: the message names it, says what is valid and what to do."""

    exit_code = 2


class Refused(MoelabError):
    """A legal request that this machine, layout or installation cannot carry out; nothing was started."""

    exit_code = 3
