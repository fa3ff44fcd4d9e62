"""Seconds and bytes of sites and passes, measured while a run trains.

On a GPU the times are those of events, which are read when a step has ended; nothing waits for the device meanwhile.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch


class SiteClock:
    """Times and sizes on one rank. ``device``: where the operations run."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu, self._pending = device.type == "cuda", list[tuple[str, Any, Any]]()
        self._seconds: dict[str, list[float]] = {}
        self.sizes: dict[str, float] = {}
        """Site → most bytes that one layer saved of it in a micro-batch."""

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Time what runs in the context under a name."""
        if self._on_gpu:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            yield
            end.record()
            self._pending.append((name, start, end))
        else:
            started = time.perf_counter()
            yield
            self._seconds.setdefault(name, []).append(time.perf_counter() - started)

    def saw(self, sizes: Mapping[str, float]) -> None:
        """Note the bytes that one layer saved of each site in one forward pass."""
        for site, size in sizes.items():
            self.sizes[site] = max(self.sizes.get(site, 0.0), size)

    def end_step(self) -> None:
        """Read the events of a step that has ended."""
        for name, start, end in self._pending:
            end.synchronize()
            self._seconds.setdefault(name, []).append(start.elapsed_time(end) / 1e3)
        self._pending.clear()

    def seconds(self, name: str) -> float:
        """Return the median of what a name took; 0 where it never ran."""
        return statistics.median(self._seconds.get(name, [0.0]))
