"""Fused attention of the CPU library: values, gradients, dropout, strides, packing, masks; test_device_attention.py has
what GPUs have too."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from reference import DTYPES, compare
from torch.utils.checkpoint import checkpoint
from twin.streams import dropout_factors

from megatron_port.core.dist.positions import Positions
from megatron_port.core.layers.attention import AttentionMask, math_attention
from megatron_port.core.layers.dropout import DropoutStream
from megatron_port.core.layers.fused import ProbabilityDropout
from megatron_port.ext.kernels import kernels
from megatron_port.ext.kernels.ops.attention import attention, packed_attention


@pytest.fixture(autouse=True)
def library(own: Path) -> None:
    kernels.load("cpu")


def _normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _shapes() -> Iterator[tuple[int, int, int, int, int]]:
    """(seq, batch, groups, heads of a group, d): odd ones, whole tiles and blocks, one row, one column."""
    yield from ((128, 2, 2, 1, 32), (64, 1, 2, 3, 16), (33, 2, 1, 2, 40), (1, 2, 1, 1, 8), (5, 1, 1, 1, 1))
    draw = random.Random(5)
    for _ in range(10):
        yield draw.randint(1, 150), draw.randint(1, 3), draw.randint(1, 3), draw.randint(1, 3), draw.randint(1, 130)


@pytest.mark.parametrize("dtype", DTYPES)
def test_causal(dtype: torch.dtype) -> None:
    for seq, batch, groups, per_group, size in _shapes():
        q, k, v = (_normal(seq, batch, n, size, seed=i) for i, n in enumerate((groups * per_group, groups, groups)))
        compare(attention, math_attention, (q, k, v), dtype, torch.device("cpu"),
                what=f"attention {(seq, batch, groups, per_group, size)}")


def test_every_key_seen_and_fewer_queries_than_keys() -> None:
    for seq, keys, size in ((7, 50, 24), (70, 3, 33), (40, 40, 64)):
        q, k, v = _normal(seq, 2, 4, size), _normal(keys, 2, 2, size, seed=1), _normal(keys, 2, 2, size, seed=2)
        compare(lambda q, k, v: attention(q, k, v, causal=False), lambda q, k, v: math_attention(q, k, v, causal=False),
                (q, k, v), torch.float32, torch.device("cpu"), what=f"{seq} queries, {keys} keys")


def test_scores_far_apart() -> None:
    """Rows whose probabilities are one-hot, or whose other terms are below the smallest float."""
    q, k, v = (30.0 * _normal(90, 1, 2, 16, seed=i) for i in range(3))
    compare(attention, math_attention, (q, k, v), torch.float32, torch.device("cpu"), what="far apart")
    big = torch.full((6, 1, 1, 4), 1e15)
    torch.testing.assert_close(attention(big, big, torch.ones_like(big)), torch.ones(6, 1, 4))


def _packed(seq: int = 45, batch: int = 2, groups: int = 2, heads: int = 3, size: int = 20) -> torch.Tensor:
    return _normal(seq, batch, groups, heads + 2, size).float()


def _of_packed(y: torch.Tensor) -> torch.Tensor:
    heads = y.shape[3] - 2
    q, k, v = y.split((heads, 1, 1), dim=3)
    return attention(q.reshape(*y.shape[:2], -1, y.shape[4]), k.squeeze(3), v.squeeze(3))


def _run(function: Callable[[torch.Tensor], torch.Tensor], given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = given.detach().requires_grad_()
    out = function(leaf)
    (gradient,) = torch.autograd.grad(out, leaf, _normal(*out.shape, seed=9).to(out.dtype))
    return out.detach(), gradient


def test_packed_and_strided_and_recomputed_give_the_same_bits() -> None:
    y = _packed()
    wanted = _run(_of_packed, y)
    for function in (packed_attention, lambda y: checkpoint(packed_attention, y, use_reentrant=False)):
        assert all(torch.equal(a, b) for a, b in zip(_run(function, y), wanted))
    # The batch first in memory, as other programs have it.
    turned = y.transpose(0, 1).contiguous().transpose(0, 1)
    assert not turned.is_contiguous()
    assert all(torch.equal(a, b) for a, b in zip(_run(packed_attention, turned), wanted))


def test_threads_change_no_bit() -> None:
    y, threads = _packed(100, 3, 2, 2, 32), torch.get_num_threads()
    seen = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            seen.append(_run(packed_attention, y))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for other in seen[1:] for a, b in zip(seen[0], other))


def test_a_row_sees_nothing_later_and_no_other_sample() -> None:
    y = _packed()
    changed = y.clone()
    changed[30:] = 7.0
    changed[:, 1] = -3.0
    out, other = packed_attention(y), packed_attention(changed)
    assert torch.equal(out[:30, 0], other[:30, 0]) and not torch.equal(out[30:, 0], other[30:, 0])


def test_not_a_number_stays_one() -> None:
    y = _packed()
    y[3, 0, 0, 0, 0] = float("nan")
    out = packed_attention(y).view(45, 2, 2, 3, 20)
    assert bool(out[3, 0, 0, 0].isnan().all()) and int(out.isnan().sum()) == 20


def test_opcheck() -> None:
    q, k, v = torch.randn(6, 2, 2, 3, 8), torch.randn(6, 2, 2, 8), torch.randn(6, 2, 2, 8)
    ops = torch.ops.megatron_port
    torch.library.opcheck(ops.attention_forward, (q, k, v, 0.3, True))
    out, rows = ops.attention_forward(q, k, v, 0.3, True)
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    torch.library.opcheck(ops.attention_backward_, (torch.randn_like(out), q, k, v, out, rows, *grads, 0.3, True))


@pytest.mark.parametrize("call, text", [
    (lambda q, k, v: attention(q.double(), k.double(), v.double()), "float32, float16 and bfloat16"),
    (lambda q, k, v: attention(q, k.half(), v), "different dtypes"),
    (lambda q, k, v: attention(q[:3], k, v), "as many queries as keys"),
    (lambda q, k, v: attention(q, k[:, :1], v[:, :1]), "do not fit together"),
    (lambda q, k, v: attention(q, k, v[..., :4]), "do not fit together"),
    (lambda q, k, v: attention(q[..., ::2], k[..., ::2], v[..., ::2]), "not contiguous"),
    (lambda q, k, v: attention(q, k[:0], v[:0], causal=False), "needs keys"),
])
def test_refusals(call: Callable[..., torch.Tensor], text: str) -> None:
    with pytest.raises(RuntimeError, match=text):
        call(torch.randn(6, 2, 4, 8), torch.randn(6, 2, 2, 8), torch.randn(6, 2, 2, 8))


SAMPLES = (3, 1 << 33)


def _dropout(p: float, seq: int, head_offset: int = 0) -> ProbabilityDropout:
    stream = DropoutStream(5, torch.device("cpu"))
    stream.set_micro_batch(9, SAMPLES)
    return stream.probability_dropout(p, op="a", head_offset=head_offset, positions=Positions.contiguous(seq))


@pytest.mark.parametrize("dtype", DTYPES)
def test_dropout(dtype: torch.dtype) -> None:
    """Values and gradients with the mask of torch's ops; heads of a rank that has not the first ones."""
    for seq, groups, per_group, size in ((5, 1, 2, 8), (64, 2, 1, 16), (67, 1, 3, 33), (131, 2, 2, 24)):
        q, k, v = (_normal(seq, 2, n, size, seed=i) for i, n in enumerate((groups * per_group, groups, groups)))
        dropout = _dropout(0.3, seq, head_offset=2)
        compare(lambda q, k, v, d=dropout: attention(q, k, v, dropout=d),
                lambda q, k, v, d=dropout: math_attention(q, k, v, dropout=d), (q, k, v), dtype, torch.device("cpu"),
                what=f"attention with dropout {(seq, groups, per_group, size)}")


@pytest.mark.parametrize("seq", [9, 40, 70])
def test_the_mask_is_the_twins(seq: int) -> None:
    """Equal scores: row i has probabilities 1 / (i + 1), and values that are the identity give them back."""
    heads = 3
    factors = dropout_factors(5, 9, list(SAMPLES), "a", (heads, seq, seq), 0.4)
    values = torch.eye(seq).view(seq, 1, 1, seq).expand(seq, 2, 1, seq)
    got = attention(torch.zeros(seq, 2, heads, seq), torch.zeros(seq, 2, 1, seq), values, dropout=_dropout(0.4, seq))
    want = factors * torch.ones(seq, seq).tril() / torch.arange(1, seq + 1).view(-1, 1)
    torch.testing.assert_close(
        got.view(seq, 2, heads, seq).permute(1, 2, 0, 3).double(), want.double(), rtol=1e-5, atol=0.0
    )


def test_packed_and_recomputed_dropout_give_the_same_bits() -> None:
    y, dropout = _packed(), _dropout(0.2, 45, head_offset=1)

    def split(y: torch.Tensor) -> torch.Tensor:
        q, k, v = y.split((3, 1, 1), dim=3)
        return attention(q.reshape(45, 2, 6, 20), k.squeeze(3), v.squeeze(3), dropout=dropout)

    def packed(y: torch.Tensor) -> torch.Tensor:
        return packed_attention(y, dropout=dropout)

    wanted = _run(split, y)
    for function in (packed, lambda y: checkpoint(packed, y, use_reentrant=False)):
        assert all(torch.equal(a, b) for a, b in zip(_run(function, y), wanted))
    assert not torch.equal(wanted[0], _run(packed_attention, y)[0])


def test_opcheck_with_dropout() -> None:
    q, k, v = torch.randn(6, 2, 2, 3, 8), torch.randn(6, 2, 2, 8), torch.randn(6, 2, 2, 8)
    ops, mask = torch.ops.megatron_port, (torch.tensor([5, -6]), -7, 9000, 1)
    torch.library.opcheck(ops.attention_forward, (q, k, v, 0.3, True, *mask))
    out, rows = ops.attention_forward(q, k, v, 0.3, True, *mask)
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    args = (torch.randn_like(out), q, k, v, out, rows, *grads, 0.3, True, *mask)
    torch.library.opcheck(ops.attention_backward_, args)


def test_dropout_that_cannot_be_is_refused() -> None:
    q, k, v = torch.randn(6, 2, 4, 8), torch.randn(6, 2, 2, 8), torch.randn(6, 2, 2, 8)
    with pytest.raises(RuntimeError, match="dropout is for causal attention"):
        attention(q, k, v, causal=False, dropout=_dropout(0.1, 6))
    with pytest.raises(RuntimeError, match="keys has 2 elements, not 1"):
        attention(q[:, :1], k[:, :1], v[:, :1], dropout=_dropout(0.1, 6))
    later = dataclasses.replace(_dropout(0.1, 6), first_query=6)
    with pytest.raises(ValueError, match="AttentionMask.end, and the first query's position is 6"):
        attention(q, k, v, dropout=later)


def _starts(batch: int, seq: int, count: int) -> torch.Tensor:
    """int32 [batch, seq]: starts of documents whose ends are drawn, other ones in each sample."""
    draw, out = random.Random(seq), torch.zeros(batch, seq, dtype=torch.int32)
    for row in out:
        for cut in sorted(draw.sample(range(1, seq), min(count, seq - 1))):
            row[cut:] = cut
    return out


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_masks(dtype: torch.dtype, p: float) -> None:
    """Windows, documents, soft-caps and sinks over several blocks of queries, as torch's ops compute them."""
    for seq, groups, per_group, size, window, softcap in (
        (150, 1, 2, 24, 40, 0.0), (97, 2, 1, 33, 0, 1.5), (131, 1, 3, 16, 7, 3.0), (256, 2, 2, 32, 0, 0.0)
    ):
        heads, first = groups * per_group, _starts(2, seq, 6)
        q, k, v = (_normal(seq, 2, n, size, seed=i) for i, n in enumerate((heads, groups, groups)))
        dropout = _dropout(p, seq) if p else None

        def run(
            function: Callable[..., torch.Tensor], *inputs: torch.Tensor, dropout: ProbabilityDropout | None = dropout,
            fixed: tuple[int, float, torch.Tensor] = (window, softcap, first),
        ) -> torch.Tensor:
            mask = AttentionMask(*fixed[:2], sinks=inputs[3], first=fixed[2])
            return function(*inputs[:3], dropout=dropout, mask=mask)

        compare(lambda *x, run=run: run(attention, *x), lambda *x, run=run: run(math_attention, *x),
                (q, k, v, _normal(heads, seed=3)), dtype, torch.device("cpu"), what=f"mask {(seq, window, softcap, p)}")


def test_a_document_is_computed_as_if_it_were_alone() -> None:
    """Values to the bit, wherever in the sample it stands; sums over queries, in keys' gradients, are cut elsewhere."""
    y, cuts = _packed(seq=180, batch=1), (0, 1, 37, 100, 101, 180)
    first = torch.zeros(1, 180, dtype=torch.int32)
    for cut in cuts[1:-1]:
        first[:, cut:] = cut
    together = packed_attention(leaf := y.clone().requires_grad_(), mask=AttentionMask(first=first))
    weights = _normal(*together.shape, seed=9).float()
    (gradient,) = torch.autograd.grad(together, leaf, weights)
    for a, b in itertools.pairwise(cuts):
        alone = packed_attention(part := y[a:b].clone().requires_grad_())
        assert torch.equal(alone, together[a:b])
        (own,) = torch.autograd.grad(alone, part, weights[a:b])
        torch.testing.assert_close(own, gradient[a:b], rtol=1e-5, atol=1e-6)


def test_opcheck_with_a_mask() -> None:
    q, k, v = torch.randn(6, 2, 2, 3, 8), torch.randn(9, 2, 2, 8), torch.randn(9, 2, 2, 8)
    first, end = torch.zeros(2, 6, dtype=torch.int32), torch.arange(2, 8, dtype=torch.int32)
    ops, mask = torch.ops.megatron_port, (None, 0, 0, 0, first, end, torch.randn(6), 3, 1.5)
    torch.library.opcheck(ops.attention_forward, (q, k, v, 0.3, True, *mask))
    out, rows = ops.attention_forward(q, k, v, 0.3, True, *mask)
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    args = (torch.randn_like(out), q, k, v, out, rows, *grads, 0.3, True, *mask, torch.empty(2, 6))
    torch.library.opcheck(ops.attention_backward_, args)


@pytest.mark.parametrize("mask, text", [
    (AttentionMask(window=-1), "must not be negative"),
    (AttentionMask(sinks=torch.zeros(3)), "sinks has 3 elements, not 4"),
    (AttentionMask(first=torch.zeros(2, 6)), "first"),
    (AttentionMask(first=torch.zeros(2, 5, dtype=torch.int32)), "first has 10 elements, not 12"),
])
def test_a_mask_that_does_not_fit_is_refused(mask: AttentionMask, text: str) -> None:
    with pytest.raises(RuntimeError, match=text):
        attention(torch.randn(6, 2, 4, 8), torch.randn(6, 2, 2, 8), torch.randn(6, 2, 2, 8), mask=mask)
