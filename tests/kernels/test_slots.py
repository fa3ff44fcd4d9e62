"""Gradients left as partial sums: added to the fp32 sums without being rounded to the parameter's dtype first, and but
for that the gradients that a kernel writes itself, each op alone and many together."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_port.ext.kernels.gradient_sums import SumsTogether
from megatron_port.ext.kernels.ops import activation, norm, rotary
from megatron_port.ext.kernels.ops.optimizer import add_slots_

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
EPS = 1e-5
Op = Callable[[Tensor, list[Tensor]], Tensor]


class Buckets:
    """fp32 sums in the place of ``ShardedParameters``, in one bucket."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self.sums = {id(p): torch.full(p.shape, 0.5, dtype=torch.float32, device=p.device) for p in parameters}
        self.told: list[int] = []

    def reduced_with(self, parameter: Tensor) -> int:
        return 0

    def gradient_of(self, parameter: Tensor) -> Tensor:
        return self.sums[id(parameter)]

    def added(self, parameter: Tensor) -> None:
        self.told.append(id(parameter))


def _layer_norm(x: Tensor, p: list[Tensor]) -> Tensor:
    y, same = norm.fork(x, p[0], p[1], EPS, rms=False)
    return y + same


def _rms_norm(x: Tensor, p: list[Tensor]) -> Tensor:
    return norm.rms_norm(x, p[0], EPS)


def _residual_norm(x: Tensor, p: list[Tensor]) -> Tensor:
    keys = torch.arange(x.shape[1], device=x.device)
    y, total = norm.bias_dropout_add_norm(
        x, p[2], x.detach() * 0.5, keys, p[0], p[1], op_key=3, p=0.25, seq_offset=1, eps=EPS, rms=False
    )
    return y * total


def _bare_residual_norm(x: Tensor, p: list[Tensor]) -> Tensor:
    keys = torch.arange(x.shape[1], device=x.device)
    y, total = norm.bias_dropout_add_norm(
        x, None, x.detach() * 0.5, keys, p[0], None, op_key=3, p=0.25, seq_offset=1, eps=EPS, rms=True
    )
    return y * total


def _rms_residual_norm(x: Tensor, p: list[Tensor]) -> Tensor:
    keys = torch.arange(x.shape[1], device=x.device)
    y, total = norm.bias_dropout_add_norm(
        x, p[1], x.detach() * 0.5, keys, p[0], None, op_key=3, p=0.25, seq_offset=1, eps=EPS, rms=True
    )
    return y * total


def _dropout(x: Tensor, p: list[Tensor]) -> Tensor:
    keys = torch.arange(x.shape[1], device=x.device)
    return norm.bias_dropout_add(
        x, p[0], None, keys, op_key=1, p=0.5, seq_offset=0, width=x.shape[2], width_offset=0
    ).square()


def _gelu(x: Tensor, p: list[Tensor]) -> Tensor:
    return activation.bias_gelu(x, p[0], approximate=True)


def _split(x: Tensor, p: list[Tensor]) -> Tensor:
    q, k, v = rotary.split((x + p[0].detach()).view(*x.shape[:2], 2, 4, -1), p[0])
    return q.sum(2, keepdim=True) * k * v


OPS: dict[str, tuple[Op, int]] = {
    "layer_norm": (_layer_norm, 2), "rms_norm": (_rms_norm, 1), "residual_norm": (_residual_norm, 3),
    "rms_residual_norm": (_rms_residual_norm, 2),
    "dropout": (_dropout, 1), "gelu": (_gelu, 1), "split": (_split, 1),
}
SHAPES = {"many": (70, 2, 64), "few": (9, 3, 40), "wide": (5, 1, 4104)}
"""Many slots; few; rows whose norm with a branch takes two passes in fp32."""


def _sums(op: Op, count: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, kept: bool
          ) -> tuple[list[Tensor], list[Tensor], Buckets]:
    """Two passes; (sums, gradients of x, where the sums are)."""
    draw = torch.Generator().manual_seed(5)
    make = lambda *size: torch.randn(*size, generator=draw).to(device, dtype)  # noqa: E731
    parameters = [make(shape[-1]).requires_grad_() for _ in range(count)]
    buckets: Any = Buckets(parameters)
    sink, dx = SumsTogether(buckets), []
    for p in parameters:
        p.register_post_accumulate_grad_hook(sink.hook(p))
        if not kept:
            del p.slot_sums  # type: ignore[attr-defined]
    for _ in range(2):
        x = make(*shape).requires_grad_()
        out = op(x, parameters)
        out.backward(make(*out.shape))
        assert x.grad is not None
        dx.append(x.grad)
        sink.flush()
    return [buckets.sums[id(p)] for p in parameters], dx, buckets


@pytest.mark.parametrize("size", SHAPES)
@pytest.mark.parametrize("name", OPS)
def test_slots_give_the_sums_of_written_gradients(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, name: str, size: str
) -> None:
    """To the bit, where each is rounded as the kernel rounds what it writes."""
    (op, count), shape = OPS[name], SHAPES[size]
    for dtype in DTYPES if size != "wide" else DTYPES[:1]:
        wanted, dx, _ = _sums(op, count, shape, dtype, device, kept=False)
        with monkeypatch.context() as patch:
            like = torch.empty(0, dtype=dtype, device=device)
            patch.setattr("megatron_port.ext.kernels.gradient_sums.add_slots_", partial(add_slots_, like=like))
            sums, same_dx, buckets = _sums(op, count, shape, dtype, device, kept=True)
        assert all(torch.equal(a, b) for a, b in zip([*wanted, *dx], [*sums, *same_dx], strict=True)), dtype
        assert not any(torch.equal(s, torch.full_like(s, 0.5)) for s in sums)
        assert len(buckets.told) == 2 * count


def test_kernels_leave_their_slots(device: torch.device, request: pytest.FixtureRequest) -> None:
    """Else the test above compares one path with itself. A CPU adds its slots up."""
    x = torch.randn(64, 2, 64, device=device)
    found = torch.ops.megatron_port.bias_gelu_backward.default(x, x, x[0, 0], True, True, True)
    of_device = "cpu" not in request.node.name.split("[")[1]
    assert (len(found[2]) > 1) == of_device and found[2].shape[1:] == (1, 64)


@pytest.mark.parametrize("name", OPS)
def test_kept_sums_are_not_rounded(device: torch.device, name: str) -> None:
    """They are near to those of the op in float32, and not at numbers of bf16."""
    (op, count), shape = OPS[name], SHAPES["many"]
    exact, _, _ = _sums(op, count, shape, torch.float32, device, kept=True)
    sums, _, _ = _sums(op, count, shape, torch.bfloat16, device, kept=True)
    for total, wanted in zip(sums, exact, strict=True):
        added = total - 0.5
        assert not torch.equal(added, added.bfloat16().float())
        assert (added - (wanted - 0.5)).norm() < 2e-2 * wanted.norm()


def test_slots_hold_no_memory_beside_them(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as for the sums of a bias that a norm does not have: what waits is limited by the slots' elements."""
    taken: list[Tensor] = []
    take = SumsTogether.take

    def noted(self: SumsTogether, slots: Tensor, parameters: Any, elements: int) -> None:
        taken.append(slots)
        take(self, slots, parameters, elements)

    monkeypatch.setattr(SumsTogether, "take", noted)
    for op, count in [*OPS.values(), (_bare_residual_norm, 1)]:
        _sums(op, count, SHAPES["many"], torch.bfloat16, device, kept=True)
    assert all(slots.untyped_storage().nbytes() == 4 * slots.numel() for slots in taken)


def test_many_slots_at_once_are_the_exact_sums(device: torch.device) -> None:
    """More tensors than a launch takes, of 1 to 300 slots; against fp64."""
    draw = torch.Generator().manual_seed(2)
    counts = [1 + (i * 37) % 300 for i in range(70)]
    slots = [torch.randn(n, 1 + i % 3, 5 + i, generator=draw).to(device) for i, n in enumerate(counts)]
    rows = [i % s.shape[1] for i, s in enumerate(slots)]
    for dtype in DTYPES:
        sums = [torch.zeros(s.shape[2], device=device) for s in slots]
        add_slots_(sums, slots, rows, torch.empty(0, dtype=dtype, device=device))
        for total, part, row in zip(sums, slots, rows):
            exact = part[:, row].double().sum(0)
            assert torch.allclose(total.double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=2e-5 * len(part) ** 0.5)
            assert torch.equal(total, total.to(dtype).float())


@pytest.mark.parametrize("shape, row, text", [
    ((4, 2, 8), 2, "not among"), ((4, 2, 7), 0, r"\[slots, gradients, cols\]"), ((0, 2, 8), 0, "gradients, cols"),
])
def test_refused_slots(device: torch.device, shape: tuple[int, ...], row: int, text: str) -> None:
    with pytest.raises(RuntimeError, match=text):
        add_slots_([torch.zeros(8, device=device)], [torch.zeros(shape, device=device)], [row],
                   torch.zeros(1, device=device))
