"""Casts to 8 bits: the same bits as torch's ops, whatever the values, shapes, formats and memory; and as used."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from test_fp8 import config, steps
from torch import Tensor

from megatron_port.core.config.schema import BackendConfig
from megatron_port.ext.kernels import kernels
from megatron_port.ext.kernels.fp8 import FNUZ, OCP, own_quantiser, torch_quantiser
from megatron_port.ext.kernels.ops import quantise
from megatron_port.ext.kernels.quantised import Quantised

FORMATS = [OCP.precise, OCP.wide, FNUZ.precise, FNUZ.wide]
INPUTS = [torch.bfloat16, torch.float32]
formats = pytest.mark.parametrize("dtype", FORMATS, ids=lambda d: str(d).removeprefix("torch.float8_"))
inputs = pytest.mark.parametrize("given", INPUTS, ids=lambda d: str(d).removeprefix("torch."))
# Single elements; tiles of 128 filled, exceeded by one and by a piece; rows of every number of pieces, and wider ones.
SHAPES = [(1, 1), (3, 5), (16, 16), (33, 47), (128, 128), (129, 130), (144, 272), (7, 1000), (3, 4104), (2, 8208),
          (5, 20000), (600, 24)]


SATURATES = bool(torch.tensor(1e9).to(OCP.precise).float().isfinite())
"""What is beyond e4m3fn's range: its largest number in torch 2.13, as here, and NaN in 2.11."""


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bits, a being an own kernel's and b torch's; of a NaN the sign may differ."""
    if a.shape != b.shape or a.dtype != b.dtype or not a.is_contiguous():
        return False
    bits, other = a.view(torch.uint8).cpu(), b.contiguous().view(torch.uint8).cpu()
    torch_nan = b.cpu().float().isnan()
    alike = (bits == other) | (a.cpu().float().isnan() & torch_nan)
    if a.dtype == OCP.precise and not SATURATES:
        alike |= torch_nan & ((bits & 0x7F) == 0x7E)
    return bool(alike.all())


def assert_same(mine: Quantised, torchs: Quantised, what: str) -> None:
    assert same(mine.values, torchs.values), what
    assert torch.equal(mine.inverse.cpu(), torchs.inverse.cpu()) and mine.rowwise == torchs.rowwise, what
    assert mine.inverse.stride() == torchs.inverse.stride() == (1, 1), what


def assert_all_same(x: Tensor, dtype: torch.dtype, what: str) -> None:
    """Every cast of x by both providers."""
    a, b = own_quantiser, torch_quantiser
    found, wanted = a.tensor(x, dtype), b.tensor(x, dtype)
    assert_same(found, wanted, f"{what}: tensor")
    assert_same(a.transposed(x, dtype), wanted.transposed(), f"{what}: transposed")
    for mine, torchs in zip(a.both(x, dtype), b.both(x, dtype)):
        assert_same(mine, torchs, f"{what}: both")
    assert_same(a.tensor(x, dtype, found.inverse), wanted, f"{what}: known")
    assert_same(a.transposed(x, dtype, found.inverse), wanted.transposed(), f"{what}: known, transposed")
    assert_same(a.rows(x, dtype), b.rows(x, dtype), f"{what}: rows")
    assert_same(a.columns(x, dtype), b.columns(x, dtype), f"{what}: columns")


def spread(rows: int, cols: int, given: torch.dtype, device: torch.device) -> Tensor:
    """Magnitudes over 40 binades, the rows' and columns' largest in different ones."""
    g = torch.Generator().manual_seed(rows * 10007 + cols)
    x = torch.randn(rows, cols, generator=g, dtype=torch.float64)
    scales = [torch.randint(-20, 20, shape, generator=g).double() for shape in ((rows, 1), (1, cols))]
    return (x * torch.exp2(scales[0] + scales[1])).to(given).to(device)


@formats
def test_every_bf16_is_rounded_as_torch_rounds_it(device: torch.device, dtype: torch.dtype) -> None:
    """Infinities, NaNs, subnormals and what is beyond the range among them; a known scale need not fit."""
    x = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(256, 256).to(device)
    for exponent in (0, -6, 11):
        inverse = torch.full((1, 1), 2.0**-exponent, device=device)
        mine = own_quantiser.tensor(x, dtype, inverse)
        assert same(mine.values, (x * 2.0**exponent).to(dtype)), exponent
        assert mine.inverse is inverse
    finite = x[x.isfinite()].view(-1, 256)
    assert_all_same(finite, dtype, "all finite numbers")


@formats
def test_float32_around_every_rounding(device: torch.device, dtype: torch.dtype) -> None:
    """The middles between neighbouring codes, a float below and above them, and random bits."""
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype).float()
    codes = codes[codes.isfinite() & (codes >= 0)].unique()
    beyond = torch.tensor([codes[-1] * 1.0625, codes[-1] * 1.2, codes[-1] * 2.0, 3e38])
    middles = torch.cat([(codes[1:] + codes[:-1]) / 2, codes, beyond])
    bits = middles.view(torch.int32)
    around = torch.cat([bits - 1, bits, bits + 1]).view(torch.float32)
    noise = torch.randint(-(2**31), 2**31, (4000,), generator=torch.Generator().manual_seed(1)).to(torch.int32)
    x = torch.cat([around, -around, noise.view(torch.float32)]).to(device)
    x = x[: x.numel() // 16 * 16].view(16, -1)
    one = torch.ones(1, 1, device=device)
    assert same(own_quantiser.tensor(x, dtype, one).values, x.to(dtype))
    assert same(own_quantiser.transposed(x, dtype, one).values, x.t().contiguous().to(dtype))


@inputs
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")
def test_shapes(device: torch.device, shape: tuple[int, int], given: torch.dtype) -> None:
    x = spread(*shape, given, device)
    for dtype in FORMATS[: 4 if shape[0] * shape[1] < 10000 else 1]:
        assert_all_same(x, dtype, f"{shape} {given} {dtype}")


@inputs
@pytest.mark.parametrize("largest", [0.0, 1e-42, 2.0**-100, 2.0**-99, 447.9, 448.0, 57344.0, 61440.0, 3.3e38])
def test_one_magnitude(device: torch.device, given: torch.dtype, largest: float) -> None:
    x = torch.randn(16, 48, generator=torch.Generator().manual_seed(2)).clamp_(-1, 1).to(device)
    x = (x * largest).to(given)
    x[3, 5], x[4, 6] = -largest, -0.0
    for dtype in FORMATS:
        assert_all_same(x, dtype, f"{largest} {given} {dtype}")


@inputs
@formats
@pytest.mark.parametrize("bad", [(float("inf"),), (float("nan"),), (float("-inf"), float("nan"))], ids=str)
def test_a_fault_does_not_hide(device: torch.device, given: torch.dtype, dtype: torch.dtype, bad: tuple) -> None:
    """Scales become 0 or infinite as torch's do; the faulty row has a NaN once it is multiplied back."""
    x = spread(32, 48, given, device)
    x[7, 0] = 0.0
    for i, value in enumerate(bad):
        x[7, 11 + i] = value
    assert_all_same(x, dtype, f"{bad} {given} {dtype}")
    found = own_quantiser.rows(x, dtype)
    back = found.values.float() * found.inverse
    assert bool(back[7].isnan().any()) and bool(back[[0, 31]].isfinite().all())


@inputs
def test_memory_that_no_vector_load_fits(device: torch.device, given: torch.dtype) -> None:
    whole = torch.zeros(64 * 48 + 1, dtype=given, device=device)
    view = whole[1:].view(64, 48)
    view.copy_(spread(64, 48, given, device))
    assert_all_same(view, OCP.precise, "unaligned")
    assert_all_same(view.clone().t(), OCP.wide, "not contiguous")


def test_the_same_bits_on_any_number_of_threads(device: torch.device) -> None:
    x, threads, seen = spread(300, 200, torch.bfloat16, device), torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            q = own_quantiser
            made = [*q.both(x, OCP.wide), q.rows(x, OCP.wide), q.columns(x, OCP.wide)]
            seen.append([t.cpu() for m in made for t in (m.values.view(torch.uint8), m.inverse)])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*seen))


def test_opcheck(device: torch.device) -> None:
    x, one = torch.randn(16, 32, device=device).bfloat16(), torch.ones(1, 1, device=device)
    ops: Any = torch.ops.megatron_port
    torch.library.opcheck(ops.fp8_tensor, (x, None, OCP.precise, True, True))
    quick = ("test_schema", "test_faketensor", "test_autograd_registration")  # compiling costs a second each
    torch.library.opcheck(ops.fp8_tensor, (x, one, OCP.precise, False, True), test_utils=quick)
    torch.library.opcheck(ops.fp8_tensor, (x, one, OCP.precise, True, False), test_utils=quick)
    torch.library.opcheck(ops.fp8_rows, (x, OCP.precise), test_utils=quick)
    torch.library.opcheck(ops.fp8_columns, (x, OCP.precise), test_utils=quick)


@pytest.mark.parametrize("broken, text", [
    (lambda x: (x.t(), OCP.wide), "not contiguous"),
    (lambda x: (x.half(), OCP.wide), "takes float32 and bfloat16 tensors only"),
    (lambda x: (x.view(-1), OCP.wide), r"x must be \[rows, columns\], with elements"),
    (lambda x: (x[:0], OCP.wide), r"x must be \[rows, columns\], with elements"),
    (lambda x: (x, torch.float16), "must be an 8-bit float"),
])
def test_refusals(device: torch.device, broken: Any, text: str) -> None:
    x, dtype = broken(torch.randn(12, 16, device=device))
    for op in (quantise.tensor, quantise.rows, quantise.columns):
        with pytest.raises(RuntimeError, match=text):
            op(x, dtype)


def test_more_refusals(device: torch.device) -> None:
    x = torch.randn(12, 16, device=device)
    with pytest.raises(RuntimeError, match="neither the values nor their transpose"):
        quantise.tensor(x, OCP.wide, values=False)
    with pytest.raises(RuntimeError, match="known has 12 elements, not 1"):
        quantise.tensor(x, OCP.wide, known=torch.ones(12, device=device))


# ---- as used


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_run_has_the_same_bits_with_either(own: Path, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What layouts are proved to be with one provider they are with the other; and the passes are those counted."""
    kernels.load("cpu")
    calls: Counter[str] = Counter()
    for name in ("tensor", "rows", "columns"):
        plain = getattr(quantise, name)

        def counted(*args: Any, name: str = name, plain: Any = plain, **asked: bool) -> Any:
            made = "both" if asked.get("transposed") and asked.get("values", True) else name
            calls["transposed" if asked.get("values") is False else made] += 1
            return plain(*args, **asked)

        monkeypatch.setattr(quantise, name, counted)

    def run(provider: Literal["own", "torch"], **layout: object) -> tuple[Any, dict[str, Tensor]]:
        backend = BackendConfig(device="cpu", scaled_mm="reference", quantise=provider)
        out, weights, _ = steps(dataclasses.replace(config(recipe, **layout), backend=backend))
        return out, weights

    first, weights = run("torch")
    assert not calls
    again, others = run("own")
    assert first == again and all(torch.equal(w, others[name]) for name, w in weights.items())
    linears, passes = 2 * 4, 2 * 2 * 4 * 3  # of 2 layers, in 3 steps; each in 2 micro-batches
    if recipe == "tensorwise":  # inputs forward, inputs again for the weight's gradient, gradients and weights
        assert calls == {"tensor": passes, "transposed": passes, "both": passes + 3 * linears}
    else:
        assert calls == {"rows": 2 * passes + 3 * linears, "columns": 3 * linears}
    ways = {"recompute": "full", "pipeline_schedule": "zb-h1"}
    (first, weights), (again, others) = run("torch", **ways), run("own", **ways)
    assert first == again and all(torch.equal(w, others[name]) for name, w in weights.items())
