"""The SLURM job that this process belongs to, and what can be asked of SLURM about it."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_port.core.errors import EnvironmentFault
from megatron_port.core.dist.slurm import in_step

LOCAL = "local"
"""Attempt of a run that no job scheduler started."""
SERIES = "MEGATRON_PORT_SERIES"
"""Set by a chained job: the id of the job that began the series."""


Fate = Literal["running", "limit", "cancelled", "requeued"]
"""State of the job by SLURM while its script runs: untouched; ended at its time limit; ended for
good, for a person (``scancel``) or an administrator; has queued it again by itself, after the loss of a node."""
ENDING = ("COMPLETING", "CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL", "DEADLINE", "FAILED")


@dataclass(frozen=True)
class Job:
    """One job, in one of its starts."""

    id: str
    restart: int
    """How often SLURM has started it again."""
    series: str
    """Id of the first job of a chain; failures are counted over a series."""
    node_list: str
    """SLURM's compressed list."""
    step: str = ""
    """``JOB.STEP`` that srun started this process in; empty: none."""
    cluster: str = ""
    """SLURM's name of it; job ids repeat over clusters."""
    array_job: str = ""
    """Id of the job array; empty: none."""
    array_task: str = ""
    """Index in it."""

    @property
    def attempt(self) -> str:
        """``JOB.RESTART``: tells the starts of a run apart."""
        return f"{self.id}.{self.restart}"

    @property
    def names(self) -> tuple[str, ...]:
        """Its id, and JOB_TASK of a task of an array."""
        return (self.id, f"{self.array_job}_{self.array_task}") if self.array_job else (self.id,)


def current_job(env: Mapping[str, str] | None = None) -> Job | None:
    """The job around this process, or None."""
    env = os.environ if env is None else env
    number = env.get("SLURM_JOB_ID", "")
    if not number:
        return None
    restart = env.get("SLURM_RESTART_COUNT", "")
    return Job(
        number, int(restart) if restart.isdigit() else 0, env.get(SERIES, "") or number,
        env.get("SLURM_JOB_NODELIST", ""), step=f"{number}.{env['SLURM_STEP_ID']}" if in_step(env) else "",
        cluster=env.get("SLURM_CLUSTER_NAME", ""), array_job=env.get("SLURM_ARRAY_JOB_ID", ""),
        array_task=env.get("SLURM_ARRAY_TASK_ID", ""),
    )


def attempt_name(env: Mapping[str, str] | None = None) -> str:
    """:attr:`Job.attempt`, or ``local``."""
    job = current_job(env)
    return job.attempt if job else LOCAL


def run_tool(command: Sequence[str], *, timeout_s: float = 60.0) -> tuple[int, str]:
    """Exit code and output (both streams) of one of SLURM's commands; 127 where it is not there, 124 when it hangs."""
    try:
        done = subprocess.run(
            list(command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", timeout=timeout_s, check=False,
        )
    except FileNotFoundError:
        return 127, f"{command[0]} is not installed here"
    except subprocess.TimeoutExpired:
        return 124, f"{command[0]} did not answer within {timeout_s:g} s"
    return done.returncode, done.stdout.strip()


ACTIVE = ("RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")
"""States of a job whose processes may still run."""


def job_state(job: str, step: str = "") -> str | None:
    """State of a job that may still have processes; empty: SLURM has none; None: SLURM does not answer.

    ``step``: a step of it (``JOB.STEP``); once that has ended the job counts as ended, whatever else runs in it.
    A job that waits in the queue (it was queued again) has no processes.
    """
    code, text = run_tool(["squeue", "--noheader", "--jobs", job, "--format", "%T"], timeout_s=30.0)
    if code:
        return "" if "invalid job id" in text.lower() else None
    states = [word for word in text.split() if word in ACTIVE]
    if not states or not step or states[0] == "COMPLETING":
        return states[0] if states else ""
    code, text = run_tool(["squeue", "--noheader", "--steps", "--jobs", job, "--format", "%i"], timeout_s=30.0)
    return "" if code == 0 and step not in text.split() else states[0]


@dataclass(frozen=True)
class QueueEntry:
    """One of this user's jobs, as squeue lists it."""

    job: str
    """Id; JOB_TASK of a task of an array."""
    state: str
    reason: str = ""
    nodes: str = ""
    start: str = ""
    """When it started, or is expected to; N/A: not known."""
    command: str = ""


def ask_queue() -> dict[str, QueueEntry]:
    """Return all of this user's jobs that wait or run, by their ids, in one question.

    Raises:
        EnvironmentFault: SLURM does not answer, so nobody knows. (Without squeue here there are none.)
    """
    code, text = run_tool(["squeue", "--me", "--noheader", "--array", "--format", "%i|%A|%T|%r|%D|%S|%o"])
    if code == 127:
        return {}
    if code:
        said = text.splitlines()[-1] if text else f"exit {code}"
        raise EnvironmentFault(f"squeue does not say which jobs are queued ({said}); try again")
    found: dict[str, QueueEntry] = {}
    for line in text.splitlines():
        words = line.split("|", 6)
        if len(words) == 7:
            job, _, state, reason, nodes, start, command = words
            found[job] = QueueEntry(job, state, reason, nodes, start, command)
    return found


def one_task_at_a_time(array_job: str, task: str) -> bool:
    """The tasks of an array run one after another (``--array=…%1``), as far as SLURM tells."""
    code, text = run_tool(["scontrol", "show", "job", f"{array_job}_{task}"], timeout_s=30.0)
    return code == 0 and "ArrayTaskThrottle=1" in text.split()


def nodes_down(node_list: str) -> list[str]:
    """Return ``n3 (down*: Not responding)`` of those nodes that cannot run jobs now; empty when SLURM does not say."""
    if not node_list:
        return []
    code, text = run_tool(["sinfo", "--noheader", "--Node", "--nodes", node_list, "--format", "%N|%T|%E"])
    found: dict[str, str] = {}
    for line in text.splitlines() if code == 0 else ():
        name, _, rest = line.strip().partition("|")
        state, _, reason = rest.partition("|")
        if state.startswith(("down", "drain", "fail", "unknown", "no_respond")) or state.endswith("*"):
            found.setdefault(name, f"{name} ({state}{'' if reason == 'none' else ': ' + reason})")
    return list(found.values())


_WHOLE_LINES = (
    "Command", "WorkDir", "StdErr", "StdIn", "StdOut", "Comment", "AdminComment", "SystemComment", "MailUser",
)


def job_record(text: str) -> dict[str, str]:
    """Fields of ``scontrol show job``. The job's name, which ends the first line, and what has a line of its own
    (Command, WorkDir, comments, the paths of the streams) may hold blanks and equals signs; the rest are words.
    """
    found: dict[str, str] = {}
    named = re.match(r"(JobId=\S+ (?:\w+=\S+ )*?)JobName=(.*?)(\n {3}UserId=\S+\(\d+\) |\Z)", text, re.DOTALL)
    if named:
        found["JobName"] = named[2]
        text = named[1] + text[named.start(3):]
    for line in text.split("\n"):
        line = line.removeprefix("   ")
        name, _, value = line.partition("=")
        if name in _WHOLE_LINES:
            found[name] = value
            continue
        for word in line.split():
            name, equals, value = word.partition("=")
            if equals:
                found.setdefault(name, value)
    return found


def ask_record(job_id: str) -> dict[str, str]:
    """:func:`job_record` of a job as SLURM has it now; empty where SLURM does not answer."""
    code, text = run_tool(["scontrol", "show", "job", job_id])
    return job_record(text) if code == 0 else {}


def fate_of(job: Job, asked: Sequence[str], record: Mapping[str, str]) -> Fate:
    """Return what becomes of the job around a script that has come to its end.

    SLURM shows a cancelled job, one at its limit and one that lost a node alike: COMPLETING, after a SIGTERM. The count
    of restarts and the time tell them apart; what is left was cancelled. (EndTime says nothing: a cancelled job's is
    now.)

    Args:
        asked: signals that the script received, in order.
        record: :func:`ask_record`; empty: only ``asked`` is known.
    """
    restarts = record.get("Restarts", "")
    if restarts.isdigit() and int(restarts) > job.restart:
        return "requeued"
    ran, limit = clock_seconds(record.get("RunTime", "")), clock_seconds(record.get("TimeLimit", ""))
    ending = record.get("JobState", "") in ENDING or "TERM" in asked
    if ending and ran is not None and limit is not None and ran >= limit - 1:
        return "limit"
    return "cancelled" if ending else "running"


def clock_seconds(text: str) -> int | None:
    """Return ``1-02:03:04`` or ``02:03:04`` as scontrol prints it; None for anything else (UNLIMITED)."""
    days, dash, clock = text.rpartition("-")
    parts = clock.split(":")
    if len(parts) != 3 or not all(p.isdigit() for p in parts) or (dash and not days.isdigit()):
        return None
    hours, minutes, seconds = map(int, parts)
    return ((int(days) if dash else 0) * 24 + hours) * 3600 + minutes * 60 + seconds
