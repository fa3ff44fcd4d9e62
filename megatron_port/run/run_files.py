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
import json
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from megatron_port.core.dist.launchers import LOCAL
from megatron_port.core.errors import EXIT_INTERRUPTED, PortError
from megatron_port.core.io.files import append_line, write_new, write_text
from megatron_port.core.io.logging import redact, redacted
from megatron_port.core.io.typed_json import REQUIRED, Natural, Seconds, read_optional

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
