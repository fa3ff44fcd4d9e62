"""GPT as a list of units (embedding, layers, head), and the stage that holds a contiguous run of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from megatron_port.config.schema import ModelConfig
from megatron_port.model.build import BuildContext
from megatron_port.model.layers import Embedding, Head, TransformerLayer


def unit_costs(model: ModelConfig) -> list[float]:
    """Forward matmul FLOPs per token of each unit, [embedding, layer 0, …, head], for balancing stages."""
    h, s, d = model.hidden_size, model.seq_length, model.head_size
    qkv = 2 * h * d * (model.num_attention_heads + 2 * model.kv_heads)
    out = 2 * h * d * model.num_attention_heads
    core = 4 * s * d * model.num_attention_heads
    mlp = 2 * h * model.ffn_size * (3 if model.activation == "swiglu" else 2)
    return [0.0, *([float(qkv + out + core + mlp)] * model.num_layers), float(2 * h * model.vocab_size)]


class GPTStage(nn.Module):
    """Layers ``[start, stop)`` of the model, the embedding with the first stage, the head with the last.

    ``virtual``: which chunk of the model it is, where stages hold several (None: the stage's own number). ``table``:
    the embedding's parameter where another chunk on this rank has it, for a tied head.

    ``forward``: tokens int64 [batch, seq] on the first stage, else activations
    [seq(/tp), batch, hidden]; returns activations, or logits [seq, batch,
    padded_vocab/tp] on the last stage.
    """

    def __init__(
        self, build: BuildContext, *, start: int, stop: int, virtual: int | None = None,
        table: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        self.build = build
        topology = build.ctx.topology
        virtual = build.ctx.coords.pp if virtual is None else virtual
        self.first, self.last = virtual == 0, virtual == topology.virtual_stages - 1
        self.embedding = Embedding(build) if self.first else None
        self.layers = nn.ModuleList(TransformerLayer(i, build) for i in range(start, stop))
        self.head: Head | None = None
        if self.last:
            if self.embedding is not None:
                table = self.embedding.word.weight
            self.head = Head(build, table if build.model.tie_embeddings else None)

    @property
    def units(self) -> list[nn.Module]:
        """What ``forward`` calls, in order: embedding, layers, head."""
        return [m for m in (self.embedding, *self.layers, self.head) if m is not None]

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


def build_chunks(build: BuildContext, layers_by_chunk: Sequence[int]) -> list[GPTStage]:
    """This rank's chunks, given how many transformer layers each virtual stage holds."""
    topology, chunks = build.ctx.topology, []
    table: nn.Parameter | None = None
    for chunk in range(topology.vp):
        virtual = topology.virtual_stage(build.ctx.coords.pp, chunk)
        start = sum(layers_by_chunk[:virtual])
        stage = GPTStage(build, start=start, stop=start + layers_by_chunk[virtual], virtual=virtual, table=table)
        if stage.embedding is not None:
            table = stage.embedding.word.weight
        chunks.append(stage)
    return chunks


def build_stage(build: BuildContext, layers_by_stage: Sequence[int]) -> GPTStage:
    """The same where a stage is one chunk."""
    (stage,) = build_chunks(build, layers_by_stage)
    return stage
