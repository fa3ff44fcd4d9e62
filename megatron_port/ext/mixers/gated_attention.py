"""Attention whose mixed values are gated (Qwen3-Next): twice the rows of queries, of which every second head gates."""

from __future__ import annotations

import torch

from megatron_port.core.model.attention import SelfAttention


class GatedAttention(SelfAttention):
    """Self-attention whose arguments are made of the fused projection, which the gates are read from as well."""

    _split_bias = None  # the projection adds its bias itself: the gates have a part of it

    def _parts(self, packed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return queries and gates [seq, batch, groups/tp, heads of a group, d], keys and values [..., 1, d]."""
        pairs = 2 * self.heads_per_group
        rows = packed.view(*packed.shape[:2], self.groups, pairs + 2, self.head_size)
        queries, keys, values = rows.split((pairs, 1, 1), dim=3)
        return queries[..., ::2, :], queries[..., 1::2, :], keys, values

    def project(self, packed: torch.Tensor) -> torch.Tensor:
        """Return [seq, batch, groups/tp, heads of a group + 2, d], without the gates; normed if asked."""
        queries, _, keys, values = self._parts(packed)
        if self.query_norm is not None and self.key_norm is not None:
            queries, keys = self.query_norm(queries.contiguous()), self.key_norm(keys.contiguous())
        return torch.cat((queries, keys, values), dim=3)

    def gates(self, packed: torch.Tensor) -> torch.Tensor:
        """Return the factors of the mixed values, [seq, batch, heads/tp · d]."""
        return self._parts(packed)[1].sigmoid().flatten(2)

    @staticmethod
    def gated(mixed: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """Return the mixed values, gated."""
        return mixed * gates

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        packed = self.qkv(x)
        mixed = self.attend_to(*self.core_arguments(packed))
        out: torch.Tensor = self.output(self.gated(mixed, self.gates(packed)))
        return out
