"""FP8 row-wise experts with any dispatcher that pads, moelab's DeepEP one included.

TorchTitan 0.3.0's converter swaps the dispatcher for a padded one and refuses DeepEP's, whose padded form comes by an
override after conversion. The experts are the same: torchao's row-wise FP8 grouped GEMMs on SM90 and SM100.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchtitan.components.quantization import Float8GroupedExpertsConverter
from torchtitan.components.quantization.float8 import _get_float8_grouped_experts_cls
from torchtitan.config.override import derive
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.common.token_dispatcher import DeepEPTokenDispatcher


class FP8Converter(Float8GroupedExpertsConverter):
    """TorchTitan's converter that lets a DeepEP dispatcher pass."""

    @dataclass(kw_only=True, slots=True)
    class Config(Float8GroupedExpertsConverter.Config):
        """No settings of its own."""

    def convert(self, model_config: Any) -> Any:
        """Convert a model's configuration in place."""
        found = list(model_config.traverse(GroupedExperts.Config))
        if not all(isinstance(row[2].token_dispatcher, DeepEPTokenDispatcher.Config) for row in found):
            return super().convert(model_config)
        for _name, config, parent, attribute in found:
            experts = _get_float8_grouped_experts_cls(type(config)._owner)
            setattr(parent, attribute, derive(config, experts.Config))
        return model_config
