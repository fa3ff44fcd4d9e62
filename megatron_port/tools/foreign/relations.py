"""Relations of a wrong tensor to the right one: a catalogue, from the plainest to the vaguest.

A relation is a function of a :class:`Wrong` that returns what it has found or None. Add one to :data:`CATALOGUE`; the
first that holds is said. Everything is computed in fp64 from what the ranks recorded.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_port.tools.foreign.placement import described, ranges
from megatron_port.tools.foreign.positions import AXIS, Cell, Division
from megatron_port.tools.foreign.record import Part

FACTOR = 1e-3
"""Relative error within which a factor is that of a known number."""


@dataclass(frozen=True)
class Relation:
    """A relation that holds."""

    kind: str
    words: str
    """Said of the tensor: "is 2 (the size of dp) times the right one"."""
    cause: str = ""
    """The usual cause."""
    off: float = 0.0
    """Relative distance that remains if the relation is taken as true."""


@dataclass
class Wrong:
    """A tensor, right in the reference and wrong on some rank."""

    name: str
    right: Tensor
    """The whole one, fp64."""
    parts: Mapping[int, Part]
    """By rank, fp64."""
    ranks: Sequence[int]
    """Those where it is wrong."""
    axes: Mapping[str, int]
    tolerance: float
    floor: float
    """Distance that is rounding."""
    what: str = "gradient"
    earlier: Tensor | None = None
    """The right one of the step before."""
    samples: Tensor | None = None
    """[samples, elements]: gradients of the samples, each as if it were the step's only one."""
    counts: Sequence[int] = ()
    """Labels of each sample."""
    by_cell: Tensor | None = None
    """[cells, elements]: gradients of blocks of positions, each as if its labels were the step's only ones."""
    cells: Sequence[Cell] = ()
    divisions: Sequence[Division] = ()
    """Which positions ranks may have."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Numbers of the layout and of the batch that factors may be, by name."""

    def of(self, part: Part, whole: Tensor) -> Tensor:
        """Return the elements of a whole tensor that a part has; 0 for padding."""
        return whole.flatten()[part.index.clamp(min=0)].masked_fill(part.index < 0, 0)

    def expected(self, rank: int) -> Tensor:
        """Return what a rank should have."""
        return self.of(self.parts[rank], self.right)

    def off(self, found: Tensor, right: Tensor) -> float:
        """Return the relative distance, what rounding explains left out."""
        size = float(right.norm())
        distance = max(0.0, float((found - right).norm()) - self.floor)
        return distance / size if size else math.inf if distance else 0.0

    def near(self, found: Tensor, right: Tensor) -> bool:
        """Is it the same within the tolerance?"""
        return self.off(found, right) <= self.tolerance

    def scale(self, found: Tensor, right: Tensor) -> float:
        """Return the factor that explains most."""
        size = float(right.square().sum())
        return float((found * right).sum()) / size if size else 0.0

    def groups(self, over: Sequence[str]) -> Iterator[list[int]]:
        """Yield ranks that differ on the axes ``over`` alone."""
        names, ranges_ = list(self.axes), [range(n) for n in self.axes.values()]
        places = list(itertools.product(*ranges_))
        kept = [i for i, name in enumerate(names) if name not in over]
        by: dict[tuple[int, ...], list[int]] = {}
        for rank, place in enumerate(places):
            by.setdefault(tuple(place[i] for i in kept), []).append(rank)
        yield from by.values()

    def subsets(self) -> Iterator[tuple[str, ...]]:
        """Yield sets of axes of more than one rank, small ones first."""
        names = [name for name, size in self.axes.items() if size > 1]
        for count in range(1, len(names) + 1):
            yield from itertools.combinations(names, count)

    def number(self, factor: float) -> str:
        """Return words for a factor: "2 (the size of dp)"."""
        written = f"1/{1 / factor:.4g}" if 0 < abs(factor) < 1 - FACTOR else f"{factor:.4g}"
        known = self.named(factor)
        return f"{written} ({known})" if known else written

    def named(self, factor: float) -> str:
        """Return what a factor is; empty: nothing known."""
        size, one_over = (factor, "") if abs(factor) >= 1 else (1 / factor if factor else 0.0, "1 / ")
        found = [name for name, value in self.numbers.items() if value != 1 and abs(size / value - 1) < FACTOR]
        found = [name for name in found if name.startswith("the size of")] or found  # axes explain more
        if not found:
            for (a, x), (b, y) in itertools.combinations(self.numbers.items(), 2):
                if x > 1 and y > 1 and abs(size / (x * y) - 1) < FACTOR:
                    found.append(f"{a} x {b}")
                    break
        return one_over + " or ".join(found[:2]) if found else ""


def absent(wrong: Wrong) -> Relation | None:
    """No rank that holds the parameter has it."""
    if all(rank in wrong.parts for rank in wrong.ranks):
        return None
    return Relation("absent", f"has no {wrong.what}", "it takes no part in the loss there, or hooks dropped it")


def unwanted(wrong: Wrong) -> Relation | None:
    """One process has none, or zero."""
    if bool(wrong.right.any()):
        return None
    size = max(float(wrong.parts[r].value.abs().max()) for r in wrong.ranks)
    return Relation("unwanted", f"is up to {size:.2g}, where one process has none",
                    "a parameter that takes no part in the loss is used on ranks, or a buffer was not cleared")


def not_finite(wrong: Wrong) -> Relation | None:
    """It has elements that are no numbers."""
    count = max(int((~wrong.parts[r].value.isfinite()).sum()) for r in wrong.ranks)
    return Relation("not finite", f"has {count} elements that are not finite") if count else None


def zero(wrong: Wrong) -> Relation | None:
    """It is zero."""
    if any(bool(wrong.parts[r].value.any()) for r in wrong.ranks):
        return None
    if wrong.what == "update":
        return Relation("zero", "was not updated", "the optimizer does not have it, or has a copy of it")
    return Relation("zero", "is zero", "the graph was cut (detach, no_grad), or the gradient went to a copy")


def factor(wrong: Wrong) -> Relation | None:
    """Every rank has the same multiple of it."""
    values = torch.cat([wrong.parts[r].value.flatten() for r in wrong.ranks])
    right = torch.cat([wrong.expected(r).flatten() for r in wrong.ranks])
    c = wrong.scale(values, right)
    if not c or not wrong.near(values, c * right):
        return None
    return Relation("factor", f"is {wrong.number(c)} times the right one", _of_factor(wrong, c),
                    wrong.off(values, c * right))


def _of_factor(wrong: Wrong, c: float) -> str:
    known = wrong.named(c)
    if c < 0:
        return "the sign is turned"
    if "the size of" in known or "ranks" in known:
        if c > 1:
            return ("it is summed over an axis where every rank already has the whole, or never divided by the number "
                    "of replicas")
        return "it is divided by the size of an axis over which it was not summed, or divided twice"
    if "label" in known or "sample" in known:
        return "the loss is divided by another number of labels or samples than the step has"
    return ""


def not_reduced(wrong: Wrong) -> Relation | None:
    """Its sum over the ranks of an axis is right: each rank has its own part."""
    for over in wrong.subsets():
        held = [[wrong.parts[r] for r in group if r in wrong.parts] for group in wrong.groups(over)]
        held, several = [parts for parts in held if parts], max(map(len, held), default=0)
        if several < 2 or any(not torch.equal(p.index, parts[0].index) for parts in held for p in parts):
            continue
        sums = [sum((p.value for p in parts), torch.zeros(())).flatten() for parts in held]
        values = torch.cat(sums)
        wanted = torch.cat([wrong.of(parts[0], wrong.right).flatten() for parts in held])
        c = wrong.scale(values, wanted)
        if c and wrong.near(values, c * wanted):
            return _unreduced(wrong, over, c, several)
    return None


def _unreduced(wrong: Wrong, over: Sequence[str], c: float, size: int) -> Relation:
    named = " x ".join(over)
    if abs(c - 1) < FACTOR:
        return Relation(
            "not reduced", f"is not summed over {named}: the sum over its ranks is the right one",
            f"a parameter that ranks of {named} share, used on different positions or samples, needs an all-reduce "
            f"over {named}",
        )
    if abs(c / size - 1) < FACTOR:
        return Relation(
            "not reduced", f"is not averaged over {named}: the mean over its ranks is the right one",
            f"the all-reduce over {named} is missing, or the group is another",
        )
    return Relation(
        "not reduced", f"is not summed over {named}: the sum over its ranks is {wrong.number(c)} times the right one",
        f"the all-reduce over {named} is missing; " + (_of_factor(wrong, c) or "and a factor is wrong"),
    )


def other_part(wrong: Wrong) -> Relation | None:
    """Ranks have one another's parts."""
    swaps = []
    for rank in wrong.ranks:
        part = wrong.parts[rank]
        for other in wrong.parts:
            theirs = wrong.parts[other]
            unlike = theirs.index.shape == part.index.shape and not torch.equal(theirs.index, part.index)
            if unlike and wrong.near(part.value, wrong.expected(other)):
                swaps.append((rank, other))
                break
        else:
            return None
    words = ", ".join(f"rank {a} has that of rank {b}" for a, b in swaps[:4])
    return Relation("other part", f"is the part of another rank: {words}", "ranks of a group are ordered differently "
                    "where the tensor is divided and where it is used")


def of_step_before(wrong: Wrong) -> Relation | None:
    """It is that of the step before, or has it added."""
    if wrong.earlier is None:
        return None
    found = torch.cat([wrong.parts[r].value.flatten() for r in wrong.ranks])
    this = torch.cat([wrong.expected(r).flatten() for r in wrong.ranks])
    before = torch.cat([wrong.of(wrong.parts[r], wrong.earlier).flatten() for r in wrong.ranks])
    now, then = torch.linalg.lstsq(torch.stack([this, before], 1), found[:, None]).solution[:, 0].tolist()
    if abs(then) < FACTOR or not wrong.near(found, now * this + then * before):
        return None
    if abs(now) < FACTOR:
        return Relation("stale", "is that of the step before",
                        "it is read before it is computed, or a buffer was not filled again")
    many = "" if abs(then - 1) < 10 * FACTOR else f"{then:.3g} times "
    return Relation("not cleared", f"has {many}that of the step before added",
                    "gradients are not cleared between steps")


def by_sample(wrong: Wrong) -> Relation | None:
    """It is a sum over samples with other weights than the right one's."""
    basis = wrong.samples
    if basis is None:
        return None
    found: dict[int, Tensor] = {}
    for rank in wrong.ranks:
        part = wrong.parts[rank]
        if part.value.numel() < 2 * len(basis):
            return None
        columns = torch.stack([wrong.of(part, g).flatten() for g in basis], 1)
        weights = torch.linalg.lstsq(columns, part.value.flatten()[:, None]).solution[:, 0]
        usual = torch.linalg.lstsq(columns, wrong.expected(rank).flatten()[:, None]).solution[:, 0]
        known = (weights, part.value.flatten()), (usual, wrong.expected(rank).flatten())
        if not all(wrong.near(columns @ by, value) for by, value in known):
            return None
        found[rank] = weights / usual
    return _weights(wrong, found)


def _weights(wrong: Wrong, found: Mapping[int, Tensor]) -> Relation | None:
    """Say what weights of samples mean, relative to the right ones."""
    first = next(iter(found.values()))
    same = all(bool((w - first).abs().max() < 0.02 * first.abs().max()) for w in found.values())
    left_out = {rank: [i for i, x in enumerate(w.tolist()) if abs(x) < 0.02] for rank, w in found.items()}
    count = len(first)
    if any(left_out.values()):
        if same:
            twice = [i for i, x in enumerate(first.tolist()) if x > 1.5 * float(first.median())]
            more = f", and counts {ranges(twice)} more than once" if twice else ""
            return Relation("samples", f"leaves out samples {ranges(left_out[wrong.ranks[0]])} of 0-{count - 1}{more}",
                            "shares of the batch overlap" if twice else "a micro-batch or a replica does not count")
        words = "; ".join(
            f"rank {rank} counts samples {ranges([i for i in range(count) if i not in out])}"
            for rank, out in list(left_out.items())[:4]
        )
        own = _own_division(wrong, found)
        return Relation("samples", f"has each rank's samples alone: {words}{own}",
                        "it is not reduced over the ranks that have other samples")
    if not same:
        return None
    if groups := _groups(wrong, first):
        size, label = count // groups, "labels" if len(set(wrong.counts)) > 1 else "samples"
        return Relation(
            "samples", f"is a mean of means: each {size} samples are divided by their own {label}, not by the step's",
            "the loss is averaged over a micro-batch or a replica first; divide its sum by the labels of the whole "
            "step",
        )
    if float(first.max() - first.min()) < 0.02 * float(first.abs().max()):
        return None  # a factor, within what least squares can say
    for size in (n for n in range(count // 2, 1, -1) if count % n == 0):
        apart = first.unflatten(0, (-1, size))
        if float((apart - apart[:, :1]).abs().max()) < FACTOR * float(first.abs().max()):
            each = enumerate(apart[:, 0].tolist())
            words = ", ".join(f"{i * size}-{i * size + size - 1} {x:.4g} times" for i, x in each)
            return Relation("samples", f"weighs groups of {size} samples differently: {words}", "a number of labels of "
                            "each micro-batch or replica stands where that of the whole step should")
    heavy = sorted(range(count), key=lambda i: -abs(float(first[i] / first.median()) - 1))
    words = ", ".join(f"sample {i} {float(first[i]):.3g} times" for i in heavy[:4])
    return Relation("samples", f"weighs samples differently: {words}", "a sample is counted twice, or weighted")


def _own_division(wrong: Wrong, found: Mapping[int, Tensor]) -> str:
    total = sum(wrong.counts)
    for weights in found.values():
        mine = [i for i, x in enumerate(weights.tolist()) if abs(x) >= 0.02]
        own = total / max(1, sum(wrong.counts[i] for i in mine))
        if any(abs(float(weights[i]) / own - 1) > 0.02 for i in mine):
            return ""
    return ", divided by their own labels" if found else ""


def _groups(wrong: Wrong, weights: Tensor) -> int:
    """Return into how many equal groups samples fall whose losses were averaged first; 0: none."""
    count, total = len(weights), sum(wrong.counts)
    for groups in range(2, count + 1):
        size, rest = divmod(count, groups)
        if rest:
            continue
        for place in ([i // size for i in range(count)], [i % groups for i in range(count)]):
            sums = [sum(n for n, at in zip(wrong.counts, place, strict=True) if at == k) for k in range(groups)]
            wanted = torch.tensor([total / (groups * sums[at]) for at in place], dtype=weights.dtype)
            shape = weights / weights.mean() * wanted.mean()
            if float((shape - wanted).abs().max()) < 0.01 and float((wanted - 1).abs().max()) > 0.02:
                return groups
    return 0


def by_position(wrong: Wrong) -> Relation | None:
    """It is a mean of the means of ranks that have other positions."""
    if wrong.by_cell is None:
        return None
    values = torch.cat([wrong.parts[r].value.flatten() for r in wrong.ranks])
    for division in wrong.divisions:
        mean = division.means(wrong.cells, wrong.by_cell).reshape(wrong.right.shape)
        made = torch.cat([wrong.of(wrong.parts[r], mean).flatten() for r in wrong.ranks])
        c = wrong.scale(values, made)
        if c and wrong.near(values, c * made):
            times = "" if abs(c - 1) < FACTOR else f"{wrong.number(c)} times "
            each = f", {division.samples} samples at a time" if division.samples < len(wrong.counts) else ""
            return Relation(
                "positions", f"is {times}a mean of means: each {AXIS} rank divides by its own number of labels"
                f"{each} ({division.words})", f"a masked loss is averaged over a rank's positions first; sum losses "
                f"and labels over {AXIS}, then divide", wrong.off(values, c * made),
            )
    return None


def permuted(wrong: Wrong) -> Relation | None:
    """It has the right rows or elements in another order, or is transposed."""
    words = ""
    cause = "packed blocks (queries, keys and values; gate and up) or experts are divided or read in another order"
    for rank in wrong.ranks:
        value, right = wrong.parts[rank].value, wrong.expected(rank)
        if value.dim() == 2 and value.shape[0] == value.shape[1] and wrong.near(value.T, right):
            words, cause = "is transposed", "a weight is kept transposed, or a product takes it so"
            continue
        for dim in range(value.dim()):
            order = _order(wrong, _rows_along(value, dim), _rows_along(right, dim))
            if order is not None:
                words = _moved(order, dim)
                if words.startswith("is shifted"):
                    cause = "positions, labels or rows are read from the wrong place"
                break
        else:
            return None
    return Relation("permuted", words, cause) if words else None


def _rows_along(value: Tensor, dim: int) -> Tensor:
    """[size of ``dim``, the rest]"""
    return value.movedim(dim, 0).reshape(value.shape[dim], -1)


def _order(wrong: Wrong, found: Tensor, right: Tensor) -> list[int] | None:
    if len(found) < 2 or len(found) > 4096:
        return None
    nearest = torch.cdist(found, right).argmin(1)
    if len(set(nearest.tolist())) < len(found) or not wrong.near(found, right[nearest]):
        return None
    order: list[int] = nearest.tolist()
    return order


def _moved(order: Sequence[int], dim: int) -> str:
    shifts = {(o - i) % len(order) for i, o in enumerate(order)}
    if len(shifts) == 1:
        by = next(iter(shifts))
        by = by if by <= len(order) // 2 else by - len(order)
        return f"is shifted by {by} along dimension {dim}"
    moved = [i for i, o in enumerate(order) if i != o]
    return (f"has the right rows of dimension {dim} in another order: row {moved[0]} is that of {order[moved[0]]}, "
            f"{len(moved)} of {len(order)} moved")


def by_slice(wrong: Wrong) -> Relation | None:
    """Slices of a dimension, such as experts or heads, have factors of their own."""
    dim_of = {r: wrong.parts[r].value.dim() for r in wrong.ranks}
    for dim in range(min(dim_of.values())):
        said: list[str] = []
        for rank in wrong.ranks:
            value = _rows_along(wrong.parts[rank].value, dim)
            right = _rows_along(wrong.expected(rank), dim)
            if len(value) < 2 or value.shape[1] < 2:
                break
            factors = [wrong.scale(v, r) if bool(r.any()) else 1.0 for v, r in zip(value, right, strict=True)]
            if not wrong.near(value, torch.tensor(factors, dtype=right.dtype)[:, None] * right):
                break
            other = {i: c for i, c in enumerate(factors) if abs(c - 1) > 10 * wrong.tolerance}
            values = list(other.values())
            if not values or max(values) - min(values) > FACTOR * max(map(abs, values)) or len(other) == len(factors):
                break
            said.append(f"{ranges(list(other))} of {len(factors)} along dimension {dim} is "
                        + (f"{wrong.number(values[0])} times the right one" if values[0] else "zero"))
        else:
            on = f" (on rank {wrong.ranks[0]})" if len(set(said)) > 1 else ""
            return Relation("slices", f"is right but where {said[0]}{on}",
                            "some heads, experts or rows are scaled or reduced differently from the others")
    return None


def masked(wrong: Wrong) -> Relation | None:
    """Elements are right or zero."""
    zeros = total = 0  # of the rank with most of them
    for rank in wrong.ranks:
        value, right = wrong.parts[rank].value, wrong.expected(rank)
        lost = (value == 0) & (right != 0)
        if not bool(lost.any()) or not wrong.near(value, right.masked_fill(lost, 0)):
            return None
        zeros, total = max((zeros, total), (int(lost.sum()), value.numel()))
    return Relation("masked", f"is right but for {zeros} of {total} elements that are zero",
                    "a mask, or a part that a rank does not add")


def one_rank(wrong: Wrong) -> Relation | None:
    """Copies of ranks that hold the same differ, and some are right."""
    right = [r for r in wrong.parts if r not in wrong.ranks]
    same = [r for r in right if any(torch.equal(wrong.parts[r].index, wrong.parts[b].index) for b in wrong.ranks
                                    if b in wrong.parts)]
    if not same:
        return None
    return Relation("copies", f"is right on ranks {ranges(same)}, which hold the same part",
                    "copies are not kept equal: a broadcast or a reduction leaves these ranks out")


ROUNDINGS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def rounded(wrong: Wrong) -> Relation | None:
    """It is rounded to a narrower type, once, or carries errors of that size."""
    pairs = [(wrong.parts[r].value, wrong.expected(r)) for r in wrong.ranks]
    for name, dtype in ROUNDINGS.items():
        unit = torch.finfo(dtype).eps
        on_grid = all(bool((value == value.to(dtype).double()).all()) for value, _ in pairs)
        if on_grid and all(float((value - right).norm()) <= 2 * unit * float(right.norm()) for value, right in pairs):
            return Relation("rounded", f"is rounded to {name}", f"it is kept or sent in {name}")
    for name, dtype in reversed(ROUNDINGS.items()):
        unit = torch.finfo(dtype).eps
        if all(float((value - right).norm()) <= 4 * unit * float(right.norm()) for value, right in pairs):
            return Relation("imprecise", f"differs by as much as rounding to {name} makes",
                            f"something behind it is computed in {name}, or a small part of it is wrong")
    return None


def unlike(wrong: Wrong) -> Relation:
    """Nothing known holds."""
    value = torch.cat([wrong.parts[r].value.flatten() for r in wrong.ranks])
    right = torch.cat([wrong.expected(r).flatten() for r in wrong.ranks])
    size = float(value.norm()) * float(right.norm())
    angle = float((value * right).sum()) / size if size else 0.0
    where = described(wrong.parts[wrong.ranks[0]].index, wrong.right.shape)
    return Relation("unlike", f"is off by {wrong.off(value, right):.2g} of its size, cosine {angle:.4f} (rank "
                    f"{wrong.ranks[0]} holds: {where})", off=wrong.off(value, right))


CATALOGUE: tuple[Callable[[Wrong], Relation | None], ...] = (
    absent, not_finite, unwanted, zero, factor, not_reduced, other_part, of_step_before, by_sample, by_position,
    permuted, by_slice, masked, rounded, one_rank,
)


def relate(wrong: Wrong) -> Relation:
    """Return the first relation that holds."""
    for relation in CATALOGUE:
        if (found := relation(wrong)) is not None:
            return found
    return unlike(wrong)
