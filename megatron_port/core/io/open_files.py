"""The limit on open files of a process: a login shell's is often 1024, and the hard one is far above."""

from __future__ import annotations

import errno
import os
import resource

SPARE = 512
"""Files beside those that were counted: sockets, pipes, libraries, logs."""


def allow_open_files(count: int) -> None:
    """Raise the soft limit so that ``count`` more files can be open, as far as the hard limit lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + SPARE
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def too_many_open(error: OSError) -> str:
    """Return what to do about an error of opening a file where the limit is its cause; empty: it is not."""
    if error.errno != errno.EMFILE:
        return ""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (f"this process may have {soft} files open, and {len(os.listdir('/dev/fd'))} are; raise the limit "
            f"(ulimit -n, hard limit {hard}), or join corpora")
