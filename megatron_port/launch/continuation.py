"""Queue a job again, or hand its work to a new job."""

from __future__ import annotations

import re
from collections.abc import Sequence

from megatron_port.errors import EnvironmentFault
from megatron_port.runtime.job import SERIES, Job, run_tool


def job_record(text: str) -> dict[str, str]:
    """Fields of ``scontrol show job``. Command, WorkDir and the paths of the streams have a line each and may hold
    spaces; the other lines are words.
    """
    found: dict[str, str] = {}
    for line in text.splitlines():
        line = line.strip()
        name, _, value = line.partition("=")
        if name in ("Command", "WorkDir", "StdErr", "StdIn", "StdOut"):
            found[name] = value
            continue
        for word in line.split():
            name, equals, value = word.partition("=")
            if equals:
                found.setdefault(name, value)
    return found


def chain_command(record: dict[str, str], job: Job, arguments: Sequence[str]) -> list[str]:
    """The sbatch command of a job like ``record`` that starts when this one has ended.

    What was given on this job's command line is in the record, so it holds for the next one too.
    ``arguments``: of the job script.
    """
    script = record.get("Command", "")
    tail = " " + " ".join(arguments)
    if arguments and script.endswith(tail):
        script = script[: -len(tail)]
    if not script or script == "(null)":
        raise EnvironmentFault(f"job {job.id} has no script that sbatch could take again; submit the run again")
    command = ["sbatch", "--parsable", f"--dependency=afterany:{job.id}", f"--export=ALL,{SERIES}={job.series}"]
    for field, option in (
        ("JobName", "job-name"), ("NumNodes", "nodes"), ("TimeLimit", "time"), ("Partition", "partition"),
        ("Account", "account"), ("QOS", "qos"), ("Reservation", "reservation"), ("Features", "constraint"),
        ("NtasksPerN:B:S:C", "ntasks-per-node"), ("CPUs/Task", "cpus-per-task"), ("TresPerNode", "gres"),
        ("ExcNodeList", "exclude"), ("MinMemoryNode", "mem"), ("Network", "network"),
    ):
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


def continue_job(action: str, job: Job, arguments: Sequence[str]) -> str:
    """Do what a verdict asks for: ``requeue`` or ``chain``. Returns a line for the log.

    Raises:
        EnvironmentFault: SLURM refused.
    """
    if action == "requeue":
        code, text = run_tool(["scontrol", "requeue", job.id])
        if code:
            raise EnvironmentFault(
                f"job {job.id} could not be queued again: {text}; some sites do not allow it: "
                f"set launch.when_stopped and launch.when_failed to \"chain\", or submit it again by hand"
            )
        return f"job {job.id} is queued again"
    code, text = run_tool(["scontrol", "show", "job", job.id])
    if code:
        raise EnvironmentFault(f"scontrol show job {job.id}: {text}; submit the run again by hand")
    code, text = run_tool(chain_command(job_record(text), job, arguments))
    if code:
        raise EnvironmentFault(f"no job could be chained: {text}; submit the run again by hand")
    return f"job {text.splitlines()[-1].partition(';')[0]} follows"
