"""Micro-batches, which the loader gives to an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from megatron_port.core.dist.positions import Division
from megatron_port.core.errors import DataError


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch of one replica; its tensors are on the host or on the rank's device.

    ``sample_ids`` are global sample indices counted from the start of training;
    they key dropout, so every stage needs them. Only the first stage needs
    ``tokens`` and only the last ``labels`` and ``loss_mask``; elsewhere they are None.
    A context-parallel rank has those of its positions.
    Every stage is told whether labels are masked, because all take part in counting the step's tokens.
    """

    sample_ids: tuple[int, ...]
    tokens: torch.Tensor | None = None
    """int64 [batch, seq]"""
    labels: torch.Tensor | None = None
    """int64 [batch, seq]"""
    loss_mask: torch.Tensor | None = None
    """float32 [batch, seq], 1 where the label counts; None: everywhere"""
    labels_masked: bool = False
    """The last stage has a ``loss_mask``. The same on every stage; without a pipeline the mask alone tells it."""
    document_starts: torch.Tensor | None = None
    """int32 [batch, seq], on every stage and of the whole sequence: where in its sample the document of each position
    starts; None: every sample is one document"""
    division: Division | None = None
    """How these sequences are divided between context-parallel ranks; None: as the layout says"""
    side: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Tensors of the loss beside labels and mask, by the names that the run's objective gives (``data.objective``):
    [batch, …], this rank's part, on the last stage only"""

    @property
    def masked(self) -> bool:
        """Whether some labels may not count, on whatever stage the mask is."""
        return self.labels_masked or self.loss_mask is not None

    def check_ids(self, vocab_size: int) -> None:
        """Raise DataError where an id on the host is outside the vocabulary; labels under a mask may be anything."""
        for name, ids in (("token", self.tokens), ("label", None if self.masked else self.labels)):
            if ids is None or not ids.is_cpu or not ids.numel():
                continue
            seen = np.from_dlpack(ids)  # the host's memory: no operation of torch
            low, high = seen.min(), seen.max()
            if low < 0 or high >= vocab_size:
                raise DataError(
                    f"{name} id {low if low < 0 else high} is outside the vocabulary of {vocab_size}; mask labels that "
                    "do not count (loss_mask), set model.vocab_size, or prepare the data with this model's tokenizer")
