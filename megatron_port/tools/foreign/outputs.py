"""The first module whose output differs, in the order in which the reference's modules end.

Ranks have rows of other positions, samples or experts than one process, so rows (vectors of the last dimension) are
looked for among those of the reference. A module is right if each of its rows is there and none is missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_port.tools.foreign.placement import ranges
from megatron_port.tools.foreign.record import Output, Record

MOST_ROWS = 4096
"""Rows of the reference's output; a module with more is not compared."""

PACKED = ((1,), (1, 1), (1, 1, 1), (2, 1, 1), (4, 1, 1), (8, 1, 1))
"""Relative sizes of features that are packed: a gate and what it gates; queries, keys and values, of groups too."""


@dataclass(frozen=True)
class Difference:
    """The first one."""

    module: str
    words: str
    before: str
    """The last module before it that was compared and is right; empty: none."""
    order: str = ""
    """Where ranks have the rows of ``before`` in an order of their own: which."""


def first_difference(reference: Sequence[Output], ranks: Sequence[Record], tolerance: float) -> Difference | None:
    """Return it; None: all that could be compared is right."""
    right, before, order = _rows(reference), "", ""
    found = [_rows(record.outputs) for record in ranks]
    for key, rows in right.items():
        held = {record.rank: mine[key] for record, mine in zip(ranks, found, strict=True) if key in mine}
        if not held or not len(rows) or len(rows) > MOST_ROWS or not bool(rows.isfinite().all()):
            continue  # as masks of -inf that a module returns
        words = _difference(rows, held, tolerance)
        if words:
            return Difference(key[0], words + _turned(list(right), ranks, found), before, order)
        before, order = key[0], _order(rows, held, tolerance)
    return None


def _turned(
    names: Sequence[tuple[str, int]], ranks: Sequence[Record], found: Sequence[Mapping[tuple[str, int], Tensor]]
) -> str:
    """Return which modules a rank runs in another order; empty: none."""
    place = {key: i for i, key in enumerate(names)}
    for record, mine in zip(ranks, found, strict=True):
        known = [key for key in mine if key in place]
        for earlier, later in zip(known, known[1:], strict=False):
            if place[later] < place[earlier]:
                return f"; rank {record.rank} runs {earlier[0]} before {later[0]}, one process after it"
    return ""


def _order(right: Tensor, held: Mapping[int, Tensor], tolerance: float) -> str:
    """Return which rows ranks have, if one has them in another order than one process, as positions that start
    elsewhere."""
    unique, inverse = torch.unique(right, dim=0, return_inverse=True)
    if len(unique) < len(right) and len(unique) < 2:
        return ""
    size, words = unique.norm(dim=1).clamp(min=1e-30), []
    first = torch.full((len(unique),), len(right)).scatter_reduce_(0, inverse, torch.arange(len(right)), "amin")
    turned = False
    for rank, rows in sorted(held.items()):
        nearest = first[_nearest(rows, unique, size)[1]].tolist()
        runs: list[list[int]] = []
        for number in nearest:
            if runs and number == runs[-1][1] + 1:
                runs[-1][1] = number
            else:
                runs.append([number, number])
        turned |= any(later[0] < earlier[0] for earlier, later in zip(runs, runs[1:], strict=False))
        words.append(f"rank {rank} has {', '.join(f'{a}-{b}' for a, b in runs[:4])}")
    return f"its rows are in another order: {'; '.join(words[:4])}" if turned and len(unique) == len(right) else ""


def _rows(outputs: Iterable[Output]) -> dict[tuple[str, int], Tensor]:
    """Return the rows of all calls by module and part, in the order of the first call."""
    out: dict[tuple[str, int], list[Tensor]] = {}
    for output in outputs:
        if output.value.dim():
            rows = output.value.double().reshape(-1, output.value.shape[-1])
            out.setdefault((output.module, output.part), []).append(rows)
    return {key: torch.cat(rows) for key, rows in out.items() if len({r.shape[-1] for r in rows}) == 1}


def _difference(right: Tensor, held: Mapping[int, Tensor], tolerance: float) -> str:
    """Return words for what differs; empty: nothing."""
    if words := _not_finite(held):
        return words
    total, right = len(right), torch.unique(right, dim=0)
    seen, unlike = torch.zeros(len(right), dtype=torch.bool), {}
    size = right.norm(dim=1).clamp(min=1e-3 * float(right.norm(dim=1).max()) + 1e-30)
    for rank, rows in held.items():
        off, nearest = _nearest(rows, right, size)
        beyond = max(0, len(rows) - total)  # as pipelines run a stage once to learn its shapes
        if int((off > tolerance).sum()) > beyond:
            unlike[rank] = (int((off > tolerance).sum()), len(rows), float(off.max()))
        seen[nearest[off <= tolerance]] = True
    if unlike:
        if _partial(right, held, size, tolerance):
            return ""
        return _described(right, held, unlike, tolerance)
    if not bool(seen.all()):
        return (f"all rows are right, but {int((~seen).sum())} of {len(right)} that one process has are on no rank: "
                "ranks repeat positions, samples or experts where they should have others")
    return ""


def _not_finite(held: Mapping[int, Tensor]) -> str:
    """Return where ranks have elements that are no numbers, and one process has none; empty: nowhere."""
    lost = {rank: ~rows.isfinite() for rank, rows in held.items() if not bool(rows.isfinite().all())}
    if not lost:
        return ""
    rank, where = next(iter(sorted(lost.items())))
    row, column = where.nonzero()[0].tolist()
    kind = "NaN" if bool(held[rank].isnan().any()) else "infinity"
    words = (f"{int(where.any(1).sum())} of {len(where)} rows on rank {rank} have {kind}, the first in row {row}, "
             f"column {column}")
    return words + (f"; so on ranks {ranges(sorted(lost))}" if len(lost) > 1 else "")


def _nearest(rows: Tensor, right: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each row how far the nearest right one is, and which; of features that ranks divide, the nearest
    block of them."""
    width, full = rows.shape[1], right.shape[1]
    best, which = torch.full((len(rows),), torch.inf, dtype=torch.float64), torch.zeros(len(rows), dtype=torch.int64)
    if width > full or full % width:
        return best, which
    for part in _blocks(right, width):
        distance = torch.cdist(rows, part, compute_mode="donot_use_mm_for_euclid_dist")
        off, nearest = (distance / (size if width == full else part.norm(dim=1).clamp(min=1e-30))).min(1)
        if float(off.sum()) < float(best.sum()):
            best, which = off, nearest
    return best, which


def _blocks(right: Tensor, width: int) -> Iterator[Tensor]:
    """Yield what a rank may have of rows: equal blocks, of packed features the same block of each."""
    count = right.shape[1] // width
    for packed in PACKED if count > 1 else PACKED[:1]:
        unit, rest = divmod(right.shape[1], sum(packed))
        if rest or any(share * unit % count for share in packed):
            continue
        pieces = right.split([share * unit for share in packed], 1)
        for block in range(count):
            yield torch.cat([piece.chunk(count, 1)[block] for piece in pieces], 1)


def _partial(right: Tensor, held: Mapping[int, Tensor], size: Tensor, tolerance: float) -> bool:
    """Is the sum over all ranks, or over neighbouring pairs, right? A reduction follows then."""
    ranks = sorted(held)
    count = len(ranks)
    for groups in (g for g in range(1, count) if count % g == 0):
        for pick in ([ranks[g::groups] for g in range(groups)],
                     [ranks[g * count // groups : (g + 1) * count // groups] for g in range(groups)]):
            if any(len({tuple(held[r].shape) for r in group}) > 1 for group in pick):
                continue
            sums = [sum((held[r] for r in group), torch.zeros(())) for group in pick]
            if all(bool((_nearest(s, right, size)[0] <= tolerance).all()) for s in sums):
                return True
    return False


def _described(
    right: Tensor, held: Mapping[int, Tensor], unlike: Mapping[int, tuple[int, int, float]], tolerance: float
) -> str:
    rank, (count, total, off) = next(iter(unlike.items()))
    words = f"{count} of {total} rows on rank {rank} are no rows of the reference (off by {off:.2g})"
    if len(unlike) > 1:
        words += f"; so on ranks {ranges(sorted(unlike))}"
    rows = held[rank]
    if rows.shape[1] == right.shape[1]:
        unit = torch.nn.functional.normalize
        cosines, nearest = (unit(rows, dim=1) @ unit(right, dim=1).T).max(1)
        factors = (rows * right[nearest]).sum(1) / right[nearest].square().sum(1).clamp(min=1e-30)
        if bool((cosines > 1 - tolerance).all()) and float(factors.max() - factors.min()) < 0.01 * float(factors.max()):
            words += f"; they are {float(factors.mean()):.4g} times such rows"
    return words
