"""Operators of torch that a CPU does not have, computed there: fused attention and the backward pass of RMSNorm.

Arithmetic in fp32. What attention only keeps for its backward pass (the state of random numbers; log-sum-exp but for
flash attention, whose backward pass may be given that of more keys) stays as it is: the backward pass here computes the
probabilities again. Tensors are [batch, heads, positions, head]; a key's
head serves as many of the query's, after one another, as there are more of these.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

Values = Mapping[str, Any]
"""An operator's arguments by the names of its schema."""


def scores_of(q: torch.Tensor, k: torch.Tensor, a: Values) -> tuple[torch.Tensor, float]:
    """Scores, and what these are scaled by. Raises NotImplementedError for dropout."""
    if a["dropout_p"]:
        raise NotImplementedError("nobody computes fused attention with dropout: its random numbers are the GPU's own")
    scale = a.get("scale") or 1 / math.sqrt(q.size(-1))
    scores = q.float() @ k.float().transpose(-2, -1) * scale
    bias = a.get("attn_bias")
    if bias is not None and bias.numel():
        scores = scores + bias.float()
    if a["is_causal"]:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    return scores, scale


def for_each_query(a: Values) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values in fp32, repeated to a head for each of the query's."""
    heads = a["query"].size(1)
    key, value = (x.float().repeat_interleave(heads // x.size(1), 1) for x in (a["key"], a["value"]))
    return key, value


def attention(a: Values) -> tuple[torch.Tensor, ...]:
    """Return the first result of a forward operator."""
    k, v = for_each_query(a)
    scores, _ = scores_of(a["query"], k, a)
    return ((torch.softmax(scores, dim=-1) @ v).to(a["query"].dtype),)


def flash_attention(a: Values) -> tuple[torch.Tensor, ...]:
    """Return the result and the log-sum-exp of the scores."""
    k, _ = for_each_query(a)
    return *attention(a), torch.logsumexp(scores_of(a["query"], k, a)[0], dim=-1)


def attention_backward(a: Values, *, given: bool = False) -> tuple[torch.Tensor, ...]:
    """Return the gradients of query, key and value; ``given``: by the log-sum-exp that the operator was given."""
    dout = a["grad_out_"] if "grad_out_" in a else a["grad_out"]
    dout, q, out = (x.float() for x in (dout, a["query"], a["out"]))
    k, v = for_each_query(a)
    scores, scale = scores_of(q, k, a)
    if given:
        weights = torch.exp(scores - a["logsumexp"].unsqueeze(-1))
    else:
        weights = torch.softmax(scores, dim=-1)
    dscores = weights * (dout @ v.transpose(-2, -1) - (dout * out).sum(-1, keepdim=True))
    found = dscores @ k * scale, dscores.transpose(-2, -1) @ q * scale, weights.transpose(-2, -1) @ dout
    groups = (a["query"].size(1), a["key"].size(1), a["value"].size(1))
    summed = (g.unflatten(1, (heads, -1)).sum(2) for g, heads in zip(found, groups))
    return tuple(gradient.to(a["query"].dtype) for gradient in summed)


def rms_norm_backward(a: Values) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of input and weight."""
    dy, x, rstd = a["grad_out"].float(), a["input"].float(), a["rstd"].float()
    over = tuple(range(-len(a["normalized_shape"]), 0))
    scaled, normed = dy * (1.0 if a["weight"] is None else a["weight"].float()), x * rstd
    dx = rstd * (scaled - normed * (scaled * normed).mean(over, keepdim=True))
    rows = tuple(range(x.dim() - len(over)))
    dweight = None if a["weight"] is None else (dy * normed).sum(rows).to(a["weight"].dtype)
    return dx.to(a["input"].dtype), dweight


def cudnn_results(a: Values) -> tuple[Any, ...]:
    """Return memory for the results of cuDNN's attention, which cannot be loaded here: it is not launched."""
    q = a["query"]
    out = torch.empty_like(q)
    few = [q.new_zeros(1, dtype=torch.int64) for _ in range(4)]
    lse = q.new_zeros(q.shape[:-1], dtype=torch.float32)
    return out, lse, few[0], few[1], q.size(-2), a["key"].size(-2), few[2], few[3], q.new_empty(0)


def cudnn_gradients(a: Values) -> tuple[torch.Tensor, ...]:
    """Return memory for the results of its backward pass."""
    return tuple(torch.empty_like(a[name]) for name in ("query", "key", "value"))


ATTENTION = "_scaled_dot_product_{}_attention{}"
ANSWERS: dict[str, Callable[[Values], tuple[torch.Tensor | None, ...]]] = {
    **{ATTENTION.format(kind, ""): attention for kind in ("efficient", "flash", "cudnn")},
    **{ATTENTION.format(kind, "_backward"): attention_backward for kind in ("efficient", "flash", "cudnn")},
    ATTENTION.format("flash", ""): flash_attention,
    ATTENTION.format("flash", "_backward"): functools.partial(attention_backward, given=True),
    "_fused_rms_norm_backward": rms_norm_backward,
}
"""Operator → its answer."""
NOT_LAUNCHED = {ATTENTION.format("cudnn", ""): cudnn_results, ATTENTION.format("cudnn", "_backward"): cudnn_gradients}
"""Operator → memory for its results."""
