"""Causal self-attention with heads split over tensor-parallel ranks; grouped-query (arXiv 2305.13245) and rotary."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.positions import Positions
from megatron_port.core.layers.attention import AttentionMask, DropoutOf
from megatron_port.core.layers.fused import ProbabilityDropout
from megatron_port.core.layers.linear import ColumnParallelLinear, Rows
from megatron_port.core.model.build import BuildContext
from megatron_port.core.model.layers import Norm
from megatron_port.core.model.spec import AttentionSpec, GroupedAttentionSpec, Groups, NormSpec
from megatron_port.core.registry import PARTS


def projection_rows(groups: Groups, ctx: ParallelContext) -> tuple[Rows, Rows] | None:
    """Return this tp rank's query rows of the fused projection, and the key and value rows that it shares; None where
    nothing is shared. Raises ValueError where the topology disagrees."""
    tp = ctx.size("tp")
    copies = groups.held(tp) // groups.groups
    if ctx.size("kv_copies") != copies:
        raise ValueError(
            f"{groups.groups} key/value heads on {tp} tp ranks have {copies} copies, and the mesh says "
            f"{ctx.size('kv_copies')}"
        )
    return None if copies == 1 else rank_rows(groups, tp, ctx.index("tp"))


def rank_rows(groups: Groups, tp: int, rank: int) -> tuple[Rows, Rows]:
    """Rows of the fused projection on tensor-parallel rank ``rank`` of ``tp``, more than there are key/value heads: its
    query heads, and the key and value that it shares."""
    copies = tp // groups.groups
    group, part = divmod(rank, copies)
    heads = groups.heads // groups.groups
    first, own = group * (heads + 2), heads // copies
    d = groups.head_size
    return Rows((first + part * own) * d, own * d), Rows((first + heads) * d, 2 * d, copies)


def _head_norm(layer: str, spec: NormSpec, build: BuildContext) -> Norm:
    """Build a norm of each head's queries or keys, or of those of all heads at once."""
    make = Norm if spec.split is None else PARTS.function("query and key norm over all heads")
    made: Norm = make(layer, spec, build)
    return made


class SelfAttention(nn.Module):
    """Self-attention [seq(/tp), batch, hidden] → same shape, without the bias of ``output``; heads / tp on each rank.

    The rows of the fused projection are ordered by group: the group's query
    heads, its key, its value. A tp slice is then a contiguous range of rows.
    With fewer groups than tp ranks, as many neighbours share a group: each has a
    contiguous part of its query heads, and a copy of its key and value.
    """

    def __init__(self, layer: str, spec: AttentionSpec, build: BuildContext) -> None:
        super().__init__()
        tp = build.ctx.size("tp")
        self.spec, self.providers, self.step, self.stream = spec, build.providers, build.step, build.stream
        self.dropout, self.recompute = build.model.attention_dropout, build.recompute("selective")
        self.rotary, self.partition = build.rotary(spec.rotation), build.partition
        self.context = build.context_attention()
        self.groups = spec.groups.held(tp) // tp
        self.heads_per_group = spec.groups.heads // spec.groups.held(tp)
        self.head_size = spec.groups.head_size
        self.head_offset = build.ctx.index("tp") * self.groups * self.heads_per_group
        self.name = f"{layer}.attention"
        self.op = f"{self.name}.probs"
        self.sinks = None if spec.sinks is None else build.per_head(spec.sinks, layer)
        self._build_projection(layer, spec, build)
        self.output = build.row(layer, spec.output)
        self.split_sums_bias = True
        """Whether :meth:`split` may give the projection's bias its gradient."""

    def _build_projection(self, layer: str, spec: AttentionSpec, build: BuildContext) -> None:
        """Build what makes queries, keys and values."""
        assert isinstance(spec, GroupedAttentionSpec) and spec.qkv.groups is not None
        self.qkv = build.column(layer, spec.qkv, rows=projection_rows(spec.qkv.groups, build.ctx))
        self.query_norm, self.key_norm = (
            None if norm is None else _head_norm(layer, norm, build) for norm in (spec.query_norm, spec.key_norm)
        )

    def _positions(self, rows: int) -> Positions:
        """Positions of the ``rows`` rows of this rank's queries, keys and values."""
        partition = self.partition.divided(self.step.division)
        return partition.held(partition.seq_length(rows))

    def _recomputed(self, attend: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
        """Return ``attend(*inputs)``, computed again in the backward pass under selective recompute."""
        if self.recompute is not None and self.training and torch.is_grad_enabled():
            return self.recompute(attend, *inputs, step=self.step)
        return attend(*inputs)

    def _attend_with_dropout(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        rows, partition = q.shape[0], self.partition.divided(self.step.division)
        mask = self._mask(partition.seq_length(rows), q)
        if self.context is None:
            return self.providers.attention(q, k, v, dropout=self._probability_dropout(rows), mask=mask)
        return self.context.attend(q, k, v, partition, dropout_of=self._dropout_of, mask=mask)

    def _mask(self, rows: int, x: torch.Tensor) -> AttentionMask | None:
        """Return what attention of all ``rows`` positions does beyond the causal softmax in this pass, or None. ``x``:
        [positions, batch, ...]."""
        spec, context = self.spec, self.step.current
        window, chunk = (size if size < rows else 0 for size in (spec.window, spec.chunk))
        first = None if context is None else context.document_starts
        if not window and not chunk and not spec.softcap and self.sinks is None and first is None:
            return None
        packed, earliest = (None, None) if context is None else (context.packed_documents, context.earliest_key)
        if chunk:
            first, packed, earliest = PARTS.function("chunk starts")(first, rows, x, chunk), None, None
        return AttentionMask(
            window=window, softcap=spec.softcap, sinks=self.sinks, first=first, documents=packed, earliest=earliest
        )

    def _probability_dropout(self, rows: int) -> ProbabilityDropout | None:
        """Return the dropout of the probabilities of ``rows`` queries in this pass; None where nothing is dropped."""
        dropout_of = self._dropout_of
        return None if dropout_of is None else dropout_of(self._positions(rows))

    @property
    def _dropout_of(self) -> DropoutOf | None:
        """The dropout of any of the layer's probabilities in this pass; None where nothing is dropped."""
        if self.dropout == 0.0 or not self.stream.enabled:
            return None

        def dropout_of(
            queries: Positions, *, first_head: int = 0, keys: Positions | None = None, seq_length: int = 0
        ) -> ProbabilityDropout:
            return self.stream.probability_dropout(
                self.dropout, op=self.op, head_offset=self.head_offset + first_head, positions=queries, keys=keys,
                seq_length=seq_length,
            )

        return dropout_of

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """Return [seq, batch, groups/tp, heads of a group + 2, d]: a group's queries, key, value; normed if asked."""
        y = self.qkv(x) if self._split_bias is None else self.qkv(x, detach_bias=True)
        groups: torch.Tensor = y.view(*y.shape[:2], self.groups, self.heads_per_group + 2, self.head_size)
        if self.query_norm is None or self.key_norm is None:
            return groups
        queries, keys, values = groups.split((self.heads_per_group, 1, 1), dim=3)
        return torch.cat((self.query_norm(queries.contiguous()), self.key_norm(keys.contiguous()), values), dim=3)

    def split(self, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [seq, batch, heads/tp, d], keys and values [seq, batch, groups/tp, d]; rotated under rope."""
        if self.rotary is None:
            bias, with_bias = self._split_bias, self.providers.split_bias
            if bias is None or with_bias is None:
                return self.providers.split_rotary(y, None, None)
            return with_bias(y, bias)
        cos, sin = self.rotary.rows(self._positions(y.shape[0]), y.device)
        return self.providers.split_rotary(y, cos, sin)

    @property
    def _split_bias(self) -> torch.Tensor | None:
        """The projection's bias where :meth:`split` gives it its gradient, and :meth:`project` does not."""
        qkv = self.qkv
        plain = isinstance(qkv, ColumnParallelLinear) and qkv.shared_bias is None and qkv.adapter is None
        wanted = self.split_sums_bias and self.providers.split_bias is not None and not self._packed
        if not plain or not wanted or self.rotary is not None or self.query_norm is not None:
            return None
        return qkv.bias

    def core_arguments(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return what :meth:`attend_to` takes, from the input: the packed projection, or queries, keys and values."""
        y = self.project(x)
        return (y,) if self._packed else self.split(y)

    def attend_to(self, *arguments: torch.Tensor) -> torch.Tensor:
        """Causal attention from what :meth:`core_arguments` returned: [seq, batch, heads/tp · elements of a value]."""
        packed = self.providers.packed_attention
        if packed is None or not self._packed:
            return self.attend_split(*arguments)

        # Inside what is recomputed: dropout and documents are those of the samples which the stream then has.
        def core(y: torch.Tensor) -> torch.Tensor:
            rows = y.shape[0]
            return packed(y, dropout=self._probability_dropout(rows), mask=self._mask(rows, y))

        return self.values(self._recomputed(core, *arguments))

    @property
    def _packed(self) -> bool:
        """Whether attention takes the projection as it is."""
        return self.providers.packed_attention is not None and self.rotary is None and self.context is None

    def attend_split(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Causal attention from what :meth:`split` returned: [seq, batch, heads/tp · elements of a value]."""
        return self.values(self._recomputed(self._attend_with_dropout, q, k, v))

    def values(self, out: torch.Tensor) -> torch.Tensor:
        """Return what the output projection takes, from the mixed values as attention gives them."""
        return out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.output(self.attend_to(*self.core_arguments(x)))
        return out
