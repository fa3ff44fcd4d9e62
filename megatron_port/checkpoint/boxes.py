"""Geometry of pieces: flat ranges of boxes, their intersection, and the proof that they tile a tensor.

A *piece* is the range ``[flat_start, flat_start + numel)`` of the row-major
flattening of a box (``offset``, ``shape``) of a global tensor. Any such range is
the union of at most ``2 * dims - 1`` axis-aligned boxes, which makes reading and
checking plain box arithmetic. Pure; no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Protocol

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """Elements ``low[d] <= i[d] < high[d]`` along each dimension."""

    low: Shape
    high: Shape

    @property
    def shape(self) -> Shape:
        """Extent along each dimension."""
        return tuple(h - lo for lo, h in zip(self.low, self.high))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def shifted(self, offset: Sequence[int]) -> Box:
        """The same box, moved by ``offset``."""
        return Box(
            tuple(lo + o for lo, o in zip(self.low, offset)),
            tuple(h + o for h, o in zip(self.high, offset)),
        )

    def intersect(self, other: Box) -> Box | None:
        """The common box; None if there is none."""
        low = tuple(max(a, b) for a, b in zip(self.low, other.low))
        high = tuple(min(a, b) for a, b in zip(self.high, other.high))
        return Box(low, high) if all(lo < h for lo, h in zip(low, high)) else None


def strides(shape: Sequence[int]) -> Shape:
    """Row-major strides in elements."""
    return tuple(prod(shape[d + 1 :]) for d in range(len(shape)))


def range_boxes(shape: Shape, start: int, stop: int) -> Iterator[Box]:
    """The flat range ``[start, stop)`` of a tensor of ``shape`` as disjoint boxes, in flat order."""
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    inner = prod(shape[1:])
    first, last = start // inner, (stop - 1) // inner
    full_from = first if start % inner == 0 else first + 1
    full_to = last + 1 if stop % inner == 0 else last
    if first < full_from:
        yield from _in_row(shape, first, start - first * inner, min(stop - first * inner, inner))
    if full_from < full_to:
        yield Box((full_from,) + (0,) * (len(shape) - 1), (full_to, *shape[1:]))
    if full_to <= last and (last > first or first == full_from):
        yield from _in_row(shape, last, max(start - last * inner, 0), stop - last * inner)


def _in_row(shape: Shape, row: int, start: int, stop: int) -> Iterator[Box]:
    for box in range_boxes(shape[1:], start, stop):
        yield Box((row, *box.low), (row + 1, *box.high))


@dataclass(frozen=True)
class FlatRange:
    """A piece without its data: a flat range of a box of a tensor. ``label`` names it in messages."""

    offset: Shape
    shape: Shape
    flat_start: int
    numel: int
    label: str = ""

    def boxes(self) -> Iterator[Box]:
        """Disjoint boxes, in coordinates of the global tensor."""
        for box in range_boxes(self.shape, self.flat_start, self.flat_start + self.numel):
            yield box.shifted(self.offset)


def range_fault(piece: FlatRange, global_shape: Shape) -> str | None:
    """What is wrong with one piece by itself, or None."""
    if not len(piece.offset) == len(piece.shape) == len(global_shape):
        return f"box {piece.offset} + {piece.shape} has other dimensions than the tensor {global_shape}"
    if min((*piece.offset, *piece.shape, piece.flat_start, piece.numel)) < 0:
        return f"box {piece.offset} + {piece.shape}, range {piece.flat_start} + {piece.numel}: negative numbers"
    for o, n, g in zip(piece.offset, piece.shape, global_shape):
        if o + n > g:
            return f"box {piece.offset} + {piece.shape} leaves the tensor {global_shape}"
    if piece.flat_start + piece.numel > prod(piece.shape):
        return (
            f"range {piece.flat_start} + {piece.numel} leaves its box {piece.shape} of {prod(piece.shape)} elements"
        )
    return None


class Ranged(Protocol):
    """A flat range of a box: FlatRange, or what has one."""

    @property
    def offset(self) -> Shape: ...
    @property
    def shape(self) -> Shape: ...
    @property
    def flat_start(self) -> int: ...
    @property
    def numel(self) -> int: ...


def stacked(pieces: Sequence[Ranged], global_shape: Shape) -> bool:
    """Are they whole boxes one behind the other along the first dimension, in order, and the tensor together?

    Most tensors of most layouts are saved so, and it costs a tenth of :func:`cover_fault`, which such pieces pass.
    """
    if not global_shape:
        return False
    inner, zeros, at = global_shape[1:], (0,) * (len(global_shape) - 1), 0
    row = prod(inner)
    for piece in pieces:
        if piece.offset[:1] != (at,) or piece.offset[1:] != zeros or piece.shape[1:] != inner or piece.flat_start:
            return False
        rows = piece.shape[0]
        if rows <= 0 or piece.numel != rows * row:
            return False
        at += rows
    return at == global_shape[0]


def cover_fault(pieces: Sequence[FlatRange], global_shape: Shape) -> str | None:
    """Why the pieces do not cover the tensor exactly once; None if they do.

    Within bounds, free of overlap and as many elements as the tensor has is an exact cover.
    """
    for piece in pieces:
        fault = range_fault(piece, global_shape)
        if fault:
            return f"{fault} ({piece.label})" if piece.label else fault
    fault = _overlap_fault(pieces)
    if fault:
        return fault
    total, have = prod(global_shape), sum(p.numel for p in pieces)
    if have != total:
        return f"{have} of {total} elements are covered"
    return None


def _overlap_fault(pieces: Sequence[FlatRange]) -> str | None:
    """Name two pieces that share an element. Pieces of one box are compared as ranges, others as boxes."""
    by_box: dict[tuple[Shape, Shape], list[FlatRange]] = {}
    for piece in pieces:
        by_box.setdefault((piece.offset, piece.shape), []).append(piece)
    solids: list[tuple[Box, str]] = []
    for (offset, shape), members in by_box.items():
        if len(members) == 1 and members[0].numel == prod(shape):  # most are, and there may be 10^5
            solids.append((Box(offset, tuple([o + n for o, n in zip(offset, shape)])), members[0].label))
            continue
        members.sort(key=lambda p: p.flat_start)
        for a, b in pairwise(members):
            if a.flat_start + a.numel > b.flat_start:
                return (
                    f"ranges {a.flat_start} + {a.numel} ({a.label}) and {b.flat_start} + {b.numel} ({b.label}) "
                    f"of box {offset} + {shape} overlap"
                )
        if sum(p.numel for p in members) == prod(shape):
            high = tuple(o + n for o, n in zip(offset, shape))
            solids.append((Box(offset, high), members[0].label))
        else:
            solids.extend((box, p.label) for p in members for box in p.boxes())
    return _solids_fault(solids)


def _solids_fault(solids: list[tuple[Box, str]]) -> str | None:
    """Sweep along the first dimension; boxes that are open together are compared pairwise."""
    solids.sort(key=lambda s: s[0].low[:1])
    open_boxes: list[tuple[Box, str]] = []
    for box, label in solids:
        if open_boxes:
            open_boxes = [(o, n) for o, n in open_boxes if o.high[:1] > box.low[:1] or not box.low]
        for other, name in open_boxes:
            if box.intersect(other) is not None:
                return f"boxes {other.low}..{other.high} ({name}) and {box.low}..{box.high} ({label}) overlap"
        open_boxes.append((box, label))
    return None
