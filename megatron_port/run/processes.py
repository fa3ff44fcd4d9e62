"""Which process is which: a number alone is used again, and only its own machine can look it up."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Collection, Iterable
from pathlib import Path

_NAME = "mp-rank-"


def born(pid: int) -> int:
    """Start of a process in clock ticks since boot; 0: there is no such process, or this system does not tell."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    fields = text.rpartition(")")[2].split()
    return 0 if fields[0] in "ZX" else int(fields[19])


def stopped(pid: int) -> bool:
    """Return whether a signal has stopped the process (SIGSTOP, Ctrl-Z, a debugger)."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    return False


def name_rank(rank: int) -> None:
    """Name this process in ps and top: ``mp-rank-3``. At most 15 characters, so far as the kernel keeps them."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(f"{_NAME}{rank}")


def rank_named(name: str) -> int | None:
    """Return the rank that a process is by its name; None: it is none."""
    number = name.removeprefix(_NAME)
    return int(number) if number != name and number.isdigit() else None


def process_space() -> str:
    """A name for the set of processes that this one can see, equal for all of them and for no others.

    The kernel's boot and the PID namespace: host names repeat, and two containers of a host do not see one another.
    Empty where the system does not tell.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def kill(processes: Iterable[tuple[int, int]], number: int = signal.SIGKILL) -> None:
    """Send a signal to those of (process id, start) that still are the same process."""
    for pid, start in processes:
        if start and born(pid) == start:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)


def signal_same(pid: int, start: int, number: int) -> bool:
    """Send a signal to a process if it is the one that was born at ``start``; False: that one has ended.

    A handle is opened first: no process that takes the number over between the look and the signal can get it.

    Raises:
        PermissionError: it is another user's.
    """
    try:
        handle = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else -1
    except ProcessLookupError:
        return False
    try:
        if not start or born(pid) != start:
            return False
        if handle >= 0:
            signal.pidfd_send_signal(handle, number)
        else:
            os.kill(pid, number)
        return True
    except ProcessLookupError:
        return False
    finally:
        if handle >= 0:
            os.close(handle)


def out_of_memory_kills() -> int:
    """Return how many processes this host's kernel has killed for memory since boot; 0 where it is not known."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    return 0


def end_connections(addresses: Collection[str]) -> int:
    """Shut down this process's TCP connections to these addresses, whoever opened them; return how many there were."""
    count = 0
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue  # no socket can be made of it, and the attempt would leave its duplicate open
            with socket.socket(fileno=os.dup(int(name))) as sock:
                if sock.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                if sock.getpeername()[0].removeprefix("::ffff:") in addresses:  # torch's store listens on IPv6 for both
                    sock.shutdown(socket.SHUT_RDWR)
                    count += 1
    return count
