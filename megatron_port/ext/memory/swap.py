"""Activations in host memory between the forward and the backward pass of their layer.

What a layer swaps leaves the device when its forward pass ends, through a ``memory.swap`` buffer of its own,
beside the next layer's computation, and is freed when that one ends. The backward pass of a layer starts the copies
back of the layer below. A layer that runs backward before its memory was given up uses it as it is.

Each layer has as many buffers as micro-batches wait in it at most, made in its first forward pass and used again ever
after.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from megatron_port.core.dist.device_streams import COMPUTE, HOST, Event, access
from megatron_port.ext.memory.streams import COPY_IN, COPY_OUT, Streams, streams_of

# Host memory through which tensors leave the device and come back while it computes (a staging ring).
#
# A fixed number of buffers, page-locked where the device is a GPU, made once. The ring owns them and every *edge*, a
# wait of one stream for another, without which a copy would race with a kernel, with the host or with the buffer's
# next user:
#
# 1. compute wrote a tensor → the copy out may read it (:meth:`StagingRing.copy_out`);
# 2. the copy out has ended → the host may read the buffer (:meth:`StagingRing.wait_host`), and compute may overwrite or
#    free the tensor (:meth:`StagingRing.wait_source`);
# 3. the host wrote the buffer, or a copy out did, and compute has used the target for the last time → the copy in may
#    write the target (:meth:`StagingRing.copy_in`);
# 4. the copy in has ended → compute may use the target (:meth:`StagingRing.wait_target`);
# 5. the last copy from or to a buffer has ended → the buffer may have a new user (:meth:`StagingRing.acquire`);
# 6. a thread has read a file into the buffer → the host may read it; it has written the buffer to a file → the buffer
#    may have a new user (:meth:`StagingRing.start_io`, :meth:`StagingRing.wait_io`).
#
# Nothing waits for the whole device. tests/distributed/stream_order.py checks the edges on a CPU.

ALIGN = 4096
"""Bytes to which buffers and their parts are aligned: what a disk that bypasses the page cache asks for."""


class StagingBuffer:
    """One buffer of a ring, while it is lent out."""

    def __init__(self, memory: torch.Tensor, streams: Streams) -> None:
        self.memory = memory
        self.out, self.into = streams.event(), streams.event()
        """The last copy out of the device, and the last into it."""
        self.source: torch.Tensor | None = None
        """Tensor that is being copied out, alive until compute has waited for the copy."""
        self.io: Future[None] | None = None
        """Job of a thread that reads or writes the buffer; ``io_ended`` marks its end."""
        self.io_ended = Event()

    def view(self, dtype: torch.dtype, numel: int, *, offset: int = 0) -> torch.Tensor:
        """Return ``numel`` elements from byte ``offset`` on.

        Raises:
            ValueError: the buffer is smaller (both sizes are named).
        """
        stop = offset + numel * dtype.itemsize
        if stop > self.memory.numel():
            raise ValueError(f"bytes {offset} to {stop} of a staging buffer of {self.memory.numel()}")
        return self.memory[offset:stop].view(dtype)


class StagingRing:
    """Staging buffers of one rank.

    Args:
        device: whose tensors are staged.
        count: buffers.
        nbytes: size of each.
        streams: those of the device; None: new ones.
    """

    def __init__(self, device: torch.device, *, count: int, nbytes: int, streams: Streams | None = None) -> None:
        self.device, self.count, self.nbytes = device, count, nbytes
        self.streams = streams_of(device) if streams is None else streams
        pinned = device.type == "cuda"
        self._free = deque(StagingBuffer(self._allocate(nbytes, pinned), self.streams) for _ in range(count))
        self._compute: Event = self.streams.event()
        self._threads: ThreadPoolExecutor | None = None
        self._jobs = 0
        self.moved = {COPY_OUT: 0, COPY_IN: 0}
        """Bytes copied since the ring was made."""

    @staticmethod
    def _allocate(nbytes: int, pinned: bool) -> torch.Tensor:
        """Return ``nbytes`` of host memory that begin at a multiple of ``ALIGN``."""
        raw = torch.empty(nbytes + ALIGN, dtype=torch.uint8, pin_memory=pinned)
        start = -raw.data_ptr() % ALIGN
        return raw[start : start + nbytes]

    @property
    def free(self) -> int:
        """Buffers that :meth:`acquire` can give out now."""
        return len(self._free)

    def acquire(self, *, for_host: bool = True) -> StagingBuffer:
        """Return a buffer that the host may write and copies may use; the host waits for its last copies and job.

        ``for_host`` False: only copies out of the device write it, so they wait for its last copy in, and not the host.

        Raises:
            RuntimeError: all are lent out (their number and size are named).
        """
        if not self._free:
            raise RuntimeError(f"all {self.count} staging buffers of {self.nbytes} bytes are in use")
        buffer = self._free.popleft()
        self.wait_io(buffer)
        if not for_host:
            self.streams.wait(COPY_OUT, buffer.into)
            return buffer
        self.streams.wait(HOST, buffer.out)
        self.streams.wait(HOST, buffer.into)
        return buffer

    def release(self, buffer: StagingBuffer) -> None:
        """Return a buffer, whose copies may still be under way; the host is done with it."""
        if buffer.source is not None:
            self.wait_source(buffer)
        self._free.append(buffer)

    # -- copies ------------------------------------------------------------------------------------------------------

    def _after_compute(self, stream: str) -> None:
        self.streams.record(self._compute, COMPUTE)
        self.streams.wait(stream, self._compute)

    @torch.no_grad()
    def copy_out(self, source: torch.Tensor, target: torch.Tensor, buffer: StagingBuffer) -> None:
        """Start to copy a tensor of the device, after the kernels queued so far, into ``target``, a view of ``buffer``.

        Call :meth:`wait_source` before the tensor is overwritten, :meth:`wait_host` before the host reads.
        """
        self._after_compute(COPY_OUT)
        access(COPY_OUT, "copy to the host", reads=[source], writes=[target])
        self.moved[COPY_OUT] += source.nbytes
        with self.streams.on(COPY_OUT):
            target.copy_(source, non_blocking=True)
        self.streams.record(buffer.out, COPY_OUT)
        buffer.source = source

    def wait_host(self, buffer: StagingBuffer) -> None:
        """Wait until the copy out has ended: the host may read the buffer."""
        self.streams.wait(HOST, buffer.out)

    def wait_source(self, buffer: StagingBuffer) -> None:
        """Make compute wait for the copy out: its source may be overwritten or freed."""
        self.streams.wait(COMPUTE, buffer.out)
        buffer.source = None

    @torch.no_grad()
    def copy_in(self, source: torch.Tensor, target: torch.Tensor, buffer: StagingBuffer) -> None:
        """Start to copy ``source``, a view of ``buffer``, into a tensor of the device, after the kernels queued so far.

        Call :meth:`wait_target` before the tensor is used.
        """
        self._after_compute(COPY_IN)
        self.streams.wait(COPY_IN, buffer.out)
        access(COPY_IN, "copy to the device", reads=[source], writes=[target])
        self.moved[COPY_IN] += source.nbytes
        with self.streams.on(COPY_IN):
            target.copy_(source, non_blocking=True)
        self.streams.record(buffer.into, COPY_IN)

    def wait_target(self, buffer: StagingBuffer) -> None:
        """Make compute wait for the copy in: its target may be used."""
        self.streams.wait(COMPUTE, buffer.into)

    # -- files -------------------------------------------------------------------------------------------------------

    def start_io(
        self, buffer: StagingBuffer, what: str, job: Callable[[], None], *, reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
    ) -> None:
        """Run ``job``, which reads or writes the buffer, in a thread; nothing orders it with other jobs.

        Args:
            reads, writes: what it touches: views of the buffer, and of the file.
        """
        if self._threads is None:
            self._threads = ThreadPoolExecutor(max(2, self.count), thread_name_prefix="staging")
        self._jobs += 1
        stream = f"file job {self._jobs}"
        access(stream, what, reads=reads, writes=writes)
        buffer.io_ended.record(stream)  # nothing of the device: the future is what the host waits for
        buffer.io = self._threads.submit(job)

    def wait_io(self, buffer: StagingBuffer) -> None:
        """Wait until the buffer's job has ended. Raises what the job raised."""
        if buffer.io is not None:
            job, buffer.io = buffer.io, None
            job.result()
            buffer.io_ended.wait(HOST)

    def drain(self) -> None:
        """Wait for the jobs of all buffers that are not lent out."""
        for buffer in self._free:
            self.wait_io(buffer)

    # -- whole tensors -----------------------------------------------------------------------------------------------

    def stage_out(self, tensor: torch.Tensor) -> StagedTensor:
        """Start to copy a tensor to the host and return where it is; see :class:`StagedTensor`.

        Raises:
            RuntimeError: no buffer is free.
            ValueError: the tensor is larger than a buffer, or not contiguous.
        """
        if not tensor.is_contiguous():
            raise ValueError(f"a staged tensor is contiguous; this one has strides {tensor.stride()}")
        if tensor.nbytes > self.nbytes:
            raise ValueError(f"a tensor of {tensor.nbytes} bytes for staging buffers of {self.nbytes}")
        buffer = self.acquire()
        host = buffer.view(tensor.dtype, tensor.numel()).view(tensor.shape)
        self.copy_out(tensor.detach(), host, buffer)
        return StagedTensor(self, buffer, host)

    def stage_in(self, staged: StagedTensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Start to copy a staged tensor back, into ``out`` or new memory, and give its buffer up.

        The result is valid for compute once :meth:`StagedTensor.wait` has been called.
        """
        target = torch.empty_like(staged.host, device=self.device, pin_memory=False) if out is None else out
        self.copy_in(staged.host, target, staged.buffer)
        self.release(staged.buffer)
        return target


class StagedTensor:
    """A tensor in a staging buffer, which it holds from :meth:`StagingRing.stage_out` to ``stage_in``."""

    def __init__(self, ring: StagingRing, buffer: StagingBuffer, host: torch.Tensor) -> None:
        self.ring, self.buffer, self.host = ring, buffer, host

    def let_go(self) -> None:
        """Make compute wait for the copy out and forget the source, whose memory may then have another use."""
        self.ring.wait_source(self.buffer)

    def wait(self) -> None:
        """Make compute wait for the copy back, after ``stage_in`` and before the tensor is used."""
        self.ring.wait_target(self.buffer)


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
