"""The staging ring, and the checker of its edges: every wait is there for a race that the checker finds without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from stream_order import OrderChecker, StreamRace

from megatron_port.core.dist.device_streams import COMPUTE, HOST, Event, access, observed_by
from megatron_port.ext.memory.streams import COPY_IN, COPY_OUT, Streams
from megatron_port.ext.memory.swap import ALIGN, StagingRing, SwapSpace

CPU = torch.device("cpu")


class Forgetful(Streams):
    """Streams on which one stream never waits for events of another."""

    def __init__(self, waiting: str, recorded: str) -> None:
        self.dropped = waiting, recorded
        self.of: dict[int, str] = {}
        self.times = 0

    def record(self, event: Event, stream: str) -> None:
        self.of[id(event)] = stream
        super().record(event, stream)

    def wait(self, stream: str, event: Event) -> None:
        if (stream, self.of.get(id(event))) == self.dropped:
            self.times += 1
        else:
            super().wait(stream, event)


def update_pass(ring: StagingRing) -> torch.Tensor:
    """What offloaded updates do: gradients leave, the host computes, weights return; the device goes on using both."""
    gradients, weights = torch.arange(12.0).view(3, 4), torch.zeros(3, 4)
    for _ in range(2):
        access(COMPUTE, "backward pass", reads=[weights], writes=[gradients])
        for i in range(3):
            buffer = ring.acquire()
            host, updated = buffer.view(torch.float32, 4), buffer.view(torch.float32, 4, offset=ALIGN)
            ring.copy_out(gradients[i], host, buffer)
            ring.wait_host(buffer)
            access(HOST, "update", reads=[host], writes=[updated])
            torch.add(host, 1.0, out=updated)
            ring.copy_in(updated, weights[i], buffer)
            ring.wait_target(buffer)
            ring.release(buffer)
        access(COMPUTE, "forward pass", reads=[weights])
        gradients.add_(weights)
    return weights


def swap_pass(ring: StagingRing) -> list[torch.Tensor]:
    """What swapped activations do: each leaves, its memory is used again, and it comes back."""
    memory, out = torch.zeros(4), []
    held = []
    for i in range(2):
        access(COMPUTE, "layer", writes=[memory])
        memory.fill_(i)
        staged = ring.stage_out(memory)
        staged.let_go()
        held.append(staged)
    for staged in reversed(held):
        back = ring.stage_in(staged)
        staged.wait()
        access(COMPUTE, "backward pass", reads=[back])
        out.append(back)
    return out


def refill_pass(ring: StagingRing) -> None:
    """A tensor returns into memory that the device has just read."""
    memory = torch.zeros(4)
    staged = ring.stage_out(torch.ones(4))
    access(COMPUTE, "the memory's last use", reads=[memory])
    ring.stage_in(staged, memory)


def upload_pass(ring: StagingRing) -> torch.Tensor:
    """The host fills one buffer after another, and each goes to the device."""
    weights = torch.zeros(3)
    for i in range(3):
        buffer = ring.acquire()
        host = buffer.view(torch.float32, 1)
        access(HOST, "the host's next values", writes=[host])
        host.fill_(i)
        ring.copy_in(host, weights[i : i + 1], buffer)
        ring.release(buffer)
    return weights


@contextmanager
def checked() -> Iterator[OrderChecker]:
    checker = OrderChecker()
    with observed_by(checker):
        yield checker


def test_real_passes_have_no_race() -> None:
    with checked() as checker:
        weights = update_pass(StagingRing(CPU, count=2, nbytes=2 * ALIGN))
        swapped = swap_pass(StagingRing(CPU, count=2, nbytes=ALIGN))
        refill_pass(StagingRing(CPU, count=1, nbytes=ALIGN))
        assert upload_pass(StagingRing(CPU, count=1, nbytes=ALIGN)).tolist() == [0.0, 1.0, 2.0]
    assert torch.equal(weights, 2 * torch.arange(12.0).view(3, 4) + 2)
    assert [t.tolist() for t in swapped] == [[1.0] * 4, [0.0] * 4]
    assert set(checker.counted) == {COMPUTE, COPY_OUT, COPY_IN, HOST}


PLANTED: dict[str, tuple[str, str, Callable[[StagingRing], object], str]] = {
    "the copy out does not wait for the gradients":
        (COPY_OUT, COMPUTE, update_pass, "copy to the host .* after backward pass"),
    "the host does not wait for the copy out": (HOST, COPY_OUT, update_pass, "update .* after copy to the host"),
    "compute does not wait for the copy out": (COMPUTE, COPY_OUT, swap_pass, "layer .* after copy to the host"),
    "the copy in does not wait for the kernels":
        (COPY_IN, COMPUTE, refill_pass, "copy to the device .* after the memory's last use"),
    "the copy in does not wait for the copy out":
        (COPY_IN, COPY_OUT, refill_pass, "copy to the device .* after copy to the host"),
    "compute does not wait for the copy in": (COMPUTE, COPY_IN, update_pass, "pass .* after copy to the device"),
    "a buffer is used again before its copy in has ended":
        (HOST, COPY_IN, upload_pass, "the host's next values .* after copy to the device"),
}
"""Who does not wait for whom, in which pass, and the race that is to be found."""


@pytest.mark.parametrize("name", PLANTED)
def test_every_missing_edge_is_found(name: str) -> None:
    waiting, recorded, run, message = PLANTED[name]
    streams = Forgetful(waiting, recorded)
    ring = StagingRing(CPU, count=2 if run is swap_pass else 1, nbytes=2 * ALIGN, streams=streams)
    with checked(), pytest.raises(StreamRace, match=message):
        run(ring)
    assert streams.times


def swapped_layers(streams: Streams) -> list[list[float]]:
    """Two micro-batches one after the other through three layers that swap, each forward and backward."""
    space, out = SwapSpace(CPU, streams), []
    for micro_batch in range(2):
        space.begin_pass()
        held = []
        for layer in range(3):
            flat = torch.full((100,), 10 * micro_batch + layer, dtype=torch.uint8)
            held.append(space.swap(layer, [flat, flat + 100]))
        space.let_go()
        for one in reversed(held):
            out += [one.take(number)[:2].tolist() for number in (1, 0)]
    return out


def test_swapped_layers_come_back_and_do_not_race() -> None:
    with checked() as checker:
        found = swapped_layers(Streams())
    assert found == [[10 * m + layer + more] * 2 for m in range(2) for layer in (2, 1, 0) for more in (100, 0)]
    assert set(checker.counted) == {COMPUTE, COPY_OUT, COPY_IN}


@pytest.mark.parametrize(
    ("waiting", "recorded", "message"),
    [
        (COPY_OUT, COMPUTE, "copy to the host .* after a layer's forward pass"),
        (COMPUTE, COPY_OUT, "the memory's next use .* after copy to the host"),
        (COMPUTE, COPY_IN, "a layer's backward pass .* after copy to the device"),
    ],
)
def test_every_missing_edge_of_swapped_layers_is_found(waiting: str, recorded: str, message: str) -> None:
    streams = Forgetful(waiting, recorded)
    with checked(), pytest.raises(StreamRace, match=message):
        swapped_layers(streams)
    assert streams.times


def test_a_full_ring_and_a_large_tensor_are_refused() -> None:
    ring = StagingRing(CPU, count=1, nbytes=64)
    with pytest.raises(ValueError, match="a tensor of 80 bytes for staging buffers of 64"):
        ring.stage_out(torch.zeros(20))
    staged = ring.stage_out(torch.zeros(16))
    assert ring.free == 0
    with pytest.raises(RuntimeError, match="all 1 staging buffers of 64 bytes are in use"):
        ring.acquire()
    ring.stage_in(staged)
    assert ring.free == 1


def test_buffers_are_aligned_and_kept() -> None:
    ring = StagingRing(CPU, count=2, nbytes=ALIGN)
    first = [ring.acquire(), ring.acquire()]
    assert all(b.memory.data_ptr() % ALIGN == 0 for b in first)
    for buffer in first:
        ring.release(buffer)
    assert [ring.acquire(), ring.acquire()] == first


def test_accesses_that_do_not_meet_are_no_race() -> None:
    memory = torch.zeros(8)
    with checked() as checker:
        checker.access(COPY_IN, "first half", [], [memory[:4]])
        checker.access(COPY_OUT, "second half", [], [memory[4:]])
        checker.access(COMPUTE, "a reader of the other half", [memory[4:][:0]], [])
        with pytest.raises(StreamRace, match=r"nothing orders a reader \(stream compute, reads\) after first half"):
            checker.access(COMPUTE, "a reader", [memory[3:5]], [])


def test_a_batch_that_grows_has_more_in_flight() -> None:
    """Batch ramp-up: a stage that held one micro-batch at a time then holds three."""
    space, flat = SwapSpace(CPU), torch.zeros(4, dtype=torch.uint8)
    for waiting in (1, 3, 1):
        space.in_flight[0] = waiting
        held = [space.swap(0, [flat + number]) for number in range(waiting)]
        assert [swapped.take(0).tolist()[0] for swapped in reversed(held)] == list(reversed(range(waiting)))
    assert space.host_bytes == 3 * 64  # no buffer was made twice
