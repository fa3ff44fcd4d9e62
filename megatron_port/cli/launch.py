"""``megatron-port launch``: write or submit the job script of a run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megatron_port.cli import launch_attempts
from megatron_port.cli.main import Parser, add_run_options, load_run
from megatron_port.errors import ConfigError
from megatron_port.launch import shipped, submit
from megatron_port.runtime.atomic import write_output


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
    """Add ``launch render | submit | sites``, and what job scripts call."""
    parser = subparsers.add_parser("launch", help="write or submit the job script of a run")
    actions = parser.add_subparsers(dest="action", required=True, metavar="action", parser_class=ParserWithRest)
    for name, text in (("render", "check a run and print its job script"), ("submit", "check a run and queue its job")):
        action = actions.add_parser(name, help=text, description=text)
        add_run_options(action)
        action.add_argument("--after", metavar="JOB", default="", help="start when that job has ended")
        if name == "render":
            action.add_argument("-o", "--output", metavar="FILE", help="write the script there instead")
        else:
            action.usage = "%(prog)s [options] run.toml [-- options of sbatch]"
            action.add_argument("--dry-run", action="store_true", help="print what would be run, and run nothing")
        action.set_defaults(act=render if name == "render" else queue)
    sites = actions.add_parser("sites", help="bring the scripts in launch/ up to date with configs/")
    sites.add_argument("--check", action="store_true", help="only say which are not")
    sites.set_defaults(act=update)
    launch_attempts.add_actions(actions)


def run(args: argparse.Namespace) -> int:
    """Run the chosen action; return its exit code."""
    if args.rest and args.action not in ("submit", "after"):
        raise ConfigError(f"launch {args.action} takes nothing after --, but there is {submit.shown(args.rest)}")
    return int(args.act(args))


def _script(args: argparse.Namespace) -> tuple[Any, str]:
    loaded = load_run(args)
    order = submit.order_of(loaded, args.overrides, args.after)
    return loaded.config, submit.checked_script(loaded.config, order)


def render(args: argparse.Namespace) -> int:
    """Print or write the script."""
    _, text = _script(args)
    if args.output:
        write_output(Path(args.output), text, mode=0o755)
    else:
        print(text, end="")
    return 0


def queue(args: argparse.Namespace) -> int:
    """Hand the script to sbatch."""
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
    if args.check:
        stale = shipped.stale_scripts()
        if stale:
            raise ConfigError(f"not what configs/ says: {', '.join(stale)}; run megatron-port launch sites")
        return 0
    for name in shipped.write_shipped():
        print(name)
    return 0
