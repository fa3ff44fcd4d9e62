"""Activations in host memory between the forward and the backward pass of their layer.

What a layer swaps leaves the device when its forward pass ends, through a ``memory.staging`` buffer of its own,
beside the next layer's computation, and is freed when that one ends. The backward pass of a layer starts the copies
back of the layer below. A layer that runs backward before its memory was given up uses it as it is.

Each layer has as many buffers as micro-batches wait in it at most, made in its first forward pass and used again ever
after.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import torch

from megatron_port.core.dist.device_streams import COMPUTE, COPY_OUT, Streams, access, streams_of
from megatron_port.ext.memory.staging import StagingBuffer, StagingRing

PART = 64
"""Bytes to which tensors in a buffer are aligned."""


class SwappedLayer:
    """Tensors that one layer swapped out in one forward pass: ``sources``, as flat bytes, in one staging buffer."""

    def __init__(
        self, space: SwapSpace, ring: StagingRing, sources: list[torch.Tensor], below: SwappedLayer | None
    ) -> None:
        self._space, self._ring, self._below = space, ring, below
        self._buffer: StagingBuffer | None = None  # for __del__, where there is none to take
        self._sources: list[torch.Tensor] = sources
        """On the device, until compute has waited for the copies."""
        self._buffer = ring.acquire(for_host=False)
        self._waits_for: StagingBuffer | None = None
        self._hosts, offset = [], 0
        for source in sources:
            access(COMPUTE, "a layer's forward pass", writes=[source])
            host = self._buffer.view(torch.uint8, source.numel(), offset=offset)
            ring.copy_out(source, host, self._buffer)
            self._hosts.append(host)
            offset += padded(source.numel())
        self._back: list[torch.Tensor | None] | None = None

    def __del__(self) -> None:  # of a pass that has no backward pass
        if self._buffer is not None:
            self._ring.release(self._buffer)

    def let_go(self) -> None:
        """Make compute wait for the copies and free the memory on the device."""
        if self._buffer is not None and self._sources:
            self._ring.wait_source(self._buffer)
            access(COMPUTE, "the memory's next use", writes=self._sources)
        self._sources = []

    def start(self) -> None:
        """Start the copies back, if they have not been."""
        if self._buffer is None:
            return
        buffer, self._buffer = self._buffer, None
        if self._sources:  # still here
            self._ring.wait_source(buffer)
            self._back, self._sources = list(self._sources), []
        else:
            targets = [torch.empty_like(host, device=self._ring.device, pin_memory=False) for host in self._hosts]
            for host, target in zip(self._hosts, targets):
                self._ring.copy_in(host, target, buffer)
            self._back, self._waits_for = list(targets), buffer
        self._hosts = []
        self._ring.release(buffer)

    def take(self, number: int) -> torch.Tensor:
        """Return source ``number`` on the device, for compute to use, once; the layer below starts to come back."""
        self._space.let_go(but=self)
        self.start()
        if self._waits_for is not None:
            self._ring.wait_target(self._waits_for)
            self._waits_for = None
        if self._below is not None:
            below, self._below = self._below, None
            below.start()
        assert self._back is not None
        tensor, self._back[number] = self._back[number], None
        assert tensor is not None
        access(COMPUTE, "a layer's backward pass", reads=[tensor])
        return tensor


class SwapSpace:
    """Host memory of the swapped activations of one rank.

    Args:
        device: of the activations.
        streams: those of the device; None: new ones.
    """

    def __init__(self, device: torch.device, streams: Streams | None = None) -> None:
        self.device, self._streams = device, streams
        self.in_flight: dict[int, int] = {}
        """Layer → micro-batches that wait in it for their backward pass at most; 1 where it is not stated."""
        self._rings: dict[int, list[StagingRing]] = {}
        self._leaving: SwappedLayer | None = None
        self._below: SwappedLayer | None = None

    @property
    def host_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(ring.count * ring.nbytes for rings in self._rings.values() for ring in rings)

    @property
    def moved(self) -> int:
        """Bytes copied to the host so far."""
        return sum(ring.moved[COPY_OUT] for rings in self._rings.values() for ring in rings)

    def begin_pass(self) -> None:
        """Note that a forward pass through a chunk begins: what is swapped next has no layer below."""
        self._below = None

    def swap(self, layer: int, sources: Sequence[torch.Tensor]) -> SwappedLayer:
        """Start to copy a layer's tensors, flat bytes, to the host, and give up those of the layer before it."""
        swapped = SwappedLayer(self, self._ring(layer, sum(padded(s.numel()) for s in sources)), list(sources),
                               self._below)
        self.let_go()
        self._leaving = self._below = swapped
        return swapped

    def let_go(self, but: SwappedLayer | None = None) -> None:
        """Free what has been copied last on the device; ``but``: unless it is this one's, which is wanted."""
        leaving, self._leaving = self._leaving, None
        if leaving is not None and leaving is not but:
            leaving.let_go()

    def _ring(self, layer: int, nbytes: int) -> StagingRing:
        """Return a ring of the layer with a free buffer of ``nbytes``. Larger micro-batches than before, and more of
        them at once (the batch's ramp-up), get a new one."""
        rings = self._rings.setdefault(layer, [])
        fitting = [ring for ring in rings if ring.nbytes >= nbytes]
        lacking = self.in_flight.get(layer, 1) - sum(ring.count for ring in fitting)
        if lacking > 0:
            if self._streams is None:
                self._streams = streams_of(self.device)
            fitting.append(StagingRing(self.device, count=lacking, nbytes=nbytes, streams=self._streams))
            rings.append(fitting[-1])
        return next((ring for ring in fitting if ring.free), fitting[0])


def measured_copy(device: torch.device, nbytes: int, times: int = 3) -> float:
    """Return the seconds per byte of a copy of ``nbytes`` to the host or back, whichever is slower, at its fastest."""
    there = torch.empty(nbytes, dtype=torch.uint8, device=device)
    here = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    best = [math.inf, math.inf]
    for _ in range(times):
        for way, (source, target) in enumerate(((there, here), (here, there))):
            started = time.perf_counter()
            target.copy_(source)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            best[way] = min(best[way], time.perf_counter() - started)
    return max(best) / nbytes


def padded(nbytes: int) -> int:
    """Return the bytes that a tensor of ``nbytes`` takes in a buffer."""
    return -(-nbytes // PART) * PART
