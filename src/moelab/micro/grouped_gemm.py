"""The grouped-GEMM experiment: what it measures, and its table, of this machine or as it comes with the package.

One case is the product of a routed expert's weight with the rows of all experts of a rank, forward and backward:

=========  ==============================  =====================================
forward    (M, K) × (G, K, N) → (M, N)     rows by input features
dgrad      (M, N) × (G, N, K) → (M, K)     the gradient of the rows
wgrad      (N, M) × (M, K) → (G, N, K)     the gradient of the weights, a product for each group
=========  ==============================  =====================================

Letters: M rows of all groups together, N output features, K input features, G groups (local experts).
``grouped_gemm_run.py`` times it, and loads torch, which a replay does not need.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from moelab.errors import BadInput
from moelab.files import read_json
from moelab.hardware import GROUP_PADDING

if TYPE_CHECKING:
    import pandas as pd

GroupedPrecision = Literal["bf16", "fp8", "mxfp8", "mxfp8_wgrad_bf16"]
PRECISIONS: tuple[GroupedPrecision, ...] = get_args(GroupedPrecision)
Direction = Literal["forward", "dgrad", "wgrad"]
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)
Sizes = Literal["even", "random", "skewed"]
SIZES: tuple[Sizes, ...] = get_args(Sizes)
FEATURE_BLOCK: dict[GroupedPrecision, int] = {"bf16": 8, "fp8": 16, "mxfp8": 32, "mxfp8_wgrad_bf16": 32}
"""What N and K must be multiples of: 16 bytes of an operand's row, or one MXFP8 block."""
ROW_BLOCK = {name: GROUP_PADDING["mxfp8_native" if name.startswith("mxfp8") else name] for name in PRECISIONS}
"""What each group's rows are padded to."""
DIRICHLET = 4.0
"""Concentration of the skewed group sizes: their standard deviation is about half of their mean."""
SEED = 20261101
STORED, SCHEMA = "grouped_gemm_h100.json", 1
SHAPE = ["m", "n", "k", "groups", "sizes"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One grouped product.

    Group sizes are ``even``; ``random``, one multinomial draw with equal chances, as balanced routing gives; or
    ``skewed``, chances drawn from a Dirichlet distribution first, as a router that prefers some experts gives.
    """

    m: int  # rows of all groups together, before padding
    n: int  # output features
    k: int  # input features
    groups: int  # local experts
    sizes: Sizes = "even"

    def __post_init__(self) -> None:
        for name in ("m", "n", "k", "groups"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name} is {getattr(self, name)}; give a whole number of at least 1")
        if self.sizes not in SIZES:
            raise BadInput(f"group sizes are {self.sizes!r}; valid are {', '.join(SIZES)}")

    @property
    def name(self) -> str:
        """Such as ``131072×2048×7168, 8 even groups``."""
        groups = "1 group" if self.groups == 1 else f"{self.groups} {self.sizes} groups"
        return f"{self.m}×{self.n}×{self.k}, {groups}"

    @property
    def mnkg(self) -> tuple[int, int, int, int]:
        """Rows, output features, input features and groups."""
        return self.m, self.n, self.k, self.groups


# w1 or w3 (TorchTitan's names) of experts on a rank with 8 of them; w2 has n and k changed over.
_671B, _16B = Case(m=131072, n=2048, k=7168, groups=8), Case(m=131072, n=1408, k=2048, groups=8)
CASES = (
    *(replace(_671B, m=m) for m in (16384, 32768, 65536, 131072)),
    replace(_671B, n=7168, k=2048),
    *(replace(_16B, m=m) for m in (65536, 131072)),
    replace(_16B, n=2048, k=1408),
    replace(_671B, m=4096),
    replace(_16B, m=16384),
    *(replace(_671B, m=65536, sizes=sizes) for sizes in ("skewed", "random")),
    *(replace(_671B, m=65536, groups=groups) for groups in (1, 32)),
)


def parse_case(text: str) -> Case:
    """A case from ``M,N,K,G`` or ``M,N,K,G,skewed``; :class:`BadInput` for anything else.

    Example:
        >>> parse_case("4096,2048,7168,8").groups
        8
    """
    numbers, rest = text.split(",")[:4], text.split(",")[4:]
    if len(numbers) < 4 or len(rest) > 1 or not all(number.strip().isdecimal() for number in numbers):
        raise BadInput(f"cannot read the shape {text!r}; write M,N,K,G or M,N,K,G,{'|'.join(SIZES)}: 65536,2048,7168,8")
    m, n, k, groups = map(int, numbers)
    sizes = rest[0].strip() if rest else "even"
    return Case(m=m, n=n, k=k, groups=groups, sizes=sizes)  # type: ignore[arg-type]  # checked by Case


def group_sizes(case: Case, *, block: int = 1) -> tuple[int, ...]:
    """Rows of each group, padded up to a multiple of ``block``; every block pads the same draw.

    Example:
        >>> group_sizes(Case(m=10, n=32, k=32, groups=3))
        (4, 3, 3)
    """
    random = np.random.default_rng(SEED)
    if case.sizes == "even":
        each, more = divmod(case.m, case.groups)
        drawn = np.array([each + (group < more) for group in range(case.groups)])
    else:
        alpha = np.full(case.groups, DIRICHLET)
        chances = random.dirichlet(alpha) if case.sizes == "skewed" else np.full(case.groups, 1 / case.groups)
        drawn = random.multinomial(case.m, chances)
    return tuple(int(-(-rows // block) * block) for rows in drawn)


# The result


@dataclass(frozen=True, kw_only=True)
class GroupedGemmResult:
    """One machine's measurement."""

    stamp: str  # where the figures come from, for a figure's title: ``measured on …, date, versions``
    rows: pd.DataFrame  # for each case, precision and pass; times in µs

    def speedups(self, precision: str) -> pd.DataFrame:
        """Times of forward and backward in a precision beside those of BF16.

        A row for each case that has both: its shape, ``bf16_us``, ``low_us``, their rates, and ``speedup``.
        """
        whole = self.rows[self.rows["pass"].eq("forward+backward")]
        columns = [*SHAPE, "median_us", "iqr_us", "tflops"]
        bf16, low = (whole[whole["precision"] == name][columns] for name in ("bf16", precision))
        both = bf16.merge(low, on=SHAPE, suffixes=("_bf16", "_low"))
        both = both.rename(columns={"median_us_bf16": "bf16_us", "median_us_low": "low_us"})
        return both.assign(speedup=both["bf16_us"] / both["low_us"])


def obtain(
    how: Literal["run", "replay"], *, path: str = "", precision: GroupedPrecision = "fp8", shapes: str = ""
) -> GroupedGemmResult:
    """Run the experiment on this machine's GPU, or read what a run left.

    Args:
        how: ``run`` or ``replay``; a machine without a GPU can only replay.
        path: file that a run writes and a replay reads; empty is ``outputs/grouped_gemm.json`` for a run and the stored
            measurement for a replay.
        precision: that a run compares with BF16.
        shapes: that a run measures, ``M,N,K,G`` separated by semicolons; empty for the experiment's own.

    Raises:
        BadInput: for a shape or a file that is none.
        NoKernels: for a run on a machine that cannot time the precision.
    """
    if how == "replay":
        return read_result(path) if path else stored()
    from moelab.micro.grouped_gemm_run import run

    cases = [parse_case(text.strip()) for text in shapes.split(";")] if shapes else CASES
    file = Path(path or "outputs/grouped_gemm.json")
    run(cases, file, ("bf16", precision))
    return read_result(file)


def stored() -> GroupedGemmResult:
    """The measurement on an H100 that comes with the package; what is shown of it is a replay and says so."""
    return read_result(str(resources.files("moelab.data.measured") / STORED))


def read_result(path: Path | str) -> GroupedGemmResult:
    """Read a file that a run wrote; :class:`BadInput` if it is none."""
    import pandas as pd  # only here: a projection takes names from this module and has no tables

    try:
        content = read_json(Path(path))
        if content["schema"] != SCHEMA:
            raise BadInput(f"{path} has schema {content['schema']}; this version reads schema {SCHEMA}")
        rows = pd.DataFrame(content["rows"]).astype(dict.fromkeys(("median_us", "iqr_us", "tflops"), float))
        packages = content["versions"]
        versions = [f"{name} {packages[name]}" for name in ("torch", "torchao") if packages.get(name)]
        stamp = f"{content['label']} on {content['hardware']['gpu']}, {', '.join([content['date'], *versions])}"
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error}. Give a file that a run wrote") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:  # something else is in the place of a table
        raise BadInput(f"{path} is not a result of the grouped-GEMM experiment: {error!r}") from error
    return GroupedGemmResult(stamp=stamp, rows=rows)
