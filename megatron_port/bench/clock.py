"""How long a piece of work takes on this rank's device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from megatron_port.preflight.exchange import synchronize

BUDGET_S = 0.15
SAMPLES = 5


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
