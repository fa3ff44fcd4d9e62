"""What the watch leaves on disk: the stacks of a hang, the failure for the job script, events of a run."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_port.core.io.atomic import append_line, write_text
from megatron_port.core.io.logging import ranks_text
from megatron_port.core.io.redact import redact, redacted
from megatron_port.tools.watch.format import Stack, stack_text
from megatron_port.tools.watch.judge import Diagnosis, doing
from megatron_port.tools.watch.rules import LAGS_S, Rank

EVENTS = "events.jsonl"
RANKS = "ranks.jsonl"


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


def add_event(folder: Path, record: Mapping[str, object]) -> None:
    """Append one line to ``events.jsonl``; the console has it too, so a disk that refuses it is passed over."""
    _append(folder / EVENTS, record)


def add_spread(folder: Path, record: Mapping[str, object]) -> None:
    """Append one line to ``ranks.jsonl``: how the ranks' times differ."""
    _append(folder / RANKS, record)


def _append(path: Path, record: Mapping[str, object]) -> None:
    line = json.dumps(redacted({"time": time.time(), **record}))
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        append_line(path, line, durable=False)
