"""Specs of single parameters, linear layers and norms, of which the parts of a model are made. Plain Python.

``model.spec`` has those parts, and the model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

Gradient = Literal["whole", "tokens", "heads", "routed"]


@dataclass(frozen=True)
class Groups:
    """Rows of a fused projection by key/value group: the group's query heads, its key, its value."""

    heads: int
    """Query heads."""
    groups: int
    """Key/value heads."""
    head_size: int

    @property
    def row_runs(self) -> tuple[int, int, int]:
        """Rows of queries, key and value of each group, in turn."""
        return self.heads // self.groups * self.head_size, self.head_size, self.head_size

    def held(self, tp: int) -> int:
        """Return the key/value heads that ``tp`` ranks hold together, copies included; each rank has at least one."""
        return max(self.groups, tp)

    def rows_held(self, tp: int) -> int:
        """Return the rows that ``tp`` ranks hold together, copies included."""
        return self.head_size * (self.heads + 2 * self.held(tp))

    def shared_rows(self, tp: int) -> int:
        """Rows of each rank that neighbouring ranks hold as well."""
        return 2 * self.head_size if tp > self.groups else 0


@dataclass(frozen=True)
class Split:
    """The dimension of a parameter that tensor-parallel ranks divide."""

    dim: int
    vocabulary: bool = False
    """Padded first, as the layout asks."""
    groups: Groups | None = None
    """Divided by key/value group, which ranks share where there are more ranks than groups."""
    kv_heads: int = 0
    """Number of key/value heads if all rows belong to them; else 0."""
    experts: bool = False
    """Divided over expert-parallel ranks in place of tensor-parallel ones."""


@dataclass(frozen=True, kw_only=True)
class ParameterSpec:
    """One parameter of the unsplit model."""

    name: str
    """Canonical; relative to the layer within a :class:`LayerSpec`."""
    shape: tuple[int, ...]
    """Logical: unsplit, unpadded."""
    init: str
    """normal, uniform (mean 0, ``std``) | zeros | ones | row norms (of the weight that it stands beside)"""
    std: float = 0.0
    decay: bool
    """Weight decay applies."""
    split: Split | None = None
    """None: every tensor-parallel rank holds all of it."""
    gradient: Gradient = "whole"
    """Part of an undivided parameter's gradient that a tensor-parallel rank's backward pass computes: ``whole``; the
    part of its ``tokens`` under sequence parallelism, else the whole; the part of its ``heads``, or of others of the
    features that ranks divide; the part of the tokens that it ``routed``, its own share under any layout."""
    tied: bool = False
    """The token table where embedding and head, or what follows that, both have it: one parameter in several units."""
    row_runs: tuple[int, ...] = ()
    """Rows of each matrix in turn, where one packs several (``ParameterRecord.row_runs``)."""

    @property
    def numel(self) -> int:
        """Logical elements."""
        return prod(self.shape)

    def is_partial(self, tp: int, sequence_parallel: bool) -> bool:
        """Whether each of ``tp`` ranks has only a part of the gradient of this unsplit parameter."""
        return tp > 1 and (self.gradient in ("heads", "routed") or (self.gradient == "tokens" and sequence_parallel))

    def local_numel(self, tp: int, padded_vocab: int = 0, ep: int = 1) -> int:
        """Elements that a rank holds, padding and copies included."""
        if self.split is None:
            return self.numel
        if self.split.experts:
            return self.numel // ep
        rest = self.numel // self.shape[self.split.dim]
        if self.split.groups is not None:
            return self.split.groups.rows_held(tp) // tp * rest
        rows = padded_vocab if self.split.vocabulary and padded_vocab else self.shape[self.split.dim]
        if 0 < self.split.kv_heads < tp:
            rows = rows // self.split.kv_heads * tp
        return rows // tp * rest

    def shared_numel(self, tp: int) -> int:
        """Return the elements that neighbouring ranks hold too; each rank has its heads' part of their gradient."""
        if self.split is not None and 0 < self.split.kv_heads < tp:
            return self.local_numel(tp)
        if self.split is None or self.split.groups is None:
            return 0
        return self.split.groups.shared_rows(tp) * (self.numel // self.shape[self.split.dim])


@dataclass(frozen=True, kw_only=True)
class LinearSpec:
    """A matrix product with every token: ``column`` divides its outputs over tensor-parallel ranks, ``row`` its inputs.

    ``packed`` matrices of ``outputs`` rows may be in one parameter [packed, outputs, inputs].
    """

    name: str
    inputs: int
    outputs: int
    parallel: Literal["column", "row", "none"]
    """``none``: every rank has all of it, and under sequence parallelism applies it to its own tokens."""
    bias: bool
    std: float
    packed: int = 1
    groups: Groups | None = None
    """The rows are a fused projection of queries, keys and values."""
    rank: int = 0
    """Its weight is a product of two factors, [out, rank] and [rank, in]; 0: it is one matrix."""
    row_runs: tuple[int, ...] = ()
    """Rows of each matrix of its weight, as ``ParameterSpec`` says."""

    @property
    def factors(self) -> tuple[LinearSpec, ...]:
        """The products that it consists of, in turn.

        What ranks exchange is between the two, so it has ``rank`` features: behind a factor that every rank has
        whole where outputs are divided, before one where inputs are. Their product has the initial deviation ``std``.
        """
        if not self.rank:
            return (self,)
        column, std = self.parallel == "column", math.sqrt(self.std / math.sqrt(self.rank))
        low = LinearSpec(
            name=f"{self.name}_low", inputs=self.inputs, outputs=self.rank, parallel="none" if column else "row",
            bias=False, std=std,
        )
        return low, replace(self, inputs=self.rank, parallel="column" if column else "none", rank=0, std=std)

    @property
    def parameters(self) -> tuple[ParameterSpec, ...]:
        """Weight, and bias where it has one; of a factored one, both weights."""
        if self.rank:
            return tuple(p for factor in self.factors for p in factor.parameters)
        lead = (self.packed,) if self.packed > 1 else ()
        column = self.parallel == "column"
        rows = Split(len(lead), groups=self.groups)
        weight = ParameterSpec(
            name=f"{self.name}.weight", shape=(*lead, self.outputs, self.inputs), init="normal", std=self.std,
            decay=True, split=rows if column else Split(1), row_runs=self.row_runs,
        )
        if self.parallel == "none":
            weight = replace(weight, split=None, gradient="tokens")
        bias = ParameterSpec(
            name=f"{self.name}.bias", shape=(*lead, self.outputs), init="zeros", decay=False,
            split=rows if column else None, gradient="whole" if column else "tokens",
        )
        return (weight, bias) if self.bias else (weight,)

    @property
    def weight_numel(self) -> int:
        """Elements of the weight; a forward takes two operations for each and each token."""
        if self.rank:
            return sum(factor.weight_numel for factor in self.factors)
        return self.packed * self.outputs * self.inputs

    def outputs_held(self, tp: int) -> int:
        """Outputs that ``tp`` ranks compute together, copies included."""
        return self.groups.rows_held(tp) if self.groups is not None else self.packed * self.outputs

    def product(self, tp: int) -> tuple[float, float]:
        """Return (outputs, inputs) of the product on one of ``tp`` ranks."""
        if self.parallel == "column":
            return self.outputs_held(tp) / tp, self.inputs
        return self.outputs, self.inputs if self.parallel == "none" else self.inputs / tp

    def kept_features(self, tp: int) -> int:
        """Activations per token that ``tp`` ranks together keep for the backward pass: what is divided of its ends."""
        return self.outputs_held(tp) if self.parallel == "column" else self.inputs


@dataclass(frozen=True, kw_only=True)
class NormSpec:
    """A norm over ``size`` features."""

    name: str
    size: int
    kind: str
    """layernorm | rmsnorm"""
    bias: bool
    gradient: Gradient = "tokens"
    zero_centered: bool = False
    """It multiplies by 1 + weight."""
    split: Split | None = None
    """The features are those of all heads, of which tensor-parallel ranks have some each."""
    epsilon: float = 0.0
    """Added to the variance; 0: ``model.norm_epsilon``."""

    @property
    def parameters(self) -> tuple[ParameterSpec, ...]:
        """Weight, and bias where it has one."""
        weight = ParameterSpec(
            name=f"{self.name}.weight", shape=(self.size,), init="zeros" if self.zero_centered else "ones", decay=False,
            gradient=self.gradient, split=self.split,
        )
        bias = replace(weight, name=f"{self.name}.bias", init="zeros")
        return (weight, bias) if self.bias else (weight,)
