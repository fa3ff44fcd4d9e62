"""The state of runs, of queue and run in one row each: read from their folders and one question to SLURM.

Files are read from their ends, so a row costs the same after a million steps. Nothing is written.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from megatron_port.core.dist.launchers import QueueEntry, expand_hosts
from megatron_port.core.errors import ConfigError, EnvironmentFault
from megatron_port.core.io.files import open_regular
from megatron_port.core.io.typed_json import Rows
from megatron_port.ext.telemetry.console import duration
from megatron_port.ext.telemetry.declared import known_metrics
from megatron_port.ext.telemetry.metrics import FILE_NAME, decode
from megatron_port.run.attempts import HISTORY, Attempt, history_rows
from megatron_port.run.run_files import FINISHED
from megatron_port.tools.launch import record as records
from megatron_port.tools.launch.direct import running
from megatron_port.tools.launch.record import Planned, QueuedJob, RecordFault

TAIL_BYTES = 6000
"""The last lines of metrics.jsonl: a dozen steps."""
RECENT = 8
"""Steps whose median duration is the pace."""
COLUMNS = (
    "run", "job", "state", "step", "loss", "tokens/s", "left", "next save", "attempts", "node-hours", "predicted",
)


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """One row. None: not known."""

    run: str
    folder: str
    job: str = ""
    state: str = ""
    """SLURM's, with its reason while the job waits; ``running (HOST:PID)`` of a direct start; else finished | saved |
    failed | cancelled | ended | local (steps of a version without records) | -"""
    live: bool = False
    """A job of it waits or runs, or its process does."""
    step: int = 0
    steps: int | None = None
    loss: float | None = None
    tokens_per_second: float | None = None
    seconds_left: float | None = None
    """At the pace of the last steps, or the planner's before there are any; queueing is not counted."""
    seconds_to_save: float | None = None
    attempts: int = 0
    node_hours: float = 0.0
    """Spent, by all attempts."""
    node_hours_predicted: float | None = None
    """Node hours of the whole run: those spent, and those left at the pace of the last steps."""
    cause: str = ""
    """Why the last attempt ended."""
    left_out: str = ""
    """Damaged lines and fields of its files, which are left out."""


def run_folders(paths: Iterable[Path]) -> list[Path]:
    """Return the folders of runs among ``paths`` and directly below them, in order.

    Raises:
        ConfigError: a path is no folder, or none of them holds a run.
    """
    out: dict[Path, None] = {}
    given = list(paths)
    for path in given:
        if not path.is_dir():
            raise ConfigError(f"{path} is no folder; give the folder of a run, or one that has runs in it")
        if is_run(path):
            out[path] = None
            continue
        with os.scandir(path) as entries:
            found = sorted(e.name for e in entries if e.is_dir())
        out.update(dict.fromkeys(path / name for name in found if is_run(path / name)))
    if not out:
        names = ", ".join(map(str, given))
        raise ConfigError(f"no run in {names}; give the folder of a run, or one that has runs in it")
    return list(out)


def is_run(folder: Path) -> bool:
    """A launch record, an attempt or a step has been there."""
    try:
        names = set(os.listdir(folder))
    except OSError:
        return False
    return bool(names & {records.FOLDER, HISTORY, FILE_NAME})


def last_steps(folder: Path) -> list[Mapping[str, Any]]:
    """Return the last training steps of a run's metrics, oldest first; empty without any."""
    try:
        with open(open_regular(folder / FILE_NAME, follow=True), "rb", buffering=0) as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - TAIL_BYTES))
            lines = stream.read().decode("utf-8", "replace").split("\n")[:-1]
    except OSError:
        return []
    found: list[Mapping[str, Any]] = []
    known = known_metrics(folder)
    for line in reversed(lines):
        step = decode(line, known)
        if step is not None and "loss" in step:
            found.append(step)
        if len(found) == RECENT:
            break
    return found[::-1]


@lru_cache(maxsize=4096)
def nodes_in(node_list: str) -> int:
    """Return how many nodes a SLURM node list names; 0 for one that is none."""
    with contextlib.suppress(EnvironmentFault):
        return len(expand_hosts(node_list))
    return 0


def status_of(folder: Path, queue: Mapping[str, QueueEntry], now: float | None = None) -> RunStatus:
    """Return the state of one run. ``queue``: ``dist.launchers.ask_queue``."""
    now = time.time() if now is None else now
    newest = records.newest(folder)
    known: Rows[QueuedJob] = records.job_rows(newest) if newest is not None else Rows("")
    jobs = known.rows
    plan = Planned()
    if newest is not None:
        with contextlib.suppress(RecordFault):
            plan = records.read_record(newest).planned
    attempts, last = history_rows(folder), last_steps(folder)
    history = attempts.rows
    live = next((queue[j.job] for j in reversed(jobs) if j.job in queue), None)
    process = running(folder, newest) if jobs and jobs[-1].process and not (history and history[-1].status) else None
    done = int(last[-1]["step"]) if last else 0
    pace = _pace(last) or plan.seconds_per_step or None
    at_work = process is not None or (live is not None and live.state == "RUNNING")
    spent, nodes = _spent(history, now, running=at_work), _nodes(history, plan)
    state = _state(newest, jobs, history, live, trained=bool(last))
    if process is not None:
        state = f"running ({process.holder.host}:{process.holder.pid})"
    ended = state in (FINISHED, "cancelled")
    left = max(0, plan.steps - done) if plan.steps else None
    return RunStatus(
        run=folder.name, folder=str(folder), job=live.job if live else jobs[-1].job if jobs else "", state=state,
        live=live is not None or process is not None, step=done, steps=plan.steps or None, loss=_number(last, "loss"),
        tokens_per_second=_number(last, "tokens_per_second"),
        seconds_left=left * pace if left is not None and pace and not ended else None,
        seconds_to_save=_to_save(plan, done, pace) if at_work else None,
        attempts=len(history), node_hours=spent,
        node_hours_predicted=spent + left * pace * nodes / 3600 if left is not None and pace and nodes else None,
        cause=history[-1].cause if history else "", left_out="; ".join(filter(None, [attempts.note(), known.note()])),
    )


def _pace(last: Sequence[Mapping[str, Any]]) -> float:
    seconds = [float(r["seconds"]) for r in last if "seconds" in r]
    return statistics.median(seconds) if seconds else 0.0


def _number(last: Sequence[Mapping[str, Any]], name: str) -> float | None:
    return float(last[-1][name]) if last and name in last[-1] else None


def _spent(history: Sequence[Attempt], now: float, *, running: bool) -> float:
    """Node-hours of all attempts; the last, if it has no end, counts until now while its job or process runs."""
    hours = 0.0
    for entry in history:
        end = now if running and not entry.status else entry.time
        hours += _count(entry) * max(0.0, end - (entry.began or entry.time)) / 3600
    return hours


def _count(entry: Attempt) -> int:
    return entry.node_count or nodes_in(entry.nodes)


def _nodes(history: Sequence[Attempt], plan: Planned) -> int:
    return (_count(history[-1]) if history else 0) or plan.nodes


def _to_save(plan: Planned, done: int, pace: float | None) -> float | None:
    if not plan.save_interval or not pace:
        return None
    return (plan.save_interval - done % plan.save_interval) * pace


def _state(
    newest: Path | None, jobs: Sequence[QueuedJob], history: Sequence[Attempt], live: QueueEntry | None, *,
    trained: bool,
) -> str:
    if live is not None:
        waits = live.state == "PENDING" and live.reason not in ("", "None")
        return f"{live.state} ({live.reason})" if waits else live.state
    if newest is not None and records.cancelled(newest):
        return "cancelled"
    if history and history[-1].status:
        return history[-1].status
    if jobs:
        return "ended"  # without a word: cancelled in the queue, or its node is lost
    return "local" if trained else "-"


def rows(folders: Iterable[Path], queue: Mapping[str, QueueEntry]) -> Iterator[RunStatus]:
    """Yield the state of each run."""
    now = time.time()
    for folder in folders:
        yield status_of(folder, queue, now)


def cells(row: RunStatus) -> tuple[str, ...]:
    """Return the row's texts, one for each of ``COLUMNS``."""
    def shown(value: float | None, form: str) -> str:
        return "-" if value is None else form.format(value)

    def clock(value: float | None) -> str:
        return "-" if value is None else duration(value)

    return (
        row.run, row.job or "-", row.state, f"{row.step}/{row.steps}" if row.steps else str(row.step),
        shown(row.loss, "{:.4f}"), shown(row.tokens_per_second, "{:,.0f}"), clock(row.seconds_left),
        clock(row.seconds_to_save), str(row.attempts), f"{row.node_hours:.2f}",
        shown(row.node_hours_predicted, "{:.2f}"),
    )


def attempts_table(folder: Path) -> str:
    """Return every submission of a run and its attempts, for ``launch list``."""
    lines = []
    read = history_rows(folder)
    history, notes = {a.attempt: a for a in read.rows}, [read.note()]
    for number in records.numbers(folder):
        place = records.record_folder(folder, number)
        try:
            made = records.read_record(place)
        except RecordFault as fault:
            lines.append(f"  {place.name}  {fault}")
            continue
        who = records.cancelled(place)
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(made.time))
        commit = str(made.code.get("commit", ""))
        code = commit[:12] + "+" * commit.endswith("+") or str(made.code.get("version", "?"))
        lines.append(f"  {place.name}  {when}  by {made.by}, code {code}" + (f"; cancelled by {who}" if who else ""))
        known = records.job_rows(place)
        notes.append(known.note())
        for job in known.rows:
            where = f" on {job.process.get('host')}, process {job.process.get('pid')}" if job.process else ""
            lines.append(f"    job {job.job} ({job.why}){where}, log {job.log or ('none' if job.process else '?')}")
        lines += [f"    {line}" for a in history.values() if a.record == place.name for line in [_attempt_line(a)]]
    others = [a for a in history.values() if not a.record]
    tail = [*(f"  {_attempt_line(a)}" for a in others), *(f"  note: {note}" for note in notes if note)]
    return "\n".join([str(folder), *lines, *tail])


def _attempt_line(entry: Attempt) -> str:
    took = duration(max(0.0, entry.time - entry.began)) if entry.status and entry.began else "-"
    nodes = _count(entry)
    end = f"{entry.status} at step {entry.step}" if entry.status else "no end noted"
    why = f": {entry.cause}" if entry.cause else ""
    return f"attempt {entry.attempt}: {nodes or '?'} node{'' if nodes == 1 else 's'}, {took}, {end}{why}"
