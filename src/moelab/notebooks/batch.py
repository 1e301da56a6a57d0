"""Running a notebook in batch through papermill, and believing it only when it says that it is complete.

A notebook whose parameters cell has lost its tag runs its defaults, and a killed kernel can leave every cell marked as
completed. So the tag and the names are checked before anything runs, and a last cell of this module's own says that it
was reached.
"""

from __future__ import annotations

import ast
import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import nbformat

from moelab.door import LINES_VARIABLE
from moelab.errors import BadInput, MoelabError
from moelab.experiment_file import read_yaml

END_MARKER = "moelab: notebook complete"
KERNEL_OPTIONS = ["--IPKernelApp.log_level=40"]
"""Errors only: ipykernel 7 warns that a kernel talks over loopback without encryption, as it always did."""


class NotebookFailed(MoelabError):
    """A notebook did not reach its end."""


def execute(
    notebook: Path,
    output: Path,
    parameters: Mapping[str, Any],
    *,
    log: IO[str] | None = None,
    cell_timeout_s: int | None = None,
) -> Path:
    """Run a notebook through papermill and believe it only if it came to its end.

    Args:
        notebook: source.
        output: executed copy to write.
        parameters: replace values of the parameters cell.
        log: text stream that receives what the notebook prints, while it runs.
        cell_timeout_s: longest time that one cell may take; without it, a cell that hangs is waited for.

    Raises:
        BadInput: if the notebook has no parameters cell or does not have one of the parameters; nothing was run.
        NotebookFailed: if a cell failed or took too long, or the end was not reached.
    """
    import papermill
    from jupyter_client.kernelspec import NoSuchKernel
    from nbclient.exceptions import CellTimeoutError, DeadKernelError
    from papermill.exceptions import PapermillException, PapermillExecutionError

    content = _read(notebook)
    known = _names(notebook, content)
    for name in parameters:
        if name not in known:  # papermill would only warn
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has: {', '.join(known)}"
            raise BadInput(f"{notebook.name} has no parameter {name!r}; {hint}")
    output.parent.mkdir(parents=True, exist_ok=True)
    os.environ[LINES_VARIABLE] = "1"  # which the kernel inherits
    content.cells.append(nbformat.v4.new_code_cell(f"print({END_MARKER!r})"))
    try:
        ran = papermill.execute_notebook(
            content,
            str(output),
            parameters=dict(parameters),
            progress_bar=False,
            stdout_file=log,
            stderr_file=log,
            execution_timeout=cell_timeout_s,
            extra_arguments=KERNEL_OPTIONS,
            cwd=str(Path.cwd()),
        )
    except (PapermillException, CellTimeoutError, DeadKernelError, NoSuchKernel) as error:
        why = str(error)
        if isinstance(error, PapermillExecutionError):
            why = " ".join(f"{error.ename}: {error.evalue}".split()).removesuffix(":")
        elif isinstance(error, CellTimeoutError):
            cell = why.partition("-------------------\n")[2].splitlines()[0]  # nbclient's text has it between rules
            why = f"a cell took longer than {cell_timeout_s} s: {cell}"
        raise NotebookFailed(f"{notebook.name}: {why}; executed copy: {output}") from error
    finally:
        del os.environ[LINES_VARIABLE]
    end = ran.cells.pop()
    if END_MARKER not in "".join(one.get("text", "") for one in end.outputs):
        raise NotebookFailed(f"{notebook.name} did not reach its end; executed copy: {output}")
    nbformat.write(ran, output)
    return output


def parameter_names(notebook: Path) -> list[str]:
    """Names assigned in the parameters cell of a notebook.

    Raises:
        BadInput: if it cannot be read, or no cell has the tag ``parameters``.
    """
    return _names(notebook, _read(notebook))


def _read(notebook: Path) -> Any:
    try:
        return nbformat.read(notebook, as_version=4)
    except OSError as error:
        where = "`moelab notebooks .` writes moelab's own to this folder"
        raise BadInput(f"{notebook} cannot be read: {error.strerror}; {where}") from error
    except (ValueError, TypeError, AttributeError, nbformat.ValidationError) as error:  # what nbformat raises of these
        raise BadInput(f"{notebook} is not a notebook: {' '.join(str(error).split())[:300]}") from error


def _names(notebook: Path, content: Any) -> list[str]:
    cells = [cell for cell in content.cells if "parameters" in cell.metadata.get("tags", [])]
    if len(cells) != 1:
        raise BadInput(
            f"{notebook.name} has {len(cells)} cells tagged 'parameters' instead of one: it would run its defaults; "
            "tag its parameters cell (in JupyterLab: property inspector, cell tags)"
        )
    try:
        tree = ast.parse(cells[0].source)
    except SyntaxError as error:
        raise BadInput(f"{notebook.name}: the parameters cell is not Python: {error}") from error
    assignments = [one for one in tree.body if isinstance(one, ast.Assign | ast.AnnAssign)]
    targets = [
        target for one in assignments for target in (one.targets if isinstance(one, ast.Assign) else [one.target])
    ]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def read_parameters(file: Path) -> dict[str, Any]:
    """Parameters of a papermill YAML file.

    Raises:
        BadInput: if it is not a mapping of names to single values.
    """
    content = read_yaml(file)
    if not isinstance(content, dict) or any(isinstance(value, dict | list) for value in content.values()):
        raise BadInput(f"{file}: expected a mapping of parameter names to single values")
    return {str(name): value for name, value in content.items()}
