"""Activation recompute (Chen et al., arXiv 1604.06174): forward again in backward instead of keeping activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from megatron_port.core.layers.step import StepSlot


def recompute(function: Callable[..., torch.Tensor], *inputs: torch.Tensor, step: StepSlot) -> torch.Tensor:
    """Run ``function(*inputs)`` keeping only its inputs; its modules see the same micro-batch both times.

    Non-reentrant: the reentrant form drops the gradient of parameters when no
    input requires one (the first stage's). torch's RNG state is not saved
    because nothing here draws from it.
    """
    state = step.state()

    def run(*args: Any) -> torch.Tensor:
        nonlocal state
        now, state = state, state.again()
        with step.use(now):
            return function(*args)

    out: torch.Tensor = checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False)
    return out
