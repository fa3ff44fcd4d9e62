"""``chaos RUN``: a drill in which ranks of a run are killed, stopped and cut off, and what that costs is reported."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from megatron_port.cli.arguments import add_json, print_json
from megatron_port.cli.main import add_run_options, load_run
from megatron_port.core.errors import ConfigError
from megatron_port.tools.chaos import FAULTS, NODE

_ALONE = ("; a node can be taken from a run of several: start the drill once on each (srun --no-kill "
          "--kill-on-bad-exit=0 --ntasks-per-node=1 megatron-port chaos …)")


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Declare the command."""
    kinds = "; ".join(f"{name} ({what})" for name, what in FAULTS.items())
    parser = subparsers.add_parser(
        "chaos", help="kill ranks of a run on purpose, and report what it cost",
        description=f"Train with lost ranks replaced, strike ranks meanwhile, and report how long each recovery took "
        f"and how many steps were repeated. Faults: {kinds}. The run's own folder is used, so give the drill a name of "
        "its own (--set name=drill). Without a launcher the run is of this machine; started once on each node it is of "
        "all of them: srun --no-kill --kill-on-bad-exit=0 --ntasks-per-node=1 megatron-port chaos …",
    )
    add_run_options(parser)
    parser.add_argument("--nproc", type=int, metavar="N", required=True, help="ranks on this machine, or on each node")
    parser.add_argument("--schedule", metavar="TEXT", help='"30 kill 3; 60 stop": seconds after the first step, fault, '
                        "and perhaps the rank (otherwise it is drawn)")
    parser.add_argument("--every", type=float, metavar="SECONDS", default=60.0,
                        help="without a schedule: a drawn fault this often, on average (default: 60)")
    parser.add_argument("--count", type=int, metavar="N", default=10, help="and so many of them (default: 10)")
    parser.add_argument("--faults", metavar="LIST", help="of these kinds (default: all that can strike)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of what is drawn (default: 0)")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Drill; return the run's exit code."""
    from megatron_port.core.config.checks import check
    from megatron_port.core.train.folders import run_folder
    from megatron_port.run.discovery import discover
    from megatron_port.run.local_ranks import node_place
    from megatron_port.tools import chaos

    config, place = load_run(args).config, node_place(discover())
    several, nodes = place.world_size > 1, place.world_size
    if several:
        nodes -= config.launch.spare_nodes
    check(config, world_size=None if config.layout.elastic else args.nproc * max(nodes, 1))
    possible = [name for name in FAULTS if several or name != NODE]
    kinds = possible if args.faults is None else [kind for kind in args.faults.split(",") if kind]
    unknown = [kind for kind in kinds if kind not in possible]
    if unknown or not kinds or args.every <= 0 or args.count < 0:
        raise ConfigError(f"--faults {','.join(kinds)} --every {args.every:g} --count {args.count}: name some of "
                          f"{', '.join(possible)}, seconds above 0, and a count of 0 or more"
                          + (_ALONE if NODE in unknown else ""))
    faults = (chaos.parse_schedule(args.schedule) if args.schedule
              else chaos.drawn_schedule(args.seed, args.every, kinds, args.count))
    if several:
        faults = chaos.with_ranks(faults, args.seed, args.nproc, nodes)
    elif any(fault.kind == NODE for fault in faults):
        raise ConfigError(f"--schedule has the fault node{_ALONE}")
    overrides = [*args.overrides, "launch.when_lost=replace"]
    if not config.checkpoint.memory_interval:
        overrides.append("checkpoint.memory_interval=1")
    command = chaos.train_command(args.run_file, args.nproc, overrides)

    def say(line: str) -> None:
        print(f"chaos: {line}", file=sys.stderr, flush=True)

    done = chaos.drill(command, run_folder(config), faults, seed=args.seed, say=say,
                       copy_interval=config.checkpoint.memory_interval or 1,
                       output=sys.stderr if args.json else None, several=several)
    if place.rank:
        return 0  # the first node has the report, and the run's exit code
    if args.json:
        print_json(done.body())
    else:
        print(chaos.text_of(done))
    return done.exit_code
