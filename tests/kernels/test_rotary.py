"""Split of the fused projection with rotary embedding: grouped heads, offsets, gradients of any strides."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable

import pytest
import torch
from reference import DTYPES, compare
from torch.utils.checkpoint import checkpoint

from megatron_port.core.config.schema import ModelConfig
from megatron_port.core.dist.positions import Positions
from megatron_port.core.layers.fused import torch_split_rotary
from megatron_port.core.model.rotary import RotaryTables
from megatron_port.ext.kernels.ops import rotary

POSITIONS = 40
Shape = tuple[int, int, int, int, int]


def _shapes() -> list[Shape]:
    """(s, b, g, r, d): heads in 16-byte pieces and element by element (6, 10, 80 in none), grouped and not."""
    draw = random.Random(5)
    out = [(5, 2, 2, 4, 128), (4, 1, 1, 1, 80), (3, 1, 70, 2, 64), (2, 3, 30, 1, 512), (1, 1, 1, 1, 2)]
    while len(out) < 20:
        out.append((draw.randint(1, 30), draw.randint(1, 3), draw.randint(1, 5), draw.choice([1, 2, 4]),
                    draw.choice([6, 10, 16, 64, 80, 128])))
    return out


def _tables(size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = RotaryTables(ModelConfig(head_dim=size)).rows(Positions.contiguous(POSITIONS), torch.device("cpu"))
    return cos.to(device), sin.to(device)


def _qkv(shape: Shape) -> torch.Tensor:
    s, b, g, r, d = shape
    return torch.randn(s, b, g, r + 2, d, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def _eager(qkv: torch.Tensor, offset: int | None) -> tuple[torch.Tensor, ...]:
    if offset is None:
        return torch_split_rotary(qkv, None, None)
    return torch_split_rotary(qkv, *_tables(qkv.shape[-1], qkv.device), offset=offset)


def _own(qkv: torch.Tensor, offset: int) -> tuple[torch.Tensor, ...]:
    return rotary.split_rotary(qkv, *_tables(qkv.shape[-1], qkv.device), offset=offset)


@pytest.mark.parametrize("dtype", DTYPES)
def test_split_rotary(device: torch.device, dtype: torch.dtype) -> None:
    for i, shape in enumerate(_shapes()):
        offset = (i * 7) % (POSITIONS - shape[0] + 1)
        own, eager = functools.partial(_own, offset=offset), functools.partial(_eager, offset=offset)
        compare(own, eager, (_qkv(shape),), dtype, device,
                what=f"split_rotary {shape} at {offset}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_tables_it_copies(device: torch.device, dtype: torch.dtype) -> None:
    for shape in _shapes()[:8]:
        qkv = _qkv(shape).to(dtype).to(device).requires_grad_()
        own = rotary.split_rotary(qkv, None, None)
        assert all(torch.equal(a, b) and a.is_contiguous() for a, b in zip(own, _eager(qkv, None)))
        dqkv, = torch.autograd.grad(own, qkv, [3 * o.detach() for o in own])
        assert torch.equal(dqkv, 3 * qkv)


@pytest.mark.parametrize("size", [7, 64])
@pytest.mark.parametrize("heads", [1, 2])
def test_a_split_without_rotation_is_torchs_and_its_gradient_is_packed(
    device: torch.device, heads: int, size: int
) -> None:
    """To the bit; gradients as attention returns them, and sizes that the kernel does not take."""
    qkv = _qkv((5, 2, 3, heads, size)).bfloat16().to(device).requires_grad_()
    found = []
    for way in (rotary.split, lambda x: torch_split_rotary(x, None, None)):
        out = way(qkv)
        assert all(o.untyped_storage().data_ptr() == qkv.untyped_storage().data_ptr() for o in out[heads > 1 :])
        grads = [torch.empty_like(o.transpose(0, 1).contiguous()).transpose(0, 1).copy_(o + i)
                 for i, o in enumerate(out)]
        found.append([*out, *torch.autograd.grad(out, qkv, grads)])
    assert all(torch.equal(a, b) for a, b in zip(*found)) and found[0][-1].is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bias_gets_the_sums_of_the_packed_gradient(device: torch.device, dtype: torch.dtype) -> None:
    """Beside fp64's, for gradients as attention returns them; more rows than slots, several strips, odd sizes."""
    for s, b, g, r, size in [(5, 2, 3, 1, 16), (70, 3, 2, 2, 8), (9, 1, 20, 4, 128), (4, 2, 2, 2, 6), (3, 1, 2, 1, 7)]:
        shape = (s, b, g, r, size)
        qkv = _qkv(shape).to(dtype).to(device)
        x, plain = qkv.clone().requires_grad_(), qkv.clone().requires_grad_()
        bias = torch.zeros(g * (r + 2) * size, dtype=dtype, device=device, requires_grad=True)
        out = rotary.split(x, bias)
        grads = [torch.empty_like(o.transpose(0, 1).contiguous()).transpose(0, 1).copy_(o + i)
                 for i, o in enumerate(out)]
        dqkv, dbias = torch.autograd.grad(out, (x, bias), grads)
        wanted, = torch.autograd.grad(torch_split_rotary(plain, None, None), plain, grads)
        assert torch.equal(dqkv, wanted) and dqkv.is_contiguous()
        sums = wanted.double().flatten(0, 1).sum(dim=0).flatten()
        rows, unit = s * b, wanted.double().abs().flatten(0, 1).sum(dim=0).flatten()
        assert ((dbias.double() - sums).abs() <= torch.finfo(dtype).eps * sums.abs() + 1e-7 * rows * unit).all(), shape


def test_without_rows_the_bias_has_no_gradient(device: torch.device) -> None:
    qkv, bias = (torch.zeros(n, device=device, requires_grad=True) for n in ((0, 2, 1, 3, 4), (12,)))
    assert not torch.autograd.grad(rotary.split(qkv, bias), bias, [qkv.new_zeros(0, 2, 1, 4)] * 3)[0].any()


def test_values_are_copied_and_every_element_is_turned_by_its_own_angle(device: torch.device) -> None:
    """One hot element at a time: it stays at i by the cosine and appears at i + d/2 by the sine of its position."""
    size, offset = 16, 9
    cos, sin = _tables(size, device)
    for i in range(size):
        qkv = torch.zeros(3, 1, 1, 3, size, device=device)
        qkv[..., i] = 1.0
        q, k, v = rotary.split_rotary(qkv, cos, sin, offset=offset)
        for s in range(3):
            j, wanted = i % (size // 2), torch.zeros(size, device=device)
            wanted[i] = cos[offset + s, j]
            wanted[(i + size // 2) % size] = sin[offset + s, j] * (1 if i < size // 2 else -1)
            assert torch.equal(q[s, 0, 0], wanted) and torch.equal(k[s, 0, 0], wanted)
        assert torch.equal(v, qkv[:, :, :, 2])


@pytest.mark.parametrize("size", [6, 64])
def test_gradients_of_any_strides(device: torch.device, size: int) -> None:
    """As attention returns them: permuted, sliced, expanded, transposed in the last dimension, odd in one."""
    s, b, g, r = 5, 2, 3, 2
    qkv = _qkv((s, b, g, r, size)).float().to(device).requires_grad_()
    own = _own(qkv, 3)
    plain = [torch.randn_like(o) for o in own]
    wanted, = torch.autograd.grad(own, qkv, plain, retain_graph=True)
    views: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda t: t.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3),
        lambda t: torch.cat((t, t), dim=2)[:, :, : t.shape[2]],
        lambda t: torch.cat((t, t), dim=3)[..., :size],
        lambda t: t.transpose(0, 3).contiguous().transpose(0, 3),
        lambda t: torch.nn.functional.pad(t, (1, 2))[..., 1:-2],
    ]
    for view in views:
        grads = [view(p) for p in plain]
        assert not any(v.is_contiguous() for v in grads)
        assert torch.equal(torch.autograd.grad(own, qkv, grads, retain_graph=True)[0], wanted)
    same = [p[:1, :, :1].expand_as(p) for p in plain]
    spread, = torch.autograd.grad(own, qkv, same, retain_graph=True)
    assert torch.equal(spread, torch.autograd.grad(own, qkv, [t.contiguous() for t in same])[0])


def test_only_one_output_is_used(device: torch.device) -> None:
    qkv = _qkv((4, 1, 2, 2, 16)).float().to(device).requires_grad_()
    dqkv, = torch.autograd.grad(_own(qkv, 0)[2].sum(), qkv)
    assert torch.equal(dqkv[:, :, :, 3], torch.ones_like(dqkv[:, :, :, 3])) and not dqkv[:, :, :, :3].any()


def test_with_attention_and_under_recompute(device: torch.device) -> None:
    qkv = _qkv((12, 2, 2, 2, 16)).float().to(device)

    def attention(x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.permute(1, 2, 0, 3) for t in _own(x, 4))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    grads = []
    for run in (attention, lambda x: checkpoint(attention, x, use_reentrant=False)):
        leaf = qkv.clone().requires_grad_()
        y = run(leaf)
        grads.append(torch.autograd.grad((y * y).sum(), leaf)[0])
    assert torch.equal(*grads)
    leaf = qkv.clone().requires_grad_()
    q, k, v = (t.permute(1, 2, 0, 3) for t in _eager(leaf, 4))
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(grads[0], torch.autograd.grad((y * y).sum(), leaf)[0])


def test_no_positions(device: torch.device) -> None:
    q, k, v = _own(torch.zeros(0, 2, 2, 3, 16, device=device), POSITIONS)
    assert q.shape == (0, 2, 2, 16) and k.shape == v.shape == (0, 2, 2, 16)


def test_opcheck(device: torch.device) -> None:
    op = torch.ops.megatron_port
    qkv = torch.randn(5, 2, 2, 4, 16, device=device, requires_grad=True)
    tables = _tables(16, device)
    torch.library.opcheck(op.rotary_forward, (qkv, *tables, 2))
    torch.library.opcheck(op.rotary_forward, (qkv, None, None, 0))
    grads = tuple(o.detach() for o in op.rotary_forward(qkv, *tables, 2))
    torch.library.opcheck(op.rotary_backward, (*grads, *tables, 2))
    torch.library.opcheck(op.split_backward, grads)


@pytest.mark.parametrize("broken, text", [
    (lambda x, c, s: (x.transpose(0, 1), c, s, 0), "not contiguous"),
    (lambda x, c, s: (x.double(), c, s, 0), "float32, float16 and bfloat16"),
    (lambda x, c, s: (x, c.half(), s.half(), 0), "another dtype"),
    (lambda x, c, s: (x, c, None, 0), "both of cos and sin"),
    (lambda x, c, s: (x, c.repeat(1, 2), s, 0), r"\[positions, d / 2\]"),
    (lambda x, c, s: (x, c, s[:-1], 0), "elements"),
    (lambda x, c, s: (x, c, s.t().contiguous().t(), 0), "sin is not contiguous"),
    (lambda x, c, s: (x, c, s, POSITIONS - 4), "offset 36 .* needs those up to 41"),
    (lambda x, c, s: (x, c, s, -1), "offset -1"),
    (lambda x, c, s: (x[0], c, s, 0), "qkv must be"),
    (lambda x, c, s: (x[:, :, :, :2].contiguous(), c, s, 0), "qkv must be"),
    (lambda x, c, s: (x[..., :7].contiguous(), None, None, 0), "even and at most 512"),
])
def test_refusals(device: torch.device, broken: Callable[..., tuple[torch.Tensor, ...]], text: str) -> None:
    qkv, cos, sin, offset = broken(torch.randn(5, 2, 2, 4, 16, device=device), *_tables(16, device))
    with pytest.raises(RuntimeError, match=text):
        rotary.split_rotary(qkv, cos, sin, offset=offset)  # type: ignore[arg-type]


def test_refusals_of_gradients(device: torch.device) -> None:
    q, k = torch.randn(5, 2, 4, 16, device=device), torch.randn(5, 2, 2, 16, device=device)
    backward = torch.ops.megatron_port.rotary_backward
    for grads, text in (((q, k, k[:4]), "differ in"), ((q[:, :, :3], k, k), "multiple"), ((q, k.half(), k), "dtypes"),
                        ((q, k, k.transpose(0, 3).contiguous().transpose(0, 3)), "last dimension")):
        with pytest.raises(RuntimeError, match=text):
            backward(*grads, None, None, 0)
