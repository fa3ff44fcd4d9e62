"""Start the ranks of one machine by forking them from a parent that has imported what they need.

torchrun starts a fresh interpreter per rank, and each imports torch and
DeepSpeed: half a minute for eight ranks on two cores. A forked rank starts in
a tenth of a second. Nothing of torch has run in the parent, so the children
start clean.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType

from megatron_port.core.dist.process import die_with_parent
from megatron_port.core.dist.rank import ProcessInfo
from megatron_port.core.errors import ConfigError, EnvironmentFault
from megatron_port.run import launchers
from megatron_port.run import launchers as slurm
from megatron_port.run.launchers import LOCAL_RANK_VARIABLE
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


@dataclass
class LocalStart:
    """How the ranks of one machine are started: what each of them is told."""

    nproc: int
    port: int
    host: str = field(default_factory=socket.gethostname)
    secret: str = field(default_factory=lambda: secrets.token_hex(16))
    """Any user of this machine can connect to a port of the loopback interface."""

    @classmethod
    def of(cls, nproc: int, port: int | None) -> LocalStart:
        """Return the start of ``nproc`` ranks, whose threads share the cores (``OMP_NUM_THREADS``).

        Raises:
            ConfigError: ``nproc`` is below one.
            EnvironmentFault: a launcher started this process already.
        """
        share_cores(nproc)
        _refuse_launcher()
        return cls(nproc, port or cls.free_port())

    @staticmethod
    def free_port() -> int:
        """Return a port that nobody listens on now."""
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            return int(s.getsockname()[1])

    def info(self, rank: int, *, attempt: str = "0") -> ProcessInfo:
        """Return what a rank's own process is told; for use in that process, whose environment it sets."""
        name_rank(rank)
        os.environ["RANK"] = os.environ[LOCAL_RANK_VARIABLE] = str(rank)
        sources = dict.fromkeys(("rank", "world_size", "local_rank", "master_addr", "master_port"), "--nproc")
        return ProcessInfo(
            rank, self.nproc, rank, self.nproc, 0, 1, "127.0.0.1", self.port, "local", self.host, attempt=attempt,
            sources=sources, secret=self.secret,
        )


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
    start = LocalStart.of(nproc, port)
    import_for_all(preload)
    children: dict[int, int] = {}
    for rank in range(nproc):
        pid = fork_child()
        if pid == 0:
            return rank_main(start.info(rank))
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
