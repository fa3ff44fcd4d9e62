"""Whether a run continues, agreed by all ranks after each step: signals, the lease of the folder, damaged state."""

from __future__ import annotations

from contextlib import suppress

import torch
import torch.distributed as dist

from megatron_port.core.dist.agree import agree
from megatron_port.core.dist.process import IDLE, LEVELS, REDUCE
from megatron_port.core.dist.rank import LeaseLost
from megatron_port.core.errors import NumericsError, StateDamaged
from megatron_port.core.train.folders import run_folder
from megatron_port.core.train.hooks import LoopState

FENCED = max(LEVELS.values()) + 1
"""Stop level above those of all signals: exit without saving."""
DAMAGED = FENCED + 1  # above every other level: a rank's state is damaged


def agreed_level(state: LoopState, level: int) -> int:
    """Return the highest stop level of any rank: a signal may reach one rank and not another.

    Raises:
        LeaseLost: on every rank: another attempt holds the run's folder by now.
        NumericsError: on every rank: the state of one is damaged.
    """
    session = state.session
    if session.fence.lost:
        level = FENCED
    if state.damage is not None:
        level = DAMAGED
    if session.info.world_size > 1:
        session.progress.at(REDUCE, "signals, agreed by all ranks")
        wish = torch.tensor([level])
        dist.all_reduce(wish, op=dist.ReduceOp.MAX, group=session.cpu_group)
        session.progress.at(IDLE)
        level = int(wish)
    if level == DAMAGED:
        stop_if_damaged(state)
    if level == FENCED:
        session.fence.check()  # rank 0 knows who it is
        raise LeaseLost(f"{run_folder(state.config)} was taken over by another attempt; rank 0 says by which")
    return level


def check_lease(state: LoopState) -> None:
    """Stop all ranks with LeaseLost if another attempt holds the folder now. Each step's lines check it as well."""
    with suppress(LeaseLost, OSError):
        state.session.fence.check()
    agreed_level(state, 0)


def stop_if_damaged(state: LoopState) -> None:
    """Raise StateDamaged on every rank if anything but an update changed the state of one. Collective."""
    error = None if (damage := state.damage) is None else NumericsError(
        f"{damage} {damage.how} (found at step {state.progress.step}): {damage.cause}, and resume "
        "from the last checkpoint; the weights of this step are not saved"
    )
    try:
        agree(error, where=str(state.ctx.coords), group=state.session.cpu_group)
    except NumericsError as told:
        raise StateDamaged(str(told)) from told
