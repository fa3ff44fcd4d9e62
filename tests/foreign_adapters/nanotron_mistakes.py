"""nanotron with a mistake in one of its functions, by option ``mistake``; one process makes none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from megatron_port.parity import Batch, World
from megatron_port.tools.foreign.adapters import nanotron
from megatron_port.tools.foreign.adapters.nanotron import Nanotron, State


class NanotronMistakes(Nanotron):
    """See the module."""

    layout: ClassVar[Mapping[str, Any]] = {**Nanotron.layout, "mistake": ""}

    def step(self, state: State, batch: Batch, world: World) -> float | None:
        if world["mistake"] == "tied apart":
            changed: Any = nanotron
            changed.sync_tied_weights_gradients = lambda **_: None
        loss = super().step(state, batch, world)
        if world["mistake"] == "summed over replicas":
            for parameter in state.model.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(state.context.dp_pg.size())
        return loss
