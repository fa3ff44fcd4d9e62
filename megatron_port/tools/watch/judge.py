"""Who is it: the verdict over an alarm, from the last heartbeats and, of a hang, the stacks. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_port.core.dist.progress import WAITING, describe
from megatron_port.core.errors import EXIT_ENVIRONMENT, EXIT_HANG
from megatron_port.core.io.logging import ranks_text
from megatron_port.tools.launch.outcome import GONE
from megatron_port.tools.watch.format import Stack, innermost, waits_in
from megatron_port.tools.watch.rules import Alarm, Rank, Rules

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
