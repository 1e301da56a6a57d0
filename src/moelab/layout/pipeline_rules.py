"""Pipeline parallelism: schedules, stages and micro-batches.

TorchTitan 0.3.0 checks stages when it splits the model (``_generate_llm_fqn_per_model_part``) and micro-batches when it
builds the schedule, both after every rank has started.
"""

from __future__ import annotations

from moelab.layout.facts import Facts
from moelab.layout.rule import Rule
from moelab.layout.schedule import SCHEDULES, effective_layers


def _schedule(facts: Facts) -> bool:
    return facts.pp == 1 or facts.pp_schedule in SCHEDULES


def _stages(facts: Facts) -> int:
    return 1 if facts.pp == 1 or facts.schedule is None else facts.pp * facts.schedule.stages_per_rank


def _stage_count(facts: Facts) -> bool:
    return _stages(facts) <= effective_layers(facts.shape.n_layers)


def _why_stage_count(facts: Facts) -> str:
    layers = facts.shape.n_layers
    return (
        f"{facts.pp_schedule} makes {_stages(facts)} stages for {effective_layers(layers)} effective layers ({layers} "
        "layers, and one each for the embedding and the output)"
    )


def _whole_batches(facts: Facts) -> bool:
    return facts.pp == 1 or facts.local_batch % facts.microbatch == 0


def _microbatches(facts: Facts) -> bool:
    if facts.pp == 1 or facts.schedule is None or not _whole_batches(facts):
        return True
    return facts.schedule.takes(facts.microbatches, facts.pp)


def _why_microbatches(facts: Facts) -> str:
    schedule = facts.schedule
    assert schedule is not None
    made = f"at microbatch {facts.microbatch} it makes {facts.microbatches} micro-batches"
    least = schedule.least_microbatches(_stages(facts))
    if facts.microbatches < least:
        return (
            f"{made}, and {schedule.name} on pp {facts.pp} needs at least {least}, one for each stage. "
            f"Legal local_batch: {least * facts.microbatch} and more"
        )
    rounds, whole = facts.microbatches // facts.pp, facts.pp * facts.microbatch
    near = facts.local_batch // whole * whole
    return (
        f"{made}, and {schedule.name} on pp {facts.pp} runs them in {rounds} rounds, into which they must divide. "
        f"Legal local_batch: any multiple of {whole}, such as {near} or {near + whole}"
    )


def _split_backward(facts: Facts) -> bool:
    splits = facts.pp > 1 and facts.schedule is not None and facts.schedule.splits_backward
    return not (splits and facts.compile == "model+loss")


def _evaluates(facts: Facts) -> bool:
    in_v = facts.pp > 1 and facts.schedule is not None and facts.schedule.style == "v"
    return not (in_v and facts.experiment.dataset == "python")


PIPELINE_RULES = (
    Rule(
        name="schedule exists",
        factor="pp_schedule",
        holds=_schedule,
        why=lambda facts: "there is no such schedule; names are spelt as TorchTitan spells them",
        shapes_layout=True,
    ),
    Rule(name="stages have layers", factor="pp", holds=_stage_count, why=_why_stage_count, shapes_layout=True),
    Rule(
        name="micro-batches are whole",
        factor="microbatch",
        holds=_whole_batches,
        why=lambda facts: f"pipeline parallelism cuts local_batch {facts.local_batch} into micro-batches of this size",
        shapes_layout=True,
    ),
    Rule(
        name="micro-batches suffice",
        factor="local_batch",
        holds=_microbatches,
        why=_why_microbatches,
        offers_choices=False,
    ),
    Rule(
        name="no split backward when compiled",
        factor="pp_schedule",
        holds=_split_backward,
        why=lambda facts: (
            "it runs dgrad and wgrad apart, which torch 2.14 cannot do with compiled layers (compile is model+loss); "
            "compile=loss or compile=none allow it"
        ),
    ),
    Rule(
        name="V schedules do not evaluate",
        factor="pp_schedule",
        holds=_evaluates,
        why=lambda facts: (
            "dataset=python evaluates held-out text after the last step, which torch 2.14 cannot do under a V "
            "schedule; dataset=c4 only trains"
        ),
    ),
)
