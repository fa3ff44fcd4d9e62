"""What mixers with a state have in common: projections, a short convolution, a recurrence, an output. Plain Python.

A mixer is one file that states a :class:`RecurrentSpec` and registers a ``MixerKind``. Its two methods with
tensors say what the recurrence takes and what becomes of its result. Everything else is the module's
(``mixers.recurrent``): the split over ranks, documents, the states between context-parallel ranks, recompute, caches.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from megatron_port.core.config.model import ModelConfig, RecurrentConfig
from megatron_port.core.layers.spec import LinearSpec, ParameterSpec, Split
from megatron_port.core.model.decoder_spec import residual_std
from megatron_port.core.model.ops import Op
from megatron_port.core.model.spec import MixerSpec

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_port.ext.mixers.recurrence import Operands

@dataclass(frozen=True, kw_only=True)
class RecurrentSpec(MixerSpec):
    """A mixer with a state. Tensor-parallel ranks divide its ``units``: heads, or groups of heads that share keys.

    ``packed`` has the rows of one unit after another: first ``convolved`` ones, over which the convolution goes, then
    ``plain`` ones.
    """

    module: ClassVar[str] = "megatron_port.ext.mixers.recurrent:Recurrent"
    recomputes: ClassVar[bool] = True
    delta: ClassVar[bool] = False
    """The recurrence has the delta rule (``mixers.recurrence``)."""
    units: int
    convolved: int
    plain: int
    kernel: int
    """Positions that the convolution reads."""
    convolution_bias: bool = False
    packed: LinearSpec
    heads: int = 0
    """Heads of the recurrence; 0: there is none behind the convolution."""
    key_size: int = 0
    value_size: int = 0
    chunk: int = 64
    """Positions whose pairs the recurrence computes at once."""
    segment: int = 2048
    """Positions that the backward pass computes again at once."""

    @property
    def projections(self) -> tuple[LinearSpec, ...]:
        return (self.packed,)

    @property
    def convolution(self) -> tuple[ParameterSpec, ...]:
        """Weight [channels, kernel], and bias where it has one; as torch's Conv1d they start uniform."""
        channels, split = self.units * self.convolved, Split(0)
        std = 1 / math.sqrt(3 * self.kernel)
        weight = ParameterSpec(
            name="attention.convolution.weight", shape=(channels, self.kernel), init="uniform", std=std, decay=True,
            split=split,
        )
        bias = ParameterSpec(
            name="attention.convolution.bias", shape=(channels,), init="uniform", std=std, decay=False, split=split,
        )
        return (weight, bias) if self.convolution_bias else (weight,)

    @property
    def own(self) -> Mapping[str, ParameterSpec]:
        """Further parameters, by the names under which :meth:`operands` and :meth:`result` find them."""
        return {}

    @property
    def parameters(self) -> tuple[ParameterSpec, ...]:
        return (*self.convolution, *self.own.values(), *self.packed.parameters, *self.output.parameters)

    def flops(self, seq: int, document: float = 0.0) -> float:
        """Operations of the convolution and of the recurrence in chunks: pairs within a chunk, and what each position
        has to do with the state."""
        taps = 2.0 * self.kernel * self.units * self.convolved
        k, v, c = self.key_size, self.value_size, min(self.chunk, seq)
        each = c * (k + v) + 4.0 * k * v  # scores and what they weigh, half of a square each; read and write
        if self.delta:
            each += c * (k + k + v) + 2.0 * k * v  # system, solution of it, what the state takes away
        return seq * (taps + self.heads * each)

    def ops(self, source: str) -> tuple[Op, ...]:
        return (
            Op(kind="column", run="attention.packed", site="qkv", reads=(source,), writes=("packed",),
               part=self.packed),
            # It is computed again in the backward pass, from the projection: states and pairs are not kept.
            Op(kind="recurrence", run="attention.mix", site="core", reads=("packed",), writes=("mixed",), part=self,
               features=self.mixed_features, keeps=("packed",), scratch=self.scratch, scratch_rows=self.segment),
        )

    @property
    def passed(self) -> tuple[float, float, float]:
        """The rows before a run that its convolution reads, what a run does to a state, and states."""
        channels = self.units * self.convolved
        product = self.key_size if self.delta else 1
        states = self.heads * self.key_size * self.value_size
        return (self.kernel - 1) * channels, states + self.heads * self.key_size * product, states

    @property
    def scratch(self) -> tuple[float, float]:
        """Elements per token of a segment that the convolution and the recurrence need in passing, as measured
        (tests/unit/test_gated_delta.py)."""
        k, v, c = self.heads * self.key_size, self.heads * self.value_size, self.heads * self.chunk
        channels, plain, states = self.units * self.convolved, self.units * self.plain, k * self.value_size / self.chunk
        return (
            2.8 * channels + 2 * k + 2.8 * c + 2.1 * states,
            3 * channels + 3.3 * plain + 6 * k + 6.7 * v + 6 * c + states,
        )

    @abstractmethod
    def operands(self, convolved: Tensor, plain: Tensor, own: Mapping[str, Tensor]) -> Operands | None:
        """Return what the recurrence takes; None: there is none.

        ``convolved`` [n, batch, units, convolved], ``plain`` [n, batch, units, plain], ``own`` in fp32 or fp64, of the
        units and heads of this rank.
        """

    @abstractmethod
    def result(
        self, mixed: Tensor | None, convolved: Tensor, plain: Tensor, own: Mapping[str, Tensor], epsilon: float
    ) -> Tensor:
        """Return what ``output`` reads, [n, batch, features / tp], from the result of the recurrence, [n, batch, heads,
        value]; ``epsilon``: of norms."""


def by_head(x: Tensor) -> Tensor:
    """[n, batch, heads, ...] → [batch, heads, n, ...], as recurrences take it."""
    return x.movedim(0, 2)


def unit(x: Any, *, epsilon: float = 1e-6) -> Any:
    """Return vectors of length 1."""
    return x * (x.square().sum(-1, keepdim=True) + epsilon).rsqrt()


def normed(x: Any, weight: Any, epsilon: float) -> Any:
    """Return the RMSNorm over the last dimension."""
    return x * (x.square().mean(-1, keepdim=True) + epsilon).rsqrt() * weight


def sizes_of(model: ModelConfig) -> RecurrentConfig:
    """Return ``model.recurrent`` with the defaults that other settings give."""
    r = model.recurrent
    heads = r.heads or model.num_attention_heads
    return replace(
        r, heads=heads, key_heads=r.key_heads or heads, key_size=r.key_size or model.head_size,
        value_size=r.value_size or model.head_size,
    )


def projection(model: ModelConfig, rows: int) -> LinearSpec:
    """Return the projection of a layer's input to the rows of all units."""
    return LinearSpec(
        name="attention.packed", inputs=model.hidden_size, outputs=rows, parallel="column", bias=False,
        std=model.matrix_std,
    )


def output(model: ModelConfig, features: int) -> LinearSpec:
    """Return the projection of a mixer's result."""
    return LinearSpec(
        name="attention.output", inputs=features, outputs=model.hidden_size, parallel="row", bias=False,
        std=residual_std(model),
    )
