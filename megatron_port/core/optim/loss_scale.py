"""Dynamic loss scaling for fp16 (Micikevicius et al., arXiv 1710.03740)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from megatron_port.core.config.schema import PrecisionConfig
from megatron_port.core.errors import NumericsError


@dataclass
class LossScaler:
    """Loss scale of the next backward pass, and the counters that change it.

    After ``hysteresis`` overflows the scale halves; after ``window`` good steps
    in a row it doubles and the hysteresis is restored.
    """

    config: PrecisionConfig
    scale: float = 1.0
    good_steps: int = 0
    hysteresis_left: int = field(default=0)
    skipped_in_a_row: int = 0

    def __post_init__(self) -> None:
        self.hysteresis_left = self.config.loss_scale_hysteresis
        if self.config.dtype == "fp16":
            self.scale = self.config.initial_loss_scale

    def account(self, loss: float, grad_norm: float, *, applied: bool) -> None:
        """Account for a step by its outcome.

        Only a gradient that overflowed under a finite loss says something of the scale: the loss is computed without
        it, so a loss that is not finite, or a spike, leaves scale and counters as they are.
        """
        if applied:
            self.update(False)
        elif math.isfinite(loss) and not math.isfinite(grad_norm):
            self.update(True)

    def update(self, overflow: bool) -> None:
        """Account for one step. Raises NumericsError when too many steps in a row were skipped."""
        if self.config.dtype != "fp16":
            return
        if not overflow:
            self.skipped_in_a_row = 0
            self.good_steps += 1
            if self.good_steps % self.config.loss_scale_window == 0:
                self.hysteresis_left = self.config.loss_scale_hysteresis
                self.scale *= 2.0
            return
        self.good_steps = 0
        self.skipped_in_a_row += 1
        self.hysteresis_left -= 1
        if self.hysteresis_left <= 0:
            self.scale = max(self.scale / 2.0, self.config.min_loss_scale)
        if self.skipped_in_a_row >= self.config.max_skipped_steps:
            raise NumericsError(
                f"{self.skipped_in_a_row} steps in a row overflowed in fp16 and were skipped (loss scale now "
                f"{self.scale:g}); lower optimizer.lr, use precision.dtype = \"bf16\", or look for bad data"
            )

    def state(self) -> dict[str, float | int]:
        """Return the state for checkpoints."""
        return {
            "loss_scale": self.scale, "loss_scale_good_steps": self.good_steps,
            "loss_scale_hysteresis_left": self.hysteresis_left, "skipped_in_a_row": self.skipped_in_a_row,
        }

    def load(self, state: dict[str, float | int]) -> None:
        """Undo ``state``; absent entries keep their defaults."""
        self.scale = float(state.get("loss_scale", self.scale))
        self.good_steps = int(state.get("loss_scale_good_steps", 0))
        self.hysteresis_left = int(state.get("loss_scale_hysteresis_left", self.config.loss_scale_hysteresis))
        self.skipped_in_a_row = int(state.get("skipped_in_a_row", 0))
