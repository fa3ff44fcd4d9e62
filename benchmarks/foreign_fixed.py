"""Megatron-core without a cause that was found, by option ``fixed``: draws that met it are run again with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from megatron_port.tools.foreign.adapter import World
from megatron_port.tools.foreign.adapters.megatron_core import MegatronCore, State


def balance_by_all_positions(world: World) -> None:
    """Weigh a balance loss by the positions of all tp ranks, where 0.16.1 takes those of this one (finding 1)."""
    from megatron.core.transformer.moe.router import TopKRouter

    attach = TopKRouter.attach_and_log_load_balancing_loss

    def attached(self: Any, activation: Tensor, *rest: Any, valid_token_count: Any = None, **more: Any) -> Any:
        count = activation.shape[0] if valid_token_count is None else valid_token_count
        return attach(self, activation, *rest, valid_token_count=count * world["tp"], **more)

    TopKRouter.attach_and_log_load_balancing_loss = attached


class MegatronFixed(MegatronCore):
    """Megatron-core with the cause of a finding patched."""

    layout: ClassVar[Mapping[str, Any]] = {**MegatronCore.layout, "fixed": 0}

    def build(self, world: World) -> State:
        if world["fixed"] == 1:
            balance_by_all_positions(world)
        return super().build(world)
