"""AdamW whose moments take 4 or about 2 bytes per parameter instead of 8: in bf16, or as codes of 8 bits.

What they round depends on logical tensors alone, as the update of every rule. Rounding to bf16 is stochastic (rounded
to nearest, a second moment with beta2 near 1 would stop growing), by a counter-based draw of (seed, name, step, element
of the unsplit tensor). Codes of 8 bits share a scale in blocks of 128 elements along the last logical dimension
(Dettmers et al., arXiv 2110.02861), which neither tensor parallelism nor ZeRO ever cuts.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING

import torch

from megatron_port.core.dist.counter import key_of, random_bits
from megatron_port.core.dist.record import ParameterRecord
from megatron_port.core.optim.buckets import StateShard
from megatron_port.core.optim.rules import (
    BlockRule,
    StateKind,
    UpdateSettings,
)
from megatron_port.ext.kernels.ops.optimizer import (
    BLOCK,
    LogicalRange,
)

if TYPE_CHECKING:
    from megatron_port.core.optim.buckets import StateShard


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
