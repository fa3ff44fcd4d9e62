"""Follow the logs of a run over its attempts, and cancel it so that it stays cancelled."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from megatron_port.core.dist.launchers import QueueEntry, ask_queue, run_tool
from megatron_port.core.errors import ConfigError, EnvironmentFault
from megatron_port.core.io.files import open_regular
from megatron_port.run.attempts import read_history
from megatron_port.tools.launch import direct
from megatron_port.tools.launch import record as records
from megatron_port.tools.launch.submit import who

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
