"""A control group with little memory, in which the kernel kills a process for lack of it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

_ROOTS = ((Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"), (Path("/sys/fs/cgroup"), "memory.max"))


@contextmanager
def little_memory(size: int) -> Iterator[Path]:
    """Yield the folder of a group of so many bytes, version 1 or 2; skip where this user cannot make one."""
    for root, limit in _ROOTS:
        group = root / f"megatron-port-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / limit).write_text(str(size))
            yield group
            return
        except OSError:
            continue
        finally:
            until = time.monotonic() + 5
            while time.monotonic() < until:
                with suppress(OSError):
                    group.rmdir()
                    break
                time.sleep(0.05)
    pytest.skip("no control group with a memory limit can be made here")


def killed(group: Path) -> int:
    """How many processes of the group the kernel has killed for lack of memory."""
    for name in ("memory.oom_control", "memory.events"):
        if (group / name).exists():
            told = dict(line.split() for line in (group / name).read_text().splitlines())
            return int(told["oom_kill"])
    raise AssertionError(f"{group} does not tell")
