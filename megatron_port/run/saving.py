"""When to save, and what follows a save that fails: training continues, the next interval tries again.

A save that was begun is waited for in three places only: before the next one begins (saves then take longer than
their interval, and a line is printed), at the end of the run, and when a signal stops it. The save at the end is
synchronous, and its failure is the run's.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_port.core.checkpoint.lineage import Committer
from megatron_port.core.checkpoint.writer import peers_of
from megatron_port.core.dist.agree import agreed
from megatron_port.core.dist.process import SAVE
from megatron_port.core.engine.api import Engine
from megatron_port.core.errors import CheckpointError
from megatron_port.core.train.agreement import check_lease
from megatron_port.core.train.folders import FOLDER, run_folder
from megatron_port.core.train.hooks import Ending, LoopHook, LoopState, Session, every
from megatron_port.run.identity import read_identity
from megatron_port.run.state import Position, save_state, saved_records, shapes_of, state_of

if TYPE_CHECKING:
    from megatron_port.ext.storage.background import BackgroundSave, Finished
    from megatron_port.ext.storage.mirror import Mirror

_NOTICEABLE = 0.5
"""Seconds of waiting for the previous save that are worth a line."""


class Saving:
    """Saves of a run. All methods but ``leave`` are collective; the ranks decide alike.

    Args:
        saved_step: the step that is safe already (the one resumed from, or 0).
        committer: of the run.
    """

    def __init__(
        self, engine: Engine, session: Session, *, saved_step: int = 0, committer: Committer | None = None
    ) -> None:
        self._engine, self._session, self._committer = engine, session, committer or Committer()
        self.saved_step = saved_step
        """Newest step that was committed."""
        self._failures = 0
        self._background: BackgroundSave | None = None
        checkpoint = session.config.checkpoint
        if checkpoint.asynchronous:
            from megatron_port.ext.storage.background import BackgroundSave

            self._background = BackgroundSave(
                peers_of(session.cpu_group), run_folder(session.config) / FOLDER,
                keep=checkpoint.keep, verify=checkpoint.verify_saves,
                compare=engine.state_check_interval > 0, note=session.logger.log, committer=self._committer,
            )

        self._mirror: Mirror | None = None
        if checkpoint.mirror:
            from megatron_port.ext.storage.mirror import Mirror

            self._mirror = agreed(lambda: Mirror(
                f"{checkpoint.mirror.rstrip('/')}/{session.config.name}", session.info.rank,
                verify=checkpoint.verify_saves, note=session.logger.log, **_run_ids(session),
            ))

    def save(self, at: Position) -> None:
        """Begin the save of an interval (or make it, if not asynchronous). A failure is announced.

        Raises:
            CheckpointError: the last ``checkpoint.max_failures`` saves have all failed.
        """
        self._wait()
        try:
            if self._background is None:
                self._save_now(at)
            else:
                config = self._session.config
                records = saved_records(config) if self._session.is_rank_zero else None
                self._background.start(
                    state_of(self._engine, config, at, records), self._engine.state_pieces(),
                    expected=shapes_of(records),
                )
        except CheckpointError as error:
            self._failed(at.step, str(error))

    def poll(self) -> None:
        """Take note, at each step's end, of a save that has ended. Raises as :meth:`save` does."""
        if self._background is not None:
            self._settle(self._background.poll())

    def finish(self) -> None:
        """Wait for the save in flight. Raises as :meth:`save` does."""
        if self._background is not None:
            self._settle(self._background.finish())

    def final(self, at: Position) -> None:
        """Make the last save, synchronously; nothing to do if ``at.step`` is safe already.

        Raises:
            CheckpointError: it failed. Earlier checkpoints are untouched.
        """
        self.finish()
        if self.saved_step != at.step:
            self._save_now(at)

    def await_copies(self) -> None:
        """Wait until every checkpoint is copied to ``checkpoint.mirror``, or was given up. Not where a signal stopped
        the run: its grace is short, and the checkpoint is in the run's folder."""
        if self._mirror is not None:
            with self._session.progress.enter(SAVE, "copies in the store"):
                self._mirror.finish()

    def _save_now(self, at: Position) -> None:
        started = time.perf_counter()
        path = save_state(self._engine, self._session, at, self._committer)
        self._done(at.step, path, f"saved {path} in {time.perf_counter() - started:.1f} s")

    def leave(self, seconds: float = 5.0) -> None:
        """Give a save that is nearly done this long to end when an error ends the run. Not collective."""
        if self._background is not None:
            self._background.abandon(seconds)

    def _wait(self) -> None:
        if self._background is None or self._background.in_flight is None:
            return
        step, started = self._background.in_flight, time.perf_counter()
        self.finish()
        waited = time.perf_counter() - started
        if waited > _NOTICEABLE:
            self._session.logger.log(
                f"training waited {waited:.1f} s for the save of step {step}: saving takes longer than "
                f"checkpoint.save_interval = {self._session.config.checkpoint.save_interval} steps"
            )

    def _settle(self, ended: Finished | None) -> None:
        if ended is None:
            return
        if ended.failure is not None:
            self._failed(ended.step, ended.failure)
            return
        self._done(
            ended.step, ended.path, f"saved {ended.path} in {ended.seconds:.1f} s, of which training waited "
            f"{ended.stall_seconds:.2f} s"
        )

    def _done(self, step: int, path: Path, line: str) -> None:
        if self._failures:
            line += f" (after {self._failures} that failed)"
        self.saved_step, self._failures = step, 0
        self._session.logger.log(line)
        if self._mirror is not None:
            self._mirror.add(path)

    def _failed(self, step: int, why: str) -> None:
        self._failures += 1
        checkpoint = self._session.config.checkpoint
        safe = f"step {self.saved_step}" if self.saved_step else "none of this run yet"
        if checkpoint.max_failures and self._failures >= checkpoint.max_failures:
            raise CheckpointError(
                f"step {step} was not saved: {why}\n{self._failures} saves in a row have failed, as many as "
                f"checkpoint.max_failures allows; the last checkpoint is {safe}"
            )
        if self._committer.fence.lost:
            return  # the loop reports it and stops at the end of the step
        allowed = f" of at most {checkpoint.max_failures}" if checkpoint.max_failures else ""
        self._session.logger.log(
            f"step {step} was not saved (failure {self._failures}{allowed} in a row): {why}\n"
            f"training continues, and the next save is tried in {checkpoint.save_interval} steps; the last checkpoint "
            f"is {safe}"
        )


class SaveInFlight(LoopHook):
    """Take note of saves that end in the background.

    Attributes:
        saving: of the run, once it has begun.
    """

    def __init__(self, state: LoopState) -> None:
        super().__init__(state)
        self.saving: Saving | None = None

    def begin(self, *, again: bool = False) -> None:
        """Start from the step that is safe already."""
        state, step = self.state, self.state.progress.step
        if self.saving is None:
            self.saving = Saving(state.engine, state.session, saved_step=step, committer=state.committer)
        self.saving.saved_step = step

    def due(self, step: int) -> bool:
        """Return whether a save may have ended: after each step."""
        return step > 0

    def act(self) -> None:
        """Take note of a save that has ended. Raises CheckpointError as :meth:`Saving.save` does."""
        if self.saving is not None:
            self.saving.poll()

    def before_rewind(self) -> None:
        """Wait for the save in flight: it may be the newest checkpoint."""
        if self.saving is not None:
            self.saving.finish()

    def close(self, ending: Ending | None) -> None:
        """After an error, give a save that is nearly done a moment to end."""
        if ending is None and self.saving is not None:
            self.saving.leave()


class PeriodicSave(LoopHook):
    """Save every ``checkpoint.save_interval`` steps, and at the end."""

    def __init__(self, state: LoopState, in_flight: SaveInFlight) -> None:
        super().__init__(state)
        self._in_flight = in_flight

    @property
    def saving(self) -> Saving:
        """Saves of the run, which has begun."""
        assert self._in_flight.saving is not None
        return self._in_flight.saving

    def due(self, step: int) -> bool:
        """Return whether an interval ends."""
        return every(self.state.config.checkpoint.save_interval, step)

    def act(self) -> None:
        """Begin a save. Raises CheckpointError as :meth:`Saving.save` does."""
        with self.state.session.progress.enter(SAVE, "checkpoint"):
            self._ask_hooks()
            self.saving.save(self._position())

    def finish(self, ending: Ending) -> None:
        """Wait for the save in flight, and make the last one."""
        with self.state.session.progress.enter(SAVE, "checkpoint"):
            self.saving.finish()
            check_lease(self.state)
            if self.state.config.checkpoint.save_final or ending.stopped:
                self._ask_hooks()
                self.saving.final(self._position())

    def close(self, ending: Ending | None) -> None:
        """Wait for copies in a store, unless an error or a signal ends the run."""
        if ending is not None and not ending.stopped:
            self.saving.await_copies()

    def _ask_hooks(self) -> None:
        for hook in self.state.hooks:
            hook.before_save()

    def _position(self) -> Position:
        state, p = self.state, self.state.progress
        return Position(
            step=p.step, samples=p.samples, skipped=p.skipped, tokenizer=state.loaders.tokenizer_name,
            numerics=state.numerics.state(), tokenizer_identity=state.loaders.tokenizer,
            corpora=state.loaders.data_fingerprint, base=state.base, objective=state.learns_from,
        )


def _run_ids(session: Session) -> dict[str, str]:
    """Return, on rank 0, the id of the run and of the one at whose checkpoint it began (``run``, ``origin``)."""
    identity = read_identity(run_folder(session.config)) if session.is_rank_zero else None
    if identity is None:
        return {}
    return {"run": identity.id, "origin": str((identity.origin or {}).get("run", ""))}
