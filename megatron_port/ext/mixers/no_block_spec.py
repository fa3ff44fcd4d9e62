"""Layers of a mixer alone (Mamba-2, Nemotron-H): the spec of no feed-forward block. Plain Python."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_port.core.config.model import ModelConfig
from megatron_port.core.layers.spec import LinearSpec, ParameterSpec
from megatron_port.core.model.ops import Op
from megatron_port.core.model.spec import FeedForward


@dataclass(frozen=True, kw_only=True)
class NoFeedForward(FeedForward):
    """A feed-forward block without parameters, which no operation runs."""

    module = "megatron_port.ext.mixers.no_block:NoBlock"

    @property
    def parameters(self) -> tuple[ParameterSpec, ...]:
        """Return none."""
        return ()

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        """Return none."""
        return ()

    @property
    def numel_per_token(self) -> int:
        """Return 0."""
        return 0

    def ops(self, source: str) -> tuple[Op, ...]:
        return ()


def no_block(model: ModelConfig) -> NoFeedForward:
    """Return the spec, the same of all models."""
    return NoFeedForward()
