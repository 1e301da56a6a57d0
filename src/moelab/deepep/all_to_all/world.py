"""The ranks of the experiment, the libraries that are installed, and their buffers."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
from torch import distributed as dist

from moelab.deepep.all_to_all.arms import Mover, Tokens
from moelab.deepep.all_to_all.deepep import DeepEP
from moelab.deepep.all_to_all.hybridep import HybridEP
from moelab.deepep.all_to_all.plan import Arm, Backend, Size
from moelab.deepep.all_to_all.standard import Standard
from moelab.errors import MoelabError

TIMEOUT_S = 100
"""DeepEP gives up on a lost peer after this: a peer may still be compiling a kernel."""
COLLECTIVE_TIMEOUT_S, CONTROL_TIMEOUT_S = 150, 300
Result = TypeVar("Result")


class ArmFailed(MoelabError):
    """An arm does not run here, or does not move tokens right."""


@dataclass(kw_only=True)
class World:
    """This process among the ranks: ``group`` moves tokens, ``control`` (gloo) agrees on what to do next."""

    device: torch.device
    group: dist.ProcessGroup
    control: dist.ProcessGroup
    rank: int
    ranks: int

    def everywhere(self, mine: Any) -> list[Any]:
        """A value of every rank."""
        values: list[Any] = [None] * self.ranks
        dist.all_gather_object(values, mine, group=self.control)
        return values

    def together(self, call: Callable[[], Result]) -> Result:
        """Do one step that all ranks do; if it fails on one, all of them give it up.

        Raises:
            ArmFailed: on every rank, with the first error.
        """
        problem = result = None
        try:
            result = call()
            if self.device.type == "cuda":
                torch.cuda.synchronize()  # kernels fail late
        except Exception as failure:  # whatever a library raises belongs into the row of its arm
            problem = f"rank {self.rank}: {type(failure).__name__}: {failure}"[:500]
        problems = [one for one in self.everywhere(problem) if one]
        if problems:
            raise ArmFailed(problems[0])
        return cast(Result, result)

    def say(self, text: str) -> None:
        """Progress, from the first rank."""
        if self.rank == 0:
            print(text, file=sys.stderr, flush=True)  # noqa: T201


@dataclass(kw_only=True)
class Libraries:
    """What can move tokens here: makers of buffers, and for the rest why not."""

    elastic: Callable[..., Any] | None = None
    hybrid: Callable[..., Any] | None = None
    found: dict[str, str] = field(default_factory=dict)

    @property
    def backends(self) -> tuple[Backend, ...]:
        """Those that are installed."""
        deepep: tuple[Backend, ...] = ("deepep",) if self.elastic else ()
        hybridep: tuple[Backend, ...] = ("hybridep",) if self.hybrid else ()
        return ("standard", *deepep, *hybridep)


def one_node() -> bool:
    """Whether all ranks share this node, by the variables that torchrun sets."""
    return os.environ.get("WORLD_SIZE") == os.environ.get("LOCAL_WORLD_SIZE")


def open_world(device: str, *, init_method: str | None = None, rank: int = -1, ranks: int = -1) -> World:
    """Join the process group.

    Args:
        device: ``cuda`` or ``cpu``.
        init_method: None takes torchrun's variables.
        rank: of this process, where they are not used.
        ranks: of all processes, likewise.
    """
    if device == "cuda":
        local = int(os.environ.get("LOCAL_RANK", max(rank, 0)))
        torch.cuda.set_device(local)
        here = torch.device("cuda", local)
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # four small kernels need no pool of processes
        if one_node():
            # DeepEP 2.1.0 asks for GPU-initiated networking even where all ranks share a node that has none.
            os.environ.setdefault("EP_DISABLE_GIN", "1")
    else:
        here = torch.device("cpu")
        torch.set_num_threads(1)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        init_method=init_method,
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
        device_id=here if device == "cuda" else None,
    )
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=CONTROL_TIMEOUT_S))
    assert dist.group.WORLD is not None
    # DeepEP takes over NCCL's communicator, which exists only after a first collective.
    dist.all_reduce(torch.zeros(1, device=here))
    return World(
        device=here, group=dist.group.WORLD, control=control, rank=dist.get_rank(), ranks=dist.get_world_size()
    )


def open_libraries(device: str) -> Libraries:
    """Import what is installed; on a CPU there is the standard all-to-all alone."""
    libraries = Libraries()
    if device != "cuda":
        libraries.found = {"deepep": "needs GPUs", "hybridep": "needs GPUs"}
        return libraries
    for name, attribute in (("deepep", "ElasticBuffer"), ("hybridep", "HybridEPBuffer")):
        try:
            deep_ep = importlib.import_module("deep_ep")
            maker = getattr(deep_ep, attribute)
        except Exception as error:  # an import of compiled code fails in many ways; each is a finding
            libraries.found[name] = f"not here: {type(error).__name__}: {error}"[:300]
            continue
        libraries.found[name] = str(getattr(deep_ep, "__version__", "version unknown"))
        if name == "deepep":
            libraries.elastic = maker
        else:
            libraries.hybrid = maker
    return libraries


class Buffers:
    """One communication buffer of each library at a time, for the size at hand."""

    def __init__(self, world: World, libraries: Libraries) -> None:
        self.world, self.libraries = world, libraries
        self.size: Size | None = None
        self.elastic: Any = None
        self.hybrid: Any = None

    def mover(self, arm: Arm, size: Size, tokens: Tokens) -> Mover:
        """An arm on the buffer of its library."""
        ranks = self.world.ranks
        if size != self.size:
            self.close()
            self.size = size
        if arm.backend == "standard":
            return Standard(tokens, self.world.group)
        if arm.backend == "deepep":
            self.elastic = self.elastic or self._open_elastic(size)
            return DeepEP(arm, tokens, self.elastic, max_tokens=size.tokens, ranks=ranks)
        self.hybrid = self.hybrid or self._open_hybrid(size)
        return HybridEP(tokens, self.hybrid, ranks=ranks)

    def close(self) -> None:
        """Give the buffers' memory back."""
        if self.elastic is not None and hasattr(self.elastic, "destroy"):
            self.elastic.destroy()
        self.elastic = self.hybrid = None

    def _open_elastic(self, size: Size) -> Any:
        assert self.libraries.elastic is not None
        return self.libraries.elastic(
            self.world.group,
            num_max_tokens_per_rank=size.tokens,
            hidden=size.hidden,
            num_topk=size.top_k,
            explicitly_destroy=True,
            num_cpu_timeout_secs=TIMEOUT_S,
            num_gpu_timeout_secs=TIMEOUT_S,
        )

    def _open_hybrid(self, size: Size) -> Any:
        assert self.libraries.hybrid is not None
        return self.libraries.hybrid(
            group=self.world.group,
            hidden_dim=size.hidden,
            max_num_of_tokens_per_rank=size.tokens,
            num_local_experts=size.experts // self.world.ranks,
        )
