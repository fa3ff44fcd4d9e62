"""``megatron-port launch``: write or submit the job script of a run, see what became of it, cancel it."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_port.cli.arguments import add_action, add_json, print_json, print_table
from megatron_port.cli.main import Parser, add_run_options, load_run
from megatron_port.core.config.ranges import expanded, local_path
from megatron_port.core.errors import ConfigError, EnvironmentFault

if TYPE_CHECKING:
    from megatron_port.core.config.schema import RunConfig
    from megatron_port.run.launchers import Job, QueueEntry
    from megatron_port.tools.launch.script import Order


# ``launch before`` and ``launch after``: what a job script asks ahead of srun and when srun has ended.

NOT_STARTED = ("nodes", "setup", "ended", "signal")
"""Keys of ``launch.attempts.NOT_STARTED``."""


def add_attempt_actions(actions: Any) -> None:
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
    from megatron_port.run.launchers import current_job

    job = current_job()
    if job is None:
        raise EnvironmentFault("this is no SLURM job (SLURM_JOB_ID is not set); job scripts call this")
    return job


def _folder(config: RunConfig) -> Path:
    return Path(config.output_dir) / config.name


def run_before(args: argparse.Namespace) -> int:
    """Print the run's folder, that of the launch record, and ``launch.when_lost`` on stdout; the rest on stderr."""
    from megatron_port.core.config.checks import check
    from megatron_port.run import launch_record as records
    from megatron_port.run.launchers import nodes_down
    from megatron_port.run.lease import refuse_array_in_one_folder, refuse_if_held
    from megatron_port.tools.launch import attempts
    from megatron_port.tools.launch.attempts import notify
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
    print(config.launch.when_lost)
    return 0


def run_after(args: argparse.Namespace) -> int:
    """Act on the end of an attempt; return the job's exit code."""
    from megatron_port.run import launch_record as records
    from megatron_port.run.launchers import ask_record, fate_of, nodes_down
    from megatron_port.tools.launch import attempts
    from megatron_port.tools.launch.attempts import notify
    from megatron_port.tools.launch.submit import continue_job

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


# ``launch status | list | logs | cancel | sweep``: see and steer what has been submitted.

DEFAULT_FOLDER = "runs"
RUN_HELP = "a run's folder, its run file, or the name of a shipped one"


def add_control_actions(actions: Any) -> None:
    """Declare the actions."""
    show = add_action(
        actions, "status", print_status, help="queue and progress of runs, one row each",
        description="State of its job or process, step, loss, tokens/s, time left, next save, attempts, node-hours "
        "spent and predicted.",
    )
    show.add_argument("folders", nargs="*", type=local_path, metavar="FOLDER",
                      help="of a run, or of several (default: runs)")
    show.add_argument("--live", action="store_true", help="only runs with a job that waits or runs")
    add_json(show)
    every = add_action(actions, "list", print_list,
                       help="submissions and attempts of a run, oldest first, and how each ended")
    every.add_argument("run", type=expanded, metavar="RUN", help=RUN_HELP)
    add_json(every)
    logs = add_action(
        actions, "logs", print_logs, help="print a run's logs, job after job",
        description="Print the last lines of a run's logs; with -f all that is added, by this job and those after it, "
        "until no job of the run is left.",
    )
    logs.add_argument("run", type=expanded, metavar="RUN", help=RUN_HELP)
    logs.add_argument("-f", "--follow", action="store_true", help="wait for more, over requeues and chained jobs")
    logs.add_argument("-n", "--lines", type=int, default=20, metavar="N", help="lines of the past (default 20; 0: all)")
    cancel = add_action(
        actions, "cancel", cancel_runs, help="cancel runs for good",
        description="Cancel every job of the runs, those in the queue and those that follow too. A running one saves "
        "first if KillWait leaves it the time; so does a run that was started without a scheduler, by hand or by "
        "torchrun. A new `launch submit` continues from what was saved.",
    )
    cancel.add_argument("runs", type=expanded, nargs="+", metavar="RUN", help=RUN_HELP)
    add_sweep(actions)


def add_sweep(actions: Any) -> None:
    """Declare ``sweep``."""
    vary = add_action(
        actions, "sweep", queue_sweep, help="queue a job array with a run for each combination of values",
        description="Each task has its own folder, NAME-000 and so on, and its own launch record.",
    )
    add_run_options(vary)
    vary.usage = "%(prog)s [options] run.toml --vary a.b=VALUE,VALUE [-- options of sbatch]"
    vary.add_argument("--vary", action="append", default=[], metavar="a.b=VALUE,VALUE",
                      help="values to try (repeatable)")
    vary.add_argument("--at-once", type=int, default=0, metavar="N", help="tasks that may run at a time (default: all)")
    vary.add_argument("--dry-run", action="store_true", help="print the tasks and the forecast, and queue nothing")


def _queue() -> tuple[dict[str, QueueEntry], str]:
    """The queue and, where SLURM does not answer, why not: what the folders say is still worth a table."""
    from megatron_port.run.launchers import ask_queue

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
    from megatron_port.cli.run_names import run_folder_of
    from megatron_port.run import launch_record as record
    from megatron_port.run.run_files import history_rows
    from megatron_port.tools.launch import status

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
    from megatron_port.cli.run_names import run_folder_of
    from megatron_port.run import direct_start as direct
    from megatron_port.run import launch_record as record
    from megatron_port.run.launchers import ask_queue
    from megatron_port.tools.launch.status import existing, follow, last_lines, live_jobs, log_files

    folder = run_folder_of(args.run).absolute()
    if args.lines < 0:
        raise ConfigError(f"-n {args.lines}: a number of lines, or 0 for all")
    files = existing(log_files(folder))

    def alive() -> bool:
        return direct.running(folder) is not None or bool(
            not direct.only(folder) and live_jobs(folder, ask_queue()))

    if args.follow and (files or (record.newest(folder) is not None and alive())):
        for text in follow(folder, count=args.lines, alive=alive, wait=time.sleep):
            print(text, end="", flush=True)
        return 0
    if not files:
        raise ConfigError(
            f"{folder} has no log: its job has not started, or the run was started on a terminal (`megatron-port train "
            f"… > FILE 2>&1` would keep one). `megatron-port launch status {folder}` shows its state"
        )
    for path in files if not args.lines else files[-1:]:
        print(f"==> {path} <==\n{last_lines(path, args.lines)[0]}", end="")
    return 0


def cancel_runs(args: argparse.Namespace) -> int:
    """Cancel each run."""
    from megatron_port.cli.run_names import run_folder_of
    from megatron_port.tools.launch.status import cancel

    for name in args.runs:
        for line in cancel(run_folder_of(name).absolute()):
            print(line)
    return 0


def queue_sweep(args: argparse.Namespace) -> int:
    """Queue the array, or show it."""
    from megatron_port.tools.launch import submit as forecast
    from megatron_port.tools.launch import sweep
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


SCHEDULERS = ("slurm", "flux", "pbs", "lsf", "jobset", "skypilot")
WITH_REST = ("submit", "sweep", "before")
"""Actions that take words after ``--``."""


class ParserWithRest(Parser):
    """Parser that keeps what follows ``--`` in ``args.rest``: argparse would mix it with the positional arguments."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, up to ``--``."""
        words = list(args or ())
        at = words.index("--") if "--" in words else len(words)
        namespace, unknown = super().parse_known_args(words[:at], namespace)
        namespace.rest = words[at + 1 :]
        return namespace, unknown


def add_parser(subparsers: Any) -> None:
    """Add every action, and what job scripts call."""
    parser = subparsers.add_parser("launch", help="submit runs to a scheduler, see their state, cancel them")
    actions = parser.add_subparsers(dest="action", required=True, metavar="action", parser_class=ParserWithRest)
    for name, text in (("show", "check a run and print its job script"), ("submit", "check a run and queue its job")):
        aliases = ["render"] if name == "show" else []
        action = actions.add_parser(name, help=text, description=text, aliases=aliases)
        add_run_options(action)
        action.add_argument("--after", metavar="JOB", default="", help="start after that job has ended")
        if name == "show":
            action.add_argument("-o", "--output", type=expanded, metavar="FILE", help="write the script there instead")
            action.add_argument("--for", dest="scheduler", default="slurm", choices=SCHEDULERS,
                                help="scheduler that it is for (default: slurm); jobset: Kubernetes")
            action.add_argument("--gpu", default="H100", metavar="NAME", help="accelerator, by SkyPilot's name")
        else:
            action.usage = "%(prog)s [options] run.toml [-- options of sbatch]"
            action.add_argument("--dry-run", action="store_true",
                                help="print nodes, node-hours, predicted end and the script, and queue nothing")
        action.set_defaults(act=render if name == "show" else queue)
    add_control_actions(actions)
    sites = add_action(actions, "sites", update, help="bring the scripts in launch/ up to date with configs/")
    sites.add_argument("--check", action="store_true", help="only say which are not")
    image = add_action(
        actions, "image", pack, help="pack this environment for the nodes' own disks (STAGE, launch.stage)",
        description="Write interpreter, standard library and packages into one archive that runs from any folder. A "
        "job with STAGE=FILE copies it to each node, with the code and configuration of its launch record.",
    )
    image.add_argument("-o", "--output", type=expanded, required=True, metavar="FILE.tar", help="where to write it")
    add_attempt_actions(actions)


def pack(args: argparse.Namespace) -> int:
    """Write an image of this environment."""
    from megatron_port.core.config.ranges import local_path
    from megatron_port.tools.launch.script import make_image

    made = make_image(local_path(args.output))
    print(f"{made.path}: {made.files:,} files, {made.unpacked / 1e6:,.0f} MB in {made.packed / 1e6:,.0f} MB; "
          f"STAGE={made.path.absolute()} sbatch …")
    return 0


def run(args: argparse.Namespace) -> int:
    """Run the chosen action; return its exit code."""
    if args.rest and args.action not in WITH_REST:
        from megatron_port.tools.launch import submit

        raise ConfigError(f"launch {args.action} takes nothing after --, but there is {submit.shown(args.rest)}")
    return int(args.act(args))


def _order(args: argparse.Namespace) -> tuple[Any, Order]:
    from megatron_port.tools.launch import submit

    loaded = load_run(args)
    return loaded.config, submit.order_of(loaded, args.overrides, args.after)


def render(args: argparse.Namespace) -> int:
    """Print or write the script."""
    from megatron_port.core.io.files import write_output
    from megatron_port.tools.launch import submit

    config, order = _order(args)
    text = submit.checked_script(config, order)
    if args.scheduler != "slurm":
        from megatron_port.tools.launch.script import emit

        text = emit(args.scheduler, config, order, submit.interpreter_of(config), args.gpu)
    if args.output:
        write_output(Path(args.output), text, mode=0o755)
    else:
        print(text, end="")
    return 0


def queue(args: argparse.Namespace) -> int:
    """Hand the script to sbatch."""
    from megatron_port.run import launch_record as records
    from megatron_port.tools.launch import submit
    from megatron_port.tools.launch import submit as forecast

    config, order = _order(args)
    submit.checked_script(config, order)
    if args.dry_run:
        folder = submit.next_folder(config)
        print("\n".join(forecast.lines(config)))
        words = submit.shown(submit.command(folder / records.SCRIPT, records.kept_options(args.rest)))
        text = submit.recorded_script(config, order, folder)
        print(f"would keep code, configuration and environment in {folder} and run\n{words}\n\n{text}", end="")
        return 0
    job = submit.submit(config, order, args.rest)
    if job.job_id:
        print(f"job {job.job_id}, script {job.script}, log {job.log}")
    else:
        print(job.said)
    return 0


def update(args: argparse.Namespace) -> int:
    """Rewrite or check the generated scripts."""
    from megatron_port.tools.launch.submit import stale_scripts, write_shipped

    if args.check:
        stale = stale_scripts()
        if stale:
            raise ConfigError(f"these differ from configs/: {', '.join(stale)}; run megatron-port launch sites")
        return 0
    for name in write_shipped():
        print(name)
    return 0
