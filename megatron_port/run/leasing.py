"""The lease of a run's folder: rank 0 takes it before anything there is touched, and every rank learns its epoch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from megatron_port.core.checkpoint.shard import disk_error
from megatron_port.core.checkpoint.writer import Committer, remove_leftovers
from megatron_port.core.dist.agree import agreed, broadcast_text
from megatron_port.core.dist.rank import Fence
from megatron_port.core.errors import PortError
from megatron_port.core.train.folders import FOLDER, run_folder
from megatron_port.core.train.hooks import Session
from megatron_port.run.lease import Lease, acquire, refuse_array_in_one_folder

if TYPE_CHECKING:
    from megatron_port.run.direct_start import DirectStart


@contextmanager
def leased_session(session: Session) -> Iterator[Session]:
    """Yield the session while this attempt holds the lease of the run's folder. Collective.

    Temporaries of attempts before this one are removed, so that none of them can be committed any more.

    Raises:
        FolderInUse: on every rank (as ConfigError): another attempt runs in the folder; nothing of it was touched.
        ConfigError: tasks of a job array would share the folder.
        EnvironmentFault: the folder cannot be written.
    """
    lease: Lease | None = None
    direct: DirectStart | None = None
    error: BaseException | None = None
    try:
        lease = agreed(lambda: _take(session) if session.is_rank_zero else None)
        if lease is not None:
            direct = _note_start(session, lease)
        told = json.dumps([lease.epoch, lease.attempt]) if lease is not None else None
        epoch, attempt = json.loads(broadcast_text(told) or "[0, \"\"]")
        yield replace(session, fence=lease or Fence(epoch, attempt))
    except BaseException as raised:
        error = raised
        raise
    finally:
        if direct is not None:
            direct.end(error)
        if lease is not None:
            lease.release()


def _note_start(session: Session, lease: Lease) -> DirectStart | None:
    """Write the launch record of a run that no job script started. A disk that refuses it does not end the run."""
    from megatron_port.run.direct_start import note_start  # rank 0 alone
    from megatron_port.run.launch_record import RecordFault

    try:
        direct = note_start(run_folder(session.config), session.config, session.info, lease.holder)
    except (OSError, RecordFault) as fault:
        session.logger.log(f"note: no launch record of this start ({fault}); `launch status` will not show its state")
        return None
    if direct is not None:
        lease.each_beat = direct.look
    return direct


def _take(session: Session) -> Lease:
    folder, log = run_folder(session.config), session.logger.log
    refuse_array_in_one_folder(folder)
    lease = acquire(folder, silence_seconds=session.config.checkpoint.lease_seconds, note=log)
    if lease.taken_from:
        log(lease.taken_from)
    try:
        if (folder / FOLDER).is_dir():
            remove_leftovers(folder / FOLDER, Committer(lease))
    except OSError as error:
        lease.release()
        raise disk_error(error, folder / FOLDER) from error
    except PortError:
        lease.release()
        raise
    return lease
