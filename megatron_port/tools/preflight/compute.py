"""Matmul rates by torch: of one core, and of each GPU, alone and with all GPUs at work."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from megatron_port.tools.preflight.core import SIZE, CoreRate, measure_core

GPU_SIZE = 8192
GROUP = 4
"""Matmuls between two timing events."""
TOGETHER_S = 2.0


@dataclass
class GpuRate:
    """Rates of one device. Memory in bytes, rates in TFLOP/s (bf16, dense, 2 n^3 operations per product)."""

    index: int
    name: str = ""
    memory_total: int = 0
    memory_free: int = 0
    alone_tflops: float = 0.0
    """Best sample while the other devices rest."""
    tflops: float = 0.0
    """Median sample while all devices work, as they do in training."""
    fault: str = ""
    """Failure; numbers measured before it are valid."""


def core_rate() -> CoreRate:
    """Measure fp32 products of 256 x 256 matrices on one thread; see :mod:`preflight.core`."""
    torch.set_num_threads(1)
    a, b = torch.randn(SIZE, SIZE), torch.randn(SIZE, SIZE)
    out = torch.empty(SIZE, SIZE)
    return measure_core(lambda: torch.mm(a, b, out=out), 2.0 * SIZE**3)


class _Gpu:
    """Matrices on one device, and the samples taken with them."""

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)
        generator = torch.Generator(self.device).manual_seed(1)
        shape = (GPU_SIZE, GPU_SIZE)
        self.a = torch.randn(shape, device=self.device, dtype=torch.bfloat16, generator=generator)
        self.b = torch.randn(shape, device=self.device, dtype=torch.bfloat16, generator=generator)
        self.first = torch.mm(self.a, self.b)
        self.out = torch.empty_like(self.first)

    def enqueue(self, groups: int) -> list[torch.cuda.Event]:
        """Start ``groups`` groups of products; return the ``groups + 1`` events between them."""
        with torch.cuda.device(self.device):
            events = [torch.cuda.Event(enable_timing=True) for _ in range(groups + 1)]
            events[0].record()
            for event in events[1:]:
                for _ in range(GROUP):
                    torch.mm(self.a, self.b, out=self.out)
                event.record()
        return events

    def rates(self, events: list[torch.cuda.Event]) -> list[float]:
        """Return TFLOP/s of each group, once all have run."""
        torch.cuda.synchronize(self.device)
        work = GROUP * 2.0 * GPU_SIZE**3
        return [work / (a.elapsed_time(b) * 1e-3) / 1e12 for a, b in zip(events, events[1:])]


def gpu_rates(meanwhile: Callable[[], None]) -> list[GpuRate]:
    """Measure every device that this process sees. ``meanwhile`` is called while all of them work.

    A device that fails is recorded, not raised. The same product made twice must give the same bits.
    """
    results = [GpuRate(i) for i in range(torch.cuda.device_count())]
    gpus: dict[int, _Gpu] = {}
    for r in results:
        with _noting_fault(r):
            r.name = torch.cuda.get_device_name(r.index)
            r.memory_free, r.memory_total = (int(n) for n in torch.cuda.mem_get_info(r.index))
            gpu = _Gpu(r.index)
            gpu.rates(gpu.enqueue(2))  # warm-up
            r.alone_tflops = max(gpu.rates(gpu.enqueue(8)))
            gpus[r.index] = gpu
    events: dict[int, list[torch.cuda.Event]] = {}
    for i, gpu in gpus.items():
        seconds = GROUP * 2.0 * GPU_SIZE**3 / (results[i].alone_tflops * 1e12)
        with _noting_fault(results[i]):
            events[i] = gpu.enqueue(max(3, min(200, int(TOGETHER_S / seconds))))
    meanwhile()
    for i, started in events.items():
        r, gpu = results[i], gpus[i]
        with _noting_fault(r):
            r.tflops = statistics.median(gpu.rates(started))
            if not torch.equal(gpu.first, gpu.out):
                r.fault = "the same product gave other bits the second time"
    return results


@contextmanager
def _noting_fault(rate: GpuRate) -> Iterator[None]:
    """Keep the first line of what torch says when the device fails."""
    try:
        yield
    except RuntimeError as error:
        rate.fault = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
