"""Clusters as YAML: what a Slurm job needs to know about where it runs.

Profiles that come with moelab are in ``data/clusters``; the path of a YAML file works too. Soperator (Slurm on
Kubernetes) is plain Slurm to its users: its nodes are pods with Slurm names, and nothing here treats it differently.

No shell ever runs a value. sbatch takes no quotes in ``#SBATCH`` lines, so what stands there must be one word of
letters, digits and a few signs; everything else is one line of text and is quoted in the script.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from moelab.errors import BadInput
from moelab.experiment import Name
from moelab.experiment_file import parse, parse_overrides, read_yaml
from moelab.files import read_json, write_json
from moelab.privacy import HIDDEN, each_text, holds_secret, is_secret_name

FOLDER = Path(__file__).parent.parent / "data" / "clusters"
TORCHRUN_DEFAULT_PORT = 29500
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.,:@/+=-]*", re.ASCII)
_FEATURES = re.compile(r"[A-Za-z0-9(\[][A-Za-z0-9_.,:@/+=&|*()\[\]-]*", re.ASCII)
_NODES = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.,\[\]-]*", re.ASCII)
_SWITCHES = re.compile(r"\d+(@[\d:-]+)?", re.ASCII)
_OWN_VARIABLES = ("SLURM_", "SLURMD_", "MOELAB_")
_SHELLS_OWN = frozenset({"UID", "EUID", "PPID", "BASHOPTS", "SHELLOPTS", "BASH_VERSINFO"})
MAX_CHARACTERS = 4_096
_PRIVATE_FILE = "everyone can read a job's script; export it in a private file and name that file in `source`"


def _rule(valid: str, holds: Callable[[str], object]) -> Callable[[str], str]:
    """A check that returns its value, or raises ValueError saying what is valid."""

    def checked(value: str) -> str:
        if not holds(value):
            raise ValueError(valid)
        return value

    return checked


word = _rule("one word of letters, digits and . _ , : @ / + = -, beginning with a letter or digit", _WORD.fullmatch)
"""For an ``#SBATCH`` line: no sign that sbatch or a shell could read as something else."""
_features = _rule("features without spaces, such as gpu&hbm80g or [rack1|rack2]", _FEATURES.fullmatch)
_node_list = _rule("names of nodes, such as gpu017 or gpu[001-003,007]", _NODES.fullmatch)
_switches = _rule("a number, and at most how long to wait for it, such as 1 or 1@12:00:00", _SWITCHES.fullmatch)
line = _rule(
    f"one line of printable text, 1 to {MAX_CHARACTERS:,} characters",
    lambda value: value.isprintable() and 0 < len(value) <= MAX_CHARACTERS,
)
"""For what the script quotes: no line breaks, and nothing invisible."""
_argument = _rule("a name or path, which an option such as -x is not", lambda value: not value.startswith("-"))
_absolute = _rule(
    "an absolute path: the job starts in another folder, on another machine", lambda value: value.startswith("/")
)
_mount = _rule("/path/outside:/path/inside, without a comma", re.compile(r"/[^,]*:[^,]*").fullmatch)

# YAML reads `1` as a number. A truth value stays one and is refused: whether `yes` means 1 or yes, nobody can tell.
Text = Annotated[str, BeforeValidator(lambda value: str(value) if type(value) is int else value)]
Word = Annotated[Text, AfterValidator(word)]
Features = Annotated[Text, AfterValidator(_features)]
Nodes = Annotated[Text, AfterValidator(_node_list)]
Switches = Annotated[Text, AfterValidator(_switches)]
Line = Annotated[Text, AfterValidator(line)]
Argument = Annotated[Line, AfterValidator(_argument)]
Absolute = Annotated[Line, AfterValidator(_absolute)]
Mount = Annotated[Line, AfterValidator(_mount)]
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Count = Annotated[int, Field(ge=0)]


class Container(BaseModel):
    """An image that pyxis starts on each node, with enroot."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    image: Line = Field(description="registry#name:tag, or the path of a .sqsh file")
    mounts: tuple[Mount, ...] = Field((), description="outside:inside; must cover the runs and the datasets")


class ClusterProfile(BaseModel):
    """One cluster, and how moelab's jobs run on it.

    ``sources`` says where a value comes from, by the name of its field or of its variable.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Name
    description: Line
    scheduler: Literal["slurm", "none"] = Field("slurm", description="none: `moelab run` starts ranks here")

    # Words of #SBATCH lines.
    partition: Word | None = None
    account: Word | None = None
    qos: Word | None = None
    constraint: Features | None = Field(None, description="features that nodes must have, such as gpu&hbm80g")
    reservation: Word | None = None
    nodelist: Nodes | None = Field(None, description="nodes that the job must have")
    exclude: Nodes | None = Field(None, description="nodes that the job must not have")
    segment: Annotated[int, Field(ge=1)] | None = Field(None, description="nodes that share a block, as in NVL72 racks")
    switches: Switches | None = Field(None, description="most leaf switches, such as 1@12:00:00")
    time_limit_minutes: Annotated[int, Field(ge=1)] = 60
    nodes: Annotated[int, Field(ge=1)] = Field(1, description="most nodes that one job may have")
    gpus_per_node: Count = Field(8, description="0: jobs ask for no GPU, and ranks run on the CPU")
    gpu_request: Literal["gres", "gpus-per-node", "none"] = Field(
        "gres", description="how jobs ask for GPUs; none: not at all, where whole nodes are handed out"
    )
    gpu_type: Word | None = Field(None, description="as Slurm names it; none: any")
    cpus_per_task: Annotated[int, Field(ge=1)] = Field(1, description="for the one task on each node")
    memory_gib: Count | None = Field(None, description="per node; 0: all of it; none: the cluster's default")
    exclusive: bool = True

    # The set-up on each node, in the order: source, modules, venv or conda_env, variables.
    modules: tuple[Argument, ...] = Field((), description="environment modules, loaded after `source`")
    source: tuple[Absolute, ...] = Field((), description="shell files, sourced first and in this order")
    venv: Absolute | None = None
    conda_env: Argument | None = Field(None, description="activated; conda's profile.d/conda.sh must be in `source`")
    python: Argument | None = Field(
        None, description="interpreter; none: that of venv, conda_env or container, else the one that submits"
    )
    variables: dict[VariableName, Line] = {}
    container: Container | None = None
    memlock: Literal["any", "unlimited"] = Field("any", description="locked memory per rank; RDMA needs unlimited")
    first_port: Annotated[int, Field(ge=1024)] = 20000
    last_port: Annotated[int, Field(le=65535)] = Field(28999, description="end of the range for torchrun's rendezvous")

    runs: Absolute | None = Field(None, description="folder of all runs, on a file system that all nodes share")
    scratch: Absolute | None = Field(None, description="shared folder for checkpoints; none: in the run directory")
    datasets: dict[Literal["c4"], Absolute] = Field({}, description="folders of local copies, by dataset")
    tokenizers: dict[Literal["nano", "debug", "16B", "671B"], Absolute] = Field({}, description="folders, by model")

    signal_s: Annotated[int, Field(ge=10, le=65535)] = Field(
        300, description="warning before the time limit, to finish a step and save; Slurm may send it 60 s early"
    )
    requeues: Count = Field(10, description="how often one job may restart")
    checkpoint_interval_steps: Count = Field(0, description="0: save only when time runs out")
    checkpoints_kept: Annotated[int, Field(ge=2)] = 2
    all_reduce_floor_gb_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None, description="a node with a lower bus bandwidth is not healthy"
    )
    sources: dict[str, Line] = {}

    @model_validator(mode="after")
    def _consistent(self) -> ClusterProfile:
        # Room for a dozen jobs at eight ports each; a person's own torchrun may hold its default.
        if self.last_port - self.first_port < 100 or self.first_port <= TORCHRUN_DEFAULT_PORT <= self.last_port:
            raise ValueError(
                f"first_port to last_port must be at least 100 ports without torchrun's own {TORCHRUN_DEFAULT_PORT}"
            )
        if self.signal_s >= self.time_limit_minutes * 60:
            raise ValueError("signal_s must be less than the time limit")
        if self.gpus_per_node and self.gpu_request == "none" and not self.exclusive:
            raise ValueError("gpu_request none needs exclusive: true, a job that has its nodes to itself")
        if self.venv and self.conda_env:
            raise ValueError("venv and conda_env exclude each other; give one of them")
        # bash refuses to set its own (`UID: readonly variable`), and `set -e` ends the script there.
        if taken := [name for name in self.variables if name.startswith(_OWN_VARIABLES) or name in _SHELLS_OWN]:
            raise ValueError(f"variables must not be {', '.join(taken)}: Slurm, moelab and bash set them themselves")
        if secret := [name for name in self.variables if is_secret_name(name)]:
            raise ValueError(f"variables must not hold {', '.join(secret)}: {_PRIVATE_FILE}")
        for name, value in self.model_dump(mode="json").items():  # JSON, so that paths and tuples are texts and lists
            if each_text(lambda text: HIDDEN if holds_secret(text) else text, value) != value:
                raise ValueError(f"{name} must not hold a key, token or password: {_PRIVATE_FILE}")
        if unknown := self.sources.keys() - type(self).model_fields.keys() - self.variables.keys():
            raise ValueError(
                f"sources names {', '.join(sorted(unknown))}, which are neither fields nor variables of this profile"
            )
        return self


def bundled() -> tuple[str, ...]:
    """Names of the profiles that come with moelab."""
    return tuple(sorted(file.stem for file in FOLDER.glob("*.yaml")))


def read_cluster(name_or_path: str, overrides: Sequence[str] | Mapping[str, Any] = ()) -> ClusterProfile:
    """Read a bundled profile by its name, or a YAML file.

    Args:
        name_or_path: such as ``slurm_generic`` or ``/home/me/cluster.yaml``.
        overrides: ``key=value`` pairs, or a mapping; ``variables.NCCL_IB_HCA=mlx5`` replaces one entry.

    Raises:
        BadInput: naming the value, what is valid and what to do.

    >>> read_cluster("nebius_soperator_b200").variables["NCCL_IB_HCA"]
    'mlx5'
    """
    if name_or_path in bundled():
        path = FOLDER / f"{name_or_path}.yaml"
    elif name_or_path.endswith((".yaml", ".yml")):
        path = Path(name_or_path)
    else:
        raise BadInput(
            f"cluster is {name_or_path!r}: there is no such profile; the profiles are {', '.join(bundled())}; or give "
            "the path of a .yaml file"
        )
    content = read_yaml(path)
    if not isinstance(content, dict):
        raise BadInput(f"{path}: expected a mapping of fields")
    for key, value in parse_overrides(overrides).items():
        name, dot, entry = key.partition(".")
        # Of a field with entries only the named one is replaced.
        held = content.get(name) or {}
        if dot and not isinstance(held, dict):
            raise BadInput(f"--set {key}: {name} has no entries")
        content[name] = {**held, entry: value} if dot else value
    try:
        return parse(ClusterProfile, content)
    except BadInput as error:
        raise BadInput(f"cluster profile {name_or_path}: {error}") from None


KEPT_FILE = "launch/cluster.json"


def keep_cluster(cluster: ClusterProfile, run: Path) -> None:
    """Write the profile into a run directory, where the job reads what it is to do."""
    write_json(run / KEPT_FILE, cluster.model_dump(mode="json"))


def kept_cluster(run: Path) -> ClusterProfile:
    """The profile that a run was submitted with.

    Raises:
        BadInput: if it is damaged.
        OSError, ValueError: if it cannot be read.
    """
    return parse(ClusterProfile, read_json(run / KEPT_FILE))
