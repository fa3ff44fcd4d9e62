"""Small files that a run leaves in its folder for others: the job script, reports, lists of runs, the live page.

srun's exit code is the highest of its tasks' and says 143 when one task failed and the others were ended for it, or 0
although ranks are lost. So the ranks themselves commit how an attempt ended and which failure came first:

    run.json                 id of the run that the folder is of
    previous/                files of runs that were in the folder before
    outcome.json             the last attempt's end: finished, or saved on a signal (rank 0)
    failures/ATTEMPT.json    the first failure of an attempt (whichever rank was first)
    failures/ATTEMPT.lost    the first rank that noticed that a peer had gone
    events.jsonl             what happened to the run, a line each
    ranks.jsonl              how the ranks' times differ, a line each window
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import socket
import stat
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from megatron_port.core.config.schema import RunConfig
from megatron_port.core.errors import EXIT_INTERRUPTED, EnvironmentFault, PortError
from megatron_port.core.io.files import NEW, free_bytes, fsync_directory, kind_of, write_text
from megatron_port.core.io.logging import redact, redacted
from megatron_port.core.io.typed_json import REQUIRED, Natural, Rows, Seconds, read_optional, read_rows
from megatron_port.core.train.folders import run_folder
from megatron_port.ext.telemetry.metrics import FILE_NAME, read_metrics
from megatron_port.run.launchers import LOCAL

IDENTITY = "run.json"
"""Which run the folder is of."""
PREVIOUS = "previous"
"""Where the records of runs go that were in the folder before; each is a folder of a run."""
OUTCOME = "outcome.json"
EVENTS = "events.jsonl"
RANKS = "ranks.jsonl"
FINISHED, SAVED = "finished", "saved"
"""Ends of an attempt that no failure ended."""
FAILURES = "failures"
MESSAGE_CHARACTERS = 4000
GONE = "is gone at"
"""In the watch's message about a rank that ended without a word (in ATTEMPT.lost: only its launcher knows why)."""


@dataclass(frozen=True)
class AttemptOutcome:
    """End of an attempt that reached its last step, or saved before it: ``outcome.json``."""

    attempt: str = ""
    status: str = field(default="", metadata=REQUIRED)
    """finished | saved"""
    step: Natural = field(default=0, metadata=REQUIRED)
    """Optimizer steps done and committed."""
    signal: str = ""
    """The first signal, for ``saved``."""
    time: Seconds = 0.0


@dataclass(frozen=True)
class Failure:
    """Failure that ended an attempt, from the rank that failed first."""

    attempt: str
    rank: Natural
    host: str
    exit_code: Natural
    message: str
    time: Seconds = 0.0
    permanent: bool = False
    """Another attempt would meet it again (``PortError.permanent``)."""


def write_outcome(run_folder: Path, outcome: AttemptOutcome) -> None:
    """Commit ``outcome.json`` (rank 0, after the state it speaks of is on disk). Raises OSError."""
    run_folder.mkdir(parents=True, exist_ok=True)
    write_text(run_folder / OUTCOME, json.dumps(asdict(outcome)))


def read_outcome(run_folder: Path) -> AttemptOutcome | None:
    """Return the last committed outcome, of whatever attempt; None if there is none that can be read."""
    return read_optional(run_folder / OUTCOME, AttemptOutcome)[0]


def record_failure(
    run_folder: Path, attempt: str, rank: int, error: BaseException, *, lost_peer: bool = False, host: str = ""
) -> None:
    """Keep this failure if no rank of the attempt was faster. Never raises: the failure itself matters more.
    Outside of a job nothing is kept.

    ``lost_peer``: this rank only noticed that another had gone; kept apart, as it is a consequence.
    ``host``: of that rank; empty: this one.
    """
    if attempt == LOCAL:
        return  # nobody reads it; the message is on the terminal
    code = error.exit_code if isinstance(error, PortError) else 1
    if isinstance(error, KeyboardInterrupt):
        code = EXIT_INTERRUPTED
    text = str(error) if isinstance(error, PortError) else f"{type(error).__name__}: {error}"
    text = redact(text)[:MESSAGE_CHARACTERS]
    permanent = isinstance(error, PortError) and error.permanent
    failure = Failure(attempt, rank, host or socket.gethostname(), code, text, time.time(), permanent)
    target = _failure_file(run_folder, attempt, lost_peer)
    with contextlib.suppress(OSError):
        if not target.exists():  # thousands of ranks may fail at once
            target.parent.mkdir(parents=True, exist_ok=True)
            write_new(target, json.dumps(asdict(failure)).encode())


def read_failure(run_folder: Path, attempt: str, *, lost_peer: bool = False) -> Failure | None:
    """Return the first failure of an attempt, if any rank could record it."""
    return read_optional(_failure_file(run_folder, attempt, lost_peer), Failure)[0]


def outcome_faults(run_folder: Path, attempt: str) -> list[str]:
    """Return what is wrong with the outcome and the failures of an attempt, where one is there and not believed."""
    found = [read_optional(run_folder / OUTCOME, AttemptOutcome)[1]]
    found += [read_optional(_failure_file(run_folder, attempt, lost), Failure)[1] for lost in (False, True)]
    return [fault for fault in found if fault]


def _failure_file(run_folder: Path, attempt: str, lost_peer: bool) -> Path:
    return run_folder / FAILURES / f"{attempt}.{'lost' if lost_peer else 'json'}"


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


# The starts of a run, one after another: ``attempts.jsonl`` in its folder has a line for each start and each end.

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


# New files, of which one process writes each, files that grow by lines, and whether the folder can be written at all.

_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)


def write_new(path: Path, data: bytes) -> bool:
    """Write a file that does not exist yet; return False, and change nothing, where it does.

    Of several processes that try, on one machine or on several, exactly one succeeds. Raises OSError.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        _write_exclusively(part, data)
        try:
            os.link(part, path)
        except FileExistsError:
            # NFS repeats a request whose answer was lost: two names mean that it was done.
            if os.stat(part).st_nlink != 2:
                return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            try:
                _write_exclusively(path, data)
            except FileExistsError:
                return False
        fsync_directory(path.parent)
        return True
    finally:
        with contextlib.suppress(OSError):
            os.unlink(part)


def append_line(path: Path, line: str, *, durable: bool = True) -> None:
    """Append a line to a regular file, which is made where it is not there, with one call of the system.

    Raises:
        OSError: the file system refused, or something else is in its place: to write to a pipe would be to wait.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
    with os.fdopen(os.open(path, flags, 0o666), "ab", buffering=0) as stream:
        mode = os.fstat(stream.fileno()).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, f"it is {kind_of(mode)}, not a regular file", str(path))
        stream.write(line.encode() + b"\n")
        if durable:
            os.fsync(stream.fileno())


def _write_exclusively(path: Path, data: bytes) -> None:
    """Write and sync a file; FileExistsError where it exists."""
    with os.fdopen(os.open(path, NEW, 0o666), "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


_PROBE = 1 << 16
"""Size of the write probe; it exceeds the slack of blocks that a full file system has already allocated."""


def check_output(config: RunConfig, trained: int) -> None:
    """Check the run's folder by writing and removing a file; rank 0 calls this before it meets the others.

    A folder that refuses would be found hours later, by the first save. ``trained``: the parameters that updates
    change. One checkpoint has a master and two moments of each, beside headers and manifest.

    Raises:
        EnvironmentFault: the folder cannot be made or written, or has no space for one checkpoint.
    """
    folder = run_folder(config)
    probe = folder / f".write-check-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with open(probe, "wb", buffering=0) as stream:
                written = stream.write(bytes(_PROBE))
                os.fsync(stream.fileno())
            if written != _PROBE:
                raise OSError(28, os.strerror(28))
        finally:
            with contextlib.suppress(OSError):
                probe.unlink()
    except OSError as error:
        raise EnvironmentFault(
            f"{folder}: cannot be written ({error.strerror or error}), so nothing of this run could be saved; free "
            "space or give this user write permission there, or choose another output_dir"
        ) from error
    needed, free = 3 * (8 if config.precision.dtype == "fp64" else 4) * trained, free_bytes(folder)
    if free is not None and free < needed:
        raise EnvironmentFault(
            f"{folder}: {free} bytes are free, and one checkpoint of this run takes {needed}; free some, or choose "
            "another output_dir"
        )
