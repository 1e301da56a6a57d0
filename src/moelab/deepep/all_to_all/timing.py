"""One group of arms: check each, then let them take turns.

An arm that fails is left out on all ranks and its error becomes its row; the others go on.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from moelab.deepep.all_to_all.arms import Mover, Tokens
from moelab.deepep.all_to_all.clock import Clock
from moelab.deepep.all_to_all.count import rates, summarise, traffic
from moelab.deepep.all_to_all.plan import Arm, Group
from moelab.deepep.all_to_all.round_trip import make_tokens, round_trip
from moelab.deepep.all_to_all.routing import load_imbalance, rows_to_ranks
from moelab.deepep.all_to_all.world import ArmFailed, Buffers, World

WARM_UP = 2
TOLERANCE = {"bf16": 0.02, "fp8": 0.06}
"""Relative error (2-norm) of a round trip that is still rounding: BF16 has 8 bits, E4M3 has 4, and both add up."""


def time_group(
    group: Group, world: World, buffers: Buffers, reference: dict[str, Any], *, repeats: int, until: float
) -> list[dict[str, Any]]:
    """Check and time the arms of a group.

    Args:
        group: what to time; all ranks call this together.
        world: the ranks.
        buffers: of the libraries.
        reference: of :func:`measure_copies`.
        repeats: turns of each arm.
        until: ``time.monotonic()`` after which no further arm is prepared.

    Returns:
        Rows for the file, the same on all ranks.
    """
    tokens = make_tokens(group.size, group.routing, world)
    shared = _describe(group, tokens, world)
    movers: dict[str, tuple[Arm, Mover]] = {}
    rows: list[dict[str, Any]] = []
    for arm in group.arms:
        late = any(world.everywhere(time.monotonic() > until))
        try:
            if late:
                raise ArmFailed("not run: the time was over")
            movers[arm.name] = (arm, _prepare(arm, group, tokens, world, buffers))
        except ArmFailed as failure:
            rows.append({**shared, **_arm_columns(arm), "error": str(failure)})
            world.say(f"  {arm.name}: {failure}")
    times = _take_turns(movers, tokens, world, repeats)
    for arm, mover in movers.values():
        rows += [
            _row(shared, arm, mover, operation, times[arm.name][operation], world, reference)
            for operation in arm.operations
        ]
    return rows


def _prepare(arm: Arm, group: Group, tokens: Tokens, world: World, buffers: Buffers) -> Mover:
    """An arm whose round trip is right on every rank, and whose rows arrive in the numbers that the routing says."""
    began = time.monotonic()
    mover = world.together(lambda: buffers.mover(arm, group.size, tokens))
    error = max(world.everywhere(round_trip(mover, tokens, world, weighted=arm.precision == "bf16")))
    if not error < TOLERANCE[arm.precision]:
        raise ArmFailed(f"the round trip is wrong: relative error {error:.3g}, allowed {TOLERANCE[arm.precision]}")
    counted = rows_to_ranks(tokens.ids_TK, experts=tokens.experts, ranks=world.ranks)
    sent_PP = world.everywhere(counted["copies" if arm.backend == "standard" else "once"])
    received, expected = mover.received(), [row[world.rank] for row in sent_PP]
    if not all(world.everywhere(received in (None, expected))):
        raise ArmFailed(f"rows from each rank: {received} by the library, {expected} by the routing")
    world.say(f"  {arm.name}: ready after {time.monotonic() - began:.1f} s")
    return mover


def _take_turns(
    movers: dict[str, tuple[Arm, Mover]], tokens: Tokens, world: World, repeats: int
) -> dict[str, dict[str, list[dict[str, float]]]]:
    """Parts of every operation of every arm in each repetition, arm after arm in each."""
    clock = Clock(world.device)
    grad_TD = tokens.x_TD.flip(0)
    times: dict[str, dict[str, list[dict[str, float]]]] = {
        name: {operation: [] for operation in arm.operations} for name, (arm, _) in movers.items()
    }

    for _ in range(repeats + WARM_UP):
        for name, (arm, mover) in movers.items():
            given: Any = None
            for operation in arm.operations:
                call = getattr(mover, operation)
                clock.start(world.group)
                if operation == "dispatch":
                    given = call(clock)
                elif operation == "combine_backward":
                    given = call(grad_TD, clock)
                else:  # experts and their backward would come between: their rows are those that arrived
                    call(given.data_RD, clock)
                times[name][operation].append(clock.parts_us())
    return times


def _describe(group: Group, tokens: Tokens, world: World) -> dict[str, Any]:
    counted = world.everywhere(rows_to_ranks(tokens.ids_TK, experts=tokens.experts, ranks=world.ranks))
    imbalance = world.everywhere(load_imbalance(tokens.ids_TK, experts=tokens.experts))
    total = world.ranks * group.size.tokens
    return {
        "group": group.name,
        "size": group.size.name,
        **{name: value for name, value in asdict(group.size).items() if name != "name"},
        "ranks": world.ranks,
        "routing": group.routing,
        "ranks_of_a_token": round(sum(sum(one["once"]) for one in counted) / total, 4),
        "busiest_expert_over_mean": round(max(imbalance), 3),
        "_sent": counted,
    }


def _arm_columns(arm: Arm) -> dict[str, Any]:
    return {"arm": arm.name, "backend": arm.backend, "precision": arm.precision, "layout": arm.layout}


def _row(
    shared: dict[str, Any],
    arm: Arm,
    mover: Mover,
    operation: str,
    parts: Sequence[dict[str, float]],
    world: World,
    reference: dict[str, Any],
) -> dict[str, Any]:
    """One line of the table: the slowest rank of each repetition, then the median of repetitions."""
    by_rank: list[list[dict[str, float]]] = world.everywhere(list(parts[WARM_UP:]))
    slowest = [max(turn, key=lambda one: sum(one.values())) for turn in zip(*by_rank, strict=True)]
    names = dict.fromkeys(name for one in slowest for name in one)
    travels = arm.precision if operation in ("dispatch", "combine_backward") else "bf16"
    counted = shared["_sent"]
    sent_PP = [one["copies" if arm.backend == "standard" else "once"] for one in counted]
    if operation in ("combine", "dispatch_backward"):  # the way back
        sent_PP = [list(column) for column in zip(*sent_PP, strict=True)]
    row = {
        **shared,
        **_arm_columns(arm),
        "sms": getattr(mover, "sms", None),
        "sms_chosen_by": "caller" if arm.sms else "library",
        "operation": operation,
        **summarise([sum(one.values()) for one in slowest]),
        "parts_us": {name: summarise([one[name] for one in slowest])["us_median"] for name in names},
        "repeats": len(slowest),
        **traffic(sent_PP, logical_rows=shared["tokens"] * shared["top_k"], hidden=shared["hidden"], precision=travels),
        "error": None,
    }
    return {**row, **rates(row, reference)}
