"""The launch record of a submission: what a job runs and what it asked for, fixed before SLURM has it.

    runs/NAME/launch/0001/
      record.json   how it was asked for: code, configuration, environment, plan (never rewritten)
      config.toml   the resolved configuration
      code/         the package as it was; code.diff: its difference from the commit
      job.sh        the script that sbatch got
      jobs.jsonl    a line for each job of it: id, what SLURM was asked for, its log
      cancelled     there once somebody has cancelled it

Everything that follows (a start from the queue, a requeue, a chained job) reads the record and nothing that was edited
since. A folder is numbered; ``mkdir`` makes it, so of two submissions at once one has the number.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron_port.core.config.ranges import HIDDEN
from megatron_port.core.errors import EnvironmentFault
from megatron_port.core.io.files import read_regular, write_text
from megatron_port.core.io.logging import redact
from megatron_port.core.io.typed_json import (
    Duration,
    Natural,
    Rows,
    Seconds,
    WrongContent,
    read_rows,
    read_typed,
    typed,
)
from megatron_port.run.run_files import append_line, write_new

FOLDER = "launch"
RECORD, CONFIG, SCRIPT, JOBS, CANCELLED = "record.json", "config.toml", "job.sh", "jobs.jsonl", "cancelled"
CODE, DIFF = "code", "code.diff"
FORMAT = 1
MARK_BYTES = 1 << 16


class RecordFault(EnvironmentFault):
    """Launch record that is damaged, or does not describe what is there now; another attempt would meet it again."""

    permanent = True


@dataclass(frozen=True, kw_only=True)
class Planned:
    """Forecast of the run at its submission; 0: not known."""

    steps: Natural = 0
    save_interval: Natural = 0
    nodes: Natural = 0
    """Nodes of a job, spares included."""
    tokens_per_step: Natural = 0
    seconds_per_step: Duration = 0.0
    """By the planner."""
    node_hours: float = 0.0
    """For all steps."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """Contents of ``record.json``."""

    number: Natural
    name: str
    """Name of the run."""
    time: Seconds
    """Seconds since 1970, at submission."""
    by: str
    """submit: ``launch submit``, before the job was queued | script: a job script, at its first start | command: rank 0
    of a run that no job script started (``run.direct_start``)."""
    run: str
    """The run file, as it was named."""
    overrides: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    """Options of sbatch beside those in the script, without the values that ``--export`` set."""
    arguments: tuple[str, ...] = ()
    """Arguments of the script."""
    cwd: str = ""
    scheduler: str = "slurm"
    sweep: str = ""
    """Folder of the sweep that it is a task of."""
    task: Natural = 0
    """Its index in the sweep."""
    code: Mapping[str, Any] = field(default_factory=dict)
    """``version``, ``commit`` (with + where files differ), ``files``, ``digest``."""
    environment: Mapping[str, Any] = field(default_factory=dict)
    """``python``, ``version``, ``packages`` (name → version)."""
    image: Mapping[str, Any] = field(default_factory=dict)
    """``path``, ``bytes``, ``mtime_ns``, ``digest`` of a staged archive; or ``name`` of a container image."""
    config_digest: str = ""
    planned: Planned = field(default_factory=Planned)
    format: int = FORMAT


@dataclass(frozen=True, kw_only=True)
class RecordedCode:
    """Types of ``Record.code``."""

    version: str = ""
    commit: str = ""
    files: Natural = 0
    digest: str = ""


@dataclass(frozen=True, kw_only=True)
class RecordedEnvironment:
    """Types of ``Record.environment``."""

    python: str = ""
    version: str = ""
    packages: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RecordedImage:
    """Types of ``Record.image``."""

    name: str = ""
    path: str = ""
    bytes: Natural = 0
    mtime_ns: Natural = 0
    digest: str = ""


@dataclass(frozen=True, kw_only=True)
class QueuedJob:
    """A line of ``jobs.jsonl``."""

    job: str
    """SLURM's id; JOB_TASK of a task of an array; LAUNCHER.EPOCH of a direct start."""
    why: str = "submitted"
    """submitted | chained | started (nobody submitted it through a record)"""
    time: Seconds = 0.0
    log: str = ""
    """File of its output."""
    asked: Mapping[str, str] = field(default_factory=dict)
    """Fields of SLURM's record of the job as it was queued."""
    process: Mapping[str, Any] = field(default_factory=dict)
    """Rank 0 of a direct start: ``host``, ``pid``, ``born`` (its start in clock ticks since boot), ``space``
    (``processes.process_space``), and the ``epoch`` of its lease."""


def kept_options(options: Sequence[str]) -> tuple[str, ...]:
    """Return sbatch's options as a record and a message may show them: without secrets.

    Of what ``--export`` sets the names stay, and no value: any of them may be a secret. No later job needs it: it gets
    the variables of the job before (``continuation.ONCE``).
    """
    out: list[str] = []
    for i, word in enumerate(options):
        if word.startswith("--export="):
            out.append("--export=" + _names_only(word.removeprefix("--export=")))
        else:
            out.append(_names_only(word) if i and options[i - 1] == "--export" else redact(word))
    return tuple(out)


def _names_only(exported: str) -> str:
    """Return ``ALL,KEY=***`` of ``ALL,KEY=value``."""
    parts = re.findall(r"""(?:'[^']*'|"[^"]*"|[^,])+""", exported)
    names = [part.partition("=") for part in parts]
    first = next((i for i, (_, equals, _) in enumerate(names) if equals), len(names))
    # After a value a part without a name may be the rest of that value.
    return ",".join(
        name if i < first else f"{name}={HIDDEN}" if equals else HIDDEN for i, (name, equals, _) in enumerate(names)
    )


def record_folder(run_folder: Path, number: int) -> Path:
    """Return the folder of one record."""
    return run_folder / FOLDER / f"{number:04d}"


def numbers(run_folder: Path) -> list[int]:
    """Return the numbers of all records, rising; those being made are among them."""
    try:
        names = os.listdir(run_folder / FOLDER)
    except OSError:
        return []
    return sorted(int(n) for n in names if re.fullmatch(r"\d{4,9}", n))


def claim(run_folder: Path, number: int) -> Path | None:
    """Make the folder of a record; None where somebody else just has. Raises OSError."""
    folder = record_folder(run_folder, number)
    for tries in range(10):
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            folder.mkdir()
            break
        except FileExistsError:
            return None
        except FileNotFoundError:  # a submission that was refused has just discarded the folders above
            if tries == 9:
                raise
    return folder


def discard(folder: Path) -> None:
    """Remove a record whose job was never queued, and the folders above it that hold nothing else."""
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()
        folder.parent.parent.rmdir()


def write_record(folder: Path, record: Record) -> None:
    """Commit ``record.json``. Raises OSError."""
    write_text(folder / RECORD, json.dumps(asdict(record), indent=1) + "\n")


def read_record(folder: Path) -> Record:
    """Return a record.

    Raises:
        RecordFault: it is not there, or is not one that this version knows.
    """
    try:
        record = read_typed(folder / RECORD, Record)
        for kind, table in (
            (RecordedCode, record.code), (RecordedEnvironment, record.environment), (RecordedImage, record.image),
        ):
            typed(kind, table)
    except (OSError, WrongContent) as error:
        reason = (error.strerror if isinstance(error, OSError) else "") or error
        raise RecordFault(f"the launch record {folder} cannot be read ({reason}); submit the run again") from None
    if record.format > FORMAT:
        raise RecordFault(f"the launch record {folder} has format {record.format}, this version reads {FORMAT}")
    return record


def add_job(folder: Path, job: QueuedJob) -> None:
    """Append a job to a record, once. Raises OSError."""
    if any(known.job == job.job for known in jobs(folder)):
        return
    append_line(folder / JOBS, json.dumps(asdict(job)))


def jobs(folder: Path) -> list[QueuedJob]:
    """Return the jobs of a record, oldest first. Lines that are none are left out (:func:`job_rows` counts them)."""
    return job_rows(folder).rows


def job_rows(folder: Path) -> Rows[QueuedJob]:
    """Return :func:`jobs`, and which lines of the file were left out."""
    read = read_rows(folder / JOBS, QueuedJob)
    read.rows = list({entry.job: entry for entry in read.rows}.values())
    return read


def record_of(run_folder: Path, *job_ids: str) -> Path | None:
    """Return the folder of the newest record that one of these jobs is of; None: of none."""
    wanted = set(filter(None, job_ids))
    for folder in newest_first(run_folder):
        if any(entry.job in wanted for entry in jobs(folder)):
            return folder
    return None


def newest_first(run_folder: Path) -> Iterator[Path]:
    """Yield the folders of all records."""
    for number in reversed(numbers(run_folder)):
        yield record_folder(run_folder, number)


def newest(run_folder: Path) -> Path | None:
    """Return the folder of the newest record; None without any."""
    return next(newest_first(run_folder), None)


def cancel(folder: Path, who: str) -> bool:
    """Mark a record as cancelled, for good; False where it was already. Raises OSError."""
    return write_new(folder / CANCELLED, (who + "\n").encode())


def cancelled(folder: Path) -> str:
    """Return who cancelled a record and when; empty: nobody."""
    try:
        return read_regular(folder / CANCELLED, MARK_BYTES).decode("utf-8", "replace").strip() or "somebody"
    except FileNotFoundError:
        return ""
    except OSError:  # a mark is there, whatever it is
        return "somebody" if os.path.lexists(folder / CANCELLED) else ""
