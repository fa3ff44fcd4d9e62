"""Causes of a wrong gradient norm: which tensors, or parts of them, it counts otherwise than the right one."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence

from megatron_port.tools.foreign.record import Part

Candidate = tuple[float, str, str]
"""Squares that are counted too much, words, cause."""

WITHOUT = "copies of a parameter are to be counted once, parts of it all; what a parameter says of itself is wrong"


def of_norm(
    value: float, right: float, ranks: Sequence[Mapping[str, Part]], rank: int, axes: Mapping[str, int],
    tolerance: float,
) -> Candidate:
    """Return what a norm counts otherwise than it should; no words: nothing found. ``ranks``: their gradients, right
    ones, of which ``rank`` told ``value``; ``axes``: theirs."""
    off, limit = value**2 - right**2, tolerance * max(right**2, value**2)
    best, least = (off, "", ""), limit + 0.01 * abs(off)
    for candidate in _candidates(ranks, rank, axes):
        distance = abs(candidate[0] - off)
        if candidate[0] and distance < least:
            best, least = candidate, 0.1 * distance if distance > limit else 0.0
    return best


def _squares(part: Part) -> float:
    return float(part.value.double().square().sum())


def _once(tables: Sequence[Mapping[str, Part]]) -> float:
    """Return the squares of all parts that ranks have, each counted once."""
    known: dict[tuple[str, bytes], float] = {}
    for table in tables:
        for name, part in table.items():
            known.setdefault((name, part.index.numpy().tobytes()), _squares(part))
    return sum(known.values())


def _apart(ranks: Sequence[Mapping[str, Part]], rank: int, axes: Mapping[str, int]) -> Iterator[Candidate]:
    """Yield norms that leave out an axis: those of ranks that are at the same place of it."""
    places, total = list(itertools.product(*map(range, axes.values()))), _once(ranks)
    for at, (axis, size) in enumerate(axes.items()):
        same = [table for place, table in zip(places, ranks, strict=True) if place[at] == places[rank][at]]
        if size > 1:
            yield _once(same) - total, f"it is not summed over {axis}", f"ranks of {axis} have other tensors or parts"


def _candidates(ranks: Sequence[Mapping[str, Part]], rank: int, axes: Mapping[str, int]) -> Iterator[Candidate]:
    """Yield what is often counted otherwise, whole sets of tensors first."""
    by: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for table in ranks for name in table):
        by.setdefault(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name), []).append(name)
    once, all_, other = {}, {}, {}
    for pattern, names in by.items():
        parts = {name: [table[name] for table in ranks if name in table] for name in names}
        different = {name: {part.index.numpy().tobytes(): _squares(part) for part in held}
                     for name, held in parts.items()}
        once[pattern] = sum(sum(d.values()) for d in different.values())
        all_[pattern] = sum(sum(_squares(p) for p in held) for held in parts.values())
        first = sum(_squares(next(table[name] for table in ranks if name in table)) for name in names)
        other[pattern] = once[pattern] - first
    own = sum(_squares(p) for p in ranks[rank].values())
    total = sum(once.values())
    yield own - total, "it is that of this rank's tensors alone", "it is not summed over ranks that have other parts"
    yield sum(all_.values()) - total, "it is that of all ranks' tensors, copies counted", "every rank's copy is counted"
    yield from _apart(ranks, rank, axes)
    for pattern in by:
        yield -once[pattern], f"{pattern} is not counted", WITHOUT
        if other[pattern]:
            yield -other[pattern], f"of {pattern} the first rank's part alone is counted", WITHOUT
        for times in sorted({len(ranks), *(n for n in range(2, len(ranks)) if len(ranks) % n == 0)}):
            yield (times - 1) * once[pattern], f"{pattern} is counted {times} times", WITHOUT


def written(value: float, right: float) -> str:
    """Return both numbers, with as many digits as show that they differ."""
    off = abs(value / right - 1)
    digits = 6 if off > 1e-4 else min(12, 3 - math.floor(math.log10(off or 1e-9)))
    return f"is {value:.{digits}g}, the right one {right:.{digits}g}"
