"""Mamba-2 (Dao & Gu, arXiv 2405.21060), as Nemotron-H, Bamba and Granite 4 have it: the mixer ``mamba2``.

Each head has values x and a time step d = softplus(x_d + bias), within limits: its state decays by exp(-A d) and learns
d x of the key B; the query C reads it, and D x is added. Heads share B and C in groups. The result is multiplied by
silu(gate) and normed, or normed first. Of one group, B and C are the same on all tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_port.core.config.model import ModelConfig
from megatron_port.core.layers.spec import ParameterSpec, Split
from megatron_port.ext.mixers.recurrent_spec import (
    RecurrentKind,
    RecurrentSpec,
    by_head,
    output,
    projection,
    shared_keys,
    shared_projection,
    sizes_of,
)

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_port.ext.mixers.recurrence import Operands
    from megatron_port.ext.mixers.recurrent_spec import Norm, Rows


@dataclass(frozen=True, kw_only=True)
class Mamba2Spec(RecurrentSpec):
    """A unit is a group: the x of its heads, B, C; their gates, then their time steps. Where there is one group, a unit
    is a head, and all share B and C."""

    groups: int
    step_min: float
    step_max: float
    """0: any."""
    gated_norm: str
    norm_before_gate: bool
    multipliers: tuple[float, ...] = (1.0,) * 5
    """Factors of gates, values, keys, queries and time steps."""
    result_multiplier: float = 1.0

    @property
    def own(self) -> Mapping[str, ParameterSpec]:
        """Logarithm of A, D and bias of the time step by head; the weight of the norm by feature."""
        split = Split(0)
        rates = ParameterSpec(
            name="attention.decay", shape=(self.heads,), init="decay rates from 1", decay=False, split=split
        )
        skip = ParameterSpec(name="attention.skip", shape=(self.heads,), init="ones", decay=False, split=split)
        bias = ParameterSpec(
            name="attention.step_bias", shape=(self.heads,), init="time steps", decay=False, split=split
        )
        norm = ParameterSpec(
            name="attention.norm.weight", shape=(self.heads * self.value_size,), init="ones", decay=False, split=split
        )
        found = {"decay": rates, "skip": skip, "step_bias": bias}
        return found if self.gated_norm == "none" else {**found, "norm": norm}

    @property
    def norms_over_ranks(self) -> int:
        return int(self.gated_norm == "all" or (self.gated_norm == "group" and self.groups == 1))

    @property
    def scratch(self) -> tuple[float, float]:
        k, v, c = self.heads * self.key_size, self.heads * self.value_size, self.heads * self.chunk
        channels = self.units * self.convolved + self.shared_convolved
        return 4.2 * k + 1.9 * v + 1.8 * c + 2.2 * channels, 5.3 * k + 10.9 * v + 2.1 * c + 1.6 * channels

    def taps(self, weights: Sequence[Tensor]) -> Tensor:
        """The convolution is linear in each channel, so the factors of values, keys and queries are its own."""
        from torch import cat

        _, *factors, _ = self.multipliers
        if factors == [1.0] * 3:
            return super().taps(weights)
        sizes = self.heads // self.units * self.value_size, self.key_size, self.key_size
        if self.shared is None:
            (mine,) = weights
            parts = mine.unflatten(0, (-1, self.convolved)).split(sizes, dim=1)
            return cat([part * factor for part, factor in zip(parts, factors, strict=True)], dim=1).flatten(0, 1)
        parts = weights[0], *weights[1].split(sizes[1:])
        return cat([part * factor for part, factor in zip(parts, factors, strict=True)])

    def _values(self, rows: Rows) -> Tensor:
        """[n, batch, heads, value]"""
        from torch.nn.functional import silu

        features = self.heads // self.units * self.value_size
        values: Tensor = silu(rows.convolved[..., :features]).unflatten(-1, (-1, self.value_size)).flatten(2, 3)
        return values

    def operands(self, rows: Rows, own: Mapping[str, Tensor]) -> Operands:
        from torch.nn.functional import silu, softplus

        from megatron_port.ext.mixers.recurrence import Operands

        each, values = self.heads // self.units, self._values(rows)
        steps = _times(rows.plain[..., each * self.value_size :].flatten(-2), self.multipliers[4])
        steps = softplus(steps + own["step_bias"])
        steps = steps.clamp(self.step_min, self.step_max or None)
        shared = rows.shared[..., None, :] if self.shared is not None else rows.convolved[..., each * self.value_size :]
        keys, queries = silu(shared).split(self.key_size, dim=-1)
        copies = values.shape[2] // keys.shape[2]
        return Operands(
            queries=by_head(queries).repeat_interleave(copies, 1), keys=by_head(keys).repeat_interleave(copies, 1),
            values=by_head(values * steps[..., None]), decay=by_head(-own["decay"].exp() * steps), rate=None,
        )

    def result(self, mixed: Tensor | None, rows: Rows, own: Mapping[str, Tensor], norm: Norm) -> Tensor:
        return _times(self._result(mixed, rows, own, norm), self.result_multiplier)

    def _result(self, mixed: Tensor | None, rows: Rows, own: Mapping[str, Tensor], norm: Norm) -> Tensor:
        from torch.nn.functional import silu

        assert mixed is not None
        out = (mixed + own["skip"][:, None] * self._values(rows)).flatten(-2)
        gate = rows.plain[..., : self.heads // self.units * self.value_size].flatten(-2)
        gate = silu(_times(gate, self.multipliers[0]))
        if self.gated_norm == "none":
            return out * gate
        if not self.norm_before_gate:
            out = out * gate
        if self.gated_norm == "all" or self.groups == 1:
            out = norm(out, own["norm"], over_ranks=True)
        else:
            size = self.heads // self.groups * self.value_size
            out = norm(out.unflatten(-1, (-1, size)), own["norm"].unflatten(0, (-1, size))).flatten(-2)
        return out * gate if self.norm_before_gate else out


def _times(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else x * factor


def mamba2(model: ModelConfig, index: int) -> Mamba2Spec:
    """Return the mixer of a layer (from 0)."""
    r = sizes_of(model)
    one = r.key_heads == 1
    units = r.heads if one else r.key_heads
    each, keys = r.heads // units, 2 * (r.key_size,)
    values = each * r.value_size
    convolved, plain = (values, *(() if one else keys)), (values, each)
    return Mamba2Spec(
        units=units, convolved=sum(convolved), plain=sum(plain), kernel=r.kernel, convolution_bias=r.convolution_bias,
        heads=r.heads, key_size=r.key_size, value_size=r.value_size, chunk=r.chunk, segment=r.segment,
        groups=r.key_heads, step_min=r.step_min, step_max=r.step_max, gated_norm=r.gated_norm,
        norm_before_gate=r.norm_before_gate, multipliers=r.multipliers or (1.0,) * 5,
        result_multiplier=r.result_multiplier,
        packed=projection(model, (*convolved, *plain), units),
        shared=shared_projection(model, keys) if one else None, shared_convolved=sum(keys) if one else 0,
        output=output(model, r.heads * r.value_size),
    )


def _faults(model: ModelConfig) -> Iterator[str]:
    yield from shared_keys(model)
    r = model.recurrent
    if 0 < r.step_max < r.step_min:
        yield (f"model.recurrent.step_max {r.step_max} is below step_min {r.step_min}; use at least that, or 0 for any "
               "time step")
    if r.multipliers and (len(r.multipliers) != 5 or min(r.multipliers) <= 0):
        yield (f"model.recurrent.multipliers {list(r.multipliers)}: give five above 0, of gates, values, keys, queries "
               "and time steps, or none")
    if r.gated_norm == "none" and r.norm_before_gate:
        yield ('model.recurrent.norm_before_gate is of the norm that gated_norm = "none" leaves out; leave it out, or '
               'use "group" or "all"')


KIND = RecurrentKind(mamba2, faults=_faults, reads=frozenset({
    "heads", "key_heads", "key_size", "value_size", "kernel", "convolution_bias", "step_min", "step_max", "gated_norm",
    "norm_before_gate", "norm_epsilon", "multipliers", "result_multiplier", "chunk", "segment",
}))
