"""AdamW with moments in bf16 and in 8 bits, and Lion: against the same formulas in torch's ops, and in fp64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from reference import DTYPES, assert_accurate

from megatron_port.core.dist.counter import random_bits
from megatron_port.ext.kernels.narrow_adamw import code_values, dequantised, quantise_, round_stochastically
from megatron_port.ext.kernels.ops import optimizer as ops

HYPER: dict[str, Any] = {"lr": 3e-3, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1}
EPS: dict[str, Any] = {"eps": 0.02}
SIZES = (1, 15, 0, 7, 576, 4101, 256, 1023, 8195)
BLOCKS = (128, 0, 4096, 4224, 1280, 256, 384)


def normal(seed: int, size: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(size, generator=torch.Generator().manual_seed(seed))


class Case:
    """Masters and gradients of several steps."""

    def __init__(
        self, device: torch.device, sizes: Sequence[int], *, grad_dtype: torch.dtype = torch.float32,
        weight_dtype: torch.dtype | None = None, steps: int = 3,
    ) -> None:
        self.masters = [normal(i, n).to(device) for i, n in enumerate(sizes)]
        self.start = [m.clone() for m in self.masters]
        self.weights = [] if weight_dtype is None else [m.to(weight_dtype) for m in self.masters]
        self.grads = [
            [normal(1000 * (k + 1) + i, n, 0.1 * 10.0 ** (i % 3 - 1)).to(grad_dtype).to(device)
             for i, n in enumerate(sizes)] for k in range(steps)
        ]

    def check_weights(self) -> None:
        for w, m in zip(self.weights, self.masters):
            assert torch.equal(w, m.to(w.dtype))


def moments(
    m: torch.Tensor, v: torch.Tensor, g: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return m + (1 - HYPER["beta1"]) * (g - m), HYPER["beta2"] * v + (1 - HYPER["beta2"]) * g * g


def updated(p: torch.Tensor, m: torch.Tensor, v: torch.Tensor, step: int) -> torch.Tensor:
    size = v.sqrt() / math.sqrt(1 - HYPER["beta2"] ** step) + EPS["eps"]
    rate = HYPER["lr"] / (1 - HYPER["beta1"] ** step)
    return p * (1 - HYPER["lr"] * HYPER["weight_decay"]) - rate * m / size


# ------------------------------------------------------------------------------------------------ bf16


def places_of(count: int) -> list[ops.LogicalRange]:
    """Whole tensors, a part of the rows, a part of the columns with odd and with even runs."""
    kinds = (
        ops.LogicalRange(0, 9000, 9000, 0, 5), ops.LogicalRange(7, 9000, 9000, 300, -6),
        ops.LogicalRange(3, 5, 11, 2, 7), ops.LogicalRange(8, 64, 256, 128, 1 << 60),
    )
    return [kinds[i % len(kinds)] for i in range(count)]


def numbers(place: ops.LogicalRange, size: int) -> torch.Tensor:
    e = torch.arange(place.start, place.start + size)
    return e // place.run * place.stride + e % place.run + place.first


@pytest.mark.parametrize("weight_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("grad_dtype", DTYPES)
def test_bf16_moments_are_rounded_by_the_counter(
    device: torch.device, grad_dtype: torch.dtype, weight_dtype: torch.dtype | None
) -> None:
    """Each step by itself, from the same bf16 moments: masters as in fp64, moments the rounding of theirs."""
    case = Case(device, SIZES, grad_dtype=grad_dtype, weight_dtype=weight_dtype)
    first, second = ([torch.zeros(n, dtype=torch.bfloat16, device=device) for n in SIZES] for _ in range(2))
    places = places_of(len(SIZES))
    for step, grads in enumerate(case.grads, 1):
        before = [[t.clone() for t in kind] for kind in (case.masters, first, second)]
        ops.adamw_bf16_(
            case.weights, case.masters, grads, first, second, places, step=torch.tensor(step, device=device),
            grad_scale=torch.tensor(0.5, device=device), skip=None, **HYPER, **EPS,
        )
        for i, place in enumerate(places):
            p, m, v, g = (t.double() for t in (*(kind[i] for kind in before), grads[i].float() * 0.5))
            m, v = moments(m, v, g)
            eager_m, eager_v = moments(before[1][i].float(), before[2][i].float(), grads[i].float() * 0.5)
            assert_accurate(
                case.masters[i], updated(before[0][i], eager_m, eager_v, step), updated(p, m, v, step), factor=2.0,
                what=f"master {i}",
            )
            random = random_bits(numbers(place, SIZES[i]).to(device), place.key, step)
            for own, eager, bits in ((first[i], eager_m, random), (second[i], eager_v, random >> 16)):
                wanted = round_stochastically(eager, bits)
                # The last bit of a float before rounding may differ, and then, rarely, the rounding.
                assert (own != wanted).float().mean() < 1e-3 if own.numel() > 4000 else (own != wanted).sum() <= 1
                assert ((own.float() - eager).abs() <= eager.abs() * 2.0**-7 + 1e-7).all()
    case.check_weights()


# ------------------------------------------------------------------------------------------------ 8 bits


def states(device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [
        (torch.zeros(n, dtype=torch.uint8, device=device), torch.zeros(n // ops.BLOCK, device=device)) for n in BLOCKS
    ]


@pytest.mark.parametrize("weight_dtype", [None, torch.float16])
@pytest.mark.parametrize("grad_dtype", DTYPES)
def test_8_bit_moments_are_the_codecs(
    device: torch.device, grad_dtype: torch.dtype, weight_dtype: torch.dtype | None
) -> None:
    """Each step by itself, from the same codes."""
    case = Case(device, BLOCKS, grad_dtype=grad_dtype, weight_dtype=weight_dtype)
    first, second = states(device), states(device)
    signed, unsigned = code_values(True, device), code_values(False, device)
    for step, grads in enumerate(case.grads, 1):
        masters = [m.clone() for m in case.masters]
        wide = [[dequantised(*s, values) for s in kind] for kind, values in ((first, signed), (second, unsigned))]
        ops.adamw_8bit_(
            case.weights, case.masters, grads, [c for c, _ in first], [s for _, s in first], [c for c, _ in second],
            [s for _, s in second], signed_values=signed, unsigned_values=unsigned,
            step=torch.tensor(float(step), device=device), grad_scale=None, skip=None, **HYPER, **EPS,
        )
        for i in range(len(BLOCKS)):
            g = grads[i].float()
            eager = moments(wide[0][i], wide[1][i], g)
            exact = moments(wide[0][i].double(), wide[1][i].double(), g.double())
            assert_accurate(
                case.masters[i], updated(masters[i], *eager, step), updated(masters[i].double(), *exact, step),
                factor=2.0, what=f"master {i}",
            )
            for (codes, scale), moment, values in ((first[i], eager[0], signed), (second[i], eager[1], unsigned)):
                wanted, of = torch.empty_like(codes), torch.empty_like(scale)
                quantise_(moment, wanted, of, values)
                torch.testing.assert_close(scale, of, rtol=1e-6, atol=0)
                off = (codes.int() - wanted.int()).abs()
                assert off.numel() == 0 or (int(off.max()) <= 1 and float((off > 0).float().mean()) < 2e-3)
    case.check_weights()


def test_codes_at_the_edges(device: torch.device) -> None:
    """Beta1 0 stores the gradient itself: zeros, equals, middles between values, NaN."""
    values = code_values(True, device)
    block = torch.zeros(ops.BLOCK, device=device)
    block[:5] = torch.tensor([1.0, -1.0, 0.5, -2.0, 0.0])
    middles = (values[60:180:5] + values[61:181:5]) / 2 * 2.0
    block[8 : 8 + len(middles)] = middles
    master, grad = torch.zeros(3 * ops.BLOCK, device=device), torch.cat([block, block * 0, block * math.nan])
    codes, scale = torch.zeros(384, dtype=torch.uint8, device=device), torch.zeros(3, device=device)
    second, second_scale = torch.zeros_like(codes), torch.zeros_like(scale)
    ops.adamw_8bit_(
        [], [master], [grad], [codes], [scale], [second], [second_scale], signed_values=values,
        unsigned_values=code_values(False, device), step=torch.tensor(1, device=device), grad_scale=None, skip=None,
        lr=1e-3, beta1=0.0, beta2=0.9, eps=1e-8, weight_decay=0.0,
    )
    wanted, of = torch.zeros_like(codes[:256]), torch.zeros_like(scale[:2])
    quantise_(grad[:256], wanted, of, values)
    assert torch.equal(codes[:256], wanted) and torch.equal(scale[:2], of) and scale[1] == torch.tensor(1e-12)
    assert bool(scale[2].isnan()) and bool(master[256:].isnan().all()) and not bool(master[:256].isnan().any())


@pytest.mark.parametrize("sizes, text", [((120,), "whole blocks"), ((128, 64), "whole blocks")])
def test_tensors_that_would_cut_a_block_are_refused(device: torch.device, sizes: tuple[int, ...], text: str) -> None:
    masters = [torch.zeros(n, device=device) for n in sizes]
    codes = [torch.zeros(n, dtype=torch.uint8, device=device) for n in sizes]
    scales = [torch.zeros(max(n // 128, 1), device=device) for n in sizes]
    with pytest.raises(RuntimeError, match=text):
        ops.adamw_8bit_(
            [], masters, masters, codes, scales, codes, scales, signed_values=code_values(True, device),
            unsigned_values=code_values(False, device), step=torch.tensor(1, device=device), grad_scale=None, skip=None,
            **HYPER, **EPS,
        )


# ------------------------------------------------------------------------------------------------ Lion


def lion(p: torch.Tensor, m: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    sign = (HYPER["beta1"] * m + (1 - HYPER["beta1"]) * g).sign()
    kept = p * (1 - HYPER["lr"] * HYPER["weight_decay"])
    return kept - HYPER["lr"] * sign, HYPER["beta2"] * m + (1 - HYPER["beta2"]) * g


@pytest.mark.parametrize("weight_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("grad_dtype", DTYPES)
def test_lion(device: torch.device, grad_dtype: torch.dtype, weight_dtype: torch.dtype | None) -> None:
    case = Case(device, SIZES, grad_dtype=grad_dtype, weight_dtype=weight_dtype)
    momentum = [torch.zeros(n, device=device) for n in SIZES]
    eager, exact = (
        [(p.to(d), torch.zeros_like(p, dtype=d)) for p in case.start] for d in (torch.float32, torch.float64)
    )
    for grads in case.grads:
        ops.lion_(
            case.weights, case.masters, grads, momentum, grad_scale=torch.tensor(0.25, device=device), skip=None,
            **HYPER,
        )
        eager = [lion(p, m, g.float() * 0.25) for (p, m), g in zip(eager, grads)]
        exact = [lion(p, m, g.double() * 0.25) for (p, m), g in zip(exact, grads)]
    for own, m, (p32, m32), (p64, m64) in zip(case.masters, momentum, eager, exact):
        assert_accurate(own, p32, p64, factor=2.0, what="master")
        assert_accurate(m, m32, m64, factor=2.0, what="momentum")
    case.check_weights()


# ------------------------------------------------------------------------------------------------ all three


def calls(device: torch.device, **other: Any) -> list[tuple[list[torch.Tensor], Any]]:
    """What each op writes, and a call of it."""
    n = 4224
    given: dict[str, Any] = {"grad_scale": None, "skip": None, **HYPER, **other}
    step = torch.tensor(2, device=device)
    grad = normal(4, n).to(device)

    def masters() -> list[torch.Tensor]:
        return [normal(3, n).to(device)]

    a, b, c = masters(), masters(), masters()
    halves = [[normal(5, n).square().bfloat16().to(device)] for _ in range(2)]
    codes = [[torch.full((n,), 200, dtype=torch.uint8, device=device)] for _ in range(2)]
    scales = [[torch.ones(n // 128, device=device)] for _ in range(2)]
    momentum = [normal(6, n).to(device)]
    return [
        ([*a, *halves[0], *halves[1]], lambda: ops.adamw_bf16_(
            [], a, [grad], halves[0], halves[1], places_of(1), step=step, **given, **EPS)),
        ([*b, *codes[0], *codes[1], *scales[0], *scales[1]], lambda: ops.adamw_8bit_(
            [], b, [grad], codes[0], scales[0], codes[1], scales[1], signed_values=code_values(True, device),
            unsigned_values=code_values(False, device), step=step, **given, **EPS)),
        ([*c, *momentum], lambda: ops.lion_([], c, [grad], momentum, **given)),
    ]


@pytest.mark.parametrize("skip", [1.0, math.nan])
def test_a_skipped_step_writes_nothing(device: torch.device, skip: float) -> None:
    for tensors, call in calls(device, skip=torch.tensor(skip, device=device)):
        before = [t.clone() for t in tensors]
        call()
        assert all(torch.equal(a, b) for a, b in zip(tensors, before))


def test_the_same_bits_again_and_by_ranges(device: torch.device) -> None:
    """A tensor in two calls by halves, as two ranks of ZeRO have it, is the tensor in one."""
    n, half = 8192, 4096
    for kind in ("bf16", "8bit"):
        whole = _one_call(device, kind, [(0, n)])
        assert all(torch.equal(a, b) for a, b in zip(whole, _one_call(device, kind, [(0, n)])))
        assert all(torch.equal(a, b) for a, b in zip(whole, _one_call(device, kind, [(0, half), (half, n)])))


def _one_call(device: torch.device, kind: str, ranges: list[tuple[int, int]]) -> list[torch.Tensor]:
    n = ranges[-1][1]
    master, grad = normal(1, n).to(device), normal(2, n).to(device)
    given: dict[str, Any] = {"step": torch.tensor(1, device=device), "grad_scale": None, "skip": None, **HYPER, **EPS}
    if kind == "bf16":
        state = [torch.zeros(n, dtype=torch.bfloat16, device=device) for _ in range(2)]
        parts = [[t[a:b] for a, b in ranges] for t in (master, grad, *state)]
        places = [ops.LogicalRange(a, n, n, 0, 11) for a, _ in ranges]
        ops.adamw_bf16_([], parts[0], parts[1], parts[2], parts[3], places, **given)
        return [master, *state]
    codes = [torch.zeros(n, dtype=torch.uint8, device=device) for _ in range(2)]
    scales = [torch.zeros(n // 128, device=device) for _ in range(2)]
    cut = [[t[a:b] for a, b in ranges] for t in (master, grad, *codes)]
    of = [[t[a // 128 : b // 128] for a, b in ranges] for t in scales]
    ops.adamw_8bit_(
        [], cut[0], cut[1], cut[2], of[0], cut[3], of[1], signed_values=code_values(True, device),
        unsigned_values=code_values(False, device), **given,
    )
    return [master, *codes, *scales]


def test_opcheck(device: torch.device) -> None:
    f, i8 = torch.zeros(128, device=device), torch.zeros(128, dtype=torch.uint8, device=device)
    half, one = torch.zeros(128, dtype=torch.bfloat16, device=device), torch.zeros(1, device=device)
    rate, step = torch.tensor(0.1, dtype=torch.float64, device=device), torch.tensor(1, device=device)
    end = (0.9, 0.95, 1e-8, 0.1)
    utils = ("test_schema", "test_faketensor")
    made = torch.ops.megatron_port
    torch.library.opcheck(
        made.adamw_bf16_, ([], [f], [f.clone()], [half], [half.clone()], [0, 128, 128, 0, 5], step, None, None, rate,
                           *end), test_utils=utils)
    torch.library.opcheck(
        made.adamw_8bit_, ([], [f], [f.clone()], [i8], [one], [i8.clone()], [one.clone()], code_values(True, device),
                           code_values(False, device), step, None, None, rate, *end), test_utils=utils)
    torch.library.opcheck(
        made.lion_, ([], [f], [f.clone()], [f.clone()], None, None, rate, 0.9, 0.95, 0.1), test_utils=utils)
