"""What to run, and nothing about how.

An :class:`Experiment` is one arm of a study at one seed. The same field names are the keys of its YAML file, the
papermill parameters of the notebooks and the ``--set key=value`` of the command line, so there is one vocabulary.
Whether the experiment is legal on a cluster, fits in memory or can run on this machine is decided elsewhere.
"""

from __future__ import annotations

import hashlib
import re
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationInfo, field_validator

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,79}$")]
MOST, MOST_RANKS = 10**9, 10**6
"""Bounds that no training comes near: a number of thousands of digits fills the memory of whatever counts with it."""
MOST_LAYERS = 1_000
"""Of a model: a plan names the modules of each stage one by one."""
MAX_TEXT_CHARACTERS = 1_000
Degree = Annotated[int, Field(ge=1, le=MOST_RANKS)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
ActivationCheckpoint = Literal["none", "selective", "full", "full+dispatch"]
MAX_ARM_CHARACTERS = 200
"""File systems take names of 255 bytes."""


class Precision(StrEnum):
    """Number format of the quantised GEMMs; everything else stays in BF16 with FP32 master weights."""

    BF16 = "bf16"
    FP8 = "fp8"
    MXFP8 = "mxfp8"
    NVFP4 = "nvfp4"


BLOCK_SCALED = (Precision.MXFP8, Precision.NVFP4)
"""Formats whose blocks have a scale each: their experts are moelab's, and leave a record of what was converted."""
NUMBERS_ONLY = (
    "NVFP4 is numbers only: emulated on every machine, it shows what it does to the loss and not to the speed"
)


class EPBackend(StrEnum):
    """Which all-to-all moves tokens to their experts."""

    STANDARD = "standard"
    DEEPEP = "deepep"
    HYBRIDEP = "hybridep"
    MINIMAL_ASYNC_EP = "minimal_async_ep"


class Routing(StrEnum):
    """How tokens choose experts: by the router, forced round-robin, or at random with equal load."""

    LEARNED = "learned"
    ROUND_ROBIN = "round_robin"
    RANDOM_BALANCED = "random_balanced"


def _printable(value: Any) -> Any:
    # Colours, line ends and signs that turn the reading direction would change what a terminal or a page shows.
    if isinstance(value, str) and not (value.isprintable() and len(value) <= MAX_TEXT_CHARACTERS):
        hidden = dict.fromkeys(f"U+{ord(sign):04X}" for sign in value if not sign.isprintable())
        raise ValueError(
            f"printable text of at most {MAX_TEXT_CHARACTERS} characters; this has {len(value)}"
            + (f", {', '.join(list(hidden)[:5])} among them" if hidden else "")
        )
    return value


class ShapeChanges(BaseModel):
    """Dimensions of your own model, where they differ from those of ``model``; names as in :class:`ModelShape`.

    Whatever else ``model`` has stays: how its router scores experts, its tokenizer, and, unless ``attention`` is
    ``gqa``, its multi-head latent attention. A model with ``gqa`` is planned and projected, but not trained.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    vocab_size: Degree | None = None
    dim: Degree | None = None
    n_layers: Annotated[int, Field(ge=1, le=MOST_LAYERS)] | None = Field(
        None, description="dense and MoE layers together"
    )
    n_dense_layers: Annotated[int, Field(ge=0, le=MOST_LAYERS)] | None = None
    n_heads: Degree | None = None
    q_lora_rank: Annotated[int, Field(ge=0, le=MOST_RANKS)] | None = Field(None, description="0: full-rank queries")
    kv_lora_rank: Degree | None = None
    qk_nope_head_dim: Degree | None = Field(None, description="of a query or key head, without its rotary part")
    qk_rope_head_dim: Degree | None = Field(None, description="rotary part of a query or key head")
    v_head_dim: Degree | None = None
    attention: Literal["mla", "gqa"] | None = Field(None, description="gqa: grouped queries; plan-only")
    n_kv_heads: Degree | None = Field(None, description="key and value heads of gqa")
    head_dim: Degree | None = Field(None, description="of every head of gqa")
    qk_norm: bool | None = Field(None, description="whether gqa norms each query and key head")
    dense_hidden_dim: Degree | None = None
    moe_hidden_dim: Degree | None = Field(None, description="of one routed expert")
    num_experts: Degree | None = None
    num_shared_experts: Annotated[int, Field(ge=0)] | None = None
    top_k: Degree | None = Field(None, description="routed experts per token")
    expert_groups: Degree | None = None
    limited_groups: Degree | None = None

    @property
    def changes(self) -> dict[str, Any]:
        """What was given."""
        return self.model_dump(exclude_none=True)


class OwnHardware(BaseModel):
    """A cluster of one's own, as a file that ``hardware`` names has it; figures as in ``data/hardware.yaml``.

    The bounds are far above any hardware, and below the same figure in MiB, in GB/s or as ``sm_90``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Name
    gpu: str = Field(description="of the catalogue, whose figures hold where none stands here; or another")
    capability: Annotated[float, Field(ge=0, lt=30)] | None = Field(None, description="such as 9.0")
    nodes: Degree = 1
    gpus: Degree = Field(8, description="of a node")
    nvlink_gpus: Degree | None = Field(None, description="that NVLink joins, where it goes beyond a node")
    nic_gb_s: Rate | None = Field(None, description="network of one GPU each way, GB/s")
    memory_gib: Annotated[Rate, Field(lt=10_000)] | None = Field(None, description="that CUDA shows")
    bf16_tflops: Rate | None = Field(None, description="dense peak, as the next two")
    fp8_tflops: Rate | None = None
    mxfp8_tflops: Rate | None = None
    hbm_tb_s: Annotated[Rate, Field(lt=100)] | None = None
    nvlink_gb_s: Rate | None = Field(None, description="each way, GB/s")
    # Long words are written as a block of YAML, which ends with a line end.
    source: Annotated[str, AfterValidator(lambda words: " ".join(words.split()))] = Field(
        "as given in the hardware file", description="of the figures"
    )

    _printable = field_validator("*")(_printable)

    @field_validator("nvlink_gpus")
    @classmethod
    def _beyond_a_node(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and value < info.data.get("gpus", 1):  # absent where it was refused itself
            raise ValueError(f"at least the {info.data['gpus']} GPUs of a node; leave it out where NVLink ends there")
        return value

    def __str__(self) -> str:
        return self.name


Hardware = Annotated[
    Annotated[Name, Tag("[name]")] | Annotated[OwnHardware, Tag("[file]")],
    Discriminator(lambda value: "[file]" if isinstance(value, dict | OwnHardware) else "[name]"),
]
"""Name of a profile, or the content of a file; the tags keep an error of the one from being told as both's."""


class Experiment(BaseModel):
    """One arm of a study at one seed.

    ``dp_shard`` of -1 takes whatever ranks the other axes leave, as TorchTitan does. ``lr`` is the peak learning rate
    of AdamW; ``local_batch`` counts sequences of ``seq_len`` tokens per data-parallel rank and step. ``capture_step``
    above zero saves what the experts multiply at that step into the run directory (:mod:`moelab.mxfp8.capture`), and
    ``trace_step`` what its ranks do in it (:mod:`moelab.titan.trace`).
    A field added here is also added to :data:`moelab.experiment_file.ADDED_FIELDS`, so that older runs stay readable;
    where it makes no difference, :mod:`moelab.layout.training` says so.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_enum_values=False)

    name: Name = Field("study", description="study that this run belongs to; the folder under runs/")
    model: Literal["nano", "debug", "16B", "671B"] = "nano"
    shape: ShapeChanges | None = Field(None, description="your own model: dimensions that differ from `model`'s")
    precision: Precision = Precision.BF16
    mxfp8_kernels: Literal["auto", "native", "emulated"] = "auto"
    quantize: Literal["experts", "experts+linears"] = "experts"
    wgrad: Literal["mxfp8", "bf16", "fp8"] = Field(
        "mxfp8",
        description="of MXFP8 or NVFP4 experts: mxfp8 (their own format) or bf16; of FP8 experts: fp8, else bf16",
    )
    ep_backend: EPBackend = EPBackend.STANDARD
    ep_kernels: Literal["native", "emulated"] = Field(
        "native", description="emulated: DeepEP's contract on plain collectives, for its numerics where it is not"
    )
    dispatch_precision: Literal["bf16", "mxfp8", "fp8"] = "bf16"
    routing: Routing = Routing.LEARNED

    nodes: Degree = 1
    gpus_per_node: Degree = Field(
        2, description="ranks on each node: GPUs, or processes on a CPU; left out of a study, what this machine has"
    )
    dp_replicate: Degree = 1
    dp_shard: int = Field(-1, le=MOST_RANKS, description="-1: the ranks that the other axes leave")
    tp: Degree = 1
    pp: Degree = 1
    pp_schedule: str = "1F1B"
    pp_stages_per_rank: Annotated[int, Field(ge=0)] = Field(
        0, description="stages of each pipeline rank; 0: the schedule's own, 1 or 2"
    )
    cp: Degree = 1
    ep: Degree = 2

    seq_len: Annotated[int, Field(ge=8, le=MOST)] = 256
    local_batch: Annotated[int, Field(ge=1, le=MOST)] = 4
    microbatch: Annotated[int, Field(ge=1, le=MOST)] = 1
    accumulate_gradients: bool = Field(
        False, description="without a pipeline too, microbatch sequences at a time, whose gradients add up"
    )
    steps: Annotated[int, Field(ge=1, le=MOST)] = 60
    warmup_steps: Annotated[int, Field(ge=0, le=MOST)] = 6
    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 3.0e-3
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    activation_checkpoint: ActivationCheckpoint = Field(
        "none", description="full+dispatch: full, but what came over the network is kept"
    )
    compile: Literal["none", "loss", "model+loss"] = "none"
    attention_backend: Literal["flex", "flex_tiles", "flex_flash", "varlen"] = Field(
        "flex", description="TorchTitan's; flex_tiles: with tiles chosen for Hopper; flex_flash: by flash-attn-4"
    )
    dataset: Annotated[str, Field(pattern=r"^(python|c4|.*/.*)$")] = Field(
        "python", description="python, c4, or a folder of text (a path with a /) that moelab.titan.corpus.build made"
    )
    validate_every: Annotated[int, Field(ge=0, le=MOST)] = Field(
        0, description="steps between passes over held-out text; 0: after the last alone, and with c4 never"
    )
    overrides: tuple[Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)+$")], ...] = Field(
        (), description="TorchTitan overrides of your own, each as module.function"
    )
    hardware: Hardware = Field(
        "local", description="a profile's name or a YAML file; `local` is the machine at hand, `cpu` hides its GPUs"
    )
    capture_step: Annotated[int, Field(ge=0, le=MOST)] = Field(0, description="0: no capture; else 1 to steps")
    trace_step: Annotated[int, Field(ge=0, le=MOST)] = Field(0, description="0: no trace; else 2 to steps")
    trace_ranks: tuple[Annotated[int, Field(ge=0, lt=MOST_RANKS)], ...] = Field(
        (0,), description="ranks that leave a trace", min_length=1, max_length=64
    )
    memory_snapshot: bool = Field(False, description="of the traced step, what CUDA's allocator held and did")
    arm_fields: tuple[str, ...] = Field(
        (), description="further fields in the arm's name; a study sets them where two arms would have one name"
    )

    _printable = field_validator("*")(_printable)

    @field_validator("shape")
    @classmethod
    def _own_shape(cls, value: ShapeChanges | None) -> ShapeChanges | None:
        return value if value and value.changes else None

    @field_validator("dp_shard")
    @classmethod
    def _shard_degree(cls, value: int) -> int:
        if value != -1 and value < 1:
            raise ValueError("must be -1 (the ranks that the other axes leave) or at least 1")
        return value

    @field_validator("capture_step")
    @classmethod
    def _captured_step(cls, value: int, info: ValidationInfo) -> int:
        # `data` has the fields that stand before this one, but for those that were refused themselves.
        if value > info.data.get("steps", value):
            raise ValueError(f"0 (no capture), or a step of this run, 1 to {info.data['steps']}")
        if value and info.data.get("compile") == "model+loss":
            raise ValueError("0 with compile=model+loss: a compiled model does not run hooks; use compile=loss or none")
        standard = info.data.get("ep_backend") is EPBackend.STANDARD and info.data.get("dispatch_precision") == "bf16"
        if value and not standard:
            raise ValueError("0 unless ep_backend=standard and dispatch_precision=bf16: others hand experts other rows")
        return value

    @field_validator("trace_step")
    @classmethod
    def _traced_step(cls, value: int, info: ValidationInfo) -> int:
        if (steps := info.data.get("steps", MOST)) < value or value == 1:
            valid = f", or a step of this run after the first, which warms up: 2 to {steps}" if steps > 1 else ""
            raise ValueError(f"0 (no trace){valid}")
        return value

    @field_validator("trace_ranks")
    @classmethod
    def _traced_ranks(cls, value: tuple[int, ...], info: ValidationInfo) -> tuple[int, ...]:
        world = info.data.get("nodes", MOST_RANKS) * info.data.get("gpus_per_node", 1)
        if max(value) >= world:
            raise ValueError(f"global ranks of this run, 0 to {world - 1}")
        # In whichever order they were given, the same ranks are the same arm.
        return tuple(sorted(set(value)))

    @field_validator("arm_fields")
    @classmethod
    def _fields_of_arms(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        dimensions = [f"shape.{dimension}" for dimension in ShapeChanges.model_fields]
        known = [*(field for field in cls.model_fields if field not in (*_NOT_OF_AN_ARM, "shape")), *dimensions]
        if unknown := [field for field in value if field not in known]:
            raise ValueError(f"names of fields; not one: {', '.join(unknown)}; known: {', '.join(known)}")
        return tuple(dict.fromkeys(value))

    @property
    def world_size(self) -> int:
        """Number of ranks: GPUs, or processes on a CPU."""
        return self.nodes * self.gpus_per_node

    @property
    def sequences_at_once(self) -> int:
        """Sequences that go forward together on each data-parallel rank."""
        return self.microbatch if self.pp > 1 or self.accumulate_gradients else self.local_batch

    @property
    def global_batch(self) -> int:
        """Sequences of a step over all ranks; ranks that the other axes do not divide are rounded down."""
        return self.local_batch * max(1, self.world_size // (self.pp * self.tp * self.cp))

    @property
    def model_label(self) -> str:
        """The model, and how it differs from the one of that name.

        >>> Experiment(model="671B", shape={"num_experts": 128}).model_label
        '671B with num_experts 128'
        """
        changes = self.shape.changes if self.shape else {}
        return self.model + (" with " + ", ".join(f"{k} {v}" for k, v in changes.items()) if changes else "")

    @property
    def arm(self) -> str:
        """Folder-safe name of the arm: what usually distinguishes it, and then ``arm_fields``.

        >>> Experiment(precision="mxfp8", quantize="experts+linears", wgrad="bf16").arm
        'mxfp8_standard_linears_wgrad-bf16'
        >>> Experiment(lr=1e-5, compile="model+loss", arm_fields=["lr", "compile"]).arm
        'bf16_standard_lr-1e-05_compile-model+loss'
        """
        parts = [self.precision.value, self.ep_backend.value]
        if self.precision is not Precision.BF16 and self.quantize != "experts":
            parts.append("linears")
        # FP8 experts have theirs in BF16 unless asked, block-scaled ones in their own format; BF16 knows no other.
        usual = ("mxfp8",) if self.precision in BLOCK_SCALED else ("mxfp8", "bf16")
        if self.precision is not Precision.BF16 and self.wgrad not in usual:
            parts.append(f"wgrad-{self.wgrad}")
        if self.dispatch_precision != "bf16":
            parts.append(f"dispatch-{self.dispatch_precision}")
        if self.routing is not Routing.LEARNED:
            parts.append(self.routing.value.replace("_", "-"))
        values = self._by_field() if self.arm_fields else {}
        for field in self.arm_fields:
            value = "default" if values[field] is None else values[field]
            if field == "overrides":
                value = "+".join(self.overrides) or "none"
            # Folders of runs have this name: signs that shells or file systems mind are replaced.
            words = re.sub(r"[^A-Za-z0-9.+]", "-", str(value))
            parts.append(f"{field.removeprefix('shape.').replace('_', '-')}-{words}")
        name = "_".join(parts)
        if len(name) <= MAX_ARM_CHARACTERS:
            return name
        digest = hashlib.sha256(name.encode()).hexdigest()[:8]
        return f"{name[: MAX_ARM_CHARACTERS - 9]}-{digest}"

    def differences(self, other: Experiment) -> tuple[str, ...]:
        """Fields in which two experiments are different arms: all but the seed and what things are called.

        >>> Experiment(lr=1e-5, seed=1).differences(Experiment(shape={"n_layers": 3}))
        ('lr', 'shape.n_layers')
        """
        mine, others = self._by_field(), other._by_field()
        return tuple(field for field, value in mine.items() if value != others[field])

    def _by_field(self) -> dict[str, Any]:
        shape = self.shape or ShapeChanges()
        own = {field: getattr(self, field) for field in type(self).model_fields}
        dimensions = {f"shape.{dimension}": value for dimension, value in shape}
        return {field: own[field] for field in own if field not in (*_NOT_OF_AN_ARM, "shape")} | dimensions


_NOT_OF_AN_ARM = ("name", "seed", "arm_fields")
