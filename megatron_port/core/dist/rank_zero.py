"""Which process prints before anything is known of the run. Imports nothing heavy."""

from __future__ import annotations

import os
from collections.abc import Mapping

from megatron_port.core.errors import LauncherFault
from megatron_port.core.dist import launchers, slurm

LOCAL_RANK_VARIABLE = "MEGATRON_PORT_LOCAL_RANK"
"""Set by ``--nproc`` for each of its ranks."""


def is_rank_zero(environ: Mapping[str, str] | None = None) -> bool:
    """True on the one rank that prints the errors which every rank meets alike.

    That is rank 0 of ``--nproc``, of a torchrun job (RANK), of a SLURM step (SLURM_PROCID counts only with a numeric
    SLURM_STEP_ID) or of another launcher, in the order in which ``discovery`` looks; and any process that no launcher
    started. A value that is not a number never silences a process.
    """
    env = os.environ if environ is None else environ
    rank = env.get(LOCAL_RANK_VARIABLE)
    if rank is None and env.get("TORCHELASTIC_RUN_ID"):
        rank = env.get("RANK")
    if rank is None and slurm.in_step(env) and env.get("SLURM_STEP_NUM_TASKS") != "1":
        rank = env.get("SLURM_PROCID")
    try:
        if rank is None:
            more = launchers.several(launchers.claims(env))
            rank = None if more is None else str(more.rank)
        return rank is None or int(rank) == 0
    except (ValueError, LauncherFault):
        return True
