"""Attention by torch's scaled_dot_product_attention and varlen_attn, and by the flash-attn package; the signature is
that of ``layers.attention.Attention``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, _sdpa_kernel

from megatron_port.core.dist.collectives import to_device_async
from megatron_port.core.layers.attention import Attention, AttentionMask, check_shapes
from megatron_port.core.layers.fused import ProbabilityDropout


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
    layer, and no work is saved by it: all scores are computed, the later half too. Of a GPU's kernels the
    memory-efficient one and math's serve masks (:func:`kernels_under_masks`), not flash attention. Queries at other
    positions are served run by run, over the keys up to the last of the run; without window and documents flash
    attention takes those too.
    """
    order, under_masks = KernelOrder(kernels), KernelOrder(kernels_under_masks(kernels))

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
        (order if mask is None else under_masks).prefer()
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
        # It imports torch's compiler, half of what a process takes to start, for divided sequences alone.
        from torch.nn.attention.bias import causal_lower_right

        return causal_lower_right(count, high - low)  # no bytes where a kernel knows it
    assert mask.end is not None
    rows = slice(row, row + count)
    first = None if mask.first is None else mask.first[:, rows] - low
    end = mask.end[rows] - low
    return replace(mask, first=first, end=end).visible(count, high - low, end.device)


def flash_attention(
    function: Callable[..., torch.Tensor], varlen: Callable[..., torch.Tensor] | None = None, *,
    name: str = "flash_attn",
) -> Attention:
    """The flash-attn package's ``flash_attn_func`` (Dao, arXiv 2307.08691), and ``flash_attn_varlen_func`` for
    documents; fp16 and bf16 on a GPU.

    The last query sees the last key (since 2.1), so that queries at other positions are served run by run, and under
    documents by the runs of each document. ``name``: of the provider, in messages.
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
        refuse_dropout(name, dropout)
        options = {} if mask is None else _flash_options(mask, name)
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
    """Attention by a function for sequences of different lengths: documents, or the runs of queries in each."""
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


class _TorchVarlen:
    """torch's ``varlen_attn`` behind the signatures of flash-attn's two functions."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        self._function = function
        self._whole: dict[tuple[int, torch.device], torch.Tensor] = {}

    def one_sequence(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, **options: Any
    ) -> torch.Tensor:
        """Return ``flash_attn_func`` of [1, s, heads, d]."""
        lengths = q.shape[1], k.shape[1]
        bounds = [self._bounds(length, q.device) for length in lengths]
        out = self.sequences(
            *(x.squeeze(0) for x in (q, k, v)), cu_seqlens_q=bounds[0], cu_seqlens_k=bounds[1], max_seqlen_q=lengths[0],
            max_seqlen_k=lengths[1], causal=causal, **options,
        )
        return out.unsqueeze(0)

    def sequences(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int, causal: bool,
        window_size: tuple[int, int] = (-1, -1),
    ) -> torch.Tensor:
        """Return ``flash_attn_varlen_func`` of [tokens, heads, d]; causal is a window that ends with the query."""
        return self._function(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
            window_size=(window_size[0], 0 if causal else window_size[1]), enable_gqa=q.shape[1] != k.shape[1],
        )

    def _bounds(self, length: int, device: torch.device) -> torch.Tensor:
        """Return (0, length) on the device, made once."""
        if (length, device) not in self._whole:
            self._whole[length, device] = to_device_async(torch.tensor([0, length], dtype=torch.int32), device)
        return self._whole[length, device]


def varlen_attention(function: Callable[..., torch.Tensor]) -> Attention:
    """Return attention by torch's ``torch.nn.attention.varlen.varlen_attn``: FlashAttention-2, whose work under windows
    and documents is that of the scores that are left; fp16 and bf16 on an NVIDIA GPU."""
    torchs = _TorchVarlen(function)
    return flash_attention(torchs.one_sequence, torchs.sequences, name="varlen")


def _flash_options(mask: AttentionMask, name: str) -> dict[str, Any]:
    """Return flash-attn's arguments for a window and a soft-cap; none for what is not asked for."""
    refuse_mask(name, mask)
    if mask.softcap and name != "flash_attn":
        raise ValueError(f"attention provider {name} does not support soft-capped scores; use own, math or flash_attn")
    window = {"window_size": (mask.window - 1, 0)} if mask.window else {}  # the query itself is not counted there
    return window | ({"softcap": mask.softcap} if mask.softcap else {})


def gpu_kernels(*, rocm: bool, deterministic: bool) -> list[SDPBackend]:
    """Return SDPA's kernels in order of preference. cuDNN's backward pass is not deterministic, and ROCm has none."""
    found = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return found if rocm or deterministic else [SDPBackend.CUDNN_ATTENTION, *found]


def kernels_under_masks(kernels: Sequence[SDPBackend]) -> list[SDPBackend]:
    """Return the kernels in order, without cuDNN's, where a mask is given: on an H100 its gradient of the queries was
    NaN under a mask tensor at sequences of 64 modulo 128 tokens (pytorch issue 196678)."""
    return [kernel for kernel in kernels if kernel != SDPBackend.CUDNN_ATTENTION]


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


def query_runs(mask: AttentionMask, keys: int) -> list[tuple[int, int, int, int]]:
    """Return (first row, number, first key, end of the keys) of each run of neighbouring queries: the last of them sees
    the last of these keys, and none of them a key outside.

    Raises:
        ValueError: the mask does not say on the host what its queries see, or some would see more than ``keys``.
    """
    if mask.runs is None:
        raise ValueError("queries and keys at other positions need AttentionMask.runs")
    if (stop := max(end + count - 1 for end, count in mask.runs)) > keys:
        raise ValueError(f"AttentionMask.runs reach to key {stop} of {keys}")
    out, row = [], 0
    for end, count in mask.runs:
        out.append((row, count, max(end - mask.window, 0) if mask.window else 0, end + count - 1))
        row += count
    return out
