"""LayerNorm and RMSNorm, with and without bias and residual."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from reference import DTYPES, compare, random_shapes

from megatron_port.ext.kernels.ops import norm

EPS = 1e-5
# 4104, 9000: more than one 16-byte piece a thread in half precision, and sums in shared memory backward in fp32; 16392,
# 25600: that in half precision too, and in fp32 wider than even so; 30000: wider in every dtype. Several rows: several
# slots of partial sums; 3000 x 40 (a row a warp), 1470 x 264 (two warps), 210 x 3592 (a block): a block works on
# several rows one after another.
SHAPES = [*random_shapes(1, 20, wide=(4104, 9000, 2051)), (3, 25600), (2, 30000), (65, 16392), (197, 40), (130, 65),
          (97, 520), (3000, 40), (1470, 264), (210, 3592)]
LARGE = 500_000
"""Elements beyond which a norm is compared only as it does most: with residual, with bias."""


def _inputs(rows: int, cols: int, count: int) -> list[torch.Tensor]:
    """x, residual, weight, bias in fp64."""
    g = torch.Generator().manual_seed(rows * 10007 + cols)
    make = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    return [make(rows, cols) * 2 + 0.5, make(rows, cols), 1 + 0.3 * make(cols), make(cols)][:count]


@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm(device: torch.device, dtype: torch.dtype) -> None:
    for rows, cols in SHAPES:
        x, residual, weight, bias = _inputs(rows, cols, 4)
        if rows * cols < LARGE:
            compare(lambda x, w, b: norm.layer_norm(x, w, b, EPS), lambda x, w, b: F.layer_norm(x, w.shape, w, b, EPS),
                    (x, weight, bias), dtype, device, what=f"layer_norm {rows}x{cols}")
            compare(lambda x, w: norm.layer_norm(x, w, None, EPS), lambda x, w: F.layer_norm(x, w.shape, w, None, EPS),
                    (x, weight), dtype, device, what=f"layer_norm without bias {rows}x{cols}")

        def eager(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return F.layer_norm(x + r, w.shape, w, b, EPS), x + r

        compare(lambda x, r, w, b: norm.add_layer_norm(x, r, w, b, EPS), eager, (x, residual, weight, bias), dtype,
                device, what=f"add_layer_norm {rows}x{cols}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm(device: torch.device, dtype: torch.dtype) -> None:
    for rows, cols in SHAPES:
        x, residual, weight = _inputs(rows, cols, 3)
        if rows * cols < LARGE:
            compare(lambda x, w: norm.rms_norm(x, w, EPS), lambda x, w: F.rms_norm(x, w.shape, w, EPS),
                    (x, weight), dtype, device, what=f"rms_norm {rows}x{cols}")

        def eager(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return F.rms_norm(x + r, w.shape, w, EPS), x + r

        compare(lambda x, r, w: norm.add_rms_norm(x, r, w, EPS), eager, (x, residual, weight), dtype, device,
                what=f"add_rms_norm {rows}x{cols}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_of_another_use_is_added(device: torch.device, dtype: torch.dtype) -> None:
    """Of an input that is used beside its norm: the second result is that input itself."""
    for rows, cols in SHAPES[::3]:
        x, _, weight, bias = _inputs(rows, cols, 4)
        compare(lambda x, w, b: norm.fork(x, w, b, EPS, rms=False),
                lambda x, w, b: (F.layer_norm(x, w.shape, w, b, EPS), x * 1), (x, weight, bias), dtype, device,
                what=f"layer_norm of two uses {rows}x{cols}")
        compare(lambda x, w: norm.fork(x, w, None, EPS, rms=True), lambda x, w: (F.rms_norm(x, w.shape, w, EPS), x * 1),
                (x, weight), dtype, device, what=f"rms_norm of two uses {rows}x{cols}")
    y, same = norm.fork(leaf := x.to(device, dtype).requires_grad_(), weight.to(device, dtype), None, EPS, rms=True)
    assert same.data_ptr() == leaf.data_ptr()
    assert torch.equal(torch.autograd.grad(same, leaf, y.detach())[0], y)


def _slots(built: Path, rows: int, cols: int) -> int:
    library = ctypes.CDLL(str(built / "libmp_emulated32.so"))
    library.mp_norm_workspace.restype = ctypes.c_int64
    floats = library.mp_norm_workspace(ctypes.c_int64(rows), ctypes.c_int64(cols))
    assert floats % (2 * cols) == 0
    return int(floats // (2 * cols))


def _modelled_us(rows: int, cols: int, slots: int) -> float:
    """Microseconds of LayerNorm's backward pass in half precision with a residual's gradient, on 3 TB/s: a block works
    on a row, or on several narrow ones, for 2 us; two sums of 4 bytes a column and slot are written and read."""
    teams = 448 // min(448, -(-cols // (8 * 32)) * 32)
    turns = -(-rows // (slots * teams))
    return max(8 * rows * cols / 3e6, 2.0 * turns) + 16 * slots * cols / 3e6


def test_slots_of_partial_sums_are_chosen_by_time(built: Path) -> None:
    """The least that the model has, of one slot for 32 rows to as many as every GPU runs at once."""
    for rows in (1, 31, 100, 256, 1024, 2048, 4096, 6655):
        for cols in (64, 768, 1600, 4096, 8192, 25600):
            slots = _slots(built, rows, cols)
            allowed = range(max(1, rows // 32), min(rows, 208) + 1)
            assert slots in allowed
            least = min(_modelled_us(rows, cols, n) for n in allowed)
            assert _modelled_us(rows, cols, slots) <= least * (1 + 1e-9), (rows, cols, slots)


def test_few_rows_take_about_the_time_of_their_bytes(built: Path) -> None:
    """A rank's rows with tp 8 and sequence parallelism: 32 of them in a slot took 11 times as long as their bytes."""
    assert _modelled_us(256, 8192, 256 // 32) > 11 * 8 * 256 * 8192 / 3e6
    for rows, cols in ((256, 8192), (1024, 4096), (1024, 8192), (2048, 1600), (2048, 4096), (4096, 4096)):
        assert _modelled_us(rows, cols, _slots(built, rows, cols)) < 1.8 * 8 * rows * cols / 3e6


def test_many_rows_have_32_or_more_a_slot(built: Path) -> None:
    """In half precision without dsum a column of a slot costs 16 bytes beside 6 a row: at most 1.09 times the least."""
    for rows in (8192, 32768, 1 << 20):
        for cols in (768, 4096, 25600):
            slots = _slots(built, rows, cols)
            assert 1 + 16 * slots / (6 * rows) <= 1.09


def test_only_the_sum_or_only_the_norm_is_used(device: torch.device) -> None:
    x, residual, weight = (t.float().to(device).requires_grad_() for t in _inputs(5, 24, 3))
    norm.add_rms_norm(x, residual, weight, EPS)[1].sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.ones_like(x)) and weight.grad is None
    x.grad = residual.grad = None
    norm.add_rms_norm(x, residual, weight, EPS)[0].sum().backward()
    assert x.grad is not None and torch.equal(x.grad, residual.grad)


def test_the_same_bits_again(device: torch.device) -> None:
    x, residual, weight, bias = (t.bfloat16().to(device).requires_grad_() for t in _inputs(50, 96, 4))
    seen = []
    for _ in range(2):
        y, total = norm.add_layer_norm(x, residual, weight, bias, EPS)
        seen.append([y, total, *torch.autograd.grad((y * y + total).sum(), (x, residual, weight, bias))])
    assert all(torch.equal(a, b) for a, b in zip(*seen))


def test_no_rows_give_zeros(device: torch.device) -> None:
    """Of a rank to which no token is routed."""
    x = torch.empty(0, 24, device=device, requires_grad=True)
    weight, bias = (torch.ones(24, device=device, requires_grad=True) for _ in range(2))
    norm.layer_norm(x, weight, bias, EPS).sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape
    for p in (weight, bias):
        assert p.grad is not None and torch.equal(p.grad.cpu(), torch.zeros(24))


def test_a_gradient_of_the_gradient_is_refused(device: torch.device) -> None:
    x, weight = (torch.randn(*shape, device=device, requires_grad=True) for shape in ((3, 8), (8,)))
    (gradient,) = torch.autograd.grad(norm.rms_norm(x, weight, EPS).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_opcheck(device: torch.device) -> None:
    for residual in (None, torch.randn(6, 40, device=device, requires_grad=True)):
        x = torch.randn(6, 40, device=device, requires_grad=True)
        w = torch.randn(40, device=device, requires_grad=True)
        torch.library.opcheck(torch.ops.megatron_port.norm_forward, (x, residual, w, None, EPS, True))
        torch.library.opcheck(torch.ops.megatron_port.norm_forward, (x, residual, w, w, EPS, False))


@pytest.mark.parametrize("broken, text", [
    (lambda x, w: (x.t(), w), "not contiguous"),
    (lambda x, w: (x.double(), w.double()), "float32, float16 and bfloat16"),
    (lambda x, w: (x, w.bfloat16()), "different dtypes"),
    (lambda x, w: (x, w[:-1].contiguous()), r"weight must be \[h\]"),
])
def test_refusals(device: torch.device, broken: object, text: str) -> None:
    x, w = broken(torch.randn(12, 16, device=device), torch.randn(16, device=device))  # type: ignore[operator]
    with pytest.raises(RuntimeError, match=text):
        norm.rms_norm(x, w, EPS)
