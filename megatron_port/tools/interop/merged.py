"""A checkpoint of adapters as one of the whole model that they and the frozen weights make."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megatron_port.core.checkpoint.reader import Checkpoint
from megatron_port.core.dist.record import WEIGHT
from megatron_port.core.model.shapes import parameter_shapes
from megatron_port.ext.weights.adapters import MergedWeights
from megatron_port.run.saved_model import model_of, tuning_of
from megatron_port.run.weights import open_base


class MergedCheckpoint(Checkpoint):
    """The weights alone, float32 as masters are; the frozen ones are read from ``base``, or where the run had them.

    Raises:
        CheckpointError: they are not there, or others than the adapters were trained beside.
    """

    def __init__(self, adapters: Checkpoint, base: str = "") -> None:
        super().__init__(adapters.path, adapters.manifest)
        config, where = adapters.manifest.state.config, str(adapters.path)
        model = model_of(config, where)
        self._shapes = parameter_shapes(model)
        self._merged = MergedWeights(model, tuning_of(config, where), open_base(adapters, base).read, adapters.read)

    def names(self, kind: str = WEIGHT) -> Iterator[str]:
        """Yield the names of the model's parameters."""
        return iter(self._shapes if kind == WEIGHT else ())

    def kinds(self) -> tuple[str, ...]:
        """Return the one kind."""
        return (WEIGHT,)

    def shape(self, name: str, kind: str = WEIGHT) -> tuple[int, ...]:
        """Return the global logical shape."""
        return self._shapes[name]

    def dtype(self, name: str, kind: str = WEIGHT) -> torch.dtype:
        """Return the dtype of what is read."""
        return torch.float32

    def read(
        self, name: str, kind: str, offset: tuple[int, ...], shape: tuple[int, ...], /, *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return a slice of a merged weight (``Checkpoint.read``)."""
        return self._merged(name, kind, offset, shape).to(torch.float32)
