"""Geometry: flat ranges as slices, and the proof of an exact cover."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_port.core.checkpoint.slices import FlatRange, cover_fault, range_slices, stacked


@dataclasses.dataclass(frozen=True)
class Named(FlatRange):
    """A range with a name for messages."""

    label: str = ""  # type: ignore[assignment, misc]

SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


@settings(max_examples=200, deadline=None)
@given(SHAPES, st.data())
def test_range_slices_are_the_range(shape: tuple[int, ...], data: st.DataObject) -> None:
    numel = int(np.prod(shape, dtype=int))
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    flat = np.arange(numel).reshape(shape)
    slices = list(range_slices(shape, start, stop))
    assert len(slices) <= max(2 * len(shape) - 1, 1)
    seen = [flat[tuple(slice(a, b) for a, b in zip(part.low, part.high))].reshape(-1) for part in slices]
    got = np.concatenate(seen) if seen else np.arange(0)
    assert got.tolist() == list(range(start, stop))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_cover_agrees_with_counting(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple))
    pieces = []
    counts = np.zeros(shape, dtype=int)
    for _ in range(data.draw(st.integers(1, 4))):
        low = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
        box = tuple(data.draw(st.integers(1, n - lo)) for n, lo in zip(shape, low))
        numel = int(np.prod(box))
        start = data.draw(st.integers(0, numel - 1))
        size = data.draw(st.integers(1, numel - start))
        pieces.append(FlatRange(low, box, start, size))
        view = counts[tuple(slice(lo, lo + n) for lo, n in zip(low, box))]
        marks = np.zeros(numel, dtype=int)
        marks[start : start + size] = 1
        view += marks.reshape(box)
    assert (cover_fault(pieces, shape) is None) == bool((counts == 1).all())
    assert not stacked(pieces, shape) or bool((counts == 1).all())


@given(st.lists(st.integers(0, 3), max_size=4), st.sampled_from([(), (1,), (2, 3), (0,)]), st.data())
def test_what_is_stacked_covers(rows: list[int], inner: tuple[int, ...], data: st.DataObject) -> None:
    """Rows of a tensor by rank are; whatever is changed of one, what still counts as stacked covers."""
    shape, pieces = (sum(rows), *inner), []
    for i, n in enumerate(rows):
        offset = (sum(rows[:i]), *(0 for _ in inner))
        pieces.append(FlatRange(offset, (n, *inner), 0, n * math.prod(inner)))
    assert stacked(pieces, shape) == all(rows)
    assert not stacked(pieces, shape) or cover_fault(pieces, shape) is None
    if pieces:
        i, small = data.draw(st.integers(0, len(pieces) - 1)), st.integers(0, 3)
        change: dict[str, Any] = data.draw(st.sampled_from([
            {"flat_start": data.draw(small)}, {"numel": data.draw(small)},
            {"offset": tuple(data.draw(small) for _ in shape)}, {"shape": tuple(data.draw(small) for _ in shape)},
        ]))
        pieces[i] = dataclasses.replace(pieces[i], **change)
        assert not stacked(pieces, shape) or cover_fault(pieces, shape) is None


@pytest.mark.parametrize(
    ("pieces", "says"),
    [
        ([Named((0,), (4,), 0, 4, "a")], "4 of 10 elements are covered; none covers element (4,)"),
        ([], "0 of 10"),
        ([Named((0,), (10,), 0, 10, "a"), Named((0,), (10,), 0, 10, "b")], "(a) and range 0 + 10"),
        # As many elements as the tensor has, one twice and one never.
        ([Named((0,), (6,), 0, 6, "a"), Named((5,), (4,), 0, 4, "b")], "overlap at element (5,)"),
        ([Named((0,), (10,), 0, 6, "a"), Named((0,), (10,), 5, 5, "b")], "overlap"),
        ([Named((0,), (6,), 0, 6, "a"), Named((5,), (5,), 0, 5, "b")], "overlap"),
        ([Named((0,), (11,), 0, 11, "a")], "leaves the tensor"),
        ([Named((0,), (10,), 5, 6, "a")], "leaves its slice"),
        ([Named((-1,), (10,), 0, 10, "a")], "negative"),
        ([Named((0, 0), (1, 10), 0, 10, "a")], "other dimensions"),
    ],
)
def test_faults_are_named(pieces: list[FlatRange], says: str) -> None:
    assert says in str(cover_fault(pieces, (10,)))


def _columns(n: int) -> list[FlatRange]:
    """Columns that are each their own piece: all are open at once in a sweep along the first dimension."""
    return [Named((0, i), (3, 1), 0, 3, "f") for i in range(n)]


def _ragged(n: int) -> list[FlatRange]:
    """Two ranges of each slice, cut in the middle of a row, in no order."""
    return [Named((0, 2 * i), (3, 2), a, 3, "f") for i in range(n // 2) for a in (3, 0)]


@pytest.mark.parametrize("fault", [False, True])
@pytest.mark.parametrize("make", [_columns, _ragged])
def test_the_time_grows_with_the_number_of_pieces(make: Callable[[int], list[FlatRange]], fault: bool) -> None:
    """Eight times as many take eight times as long, where a pairwise comparison takes 64 times."""

    def seconds(n: int) -> float:
        pieces = make(n)
        if fault:
            pieces[-1] = pieces[0]
        best = math.inf
        for _ in range(3):
            began = time.process_time()
            found = cover_fault(pieces, (3, n))
            best = min(best, time.process_time() - began)
            assert (found is not None) == fault
        return best

    assert seconds(4000) < 24 * seconds(500)
