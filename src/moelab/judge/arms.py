"""How an arm's folder-safe name, and seeds, read in a sentence, a table or a legend."""

from __future__ import annotations

from collections.abc import Collection

from moelab.experiment import Experiment, ShapeChanges

PRECISIONS = {"bf16": "BF16", "fp8": "FP8", "mxfp8": "MXFP8", "nvfp4": "NVFP4"}
BACKENDS = {
    "standard": "standard all-to-all",
    "deepep": "DeepEP",
    "hybridep": "HybridEP",
    "minimal_async_ep": "minimal async EP",
}


def base_arm(arm: str) -> tuple[str, str]:
    """Split an arm's name into ``<precision>_<backend>`` and what follows it; ``(arm, "")`` for another kind of name.

    Example:
        >>> base_arm("mxfp8_standard_wgrad-bf16")
        ('mxfp8_standard', 'wgrad-bf16')
    """
    # By name and not by "_": minimal_async_ep has some of its own.
    for precision in PRECISIONS:
        for backend in BACKENDS:
            base = f"{precision}_{backend}"
            if arm == base or arm.startswith(f"{base}_"):
                return base, arm[len(base) + 1 :]
    return arm, ""


def arm_label(arm: str) -> str:
    """Name an arm in words; another kind of name comes back unchanged. Nothing is escaped for HTML.

    Example:
        >>> arm_label("mxfp8_standard")
        'MXFP8 + standard all-to-all'
        >>> arm_label("mxfp8_deepep_wgrad-bf16_round-robin")
        'MXFP8 + DeepEP (wgrad BF16, round-robin)'
        >>> arm_label("bf16_standard_activation-checkpoint-full_n-layers-3")
        'BF16 + standard all-to-all (activation checkpoint full, n layers 3)'
    """
    base, rest = base_arm(arm)
    precision, _, backend = base.partition("_")
    if precision not in PRECISIONS or backend not in BACKENDS:
        return arm
    label = f"{PRECISIONS[precision]} + {BACKENDS[backend]}"
    if not rest:
        return label
    fields = [*Experiment.model_fields, *ShapeChanges.model_fields, "dispatch"]
    hyphenated = sorted((field.replace("_", "-") for field in fields), key=len, reverse=True)  # ep-kernels before ep
    # Values may hold hyphens too (`lr-1e-05`), so a part is read by the fields' names and not split at them.
    details = []
    for part in rest.split("_"):
        name = next((name for name in hyphenated if part.startswith(f"{name}-")), "")
        value = part.removeprefix(f"{name}-")
        details.append(f"{name.replace('-', ' ')} {PRECISIONS.get(value, value)}" if name else part)
    return f"{label} ({', '.join(details)})"


def contrast(arm: str, other: str) -> tuple[str, str, str]:
    """Name two arms by what sets them apart: words for each, and for the precision or backend that they share, if any.

    Example:
        >>> contrast("mxfp8_standard", "bf16_standard")
        ('MXFP8', 'BF16', 'standard all-to-all')
        >>> contrast("mxfp8_deepep", "bf16_standard")
        ('MXFP8 + DeepEP', 'BF16 + standard all-to-all', '')
        >>> contrast("bf16_standard_lr-0.0003", "bf16_standard")
        ('BF16 (lr 0.0003)', 'BF16', 'standard all-to-all')
    """
    labels = arm_label(arm), arm_label(other)
    # The parts of "MXFP8 + DeepEP (wgrad BF16)"; of another kind of name there is the first alone.
    parts = [tuple(part for half in label.split(" + ", 1) for part in half.split(" (", 1)) for label in labels]
    (precision, *rest), (other_precision, *other_rest) = parts
    if labels[0] == labels[1] or not rest or not other_rest:
        return *labels, ""
    details, other_details = (f" ({own[1]}" if len(own) > 1 else "" for own in (rest, other_rest))
    shared_details = details if details == other_details else ""
    if not shared_details:
        precision, other_precision = precision + details, other_precision + other_details
    if rest[0] == other_rest[0]:
        return precision, other_precision, rest[0] + shared_details
    if precision == other_precision:
        return rest[0] + shared_details, other_rest[0] + shared_details, precision
    return *labels, ""


def seeds_words(n: int) -> str:
    """``1 seed``, ``3 seeds``."""
    return f"{n} seed{'' if n == 1 else 's'}"


def seed_names(seeds: Collection[int]) -> str:
    """``seed 1``, ``seeds 1, 4``."""
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, sorted(seeds)))}"
