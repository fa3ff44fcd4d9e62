"""Protocol of a pipeline stage's module, and helpers over its parameter records."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.record import BUFFER, WEIGHT, ParameterRecord, StatePiece, StateReader, record_of
from megatron_port.core.layers.step import TallySpec


@runtime_checkable
class StageModule(Protocol):
    """One pipeline stage of any model; also an ``nn.Module``."""

    auxiliary_names: tuple[str, ...]
    """Names of the sums that modules of the whole model add to in a step (``layers.step``), alike on every stage."""
    tally_specs: Mapping[str, TallySpec]
    """Shapes and dtypes of the counts and sums that they add to, by name, likewise."""

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Map tokens, or the boundary's tensors, to the boundary's (a single one without a tuple), or logits."""

    def loss_sum(self, logits: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Return the sum of token losses (last stage)."""

    def after_update(self, totals: Mapping[str, torch.Tensor], skipped: torch.Tensor) -> None:
        """Change state that no gradient changes, by the tallies' sums over all ranks. ``skipped``: scalar on the
        device, 1 where the step's update was skipped and nothing may change."""

    def boundary(self, batch: int, seq: int) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return name → (shape, dtype) of the tensors between stages, in order; the same on every stage."""


def recorded_parameters(stage: nn.Module) -> list[tuple[ParameterRecord, nn.Parameter]]:
    """Return (record, parameter) of a stage, each parameter once, in module order.

    Raises AttributeError when a parameter has no record, ValueError when two are the same slice of the same name.
    """
    pairs = [(record_of(p), p) for p in stage.parameters()]
    places = [record.place for record, _ in pairs]
    if len(set(places)) != len(places):
        doubled = sorted({name for name, at in places if places.count((name, at)) > 1})
        raise ValueError(f"parameters share a canonical name: {doubled}")
    return pairs


def read_local(read: StateReader, record: ParameterRecord, kind: str, out: torch.Tensor) -> None:
    """Fill ``out`` (shape ``record.local_shape``) with this rank's slice; padding becomes zero.

    A reader that can reads straight into it, so after an error its content is undefined.
    """
    with torch.no_grad():
        view = record.local_view(out)
        if view.numel() != out.numel():
            out.zero_()
        if view.numel():
            found = read(record.name, kind, record.offset, record.extent, out=view)
            if found is not view:
                view.copy_(found)


class ScratchBuffer:
    """Memory for one whole local tensor at a time, used again for the next."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._flat = torch.empty(0, dtype=dtype)

    def get(self, shape: Sequence[int], device: torch.device) -> torch.Tensor:
        """Return an uninitialized tensor of that shape and device; the one returned before is overwritten."""
        size = math.prod(shape)
        if self._flat.numel() < size or self._flat.device != device:
            self._flat = torch.empty(0, dtype=self._dtype)  # freed first, so that two never exist
            self._flat = torch.empty(size, dtype=self._dtype, device=device)
        return self._flat[:size].view(tuple(shape))


def read_range(
    read: StateReader, record: ParameterRecord, kind: str, out: torch.Tensor, start: int, scratch: ScratchBuffer
) -> None:
    """Fill ``out`` (1-D) with the elements from ``start`` of this rank's flattened slice; padding becomes zero."""
    size = math.prod(record.local_shape)
    if out.numel() == size:
        read_local(read, record, kind, out.view(record.local_shape))
    else:
        whole = scratch.get(record.local_shape, out.device)
        read_local(read, record, kind, whole)
        with torch.no_grad():
            out.copy_(whole.view(-1)[start : start + out.numel()])


def logical_pieces(record: ParameterRecord, kind: str, flat: torch.Tensor, start: int) -> Iterator[StatePiece]:
    """Yield pieces for elements [start, start + len(flat)) of this rank's flattened local tensor, padding cut off.

    Padding is at the end of the split dimension. Where that is dimension 0 the
    logical elements are a prefix of the flat tensor; an inner dimension is never padded.
    """
    logical = 1
    for n in record.extent:
        logical *= n
    padded = 1
    for n in record.local_shape:
        padded *= n
    if logical != padded and record.split_dim != 0:
        raise ValueError(f"{record.name}: padding along dimension {record.split_dim} is not supported")
    length = min(start + flat.numel(), logical) - start
    if length > 0:
        yield StatePiece(
            name=record.name, kind=kind, global_shape=record.shape, offset=record.offset, shape=record.extent,
            flat_start=start, tensor=flat[:length],
        )


def buffer_pieces(
    buffers: Sequence[tuple[ParameterRecord, torch.Tensor]], ctx: ParallelContext
) -> Iterator[StatePiece]:
    """Yield the buffers that this rank saves: those of which it owns a copy, unless frozen."""
    for record, buffer in buffers:
        if record.trainable and record.is_owned(ctx.mesh, ctx.rank):
            yield from logical_pieces(record, BUFFER, buffer.detach().reshape(-1), 0)


def load_buffers(buffers: Sequence[tuple[ParameterRecord, torch.Tensor]], read: StateReader) -> None:
    """Set every buffer."""
    for record, buffer in buffers:
        read_local(read, record, BUFFER, buffer)


def zero_moments(read: StateReader) -> StateReader:
    """Return a reader whose optimizer state is zero: weights and buffers from a checkpoint, optimizer fresh."""

    def wrapped(
        name: str, kind: str, offset: tuple[int, ...], shape: tuple[int, ...], /, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        if kind not in (WEIGHT, BUFFER):
            return torch.zeros(shape) if out is None else out.zero_()
        return read(name, kind, offset, shape, out=out)

    return wrapped


__all__ = [
    "ScratchBuffer", "StageModule", "buffer_pieces", "load_buffers", "logical_pieces", "read_local", "read_range",
    "recorded_parameters", "zero_moments",
]
