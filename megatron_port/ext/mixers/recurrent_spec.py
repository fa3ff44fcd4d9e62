"""Base of the mixers with a state: projections, a short convolution, a recurrence, an output. Plain Python.

A mixer is one file that states a :class:`RecurrentSpec` and registers a :class:`RecurrentKind`. Its two methods with
tensors say what the recurrence takes and what becomes of its result. Everything else is the module's
(``mixers.recurrent``): the split over ranks, documents, the states between context-parallel ranks, recompute, caches.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from megatron_port.core.config.model import MixerKind, ModelConfig, RecurrentConfig
from megatron_port.core.layers.spec import LinearSpec, ParameterSpec, Split
from megatron_port.core.model.decoder_spec import residual_std
from megatron_port.core.model.ops import Op
from megatron_port.core.model.spec import MixerSpec

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_port.ext.mixers.recurrence import Operands


class Norm(Protocol):
    """RMSNorm with the epsilon of results."""

    def __call__(self, x: Tensor, weight: Tensor, *, over_ranks: bool = False) -> Tensor:
        """Return the norm over the last dimension; ``over_ranks``: over that of all tensor-parallel ranks together."""


@dataclass(frozen=True)
class RecurrentKind(MixerKind):
    """A mixer with a state, which every layout divides and generation remembers."""

    context: bool = True
    documents: bool = True
    memory: bool = True
    reads: frozenset[str] = frozenset()
    """Settings of ``model.recurrent`` that it reads."""
    faults: Callable[[ModelConfig], Iterable[str]] = lambda model: ()
    """Finds faults of the model's sizes; where there is none, ``spec`` is called."""


@dataclass(frozen=True)
class Rows:
    """Rows that a mixer reads at n neighbouring positions, in fp32 or fp64, of the units of this rank."""

    convolved: Tensor
    """[n, batch, units, convolved]"""
    plain: Tensor
    """[n, batch, units, plain]"""
    shared: Tensor
    """[n, batch, rows of ``shared``], the first of them convolved."""


@dataclass(frozen=True, kw_only=True)
class RecurrentSpec(MixerSpec):
    """A mixer with a state. Tensor-parallel ranks divide its ``units``: heads, or groups of heads that share keys.

    ``packed`` has the rows of one unit after another, of which :meth:`inputs` makes ``convolved`` ones, over which the
    convolution goes, and ``plain`` ones. ``shared`` has rows that all units read and every rank has whole.
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
    shared: LinearSpec | None = None
    shared_convolved: int = 0
    """Rows of ``shared`` that the convolution reads."""
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
        return (self.packed,) if self.shared is None else (self.packed, self.shared)

    @property
    def entry_rank(self) -> int:
        """The layer's input, and the shared rows."""
        return 0 if self.shared is None else self.packed.inputs + self.shared.outputs

    @property
    def shared_rows(self) -> int:
        """Rows of ``shared``."""
        return 0 if self.shared is None else self.shared.outputs

    @property
    def convolution(self) -> tuple[ParameterSpec, ...]:
        """Weight [channels, kernel], and bias where it has one, of the units' channels and then of those they share; as
        torch's Conv1d they start uniform."""
        weight = ParameterSpec(
            name="attention.convolution.weight", shape=(self.units * self.convolved, self.kernel), init="uniform",
            std=1 / math.sqrt(3 * self.kernel), decay=True, split=Split(0),
        )
        found: tuple[ParameterSpec, ...] = (weight,)
        if self.shared_convolved:
            found = weight, replace(
                weight, name="attention.shared_convolution.weight", shape=(self.shared_convolved, self.kernel),
                split=None, gradient="heads",
            )
        if not self.convolution_bias:
            return found
        return tuple(p for one in found for p in (one, replace(
            one, name=one.name.replace("weight", "bias"), shape=one.shape[:1], decay=False
        )))

    @property
    def own(self) -> Mapping[str, ParameterSpec]:
        """Further parameters, by the names under which :meth:`operands` and :meth:`result` find them."""
        return {}

    @property
    def parameters(self) -> tuple[ParameterSpec, ...]:
        products = (p for linear in (*self.projections, self.output) for p in linear.parameters)
        return (*self.convolution, *self.own.values(), *products)

    def flops(self, seq: int, document: float = 0.0) -> float:
        """Operations of the convolution and of the recurrence in chunks: pairs within a chunk, and what each position
        has to do with the state."""
        taps = 2.0 * self.kernel * (self.units * self.convolved + self.shared_convolved)
        k, v, c = self.key_size, self.value_size, min(self.chunk, seq)
        each = c * (k + v) + 4.0 * k * v  # scores and what they weigh, half of a square each; read and write
        if self.delta:
            each += c * (k + k + v) + 2.0 * k * v  # system, solution of it, what the state takes away
        return seq * (taps + self.heads * each)

    def ops(self, source: str) -> tuple[Op, ...]:
        project = Op(kind="column", run="attention.packed", site="qkv", reads=(source,), writes=("packed",),
                     part=self.packed)
        if self.shared is not None:
            project = replace(
                project, kind="column and shared", run="attention.project", keeps=(source,),
                features=self.packed.outputs + self.shared.outputs,
            )
        return (
            project,
            # It is computed again in the backward pass, from the projection: states and pairs are not kept.
            Op(kind="recurrence", run="attention.mix", site="core", reads=("packed",), writes=("mixed",), part=self,
               features=self.mixed_features, keeps=("packed",), scratch=self.scratch, scratch_rows=self.segment),
        )

    @property
    def passed(self) -> tuple[float, float, float]:
        """The rows before a run that its convolution reads, what a run does to a state, and states."""
        channels = self.units * self.convolved + self.shared_convolved
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
            2 * channels + 2.3 * plain + 6 * k + 6.7 * v + 6 * c + states,
        )

    def inputs(self, rows: Tensor, wide: Any) -> tuple[Tensor, Tensor]:
        """Return what the convolution reads, [n, batch, units, convolved], and the plain rows, from the projection's
        [n, batch, units, ...]; ``wide``: fp32 or fp64, in which anything is computed."""
        convolved, plain = rows.split((self.convolved, self.plain), dim=-1)
        return convolved, plain

    def taps(self, weights: Sequence[Tensor]) -> Tensor:
        """Return the weights of the convolution [channels, kernel] from those of the units' channels, and of those that
        they share; a mixer may scale them in place of its rows."""
        from torch import cat

        return cat(tuple(weights))

    @abstractmethod
    def operands(self, rows: Rows, own: Mapping[str, Tensor]) -> Operands | None:
        """Return what the recurrence takes; None: there is none. ``own``: as wide as ``rows``, of this rank."""

    @abstractmethod
    def result(self, mixed: Tensor | None, rows: Rows, own: Mapping[str, Tensor], norm: Norm) -> Tensor:
        """Return what ``output`` reads, [n, batch, features / tp], from the result of the recurrence, [n, batch, heads,
        value]."""


def by_head(x: Tensor) -> Tensor:
    """[n, batch, heads, ...] → [batch, heads, n, ...], as recurrences take it."""
    return x.movedim(0, 2)


def unit(x: Any, *, epsilon: float = 1e-6) -> Any:
    """Return vectors of length 1."""
    return x * (x.square().sum(-1, keepdim=True) + epsilon).rsqrt()


def sizes_of(model: ModelConfig) -> RecurrentConfig:
    """Return ``model.recurrent`` with the defaults that other settings give."""
    r = model.recurrent
    heads = r.heads or model.num_attention_heads
    return replace(
        r, heads=heads, key_heads=r.key_heads or heads, key_size=r.key_size or model.head_size,
        value_size=r.value_size or model.head_size, norm_epsilon=r.norm_epsilon or model.norm_epsilon,
    )


def shared_keys(model: ModelConfig) -> Iterator[str]:
    """Name heads of values that heads of keys cannot share."""
    r = sizes_of(model)
    if r.heads % r.key_heads:
        yield (f"model.recurrent.heads {r.heads} does not divide by key_heads {r.key_heads}; each head of keys serves "
               "as many heads of values")


def projection(model: ModelConfig, row_runs: tuple[int, ...], units: int, *, bias: bool = False) -> LinearSpec:
    """Return the projection of a layer's input to the rows of all units; ``row_runs``: rows of each matrix that a unit
    has a part of, in turn."""
    return LinearSpec(
        name="attention.packed", inputs=model.hidden_size, outputs=units * sum(row_runs), parallel="column", bias=bias,
        std=model.matrix_std, row_runs=row_runs,
    )


def shared_projection(model: ModelConfig, row_runs: tuple[int, ...]) -> LinearSpec:
    """Return the projection of a layer's input to the rows that all units read."""
    return replace(projection(model, row_runs, 1), name="attention.shared", parallel="none")


def output(model: ModelConfig, features: int, *, bias: bool = False) -> LinearSpec:
    """Return the projection of a mixer's result."""
    return LinearSpec(
        name="attention.output", inputs=features, outputs=model.hidden_size, parallel="row", bias=bias,
        std=residual_std(model),
    )
