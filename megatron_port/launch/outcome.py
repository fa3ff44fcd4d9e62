"""What the ranks leave behind: how an attempt ended, and which failure came first.

srun's exit code is the highest of its tasks' and says 143 when one task failed and the
others were ended for it, or 0 although ranks are lost. So the ranks themselves commit
two small files in the run's folder, and the job script reads those.

    outcome.json             the last attempt's end: finished, or saved on a signal (rank 0)
    failures/ATTEMPT.json    the first failure of an attempt (whichever rank was first)
    failures/ATTEMPT.lost    the first rank that noticed that a peer had gone
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_port.errors import EXIT_INTERRUPTED, PortError
from megatron_port.runtime.job import LOCAL
from megatron_port.runtime.permissions import file_mode
from megatron_port.runtime.redact import redact

OUTCOME = "outcome.json"
FAILURES = "failures"
FINISHED, SAVED = "finished", "saved"
MESSAGE_CHARACTERS = 4000
GONE = "is gone at"
"""In the watch's message about a rank that ended without a word (in ATTEMPT.lost: only its launcher knows why)."""


@dataclass(frozen=True)
class AttemptOutcome:
    """End of an attempt that reached its last step, or saved before it."""

    attempt: str
    status: str
    """finished | saved"""
    step: int
    """Optimizer steps done and committed."""
    signal: str = ""
    """The first signal, for ``saved``."""
    time: float = 0.0


@dataclass(frozen=True)
class Failure:
    """Failure that ended an attempt, from the rank that failed first."""

    attempt: str
    rank: int
    host: str
    exit_code: int
    message: str
    time: float = 0.0
    permanent: bool = False
    """Another attempt would meet it again (``PortError.permanent``)."""


def write_outcome(run_folder: Path, outcome: AttemptOutcome) -> None:
    """Commit ``outcome.json`` (rank 0, after the state it speaks of is on disk). Raises OSError."""
    run_folder.mkdir(parents=True, exist_ok=True)
    _commit(run_folder / OUTCOME, asdict(outcome), replace=True)


def read_outcome(run_folder: Path) -> AttemptOutcome | None:
    """Return the last committed outcome, of whatever attempt; None if there is none that can be read."""
    values = _read(run_folder / OUTCOME)
    try:
        return None if values is None else AttemptOutcome(**values)
    except TypeError:
        return None


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
    folder = run_folder / FAILURES
    target = folder / f"{attempt}.{'lost' if lost_peer else 'json'}"
    with contextlib.suppress(OSError):
        if not target.exists():  # thousands of ranks may fail at once
            folder.mkdir(parents=True, exist_ok=True)
            _commit(target, asdict(failure), replace=False)


def write_json(path: Path, values: dict) -> None:
    """Commit a small file. Raises OSError."""
    _commit(path, values, replace=True)


def read_failure(run_folder: Path, attempt: str, *, lost_peer: bool = False) -> Failure | None:
    """Return the first failure of an attempt, if any rank could record it."""
    values = _read(run_folder / FAILURES / f"{attempt}.{'lost' if lost_peer else 'json'}")
    try:
        return None if values is None else Failure(**values)
    except TypeError:
        return None


def _commit(target: Path, values: dict, *, replace: bool) -> None:
    """Write under a temporary name and fsync; then rename, or link so that the first writer wins."""
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            json.dump(values, stream)
            stream.flush()
            os.fchmod(stream.fileno(), file_mode())  # mkstemp makes it private, and a colleague may look after it
            os.fsync(stream.fileno())
        if replace:
            os.replace(name, target)
        else:
            with contextlib.suppress(FileExistsError):
                os.link(name, target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


def _read(path: Path) -> dict | None:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return values if isinstance(values, dict) else None
