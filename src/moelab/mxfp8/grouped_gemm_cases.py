"""What the grouped-GEMM experiment measures: shapes, group sizes as routing makes them, checks before any timing.

One case is the product of a routed expert's weight with the rows of all experts of a rank, forward and backward:

=========  ==============================  =====================================
forward    (M, K) × (G, K, N) → (M, N)     rows by input features
dgrad      (M, N) × (G, N, K) → (M, K)     the gradient of the rows
wgrad      (N, M) × (M, K) → (G, N, K)     the gradient of the weights, a product for each group
=========  ==============================  =====================================

Letters: M rows of all groups together, N output features, K input features, G groups (local experts).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from moelab.errors import BadInput
from moelab.hardware import GROUP_PADDING

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

    @property
    def flops(self) -> int:
        """Multiplications and additions of one of the three products."""
        return 2 * self.m * self.n * self.k

    @property
    def elements(self) -> dict[str, int]:
        """Elements of ``rows``, ``weights`` and ``gradient``, which casts read."""
        return {"rows": self.m * self.k, "weights": self.groups * self.n * self.k, "gradient": self.m * self.n}


def parse_case(text: str) -> Case:
    """A case from ``M,N,K,G`` or ``M,N,K,G,skewed``; :class:`BadInput` for anything else.

    Example:
        >>> parse_case("4096,2048,7168,8").groups
        8
    """
    parts = text.replace("x", ",").split(",")
    numbers, rest = parts[:4], parts[4:]
    if len(numbers) < 4 or len(rest) > 1 or not all(number.strip().isdecimal() for number in numbers):
        raise BadInput(f"cannot read the shape {text!r}; write M,N,K,G or M,N,K,G,{'|'.join(SIZES)}: 65536,2048,7168,8")
    m, n, k, groups = map(int, numbers)
    sizes = rest[0].strip() if rest else "even"
    return Case(m=m, n=n, k=k, groups=groups, sizes=sizes)  # type: ignore[arg-type]  # checked by Case


def require_divisible(case: Case, precision: GroupedPrecision) -> None:
    """Refuse dimensions that the kernels of a precision cannot take: :class:`BadInput` names the nearest valid one."""
    block = FEATURE_BLOCK[precision]
    # N counts as K does: backward sums over it.
    for name, value in (("k", case.k), ("n", case.n)):
        if value % block:
            nearest = max(1, round(value / block)) * block
            raise BadInput(f"{name} is {value}: {precision} needs a multiple of {block}, the nearest is {nearest}")


def group_sizes(case: Case, *, block: int = 1) -> tuple[int, ...]:
    """Rows of each group; the draw is the same for every block, so that all pad the same routing.

    Each group is padded up to a multiple of ``block``; an empty group stays empty.

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
    # Padded after the draw, so that every block size pads the same routing.
    return tuple(int(-(-rows // block) * block) for rows in drawn)


EXPERTS_671B = Case(m=131072, n=2048, k=7168, groups=8)
"""A 671B expert's w1 or w3 (TorchTitan's names) on a rank with 8 of its 256 experts."""
EXPERTS_16B = Case(m=131072, n=1408, k=2048, groups=8)
"""A 16B expert's w1 or w3 on a rank with 8 of its 64 experts."""


def transposed(case: Case) -> Case:
    """The case of w2, which leads back from the experts' hidden dimension."""
    return replace(case, n=case.k, k=case.n)


CASES = (
    # In the order of importance: the time may end before the list does. The first seven are the earlier measurement.
    replace(EXPERTS_671B, m=16384),
    replace(EXPERTS_671B, m=32768),
    replace(EXPERTS_671B, m=65536),
    EXPERTS_671B,
    transposed(EXPERTS_671B),
    replace(EXPERTS_16B, m=65536),
    EXPERTS_16B,
    transposed(EXPERTS_16B),
    replace(EXPERTS_671B, m=4096),
    replace(EXPERTS_16B, m=16384),
    replace(EXPERTS_671B, m=65536, sizes="skewed"),
    replace(EXPERTS_671B, m=65536, groups=1),
    replace(EXPERTS_671B, m=65536, groups=32),
    replace(EXPERTS_671B, m=65536, sizes="random"),
)
QUICK = (CASES[0], CASES[5])
