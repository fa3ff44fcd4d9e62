"""Train a step on layouts of the ghost machine, and hold the priority of each collective's stream to the setting.

    python tests/ghost/priorities.py [--python ENV/bin/python]

A communicator is known by its place in the list that every rank creates in one order (``groups.planned``). Those that
``run.device`` calls urgent must have started operations on a stream of the highest priority, the others none.
What a rank waits for at once runs on the stream of its kernels, which nobody made with a priority. Exit 1: a priority
is another than the setting's.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from analyse import stream_priorities
from check import RUN
from machine import RankLog
from options import chosen_torch, machine, parser

from megatron_port.core.dist.groups import planned
from megatron_port.core.dist.mesh import Topology
from megatron_port.run.device import is_urgent

RUNS = (
    (Topology(tp=2, pp=2, dp=2), "auto", ("layout.sequence_parallel=true",)),
    (Topology(tp=2, pp=2, dp=2), "high", ()),
    (Topology(tp=2, pp=2, dp=2), "normal", ()),
    (Topology(dp=2, cp=2), "auto", ("layout.cp_method=ring",)),
    (Topology(tp=2, dp=2), "auto", ("layout.zero_stage=3", "layout.sequence_parallel=true")),
)
"""Ranks of each axis, the priority that is asked for, and further settings."""
STARTS = {"tp", "pp", "pp_reverse", "dp"}
"""Purposes that start something beside the kernels in a dense step."""


def wrong(log: RankLog, topology: Topology, asked: str) -> list[str]:
    """Return what is wrong with the priorities of one rank's communicators."""
    names = [c for c in planned(topology, two_way=True) if any(log.rank in group for group in c.groups)]
    found = stream_priorities(log)
    out = []
    for communicator, (name, priorities) in zip(names, found.items()):
        who = f"rank {log.rank}: {'='.join(communicator.names)} ({name})"
        urgent = is_urgent(communicator, asked)
        if any((priority < NORMAL) != urgent for priority in priorities):
            out.append(f"{who} has streams of priority {sorted(priorities)}, not {'high' if urgent else 'normal'}")
        if not priorities and STARTS & set(communicator.names):
            out.append(f"{who} started nothing on a stream of its own")
    return out


NORMAL = 0
"""Priority of a stream that asks for none; what is less is higher."""


def settings(topology: Topology, more: Sequence[str], asked: str) -> list[str]:
    """Return the command line's settings of a layout."""
    sizes = {"tensor_parallel_size": topology.tp, "pipeline_parallel_size": topology.pp,
             "data_parallel_size": topology.dp, "context_parallel_size": topology.cp}
    sets = [f"layout.{name}={size}" for name, size in sizes.items()]
    sets += [f"model.num_layers={2 * topology.pp}", f"batch.global_batch_size={2 * topology.dp}",
             f"backend.collective_priority={asked}",
             "training.steps=1", "training.eval_interval=0", "training.eval_batches=0", "checkpoint.save_interval=0",
             "checkpoint.save_final=false", *more]
    return [word for one in sets for word in ("--set", one)]


def main() -> int:
    """Run the layouts; 1 if a priority is wrong."""
    arguments = parser(__doc__ or "").parse_args()
    bad = False
    with machine(chosen_torch(arguments.python)) as made:
        (made.scratch / "run.toml").write_text(RUN)
        for topology, asked, more in RUNS:
            ended = made.run("train", "run.toml", "--nproc", str(topology.world_size),
                             *settings(topology, more, asked), seconds=120.0)
            said = [line for line in ended.output.splitlines() if "streams of the collectives" in line]
            found = [f for log in ended.logs for f in wrong(log, topology, asked)]
            if ended.code or len(ended.logs) != topology.world_size:
                found.append(f"exit {ended.code}: {ended.output[-300:]}")
            print(f"{topology.sizes()} {' '.join(more)}: {', '.join(said) or 'nothing said'}", *found, sep="\n  ")
            bad |= bool(found) or not said
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
