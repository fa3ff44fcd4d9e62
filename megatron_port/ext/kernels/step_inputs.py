"""Micro-batches at fixed addresses on the device, for captured steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch

from megatron_port.core.data.batch import MicroBatch
from megatron_port.core.dist.positions import Division

FIELDS = ("tokens", "labels", "loss_mask", "document_starts")
"""Fields of a micro-batch that are tensors, beside ``side``."""
Shapes = tuple[tuple[int, ...] | int | str | Division | None, ...]
"""Samples of each micro-batch, whether labels are masked and how its sequences are divided, then the name and the shape
of each of its tensors."""


def tensors_of(batch: MicroBatch) -> dict[str, torch.Tensor]:
    """Return the tensors that a micro-batch has, by name, side tensors last; the names of fields are no side
    tensor's."""
    fields = {name: getattr(batch, name) for name in FIELDS}
    return {name: t for name, t in fields.items() if t is not None} | dict(sorted(batch.side.items()))


def with_tensors(batch: MicroBatch, tensors: Mapping[str, torch.Tensor]) -> MicroBatch:
    """Return a micro-batch with other tensors for those of :func:`tensors_of`."""
    fields: dict[str, Any] = {name: tensors.get(name) for name in FIELDS}
    return replace(batch, **fields, side={name: tensors[name] for name in batch.side})


def shapes_of(micro_batches: Sequence[MicroBatch]) -> Shapes:
    """Return the shapes that a graph is for: it serves steps of equal ones. They change on all ranks at once."""
    out: list[tuple[int, ...] | int | str | Division | None] = []
    for batch in micro_batches:
        # Masks are on the last stage alone, and a new graph runs the passes more than once: all stages must, or hang.
        # A division is numbers of the host, which a graph holds as they were at its capture.
        out += [len(batch.sample_ids), int(batch.masked), batch.division]
        for name, tensor in tensors_of(batch).items():
            out += [name, tuple(tensor.shape)]
    return tuple(out)


class StepInputs:
    """Device memory for the micro-batches of a step.

    ``batches``: the micro-batches there; ``keys``: their samples' dropout keys, int64 [samples] each.

    Args:
        like: micro-batches of the same shapes and divisions.
        apart: the micro-batches take turns in ``slot``, which has the shapes of each (``step_pieces``).
        slot: the one to use; None: a new one.
    """

    def __init__(
        self, like: Sequence[MicroBatch], device: torch.device, *, apart: bool = False, slot: StepInputs | None = None
    ) -> None:
        self.shapes = shapes_of(like)
        keys = [torch.empty(len(b.sample_ids), dtype=torch.int64) for b in like]
        given = [*_tensors(like), *keys]
        self._memory = {
            dtype: torch.zeros(sum(t.numel() for t in given if t.dtype == dtype), dtype=dtype, device=device)
            for dtype in dict.fromkeys(t.dtype for t in given)
        }
        free = dict(self._memory)

        def placed(t: torch.Tensor) -> torch.Tensor:
            here, free[t.dtype] = free[t.dtype][: t.numel()], free[t.dtype][t.numel() :]
            return here.view(t.shape)

        self.batches = [
            with_tensors(batch, {name: placed(t) for name, t in tensors_of(batch).items()}) for batch in like
        ]
        self.keys = [placed(t) for t in keys]
        self.slot: StepInputs | None = slot or StepInputs(like[:1], device) if apart else None
        self.losses: list[torch.Tensor] = []
        """Losses of micro-batches that take turns, each a scalar of its own."""

    def load(self, micro_batches: Sequence[MicroBatch], keys: Sequence[torch.Tensor]) -> None:
        """Copy a step's micro-batches and keys there, from the host or from the device, in one copy for each dtype and
        side; the host does not wait for the device."""
        given = [*_tensors(micro_batches), *keys]
        for dtype, memory in self._memory.items():
            _copy(memory, [t for t in given if t.dtype == dtype])

    def show(self, number: int) -> None:
        """Copy a micro-batch to the slot, if there are both: one launch for each dtype."""
        if self.slot is not None and number < len(self.batches):
            self.slot.load(self.batches[number : number + 1], self.keys[number : number + 1])

    def keep(self, number: int, loss: Sequence[torch.Tensor]) -> None:
        """Copy the loss of a micro-batch, before the next one takes its place."""
        if self.slot is not None and number < len(self.batches):
            if not self.losses:
                self.losses = list(loss[0].new_zeros(len(self.batches)))
            self.losses[number].copy_(loss[0])

    def given(self, count: int) -> tuple[list[MicroBatch], list[torch.Tensor]]:
        """Return the micro-batches and keys that the passes of ``count`` micro-batches read."""
        slot = self.slot
        return (self.batches, self.keys) if slot is None else (slot.batches * count, slot.keys * count)


def _tensors(micro_batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
    return [t for batch in micro_batches for t in tensors_of(batch).values()]


def _copy(target: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Copy parts to memory, one after the other: those in a row that are on one device in one call. The dropout keys
    are on the host, whatever device a caller's micro-batches are on."""
    at = 0
    for device, group in groupby(parts, lambda part: part.device):
        flat = [part.reshape(-1) for part in group]
        here = target.narrow(0, at, sum(part.numel() for part in flat))
        at += here.numel()
        if device == target.device:
            torch.cat(flat, out=here)
        else:  # from pageable memory the copy would wait for all that the device has to do
            joined = torch.cat(flat)
            here.copy_(joined.pin_memory() if target.is_cuda else joined, non_blocking=True)
