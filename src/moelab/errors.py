"""The errors that moelab raises on purpose, each with the exit code that the command line gives it."""

from __future__ import annotations


class MoelabError(Exception):
    """Something failed and the message says what, why and what to do."""

    exit_code = 1

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in place of a traceback: the message is meant for the reader, our code is not."""
        from moelab.privacy import without_secrets

        return [f"{type(self).__name__}: {without_secrets(str(self))}"]  # it may quote a file


class BadInput(MoelabError):
    """A value that a person gave is wrong: the message names it, says what is valid and what to do."""

    exit_code = 2


class Refused(MoelabError):
    """A legal request that this machine, layout or installation cannot carry out; nothing was started."""

    exit_code = 3
