"""A checkpoint as one of the model that says the same without what only this program knows: factors, shared layers.

Hugging Face's families have neither, so exports are made of this.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from megatron_port.core.checkpoint.reader import Checkpoint
from megatron_port.core.config.dump import as_dict
from megatron_port.core.config.schema import ModelConfig
from megatron_port.core.dist.state import WEIGHT
from megatron_port.core.model.shapes import parameter_shapes
from megatron_port.tools.compress.axes import layer_of
from megatron_port.tools.compress.factor import MultipliedWeights, without_factors
from megatron_port.tools.interop.sidecar import model_of


def plain_model(model: ModelConfig) -> ModelConfig:
    """Return the model of whole matrices, one set for each layer, that computes what ``model`` does."""
    return replace(without_factors(model), shared_layers=1)


class PlainCheckpoint(Checkpoint):
    """The weights of :func:`plain_model`, and the buffers as they are: factored matrices are multiplied out, and each
    layer has a copy of weights that it shares."""

    def __init__(self, of: Checkpoint) -> None:
        state = of.manifest.state
        model = model_of(state.config, str(of.path))
        plain = plain_model(model)
        config: dict[str, Any] = {**state.config, "model": as_dict(plain)}
        super().__init__(of.path, replace(of.manifest, state=replace(state, config=config)))
        self._of, self._shapes = of, parameter_shapes(plain)
        self._model = model
        self._weights = MultipliedWeights(replace(model, shared_layers=1), self._read_owner)

    def _read_owner(
        self, name: str, kind: str, offset: tuple[int, ...], shape: tuple[int, ...], /, *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Read a weight of a layer from the layer whose weights it uses."""
        layer, relative = layer_of(name)
        if layer is not None and kind == WEIGHT:
            name = f"layers.{self._model.owner_of(layer)}.{relative}"
        return self._of.read(name, kind, offset, shape, out=out)

    def names(self, kind: str = WEIGHT) -> Iterator[str]:
        """Yield the names of the plain model's parameters, or of the buffers."""
        return iter(self._shapes) if kind == WEIGHT else super().names(kind)

    def shape(self, name: str, kind: str = WEIGHT) -> tuple[int, ...]:
        """Return the global logical shape."""
        return self._shapes[name] if kind == WEIGHT else super().shape(name, kind)

    def dtype(self, name: str, kind: str = WEIGHT) -> torch.dtype:
        """Return the dtype of what is read."""
        return torch.float32 if kind == WEIGHT else super().dtype(name, kind)

    def read(
        self, name: str, kind: str, offset: tuple[int, ...], shape: tuple[int, ...], /, *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return a slice of a tensor of the plain model (``Checkpoint.read``)."""
        found = self._weights(name, kind, offset, shape)
        return found.float() if kind == WEIGHT else found


def plain(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint as one of a plain model; itself where it is one already."""
    model = model_of(checkpoint.manifest.state.config, str(checkpoint.path))
    return checkpoint if plain_model(model) == model else PlainCheckpoint(checkpoint)
