"""A mixer with a state on one process that rounds as tensor-parallel ranks do.

Rows that all units read are on every rank, and the gradient that each rank's units give them is rounded before the
ranks' are added. Here each rank's units have a copy of these rows, and run by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron_port.core.layers.fused import upcast
from megatron_port.core.layers.spec import ParameterSpec
from megatron_port.ext.mixers.recurrence import in_chunks, zero_state
from megatron_port.ext.mixers.recurrent import Recurrent
from megatron_port.tools.parity.rank_sums import ring_sum


class _Copies(torch.autograd.Function):
    """Rows [ranks, ...] of x, whose gradients are added as ranks add theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int) -> Tensor:
        return x.expand(ranks, *x.shape).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ring_sum(list(grad)), None


def split_units(module: Recurrent, ranks: int) -> None:
    """Let a mixer run as on ``ranks`` tensor-parallel ranks. Its rows are those of each rank, one behind another."""
    spec = module.spec

    def project(x: Tensor) -> Tensor:
        assert module.shared is not None
        rows, copies = module.packed(x), _Copies.apply(module.shared(x), ranks)  # type: ignore[no-untyped-call]
        return torch.cat([part for pair in zip(rows.chunk(ranks, -1), copies) for part in pair], dim=-1)

    def on_rank(rank: int) -> Any:
        """Return what a rank's module has."""
        def held(parameter: Tensor, stated: ParameterSpec) -> Tensor:
            wide = upcast(parameter)
            return wide if stated.split is None else wide.chunk(ranks, stated.split.dim)[rank]

        found: Any = SimpleNamespace(
            spec=spec, units=module.units // ranks, wide=module.wide,
            convolution=list(map(held, module.convolution, spec.convolution)),
            own={name: held(module.own[name], stated) for name, stated in spec.own.items()},
        )
        found._split = partial(Recurrent._split, found)
        return found

    def split(packed: Tensor) -> tuple[Tensor, ...]:
        parts = [on_rank(i)._split(part) for i, part in enumerate(packed.chunk(ranks, -1))]
        return torch.cat([part[0] for part in parts], -1), torch.cat([part[1] for part in parts], 2), parts[0][2]

    def mixed(packed: Tensor, before: Tensor | None, state: Tensor | None, run: Any) -> tuple[Tensor, Tensor | None]:
        out, states = [], list[Tensor]()
        for i, part in enumerate(packed.chunk(ranks, -1)):
            ahead, ours = (None if x is None else x.chunk(ranks, dim)[i] for x, dim in ((before, -1), (state, 1)))
            rows, own, operands = Recurrent._prepared(on_rank(i), part, ahead, run)
            found = None
            if operands is not None:
                found, ours = in_chunks(operands, zero_state(operands) if ours is None else ours, chunk=spec.chunk)
                found, states = found.movedim(2, 0), [*states, ours]
            out.append((found, rows, own))
        return _results(module, out).to(packed.dtype), torch.cat(states, 1) if states else None

    module.project, module._split, module._mixed = project, split, mixed  # type: ignore[method-assign, assignment]


class _SplitNorm(torch.autograd.Function):
    """``mixers.projection_norm.split_rms_norm`` of x [ranks, n, batch, features] by weight [ranks, features]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        ctx.count = len(x) * x.shape[-1]
        mean = ring_sum(list(x.square().sum(-1, keepdim=True))) / ctx.count
        rstd = torch.rsqrt(mean + epsilon)
        ctx.save_for_backward(x, weight, rstd)
        return x * rstd * weight[:, None, None]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, rstd = ctx.saved_tensors
        normed, scaled = x * rstd, grad * weight[:, None, None]
        mean = ring_sum(list((scaled * normed).sum(-1, keepdim=True))) / ctx.count
        return (scaled - normed * mean) * rstd, (grad * normed).flatten(1, -2).sum(1), None


def _results(module: Recurrent, ranks: list[tuple[Any, Any, Any]]) -> Tensor:
    """Return what each rank's units make of (their result, their rows, their parameters), one behind another."""
    given_to: list[tuple[Tensor, Tensor]] = []

    def seen(x: Tensor, weight: Tensor, *, over_ranks: bool = False) -> Tensor:
        given_to.extend([(x, weight)] if over_ranks else [])
        return x

    for given in ranks:
        module.spec.result(*given, seen)
    normed: Iterator[Tensor] = iter(())
    if given_to:
        xs, weights = (torch.stack(parts) for parts in zip(*given_to, strict=True))
        normed = iter(_SplitNorm.apply(xs, weights, module.epsilon))  # type: ignore[no-untyped-call]

    def norm(x: Tensor, weight: Tensor, *, over_ranks: bool = False) -> Tensor:
        return next(normed) if over_ranks else module._norm(x, weight)

    return torch.cat([module.spec.result(*given, norm) for given in ranks], dim=-1)
