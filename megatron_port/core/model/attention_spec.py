"""Specs of softmax attention: grouped-query with a fused projection, and by way of latents. Plain Python."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from megatron_port.core.model.mixer_spec import MixerSpec
from megatron_port.core.model.ops import Op
from megatron_port.core.model.parameter_spec import Groups, LinearSpec, NormSpec, ParameterSpec

Rotation = Literal["none", "usual", "window"]
"""Of queries and keys by their positions: not at all, or with the model's frequencies, or with those that layers with a
window have for themselves."""


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(MixerSpec):
    """Causal self-attention with a softmax over scores, however queries, keys and values are made."""

    groups: Groups
    rotation: Rotation
    softcap: float = 0.0
    """Soft-cap of the scores; 0: none."""
    sinks: ParameterSpec | None = None
    """A score per query head without a key and a value."""

    @property
    def attention(self) -> AttentionSpec:
        return self

    @property
    def _own_parameters(self) -> tuple[ParameterSpec, ...]:
        """Those that come before the projections'."""
        return () if self.sinks is None else (self.sinks,)

    @property
    def value_size(self) -> int:
        """Elements of a head's value."""
        return self.groups.head_size

    @property
    def mixed_features(self) -> int:
        return self.groups.heads * self.groups.head_size

    @property
    def normed_heads(self) -> NormSpec | None:
        """A norm of the heads of queries or of keys."""
        return None

    def is_masked(self, seq: int) -> bool:
        """Whether attention over ``seq`` tokens is more than causal."""
        return 0 < self.window < seq or self.softcap > 0 or self.sinks is not None

    def packed_features(self, tp: int) -> int:
        """Elements per token of queries, keys and values on ``tp`` ranks together, copies and padding included."""
        return self.groups.rows_held(tp)

    def flops(self, seq: int, document: float = 0.0) -> float:
        """Operations of QKᵀ and of the weights times V of one sample's forward. The causal half is not taken off, nor
        is a window's. ``document``: as :meth:`scores_seen`."""
        sizes = self.groups.heads * (self.groups.head_size + self.value_size)
        return 2 * self.scores_seen(seq, document) * sizes

    def pair_flops(self, seq: int, document: float = 0.0) -> float:
        return self.flops(seq, document)

    def scores_seen(self, seq: int, document: float = 0.0) -> float:
        """Twice the scores of one head that documents and a window leave of ``seq`` tokens: w (2 d - w) seq / d.

        ``document``: tokens of the document that a token is in, in the mean over tokens; 0: the sample is one. Exact
        without a window, and with one where all documents have this length.
        """
        length = min(document or seq, seq)
        window = min(self.window or length, length)
        seen = window * (2 * length - window)
        return seen if length == seq else seen * seq / length

    def ops(self, source: str) -> tuple[Op, ...]:
        return self._two_ops(source, "heads", "scores")

    def _two_ops(self, source: str, heads: str, scores: str) -> tuple[Op, ...]:
        """Queries, keys and values of ``source``, and what is mixed of them."""
        return (
            Op(kind=heads, run="attention.core_arguments", site="qkv", reads=(source,), writes=("heads",), part=self),
            Op(kind=scores, run="attention.attend_to", site="core", reads=("heads",), writes=("mixed",), part=self),
        )


@dataclass(frozen=True, kw_only=True)
class GroupedAttentionSpec(AttentionSpec):
    """Attention with a fused projection of queries, keys and values, and optional norms of queries and of keys."""

    module: ClassVar[str] = "megatron_port.core.model.attention:SelfAttention"
    qkv: LinearSpec
    query_norm: NormSpec | None
    key_norm: NormSpec | None

    @property
    def projections(self) -> tuple[LinearSpec, ...]:
        return self.qkv.factors

    @property
    def parameters(self) -> tuple[ParameterSpec, ...]:
        norms = tuple(p for n in (self.query_norm, self.key_norm) if n is not None for p in n.parameters)
        return (*self._own_parameters, *self.qkv.parameters, *norms, *self.output.parameters)

    @property
    def entry_rank(self) -> int:
        return self.qkv.rank

    @property
    def normed_heads(self) -> NormSpec | None:
        return self.query_norm or self.key_norm

    def normalized_features(self, tp: int) -> int:
        """Elements per token that the norms of queries and keys read on ``tp`` ranks together, copies included."""
        heads = self.groups.heads if self.query_norm is not None else 0
        heads += self.groups.held(tp) if self.key_norm is not None else 0
        return heads * self.groups.head_size

    @property
    def norms_over_ranks(self) -> int:
        return sum(norm is not None and norm.split is not None for norm in (self.query_norm, self.key_norm))
