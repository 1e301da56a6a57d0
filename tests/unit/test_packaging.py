"""What is installed is what is written: pins, version, files of the package, and pages that name what is there."""

from __future__ import annotations

import ast
import importlib
import itertools
import json
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import moelab
import moelab.titan
from moelab import machine
from moelab.machine import TESTED
from moelab.notebooks.batch import END_MARKER
from moelab.notebooks.shipped import FOLDERS

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
CORE, EXTRAS = PROJECT["project"]["dependencies"], PROJECT["project"]["optional-dependencies"]
PAGES = (ROOT / "README.md", ROOT / "TOUR.md", *sorted((ROOT / "docs").glob("*.md")))


def output(*command: str | Path, **where: Any) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, **where)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def pins(requirements: list[str]) -> dict[str, SpecifierSet]:
    parsed = {one.name: one.specifier for one in map(Requirement, requirements)}
    assert len(parsed) == len(requirements)
    return parsed


def test_pins_are_bounded_tested_and_those_of_the_environment() -> None:
    for name, pin in pins([*CORE, *itertools.chain(*EXTRAS.values())]).items():
        assert {one.operator for one in pin} & {"<", "=="}, name
    for name, releases in TESTED.items():
        *before, last = releases[-1].split(".")  # such as 2.15 of any patch, or 0.3.0
        following = ".".join([*before, str(int(last) + 1)])
        assert [pins(CORE)[name].contains(one) for one in (*releases, following)] == [*[True] * len(releases), False]
    conda = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    (pip,) = [one["pip"] for one in conda if isinstance(one, dict)]
    assert pip.pop() == "-e ."
    assert pins(pip) == pins([*CORE, *EXTRAS["lab"], *EXTRAS["dev"]])
    of_conda = [one for one in conda if isinstance(one, str) and one != "pip"]
    assert pins(of_conda) == {"python": SpecifierSet(PROJECT["project"]["requires-python"])}
    assert set(EXTRAS) == {"lab", "dev", "site"}  # nothing but `make site` needs what builds the site


def needed(requirements: list[str]) -> set[str]:
    """Names of the packages that these need here, those that they need in turn too, from what is installed."""
    seen: set[tuple[str, str]] = set()
    waiting = [(one, "") for one in requirements]
    while waiting:
        text, of_extra = waiting.pop()
        one = Requirement(text)
        if one.marker and not one.marker.evaluate({"extra": of_extra}):
            continue
        for extra in {"", *one.extras} - {extra for name, extra in seen if name == one.name}:
            seen.add((one.name, extra))
            waiting += [(line, extra) for line in metadata.requires(one.name) or ()]
    return {canonicalize_name(name) for name, _ in seen}


def test_each_part_of_the_constraints_has_all_that_its_set_needs() -> None:
    """pip installs what comes before `# core` to build, before `# lab` for the core, and so on: all has a hash."""
    text = (ROOT / "constraints.txt").read_text()
    digest = r"    --hash=sha256:[0-9a-f]{64}"
    line = rf"#.*|([a-z0-9-]+==\S+( ; [^\\\n]+)?) \\(\n{digest} \\)*\n{digest}"
    assert re.fullmatch(rf"(({line})\n)+", text)  # and no address of an index
    wanted = [*PROJECT["dependency-groups"]["build"], *PROJECT["build-system"]["requires"]]
    for last, following in (("build", "# core\n"), ("core", "# lab\n"), ("lab", "# dev\n"), ("dev", "# site\n")):
        wanted += CORE if last == "core" else EXTRAS.get(last, [])
        part = re.split(rf"^{following}", text, flags=re.M)[0]
        locked = [Requirement(found[1]) for found in re.finditer(line, part) if found[1]]
        here = {one.name: one.specifier for one in locked if one.marker is None or one.marker.evaluate()}
        assert here.keys() == needed(wanted), f"{last}: run `make upgrade`"
        for pin in map(Requirement, wanted):
            (version,) = here[canonicalize_name(pin.name)]
            assert pin.specifier.contains(version.version), f"{pin}: run `make upgrade`"


def test_what_workflows_run_is_pinned_by_hash_and_what_is_published_meets_nothing_else() -> None:
    jobs: dict[str, list[dict[str, str]]] = {}
    for file in sorted((ROOT / ".github" / "workflows").glob("*.yml")):
        text = file.read_text()
        for action in re.findall(r"uses: (.*)", text):
            assert re.fullmatch(r"\./\.github/workflows/\w+\.yml|[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+.*", action), (
                action
            )
        for line in text.splitlines():
            if re.search(r"\bpipx?\b.* (install|run)\b", line):
                assert "--require-hashes" in line or "dist/*.whl" in line, line
        for name, job in yaml.safe_load(text)["jobs"].items():
            jobs[f"{file.stem}.{name}"] = job.get("steps", [])
            trusted = "id-token" in (job.get("permissions") or {})
            commands = [step["run"] for step in job.get("steps", []) if "run" in step]
            assert not trusted or all(one.startswith("ls ") for one in commands), name
    package = [step["run"] for step in jobs["build.package"] if "run" in step]
    assert package == ["make dist"]
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [one["repo"] for one in hooks] == ["local"]
    assert all(hook["entry"].startswith(".venv/bin/") for one in hooks for hook in one["hooks"])


def build(source: Path, folder: Path, *what: str) -> Path:
    """The wheel of a source tree, made without asking an index."""
    output(sys.executable, "-m", "build", "--no-isolation", *what, "--outdir", folder, source)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("wheel"), "--wheel")


def test_the_wheel_has_every_file_of_the_package_and_the_sdist_builds_the_same(wheel: Path, tmp_path: Path) -> None:
    assert wheel.name == f"moelab-{moelab.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as content:
        names = {name for name in content.namelist() if ".dist-info/" not in name}
        license_file = content.read(f"moelab-{moelab.__version__}.dist-info/licenses/LICENSE")
    assert license_file == (ROOT / "LICENSE").read_bytes()
    kept = output("git", "ls-files", "src/moelab", *FOLDERS, cwd=ROOT).splitlines()
    assert names == {name.removeprefix("src/") if name.startswith("src/") else f"moelab/data/{name}" for name in kept}
    assert {"moelab/viz/templates/report.html.j2", "moelab/py.typed", "moelab/data/studies/nano.yaml"} <= names
    from_sdist = build(ROOT, tmp_path)  # makes the sdist, then the wheel from that
    assert (tmp_path / f"moelab-{moelab.__version__}.tar.gz").is_file()
    assert from_sdist.read_bytes() == wheel.read_bytes()


WITHOUT_A_CLONE = f"""
import sys

CLONE, PACKAGES = "{ROOT}/", "{sysconfig.get_paths()["purelib"]}"


def refuse(event, arguments):
    if event == "open" and str(arguments[0]).startswith(CLONE) and not str(arguments[0]).startswith(PACKAGES):
        raise RuntimeError(f"a file of the clone was opened: {{arguments[0]}}")


sys.addaudithook(refuse)
"""


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A virtual environment with the wheel, and its variables; it sees the other packages of this one, and no file of
    the clone."""
    folder = tmp_path_factory.mktemp("installed") / "venv"
    venv.create(folder, symlinks=True)
    output(sys.executable, "-m", "pip", "--python", folder, "install", "--quiet", "--no-deps", "--no-index", wheel)
    (packages,) = folder.glob("lib/python*/site-packages")
    # Their .pth files, such as the one of an editable moelab, are not read: only a site folder's are.
    (packages / "others.pth").write_text(sysconfig.get_paths()["purelib"])
    (packages / "sitecustomize.py").write_text(WITHOUT_A_CLONE)
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    variables |= {"CUDA_VISIBLE_DEVICES": "", "PATH": f"{folder}/bin:{os.environ['PATH']}"}
    opened = subprocess.run([folder / "bin/python", "-c", f"open('{ROOT}/README.md')"], env=variables, check=False)
    assert opened.returncode == 1  # so that what follows shows something
    return folder, variables


def test_the_wheel_works_without_a_clone(installed: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    _, variables = installed

    def shell(command: str) -> str:
        return output(*command.split(), env=variables, cwd=tmp_path, timeout=300)

    assert "begin with: jupyter lab notebooks/00_start_here.ipynb" in shell("moelab notebooks .")
    assert {one.name for one in tmp_path.iterdir()} == {*FOLDERS}
    assert "legal, and fits: nano, arm mxfp8_standard" in shell("moelab plan nano")
    assert "mxfp8_deepep_round-robin" in shell("moelab project 671B_b200_x256")
    assert "#SBATCH --nodes=32" in shell("moelab submit 671B_b200_x256 --cluster nebius_soperator_b200 --dry-run")
    run = "-f papermill_params/05_plan_layout/smoke.yaml"
    assert END_MARKER in shell(f"python -m moelab.notebooks notebooks/05_plan_layout.ipynb out.ipynb {run}")


DOOR = "from moelab import Study, Experiment, read_study, plan, project, search, run, submit, status, collect, report"
DOOR += ", explain, doctor, watch"


def test_every_example_of_the_page_on_the_door_runs_from_the_wheel_in_an_empty_folder(
    installed: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    """The page has an example for each name; it trains two arms of the nano model on this CPU."""
    folder, variables = installed
    page = (ROOT / "docs/api.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.S)
    imported = {name.strip() for block in blocks for name in re.findall(r"^from moelab import (.*)$", block, re.M)}
    assert {one.strip() for names in imported for one in names.split(",")} == set(moelab.__all__)
    trace = "moelab/data/measured/trace_two_h200_full_standard.json.gz"
    (packages,) = folder.glob("lib/python*/site-packages")
    (tmp_path / "trace.json.gz").write_bytes((packages / trace).read_bytes())
    # `import *` would do: the page imports what each example adds.
    (tmp_path / "page.py").write_text("\n".join([f"{DOOR}\n", *blocks, "print(verdict)"]))
    said = output(folder / "bin/python", "page.py", env=variables, cwd=tmp_path, timeout=600)
    assert "study my_study: nano, 8 steps; arms bf16_standard, mxfp8_standard; seed 0" in said
    assert "Same loss? Not decided" in said
    assert (tmp_path / "report.html").stat().st_size > 1e6  # with plotly in it
    assert sorted(one.name for one in (tmp_path / "runs").iterdir()) == ["my_study"]


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
calls = (["doctor"], ["plan", "671B_b200_x256"], ["project", "671B_b200_x256"], ["plan", "nano.yaml", "--config"])
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
    (tmp_path / "nano.yaml").write_text("name: nano\ngpus_per_node: 2\nep: 2\n")
    variables = {**os.environ, "PYTHONPATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", COMMANDS_AND_IMPORTS]
    done = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True, check=False)
    codes, failed = json.loads(done.stdout.splitlines()[-1])
    assert codes == [0, 0, 0, 3, 3], done.stdout + done.stderr
    assert set(failed.values()) == {"No module named 'triton'"}
    # What is built into TorchTitan, and what measures that.
    assert {name.split(".")[1] for name in failed} == {"deepep", "micro", "mxfp8", "titan"}
    reason = "TorchTitan 0.3.0 cannot be imported without Triton, on a CPU too; on Linux: pip install triton"
    assert f"  --  BF16, FP8, MXFP8, NVFP4: {reason}\n" in done.stdout
    assert f"moelab: bf16_standard: {reason}" in done.stderr
    assert "moelab: TorchTitan cannot be imported here: No module named 'triton'" in done.stderr
    assert not (tmp_path / "runs").exists()


# Pages


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    text = page.read_text()
    anchors = {"#" + re.sub(r"[^\w -]", "", line.lower()).strip().replace(" ", "-") for line in text.splitlines()}
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not link.startswith("http")]
    lost = [link for link in links if link not in anchors and not (page.parent / link.partition("#")[0]).exists()]
    assert lost == []


def test_every_path_of_the_tour_is_there() -> None:
    tour = (ROOT / "TOUR.md").read_text().split("## Tree")[0]
    named = re.findall(r"`((?:[\w.-]+/)*[\w-]+\.(?:py|yaml|toml)|(?:\w+/)+)`", tour)
    assert len(named) > 20
    assert [name for name in named if not (ROOT / name).exists() and not (ROOT / "src/moelab" / name).exists()] == []


def test_the_page_on_torchtitan_names_every_internal_that_is_imported() -> None:
    page = (ROOT / "docs" / "torchtitan.md").read_text()
    nodes = [node for path in (ROOT / "src").rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    imported = {
        (node.module or "", alias.name) for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    imported |= {("", alias.name) for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    theirs = {one for one in imported if (one[0] or one[1]).split(".")[0] in ("torchtitan", "torchao")}
    lacking = [one for one in theirs if f"`{one[1]}`" not in page and f"`{'.'.join(one)}`" not in page]
    assert lacking == []
    assert all(f"{name.lower()} {TESTED[name][0]}" in page.lower() for name in ("torchtitan", "torchao"))


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
    newest = re.search(r"^## \[(\S+)\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest is not None
    assert newest.groups() == (citation["version"], str(citation["date-released"]))
    assert citation["version"] == moelab.__version__
