"""``launch before`` and ``launch after``: what a job script asks ahead of srun and when srun has ended."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_port.cli.main import add_run_options, load_run
from megatron_port.core.config.urls import local_path
from megatron_port.core.errors import EnvironmentFault

if TYPE_CHECKING:
    from megatron_port.core.config.schema import RunConfig
    from megatron_port.core.dist.job import Job

NOT_STARTED = ("nodes", "setup", "ended", "signal")
"""Keys of ``launch.attempts.NOT_STARTED``."""


def add_actions(actions: Any) -> None:
    """Declare both actions."""
    before = actions.add_parser(
        "before", help="for job scripts: check the run and note that an attempt starts",
        description="Check the configuration for this job's nodes, tell how the attempt before ended, and print the "
        "run's folder. Exit 3 when too many attempts in a row got no further.",
    )
    add_run_options(before)
    before.add_argument("--record", type=local_path, metavar="FOLDER", help="the launch record that the script is of")
    before.usage = "%(prog)s [options] run.toml [-- arguments of the job script]"
    before.set_defaults(act=run_before)
    after = actions.add_parser(
        "after", help="for job scripts: note how an attempt ended, and queue the job again where that is wanted",
        description="Read what the ranks left in the run's folder; finish, requeue, chain or stop.",
    )
    add_run_options(after)
    after.add_argument("--code", type=int, required=True, metavar="N", help="exit code of srun")
    after.add_argument("--srun-log", type=local_path, metavar="FILE", help="srun's own lines")
    after.add_argument("--asked", default="", metavar="SIGNALS", help="signals that the script received")
    after.add_argument("--not-started", default="", choices=NOT_STARTED, help="why no rank was started")
    after.add_argument("--record", type=local_path, metavar="FOLDER", required=True, help="the job's launch record")
    after.set_defaults(act=run_after)


def _job() -> Job:
    from megatron_port.core.dist.job import current_job

    job = current_job()
    if job is None:
        raise EnvironmentFault("this is no SLURM job (SLURM_JOB_ID is not set); job scripts call this")
    return job


def _folder(config: RunConfig) -> Path:
    return Path(config.output_dir) / config.name


def run_before(args: argparse.Namespace) -> int:
    """Print the run's folder and that of the launch record on stdout; the rest is printed on stderr."""
    from megatron_port.core.config.checks import check
    from megatron_port.core.dist.job import nodes_down
    from megatron_port.core.dist.lease import refuse_array_in_one_folder, refuse_if_held
    from megatron_port.tools.launch import attempts
    from megatron_port.tools.launch import record as records
    from megatron_port.tools.launch.notify import notify
    from megatron_port.tools.launch.opening import open_record

    job, loaded = _job(), load_run(args)
    config = loaded.config
    check(config)
    refuse_array_in_one_folder(_folder(config))
    refuse_if_held(_folder(config))
    record, lines = open_record(loaded, args.overrides, job, args.record, args.rest)
    log = next((entry.log for entry in records.jobs(record) if entry.job in job.names), "")
    lines += attempts.faults(_folder(config), job.attempt)
    lines += attempts.before(_folder(config), job, config.launch, nodes_down=nodes_down, record=record.name, log=log)
    lines.append(notify("started", f"{config.name}: attempt {job.attempt} starts on {job.node_list}", run=config.name))
    for line in filter(None, lines):
        print(f"launch: {line}", file=sys.stderr)
    print(_folder(config))
    print(record)
    return 0


def run_after(args: argparse.Namespace) -> int:
    """Act on the end of an attempt; return the job's exit code."""
    from megatron_port.core.dist.job import ask_record, fate_of, nodes_down
    from megatron_port.tools.launch import attempts
    from megatron_port.tools.launch import record as records
    from megatron_port.tools.launch.continuation import continue_job
    from megatron_port.tools.launch.notify import notify

    job, config = _job(), load_run(args).config
    log = ""
    if args.srun_log is not None and args.srun_log.is_file():
        log = args.srun_log.read_text(encoding="utf-8", errors="replace")
    asked = args.asked.split()
    fate = "cancelled" if records.cancelled(args.record) else fate_of(job, asked, ask_record(job.id))
    verdict = attempts.after(
        _folder(config), job, config.launch, code=args.code, srun_log=log, asked=" and ".join(asked), fate=fate,
        nodes_down=nodes_down, not_started=args.not_started,
    )
    lines = list(filter(None, verdict.lines))
    for line in attempts.faults(_folder(config), job.attempt):
        print(f"launch: {line}", flush=True)
    for line in lines:
        print(f"launch: {line}", flush=True)
    if verdict.action in ("requeue", "chain"):
        lines.append(continue_job(verdict.action, job, args.record, asked=asked))
        print(f"launch: {lines[-1]}", flush=True)
    event = {"done": "finished", "stop": "stopped"}.get(verdict.action, "continued")
    problem = notify(event, f"{config.name}: attempt {job.attempt}: {'; '.join(lines) or 'finished'}", run=config.name)
    if problem:
        print(f"launch: {problem}", flush=True)
    return 0 if event == "continued" else verdict.exit_code
