"""Fused attention of device code in halves: values, gradients, masks of dropout, what a query sees, strides, limits.

The CPU's own library runs the same tests, so the two cannot drift apart; ``test_attention.py`` has what it alone does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from reference import compare
from torch.utils.checkpoint import checkpoint
from twin.streams import dropout_factors

from megatron_port.core.dist.positions import Positions, Run
from megatron_port.core.layers.attention import AttentionMask, key_ends, math_attention
from megatron_port.core.layers.dropout import DropoutStream
from megatron_port.core.layers.fused import ProbabilityDropout
from megatron_port.ext.kernels.ops.attention import attention, packed_attention

HALVES = (torch.bfloat16, torch.float16)
SAMPLES = (3, 1 << 33)


def _normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _dropout(
    device: torch.device | str, p: float, positions: Positions | int, head_offset: int = 0, **keys: Any
) -> ProbabilityDropout:
    stream = DropoutStream(5, torch.device(device))
    stream.set_micro_batch(9, SAMPLES)
    at = Positions.contiguous(positions) if isinstance(positions, int) else positions
    return stream.probability_dropout(p, op="a", head_offset=head_offset, positions=at, **keys)


def _compare(
    device: torch.device, dtype: torch.dtype, queries: int, keys: int, groups: int, per_group: int, size: int, *,
    p: float = 0.0, mask: AttentionMask | None = None, positions: Positions | None = None, causal: bool = True,
    spread: float = 1.0,
) -> None:
    def run(function: Callable[..., torch.Tensor], q: torch.Tensor, *kv: torch.Tensor) -> torch.Tensor:
        where = positions or Positions.contiguous(queries)
        drop = _dropout(q.device, p, where, head_offset=2, **({"seq_length": keys} if positions else {})) if p else None
        here = mask
        if mask is not None:
            first, end = (None if x is None else x.to(q.device) for x in (mask.first, mask.end))
            here = replace(mask, first=first, end=end)
        return function(q, *kv, causal=causal, dropout=drop, mask=here)

    inputs = tuple(spread * _normal(n, 2, heads, size, seed=i)
                   for i, (n, heads) in enumerate(((queries, groups * per_group), (keys, groups), (keys, groups))))
    compare(partial(run, attention), partial(run, math_attention), inputs, dtype, device,
            what=f"attention {(queries, keys, groups, per_group, size, p)}")


@pytest.mark.parametrize("dtype", HALVES)
def test_values_and_gradients(device: torch.device, dtype: torch.dtype) -> None:
    """Whole blocks, tails, several steps; heads of whole and of padded width; groups of heads; with dropout or not."""
    shapes = ((5, 1, 2, 8, 0.3), (64, 1, 1, 64, 0.3), (67, 2, 1, 40, 0.3), (130, 1, 2, 16, 0.1), (52, 1, 1, 88, 0.0),
              (97, 1, 1, 128, 0.5))
    for seq, groups, per_group, size, p in shapes[: 3 if dtype == torch.float16 else None]:  # which torch is slow in
        _compare(device, dtype, seq, seq, groups, per_group, size, p=p)


def test_every_key_seen_and_fewer_queries_than_keys(device: torch.device) -> None:
    for queries, keys, size in ((7, 50, 24), (70, 3, 32)):
        _compare(device, torch.bfloat16, queries, keys, 2, 1, size, causal=False)


def test_scores_far_apart(device: torch.device) -> None:
    """Rows whose probabilities are one-hot, or whose other terms are below the smallest float; and equal large ones."""
    _compare(device, torch.bfloat16, 70, 70, 1, 1, 16, p=0.2, spread=20.0)
    big = torch.full((70, 1, 1, 8), 1e15, device=device, dtype=torch.bfloat16)
    assert torch.equal(attention(big, big, torch.ones_like(big)), torch.ones_like(big).flatten(2))


@pytest.mark.parametrize("seq", [24, 72, 104])
def test_every_pass_makes_the_twins_mask(device: torch.device, seq: int) -> None:
    """Equal scores: the output under values that are the identity, the values' gradient under such an output gradient,
    and the sign of the queries' gradient under such keys show which probabilities are kept, one by one."""
    heads, p, eye = 2, 0.4, torch.eye(seq, device=device, dtype=torch.bfloat16)
    kept = dropout_factors(5, 9, list(SAMPLES), "a", (3, seq, seq), p)[:, 1:] * torch.ones(seq, seq).tril() > 0
    zeros, ones = (torch.full((seq, 2, heads, seq), x, device=device, dtype=torch.bfloat16) for x in (0.0, 1.0))
    unit, drop = eye.view(seq, 1, 1, seq).expand(seq, 2, heads, seq), _dropout(device, p, seq, head_offset=1)

    def of(rows: torch.Tensor) -> torch.Tensor:
        return rows.detach().view(seq, 2, heads, seq).permute(1, 2, 0, 3).cpu()

    values = unit.clone().requires_grad_()
    out = attention(zeros, zeros, values, dropout=drop)
    assert torch.equal(of(out) > 0, kept)
    (dv,) = torch.autograd.grad(out, values, unit.flatten(2))
    assert torch.equal(of(dv).mT > 0, kept)
    queries = zeros.clone().requires_grad_()
    (dq,) = torch.autograd.grad(attention(queries, unit, ones, dropout=drop).sum(), queries)
    live = torch.ones(seq, seq).tril().bool()
    mixed = (kept.any(-1) & (kept.sum(-1) < live.sum(-1))).unsqueeze(-1) & live
    assert torch.equal((of(dq) > 0)[mixed], kept[mixed]) and int(mixed.sum()) > seq


@pytest.mark.parametrize("mask", [
    AttentionMask(window=20), AttentionMask(first=torch.tensor([[0] * 37 + [37] * 63, [0] * 64 + [64] * 36]).int()),
    AttentionMask(window=70, first=torch.tensor([[0] * 10 + [10] * 90] * 2).int()),
])
def test_windows_and_documents(device: torch.device, mask: AttentionMask) -> None:
    _compare(device, torch.bfloat16, 100, 100, 1, 2, 32, p=0.3, mask=mask)


def test_queries_at_other_positions_than_the_keys(device: torch.device) -> None:
    """As a rank has them that holds the first and the last piece of a divided sequence; some see nothing."""
    positions = Positions((Run(4, 20), Run(70, 26)))
    rows = torch.tensor([*range(4, 24), *range(70, 96)])
    _compare(device, torch.bfloat16, 46, 96, 1, 2, 16, p=0.3, mask=AttentionMask(end=key_ends(rows)),
             positions=positions)
    _compare(device, torch.bfloat16, 46, 40, 1, 1, 16, mask=AttentionMask(end=key_ends(rows, 10)))


def _run(function: Callable[[torch.Tensor], torch.Tensor], given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = given.detach().requires_grad_()
    out = function(leaf)
    (gradient,) = torch.autograd.grad(out, leaf, _normal(*out.shape, seed=9).to(out))
    return out.detach(), gradient


def test_packed_strided_recomputed_and_repeated_give_the_same_bits(device: torch.device) -> None:
    y, drop = _normal(70, 2, 1, 4, 24).to(device, torch.bfloat16), _dropout(device, 0.2, 70)

    def split(y: torch.Tensor) -> torch.Tensor:
        q, k, v = y.split((2, 1, 1), dim=3)
        return attention(q.reshape(70, 2, 2, 24), k.squeeze(3).contiguous(), v.squeeze(3).contiguous(), dropout=drop)

    packed = partial(packed_attention, dropout=drop)
    turned = y.transpose(0, 1).contiguous().transpose(0, 1)  # the batch first in memory
    wanted = _run(split, y)
    again = partial(checkpoint, packed, use_reentrant=False)
    for function, given in ((packed, y), (packed, y), (packed, turned), (again, y)):
        assert all(torch.equal(a, b) for a, b in zip(_run(function, given), wanted))


def test_a_row_sees_nothing_later_and_no_other_sample(device: torch.device) -> None:
    y = _normal(80, 2, 1, 3, 16).to(device, torch.bfloat16)
    changed = y.clone()
    changed[30:], changed[:, 1] = 7.0, -3.0
    out, other = packed_attention(y), packed_attention(changed)
    assert torch.equal(out[:30, 0], other[:30, 0]) and not torch.equal(out[30:, 0], other[30:, 0])
    y[3, 0, 0, 0, 0] = float("nan")
    out = packed_attention(y)
    assert bool(out[3, 0].isnan().all()) and int(out.isnan().sum()) == 16


@pytest.mark.parametrize("change, text", [
    (lambda y: y.float(), "float16 and bfloat16"), (lambda y: y[..., :12].contiguous(), "multiples of 8 up to 128"),
    (lambda y: torch.cat([y] * 9, dim=-1), "multiples of 8 up to 128"),
    (lambda y: torch.cat([y, y[..., :4]], dim=-1)[..., :16], "multiples of 16 bytes"),
])
def test_limits_of_device_code(
    device: torch.device, request: pytest.FixtureRequest, change: Callable[..., torch.Tensor], text: str
) -> None:
    y = torch.randn(6, 2, 1, 3, 16, device=device, dtype=torch.bfloat16)
    if request.node.callspec.params["device"] == "cpu":
        assert packed_attention(change(y)).shape[:2] == (6, 2)
        return
    with pytest.raises(RuntimeError, match=text):
        packed_attention(change(y))
    with pytest.raises(RuntimeError, match="no sinks and no soft-cap"):
        packed_attention(y, mask=AttentionMask(softcap=2.0))
