"""Geometry of pieces: flat ranges of slices, their intersection, and the proof that they tile a tensor.

A *piece* is the range ``[flat_start, flat_start + numel)`` of the row-major
flattening of a slice (``offset``, ``shape``) of a global tensor. Any such range is
the union of at most ``2 * dims - 1`` axis-aligned slices, which makes reading and
checking plain slice arithmetic. Pure; no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Slice:
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

    def shifted(self, offset: Sequence[int]) -> Slice:
        """Return this slice moved by ``offset``, in elements by dimension."""
        return Slice(tuple(lo + o for lo, o in zip(self.low, offset)), tuple(h + o for h, o in zip(self.high, offset)))

    def intersect(self, other: Slice) -> Slice | None:
        """The common slice; None if there is none."""
        low = tuple(max(a, b) for a, b in zip(self.low, other.low))
        high = tuple(min(a, b) for a, b in zip(self.high, other.high))
        return Slice(low, high) if all(lo < h for lo, h in zip(low, high)) else None


def slabs(shape: tuple[int, ...], elements: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield slices (offset, shape) of at most ``elements`` elements that tile a tensor, in row-major order."""
    if prod(shape) <= elements or not shape:
        yield (0,) * len(shape), shape
        return
    inner = prod(shape[1:])
    if inner > elements:
        for i in range(shape[0]):
            for offset, size in slabs(shape[1:], elements):
                yield (i, *offset), (1, *size)
        return
    rows = elements // inner
    for start in range(0, shape[0], rows):
        yield (start,) + (0,) * (len(shape) - 1), (min(rows, shape[0] - start), *shape[1:])


def strides(shape: Sequence[int]) -> Shape:
    """Row-major strides in elements."""
    return tuple(prod(shape[d + 1 :]) for d in range(len(shape)))


def range_slices(shape: Shape, start: int, stop: int) -> Iterator[Slice]:
    """The flat range ``[start, stop)`` of a tensor of ``shape`` as disjoint slices, in flat order."""
    if start >= stop:
        return
    if not shape:
        yield Slice((), ())
        return
    inner = prod(shape[1:])
    first, last = start // inner, (stop - 1) // inner
    full_from = first if start % inner == 0 else first + 1
    full_to = last + 1 if stop % inner == 0 else last
    if first < full_from:
        yield from _in_row(shape, first, start - first * inner, min(stop - first * inner, inner))
    if full_from < full_to:
        yield Slice((full_from,) + (0,) * (len(shape) - 1), (full_to, *shape[1:]))
    if full_to <= last and (last > first or first == full_from):
        yield from _in_row(shape, last, max(start - last * inner, 0), stop - last * inner)


def _in_row(shape: Shape, row: int, start: int, stop: int) -> Iterator[Slice]:
    for part in range_slices(shape[1:], start, stop):
        yield Slice((row, *part.low), (row + 1, *part.high))


@dataclass(frozen=True)
class FlatRange:
    """A piece without its data: a flat range of a slice of a tensor."""

    offset: Shape
    shape: Shape
    flat_start: int
    numel: int

    @property
    def label(self) -> str:
        """Name in messages; empty: none."""
        return ""

    def slices(self) -> Iterator[Slice]:
        """Disjoint slices, in coordinates of the global tensor."""
        for part in range_slices(self.shape, self.flat_start, self.flat_start + self.numel):
            yield part.shifted(self.offset)


def range_fault(piece: FlatRange, global_shape: Shape) -> str | None:
    """Return what is wrong with one piece by itself, or None."""
    if not len(piece.offset) == len(piece.shape) == len(global_shape):
        return f"slice {piece.offset} + {piece.shape} has other dimensions than the tensor {global_shape}"
    if min((*piece.offset, *piece.shape, piece.flat_start, piece.numel)) < 0:
        return f"slice {piece.offset} + {piece.shape}, range {piece.flat_start} + {piece.numel}: negative numbers"
    for o, n, g in zip(piece.offset, piece.shape, global_shape):
        if o + n > g:
            return f"slice {piece.offset} + {piece.shape} leaves the tensor {global_shape}"
    if piece.flat_start + piece.numel > prod(piece.shape):
        return (
            f"range {piece.flat_start} + {piece.numel} leaves its slice {piece.shape} of {prod(piece.shape)} elements"
        )
    return None


def stacked(pieces: Sequence[FlatRange], global_shape: Shape) -> bool:
    """Are they whole slices one behind the other along the first dimension, in order, and the tensor together?

    Most tensors of most layouts are saved so, and it costs a tenth of :func:`cover_fault`, which such pieces pass.
    """
    if not global_shape:
        return False
    inner, zeros, at = global_shape[1:], (0,) * (len(global_shape) - 1), 0
    row = prod(inner)
    for piece in pieces:
        # A forged manifest may give a piece fewer dimensions than its tensor.
        if len(piece.shape) != len(global_shape) or piece.shape[1:] != inner or piece.flat_start:
            return False
        if piece.offset != (at, *zeros):
            return False
        rows = piece.shape[0]
        if rows <= 0 or piece.numel != rows * row:
            return False
        at += rows
    return at == global_shape[0]


def cover_fault(pieces: Sequence[FlatRange], global_shape: Shape) -> str | None:
    """Why the pieces do not cover the tensor exactly once; None if they do. Linear in the pieces, but for a sort.

    How often each element is covered is a function whose mixed difference along all dimensions is zero but at the
    slices' corners, +1 or -1 at each, and which that difference determines. So the cover is exact if and only if the
    corners of all slices cancel, but for those of the tensor itself. Where they do not, the first corner in
    lexicographic order is an element that is covered too often or not at all.
    """
    for piece in pieces:
        fault = range_fault(piece, global_shape)
        if fault:
            return f"{fault} ({piece.label})" if piece.label else fault
    solids = list(_solids(pieces))
    corners = _corners([(part, 1) for part in solids] + [(Slice((0,) * len(global_shape), global_shape), -1)])
    if not corners:
        return None
    element = min(corners)
    if corners[element] < 0:
        total, have = prod(global_shape), sum(p.numel for p in pieces)
        return f"{have} of {total} elements are covered; none covers element {element}"
    owners = [p for p in pieces if _holds(p, element)]
    a, b = owners[0], owners[1]
    return (
        f"range {a.flat_start} + {a.numel} of slice {a.offset} + {a.shape} ({a.label}) and range {b.flat_start} + "
        f"{b.numel} of slice {b.offset} + {b.shape} ({b.label}) overlap at element {element}"
    )


def _solids(pieces: Sequence[FlatRange]) -> Iterator[Slice]:
    """The pieces as slices; ranges of one slice that follow one another are taken together."""
    by_box: dict[tuple[Shape, Shape], list[tuple[int, int]]] = {}
    for piece in pieces:
        if piece.numel:
            spans = by_box.setdefault((piece.offset, piece.shape), [])
            spans.append((piece.flat_start, piece.flat_start + piece.numel))
    for (offset, shape), ranges in by_box.items():
        ranges.sort()
        start, stop = ranges[0]
        for a, z in [*ranges[1:], (-1, -1)]:
            if a == stop:
                stop = z
                continue
            for part in range_slices(shape, start, stop):
                yield part.shifted(offset)
            start, stop = a, z


def _corners(slices: Sequence[tuple[Slice, int]]) -> dict[Shape, int]:
    """Sum over weighted slices of ±weight at each corner, zeros left out: a corner of k upper bounds counts (-1)^k.

    Dimension by dimension, so that corners of neighbours cancel before they are multiplied by the next dimension.
    """
    sums: dict[tuple[Shape, Shape, Shape], int] = {}  # (corner so far, low and high of the dimensions to come)
    for part, weight in slices:
        if all(lo < hi for lo, hi in zip(part.low, part.high)):
            _add(sums, ((), part.low, part.high), weight)
    for _ in range(len(slices[0][0].low)):
        following: dict[tuple[Shape, Shape, Shape], int] = {}
        for (corner, low, high), weight in sums.items():
            _add(following, ((*corner, low[0]), low[1:], high[1:]), weight)
            _add(following, ((*corner, high[0]), low[1:], high[1:]), -weight)
        sums = following
    return {corner: weight for (corner, _, _), weight in sums.items()}


def _add(sums: dict[Any, int], key: Any, weight: int) -> None:
    """Add to a sum; one that becomes zero is removed."""
    total = sums.get(key, 0) + weight
    if total:
        sums[key] = total
    else:
        sums.pop(key, None)


def _holds(piece: FlatRange, element: Shape) -> bool:
    """Is the element in the piece?"""
    inside = [i - o for i, o in zip(element, piece.offset)]
    if not all(0 <= i < n for i, n in zip(inside, piece.shape)):
        return False
    at = sum(i * s for i, s in zip(inside, strides(piece.shape)))
    return piece.flat_start <= at < piece.flat_start + piece.numel
