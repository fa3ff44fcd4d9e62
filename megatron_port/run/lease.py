"""One attempt at a time in a run folder: a lease with an epoch that fences off whoever held it before.

``lease/epoch-00000007.json`` says who holds the folder (:class:`~megatron_port.run.lease.Holder`). The highest
epoch holds it. To take it over is to make the next file, which only one process can: ``link`` and ``O_EXCL`` are atomic
on local file systems, NFS and Lustre alike. The holder rewrites its own file every few seconds (a counter), and before
it renames, deletes or appends anything in the folder it looks whether a higher epoch has come: then it was taken for
dead, and must stop. Temporary names carry the epoch, so that whoever cleans up knows whose they are.

The look and the deed are two calls. What slips in between is bounded: a new holder first removes the temporaries of
older epochs, and a rename of one that is gone fails in the file system.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

from megatron_port.core.config.ranges import Range
from megatron_port.core.dist.rank import Fence, LeaseLost
from megatron_port.core.errors import ConfigError, EnvironmentFault
from megatron_port.core.io.files import open_regular, write_text
from megatron_port.core.io.typed_json import Natural, Seconds, WrongContent, parse_json, right_fields
from megatron_port.run.launchers import AGENT_VARIABLE, LOCAL, current_job, job_state, one_task_at_a_time
from megatron_port.run.processes import born, process_space
from megatron_port.run.run_files import write_new

# Who holds a run folder, and whether that attempt still runs.
#
# Nothing here compares the clocks of two machines. A process of this machine is looked up; a job is asked of SLURM; of
# anything else the heartbeat counter is watched for a while, by the watcher's own monotonic clock.

EXIT_SECONDS = 2.0
"""A process of this machine that was just killed, or is about to end, gets this long to be gone."""
POLL_SECONDS = 0.2
ASK_SECONDS = 2.0
"""Between two questions to SLURM."""
MOST_SILENCE = 24 * 3600.0
"""Nobody is waited for any longer."""
Patience = Annotated[float, Range(lambda x: 0 <= x <= MOST_SILENCE, "at most a day, in seconds")]


@dataclass(frozen=True, kw_only=True)
class Holder:
    """The attempt that holds a run folder: rank 0's process and its job."""

    epoch: Natural = 0
    """Fencing token: 1 for the first attempt in a folder, one more for each that follows."""
    attempt: str = LOCAL
    """``JOB.RESTART``, or local."""
    run: str = ""
    """Id of the run; empty until it is known."""
    host: str = ""
    space: str = ""
    """``processes.process_space``: where ``pid`` means something."""
    pid: Natural = 0
    born: Natural = 0
    """Start of the process, in clock ticks since boot."""
    job: str = ""
    restart: Natural = 0
    step: str = ""
    cluster: str = ""
    series: str = ""
    array_job: str = ""
    array_task: str = ""
    agent: str = ""
    """Name of what keeps the ranks (``launchers.AGENT_VARIABLE``); empty: nothing."""
    since: Seconds = 0.0
    """Seconds since 1970 on its host; for people."""
    heartbeat: Natural = 0
    silence: Patience = 0.0
    """Seconds without a heartbeat that this holder asks to be granted; it beats several times in them."""
    released: bool = False
    """It has ended and said so."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @staticmethod
    def from_json(values: Any) -> Holder | None:
        """None if ``values`` are not those of a holder; fields that are unknown or of a wrong type are left out."""
        taken = right_fields(Holder, values)
        return Holder(**taken) if "epoch" in taken else None

    def describe(self) -> str:
        """Return ``attempt 12.0 (SLURM job 12) on node7, process 4242, since 2026-01-31 12:00:00``."""
        job = ""
        if self.job:
            task = f", task {self.array_task} of array {self.array_job}" if self.array_job else ""
            job = f" (SLURM job {self.job}{task})"
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since)) if self.since else "an unknown time"
        return f"attempt {self.attempt}{job} on {self.host or 'an unknown host'}, process {self.pid}, since {since}"


def this_process() -> Holder:
    """The holder that this process would be."""
    job = current_job()
    mine = Holder(
        host=socket.gethostname(), space=process_space(), pid=os.getpid(), born=born(os.getpid()), since=time.time(),
        agent=os.environ.get(AGENT_VARIABLE, ""),
    )
    if job is None:
        return mine
    values = mine.to_json() | {
        "attempt": job.attempt, "job": job.id, "restart": job.restart, "step": job.step, "cluster": job.cluster,
        "series": job.series, "array_job": job.array_job, "array_task": job.array_task,
    }
    return Holder(**values)


class Life(Enum):
    """State of a holder, as far as it is known."""

    ENDED = "ended"
    RUNS = "runs"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Judgement:
    """Whether a holder still runs, and how that is known."""

    life: Life
    reason: str


def same_machine(holder: Holder, mine: Holder) -> bool:
    """This process can look the holder's process up."""
    return bool(holder.space) and holder.space == mine.space


def look(holder: Holder, mine: Holder) -> Judgement:
    """Judge a holder at once: by its own word, its process, its job. Asks SLURM at most once or twice."""
    if holder.released:
        return Judgement(Life.ENDED, "it has ended")
    if same_machine(holder, mine) and holder.born:
        if born(holder.pid) == holder.born:
            return Judgement(Life.RUNS, "its process runs on this host")
        return Judgement(Life.ENDED, f"process {holder.pid} is gone")
    if holder.agent and holder.agent == mine.agent:
        return Judgement(Life.ENDED, "this run's agent has replaced it")
    if not holder.job or (holder.cluster and mine.cluster and holder.cluster != mine.cluster):
        return Judgement(Life.UNKNOWN, "its host cannot be asked from here")
    if holder.job == mine.job and holder.restart < mine.restart:
        return Judgement(Life.ENDED, f"SLURM has started job {holder.job} again")
    if holder.job == mine.job and not holder.step:
        return Judgement(Life.UNKNOWN, "it is of this very job")
    state = job_state(holder.job, holder.step)
    if state is None:
        return Judgement(Life.UNKNOWN, f"squeue does not say whether job {holder.job} runs")
    if state:
        return Judgement(Life.RUNS, f"squeue says that job {holder.job} is {state}")
    return Judgement(Life.ENDED, f"squeue knows of no process of job {holder.job}")


def _ends_soon(judgement: Judgement, holder: Holder, mine: Holder) -> bool:
    """SLURM takes its time over a job's end, and the next of a chain must not be refused for that."""
    chained = bool(mine.series) and holder.series == mine.series
    return holder.job != "" and (chained or "COMPLETING" in judgement.reason)


def judge(
    reread: Callable[[], tuple[Holder, object]],
    mine: Holder,
    silence_seconds: float,
    *,
    note: Callable[[str], None] | None = None,
) -> Judgement:
    """Whether the holder still runs, found out for as long as that takes; ENDED or RUNS.

    Args:
        reread: the holder as its file says now, and a mark that changes with each heartbeat.
        silence_seconds: a holder whose heartbeat has not moved for this long (or for its own ``silence``, if that is
            longer), seen from here, has ended, unless its process or its job is known to run. One whose process or job
            is gone is not waited for.
        note: takes a line before a longer wait.
    """
    holder, mark = reread()
    silence_seconds = max(silence_seconds, holder.silence)
    begun = asked = time.monotonic()
    judgement = look(holder, mine)
    first = True
    while judgement.life is not Life.ENDED:
        waited = time.monotonic() - begun
        if judgement.life is Life.RUNS:
            patience = EXIT_SECONDS if same_machine(holder, mine) else 0.0
            if _ends_soon(judgement, holder, mine):
                patience = max(patience, silence_seconds)
            if waited >= patience:
                return judgement
        elif waited >= silence_seconds:
            return Judgement(Life.ENDED, f"its heartbeat has stood still for {waited:.0f} s, and {judgement.reason}")
        if first and note is not None and not (judgement.life is Life.RUNS and same_machine(holder, mine)):
            note(f"{holder.describe()}: {judgement.reason}; watching its heartbeat for up to {silence_seconds:g} s")
        first = False
        time.sleep(POLL_SECONDS)
        holder, seen = reread()
        if holder.released:
            return look(holder, mine)
        if seen != mark and judgement.life is Life.UNKNOWN:
            return Judgement(Life.RUNS, "its heartbeat moves")
        if same_machine(holder, mine) or (judgement.life is Life.RUNS and time.monotonic() - asked > ASK_SECONDS):
            asked = time.monotonic()
            judgement = look(holder, mine)
    return judgement


FOLDER = "lease"
SILENCE_SECONDS = 60.0
BEATS = 6
"""Heartbeats in the time after which a holder that is silent is taken for dead."""
LAST_EPOCH = 10**18 - 1
"""The largest number that a file's name can have."""
KEPT = 16
"""Files of earlier epochs that stay."""

_FILE = re.compile(r"epoch-(\d{8,18})\.json")
_LEFTOVER = re.compile(r"\.epoch-(\d{8,18})\.json\..*\.tmp")


class FolderInUse(ConfigError):
    """Another attempt holds the run folder. Configuration, exit 2: it takes another name, or another time."""


def newest_epoch(run_folder: Path) -> int:
    """The epoch that holds the folder; 0: none ever did. Raises OSError."""
    try:
        names = os.listdir(run_folder / FOLDER)
    except FileNotFoundError:
        return 0
    return max((int(found.group(1)) for name in names if (found := _FILE.fullmatch(name))), default=0)


def lease_file(run_folder: Path, epoch: int) -> Path:
    """Return ``lease/epoch-00000007.json``."""
    return run_folder / FOLDER / f"epoch-{epoch:08d}.json"


def read_holder(run_folder: Path, epoch: int) -> tuple[Holder, object]:
    """Return the holder in an epoch's file, and a mark that changes when it is written. A torn file names nobody."""
    path = lease_file(run_folder, epoch)
    try:
        with open(open_regular(path, follow=True), encoding="utf-8", errors="replace") as stream:
            status = os.fstat(stream.fileno())
            text = stream.read(1 << 16)
    except OSError:
        return Holder(epoch=epoch), None
    try:
        found = Holder.from_json(parse_json(text))
    except WrongContent:
        found = None
    return replace(found or Holder(), epoch=epoch), (text, status.st_mtime_ns)


def _refusal(run_folder: Path, holder: Holder, judgement: Judgement, mine: Holder) -> FolderInUse:
    if holder.job:
        end = f"scancel {holder.job}"
    else:
        end = f"kill {holder.pid}" + ("" if same_machine(holder, mine) else f" on {holder.host}")
    name = run_folder.name
    advice = f"Give this run another name (--set name={name}-2), wait until that one has ended, or end it ({end})"
    if mine.array_job and mine.array_job == holder.array_job:
        advice = (
            f"Give each task of the job array a run of its own (--set name={name}-$SLURM_ARRAY_TASK_ID), or run the "
            "tasks one after another (--array=…%1)"
        )
    return FolderInUse(
        f"{run_folder} is in use by {holder.describe()}: {judgement.reason}. Two attempts in one folder would destroy "
        f"one another's metrics and checkpoints, so this one has touched nothing. {advice}"
    )


def refuse_array_in_one_folder(run_folder: Path) -> None:
    """Tasks of a job array that run at once need a folder each.

    Raises:
        ConfigError: this is such a task, and nothing in ``run_folder`` tells it from the others. What the folder shares
            with the working directory does not: ``/projects/bif-2/…`` holds the runs of all tasks.
    """
    mine = this_process()
    own = os.path.relpath(run_folder)
    named = re.search(rf"(?<!\d)0*{re.escape(mine.array_task)}(?!\d)", own) if mine.array_task else True
    if named or one_task_at_a_time(mine.array_job, mine.array_task):
        return
    name = run_folder.name
    raise ConfigError(
        f"task {mine.array_task} of the job array {mine.array_job} would share {run_folder} with the other tasks, its "
        "metrics and its checkpoints: give each task a run of its own, e.g. --set "
        f"name={name}-$SLURM_ARRAY_TASK_ID, or let the tasks run one after another, each resuming the one before "
        "(sbatch --array=…%1)"
    )


def refuse_if_held(run_folder: Path) -> None:
    """For job scripts, ahead of the ranks: what can be told at once, without a wait. Takes nothing.

    Raises:
        FolderInUse: another attempt runs in the folder.
    """
    mine = this_process()
    with contextlib.suppress(OSError):
        epoch = newest_epoch(run_folder)
        if epoch:
            holder, _ = read_holder(run_folder, epoch)
            if holder.job == mine.job and holder.job:
                return
            judgement = look(holder, mine)
            chained = bool(mine.series) and holder.series == mine.series
            if judgement.life is Life.RUNS and not chained and "COMPLETING" not in judgement.reason:
                raise _refusal(run_folder, holder, judgement, mine)


def life_of(run_folder: Path) -> Life:
    """Return whether an attempt runs in the folder, as far as this process can tell at once. Takes nothing."""
    with contextlib.suppress(OSError):
        epoch = newest_epoch(run_folder)
        if epoch:
            holder, _ = read_holder(run_folder, epoch)
            return look(holder, this_process()).life
    return Life.ENDED


class Lease(Fence):
    """A run folder that this process holds; made by :func:`acquire`. Thread-safe.

    Heartbeats come from a thread of its own. A disk that refuses them (full, quota) does not end it: the file's time is
    set instead, which needs no space.
    """

    def __init__(self, run_folder: Path, holder: Holder, silence_seconds: float, taken_from: str) -> None:
        super().__init__(holder.epoch, holder.attempt)
        self.run_folder = run_folder
        self.taken_from = taken_from
        """A line on the attempt that held the folder before and did not release it; empty: none."""
        self.each_beat: Callable[[], None] | None = None
        """Called by the thread at every heartbeat."""
        self._holder, self._process = holder, os.getpid()
        self._lost: str = ""
        self._writing = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._beat, args=(silence_seconds / BEATS,), name="lease", daemon=True
        )
        self._thread.start()

    @property
    def holder(self) -> Holder:
        """This process, as its file says."""
        return self._holder

    @property
    def lost(self) -> bool:
        """Another attempt was seen to have taken over."""
        return bool(self._lost)

    def check(self) -> None:
        """Raise LeaseLost if another attempt has taken over. One listing of a small folder; OSError if that fails."""
        newest = self.epoch if self._lost else newest_epoch(self.run_folder)
        if newest > self.epoch:
            other, _ = read_holder(self.run_folder, newest)
            self._lost = (
                f"{self.run_folder} was taken over by {other.describe()} (epoch {newest}; this is attempt "
                f"{self.attempt}, epoch {self.epoch}): this one was taken for dead, because its heartbeat had stood "
                "still, or its job or process was not found. It stops here and writes nothing more; what it saved "
                "before is there"
            )
        if self._lost:
            raise LeaseLost(self._lost)

    def _beat(self, seconds: float) -> None:
        while not self._stop.wait(seconds):
            try:
                self.check()
                self._write(released=False)
                if self.each_beat is not None:
                    self.each_beat()
            except LeaseLost:
                return
            except OSError:
                with contextlib.suppress(OSError):
                    os.utime(lease_file(self.run_folder, self.epoch))

    def _write(self, *, released: bool) -> None:
        with self._writing:
            if self._stop.is_set() and not released:
                return
            self._holder = replace(
                self._holder, heartbeat=self._holder.heartbeat + 1, run=self.run, released=released
            )
            path = lease_file(self.run_folder, self.epoch)
            path.parent.mkdir(exist_ok=True)  # a person may have removed it
            # Not synced: the next heartbeat replaces it, and a slow disk must not make this holder look dead.
            write_text(path, _text(self._holder), durable=False)

    def release(self) -> None:
        """The attempt is over: whoever comes next need not ask. Not for a forked child; a second call does nothing."""
        if os.getpid() != self._process or self._stop.is_set():
            return
        self._stop.set()
        self._thread.join(2.0)
        with contextlib.suppress(OSError, LeaseLost):
            self.check()
            self._write(released=True)


def acquire(
    run_folder: Path,
    *,
    silence_seconds: float = SILENCE_SECONDS,
    note: Callable[[str], None] | None = None,
) -> Lease:
    """Hold ``run_folder`` for this process; made if it is not there. Blocks while a holder's end is in doubt.

    Args:
        silence_seconds: how long the heartbeat of a holder that cannot be looked up must stand still.
        note: takes a line before a longer wait.

    Raises:
        FolderInUse: another attempt runs in it.
        EnvironmentFault: the file system refused.
    """
    mine = this_process()
    try:
        (run_folder / FOLDER).mkdir(parents=True, exist_ok=True)
        while True:
            newest = newest_epoch(run_folder)
            before = ""
            if newest:
                judgement = judge(lambda: read_holder(run_folder, newest), mine, silence_seconds, note=note)  # noqa: B023
                holder, _ = read_holder(run_folder, newest)
                if judgement.life is Life.RUNS:
                    raise _refusal(run_folder, holder, judgement, mine)
                if not holder.released:
                    before = f"taking {run_folder} over from {holder.describe()}: {judgement.reason}"
            if newest >= LAST_EPOCH:
                raise EnvironmentFault(
                    f"{lease_file(run_folder, newest)}: no epoch can follow {newest}, which no run reaches; remove "
                    "that file if no attempt of this run is at work"
                )
            claimed = replace(mine, epoch=newest + 1, since=time.time(), silence=silence_seconds)
            if _claim(run_folder, claimed) and newest_epoch(run_folder) == claimed.epoch:
                _forget(run_folder, claimed.epoch)
                return Lease(run_folder, claimed, silence_seconds, before)
            # Another was faster: it is the holder to ask about now.
    except OSError as error:
        raise EnvironmentFault(
            f"{run_folder}: the run's lease cannot be written: {error.strerror or error}; give this user write "
            "permission and space there, or choose another output_dir"
        ) from error


def _text(holder: Holder) -> str:
    return json.dumps(holder.to_json(), indent=1) + "\n"


def _claim(run_folder: Path, holder: Holder) -> bool:
    """Make the epoch's file with its content, if nobody has. Raises OSError."""
    return write_new(lease_file(run_folder, holder.epoch), _text(holder).encode())


def _forget(run_folder: Path, epoch: int) -> None:
    """Remove the files of epochs long past, and what a killed holder left of a write."""
    with contextlib.suppress(OSError):
        for path in (run_folder / FOLDER).iterdir():
            found = _FILE.fullmatch(path.name)
            left = _LEFTOVER.fullmatch(path.name)
            if (found and int(found.group(1)) <= epoch - KEPT) or (left and int(left.group(1)) < epoch):
                path.unlink()
