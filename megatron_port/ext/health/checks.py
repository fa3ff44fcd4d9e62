"""Checks of a run's devices every so many steps: equal copies of weights, and equal results on another replica."""

from __future__ import annotations

from megatron_port.core.dist.process import EVALUATE
from megatron_port.core.train.hooks import LoopHook, LoopState, every
from megatron_port.ext.health.replay import check_replay_settings, replay_on_neighbour
from megatron_port.ext.health.replicas import check_replicas


class ReplicaCheck(LoopHook):
    """Compare the copies of weights every ``telemetry.replica_check_interval`` steps."""

    def due(self, step: int) -> bool:
        """Return whether an interval ends."""
        return every(self.state.config.telemetry.replica_check_interval, step)

    def act(self) -> None:
        """Raise NumericsError on every rank where copies differ."""
        check_replicas(self.state.engine, self.state.ctx, step=self.state.progress.step)


class ReplayCheck(LoopHook):
    """Compute a micro-batch on another replica too, every ``numerics.replay_interval`` steps.

    Raises:
        ConfigError: sound devices may give other bits with these settings.
    """

    def __init__(self, state: LoopState) -> None:
        super().__init__(state)
        check_replay_settings(state.config, state.session)

    def due(self, step: int) -> bool:
        """Return whether an interval ends."""
        return every(self.state.config.numerics.replay_interval, step)

    def act(self) -> None:
        """Compute a micro-batch of the last step again. Raises NumericsError on every rank where results differ."""
        state = self.state
        first, _ = state.batches.step_plan(state.progress.step - 1)
        with state.session.progress.enter(EVALUATE, "replay on another replica"):
            replay_on_neighbour(
                state.engine, state.session, state.loaders.train, first_sample=state.numerics.position(first),
                step=state.progress.step,
            )
