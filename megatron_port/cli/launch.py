"""``megatron-port launch``: write or submit the job script of a run, see what became of it, cancel it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_port.cli import launch_attempts, launch_control
from megatron_port.cli.main import Parser, add_run_options, load_run
from megatron_port.core.config.urls import expanded
from megatron_port.core.errors import ConfigError

if TYPE_CHECKING:
    from megatron_port.tools.launch.script import Order

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
    launch_control.add_actions(actions)
    sites = actions.add_parser("sites", help="bring the scripts in launch/ up to date with configs/")
    sites.add_argument("--check", action="store_true", help="only say which are not")
    sites.set_defaults(act=update)
    image = actions.add_parser(
        "image", help="pack this environment for the nodes' own disks (STAGE, launch.stage)",
        description="Write interpreter, standard library and packages into one archive that runs from any folder. A "
        "job with STAGE=FILE copies it to each node, with the code and configuration of its launch record.",
    )
    image.add_argument("-o", "--output", type=expanded, required=True, metavar="FILE.tar", help="where to write it")
    image.set_defaults(act=pack)
    launch_attempts.add_actions(actions)


def pack(args: argparse.Namespace) -> int:
    """Write an image of this environment."""
    from megatron_port.core.config.urls import local_path
    from megatron_port.tools.launch.image import make_image

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
    from megatron_port.core.io.atomic import write_output
    from megatron_port.tools.launch import submit

    config, order = _order(args)
    text = submit.checked_script(config, order)
    if args.scheduler != "slurm":
        from megatron_port.tools.launch.emit import emit

        text = emit(args.scheduler, config, order, submit.interpreter_of(config), args.gpu)
    if args.output:
        write_output(Path(args.output), text, mode=0o755)
    else:
        print(text, end="")
    return 0


def queue(args: argparse.Namespace) -> int:
    """Hand the script to sbatch."""
    from megatron_port.tools.launch import forecast, submit
    from megatron_port.tools.launch import record as records

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
    from megatron_port.tools.launch import shipped

    if args.check:
        stale = shipped.stale_scripts()
        if stale:
            raise ConfigError(f"these differ from configs/: {', '.join(stale)}; run megatron-port launch sites")
        return 0
    for name in shipped.write_shipped():
        print(name)
    return 0
