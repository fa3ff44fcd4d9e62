"""Causal softmax with dropout: values and gradients, masks, what it must not read, its limits."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from reference import DTYPES, compare
from torch.utils.checkpoint import checkpoint
from twin.streams import dropout_factors

from megatron_port.core.dist.positions import Positions, Run
from megatron_port.core.layers.dropout import DropoutStream
from megatron_port.core.layers.fused import ProbabilityDropout
from megatron_port.ext.kernels.ops.softmax import causal_softmax

SCALE = 0.3


def _shapes() -> list[tuple[int, int, int, int]]:
    """(b, heads, q, k): odd and aligned, q = k and q < k; a row of every kernel: warp, block, read twice."""
    draw = random.Random(4)
    out = [(1, 2, 3, 1024), (1, 1, 2, 2056), (1, 1, 2, 4100), (1, 1, 1, 2051), (1, 1, 2, 16392), (2, 1, 1, 1)]
    while len(out) < 24:
        k = draw.choice([draw.randint(1, 90), 8 * draw.randint(1, 40)])
        q = min(k, draw.choice([k, draw.randint(1, k)]), 40)
        out.append((draw.randint(1, 2), draw.randint(1, 3), q, k))
    return out


SHAPES = _shapes()


def _live(q: int, k: int) -> torch.Tensor:
    return torch.ones(q, k, dtype=torch.bool).tril_(k - q)


def _eager(scores: torch.Tensor, scale: float = SCALE) -> torch.Tensor:
    wide = torch.float64 if scores.dtype == torch.float64 else torch.float32
    dead = ~_live(*scores.shape[-2:]).to(scores.device)
    return torch.softmax((scores.to(wide) * scale).masked_fill(dead, float("-inf")), dim=-1).to(scores.dtype)


def _scores(b: int, heads: int, q: int, k: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(q * 1000 + k)
    return torch.randn(b, heads, q, k, generator=g, dtype=torch.float64) * 5


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_gradients(device: torch.device, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        compare(lambda x: causal_softmax(x, scale=SCALE), _eager, (_scores(*shape),), dtype, device,
                what=f"causal_softmax {shape}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_row_of_the_gradient(device: torch.device, dtype: torch.dtype) -> None:
    """Row by row, nearly one-hot ones too: there dy - sum(dy * y) is as small as the rounding of y."""
    for k in (7, 64):
        base = (_scores(1, 2, k, k) * 2).to(dtype)
        dy = torch.randn(base.shape, generator=torch.Generator().manual_seed(k)).to(dtype)
        exact = base.double().requires_grad_()
        _eager(exact).backward(dy.double())
        own = base.to(device).requires_grad_()
        causal_softmax(own, scale=SCALE).backward(dy.to(device))
        assert exact.grad is not None and own.grad is not None
        error = (own.grad.cpu().double() - exact.grad).abs().amax(-1)
        largest = exact.grad.abs().amax(-1)
        floor = 4 * torch.finfo(dtype).eps * SCALE if dtype == torch.float32 else torch.finfo(torch.float16).tiny
        assert bool((error <= 3 * torch.finfo(dtype).eps * largest + floor).all()), f"{dtype} {k}"


def test_the_dead_part_is_zero_and_is_not_read(device: torch.device) -> None:
    for q, k in ((5, 5), (5, 9), (16, 16), (9, 24), (2, 1032), (2, 1033), (3, 4100), (2, 16392)):
        scores = _scores(1, 1, q, k).float()
        dead = ~_live(q, k)
        want, dy = _eager(scores), torch.randn(1, 1, q, k)
        x = scores.masked_fill(dead, float("nan")).to(device).requires_grad_()
        probs = causal_softmax(x, scale=SCALE)
        assert torch.equal(probs.detach().cpu()[..., dead], torch.zeros(1, 1, int(dead.sum())))
        assert torch.allclose(probs.detach().cpu(), want, atol=1e-6)
        probs.backward(dy.masked_fill(dead, float("nan")).to(device))
        assert x.grad is not None and torch.equal(x.grad.cpu()[..., dead], torch.zeros(1, 1, int(dead.sum())))
        assert bool(torch.isfinite(x.grad).all())


@pytest.mark.parametrize("k", [24, 25, 1032, 1033, 16392])
def test_infinite_and_large_scores(device: torch.device, k: int) -> None:
    """-inf is a masked column; differences decide, however large the scores."""
    scores = _scores(1, 1, 3, k).float() + 6e4
    scores[..., 0, : k // 2] = float("-inf")
    scores[..., 2, 1::2] = float("-inf")
    scores[..., 1, k - 2] = 3e38
    own = causal_softmax(scores.to(device), scale=1.0).cpu()
    assert torch.allclose(own, _eager(scores, 1.0), atol=1e-6)
    assert own[0, 0, 1, k - 2] == 1.0
    scores[..., 0, 0] = float("nan")
    assert bool(torch.isnan(causal_softmax(scores.to(device), scale=1.0)[..., 0, : k - 2]).all())


def test_a_negative_scale(device: torch.device) -> None:
    scores = _scores(1, 2, 8, 8).float()
    assert torch.allclose(causal_softmax(scores.to(device), scale=-0.7).cpu(), _eager(scores, -0.7), atol=1e-6)


def test_the_same_bits_again_and_under_recompute(device: torch.device) -> None:
    seen = []
    threads = torch.get_num_threads()
    try:
        for count, again in ((1, False), (2, False), (1, True)):
            torch.set_num_threads(count)
            x = _scores(2, 3, 60, 60).bfloat16().to(device).requires_grad_()
            layer: Callable[[torch.Tensor], torch.Tensor] = lambda x: causal_softmax(x * 2, scale=SCALE)  # noqa: E731
            y = checkpoint(layer, x, use_reentrant=False) if again else layer(x)
            seen.append((y.detach(), *torch.autograd.grad((y.float() ** 2).sum(), x)))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for other in seen[1:] for a, b in zip(seen[0], other))


SAMPLES = (3, 1 << 33)


def _dropout(device: torch.device, p: float, positions: Positions, head_offset: int = 0) -> ProbabilityDropout:
    stream = DropoutStream(5, device)
    stream.set_micro_batch(9, SAMPLES)
    return stream.probability_dropout(p, op="layers.0.attention.probs", head_offset=head_offset, positions=positions)


@pytest.mark.parametrize("keys", [8, 13, 40, 1028, 1031])
def test_the_mask_is_the_twins(device: torch.device, keys: int) -> None:
    """Of the last queries of a sequence and of some of its heads; the probabilities of equal scores are known."""
    p, heads, queries = 0.3, 5, min(keys, 11)
    whole = dropout_factors(5, 9, list(SAMPLES), "layers.0.attention.probs", (heads, keys, keys), p)
    factors = whole[:, 2:4, keys - queries :]
    dropout = _dropout(device, p, Positions.contiguous(queries, keys - queries), head_offset=2)
    probs = causal_softmax(torch.zeros(2, 2, queries, keys, device=device), scale=1.0, dropout=dropout)
    want = torch.softmax(torch.zeros(queries, keys).masked_fill(~_live(queries, keys), float("-inf")), dim=-1) * factors
    torch.testing.assert_close(probs.cpu().double(), want.double(), rtol=1e-6, atol=0.0)
    assert bool((factors[..., 0] == 0).any()), "no live element was dropped"


@pytest.mark.parametrize("dtype", DTYPES)
def test_dropout_in_the_softmax_has_the_bits_of_dropout_after_it(device: torch.device, dtype: torch.dtype) -> None:
    for b, heads, q, k in ((2, *shape[1:]) for shape in SHAPES):
        dropout = _dropout(device, 0.2, Positions.contiguous(q, k - q), head_offset=heads)
        dy = torch.randn(b, heads, q, k, generator=torch.Generator().manual_seed(k)).to(device, dtype)
        seen = []
        for function in (
            lambda x, dropout: causal_softmax(x, scale=SCALE, dropout=dropout),
            lambda x, dropout: dropout.drop(causal_softmax(x, scale=SCALE)),
        ):
            x = _scores(b, heads, q, k).to(device, dtype).requires_grad_()
            y = function(x, dropout)
            y.backward(dy)
            seen.append((y.detach(), x.grad))
        assert all(torch.equal(own, eager) for own, eager in zip(*seen)), f"{dtype} {(b, heads, q, k)}"


def test_dropout_of_queries_that_are_not_the_last_ones(device: torch.device) -> None:
    x = _scores(2, 2, 6, 6).float().to(device)
    for positions in (Positions((Run(1, 3), Run(5, 3))), Positions.contiguous(6, 4)):
        dropout = _dropout(device, 0.4, positions)
        assert torch.equal(causal_softmax(x, scale=1.0, dropout=dropout), dropout.drop(causal_softmax(x, scale=1.0)))


def test_opcheck_with_dropout(device: torch.device) -> None:
    x = torch.randn(2, 3, 4, 8, device=device, requires_grad=True)
    keys = torch.tensor([5, -6], device=device)
    torch.library.opcheck(torch.ops.megatron_port.causal_softmax_dropout_forward, (x, 0.5, keys, -7, 9000, 1))
    probs = causal_softmax(x.detach(), scale=0.5)
    torch.library.opcheck(
        torch.ops.megatron_port.causal_softmax_dropout_backward, (torch.randn_like(probs), probs, keys, 0.5, -7, 9, 1)
    )


@pytest.mark.parametrize("change, text", [
    ({"keys": lambda k: k.int()}, "keys has another dtype"),
    ({"keys": lambda k: k[:1]}, "keys has 1 elements, not 2"),
    ({"threshold": lambda t: 65536}, "threshold must be in 1"),
    ({"threshold": lambda t: 0}, "threshold must be in 1"),
    ({"head_offset": lambda h: -1}, "head_offset must not be negative"),
])
def test_refusals_of_masks(device: torch.device, change: dict[str, Callable[..., object]], text: str) -> None:
    given: dict[str, object] = {"keys": torch.tensor([5, -6], device=device), "threshold": 9, "head_offset": 0}
    given |= {name: how(given[name]) for name, how in change.items()}
    with pytest.raises(RuntimeError, match=text):
        torch.ops.megatron_port.causal_softmax_dropout_forward(
            torch.randn(2, 3, 4, 8, device=device), 1.0, given["keys"], 1, given["threshold"], given["head_offset"]
        )


def test_opcheck(device: torch.device) -> None:
    x = torch.randn(2, 2, 3, 8, device=device, requires_grad=True)
    torch.library.opcheck(torch.ops.megatron_port.causal_softmax_forward, (x, 0.5))
    probs = causal_softmax(x.detach(), scale=0.5)
    torch.library.opcheck(torch.ops.megatron_port.causal_softmax_backward, (torch.randn_like(probs), probs, 0.5))


@pytest.mark.parametrize("broken, text", [
    (lambda x: x.transpose(0, 1), "not contiguous"),
    (lambda x: x.double(), "float32, float16 and bfloat16"),
    (lambda x: x[0], r"\[b, heads, q, k\]"),
    (lambda x: x[..., :3].contiguous(), "fewer keys than queries"),
])
def test_refusals(device: torch.device, broken: Callable[[torch.Tensor], torch.Tensor], text: str) -> None:
    with pytest.raises(RuntimeError, match=text):
        causal_softmax(broken(torch.randn(2, 3, 4, 8, device=device)), scale=1.0)
