"""The watch of a run, put together from what is known once the ranks have met."""

from __future__ import annotations

from contextlib import AbstractContextManager

from megatron_port.core.config.schema import RunConfig
from megatron_port.core.dist.peer_failure import explain_peer_failure
from megatron_port.core.dist.process import ProgressTracker
from megatron_port.core.dist.rank import ProcessInfo
from megatron_port.core.io.logging import Logger
from megatron_port.core.train.folders import run_folder
from megatron_port.run.build import topology_of
from megatron_port.tools.watch.client import watched
from megatron_port.tools.watch.wire import Store


def watch_ranks(
    config: RunConfig, info: ProcessInfo, progress: ProgressTracker, store: Store
) -> AbstractContextManager[None]:
    """Send heartbeats of this rank while the body runs, as ``[watch]`` configures; see ``watch.client.watched``.

    An ``around`` of ``run.session.open_session``: no group exists yet, so a rank that hangs while they are made is
    seen.
    """
    topology, logger = topology_of(config), Logger(info.rank, info.world_size, info.hostname)
    fits = topology.world_size == info.world_size  # else the session refuses at once
    place = topology.coordinates(info.rank if fits else 0)

    def note(line: str) -> None:
        if info.local_rank == 0:  # one word a node
            logger.log_any(line)

    return watched(
        config.watch, info, progress, coords=str(place), stage=place.pp, folder=run_folder(config), store=store,
        note=note, victim_of=lambda error: explain_peer_failure(error, info),
    )
