"""The training loop: steps, until done or told to stop. What else a run does hangs on it as hooks (``train.hooks``).

Read it top to bottom; then ``train.hooks``, what a hook may do, and ``run.trainer``, the list of a run's.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass

from megatron_port.core.dist.process import DATA, StopRequest
from megatron_port.core.errors import NumericsError
from megatron_port.core.optim.schedules import learning_rate
from megatron_port.core.train.agreement import agreed_level
from megatron_port.core.train.hooks import Ending, LoopState, Progress, TakenStep


@dataclass(frozen=True)
class TrainingResult:
    """Result of a run: its counters, its exit code, its last validation loss."""

    progress: Progress
    exit_code: int
    validation_loss: float | None


class Loop:
    """Training loop of one rank, from where ``state.progress`` stands."""

    def __init__(self, state: LoopState) -> None:
        self.state, self.hooks = state, state.hooks

    def run(self) -> TrainingResult:
        """Train to ``training.steps``; on a signal save and return early."""
        state, p = self.state, self.state.progress
        ending: Ending | None = None
        with ExitStack() as closing:
            for hook in reversed(self.hooks):  # they are closed in the order of the list, whatever one of them raises
                closing.push(lambda kind, error, trace, hook=hook: hook.close(ending if error is None else None))
            for hook in self.hooks:
                hook.begin()
            with StopRequest() as stop:
                level = agreed_level(state, stop.level)  # a signal may have come while the run started
                if not level and p.step == 0:
                    self._act()
                while p.step < state.config.training.steps and not level:
                    self._step()
                    level = agreed_level(state, stop.level)
                    self._act()
                stopped = bool(level) and p.step < state.config.training.steps
                end = Ending(level, stopped, stop.signal_name)
                for hook in self.hooks:
                    hook.finish(end)
            ending = end
        return TrainingResult(p, end.exit_code, state.validation_loss)

    def _act(self) -> None:
        """Let the hooks act that are due."""
        step = self.state.progress.step
        for hook in self.hooks:
            if hook.due(step):
                hook.act()
            if self.state.progress.step != step:
                return  # rewound: the other hooks are asked when the run is at this step again

    def _step(self) -> None:
        """Take a step, within the contexts of the hooks, and let them look at it."""
        with ExitStack() as around:
            for hook in self.hooks:
                around.enter_context(hook.around_step(self.state.progress.step + 1))
            taken = self._take()
            for hook in self.hooks:
                hook.after_step(taken)

    def _take(self) -> TakenStep:
        """Take one optimizer step and count it."""
        state, c, p = self.state, self.state.config, self.state.progress
        started = time.perf_counter()
        begins, size = state.batches.step_plan(p.step)
        if begins != p.samples:
            raise NumericsError(
                f"step {p.step} should begin at sample {begins}, but {p.samples} were consumed; the batch sizes of "
                "this run differ from those of the checkpoint"
            )
        lr = learning_rate(c.optimizer, p.step, c.training.steps)
        # Position in the data's order, of which samples are left out after anomalies; p.samples does not count those.
        first, limits = state.numerics.position(begins), state.numerics.limits()
        activity = state.session.progress  # what the watch sees this rank do
        activity.begin_step(p.step)
        activity.at(DATA, "samples from", first)
        micro_batches = state.loaders.train.step(first, size)
        for hook in self.hooks:
            hook.before_step(p.step, micro_batches)
        result = state.engine.train_step(micro_batches, step=p.step, lr=lr, limits=limits)
        for hook in self.hooks:
            hook.after_train_step()
        activity.end_step()
        seconds = time.perf_counter() - started
        p.step += 1
        p.samples += size
        p.skipped += result.skipped
        reason = state.numerics.judge(result, limits)
        too_many = state.numerics.count_anomaly(p.step) if reason else False
        return TakenStep(p.step, result, micro_batches, first, size, lr, limits, seconds, reason, too_many)
