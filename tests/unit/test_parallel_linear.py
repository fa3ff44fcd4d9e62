"""Weight gradients that an accumulator adds to its sums: the same as autograd's, whatever the dtype and the shape."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_port.core.dist.collectives import widening_addmm
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.layers.linear import (
    ColumnParallelLinear,
    LinearContext,
    RowParallelLinear,
    WgradAccumulator,
    add_product,
    linear,
)
from megatron_port.core.model.spec import LinearSpec

MICRO_BATCHES = 3
HALF = (torch.bfloat16, torch.float16)


def _accumulate(weight: torch.Tensor, main_grad: torch.Tensor) -> torch.Tensor:
    """Let ``linear`` add the weight's gradient to ``main_grad``, which is returned."""
    weight.wgrad_accumulator = WgradAccumulator(lambda w: None, lambda w: main_grad)  # type: ignore[attr-defined]
    return main_grad


def _main_grad(weight: torch.Tensor) -> torch.Tensor:
    """The sum that the weight's gradient is added to."""
    accumulator: WgradAccumulator = weight.wgrad_accumulator  # type: ignore[attr-defined]
    return accumulator.main_grad_of(weight)


def _weight(shape: tuple[int, ...], dtype: torch.dtype, *, wide: torch.dtype | None = None) -> nn.Parameter:
    """A parameter of seeded values; with ``wide`` as an engine keeps it: a sum of that dtype, and a hook."""
    g = torch.Generator().manual_seed(3)
    p = nn.Parameter(torch.randn(shape, generator=g, dtype=torch.float64).to(dtype))
    if wide is not None:
        main_grad = _accumulate(p, torch.zeros(shape, dtype=wide))

        def hook(parameter: torch.Tensor) -> None:
            if parameter.grad is not None:
                main_grad.add_(parameter.grad)
                parameter.grad = None

        p.register_post_accumulate_grad_hook(hook)
    return p


def _pairs(dtype: torch.dtype, n_in: int, n_out: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(x [5, 2, in], gradient of y [5, 2, out]) of each micro-batch."""
    g = torch.Generator().manual_seed(4)
    make = lambda n: torch.randn(5, 2, n, generator=g, dtype=torch.float64).to(dtype)  # noqa: E731
    return [(make(n_in), make(n_out)) for _ in range(MICRO_BATCHES)]


def _run(
    weight: nn.Parameter, bias: torch.Tensor | None, pairs: list[tuple[torch.Tensor, torch.Tensor]]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(outputs, input gradients); all forwards before the first backward, as a pipeline has them."""
    inputs = [x.clone().requires_grad_() for x, _ in pairs]
    outputs = [linear(x, weight, bias) for x in inputs]
    for y, (_, g) in zip(outputs, pairs):
        y.backward(g)
    return [y.detach() for y in outputs], [x.grad for x in inputs]  # type: ignore[misc]


@pytest.mark.parametrize("dtype, bound", [(torch.float64, 1e-14), (torch.float32, 1e-6)])
@pytest.mark.parametrize("shape", [(6, 7), (2, 3, 7)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_same_gradients(dtype: torch.dtype, bound: float, shape: tuple[int, ...], has_bias: bool) -> None:
    pairs = _pairs(dtype, 7, 6)
    plain, main = _weight(shape, dtype), _weight(shape, dtype, wide=dtype)
    biases = [_weight((6,), dtype) if has_bias else None for _ in range(2)]
    wanted, got = _run(plain, biases[0], pairs), _run(main, biases[1], pairs)
    assert all(torch.equal(a, b) for a, b in zip(wanted[0], got[0]))
    assert all(torch.allclose(a, b, rtol=bound, atol=bound) for a, b in zip(wanted[1], got[1]))
    assert main.grad is None and plain.grad is not None
    assert torch.allclose(_main_grad(main), plain.grad, rtol=10 * bound, atol=10 * bound)
    if has_bias:
        assert torch.equal(biases[0].grad, biases[1].grad)  # type: ignore[union-attr, arg-type]


def _errors(dtype: torch.dtype, device: torch.device) -> tuple[float, float]:
    """Largest error of the accumulated gradient over micro-batches, and of plain ones added to a float32 sum."""
    pairs = [(x.to(device), g.to(device)) for x, g in _pairs(dtype, 48, 40)]
    plain, exact = torch.zeros(40, 48, device=device), torch.zeros(40, 48, dtype=torch.float64, device=device)
    weight = _weight((40, 48), dtype)
    main = nn.Parameter(weight.detach().to(device))
    main_grad = _accumulate(main, torch.zeros(40, 48, device=device))
    for x, g in pairs:
        leaf = main.detach().requires_grad_()
        F.linear(x, leaf).backward(g)
        plain += leaf.grad  # type: ignore[arg-type]
        exact += g.flatten(0, 1).double().t() @ x.flatten(0, 1).double()
        linear(x, main).backward(g)
    error = lambda have: float((have.double() - exact).abs().max())  # noqa: E731
    return error(main_grad), error(plain)


@pytest.mark.parametrize("dtype", HALF)
def test_half_precision_is_not_rounded(dtype: torch.dtype) -> None:
    own, plain = _errors(dtype, torch.device("cpu"))
    assert own < plain / 100


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF)
def test_half_precision_on_a_gpu(dtype: torch.dtype) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU that torch can use")
    device = torch.device("cuda")
    own, plain = _errors(dtype, device)
    assert own < plain / 100 if widening_addmm(device, dtype) else own <= plain


@pytest.mark.parametrize("a, total", [
    (torch.float64, torch.float64), (torch.float32, torch.float32), (torch.float32, torch.float64),
    (torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.bfloat16, torch.float64),
])
def test_sums_of_any_width(a: torch.dtype, total: torch.dtype) -> None:
    g = torch.Generator().manual_seed(5)
    left, right = torch.randn(9, 4, generator=g).to(a), torch.randn(9, 3, generator=g).to(a)
    out = torch.ones(4, 3, dtype=total)
    add_product(out, left, right)
    exact = 1 + left.double().t() @ right.double()
    bound = 1e-12 if a == torch.float64 else 1e-5
    assert float((out.double() - exact).abs().max()) < bound
    out.fill_(float("nan"))  # what nobody has written
    add_product(out, left, right, first=True)
    assert float((out.double() - exact + 1).abs().max()) < bound


def test_the_first_product_of_a_step_needs_no_zeros() -> None:
    """The accumulator asks each time whether the sum holds anything; deferred products when they are computed."""
    main_grad, fresh = torch.full((6, 7), float("nan"), dtype=torch.float64), [True, False, False]
    plain, main = _weight((6, 7), torch.float64), _weight((6, 7), torch.float64)
    accumulator = WgradAccumulator(lambda w: None, lambda w: main_grad, lambda w: main_grad if fresh.pop(0) else None)
    main.wgrad_accumulator = accumulator  # type: ignore[attr-defined]
    for number, (x, g) in enumerate(_pairs(torch.float64, 7, 6)):
        linear(x, plain).backward(g)
        accumulator.deferred = waiting = [] if number < 2 else None  # type: ignore[assignment]
        linear(x, main).backward(g)
        if waiting is not None:
            assert bool(main_grad.isnan().all()) == (number == 0)
            accumulator.flush(waiting)
    assert not fresh and torch.allclose(main_grad, plain.grad, rtol=1e-12)  # type: ignore[arg-type]


def test_under_recompute() -> None:
    """The forward pass runs twice; the gradient is added once."""
    plain, main = _weight((2, 3, 7), torch.float64), _weight((2, 3, 7), torch.float64, wide=torch.float64)
    for x, g in _pairs(torch.float64, 7, 6):
        x.requires_grad_()

        def run(h: torch.Tensor, weight: nn.Parameter) -> torch.Tensor:
            return linear(torch.tanh(h), weight).square()

        run(x, plain).backward(g)
        wanted, x.grad = x.grad, None
        checkpoint(run, x, main, use_reentrant=False).backward(g)
        assert torch.allclose(wanted, x.grad, rtol=1e-12)  # type: ignore[arg-type]
    assert main.grad is None
    assert torch.allclose(_main_grad(main), plain.grad, rtol=1e-12)  # type: ignore[arg-type]


def test_a_matrix_that_is_also_the_embedding() -> None:
    """The lookup's gradient comes through the hook, the projection's directly."""
    plain, main = _weight((6, 7), torch.float64), _weight((6, 7), torch.float64, wide=torch.float64)
    tokens = torch.tensor([[0, 5, 5], [2, 1, 0]])
    for weight in (plain, main):
        for factor in (1.0, 2.0):
            (factor * linear(torch.tanh(F.embedding(tokens, weight)), weight).square()).sum().backward()
    assert main.grad is None
    assert torch.allclose(_main_grad(main), plain.grad, rtol=1e-12)  # type: ignore[arg-type]


def test_an_input_without_gradient_and_a_frozen_weight() -> None:
    (x, g), *_ = _pairs(torch.float64, 7, 6)
    main = _weight((6, 7), torch.float64, wide=torch.float64)
    linear(x, main).backward(g)
    assert torch.allclose(_main_grad(main), g.flatten(0, 1).t() @ x.flatten(0, 1))
    main.requires_grad_(False)
    _main_grad(main).zero_()
    linear(x.requires_grad_(), main).backward(g)
    assert x.grad is not None and not bool(_main_grad(main).any())
    with torch.no_grad():
        assert not linear(x, main.requires_grad_()).requires_grad


@pytest.mark.parametrize("make, spec", [
    (ColumnParallelLinear,
     LinearSpec(name="c", inputs=7, outputs=3, parallel="column", bias=True, std=0.3, packed=2)),
    (RowParallelLinear, LinearSpec(name="r", inputs=7, outputs=6, parallel="row", bias=True, std=0.3)),
])
def test_the_split_layers_use_it(
    make: Callable[[str, LinearSpec, LinearContext], nn.Module], spec: LinearSpec
) -> None:
    layer = make("layer", spec, LinearContext(ParallelContext.single(), dtype=torch.float64))
    for p in layer.parameters():
        nn.init.normal_(p)
    (x, g), *_ = _pairs(torch.float64, 7, 6)
    layer(x).backward(g)
    wanted = {name: p.grad for name, p in layer.named_parameters()}
    layer.zero_grad(set_to_none=True)
    assert isinstance(layer.weight, nn.Parameter)
    main_grad = _accumulate(layer.weight, torch.zeros_like(layer.weight))
    layer(x).backward(g)
    assert layer.weight.grad is None and torch.equal(layer.bias.grad, wanted["bias"])  # type: ignore[arg-type]
    assert torch.allclose(main_grad, wanted["weight"], rtol=1e-12)  # type: ignore[arg-type]
