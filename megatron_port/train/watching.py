"""The watch of a run, put together from a session."""

from __future__ import annotations

from contextlib import AbstractContextManager

from megatron_port.runtime.peers import explain_peer_failure
from megatron_port.train.session import Session
from megatron_port.train.state import run_folder
from megatron_port.watch.client import watched


def watched_session(session: Session) -> AbstractContextManager[None]:
    """Heartbeats of this rank while the body runs, as ``[watch]`` says; see ``watch.client.watched``."""
    place = session.ctx.coords

    def note(line: str) -> None:
        if session.info.local_rank == 0:  # one word a node
            session.logger.log_any(line)

    return watched(
        session.config.watch, session.info, session.pulse, coords=str(place),
        stage=place.pp, folder=run_folder(session.config), store=session.store, note=note,
        victim_of=lambda error: explain_peer_failure(error, session.info),
    )
