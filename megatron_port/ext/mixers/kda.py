"""Kimi Delta Attention (arXiv 2510.26692), as Kimi Linear has it: the mixer ``kda``.

Gated DeltaNet with a decay of each element of a key: exp(-A softplus(x_a + bias)), whose x_a comes by way of a few
features that all heads share, as does the gate. The result of a head is normed and multiplied by sigmoid(gate).
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
    shared_projection,
    sizes_of,
    unit,
)

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_port.ext.mixers.recurrence import Operands
    from megatron_port.ext.mixers.recurrent_spec import Norm, Rows


@dataclass(frozen=True, kw_only=True)
class KimiDeltaSpec(RecurrentSpec):
    """A unit is a head: its query, key, value; its b. Shared are the features of decays, then those of gates, as many
    as a value has each."""

    delta: ClassVar[bool] = True
    std: float
    """Deviation of the products from shared features to heads."""

    @property
    def own(self) -> Mapping[str, ParameterSpec]:
        """Logarithm of A by head; bias of the decay by element; products with shared features; the weight of the norm,
        which all heads share."""
        def rows(name: str, size: int) -> ParameterSpec:
            return ParameterSpec(
                name=f"attention.{name}.weight", shape=(self.heads * size, self.value_size), init="normal",
                std=self.std, decay=True, split=Split(0),
            )

        return {
            "decay": ParameterSpec(
                name="attention.decay", shape=(self.heads,), init="decay rates from 1", decay=False, split=Split(0)
            ),
            "decay_bias": ParameterSpec(
                name="attention.decay_bias", shape=(self.heads * self.key_size,), init="time steps", decay=False,
                split=Split(0),
            ),
            "decay_up": rows("decay_up", self.key_size), "gate_up": rows("gate_up", self.value_size),
            "norm": ParameterSpec(
                name="attention.norm.weight", shape=(self.value_size,), init="ones", decay=False, gradient="heads"
            ),
        }

    @property
    def scratch(self) -> tuple[float, float]:
        # Pairs of a chunk's positions have decays of each element of a key, which are computed for a block at once.
        k, v, block = self.heads * self.key_size, self.heads * self.value_size, min(16, self.chunk)
        return (15 + 3.6 * block**2 / self.chunk) * k + 3.6 * v, 104 * k + 11.3 * v

    def flops(self, seq: int, document: float = 0.0) -> float:
        up = 2.0 * self.heads * (self.key_size + self.value_size) * self.value_size
        return super().flops(seq, document) + seq * up

    def operands(self, rows: Rows, own: Mapping[str, Tensor]) -> Operands:
        from torch.nn.functional import linear, silu, softplus

        from megatron_port.ext.mixers.recurrence import Operands

        k = self.key_size
        query, key, values = silu(rows.convolved).split((k, k, self.value_size), dim=-1)
        forget = linear(rows.shared[..., : self.value_size], own["decay_up"], own["decay_bias"])
        decay = -own["decay"].exp()[:, None] * softplus(forget.unflatten(-1, (-1, k)))
        return Operands(
            queries=by_head(unit(query) * k**-0.5), keys=by_head(unit(key)), values=by_head(values),
            decay=by_head(decay), rate=by_head(rows.plain.flatten(-2).sigmoid()),
        )

    def result(self, mixed: Tensor | None, rows: Rows, own: Mapping[str, Tensor], norm: Norm) -> Tensor:
        from torch.nn.functional import linear

        assert mixed is not None
        gate = linear(rows.shared[..., self.value_size :], own["gate_up"])
        return norm(mixed, own["norm"]).flatten(-2) * gate.sigmoid()


def kda(model: ModelConfig, index: int) -> KimiDeltaSpec:
    """Return the mixer of a layer (from 0)."""
    r = sizes_of(model)
    convolved = r.key_size, r.key_size, r.value_size
    return KimiDeltaSpec(
        units=r.heads, convolved=sum(convolved), plain=1, kernel=r.kernel, heads=r.heads, key_size=r.key_size,
        value_size=r.value_size, chunk=r.chunk, segment=r.segment, std=model.matrix_std,
        packed=projection(model, (*convolved, 1), r.heads), shared=shared_projection(model, 2 * (r.value_size,)),
        output=output(model, r.heads * r.value_size),
    )


KIND = RecurrentKind(kda, reads=frozenset({
    "heads", "key_size", "value_size", "kernel", "chunk", "segment", "norm_epsilon",
}))
