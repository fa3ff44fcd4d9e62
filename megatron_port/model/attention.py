"""Causal self-attention with heads split over tensor-parallel ranks; grouped-query (arXiv 2305.13245) and rotary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from megatron_port.config.schema import ModelConfig
from megatron_port.model.build import BuildContext
from megatron_port.model.recompute import recompute
from megatron_port.parallel.context import ParallelContext
from megatron_port.parallel.linear import ColumnParallelLinear, RowParallelLinear, Rows


def projection_rows(model: ModelConfig, ctx: ParallelContext) -> tuple[Rows, Rows] | None:
    """This tp rank's query rows, and the key and value rows that it shares, of the fused projection; None: nothing is
    shared. Raises ValueError where the topology says otherwise."""
    copies = model.kv_heads_held(ctx.topology.tp) // model.kv_heads
    if ctx.topology.kv_copies != copies:
        raise ValueError(
            f"{model.kv_heads} key/value heads on {ctx.topology.tp} tp ranks have {copies} copies, and the topology "
            f"says {ctx.topology.kv_copies}"
        )
    return None if copies == 1 else rank_rows(model, ctx.topology.tp, ctx.coords.tp)


def rank_rows(model: ModelConfig, tp: int, rank: int) -> tuple[Rows, Rows]:
    """Rows of the fused projection on tensor-parallel rank ``rank`` of ``tp``, more than there are key/value heads: its
    query heads, and the key and value that it shares."""
    copies = tp // model.kv_heads
    group, part = divmod(rank, copies)
    heads = model.num_attention_heads // model.kv_heads
    first, own = group * (heads + 2), heads // copies
    d = model.head_size
    return Rows((first + part * own) * d, own * d), Rows((first + heads) * d, 2 * d, copies)


class SelfAttention(nn.Module):
    """[seq(/tp), batch, hidden] → the same, without the bias of ``output``; heads / tp on each rank.

    The rows of the fused projection are ordered by group: the group's query
    heads, its key, its value. A tp slice is then a contiguous range of rows.
    With fewer groups than tp ranks, as many neighbours share a group: each has a
    contiguous part of its query heads, and a copy of its key and value.
    """

    def __init__(self, name: str, build: BuildContext) -> None:
        super().__init__()
        cfg, tp = build.model, build.ctx.topology.tp
        self.build = build
        self.groups = cfg.kv_heads_held(tp) // tp
        self.heads_per_group = cfg.num_attention_heads // cfg.kv_heads_held(tp)
        self.head_size = cfg.head_size
        self.head_offset = build.ctx.coords.tp * self.groups * self.heads_per_group
        self.name, self.op = name, f"{name}.probs"
        common: dict[str, Any] = {"ctx": build.ctx, "sequence_parallel": build.sequence_parallel, "bias": cfg.add_bias,
                  "dtype": build.dtype, "kernels": build.kernels}
        rows = (cfg.num_attention_heads + 2 * cfg.kv_heads) * cfg.head_size
        self.qkv = ColumnParallelLinear(
            f"{name}.qkv", cfg.hidden_size, rows, init=build.init, rows=projection_rows(cfg, build.ctx), **common
        )
        self.output = RowParallelLinear(
            f"{name}.output", cfg.num_attention_heads * cfg.head_size, cfg.hidden_size, init=build.output_init,
            skip_bias=True, **common,
        )

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
            probs, p, op=self.op, head_offset=self.head_offset
        )
        return self.build.providers.attention(q, k, v, probs_hook=hook)

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """[seq, batch, groups/tp, heads of a group + 2, d]: of each group its queries, its key, its value."""
        y = self.qkv(x)
        return y.view(*y.shape[:2], self.groups, self.heads_per_group + 2, self.head_size)

    def split(self, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [seq, batch, heads/tp, d], keys and values [seq, batch, groups/tp, d]; rotated under rope."""
        seq, batch = y.shape[:2]
        if self.build.model.position_embedding != "rope":
            return self.build.providers.split_rotary(y, None, None)
        cache = self.build.cache.now
        if cache is None or cache.positions is None:
            cos, sin = self.build.rotary.get(seq, self.build.model, y.device)
            return self.build.providers.split_rotary(y, cos, sin)
        # One token of each sequence, each at its own position: rows are rotated one by one, so the batch stands in for
        # the sequence.
        cos, sin = (t[cache.positions] for t in self.build.rotary.get(cache.length, self.build.model, y.device))
        q, k, v = self.build.providers.split_rotary(y.view(batch, 1, *y.shape[2:]), cos, sin)
        return q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, cache, packed = self.project(x), self.build.cache.now, self.build.providers.packed_attention
        if packed is not None and cache is None and self.build.model.position_embedding != "rope":
            return self.output(self._core(packed, y))
        q, k, v = self.split(y)
        if cache is not None:
            if cache.positions is not None:
                return self.output(cache.attend(self.name, q, k, v))
            cache.store(self.name, k, v)
        return self.output(self._core(self._attend, q, k, v))
