"""Return to the newest checkpoint of a run after an anomaly (``numerics.on_anomaly = "rewind"``)."""

from __future__ import annotations

from dataclasses import replace

from megatron_port.core.dist.process import START
from megatron_port.core.errors import NumericsError
from megatron_port.core.train.hooks import Anomaly, LoopHook, LoopState, TakenStep
from megatron_port.ext.health.anomaly import REPRODUCIBLE
from megatron_port.run.loading import load_first_whole, take_counters
from megatron_port.run.provenance import record_event
from megatron_port.run.state import find_checkpoints


class Rewind(LoopHook):
    """Take back a step that recovery has explained, once the ranks have agreed to continue."""

    def __init__(self, state: LoopState) -> None:
        super().__init__(state)
        self._anomaly: Anomaly | None = None

    def after_step(self, taken: TakenStep) -> None:
        """Note an anomaly."""
        self._anomaly = taken.anomaly

    def due(self, step: int) -> bool:
        """Return whether the last step is to be taken back."""
        return self._anomaly is not None

    def act(self) -> None:
        """Return to the newest checkpoint of this run; samples that caused the anomaly twice are left out from now on.

        Raises:
            NumericsError: on every rank: there is no checkpoint.
        """
        anomaly, self._anomaly = self._anomaly, None
        assert anomaly is not None
        with self.state.session.progress.enter(START, "rewind"):  # it may take as long as loading
            for hook in self.state.hooks:
                hook.before_rewind()
            self._rewind(anomaly)
            for hook in self.state.hooks:
                hook.begin(again=True)

    def _rewind(self, anomaly: Anomaly) -> None:
        state, session = self.state, self.state.session
        automatic = replace(state.config, checkpoint=replace(state.config.checkpoint, resume="auto"))
        found = find_checkpoints(replace(session, config=automatic))
        if not found:
            raise NumericsError(
                f"{anomaly.summary}. There is no checkpoint to rewind to yet; set checkpoint.save_interval below "
                f"{anomaly.step}, or numerics.on_anomaly = \"skip\""
            )
        loaded = load_first_whole(state.engine, found, session)
        take_counters(state, loaded, medians_only=True)
        loaded.close()
        left = ""
        if anomaly.verdict == REPRODUCIBLE:
            state.numerics.leave_out(anomaly.first, anomaly.count)
            left = f"; samples {anomaly.first} to {anomaly.first + anomaly.count - 1} are left out"
        session.logger.log(f"rewound to {loaded.path} at step {state.progress.step}{left}")
        record_event(session, "rewind", state.progress.step, reason=anomaly.summary)
