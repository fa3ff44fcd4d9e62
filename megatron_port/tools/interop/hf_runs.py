"""Rows of our parameters that are rows of a Hugging Face family's tensors."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Run:
    """``count`` rows of a parameter of ours from ``ours`` on are the rows of ``tensor`` from ``theirs`` on."""

    ours: int
    tensor: str
    theirs: int
    count: int
    step: int = 1
    """From a row there to the next."""
    expert: int | None = None
    """Place along the first dimension there, where a tensor has all experts; None: there is no such dimension."""

    def rows(self, start: int, count: int) -> slice:
        """Return the rows there that ``count`` rows of ours from ``start`` on are, all of them in this run."""
        first = self.theirs + (start - self.ours) * self.step
        return slice(first, first + (count - 1) * self.step + 1, self.step)


def expert_runs(rows: Sequence[int], there: str | tuple[str, ...], prefix: str, kind: str) -> Iterator[Run]:
    """Runs of a parameter of all experts.

    Args:
        rows: dimensions of its rows: experts, matrices of an expert where it has several, rows of a matrix.
        there: a name for each matrix of one expert, ``{}`` for its number; or one of a tensor of all experts, in which
            rows of an expert's matrices alternate.
        prefix: what stands before these names.
        kind: ``weight`` or ``bias``.
    """
    each, packed = rows[-1], rows[1] if len(rows) == 3 else 1
    for expert in range(rows[0]):
        for part in range(packed):
            ours = (expert * packed + part) * each
            if isinstance(there, str) and "{}" not in there:
                tensor = f"{prefix}{there}" + ("" if kind == "weight" else f"_{kind}")
                yield Run(ours, tensor, part, each, step=packed, expert=expert)
            else:
                name = there if isinstance(there, str) else there[part]
                yield Run(ours, f"{prefix}{name.format(expert)}.{kind}", 0, each)


def overlaps(runs: Sequence[Run], first: int, count: int) -> list[tuple[Run, int, int]]:
    """Return (run, first row, rows) of the rows [first, first + count) of ours, in order; ``runs`` tile ours."""
    out = []
    for at in range(max(bisect_right(runs, first, key=lambda run: run.ours) - 1, 0), len(runs)):
        run = runs[at]
        if run.ours >= first + count:
            break
        start, stop = max(first, run.ours), min(first + count, run.ours + run.count)
        if start < stop:
            out.append((run, start, stop - start))
    return out
