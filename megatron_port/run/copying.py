"""Copies of the state in the nodes' memory while a run trains, and what a start does that was resumed from one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_port.core.checkpoint.format import Lineage, SavedState, plain, read_manifest, step_of
from megatron_port.core.dist.agree import agree, agreed, broadcast_text
from megatron_port.core.dist.process import SAVE
from megatron_port.core.errors import CheckpointError, EnvironmentFault, PeerLost
from megatron_port.core.train.hooks import Ending, LoopHook, LoopState, TakenStep, every
from megatron_port.ext.storage.copies import (
    SLOTS,
    StateCopies,
    copies_folder,
    described,
    own_folder,
    remove_copies,
    whole_copies,
)
from megatron_port.run.agent_link import KeptRank, Restart
from megatron_port.run.hooks import PeriodicSave, position
from megatron_port.run.provenance import record_event
from megatron_port.run.state import MOVING, saved_records, state_of

if TYPE_CHECKING:
    from megatron_port.ext.storage.disk_copies import DiskCopies
    from megatron_port.ext.storage.partner_copies import Partner


class StateCopying(LoopHook):
    """Copy the state into the node's memory every ``checkpoint.memory_interval`` steps, and some copies to its disk.

    The last hook but the closing one: what else is due at a step is done before its copy, so it is done again where a
    fault comes in between.
    """

    def __init__(self, state: LoopState, saves: PeriodicSave, kept: KeptRank | None) -> None:
        super().__init__(state)
        self._saves, self._kept = saves, kept
        self._copies: StateCopies | None = None
        self._partner: Partner | None = None
        self._disk: DiskCopies | None = None
        self._first: SavedState | None = None
        self._described: dict[str, Any] = {}

    def begin(self, *, again: bool = False) -> None:
        """Tell the agent that this rank is back; save what a fault kept from being saved."""
        state, step = self.state, self.state.progress.step
        if again:
            return
        ctx, folder, fence = state.ctx, copies_folder(state.config), state.session.fence
        if state.config.checkpoint.memory_interval:
            run = broadcast_text(fence.run if state.session.is_rank_zero else None) or ""
            self._partner, self._disk = self._sender(folder), self._writer(run)
            self._copies = StateCopies(folder, rank=ctx.rank, world=ctx.topology.world_size, run=run, epoch=fence.epoch,
                                       spare=self._resumed_from(folder), partner=self._partner, disk=self._disk)
        if self._kept is not None:
            if self._kept.recovery is not None:
                self._save_what_was_lost()
            self._kept.step, self._kept.begun = step, True
            self._kept.link.running(step, fence.epoch)
            self._tell(self._kept.recovery, self._kept.met_at, step)

    def _sender(self, folder: Path) -> Partner | None:
        """Return what sends this rank's copies to the next node; None: there is one node. Collective.

        Raises:
            EnvironmentFault: no agent would bring a lost node's copies back.
        """
        info, store = self.state.session.info, self.state.session.store
        if info.num_nodes == 1 or store is None:
            return None
        if self._kept is None:
            raise EnvironmentFault(
                f"checkpoint.memory_interval is {self.state.config.checkpoint.memory_interval}, and the run has "
                f"{info.num_nodes} nodes without an agent: copies in memory would be lost with a node; set "
                'launch.when_lost = "replace", or memory_interval = 0'
            )
        from megatron_port.ext.storage.partner_copies import Partner  # runs of one node need none

        # A run of several nodes was resumed from a checkpoint: of the copies there, or a newer one.
        agreed(lambda: own_folder(folder, fresh=True) if info.local_rank == 0 else None)
        return Partner(folder, store, rank=info.rank, world=info.world_size, step=info.local_world_size,
                       master=info.master_addr)

    def _writer(self, run: str) -> DiskCopies | None:
        """Return what writes this rank's copies to the node's disk; None: nothing does, or a disk refuses. Collective.

        ``run``: its id.
        """
        if not self.state.config.checkpoint.disk_interval:
            return None
        from megatron_port.ext.storage.disk_copies import DiskCopies, file_system  # few runs write them

        folder, session, spare = copies_folder(self.state.config, "disk"), self.state.session, None
        try:
            if self._partner is not None:  # as in memory, see _sender
                agreed(lambda: own_folder(folder, fresh=True, tier="disk") if session.info.local_rank == 0 else None)
            else:
                spare = self._kept_on_disk(folder, run)
            disk = agreed(lambda: DiskCopies(folder, rank=session.info.rank, spare=spare,
                                             interval=self.state.config.checkpoint.disk_interval))
        except PeerLost:
            raise
        except (CheckpointError, EnvironmentFault) as error:
            session.logger.log(f"{error}\ntraining continues without copies on the nodes' disks")
            return None
        kind = file_system(folder)
        if kind in ("tmpfs", "ramfs"):
            session.logger.log(f"{folder} is in memory ({kind}), not on a disk: what takes the copies in memory takes "
                               "these; set checkpoint.disk_folder to a folder on a disk of each node")
        return disk

    def _kept_on_disk(self, folder: Path, run: str) -> int | None:
        """Return which of the two copies on the disk stays until there is another; None: neither. Collective.

        What the run was resumed from; else the newest that is not later: memory that it was resumed from may go.
        """
        resumed = self._resumed_from(folder)
        if resumed is not None:
            return resumed
        found = whole_copies(self.state.session, run, self.state.progress.step + 1, "disk", read=False)
        return found[0][1] if found else None

    def _resumed_from(self, folder: Path) -> int | None:
        """Return which of the two copies the run has been resumed from; None: neither."""
        for path in self.state.checkpoints:
            if path.parent == folder and read_manifest(path).state.step == self.state.progress.step:
                return SLOTS.index(path.name)
        return None

    def _save_what_was_lost(self) -> None:
        """Save now if the last save that was due has not been committed: the fault may have struck in its midst."""
        interval, step = self.state.config.checkpoint.save_interval, self.state.progress.step
        saved = max((step_of(path.name) or 0 for path in self.state.checkpoints), default=0)
        if interval and step - step % interval > saved and step < self.state.config.training.steps:
            self._saves.act()

    def _tell(self, recovery: Restart | None, met_at: float, step: int) -> None:
        if recovery is None:
            return
        seconds = time.time() - recovery.lost_at
        self.state.session.logger.log(
            f"recovered: {recovery.why}; training continues at step {step}, {seconds:.1f} s after the loss was seen"
        )
        record_event(self.state.session, "recovery", step, message=recovery.why, number=recovery.number,
                     seconds=round(seconds, 3), met_seconds=round(met_at - recovery.lost_at, 3),
                     repeated=max(0, recovery.step - step))

    def after_step(self, taken: TakenStep) -> None:
        """Note the step."""
        if self._kept is not None:
            self._kept.step = taken.step

    def due(self, step: int) -> bool:
        """Return whether a copy is due."""
        return every(self.state.config.checkpoint.memory_interval, step)

    def act(self) -> None:
        """Copy this rank's state. Raises CheckpointError where the memory is not there."""
        state, copies = self.state, self._copies
        assert copies is not None
        with state.session.progress.enter(SAVE, "copy in memory"):
            if self._partner is not None:
                agree(self._partner.finish(), group=state.session.cpu_group)
            if self._disk is not None and self._disk.due(state.progress.step):
                self._finish_disk(self._disk)
            copies.take(state.engine.state_pieces(), state.progress.step, self._about())

    def _finish_disk(self, disk: DiskCopies) -> None:
        """Wait until the last copy is on every node's disk. What a disk refuses costs a line, not the run."""
        try:
            agree(disk.finish(), group=self.state.session.cpu_group)
        except CheckpointError as error:
            self.state.session.logger.log(f"{error}\ntraining continues; the copy before it stays on the disks")
        else:
            disk.keep()

    def _about(self) -> dict[str, Any]:
        """Return what rank 0's list says of the run. What does not change is worked out for the first copy alone."""
        state, fence, parent = self.state, self.state.session.fence, self.state.committer.parent
        if not state.session.is_rank_zero:
            return {}
        lineage = Lineage(run=fence.run, commit=parent.commit if parent is not None else 0, epoch=fence.epoch,
                          attempt=fence.attempt, parent=parent)
        if self._first is None:
            self._first = state_of(state.engine, state.config, position(state), saved_records(state.config))
            self._described = described(self._first, lineage)
            return self._described
        now = state_of(state.engine, state.config, position(state), before=self._first)
        moved = {name: plain(getattr(now, name)) for name in MOVING}
        return {"state": {**self._described["state"], **moved}, "lineage": lineage.body()}

    def before_rewind(self) -> None:
        """Drop the copies: they are of steps that will be taken again."""
        if self._partner is not None:
            agree(self._partner.finish(), group=self.state.session.cpu_group)
            self._partner.forget()
        if self._disk is not None:
            self._finish_disk(self._disk)
            agreed(self._disk.forget)
        if self._copies is not None:
            self._copies.forget()

    def close(self, ending: Ending | None) -> None:
        """Drop a copy that may hold what damaged this rank's state, between the last update and the one before.

        A copy of an earlier step was taken ahead of a check that found the state as the update had left it.
        """
        if self._partner is not None:
            self._partner.close()
        if self._disk is not None:
            self._disk.close()
        if ending is not None:
            return
        damaged, copies = self.state.damage is not None, self._copies
        if self._kept is not None:
            self._kept.damaged_from = self.state.progress.step - 1 if damaged else -1
        last = copies.last_step if copies is not None else None
        if damaged and copies is not None and last is not None and last >= self.state.progress.step - 1:
            copies.forget(newest_alone=True)
            if self._disk is not None:
                self._disk.forget(last)

    def finish(self, ending: Ending) -> None:
        """Free the memory where no agent does when all ranks have ended."""
        if self._kept is None:
            remove_copies(self.state.config)
