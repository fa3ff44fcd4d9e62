"""Priority of the GPU streams on which NCCL or RCCL runs the collectives that are started ahead of their use.

A GPU that has blocks of two kernels to place takes those of the stream with the higher priority first. A collective on
a stream of normal priority therefore starts where the product beside it leaves multiprocessors free, which may be at
that product's end: it then hides behind nothing. Where the next kernel waits for the collective (tensor-, context- and
expert-parallel exchanges, messages between stages) it is to be first. Where nothing waits for it before the end of the
step (gradients summed over replicas, weights gathered behind the passes) it is not: its blocks would only keep a
product's from running, for no gain.

A collective that the program waits for at once runs on the stream of the kernels around it (torch from 2.8 on), and
priority says nothing about it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_port.core.dist.groups import planned
from megatron_port.core.dist.mesh import REVERSE, Communicator, Topology
from megatron_port.core.io.variables import variables

URGENT = frozenset({"tp", "cp", "ep", "pp", REVERSE})
"""Purposes of communicators whose results the next kernel takes."""
FORCED = "TORCH_NCCL_HIGH_PRIORITY"
"""torch's own variable, which gives all groups high priority whatever their options say."""


def is_urgent(communicator: Communicator, asked: str) -> bool:
    """Return whether a communicator's streams have high priority under ``backend.collective_priority``.

    Under ``auto`` one that several purposes share is as urgent as the most urgent of them.
    """
    return asked == "high" or (asked == "auto" and not URGENT.isdisjoint(communicator.names))


def group_options(asked: str, backend: str) -> Callable[[Communicator], Any]:
    """Return what makes the options of a communicator's next group (``ParallelContext.create``).

    Each group takes options of its own, because torch writes into them. gloo has no streams, and gets None.
    """
    if backend != "nccl":
        return lambda communicator: None
    from torch.distributed import ProcessGroupNCCL  # only in a torch with NCCL or RCCL

    return lambda communicator: ProcessGroupNCCL.Options(is_high_priority_stream=is_urgent(communicator, asked))


def describe_policy(asked: str) -> str:
    """Return which kinds of groups have streams of which priority, for ``doctor``."""
    if variables((FORCED,)).get(FORCED, "0") not in ("", "0"):
        return f"all high: {FORCED} is set"
    if asked == "auto":
        return "auto: high for tensor-, context-, expert- and pipeline-parallel groups; normal for the others"
    return f"{asked} for all groups: asked for"


def describe_priority(asked: str, topology: Topology, *, two_way: bool) -> str:
    """Return which communicators of a layout have streams of which priority, for the line at the start of a run.

    ``two_way``: the stages have a second communicator, for gradients (``planned``).
    """
    if variables((FORCED,)).get(FORCED, "0") not in ("", "0"):
        return describe_policy(asked)
    by_kind: dict[bool, list[str]] = {True: [], False: []}
    for communicator in planned(topology, two_way=two_way):
        by_kind[is_urgent(communicator, asked)].append("=".join(communicator.names))
    said = [f"{'high' if urgent else 'normal'} {', '.join(names)}" for urgent, names in by_kind.items() if names]
    return f"{'; '.join(said)} (backend.collective_priority = \"{asked}\")"
