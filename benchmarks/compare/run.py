"""All peers of a size: build, prove that they compute the same, then time them in turn."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.compare.child import Child
from benchmarks.compare.peer import PEERS, REFERENCE
from benchmarks.compare.sizes import Size

CHECKED_STEPS = 5
"""A recorded step is replayed from the fourth on (``kernels.step_graphs``), so the last two are replays."""
TOLERANCE = {"fp32": (2e-6, 2e-5), "bf16": (1e-3, 1e-2), "fp8": (5e-3, 5e-2)}
"""Relative, by precision (fp8: of a peer whose layers are in 8 bits): of the first step's loss (the same weights); of
the further losses and of all gradient norms (which clip and optimizer enter)."""
LAYER_TOLERANCE = {"fp32": 1e-5, "bf16": 8e-2, "fp8": 0.5}
"""Of elements of a stack's output and input gradient over their rms, and of the norm of all weights' gradients."""


@dataclass
class PeerResult:
    """A peer on a size."""

    peer: str
    state: str = "counted"
    """counted | handicapped (shown, not counted) | refused (computes something else) | unable | failed"""
    reason: str = ""
    settings: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, list[float]] = field(default_factory=dict)
    difference: float | None = None
    """The largest relative difference from the reference over its tolerance."""
    seconds: list[float] = field(default_factory=list)
    """Of a step, by repetition."""
    cpu_seconds: list[float] = field(default_factory=list)
    """Processor time of a step, by repetition."""
    memory: int = 0

    @property
    def timed(self) -> bool:
        """It is worth timing."""
        return self.state in ("counted", "handicapped")

    def fail(self, answer: dict[str, Any]) -> bool:
        """Take an answer that is none; whether it was."""
        for state in ("unable", "failed"):
            if state in answer:
                self.state, self.reason = state, str(answer[state])
                return True
        return False


@dataclass(frozen=True)
class Plan:
    """How to measure. ``keep``: all peers stay in memory between repetitions; else each repetition is a new process."""

    device: str
    threads: int
    repetitions: int = 5
    steps: int = 5
    warm_up: int = 3
    keep: bool = True
    timeout_s: float = 1800.0
    changes: dict[str, int] = field(default_factory=dict)
    ends: float | None = None
    """Of time.monotonic: no repetition but the first begins after it, and no answer is waited for much longer."""
    reference: dict[str, list[float]] = field(default_factory=dict)
    """The numbers of plain torch as an earlier comparison stored them; then it need not run to prove the others."""

    def child(self) -> Child:
        """A worker process that answers within half of the time that is left: one that compiles for longer must not
        take the others' repetitions."""
        left = self.timeout_s if self.ends is None else max(20.0, 0.5 * (self.ends - time.monotonic()))
        return Child(self.device, self.threads, min(self.timeout_s, left))

    @property
    def over(self) -> bool:
        """There is no time for another repetition."""
        return self.ends is not None and time.monotonic() > self.ends


def stored_reference(path: Path, size: Size) -> dict[str, list[float]]:
    """Return what plain torch computed for this size in an earlier comparison; {}: that file has no such row."""
    for found in json.loads(path.read_text())["sizes"]:
        model = {key: getattr(size.model, key) for key in found["model"]}
        batch = (found["micro_batch"], found["global_batch"], found["dtype"])
        if found["size"] != size.name or found["model"] != model or batch != (
                size.micro_batch, size.global_batch, size.dtype):
            continue
        for row in found["peers"]:
            if row["peer"] == REFERENCE and "grad_norms" in row:
                return {key: row[key] for key in ("losses", "grad_norms", "probes") if key in row}
    return {}


def differences(
    size: Size, mine: dict[str, list[float]], reference: dict[str, list[float]], precision: str = ""
) -> float:
    """The largest difference of a peer's numbers from the reference's, in tolerances of ``precision`` (the size's)."""
    precision = precision or size.dtype
    if size.layers_only:
        bound = LAYER_TOLERANCE[precision]
        off = [abs(a - b) / bound for a, b in zip(mine["probes"], reference["probes"])]
        off += [abs(a / b - 1) / bound for a, b in zip(mine["grad_norms"], reference["grad_norms"])]
        return max(x if x == x else float("inf") for x in off)
    first, later = TOLERANCE[precision]
    pairs = [
        (kind, i, a, b)
        for kind in ("losses", "grad_norms") for i, (a, b) in enumerate(zip(mine[kind], reference[kind]))
    ]
    worst = 0.0
    for kind, i, a, b in pairs:
        bound = first if kind == "losses" and i == 0 else later
        off = abs(a - b) / max(abs(b), 1e-12) / bound
        worst = max(worst, off if off == off else float("inf"))
    return worst


def compare(
    size: Size, names: Sequence[str], plan: Plan, say: Callable[[str], None]
) -> tuple[list[PeerResult], list[dict[str, Any]]]:
    """(outcome of each peer, rates of products and copies measured between the repetitions)."""
    needed = [] if REFERENCE in names or plan.reference else [REFERENCE]
    outcomes = [PeerResult(name) for name in [*needed, *names]]
    children: dict[str, Child] = {}
    products = plan.child()
    if plan.keep:  # all start at once: importing takes longer than a small size does
        children = {o.peer: plan.child() for o in outcomes}
    rates: list[dict[str, Any]] = []

    def start(outcome: PeerResult) -> Child:
        child = children.get(outcome.peer) or plan.child()
        answer = child.ask("build", peer=outcome.peer, size=size.name, changes=plan.changes)
        if not outcome.fail(answer):
            outcome.settings = answer["settings"]
            if answer["handicap"] and outcome.state == "counted":
                outcome.state, outcome.reason = "handicapped", answer["handicap"]
        return child

    def rate() -> None:
        answer = products.ask("matmul", dtype=size.dtype, small=size.for_tests)
        if "flops" in answer:
            rates.append(answer)

    try:
        for outcome in outcomes:
            child = start(outcome)
            if outcome.timed:
                answer = child.ask("check", steps=CHECKED_STEPS)
                if not outcome.fail(answer):
                    outcome.numbers = answer
                    if plan.keep:
                        child.ask("time", steps=1, warm_up=plan.warm_up)
            if not (outcome.timed and plan.keep):
                child.close()
            say(f"  {outcome.peer}: {outcome.reason or 'built'}")
        judge(size, outcomes, plan.reference)
        for outcome in outcomes:
            if plan.keep and not (outcome.timed and outcome.peer in names):
                children.pop(outcome.peer).close()
        for round_ in range(plan.repetitions):
            if round_ and plan.over:  # what was built and checked is timed in any case
                say(f"  {round_} of {plan.repetitions} repetitions: no time is left")
                break
            rate()
            order = [o for o in outcomes if o.timed and o.peer in names]
            # Rotated and every second time reversed: nobody always follows the same neighbour.
            shift = round_ % max(len(order), 1)
            order = order[shift:] + order[:shift]
            for outcome in order[::-1] if round_ % 2 else order:
                child = children.get(outcome.peer) or start(outcome)
                unseen = max(plan.warm_up, CHECKED_STEPS)  # a new process records in its first steps
                answer = child.ask("time", steps=plan.steps, warm_up=1 if plan.keep else unseen)
                if not outcome.fail(answer):
                    outcome.seconds.append(answer["seconds"])
                    outcome.cpu_seconds.append(answer["cpu_seconds"])
                    outcome.memory = max(outcome.memory, answer["memory"])
                if not plan.keep:
                    child.close()
            say(f"  repetition {round_ + 1} of {plan.repetitions}")
        rate()
    finally:
        for child in (products, *children.values()):
            child.close()
    return [o for o in outcomes if o.peer in names], rates


def judge(size: Size, outcomes: Sequence[PeerResult], stored: dict[str, list[float]] | None = None) -> None:
    """Refuse what does not compute what the reference computes; all of it, where there is no reference. ``stored``: its
    numbers from an earlier run, which then judge this run's reference too."""
    reference = stored or next((o.numbers for o in outcomes if o.peer == REFERENCE and o.numbers), None)
    for outcome in outcomes:
        if not outcome.timed:
            continue
        if reference is None:
            outcome.state, outcome.reason = "refused", f"{REFERENCE} did not run, so nothing says that this is the same"
            continue
        precision = "fp8" if PEERS[outcome.peer].fp8 else size.dtype
        outcome.difference = differences(size, outcome.numbers, reference, precision)
        if not outcome.difference <= 1.0:
            outcome.state = "refused"
            outcome.reason = (
                f"computes something else: {outcome.difference:.3g} tolerances from {REFERENCE} "
                f"({_short(outcome.numbers)} against {_short(reference)})"
            )


def _short(numbers: dict[str, list[float]]) -> str:
    return "; ".join(f"{kind} {[round(v, 6) for v in values[:3]]}" for kind, values in numbers.items())


def ours(name: str) -> bool:
    """The row is this project's, in the size's own precision."""
    return PEERS[name].ours and not PEERS[name].fp8
