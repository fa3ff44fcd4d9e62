"""When a run is in trouble: pure rules over heartbeats, on a clock that the caller reads. No sockets, no processes.

*Lost*: a rank's connection ended and it had not said goodbye. *Failed*: a rank told of its own error. *Hang*: see
:meth:`Rules.tick`. What a lost peer makes its neighbours say (PeerLost) is no trouble of its own.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_port.core.config.schema import WatchConfig
from megatron_port.core.dist.process import (
    COMMUNICATOR,
    DATA,
    EVALUATE,
    OWN,
    PHASES,
    SAVE,
    START,
    STEP,
    WAITING,
    describe,
)
from megatron_port.core.errors import EXIT_ENVIRONMENT, EXIT_HANG
from megatron_port.core.io.logging import ranks_text
from megatron_port.run.run_files import GONE
from megatron_port.run.watch.wire import PAUSE_S, Stack, innermost, waits_in

MARGIN_S = 1.5
"""A heartbeat is up to a second old, and stacks take a moment: so much earlier is a hang called."""
GRACE_S = 0.7
"""Between the first sign of a failure and the verdict: the cause may arrive after a consequence."""
AGREED_S = 2.0
"""An error that all ranks agree on is raised by all of them within this time, and rank 0 prints it."""
UNEXPLAINED_S = 4.0
"""Ranks that lost a peer wait so long for its name; then they tell what they know."""
LAGS_S = 3.0
"""No heartbeat for so long: the rank cannot run."""
STEPS_KEPT = 63


@dataclass(frozen=True)
class RankIdentity:
    """Identity of a rank."""

    rank: int
    host: str
    pid: int
    born: int
    """Start of the process in clock ticks since the host's boot: tells it from a later one with its number."""
    coords: str
    """``pp 0, dp 1, tp 0``"""
    stage: int
    """Pipeline stage: ranks of one stage do the same work."""

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} ({self.coords})"


@dataclass(frozen=True)
class Beat:
    """Heartbeat of a rank."""

    counter: int
    scope: str
    phase: str
    operation: str
    number: int
    age: float
    """Seconds since the counter last grew."""
    step: int
    steps_done: int
    step_seconds: float
    totals: tuple[float, ...] = ()
    """Seconds by phase (``progress.PHASES``) over ``steps_done`` steps."""

    @property
    def connects(self) -> bool:
        """Whether communicators are being made."""
        return self.scope == START and self.operation.startswith(COMMUNICATOR)


@dataclass
class Rank:
    """State of a rank, as far as it is known."""

    place: RankIdentity
    heard_at: float
    progress_at: float
    beat: Beat = field(default_factory=lambda: Beat(0, START, START, "", -1, 0.0, 0, 0, 0.0, (0.0,) * len(PHASES)))
    closed_at: float | None = None
    """Its connection has ended."""
    left: bool = False
    """It said goodbye."""
    fault: Fault | None = None
    met: bool = True
    """It has been connected to this hub, and not only to one before."""

    @property
    def here(self) -> bool:
        """Whether the rank is connected and with the run."""
        return self.closed_at is None and not self.left


@dataclass(frozen=True)
class Fault:
    """Error that a rank reported."""

    at: float
    code: int
    text: str
    told: bool
    """The rank prints it itself."""
    victim: bool
    """It only noticed that another rank had gone."""


@dataclass(frozen=True)
class Alarm:
    """Sign of trouble."""

    kind: str
    """lost | failed | hang | unexplained"""
    rank: int
    """The first; of a hang: any that made no progress."""
    deadline: float = 0.0
    """Limit of a hang: the seconds without progress that are too long here."""
    mute: tuple[tuple[int, float], ...] = ()
    """Silent ranks of a hang and when each was last heard, the longest silent first. (The signal that asks a rank for
    its stack may wake it.)"""


class Rules:
    """Record of everything the ranks have told, and the judgement whether it is trouble.

    Args:
        world: ranks of the run.
        now: seconds of any clock that does not go back; the same clock in every call.
    """

    def __init__(self, config: WatchConfig, world: int, now: float) -> None:
        self.config, self.world = config, world
        self.ranks: dict[int, Rank] = {}
        self.step_at = now
        """When some rank last began or ended a step."""
        self._timed = world
        """The rank whose steps are timed: the lowest. (Once one has left, no step follows.)"""
        self._ticked = now
        self._steps: deque[float] = deque(maxlen=STEPS_KEPT)
        self._first_fault: float | None = None

    # What the ranks tell.

    def hello(self, place: RankIdentity, now: float, *, met: bool = True) -> None:
        """Note that a rank has connected (``met`` false: to an earlier hub, and it is expected here)."""
        self.ranks[place.rank] = Rank(place, now, now, met=met)
        self._timed = min(self._timed, place.rank)

    def beat(self, rank: int, beat: Beat, now: float) -> None:
        """Note a heartbeat."""
        state = self.ranks[rank]
        before, state.beat, state.heard_at = state.beat, beat, now
        if beat.counter != before.counter:
            state.progress_at = max(state.progress_at, now - beat.age)
        if beat.step != before.step or beat.steps_done != before.steps_done:
            self.step_at = now
        done = beat.steps_done - before.steps_done
        if done > 0 and rank == self._timed and before.steps_done > 0:  # the first step warms up
            self._steps.append((beat.step_seconds - before.step_seconds) / done)

    def failing(self, rank: int, *, code: int, text: str, told: bool, victim: bool, now: float) -> None:
        """Note an error that ends a rank."""
        state = self.ranks[rank]
        state.heard_at = now
        if state.fault is None:
            state.fault = Fault(now, code, text, told, victim)
            self._noticed(now)

    def goodbye(self, rank: int) -> None:
        """Note that a rank leaves, as it should."""
        self.ranks[rank].left = True

    def closed(self, rank: int, now: float) -> None:
        """Note that a rank's connection has ended."""
        state = self.ranks[rank]
        if state.closed_at is None:
            state.closed_at = now
            if not state.left and state.fault is None:
                self._noticed(now)

    def explained(self) -> None:
        """Forget what was noticed so far: the ranks were told to speak for themselves."""
        self._first_fault = None

    # What follows from it.

    @property
    def median_step(self) -> float:
        """Seconds of the last steps; 0 before there is one."""
        return statistics.median(self._steps) if self._steps else 0.0

    @property
    def step(self) -> int:
        """Furthest step that any rank has reported."""
        return max((s.beat.step for s in self.ranks.values()), default=0)

    @property
    def hang_limit(self) -> float:
        """Seconds without progress that are too long in a step."""
        return max(self.config.hang_seconds, self.config.hang_steps * self.median_step)

    def silent(self, now: float) -> list[int]:
        """Connected ranks whose heartbeat stays out."""
        return [r for r, s in self.ranks.items() if s.here and now - s.heard_at >= LAGS_S]

    def tick(self, now: float) -> Alarm | None:
        """Judge the state of all ranks. Call it several times per second.

        A hang: some rank made no progress for the longest limit of any rank's present scope, and no rank began or
        ended a step for as long. (A rank that saves or evaluates keeps the others waiting, so its limit is theirs.)
        In a scope with a limit of its own no rank at all may have made progress. Heartbeats that stay out while steps
        continue are no trouble. A rank that cannot run is not given the long limits of evaluation, saving and making
        communicators: three times the usual one.
        """
        pause, self._ticked = now - self._ticked, now
        if pause > PAUSE_S:
            self._forget(pause)
        return self._failure(now) or self._hang(now)

    def _failure(self, now: float) -> Alarm | None:
        if self._first_fault is None:
            return None
        waited = now - self._first_fault
        if waited < GRACE_S:
            return None
        lost = [(s.closed_at, r) for r, s in self.ranks.items() if s.closed_at is not None and self._is_lost(s)]
        failed = [(s.fault.at, r) for r, s in self.ranks.items() if s.fault is not None and not s.fault.victim]
        first_lost, first_failed = min(lost, default=None), min(failed, default=None)
        if first_failed is not None and (first_lost is None or first_failed <= first_lost):
            whole = all(s.fault is not None or not s.here for s in self.ranks.values())
            if whole or waited >= AGREED_S:
                return Alarm("failed", first_failed[1])
            return None
        if first_lost is not None:
            return Alarm("lost", first_lost[1])
        if waited >= UNEXPLAINED_S:
            victims = [(s.fault.at, r) for r, s in self.ranks.items() if s.fault is not None]
            if victims:
                return Alarm("unexplained", min(victims)[1])
            self._first_fault = None
        return None

    @staticmethod
    def _is_lost(state: Rank) -> bool:
        return not state.left and state.fault is None

    def _hang(self, now: float) -> Alarm | None:
        here = {r: s for r, s in self.ranks.items() if s.here and s.fault is None}
        if not here:
            return None
        # What a rank without heartbeat was at is a second old, and may be a step old: those that answer know better.
        heard = [s for s in here.values() if now - s.heard_at < LAGS_S] or list(here.values())
        limit, own = max(self._limit(s.beat) for s in heard)
        connecting = any(s.beat.connects for s in here.values())
        if connecting:  # those that have their communicators wait for the others
            limit, own = max(self.config.connect_seconds, self.hang_limit), True
        behind = min(here, key=lambda r: here[r].progress_at)
        newest = max(s.progress_at for s in here.values())
        still = now - (newest if own else max(here[behind].progress_at, self.step_at))
        silent = sorted(((r, here[r].heard_at) for r in self.silent(now) if r in here), key=lambda found: found[1])
        if still >= limit - MARGIN_S:
            return Alarm("hang", behind, limit, tuple(silent))
        starting = any(s.beat.scope == START for s in heard) and not connecting
        cannot = 3 * self.hang_limit
        cannot_run = silent and now - silent[0][1] >= cannot
        if cannot_run and not starting and now - newest >= cannot - MARGIN_S:
            return Alarm("hang", silent[0][0], cannot, tuple(silent))
        return None

    def _limit(self, beat: Beat) -> tuple[float, bool]:
        """Return (seconds, whether it is the scope's own limit) for what a rank is doing."""
        usual, c = self.hang_limit, self.config
        own = {START: c.start_seconds, EVALUATE: c.evaluate_seconds, SAVE: c.save_seconds}.get(beat.scope, 0.0)
        if beat.scope == STEP and beat.phase == DATA:
            own = c.data_seconds
        return (own, True) if own > usual else (usual, False)

    def _noticed(self, now: float) -> None:
        if self._first_fault is None:
            self._first_fault = now

    def _forget(self, pause: float) -> None:
        """Discount a time for which the watch was stopped, and perhaps everything else too."""
        self.step_at += pause
        for state in self.ranks.values():
            state.heard_at += pause
            state.progress_at += pause


# Who is it: the verdict over an alarm, from the last heartbeats and, of a hang, the stacks. Pure.

KINDS_SHOWN = 4
WORDS_SHOWN = 40
"""Lines of a dying process's stack."""


@dataclass(frozen=True)
class Diagnosis:
    """Diagnosis of a failure, for a person and for the exit code."""

    code: int
    ranks: tuple[int, ...]
    """Named, the first of them first."""
    headline: str
    details: tuple[str, ...] = ()
    told: bool = False
    """A rank prints it; the watch need not."""


def doing(state: Rank) -> str:
    """Return ``step 12, evaluate: forward, micro-batch 3``."""
    b = state.beat
    scope = "" if b.scope in ("step", b.phase) else f"{b.scope}: "
    return f"step {b.step}, {scope}{describe(b.phase, b.operation, b.number)}"


def hang(rules: Rules, alarm: Alarm, stacks: Mapping[int, Sequence[Stack]], now: float) -> Diagnosis:
    """Name the rank that the others wait for.

    First those that cannot run; else those that do not wait for another rank, the first to stand still first; else all
    wait for one another, and the rarest operation is the odd one out.
    """
    here = {r: s for r, s in rules.ranks.items() if s.here and s.fault is None}
    mute = [r for r, _ in alarm.mute if r in here]
    waits = {r: _wait(here[r], stacks.get(r, ())) for r in here if r not in mute}
    busy = sorted((r for r, wait in waits.items() if not wait), key=lambda r: here[r].progress_at)
    if mute:
        named = mute
        why = (f"no heartbeat for {now - alarm.mute[0][1]:.1f} s: the process is stopped or cannot run, its node "
               "is dead, or the network to it is cut")
    elif busy:
        # What stands still later waits for the first, somewhere that cannot be seen (a GPU's queue, say).
        named = [r for r in busy if here[r].progress_at - here[busy[0]].progress_at < 1.0]
        at = innermost(stacks.get(busy[0], ()))
        why = f"it answers, and waits for no other rank{f'; it is at {at}' if at else ''}"
    elif len(set(waits.values())) == 1:
        named = _odd_ones(waits, here)
        why = (f"all ranks wait in the same operation, {waits[named[0]]}: the network or a device does not answer; "
               "this rank is the first that stood still")
    else:
        named = _odd_ones(waits, here)
        why = f"the ranks wait for one another in different operations; this one in {waits[named[0]]}"
    first = here[named[0]]
    where = f"{doing(first)} (its last heartbeat; others are at step {rules.step})" if mute else doing(first)
    if not first.met:
        where = f"a place unknown since the watch was started again (others are at step {rules.step})"
    headline = (
        f"{first.place} made no progress for {now - first.progress_at:.1f} s (the limit is {alarm.deadline:.1f} s) at "
        f"{where}: {why}"
    )
    more = [f"so did {ranks_text(named[1:])}"] if len(named) > 1 else []
    return Diagnosis(EXIT_HANG, tuple(named), headline, (*more, *_others(waits, set(named))))


def _wait(state: Rank, stacks: Sequence[Stack]) -> str:
    """Return what a rank that answers waits for; empty: for no other rank, as far as can be seen."""
    seen = waits_in(stacks)
    if seen:
        return describe(state.beat.phase, state.beat.operation, -1) if state.beat.connects else seen
    return describe(state.beat.phase, state.beat.operation, state.beat.number) if state.beat.phase in WAITING else ""


def _odd_ones(waits: Mapping[int, str], here: Mapping[int, Rank]) -> list[int]:
    kinds: dict[str, list[int]] = {}
    for rank in sorted(waits, key=lambda r: here[r].progress_at):
        kinds.setdefault(waits[rank], []).append(rank)
    return min(kinds.values(), key=lambda found: (len(found), here[found[0]].progress_at))


def _others(waits: Mapping[int, str], named: set[int]) -> list[str]:
    """Return lines ``ranks 0, 2-3 wait in all_reduce (…)``, the most frequent first."""
    kinds: dict[str, list[int]] = {}
    for rank, wait in waits.items():
        if rank not in named:
            kinds.setdefault(wait, []).append(rank)
    found = sorted(kinds.items(), key=lambda item: -len(item[1]))
    lines = [
        f"{ranks_text(ranks)} wait{'s' if len(ranks) == 1 else ''} in {wait}" if wait
        else f"{ranks_text(ranks)} made no progress either"
        for wait, ranks in found[:KINDS_SHOWN]
    ]
    left = found[KINDS_SHOWN:]
    return [*lines, f"and {sum(len(r) for _, r in left)} ranks in {len(left)} other places"] if left else lines


def lost(rules: Rules, rank: int, *, words: str = "", hint: str = "") -> Diagnosis:
    """Diagnose a rank that ended without a word: a signal, the kernel's out-of-memory killer, ``os._exit``."""
    state = rules.ranks[rank]
    gone = [r for r, s in rules.ranks.items() if s.closed_at is not None and not s.left and s.fault is None]
    last = words.strip().splitlines()
    reason = last[0] if last else "it ended without a word: killed (out of memory?), or the process left by itself"
    age = (state.closed_at or state.heard_at) - state.heard_at
    headline = (
        f"{state.place} {GONE} {doing(state)} (its last heartbeat, {age:.1f} s before its end; others are at step "
        f"{rules.step}): {reason}{f'; {hint}' if hint else ''}"
    )
    if len(gone) > 1 and len(gone) == rules.world:
        headline = f"all {len(gone)} ranks ended at once, from outside; the first: {headline}"
        return Diagnosis(EXIT_ENVIRONMENT, (rank,), headline)
    others = [r for r in gone if r != rank]
    more = [f"after it {ranks_text(others)} ended too"] if others else []
    return Diagnosis(EXIT_ENVIRONMENT, (rank, *others), headline, (*last[1 : 1 + WORDS_SHOWN], *more))


def failed(rules: Rules, rank: int) -> Diagnosis:
    """Diagnose a rank that met an error it could not share with the others; they would wait for it."""
    state = rules.ranks[rank]
    assert state.fault is not None
    told = state.fault.told or any(
        s.fault is not None and s.fault.told and not s.fault.victim for s in rules.ranks.values()
    )
    headline = f"{state.place} failed at {doing(state)}: {state.fault.text}"
    return Diagnosis(state.fault.code, (rank,), headline, told=told)


# Slow ranks: each rank's own seconds per step against those of its stage's other ranks, window by window. Pure.
#
# Own work is reading data, forward and backward passes; waits for neighbours and collectives are not. The ranks of a
# pipeline stage do equal work, so a rank's score is its own time over the median of the others'. Work done on the hub,
# once per window, from numbers that heartbeats carry anyway.

WINDOW_S = 5.0
"""The shortest window."""
_OWN = [PHASES.index(phase) for phase in OWN]
ALL_RANKS = 128
"""Up to so many ranks a line of ``ranks.jsonl`` has each; beyond, quartiles and the slowest."""
SLOWEST = 8


@dataclass(frozen=True)
class StragglerEvent:
    """A rank that is slow, or no longer is."""

    place: RankIdentity
    step: int
    score: float
    """Own seconds over the peers' median."""
    own_seconds: float
    """A step."""
    peer_seconds: float
    phases: dict[str, float]
    """Seconds per step by phase, in this window."""
    windows: int
    slow: bool

    def line(self) -> str:
        """Return the line for the console."""
        if not self.slow:
            return f"straggler: {self.place} is as fast as the others again at step {self.step}"
        worst = max(OWN, key=lambda p: self.phases[p])
        return (
            f"straggler: {self.place} takes {self.score:.2f} times as long as its stage's other ranks, for "
            f"{self.windows} windows until step {self.step}: {self.own_seconds:.3g} s of its own work a step against "
            f"{self.peer_seconds:.3g} s, most of it in {worst}"
        )

    def record(self) -> dict[str, object]:
        """Return the record for events.jsonl."""
        return {
            "event": "straggler" if self.slow else "straggler_over", "step": self.step, "rank": self.place.rank,
            "host": self.place.host, "coords": self.place.coords, "score": round(self.score, 4),
            "own_seconds": round(self.own_seconds, 6), "peer_seconds": round(self.peer_seconds, 6),
            "phases": {name: round(value, 6) for name, value in self.phases.items()}, "windows": self.windows,
        }


class Stragglers:
    """Comparison of the ranks at the end of each window."""

    def __init__(self, config: WatchConfig, now: float) -> None:
        self.config = config
        self._began = self._started = self._spread_at = now
        self._spread: dict[str, object] | None = None
        self._steps_at: dict[int, int] = {}
        self._totals_at: dict[int, tuple[float, ...]] = {}
        self._slow_for: dict[int, int] = {}
        self._named: set[int] = set()
        self.slow: dict[int, float] = {}
        """Ranks that are named, and their scores in the last window."""
        self._own: dict[int, tuple[float, int]] = {}
        """Own times of the last window: rank → own seconds per step, steps done."""

    def look(self, ranks: Iterable[Rank], now: float) -> list[StragglerEvent]:
        """Return what is new since the last call; most calls fall within a window and cost next to nothing."""
        if not self.config.straggler_percent or now - self._began < WINDOW_S:
            return []
        states = [s for s in ranks if s.here and s.beat.steps_done > 1]
        if not states:
            return []
        if min(s.beat.steps_done - self._steps_at.get(s.place.rank, 0) for s in states) < self.config.straggler_steps:
            return []
        found = self._compare(states) if self._steps_at else []
        self._note_spread(now)
        self._began = now
        self._steps_at = {s.place.rank: s.beat.steps_done for s in states}
        self._totals_at = {s.place.rank: s.beat.totals for s in states}
        return found

    def spread(self) -> dict[str, object] | None:
        """Return the ranks' own seconds per step in the last window, for ``ranks.jsonl``; None: nothing new.

        Lines come at every window at first and ever more rarely, so that a run of months leaves a few thousand.
        """
        made, self._spread = self._spread, None
        return made

    def _note_spread(self, now: float) -> None:
        if not self._own or now - self._spread_at < (now - self._started) / 200:
            self._own = {}
            return
        own, self._own = self._own, {}
        self._spread_at = now
        values = sorted((seconds, rank) for rank, (seconds, _) in own.items())
        at = {name: round(values[round(share * (len(values) - 1))][0], 6)
              for name, share in (("least", 0), ("q1", 0.25), ("median", 0.5), ("q3", 0.75), ("most", 1))}
        record: dict[str, object] = {"step": max(step for _, step in own.values()), "ranks": len(own), **at}
        if len(own) <= ALL_RANKS:
            record["own_seconds"] = {str(rank): round(own[rank][0], 6) for rank in sorted(own)}
        else:
            record["slowest"] = {str(rank): round(seconds, 6) for seconds, rank in values[-SLOWEST:]}
        self._spread = record

    def _compare(self, states: list[Rank]) -> list[StragglerEvent]:
        """Close a window."""
        phases: dict[int, list[float]] = {}
        stages: dict[int, list[Rank]] = {}
        for s in states:
            rank = s.place.rank
            if rank not in self._totals_at:
                continue
            steps = s.beat.steps_done - self._steps_at[rank]
            phases[rank] = [(a - b) / steps for a, b in zip(s.beat.totals, self._totals_at[rank])]
            self._own[rank] = sum(phases[rank][i] for i in _OWN), s.beat.step
            stages.setdefault(s.place.stage, []).append(s)
        out = []
        for members in stages.values():
            if len(members) < 2:
                continue
            own = sorted((sum(phases[s.place.rank][i] for i in _OWN), s.place.rank) for s in members)
            for s in members:
                finding = self._judge(s, phases[s.place.rank], own)
                if finding is not None:
                    out.append(finding)
        return sorted(out, key=lambda f: -f.score)

    def _judge(self, state: Rank, phases: list[float], own: list[tuple[float, int]]) -> StragglerEvent | None:
        """Score one rank; return an event when it becomes slow or fast again. ``own``: its stage's ranks, sorted."""
        rank = state.place.rank
        mine = sum(phases[i] for i in _OWN)
        peers = _median_without(own, (mine, rank))
        score = mine / peers if peers > 0 else 1.0
        slow = score > 1 + self.config.straggler_percent / 100
        count = self._slow_for[rank] = self._slow_for.get(rank, 0) + 1 if slow else 0
        named = rank in self._named
        self.slow.pop(rank, None)
        if slow and count >= self.config.straggler_windows:
            self.slow[rank] = score
        if slow and not named and count >= self.config.straggler_windows:
            self._named.add(rank)
        elif not slow and named:
            self._named.discard(rank)
        else:
            return None
        return StragglerEvent(
            state.place, state.beat.step, score, mine, peers, dict(zip(PHASES, phases)), count, slow=slow
        )


def _median_without(values: list[tuple[float, int]], left_out: tuple[float, int]) -> float:
    """Median of sorted values without one of them."""
    at = bisect_left(values, left_out)
    n = len(values) - 1

    def pick(i: int) -> float:
        return values[i if i < at else i + 1][0]

    return pick(n // 2) if n % 2 else statistics.fmean((pick(n // 2 - 1), pick(n // 2)))
