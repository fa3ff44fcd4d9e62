"""A run's training: its state and its hooks (``run.assemble``), and the loop over them."""

from __future__ import annotations

from megatron_port.core.train.hooks import LoopState, Session
from megatron_port.core.train.loop import Loop, TrainingResult
from megatron_port.run.assemble import loop_hooks
from megatron_port.run.start import load_model, open_state


class Trainer:
    """Training of one rank: built from a session, it holds the engine with the weights that the run begins from."""

    def __init__(self, session: Session) -> None:
        self.state: LoopState = open_state(session)
        self.state.hooks = loop_hooks(self.state)
        load_model(self.state)

    def run(self) -> TrainingResult:
        """Train to ``training.steps``; on a signal save and return early."""
        return Loop(self.state).run()
