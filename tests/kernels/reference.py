"""How an own op is compared: its error and eager torch's, both against the same computation in fp64."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch

Inputs = Sequence[torch.Tensor | None]
Function = Callable[..., "torch.Tensor | tuple[torch.Tensor, ...]"]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def random_shapes(seed: int, count: int, *, wide: Sequence[int] = ()) -> list[tuple[int, int]]:
    """(rows, cols): odd ones, ones that fit 16-byte vectors, and the ``wide`` columns given."""
    draw = random.Random(seed)
    out = [(draw.randint(1, 3), cols) for cols in wide]
    while len(out) < count:
        cols = draw.choice([draw.randint(1, 300), 8 * draw.randint(1, 60), 2 * draw.randint(1, 200) + 1])
        out.append((draw.randint(1, 40), cols))
    return out


def leaves(inputs: Inputs, dtype: torch.dtype) -> list[torch.Tensor | None]:
    """Copies of a dtype that collect gradients (integers stay what they are)."""
    return [
        x if x is None or not x.is_floating_point() else x.detach().to(dtype).requires_grad_() for x in inputs
    ]


def run(function: Function, inputs: Inputs, grads: Sequence[torch.Tensor] | None) -> tuple[list[torch.Tensor], ...]:
    """(outputs, gradients of the inputs that have one) for these gradients of the outputs."""
    out = function(*inputs)
    outputs = [out] if isinstance(out, torch.Tensor) else list(out)
    if grads is None:
        return [o.detach() for o in outputs], []
    torch.autograd.backward(outputs, [g.to(o.dtype) for g, o in zip(grads, outputs)])
    return [o.detach() for o in outputs], [x.grad for x in inputs if x is not None and x.grad is not None]


def one_ulp(reference: torch.Tensor, dtype: torch.dtype) -> float:
    """Spacing of the dtype at the largest magnitude of the reference."""
    largest = float(reference.abs().max()) if reference.numel() else 0.0
    return max(largest, float(torch.finfo(dtype).tiny)) * float(torch.finfo(dtype).eps)


def assert_accurate(
    own: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor, *, factor: float, what: str
) -> None:
    """max|own - exact| ≤ factor · max|eager - exact| + 1 ulp of own's dtype."""
    same = own.shape == eager.shape and own.dtype == eager.dtype
    assert same, f"{what}: {own.shape} {own.dtype}, eager {eager.shape} {eager.dtype}"
    exact = exact.to(own.device, torch.float64)
    assert bool(torch.isfinite(own).all()), f"{what}: not finite"
    error = float((own.double() - exact).abs().max()) if own.numel() else 0.0
    allowed = factor * (float((eager.double() - exact).abs().max()) if own.numel() else 0.0)
    allowed += one_ulp(exact, own.dtype)
    assert error <= allowed, f"{what}: error {error:.3e}, allowed {allowed:.3e} ({tuple(own.shape)}, {own.dtype})"


def compare(
    own: Function, eager: Function, inputs: Inputs, dtype: torch.dtype, device: torch.device, *, what: str = "",
    gradient_factor: float = 3.0,
) -> None:
    """Outputs and gradients of ``own`` against ``eager`` in ``dtype``, both measured against ``eager`` in fp64.

    ``inputs`` are fp64 or integers; they are rounded to ``dtype`` first, so that all start from the same numbers.
    """
    base = [x if x is None or not x.is_floating_point() else x.to(dtype).double() for x in inputs]
    exact_in = leaves(base, torch.float64)
    probe = eager(*exact_in)
    shapes = [probe] if isinstance(probe, torch.Tensor) else list(probe)
    generator = torch.Generator().manual_seed(7)
    grads = [torch.randn(o.shape, generator=generator, dtype=torch.float64).to(dtype).double() for o in shapes]
    exact, exact_grads = run(eager, leaves(base, torch.float64), grads)
    there = [x if x is None else x.to(device) for x in base]
    on = [g.to(device) for g in grads]
    plain, plain_grads = run(eager, leaves(there, dtype), on)
    mine, mine_grads = run(own, leaves(there, dtype), on)
    assert len(mine_grads) == len(plain_grads), f"{what}: {len(mine_grads)} gradients, eager has {len(plain_grads)}"
    for i, (a, b, c) in enumerate(zip(mine, plain, exact)):
        assert_accurate(a, b, c, factor=2.0, what=f"{what} output {i}")
    for i, (a, b, c) in enumerate(zip(mine_grads, plain_grads, exact_grads)):
        assert_accurate(a, b, c, factor=gradient_factor, what=f"{what} gradient {i}")
