"""All peers of a size: build, check, and time each in the same process; what was measured is handed on at once."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.compare.child import Child
from benchmarks.compare.clocks import ClockLog
from benchmarks.compare.peer import PEERS, REFERENCE
from benchmarks.compare.sizes import Size

CHECKED_STEPS = 5
"""A captured step is replayed from the fourth on (``kernels.step_graphs``), so the last two are replays."""
TOLERANCE = {"fp32": (2e-6, 2e-5), "bf16": (1e-3, 1e-2), "fp8": (5e-3, 5e-2), "narrow": (5e-3, 5e-2)}
"""Relative, by precision (fp8: of a peer whose layers are in 8 bits; narrow: whose weights, sums and moments are in
bf16): of the first step's loss (the same weights); of the further losses and of all gradient norms (which clip and
optimizer enter)."""
LAYER_TOLERANCE = {"fp32": 1e-5, "bf16": 8e-2, "fp8": 0.5, "narrow": 8e-2}
"""Of elements of a stack's output and input gradient over their rms, and of the norm of all weights' gradients."""
LEAST_S = 8.0
"""With less time than this left no peer is begun."""
PROOF_S = 12.0
"""Left for plain torch, where it was not asked for, by a program that is to prove the numbers and may not end."""
NO_TIME = "no time was left"


@dataclass
class PeerResult:
    """A peer on a size."""

    peer: str
    state: str = "not run"
    """counted | handicapped (shown, not counted) | refused (computes something else) | unproved (nothing of other code
    has computed the same yet) | unable | failed | cut (it did not answer while there was time) | not run"""
    reason: str = ""
    settings: dict[str, str] = field(default_factory=dict)
    handicap: str = ""
    favour: str = ""
    numbers: dict[str, list[float]] = field(default_factory=dict)
    difference: float | None = None
    """The largest relative difference from the reference over its tolerance."""
    seconds: list[float] = field(default_factory=list)
    """Of a step, by repetition."""
    cpu_seconds: list[float] = field(default_factory=list)
    """Processor time of a step, by repetition."""
    clocks: list[dict[str, Any]] = field(default_factory=list)
    """Power and clocks, by repetition (``clocks.summarise``)."""
    memory: int = 0

    @property
    def runs(self) -> bool:
        """Nothing has gone wrong with it so far."""
        return self.state not in ("unable", "failed", "cut")

    def fail(self, answer: dict[str, Any]) -> bool:
        """Take an answer that is none; whether it was."""
        for state in ("unable", "failed", "cut"):
            if state in answer:
                self.state, self.reason = state, str(answer[state])
                return True
        return False


@dataclass(frozen=True)
class Plan:
    """How to measure. ``kept``: so many peers, from the first on, stay in memory and take turns; each of the others is
    timed to its end and leaves."""

    device: str
    threads: int
    repetitions: int = 5
    steps: int = 5
    warm_up: int = 3
    kept: int = 1 << 30
    timeout_s: float = 1800.0
    changes: dict[str, int] = field(default_factory=dict)
    ends: float | None = None
    """Of time.monotonic: nothing begins after it, and no answer is waited for longer."""
    window_s: float = 0.0
    """A repetition has as many steps as take so long, at least ``steps``."""

    @property
    def left(self) -> float:
        """Seconds until ``ends``."""
        return float("inf") if self.ends is None else self.ends - time.monotonic()


def kept_peers(size: Size, names: Sequence[str], memory: int) -> int:
    """Return how many of the peers, from the first on, fit beside each other into so many bytes (0: no limit).

    Each takes what a step needs, an eighth of it for what the allocator cannot use, and 2 GB of libraries and buffers.
    """
    each = 1.125 * size.step_bytes + 2e9
    return len(names) if not memory else min(len(names), int(0.95 * memory / each))


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


class Comparison:
    """One size's peers. ``save`` is called whenever there is a new figure, before anything else begins."""

    def __init__(
        self, size: Size, names: Sequence[str], plan: Plan, *, say: Callable[[str], None],
        save: Callable[[Comparison], None], clocks: ClockLog | None = None, worker: Callable[..., Any] = Child,
    ) -> None:
        self.size, self.plan, self.say, self.save = size, plan, say, save
        self.clocks, self.worker = clocks or ClockLog(None, "not asked for"), worker
        other = [name for name in names if not PEERS[name].ours]
        self.outcomes = [PeerResult(name) for name in (*names, *([] if other else [REFERENCE]))]
        self.rates: list[dict[str, Any]] = []
        self.children: dict[str, Any] = {}
        self.reserve_s = 0.0
        """What the peers that are still to begin are left by the one that is asked."""
        self.stand_in = [] if REFERENCE in (o.peer for o in self.outcomes) else [PeerResult(REFERENCE)]
        """Plain torch, begun only where the other programs that were to prove the numbers have not computed them."""

    def run(self) -> None:
        """Measure. First whoever stays in memory, in turns; then the others one after another."""
        self.save(self)
        kept, rest = self.outcomes[: self.plan.kept], self.outcomes[self.plan.kept :]
        try:
            self._start_all()
            self._rate()
            for later, outcome in zip(reversed(range(len(kept))), kept):
                self.reserve_s = LEAST_S * later + self._for_proof(outcome)
                self._begin(outcome)
            self.reserve_s = 0.0
            for number in range(1, self.plan.repetitions):
                self._round(number, [o for o in kept if o.seconds])
            self._close(kept)
            rest = [*self._unproved(kept), *rest]
            while rest:
                outcome = rest.pop(0)
                self.reserve_s = self._for_proof(outcome)
                self._begin(outcome)
                self.reserve_s = 0.0
                for _ in range(1, self.plan.repetitions):
                    self._window(outcome, warm_up=0)
                self._close([outcome])
                rest = [*self._unproved([outcome]), *rest]
        finally:
            self._close([*self.outcomes, *self.stand_in, PeerResult("products")])
        for outcome in self.outcomes:
            outcome.reason = outcome.reason or (NO_TIME if outcome.state == "not run" else "")
        self.save(self)

    def _start_all(self) -> None:
        """Start every process at once, since importing takes longer than a small size does, and wait for all."""
        for outcome in [*self.outcomes, *self.stand_in]:
            lacking = next((name for name in PEERS[outcome.peer].needs if not importable(name)), "")
            if lacking:
                outcome.fail({"unable": f"{lacking} is not installed"})
        for name in ("products", *(o.peer for o in [*self.outcomes, *self.stand_in] if o.runs)):
            self.children[name] = self.worker(self.plan.device, self.plan.threads)
        for name in self.children:
            self._ask(name, "ready")

    def _for_proof(self, outcome: PeerResult) -> float:
        """Return the seconds that a peer leaves the stand-in."""
        waits = self.stand_in and proves(outcome.peer) and reference_of(self.outcomes) is None
        return PROOF_S if waits else 0.0

    def _unproved(self, tried: Sequence[PeerResult]) -> list[PeerResult]:
        """Return the stand-in, once, if peers that were to prove the numbers were ``tried`` and nobody has."""
        if reference_of(self.outcomes) is not None or not any(proves(o.peer) and not o.runs for o in tried):
            return []
        begun, self.stand_in = self.stand_in, []
        self.outcomes += begun
        return begun

    def _ask(self, name: str, do: str, **more: Any) -> dict[str, Any]:
        """Ask a process, for no longer than there is time."""
        seconds = max(1.0, min(self.plan.timeout_s, self.plan.left - self.reserve_s))
        answer: dict[str, Any] = self.children[name].ask(do, timeout_s=seconds, **more)
        return answer

    def _begin(self, outcome: PeerResult) -> None:
        """Build, check and time a peer for the first time."""
        if not outcome.runs or self.plan.left < LEAST_S:
            return
        answer = self._ask(outcome.peer, "build", peer=outcome.peer, size=self.size.name, changes=self.plan.changes)
        if not outcome.fail(answer):
            outcome.settings, outcome.handicap, outcome.favour = (
                answer[key] for key in ("settings", "handicap", "favour"))
            answer = self._ask(outcome.peer, "check", steps=CHECKED_STEPS)
            if not outcome.fail(answer):
                outcome.numbers = answer
                self._window(outcome, warm_up=self.plan.warm_up)
        if not outcome.seconds:
            self.say(f"  {outcome.peer}: {outcome.state}: {outcome.reason}")

    def _window(self, outcome: PeerResult, *, warm_up: int) -> None:
        """Time some steps of a peer, and hand the figure on."""
        if not outcome.runs or not outcome.numbers or self.plan.left <= 0:
            return
        answer = self._ask(outcome.peer, "time", steps=self.plan.steps, warm_up=warm_up, window_s=self.plan.window_s)
        if not outcome.seconds and outcome.fail(answer):  # a later repetition that fails takes nothing back
            return
        if "seconds" not in answer:
            self.say(f"  {outcome.peer}: {answer}")
            self._close([outcome])
            return
        outcome.seconds.append(answer["seconds"])
        outcome.cpu_seconds.append(answer["cpu_seconds"])
        outcome.memory = max(outcome.memory, answer["memory"])
        outcome.clocks.append(self.clocks.between(*answer["window"]))
        judge(self.size, self.outcomes)
        self.save(self)
        self.say(f"  {outcome.peer}: figure {len(outcome.seconds)} is written")

    def _round(self, number: int, order: list[PeerResult]) -> None:
        """Time each peer once more. Rotated and every second time reversed: nobody always follows the same one."""
        self._rate()
        shift = number % max(len(order), 1)
        order = order[shift:] + order[:shift]
        for outcome in order[::-1] if number % 2 else order:
            if outcome.peer in self.children:
                self._window(outcome, warm_up=1)

    def _rate(self) -> None:
        """Measure products and copies, in a process of their own."""
        if self.plan.left > 0:
            answer = self._ask("products", "matmul", dtype=self.size.dtype, small=self.size.for_tests)
            if "flops" in answer:
                answer["clocks"] = self.clocks.between(*answer.pop("window"))
                self.rates.append(answer)

    def _close(self, outcomes: Sequence[PeerResult]) -> None:
        for outcome in outcomes:
            if outcome.peer in self.children:
                self.children.pop(outcome.peer).close()


def importable(module: str) -> bool:
    """Whether a module can be found; none of it is run but the packages that hold it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def precision_of(peer: str, size: Size) -> str:
    """Return the key of a peer's tolerance."""
    return PEERS[peer].precision or size.dtype


def proves(peer: str) -> bool:
    """Whether a peer can be what the others are compared with: other code, in the size's own precision."""
    return not PEERS[peer].ours and not PEERS[peer].precision


def reference_of(outcomes: Sequence[PeerResult]) -> PeerResult | None:
    """Return the peer that the others are compared with: plain torch; where it has not run, the first other program of
    the size's own precision."""
    ran = [o for o in outcomes if o.numbers and o.runs and proves(o.peer)]
    return next((o for o in ran if o.peer == REFERENCE), ran[0] if ran else None)


def judge(size: Size, outcomes: Sequence[PeerResult]) -> None:
    """Count what computes what the reference computes, and refuse what does not. Where nothing of other code has
    computed the same, nothing is proved. A reference other than plain torch is proved by the first that agrees."""
    reference = reference_of(outcomes)
    for outcome in (o for o in outcomes if o.numbers and o.runs):
        if reference is None:
            outcome.state = "unproved"
            outcome.reason = "no other program has run, so nothing says that this is the same"
            continue
        off = outcome.difference = differences(
            size, outcome.numbers, reference.numbers, precision_of(outcome.peer, size))
        outcome.state = "handicapped" if outcome.handicap else "counted"
        outcome.reason = outcome.handicap
        if not off <= 1.0:
            outcome.state = "refused"
            outcome.reason = (
                f"computes something else: {off:.3g} tolerances from {reference.peer} "
                f"({_short(outcome.numbers)} against {_short(reference.numbers)})"
            )
    if reference is not None and reference.peer != REFERENCE:
        agree = any(o.state in ("counted", "handicapped") for o in outcomes if o is not reference)
        if not agree:
            reference.state, reference.reason = "unproved", f"{REFERENCE} has not run and nobody agrees with this"


def _short(numbers: dict[str, list[float]]) -> str:
    return "; ".join(f"{kind} {[round(v, 6) for v in values[:3]]}" for kind, values in numbers.items())


def ours(name: str) -> bool:
    """The row is this project's, in the size's own precision."""
    return PEERS[name].ours and not PEERS[name].precision
