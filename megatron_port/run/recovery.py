"""A rank that outlives its peers: it leaves a step whose peers are lost, keeps its process, and starts again with them.

The run's agent (``run.agent``) starts the lost ranks again. Then all ranks meet anew and resume from the newest
copy of the state that all of them have (``storage.copies``), else from the newest checkpoint: the same code as any
start, so what holds for a resumed run holds here.
"""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Sequence

from megatron_port.api import run_training
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.dist.process import block_signals
from megatron_port.core.dist.rank import ProcessInfo
from megatron_port.core.errors import EnvironmentFault, PortError, StateDamaged
from megatron_port.core.io.logging import unexpected
from megatron_port.core.train.folders import run_folder
from megatron_port.core.train.loop import TrainingResult
from megatron_port.ext.storage.copies import CopiesNotSaved
from megatron_port.run.agent_link import KeptRank
from megatron_port.run.launchers import attempt_name
from megatron_port.run.local_ranks import process_info
from megatron_port.run.peer_failure import explain_peer_failure
from megatron_port.run.processes import end_connections
from megatron_port.run.rendezvous import abort_collectives
from megatron_port.run.run_files import FAILURES, record_failure


def train_kept(config: RunConfig, info: ProcessInfo, kept: KeptRank) -> TrainingResult:
    """Train on one rank, as often as the agent starts this rank.

    Raises:
        PortError, Exception: of the last start, where the agent starts no other.
    """
    kept.link.leave = leave_collectives
    # The library's own watchdog would end a process that waits for a lost peer; here the agent tells it to leave.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    while True:
        try:
            return run_training(config, info, kept=kept)
        except BrokenPipeError:
            raise
        except Exception as error:
            failure, victim = _judged(error, config, info, kept)
        # The traceback is gone, and with it the engine and the groups of this start: their connections close, and the
        # ranks that wait for this one leave their step too.
        gc.collect()
        block_signals()  # they are obeyed when this rank trains again, and can save
        following = kept.link.lost(str(failure), victim=victim, step=kept.step, damaged_from=kept.damaged_from,
                                   keeps=isinstance(failure, CopiesNotSaved))
        if following is None:
            if not kept.link.replaced:
                record_failure(run_folder(config), attempt_name(), info.rank, failure, lost_peer=victim)
            raise failure
        meeting, kept.recovery = following
        info = process_info(meeting, info.local_rank)


def _judged(error: Exception, config: RunConfig, info: ProcessInfo, kept: KeptRank) -> tuple[PortError, bool]:
    """Return the error to raise if the run ends, without its traceback, and whether another rank is the cause."""
    lost = explain_peer_failure(error, info)
    if lost is not None:
        return _without_traceback(lost), True
    if not isinstance(error, PortError):
        name = f"traceback-{attempt_name()}-rank-{info.rank:05d}.txt"
        return _without_traceback(unexpected(error, run_folder(config) / FAILURES, name)), False
    environment = isinstance(error, EnvironmentFault) and kept.begun and not isinstance(error, CopiesNotSaved)
    others_state = isinstance(error, StateDamaged) and kept.damaged_from < 0
    return _without_traceback(error), environment or others_state


def _without_traceback(error: PortError) -> PortError:
    """Return a copy of the error, which has neither its traceback nor its causes."""
    return copy.copy(error)


def leave_collectives(lost: Sequence[str] = ()) -> None:
    """Have this rank leave the collectives in which it waits, from any thread.

    NCCL's communicators are aborted. gloo has nothing to abort: its ranks leave when a peer's connections close. Those
    to nodes that are lost, which can close none, are closed here. ``lost``: addresses of such nodes.
    """
    if lost:
        end_connections(lost)
    abort_collectives()
