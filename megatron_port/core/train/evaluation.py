"""Evaluations of a run: the validation loss before the first step, each interval, and after the last step."""

from __future__ import annotations

import time
from collections.abc import Callable

from megatron_port.core.dist.process import EVALUATE
from megatron_port.core.engine.api import EvalResult
from megatron_port.core.train.hooks import LoopHook, LoopState, every


class Evaluation(LoopHook):
    """Evaluate on the first ``training.eval_batches`` global batches of the validation split."""

    def __init__(self, state: LoopState, report: Callable[[float, float], None]) -> None:
        """``report`` takes the loss and the seconds that it took."""
        super().__init__(state)
        self._report = report

    def due(self, step: int) -> bool:
        """Return whether the run begins, an interval ends, or the last step was taken."""
        training = self.state.config.training
        ends = step in (0, training.steps) and training.eval_batches > 0
        return ends or every(training.eval_interval, step)

    def act(self) -> None:
        """Evaluate and report. Collective."""
        state, c = self.state, self.state.config
        started = time.perf_counter()
        total = EvalResult(0.0, 0)
        with state.session.progress.enter(EVALUATE), state.engine.evaluated_weights():
            for batch in state.loaders.eval_batches("valid", c.training.eval_batches, c.batch.global_batch_size):
                result = state.engine.eval_step(batch)
                total = EvalResult(total.loss_sum + result.loss_sum, total.tokens + result.tokens)
        state.validation_loss = total.loss
        self._report(total.loss, time.perf_counter() - started)
