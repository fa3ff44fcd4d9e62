"""Weights with their smallest elements left out, as a reader of slices: which ones follows from the logical tensor.

A rank that reads a slice decides on it as every other rank would: for 2:4 it reads the whole groups that the slice
touches, for a share of a matrix it reads the matrix once for its threshold. So every layout has the same zeros, and no
rank talks to another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import torch

from megatron_port.core.checkpoint.reader import Checkpoint
from megatron_port.core.config.features import SparsityConfig
from megatron_port.core.config.schema import ModelConfig
from megatron_port.core.dist.record import BUFFER, WEIGHT, StateReader
from megatron_port.core.errors import CheckpointError
from megatron_port.core.model.shapes import fingerprint
from megatron_port.ext.weights.settings import GROUP, is_sparse

Box = tuple[int, ...]


class SparseWeights:
    """Reader of the weights of ``read``, in which those that ``[sparsity]`` names are sparse.

    ``shapes``: of the logical tensors, by name.
    """

    def __init__(self, sparsity: SparsityConfig, shapes: dict[str, tuple[int, ...]], read: StateReader) -> None:
        self.sparsity, self.shapes, self.base = sparsity, shapes, read
        self._thresholds: dict[tuple[str, Box], tuple[float, int]] = {}

    def __call__(
        self, name: str, kind: str, offset: Box, shape: Box, /, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        found = self.base(name, kind, offset, shape, out=out)
        if kind != WEIGHT or not found.numel() or not is_sparse(self.sparsity, name) or name not in self.shapes:
            return found
        if found is not out:
            found = found.clone()  # it may be a view of a file
        if self.sparsity.method == "2:4":
            found.mul_(self._pairs(name, offset, shape).to(found.device))
        else:
            for lead in product(*(range(o, o + n) for o, n in zip(offset[:-2], shape[:-2]))):
                part = found[tuple(i - o for i, o in zip(lead, offset))]
                part.mul_(self._largest(name, lead, part, offset[-2:]))
        return found

    def _pairs(self, name: str, offset: Box, shape: Box) -> torch.Tensor:
        """Return 1 where an element of a box is one of the two largest of its four, the first of equal ones."""
        first = offset[-1] // GROUP * GROUP
        stop = -(-(offset[-1] + shape[-1]) // GROUP) * GROUP
        whole = self.base(name, WEIGHT, (*offset[:-1], first), (*shape[:-1], stop - first))
        groups = whole.abs().reshape(*shape[:-1], -1, GROUP)
        largest = groups.sort(dim=-1, descending=True, stable=True).indices[..., : GROUP // 2]
        kept = torch.zeros_like(groups).scatter_(-1, largest, 1.0).reshape(*shape[:-1], -1)
        return kept[..., offset[-1] - first :][..., : shape[-1]]

    def _largest(self, name: str, lead: Box, part: torch.Tensor, offset: Box) -> torch.Tensor:
        """Return 1 where an element of a box [rows, columns] of a matrix is not among its smallest."""
        columns = self.shapes[name][-1]
        threshold, last = self._threshold(name, lead)
        size, at = part.abs(), torch.arange(part.shape[1], device=part.device) + offset[1]
        rows = torch.arange(part.shape[0], device=part.device) + offset[0]
        index = rows[:, None] * columns + at
        return ((size > threshold) | ((size == threshold) & (index > last))).to(part.dtype)

    def _threshold(self, name: str, lead: Box) -> tuple[float, int]:
        """Return the size up to which elements of a matrix go, and the last index at which one of this size does."""
        if (name, lead) not in self._thresholds:
            rows, columns = self.shapes[name][-2:]
            box = (*lead, 0, 0), (*(1 for _ in lead), rows, columns)
            size = self.base(name, WEIGHT, *box).abs().flatten()
            count = round(self.sparsity.ratio * size.numel())  # as torch.nn.utils.prune
            if count == 0:
                self._thresholds[name, lead] = -1.0, -1
            else:
                threshold = float(size.kthvalue(count).values)
                equal = (size == threshold).nonzero().flatten()
                self._thresholds[name, lead] = threshold, int(equal[count - int((size < threshold).sum()) - 1])
        return self._thresholds[name, lead]


# A checkpoint whose weights are the run's averaged ones (``optimizer.ema_decay``).

EMA = "ema"
"""Kind of the averaged weights in checkpoints."""


class AveragedCheckpoint(Checkpoint):
    """The averaged weights and the buffers of a checkpoint; nothing else.

    Raises:
        CheckpointError: it has no averaged weights, or was saved before the first update.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint.path, checkpoint.manifest)
        if EMA not in super().kinds():
            raise CheckpointError(
                f"{checkpoint.path} has no averaged weights (kinds: {', '.join(super().kinds())}); its run had no "
                "optimizer.ema_decay. Leave --ema out"
            )
        if not checkpoint.scalars.get("optimizer_steps"):
            raise CheckpointError(f"{checkpoint.path}: no update has begun its averaged weights; leave --ema out")

    def names(self, kind: str = WEIGHT) -> Iterator[str]:
        """Yield the names that have this kind."""
        return super().names(EMA if kind == WEIGHT else kind)

    def kinds(self) -> tuple[str, ...]:
        """Return the kinds but the optimizer's."""
        return (WEIGHT, BUFFER) if BUFFER in super().kinds() else (WEIGHT,)

    def shape(self, name: str, kind: str = WEIGHT) -> tuple[int, ...]:
        """Return the global logical shape (``Checkpoint.shape``)."""
        return super().shape(name, EMA if kind == WEIGHT else kind)

    def dtype(self, name: str, kind: str = WEIGHT) -> torch.dtype:
        """Return the dtype that was saved (``Checkpoint.dtype``)."""
        return super().dtype(name, EMA if kind == WEIGHT else kind)

    def read(
        self, name: str, kind: str, offset: tuple[int, ...], shape: tuple[int, ...], /, *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return a slice of an averaged weight or a buffer (``Checkpoint.read``)."""
        return super().read(name, EMA if kind == WEIGHT else kind, offset, shape, out=out)


# Which frozen weights adapters were trained beside, by their values.

def check_base(extra: Mapping[str, Any], model: ModelConfig, read: StateReader, *, adapters: str, base: str) -> None:
    """Check that ``base`` has the frozen weights of the checkpoint ``adapters``, whose extra state is ``extra``.

    Raises:
        CheckpointError: it has others.
    """
    saved = extra.get("base")
    wanted = saved.get("fingerprint") if isinstance(saved, dict) else None
    found = fingerprint(model, read)
    if wanted is not None and wanted != found:
        where = saved.get("path") if isinstance(saved, dict) else ""
        raise CheckpointError(
            f"{adapters} holds adapters of other weights than those of {base}: they were trained beside {where} "
            f"(fingerprint {wanted[:12]}; here it is {found[:12]}). Name those weights"
        )
