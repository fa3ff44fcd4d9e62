"""Weights that every peer starts from, and batches, both drawn from a seed.

Biases and norms are drawn too, and matrices so wide that activations, attention scores and logits are of order 1: with
the usual start (0.02, no bias) even a wrong activation gives nearly the right loss.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.compare.sizes import Size
from megatron_port.core.config.schema import ModelConfig
from megatron_port.core.dist.record import InitSpec, initial_values
from megatron_port.core.model.shapes import parameter_shapes

SEED = 1234


class Weights:
    """``read(name)``: the whole fp32 tensor of a canonical name; the same numbers in every process."""

    def __init__(self, model: ModelConfig, device: torch.device) -> None:
        self.model, self.device = model, device
        self.shapes = parameter_shapes(model)

    def read(self, name: str) -> Tensor:
        """Drawn when asked for, so that a large model is never held twice."""
        shape = self.shapes[name]
        spread = 0.1 if len(shape) == 1 or name.endswith(".bias") else shape[-1] ** -0.5
        value = initial_values(
            seed=SEED, name=name, init=InitSpec("normal", spread), shape=shape, offset=(0,) * len(shape), extent=shape,
            device=self.device,
        )
        return value + 1.0 if "norm" in name and name.endswith(".weight") else value

    def qkv(self, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value rows of a packed projection or its bias, heads in order."""
        m = self.model
        per = m.num_attention_heads // m.kv_heads
        packed = self.read(name)
        rows = packed.view(m.kv_heads, per + 2, m.head_size, *packed.shape[1:])
        q, k, v = rows[:, :per], rows[:, per], rows[:, per + 1]
        return q.flatten(0, 2), k.flatten(0, 1), v.flatten(0, 1)


def batch(size: Size, number: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens and labels int64 [global batch, seq] of batch ``number``; of a stack of layers: input and output gradient
    [seq, batch, hidden]."""
    generator = torch.Generator().manual_seed(number)
    m = size.model
    if size.layers_only:
        shape = (m.seq_length, size.global_batch, m.hidden_size)
        dtype = torch.bfloat16 if size.dtype == "bf16" else torch.float32
        x, g = (torch.randn(shape, generator=generator).to(dtype).to(device) for _ in range(2))
        return x, g
    drawn = torch.randint(0, m.vocab_size, (size.global_batch, m.seq_length + 1), generator=generator).to(device)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def probes(out: Tensor, dx: Tensor) -> list[float]:
    """What a stack of layers is compared by: elements of its output and of its input's gradient, over their rms."""
    found = []
    for tensor in (out, dx):
        flat = tensor.detach().double().reshape(-1)
        step = max(1, flat.numel() // 61)
        found += (flat[::step][:61] / flat.square().mean().sqrt()).tolist()
    return found
