"""The native engine's updates by own kernels: of AdamW here, of rules with narrow state in ``fused_rule_update``.

No step waits for the device: learning rate, loss scale, clip factor and overflow are read there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from megatron_port.core.config.schema import OptimizerConfig
from megatron_port.core.engine.native_update import SquareNorm, Update, UpdateRequest
from megatron_port.core.optim.buckets import StateShard
from megatron_port.core.optim.gradients import clamp_, clip_factor, norm_target
from megatron_port.core.optim.rules import (
    AdamW,
    OptimizerRule,
    StepValues,
    grouped,
)
from megatron_port.core.registry import STEP_PARTS
from megatron_port.ext.kernels.ops.optimizer import (
    adamw_,
    square_norm,
)

if TYPE_CHECKING:
    from megatron_port.core.optim.buckets import StateShard


# AdamW on fp32 masters through the own multi-tensor kernel. No step waits for the device.

class AdamWGroup(NamedTuple):
    """Tensors with one weight decay. ``weights`` is empty where the masters are the weights."""

    weights: Sequence[Tensor]
    masters: Sequence[Tensor]
    weight_decay: float
    lr_factor: float = 1.0


class MomentStates(Mapping[Tensor, dict[str, Tensor]]):
    """Mapping of master → {"step", "exp_avg", "exp_avg_sq"}, the optimizer's own tensors. Setting an entry copies.

    All entries share one "step" (int64 scalar on the device): setting one sets it for all.
    """

    def __init__(
        self, masters: Sequence[Tensor], step: Tensor, moments: Sequence[tuple[Tensor, Tensor]] | None = None
    ) -> None:
        self._step = step
        made = moments or [(torch.zeros_like(m), torch.zeros_like(m)) for m in masters]
        self._moments = dict(zip(masters, made, strict=True))

    def moments(self, masters: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the first and the second moments of these masters."""
        pairs = [self._moments[m] for m in masters]
        return [first for first, _ in pairs], [second for _, second in pairs]

    def __getitem__(self, master: Tensor) -> dict[str, Tensor]:
        exp_avg, exp_avg_sq = self._moments[master]
        return {"step": self._step, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}

    @torch.no_grad()
    def __setitem__(self, master: Tensor, state: Mapping[str, Tensor]) -> None:
        for name, own in self[master].items():
            if own.shape != state[name].shape:
                raise ValueError(f"{name} is {tuple(state[name].shape)}, not {tuple(own.shape)}")
            own.copy_(state[name])

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._moments)

    def __len__(self) -> int:
        return len(self._moments)


class FusedAdamW:
    """Update by ``kernels.ops.optimizer.adamw_`` over groups, with its moments and a step counter.

    ``kernels.load`` must have run for the masters' device. Within a group the weights have one dtype.

    Args:
        groups: (weights, masters, weight_decay[, lr_factor]) each; masters fp32 and contiguous, all on one device.
        betas, eps: as torch.optim.AdamW.
        moments: (exp_avg, exp_avg_sq) of each master in the groups' order, zeros; None: made here.
        device: of the step counter; None: the first master's.

    Raises:
        ValueError: a master is not fp32, or appears twice; weights and masters do not correspond.
    """

    def __init__(
        self, groups: Sequence[
            AdamWGroup | tuple[Sequence[Tensor], Sequence[Tensor], float]
            | tuple[Sequence[Tensor], Sequence[Tensor], float, float]
        ], *,
        betas: tuple[float, float], eps: float, device: torch.device | None = None,
        moments: Sequence[tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        self.groups = [AdamWGroup(list(w), list(m), float(decay), *more) for w, m, decay, *more in groups]
        self.betas, self.eps = betas, eps
        masters = [m for group in self.groups for m in group.masters]
        for group in self.groups:
            if group.weights and [w.shape for w in group.weights] != [m.shape for m in group.masters]:
                raise ValueError("weights and masters of a group differ in number or shape")
        if any(m.dtype != torch.float32 for m in masters):
            raise ValueError("a master is not float32")
        self.step_count = torch.zeros((), dtype=torch.int64, device=masters[0].device if masters else device)
        self.state = MomentStates(masters, self.step_count, moments)
        if len(self.state) != len(masters):
            raise ValueError("a master is in the groups twice")
        self._moments = [self.state.moments(group.masters) for group in self.groups]

    def step(
        self, grads: Sequence[Sequence[Tensor]], *, lr: float | Tensor, grad_scale: Tensor | None = None,
        skip: Tensor | None = None,
    ) -> None:
        """Apply one update; ``grads[i]`` are those of the masters of group i. ``adamw_`` says what lr, grad_scale
        and skip are.

        Where ``skip`` is not zero neither tensors nor the counter change.
        """
        if len(grads) != len(self.groups):
            raise ValueError(f"gradients of {len(grads)} groups, not {len(self.groups)}")
        # An update has the number of steps taken, plus one; a skipped one writes nothing whatever its number.
        self.step_count.add_(1 if skip is None else skip == 0)
        for group, own, (exp_avg, exp_avg_sq) in zip(self.groups, grads, self._moments):
            adamw_(
                group.weights, group.masters, own, exp_avg, exp_avg_sq,
                step=self.step_count, grad_scale=grad_scale, skip=skip,
                lr=lr if group.lr_factor == 1.0 else lr * group.lr_factor, beta1=self.betas[0],
                beta2=self.betas[1], eps=self.eps, weight_decay=group.weight_decay,
            )

    def clipped_step(
        self, grads: Sequence[Sequence[Tensor]], *, lr: float | Tensor, square_norm: Tensor, max_norm: float,
        inv_scale: float | Tensor = 1.0, limit: float | Tensor = sys.float_info.max, skip: Tensor | None = None,
        target: Callable[[Tensor], Tensor] | None = None, before: Callable[[Tensor], None] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Unscale and clip gradients and update, unless their norm is not finite; return (norm, skip).

        ``square_norm`` is of the whole model's gradients as they are given here; see ``clip_factor``, also for
        ``limit``, ``skip`` and ``target``. ``before``: told grad_scale before the update.
        """
        grad_scale, skip, norm = clip_factor(
            square_norm, max_norm=max_norm, inv_scale=inv_scale, limit=limit, skip=skip, target=target
        )
        if before is not None:
            before(grad_scale)
        self.step(grads, lr=lr, grad_scale=grad_scale, skip=skip)
        return norm, skip


class OwnUpdate:
    """Update of ``pieces`` by the kernel of ``ops.optimizer``. ``sums``: the flat gradients."""

    def __init__(
        self, pieces: Sequence[StateShard], config: OptimizerConfig, device: torch.device,
        sums: Sequence[torch.Tensor] = (),
    ) -> None:
        self.config, self.sums = config, sums
        self.square_norm: SquareNorm = square_norm
        groups = grouped(((p.record, p) for p in pieces), config.weight_decay)
        self.groups = list(groups.values())
        separate = any(p.weight.dtype != p.master.dtype for p in pieces)
        self.optimizer = FusedAdamW(
            [([p.weight for p in pieces] if separate else [], [p.master for p in pieces], settings.weight_decay,
              settings.lr_factor) for settings, pieces in groups.items()],
            betas=(config.beta1, config.beta2), eps=config.eps, device=device,
            moments=[(p.state["exp_avg"], p.state["exp_avg_sq"]) for pieces in self.groups for p in pieces],
        )

    @property
    def steps(self) -> int:
        """Updates taken; reading it waits for the device."""
        return int(self.optimizer.step_count)

    def restore(self, steps: int) -> None:
        """Continue after ``steps`` updates (:meth:`Update.restore`)."""
        self.optimizer.step_count.fill_(steps)

    @torch.no_grad()
    def step(
        self, square: torch.Tensor, values: StepValues, *, skip: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.optimizer.clipped_step(
            self._gradients(), lr=values.lr, square_norm=square, max_norm=self.config.clip_grad,
            inv_scale=values.inv_scale, limit=values.largest_norm, skip=skip, target=norm_target(self.config, values),
            before=self._clamp if self.config.clip_value else None,
        )

    def _clamp(self, scale: torch.Tensor) -> None:
        clamp_(self.sums, self.config.clip_value, scale)

    def apply(self, factor: torch.Tensor, skip: torch.Tensor, *, lr: torch.Tensor) -> None:
        """Apply the pieces' gradients times ``factor`` unless ``skip`` is not 0: scalars on the device."""
        self.optimizer.step(self._gradients(), lr=lr, grad_scale=factor, skip=skip)

    def _gradients(self) -> list[list[torch.Tensor]]:
        return [[p.gradient for p in pieces] for pieces in self.groups]


def own_update(
    rule: OptimizerRule, asked: UpdateRequest, pieces: Sequence[StateShard], sums: Sequence[torch.Tensor] = ()
) -> Update | None:
    """Return the update of ``pieces`` by own kernels; None: the rule has none. ``sums``: their flat gradients."""
    if isinstance(rule, AdamW):
        return OwnUpdate(pieces, asked.config, asked.sharded.ctx.device, sums)
    made: Update | None = STEP_PARTS.function("own update with narrow moments")(rule, asked, pieces, sums)
    return made
