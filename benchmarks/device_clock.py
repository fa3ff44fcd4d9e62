"""Seconds that a device takes for a call, not the seconds that the host takes to launch it.

An event before and an event after one call time the host wherever launching takes longer than the kernel. Here a plug
(a kernel that spins) occupies the device while the host queues many calls; the events stand around those calls only, so
the device goes from one to the next without waiting. Inputs are taken in turn from several copies that together exceed
the last cache, as in a training step, where an operand was last touched long ago. A CPU has no queue: there the same
calls are timed by the wall.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_port.tools.bench.measure import queued_seconds

CALLS = 24
"""Queued between two events. With the kernels of one call they stay below what a stream queues (about 1,000)."""
REPEATS = 7
CACHES = 3.0
"""The copies of the inputs hold this many times the last cache."""
MOST_COPIES = 16

Call = Callable[[int], Any]
"""Takes the number of the copy of the inputs that it is to use."""


@dataclass(frozen=True)
class Timing:
    """Of one call."""

    device_s: float
    """Median over the repeats."""
    host_s: float
    """To queue one call; on a CPU the same as ``device_s``."""
    spread: float
    """Interquartile range over the median."""

    @property
    def launch_bound(self) -> bool:
        """Whether the host queues calls more slowly than the device does them."""
        return self.host_s > self.device_s


def last_cache_bytes(device: torch.device) -> int:
    """Of the device's L2; on a CPU 32 MiB, what a few of its cores share."""
    if device.type != "cuda":
        return 32 << 20
    return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)) or 64 << 20


def copies_of(inputs: Sequence[Any], device: torch.device) -> list[tuple[Any, ...]]:
    """Return the inputs and copies of them, as many as exceed ``CACHES`` times the last cache."""
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    size = sum(x.numel() * x.element_size() for x in tensors)
    count = 1 if not size else min(MOST_COPIES, int(CACHES * last_cache_bytes(device) / size) + 1)

    def copied(x: Any) -> Any:
        return x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x

    return [tuple(inputs), *(tuple(copied(x) for x in inputs) for _ in range(count - 1))]


def _on_cpu(call: Call, calls: int, copies: int) -> tuple[float, float]:
    started = time.perf_counter()
    for i in range(calls):
        call(i % copies)
    seconds = (time.perf_counter() - started) / calls
    return seconds, seconds


def _queued(call: Call, calls: int, copies: int, plug_s: float) -> tuple[float, float]:
    """(device, host) seconds of one call behind a plug of ``plug_s``."""
    return queued_seconds([partial(call, i % copies) for i in range(calls)], plug_s)


def time_calls(
    functions: dict[str, Call], device: torch.device, *, copies: int = 1, calls: int = CALLS, repeats: int = REPEATS
) -> dict[str, Timing]:
    """Time each function, alternating: median over ``repeats`` of ``calls`` queued calls."""
    cuda = device.type == "cuda"
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in functions}
    plug = {}
    for name, call in functions.items():
        for i in range(3):
            call(i % copies)
        # The host's time for all calls, with a margin: the device must not run dry before the last is queued.
        plug[name] = 1.5 * calls * (_queued(call, 3, copies, 1e-6)[1] if cuda else 0.0) + 1e-4
    for _ in range(repeats):
        for name, call in functions.items():
            taken[name].append(_queued(call, calls, copies, plug[name]) if cuda else _on_cpu(call, calls, copies))
    return {name: _timing(pairs) for name, pairs in taken.items()}


def _timing(pairs: list[tuple[float, float]]) -> Timing:
    device = [d for d, _ in pairs]
    middle = statistics.median(device)
    low, high = (statistics.quantiles(device, n=4)[::2]) if len(device) > 1 else (middle, middle)
    return Timing(middle, statistics.median(h for _, h in pairs), (high - low) / middle if middle else 0.0)


def copy_bandwidth(device: torch.device, size: int = 2 << 30) -> float:
    """Return the bytes/s of a copy of ``size`` bytes on the device, read and write counted."""
    source = torch.randint(256, (size,), dtype=torch.uint8, device=device)  # zeros may move faster than numbers
    target = torch.empty_like(source)
    timing = time_calls({"copy": lambda i: target.copy_(source)}, device, calls=8)["copy"]
    return 2 * size / timing.device_s
