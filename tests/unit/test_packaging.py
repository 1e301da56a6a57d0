"""What is installed is what is written: pins, version, files of the package."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

import moelab
import moelab.titan
from moelab import machine
from moelab.machine import TESTED

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]


def environment() -> tuple[list[str], dict[str, list[str]]]:
    """What conda installs, and what pip installs by the comment above it."""
    content = yaml.safe_load((ROOT / "environment.yml").read_text())
    conda = [one for one in content["dependencies"] if isinstance(one, str)]
    (pip,) = [one["pip"] for one in content["dependencies"] if isinstance(one, dict)]
    groups: dict[str, list[str]] = {"core": []}
    group = "core"
    for line in (ROOT / "environment.yml").read_text().split("- pip:\n")[1].splitlines():
        if found := re.fullmatch(r"\s*# (lab|dev)", line):
            group = found[1]
            groups[group] = []
        elif found := re.fullmatch(r"\s*- (\S+|-e \.)", line):
            groups[group].append(found[1])
    assert [one for members in groups.values() for one in members] == pip
    return conda, groups


def pins(requirements: list[str]) -> dict[str, str]:
    parsed = [Requirement(one) for one in requirements]
    assert len({one.name for one in parsed}) == len(parsed)
    return {one.name: str(one.specifier) for one in parsed}


def test_environment_yml_has_the_pins_of_pyproject() -> None:
    conda, groups = environment()
    editable = groups["dev"].pop()
    assert editable == "-e ."
    assert pins(groups["core"]) == pins(PROJECT["project"]["dependencies"])
    assert pins(groups["lab"]) == pins(EXTRAS["lab"])
    assert pins(groups["dev"]) == pins(EXTRAS["dev"])
    assert pins([one for one in conda if one != "pip"]) == {"python": PROJECT["project"]["requires-python"]}
    assert set(EXTRAS) == {"lab", "dev"}


def test_the_doctor_looks_for_the_pinned_versions() -> None:
    required = {one.name: one.specifier for one in map(Requirement, PROJECT["project"]["dependencies"])}
    for name, release in TESTED.items():
        assert required[name].contains(f"{release}.0" if release.count(".") == 1 else release)
        major, minor, *rest = (int(part) for part in release.split("."))
        following = f"{major}.{minor}.{rest[0] + 1}" if rest else f"{major}.{minor + 1}.0"
        assert not required[name].contains(following)


def test_the_version_comes_from_one_place() -> None:
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert "version" not in PROJECT["project"]
    source = ROOT / PROJECT["tool"]["hatch"]["version"]["path"]
    assert source.read_text().count(f'__version__ = "{moelab.__version__}"') == 1
    elsewhere = [
        path
        for path in (ROOT / "src").rglob("*.py")
        if path != source and re.search(r"^__version__\s*=|VERSION\s*=\s*[\"']\d", path.read_text(), re.M)
    ]
    assert elsewhere == []


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", str(ROOT), "--no-deps", "--quiet", "--wheel-dir", str(folder)]
    if importlib.util.find_spec("hatchling"):
        command.append("--no-build-isolation")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "hatchling" in done.stderr and done.returncode:
        pytest.skip("hatchling is not installed and cannot be fetched from here")
    assert done.returncode == 0, done.stderr
    (file,) = folder.glob("*.whl")
    return file


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    assert wheel.name == f"moelab-{moelab.__version__}-py3-none-any.whl"
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    files = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src" / "moelab").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert names == files
    assert "moelab/viz/templates/report.html.j2" in names


def test_the_wheel_has_the_command_and_the_license(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as content:
        folder = f"moelab-{moelab.__version__}.dist-info"
        assert "moelab = moelab.cli:main" in content.read(f"{folder}/entry_points.txt").decode()
        metadata = content.read(f"{folder}/METADATA").decode()
        assert content.read(f"{folder}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert f"Version: {moelab.__version__}\n" in metadata
    assert "License-Expression: BSD-3-Clause\n" in metadata


ALONE = """
import sys
from pathlib import Path
import moelab
from moelab.cli import main
assert Path(moelab.__file__).is_relative_to(sys.argv[1]), moelab.__file__
plain = ["--set", "pp=2", "--set", "tp=2", "--set", "ep=32"]
assert main(["plan", "study.yaml", *plain]) == 0
assert main(["project", "study.yaml", *plain]) == 0
assert main(["submit", "study.yaml", *plain, "--cluster", "nebius_soperator_b200", "--dry-run"]) == 0
"""
STUDY = {
    "name": "alone",
    "model": "671B",
    "nodes": 32,
    "gpus_per_node": 8,
    "seq_len": 8192,
    "local_batch": 64,
    "activation_checkpoint": "full",
    "compile": "model+loss",
    "dataset": "c4",
    "hardware": "b200_x256",
}


def child(code: str, *arguments: str | Path, path: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Python without GPUs, with another folder at the head of its path."""
    variables = {**os.environ, "PYTHONPATH": str(path), "CUDA_VISIBLE_DEVICES": ""}
    call = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(call, env=variables, cwd=cwd, capture_output=True, text=True, check=False)


def test_the_wheel_works_without_a_clone(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(STUDY))
    done = child(ALONE, tmp_path / "installed", path=tmp_path / "installed", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --nodes=32" in done.stdout


WITHOUT_TRITON = """
import sys
from importlib.machinery import PathFinder


class WithoutTriton(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] == "triton" else super().find_spec(name, path, target)


sys.meta_path[:] = [WithoutTriton if finder is PathFinder else finder for finder in sys.meta_path]
"""
COMMANDS_AND_IMPORTS = """
import importlib, json, pkgutil, warnings
import moelab
from moelab.cli import main
calls = (["doctor"], ["plan", "study.yaml"], ["project", "study.yaml"], ["plan", "nano.yaml", "--config"])
codes = [main(call) for call in (*calls, ["run", "nano.yaml"])]
warnings.simplefilter("ignore")
failed = {}
for module in pkgutil.walk_packages(moelab.__path__, "moelab."):
    if not module.name.endswith("__main__"):
        try:
            importlib.import_module(module.name)
        except ImportError as error:
            failed[module.name] = str(error)
print(json.dumps([codes, failed]))
"""


def test_without_triton_all_works_but_training_which_says_so(tmp_path: Path) -> None:
    """As with PyTorch built for CPUs alone, which brings no Triton; TorchTitan 0.3.0 imports it all the same."""
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_TRITON)
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(STUDY | {"pp": 2, "tp": 2, "ep": 32}))
    (tmp_path / "nano.yaml").write_text("name: nano\ngpus_per_node: 2\nep: 2\n")
    done = child(COMMANDS_AND_IMPORTS, path=tmp_path, cwd=tmp_path)
    codes, failed = json.loads(done.stdout.splitlines()[-1])
    assert codes == [0, 0, 0, 3, 3], done.stdout + done.stderr
    assert set(failed.values()) == {"No module named 'triton'"}
    assert {name.split(".")[1] for name in failed} == {"deepep", "mxfp8", "titan"}  # what is built into TorchTitan
    reason = "TorchTitan 0.3.0 cannot be imported without Triton, on a CPU too; on Linux: pip install triton"
    assert f"bf16_standard: {reason}" in done.stdout
    assert f"moelab: bf16_standard: {reason}" in done.stderr
    assert "moelab: TorchTitan cannot be imported here: No module named 'triton'" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_every_path_of_the_tour_is_there() -> None:
    named = re.findall(
        r"`((?:[\w.-]+/)*[\w-]+\.(?:py|yaml|toml)|(?:\w+/)+)`", (ROOT / "TOUR.md").read_text().split("## Tree")[0]
    )
    assert len(named) > 20
    assert [name for name in named if not (ROOT / name).exists() and not (ROOT / "src/moelab" / name).exists()] == []


@pytest.mark.parametrize(
    "page", ["README.md", "TOUR.md", *(f"docs/{one.name}" for one in (ROOT / "docs").glob("*.md"))]
)
def test_every_link_of_a_page_leads_somewhere(page: str) -> None:
    text = (ROOT / page).read_text()
    anchors = {"#" + re.sub(r"[^\w -]", "", line.lower()).strip().replace(" ", "-") for line in text.splitlines()}
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if not link.startswith("http"):
            file, _, _ = link.partition("#")
            assert link in anchors or (ROOT / page).parent.joinpath(file).exists(), link


def test_the_page_on_torchtitan_names_every_internal_that_is_imported() -> None:
    page = (ROOT / "docs" / "torchtitan.md").read_text()
    lacking = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("torchtitan", "torchao"):
                names = [(alias.name, f"{node.module}.{alias.name}") for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [(alias.name,) for alias in node.names if alias.name.split(".")[0] in ("torchtitan", "torchao")]
            else:
                continue
            lacking |= {one[0] for one in names if not any(f"`{name}`" in page for name in one)}
    assert not lacking
    assert all(f"{name.lower()} {release}" in page.lower() for name, release in TESTED.items() if name != "torch")


def test_another_release_of_torchtitan_is_told_at_import(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torchtitan": "0.3.0", "torchao": "0.19.0+cu130"}
    monkeypatch.setattr(machine, "version", versions.get)
    with pytest.warns(
        UserWarning, match=r"not tested with torchao 0\.19\.0\+cu130 \(tested: 0\.18\.0\).*torchtitan\.md"
    ):
        importlib.reload(moelab.titan)
    monkeypatch.undo()
    importlib.reload(moelab.titan)  # with the versions that are here, of which nothing is said


def test_citation_and_changelog_are_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == moelab.__version__
    newest = re.search(r"^## \[(\S+)\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest is not None
    assert newest.groups() == (moelab.__version__, str(citation["date-released"]))
