"""The starts of a run, one after another: ``attempts.jsonl`` in its folder has a line for each start and each end."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from megatron_port.core.dist.launchers import LOCAL
from megatron_port.core.io.files import append_line
from megatron_port.core.io.typed_json import Natural, Rows, Seconds, read_rows
from megatron_port.ext.telemetry.metrics import FILE_NAME, read_metrics
from megatron_port.run.run_files import Failure, read_failure, read_outcome

HISTORY = "attempts.jsonl"
FAILED = "failed"


@dataclass(frozen=True)
class Attempt:
    """Start of the run by a job, and its end."""

    attempt: str
    """JOB.RESTART; LAUNCHER.EPOCH of a direct start."""
    series: str
    """First job of the chain."""
    nodes: str
    """SLURM's node list; rank 0's host of a direct start."""
    status: str = ""
    """finished | saved | failed; empty: still running, or it ended without a word."""
    step: Natural = 0
    """Steps done when it ended."""
    cause: str = ""
    time: Seconds = 0.0
    began: Seconds = 0.0
    """Seconds since 1970."""
    record: str = ""
    """Number of its launch record."""
    log: str = ""
    """File of the job's output."""
    node_count: Natural = 0
    """Nodes of a direct start, of which ``nodes`` names the first; 0: count the names."""


def steps_done(run_folder: Path) -> int:
    """Return the steps that the run's metrics contain; 0 without any."""
    last = 0
    with contextlib.suppress(OSError):
        for record in read_metrics(run_folder / FILE_NAME):
            last = int(record["step"])
    return last


def read_history(run_folder: Path) -> list[Attempt]:
    """Return every attempt, oldest first; the line of an end replaces that of its start, whose
    time, record and log it keeps. Lines that are none are left out (:func:`history_rows` counts them).
    """
    return history_rows(run_folder).rows


def history_rows(run_folder: Path) -> Rows[Attempt]:
    """Return :func:`read_history`, and which lines of the file were left out."""
    read = read_rows(run_folder / HISTORY, Attempt)
    found: dict[str, Attempt] = {}
    for entry in read.rows:
        start = found.get(entry.attempt, entry)
        found[entry.attempt] = replace(
            entry, began=entry.began or start.began, record=entry.record or start.record, log=entry.log or start.log
        )
    read.rows = list(found.values())
    return read


def add_attempt(run_folder: Path, entry: Attempt) -> None:
    """Append a start or an end. Raises OSError."""
    run_folder.mkdir(parents=True, exist_ok=True)
    append_line(run_folder / HISTORY, json.dumps(asdict(entry)))


def close_lost(
    run_folder: Path, *, asking: str, nodes_down: Callable[[str], list[str]], now: float | None = None
) -> list[Attempt]:
    """Return the history; an attempt at its end that ended without a word is completed first.

    Args:
        asking: the attempt that asks, which is not lost.
        nodes_down: SLURM node list → those of them that are down, described.
    """
    history = read_history(run_folder)
    if history and not history[-1].status and history[-1].attempt != asking:
        lost = history[-1]
        now, outcome = time.time() if now is None else now, read_outcome(run_folder)
        status, step, cause = FAILED, steps_done(run_folder), ""
        own = outcome is not None and (
            outcome.attempt == lost.attempt
            or (outcome.attempt == LOCAL and lost.node_count > 0 and outcome.time >= lost.began)
        )
        if outcome is not None and own:
            status, step, cause = outcome.status, outcome.step, outcome.signal
        else:
            cause = _silent_cause(run_folder, lost, nodes_down)
        history[-1] = replace(lost, status=status, step=step, cause=cause, time=now)
        add_attempt(run_folder, history[-1])
    return history


def _silent_cause(run_folder: Path, lost: Attempt, nodes_down: Callable[[str], list[str]]) -> str:
    """Return the cause of an attempt whose job script did not reach its end."""
    parts = []
    failure = read_failure(run_folder, lost.attempt)
    if failure is not None:
        parts.append(failure_text(failure))
    down = nodes_down(lost.nodes)
    if down:
        parts.append(f"of its nodes {', '.join(down)} cannot run jobs now")
    if not parts:
        noticed = read_failure(run_folder, lost.attempt, lost_peer=True)
        what = "process" if lost.node_count else "job script"
        parts.append(f"its {what} was ended from outside")
        parts += [failure_text(noticed)] if noticed else []
    return "; ".join(parts)


def failure_text(failure: Failure) -> str:
    mark = f"rank {failure.rank} on {failure.host}: "
    return failure.message if failure.message.startswith("rank ") else mark + failure.message
