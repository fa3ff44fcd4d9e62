"""Multi-tensor AdamW, squared norm and clip factor, and the optimizer that is made of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import DTYPES, assert_accurate

from megatron_port.core.optim.gradients import clip_factor
from megatron_port.ext.kernels import kernels
from megatron_port.ext.kernels.ops import optimizer
from megatron_port.ext.kernels.own_updates import AdamWGroup, FusedAdamW

Tensors = list[torch.Tensor]
HYPER = {"lr": 3e-3, "beta1": 0.9, "beta2": 0.95, "eps": 0.02, "weight_decay": 0.1}
# Odd ones, an empty one, one over two AdamW chunks (4096) and one over two chunks of the norm (8192).
SHAPES: tuple[tuple[int, ...], ...] = ((1,), (3, 5), (0,), (7,), (64, 9), (4101,), (2, 128), (31, 33), (), (8195,))


def _normal(seed: int, shape: Sequence[int], scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Case:
    """fp32 masters, moments and gradients of several steps, and what AdamW makes of them in another precision."""

    def __init__(
        self, device: torch.device, *, grad_dtype: torch.dtype = torch.float32,
        weight_dtype: torch.dtype | None = None, shapes: Sequence[Sequence[int]] = SHAPES, steps: int = 5,
    ) -> None:
        self.masters = [_normal(i, s).float().to(device) for i, s in enumerate(shapes)]
        self.start = [m.clone() for m in self.masters]
        self.exp_avg, self.exp_avg_sq = ([torch.zeros_like(m) for m in self.masters] for _ in range(2))
        self.weights = [] if weight_dtype is None else [m.to(weight_dtype) for m in self.masters]
        self.grads = [
            [_normal(1000 * (k + 1) + i, s, 0.1 * (k + 1)).to(grad_dtype).to(device) for i, s in enumerate(shapes)]
            for k in range(steps)
        ]

    def step(self, number: int, **other: Any) -> None:
        """Own update number (from 1)."""
        given: dict[str, Any] = {"grad_scale": None, "skip": None, **HYPER, **other}
        given.setdefault("step", torch.tensor(number, device=self.masters[0].device))
        optimizer.adamw_(self.weights, self.masters, self.grads[number - 1], self.exp_avg, self.exp_avg_sq, **given)

    def everything(self) -> Tensors:
        return [*self.weights, *self.masters, *self.exp_avg, *self.exp_avg_sq]

    def eager(self, dtype: torch.dtype, *, scale: float = 1.0, decay: float = HYPER["weight_decay"]) -> Tensors:
        """Masters, exp_avg and exp_avg_sq after all steps of torch.optim.AdamW in a dtype."""
        params = [p.to(dtype).clone() for p in self.start]
        adam = torch.optim.AdamW(params, lr=HYPER["lr"], betas=(HYPER["beta1"], HYPER["beta2"]), eps=HYPER["eps"],
                                 weight_decay=decay, foreach=False)
        for grads in self.grads:
            for p, g in zip(params, grads):
                p.grad = g.to(dtype) * scale
            adam.step()
        return [*params, *(adam.state[p][kind] for kind in ("exp_avg", "exp_avg_sq") for p in params)]

    def check(self, **other: float) -> None:
        own = [*self.masters, *self.exp_avg, *self.exp_avg_sq]
        for i, (a, b, c) in enumerate(zip(own, self.eager(torch.float32, **other), self.eager(torch.float64, **other))):
            assert_accurate(a, b, c, factor=2.0, what=f"tensor {i}")
        for w, m in zip(self.weights, self.masters):
            assert torch.equal(w, m.to(w.dtype))


@pytest.mark.parametrize("weight_dtype", [None, *DTYPES])
@pytest.mark.parametrize("grad_dtype", DTYPES)
def test_five_steps(device: torch.device, grad_dtype: torch.dtype, weight_dtype: torch.dtype | None) -> None:
    case = Case(device, grad_dtype=grad_dtype, weight_dtype=weight_dtype)
    for number in range(1, 6):
        case.step(number)
    assert not torch.equal(case.masters[3], case.start[3])
    case.check()


def test_twenty_lists_of_random_sizes(device: torch.device) -> None:
    for seed in range(20):
        sizes = torch.randint(1, 700, (4,), generator=torch.Generator().manual_seed(seed)).tolist()
        case = Case(device, shapes=[(n,) for n in sizes], weight_dtype=torch.bfloat16, steps=2)
        case.step(1)
        case.step(2)
        case.check()


def test_more_tensors_than_a_launch_takes(device: torch.device) -> None:
    """A launch takes 64 tensors (AdamW) or 160 (norm)."""
    case = Case(device, shapes=[(1 + 7 * i % 23,) for i in range(335)], weight_dtype=torch.float16, steps=2)
    case.step(1)
    case.step(2)
    case.check()
    total = optimizer.square_norm(case.grads[0])
    torch.testing.assert_close(total, sum(g.double().square().sum() for g in case.grads[0]), rtol=2e-6, atol=0)


def test_unaligned_tensors(device: torch.device) -> None:
    """Views that start at any element: the scalar path, next to the vector path, over two launches that differ."""
    case, other = (Case(device, shapes=[(30 + i,) for i in range(70)], weight_dtype=torch.bfloat16) for _ in range(2))
    for name in ("masters", "exp_avg", "exp_avg_sq", "weights"):
        moved = []
        for shift, t in enumerate(getattr(case, name)):
            room = t.new_zeros(t.numel() + 8)
            moved.append(room[shift % 7 : shift % 7 + t.numel()].copy_(t))
        setattr(case, name, moved)
    torch.testing.assert_close(optimizer.square_norm(case.masters), optimizer.square_norm(other.masters))
    case.step(1)
    other.step(1)
    for a, b in zip(case.everything(), other.everything()):
        # The same formula; contraction into FMA may differ between a vectorised body and its remainder.
        torch.testing.assert_close(a, b, rtol=1e-6 if a.dtype == torch.float32 else 1e-2, atol=1e-7)


def test_zero_weight_decay(device: torch.device) -> None:
    case = Case(device)
    for number in range(1, 6):
        case.step(number, weight_decay=0.0)
    case.check(decay=0.0)


def test_gradients_are_scaled(device: torch.device) -> None:
    case = Case(device, grad_dtype=torch.float16)
    for number in range(1, 6):
        case.step(number, grad_scale=torch.tensor(2.0**-7, device=device))
    case.check(scale=2.0**-7)


def test_the_learning_rate_is_read_from_memory(device: torch.device) -> None:
    """One tensor whose number changes gives the bits of numbers handed over; another dtype is refused."""
    case, other, rate = Case(device), Case(device), torch.zeros((), dtype=torch.float64, device=device)
    for number in range(1, 4):
        case.step(number, lr=rate.fill_(number / 700))
        other.step(number, lr=number / 700)
    assert all(torch.equal(a, b) for a, b in zip(case.everything(), other.everything()))
    with pytest.raises(RuntimeError, match="lr"):
        case.step(4, lr=rate.float())


@pytest.mark.parametrize("skip", [1.0, -3.0, math.nan, math.inf])
def test_a_skipped_step_writes_nothing(device: torch.device, skip: float) -> None:
    case = Case(device, weight_dtype=torch.bfloat16)
    case.step(1, skip=torch.tensor(0.0, device=device))
    case.grads[1][3].fill_(math.nan)
    for w in case.weights:
        w.fill_(7)  # not the rounded master: a write would show
    before = [t.clone() for t in case.everything()]
    case.step(2, skip=torch.tensor(skip, device=device))
    for a, b in zip(case.everything(), before):
        assert torch.equal(a.view(torch.uint8) if a.dim() else a, b.view(torch.uint8) if b.dim() else b)
    case.step(2, skip=torch.tensor(0.0, device=device))
    assert bool(case.masters[3].isnan().all())
    assert all(not torch.equal(w, b) for w, b in zip(case.weights, before) if w.numel())


@pytest.mark.parametrize("beta1, beta2", [(0.9, 0.999), (0.0, 0.99999), (0.3, 0.0), (0.99, 0.95)])
@pytest.mark.parametrize("number", [1, 2, 1000, 1_000_000])
def test_bias_corrections(device: torch.device, number: int, beta1: float, beta2: float) -> None:
    """A lone update far into a run, against the formula in fp64; the first and the millionth alike."""
    g, m, v = _normal(1, (50,)), _normal(2, (50,)), _normal(3, (50,)).square()
    g, m, v = (t.float().to(device) for t in (g, m, v))
    wide = [t.double() for t in (g, m, v)]
    exp_avg = wide[1] * beta1 + wide[0] * (1 - beta1)
    exp_avg_sq = wide[2] * beta2 + wide[0].square() * (1 - beta2)
    correct1, correct2 = (-math.expm1(number * math.log(b) if b else -math.inf) for b in (beta1, beta2))
    expected = -(exp_avg / correct1) / ((exp_avg_sq / correct2).sqrt() + 1e-8)
    for step in (torch.tensor(number, device=device), torch.tensor(float(number), device=device)):
        master, own_m, own_v = torch.zeros_like(g), m.clone(), v.clone()
        optimizer.adamw_([], [master], [g], [own_m], [own_v], step=step, grad_scale=None, skip=None, lr=1.0,
                         beta1=beta1, beta2=beta2, eps=1e-8, weight_decay=0.5)
        torch.testing.assert_close(master.double(), expected, rtol=1e-6, atol=2e-6 * float(expected.abs().max()))
        torch.testing.assert_close(own_m.double(), exp_avg, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(own_v.double(), exp_avg_sq, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_square_norm(device: torch.device, dtype: torch.dtype) -> None:
    tensors = [_normal(i, s).to(dtype).to(device) for i, s in enumerate((*SHAPES, (150_001,)))]
    tensors.append(tensors[-1][3:2000])  # not aligned to 16 bytes
    total = optimizer.square_norm(tensors)
    assert total.dtype == torch.float64 and total.shape == ()
    torch.testing.assert_close(total, sum(t.double().square().sum() for t in tensors), rtol=2e-6, atol=0)
    assert torch.equal(total, optimizer.square_norm(tensors))


def test_square_norm_of_no_elements_is_zero(device: torch.device) -> None:
    assert float(optimizer.square_norm([torch.zeros(0, device=device)])) == 0.0
    with pytest.raises(ValueError, match="empty list"):
        optimizer.square_norm([])


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", DTYPES)
def test_square_norm_keeps_what_is_not_finite(device: torch.device, dtype: torch.dtype, bad: float) -> None:
    for at in (0, 3, 500, 8200):
        tensors = [torch.ones(5, dtype=dtype, device=device), torch.ones(8201, dtype=dtype, device=device)]
        tensors[1][at] = bad
        total = float(optimizer.square_norm(tensors))
        assert math.isnan(total) if math.isnan(bad) else total == math.inf
        assert float(clip_factor(torch.tensor(total), max_norm=1.0, inv_scale=1.0)[1]) == 1.0


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_added_as_torch_adds_them(device: torch.device, dtype: torch.dtype) -> None:
    """To the bit: more tensors than a launch takes, unaligned, empty and strided ones."""
    shapes = [*SHAPES, *((n,) for n in range(1, 90))]
    grads = [_normal(i, s).to(dtype).to(device) for i, s in enumerate(shapes)]
    grads[4] = grads[4].t().contiguous().t()
    flat = torch.ones(sum(g.numel() for g in grads) + 1, device=device)[1:]
    sums = [part.view(g.shape) for part, g in zip(flat.split([g.numel() for g in grads]), grads)]
    wanted = [(s + 0.25).add_(g) for s, g in zip(sums, grads)]
    flat += 0.25
    optimizer.add_gradients_(sums, grads)
    assert all(torch.equal(a, b) for a, b in zip(sums, wanted))


@pytest.mark.parametrize("sums, grads, text", [
    ([4], [], "as many gradients as sums"), ([4], [5], "5 elements, not 4"),
    ([4, 4], [4, 4.5], "another dtype"), ([4.5], [4], "another dtype"),
])
def test_refused_accumulations(device: torch.device, sums: list[float], grads: list[float], text: str) -> None:
    """A number with a fraction: in fp64."""
    make = lambda n: torch.zeros(int(n), dtype=torch.float64 if n % 1 else torch.float32, device=device)  # noqa: E731
    with pytest.raises(RuntimeError, match=text):
        optimizer.add_gradients_([make(n) for n in sums], [make(n) for n in grads])


def test_bits_do_not_depend_on_the_number_of_threads(built: Path) -> None:
    kernels.load("cpu")
    tensors = [_normal(i, (n,)).float() for i, n in enumerate((100_003, 7, 40_000))]
    before, seen = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            case = Case(torch.device("cpu"), shapes=((100_003,), (7,)), steps=1)
            case.step(1)
            seen.append([optimizer.square_norm(tensors), *case.masters])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in seen[1:] for a, b in zip(seen[0], other))


@pytest.mark.parametrize("norm, max_norm, inv_scale", [(10.0, 1.0, 1.0), (0.5, 1.0, 1.0), (10.0, 0.0, 1.0),
                                                       (5000.0, 1.0, 2.0**-10), (0.0, 1.0, 0.5)])
def test_clip_factor(norm: float, max_norm: float, inv_scale: float) -> None:
    factor, skip, own = clip_factor(
        torch.tensor(norm**2, dtype=torch.float64), max_norm=max_norm, inv_scale=inv_scale
    )
    real = norm * inv_scale
    expected = inv_scale * (max_norm / (real + 1e-6) if real > max_norm > 0 else 1.0)
    assert factor.dtype == skip.dtype == torch.float32 and float(own) == real and float(skip) == 0.0
    assert float(factor) == pytest.approx(expected, rel=1e-7)


def test_fused_adamw_steps_clips_and_skips(device: torch.device) -> None:
    """Two groups, clipping in each step, one overflow in between: as AdamW that never saw it."""
    case = Case(device, weight_dtype=torch.bfloat16)
    half = len(case.masters) // 2
    groups = [AdamWGroup(case.weights[:half], case.masters[:half], 0.1),
              AdamWGroup(case.weights[half:], case.masters[half:], 0.0)]
    own = FusedAdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    wide = [m.double().clone() for m in case.start]
    exact = torch.optim.AdamW(
        [{"params": wide[:half], "weight_decay": 0.1}, {"params": wide[half:], "weight_decay": 0.0}],
        lr=HYPER["lr"], betas=(0.9, 0.95), eps=1e-8)
    for number, grads in enumerate(case.grads):
        if number == 2:
            bad = [g.clone() for g in grads]
            bad[4].view(-1)[0] = math.inf
            before = [t.clone() for t in (*case.weights, *case.masters)]
            norm, skip = own.clipped_step([bad[:half], bad[half:]], lr=1.0, square_norm=optimizer.square_norm(bad),
                                          max_norm=1.0)
            assert float(skip) == 1.0 and float(norm) == math.inf and int(own.step_count) == 2
            assert all(torch.equal(a, b) for a, b in zip((*case.weights, *case.masters), before))
        norm, skip = own.clipped_step(
            [grads[:half], grads[half:]], lr=HYPER["lr"], square_norm=optimizer.square_norm(grads), max_norm=0.5,
            inv_scale=0.25)
        real = math.sqrt(sum(float(g.double().square().sum()) for g in grads)) / 4
        assert float(norm) == pytest.approx(real, rel=1e-6) and float(skip) == 0.0
        for p, g in zip(wide, grads):
            p.grad = g.double() / 4 * (0.5 / (real + 1e-6) if real > 0.5 else 1.0)
        exact.step()
    assert int(own.step_count) == 5
    for m, w, e in zip(case.masters, case.weights, wide):
        torch.testing.assert_close(m.double(), e, rtol=2e-6, atol=2e-6)
        assert torch.equal(w, m.bfloat16())


def test_state_can_be_read_and_set(device: torch.device) -> None:
    def new(case: Case) -> FusedAdamW:
        return FusedAdamW([([], case.masters, 0.1)], betas=(0.9, 0.95), eps=1e-8)

    first, second = Case(device), Case(device)
    a, b = new(first), new(second)
    a.step([first.grads[0]], lr=1e-3)
    for mine, theirs in zip(first.masters, second.masters):
        state = a.state[mine]
        assert sorted(state) == ["exp_avg", "exp_avg_sq", "step"] and float(state["step"]) == 1.0
        theirs.copy_(mine)
        b.state[theirs] = {"step": torch.tensor(1.0), "exp_avg": state["exp_avg"].clone(),
                           "exp_avg_sq": state["exp_avg_sq"].cpu()}
    for optim, case in ((a, first), (b, second)):
        optim.step([case.grads[1]], lr=1e-3)
    assert all(torch.equal(x, y) for x, y in zip(first.masters, second.masters))
    assert len(b.state) == len(SHAPES) and b.state.get(torch.zeros(1)) is None
    with pytest.raises(ValueError, match="exp_avg"):
        b.state[second.masters[0]] = {**a.state[first.masters[0]], "exp_avg": torch.zeros(9)}


def test_autograd_sees_that_weights_changed(device: torch.device) -> None:
    w = torch.nn.Parameter(torch.ones(8, device=device))
    x = torch.ones(8, device=device, requires_grad=True)
    loss = (w * x).sum()
    state = [torch.zeros(8, device=device) for _ in range(3)]
    optimizer.adamw_([w], [state[0]], [torch.ones(8, device=device)], [state[1]], [state[2]],
                     step=torch.tensor(1, device=device), grad_scale=None, skip=None, **HYPER)
    assert float(w.detach()[0]) != 1.0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_opcheck(device: torch.device) -> None:
    case = Case(device, shapes=((5,), (8, 3)), weight_dtype=torch.bfloat16)
    torch.library.opcheck(torch.ops.megatron_port.square_norm, (case.grads[0],))
    scalar, rate = torch.tensor(0.0, device=device), torch.tensor(3e-3, dtype=torch.float64, device=device)
    for weights, other in (([], None), (case.weights, scalar)):
        torch.library.opcheck(
            torch.ops.megatron_port.adamw_,
            (weights, case.masters, case.grads[0], case.exp_avg, case.exp_avg_sq, torch.tensor(1, device=device),
             other, other, rate, *list(HYPER.values())[1:]))


def _break(case: Case, what: str) -> dict[str, object]:
    device = case.masters[0].device
    if what == "short":
        case.exp_avg.pop()
    elif what == "size":
        case.exp_avg_sq[1] = torch.zeros(4, device=device)
    elif what == "strided":
        case.masters[1] = torch.zeros(5, 3, device=device).t()
    elif what == "dtype":
        case.exp_avg[1] = case.exp_avg[1].double()
    elif what == "weights":
        case.weights[1] = case.weights[1].half()
    elif what == "step":
        return {"step": torch.tensor(1, dtype=torch.int32, device=device)}
    elif what == "scale":
        return {"grad_scale": torch.ones(2, device=device)}
    elif what == "beta":
        return {"beta1": 1.0}
    return {}


@pytest.mark.parametrize("what, text", [
    ("short", "exp_avg has 9 tensors, masters 10"), ("size", r"exp_avg_sq\[1\] has 4 elements, not 15"),
    ("strided", r"masters\[1\] is not contiguous"), ("dtype", r"exp_avg\[1\] has another dtype"),
    ("weights", r"weights\[1\] has another dtype"), ("step", "step must be int64 or float32"),
    ("scale", "grad_scale has 2 elements"), ("beta", r"must be in \[0, 1\)"),
])
def test_refusals(device: torch.device, what: str, text: str) -> None:
    case = Case(device, weight_dtype=torch.bfloat16)
    other = _break(case, what)
    with pytest.raises(RuntimeError, match=text):
        case.step(1, **other)


def test_square_norm_refusals(device: torch.device) -> None:
    x = torch.ones(4, 6, device=device)
    for broken, text in (([x.t()], "not contiguous"), ([x, x.half()], "different dtypes"), ([x.double()], "float32")):
        with pytest.raises(RuntimeError, match=text):
            optimizer.square_norm(broken)


def test_gradients_may_be_strided(device: torch.device) -> None:
    case, other = (Case(device, shapes=((6, 4),)) for _ in range(2))
    case.grads[0] = [case.grads[0][0].t().contiguous().t()]
    case.step(1)
    other.step(1)
    assert torch.equal(case.masters[0], other.masters[0])


def test_fused_adamw_refusals() -> None:
    m = torch.zeros(3)
    with pytest.raises(ValueError, match="twice"):
        FusedAdamW([([], [m], 0.0), ([], [m], 0.1)], betas=(0.9, 0.95), eps=1e-8)
    with pytest.raises(ValueError, match="float32"):
        FusedAdamW([([], [m.double()], 0.0)], betas=(0.9, 0.95), eps=1e-8)
    with pytest.raises(ValueError, match="differ"):
        FusedAdamW([([torch.zeros(4)], [m], 0.0)], betas=(0.9, 0.95), eps=1e-8)
    with pytest.raises(ValueError, match="groups"):
        FusedAdamW([([], [m], 0.0)], betas=(0.9, 0.95), eps=1e-8).step([], lr=0.1)
