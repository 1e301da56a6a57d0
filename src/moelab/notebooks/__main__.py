"""Run a notebook through papermill: ``python -m moelab.notebooks NOTEBOOK OUTPUT -f PARAMETERS.yaml -p NAME VALUE``.

What the notebook prints appears on stdout while it runs. Exit 0 means that it reached its last cell.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from moelab.errors import MoelabError
from moelab.notebooks.batch import execute, read_parameters


def main() -> int:
    """Parse the command line and run the notebook; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m moelab.notebooks", description=__doc__)
    parser.add_argument("notebook", type=Path)
    parser.add_argument("output", type=Path, help="executed copy to write")
    parser.add_argument("-f", "--parameters-file", type=Path, help="YAML of parameters")
    parser.add_argument("-p", "--parameter", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"))
    parser.add_argument("--cell-timeout-s", type=int, help="longest time that one cell may take")
    options = parser.parse_args()
    try:
        parameters = read_parameters(options.parameters_file) if options.parameters_file else {}
        parameters |= dict(options.parameter)
        execute(options.notebook, options.output, parameters, log=sys.stdout, cell_timeout_s=options.cell_timeout_s)
    except MoelabError as error:
        print(f"moelab: {error}", file=sys.stderr)  # noqa: T201
        return error.exit_code
    except KeyboardInterrupt:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
