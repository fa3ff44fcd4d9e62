"""The state of runs, of queue and run in one row each: read from their folders and one question to SLURM.

Files are read from their ends, so a row costs the same after a million steps. Nothing is written.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from megatron_port.core.errors import ConfigError, EnvironmentFault
from megatron_port.core.io.files import open_regular
from megatron_port.core.io.typed_json import Rows
from megatron_port.ext.telemetry.console import duration
from megatron_port.ext.telemetry.metrics import FILE_NAME, decode, known_metrics
from megatron_port.run import direct_start as direct
from megatron_port.run import launch_record as records
from megatron_port.run.direct_start import running
from megatron_port.run.launch_record import Planned, QueuedJob, RecordFault
from megatron_port.run.launchers import QueueEntry, ask_queue, expand_hosts, run_tool
from megatron_port.run.run_files import FINISHED, HISTORY, Attempt, history_rows, read_history
from megatron_port.tools.launch.submit import who

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
    """Return the state of one run. ``queue``: ``run.launchers.ask_queue``."""
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


# Follow the logs of a run over its attempts, and cancel it so that it stays cancelled.

ASK_S = 10.0
"""Between two questions whether a job of the run is left."""
POLL_S = 0.5
SETTLE_S = 20.0
"""A job that was being queued while the run was cancelled shows up within this."""


def log_files(run_folder: Path) -> list[Path]:
    """Return the logs of all jobs of a run, oldest first, each once; they need not exist yet."""
    found: dict[str, None] = {}
    for number in records.numbers(run_folder):
        jobs = records.jobs(records.record_folder(run_folder, number))
        found.update(dict.fromkeys(job.log for job in jobs if job.log))
    found.update(dict.fromkeys(a.log for a in read_history(run_folder) if a.log))
    return [Path(name) for name in found]


def existing(files: Sequence[Path]) -> list[Path]:
    """Return those of the logs that can be read: regular files."""
    return [path for path in files if os.path.isfile(path)]


def live_jobs(run_folder: Path, queue: Mapping[str, QueueEntry]) -> list[QueueEntry]:
    """Return those of a run's jobs that wait or run, of any of its records."""
    known = [j.job for n in records.numbers(run_folder) for j in records.jobs(records.record_folder(run_folder, n))]
    scripts = f"{run_folder / records.FOLDER}{os.sep}"
    by_id = {job: queue[job] for job in known if job in queue}
    by_id.update({e.job: e for e in queue.values() if e.command.startswith(scripts)})
    return list(by_id.values())


def last_lines(path: Path, count: int) -> tuple[str, int]:
    """Return the last lines of a file (all of it for 0) and its size. Raises OSError."""
    with open(open_regular(path, follow=True), "rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        start, found = size, b""
        while start and (not count or found.count(b"\n") <= count):
            step = min(start, 1 << 16)
            start -= step
            stream.seek(start)
            found = stream.read(step) + found
    lines = found.decode("utf-8", "replace").splitlines(keepends=True)
    return "".join(lines[-count:] if count else lines), size


def follow(run_folder: Path, *, count: int, alive: Callable[[], bool], wait: Callable[[float], None]) -> Iterator[str]:
    """Yield what the logs have, then what is added, job after job, until no job of the run is left.

    Args:
        count: lines of the past; 0: all.
        alive: a job of the run waits or runs.
        wait: sleeps.
    """
    place: dict[Path, int] = {}
    files = log_files(run_folder)
    shown = existing(files)
    for path in shown if not count else shown[-1:]:
        text, place[path] = last_lines(path, count)
        yield _titled(path, text)
    for path in shown:
        place.setdefault(path, path.stat().st_size)
    asked, left = time.monotonic(), True
    while True:
        new = False
        for path in log_files(run_folder):
            text = _added(path, place)
            new = new or bool(text)
            if text:
                yield text
        if not new and not left:
            return
        if time.monotonic() - asked > ASK_S:
            asked, left = time.monotonic(), alive()
        wait(POLL_S)


def _titled(path: Path, text: str) -> str:
    return f"==> {path} <==\n{text}"


def _added(path: Path, place: dict[Path, int]) -> str:
    """Return what a log has gained since the last look; a file that is new gets its title."""
    try:
        with open(open_regular(path, follow=True), "rb") as stream:
            stream.seek(place.get(path, 0))
            data = stream.read()
    except OSError:
        return ""
    if not data:
        return ""
    title = path not in place
    place[path] = place.get(path, 0) + len(data)
    text = data.decode("utf-8", "replace")
    return _titled(path, text) if title else text


def cancel(run_folder: Path, *, wait: Callable[[float], None] = time.sleep) -> list[str]:
    """Cancel every job of a run for good, and the process of a direct start; return lines on what was done.

    The mark in the record comes first: a job script that is about to queue its job again, or a chained one, sees it.

    Raises:
        ConfigError: nothing of the run is there to cancel.
        EnvironmentFault: SLURM does not answer, or refuses; or the process is another user's.
    """
    newest = records.newest(run_folder)
    if newest is None:
        raise ConfigError(
            f"{run_folder} has no launch record: no job and no process of it is known, so nothing is cancelled"
        )
    process = direct.running(run_folder, newest)
    jobs = [] if direct.only(run_folder) else live_jobs(run_folder, ask_queue())
    done: list[str] = []
    by = f"{who()} at {time.strftime('%Y-%m-%d %H:%M:%S')}"
    try:
        if process is not None:
            done.append(direct.stop(process, by))
        records.cancel(newest, by)
    except OSError as error:
        raise EnvironmentFault(f"{run_folder} cannot be cancelled: {error.strerror}") from None
    if not jobs:
        return done or [f"{run_folder}: nothing waits or runs; marked as cancelled"]
    until = time.monotonic() + SETTLE_S
    while jobs and time.monotonic() < until:
        _scancel([e.job for e in jobs])
        told = {line.split()[1] for line in done}
        done += [f"job {e.job} ({e.state}) cancelled" for e in jobs if e.job not in told]
        wait(1.0)
        jobs = [e for e in live_jobs(run_folder, ask_queue()) if e.state != "COMPLETING"]
        jobs = [e for e in jobs if e.state == "PENDING" or f"job {e.job} " not in " ".join(done)]
    return done


def _scancel(jobs: Sequence[str]) -> None:
    code, text = run_tool(["scancel", *jobs])
    if code and "already" not in text.lower() and "invalid job id" not in text.lower():
        raise EnvironmentFault(f"scancel {' '.join(jobs)} failed: {text}")
