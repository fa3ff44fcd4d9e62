"""Learning rate and global batch as pure functions of the step.

Steps count from 0: step 0 is the first update. Nothing here has state, so a
resumed run needs only its step to continue exactly.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable

from megatron_port.core.config.layout import batch_problems
from megatron_port.core.config.schema import BatchConfig, OptimizerConfig
from megatron_port.core.errors import ConfigError
from megatron_port.core.registry import FALLING, LR_SCHEDULES

SHAPES: dict[str, Callable[[float], float]] = {
    "cosine": lambda x: 0.5 * (1.0 + math.cos(math.pi * x)), "linear": lambda x: 1.0 - x,
    "sqrt": lambda x: 1.0 - math.sqrt(x),
}
"""Share of the way from min_lr to lr that is left after a share x of a decay."""


def fall_of(optimizer: OptimizerConfig, total_steps: int) -> tuple[int, int]:
    """Return the steps (first, end) between which the learning rate falls to ``min_lr`` on a curve of :data:`SHAPES`.

    Under ``wsd`` these are the last ``wsd_steps`` before ``end``, by default a fifth of those after the warm-up.
    """
    end = optimizer.decay_steps or total_steps
    if optimizer.decay != "wsd":
        return optimizer.warmup_steps, end
    return end - (optimizer.wsd_steps or max(1, (end - optimizer.warmup_steps) // 5)), end


def falling(optimizer: OptimizerConfig, step: int, total_steps: int) -> float:
    """Return the rate of ``cosine``, ``linear`` and ``wsd``: lr until the fall begins, then a curve to min_lr."""
    first, end = fall_of(optimizer, total_steps)
    if step < first:
        return optimizer.lr
    if step >= end:
        return optimizer.min_lr
    shape = SHAPES[optimizer.wsd_shape if optimizer.decay == "wsd" else optimizer.decay]
    return optimizer.min_lr + (optimizer.lr - optimizer.min_lr) * shape((step - first) / (end - first))


def constant(optimizer: OptimizerConfig, step: int, total_steps: int) -> float:
    """Return lr."""
    return optimizer.lr


def inverse_sqrt(optimizer: OptimizerConfig, step: int, total_steps: int) -> float:
    """Return lr times the root of warmup_steps / step, at least min_lr."""
    return max(optimizer.min_lr, optimizer.lr * math.sqrt(max(optimizer.warmup_steps, 1) / max(step, 1)))


def learning_rate(optimizer: OptimizerConfig, step: int, total_steps: int) -> float:
    """Return the learning rate of update ``step`` (from 0) of a run of ``total_steps``.

    With W = warmup_steps, D = decay_steps or total_steps, and S = W, or D - wsd_steps for ``wsd``::

        step < W         lr * (step + 1) / (W + 1)
        W <= step < S    lr
        S <= step < D    min_lr + (lr - min_lr) * f((step - S) / (D - S))
        step >= D        min_lr

    where f(x) = (1 + cos(pi x)) / 2 for ``cosine``, 1 - x for ``linear`` and 1 - sqrt(x) for ``sqrt``; ``wsd`` has that
    of ``wsd_shape`` (warm-up, stable, decay: Hu et al., arXiv 2404.06395; 1 - sqrt: Haegele et al., arXiv 2405.18392).
    ``constant`` stays at lr after the warm-up. ``inverse_sqrt`` is the larger of min_lr and lr * sqrt(W / step), with
    W at least 1 (Vaswani et al., arXiv 1706.03762). The line of the warm-up would be 0 one step before the first (an
    update with rate 0 would be lost) and meets lr at step W: W updates lie below the peak. A plugin's schedule
    (``registry.LR_SCHEDULES``) is asked from step W on.

    Raises:
        ConfigError: unknown ``decay``, or the decay does not begin after the warm-up and before its end; a plugin's
            schedule cannot be imported, or gives a rate that is none.
    """
    if step < 0:
        raise ValueError(f"step {step} is negative")
    warmup = optimizer.warmup_steps
    if optimizer.decay not in LR_SCHEDULES.names:
        raise ConfigError(f"optimizer.decay is {optimizer.decay!r}; expected {', '.join(LR_SCHEDULES.names)}")
    if optimizer.decay in FALLING and 0 < optimizer.decay_steps <= warmup:
        raise ConfigError(
            f"optimizer.decay_steps {optimizer.decay_steps} must be larger than optimizer.warmup_steps {warmup}"
        )
    if step < warmup:
        return optimizer.lr * (step + 1) / (warmup + 1)
    rate = float(LR_SCHEDULES.function(optimizer.decay)(optimizer, step, total_steps))
    if not 0.0 <= rate < math.inf:
        raise ConfigError(f"optimizer.decay {optimizer.decay!r} gives {rate} at step {step}; a rate is 0 or more")
    return rate


class BatchSchedule:
    """Schedule of the global batch of each step, with Megatron-LM's ramp-up.

    The ramp goes from S = rampup_start to G = global_batch_size in n = (G - S) / rampup_increment stages over
    R = rampup_samples: after c consumed samples the batch is ``S + rampup_increment * floor(c n / R)`` for c < R,
    else G. (Megatron-LM computes c / (R / n) in floating point; here the integers are exact.)

    Args:
        batch: sizes; ``rampup_start = 0`` means no ramp-up.
        dp: data-parallel replicas.
        begun: (step, samples consumed before it) of a run whose ramp-up has ended, where ``batch`` has none.

    Raises:
        ConfigError: all that a check of the configuration says of these sizes (``config.layout.batch_problems``).
    """

    def __init__(self, batch: BatchConfig, dp: int, begun: tuple[int, int] | None = None) -> None:
        if dp < 1:
            raise ValueError(f"dp is {dp}")
        least = {"micro_batch_size": 1, "global_batch_size": 1, "rampup_start": 0}
        wrong = [f"batch.{name} is {getattr(batch, name)}; it must be at least {n}"
                 for name, n in least.items() if getattr(batch, name) < n]
        if problems := wrong or batch_problems(batch, dp):
            raise ConfigError(problems)
        self._final = batch.global_batch_size
        self._start = batch.rampup_start or batch.global_batch_size
        self._increment = batch.rampup_increment
        self._ramp = batch.rampup_samples if self._start < self._final else 0
        self._stages = (self._final - self._start) // self._increment if self._ramp else 0
        self._first_steps, self._first_samples, self._sizes = self._table()
        if begun is not None and not self._ramp:
            self._first_samples = [begun[1] - begun[0] * self._final]  # of a step 0 that no run had

    def _table(self) -> tuple[list[int], list[int], list[int]]:
        """First step, first sample and batch of each stage that is not skipped; the last is the full batch."""
        steps, samples, sizes = [0], [0], [self.global_batch(0)]
        while sizes[-1] < self._final:
            stage = (sizes[-1] - self._start) // self._increment
            boundary = -(-(stage + 1) * self._ramp // self._stages)
            taken = -(-(boundary - samples[-1]) // sizes[-1])
            steps.append(steps[-1] + taken)
            samples.append(samples[-1] + taken * sizes[-1])
            sizes.append(self.global_batch(samples[-1]))
        return steps, samples, sizes

    def global_batch(self, samples_consumed: int) -> int:
        """Return the batch size of the step that begins after ``samples_consumed`` samples."""
        if samples_consumed < 0:
            raise ValueError(f"samples_consumed is {samples_consumed}")
        if samples_consumed >= self._ramp:
            return self._final
        return self._start + self._increment * (samples_consumed * self._stages // self._ramp)

    def step_plan(self, step: int) -> tuple[int, int]:
        """Return ``(first sample, global batch)`` of step ``step`` (from 0), in O(log stages)."""
        if step < 0:
            raise ValueError(f"step {step} is negative")
        i = bisect_right(self._first_steps, step) - 1
        return self._first_samples[i] + (step - self._first_steps[i]) * self._sizes[i], self._sizes[i]

    def samples_before(self, step: int) -> int:
        """Samples that the steps before ``step`` consume; for ``step = total`` the samples of the whole run."""
        return self.step_plan(step)[0]
