"""Which weights a model has, by their values."""

from __future__ import annotations

import torch
import xxhash

from megatron_port.core.config.schema import ModelConfig
from megatron_port.core.dist.record import WEIGHT, StateReader
from megatron_port.core.model.shapes import parameter_shapes

ROWS, COLUMNS = 3, 256
"""Looked at in each matrix, the rows spread evenly from first to last."""


def fingerprint(model: ModelConfig, read: StateReader) -> str:
    """Return 32 hex digits of a part of every parameter's values: at most ``ROWS`` x ``COLUMNS`` of each.

    The values are rounded to float32, and neither the layout nor the format counts: a folder and its import have the
    same. Training changes nearly every value, so other weights have another; a single flipped bit may not.
    """
    digest = xxhash.xxh3_128()
    for name, shape in parameter_shapes(model).items():
        digest.update(f"{name} {shape}".encode())
        for offset, size in _looked_at(shape):
            digest.update(read(name, WEIGHT, offset, size).to(torch.float32).contiguous().numpy().data)
    return digest.hexdigest()


def _looked_at(shape: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return (offset, shape) of the slices of a parameter that are looked at."""
    width = min(shape[-1], COLUMNS)
    if len(shape) == 1:
        return [((0,), (width,))]
    last = [n - 1 for n in shape[:-1]]
    starts = sorted({tuple(n * i // (ROWS - 1) for n in last) for i in range(ROWS)})
    return [((*start, 0), (*(1 for _ in start), width)) for start in starts]
