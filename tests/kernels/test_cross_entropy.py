"""Cross-entropy over a split vocabulary: the ops, and what layers.cross_entropy makes of them on one process."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from reference import DTYPES, assert_accurate, compare, random_shapes
from torch.utils.checkpoint import checkpoint

from megatron_port.core.layers.cross_entropy import (
    CrossEntropyOps,
    torch_cross_entropy,
    vocab_parallel_cross_entropy,
)
from megatron_port.ext.kernels.ops import softmax as cross_entropy
from megatron_port.ext.kernels.ops.softmax import own_cross_entropy

# Wider than a block reads at once, in packs and one by one.
SHAPES = random_shapes(4, 20, wide=(18000, 4104, 2303))
INFINITY = float("inf")
providers = pytest.mark.parametrize("ops", [own_cross_entropy, torch_cross_entropy], ids=["own", "torch"])


def _inputs(rows: int, cols: int, labels_below: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits in fp64, and labels."""
    g = torch.Generator().manual_seed(rows * 10007 + cols)
    logits = torch.randn(rows, cols, generator=g, dtype=torch.float64) * 4 + 1
    return logits, torch.randint(0, labels_below or cols, (rows,), generator=g)


def _loss(x: torch.Tensor, labels: torch.Tensor, ops: CrossEntropyOps) -> torch.Tensor:
    return vocab_parallel_cross_entropy(x, labels, offset=0, extent=x.shape[-1], group=None, ops=ops)


def _eager(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(x if x.dtype == torch.float64 else x.float(), labels, reduction="none")


@pytest.mark.parametrize("dtype", DTYPES)
def test_loss_and_gradient(device: torch.device, dtype: torch.dtype) -> None:
    for rows, cols in SHAPES:
        compare(partial(_loss, ops=own_cross_entropy), _eager, _inputs(rows, cols), dtype, device,
                what=f"cross_entropy {rows}x{cols}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_torchs_provider(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_port.core.layers.cross_entropy._CHUNK", 1000)
    for rows, cols in SHAPES:
        compare(partial(_loss, ops=torch_cross_entropy), _eager, _inputs(rows, cols), dtype, torch.device("cpu"),
                what=f"cross_entropy {rows}x{cols}")


@providers
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab, width, ranks", [(37, 16, 3), (40, 20, 2), (9, 8, 3), (61, 31, 2)])
def test_parts_of_the_vocabulary(
    device: torch.device, ops: CrossEntropyOps, dtype: torch.dtype, vocab: int, width: int, ranks: int
) -> None:
    """What the ranks hold adds up to the whole; (9, 8, 3): the last rank holds padding alone."""
    x, labels = _inputs(11, vocab)
    labels[3] = -100
    x = x.to(device, dtype)
    labels = labels.to(device)
    parts, found = [], []
    for rank in range(ranks):
        extent = max(0, min(width, vocab - rank * width))
        part = torch.full((11, width), float("nan"), dtype=dtype, device=device)
        part[:, :extent] = x[:, rank * width : rank * width + extent]
        parts.append((part, rank * width, extent))
        before = part.clone()
        found.append(ops.statistics(part, labels, offset=rank * width, extent=extent))
        assert torch.equal(part.nan_to_num(), before.nan_to_num()) and found[-1][0].dtype == torch.float32
    assert bool((found[0][2][3] == 0) & (found[-1][2][3] == 0)), "a label of no rank has a logit"
    maximum = torch.stack([m for m, _, _ in found]).amax(dim=0)
    assert torch.equal(maximum, x.float().amax(dim=-1))
    total = sum((t * (m - maximum).exp() for m, t, _ in found), torch.zeros_like(maximum))
    exact = x.double().softmax(dim=-1)
    there = labels.clamp_min(0).unsqueeze(-1)
    assert torch.allclose((1 / total).double(), exact.amax(dim=-1), rtol=1e-5, atol=0)
    wanted = x.gather(-1, there).squeeze(-1).float().masked_fill(labels < 0, 0.0)
    assert torch.equal(torch.stack([t for _, _, t in found]).sum(dim=0), wanted)
    grad = torch.linspace(-1, 2, 11, device=device)
    exact = (exact - (torch.arange(vocab, device=device) == labels.unsqueeze(-1)).double()) * grad.unsqueeze(-1)
    for part, offset, extent in parts:
        ops.gradient_(part, labels, maximum, total, grad, offset=offset, extent=extent)
        assert not bool(part[:, extent:].any()), "the padding has a gradient"
        wanted = exact[:, offset : offset + extent]
        if extent:
            assert_accurate(part[:, :extent], wanted.to(dtype), wanted, factor=3.0, what=f"part at {offset}")


@providers
def test_rows_that_are_not_finite(device: torch.device, ops: CrossEntropyOps) -> None:
    x = torch.randn(5, 700, device=device)
    x[0, 3] = INFINITY
    x[1, 650] = float("nan")
    x[2] = -INFINITY
    x[3, 1:] = -INFINITY
    x[4, :650] = -INFINITY
    labels = torch.tensor([5, 5, 5, 0, 690], device=device)
    wanted = F.cross_entropy(x, labels, reduction="none")
    assert wanted.isnan().tolist() == [True, True, True, False, False]
    leaf = x.clone().requires_grad_()
    loss = _loss(leaf, labels, ops)
    assert torch.allclose(loss, wanted, equal_nan=True) and not bool(loss[3])
    loss.sum().backward()
    assert leaf.grad is not None and bool(leaf.grad[3:].isfinite().all()) and bool(leaf.grad[:3].isnan().all(-1).all())
    part = torch.full((2, 9), -INFINITY, device=device)
    maximum, total, _ = ops.statistics(part, labels[:2], offset=0, extent=9)
    assert bool((maximum == -INFINITY).all()) and not bool(total.any()), "a rank with nothing to add"


@providers
def test_large_logits(device: torch.device, ops: CrossEntropyOps) -> None:
    x, labels = _inputs(6, 333)
    leaf = (x.float() * 1000).to(device).requires_grad_()
    exact = _eager(leaf.detach().double(), labels.to(device))
    loss = _loss(leaf, labels.to(device), ops)
    assert torch.allclose(loss.double(), exact, rtol=1e-6)
    loss.sum().backward()
    assert leaf.grad is not None and bool(leaf.grad.isfinite().all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_that_no_vector_load_fits(device: torch.device, dtype: torch.dtype) -> None:
    x, labels = _inputs(4, 64)
    whole = torch.zeros(4 * 64 + 1, dtype=dtype, device=device)
    view = whole[1:].view(4, 64)
    view.copy_(x)
    aligned = view.clone()
    labels = labels.to(device)
    want, have = (_loss(t, labels, own_cross_entropy) for t in (aligned, view))
    assert torch.allclose(want, have, rtol=1e-6)
    grad = torch.ones(4, device=device)
    for t in (aligned, view):
        m, s, _ = cross_entropy.statistics(t, labels, offset=0, extent=64)
        cross_entropy.gradient_(t, labels, m, s, grad, offset=0, extent=64)
    assert torch.allclose(aligned.float(), view.float(), rtol=1e-2, atol=1e-6) and not bool(whole[0])


def test_the_same_bits_again_on_any_number_of_threads(device: torch.device) -> None:
    x, labels = _inputs(37, 1000)
    threads, seen = torch.get_num_threads(), []
    try:
        for count in (1, 1, 2):
            torch.set_num_threads(count)
            leaf = x.bfloat16().to(device).requires_grad_()
            loss = _loss(leaf, labels.to(device), own_cross_entropy)
            loss.sum().backward()
            assert leaf.grad is not None
            seen.append((loss, leaf.grad))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for other in seen[1:] for a, b in zip(seen[0], other))


@providers
def test_the_gradient_takes_the_logits_place_once(device: torch.device, ops: CrossEntropyOps) -> None:
    hidden = torch.randn(6, 5, device=device)
    weight = torch.randn(24, 5, device=device, requires_grad=True)
    labels = torch.arange(6, device=device)
    logits = F.linear(hidden, weight)
    with torch.no_grad():
        before = logits.clone()
        evaluated = _loss(logits, labels, ops)
        assert torch.equal(logits, before), "evaluation changed the logits"
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        _loss(logits, labels, ops)
    large = {t.untyped_storage().data_ptr() for t in kept if t.numel() >= logits.numel()}
    assert large == {logits.untyped_storage().data_ptr()}, "a copy of the logits is kept"
    loss, other = _loss(logits, labels, ops), _loss(logits, labels, ops)
    assert torch.equal(loss, evaluated) and torch.equal(logits, before)
    loss.sum().backward(retain_graph=True)
    expected = before.softmax(dim=-1) - F.one_hot(labels, 24)
    assert torch.allclose(logits, expected, atol=1e-6), "the gradient is not in the logits' place"
    assert torch.allclose(weight.grad, expected.t() @ hidden, atol=1e-5)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="gradient over them"):
        loss.sum().backward()
    with pytest.raises(RuntimeError, match="gradient over them"):
        other.sum().backward()
    changed = F.linear(hidden, weight)
    loss = _loss(changed, labels, ops)
    changed.detach().mul_(2)
    with pytest.raises(RuntimeError, match="nothing else may change them"):
        loss.sum().backward()


@providers
def test_under_recompute(device: torch.device, ops: CrossEntropyOps) -> None:
    weight = torch.randn(24, 5, device=device)
    labels = torch.arange(6, device=device)

    def run(hidden: torch.Tensor) -> torch.Tensor:
        return _loss(F.linear(hidden, weight), labels, ops)

    plain = torch.randn(6, 5, device=device, requires_grad=True)
    kept = plain.detach().clone().requires_grad_()
    run(plain).sum().backward()
    checkpoint(run, kept, use_reentrant=False).sum().backward()
    assert plain.grad is not None and kept.grad is not None and torch.equal(plain.grad, kept.grad)


def test_opcheck(device: torch.device) -> None:
    logits, labels = torch.randn(3, 2, 24, device=device), torch.randint(0, 24, (3, 2), device=device)
    torch.library.opcheck(torch.ops.megatron_port.cross_entropy_statistics, (logits, labels, 0, 20))
    maximum, total, _ = cross_entropy.statistics(logits, labels, offset=0, extent=20)
    assert maximum.shape == (3, 2)
    torch.library.opcheck(
        torch.ops.megatron_port.cross_entropy_gradient_,
        (logits, labels, maximum, total, torch.randn(3, 2, device=device), 0, 20),
    )


def test_no_rows(device: torch.device) -> None:
    x, labels = torch.empty(0, 16, device=device), torch.empty(0, dtype=torch.int64, device=device)
    maximum, total, _ = cross_entropy.statistics(x, labels, offset=0, extent=16)
    assert maximum.shape == (0,)
    cross_entropy.gradient_(x, labels, maximum, total, total, offset=0, extent=16)


@pytest.mark.parametrize("broken, text", [
    (lambda x, y, m: (x.t(), y, m, 4), "not contiguous"),
    (lambda x, y, m: (x.double(), y, m, 4), "float32, float16 and bfloat16"),
    (lambda x, y, m: (x, y.int(), m, 4), "labels has another dtype"),
    (lambda x, y, m: (x, y[:-1], m, 4), "labels has 11 elements, not 12"),
    (lambda x, y, m: (x, y, m, 17), "extent must be"),
    (lambda x, y, m: (x, y, m.double(), 4), "grad has another dtype"),
])
def test_refusals(device: torch.device, broken: object, text: str) -> None:
    x, labels, grad, extent = broken(  # type: ignore[operator]
        torch.randn(12, 16, device=device), torch.zeros(12, dtype=torch.int64, device=device),
        torch.ones(12, device=device),
    )
    ones = torch.ones(12, device=device)
    with pytest.raises(RuntimeError, match=text):
        cross_entropy.gradient_(x, labels, ones, ones, grad, offset=0, extent=extent)
    if "grad" not in text:
        with pytest.raises(RuntimeError, match=text):
            cross_entropy.statistics(x, labels, offset=0, extent=extent)
