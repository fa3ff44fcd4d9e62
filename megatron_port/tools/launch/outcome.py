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
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_port.core.dist.job import LOCAL
from megatron_port.core.errors import EXIT_INTERRUPTED, PortError
from megatron_port.core.io.atomic import write_new, write_text
from megatron_port.core.io.redact import redact
from megatron_port.core.io.typed_json import Natural, Seconds, read_optional
from megatron_port.ext.telemetry.run_state import FINISHED, OUTCOME, SAVED, AttemptOutcome

__all__ = ["FINISHED", "GONE", "OUTCOME", "SAVED", "AttemptOutcome", "Failure", "outcome_faults", "read_failure",
           "read_outcome", "record_failure", "write_outcome"]
FAILURES = "failures"
MESSAGE_CHARACTERS = 4000
GONE = "is gone at"
"""In the watch's message about a rank that ended without a word (in ATTEMPT.lost: only its launcher knows why)."""


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
