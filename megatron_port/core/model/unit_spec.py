"""The units of a model (embedding, layers, head) and the model of them, stated once as parts are (``model.spec``).

Plain Python, without torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby

from megatron_port.core.model.spec import LayerSpec, LinearSpec, NormSpec, ParameterSpec


@dataclass(frozen=True, kw_only=True)
class EmbeddingSpec:
    """Token table and, where positions are learned, theirs."""

    word: ParameterSpec
    position: ParameterSpec | None

    @property
    def parameters(self) -> tuple[ParameterSpec, ...]:
        """In the order of the module: its own before those of its parts."""
        return (self.word,) if self.position is None else (self.position, self.word)

    def forward_flops(self, seq: int) -> float:
        """Return 0: rows are looked up, without any product."""
        return 0


@dataclass(frozen=True, kw_only=True)
class PredictionSpec:
    """A module of multi-token prediction (DeepSeek-V3, arXiv 2412.19437): norms of a token's embedding and of a hidden
    state, the projection of both, a layer, and the norm before the head, which it shares with the model."""

    name: str
    """Canonical, before the names of its parts."""
    embedding_norm: NormSpec
    hidden_norm: NormSpec
    projection: LinearSpec
    layer: LayerSpec
    norm: NormSpec

    @property
    def parameters(self) -> tuple[ParameterSpec, ...]:
        """In the order of the modules, by canonical name."""
        before = self.embedding_norm, self.hidden_norm, self.projection
        named = [(self.name, p) for part in before for p in part.parameters]
        named += [(f"{self.name}.layer", p) for p in self.layer.parameters]
        named += [(self.name, p) for p in self.norm.parameters]
        return tuple(replace(p, name=f"{prefix}.{p.name}") for prefix, p in named)

    def forward_flops(self, seq: int) -> float:
        """Operations of one sample's forward, its logits left out."""
        return 2 * seq * self.projection.weight_numel + self.layer.forward_flops(seq)


@dataclass(frozen=True, kw_only=True)
class HeadSpec:
    """Final norm and projection to the vocabulary; tied to the token table or with a matrix of its own.

    In training the modules of multi-token prediction follow it, which share its matrix and the token table.
    """

    norm: NormSpec
    weight: ParameterSpec
    bias: ParameterSpec | None
    predictions: tuple[PredictionSpec, ...] = ()
    table: ParameterSpec | None = None
    """The token table that they read, where the head has another matrix."""

    @property
    def shared(self) -> tuple[ParameterSpec, ...]:
        """Parameters that the modules of multi-token prediction read too."""
        own = (self.weight,) if self.bias is None else (self.weight, self.bias)
        return own if self.table is None else (*own, self.table)

    @property
    def parameters(self) -> tuple[ParameterSpec, ...]:
        """In the order of the modules: the head's own before those of its parts."""
        own = (self.weight,) if self.bias is None else (self.weight, self.bias)
        table = () if self.table is None else (self.table,)
        return (*own, *self.norm.parameters, *table, *(p for part in self.predictions for p in part.parameters))

    def forward_flops(self, seq: int) -> float:
        """Operations of the logits of one sample, those of tokens further ahead included."""
        logits = (1 + len(self.predictions)) * 2 * seq * self.weight.numel
        return logits + sum(part.forward_flops(seq) for part in self.predictions)


Unit = EmbeddingSpec | LayerSpec | HeadSpec


@dataclass(frozen=True)
class ModelSpec:
    """The units of a model in order."""

    embedding: EmbeddingSpec
    layers: tuple[LayerSpec, ...]
    head: HeadSpec
    shared: int = 1
    """Consecutive layers that use one set of weights, which have the names of the first."""

    @property
    def units(self) -> tuple[Unit, ...]:
        """Embedding, layers, head."""
        return self.embedding, *self.layers, self.head

    def parameters(self) -> Iterator[ParameterSpec]:
        """Every parameter once, in order, by canonical name; a tied table with the embedding."""
        yield from self.embedding.parameters
        for index in range(0, len(self.layers), self.shared):
            layer = self.layers[index]
            for parameter in layer.parameters:
                yield replace(parameter, name=f"layers.{index}.{parameter.name}")
        yield from (p for p in self.head.parameters if not p.tied)

    def all_kinds(self) -> list[tuple[LayerSpec, int]]:
        """All layers as runs of equal ones, and those of the modules that predict further tokens."""
        return [*self.kinds(), *((part.layer, 1) for part in self.head.predictions)]

    def kinds(self, start: int = 0, stop: int | None = None) -> list[tuple[LayerSpec, int]]:
        """The layers [start, stop) as runs of equal ones: (layer, how many)."""
        return [(layer, len(list(run))) for layer, run in groupby(self.layers[start:stop])]
