"""Attention over parts of the keys by torch's flash attention, for keys that go round (``RingKeys``).

The kernel gives the log-sum-exp of each query's scores beside the result, which is all that merging needs; its backward
pass takes those of all keys, so that each part's gradients are its share of the whole (Liu et al., arXiv 2310.01889).
No scores exist. A part's result and gradients are rounded to the dtype of the queries once each, and merged and summed
in float32: an error no larger than that of one more rounding, because a query's parts have weights of sum 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_port.core.layers.attention import AttentionMask
from megatron_port.ext.context.attention import Drop, wide_dtype

_OPS = torch.ops.aten


def _folded(x: Tensor) -> Tensor:
    """[s, b, heads, d] as a view [1, b · heads, s, d]: one sample that has the heads of all."""
    return x.flatten(1, 2).transpose(0, 1).unsqueeze(0)


def _unfolded(x: Tensor, like: Tensor) -> Tensor:
    """The reverse, in the shape of ``like``."""
    return x.squeeze(0).transpose(0, 1).reshape(like.shape)


class FusedPartial:
    """By the flash attention that torch has for the device: on GPUs fp16 and bf16, heads of up to 256 elements, a
    multiple of 8; on a CPU any dtype."""

    by_runs = True

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, drop: Drop | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the partial: its result in the dtype of ``q``, the log-sum-exp as largest score, and 1.

        Raises:
            ValueError: dropout, or a mask that is not by runs.
        """
        causal = _is_causal(mask, drop)
        call = _cpu_forward if q.device.type == "cpu" else _gpu_forward
        out, lse = call(_folded(q), _folded(k), _folded(v), causal)
        top = lse.reshape(q.shape[1], q.shape[2], -1).to(wide_dtype(q.dtype))
        return _unfolded(out, q), top, torch.ones_like(top)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: tuple[Tensor, Tensor, Tensor], along: Tensor,
        mask: AttentionMask, drop: Drop | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients in the dtype of ``q``. ValueError: as :meth:`forward`."""
        causal = _is_causal(mask, drop)
        out, top, total = whole
        lse = (top + total.log()).flatten(0, 1).unsqueeze(0).contiguous()
        call = _cpu_backward if q.device.type == "cpu" else _gpu_backward
        folded = [_folded(x) for x in (dout, q, k, v, out)]
        grads = call(folded, lse, causal)
        dq, dk, dv = (_unfolded(grad, x) for grad, x in zip(grads, (q, k, v), strict=True))
        return dq, dk, dv


def _is_causal(mask: AttentionMask, drop: Drop | None) -> bool:
    if drop is not None or mask.end is not None or mask.first is not None or mask.softcap or mask.window:
        raise ValueError("fused attention of parts knows the causal mask alone; set backend.attention = \"math\"")
    return mask.runs is not None


def _gpu_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    out, lse, *_ = _OPS._scaled_dot_product_flash_attention.default(q, k, v, 0.0, causal, False)
    return out, lse


def _gpu_backward(tensors: list[Tensor], lse: Tensor, causal: bool) -> tuple[Tensor, ...]:
    dout, q, k, v, out = tensors
    state = q.new_empty(2, dtype=torch.uint64)  # of random numbers, which nothing reads without dropout
    found: tuple[Tensor, ...] = _OPS._scaled_dot_product_flash_attention_backward.default(
        dout, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, state, state
    )
    return found


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    k, v = (_for_each_query(x, q) for x in (k, v))
    found: tuple[Tensor, Tensor] = _OPS._scaled_dot_product_flash_attention_for_cpu.default(q, k, v, 0.0, causal)
    return found


def _cpu_backward(tensors: list[Tensor], lse: Tensor, causal: bool) -> tuple[Tensor, ...]:
    dout, q, k, v, out = tensors
    dq, dk, dv = _OPS._scaled_dot_product_flash_attention_for_cpu_backward.default(
        dout, q, _for_each_query(k, q), _for_each_query(v, q), out, lse, 0.0, causal
    )
    return dq, *(x.unflatten(1, (k.shape[1], -1)).sum(dim=2) for x in (dk, dv))


def _for_each_query(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values [1, heads of keys, s, d] with a head for each of the query's: the CPU's kernel has no groups."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)
