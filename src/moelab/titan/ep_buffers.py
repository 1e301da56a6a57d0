"""Communication buffers for one micro-batch instead of a whole batch.

DeepEP, HybridEP and MinimalAsyncEP allocate their buffer once, for the most tokens that a rank ever dispatches at a
time. TorchTitan 0.3.0 takes the tokens of its whole local batch for that, and refuses a smaller number. Under pipeline
parallelism, however, a rank dispatches one micro-batch at a time: with a local batch of 64 sequences and micro-batches
of one, the buffer would be 64 times too large. The number is corrected after TorchTitan has set it: for HybridEP and
MinimalAsyncEP by the override here, for DeepEP by the one that puts moelab's dispatcher in place
(:mod:`moelab.deepep.dispatcher`). Both can go when TorchTitan counts micro-batches. What the buffers take is in
:mod:`moelab.memory.peak`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torchtitan.config.override import override
from torchtitan.models.common.token_dispatcher import BaseEPTokenDispatcher

from moelab.experiment import Experiment

ONE_MICROBATCH = "moelab.titan.ep_buffers.one_microbatch"
"""Name for TorchTitan's ``override.imports``."""


def tokens_of_a_microbatch(experiment: Experiment) -> int:
    """Tokens that a rank dispatches at a time under pipeline parallelism; context and tensor axes share a sequence.

    >>> tokens_of_a_microbatch(Experiment(seq_len=8192, microbatch=1, tp=2, pp=2, local_batch=64))
    4096
    """
    return experiment.microbatch * experiment.seq_len // (experiment.cp * experiment.tp)


@override(target=BaseEPTokenDispatcher.Config, description="buffers for one micro-batch under pipeline parallelism")
def one_microbatch(config: BaseEPTokenDispatcher.Config, *, tokens: int) -> Any:
    """Set the most tokens of a dispatch where the dispatcher has such a setting.

    Args:
        config: any dispatcher with expert parallelism.
        tokens: as :func:`tokens_of_a_microbatch` gives them.
    """
    if not hasattr(config, "num_max_tokens_per_rank"):
        return config
    return dataclasses.replace(config, num_max_tokens_per_rank=tokens)
