"""A GPT on whole sequences, one process, plain autograd: what runs on divided sequences are compared with.

Only torch, numpy and the twin (``tests/twin``), whose network it is, with further kinds of attention. Where torch's own
attention can compute a case (no sinks, no soft-cap, no dropout of probabilities), it does; else scores are written out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from twin import streams
from twin.model import (
    Drop,
    Shape,
    Weights,
    activated,
    initial,
    no_dropout,
    normed,
    product,
    root_mean_square,
    rotated,
)
from twin.streams import initial_normal
from twin.update import Adam, clip


@dataclass(frozen=True)
class Network(Shape):
    """The twin's network with heads of any size and further kinds of attention."""

    head_dim: int = 0
    sliding_window: int = 0
    attention_pattern: tuple[str, ...] = ()
    attention_gate: bool = False
    attention_sinks: bool = False
    attention_softcap: float = 0.0

    @property
    def head(self) -> int:
        """Elements of a head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    def window(self, layer: int) -> int:
        """Keys that a query of a layer sees at most; 0: any number."""
        kinds = self.attention_pattern or ("window",)
        return self.sliding_window if kinds[layer % len(kinds)] == "window" else 0


@dataclass(frozen=True)
class Batch:
    """Samples, whole: tokens [b, seq + 1], the first position of each position's document [b, seq] or None, and which
    labels count [b, seq] or None."""

    samples: tuple[int, ...]
    tokens: np.ndarray
    starts: np.ndarray | None
    counted: np.ndarray | None
    reset: bool = False
    """Learned positions are counted from each document's start."""


@dataclass(frozen=True)
class Steps:
    """What some steps left."""

    losses: list[float]
    norms: list[float]
    eval_losses: tuple[float, float]
    """Of the first step's samples, before the first update and after the last."""
    gradients: Weights
    """Of the first step, unclipped."""
    weights: Weights


def seen(seq: int, window: int, starts: Tensor | None) -> Tensor:
    """Bool [b or 1, 1, seq, seq]: the keys that each query sees."""
    query, key = torch.arange(seq)[:, None], torch.arange(seq)[None]
    visible = ((key <= query) & (key > query - (window or seq)))[None]
    if starts is not None:
        visible = visible & (key[None] >= starts[:, :, None])
    return visible[:, None]


def attention(x: Tensor, w: Weights, index: int, m: Network, drop: Drop, starts: Tensor | None) -> Tensor:
    """x [b, seq, hidden] → the heads' outputs, joined."""
    layer, (batch, seq, _) = f"layers.{index}", x.shape
    per = m.num_attention_heads // m.num_query_groups
    packed = product(x, w, f"{layer}.attention.qkv").view(batch, seq, m.num_query_groups, -1, m.head)
    q, k, v = packed[..., :-2, :], packed[..., -2:-1, :], packed[..., -1:, :]
    gates = None
    if m.attention_gate:  # a query, its gate, the next query
        q, gates = q.unflatten(3, (per, 2)).unbind(4)
    if m.qk_norm:
        q, k = (root_mean_square(t, w[f"{layer}.attention.{n}_norm.weight"], m) for t, n in ((q, "query"), (k, "key")))
    q = q.reshape(batch, seq, -1, m.head)
    k, v = (t.expand(-1, -1, -1, per, -1).reshape(batch, seq, -1, m.head) for t in (k, v))
    if m.position_embedding == "rope":
        q, k = rotated(q, m.rope_theta), rotated(k, m.rope_theta)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    visible = seen(seq, m.window(index), starts)
    if m.attention_dropout or m.attention_softcap or m.attention_sinks:
        sinks = w[f"{layer}.attention.sinks"] if m.attention_sinks else None
        probs = drop(_softmax(q, k, visible, m, sinks), f"{layer}.attention.probs", m.attention_dropout)
        out = probs @ v
    else:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
    out = out.transpose(1, 2).reshape(batch, seq, -1)
    return out if gates is None else out / (1 + torch.exp(-gates.reshape(batch, seq, -1)))


def _softmax(q: Tensor, k: Tensor, visible: Tensor, m: Network, sinks: Tensor | None) -> Tensor:
    scores = q @ k.transpose(2, 3) / math.sqrt(m.head)
    if m.attention_softcap:
        scores = m.attention_softcap * torch.tanh(scores / m.attention_softcap)
    weights = torch.exp(scores - 1.0).masked_fill(~visible, 0.0)  # of fresh weights: scores are near 0
    total = weights.sum(-1, keepdim=True)
    return weights / (total if sinks is None else total + torch.exp(sinks - 1.0)[:, None, None])


def token_losses(batch: Batch, w: Weights, m: Network, drop: Drop) -> Tensor:
    """Nats of each prediction, [b, seq]."""
    tokens, labels = (torch.from_numpy(t.copy()) for t in (batch.tokens[:, :-1], batch.tokens[:, 1:]))
    starts = None if batch.starts is None else torch.from_numpy(batch.starts).long()
    x = w["embedding.word.weight"][tokens]
    if m.position_embedding == "learned":
        place = torch.arange(tokens.shape[1])
        x = x + w["embedding.position.weight"][place - starts if batch.reset and starts is not None else place]
    x = drop(x, "embedding", m.hidden_dropout)
    for i in range(m.num_layers):
        layer = f"layers.{i}"
        y = attention(normed(x, w, f"{layer}.norm1", m), w, i, m, drop, starts)
        x = x + drop(product(y, w, f"{layer}.attention.output"), f"{layer}.attention", m.hidden_dropout)
        y = activated(product(normed(x, w, f"{layer}.norm2", m), w, f"{layer}.mlp.up"), m.activation)
        x = x + drop(product(y, w, f"{layer}.mlp.down"), f"{layer}.mlp", m.hidden_dropout)
    head = w["embedding.word.weight" if m.tie_embeddings else "head.weight"]
    logits = normed(x, w, "final_norm", m) @ head.t()
    return logits.logsumexp(-1) - logits.gather(-1, labels[..., None])[..., 0]


def mean_loss(batch: Batch, w: Weights, m: Network, drop: Drop = no_dropout) -> Tensor:
    """The mean over the labels that count; 0 where none does."""
    losses = token_losses(batch, w, m, drop)
    mask = torch.ones_like(losses) if batch.counted is None else torch.from_numpy(batch.counted).to(losses.dtype)
    return (losses * mask).sum() / mask.sum().clamp(min=1.0)


def train(
    m: Network, seed: int, optimizer: dict[str, Any], lr: float, batches: Callable[[int], Batch], steps: int
) -> Steps:
    """Train in fp64 from the initial weights; ``batches(step)``: all samples of a step."""
    w: Weights = {name: t.double() for name, t in initial(m, seed).items()}
    for i in range(m.num_layers if m.attention_gate else 0):
        rows = 2 * (m.num_attention_heads + m.num_query_groups) * m.head
        name = f"layers.{i}.attention.qkv"
        w[f"{name}.weight"] = initial_normal(seed, f"{name}.weight", (rows, m.hidden_size), m.init_std).double()
        if f"{name}.bias" in w:
            w[f"{name}.bias"] = torch.zeros(rows, dtype=torch.float64)
    for i in range(m.num_layers if m.attention_sinks else 0):
        w[f"layers.{i}.attention.sinks"] = torch.zeros(m.num_attention_heads, dtype=torch.float64)
    adam, first = Adam(optimizer), batches(0)
    out = Steps([], [], (float(mean_loss(first, w, m)), 0.0), {}, w)
    for step in range(steps):
        batch = batches(step)

        def drop(x: Tensor, op: str, p: float, step: int = step, samples: Sequence[int] = batch.samples) -> Tensor:
            if p == 0.0:
                return x
            return x * streams.dropout_factors(seed, step, list(samples), op, tuple(x.shape[1:]), p)

        for t in w.values():
            t.requires_grad_()
        loss = mean_loss(batch, w, m, drop)
        gradients = dict(zip(w, (g.clone() for g in torch.autograd.grad(loss, list(w.values())))))
        for t in w.values():
            t.requires_grad_(False)
        if not step:
            out.gradients.update({name: g.clone() for name, g in gradients.items()})
        out.losses.append(float(loss.detach()))
        out.norms.append(clip(gradients, optimizer["clip_grad"]))
        adam.step(w, gradients, lr)
    after = float(mean_loss(first, w, m))
    return Steps(out.losses, out.norms, (out.eval_losses[0], after), out.gradients, w)
