"""Who holds a run folder, and whether that attempt still runs.

Nothing here compares the clocks of two machines. A process of this machine is looked up; a job is asked of SLURM; of
anything else the heartbeat counter is watched for a while, by the watcher's own monotonic clock.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Annotated, Any

from megatron_port.core.config.ranges import Range
from megatron_port.core.dist.job import LOCAL, current_job, job_state
from megatron_port.core.dist.processes import born, process_space
from megatron_port.core.io.typed_json import Natural, Seconds, right_fields

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
        host=socket.gethostname(), space=process_space(), pid=os.getpid(), born=born(os.getpid()), since=time.time()
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
