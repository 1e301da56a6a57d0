"""What training costs at a projected speed: GPU-hours, days, money and energy."""

from __future__ import annotations

from dataclasses import dataclass

from moelab.errors import BadInput
from moelab.projection.project import Projection

DEEPSEEK_TOKENS = 14.8e12
"""Tokens that DeepSeek-V3 was trained on (its technical report)."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of training on ``tokens`` tokens.

    Attributes:
        gpu_hours: of all GPUs.
        days: of wall time, without interruptions.
        price: in the currency of the price of an hour.
        energy_mwh: of the GPUs' share of the facility, MWh.
    """

    gpu_hours: float
    days: float
    price: float
    energy_mwh: float


def cost(
    projection: Projection,
    *,
    price_per_gpu_hour: float,
    watts_per_gpu: float,
    tokens: float = DEEPSEEK_TOKENS,
) -> Cost:
    """Cost of a training run at a projected speed.

    Args:
        projection: gives the speed and the number of GPUs.
        price_per_gpu_hour: of one GPU, in any currency.
        watts_per_gpu: drawn for each GPU, its share of host, network and cooling included.
        tokens: to train on.

    Raises:
        BadInput: for a number that is not positive.
    """
    given = {"price_per_gpu_hour": price_per_gpu_hour, "watts_per_gpu": watts_per_gpu, "tokens": tokens}
    for name, value in given.items():
        if not 0 < value < float("inf"):
            raise BadInput(f"{name} is {value}; give a positive number")
    gpu_hours = tokens / projection.tps / 3600
    return Cost(
        gpu_hours=gpu_hours,
        days=gpu_hours / projection.job.gpus / 24,
        price=gpu_hours * price_per_gpu_hour,
        energy_mwh=gpu_hours * watts_per_gpu / 1e6,
    )
