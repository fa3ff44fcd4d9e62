"""A hook of the training loop from outside the package: which step had the least validation loss.

``best.json`` in the run's folder names that step, so that a script can copy its checkpoint before it is removed. An
attempt that resumes at an earlier step forgets a later best: those steps run again.
"""

import json
import math

from megatron_port.core.dist.agree import broadcast_text
from megatron_port.core.io.files import write_text
from megatron_port.core.registry import LOOP_HOOKS
from megatron_port.core.train.folders import run_folder
from megatron_port.core.train.hooks import LoopHook, LoopState


class BestStep(LoopHook):
    """Keep the step with the least validation loss."""

    def __init__(self, state: LoopState) -> None:
        super().__init__(state)
        self.path = run_folder(state.config) / "best.json"
        self.step, self.loss = 0, math.inf

    def begin(self, *, again: bool = False) -> None:
        """Take up what an earlier attempt found. Rank 0 reads, all ranks learn it."""
        text = None
        if self.state.session.is_rank_zero and self.path.exists():
            text = self.path.read_text()
        found = json.loads(broadcast_text(text) or "{}")
        known = found.get("step", math.inf) <= self.state.progress.step
        self.step, self.loss = (found["step"], found["validation_loss"]) if known else (0, math.inf)

    def due(self, step: int) -> bool:
        """Return whether the last evaluation found a lower loss, which is equal on all ranks."""
        loss = self.state.validation_loss
        return loss is not None and loss < self.loss

    def act(self) -> None:
        """Note the step, on rank 0 in the run's folder."""
        assert self.state.validation_loss is not None
        self.step, self.loss = self.state.progress.step, self.state.validation_loss
        if self.state.session.is_rank_zero:
            self.state.session.fence.check()
            write_text(self.path, json.dumps({"step": self.step, "validation_loss": self.loss}) + "\n")


LOOP_HOOKS.add("best-step", BestStep)
