"""Spec of a feed-forward block whose gate and whose result are scaled (Falcon-H1). Plain Python, without torch."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_port.core.config.model import ModelConfig
from megatron_port.core.model.spec import MLPSpec


@dataclass(frozen=True, kw_only=True)
class ScaledMLPSpec(MLPSpec):
    """SwiGLU with factors of the gate, before its activation, and of the result."""

    module = "megatron_port.ext.mixers.scaled_mlp:ScaledMLP"
    multipliers: tuple[float, ...]

    def keeps_gate(self, torchs: bool) -> bool:
        return False


def scaled_mlp(plain: MLPSpec, model: ModelConfig) -> ScaledMLPSpec:
    """Return a block with the model's factors."""
    return ScaledMLPSpec(**vars(plain), multipliers=model.mlp_multipliers)
