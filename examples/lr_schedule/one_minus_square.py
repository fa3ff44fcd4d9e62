"""A learning-rate schedule from outside the package: a parabola that leaves the peak flat and lands at min_lr.

    min_lr + (lr - min_lr) * (1 - x^2),   x = share of the steps between the warm-up and decay_steps

A schedule is a pure function of the settings and the step. Every rank asks it, and so does an attempt that resumes, so
it must not keep anything between two calls. The warm-up is the package's: the function is asked from there on.
"""

from megatron_port.core.config.schema import OptimizerConfig
from megatron_port.core.registry import LR_SCHEDULES


def one_minus_square(settings: OptimizerConfig, step: int, total_steps: int) -> float:
    """Return the learning rate of update ``step`` (from 0), which is at or after ``settings.warmup_steps``."""
    end = settings.decay_steps or total_steps
    x = min((step - settings.warmup_steps) / max(end - settings.warmup_steps, 1), 1.0)
    return settings.min_lr + (settings.lr - settings.min_lr) * (1.0 - x * x)


LR_SCHEDULES.add("one-minus-square", one_minus_square)
