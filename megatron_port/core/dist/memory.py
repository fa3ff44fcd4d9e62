"""This process's peak of resident memory."""

from __future__ import annotations

import mmap
import resource
import sys
import weakref
from pathlib import Path
from typing import Any

import torch


def peak_resident_bytes(status: Path = Path("/proc/self/status")) -> int:
    """Return the most memory that this program has had resident, in bytes.

    getrusage's ``ru_maxrss`` is not that: it outlives ``exec``, so that a program started by a larger one (a test
    session, a notebook) begins with that one's peak.
    """
    try:
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    except (OSError, ValueError, IndexError):
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10


# Host memory of an exact size, page-locked where a GPU copies to or from it.
#
# torch's own allocator of pinned memory rounds up to a power of two: 80 GB of optimizer state would lock 137 GB.

def host_bytes(nbytes: int, *, pinned: bool) -> torch.Tensor:
    """Return ``nbytes`` zero bytes of host memory (uint8), page-locked if ``pinned``; freed with the last view of it.

    Copies that do not block must have ended before it is freed: torch records no events for it.

    Raises:
        RuntimeError: the pages cannot be locked (bytes and the runtime's code are named).
        MemoryError, OSError: there is no such memory.
    """
    if not nbytes:
        return torch.zeros(0, dtype=torch.uint8)
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    data = torch.frombuffer(pages, dtype=torch.uint8)
    if not pinned:
        return data
    runtime: Any = torch.cuda.cudart()
    code = int(runtime.cudaHostRegister(data.data_ptr(), nbytes, 0))
    if code:
        raise RuntimeError(f"cudaHostRegister of {nbytes} bytes failed with code {code}; is the limit of locked memory "
                           "(ulimit -l) too low?")
    weakref.finalize(pages, runtime.cudaHostUnregister, data.data_ptr())
    return data
