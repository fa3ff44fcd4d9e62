"""What follows a step that cannot be trusted: it is replayed and explained, and may end the run."""

from __future__ import annotations

from megatron_port.core.dist.process import EVALUATE
from megatron_port.core.errors import NumericsError
from megatron_port.core.train.agreement import stop_if_damaged
from megatron_port.core.train.folders import run_folder
from megatron_port.core.train.hooks import LoopHook, TakenStep
from megatron_port.run.provenance import record_event


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
    """Explain an anomaly, and end the run where ``numerics`` asks for that. ``health.rewind`` takes the step back."""

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
