"""The units of the pipeline: embedding, transformer layers, head. One tensor passes between them."""

from __future__ import annotations

import torch
from torch import nn

from megatron_port.model.attention import SelfAttention
from megatron_port.model.build import BuildContext
from megatron_port.model.mlp import MLP
from megatron_port.model.norm import Norm
from megatron_port.model.recompute import recompute
from megatron_port.parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron_port.parallel.embedding import VocabParallelEmbedding, vocab_parameter
from megatron_port.parallel.linear import linear
from megatron_port.parallel.record import attach, split_record

WORD_EMBEDDING = "embedding.word.weight"
"""Canonical name of the token embedding, and of the head's matrix when the two are tied."""


class Embedding(nn.Module):
    """Tokens int64 [batch, seq] → [seq(/tp), batch, hidden]: token embedding, learned positions, dropout."""

    def __init__(self, build: BuildContext) -> None:
        super().__init__()
        cfg = build.model
        self.build = build
        tied = cfg.tie_embeddings and build.ctx.topology.last_stage != 0  # else the head shares this parameter
        weight = vocab_parameter(
            WORD_EMBEDDING, cfg.vocab_size, cfg.hidden_size, ctx=build.ctx,
            padding_multiple=build.layout.vocab_padding_multiple, init=build.init, dtype=build.dtype,
            tied_key=WORD_EMBEDDING if tied else None,
        )
        self.word = VocabParallelEmbedding(weight, ctx=build.ctx, sequence_parallel=build.sequence_parallel)
        self.position: nn.Parameter | None = None
        if cfg.position_embedding == "learned":
            record = split_record(
                "embedding.position.weight", (cfg.seq_length, cfg.hidden_size), init=build.init, decay=True,
                partial_grad_over_tp=build.sequence_parallel,
            )
            empty = torch.empty(record.local_shape, dtype=build.dtype, device=build.ctx.device)
            self.position = attach(nn.Parameter(empty), record)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.word(tokens.t().contiguous())
        if self.position is not None:
            x = x + self._positions(x.shape[0])
        return self.build.residual_dropout(x, op="embedding")

    def _positions(self, rows: int) -> torch.Tensor:
        """Positions of this rank's ``rows``, [rows, 1, hidden]; in generation, [1, batch, hidden]."""
        assert self.position is not None
        cache = self.build.cache.now
        if cache is not None and cache.positions is not None:
            return self.position[cache.positions][None]
        start = self.build.ctx.coords.tp * rows if self.build.sequence_parallel else 0
        return self.position[start : start + rows, None, :]


class TransformerLayer(nn.Module):
    """Pre-norm layer: x + dropout(attention(norm x)), then x + dropout(mlp(norm x)); [seq(/tp), batch, hidden].

    With ``model.parallel_residual`` the second also reads the layer's input (Wang & Komatsuzaki's GPT-J).
    """

    def __init__(self, index: int, build: BuildContext) -> None:
        super().__init__()
        name = f"layers.{index}"
        self.name, self.build = name, build
        self.norm1 = Norm(f"{name}.norm1", build)
        self.attention = SelfAttention(f"{name}.attention", build)
        self.norm2 = Norm(f"{name}.norm2", build)
        self.mlp = MLP(f"{name}.mlp", build)

    def _forward(self, x: torch.Tensor) -> torch.Tensor:
        join = self.build.bias_dropout_add
        out, bias = self.attention(self.norm1(x)), self.attention.output.bias
        if self.build.model.parallel_residual:
            branch = self.mlp(self.norm2(x))
            x = join(out, bias, x, op=f"{self.name}.attention")
            return join(branch, self.mlp.down.bias, x, op=f"{self.name}.mlp")
        if bias is None and self.build.dropout_now == 0.0:
            y, x = self.norm2.add(out, x)
        else:
            x = join(out, bias, x, op=f"{self.name}.attention")
            y = self.norm2(x)
        return join(self.mlp(y), self.mlp.down.bias, x, op=f"{self.name}.mlp")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.build.layout.recompute == "full" and self.training and torch.is_grad_enabled():
            return recompute(self._forward, x, stream=self.build.stream)
        return self._forward(x)


class Head(nn.Module):
    """Final norm and projection to the split vocabulary: [seq(/tp), batch, hidden] → [seq, batch, padded_vocab/tp].

    ``shared``: the embedding's parameter when both are on this stage and tied.
    """

    def __init__(self, build: BuildContext, shared: nn.Parameter | None = None) -> None:
        super().__init__()
        cfg = build.model
        self.build = build
        self.norm = Norm("final_norm", build)
        if shared is not None:
            self.weight = shared
        else:
            self.weight = vocab_parameter(
                WORD_EMBEDDING if cfg.tie_embeddings else "head.weight", cfg.vocab_size, cfg.hidden_size, ctx=build.ctx,
                padding_multiple=build.layout.vocab_padding_multiple, init=build.init, dtype=build.dtype,
                tied_key=WORD_EMBEDDING if cfg.tie_embeddings else None, tied_primary=not cfg.tie_embeddings,
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(
            self.norm(x), self.weight, group=self.build.ctx.tp_group, sequence_parallel=self.build.sequence_parallel
        )

    def token_losses(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Loss of each token [batch, seq] in nats, for ``labels`` int64 [batch, seq]."""
        record = self.weight.record  # type: ignore[attr-defined]
        losses = vocab_parallel_cross_entropy(
            logits, labels.t().contiguous(), offset=record.offset[0], extent=record.extent[0],
            group=self.build.ctx.tp_group, ops=self.build.providers.cross_entropy,
        )
        return losses.t()
