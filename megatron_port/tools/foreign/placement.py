"""How a rank holds a parameter, as the index of each of its elements in the whole one.

    [local shape], int64: position in the flat whole parameter; -1: padding

So any division is one kind of thing: rows, columns, packed blocks that are divided each by itself, shards of shards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_port.core.errors import ConfigError
from megatron_port.tools.foreign.adapter import Placement, Shard


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor; any other as it is. What is still being exchanged is waited for."""
    part: Any = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    found: Tensor = part.wait() if type(part).__name__ == "AsyncCollectiveTensor" else part
    return found


def whole(shape: Sequence[int]) -> Tensor:
    """Return the map of a parameter that a rank has whole."""
    return torch.arange(torch.Size(shape).numel()).reshape(tuple(shape))


def sharded(index: Tensor, shard: Shard) -> Tensor:
    """Return the part of a map that a shard of it has."""
    blocks = index.chunk(shard.interleaved, shard.dim)
    parts = [block.tensor_split(shard.count, shard.dim)[shard.index] for block in blocks]
    return torch.cat(parts, shard.dim)


def stated(placement: Placement, shape: Sequence[int]) -> Tensor:
    """Return the map that an adapter states."""
    if isinstance(placement, Tensor):
        return placement
    index = whole(shape)
    for shard in () if placement is None else (placement,) if isinstance(placement, Shard) else placement:
        index = sharded(index, shard)
    return index


def of_dtensor(tensor: Any, shape: Sequence[int]) -> Tensor:
    """Return the map of a DTensor: the indices are divided as it is."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = tensor.device_mesh
    index = DTensor.from_local(whole(shape), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return local(index.redistribute(placements=tensor.placements))


def of_megatron(tensor: Tensor, shape: Sequence[int], place: tuple[int, int]) -> Tensor | None:
    """Return the map that Megatron's attributes of a parameter state, ``place``: (rank, size) of the axis tp; None:
    it has none."""
    if not getattr(tensor, "tensor_model_parallel", False):
        return None
    index, count = place
    blocks = max(1, int(getattr(tensor, "partition_stride", 1)))
    return sharded(whole(shape), Shard(int(tensor.partition_dim), index, count, blocks))  # type: ignore[attr-defined]


def by_shape(name: str, tensor: Tensor, shape: Sequence[int], places: Mapping[str, tuple[int, int]]) -> Tensor:
    """Return the map that fits the shape of what a rank holds; ``places``: (index, size) of this rank on each axis.

    Raises:
        ConfigError: none fits, or several do.
    """
    if tuple(tensor.shape) == tuple(shape):
        return whole(shape)
    fits: dict[str, Shard] = {}
    if tensor.dim() == len(shape):
        unlike = [d for d in range(len(shape)) if tensor.shape[d] != shape[d]]
        if len(unlike) == 1:
            fits = {axis: Shard(unlike[0], index, size) for axis, (index, size) in places.items()
                    if tensor.shape[unlike[0]] * size == shape[unlike[0]]}
    if len(fits) != 1:
        found = f"could be a part along {' or '.join(sorted(fits))}" if fits else "is no equal part along one axis"
        raise ConfigError(
            f"{name}: this rank has {list(tensor.shape)} of {list(shape)}, which {found}; state it in "
            "Adapter.placements, or load weights by the trainer's own means in Adapter.load"
        )
    return sharded(whole(shape), next(iter(fits.values())))


def by_content(name: str, part: Tensor, full: Tensor) -> Tensor:
    """Return the map of what a trainer has loaded by itself: each value is looked for in the whole parameter.

    Rows and columns are found by most of their values, as single values occur twice.

    Raises:
        ConfigError: what the rank holds is not made of rows and columns of it.
    """
    part, full = part.detach().double(), full.detach().to(part.dtype).double()
    if part.shape == full.shape and torch.equal(part, full):
        return whole(full.shape)
    if (run := _run(part, full)) is not None:
        return run
    values, order = full.flatten().sort(stable=True)
    at = torch.searchsorted(values, part.flatten()).clamp(max=len(values) - 1)
    found = torch.where(values[at] == part.flatten(), order[at], -1).reshape(part.shape)
    if (part.dim() != full.dim() or full.dim() == 1) and len(full.unique()) < full.numel():
        raise ConfigError(f"{name}: values occur twice in it, so what this rank has loaded does not say which part it "
                          "has; state it in Adapter.placements")
    if part.dim() != full.dim():
        return found
    index: Tensor = torch.zeros((), dtype=torch.int64)
    stride, padded = 1, torch.zeros((), dtype=torch.bool)
    for dim in reversed(range(full.dim())):
        along = torch.where(found < 0, -1, found // stride % full.shape[dim]).movedim(dim, 0)
        along = along.reshape(len(along), -1)
        if full.dim() == 1 or not along.shape[1]:
            rows = along[:, 0]
        else:
            seen = along.masked_fill(along < 0, full.shape[dim])
            counts = torch.zeros(len(seen), full.shape[dim] + 1).scatter_add_(1, seen, torch.ones(seen.shape))
            counts[:, -1].clamp_(max=0.5)  # padding where nothing else was found
            rows = counts.argmax(1)
            rows = torch.where(rows == full.shape[dim], -1, rows)
        shape = [-1 if d == dim else 1 for d in range(full.dim())]
        index, padded = index + rows.clamp(min=0).reshape(shape) * stride, padded | (rows < 0).reshape(shape)
        stride *= full.shape[dim]
    index = torch.where(padded, -1, index).expand(part.shape).contiguous()
    held = index >= 0
    if not held.any() or not torch.equal(full.flatten()[index[held]], part[held]):
        raise ConfigError(
            f"{name}: what this rank has loaded, {list(part.shape)}, is not made of rows and columns of the whole "
            f"{list(full.shape)}; state how it is placed in Adapter.placements"
        )
    return index


def _run(part: Tensor, full: Tensor) -> Tensor | None:
    """Return the map of what is one run of neighbouring rows, columns or flat elements; None: it is none, or several
    fit."""
    flat = part.dim() != full.dim()
    unlike = [0] if flat else [d for d in range(full.dim()) if part.shape[d] != full.shape[d]]
    if len(unlike) != 1:
        return None
    dim, source = unlike[0], full.flatten() if flat else full
    index, size = whole(source.shape), part.numel() if flat else part.shape[dim]
    fits = [at for at in range(source.shape[dim] - size + 1)
            if torch.equal(source.narrow(dim, at, size), part.flatten() if flat else part)]
    return index.narrow(dim, fits[0], size).reshape(part.shape) if len(fits) == 1 else None


def described(index: Tensor, shape: Sequence[int]) -> str:
    """Return words for a map: whole, or the ranges of rows and columns."""
    if tuple(index.shape) == tuple(shape) and torch.equal(index, whole(shape)):
        return "whole"
    if index.dim() != len(shape):
        return f"{int((index >= 0).sum())} elements of a flat buffer"
    words, stride = [], 1
    for dim in reversed(range(len(shape))):
        along = (index // stride % shape[dim]).movedim(dim, 0).reshape(index.shape[dim], -1)
        held = (index >= 0).movedim(dim, 0).reshape(index.shape[dim], -1)
        rows = sorted({int(row[mask][0]) for row, mask in zip(along, held, strict=True) if mask.any()})
        if len(rows) < shape[dim]:
            words.append(f"{ranges(rows)} of {shape[dim]} along dimension {dim}")
        stride *= shape[dim]
    return ", ".join(reversed(words)) or "whole, in another order"


def ranges(numbers: Sequence[int]) -> str:
    """Return numbers as ranges: 0-3, 8-11."""
    out: list[list[int]] = []
    for number in sorted(numbers):
        if out and number == out[-1][1] + 1:
            out[-1][1] = number
        else:
            out.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in out)
