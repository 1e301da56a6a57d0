"""Activation checkpointing that keeps what came over the network.

==================  ==========================================  ==================================================
setting             a layer keeps                               its backward communicates again
==================  ==========================================  ==================================================
``selective``       TorchTitan's choice, and what arrived       no
``full``            its input                                   yes: the dispatch and the combine of the forward,
                                                                as the published run did
``full+dispatch``   its input, and what arrived                 no
==================  ==========================================  ==================================================

``selective`` is TorchTitan's, which saves the results of the communication operators that it knows; the subclass adds
moelab's. ``full+dispatch`` is new: everything is computed again but nothing is sent again, at the price of the rows of
every layer that waits for its backward (``moelab plan`` shows it). What arrived is kept together with the router's
choice: another choice in the recomputation would not match the rows.

TorchTitan 0.3.0's standard dispatcher is an operator whose result can be kept in a compiled model, and on a CPU; in an
uncompiled model on a GPU it is not, and ``moelab plan`` refuses ``full+dispatch`` there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

from moelab.deepep.ops import NAMESPACE

_QUANTISED_PRODUCT = torch.ops.aten._scaled_grouped_mm.default


def communication_ops() -> set[Any]:
    """Moelab's operators whose results are kept: recomputing them would communicate again."""
    library = getattr(torch.ops, NAMESPACE)
    return {library.dispatch.default, library.combine.default}


class CommunicationSavingAC(SelectiveAC):
    """TorchTitan's selective checkpointing, which also saves moelab's dispatch and combine and 8-bit grouped products.

    The products are 2F values a row, which rows in 8 bits, half as large as in BF16, partly pay for. TorchTitan itself
    saves FP8 linears (``_scaled_mm``) but recomputes grouped products.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        """No settings of its own."""

    def get_save_ops(self) -> set[Any]:
        """What TorchTitan saves, moelab's communication, and products in 8 bits."""
        return super().get_save_ops() | communication_ops() | {_QUANTISED_PRODUCT}


class CommunicationSavingFullAC(FullAC):
    """Full checkpointing that communicates once."""

    @dataclass(kw_only=True, slots=True)
    class Config(FullAC.Config):
        """No settings of its own."""

    def _wrap_block(self, module: nn.Module, *, base_fqn: str | None = None) -> nn.Module:
        # The all-to-all is the standard dispatcher's; top-k is the router's choice, to which the kept rows belong.
        theirs = {torch.ops._c10d_functional.all_to_all_single.default, torch.ops.aten.topk.default}
        kept = communication_ops() | theirs
        return checkpoint_wrapper(
            module,
            context_fn=partial(create_selective_checkpoint_contexts, partial(_policy, frozenset(kept))),
            preserve_rng_state=self.config.preserve_rng_state,
            determinism_check=self.config.determinism_check,
            early_stop=False,
            debug=self.config.debug,
        )


def _policy(kept: frozenset[Any], _context: Any, operator: Any, *inputs: Any, **settings: Any) -> CheckpointPolicy:
    """Keep communication, and the row counts that the host reads back for it; recompute the rest."""
    to_host = operator is torch.ops.aten._to_copy.default and str(settings.get("device")) == "cpu" and inputs[0].is_cuda
    # A compiler may keep more where it sees a gain, but may never send again.
    return CheckpointPolicy.MUST_SAVE if to_host or operator in kept else CheckpointPolicy.PREFER_RECOMPUTE
