"""The network of evidence/definitions.md as plain functions of a dictionary of tensors: batch first, nothing split."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from twin.streams import initial_normal

Weights = dict[str, Tensor]
Drop = Callable[[Tensor, str, float], Tensor]
"""``drop(x, op, p)``: x [sample, …] with dropout of that op."""


@dataclass(frozen=True)
class Shape:
    """The ``[model]`` of a run; every field is given."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    ffn_hidden_size: int
    vocab_size: int
    seq_length: int
    position_embedding: str
    normalization: str
    activation: str
    add_bias: bool
    tie_embeddings: bool
    hidden_dropout: float
    attention_dropout: float
    init_std: float
    norm_epsilon: float
    rope_theta: float = 10000.0
    qk_norm: bool = False
    mup_base_size: int = 0

    @property
    def width(self) -> float:
        """muP's m."""
        return self.hidden_size / self.mup_base_size if self.mup_base_size else 1.0

    @property
    def head(self) -> int:
        """Elements of a head."""
        return self.hidden_size // self.num_attention_heads


def shapes(m: Shape) -> dict[str, tuple[tuple[int, ...], str]]:
    """Name → (shape, kind): kind ``normal``, ``output`` (smaller start), ``ones`` or ``zeros``."""
    h = m.hidden_size
    out: dict[str, tuple[tuple[int, ...], str]] = {"embedding.word.weight": ((m.vocab_size, h), "normal")}
    if m.position_embedding == "learned":
        out["embedding.position.weight"] = ((m.seq_length, h), "normal")
    biased_norm = m.normalization == "layernorm" and m.add_bias

    def norm(name: str) -> None:
        out[f"{name}.weight"] = ((h,), "ones")
        if biased_norm:
            out[f"{name}.bias"] = ((h,), "zeros")

    def linear(name: str, rows: tuple[int, ...], columns: int, kind: str) -> None:
        out[f"{name}.weight"] = ((*rows, columns), kind)
        if m.add_bias:
            out[f"{name}.bias"] = (rows, "zeros")

    for i in range(m.num_layers):
        layer, f = f"layers.{i}", m.ffn_hidden_size
        norm(f"{layer}.norm1")
        linear(f"{layer}.attention.qkv", ((m.num_attention_heads + 2 * m.num_query_groups) * m.head,), h, "normal")
        for part in ("query", "key") if m.qk_norm else ():
            out[f"{layer}.attention.{part}_norm.weight"] = ((m.head,), "ones")
        linear(f"{layer}.attention.output", (h,), m.num_attention_heads * m.head, "output")
        norm(f"{layer}.norm2")
        linear(f"{layer}.mlp.up", (2, f) if m.activation == "swiglu" else (f,), h, "normal")
        linear(f"{layer}.mlp.down", (h,), f, "output")
    norm("final_norm")
    if not m.tie_embeddings:
        out["head.weight"] = ((m.vocab_size, h), "normal")
    return out


def initial(m: Shape, seed: int) -> Weights:
    """Float32 weights before the first step."""
    hidden = m.init_std / math.sqrt(m.width)
    stds = {"normal": hidden, "output": hidden / math.sqrt(2 * m.num_layers)}
    out = {}
    for name, (shape, kind) in shapes(m).items():
        if kind in stds:
            of_layer = name.startswith("layers.")
            out[name] = initial_normal(seed, name, shape, stds[kind] if of_layer else m.init_std)
        else:
            out[name] = torch.ones(shape) if kind == "ones" else torch.zeros(shape)
    return out


def decays(name: str) -> bool:
    """Weight decay: on matrices and embeddings, not on biases and norms."""
    return name.endswith(".weight") and "norm" not in name


def normed(x: Tensor, w: Weights, name: str, m: Shape) -> Tensor:
    """LayerNorm or RMSNorm over the last dimension, in float32 at least."""
    wide = x if x.dtype == torch.float64 else x.float()
    if m.normalization == "layernorm":
        wide = wide - wide.mean(-1, keepdim=True)
    wide = wide / torch.sqrt((wide * wide).mean(-1, keepdim=True) + m.norm_epsilon)
    y = wide * w[f"{name}.weight"].to(wide.dtype)
    bias = w.get(f"{name}.bias")
    return (y if bias is None else y + bias.to(wide.dtype)).to(x.dtype)


def root_mean_square(x: Tensor, weight: Tensor, m: Shape) -> Tensor:
    """RMSNorm over the last dimension, in float32 at least."""
    wide = x if x.dtype == torch.float64 else x.float()
    wide = wide / torch.sqrt((wide * wide).mean(-1, keepdim=True) + m.norm_epsilon)
    return (wide * weight.to(wide.dtype)).to(x.dtype)


def rotated(x: Tensor, theta: float) -> Tensor:
    """x [sample, seq, head, d]: element i turns with element i + d/2. Angles are float32 as documented."""
    half = x.shape[-1] // 2
    frequency = 1.0 / theta ** (torch.arange(0, 2 * half, 2).float() / (2 * half))
    angle = torch.arange(x.shape[1]).float()[:, None] * frequency
    cos, sin = (t.to(x.dtype)[:, None, :] for t in (angle.cos(), angle.sin()))
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def product(x: Tensor, w: Weights, name: str) -> Tensor:
    """x Wᵀ + b."""
    weight, bias = w[f"{name}.weight"], w.get(f"{name}.bias")
    y = x @ weight.flatten(0, -2).t()
    return y if bias is None else y + bias.flatten()


def attention(x: Tensor, w: Weights, layer: str, m: Shape, drop: Drop, starts: Tensor | None = None) -> Tensor:
    """Causal, grouped-query. Rows of the projection: for each group its queries, its key, its value.

    ``starts`` [sample, seq]: the first key that each query sees.
    """
    samples, seq, _ = x.shape
    per = m.num_attention_heads // m.num_query_groups
    packed = product(x, w, f"{layer}.attention.qkv").view(samples, seq, m.num_query_groups, per + 2, m.head)
    q, k, v = packed[..., :per, :], packed[..., per : per + 1, :], packed[..., per + 1 :, :]
    if m.qk_norm:
        q, k = (root_mean_square(x, w[f"{layer}.attention.{n}_norm.weight"], m) for x, n in ((q, "query"), (k, "key")))
    q = q.reshape(samples, seq, -1, m.head)
    k, v = (t.expand(-1, -1, -1, per, -1).reshape(samples, seq, -1, m.head) for t in (k, v))
    if m.position_embedding == "rope":
        q, k = rotated(q, m.rope_theta), rotated(k, m.rope_theta)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(m.head)
    hidden = torch.ones(seq, seq, dtype=torch.bool).triu(1)[None, None]
    if starts is not None:
        hidden = hidden | (torch.arange(seq) < starts[:, None, :, None])
    wide = scores if scores.dtype == torch.float64 else scores.float()
    probs = wide.masked_fill(hidden, -math.inf).softmax(-1).to(x.dtype)
    probs = drop(probs, f"{layer}.attention.probs", m.attention_dropout)
    return torch.einsum("bhij,bjhd->bihd", probs, v).reshape(samples, seq, -1)


def activated(x: Tensor, kind: str) -> Tensor:
    """GeLU (erf or tanh form), or silu of the first half times the second."""
    if kind == "gelu":
        return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))
    if kind == "gelu_tanh":
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    gate, up = x.chunk(2, -1)
    return gate * torch.sigmoid(gate) * up


def token_losses(
    tokens: Tensor, labels: Tensor, w: Weights, m: Shape, drop: Drop, starts: Tensor | None = None, reset: bool = False,
    z: float = 0.0,
) -> Tensor:
    """Nats of each prediction [sample, seq]. ``starts`` [sample, seq]: of documents, which attention stays within and
    from which learned places are counted if ``reset``. ``z``: factor of z-loss."""
    x = w["embedding.word.weight"][tokens]
    if m.position_embedding == "learned":
        place = torch.arange(tokens.shape[1])
        x = x + w["embedding.position.weight"][place - starts if reset and starts is not None else place]
    x = drop(x, "embedding", m.hidden_dropout)
    for i in range(m.num_layers):
        layer = f"layers.{i}"
        y = attention(normed(x, w, f"{layer}.norm1", m), w, layer, m, drop, starts)
        x = x + drop(product(y, w, f"{layer}.attention.output"), f"{layer}.attention", m.hidden_dropout)
        y = activated(product(normed(x, w, f"{layer}.norm2", m), w, f"{layer}.mlp.up"), m.activation)
        x = x + drop(product(y, w, f"{layer}.mlp.down"), f"{layer}.mlp", m.hidden_dropout)
    head = w["embedding.word.weight" if m.tie_embeddings else "head.weight"]
    logits = normed(x, w, "final_norm", m) @ head.t() / m.width
    wide = logits if logits.dtype == torch.float64 else logits.float()
    log_z = wide.logsumexp(-1)
    return log_z - wide.gather(-1, labels[..., None])[..., 0] + z * log_z * log_z


def no_dropout(x: Tensor, op: str, p: float) -> Tensor:
    """Of evaluation."""
    return x


def operations(m: Shape, scores: float) -> float:
    """Floating-point operations of one sample's forward pass: 2 n k for each of s rows of an [n, k] product, and the
    two products of ``scores`` scores."""
    matrices = sum(
        math.prod(shape) for name, (shape, kind) in shapes(m).items()
        if kind in ("normal", "output") and name.startswith("layers.")
    )
    core = m.num_layers * 4 * scores * m.num_attention_heads * m.head
    return 2 * m.seq_length * (matrices + m.vocab_size * m.hidden_size) + core


def parameters_of(config: dict[str, Any]) -> Shape:
    """From the ``[model]`` table of a run file."""
    return Shape(**{k: v for k, v in config.items() if k != "name"})
