"""Processes of this host by number and start time, so that a number used again is never mistaken for the old one."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable
from pathlib import Path

from megatron_port.runtime.processes import born


def kill(processes: Iterable[tuple[int, int]]) -> None:
    """Send SIGKILL to those of (number, start) that still are the same process."""
    for pid, start in processes:
        if start and born(pid) == start:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def poke(processes: Iterable[tuple[int, int]], number: int) -> None:
    """Send a signal to those that still are the same process."""
    for pid, start in processes:
        if start and born(pid) == start:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)


def out_of_memory_kills() -> int:
    """Return how many processes this host's kernel has killed for memory since boot; 0 where it is not known."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    return 0
