"""Measured rates of kernels, host calls and links by (op, shape, dtype, provider), and what is taken between them.

A table is a CSV file that ``bench calibrate`` writes, or that was copied from a publication, with the columns ``op``,
``provider``, ``dtype``, ``shape`` (sizes joined by "x"), ``rate`` and ``source``:

| op | shape | rate |
|---|---|---|
| attention-forward, attention-backward | length x head size | 10^12 operations of the causal half a second |
| product, product-input, product-weight | rows x columns x inner | 10^12 operations a second |
| stream; norm-, add-, activation-, loss-forward and -backward; update | bytes | 10^9 bytes a second |
| dropout | elements | 10^9 elements a second, random numbers drawn |
| host | calls | 10^6 calls a second |
| host-recompute (a layer's forward pass again), host-micro-batch, host-step | 1 | 10^6 a second |
| all-reduce, all-gather, reduce-scatter | ranks x bytes of the whole buffer | 10^9 bytes of the buffer a second |
| transfer (between two) | 2 x bytes | 10^9 bytes a second |
| all-reduce-, all-gather-, reduce-scatter-hidden | as theirs | share of 1 that products beside them hide |
| tensor- and sequence-forward and -backward | ranks x bytes of an activation | the same: what they add to a pass |

``product`` is a linear layer's forward product. The other two are its backward ones, of which ``product-weight``
includes the addition to the sum of gradients; where a table lacks them, ``product`` stands for them. The provider
``here`` is what the program itself takes on a machine. Bytes of passes are those that the planner counts for them, and
their rate is that of what a larger pass takes longer: a start costs the host a call.

Between measured shapes the *ratio* of the measured rate to the planner's own formula is taken, not the rate: the
formula knows how a product of other sizes differs, the table how far off it is here. The ratio is the mean over the
nearest shapes, weighted by the inverse square of their distance in the logarithm of the sizes. How good that is says
:func:`held_out_errors`: each shape is predicted from the others.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from megatron_port.core.errors import ConfigError

COLUMNS = ("op", "provider", "dtype", "shape", "rate", "source")
NEAREST = 4
"""Measured shapes that a ratio is taken from."""
REACH = math.log(8.0)
"""How far a shape may lie from the nearest measured one, by the logarithms; beyond it the formula is alone."""

Shape = tuple[float, ...]
Formula = Callable[[Shape], float]
"""Shape → the rate that the planner's own formula gives."""


@dataclass(frozen=True)
class Entry:
    """A line of a table."""

    op: str
    provider: str
    dtype: str
    shape: Shape
    rate: float
    source: str = ""


class KernelTable:
    """Entries by (op, provider, dtype). Equal only to itself, so that it may be part of a cached key."""

    def __init__(self, entries: Sequence[Entry], name: str = "") -> None:
        self.name = name
        self.entries = tuple(entries)
        self._groups: dict[tuple[str, str, str], list[Entry]] = {}
        for entry in entries:
            self._groups.setdefault((entry.op, entry.provider, entry.dtype), []).append(entry)
        self._ratios: dict[tuple[str, str, str, Shape], float | None] = {}

    def group(self, op: str, provider: str = "", dtype: str = "") -> list[Entry]:
        """Entries of an op; an empty provider or dtype in the table stands for any."""
        for key in ((op, provider, dtype), (op, provider, ""), (op, "", dtype), (op, "", "")):
            if key in self._groups:
                return self._groups[key]
        return []

    def has(self, op: str, provider: str, dtype: str) -> bool:
        """Whether there are entries of just this provider and dtype."""
        return (op, provider, dtype) in self._groups

    def curve(self, op: str, provider: str, dtype: str, length: float, head: float) -> float | None:
        """Rate of attention at a length: between two measured ones straight in the logarithm, beyond them the last.

        The head size is the nearest that was measured. None: the table has nothing of this provider.
        """
        found = self.group(op, provider, dtype)
        if not found:
            return None
        nearest = min({e.shape[1] for e in found}, key=lambda size: abs(math.log(size / head)))
        return _on_curve(sorted((e.shape[0], e.rate) for e in found if e.shape[1] == nearest), length)

    def rate(self, op: str, dtype: str, size: float) -> float | None:
        """Rate of an op by the last size of its shape, between two measured ones as in :meth:`curve`. None: it was not
        measured."""
        found = self.group(op, "", dtype)
        return _on_curve(sorted((e.shape[-1], e.rate) for e in found), size) if found else None

    def ratio(self, op: str, provider: str, dtype: str, shape: Shape, formula: Formula) -> float | None:
        """Measured over planned rate at a shape. None: nothing was measured near it."""
        key = (op, provider, dtype, shape)
        if key not in self._ratios:
            self._ratios[key] = between(self.group(op, provider, dtype), shape, formula)
        return self._ratios[key]


def _on_curve(points: Sequence[tuple[float, float]], x: float) -> float:
    """The rate at ``x`` of (size, rate), in order: straight in the logarithm of the size, beyond the ends theirs."""
    if x <= points[0][0]:
        return points[0][1]
    for (a, low), (b, high) in zip(points, points[1:]):
        if x <= b:
            return low + (high - low) * math.log(x / a) / math.log(b / a)
    return points[-1][1]


def between(entries: Sequence[Entry], shape: Shape, formula: Formula) -> float | None:
    """Measured over planned rate at ``shape`` from the nearest entries. None: none is within ``REACH``."""
    near = sorted(
        ((math.dist(*([math.log(max(x, 1.0)) for x in s] for s in (e.shape, shape))), e) for e in entries),
        key=lambda pair: pair[0],
    )[:NEAREST]
    if not near or near[0][0] > REACH:
        return None
    weighted = total = 0.0
    for distance, entry in near:
        weight = 1 / (distance * distance + 1e-4)
        weighted += weight * math.log(entry.rate / formula(entry.shape))
        total += weight
    return math.exp(weighted / total)


def held_out_errors(entries: Sequence[Entry], formula: Formula) -> list[float]:
    """Relative error of the rate of each entry as the others and the formula give it."""
    out = []
    for i, entry in enumerate(entries):
        ratio = between([*entries[:i], *entries[i + 1 :]], entry.shape, formula)
        out.append(formula(entry.shape) * (ratio or 1.0) / entry.rate - 1)
    return out


def band(errors: Sequence[float]) -> float:
    """Half width of the band that two thirds of the held-out shapes are in; 0 where nothing was held out."""
    if not errors:
        return 0.0
    return statistics.quantiles([abs(e) for e in errors], n=3)[1] if len(errors) > 1 else abs(errors[0])


def to_csv(entries: Sequence[Entry]) -> str:
    """The text of a table."""
    lines = [",".join(COLUMNS)]
    for e in entries:
        shape = "x".join(f"{size:g}" if size < 1e6 else f"{size:.0f}" for size in e.shape)
        lines.append(",".join([e.op, e.provider, e.dtype, shape, f"{e.rate:.5g}", e.source.replace(",", ";")]))
    return "\n".join(lines) + "\n"


@lru_cache(maxsize=64)
def read_table(path: Path) -> KernelTable:
    """A table from its file.

    Raises:
        ConfigError: no such file, a column that is missing, or a line without a positive rate; the line is named.
    """
    try:
        with path.open(newline="") as f:
            rows = list(csv.DictReader(f))
    except OSError as error:
        raise ConfigError(f"calibration.table {path}: {error.strerror}; name a CSV file of bench calibrate") from error
    entries = []
    for number, row in enumerate(rows, 2):
        missing = [c for c in COLUMNS[:5] if row.get(c) is None]
        if missing:
            raise ConfigError(f"calibration.table {path}, line {number}: no column {', '.join(missing)}")
        try:
            shape, rate = tuple(float(x) for x in row["shape"].split("x")), float(row["rate"])
        except ValueError:
            shape, rate = (), 0.0
        if not shape or not (rate > 0 and math.isfinite(rate)) or min(shape) <= 0:
            raise ConfigError(
                f"calibration.table {path}, line {number}: shape {row['shape']!r} and rate {row['rate']!r} must be "
                "positive numbers"
            )
        entries.append(Entry(row["op"], row["provider"], row["dtype"], shape, rate, row.get("source") or ""))
    return KernelTable(entries, path.name)
