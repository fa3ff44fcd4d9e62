"""Products by cublasLt or hipBLASLt against fp64: on a GPU the real library, on a CPU the ghost machine's, whose
epilogues are plain loops."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ghost_cublaslt import compiled_cublaslt
from torch import Tensor

from megatron_port.core.layers.linear import PLAIN, WgradAccumulator, linear
from megatron_port.ext.kernels import kernels
from megatron_port.ext.kernels import lt_products as products
from megatron_port.ext.kernels.lt_linear import LtLinearKernels
from megatron_port.ext.kernels.lt_products import Epilogue, product, times_asked
from megatron_port.ext.kernels.products_table import Form

ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
ROWS, COLUMNS, INNER = 24, 40, 16


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ghost machine's cublasLt."""
    return compiled_cublaslt(tmp_path_factory.mktemp("cublaslt"))


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, own: Path) -> Iterator[torch.device]:
    """A device whose library is open, with nothing asked of it yet."""
    if request.param == "gpu":
        kernels.load("rocm" if torch.version.hip else "cuda")
        assert products.open_library() == ""
        yield torch.device("cuda")
        products.close_library()
        return
    kernels.load("cpu")
    assert products.open_library(products.CPU, request.getfixturevalue("stand_in")) == ""
    yield torch.device("cpu")
    products.close_library(products.CPU)


def side(device: torch.device) -> int:
    """The library's side for a device."""
    return products.CPU if device.type == "cpu" else products.GPU


def random(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    """Numbers that every call makes anew."""
    return torch.randn(*shape).to(device, dtype)


def gelu(x: Tensor) -> Tensor:
    """GeLU in its tanh form, written out."""
    return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


def slope(x: Tensor) -> Tensor:
    """Derivative of that by autograd."""
    at = x.detach().requires_grad_()
    (found,) = torch.autograd.grad(gelu(at).sum(), at)
    return found


def off(found: Tensor, exact: Tensor) -> float:
    """Largest difference over the exact result's rms."""
    return float((found.double() - exact).abs().max() / exact.square().mean().sqrt())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("transposed", [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("epilogue", list(Epilogue))
def test_every_epilogue_is_its_formula(
    device: torch.device, dtype: torch.dtype, transposed: tuple[bool, bool], epilogue: Epilogue
) -> None:
    torch.manual_seed(3)
    left, right = (random(device, dtype, *(shape[::-1] if flip else shape)) for shape, flip in zip(
        ((ROWS, INNER), (INNER, COLUMNS)), transposed))
    left, right = left.t() if transposed[0] else left, right.t() if transposed[1] else right
    wide, layers = left.double() @ right.double(), []
    for candidate in range(8):
        out = torch.full((ROWS, COLUMNS), float("nan"), device=device, dtype=dtype)
        bias, before = random(device, dtype, COLUMNS), random(device, dtype, ROWS, COLUMNS)
        aux = before.clone() if epilogue >= Epilogue.DGELU else torch.full_like(out, float("nan"))
        vector = torch.full_like(bias, float("nan")) if epilogue == Epilogue.DGELU_BGRAD else bias
        given: dict[str, Any] = {"vector": None if epilogue in (Epilogue.PLAIN, Epilogue.DGELU) else vector,
                                 "aux": aux if epilogue >= Epilogue.GELU_AUX_BIAS else None}
        if candidate >= products.candidates(left, right, out, epilogue=epilogue, **given):
            assert device.type == "cuda"  # which may have fewer, or no such product
            break
        product(left, right, out, candidate=candidate, epilogue=epilogue, **given)
        sum_of, gradient = wide + bias.double(), wide * slope(before.double())
        first = {Epilogue.PLAIN: wide, Epilogue.BIAS: sum_of, Epilogue.GELU_AUX_BIAS: gelu(sum_of)}
        exact = first.get(epilogue, gradient)
        assert off(out, exact) < 8 * ROUNDING[dtype]
        if epilogue == Epilogue.GELU_AUX_BIAS:
            assert off(aux, sum_of) < 8 * ROUNDING[dtype]
        if epilogue == Epilogue.DGELU_BGRAD:
            assert off(vector, exact.sum(0)) < 8 * ROUNDING[dtype]
        layers.append((out, bias, before, aux, vector))  # the next one's are at other addresses


def test_the_library_is_asked_once_for_each_form(device: torch.device) -> None:
    """A form is shapes, dtypes, transposition, alignment and epilogue: not addresses, not what is in the operands, not
    whether it adds."""
    def call(rows: int = ROWS, dtype: torch.dtype = torch.bfloat16, shift: int = 0, adds: bool = False) -> None:
        left = random(device, dtype, rows * INNER + 8)[shift : shift + rows * INNER].view(rows, INNER)
        out = torch.zeros(rows, COLUMNS, device=device, dtype=torch.float32)
        product(left, random(device, dtype, COLUMNS, INNER).t(), out, adds=adds)

    asked = [times_asked(side(device))]
    for more in ({}, {}, {"adds": True}, {"rows": 32}, {"dtype": torch.float16}, {"shift": 4}, {"shift": 8},
                 {"rows": 32}):
        call(**more)  # type: ignore[arg-type]
        asked.append(times_asked(side(device)))
    assert [after - before for before, after in zip(asked, asked[1:])] == [1, 0, 0, 1, 1, 1, 0, 0]


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    left, right = random(device, torch.bfloat16, ROWS, INNER), random(device, torch.bfloat16, INNER, COLUMNS)
    out = torch.empty(ROWS, COLUMNS, device=device, dtype=torch.bfloat16)
    for said, arguments in (
        ("names 8 algorithms for this product, and number 8 is asked", {"candidate": 8}),
        ("takes another vector or aux", {"epilogue": Epilogue.BIAS}),
        ("takes another vector or aux", {"aux": out}),
        ("vector has another dtype", {"epilogue": Epilogue.BIAS, "vector": torch.zeros(COLUMNS, device=device)}),
        ("vector has 24 elements, not 40", {"epilogue": Epilogue.BIAS, "vector": out[:, 0].contiguous()}),
        ("aux is not contiguous", {"epilogue": Epilogue.DGELU, "aux": out.t().contiguous().t()}),
    ):
        if device.type == "cuda" and "candidate" in arguments:
            continue  # it may name fewer
        with pytest.raises(RuntimeError, match=said):
            product(left, right, out, **arguments)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="do not fit one another"):
        product(left, right.t(), out)
    with pytest.raises(RuntimeError, match="different dtypes"):
        product(left, right.half(), out)
    with pytest.raises(RuntimeError, match="neither rows nor columns of neighbouring elements"):
        product(random(device, torch.bfloat16, ROWS, 2 * INNER)[:, ::2], right, out)
    products.close_library(side(device))
    with pytest.raises(RuntimeError, match="no cublasLt or hipBLASLt is open"):
        product(left, right, out)
    assert products.library_name(side(device)) == ""


@pytest.mark.parametrize(("status", "said"), [
    (1, "1 (NOT_INITIALIZED)"), (3, "3 (ALLOC_FAILED)"), (14, "14 (INTERNAL_ERROR)"), (99, "99"), (7, ""), (15, ""),
])
def test_a_heuristic_that_fails_is_asked_again(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, status: int, said: str
) -> None:
    """Of the library's faults only those that tell of a product it cannot compute are kept as no algorithm."""
    if device.type != "cpu":
        pytest.skip("nothing makes a GPU's library fail")
    left, right = random(device, torch.bfloat16, ROWS, INNER), random(device, torch.bfloat16, INNER, COLUMNS)
    out = torch.empty(ROWS, COLUMNS, device=device, dtype=torch.bfloat16)
    monkeypatch.setenv("GHOST_HEURISTIC", str(status))
    if not said:
        assert products.candidates(left, right, out) == 0
        monkeypatch.delenv("GHOST_HEURISTIC")
        assert products.candidates(left, right, out) == 0
        return
    with pytest.raises(RuntimeError) as caught:
        products.candidates(left, right, out)
    words = str(caught.value)
    assert f"cublasLtMatmulAlgoGetHeuristic gave status {said}; " in words
    assert 'set backend.products = "torch"' in words and ("memory free" in words) == (status == 3)
    monkeypatch.delenv("GHOST_HEURISTIC")
    assert products.candidates(left, right, out) == 8
    product(left, right, out)
    assert off(out, left.double() @ right.double()) < 8 * ROUNDING[torch.bfloat16]


def forms(tokens: int) -> dict[Form, int]:
    """All products of a linear layer of INNER inputs and COLUMNS outputs, each by another candidate."""
    return {Form("forward", tokens, COLUMNS, INNER): 0, Form("forward+bias", tokens, COLUMNS, INNER): 1,
            Form("dgrad", tokens, INNER, COLUMNS): 2, Form("wgrad", COLUMNS, INNER, tokens): 3}


@pytest.mark.gpu
def test_nothing_waits_in_a_captured_product(device: torch.device) -> None:
    """Products captured in a graph and replayed give the bits of those that are called."""
    if device.type != "cuda":
        pytest.skip("nothing is captured on a CPU")
    left, right = random(device, torch.bfloat16, 256, 128), random(device, torch.bfloat16, 128, 256)
    called, replayed = (torch.zeros(256, 256, device=device) for _ in range(2))
    product(left, right, called)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        product(left, right, replayed, adds=True)
    for times in (1, 2):
        graph.replay()
        assert torch.equal(replayed, times * called)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_linear_layer_sums_weight_gradients_unrounded(
    device: torch.device, dtype: torch.dtype, biased: bool
) -> None:
    """Two micro-batches: the first is written over a sum of NaN, the second added. A product rounded to half precision
    would miss fp64's by its rounding."""
    torch.manual_seed(5)
    weight = random(device, dtype, COLUMNS, INNER).requires_grad_()
    bias = random(device, dtype, COLUMNS).requires_grad_() if biased else None
    total = torch.full((COLUMNS, INNER), float("nan"), device=device)
    state = {"fresh": True}

    def added(_: Tensor) -> None:
        state["fresh"] = False

    weight.wgrad_accumulator = WgradAccumulator(  # type: ignore[attr-defined]
        added, lambda _: total, lambda _: total if state["fresh"] else None)
    lt = LtLinearKernels(forms(6 * 4), dtype)
    exact = torch.zeros(COLUMNS, INNER, dtype=torch.float64, device=device)
    before = times_asked(side(device))
    for _ in range(2):
        x, dy = random(device, dtype, 6, 4, INNER).requires_grad_(), random(device, dtype, 6, 4, COLUMNS)
        y = linear(x, weight, bias, kernels=lt)
        y.backward(dy)
        wide = x.detach().double() @ weight.detach().double().t()
        assert off(y.detach(), wide if bias is None else wide + bias.detach().double()) < 8 * ROUNDING[dtype]
        assert x.grad is not None and off(x.grad, dy.double() @ weight.detach().double()) < 8 * ROUNDING[dtype]
        exact += dy.double().flatten(0, 1).t() @ x.detach().double().flatten(0, 1)
    assert off(total, exact) < 1e-5 < ROUNDING[dtype] / 10
    assert weight.grad is None and times_asked(side(device)) - before == 3


def test_the_two_weights_of_a_shared_projection_are_served_apart(device: torch.device) -> None:
    """Of ranks that share a key and value: a weight for queries and one for what is shared, with one bias."""
    torch.manual_seed(7)
    dtype, shared_rows, tokens = torch.bfloat16, 16, 24
    whole = random(device, dtype, COLUMNS + shared_rows, INNER)
    weights = [part.clone().requires_grad_() for part in whole.split([COLUMNS, shared_rows])]
    totals = [torch.full_like(w, float("nan"), dtype=torch.float32) for w in weights]

    def adding(total: Tensor) -> WgradAccumulator:
        return WgradAccumulator(lambda _: None, lambda _: total, lambda _: total)

    for weight, total in zip(weights, totals):
        weight.wgrad_accumulator = adding(total)  # type: ignore[attr-defined]
    bias = random(device, dtype, COLUMNS + shared_rows).requires_grad_()
    chosen = forms(tokens) | {
        Form("forward+bias", tokens, shared_rows, INNER): 4, Form("dgrad", tokens, INNER, shared_rows): 5,
        Form("wgrad", shared_rows, INNER, tokens): 6}
    x, dy = random(device, dtype, 6, 4, INNER).requires_grad_(), random(device, dtype, 6, 4, COLUMNS + shared_rows)
    before = times_asked(side(device))
    y = linear(x, weights[0], bias, shared=weights[1], kernels=LtLinearKernels(chosen, dtype))
    y.backward(dy)
    assert times_asked(side(device)) - before == 6
    wide, dy_2d = whole.double(), dy.double().flatten(0, 1)
    assert off(y.detach(), x.detach().double() @ wide.t() + bias.detach().double()) < 8 * ROUNDING[dtype]
    assert x.grad is not None and off(x.grad, dy.double() @ wide) < 8 * ROUNDING[dtype]
    assert off(torch.cat(totals), dy_2d.t() @ x.detach().double().flatten(0, 1)) < 1e-5


def test_other_forms_and_dtypes_are_torchs(device: torch.device) -> None:
    lt, weight = LtLinearKernels(forms(24), torch.bfloat16), random(device, torch.bfloat16, COLUMNS, INNER)
    asked = times_asked(side(device))
    for x in (random(device, torch.bfloat16, 25, INNER), random(device, torch.float16, 24, INNER),
              random(device, torch.bfloat16, INNER, 24).t()):
        w = weight.to(x.dtype)
        assert torch.equal(lt.forward(x, w, w, None)[0], PLAIN.forward(x, w, w, None)[0])
    x, bias = random(device, torch.bfloat16, 24, INNER), random(device, torch.bfloat16, COLUMNS + 1)[1:]
    given = (x, weight, weight, bias)  # a bias between 16 bytes
    assert torch.equal(lt.forward(*given)[0], PLAIN.forward(*given)[0])
    dy = random(device, torch.bfloat16, 25, COLUMNS)
    assert torch.equal(lt.dgrad(dy, weight, weight), PLAIN.dgrad(dy, weight, weight))
    x, dy = random(device, torch.bfloat16, 24, INNER), random(device, torch.bfloat16, 24, COLUMNS)
    for dtype, shift in ((torch.float64, 0), (torch.float32, 1)):  # a sum that is no float32, and one between 16 bytes
        room = [torch.ones(COLUMNS * INNER + 4, device=device, dtype=dtype) for _ in range(2)]
        sums = [memory[shift : shift + COLUMNS * INNER].view(COLUMNS, INNER) for memory in room]
        for kernels_of, total in zip((lt, PLAIN), sums):
            kernels_of.wgrad_accumulate(total, dy, x, None)
        assert torch.equal(*sums)
    assert times_asked(side(device)) == asked
