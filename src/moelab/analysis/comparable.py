"""In what runs differ beside what is compared: their other settings, their machines and the versions of their software.

A verdict and a gain are of the arms alone only where all else is the same. What is not known of a run, such as the
machine of one whose ``environment.json`` is damaged, is no difference; it is named where the run is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from moelab.experiment import Experiment
from moelab.runs.collect import Collected
from moelab.runs.settings import spread

ARM_FIELDS = frozenset(
    {
        "seed",
        "precision",
        "mxfp8_kernels",
        "quantize",
        "wgrad",
        "ep_backend",
        "ep_kernels",
        "dispatch_precision",
        "routing",
    }
)
"""What sets two arms apart; every other field should be the same in both."""
NOT_FOR_SPEED = frozenset({"lr", "warmup_steps", "steps", "dataset"})
"""Settings that a step's time does not depend on."""
SPEED_PACKAGES = ("torch", "nvidia-nccl-cu13", "torchtitan", "torchao", "triton", "deep_ep")
LOSS_PACKAGES = ("torch", "torchtitan", "torchao", "triton")


def differing_fields(one: Experiment, other: Experiment) -> dict[str, str]:
    """Fields in which two experiments differ, beside the study's name and the seed: name to words.

    >>> differing_fields(Experiment(lr=2.0e-3), Experiment(lr=3.0e-3, seed=1))
    {'lr': 'lr 0.002 instead of 0.003'}
    """
    return {name: f"{name} {_field(one, name)} instead of {_field(other, name)}" for name in one.differences(other)}


def differing_settings(arm: Experiment, reference: Experiment) -> dict[str, str]:
    """Fields in which two arms differ that make neither of them an arm: name to words."""
    own = ARM_FIELDS | {*arm.arm_fields, *reference.arm_fields}
    return {name: words for name, words in differing_fields(arm, reference).items() if name not in own}


def caveats(runs: Sequence[Collected], reference: Sequence[Collected]) -> tuple[str, ...]:
    """In what an arm's runs differ from the reference's beside what makes them arms, as sentences.

    Args:
        runs: of the arm, alike in all but the seed.
        reference: of the reference.
    """
    settings: dict[str, str] = {}
    for run in runs[:1]:
        for other in reference[:1]:
            if run.experiment is not None and other.experiment is not None:
                settings = differing_settings(run.experiment, other.experiment)
    facts = differing_facts(runs, reference, loss_facts)
    told = [f"The arms also differ in their settings: {', '.join(settings.values())}."] if settings else []
    return (*told, *([f"The runs also differ in what computes the loss: {'; '.join(facts)}."] if facts else []))


def differing_facts(
    runs: Sequence[Collected], reference: Sequence[Collected], facts: Callable[[Collected], Mapping[str, str]]
) -> list[str]:
    """What is known of both groups of runs and is not one value in all of them, in words.

    Args:
        runs: of an arm or a side.
        reference: of what it is held against.
        facts: :func:`speed_facts` or :func:`loss_facts`.
    """
    known, known_reference = [facts(run) for run in runs], [facts(run) for run in reference]
    names = dict.fromkeys(name for one in [*known, *known_reference] for name in one)
    words = []
    for name in names:
        values, others = ([one[name] for one in group if name in one] for group in (known, known_reference))
        if values and others and len({*values, *others}) > 1:
            words.append(f"{name} {spread(values)} against {spread(others)}")
    return words


def speed_facts(run: Collected) -> dict[str, str]:
    """What a run's speed depends on beside its settings; nothing for a machine that is not known."""
    if run.environment is None:
        return {}
    driver = {"driver": found} if (found := run.environment.versions.get("driver")) else {}
    return {
        "machine": run.environment.machine,
        "processor": run.environment.processor,
        **driver,
        **_packages(run, SPEED_PACKAGES),
        "moelab": run.environment.moelab,
    }


def loss_facts(run: Collected) -> dict[str, str]:
    """What rounds a run's loss beside its settings; nothing for a machine that is not known."""
    if run.environment is None:
        return {}
    commit = {"commit": run.environment.git_commit} if run.environment.git_commit else {}
    return {
        "hardware": run.environment.chip,
        **_packages(run, LOSS_PACKAGES),
        "moelab": run.environment.moelab,
        **commit,
    }


def kernel_facts(run: Collected) -> dict[str, str]:
    """Which kernels of a run were emulated."""
    words = {True: "emulated", False: "native"}
    return {"MXFP8 kernels": words[run.emulates_mxfp8], "DeepEP kernels": words[run.emulates_deepep]}


def _packages(run: Collected, names: Iterable[str]) -> dict[str, str]:
    """Versions that are on record: an older record may not speak of a package at all."""
    packages = run.environment.packages if run.environment is not None else {}
    return {name: packages[name] or "not installed" for name in names if name in packages}


def _field(experiment: Experiment, name: str) -> str:
    dimension = name.removeprefix("shape.")
    if dimension == name:
        return str(getattr(experiment, name))
    value = getattr(experiment.shape, dimension) if experiment.shape else None
    return "the model's own" if value is None else str(value)
