"""A job that starts finds its launch record, or makes one, and checks that nothing has changed since."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from megatron_port.core.config.loader import Loaded
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.errors import ConfigError, EnvironmentFault
from megatron_port.core.io.files import write_output
from megatron_port.core.io.variables import variables
from megatron_port.run import launch_record as records
from megatron_port.run import sources as snapshot
from megatron_port.run.launch_record import QueuedJob, Record, RecordFault
from megatron_port.run.launchers import Job, ask_record, run_tool
from megatron_port.tools.launch.submit import asked_fields, fill, order_of, run_folder_of, unwritable


def open_record(
    loaded: Loaded, overrides: Sequence[str], job: Job, given: Path | None, arguments: Sequence[str]
) -> tuple[Path, list[str]]:
    """Return the folder of the record that this job continues, and lines for the log.

    Args:
        given: the record that the job's script names; None: the one that the job is of, or a new one.
        arguments: of the job script, kept in a new record.

    Raises:
        ConfigError: the run was cancelled.
        RecordFault: code or image are not what was submitted; packages neither, and ``launch.changed_environment`` is
            stop.
        EnvironmentFault: the folder cannot be written.
    """
    run_folder = run_folder_of(loaded.config)
    folder = given or records.record_of(run_folder, job.series, *job.names)
    try:
        if folder is None:
            folder = _made_by_script(loaded, overrides, job, run_folder, arguments)
            return folder, [f"launch record {folder}"]
        lines = _checked(folder, records.read_record(folder), loaded.config)
        if not any(entry.job in job.names for entry in records.jobs(folder)):
            records.add_job(folder, _queued(job, "started"))
    except OSError as error:
        raise unwritable(run_folder, error) from error
    return folder, [f"launch record {folder}", *lines]


def _queued(job: Job, why: str) -> QueuedJob:
    asked = ask_record(job.id)
    return QueuedJob(job=job.names[-1], why=why, time=time.time(), log=asked.get("StdOut", ""),
                     asked=asked_fields(asked, tasks=bool(variables(("SLURM_NTASKS",)))))


def _checked(folder: Path, record: Record, config: RunConfig) -> list[str]:
    who = records.cancelled(folder)
    if who:
        raise ConfigError(f"{folder.parent.parent} was cancelled by {who}; submit the run again to continue it")
    snapshot.check_code(folder, record.code)
    snapshot.check_image(record.image)
    changed = snapshot.changed_packages(record.environment.get("packages", {}))
    if not changed:
        return []
    shown = ", ".join(changed[:8]) + (f" and {len(changed) - 8} more" if len(changed) > 8 else "")
    text = f"packages are others than when the job was submitted: {shown}"
    if config.launch.changed_environment == "stop":
        raise RecordFault(
            f"{text}; restore them, submit the run again, or set launch.changed_environment = \"warn\" when you do"
        )
    return [text]


def _made_by_script(
    loaded: Loaded, overrides: Sequence[str], job: Job, run_folder: Path, arguments: Sequence[str]
) -> Path:
    """Make a record for a job whose script went to sbatch without one. Raises OSError, EnvironmentFault."""
    for _ in range(100):
        number = max(records.numbers(run_folder), default=0) + 1
        folder = records.claim(run_folder, number)
        if folder is not None:
            break
    else:
        raise EnvironmentFault(f"{run_folder}: other jobs make launch records there without end")
    try:
        fill(folder, number, loaded.config, order_of(loaded, overrides), by="script", arguments=tuple(arguments))
        _keep_script(folder, job)
        records.add_job(folder, _queued(job, "started"))
    except BaseException:
        records.discard(folder)
        raise
    return folder


def _keep_script(folder: Path, job: Job) -> None:
    """Keep the script that SLURM has of this job, so that a chained job gets it, and have it read the record."""
    path = folder / records.SCRIPT
    code, text = run_tool(["scontrol", "write", "batch_script", job.id, "-"])
    if code or not text.startswith("#!"):
        return  # an interactive job has none; chain_command's sbatch then says what is missing
    write_output(path, with_record(text, folder), mode=0o700)  # a user's own script may hold a secret


def with_record(script: str, folder: Path) -> str:
    """Return a job script with the record's place set ahead of its first command."""
    from megatron_port.tools.launch.script import shell_quote

    lines = script.removesuffix("\n").split("\n")
    first = next((i for i, line in enumerate(lines) if line.strip() and not line.startswith("#")), len(lines))
    place = folder / records.CODE / "megatron_port" / "_launch"
    added = [f"job_record={shell_quote(str(folder), 'the launch record')}",
             "job_arguments=kept",
             f"MEGATRON_PORT_LAUNCH={shell_quote(str(place), 'the launch record')}"]
    return "\n".join([*lines[:first], *added, *lines[first:]]) + "\n"
