"""The native engine's updates by own kernels: of AdamW here, of rules with narrow state in ``fused_rule_update``.

No step waits for the device: learning rate, loss scale, clip factor and overflow are read there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, singledispatchmethod
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from megatron_port.core.config.schema import OptimizerConfig
from megatron_port.core.dist.counter import key_of, random_bits
from megatron_port.core.dist.record import ParameterRecord
from megatron_port.core.engine.native_update import SquareNorm, Update, UpdateRequest
from megatron_port.core.optim.buckets import StateShard
from megatron_port.core.optim.gradients import clamp_, clip_factor, norm_target, step_factor
from megatron_port.core.optim.rules import (
    AdamW,
    BlockRule,
    GroupSettings,
    OptimizerRule,
    StateKind,
    StepValues,
    UpdateSettings,
    grouped,
)
from megatron_port.core.registry import STEP_PARTS
from megatron_port.ext.kernels.kernels import load as load_kernels
from megatron_port.ext.kernels.lion import Lion
from megatron_port.ext.kernels.ops.optimizer import (
    BLOCK,
    LogicalRange,
    adamw_,
    adamw_8bit_,
    adamw_bf16_,
    lion_,
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
        inv_scale: float | Tensor = 1.0, limit: float | Tensor = sys.float_info.max, veto: Tensor | None = None,
        target: Callable[[Tensor], Tensor] | None = None, before: Callable[[Tensor], None] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Unscale and clip gradients and update, unless their norm is not finite; return (norm, skip).

        ``square_norm`` is of the whole model's gradients as they are given here; see ``clip_factor``, also for
        ``limit``, ``veto`` and ``target``. ``before``: told grad_scale before the update.
        """
        grad_scale, skip, norm = clip_factor(
            square_norm, max_norm=max_norm, inv_scale=inv_scale, limit=limit, veto=veto, target=target
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
        self, square: torch.Tensor, values: StepValues, *, veto: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.optimizer.clipped_step(
            self._gradients(), lr=values.lr, square_norm=square, max_norm=self.config.clip_grad,
            inv_scale=values.inv_scale, limit=values.largest_norm, veto=veto, target=norm_target(self.config, values),
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
    made: Update | None = STEP_PARTS.function("own update of a narrow rule")(rule, asked, pieces, sums)
    return made


# AdamW whose moments take 4 or about 2 bytes per parameter instead of 8: in bf16, or as codes of 8 bits.
#
# What they round depends on logical tensors alone, as the update of every rule. Rounding to bf16 is stochastic
# (rounded to nearest, a second moment with beta2 near 1 would stop growing), by a counter-based draw of (seed, name,
# step, element of the unsplit tensor). Codes of 8 bits share a scale in blocks of 128 elements along the last logical
# dimension (Dettmers et al., arXiv 2110.02861), which neither tensor parallelism nor ZeRO ever cuts.

FIRST, SECOND = "exp_avg", "exp_avg_sq"
_SMALLEST_SCALE = 1e-12
_DECADES = 7


@lru_cache(maxsize=8)
def code_values(signed: bool, device: torch.device) -> torch.Tensor:
    """Return the values of the codes of 8 bits, fp32 [256], ascending, within [-1, 1] or [0, 1].

    The dynamic map of Dettmers et al. (arXiv 2110.02861): 0, 1, and in each decade (10^-7, 10^-6] to (0.1, 1] the
    middles of equal parts, twice as many as in the decade below: 1 to 64 of each sign, or 2 to 128 without signs.
    """
    values = [torch.tensor([0.0, 1.0])]
    for decade in range(_DECADES):
        parts = 2**decade if signed else 2 ** (decade + 1)
        edges = torch.linspace(0.1, 1.0, parts + 1)
        middles = (edges[:-1] + edges[1:]) / 2.0 * 10.0 ** (decade + 1 - _DECADES)
        values += [middles, -middles] if signed else [middles]
    return torch.cat(values).sort().values.to(device)


def quantise_(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, values: torch.Tensor) -> None:
    """Write the codes (uint8 [n]) and scales ([n / 128], as wide as ``x``) of ``x`` [n], n whole blocks.

    A block's scale is its largest absolute value, at least 1e-12. Of the two values around x / scale the nearer one is
    taken, the upper one at the middle.
    """
    blocks = x.view(-1, BLOCK)
    scale.copy_(blocks.abs().amax(dim=-1).clamp(min=_SMALLEST_SCALE))
    relative, wide = blocks / scale.unsqueeze(-1), values.to(x.dtype)
    low = (torch.searchsorted(wide, relative, right=True) - 1).clamp_(0, wide.numel() - 2)
    below, above = wide[low], wide[low + 1]
    codes.copy_((low + (relative - below >= (above - below) * 0.5)).view(-1))


def dequantised(codes: torch.Tensor, scale: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return ``values[code] * scale``, [n], as wide as ``scale``."""
    found = values.to(scale.dtype)[codes.long()].view(-1, BLOCK) * scale.unsqueeze(-1)
    return found.view(-1)


def logical_range(record: ParameterRecord, start: int, seed: int) -> LogicalRange:
    """Return which elements of the unsplit tensor are in this rank's flattened tensor from ``start`` on.

    Raises:
        ValueError: the tensor is divided along several dimensions.
    """
    divided = [d for d, n in enumerate(record.local_shape) if n != record.shape[d] or record.offset[d]]
    key = key_of("moments", seed, record.name)
    if not divided:
        return LogicalRange(start, max(record.numel, 1), max(record.numel, 1), 0, key)
    if len(divided) > 1:
        raise ValueError(f"{record.name} is divided along dimensions {divided}; one is expected")
    (d,) = divided
    inner = prod(record.shape[d + 1 :])
    run, stride, first = record.local_shape[d] * inner, record.shape[d] * inner, record.offset[d] * inner
    if prod(record.shape[:d]) == 1:  # one run: nothing to divide by, and padding may lie behind the whole tensor
        run = stride = max(run, stride)
    return LogicalRange(start, run, stride, first, key)


def element_numbers(place: LogicalRange, count: int, device: torch.device) -> torch.Tensor:
    """Return the numbers of ``count`` elements in the unsplit tensor, int64."""
    e = torch.arange(place.start, place.start + count, dtype=torch.int64, device=device)
    if place.run == place.stride:
        return e + place.first
    return torch.div(e, place.run, rounding_mode="floor") * place.stride + e % place.run + place.first


def round_stochastically(x: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """Return fp32 ``x`` in bf16: up (in size) where the lowest 16 bits of ``random`` (int64) carry, otherwise cut off.

    Infinity and NaN stay what they are.
    """
    bits = x.view(torch.int32).long()
    cut = ((bits + (random & 0xFFFF)) >> 16).to(torch.int16).view(torch.bfloat16)
    return torch.where(torch.isfinite(x), cut, x.to(torch.bfloat16))


def _adamw_(
    master: torch.Tensor, gradient: torch.Tensor, first: torch.Tensor, second: torch.Tensor, s: UpdateSettings
) -> None:
    """Update a master and its moments in place, as torch.optim.AdamW does."""
    first.lerp_(gradient, 1.0 - s.beta1)
    second.mul_(s.beta2).addcmul_(gradient, gradient, value=1.0 - s.beta2)
    size = second.sqrt().div_((1.0 - s.beta2**s.step) ** 0.5).add_(s.eps)
    master.mul_(1.0 - s.lr * s.weight_decay).addcdiv_(first, size, value=-s.lr / (1.0 - s.beta1**s.step))


class AdamWBf16(BlockRule):
    """AdamW with both moments in bf16, rounded stochastically after they have been used."""

    block = 1

    def state(self, record: ParameterRecord) -> tuple[StateKind, ...]:
        """Return both moments, for every parameter."""
        return StateKind(FIRST, dtype=torch.bfloat16), StateKind(SECOND, dtype=torch.bfloat16)

    @torch.no_grad()
    def update_(self, piece: StateShard, settings: UpdateSettings) -> None:
        first, second = (piece.state[kind].to(piece.master.dtype) for kind in (FIRST, SECOND))
        _adamw_(piece.master, piece.gradient, first, second, settings)
        place = logical_range(piece.record, piece.start, settings.seed)
        random = random_bits(element_numbers(place, first.numel(), first.device), place.key, settings.step)
        piece.state[FIRST].copy_(round_stochastically(first.float(), random))
        piece.state[SECOND].copy_(round_stochastically(second.float(), random >> 16))


class AdamW8bit(BlockRule):
    """AdamW with both moments in 8 bits where a parameter is a matrix whose logical rows are whole blocks of 128
    elements; other parameters (vectors, odd rows) have moments as wide as their masters."""

    block = BLOCK

    def is_narrow(self, record: ParameterRecord) -> bool:
        """Return whether a parameter's moments are codes; by its logical shape alone."""
        return len(record.shape) > 1 and record.shape[-1] % BLOCK == 0

    def state(self, record: ParameterRecord) -> tuple[StateKind, ...]:
        """Return codes and scales of both moments, or both moments."""
        if not self.is_narrow(record):
            return StateKind(FIRST), StateKind(SECOND)
        return tuple(
            kind for name in (FIRST, SECOND)
            for kind in (StateKind(f"{name}_codes", dtype=torch.uint8),
                         StateKind(f"{name}_scale", of="block", block=BLOCK))
        )

    @torch.no_grad()
    def update_(self, piece: StateShard, settings: UpdateSettings) -> None:
        state: Mapping[str, torch.Tensor] = piece.state
        if not self.is_narrow(piece.record):
            _adamw_(piece.master, piece.gradient, state[FIRST], state[SECOND], settings)
            return
        values = {FIRST: code_values(True, piece.master.device), SECOND: code_values(False, piece.master.device)}
        wide = {k: dequantised(state[f"{k}_codes"], state[f"{k}_scale"], v) for k, v in values.items()}
        _adamw_(piece.master, piece.gradient, wide[FIRST], wide[SECOND], settings)
        for kind, moment in wide.items():
            quantise_(moment, state[f"{kind}_codes"], state[f"{kind}_scale"], values[kind])


ADAMW_BF16 = AdamWBf16()
ADAMW_8BIT = AdamW8bit()


# The native engine's updates by AdamW with narrow moments and by Lion: own kernels, without waiting for the device.

Call = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], None]
"""Update of some tensors by (learning rate, factor of gradients, whether to write nothing)."""


class FusedCalls:
    """Makes the calls that update pieces by a rule that has kernels.

    Args:
        step: number of the update, int64 scalar on the pieces' device.
        seed: of the run.
        separate: weights are other memory than masters, as wide or not.
    """

    def __init__(
        self, rule: OptimizerRule, config: OptimizerConfig, step: torch.Tensor, *, seed: int, separate: bool
    ) -> None:
        self.rule, self.config, self._step, self.seed, self.separate = rule, config, step, seed, separate

    def of(self, settings: GroupSettings, pieces: Sequence[StateShard]) -> list[Call]:
        """Return the calls for one group's pieces, which share weight decay and learning rate."""
        return self._of(self.rule, settings, pieces)

    @singledispatchmethod
    def _of(self, rule: OptimizerRule, settings: GroupSettings, pieces: Sequence[StateShard]) -> list[Call]:
        raise TypeError(f"{type(rule).__name__} has no kernel")

    @_of.register
    def _(self, rule: Lion, settings: GroupSettings, pieces: Sequence[StateShard]) -> list[Call]:
        return [self._lion(settings, pieces)]

    @_of.register
    def _(self, rule: AdamWBf16, settings: GroupSettings, pieces: Sequence[StateShard]) -> list[Call]:
        return [self._bf16(settings, pieces)]

    @_of.register
    def _(self, rule: AdamW, settings: GroupSettings, pieces: Sequence[StateShard]) -> list[Call]:
        return [self._wide(settings, pieces)]

    @_of.register
    def _(self, rule: AdamW8bit, settings: GroupSettings, pieces: Sequence[StateShard]) -> list[Call]:
        narrow = [p for p in pieces if rule.is_narrow(p.record)]
        wide = [p for p in pieces if not rule.is_narrow(p.record)]
        calls = [self._eight_bits(settings, narrow)] if narrow else []
        return [*calls, self._wide(settings, wide)] if wide else calls

    def _lists(
        self, pieces: Sequence[StateShard]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        """Weights (none where the masters are the weights), masters and gradients."""
        weights = [p.weight for p in pieces] if self.separate else []
        return weights, [p.master for p in pieces], [p.gradient for p in pieces]

    def _lion(self, settings: GroupSettings, pieces: Sequence[StateShard]) -> Call:
        lists, c = self._lists(pieces), self.config
        return lambda lr, factor, skip: lion_(
            *lists, _state(pieces, FIRST), grad_scale=factor, skip=skip, lr=lr * settings.lr_factor, beta1=c.beta1,
            beta2=c.beta2, weight_decay=settings.weight_decay,
        )

    def _bf16(self, settings: GroupSettings, pieces: Sequence[StateShard]) -> Call:
        lists, c = self._lists(pieces), self.config
        places = [logical_range(p.record, p.start, self.seed) for p in pieces]
        return lambda lr, factor, skip: adamw_bf16_(
            *lists, _state(pieces, FIRST), _state(pieces, SECOND), places, step=self._step, grad_scale=factor,
            skip=skip, lr=lr * settings.lr_factor, beta1=c.beta1, beta2=c.beta2, eps=c.eps,
            weight_decay=settings.weight_decay,
        )

    def _eight_bits(self, settings: GroupSettings, pieces: Sequence[StateShard]) -> Call:
        lists, c, device = self._lists(pieces), self.config, self._step.device
        state = [_state(pieces, f"{kind}_{part}") for kind in (FIRST, SECOND) for part in ("codes", "scale")]
        return lambda lr, factor, skip: adamw_8bit_(
            *lists, *state, signed_values=code_values(True, device), unsigned_values=code_values(False, device),
            step=self._step, grad_scale=factor, skip=skip, lr=lr * settings.lr_factor, beta1=c.beta1, beta2=c.beta2,
            eps=c.eps, weight_decay=settings.weight_decay,
        )

    def _wide(self, settings: GroupSettings, pieces: Sequence[StateShard]) -> Call:
        lists, c = self._lists(pieces), self.config
        return lambda lr, factor, skip: adamw_(
            *lists, _state(pieces, FIRST), _state(pieces, SECOND), step=self._step, grad_scale=factor, skip=skip,
            lr=lr * settings.lr_factor, beta1=c.beta1, beta2=c.beta2, eps=c.eps, weight_decay=settings.weight_decay,
        )


def _state(pieces: Sequence[StateShard], kind: str) -> list[torch.Tensor]:
    return [p.state[kind] for p in pieces]


class FusedRuleUpdate:
    """Update of ``pieces`` by the kernels of ``kernels.ops.optimizer``. ``sums``: the flat gradients."""

    def __init__(
        self, pieces: Sequence[StateShard], rule: OptimizerRule, config: OptimizerConfig, device: torch.device, *,
        seed: int, sums: Sequence[torch.Tensor] = (),
    ) -> None:
        self.config, self.sums = config, sums
        self.square_norm: SquareNorm = square_norm
        self._step = torch.zeros((), dtype=torch.int64, device=device)
        separate = any(p.weight.dtype != p.master.dtype for p in pieces)
        calls = FusedCalls(rule, config, self._step, seed=seed, separate=separate)
        groups = grouped(((p.record, p) for p in pieces), config.weight_decay)
        self._calls = [call for settings, pieces in groups.items() for call in calls.of(settings, pieces)]

    @property
    def steps(self) -> int:
        """Updates taken; reading it waits for the device."""
        return int(self._step)

    def restore(self, steps: int) -> None:
        """Continue after ``steps`` updates (:meth:`Update.restore`)."""
        self._step.fill_(steps)

    @torch.no_grad()
    def step(
        self, square: torch.Tensor, values: StepValues, *, veto: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        factor, skip, norm = step_factor(self.config, square, values, veto)
        if self.config.clip_value:
            clamp_(self.sums, self.config.clip_value, factor)
        self.apply(factor, skip, lr=values.lr)
        return norm, skip

    def apply(self, factor: torch.Tensor, skip: torch.Tensor, *, lr: torch.Tensor) -> None:
        """Apply the pieces' gradients times ``factor`` unless ``skip`` is not 0: scalars on the device."""
        # An update has the number of steps taken, plus one; a skipped one writes nothing whatever its number.
        self._step.add_(skip == 0)
        for call in self._calls:
            call(lr, factor, skip)


def narrow_update(
    rule: OptimizerRule, asked: UpdateRequest, pieces: Sequence[StateShard], sums: Sequence[torch.Tensor] = ()
) -> Update | None:
    """Return the update of ``pieces`` by the kernel of a rule that is not AdamW; None: it has none. ``sums``: their
    flat gradients."""
    if not isinstance(rule, (AdamWBf16, AdamW8bit, Lion)):
        return None
    return FusedRuleUpdate(pieces, rule, asked.config, asked.sharded.ctx.device, seed=asked.seed, sums=sums)


def host_calls(rule: OptimizerRule, asked: UpdateRequest, step: torch.Tensor) -> FusedCalls:
    """Return what updates pieces in host memory by own kernels for CPUs. ``step``: number of the update, int64.

    Raises:
        EnvironmentFault: the kernels are not built for this machine's CPU.
    """
    if asked.sharded.ctx.device.type != "cpu":  # else the provider has loaded them
        load_kernels("cpu")
    return FusedCalls(rule, asked.config, step, seed=asked.seed, separate=True)
