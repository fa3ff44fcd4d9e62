"""A small GPT in plain torch, for adapters of what divides any module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from megatron_port.tools.foreign.adapter import Batch, World

WIDTH, HEADS, LAYERS = 32, 4, 2


class Block(nn.Module):
    """Attention and a feed-forward block, each after a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head = width // heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries, self.keys, self.values = (nn.Linear(width, width) for _ in range(3))
        self.output = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, width] → the same."""
        y = self.attention_norm(x)
        q, k, v = (p(y).unflatten(-1, (-1, self.head)).transpose(1, 2) for p in (self.queries, self.keys, self.values))
        x = x + self.output(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        mixed: Tensor = x + self.down(torch.nn.functional.gelu(self.up(self.mlp_norm(x))))
        return mixed


class Gpt(nn.Module):
    """Tokens [batch, sequence] → logits [batch, sequence, vocabulary]. Parts that are None pass their input on, so that
    a pipeline's stages can be cut out."""

    def __init__(self, vocabulary: int = 64, sequence: int = 16, *, layers: int = LAYERS) -> None:
        super().__init__()
        self.tokens: Any = nn.Embedding(vocabulary, WIDTH)
        self.positions: Any = nn.Embedding(sequence, WIDTH)
        self.layers = nn.ModuleDict({str(i): Block(WIDTH, HEADS) for i in range(layers)})
        self.norm: Any = nn.LayerNorm(WIDTH)
        self.head: Any = nn.Linear(WIDTH, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits, or what the next stage takes."""
        if self.tokens is not None:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for layer in self.layers.values():
            x = layer(x)
        return self.head(self.norm(x)) if self.head is not None else x


def loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of the losses of all labels that are not -100."""
    return cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


def step_of_replicas(
    state: Any, batch: Batch, world: World, sums: Callable[[Batch], Tensor], reduces: Callable[[bool], None]
) -> float:
    """Take a step of a trainer that averages gradients over all ranks; return the step's loss.

    Args:
        state: (model, optimizer).
        sums: returns the sum of a micro-batch's losses, over the step's labels.
        reduces: tells the wrapper whether the next backward pass reduces gradients; one process has no wrapper.
    """
    state[1].zero_grad()
    count = world["micro_batches"]
    mine, total = batch.share(world.rank, world.size), torch.zeros((), dtype=torch.float64)
    for index in range(count):
        if world.size > 1:
            reduces(index == count - 1)
        loss = sums(mine.share(index, count)) * world.size
        loss.backward()
        total += loss.detach()
    torch.distributed.all_reduce(total)
    return float(total) / world.size
