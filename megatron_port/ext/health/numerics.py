"""Which steps can be trusted: limits from a running median, a verdict on each step, and what was left out.

Pure bookkeeping on numbers that are the same on every rank, so every rank decides alike without a word.
``health.anomaly`` finds where an anomaly comes from, ``train.loop`` does what the policy says.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_port.core.config.schema import RunConfig
from megatron_port.core.engine.api import StepLimits, StepResult

LOSS_FLOOR = 1.0
"""Nats a token: a memorised corpus has a loss near 0, of which a multiple means nothing."""
CHANCE_FACTOR = 1.25
"""A loss above this times that of guessing all tokens alike (or of the first step, where that is larger) is no training
curve's: warm-ups fall from there, and a spike of a few percent at a high rate stays below."""
FEW = 8
"""Applied steps after which spikes are looked for: the start is where a rate that is too high shows."""
MEMORY_STEPS = 1000
"""``numerics.max_anomalies`` counts those of so many steps."""


@dataclass(frozen=True)
class LeftOut:
    """Samples taken out of the order, by their position in it."""

    first: int
    count: int


def position(first_sample: int, left_out: Sequence[LeftOut]) -> int:
    """Return where in the data's order the step begins that begins at ``first_sample`` of what is trained on.

    ``left_out``: rising, each a whole step's samples. The counter of consumed samples continues as if they had never
    been in the order, so schedules and checkpoints need not know of them.
    """
    at = first_sample
    for gap in left_out:
        if at >= gap.first:
            at += gap.count
    return at


class NumericsGuard:
    """State of the guard; equal on all ranks."""

    def __init__(self, config: RunConfig) -> None:
        self.config, self.settings = config, config.numerics
        self.losses: deque[float] = deque(maxlen=self.settings.window)
        self.grad_norms: deque[float] = deque(maxlen=self.settings.window)
        self.anomaly_steps: list[int] = []
        """Steps (1 is the first) at which one was met, of this run's last ``MEMORY_STEPS``."""
        self.anomalies_total = 0
        self.left_out: list[LeftOut] = []
        self.first_loss = 0.0
        """Loss of the first training step that was applied; 0: none was."""

    def _limit(self, seen: deque[float], factor: float, floor: float) -> float:
        count = 2 * len(seen)
        if factor == 0.0 or count < min(self.settings.window, 2 * FEW):
            return math.inf
        # Few values have a median of little worth; the largest of them gives no false alarm.
        usual = statistics.median(seen) if count >= self.settings.window else max(seen)
        return max(factor * usual, floor)

    def _chance(self) -> float:
        """Return the largest loss that a model which has learned anything can have; from the first step on."""
        if self.settings.loss_spike == 0.0:
            return math.inf
        return max(CHANCE_FACTOR * max(math.log(self.config.model.vocab_size), self.first_loss), LOSS_FLOOR)

    def limits(self) -> StepLimits:
        """Return the limits of the next step, in a few microseconds."""
        loss = self._limit(self.losses, self.settings.loss_spike, LOSS_FLOOR)
        return StepLimits(
            # The very first loss may be anything: it is what the others are compared with.
            loss=min(loss, self._chance()) if self.first_loss else loss,
            grad_norm=self._limit(self.grad_norms, self.settings.grad_norm_spike, self.config.optimizer.clip_grad),
        )

    def position(self, first_sample: int) -> int:
        """Return :func:`position` of a sample."""
        return position(first_sample, self.left_out)

    def judge(self, result: StepResult, limits: StepLimits) -> str:
        """Return what is wrong with a step; empty: nothing, or fp16's loss scale was too large (a normal skip)."""
        if not math.isfinite(result.loss):
            return f"the loss is {result.loss:g}"
        if result.grad_norm is None:
            return "" if self.config.precision.dtype == "fp16" else "the gradient is not finite"
        if result.loss > limits.loss:
            return f"the loss {result.loss:.6g} is above its limit {limits.loss:.6g}"
        if result.grad_norm > limits.grad_norm:
            return f"the gradient norm {result.grad_norm:.6g} is above its limit {limits.grad_norm:.6g}"
        return ""

    def accept(self, result: StepResult) -> None:
        """Take a step without anomaly into the medians. One that fp16 skipped has no norm, one whose labels are all
        masked no loss: they do not count."""
        if result.grad_norm is not None and result.tokens:
            self.first_loss = self.first_loss or result.loss
            self.losses.append(result.loss)
            self.grad_norms.append(result.grad_norm)

    @property
    def steps_in_a_row(self) -> int:
        """Return the number of anomalies at consecutive steps, the last one included."""
        count = 0
        for at, step in enumerate(reversed(self.anomaly_steps)):
            if step != self.anomaly_steps[-1] - at:
                break
            count += 1
        return count

    def count_anomaly(self, step: int) -> bool:
        """Count an anomaly at ``step``; return whether there were too many."""
        self.anomalies_total += 1
        self.anomaly_steps = [s for s in self.anomaly_steps if s > step - MEMORY_STEPS] + [step]
        return len(self.anomaly_steps) >= self.settings.max_anomalies

    def leave_out(self, first: int, count: int) -> None:
        """Take a whole step's samples, by their position, out of the order."""
        self.left_out = sorted([*self.left_out, LeftOut(first, count)], key=lambda gap: gap.first)

    def state(self) -> dict[str, Any]:
        """Return the state for checkpoints: a resumed run must refuse the steps that an unbroken one refuses."""
        return {
            "losses": list(self.losses), "grad_norms": list(self.grad_norms), "anomaly_steps": self.anomaly_steps,
            "anomalies_total": self.anomalies_total, "left_out": [[g.first, g.count] for g in self.left_out],
            "first_loss": self.first_loss,
        }

    def load(self, state: Mapping[str, Any], *, medians_only: bool = False) -> None:
        """Load a result of ``state``; absent parts start afresh. ``medians_only``: keep the anomalies."""
        for name in ("losses", "grad_norms"):
            seen = getattr(self, name)
            seen.clear()
            seen.extend(float(x) for x in state.get(name, ()))
        # A checkpoint of an earlier version does not know it; its losses were all sound.
        self.first_loss = float(state.get("first_loss", max(self.losses, default=0.0)))
        if medians_only:
            return
        self.anomaly_steps = [int(s) for s in state.get("anomaly_steps", ())]
        self.anomalies_total = int(state.get("anomalies_total", 0))
        self.left_out = [LeftOut(int(first), int(count)) for first, count in state.get("left_out", ())]
