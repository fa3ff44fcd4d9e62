"""Mistakes in torchtitan's own functions, planted where it does not have them. One process makes none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor
from torchtitan.distributed import fsdp, utils

from megatron_port.parity import World
from megatron_port.tools.foreign.adapters.torchtitan import TorchTitan


def _own_labels() -> None:
    """The loss is divided by the labels of this rank."""
    utils.dist_sum_tensor = lambda labels, mesh: labels


def _divided() -> None:
    """FSDP divides what the loss has divided."""
    fsdp.disable_fsdp_gradient_division = lambda model: None


def _norm_of_a_stage() -> None:
    """The norm is that of one stage of the pipeline."""
    norm = utils.clip_grad_norm_

    def of_one(parameters: Any, most: float, *, pp_mesh: Any, **more: Any) -> Tensor:
        found: Tensor = norm(parameters, most, pp_mesh=None, **more)
        return found

    utils.clip_grad_norm_ = of_one


MISTAKES = {"own labels": _own_labels, "divided again": _divided, "norm of a stage": _norm_of_a_stage}


class TitanMistakes(TorchTitan):
    layout: ClassVar[Mapping[str, Any]] = {**TorchTitan.layout, "mistake": ""}

    def start(self, world: World) -> None:
        super().start(world)
        if world.size > 1 and world["mistake"]:
            MISTAKES[world["mistake"]]()
