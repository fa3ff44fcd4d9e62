"""Which process prints before anything is known of the run. Imports nothing heavy."""

from __future__ import annotations

import os
from collections.abc import Mapping


def speaker(environ: Mapping[str, str] | None = None) -> bool:
    """True on the one rank that prints the errors which every rank meets alike.

    That is rank 0 of a torchrun job (RANK) or of a SLURM step (SLURM_PROCID counts
    only with a numeric SLURM_STEP_ID), and any process that no launcher started. A
    value that is not a number never silences a process.
    """
    env = os.environ if environ is None else environ
    rank = env.get("RANK")
    if rank is None and env.get("SLURM_STEP_ID", "").isdigit():
        rank = env.get("SLURM_PROCID")
    try:
        return rank is None or int(rank) == 0
    except ValueError:
        return True
