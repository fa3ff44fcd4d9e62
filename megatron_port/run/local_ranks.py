"""Start the ranks of one machine by forking them from a parent that has imported what they need.

torchrun starts a fresh interpreter per rank, and each imports torch and
DeepSpeed: half a minute for eight ranks on two cores. A forked rank starts in
a tenth of a second. Nothing of torch has run in the parent, so the children
start clean.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

from megatron_port.core.dist.process import die_with_parent
from megatron_port.core.dist.rank import ProcessInfo
from megatron_port.core.errors import ConfigError, EnvironmentFault
from megatron_port.run import launchers
from megatron_port.run import launchers as slurm
from megatron_port.run.launchers import AGENT_VARIABLE, LOCAL_RANK_VARIABLE
from megatron_port.run.processes import name_rank

GRACE_S = 8.0
"""After the first rank failed the others may finish speaking; then they are killed. A failing rank leaves within 7 s
(``run.rendezvous.stop``); one that waits for the dead to report would wait for minutes."""


def share_cores(nproc: int) -> None:
    """Divide this machine's cores among ``nproc`` ranks (``OMP_NUM_THREADS``), unless the user has.

    Call it before torch is imported, whose thread library reads the variable once, when it is loaded. Ranks with a
    thread for every core each wait for one another in busy loops: eight on two cores took 1.3 times as long a step, and
    2.4 s longer for the first.

    Raises:
        ConfigError: ``nproc`` is below one.
    """
    if nproc < 1:
        raise ConfigError(f"--nproc {nproc}: at least 1")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, cores // nproc)
        os.environ["OMP_NUM_THREADS"] = str(threads)
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(threads)  # the ranks inherit it


def free_port(address: str = "127.0.0.1") -> int:
    """Return a port of one of this host's addresses that nobody listens on now."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as s:
        s.bind((address, 0))
        return int(s.getsockname()[1])


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of a start meet, and how many there are."""

    number: int
    """Number of the start: 0 is the first."""
    address: str
    """Address of rank 0's node."""
    port: int
    hosts: tuple[str, ...]
    """Host of each node, in the order of its ranks."""
    size: int
    """Ranks of each node."""
    node: int = 0
    """Place of the reader's node among the hosts."""
    secret: str = field(default="", repr=False)
    """Secret of this run's ranks: any user of a machine can connect to its ports."""

    def at(self, node: int) -> Meeting:
        """Return it for the ranks of another node."""
        return replace(self, node=node)

    def body(self) -> dict[str, Any]:
        """Return it for a message. The hosts are one text, as each of thousands of nodes is told all of them."""
        return {**vars(self), "hosts": " ".join(self.hosts)}

    @staticmethod
    def of(body: Mapping[str, Any]) -> Meeting:
        """Return what a message says."""
        return Meeting(**{**body, "hosts": tuple(body["hosts"].split(" "))})


def process_info(meeting: Meeting, local: int) -> ProcessInfo:
    """Return what a rank's process is told, and set its environment; for use in that process."""
    rank, several = meeting.node * meeting.size + local, len(meeting.hosts) > 1
    name_rank(rank)
    os.environ["RANK"] = os.environ[LOCAL_RANK_VARIABLE] = str(rank)
    os.environ[AGENT_VARIABLE] = hashlib.sha256(f"agent {meeting.secret}".encode()).hexdigest()[:16]
    how = "the run's agent" if several else "--nproc"
    sources = dict.fromkeys(("rank", "world_size", "local_rank", "master_addr", "master_port"), how)
    return ProcessInfo(
        rank, len(meeting.hosts) * meeting.size, local, meeting.size, meeting.node, len(meeting.hosts),
        meeting.address, meeting.port, "agent" if several else "local", socket.gethostname(),
        attempt=str(meeting.number), sources=sources, secret=meeting.secret,
        nodes=tuple((host, meeting.size) for host in meeting.hosts),
    )


def local_meeting(nproc: int, port: int | None) -> Meeting:
    """Return the meeting of ``nproc`` ranks of this machine, whose threads share the cores (``OMP_NUM_THREADS``).

    Raises:
        ConfigError: ``nproc`` is below one.
        EnvironmentFault: a launcher started this process already.
    """
    share_cores(nproc)
    _refuse_launcher()
    return Meeting(0, "127.0.0.1", port or free_port(), (socket.gethostname(),), nproc, secret=secrets.token_hex(16))


def node_place(info: ProcessInfo) -> ProcessInfo:
    """Return the place of this process among those that a launcher started, one a node, each to fork ranks.

    Raises:
        EnvironmentFault: it started several on a node.
    """
    if info.local_world_size > 1:
        raise EnvironmentFault(
            f"{info.launcher} started {info.local_world_size} processes on this node, and each would fork --nproc "
            "ranks: start one a node (srun --ntasks-per-node=1; torchrun --nproc-per-node=1 -m -- megatron_port …)"
        )
    # torchrun's agent listens on the port itself.
    return replace(info, master_port=info.master_port + 1, agent_store=False) if info.agent_store else info


def nodes_meeting(nproc: int, nodes: int, info: ProcessInfo) -> Meeting:
    """Return the meeting of ``nproc`` ranks on each of ``nodes`` nodes, for their agent to complete.

    Raises:
        EnvironmentFault: there is no node for ranks.
    """
    if nodes < 1:
        raise EnvironmentFault(
            f"{info.launcher} started {info.world_size} nodes, and launch.spare_nodes leaves {nodes} of them to train "
            "on; start more, or set fewer spare nodes"
        )
    return Meeting(0, "", 0, ("",) * nodes, nproc, secret=info.secret or secrets.token_hex(16))


def fork_child() -> int:
    """Fork a process that ends with this one. Return its process id, and 0 in it.

    What was printed so far is written first, so that the child does not write it again.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        die_with_parent()
        gc.enable()
    return pid


def run_local(
    nproc: int, rank_main: Callable[[ProcessInfo], int], *, preload: Sequence[str] = (), port: int | None = None
) -> int:
    """Fork ``nproc`` ranks and call ``rank_main(info)`` in each.

    In a child this returns what ``rank_main`` returns, and the child continues
    as the process it is: the caller's error handling serves it too. In the
    parent it returns the exit code of the first rank that failed, or 0.
    Signals sent to the parent reach every rank.

    Raises:
        ConfigError: ``nproc`` is below one.
        EnvironmentFault: a launcher started this process already, or torch ran in it.
    """
    meeting = local_meeting(nproc, port)
    import_for_all(preload)
    children: dict[int, int] = {}
    for rank in range(nproc):
        pid = fork_child()
        if pid == 0:
            return rank_main(process_info(meeting, rank))
        children[pid] = rank
    gc.enable()
    return _wait(children)


def run_apart(call: Callable[[], int], *, preload: Sequence[str] = ()) -> int:
    """Return the exit code of a forked process that ends with what ``call()`` returns there.

    ``preload``: modules that it needs, imported here first, once for all that are forked. The calling process must not
    have run torch's operators on several threads: a fork has none of them.
    """
    import_for_all(preload)
    pid = fork_child()
    if pid == 0:
        code = 1
        try:
            code = call()
        finally:  # whatever the caller would do on its way out is not this process's
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    gc.enable()
    return _wait({pid: 0})


def _refuse_launcher() -> None:
    """Raise EnvironmentFault where a launcher has started several processes: each would fork ranks of its own."""
    env = os.environ
    if env.get("TORCHELASTIC_RUN_ID") or env.get("SLURM_STEP_NUM_TASKS", "1") not in ("", "1"):
        raise EnvironmentFault("--nproc under torchrun or srun would start ranks twice; leave it out")
    more = launchers.several(launchers.claims(env))
    if more is not None and (more.size or not slurm.in_step(env)):
        names = " and ".join(more.sources.values())
        raise EnvironmentFault(f"{more}: --nproc would start ranks twice; leave it out, or unset {names}")


def import_for_all(modules: Sequence[str]) -> None:
    """Import what every rank needs, and leave the garbage collector off.

    It would go through a million objects again and again while they are made, a tenth of the time; and in the ranks it
    would write to each object, of which they then had copies of their own. What is there now it never visits again.
    """
    gc.disable()
    try:
        for name in modules:
            importlib.import_module(name)
    except BaseException:
        gc.enable()
        raise
    gc.freeze()


def _wait(children: dict[int, int]) -> int:
    """Reap every rank; pass signals on; end the rest ``GRACE_S`` after the first failure."""
    alive = dict(children)

    def forward(number: int, frame: FrameType | None) -> None:
        for pid in tuple(alive):
            with contextlib.suppress(ProcessLookupError):  # it ended just now
                os.kill(pid, number)

    # A terminal's Ctrl-C reaches the ranks by itself; a SIGINT sent to this process alone must be passed on,
    # and ranks take a second one for "at once", so it is passed on only to ranks outside the foreground group.
    before = {n: signal.signal(n, forward) for n in (signal.SIGTERM, signal.SIGUSR1)}
    interrupted = signal.signal(signal.SIGINT, signal.SIG_IGN if sys.stdin.isatty() else forward)
    first_failure, deadline = 0, float("inf")
    try:
        while alive:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                if time.monotonic() > deadline:
                    for left in alive:
                        os.kill(left, signal.SIGKILL)
                    deadline = float("inf")
                time.sleep(0.02)
                continue
            if pid not in alive:
                continue
            rank = alive.pop(pid)
            code = os.waitstatus_to_exitcode(status)
            if code and not first_failure:
                first_failure = code if code > 0 else 128 - code
                deadline = time.monotonic() + GRACE_S
                if code < 0:
                    print(f"error: rank {rank} was killed by {signal.Signals(-code).name}", file=sys.stderr)
    finally:
        signal.signal(signal.SIGINT, interrupted)
        for number, handler in before.items():
            signal.signal(number, handler)
    return first_failure
