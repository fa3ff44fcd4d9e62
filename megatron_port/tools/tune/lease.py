"""One tuning in a folder at a time, and no trial of a killed one beside its own: the folder's ``running.json``.

It names the tuning's process and the trial's, each by number and birth. A tuning that was killed leaves it, and the
trial that it had started still runs; the next one ends that before it measures.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatron_port.core.dist.job import current_job
from megatron_port.core.dist.processes import born, process_space
from megatron_port.core.errors import EnvironmentFault
from megatron_port.core.io.atomic import write_output
from megatron_port.core.io.typed_json import Natural, WrongContent, read_typed

FILE_NAME = "running.json"
GRACE_S = 10.0


@dataclass(frozen=True, kw_only=True)
class RunningTuning:
    """Contents of ``running.json``: processes as (number, birth)."""

    tune: tuple[Natural, Natural]
    trial: tuple[Natural, Natural]
    space: str = ""
    job: str = ""


@contextlib.contextmanager
def hold_folder(folder: Path, say: Callable[[str], None]) -> Iterator[Callable[[int], None]]:
    """Hold the folder while trials are measured; gives what is told a trial's session. Raises as :func:`claim`."""
    folder.mkdir(parents=True, exist_ok=True)
    if left := claim(folder):
        say(left)
    note(folder, 0)
    try:
        yield partial(note, folder)
    finally:
        forget(folder)


def note(folder: Path, trial: int) -> None:
    """Write down that this process measures in ``folder``, by a trial whose session has that number (0: none yet)."""
    me = os.getpid()
    write_output(folder / FILE_NAME, json.dumps({
        "space": process_space(), "job": _job(), "tune": [me, born(me)],
        "trial": [trial, born(trial) if trial else 0],
    }))


def _job() -> str:
    job = current_job()
    return "" if job is None else job.id


def forget(folder: Path) -> None:
    """Remove the note."""
    (folder / FILE_NAME).unlink(missing_ok=True)


def claim(folder: Path) -> str:
    """End what a killed tuning left running in ``folder``; return a line about it, empty where there was nothing.

    Raises:
        EnvironmentFault: another tuning is at work there, or may be, on a machine that this process cannot see.
    """
    path = folder / FILE_NAME
    try:
        known = read_typed(path, RunningTuning)
    except (OSError, WrongContent):
        return ""
    tune, trial = known.tune, known.trial
    if known.space != process_space():
        if known.job != _job():
            return ""  # the end of its job ended it
        raise EnvironmentFault(
            f"{path}: a tuning on another machine, or in another container, may still measure in this folder; give "
            "another --out, or remove that file when it has ended"
        )
    if tune[0] != os.getpid() and tune[1] and born(tune[0]) == tune[1]:
        raise EnvironmentFault(f"process {tune[0]} tunes in {folder} now; wait for it, or give another --out")
    ended = _end_session(trial[0], trial[1])
    forget(folder)
    processes = f"{ended} process{'es' if ended > 1 else ''}"
    return f"ended the trial that a killed tuning had left running ({processes})" if ended else ""


def _end_session(leader: int, start: int) -> int:
    """End the processes of a session, first by asking; return how many there were. None of them is another's: a number
    is not used again for a process while a session or group has it."""
    if not start or born(leader) not in (start, 0):
        return 0
    found = _members(leader, start)
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in _members(leader, start):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        until = time.monotonic() + GRACE_S
        while _members(leader, start) and time.monotonic() < until:
            time.sleep(0.05)
    return len(found)


def _members(session: int, start: int) -> list[int]:
    """Processes of a session that are not older than its leader was, and have not ended."""
    out = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] not in "ZX" and int(fields[3]) == session and int(fields[19]) >= start:
            out.append(int(entry.parent.name))
    return out
