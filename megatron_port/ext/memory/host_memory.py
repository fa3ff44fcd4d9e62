"""Host memory of an exact size, page-locked where a GPU copies to or from it.

torch's own allocator of pinned memory rounds up to a power of two: 80 GB of optimizer state would lock 137 GB.
"""

from __future__ import annotations

import mmap
import weakref
from typing import Any

import torch


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
