"""The verdict on a case: each tensor of each rank against the reference's, and what a wrong one is."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_port.tools.foreign.norms import of_norm, written
from megatron_port.tools.foreign.outputs import Difference, first_difference
from megatron_port.tools.foreign.placement import ranges
from megatron_port.tools.foreign.positions import AXIS, Cell, Division, divisions
from megatron_port.tools.foreign.record import STEPS, Part, Record, read
from megatron_port.tools.foreign.relations import Relation, Wrong, relate

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}
"""Relative distance of a gradient, by its type; ten times that in the second step, whose weights differ already."""
LOSS = 0.1
"""Part of that for the loss, which averages errors."""
VAGUE = {"imprecise": 1, "unlike": 2}
"""Relations that say little; findings with them come last."""
NOISE = 1e-3
"""Times the rms of a gradient: elements below say nothing of an update."""
FLOOR = 1e-2
"""Part of the tolerance, times the rms of all gradients, that a gradient may have which is zero in exact arithmetic."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, of tensors that share it."""

    what: str
    """loss, norm, gradient, weight or update."""
    step: int
    names: list[str]
    ranks: list[int]
    relation: Relation
    which: str = ""
    """Words for the names."""

    @property
    def text(self) -> str:
        """Words for it."""
        named = f" of {self.which}" if self.which else ""
        when = "" if self.step == 0 else f", step {self.step}"
        where = f" (ranks {ranges(self.ranks)}{when})" if self.ranks else ""
        return f"{self.what}{named}{where} {self.relation.words}"


@dataclass
class Verdict:
    """The findings of a comparison."""

    findings: list[Finding] = field(default_factory=list)
    difference: Difference | None = None
    backward: str = ""
    """The wrong gradient that is computed first: its parameter is the last one in the reference's order."""
    notes: list[str] = field(default_factory=list)
    compared: dict[str, int] = field(default_factory=dict)
    worst: float = 0.0
    """The largest relative distance of a gradient that passed."""

    @property
    def equal(self) -> bool:
        """Is nothing wrong?"""
        return not self.findings

    def lines(self) -> Iterator[str]:
        """Yield the verdict, a line each."""
        counts = ", ".join(f"{count} {what}" for what, count in self.compared.items())
        if self.equal:
            yield f"equal: {counts}; the largest distance of a gradient is {self.worst:.1e}"
        else:
            yield f"different: {len(self.findings)} findings in {counts}"
        for finding in self.findings:
            yield f"  {finding.text}"
            if finding.relation.cause:
                yield f"    usually: {finding.relation.cause}"
        if self.difference is not None:
            after = f", after {self.difference.before}, which is right" if self.difference.before else ""
            if self.difference.order:
                after = f", after {self.difference.before}: {self.difference.order}"
            yield f"  first difference in the forward pass: {self.difference.module}{after}: {self.difference.words}"
        elif not self.equal:
            yield "  forward pass: every output that was compared is right"
        if self.backward:
            yield f"  first difference in the backward pass: gradient of {self.backward}"
        yield from (f"  note: {note}" for note in self.notes)

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON's types."""
        return {"equal": self.equal, "worst": self.worst, "compared": self.compared, "notes": self.notes,
                "backward": self.backward,
                "findings": [{**asdict(f), "text": f.text} for f in self.findings],
                "difference": None if self.difference is None else asdict(self.difference)}


def _pattern(names: Sequence[str], everything: Sequence[str] = ()) -> str:
    """Return names, those of several layers together: layers.*.norm.weight (12)."""
    by: dict[str, list[str]] = {}
    for name in names:
        by.setdefault(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name), []).append(name)
    if len(by) > 6:
        parts = [name.split(".")[:-1] for name in names]
        common = itertools.takewhile(lambda at: len(set(at)) == 1, zip(*parts, strict=False))
        stem = ".".join(at[0] for at in common)
        inside = [name for name in everything if not stem or name.startswith(f"{stem}.")]
        if len(names) > 0.75 * len(inside):
            return f"{len(names)} of {len(inside)} tensors" + (f" in {stem}" if stem else "")
    words = [same[0] if len(same) == 1 else f"{key} ({len(same)})" for key, same in by.items()]
    return ", ".join(words[:6]) + (f" and {sum(map(len, list(by.values())[6:]))} more" if len(words) > 6 else "")


class Comparison:
    """The records of a case. ``axes``: of its ranks; ``numbers``: what factors may be, by name; ``tolerance``: None: as
    the types of gradients and of what modules return have it."""

    def __init__(
        self, folder: Path, size: int, axes: Mapping[str, int], numbers: Mapping[str, float],
        tolerance: float | None = None,
    ) -> None:
        self.reference = read(folder / "reference", 0)
        self.ranks = [read(folder / "layout", rank) for rank in range(size)]
        self.axes, self.counts = axes, list[int]()
        self.samples: Record | None = None
        if (folder / "samples" / "counts.json").is_file():
            self.samples = read(folder / "samples", 0)
            self.counts = json.loads((folder / "samples" / "counts.json").read_text())
        self.by_cell: Record | None = None
        self.cells, self.divisions = list[Cell](), list[Division]()
        if (folder / "positions" / "cells.json").is_file():
            self.by_cell = read(folder / "positions", 0)
            told = json.loads((folder / "positions" / "cells.json").read_text())
            self.cells = [Cell(**cell) for cell in told["cells"]]
            self.divisions = list(divisions(axes[AXIS], told["sequence"], len(self.counts)))
        labels = sum(self.counts)
        sizes = {f"the size of {axis}": float(n) for axis, n in axes.items()}
        if size not in axes.values():
            sizes["the number of ranks"] = float(size)
        self.numbers = {**sizes, **numbers}
        if labels:
            self.numbers |= {"the step's labels": float(labels), "samples": float(len(self.counts))}
        gradients = self.reference.gradients[0]
        dtype = next((part.value.dtype for part in gradients.values()), torch.float32)
        found = {part.value.dtype for record in self.ranks for part in record.gradients[0].values()}
        computed = {output.value.dtype for output in self.reference.outputs} & {torch.bfloat16, torch.float16}
        self.tolerance = tolerance or max(TOLERANCES.get(d, 1e-4) for d in {dtype, *found, *computed})
        self.verdict = Verdict()
        self._rms: dict[int, float] = {}
        """Rms of all gradients, by step."""

    def run(self) -> Verdict:
        """Compare everything."""
        verdict, wrong = self.verdict, set[str]()
        for step in range(STEPS):
            self._losses(step)
            wrong |= self._tensors(step, "gradient", wrong)
            self._norms(step, bool(wrong))
            if {"gradient", "gradient norm"} & {finding.what for finding in verdict.findings}:
                verdict.notes.append("updates are not compared, as gradients or their norm are wrong")
                break
            wrong |= self._tensors(step, "update", wrong)
            if verdict.findings:
                break  # what follows is wrong too
        self._untold()
        self._nothing()
        verdict.findings.sort(key=lambda finding: VAGUE.get(finding.relation.kind, 0))
        types = {output.value.dtype for output in self.reference.outputs}
        bound = max([self.tolerance, *(TOLERANCES.get(t, 1e-4) for t in types)])
        difference = first_difference(self.reference.outputs, self.ranks, bound)
        if verdict.findings:
            verdict.difference = difference
        elif difference is not None:
            verdict.notes.append(f"{difference.module}: {difference.words}; all gradients are right all the same")
        return verdict

    # Gradients and updates

    def _tensors(self, step: int, what: str, known: set[str]) -> set[str]:
        """Compare the gradients of a step, or what it did to the weights; return the names of wrong ones."""
        right = self._right(step, what)
        elements = sum(t.numel() for t in right.values())
        rms = math.sqrt(sum(float(t.square().sum()) for t in right.values()) / max(1, elements))
        if what == "gradient":
            self._rms[step] = rms
        found: dict[str, tuple[Relation, list[int], list[str]]] = {}
        compared = 0
        for name, tensor in right.items():
            parts = self._parts(step, what, name)
            compared += bool(parts)
            if name in known:
                continue
            wrong = self._wrong(step, what, name, tensor, parts, rms)
            if wrong is not None:
                relation = relate(wrong)
                key = f"{relation.kind} {relation.words} {list(wrong.ranks)}"
                if relation.kind == "unlike":
                    key = "unlike"
                _, ranks, names = found.setdefault(key, (relation, [], []))
                ranks += [rank for rank in wrong.ranks if rank not in ranks]
                names.append(name)
        if step == 0:
            self.verdict.compared[f"{what}s"] = compared
        for relation, ranks, names in found.values():
            which = _pattern(names, list(right))
            self.verdict.findings.append(Finding(what, step, names, ranks, relation, which))
        bad = {name for _, _, names in found.values() for name in names}
        if what == "gradient" and bad:
            self.verdict.backward = [name for name in right if name in bad][-1]
        return bad

    def _right(self, step: int, what: str) -> dict[str, Tensor]:
        if what == "gradient":
            none = {name: torch.zeros_like(self.reference.weights[0][name].value, dtype=torch.float64)
                    for name in self.reference.absent[step] if name in self.reference.weights[0]}
            return none | {name: p.value.double() for name, p in self.reference.gradients[step].items()}
        before, after = self.reference.weights[step], self.reference.weights[step + 1]
        changes = {name: after[name].value.double() - before[name].value.double() for name in after if name in before}
        return {name: change.masked_fill(self._noise(step, name), 0) for name, change in changes.items()}

    def _noise(self, step: int, name: str) -> Tensor:
        """Return where the gradients so far are too small to say which way an element goes: Adam makes whole steps of
        their rounding."""
        found = torch.zeros(self.reference.weights[0][name].value.shape, dtype=torch.bool)
        for earlier in range(step + 1):
            if (part := self.reference.gradients[earlier].get(name)) is not None:
                size = part.value.double().abs()
                found |= size < NOISE * size.square().mean().sqrt()
                if float(size.norm()) <= 10 * self._floor(self._rms[earlier], size.numel()):
                    found |= True
        return found

    def _floor(self, rms: float, count: int) -> float:
        """Return the distance that rounding explains in a gradient of so many elements."""
        return self.tolerance * FLOOR * rms * math.sqrt(count)

    def _parts(self, step: int, what: str, name: str) -> dict[int, Part]:
        out = {}
        for record in self.ranks:
            if what == "gradient":
                if name in (table := record.gradients[step]):
                    out[record.rank] = Part(table[name].value.double(), table[name].index)
            elif name in record.weights[step] and name in record.weights[step + 1]:
                before, after = record.weights[step][name], record.weights[step + 1][name]
                noise = self._noise(step, name).flatten()[after.index.clamp(min=0)]
                change = after.value.double() - before.value.double()
                out[record.rank] = Part(change.masked_fill(noise, 0), after.index)
        return out

    def _wrong(
        self, step: int, what: str, name: str, right: Tensor, parts: Mapping[int, Part], rms: float
    ) -> Wrong | None:
        """Return the tensor if it is wrong on some rank."""
        floor = self._floor(rms, right.numel()) * (1 if step == 0 else 10)
        if what == "update":
            weight = self.reference.weights[step][name].value
            floor += 4 * torch.finfo(weight.dtype).eps * float(weight.double().norm())
        missing = [r.rank for r in self.ranks if name in r.absent[step]] if what == "gradient" else []
        tolerance = self.tolerance * (1 if step == 0 else 10)
        earlier = self.reference.gradients[step - 1].get(name) if what == "gradient" and step else None
        wrong = Wrong(
            name=name, right=right, parts=parts, ranks=[], axes=self.axes, tolerance=tolerance, floor=floor, what=what,
            earlier=None if earlier is None else earlier.value.double(),
            counts=self.counts, numbers=self.numbers,
        )
        if step == 0 and what == "gradient":
            wrong.samples, wrong.by_cell = _basis(self.samples, name), _basis(self.by_cell, name)
            wrong.cells, wrong.divisions = self.cells, self.divisions
        if float(right.norm()) > floor:
            wrong.ranks = list(missing)
        for rank, part in parts.items():
            expected = wrong.of(part, right)
            distance = float((part.value - expected).norm())
            padding = part.value[part.index < 0]
            size = float(expected.norm())
            if not distance <= tolerance * size + floor or (len(padding) and bool((padding != 0).any())):
                wrong.ranks = [*wrong.ranks, rank]
            elif step == 0 and what == "gradient" and size > floor:
                self.verdict.worst = max(self.verdict.worst, distance / size)
        return wrong if wrong.ranks else None

    def _nothing(self) -> None:
        """Find fault where nothing was compared: an adapter that tells nothing passes nothing."""
        told = any(record.gradients[0] for record in self.ranks)
        moved = any(bool(change.any()) for change in self._right(0, "update").values())
        if not self.verdict.findings and not ((told and self.reference.gradients[0]) or moved):
            words = "has nothing to compare: neither gradients nor updates are told; see Adapter.gradients and update"
            self.verdict.findings.append(Finding("the adapter", 0, [], [], Relation("nothing", words)))
        if all(x is None for record in (self.reference, *self.ranks) for x in record.losses):
            self.verdict.notes.append("no loss is told, so none was compared")
        none = [n for n in self.reference.absent[0] if not any(n in r.gradients[0] for r in self.ranks)]
        if none:
            self.verdict.notes.append(f"neither one process nor a rank has a gradient of {_pattern(none)}")

    def _untold(self) -> None:
        """Find what no rank has, and note gradients that no rank tells."""
        held = {name for r in self.ranks for name in (*r.weights[0], *r.gradients[0], *r.absent[0])}
        if held and (lost := sorted(self.reference.weights[0].keys() - held)):
            why = "a stage or an expert is not built, or Adapter.name gives it another's name"
            self.verdict.findings.append(Finding("weight", 0, lost, [], Relation("lost", "is on no rank", why),
                                                 _pattern(lost)))
        untold = sorted(n for n in self.reference.gradients[0] if not self._parts(0, "gradient", n))
        if untold:
            self.verdict.notes.append(f"no rank tells the gradient of {_pattern(untold)}; judged by its update alone")

    # Loss and norm

    def _losses(self, step: int) -> None:
        right = self.reference.losses[step]
        told = {r.rank: x for r in self.ranks if (x := r.losses[step]) is not None}
        if right is None or not told:
            return
        self.verdict.compared["losses"] = self.verdict.compared.get("losses", 0) + len(told)
        bound = self.tolerance * LOSS * (1 if step == 0 else 10)

        def near(a: float, b: float) -> bool:
            return abs(a - b) <= bound * abs(b)

        if all(near(x, right) for x in told.values()):
            return
        mean = sum(told.values()) / len(told)
        if near(mean, right) or self._own_losses(told, bound):
            note = "each rank tells the loss of its own samples"
            if note not in self.verdict.notes:
                self.verdict.notes.append(note)
            return
        wrong = Wrong("", torch.tensor(right), {}, [], self.axes, self.tolerance, 0.0, numbers=self.numbers)
        same = max(told.values()) - min(told.values()) <= bound * abs(right)
        ratio = mean / right
        words = f"is {mean:.6g}, the right one {right:.6g}"
        if wrong.named(ratio):
            words += f": {wrong.number(ratio)} times it"
        if not math.isfinite(mean):
            words = f"is {mean}, the right one {right:.6g}"
        elif not same:
            words = "differs between ranks: " + ", ".join(f"{r}: {x:.6g}" for r, x in list(told.items())[:4])
            words += f"; the right one is {right:.6g}"
        elif self.samples is not None and (mean_of_means := self._mean_of_means(mean, bound)):
            words += f": a mean of the means of {mean_of_means} parts of the step"
        if self._mean_of_positions(mean, bound):
            words += f": a mean of the means of {AXIS} ranks, each over its own number of labels"
        self.verdict.findings.append(Finding("loss", step, [], sorted(told), Relation("loss", words)))

    def _own_losses(self, told: Mapping[int, float], bound: float) -> bool:
        """Is each rank's loss that of a share of neighbouring samples?"""
        if self.samples is None or len(told) < 2:
            return False
        losses, count = self.samples.losses, len(self.counts)
        shares = [(a, a + size) for size in range(1, count) if count % size == 0 for a in range(0, count, size)]
        means = [sum((losses[i] or 0.0) * self.counts[i] for i in range(a, b)) / max(1, sum(self.counts[a:b]))
                 for a, b in shares]
        return all(any(abs(x - m) <= bound * abs(m) for m in means) for x in told.values())

    def _mean_of_means(self, value: float, bound: float) -> int:
        assert self.samples is not None
        losses, count = self.samples.losses, len(self.counts)
        for groups in range(2, count + 1):
            if count % groups:
                continue
            size = count // groups
            means = [sum((losses[i] or 0.0) * self.counts[i] for i in range(g * size, g * size + size))
                     / sum(self.counts[g * size : g * size + size]) for g in range(groups)]
            if abs(sum(means) / groups - value) <= bound * abs(value):
                return groups
        return 0

    def _mean_of_positions(self, value: float, bound: float) -> bool:
        if self.by_cell is None:
            return False
        losses = torch.tensor([x or 0.0 for x in self.by_cell.losses], dtype=torch.float64)
        means = [float(division.means(self.cells, losses)) for division in self.divisions]
        return any(abs(mean - value) <= bound * abs(value) for mean in means)

    def _norms(self, step: int, known: bool) -> None:
        """Compare gradient norms that ranks tell; where gradients are wrong already, the norm follows."""
        told = {r.rank: x for r in self.ranks if (x := r.norms[step]) is not None}
        squares = sum(float(p.value.double().square().sum()) for p in self.reference.gradients[step].values())
        right = self.reference.norms[step] or math.sqrt(squares)
        if not told or not right or known:
            return
        self.verdict.compared["norms"] = self.verdict.compared.get("norms", 0) + len(told)
        bound = self.tolerance * (1 + 9 * bool(step)) * right
        bad = {rank: x for rank, x in told.items() if not abs(x - right) <= bound}  # a norm that is no number, too
        if not bad:
            return
        rank, value = next(iter(bad.items()))
        if not math.isfinite(value):
            words = f"is {value}, the right one {right:.6g}"
            self.verdict.findings.append(Finding("gradient norm", step, [], sorted(bad), Relation("norm", words)))
            return
        tables = [record.gradients[step] for record in self.ranks]
        _, found, cause = of_norm(value, right, tables, rank, self.axes, FLOOR * self.tolerance)
        if not found:
            wrong = Wrong("", torch.tensor(right), {}, [], self.axes, self.tolerance, 0.0, numbers=self.numbers)
            found = f"{wrong.number(value / right)} times it"
        words = f"{written(value, right)}: {found}"
        self.verdict.findings.append(Finding("gradient norm", step, [], sorted(bad), Relation("norm", words, cause)))


def _basis(record: Record | None, name: str) -> Tensor | None:
    """Return [steps, elements], the gradients of a parameter."""
    if record is None or any(name not in gradients for gradients in record.gradients):
        return None
    return torch.stack([gradients[name].value.double().flatten() for gradients in record.gradients])
