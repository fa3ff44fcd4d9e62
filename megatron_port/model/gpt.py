"""GPT as a list of units (embedding, layers, head), and the stage that holds a contiguous run of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from megatron_port.config.schema import ModelConfig
from megatron_port.model.build import BuildContext
from megatron_port.model.layers import Embedding, Head, TransformerLayer


def unit_costs(model: ModelConfig) -> list[float]:
    """Forward matmul FLOPs a token of each unit, [embedding, layer 0, …, head], for balancing stages."""
    h, s, d = model.hidden_size, model.seq_length, model.head_size
    qkv = 2 * h * d * (model.num_attention_heads + 2 * model.kv_heads)
    out = 2 * h * d * model.num_attention_heads
    core = 4 * s * d * model.num_attention_heads
    mlp = 2 * h * model.ffn_size * (3 if model.activation == "swiglu" else 2)
    return [0.0, *([float(qkv + out + core + mlp)] * model.num_layers), float(2 * h * model.vocab_size)]


class GPTStage(nn.Module):
    """Layers ``[start, stop)`` of the model, the embedding with the first stage, the head with the last.

    ``forward``: tokens int64 [batch, seq] on the first stage, else activations
    [seq(/tp), batch, hidden]; returns activations, or logits [seq, batch,
    padded_vocab/tp] on the last stage.
    """

    def __init__(self, build: BuildContext, *, start: int, stop: int) -> None:
        super().__init__()
        self.build = build
        self.first = build.ctx.coords.pp == 0
        self.last = build.ctx.coords.pp == build.ctx.topology.pp - 1
        self.embedding = Embedding(build) if self.first else None
        self.layers = nn.ModuleList(TransformerLayer(i, build) for i in range(start, stop))
        self.head: Head | None = None
        if self.last:
            shared = None
            if self.embedding is not None and build.model.tie_embeddings:
                shared = self.embedding.word.weight
            self.head = Head(build, shared)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return x if self.head is None else self.head(x)

    def loss_sum(self, logits: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Sum of the token losses of a micro-batch, a scalar (last stage only)."""
        if self.head is None:
            raise ValueError("loss_sum on a stage without the head")
        losses = self.head.token_losses(logits, labels)
        return losses.sum() if mask is None else (losses * mask).sum()

    def activation_shape(self, batch: int, seq: int) -> tuple[int, int, int]:
        """Shape of what passes between stages."""
        split = self.build.ctx.topology.tp if self.build.sequence_parallel else 1
        return (seq // split, batch, self.build.model.hidden_size)


def build_stage(build: BuildContext, layers_by_stage: Sequence[int]) -> GPTStage:
    """This rank's stage, given how many transformer layers each stage holds."""
    start = sum(layers_by_stage[: build.ctx.coords.pp])
    return GPTStage(build, start=start, stop=start + layers_by_stage[build.ctx.coords.pp])
