"""Gradients that wait for others of their bucket: the sums of each by itself, and no memory asked for too early."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_port.core.engine.native_passes import GradientSink
from megatron_port.ext.kernels import kernels
from megatron_port.ext.kernels.gradient_sums import SumsTogether
from megatron_port.ext.kernels.ops.optimizer import add_slots_


@pytest.fixture(autouse=True)
def library() -> None:
    if problem := kernels.kernels_status("cpu")[1]:
        pytest.skip(problem)
    kernels.load("cpu")


class Buckets:
    """Sums of parameters in buckets, in the place of ``ShardedParameters``; notes what is asked of them, in order."""

    def __init__(self, sizes: list[tuple[int, int]]) -> None:
        draw = torch.Generator().manual_seed(1)
        self.bucket = [bucket for bucket, _ in sizes]
        self.parameters = [torch.zeros(n, dtype=torch.bfloat16) for _, n in sizes]
        self.sums = [torch.randn(n, generator=draw) for _, n in sizes]
        self.asked: list[tuple[str, int]] = []

    def _index(self, parameter: torch.Tensor) -> int:
        return next(i for i, p in enumerate(self.parameters) if p is parameter)

    def reduced_with(self, parameter: torch.Tensor) -> int:
        return self.bucket[self._index(parameter)]

    def gradient_of(self, parameter: torch.Tensor) -> torch.Tensor:
        self.asked.append(("sum", self._index(parameter)))
        return self.sums[self._index(parameter)]

    def uninitialized_gradient_of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        return None  # each has been added to

    def added(self, parameter: torch.Tensor) -> None:
        self.asked.append(("added", self._index(parameter)))


def _passes(together: bool, sizes: list[tuple[int, int]], count: int) -> Buckets:
    """Two backward passes in which every parameter gets a gradient."""
    buckets: Any = Buckets(sizes)
    sink: GradientSink = SumsTogether(buckets) if together else GradientSink(buckets)
    draw = torch.Generator().manual_seed(2)
    for _ in range(count):
        for parameter in buckets.parameters:
            parameter.grad = torch.randn(parameter.shape, generator=draw).bfloat16()
            sink.hook(parameter)(parameter)
        sink.flush()
    assert all(p.grad is None for p in buckets.parameters)
    result: Buckets = buckets
    return result


SIZES = [(0, 24), (0, 7), (1, 96), (1, 1), (0, 5), (2, 70_000), (2, 3)]


def test_the_sums_are_those_of_each_by_itself() -> None:
    one, together = _passes(False, SIZES, 2), _passes(True, SIZES, 2)
    assert all(torch.equal(a, b) for a, b in zip(one.sums, together.sums))
    assert not any(torch.equal(a, b) for a, b in zip(Buckets(SIZES).sums, together.sums))


def test_gradients_of_a_bucket_are_added_before_another_bucket_is_asked_for() -> None:
    """The memory of one may be taken for the other. A large gradient does not wait."""
    asked = _passes(True, SIZES, 1).asked
    assert asked == [
        ("sum", 0), ("sum", 1), ("added", 0), ("added", 1), ("sum", 2), ("sum", 3), ("added", 2), ("added", 3),
        ("sum", 5), ("added", 5), ("sum", 4), ("added", 4), ("sum", 6), ("added", 6),
    ]


def test_slots_wait_within_a_bucket_and_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    buckets: Any = Buckets([(0, 8), (0, 8), (1, 8), (1, 8)])
    sink = SumsTogether(buckets)
    first, second, third, fourth = buckets.parameters
    for parameter in buckets.parameters:
        sink.hook(parameter)
    before = [s.clone() for s in buckets.sums]
    slots = torch.arange(48.0).view(3, 2, 8)
    sink.take(slots, (first, second), 48)
    assert not buckets.asked
    sink.take(slots[:, :1].contiguous(), (third,), 24)
    assert buckets.asked == [("sum", 0), ("sum", 1), ("added", 0), ("added", 1)]
    monkeypatch.setattr("megatron_port.ext.kernels.gradient_sums._MOST_WAITING", 40)
    sink.take(slots[:, 1:].contiguous(), (fourth,), 24)
    assert buckets.asked[4:] == [("sum", 2), ("sum", 3), ("added", 2), ("added", 3)]
    wanted = [*slots.sum(0), *slots.sum(0)]
    assert all(torch.allclose(s, b + w, rtol=1e-6) for s, b, w in zip(buckets.sums, before, wanted))


def test_slots_of_parameters_in_two_buckets_are_added_apart() -> None:
    buckets: Any = Buckets([(0, 8), (1, 8)])
    sink = SumsTogether(buckets)
    for parameter in buckets.parameters:
        sink.hook(parameter)
    before = [s.clone() for s in buckets.sums]
    slots = torch.arange(48.0).view(3, 2, 8)
    sink.take(slots, tuple(buckets.parameters), 48)
    assert buckets.asked == [("sum", 0), ("added", 0)]
    sink.flush()
    assert buckets.asked[2:] == [("sum", 1), ("added", 1)]
    assert all(torch.allclose(s, b + w, rtol=1e-6) for s, b, w in zip(buckets.sums, before, slots.sum(0)))


def test_a_launch_adds_to_a_sum_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a launch read and write sums without waiting for each other: of two, one could be lost. A parameter may
    be used by two kernels, by one in two places, and with others that are not used again."""
    launches: list[list[int]] = []

    def launch(sums: list[torch.Tensor], *others: Any) -> None:
        launches.append([next(i for i, s in enumerate(buckets.sums) if s is each) for each in sums])
        add_slots_(sums, *others)

    monkeypatch.setattr("megatron_port.ext.kernels.gradient_sums.add_slots_", launch)
    buckets: Any = Buckets([(0, 8), (0, 8), (0, 8), (1, 8)])
    sink = SumsTogether(buckets)
    for parameter in buckets.parameters:
        sink.hook(parameter)
    wanted, draw = [s.clone() for s in buckets.sums], torch.Generator().manual_seed(3)
    for used in ((0, 1), (2,), (1,), (2, 2), (1, 3, 1), (0, 3)) * 2:
        slots = torch.randn(3, len(used), 8, generator=draw)
        for i, gradient in zip(used, slots.sum(0), strict=True):
            wanted[i] += gradient
        sink.take(slots, tuple(buckets.parameters[i] for i in used), slots.numel())
    sink.flush()
    assert all(len(set(sums)) == len(sums) for sums in launches), launches
    assert launches[:3] == [[0, 1, 2], [1], [2]]
    assert all(torch.allclose(s, w, rtol=1e-5, atol=1e-6) for s, w in zip(buckets.sums, wanted, strict=True))
