"""Micro-batches at fixed addresses on the device, for recorded steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from megatron_port.data.batch import MicroBatch
from megatron_port.errors import ConfigError

Shapes = tuple[tuple[int, tuple[int, ...] | None, tuple[int, ...] | None, bool], ...]
"""Shapes of each micro-batch: samples, shape of the tokens, of the labels, and whether there is a mask."""


def shapes_of(micro_batches: Sequence[MicroBatch]) -> Shapes:
    """Return what must be alike in two steps for the one's recording to serve the other.

    Raises:
        ConfigError: a micro-batch has document bounds, whose number differs from step to step.
    """
    if any(b.document_starts is not None for b in micro_batches):
        raise ConfigError(
            'backend.graphs "step" with samples of several documents: their bounds have another length in every step, '
            'and a recorded step has fixed shapes; use graphs = "off"'
        )
    return tuple(
        (len(b.sample_ids), None if b.tokens is None else tuple(b.tokens.shape),
         None if b.labels is None else tuple(b.labels.shape), b.loss_mask is not None) for b in micro_batches
    )


def _integers(batch: MicroBatch) -> Iterator[torch.Tensor]:
    yield from (t for t in (batch.tokens, batch.labels) if t is not None)


class StepInputs:
    """Device memory for the micro-batches of a step.

    ``batches``: the micro-batches there; ``keys``: their samples' dropout keys, int64 [samples] each.
    """

    def __init__(self, like: Sequence[MicroBatch], device: torch.device) -> None:
        self.shapes = shapes_of(like)
        samples = sum(len(b.sample_ids) for b in like)
        whole = sum(t.numel() for b in like for t in _integers(b))
        masks = sum(b.loss_mask.numel() for b in like if b.loss_mask is not None)
        self._integers = torch.zeros(whole + samples, dtype=torch.int64, device=device)
        self._masks = torch.zeros(masks, dtype=torch.float32, device=device)
        self.keys = list(self._integers[whole:].split([len(b.sample_ids) for b in like]))
        integers, floats = self._integers, self._masks
        self.batches: list[MicroBatch] = []
        for batch in like:
            held: dict[str, torch.Tensor | None] = {}
            for name in ("tokens", "labels"):
                t = getattr(batch, name)
                held[name] = None if t is None else integers[: t.numel()].view(t.shape)
                integers = integers[0 if t is None else t.numel() :]
            mask = batch.loss_mask
            held["loss_mask"] = None if mask is None else floats[: mask.numel()].view(mask.shape)
            floats = floats[0 if mask is None else mask.numel() :]
            self.batches.append(replace(batch, **held))  # type: ignore[arg-type]  # three tensors by name

    def load(self, micro_batches: Sequence[MicroBatch], keys: Sequence[Sequence[int]]) -> None:
        """Copy a step's micro-batches and keys there; the host does not wait for the device."""
        numbers = torch.tensor([key for of_batch in keys for key in of_batch], dtype=torch.int64)
        _copy(self._integers, [*(t for b in micro_batches for t in _integers(b)), numbers])
        if self._masks.numel():
            _copy(self._masks, [b.loss_mask for b in micro_batches if b.loss_mask is not None])


def _copy(target: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    flat = torch.cat([part.reshape(-1) for part in parts])
    # From pageable memory the copy would wait for all that the device has to do.
    target.copy_(flat.pin_memory() if target.is_cuda and not flat.is_cuda else flat, non_blocking=True)
