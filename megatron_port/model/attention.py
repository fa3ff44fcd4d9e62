"""Causal self-attention with heads split over tensor-parallel ranks; grouped-query (arXiv 2305.13245) and rotary."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megatron_port.model.build import BuildContext
from megatron_port.model.recompute import recompute
from megatron_port.parallel.linear import ColumnParallelLinear, RowParallelLinear


def rotary_table(
    seq: int, head_size: int, theta: float, *, device: torch.device, start: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [seq, 1, 1, head_size] of rotary embedding (Su et al., arXiv 2104.09864), float32.

    Frequencies and angles are float32 as in transformers' Llama, so that imported weights give its logits.
    """
    frequency = 1.0 / theta ** (torch.arange(0, head_size, 2, dtype=torch.int64, device=device).float() / head_size)
    angle = torch.outer(torch.arange(start, start + seq, device=device).float(), frequency)
    angle = torch.cat((angle, angle), dim=-1)[:, None, None, :]
    return angle.cos(), angle.sin()


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate [seq, batch, heads, head_size]; element i pairs with i + head_size/2 (Llama's convention)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat((-second, first), dim=-1) * sin.to(x.dtype)


class SelfAttention(nn.Module):
    """[seq(/tp), batch, hidden] → the same; heads / tp on each rank.

    The rows of the fused projection are ordered by group: the group's query
    heads, its key, its value. A tp slice is then a contiguous range of rows.
    """

    def __init__(self, name: str, build: BuildContext) -> None:
        super().__init__()
        cfg, tp = build.model, build.ctx.topology.tp
        self.build = build
        self.groups = cfg.kv_heads // tp
        self.heads_per_group = cfg.num_attention_heads // cfg.kv_heads
        self.head_size = cfg.head_size
        self.head_offset = build.ctx.coords.tp * self.groups * self.heads_per_group
        self.op = f"{name}.probs"
        common: dict[str, Any] = {"ctx": build.ctx, "sequence_parallel": build.sequence_parallel, "bias": cfg.add_bias,
                  "dtype": build.dtype}
        rows = (cfg.num_attention_heads + 2 * cfg.kv_heads) * cfg.head_size
        self.qkv = ColumnParallelLinear(f"{name}.qkv", cfg.hidden_size, rows, init=build.init, **common)
        self.output = RowParallelLinear(
            f"{name}.output", cfg.num_attention_heads * cfg.head_size, cfg.hidden_size, init=build.output_init, **common
        )

    def _core(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        p, stream = self.build.model.attention_dropout, self.build.stream
        if p == 0.0 or not stream.enabled:
            return self.build.providers.attention(q, k, v)
        hook = lambda probs: stream.dropout_probabilities(  # noqa: E731
            probs, p, op=self.op, head_offset=self.head_offset
        )
        return self.build.providers.attention(q, k, v, probs_hook=hook)

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [seq, batch, heads/tp, d], keys and values [seq, batch, groups/tp, d]."""
        y = self.qkv(x)
        seq, batch, _ = y.shape
        y = y.view(seq, batch, self.groups, self.heads_per_group + 2, self.head_size)
        q, k, v = y.split((self.heads_per_group, 1, 1), dim=3)
        return (
            q.reshape(seq, batch, self.groups * self.heads_per_group, self.head_size), k.squeeze(3), v.squeeze(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x)
        cfg = self.build.model
        if cfg.position_embedding == "rope":
            cos, sin = rotary_table(q.shape[0], self.head_size, cfg.rope_theta, device=q.device)
            q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        if self.build.layout.recompute == "selective" and self.training and torch.is_grad_enabled():
            context = recompute(self._core, q, k, v, stream=self.build.stream)
        else:
            context = self._core(q, k, v)
        return self.output(context)
