"""Providers of causal attention, all of one signature.

``attention(q, k, v, *, causal=True, dropout=None, mask=None)``: q [s, b, heads, d], k and v
[s, b, kv_heads, d] → [s, b, heads * d], scores scaled by 1/sqrt(d). With grouped
queries (arXiv 2305.13245), query head j uses key head j // (heads / kv_heads).
``mask`` (:class:`AttentionMask`): a window, documents, sinks, a soft-cap; a provider raises ValueError for what it
lacks, which ``choose_attention`` refuses when a run starts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, _sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from megatron_port.core.dist.positions import Positions, SequencePartition
from megatron_port.core.layers.attention import AttentionMask, masked_softmax, query_runs
from megatron_port.core.layers.fused import CausalSoftmax, ProbabilityDropout, product, torch_causal_softmax


class Attention(Protocol):
    """Attention of one layer; shapes as in the module's docstring."""

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        causal: bool = True,
        dropout: ProbabilityDropout | None = None,
        mask: AttentionMask | None = None,
    ) -> torch.Tensor: ...


class DropoutOf(Protocol):
    """Dropout of any of a layer's probabilities: of queries at these positions, from this rank's head ``first_head``
    on. ``keys``: positions of the columns in a sequence of ``seq_length``; None: all of it."""

    def __call__(
        self, queries: Positions, *, first_head: int = 0, keys: Positions | None = None, seq_length: int = 0
    ) -> ProbabilityDropout: ...


class ContextAttention(Protocol):
    """A method of context parallelism."""

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, partition: SequencePartition, *,
        dropout_of: DropoutOf | None, mask: AttentionMask | None,
    ) -> torch.Tensor:
        """Return the result [held, batch, heads/tp · d] of this rank's queries. Collective.

        q [held, batch, heads/tp, d], k and v [held, batch, groups/tp, d]; ``mask``: of the whole sequence, None where
        it is causal and no more.
        """


def check_shapes(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, mask: AttentionMask | None = None
) -> None:
    """Raise ValueError unless the shapes fit together, and the mask with them."""
    if k.shape != v.shape or q.shape[1] != k.shape[1] or q.shape[3] != k.shape[3] or q.shape[2] % k.shape[2]:
        raise ValueError(f"attention: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} do not fit together")
    if mask is not None and not causal:
        raise ValueError("attention that is not causal takes no AttentionMask")
    if causal and q.shape[0] != k.shape[0] and (mask is None or mask.end is None):
        raise ValueError(f"causal attention needs as many queries as keys, not {q.shape[0]} and {k.shape[0]}")


def math_attention_with(softmax: CausalSoftmax) -> Attention:
    """Attention written out: products in the input's dtype, softmax in fp32 (fp64 for fp64) by the provider given, or
    under a mask by torch."""

    def attention(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        causal: bool = True,
        dropout: ProbabilityDropout | None = None,
        mask: AttentionMask | None = None,
    ) -> torch.Tensor:
        check_shapes(q, k, v, causal, mask)
        seq, batch, heads, size = q.shape
        keys, groups = k.shape[0], k.shape[2]
        rep = heads // groups
        # The query heads of a group stand below one another, so one product serves them and k is never repeated.
        # Scaled before the product: half-precision scores overflow later then.
        grouped = (q * (1.0 / math.sqrt(size))).permute(1, 2, 0, 3).reshape(batch, groups, rep * seq, size)
        scores = product(grouped, k.permute(1, 2, 3, 0)).view(batch, heads, seq, keys)
        if causal and mask is None:
            probs = softmax(scores, scale=1.0, dropout=dropout)
        else:
            probs = _softmax(scores) if mask is None else masked_softmax(scores, mask)
            probs = probs if dropout is None else dropout.drop(probs)
        out = product(probs.view(batch, groups, rep * seq, keys), v.permute(1, 2, 0, 3))
        return out.view(batch, heads, seq, size).permute(2, 0, 1, 3).reshape(seq, batch, heads * size)

    return attention


def _softmax(scores: torch.Tensor) -> torch.Tensor:
    """Softmax over every key, in fp32 (fp64 for fp64); the result has the dtype of the scores."""
    wide = torch.float64 if scores.dtype == torch.float64 else torch.float32
    return torch.softmax(scores, dim=-1, dtype=wide).to(scores.dtype)


math_attention = math_attention_with(torch_causal_softmax)
"""With torch's softmax."""


def refuse_dropout(name: str, dropout: ProbabilityDropout | None) -> None:
    """Raise ValueError if there is dropout, whose masks only the project's own attention and math can make."""
    if dropout is not None:
        raise ValueError(f"attention provider {name} cannot drop probabilities by counters; use math")


def refuse_mask(name: str, mask: AttentionMask) -> None:
    """Raise ValueError for what only the project's own attention and math can do."""
    if mask.sinks is not None:
        raise ValueError(f"attention provider {name} does not support attention sinks; use own or math")


def fold_batch(x: torch.Tensor) -> torch.Tensor:
    """Return [s, b, heads, d] as [1, s, b * heads, d]: one sample that has the heads of all.

    The batch is inside the sequence, and fused kernels want their output and its gradient contiguous with the batch
    outside: with several samples they copy both. Heads are independent and in one order, also those of grouped queries
    (head j of b * heads uses key head j // (heads / kv_heads)), so the values are the same and nothing is copied.
    """
    return x.flatten(1, 2).unsqueeze(0)


class KernelOrder:
    """Kernels that torch's attention tries, in this order.

    torch keeps one order for the whole process, which another model may have changed since. So :meth:`prefer` does not
    remember it but asks torch, in half a microsecond; torch's own context would cost each call three launches.
    """

    def __init__(self, kernels: Sequence[SDPBackend]) -> None:
        self._kernels = list(kernels)
        self._ours: tuple[object, ...] | None = None

    def prefer(self) -> None:
        """Let torch try these kernels until another order is preferred. No kernels: torch's order stays as it is."""
        if self._kernels and _kernel_order() != self._ours:
            # Not torch's public context: it restores the order at its end, and this one has to stay.
            _sdpa_kernel(self._kernels, set_priority=True)
            self._ours = _kernel_order()


def _kernel_order() -> tuple[object, ...]:
    """Return the state of torch's attention: the order of all kernels, and which of them are enabled."""
    c = torch._C
    return (c._get_sdp_priority_order(), c._get_flash_sdp_enabled(), c._get_mem_efficient_sdp_enabled(),
            c._get_math_sdp_enabled(), c._get_cudnn_sdp_enabled())


def sdpa_attention(kernels: Sequence[SDPBackend] = ()) -> Attention:
    """torch's scaled_dot_product_attention; ``kernels``: tried in this order (empty: torch's own choice).

    A window and documents take a mask of queries · keys bytes, for each sample where documents differ, made in every
    layer, and no work is saved by it: all scores are computed, the later half too. Of a GPU's kernels cuDNN's, the
    memory-efficient one and math's take masks, not flash attention. Queries at other positions are served run by run,
    over the keys up to the last of the run; without window and documents flash attention takes those too.
    """
    order = KernelOrder(kernels)

    def attention(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        causal: bool = True,
        dropout: ProbabilityDropout | None = None,
        mask: AttentionMask | None = None,
    ) -> torch.Tensor:
        check_shapes(q, k, v, causal, mask)
        refuse_dropout("sdpa", dropout)
        order.prefer()
        if mask is None:
            return _sdpa(q, k, v, None, causal)
        refuse_mask("sdpa", mask)
        if mask.softcap:
            raise ValueError("attention provider sdpa does not support soft-capped scores; use own, math or flash_attn")
        if mask.end is None:
            return _sdpa(q, k, v, mask.visible(q.shape[0], k.shape[0], q.device), False)
        parts = [
            _sdpa(q[row : row + count], k[low:high], v[low:high], _run_bias(mask, row, count, low, high), False)
            for row, count, low, high in query_runs(mask, k.shape[0])
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    return attention


def _sdpa(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor | None, causal: bool
) -> torch.Tensor:
    """torch's attention in the package's shapes. ``visible``: bool [batch or 1, 1, queries, keys], or torch's bias."""
    gqa = q.shape[2] != k.shape[2]
    if visible is not None and visible.dim() == 4 and visible.shape[0] > 1:
        qt, kt, vt = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        out = F.scaled_dot_product_attention(qt, kt, vt, attn_mask=visible, enable_gqa=gqa)
        return out.permute(2, 0, 1, 3).reshape(q.shape[0], q.shape[1], -1)
    qt, kt, vt = (fold_batch(x).transpose(1, 2) for x in (q, k, v))
    causal = causal and visible is None
    out = F.scaled_dot_product_attention(qt, kt, vt, attn_mask=visible, is_causal=causal, enable_gqa=gqa)
    return out.transpose(1, 2).reshape(q.shape[0], q.shape[1], -1)


def _run_bias(mask: AttentionMask, row: int, count: int, low: int, high: int) -> torch.Tensor:
    """Return what a run of queries sees of the keys [low, high), as torch's attention takes it."""
    if not mask.window and mask.first is None:
        return causal_lower_right(count, high - low)  # no bytes where a kernel knows it
    assert mask.end is not None
    rows = slice(row, row + count)
    first = None if mask.first is None else mask.first[:, rows] - low
    end = mask.end[rows] - low
    return replace(mask, first=first, end=end).visible(count, high - low, end.device)


def flash_attention(
    function: Callable[..., torch.Tensor], varlen: Callable[..., torch.Tensor] | None = None
) -> Attention:
    """The flash-attn package's ``flash_attn_func`` (Dao, arXiv 2307.08691), and ``flash_attn_varlen_func`` for
    documents; fp16 and bf16 on a GPU.

    The last query sees the last key (since 2.1), so that queries at other positions are served run by run, and under
    documents by the runs of each document.
    """

    def attention(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        causal: bool = True,
        dropout: ProbabilityDropout | None = None,
        mask: AttentionMask | None = None,
    ) -> torch.Tensor:
        check_shapes(q, k, v, causal, mask)
        refuse_dropout("flash_attn", dropout)
        options = {} if mask is None else _flash_options(mask)
        if mask is not None and mask.first is not None:
            return _flash_documents(varlen, q, k, v, mask, options)
        runs = [(0, q.shape[0], 0, k.shape[0])] if mask is None or mask.end is None else query_runs(mask, k.shape[0])
        parts = [
            function(*map(fold_batch, (q[row : row + count], k[low:high], v[low:high])), causal=causal, **options)
            for row, count, low, high in runs
        ]
        out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return out.reshape(q.shape[0], q.shape[1], -1)

    return attention


def _flash_documents(
    varlen: Callable[..., torch.Tensor] | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    mask: AttentionMask, options: dict[str, Any],
) -> torch.Tensor:
    """flash-attn's function for sequences of different lengths: documents, or the runs of queries in each."""
    if varlen is None or mask.documents is None:
        raise ValueError("attention provider flash_attn needs flash_attn_varlen_func and AttentionMask.documents")
    documents = mask.documents()
    offsets, longest, keys = documents.offsets, documents.longest, documents.keys
    if (keys is None) != (mask.end is None):
        raise ValueError("AttentionMask.documents are of other queries than its end")
    q_flat, k_flat, v_flat = (x.transpose(0, 1).flatten(0, 1) for x in (q, k, v))
    if keys is not None:
        k_flat, v_flat = k_flat.index_select(0, keys.rows), v_flat.index_select(0, keys.rows)
    out = varlen(
        q_flat, k_flat, v_flat, cu_seqlens_q=offsets, cu_seqlens_k=offsets if keys is None else keys.offsets,
        max_seqlen_q=longest, max_seqlen_k=longest if keys is None else keys.longest, causal=True, **options,
    )
    return out.view(q.shape[1], q.shape[0], -1).transpose(0, 1).contiguous()


def _flash_options(mask: AttentionMask) -> dict[str, Any]:
    """Return flash-attn's arguments for a window and a soft-cap; none for what is not asked for."""
    refuse_mask("flash_attn", mask)
    window = {"window_size": (mask.window - 1, 0)} if mask.window else {}  # the query itself is not counted there
    return window | ({"softcap": mask.softcap} if mask.softcap else {})


def gpu_kernels(*, rocm: bool, deterministic: bool) -> list[SDPBackend]:
    """Return SDPA's kernels in order of preference. cuDNN's backward pass is not deterministic, and ROCm has none."""
    found = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return found if rocm or deterministic else [SDPBackend.CUDNN_ATTENTION, *found]


def serving_kernel(
    kernels: Sequence[SDPBackend], *, heads: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> str:
    """Return the name of the first kernel that takes (query heads, key heads, head size) on this GPU."""
    queries, groups, size = heads
    q = torch.empty(1, queries, 128, size, dtype=dtype, device=device, requires_grad=True)
    k = torch.empty(1, groups, 128, size, dtype=dtype, device=device, requires_grad=True)
    params = torch.backends.cuda.SDPAParams(q, k, k, None, 0.0, True, queries != groups)
    tests = {
        SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.can_use_cudnn_attention,
        SDPBackend.FLASH_ATTENTION: torch.backends.cuda.can_use_flash_attention,
        SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.can_use_efficient_attention,
    }
    for kernel in kernels:
        if kernel not in tests or tests[kernel](params, False):
            return kernel.name.lower()
    return "none"
