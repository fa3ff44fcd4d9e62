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
from types import FrameType

from megatron_port.core.dist.process import die_with_parent
from megatron_port.core.dist.rank import ProcessInfo
from megatron_port.core.errors import ConfigError, EnvironmentFault
from megatron_port.run import launchers
from megatron_port.run import launchers as slurm
from megatron_port.run.launchers import LOCAL_RANK_VARIABLE

GRACE_S = 8.0
"""After the first rank failed the others may finish speaking; then they are killed. A failing rank leaves within 7 s
(``run.rendezvous.stop``); one that waits for the dead to report would wait for minutes."""


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


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
    if nproc < 1:
        raise ConfigError(f"--nproc {nproc}: at least 1")
    _refuse_launcher()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // nproc)))
    _import_for_all(preload)
    # Any user of this machine can connect to a port of the loopback interface.
    host, port, secret = socket.gethostname(), port or _free_port(), secrets.token_hex(16)
    sys.stdout.flush()
    sys.stderr.flush()
    children: dict[int, int] = {}
    for rank in range(nproc):
        pid = os.fork()
        if pid == 0:
            die_with_parent()
            gc.enable()
            os.environ["RANK"] = os.environ[LOCAL_RANK_VARIABLE] = str(rank)
            sources = dict.fromkeys(("rank", "world_size", "local_rank", "master_addr", "master_port"), "--nproc")
            return rank_main(
                ProcessInfo(
                    rank, nproc, rank, nproc, 0, 1, "127.0.0.1", port, "local", host, attempt="0", sources=sources,
                    secret=secret,
                )
            )
        children[pid] = rank
    gc.enable()
    return _wait(children)


def run_apart(call: Callable[[], int], *, preload: Sequence[str] = ()) -> int:
    """Return the exit code of a forked process that ends with what ``call()`` returns there.

    ``preload``: modules that it needs, imported here first, once for all that are forked. The calling process must not
    have run torch's operators on several threads: a fork has none of them.
    """
    _import_for_all(preload)
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        die_with_parent()
        gc.enable()
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


def _import_for_all(modules: Sequence[str]) -> None:
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
