"""One rule: a predicate that a search can afford, and the words for a person when it is broken."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any, get_args

from moelab.experiment import EPBackend, Experiment, Precision
from moelab.layout.facts import Facts
from moelab.layout.schedule import SCHEDULES


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One rule of legality.

    Attributes:
        name: short name, for tests and tables.
        factor: field of the experiment that is named as the one at fault; what else could change is in ``why``.
        holds: whether a candidate keeps the rule; it must be true where another rule leaves nothing to judge.
        why: what is wrong, without the factor and without the choices.
        shapes_layout: whether no layout can be resolved without it.
        offers_choices: whether the values of ``factor`` that would do are listed; the others say it in ``why``.
    """

    name: str
    factor: str
    holds: Callable[[Facts], bool]
    why: Callable[[Facts], str]
    shapes_layout: bool = False
    offers_choices: bool = True

    def explain(self, facts: Facts) -> str:
        """The reason as a sentence: the factor, what was given, what is wrong, and the legal choices."""
        said = f"{self.factor} is {given(facts, self.factor)}: {self.why(facts)}"
        if not self.offers_choices:
            return said
        choices = self.choices(facts)
        if not choices:
            return f"{said}. No {self.factor} is legal while the other fields stay as they are"
        return f"{said}. Legal {self.factor}: {', '.join(map(str, choices))}"

    def choices(self, facts: Facts) -> list[Any]:
        """Values of the factor that keep every rule of this factor, and every other rule that is kept now."""
        from moelab.layout.rules import RULES

        kept = [rule for rule in RULES if rule.factor == self.factor or rule.holds(facts)]
        options = ((value, facts.vary(self.factor, value)) for value in candidates(facts, self.factor))
        return [value for value, changed in options if all(rule.holds(changed) for rule in kept)]


def given(facts: Facts, factor: str) -> Any:
    """The value of a field as the experiment gives it."""
    if factor == "dp_shard":
        return facts.dp_shard_given
    value = getattr(facts if hasattr(facts, factor) else facts.experiment, factor)
    return value.value if isinstance(value, Enum) else value


def candidates(facts: Facts, factor: str) -> Iterable[Any]:
    """Values that a field could have, most of them illegal."""
    if factor == "ep":
        return divisors(facts.shape.num_experts)
    if factor == "tp":
        return divisors(facts.shape.n_heads)
    if factor == "microbatch":
        return divisors(facts.local_batch)
    if factor in ("pp", "cp", "dp_replicate", "dp_shard"):
        return divisors(facts.world_size)
    if factor == "pp_schedule":
        return tuple(SCHEDULES)
    if factor in ("ep_backend", "precision"):
        return tuple(EPBackend if factor == "ep_backend" else Precision)
    return get_args(Experiment.model_fields[factor].annotation)


@lru_cache(maxsize=4096)
def divisors(number: int) -> tuple[int, ...]:
    """Divisors in rising order.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    small = [value for value in range(1, int(number**0.5) + 1) if number % value == 0]
    return tuple(sorted({*small, *(number // value for value in small)}))
