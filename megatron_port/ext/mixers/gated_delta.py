"""Gated DeltaNet (Yang et al., arXiv 2412.06464), as Qwen3-Next has it: the mixer ``gated_delta``.

Queries and keys of length 1, values and gate; a = exp(-A softplus(x_a + bias)) and b = sigmoid(x_b) of each head of
values, or twice that. Heads of values may share a query and a key. The result of a head is normed and multiplied by
silu(gate).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from megatron_port.core.config.model import ModelConfig
from megatron_port.core.layers.spec import ParameterSpec, Split
from megatron_port.ext.mixers.recurrent_spec import (
    RecurrentKind,
    RecurrentSpec,
    by_head,
    output,
    projection,
    shared_keys,
    sizes_of,
    unit,
)

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_port.ext.mixers.recurrence import Operands
    from megatron_port.ext.mixers.recurrent_spec import Norm, Rows


@dataclass(frozen=True, kw_only=True)
class GatedDeltaSpec(RecurrentSpec):
    """A unit is a head of keys: its query, key, values; its gates, then b and a of each of its values."""

    delta: ClassVar[bool] = True
    most: float = 1.0
    """Bound of b."""

    @property
    def own(self) -> Mapping[str, ParameterSpec]:
        """Logarithm of A and bias of the decay by head; the weight of the norm, which all heads share."""
        return {
            "decay": ParameterSpec(
                name="attention.decay", shape=(self.heads,), init="decay rates", decay=False, split=Split(0)
            ),
            "decay_bias": ParameterSpec(
                name="attention.decay_bias", shape=(self.heads,), init="ones", decay=False, split=Split(0)
            ),
            "norm": ParameterSpec(
                name="attention.norm.weight", shape=(self.value_size,), init="ones", decay=False, gradient="heads"
            ),
        }

    def operands(self, rows: Rows, own: Mapping[str, Tensor]) -> Operands:
        from torch.nn.functional import silu, softplus

        from megatron_port.ext.mixers.recurrence import Operands

        k, each = self.key_size, self.heads // self.units
        query, key, values = silu(rows.convolved).split((k, k, each * self.value_size), dim=-1)
        _, rate, forget = rows.plain.split((each * self.value_size, each, each), dim=-1)
        decay = -own["decay"].exp() * softplus(forget.flatten(-2) + own["decay_bias"])
        return Operands(
            queries=by_head(unit(query) * k**-0.5).repeat_interleave(each, 1),
            keys=by_head(unit(key)).repeat_interleave(each, 1),
            values=by_head(values.unflatten(-1, (each, -1)).flatten(2, 3)),
            decay=by_head(decay), rate=by_head(self.most * rate.flatten(-2).sigmoid()),
        )

    def result(self, mixed: Tensor | None, rows: Rows, own: Mapping[str, Tensor], norm: Norm) -> Tensor:
        from torch.nn.functional import silu

        assert mixed is not None
        gate = rows.plain[..., : self.heads // self.units * self.value_size].unflatten(-1, (-1, self.value_size))
        return (norm(mixed, own["norm"]) * silu(gate.flatten(2, 3))).flatten(-2)


def gated_delta(model: ModelConfig, index: int) -> GatedDeltaSpec:
    """Return the mixer of a layer (from 0)."""
    r = sizes_of(model)
    each = r.heads // r.key_heads
    values = each * r.value_size
    convolved, plain = (r.key_size, r.key_size, values), (values, each, each)
    return GatedDeltaSpec(
        units=r.key_heads, convolved=sum(convolved), plain=sum(plain), kernel=r.kernel, heads=r.heads,
        key_size=r.key_size, value_size=r.value_size, chunk=r.chunk, segment=r.segment,
        packed=projection(model, (*convolved, *plain), r.key_heads), output=output(model, r.heads * r.value_size),
        most=2.0 if r.negative_eigenvalues else 1.0,
    )


KIND = RecurrentKind(
    gated_delta, faults=shared_keys,
    reads=frozenset({
        "heads", "key_heads", "key_size", "value_size", "kernel", "chunk", "segment", "norm_epsilon",
        "negative_eigenvalues",
    }),
)
