"""What the watch leaves on disk: the stacks of a hang, the failure for the job script, events of a run."""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_port.core.dist.process import PHASES, describe
from megatron_port.core.io.files import write_text
from megatron_port.core.io.logging import ranks_text, redact
from megatron_port.run.watch.rules import LAGS_S, Diagnosis, Rank, doing
from megatron_port.run.watch.wire import Stack, stack_text


def write_hang(
    folder: Path, verdict: Diagnosis, ranks: Mapping[int, Rank], stacks: Mapping[int, Sequence[Stack]], *, now: float,
    raw: Mapping[int, str],
) -> Path:
    """Commit ``hang-STEP-TIME.txt``: the verdict, the last heartbeat of every rank, all stacks, equal ones once.

    ``raw``: stacks of ranks whose interpreter is stuck, as the signal handler wrote them. Raises OSError.
    """
    step = max((s.beat.step for s in ranks.values()), default=0)
    folder.mkdir(parents=True, exist_ok=True)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    target = folder / f"hang-{step}-{stamp}.txt"
    lines = [verdict.headline, *verdict.details, "", "Last heartbeats", ""]
    for rank in sorted(ranks):
        s = ranks[rank]
        lines.append(
            f"{s.place}, process {s.place.pid}: {doing(s)}; progress {now - s.progress_at:.1f} s ago, heartbeat "
            f"{now - s.heard_at:.1f} s ago{_state(s, now)}"
        )
    kinds: dict[str, list[int]] = {}
    for rank, found in stacks.items():
        kinds.setdefault(stack_text(found), []).append(rank)
    for rank, text in raw.items():
        kinds.setdefault(text.rstrip(), []).append(rank)
    for text, members in sorted(kinds.items(), key=lambda item: (len(item[1]), min(item[1]))):
        lines += ["", f"Stacks of {ranks_text(members)}", "", text]
    none = [r for r in ranks if r not in stacks and r not in raw]
    if none:
        lines += ["", f"No stacks of {ranks_text(none)}: the last heartbeat above is all there is."]
    write_text(target, redact("\n".join(lines) + "\n"))
    return target


def _state(state: Rank, now: float) -> str:
    if state.left:
        return "; it has left"
    if state.closed_at is not None:
        return "; its connection has ended"
    if state.fault is not None:
        return f"; it failed: {state.fault.text.splitlines()[0][:200] if state.fault.text else ''}"
    return "; SILENT" if now - state.heard_at >= LAGS_S else ""


# ``now.json``: what every rank is doing, by its last heartbeat; rewritten every few seconds while a run is watched.

NOW = "now.json"
EVERY_S = 2.0
"""Between two versions of the file."""
MOST_RANKS = 128
"""Ranks that have an entry of their own; of more, those that made no progress for the longest."""


def snapshot(ranks: Mapping[int, Rank], world: int, now: float) -> dict[str, Any]:
    """Return the state of the ranks as JSON types. ``now``: of the clock by which they were heard.

    Its size is bounded, whatever the number of ranks.
    """
    here = [s for s in ranks.values() if s.here]
    longest = sorted(here, key=lambda s: (s.progress_at, s.place.rank))[:MOST_RANKS]
    mean = [0.0] * len(PHASES)
    stepped = [s for s in here if s.beat.steps_done and len(s.beat.totals) == len(PHASES)]
    for s in stepped:
        for i, seconds in enumerate(s.beat.totals):
            mean[i] += seconds / s.beat.steps_done / len(stepped)
    return {
        "time": time.time(), "world": world, "connected": len(here),
        "left": sum(s.left for s in ranks.values()), "step": max((s.beat.step for s in here), default=0),
        "doing": dict(Counter(f"{s.beat.scope}: {s.beat.phase}" for s in here).most_common(16)),
        "phase_seconds": {name: round(seconds, 6) for name, seconds in zip(PHASES, mean)} if stepped else {},
        "ranks": [_rank(s, now) for s in sorted(longest, key=lambda s: s.place.rank)],
    }


def _rank(s: Rank, now: float) -> dict[str, Any]:
    beat = s.beat
    steps = max(beat.steps_done, 1)
    return {
        "rank": s.place.rank, "host": s.place.host, "coords": s.place.coords, "scope": beat.scope,
        "doing": describe(beat.phase, beat.operation, beat.number)[:120], "step": beat.step,
        "idle_seconds": round(now - s.progress_at, 1), "silent": now - s.heard_at >= LAGS_S,
        "seconds_per_step": round(beat.step_seconds / steps, 6),
        "phase_seconds": {name: round(t / steps, 6) for name, t in zip(PHASES, beat.totals)},
    }


class NowFile:
    """Writer of ``now.json`` in a run's folder; a disk that refuses it is passed over."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NOW
        self._due = 0.0

    def write(self, ranks: Mapping[int, Rank], world: int, now: float) -> None:
        """Write the file, if it is due and a rank is connected."""
        if now < self._due or not ranks:
            return
        self._due = now + EVERY_S
        with contextlib.suppress(OSError):
            write_text(self._path, json.dumps(snapshot(ranks, world, now)))
