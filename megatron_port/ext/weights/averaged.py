"""A checkpoint whose weights are the run's averaged ones (``optimizer.ema_decay``)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megatron_port.core.checkpoint.reader import Checkpoint
from megatron_port.core.dist.state import BUFFER, WEIGHT
from megatron_port.core.errors import CheckpointError

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
