"""How long a piece of work takes on this rank's device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from megatron_port.tools.preflight.exchange import synchronize

BUDGET_S = 0.15
SAMPLES = 5
SPIN_HZ = 2.1e9
"""Upper limit of the clock that a plug counts: too high a value only makes it longer."""
LOAD_S, ROUND_S, AHEAD = 1.5, 0.01, 8
"""Seconds of steady work, of products in a round of it, and rounds that are queued at once."""
PRODUCTS = 0.7
"""Share of a training step that products take: 0.68 of the kernels' time in a step of GPT-2 XL on an H200."""
CALL_S = 4e-4
"""More than the host takes to launch a call, its backward pass included."""


def seconds_of(work: Callable[[], object], device: torch.device, *, budget_s: float = BUDGET_S) -> float:
    """Median seconds of one call over ``SAMPLES`` samples, all of which take about ``budget_s``; after a warm-up."""
    work()
    synchronize(device)
    started = time.perf_counter()
    work()
    synchronize(device)
    once = max(time.perf_counter() - started, 1e-7)
    calls = max(1, int(budget_s / SAMPLES / once))
    samples = []
    for _ in range(SAMPLES):
        started = time.perf_counter()
        for _ in range(calls):
            work()
        synchronize(device)
        samples.append((time.perf_counter() - started) / calls)
    return statistics.median(samples)


def device_seconds(work: Callable[[], object], device: torch.device, budget_s: float = BUDGET_S) -> float:
    """Median seconds that the device takes for one call, not the host to launch it; on a CPU the same."""
    if device.type == "cpu":
        return seconds_of(work, device, budget_s=budget_s)
    work()
    count = max(4, min(32, int(budget_s / SAMPLES / max(queued_seconds([work])[0], 1e-7))))
    return statistics.median(queued_seconds([work] * count)[0] for _ in range(SAMPLES))


def load_share(product: Callable[[], object], other: Callable[[], object], device: torch.device) -> float:
    """Rate of ``product`` in a GPU's steady work, over its rate in a burst; 1 on a CPU.

    Large products draw more than the power limit allows, and after some 0.1 s the clock falls: 8192^3 on an H200 from
    790 to 680 TFLOP/s. In training they have about ``PRODUCTS`` of the time, kernels that wait for memory the rest, and
    the limit holds for both together. So the two take turns for ``LOAD_S``, and the second half counts.
    """
    if device.type == "cpu":
        return 1.0
    burst, beside = device_seconds(product, device), device_seconds(other, device)
    count = max(1, round(ROUND_S / burst))
    pauses = max(1, round(count * burst * (1 - PRODUCTS) / PRODUCTS / beside))
    seconds, ends = list[float](), time.perf_counter() + LOAD_S
    while time.perf_counter() < ends or len(seconds) < 2 * AHEAD:
        marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(AHEAD)]
        for start, end in marks:
            start.record()
            for _ in range(count):
                product()
            end.record()
            for _ in range(pauses):
                other()
        torch.cuda.synchronize()
        seconds += [start.elapsed_time(end) / 1e3 / count for start, end in marks]
    return min(burst / statistics.median(seconds[len(seconds) // 2 :]), 1.0)


def queued_seconds(calls: Sequence[Callable[[], object]], plug_s: float = 0.0) -> tuple[float, float]:
    """Return (device, host) seconds of one of the calls on a GPU.

    A kernel that spins for ``plug_s`` (0: ``CALL_S`` per call) occupies the device while the host queues all calls; the
    events stand around these alone, so the device goes from one to the next without waiting for the host. With their
    kernels they must fit the stream's queue, about 1,000.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(int((plug_s or CALL_S * len(calls)) * SPIN_HZ))
    start.record()
    began = time.perf_counter()
    for call in calls:
        call()
    host = (time.perf_counter() - began) / len(calls)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / len(calls), host
