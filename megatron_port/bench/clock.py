"""How long a piece of work takes on this rank's device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from megatron_port.preflight.exchange import synchronize

BUDGET_S = 0.15
SAMPLES = 5
SPIN_HZ = 2.1e9
"""Upper limit of the clock that a plug counts: too high a value only makes it longer."""
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


def queued_seconds(calls: Sequence[Callable[[], object]], plug_s: float = 0.0) -> tuple[float, float]:
    """Return (device, host) seconds of one of the calls on a GPU.

    A kernel that spins for ``plug_s`` (0: ``CALL_S`` a call) occupies the device while the host queues all calls; the
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
