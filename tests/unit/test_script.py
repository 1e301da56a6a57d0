"""Cluster profiles and the sbatch script: golden files, shellcheck, and hostile values that reach no shell and no
directive."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from processes import program

from moelab.errors import BadInput, Refused
from moelab.experiment_file import parse
from moelab.hardware import cluster_of
from moelab.health.deepep import PREFIXES
from moelab.launch.cluster import ClusterProfile, keep_cluster, kept_cluster, read_cluster
from moelab.launch.script import JobSpec, render

GOLDEN = Path(__file__).parents[1] / "golden"
STUDY = Path("/shared/runs/dsv3_671b")
RUNS = tuple(STUDY / f"{arm}/seed0/20260914T031022Z-0a1b2c" for arm in ("bf16_standard", "mxfp8_deepep"))
EVERYTHING: dict[str, Any] = {
    "partition": "gpu",
    "account": "lab",
    "qos": "high",
    "constraint": "gpu&hbm80g",
    "reservation": "moe",
    "nodelist": "gpu[001-064]",
    "exclude": "gpu[007,013]",
    "segment": 16,
    "switches": "1@12:00:00",
    "gpu_type": "b200",
    "memory_gib": 900,
    "source": ["/etc/profile.d/modules.sh", "/opt/conda/etc/profile.d/conda.sh"],
    "modules": ["cuda/13.0"],
    "conda_env": "moelab",
    "variables": {"NCCL_DEBUG": "WARN", "GREETING": "it's $HOME"},
    "container": {"image": "nvcr.io#nvidia/pytorch:26.09-py3", "mounts": ["/shared:/shared", "/data:/data"]},
    "memlock": "unlimited",
    "scratch": "/scratch/me",
    "datasets": {"c4": "/data/c4"},
    "tokenizers": {"671B": "/data/DeepSeek-V3.1-Base"},
}


def profile(**fields: Any) -> ClusterProfile:
    return parse(ClusterProfile, {"name": "test", "description": "a test", "nodes": 32, **fields})


def spec(cluster: ClusterProfile, **fields: Any) -> JobSpec:
    job = {"runs": RUNS, "name": "dsv3_671b", "comment": "dsv3_671b", "nodes": 32, "gpus_per_node": 8}
    return JobSpec(cluster=cluster, **{**job, **fields})


def test_the_published_cluster_has_the_published_settings_each_with_its_source() -> None:
    cluster = read_cluster("nebius_soperator_b200")
    hardware = cluster_of("b200_x256")
    assert (cluster.nodes, cluster.gpus_per_node) == (hardware.nodes, hardware.node.gpus)
    assert set(cluster.variables) <= set(cluster.sources)
    assert all(name.startswith(PREFIXES) for name in cluster.variables)


def test_a_file_of_ones_own_is_read(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("name: a\ndescription: b\nvariables: {TIMEOUT: 22, X: 012}\ncontainer: {image: a.sqsh}\n")
    cards = "mlx5_1:1,mlx5_2:1"
    overrides = ["container.mounts=[/data:/data]", f"variables.NCCL_IB_HCA={cards}", "account=24061", "qos=2024_01"]
    assert read_cluster(str(file), overrides).model_dump(exclude_defaults=True) == {
        "name": "a",
        "description": "b",
        "account": "24061",
        "qos": "2024_01",
        "variables": {"TIMEOUT": "22", "X": "012", "NCCL_IB_HCA": cards},
        "container": {"image": "a.sqsh", "mounts": ("/data:/data",)},
    }


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"partitoin": "main"}, "unknown field 'partitoin'; did you mean 'partition'?"),
        ({"partition": "a b"}, "partition: got 'a b'; valid: one word"),
        ({"runs": "runs"}, "runs: got 'runs'; valid: an absolute path"),
        ({"modules": ["--force"]}, "modules.0: got '--force'; valid: a name or path"),
        ({"variables": {"A B": "x"}}, "variables.A B"),
        ({"variables": {"A": True}}, "variables.A: got True"),
        ({"variables": {"SLURM_JOB_ID": "1"}}, "SLURM_JOB_ID: Slurm, moelab and bash set them"),
        ({"variables": {"SLURMD_NODENAME": "n7"}}, "SLURMD_NODENAME: Slurm, moelab and bash set them"),
        ({"variables": {"UID": "3"}}, "UID: Slurm, moelab and bash set them"),
        ({"variables": {"WANDB_API_KEY": "abc"}}, "must not hold WANDB_API_KEY"),
        ({"variables": {"https_proxy": "http://ada:hunter2@proxy:3128"}}, "variables must not hold a key, token or"),
        ({"description": "login with " + "0a1b2c3d" * 5}, "description must not hold a key, token or password"),
        ({"container": {"image": "docker://ada:hunter2@nvcr.io#x"}}, "container must not hold a key"),
        ({"container": {"image": "x", "mounts": ["/a"]}}, "/path/outside:/path/inside"),
        ({"first_port": 29000, "last_port": 30000}, "without torchrun's own 29500"),
        ({"first_port": 20000, "last_port": 20010}, "at least 100 ports"),
        ({"time_limit_minutes": 5, "signal_s": 300}, "signal_s must be less than the time limit"),
        ({"venv": "/a", "conda_env": "b"}, "exclude each other"),
        ({"sources": {"NCCL_IB_HCA": "x"}}, "NCCL_IB_HCA, which are neither fields nor variables"),
        ({"checkpoints_kept": 1}, "checkpoints_kept: got 1"),
        ({"gpus_per_node": True}, "gpus_per_node: got True"),
        ({"constraint": "gpu hbm80g"}, "constraint: got 'gpu hbm80g'; valid: features without spaces"),
        ({"constraint": "gpu#x"}, "constraint: got 'gpu#x'"),
        ({"exclude": "/etc/passwd"}, "exclude: got '/etc/passwd'; valid: names of nodes, such as gpu017"),
        ({"segment": 0}, "segment: got 0"),
        ({"switches": "one"}, "switches: got 'one'; valid: a number, and at most how long"),
        ({"gpu_request": "gpus"}, "gpu_request: got 'gpus'"),
        ({"gpu_request": "none", "exclusive": False}, "gpu_request none needs exclusive: true"),
    ],
)
def test_what_is_wrong_with_a_profile_is_named(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(BadInput, match=re.escape(told)):
        profile(**fields)


@pytest.mark.parametrize(
    ("name", "override", "told"),
    [
        ("nebius", "qos=x", "the profiles are local, nebius_soperator_b200, slurm_generic"),
        ("/no/such.yaml", "qos=x", "cannot be read"),
        ("slurm_generic", "partition.x=1", "cluster profile slurm_generic: partition: got"),
        ("slurm_generic", "name.x=1", "--set name.x: name has no entries"),
        ("slurm_generic", "time_limit_minutes=4:00:00", "time_limit_minutes: got '4:00:00'"),
        ("slurm_generic", "partition", "expected key=value"),
    ],
)
def test_what_is_wrong_with_a_request_is_named(name: str, override: str, told: str) -> None:
    with pytest.raises(BadInput, match=re.escape(told)):
        read_cluster(name, [override])


# The script


def golden() -> dict[str, str]:
    python = "python=/opt/moelab/bin/python"
    return {
        "slurm_generic": render(spec(read_cluster("slurm_generic", [python]), runs=RUNS[:1], nodes=2)),
        "nebius_soperator_b200": render(spec(read_cluster("nebius_soperator_b200", [python, "partition=main"]))),
        "everything": render(spec(profile(**EVERYTHING), dependency="afterok:123_0:124")),
    }


def directives(script: str) -> list[str]:
    """What sbatch reads: the lines of comments after the first, up to the first command."""
    lines = script.removeprefix("#!/bin/bash\n").splitlines()
    end = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    return [line.removeprefix("#SBATCH ") for line in lines[:end] if line]


@pytest.mark.parametrize("name", golden())
def test_script_is_the_golden_one_and_bash_and_shellcheck_accept_it(name: str) -> None:
    """``python tests/unit/test_script.py`` writes the golden files; read what changed in them."""
    file = GOLDEN / f"{name}.sbatch"
    assert golden()[name] == file.read_text()
    subprocess.run(["bash", "-n", str(file)], check=True)
    shellcheck = Path(sys.executable).with_name("shellcheck")
    # Left out: that files of the cluster are not here to be read, and that a quoted value has a dollar in it.
    command = [str(shellcheck), "--exclude=SC1091,SC2016", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_a_job_asks_for_nothing_that_its_profile_does_not_name() -> None:
    script = render(spec(profile(gpus_per_node=0, exclusive=False, container={"image": "x"})))
    unnamed = {"mem", "gres", "exclusive", "partition", "account", "qos", "dependency", "container-mounts"}
    unnamed |= {"constraint", "reservation", "nodelist", "exclude", "segment", "switches"}
    assert not unnamed & {*re.findall("--([a-z-]+)", script)}


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({}, {"--gres=gpu:8"}),
        ({"gpu_request": "gpus-per-node"}, {"--gpus-per-node=8"}),
        ({"gpu_request": "gpus-per-node", "gpu_type": "h100"}, {"--gpus-per-node=h100:8"}),
        ({"gpu_request": "none"}, set()),
        ({"gpus_per_node": 0}, set()),
    ],
)
def test_how_gpus_are_asked_for(fields: dict[str, Any], options: set[str]) -> None:
    """Of the job and again of its step; with ``none`` ranks run on the GPUs of a whole node all the same."""
    script = render(spec(profile(**fields)))
    assert set(re.findall(r"--(?:gres|gpus)\S*", script)) == options
    assert script.count("--g") == 2 * len(options)
    assert profile(**fields).gpus_per_node == fields.get("gpus_per_node", 8)


STUB = """\
{{ printf '%s\\0' "$@"; printf '\\n\\0'; }} >>{record}/{name}
env -0 >{record}/{name}.env
"""


def run_script(script: str, folder: Path) -> tuple[dict[str, list[list[str]]], list[str]]:
    """Run a script as slurmd would, as task 1 of job array 7: the calls of each program, and the step's variables."""
    record, programs, work = (folder / part for part in ("record", "programs", "work"))
    for part in (record, programs, work):
        part.mkdir()
    for name in ("srun", "scontrol", "module", "conda"):
        program(programs, name, STUB.format(record=record, name=name), shell="/bin/bash")
    (folder / "job.sbatch").write_text(script)
    slurm = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1", "SLURM_JOB_ID": "8", "SLURMD_NODENAME": "n0"}
    environment = {"PATH": f"{programs}:/usr/bin:/bin", "HOME": str(work), "LANG": "C.UTF-8", **slurm}
    command = ["bash", str(folder / "job.sbatch")]
    done = subprocess.run(command, env=environment, cwd=work, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, list(work.iterdir())) == (0, []), done.stderr
    texts = {file.name: file.read_text() for file in record.iterdir()}
    calls = {name: [one.split("\0")[:-1] for one in text.split("\n\0")[:-1]] for name, text in texts.items()}
    return calls, texts["srun.env"].split("\0")


def two_runs(folder: Path) -> tuple[Path, Path]:
    runs = folder / "runs" / "first", folder / "runs" / "second"
    for run in runs:
        (run / "logs").mkdir(parents=True)
    return runs


# fmt: off
HOSTILE = (
    "; touch pwned", "$(touch pwned)", "`touch pwned`", "'; touch pwned; '", '"; touch pwned; "', "x\ntouch pwned",
    "x\n#SBATCH --wrap=true", "#SBATCH --wrap=true", "two words", "$HOME", "a\\", "*", "~", "{a,b}", "a=b", "-x",
    "--help", "naïve ü 日本 🦊", " x ", "x\ty", "x\ry", "x\u2028y", "\x00", "", "{{ 7 * 7 }}", "%j",
)
# fmt: on
# Where a value {v} is put, as a field of the profile or of the job, {f} being the test's folder; and where it is seen
# that it arrived: a line for sbatch, an argument of a program's first call, or a variable of the step.
PLACES: dict[str, tuple[dict[str, Any], str]] = {
    "partition": ({"partition": "{v}"}, "#SBATCH --partition={v}"),
    "account": ({"account": "{v}"}, "#SBATCH --account={v}"),
    "qos": ({"qos": "{v}"}, "#SBATCH --qos={v}"),
    "constraint": ({"constraint": "{v}"}, "#SBATCH --constraint={v}"),
    "reservation": ({"reservation": "{v}"}, "#SBATCH --reservation={v}"),
    "nodelist": ({"nodelist": "{v}"}, "#SBATCH --nodelist={v}"),
    "exclude": ({"exclude": "{v}"}, "#SBATCH --exclude={v}"),
    "segment": ({"segment": "{v}"}, "#SBATCH --segment={v}"),
    "switches": ({"switches": "{v}"}, "#SBATCH --switches={v}"),
    "gpu_type": ({"gpu_type": "{v}"}, "#SBATCH --gres=gpu:{v}:8"),
    "gpu_request": ({"gpu_request": "{v}"}, "#SBATCH --{v}=8"),
    "name": ({"name": "{v}"}, "#SBATCH --job-name={v}"),
    "comment": ({"comment": "{v}"}, "#SBATCH --comment={v}"),
    "dependency": ({"dependency": "{v}"}, "#SBATCH --dependency={v}"),
    "run": ({"runs": ["{f}/runs/first", "{f}/runs/x{v}"]}, "srun {f}/runs/x{v}"),
    "modules": ({"modules": ["{v}"]}, "module {v}"),
    "conda_env": ({"conda_env": "{v}"}, "conda {v}"),
    "python": ({"python": "{v}"}, "srun {v}"),
    "image": ({"container": {"image": "{v}"}}, "srun --container-image={v}"),
    "mounts": ({"container": {"image": "x", "mounts": ["/{v}:/y", "/z:/z"]}}, "srun --container-mounts=/{v}:/y,/z:/z"),
    "source": ({"source": ["{f}/a/{v}x"]}, "export SOURCED=yes"),
    "venv": ({"venv": "{f}/b/{v}x"}, "export SOURCED=yes"),
    "variables": ({"variables": {"NCCL_IB_HCA": "{v}"}}, "export NCCL_IB_HCA={v}"),
    "variable name": ({"variables": {"{v}": "set"}}, "export {v}=set"),
}
OF_THE_JOB = ("name", "comment", "dependency", "run")
FREE_TEXT = ("image", "variables", "run", "source", "venv", "mounts")
DIRECTIVES = {"partition": 1, "account": 1, "qos": 1, "constraint": 1, "reservation": 1, "nodelist": 1, "exclude": 1}
DIRECTIVES |= {"segment": 1, "switches": 1, "dependency": 2}  # that a field adds
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="/"), max_size=20)


def filled(name: str, value: str, folder: Path) -> tuple[dict[str, Any], str]:
    """Fields and arrival of a place, with the value and the folder in place."""
    text = json.dumps(PLACES[name]).replace("{f}", str(folder)).replace("{v}", json.dumps(value)[1:-1])
    fields, arrival = json.loads(text)
    return fields, arrival


def check(name: str, value: str) -> bool:
    """Refused with a named error (False), or arrived as it is (True); anything else fails."""
    with tempfile.TemporaryDirectory(prefix="moelab-script-") as scratch:
        folder = Path(scratch)
        fields, arrival = filled(name, value, folder)
        for path in fields.get("source", []) + [f"{path}/bin/activate" for path in [fields.get("venv")] if path]:
            if value.isprintable():  # a shell file with a hostile name, so far as a file system takes it
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                Path(path).write_text("export SOURCED=yes\n")
        harmless = two_runs(folder)
        runs = tuple(Path(path) for path in fields.pop("runs", ())) or harmless
        of_job = fields if name in OF_THE_JOB else {}
        try:
            job = spec(profile(**({} if of_job else fields)), **{"runs": runs, **of_job})
        except BadInput as error:
            if name.split()[0].removesuffix("s") not in str(error) and "container" not in str(error):
                raise
            return False
        (job.runs[1] / "logs").mkdir(parents=True, exist_ok=True)
        script = render(job)
        of_plain = len(directives(render(spec(profile()))))
        assert script.count("\n#SBATCH") == len(directives(script)) == of_plain + DIRECTIVES.get(name, 0)
        calls, variables = run_script(script, folder)
        assert len(calls["srun"]) == 1
        kind, wanted = arrival.split(" ", 1)
        seen = {"#SBATCH": directives(script), "export": variables}.get(kind) or calls[kind][0]
        assert wanted in seen, (calls, script)
        return True


@pytest.mark.parametrize("name", PLACES)
def test_hostile_values_are_refused_or_arrive_as_they_are(name: str) -> None:
    for value in HOSTILE:
        arrived = check(name, value)
        if value and not value.isprintable():
            assert not arrived, value
        elif name in FREE_TEXT and value and not (name == "mounts" and "," in value):
            assert arrived, value


def test_a_job_reads_the_profile_that_its_run_was_submitted_with(tmp_path: Path) -> None:
    cluster = profile(**EVERYTHING, description="ü 日本 🦊")
    keep_cluster(cluster, tmp_path)
    assert kept_cluster(tmp_path) == cluster


@given(name=st.sampled_from(sorted(PLACES)), value=TEXT)
@example(name="variables", value="\ud7ff")
@settings(max_examples=60, deadline=None)
def test_any_text_is_refused_or_arrives_as_it_is(name: str, value: str) -> None:
    check(name, value)


def test_what_no_job_can_have_is_refused_by_name() -> None:
    bad = {"name": "a b", "comment": "a b", "dependency": "singleton", "runs": (Path("/home/me/my runs/a"),)}
    for field, value in bad.items():
        with pytest.raises(BadInput, match=f"^(folder of the )?{field}: got "):
            spec(profile(), **{field: value})
    with pytest.raises(Refused, match="use `moelab run`"):
        spec(read_cluster("local"))


if __name__ == "__main__":
    for name, script in golden().items():
        (GOLDEN / f"{name}.sbatch").write_text(script)
