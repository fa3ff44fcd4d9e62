"""``megatron-port launch``: write or submit the job script of a run."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_port.cli import launch_attempts
from megatron_port.cli.arguments import add_json, add_verb, print_json, print_table
from megatron_port.cli.main import Parser, add_run_options, load_run
from megatron_port.errors import ConfigError


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
    """Add ``launch list | show | submit | sites``, and what job scripts call."""
    parser = subparsers.add_parser("launch", help="write or submit the job script of a run")
    actions = parser.add_subparsers(dest="action", required=True, metavar="action", parser_class=ParserWithRest)
    listed = add_verb(actions, "list", help="the attempts of a run, oldest first: jobs, nodes, how each ended")
    listed.add_argument("run", metavar="RUN", help="a run's folder, its run file, or the name of a shipped one")
    add_json(listed)
    listed.set_defaults(act=list_attempts)
    for name, text in (("show", "check a run and print its job script"), ("submit", "check a run and queue its job")):
        aliases = ["render"] if name == "show" else []
        action = actions.add_parser(name, help=text, description=text, aliases=aliases)
        add_run_options(action)
        action.add_argument("--after", metavar="JOB", default="", help="start when that job has ended")
        if name == "show":
            action.add_argument("-o", "--output", metavar="FILE", help="write the script there instead")
        else:
            action.usage = "%(prog)s [options] run.toml [-- options of sbatch]"
            action.add_argument("--dry-run", action="store_true", help="print what would be run, and run nothing")
        action.set_defaults(act=render if name == "show" else queue)
    sites = actions.add_parser("sites", help="bring the scripts in launch/ up to date with configs/")
    sites.add_argument("--check", action="store_true", help="only say which are not")
    sites.set_defaults(act=update)
    launch_attempts.add_actions(actions)


def run(args: argparse.Namespace) -> int:
    """Run the chosen action; return its exit code."""
    from megatron_port.launch import submit

    if args.rest and args.action not in ("submit", "after"):
        raise ConfigError(f"launch {args.action} takes nothing after --, but there is {submit.shown(args.rest)}")
    return int(args.act(args))


def list_attempts(args: argparse.Namespace) -> int:
    """Print the attempts of a run."""
    from megatron_port.config.run_names import run_folder_of
    from megatron_port.launch.attempts import read_history

    folder = run_folder_of(args.run)
    found = read_history(folder)
    if args.json:
        print_json([asdict(one) for one in found])
    elif not found:
        print(f"no job has started {folder}: attempts are noted by job scripts (`launch submit`)")
    else:
        print_table([("attempt", "status", "step", "nodes", "cause"),
                     *((a.attempt, a.status or "running or lost", f"{a.step:,}", a.nodes, a.cause) for a in found)],
                    right=(2,))
    return 0


def _script(args: argparse.Namespace) -> tuple[Any, str]:
    from megatron_port.launch import submit

    loaded = load_run(args)
    order = submit.order_of(loaded, args.overrides, args.after)
    return loaded.config, submit.checked_script(loaded.config, order)


def render(args: argparse.Namespace) -> int:
    """Print or write the script."""
    from megatron_port.runtime.atomic import write_output

    _, text = _script(args)
    if args.output:
        write_output(Path(args.output), text, mode=0o755)
    else:
        print(text, end="")
    return 0


def queue(args: argparse.Namespace) -> int:
    """Hand the script to sbatch."""
    from megatron_port.launch import submit

    config, text = _script(args)
    path = submit.script_path(config)
    if args.dry_run:
        print(f"would write {path} and run\n{submit.shown(submit.command(path, args.rest))}\n\n{text}", end="")
        return 0
    job = submit.submit(config, text, args.rest)
    if job.job_id:
        print(f"job {job.job_id}, script {path}, log {job.log}")
    else:
        print(job.said)
    return 0


def update(args: argparse.Namespace) -> int:
    """Rewrite or check the generated scripts."""
    from megatron_port.launch import shipped

    if args.check:
        stale = shipped.stale_scripts()
        if stale:
            raise ConfigError(f"not what configs/ says: {', '.join(stale)}; run megatron-port launch sites")
        return 0
    for name in shipped.write_shipped():
        print(name)
    return 0
