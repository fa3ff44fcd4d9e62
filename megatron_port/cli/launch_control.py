"""``launch status | list | logs | cancel | sweep``: see and steer what has been submitted."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_port.cli.arguments import add_json, add_verb, print_json, print_table
from megatron_port.cli.main import add_run_options
from megatron_port.core.config.urls import expanded, local_path
from megatron_port.core.errors import ConfigError, EnvironmentFault

if TYPE_CHECKING:
    from megatron_port.core.dist.job import QueueEntry

DEFAULT_FOLDER = "runs"
RUN_HELP = "a run's folder, its run file, or the name of a shipped one"


def add_actions(actions: Any) -> None:
    """Declare the actions."""
    show = actions.add_parser(
        "status", help="queue and progress of runs, one row each",
        description="State of its job or process, step, loss, tokens/s, time left, next save, attempts, node-hours "
        "spent and predicted.",
    )
    show.add_argument("folders", nargs="*", type=local_path, metavar="FOLDER",
                      help="of a run, or of several (default: runs)")
    show.add_argument("--live", action="store_true", help="only runs with a job that waits or runs")
    add_json(show)
    show.set_defaults(act=print_status)
    every = add_verb(actions, "list", help="submissions and attempts of a run, oldest first, and how each ended")
    every.add_argument("run", type=expanded, metavar="RUN", help=RUN_HELP)
    add_json(every)
    every.set_defaults(act=print_list)
    logs = actions.add_parser(
        "logs", help="print a run's logs, job after job",
        description="Print the last lines of a run's logs; with -f all that is added, by this job and those after it, "
        "until no job of the run is left.",
    )
    logs.add_argument("run", type=expanded, metavar="RUN", help=RUN_HELP)
    logs.add_argument("-f", "--follow", action="store_true", help="wait for more, over requeues and chained jobs")
    logs.add_argument("-n", "--lines", type=int, default=20, metavar="N", help="lines of the past (default 20; 0: all)")
    logs.set_defaults(act=print_logs)
    cancel = actions.add_parser(
        "cancel", help="cancel runs for good",
        description="Cancel every job of the runs, those in the queue and those that follow too. A running one saves "
        "first if KillWait leaves it the time; so does a run that was started without a scheduler, by hand or by "
        "torchrun. A new `launch submit` continues from what was saved.",
    )
    cancel.add_argument("runs", type=expanded, nargs="+", metavar="RUN", help=RUN_HELP)
    cancel.set_defaults(act=cancel_runs)
    add_sweep(actions)


def add_sweep(actions: Any) -> None:
    """Declare ``sweep``."""
    vary = actions.add_parser(
        "sweep", help="queue a job array with a run for each combination of values",
        description="Each task has its own folder, NAME-000 and so on, and its own launch record.",
    )
    add_run_options(vary)
    vary.usage = "%(prog)s [options] run.toml --vary a.b=VALUE,VALUE [-- options of sbatch]"
    vary.add_argument("--vary", action="append", default=[], metavar="a.b=VALUE,VALUE",
                      help="values to try (repeatable)")
    vary.add_argument("--at-once", type=int, default=0, metavar="N", help="tasks that may run at a time (default: all)")
    vary.add_argument("--dry-run", action="store_true", help="print the tasks and the forecast, and queue nothing")
    vary.set_defaults(act=queue_sweep)


def _queue() -> tuple[dict[str, QueueEntry], str]:
    """The queue and, where SLURM does not answer, why not: what the folders say is still worth a table."""
    from megatron_port.core.dist.job import ask_queue

    try:
        return ask_queue(), ""
    except EnvironmentFault as error:
        return {}, f"note: {error}; the states of the queue are missing below"


def print_status(args: argparse.Namespace) -> int:
    """Print the table."""
    from megatron_port.tools.launch import status

    queue, note = _queue()
    found = list(status.rows(status.run_folders(args.folders or [Path(DEFAULT_FOLDER)]), queue))
    if note and any(row.job[:1].isdigit() for row in found):  # a scheduler's; direct starts need none
        print(note, file=sys.stderr)
    for row in found:
        if row.left_out:
            print(f"note: {row.folder}: {row.left_out}", file=sys.stderr)
    if args.live:
        found = [row for row in found if row.live]
    if args.json:
        print_json([asdict(row) for row in found])
    else:
        print_table([status.COLUMNS, *(status.cells(row) for row in found)], right=range(3, len(status.COLUMNS)))
    return 0


def print_list(args: argparse.Namespace) -> int:
    """Print submissions and attempts."""
    from megatron_port.core.config.run_names import run_folder_of
    from megatron_port.tools.launch import record, status
    from megatron_port.tools.launch.attempts import history_rows

    folder = run_folder_of(args.run)
    read = history_rows(folder)
    found = read.rows
    if args.json and read.note():
        print(f"note: {folder}: {read.note()}", file=sys.stderr)
    if args.json:
        print_json([asdict(one) for one in found])
    elif not found and not read.bad and not record.numbers(folder):
        print(f"nothing is known of a start of {folder}: job scripts and `megatron-port train` note theirs")
    else:
        print(status.attempts_table(folder))
    return 0


def print_logs(args: argparse.Namespace) -> int:
    """Print or follow a run's logs."""
    from megatron_port.core.config.run_names import run_folder_of
    from megatron_port.core.dist.job import ask_queue
    from megatron_port.tools.launch import control, direct, record

    folder = run_folder_of(args.run).absolute()
    if args.lines < 0:
        raise ConfigError(f"-n {args.lines}: a number of lines, or 0 for all")
    files = control.existing(control.log_files(folder))

    def alive() -> bool:
        return direct.running(folder) is not None or bool(
            not direct.only(folder) and control.live_jobs(folder, ask_queue()))

    if args.follow and (files or (record.newest(folder) is not None and alive())):
        for text in control.follow(folder, count=args.lines, alive=alive, wait=time.sleep):
            print(text, end="", flush=True)
        return 0
    if not files:
        raise ConfigError(
            f"{folder} has no log: its job has not started, or the run was started on a terminal (`megatron-port train "
            f"… > FILE 2>&1` would keep one). `megatron-port launch status {folder}` shows its state"
        )
    for path in files if not args.lines else files[-1:]:
        print(f"==> {path} <==\n{control.last_lines(path, args.lines)[0]}", end="")
    return 0


def cancel_runs(args: argparse.Namespace) -> int:
    """Cancel each run."""
    from megatron_port.core.config.run_names import run_folder_of
    from megatron_port.tools.launch import control

    for name in args.runs:
        for line in control.cancel(run_folder_of(name).absolute()):
            print(line)
    return 0


def queue_sweep(args: argparse.Namespace) -> int:
    """Queue the array, or show it."""
    from megatron_port.tools.launch import forecast, sweep
    from megatron_port.tools.launch.submit import shown

    if args.at_once < 0:
        raise ConfigError(f"--at-once {args.at_once}: a number of tasks, or 0 for all")
    tasks = sweep.tasks_of(args.run_file, args.overrides, args.vary)
    for task in tasks:
        print(f"task {task.index}: {task.folder}  {shown(task.changes)}")
    if args.dry_run:
        each = forecast.forecast(tasks[0].loaded.config)
        print("\n".join(f"each: {line}" for line in forecast.lines(tasks[0].loaded.config)))
        if each.jobs:
            print(f"all {len(tasks)}: {each.node_hours * len(tasks):,.1f} node-hours")
        return 0
    job, folder = sweep.submit_sweep(tasks, args.run_file, args.overrides, args.rest, args.at_once)
    print(f"job array {job}, {len(tasks)} tasks, script {folder / 'job.sh'}")
    return 0
