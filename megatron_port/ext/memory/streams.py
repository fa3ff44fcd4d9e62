"""Streams of copies between the device and the host, beside the computation."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from megatron_port.core.dist.device_streams import COMPUTE, HOST, Event

COPY_OUT = "copy out"
"""Copies from the device to the host."""
COPY_IN = "copy in"
"""Copies from the host to the device."""


class Streams:
    """Streams of a device without any: a CPU, on which a copy has ended when its call returns."""

    def event(self) -> Event:
        """Return a new event."""
        return Event()

    def record(self, event: Event, stream: str) -> None:
        """Let an event mark everything that is queued on a stream so far."""
        event.record(stream)

    def wait(self, stream: str, event: Event) -> None:
        """Let a stream, or the host, wait for what an event marks."""
        event.wait(stream)

    def on(self, stream: str) -> AbstractContextManager[Any]:
        """Return a context in which kernels and copies are queued on a stream."""
        return nullcontext()


class CudaStreams(Streams):
    """Streams of a GPU (CUDA or HIP), two of them for copies."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._copies = {name: torch.cuda.Stream(device) for name in (COPY_OUT, COPY_IN)}

    def _native(self, stream: str) -> Any:
        return self._copies.get(stream) or torch.cuda.current_stream(self.device)

    def event(self) -> Event:
        return Event(torch.cuda.Event())

    def record(self, event: Event, stream: str) -> None:
        if stream != HOST:
            event.native.record(self._native(stream))
        super().record(event, stream)

    def wait(self, stream: str, event: Event) -> None:
        if stream == HOST:
            event.native.synchronize()
        else:
            self._native(stream).wait_event(event.native)
        super().wait(stream, event)

    def on(self, stream: str) -> AbstractContextManager[Any]:
        return nullcontext() if stream in (HOST, COMPUTE) else torch.cuda.stream(self._copies[stream])


def streams_of(device: torch.device) -> Streams:
    """Return the streams of a device; on a GPU two new ones for copies."""
    return CudaStreams(device) if device.type == "cuda" else Streams()
