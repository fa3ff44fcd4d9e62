"""When a run is in trouble: pure rules over heartbeats, on a clock that the caller reads. No sockets, no processes.

*Lost*: a rank's connection ended and it had not said goodbye. *Failed*: a rank told of its own error. *Hang*: see
:meth:`Rules.tick`. What a lost peer makes its neighbours say (PeerLost) is no trouble of its own.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

from megatron_port.core.config.schema import WatchConfig
from megatron_port.core.dist.progress import COMMUNICATOR, DATA, EVALUATE, PHASES, SAVE, START, STEP

MARGIN_S = 1.5
"""A heartbeat is up to a second old, and stacks take a moment: so much earlier is a hang called."""
PAUSE_S = 2.5
"""The watch itself was stopped (with the whole job, mostly) if it slept longer than this."""
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
