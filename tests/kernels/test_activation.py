"""GELU of x + bias, SwiGLU on the packed projection, and the CPU's exp, tanh and 2^x beneath them."""

from __future__ import annotations

import ctypes
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from reference import DTYPES, compare, random_shapes
from torch.utils.checkpoint import checkpoint

from megatron_port.ext.kernels.cpu_levels import cpu_levels, processor_flags
from megatron_port.ext.kernels.ops import activation

# 2056 and 6200: two strips of columns and more, with 8 and with 4 elements a thread; 1029: five in single steps.
SHAPES = random_shapes(2, 20, wide=(2056, 6200, 1029))
FORMS = {True: "tanh", False: "none"}


def _normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _eager_swiglu(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


@pytest.mark.parametrize("approximate", [True, False], ids=["tanh", "erf"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_gelu(device: torch.device, dtype: torch.dtype, approximate: bool) -> None:
    for rows, cols in SHAPES:
        x, bias = 2.5 * _normal(rows, cols, seed=rows * 10007 + cols), _normal(cols, seed=cols)
        compare(lambda x, b: activation.bias_gelu(x, b, approximate=approximate),
                lambda x, b: F.gelu(x + b, approximate=FORMS[approximate]), (x, bias), dtype, device,
                what=f"bias_gelu {rows}x{cols}")
    compare(lambda x: activation.bias_gelu(x, None, approximate=approximate),
            lambda x: F.gelu(x, approximate=FORMS[approximate]), (_normal(2, 3, 40),), dtype, device, what="gelu")


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu(device: torch.device, dtype: torch.dtype) -> None:
    for rows, cols in SHAPES:
        x = 2.5 * _normal(rows, 2 * cols, seed=rows * 10007 + cols)
        compare(activation.swiglu, _eager_swiglu, (x,), dtype, device, what=f"swiglu {rows}x{cols}")
    compare(activation.swiglu, _eager_swiglu, (_normal(2, 3, 48),), dtype, device, what="swiglu of three dimensions")


def test_many_rows(device: torch.device) -> None:
    """Each block takes more than one turn, and dbias is the sum over several slots."""
    for cols in (16, 24, 7):
        x, bias = _normal(901, cols), _normal(cols, seed=1)
        compare(lambda x, b: activation.bias_gelu(x, b, approximate=True),
                lambda x, b: F.gelu(x + b, approximate="tanh"), (x, bias), torch.float32, device, what="many rows")
        compare(activation.swiglu, _eager_swiglu, (_normal(901, 2 * cols),), torch.float32, device, what="many rows")


@pytest.mark.parametrize("approximate", [True, False], ids=["tanh", "erf"])
def test_the_whole_range(device: torch.device, approximate: bool) -> None:
    """Values and slopes from -30 to 30, with and without 16-byte pieces; the limits, and NaN for NaN."""
    # Pieces of it too: the error that is allowed goes with the largest value.
    for low, high, count in ((-30, 30, 4096), (-30, 30, 4093), (-13, -4, 1000), (-4, 0, 1000), (0, 2, 1000)):
        x = torch.linspace(low, high, count, dtype=torch.float64)
        compare(lambda x: activation.bias_gelu(x, None, approximate=approximate),
                lambda x: F.gelu(x, approximate=FORMS[approximate]), (x,), torch.float32, device,
                what=f"from {low} to {high}")
    both = torch.stack((torch.linspace(-30, 30, 4096), torch.ones(4096)), 0).double().reshape(1, -1)
    for packed in (both, both[:, 3:-3]):
        compare(activation.swiglu, _eager_swiglu, (packed,), torch.float32, device, what="gates from -30 to 30")
    ends = torch.tensor([float("nan"), float("inf"), 3e4, -3e4, 0.0], device=device)
    for dtype in DTYPES:
        limits = [-1.0, 2.0**40, ends.to(dtype)[2].item(), 0.0, 0.0]
        y = activation.bias_gelu(ends.to(dtype), None, approximate=approximate)
        assert y.float().nan_to_num(nan=-1.0, posinf=2.0**40).tolist() == limits
        y = activation.swiglu(torch.stack((ends, torch.ones_like(ends))).to(dtype).reshape(-1))
        assert y.float().nan_to_num(nan=-1.0, posinf=2.0**40).tolist() == limits
        x = ends[2:].to(dtype).requires_grad_()
        activation.bias_gelu(x, None, approximate=approximate).sum().backward()
        assert x.grad is not None and x.grad.tolist() == [1.0, 0.0, 0.5]


def test_exp_tanh_and_power_of_2_of_the_cpu(build_script: ModuleType, built: Path, tmp_path: Path) -> None:
    """Within 2 ulp of fp64 at every level of the instruction set that runs here, ends and NaN included."""
    source = tmp_path / "functions.cpp"
    source.write_text('#include "vmath.h"\n' + "".join(
        f'extern "C" void v_{name}(const float* x, float* y, long n) {{\n'
        f"  for (long i = 0; i < n; i++) y[i] = mp::{name}(x[i]);\n}}\n"
        for name in ("exp_float", "tanh_float", "power_of_2")))
    levels = cpu_levels(processor_flags(), platform.machine())
    for built_for in build_script.plan("cpu", ()):
        if not any(level in built_for.name for level in levels):
            continue
        target = tmp_path / built_for.name
        subprocess.run([*built_for.compile, "-shared", str(source), "-o", str(target)], check=True)
        library = ctypes.CDLL(str(target))
        powers = torch.logspace(-40, 6.7, 20011, base=2.0)
        x = torch.cat((torch.linspace(-104, 88.7, 30011), powers, -powers))
        ends = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e30, -1e30, 0.0])
        for name, exact, limits in (
            ("exp_float", torch.exp, [-9.0, 2.0**40, 0.0, 2.0**40, 0.0, 1.0]),
            ("tanh_float", torch.tanh, [-9.0, 1, -1, 1, -1, 0]),
            ("power_of_2", torch.exp2, [-9.0, 2.0**40, 0.0, 2.0**40, 0.0, 1.0]),
        ):
            y, at_ends = torch.empty_like(x), torch.empty_like(ends)
            for given, out in ((x, y), (ends, at_ends)):
                getattr(library, f"v_{name}")(ctypes.c_void_p(given.data_ptr()), ctypes.c_void_p(out.data_ptr()),
                                              ctypes.c_long(given.numel()))
            wanted = exact(x.double())
            nearest = wanted.float().abs()
            ulp = (torch.nextafter(nearest, torch.full_like(nearest, float("inf"))) - nearest).double()
            finite = torch.isfinite(nearest)
            error = ((y.double() - wanted).abs() / ulp)[finite]
            assert float(error.max()) <= 2.0, f"{name} of {built_for.name}: {float(error.max())} ulp"
            assert torch.equal(y[~finite].abs(), nearest[~finite])
            assert at_ends.nan_to_num(nan=-9.0, posinf=2.0**40).tolist() == limits, f"{name} of {built_for.name}"


def test_no_rows(device: torch.device) -> None:
    x = torch.zeros(0, 24, device=device, requires_grad=True)
    bias = torch.zeros(24, device=device, requires_grad=True)
    y = activation.bias_gelu(x, bias, approximate=True)
    y.sum().backward()
    assert y.shape == (0, 24) and bias.grad is not None and torch.equal(bias.grad, torch.zeros_like(bias))
    assert activation.swiglu(x).shape == (0, 12)


def test_the_same_bits_again(device: torch.device) -> None:
    x, bias = _normal(300, 96).bfloat16().to(device), _normal(96).bfloat16().to(device)
    seen = []
    for _ in range(2):
        leaf, shift = x.clone().requires_grad_(), bias.clone().requires_grad_()
        y = activation.swiglu(activation.bias_gelu(leaf, shift, approximate=False))
        seen.append([y, *torch.autograd.grad((y * y).sum(), (leaf, shift))])
    assert all(torch.equal(a, b) for a, b in zip(*seen))


def test_under_recompute_and_with_strided_gradients(device: torch.device) -> None:
    x, bias = _normal(12, 64).float().to(device), _normal(64).float().to(device)

    def layer(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return activation.swiglu(activation.bias_gelu(x, bias, approximate=True)).t()

    grads = []
    for run in (layer, lambda *inputs: checkpoint(layer, *inputs, use_reentrant=False)):
        leaves = x.clone().requires_grad_(), bias.clone().requires_grad_()
        y = run(*leaves)
        grads.append(torch.autograd.grad(y, leaves, torch.ones_like(y)))
    assert all(torch.equal(a, b) for a, b in zip(*grads)) and float(grads[0][0].abs().max()) > 0


def test_a_bias_that_is_frozen_gets_no_gradient(device: torch.device) -> None:
    x, bias = _normal(6, 16).float().to(device).requires_grad_(), _normal(16).float().to(device)
    activation.bias_gelu(x, bias, approximate=True).sum().backward()
    assert x.grad is not None and bias.grad is None


def test_opcheck(device: torch.device) -> None:
    x, bias = (torch.randn(*shape, device=device, requires_grad=True) for shape in ((6, 40), (40,)))
    ops = torch.ops.megatron_port
    for approximate in (True, False):
        torch.library.opcheck(ops.bias_gelu_forward, (x, bias, approximate))
        torch.library.opcheck(ops.bias_gelu_forward, (x, None, approximate))
    torch.library.opcheck(ops.swiglu_forward, (x,))
    dy, held = torch.randn(6, 40, device=device), x.detach()
    torch.library.opcheck(ops.bias_gelu_backward, (dy, held, bias.detach(), True, True))
    torch.library.opcheck(ops.swiglu_backward, (dy[:, :20].contiguous(), held))


def _gelu(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return activation.bias_gelu(x, bias, approximate=True)


@pytest.mark.parametrize("call, text", [
    (lambda x, b: _gelu(x.t(), b), "not contiguous"),
    (lambda x, b: _gelu(x.double(), b.double()), "float32, float16 and bfloat16"),
    (lambda x, b: _gelu(x, b.bfloat16()), "different dtypes"),
    (lambda x, b: _gelu(x, b[:-1].contiguous()), r"bias must be \[f\]"),
    (lambda x, b: activation.swiglu(x[:, ::2]), "not contiguous"),
    (lambda x, b: activation.swiglu(x.int()), "float32, float16 and bfloat16"),
    (lambda x, b: activation.swiglu(x[:, :7].contiguous()), "gate, then up"),
    (lambda x, b: torch.ops.megatron_port.swiglu_backward(x, x), "dy must be"),
    (lambda x, b: torch.ops.megatron_port.bias_gelu_backward(x, x, None, True, True), "no bias"),
])
def test_refusals(
    device: torch.device, call: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], text: str
) -> None:
    with pytest.raises(RuntimeError, match=text):
        call(torch.randn(12, 16, device=device), torch.randn(16, device=device))
