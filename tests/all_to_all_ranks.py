"""One of two gloo ranks that put the all-to-all experiment through its paces; the first writes what it saw.

DeepEP is a stand-in: moelab's for the expanded layout, and here one for the dense layout made from it.

    python all_to_all_ranks.py RANK FOLDER
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

from moelab.deepep.all_to_all.arms import Tokens
from moelab.deepep.all_to_all.clock import Clock
from moelab.deepep.all_to_all.plan import ROUTINGS, SMALL, Arm, Group, plan
from moelab.deepep.all_to_all.report import run
from moelab.deepep.all_to_all.round_trip import make_tokens, round_trip
from moelab.deepep.all_to_all.standard import Standard
from moelab.deepep.all_to_all.world import Buffers, Libraries, World, open_world
from moelab.deepep.stand_in import StandInBuffer

RANKS = 2
SIZE = replace(SMALL, tokens=96)


class BothLayouts(StandInBuffer):
    """The stand-in with DeepEP's dense layout too: each token once, with its local experts and their scores."""

    made: ClassVar[list[Any]] = []

    def __init__(self, group: Any, *, num_max_tokens_per_rank: int, hidden: int, num_topk: int, **_: Any) -> None:
        super().__init__(group, num_max_tokens_per_rank=num_max_tokens_per_rank, hidden=hidden, num_topk=num_topk)
        self.made.append(self)

    def get_theoretical_num_sms(self, num_experts: int, num_topk: int) -> int:
        return 6

    def dispatch(self, x: Any, *, do_expand: bool = False, **options: Any) -> Any:
        rows, ids, weights, handle, event = super().dispatch(x, do_expand=True, **options)
        if do_expand:
            return rows, ids, weights, handle, event
        slots = handle.recv_src_metadata[:, 2:].long()
        first = slots.gather(1, (slots >= 0).int().argmax(dim=1, keepdim=True)).flatten()
        ends = torch.tensor(handle.num_recv_tokens_per_expert_list).cumsum(0)
        ids = torch.where(slots >= 0, torch.bucketize(slots, ends, right=True), -1)
        weights = None if weights is None else torch.where(slots >= 0, weights[slots.clamp(min=0)], 0.0)
        handle.do_expand = False
        return (
            tuple(one[first] for one in rows) if isinstance(rows, tuple) else rows[first],
            ids,
            weights,
            handle,
            event,
        )

    def combine(self, x: Any, handle: Any, topk_weights: Any = None, **options: Any) -> Any:
        if handle.do_expand:
            return super().combine(x, handle, topk_weights, **options)
        slots = handle.recv_src_metadata[:, 2:].long()
        first = slots.gather(1, (slots >= 0).int().argmax(dim=1, keepdim=True)).flatten()
        rows = x.new_zeros((handle.num_expanded_tokens, x.shape[1]))
        rows[first] = x
        weights = None
        if topk_weights is not None:
            weights = topk_weights.new_zeros(handle.num_expanded_tokens)
            weights[slots[slots >= 0]] = topk_weights[slots >= 0]
        return super().combine(rows, handle, weights, **options)


class Broken(BothLayouts):
    """DeepEP that returns the wrong sums with 16 SMs, and fails on one rank alone with 24."""

    def combine(self, x: Any, handle: Any, topk_weights: Any = None, **options: Any) -> Any:
        combined, weights, event = super().combine(x, handle, topk_weights, **options)
        if options["num_sms"] == 24 and self.rank == 1:
            raise RuntimeError("an illegal memory access was encountered")
        return combined * (2 if options["num_sms"] == 16 else 1), weights, event


def against_torchtitan(world: World) -> dict[str, bool]:
    """Whether the standard arm does what TorchTitan's dispatcher does, forward and backward, bit for bit."""
    set_spmd_backend("partial_dtensor")
    dispatcher = AllToAllTokenDispatcher.Config(num_experts=SIZE.experts, top_k=SIZE.top_k).build()
    dispatcher.wire_meshes(ep_mesh=DeviceMesh.from_group(world.group, "cpu", mesh_dim_names=("ep",)))
    equal: dict[str, bool] = {}
    for routing in ROUTINGS:
        tokens = make_tokens(SIZE, routing, world)
        x = tokens.x_TD.clone().requires_grad_()
        counts = torch.bincount(tokens.ids_TK.flatten(), minlength=SIZE.experts)
        rows, per_expert, metadata = dispatcher.dispatch(x, tokens.scores_TK, tokens.ids_TK, counts)
        out = dispatcher.combine(rows, metadata, x)
        (grad_rows,) = torch.autograd.grad(out, rows, tokens.x_TD.flip(0), retain_graph=True)
        (grad_x,) = torch.autograd.grad(rows, x, grad_rows)
        mine, clock = Standard(tokens, world.group), Clock(world.device)
        mine_rows = mine.dispatch(clock).data_RD
        mine_grad = mine.combine_backward(tokens.x_TD.flip(0), clock).data_RD
        equal[f"{routing} rows"] = torch.equal(mine_rows, rows)
        equal[f"{routing} counts"] = mine.expert_of_row().bincount(minlength=len(per_expert)).equal(per_expert)
        equal[f"{routing} out"] = torch.equal(mine.combine(mine_rows, clock), out)
        equal[f"{routing} grad rows"] = torch.equal(mine_grad, grad_rows)
        equal[f"{routing} grad x"] = torch.equal(mine.dispatch_backward(mine_grad, clock), grad_x)
    return equal


def arms_agree(world: World) -> dict[str, Any]:
    """Each arm's rows against the standard's, as sets for each expert, and its round trip's error."""
    seen: dict[str, Any] = {}
    buffers = Buffers(world, Libraries(elastic=BothLayouts))
    for routing in ROUTINGS:
        tokens = make_tokens(SIZE, routing, world)
        expected = _by_expert(Standard(tokens, world.group), tokens, world)
        for arm in (arm for group in plan([SIZE], [routing], ["standard", "deepep"], [8]) for arm in group.arms):
            mover = buffers.mover(arm, SIZE, tokens)
            found = _by_expert(mover, tokens, world)
            seen[f"{routing} {arm.name}"] = {
                "rows_equal": [torch.equal(*pair) for pair in zip(found, expected, strict=True)],
                "rows_error": max(float((one - two).abs().max()) for one, two in zip(found, expected, strict=True)),
                "largest": max(float(one.abs().max()) for one in expected),
                "error": round_trip(mover, tokens, world, weighted=arm.precision == "bf16"),
                "received": mover.received(),
            }
    return seen


def _by_expert(mover: Any, tokens: Tokens, world: World) -> list[torch.Tensor]:
    """The rows of each local expert, in an order of their own; a row's first feature tells tokens apart."""
    rows = mover.dispatch(Clock(world.device)).bf16().float()
    expert_R = mover.expert_of_row()
    sorted_rows = []
    for expert in range(SIZE.experts // world.ranks):
        mine, score = rows[expert_R == expert], mover.score_of_row()[expert_R == expert]
        order = score.argsort()  # scores travel unrounded in every arm
        sorted_rows.append(torch.cat([mine[order], score[order, None]], dim=1))
    return sorted_rows


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    world = open_world("cpu", init_method=f"file://{folder}/store", rank=rank, ranks=RANKS)
    seen: dict[str, Any] = {"torchtitan": against_torchtitan(world), "arms": arms_agree(world)}
    groups = plan([SIZE], ["random_balanced", "round_robin"], ["standard", "deepep"], [8])
    good = Libraries(elastic=BothLayouts, found={"deepep": "stand-in"})
    run(groups, world, good, folder / "good.json", repeats=3, budget_s=600)
    before = len(BothLayouts.made)
    run(groups, world, good, folder / "good.json", repeats=3, budget_s=600)  # nothing is missing
    seen["buffers_of_a_second_call"] = len(BothLayouts.made) - before
    swept = Group(size=SIZE, routing="skewed", arms=(Arm(backend="standard"), *_sweep(8, 16, 24)))
    broken = Libraries(elastic=Broken, found={"deepep": "a stand-in that is broken"})
    run([swept], world, broken, folder / "broken.json", repeats=3, budget_s=600)
    run(groups, world, good, folder / "late.json", repeats=3, budget_s=0)
    (folder / f"seen{rank}.json").write_text(json.dumps(seen))


def _sweep(*counts: int) -> list[Arm]:
    return [Arm(backend="deepep", layout="expanded", sms=count) for count in counts]


if __name__ == "__main__":
    main()
