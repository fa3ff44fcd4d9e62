"""Slow ranks: each rank's own seconds per step against those of its stage's other ranks, window by window. Pure.

Own work is reading data, forward and backward passes; waits for neighbours and collectives are not. The ranks of a
pipeline stage do equal work, so a rank's score is its own time over the median of the others'. Work done on the hub,
once per window, from numbers that heartbeats carry anyway.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

from megatron_port.core.config.schema import WatchConfig
from megatron_port.core.dist.progress import OWN, PHASES
from megatron_port.tools.watch.rules import Rank, RankIdentity

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

