"""Who may read and write what a run leaves behind: what the user's umask says, and never everybody may write."""

from __future__ import annotations

import os

EVERYBODY_WRITES = 0o002


def tighten() -> None:
    """Nothing that this process or its children make can be written by everybody, whatever umask it was given.

    Containers and batch systems start with umask 0 now and then; a checkpoint that anybody can replace is one that
    anybody can poison. Group and readers are left to the user's umask (077 keeps all of a run to oneself).
    """
    os.umask(os.umask(0o077) | EVERYBODY_WRITES)
