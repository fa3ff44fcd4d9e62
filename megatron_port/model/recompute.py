"""Activation recompute (Chen et al., arXiv 1604.06174): forward again in backward instead of keeping activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from megatron_port.parallel.random import DropoutStream


def recompute(function: Callable[..., torch.Tensor], *inputs: torch.Tensor, stream: DropoutStream) -> torch.Tensor:
    """Run ``function(*inputs)`` keeping only its inputs; its modules see the same micro-batch both times.

    Non-reentrant: the reentrant form drops the gradient of parameters when no
    input requires one (the first stage's). torch's RNG state is not saved
    because nothing here draws from it.
    """
    context, enabled = stream.current, stream.enabled

    def run(*args: Any) -> torch.Tensor:
        nonlocal context
        now, context = context, None if context is None else context.again()
        was, stream.enabled = stream.enabled, enabled
        try:
            with stream.use(now):
                return function(*args)
        finally:
            stream.enabled = was

    out: torch.Tensor = checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False)
    return out
