"""A reader of the pruned model over the weights of the whole one: any slice, without the rest in memory."""

from __future__ import annotations

import numpy as np
import torch

from megatron_port.core.dist.record import StateReader
from megatron_port.core.model.shapes import buffer_shapes, parameter_shapes
from megatron_port.tools.compress.axes import Axis, axes_of, layer_of
from megatron_port.tools.compress.selection import Selection

Box = tuple[int, ...]


class PrunedWeights:
    """A reader (``dist.record.StateReader``) of what ``selection`` keeps of the weights and buffers that ``read``
    gives.

    A slice is read as one slice of the source from its first to its last index along every dimension, a run of the
    first dimension at a time, so that no more than the source's part of the slice is in memory.
    """

    def __init__(self, selection: Selection, read: StateReader) -> None:
        self._selection, self._read = selection, read
        model = selection.source
        self._shapes = parameter_shapes(model) | buffer_shapes(model)
        self._gated = model.gated
        self._over_heads = model.qk_norm and model.qk_norm_over == "projection"

    def __call__(
        self, name: str, kind: str, offset: Box, shape: Box, /, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return a slice of a tensor of the pruned model.

        Raises:
            CheckpointError: the parameter is not known to pruning, or the source lacks it.
        """
        layer, relative = layer_of(name)
        source = name if layer is None else f"layers.{self._selection.layers[layer]}.{relative}"
        place = None if layer is None else self._selection.layers[layer]
        axes = axes_of(source, self._shapes[source], gated=self._gated, norm_over_heads=self._over_heads)
        kept = [
            self._indices(axis, place, first, count) for axis, first, count in zip(axes, offset, shape, strict=True)
        ]
        parts = [self._slab(source, kind, [rows, *kept[1:]]) for rows in _runs(kept[0])]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _indices(self, axis: Axis, layer: int | None, first: int, count: int) -> np.ndarray:
        """Return the source's indices of a range of the pruned model's."""
        found = self._selection.of(axis, layer)
        return np.arange(first, first + count) if found is None else found[first : first + count]

    def _slab(self, name: str, kind: str, kept: list[np.ndarray]) -> torch.Tensor:
        low = tuple(int(rows[0]) for rows in kept)
        read = self._read(name, kind, low, tuple(int(rows[-1]) - a + 1 for rows, a in zip(kept, low)))
        for dim, (rows, a) in enumerate(zip(kept, low)):
            if len(rows) != read.shape[dim]:
                read = read.index_select(dim, torch.from_numpy(rows - a))
        return read


def _runs(indices: np.ndarray) -> list[np.ndarray]:
    """Cut ascending indices wherever more is left out than is kept, so that little is read in vain."""
    gaps = np.flatnonzero(np.diff(indices) > 64) + 1
    return [part for part in np.split(indices, gaps) if len(part)]
