"""Hooks that every run has: what follows a step that cannot be trusted, when to save, what a run leaves at its end."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_port.core.checkpoint.writer import Committer, peers_of
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.dist.agree import agreed
from megatron_port.core.dist.process import EVALUATE, SAVE, block_signals
from megatron_port.core.engine.api import Engine
from megatron_port.core.errors import CheckpointError, NumericsError
from megatron_port.core.optim.schedules import learning_rate
from megatron_port.core.train.agreement import check_lease, stop_if_damaged
from megatron_port.core.train.folders import FOLDER, run_folder
from megatron_port.core.train.hooks import Ending, LoopHook, LoopState, Session, TakenStep, every
from megatron_port.ext.telemetry.flops import attention_counted
from megatron_port.ext.telemetry.reporting import Reporting
from megatron_port.run.launchers import attempt_name
from megatron_port.run.provenance import read_identity, record_event
from megatron_port.run.run_files import FINISHED, SAVED, AttemptOutcome, write_outcome
from megatron_port.run.state import Position, save_state, saved_records, shapes_of, state_of

if TYPE_CHECKING:
    from megatron_port.ext.storage.background import BackgroundSave, Finished
    from megatron_port.ext.storage.mirror import Mirror


# What follows a step that cannot be trusted: it is replayed and explained, and may end the run.
class DamageCheck(LoopHook):
    """Check that nothing but updates changed this rank's state: after each step, and before a save.

    After a step it only notes what it finds; the ranks learn of it when they agree to continue.
    """

    def after_step(self, taken: TakenStep) -> None:
        """Note the damage that the engine found between the last two updates."""
        self.state.damage = self.state.engine.state_damage()

    def before_save(self) -> None:
        """Check the state as it is: a damaged one must not become the newest checkpoint."""
        self.state.damage = self.state.engine.state_damage(now=True)
        stop_if_damaged(self.state)


class Recovery(LoopHook):
    """Explain an anomaly, and end the run where ``numerics`` asks for that. ``run.rewind`` takes the step back."""

    def after_step(self, taken: TakenStep) -> None:
        """Take a good step into the medians; replay another. Raises NumericsError where the run must end."""
        if not taken.reason:
            self.state.numerics.accept(taken.result)
            return
        stop_if_damaged(self.state)  # what a flipped bit did must not be taken for the data's fault
        self._investigate(taken)
        if taken.too_many or self.state.config.numerics.on_anomaly == "stop":
            raise self._error(taken)

    def _investigate(self, taken: TakenStep) -> None:
        from megatron_port.ext.health.anomaly import investigate  # most runs meet none

        state = self.state
        with state.session.progress.enter(EVALUATE, "replay of a step"):
            taken.anomaly = investigate(
                state.engine, state.session, taken.micro_batches, taken.result, step=taken.step - 1, lr=taken.lr,
                limits=taken.limits, reason=taken.reason, first=taken.first, count=taken.size,
                run_folder=run_folder(state.config),
            )
        state.session.logger.log(taken.anomaly.summary)
        record_event(state.session, "anomaly", taken.step, reason=taken.anomaly.summary)

    def _error(self, taken: TakenStep) -> NumericsError:
        """Return why the run ends here."""
        assert taken.anomaly is not None
        numerics, why = self.state.numerics, ""
        if taken.too_many:
            why = f"; {len(numerics.anomaly_steps)} anomalies within 1,000 steps (numerics.max_anomalies)"
        if numerics.steps_in_a_row > 2:
            why += f", {numerics.steps_in_a_row} in a row on other samples each: suspect the weights, not the data"
        return NumericsError(
            f"{taken.anomaly.summary}{why}. Samples {taken.first} to {taken.first + taken.size - 1}; see "
            f"{run_folder(self.state.config)}/anomaly-{taken.step}.json. Lower optimizer.lr, check the data, leave the "
            "host out, or resume before this step"
        )


# When to save, and what follows a save that fails: training continues, the next interval tries again.
#
# A save that was begun is waited for in three places only: before the next one begins (saves then take longer than
# their interval, and a line is printed), at the end of the run, and when a signal stops it. The save at the end is
# synchronous, and its failure is the run's.

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
                f"{checkpoint.mirror.rstrip('/')}/{session.config.name}", session.info.rank, session.info.world_size,
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

    def resumed(self, checkpoints: Sequence[Path]) -> None:
        """Copy the newest checkpoint of the run to ``checkpoint.mirror``, unless the start before this one has.

        A fault may strike before it has, and one made of copies in memory was not saved by any. ``checkpoints``:
        what the run may start from, best first.
        """
        own = [path for path in checkpoints if path.parent == run_folder(self._session.config) / FOLDER]
        if self._mirror is not None and own:
            self._mirror.add(own[0])

    def leave(self, seconds: float) -> None:
        """Give a save that is nearly done this long to end when an error ends the run. Not collective."""
        if self._background is not None:
            self._background.abandon(seconds)
        if self._mirror is not None:
            self._mirror.abandon()

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
        patience: seconds that a save which is nearly done is given after an error.
    """

    def __init__(self, state: LoopState, patience: float = 5.0) -> None:
        super().__init__(state)
        self.saving: Saving | None = None
        self.patience = patience

    def begin(self, *, again: bool = False) -> None:
        """Start from the step that is safe already."""
        state, step = self.state, self.state.progress.step
        if self.saving is None:
            self.saving = Saving(state.engine, state.session, saved_step=step, committer=state.committer)
            self.saving.resumed(state.checkpoints)
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
            self.saving.leave(self.patience)


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
            self.saving.save(position(self.state))

    def finish(self, ending: Ending) -> None:
        """Wait for the save in flight, and make the last one."""
        with self.state.session.progress.enter(SAVE, "checkpoint"):
            self.saving.finish()
            check_lease(self.state)
            if self.state.config.checkpoint.save_final or ending.stopped:
                self._ask_hooks()
                self.saving.final(position(self.state))

    def close(self, ending: Ending | None) -> None:
        """Wait for copies in a store, unless an error or a signal ends the run."""
        if ending is not None and not ending.stopped:
            self.saving.await_copies()

    def _ask_hooks(self) -> None:
        for hook in self.state.hooks:
            hook.before_save()


def position(state: LoopState) -> Position:
    """Return where a run stands, for a checkpoint."""
    p = state.progress
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


# End of a run: its outcome, committed for the job script, and lines that say how far and how fast it went.

class Closing(LoopHook):
    """Commit how the run ended, and print how far it came."""

    def __init__(self, state: LoopState, reporting: Reporting) -> None:
        super().__init__(state)
        self._reporting = reporting
        self._begun_at = 0

    def begin(self, *, again: bool = False) -> None:
        """Note the step at which this start begins."""
        if not again:
            self._begun_at = self.state.progress.step

    def finish(self, ending: Ending) -> None:
        """Commit the outcome, on rank 0. Raises LeaseLost on every rank if the folder is another attempt's."""
        block_signals()  # what comes now comes too late to matter, and must not kill a rank that has saved
        check_lease(self.state)
        if not self.state.session.is_rank_zero:
            return
        status, step, name = SAVED if ending.stopped else FINISHED, self.state.progress.step, ending.signal_name
        record_event(self.state.session, status, step, **({"signal": name} if name else {}))
        outcome = AttemptOutcome(attempt_name(), status, step, name, time.time())
        write_outcome(run_folder(self.state.config), outcome)

    def close(self, ending: Ending | None) -> None:
        """Print how far the run came and how fast it was; after an error nothing."""
        if ending is None:
            return
        c, step, log = self.state.config, self.state.progress.step, self.state.session.logger.log
        if ending.stopped:
            log(f"stopped by {ending.local_signal or 'another rank'} after step {step}")
        else:
            log(finished_line(c, step, self._begun_at))
        if self._reporting.rates:
            log(closing_lines(c, list(self._reporting.rates), self._reporting.document))


def closing_lines(config: RunConfig, rates: list[tuple[float, float]], document: float = 0.0) -> str:
    """Return the speed of this attempt, as hardware and as model FLOPs, beside what was published.

    ``rates``: (hardware, model) TFLOP/s per device of each step. The median without the first step, which warms up.
    """
    later = rates[1:] or rates
    hardware, model = statistics.median(r[0] for r in later), statistics.median(r[1] for r in later)
    peak = config.cluster.peak_tflops

    def share(rate: float, name: str) -> str:
        return f" ({name} {100 * rate / peak:.2f} %)" if peak else ""

    lines = [
        f"TFLOP/s per {config.cluster.device_label}, median of {len(later)} step{'s' if len(later) > 1 else ''}: "
        f"hardware {hardware:.4g}{share(hardware, 'HFU')}, model {model:.4g}{share(model, 'MFU')}; "
        f"{attention_counted(config.model, document)}"
    ]
    published = config.telemetry.published_tflops
    if published:
        source = f", {config.telemetry.published_source}" if config.telemetry.published_source else ""
        lines.append(
            f"published: hardware {published:.4g}{share(published, 'HFU')}{source}; "
            f"this run reached {hardware / published:.4g} of it"
        )
    return "\n".join(lines)


def finished_line(config: RunConfig, step: int, begun_at: int) -> str:
    """Return a line on a run that has reached ``training.steps``; ``begun_at``: the step at which this start began."""
    further = f"to train further: --set training.steps={2 * max(step, 1)}"
    if not learning_rate(config.optimizer, step, 2 * max(step, 1)):  # the schedule has ended at 0
        further += f" --set optimizer.decay_steps={2 * max(step, 1)}"
    if begun_at >= step:
        return (f"nothing to do: {run_folder(config)} finished at step {step} of {config.training.steps} before this "
                f"start; {further}")
    return f"finished: step {step} of {config.training.steps}, in {run_folder(config)}; {further}"
