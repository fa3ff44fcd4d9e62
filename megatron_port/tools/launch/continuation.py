"""Queue a job again, or hand its work to a new job: the record's script, with what was asked for at first."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_port.core.dist.job import SERIES, Job, ask_record, fate_of, run_tool
from megatron_port.core.dist.slurm import expand_hosts
from megatron_port.core.errors import EnvironmentFault
from megatron_port.tools.launch.record import SCRIPT, QueuedJob, Record, add_job, cancelled, jobs, read_record

OPTIONS = (
    ("JobName", "job-name"), ("NumNodes", "nodes"), ("TimeLimit", "time"), ("Partition", "partition"),
    ("Account", "account"), ("QOS", "qos"), ("Reservation", "reservation"), ("Features", "constraint"),
    ("NtasksPerN:B:S:C", "ntasks-per-node"), ("CPUs/Task", "cpus-per-task"), ("TresPerNode", "gres"),
    ("ExcNodeList", "exclude"), ("MinMemoryNode", "mem"), ("Network", "network"),
)
"""Field of a job's record, and the option of sbatch that asks for it."""
ONCE = (
    "--hold", "-H", "--wait", "-W", "--begin", "-b", "--array", "-a", "--dependency", "-d", "--parsable", "--export",
)
"""Options that were meant for the first job."""
WITH_VALUE = ("-b", "-a", "-d", "--begin", "--array", "--dependency", "--export")


def asked_fields(record: Mapping[str, str], *, tasks: bool = False) -> dict[str, str]:
    """Return what a job asked for, of SLURM's record of it as it was queued: once a node is lost it shows what is left.

    ``tasks``: their number was asked for (-n); otherwise SLURM's record has one it made up.
    """
    names = [field for field, _ in OPTIONS] + ["StdOut"] + (["NumTasks"] if tasks else [])
    return {name: record[name] for name in names if name in record}


def lasting(options: Sequence[str]) -> list[str]:
    """Return those of the first job's options that hold for every job after it."""
    out: list[str] = []
    skip = False
    for word in options:
        name, equals, _ = word.partition("=")
        if skip:
            skip = False
        elif name in ONCE:
            skip = name in WITH_VALUE and not equals
        elif re.match(r"-[bad][^-]", word):  # -dafterany:1
            continue
        else:
            out.append(word)
    return out


def chain_command(folder: Path, record: Record, job: Job) -> list[str]:
    """Return the sbatch command of a job like the record's first, which starts when ``job`` has ended."""
    first = next(iter(jobs(folder)), QueuedJob(job=job.id))
    asked = dict(first.asked)
    if "NumNodes" not in asked and job.node_list:
        asked["NumNodes"] = str(len(expand_hosts(job.node_list)))
    command = ["sbatch", "--parsable", *lasting(record.options)]
    for field, option in OPTIONS:
        value = asked.get(field, "")
        if field == "NumNodes":
            value = value.partition("-")[0]
        if field == "NtasksPerN:B:S:C":
            value = value.partition(":")[0]
        if field == "TresPerNode":
            value = re.sub(r"(^|,)gres[:/]", r"\1", value)  # gres:gpu:8 or gres/gpu:8
        if value and value not in ("(null)", "N/A", "0"):
            command.append(f"--{option}={value}")
    if asked.get("NtasksPerN:B:S:C", "0").startswith("0:") and asked.get("NumTasks", "").isdigit():
        command.append(f"--ntasks={asked['NumTasks']}")
    log = asked.get("StdOut", "")
    if log:
        folder_of, slash, name = log.rpartition("/")
        name = re.sub(rf"(?<!\d){first.job.partition('_')[0]}(?!\d)", "%j", name.replace("%", "%%"))
        command.append(f"--output={folder_of.replace('%', '%%')}{slash}{name}")
    if record.sweep:
        command.append(f"--array={record.task}")
    command += [f"--dependency=afterany:{job.id}", f"--export=ALL,{SERIES}={job.series}"]
    return [*command, str(folder / SCRIPT), *record.arguments]


def continue_job(action: str, job: Job, folder: Path, *, asked: Sequence[str]) -> str:
    """Do what an action asks for: ``requeue`` or ``chain``. Return a line for the log.

    Nothing is done where the job was cancelled meanwhile, or SLURM has queued it again by itself.

    Args:
        folder: of the launch record.
        asked: signals that the job script received.

    Raises:
        EnvironmentFault: SLURM refused.
    """
    if action == "chain":  # from here on a lost node cannot make SLURM start this job again beside the next one
        run_tool(["scontrol", "update", f"JobId={job.id}", "Requeue=0"])
    record = ask_record(job.id)
    fate = fate_of(job, asked, record)
    who = cancelled(folder)
    if who:
        return f"the run was cancelled by {who}: nothing is queued again"
    if fate == "requeued":
        if action == "chain":
            run_tool(["scontrol", "update", f"JobId={job.id}", "Requeue=1"])
        return f"SLURM has queued job {job.id} again by itself"
    if fate == "cancelled":
        return f"job {job.id} was cancelled: nothing is queued again"
    if action == "requeue":
        return _requeue(job)
    if not record:
        raise EnvironmentFault(f"scontrol show job {job.id} does not answer; submit the run again by hand")
    return _chain(job, folder)


def _requeue(job: Job) -> str:
    code, text = run_tool(["scontrol", "requeue", job.id])
    if code:
        raise EnvironmentFault(
            f"job {job.id} could not be queued again: {text}; some sites do not allow it: "
            f"set launch.when_stopped and launch.when_failed to \"chain\", or submit it again by hand"
        )
    return f"job {job.id} is queued again"


def _chain(job: Job, folder: Path) -> str:
    kept = read_record(folder)
    if not (folder / SCRIPT).is_file():
        raise EnvironmentFault(f"job {job.id} has no script that sbatch could take again; submit the run again")
    code, text = run_tool(chain_command(folder, kept, job))
    if code:
        raise EnvironmentFault(f"no job could be chained: {text}; submit the run again by hand")
    number = text.splitlines()[-1].partition(";")[0]
    name = f"{number}_{kept.task}" if kept.sweep else number
    log = ask_record(name).get("StdOut", "")
    add_job(folder, QueuedJob(job=name, why="chained", time=time.time(), log=log))
    if cancelled(folder):  # between the look above and now
        run_tool(["scancel", number])
        return f"job {number} was queued and cancelled: the run was cancelled by {cancelled(folder)}"
    return f"job {number} follows"
