"""This process's peak of resident memory."""

from __future__ import annotations

import resource
import sys
from pathlib import Path


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
