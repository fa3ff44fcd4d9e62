"""Layers that share weights, out of layers that each have their own: the mean of each group's."""

from __future__ import annotations

import torch

from megatron_port.core.config.schema import ModelConfig
from megatron_port.core.dist.state import WEIGHT, StateReader
from megatron_port.tools.compress.axes import layer_of

Box = tuple[int, ...]


class MeanWeights:
    """A reader (``dist.state.StateReader``) of ``model``, whose layers share weights, over the same model without:
    a group's weights are the mean of its layers', in float64. Where they are equal, so are the models."""

    def __init__(self, model: ModelConfig, read: StateReader) -> None:
        self._model, self._read = model, read

    def __call__(
        self, name: str, kind: str, offset: Box, shape: Box, /, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return a slice of a tensor, in the dtype of the source."""
        layer, relative = layer_of(name)
        if layer is None or kind != WEIGHT:
            return self._read(name, kind, offset, shape, out=out)
        group = range(layer, min(layer + self._model.shared_layers, self._model.num_layers))
        first = self._read(f"layers.{layer}.{relative}", kind, offset, shape)
        total = first.double()
        for other in group[1:]:
            total += self._read(f"layers.{other}.{relative}", kind, offset, shape)
        return (total / len(group)).to(first.dtype)
