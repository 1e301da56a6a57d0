"""A real JupyterLab for tests: a server of its own in a temporary folder, with this Python as its only kernel.

    with lab_server(tmp_path) as lab:
        page.goto(lab.url_of("01_quantise_to_mxfp8.ipynb"))

Settings, workspaces and history are the folder's, so that no one's JupyterLab is touched or seen. Everything that the
server starts carries the folder's name in its environment: by that the last ones are found, whatever a test did.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from processes import processes

from moelab.machine import end_with_parent

LONGEST_START_S = 120
MARK = "MOELAB_TEST_LAB"
KERNEL = {
    "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
    "display_name": "Python 3",
    "language": "python",
}
# Asking whether to fetch news is JupyterLab's first act for a new user; the answer is no.
SETTINGS = {"@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False}}


@dataclass(frozen=True, kw_only=True)
class Lab:
    """A running server."""

    url: str  # with a slash at its end
    token: str
    root: Path  # of the notebooks
    folder: Path  # of all that the server writes

    def url_of(self, notebook: str) -> str:
        """Where a browser finds a notebook of ``root``, in a workspace of its own."""
        return f"{self.url}lab/workspaces/{Path(notebook).stem}/tree/{quote(notebook)}?token={self.token}"

    def processes(self) -> list[int]:
        """Ids of the server and of all that it started, kernels and trainings too."""
        return [process for process, _, variables in processes() if variables.get(MARK) == str(self.folder)]


@contextmanager
def lab_server(folder: Path) -> Iterator[Lab]:
    """Start a server on the empty folder ``notebooks`` in a folder, and end it with all that it started."""
    root = folder / "notebooks"
    root.mkdir()
    _write(folder / "jupyter" / "kernels" / "python3" / "kernel.json", KERNEL)
    for name, values in SETTINGS.items():
        plugin, key = name.split(":")
        _write(folder / "settings" / plugin / f"{key}.jupyterlab-settings", values)
    environment = {**os.environ, MARK: str(folder), "JUPYTER_PATH": str(folder / "jupyter")}
    for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        environment[name] = str(folder / name.lower())
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--ServerApp.ip=127.0.0.1", "--ServerApp.port=0"]
    command += [f"--ServerApp.root_dir={root}", f"--LabApp.user_settings_dir={folder / 'settings'}"]
    command += [f"--LabApp.workspaces_dir={folder / 'workspaces'}", *(["--allow-root"] if os.getuid() == 0 else [])]
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(
            command,
            cwd=root,
            env=environment,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
    lab: Lab | None = None
    try:
        lab = _started(server, folder, root)
        yield lab
    finally:
        server.terminate()  # it asks its kernels to end
        with suppress(subprocess.TimeoutExpired):
            server.wait(30)
        for process in lab.processes() if lab else [server.pid]:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        server.wait()


def _started(server: subprocess.Popen[bytes], folder: Path, root: Path) -> Lab:
    deadline = time.monotonic() + LONGEST_START_S
    while time.monotonic() < deadline and server.poll() is None:
        for file in (folder / "jupyter_runtime_dir").glob("jpserver-*.json"):
            with suppress(json.JSONDecodeError):
                known = json.loads(file.read_text())
                return Lab(url=known["url"], token=known["token"], root=root, folder=folder)
        time.sleep(0.1)
    raise RuntimeError(f"JupyterLab did not start:\n{(folder / 'server.log').read_text()[-3000:]}")


def _write(file: Path, content: object) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content))
