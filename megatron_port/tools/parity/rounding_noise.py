"""Random errors in the place of rounding: how far may half precision move a gradient at all?

A gradient that is a sum of terms of both signs keeps the errors of its terms and not their size. The terms of the norms
of queries and keys and of sinks are differences themselves (of what a softmax passes back, behind a soft-cap's slope),
and what a norm at a branch's end makes large was small before. How ill-conditioned that is depends on the model and
on the batch, so it is measured: a process in fp32 is given errors as large as half precision's can be, in the places
where half precision rounds. What they change is the unit of what half precision changed (docs/parity.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron_port.core.config.schema import PrecisionConfig
from megatron_port.core.layers.linear import ColumnParallelLinear, RowParallelLinear
from megatron_port.core.model.attention import SelfAttention
from megatron_port.core.model.layers import Embedding, Head
from megatron_port.core.model.mlp import MLP
from megatron_port.core.model.moe import Experts, MoE
from megatron_port.core.model.norm import Norm
from megatron_port.core.optim.loss_scale import LossScaler

SEEDS = range(16)
"""Seeds of the errors, one per process."""
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class _Noisy(torch.autograd.Function):
    """Add errors to a result, and others to its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, noise: Callable[[Tensor, float], Tensor], scale: float) -> Tensor:
        ctx.noise, ctx.scale = noise, scale
        return noise(x, 1.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.noise(grad, ctx.scale), None, None


@dataclass(frozen=True)
class RoundingNoise:
    """Random errors, uniform within the largest that rounding to ``dtype`` makes, of weights, results and gradients."""

    seed: int
    dtype: str
    loss_scale: float = 1.0
    """Factor of the gradients that are rounded, which lifts small ones out of fp16's subnormal numbers."""

    @classmethod
    def of(cls, precision: PrecisionConfig) -> list[RoundingNoise]:
        """Return the noise of each of the processes that a run in half precision is judged by."""
        return [cls(seed, precision.dtype, LossScaler(precision).scale) for seed in SEEDS]

    def emulate_rounding(self, stage: nn.Module) -> None:
        """Give these errors to the model of a single process that rounds nothing itself."""
        generator, info = torch.Generator().manual_seed(self.seed), torch.finfo(_DTYPES[self.dtype])

        def noise(x: Tensor, scale: float) -> Tensor:
            error = (x.abs() * (info.eps / 2)).clamp_min(info.smallest_normal * info.eps / 2 / scale)
            return x + error * (2 * torch.rand(x.shape, generator=generator) - 1).to(x)

        def noisy(x: Any) -> Any:
            if isinstance(x, tuple):
                return tuple(map(noisy, x))
            if not isinstance(x, Tensor) or not x.requires_grad:
                return x
            return _Noisy.apply(x, noise, self.loss_scale)  # type: ignore[no-untyped-call]

        for parameter in stage.parameters():
            parameter.data.copy_(noise(parameter.data, 1.0))
        for module in list(stage.modules()):
            if isinstance(module, Embedding | Head | Norm | ColumnParallelLinear | RowParallelLinear | Experts | MoE):
                module.register_forward_hook(lambda _module, _inputs, out: noisy(out))
            elif isinstance(module, SelfAttention):
                _around_attention(module, noisy)
            if isinstance(module, MLP | Experts):
                _around_activation(module, noisy)


def _around_attention(module: SelfAttention, noisy: Callable[[Any], Any]) -> None:
    """Add errors to queries, keys and values as attention takes them, and to what it mixes."""
    split, values = module.split, module.values
    module.split = lambda y: noisy(split(y))  # type: ignore[method-assign]
    module.values = lambda out: values(noisy(out))  # type: ignore[method-assign]


def _around_activation(module: MLP | Experts, noisy: Callable[[Any], Any]) -> None:
    """Add errors to an activation, and to its argument unless that is the output of a module."""
    activate, before = module.activate, noisy if isinstance(module, Experts) else lambda hidden: hidden
    module.activate = lambda hidden: noisy(activate(before(hidden)))  # type: ignore[method-assign]
