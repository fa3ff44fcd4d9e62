"""Queue a job again, or hand its work to a new job."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Sequence
from pathlib import Path

from megatron_port.errors import EnvironmentFault
from megatron_port.runtime.atomic import write_text
from megatron_port.runtime.job import SERIES, Job, ask_record, fate_of, run_tool
from megatron_port.runtime.slurm import expand_hosts

REQUESTS = "requests"
"""Folder in the run's: what the first job of a series asked for."""
OPTIONS = (
    ("JobName", "job-name"), ("NumNodes", "nodes"), ("TimeLimit", "time"), ("Partition", "partition"),
    ("Account", "account"), ("QOS", "qos"), ("Reservation", "reservation"), ("Features", "constraint"),
    ("NtasksPerN:B:S:C", "ntasks-per-node"), ("CPUs/Task", "cpus-per-task"), ("TresPerNode", "gres"),
    ("ExcNodeList", "exclude"), ("MinMemoryNode", "mem"), ("Network", "network"),
)
"""Field of a job's record, and the option of sbatch that asks for it."""


def remember_request(run_folder: Path, job: Job) -> None:
    """Keep what the first job of a series asked for. Once a node is lost SLURM's record shows only what is left.

    Never raises: without the file a chained job asks for what this job's start tells.
    """
    path = run_folder / REQUESTS / f"{job.series}.json"
    record = {} if path.exists() else ask_record(job.id)
    asked = {field: record[field] for field, _ in OPTIONS if field in record}
    if asked:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, json.dumps(asked))


def request_of(run_folder: Path, job: Job) -> dict[str, str]:
    """Return what :func:`remember_request` kept; at least as many nodes as this job began with."""
    try:
        kept = json.loads((run_folder / REQUESTS / f"{job.series}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        kept = {}
    asked = {k: v for k, v in kept.items() if isinstance(v, str)} if isinstance(kept, dict) else {}
    if "NumNodes" not in asked and job.node_list:
        asked["NumNodes"] = str(len(expand_hosts(job.node_list)))
    return asked


def chain_command(record: dict[str, str], job: Job, arguments: Sequence[str]) -> list[str]:
    """Return the sbatch command of a job like ``record`` that starts when this one has ended.

    What was given on the job's command line is in the record, so it holds for the next one too.

    Args:
        record: of :func:`job_record`, with :func:`request_of` on top.
        arguments: of the job script.

    Raises:
        EnvironmentFault: SLURM has no script for it.
    """
    script = record.get("Command", "")
    tail = " " + " ".join(arguments)
    if arguments and script.endswith(tail):
        script = script[: -len(tail)]
    if not script or script == "(null)":
        raise EnvironmentFault(f"job {job.id} has no script that sbatch could take again; submit the run again")
    command = ["sbatch", "--parsable", f"--dependency=afterany:{job.id}", f"--export=ALL,{SERIES}={job.series}"]
    for field, option in OPTIONS:
        value = record.get(field, "")
        if field == "NumNodes":
            value = value.partition("-")[0]
        if field == "NtasksPerN:B:S:C":
            value = value.partition(":")[0]
        if field == "TresPerNode":
            value = re.sub(r"(^|,)gres[:/]", r"\1", value)  # gres:gpu:8 or gres/gpu:8
        if value and value not in ("(null)", "N/A", "0"):
            command.append(f"--{option}={value}")
    log = record.get("StdOut", "")
    if log:
        folder, slash, name = log.rpartition("/")
        name = re.sub(rf"(?<!\d){job.id}(?!\d)", "%j", name.replace("%", "%%"))
        command.append(f"--output={folder.replace('%', '%%')}{slash}{name}")
    return [*command, script, *arguments]


def continue_job(action: str, job: Job, arguments: Sequence[str], *, run_folder: Path, asked: Sequence[str]) -> str:
    """Do what an action asks for: ``requeue`` or ``chain``. Return a line for the log.

    Nothing is done where the job was cancelled meanwhile, or SLURM has queued it again by itself.

    Args:
        asked: signals that the job script received.

    Raises:
        EnvironmentFault: SLURM refused.
    """
    if action == "chain":  # from here on a lost node cannot make SLURM start this job again beside the next one
        run_tool(["scontrol", "update", f"JobId={job.id}", "Requeue=0"])
    record = ask_record(job.id)
    fate = fate_of(job, asked, record)
    if fate == "requeued":
        if action == "chain":
            run_tool(["scontrol", "update", f"JobId={job.id}", "Requeue=1"])
        return f"SLURM has queued job {job.id} again by itself"
    if fate == "cancelled":
        return f"job {job.id} was cancelled: nothing is queued again"
    if action == "requeue":
        code, text = run_tool(["scontrol", "requeue", job.id])
        if code:
            raise EnvironmentFault(
                f"job {job.id} could not be queued again: {text}; some sites do not allow it: "
                f"set launch.when_stopped and launch.when_failed to \"chain\", or submit it again by hand"
            )
        return f"job {job.id} is queued again"
    if not record:
        raise EnvironmentFault(f"scontrol show job {job.id} does not answer; submit the run again by hand")
    code, text = run_tool(chain_command({**record, **request_of(run_folder, job)}, job, arguments))
    if code:
        raise EnvironmentFault(f"no job could be chained: {text}; submit the run again by hand")
    return f"job {text.splitlines()[-1].partition(';')[0]} follows"
