"""Causal self-attention with heads split over tensor-parallel ranks; grouped-query (arXiv 2305.13245) and rotary."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from megatron_port.model.build import BuildContext
from megatron_port.model.norm import Norm
from megatron_port.model.recompute import recompute
from megatron_port.model.spec import AttentionSpec, Groups
from megatron_port.parallel.context import ParallelContext
from megatron_port.parallel.linear import Rows


def projection_rows(groups: Groups, ctx: ParallelContext) -> tuple[Rows, Rows] | None:
    """Return this tp rank's query rows of the fused projection, and the key and value rows that it shares; None where
    nothing is shared. Raises ValueError where the topology disagrees."""
    copies = groups.held(ctx.topology.tp) // groups.groups
    if ctx.topology.kv_copies != copies:
        raise ValueError(
            f"{groups.groups} key/value heads on {ctx.topology.tp} tp ranks have {copies} copies, and the topology "
            f"says {ctx.topology.kv_copies}"
        )
    return None if copies == 1 else rank_rows(groups, ctx.topology.tp, ctx.index("tp"))


def rank_rows(groups: Groups, tp: int, rank: int) -> tuple[Rows, Rows]:
    """Rows of the fused projection on tensor-parallel rank ``rank`` of ``tp``, more than there are key/value heads: its
    query heads, and the key and value that it shares."""
    copies = tp // groups.groups
    group, part = divmod(rank, copies)
    heads = groups.heads // groups.groups
    first, own = group * (heads + 2), heads // copies
    d = groups.head_size
    return Rows((first + part * own) * d, own * d), Rows((first + heads) * d, 2 * d, copies)


class SelfAttention(nn.Module):
    """Self-attention [seq(/tp), batch, hidden] → same shape, without the bias of ``output``; heads / tp on each rank.

    The rows of the fused projection are ordered by group: the group's query
    heads, its key, its value. A tp slice is then a contiguous range of rows.
    With fewer groups than tp ranks, as many neighbours share a group: each has a
    contiguous part of its query heads, and a copy of its key and value.
    """

    def __init__(self, layer: str, spec: AttentionSpec, build: BuildContext) -> None:
        super().__init__()
        tp = build.ctx.topology.tp
        self.build, self.spec = build, spec
        self.groups = spec.groups.held(tp) // tp
        self.heads_per_group = spec.groups.heads // spec.groups.held(tp)
        self.head_size = spec.groups.head_size
        self.head_offset = build.ctx.index("tp") * self.groups * self.heads_per_group
        self.name = f"{layer}.attention"
        self.op = f"{self.name}.probs"
        self.qkv = build.column(layer, spec.qkv, rows=projection_rows(spec.groups, build.ctx))
        self.query_norm = None if spec.query_norm is None else Norm(layer, spec.query_norm, build)
        self.key_norm = None if spec.key_norm is None else Norm(layer, spec.key_norm, build)
        self.output = build.row(layer, spec.output)

    def _core(self, attend: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
        """``attend(*inputs)``, computed again in the backward pass under selective recompute."""
        if self.build.layout.recompute == "selective" and self.training and torch.is_grad_enabled():
            return recompute(attend, *inputs, stream=self.build.stream)
        return attend(*inputs)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        p, stream = self.build.model.attention_dropout, self.build.stream
        if p == 0.0 or not stream.enabled:
            return self.build.providers.attention(q, k, v)
        hook = lambda probs: stream.dropout_probabilities(  # noqa: E731
            probs, p, op=self.op, head_offset=self.head_offset, positions=self.build.held_positions(q.shape[0])
        )
        return self.build.providers.attention(q, k, v, probs_hook=hook)

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """Return [seq, batch, groups/tp, heads of a group + 2, d]: a group's queries, key, value; normed if asked."""
        y = self.qkv(x)
        groups: torch.Tensor = y.view(*y.shape[:2], self.groups, self.heads_per_group + 2, self.head_size)
        if self.query_norm is None or self.key_norm is None:
            return groups
        queries, keys, values = groups.split((self.heads_per_group, 1, 1), dim=3)
        return torch.cat((self.query_norm(queries.contiguous()), self.key_norm(keys.contiguous()), values), dim=3)

    def split(self, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries [seq, batch, heads/tp, d], keys and values [seq, batch, groups/tp, d]; rotated under rope."""
        seq, batch = y.shape[:2]
        if self.build.model.position_embedding != "rope":
            return self.build.providers.split_rotary(y, None, None)
        cache = self.build.cache.now
        if cache is None or cache.positions is None:
            cos, sin = self.build.rotary.rows(self.build.held_positions(seq), self.build.model, y.device)
            return self.build.providers.split_rotary(y, cos, sin)
        # One token of each sequence, each at its own position: rows are rotated one by one, so the batch stands in for
        # the sequence.
        cos, sin = self.build.rotary.rows_at(cache.positions, cache.length, self.build.model)
        q, k, v = self.build.providers.split_rotary(y.view(batch, 1, *y.shape[2:]), cos, sin)
        return q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, cache, packed = self.project(x), self.build.cache.now, self.build.providers.packed_attention
        if packed is not None and cache is None and self.build.model.position_embedding != "rope":
            out: torch.Tensor = self.output(self._core(packed, y))
            return out
        q, k, v = self.split(y)
        if cache is not None:
            if cache.positions is not None:
                out = self.output(cache.attend(self.name, q, k, v))
                return out
            cache.store(self.name, k, v)
        out = self.output(self._core(self._attend, q, k, v))
        return out
