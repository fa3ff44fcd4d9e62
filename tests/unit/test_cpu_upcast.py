"""Half-precision products by float32: one rounding of the same sum, on the processors that want it, gradients too."""

from __future__ import annotations

import pytest
import torch

from megatron_port.core.layers import fused as cpu_upcast

HALF = [torch.bfloat16, torch.float16]


@pytest.fixture(params=[True, False], ids=["widened", "as torch does"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(cpu_upcast, "_has_instructions", lambda dtype: not request.param)
    return bool(request.param)


@pytest.mark.parametrize("dtype", HALF)
def test_the_sum_is_rounded_once(kind: bool, dtype: torch.dtype) -> None:
    x, w, b = (torch.randn(*shape, dtype=torch.float64).to(dtype) for shape in ((3, 5, 33), (17, 33), (17,)))
    exact = x.double() @ w.double().t() + b.double()
    y = cpu_upcast.linear(x, w, b)
    spacing = torch.finfo(dtype).eps * exact.abs() + 33 * torch.finfo(torch.float32).eps * exact.abs().max()
    assert y.dtype == dtype and y.shape == (3, 5, 17)
    assert ((y.double() - exact).abs() <= spacing * (0.5 if kind else 1.0)).all()
    assert cpu_upcast.product(x, w.t()).dtype == dtype
    assert torch.equal(cpu_upcast.product(x, w.t()), cpu_upcast.linear(x, w))


@pytest.mark.parametrize("dtype", HALF)
def test_gradients_are_rounded_once(kind: bool, dtype: torch.dtype) -> None:
    x, w = torch.randn(7, 19).to(dtype).requires_grad_(), torch.randn(11, 19).to(dtype).requires_grad_()
    dy = torch.randn(7, 11).to(dtype)
    cpu_upcast.linear(x, w).backward(dy)
    for found, exact in ((x.grad, dy.double() @ w.detach().double()), (w.grad, dy.double().t() @ x.detach().double())):
        assert found is not None and found.dtype == dtype
        torch.testing.assert_close(found.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-4)


def test_wider_types_stay_as_they_are() -> None:
    for dtype in (torch.float32, torch.float64):
        x, w = torch.randn(4, 6, dtype=dtype), torch.randn(5, 6, dtype=dtype)
        assert not cpu_upcast.widens(x)
        assert torch.equal(cpu_upcast.linear(x, w), torch.nn.functional.linear(x, w))
        assert torch.equal(cpu_upcast.product(x, w.t()), x @ w.t())


def test_a_gpu_is_left_alone() -> None:
    assert not cpu_upcast.widens(torch.empty(1, dtype=torch.bfloat16, device="meta"))
