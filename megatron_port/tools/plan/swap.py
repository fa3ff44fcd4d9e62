"""Activations in host memory: the bytes of a rank's buffers, and the seconds by which the copies outlast the passes."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_port.core.pipeline.actions import most_held
from megatron_port.core.pipeline.schedules import make_schedule
from megatron_port.tools.plan.activations import away
from megatron_port.tools.plan.case import Case, Machine
from megatron_port.tools.plan.ledger import steady_count


@dataclass(frozen=True)
class HostLink:
    """Host link of a device, over which activations are copied while one micro-batch is computed."""

    rate: float
    """Bytes per second, each way."""
    forward: float
    """Seconds of the forward pass, behind which the copies out hide."""
    backward: float

    def seconds(self, nbytes: float) -> float:
        """Return the seconds of a micro-batch for which its passes wait for so many bytes to leave and come back."""
        taken = nbytes / self.rate
        return max(taken - self.forward, 0.0) + max(taken - self.backward, 0.0)


def link_of(machine: Machine, forward: float, backward: float) -> HostLink | None:
    """Return the link beside passes of so many seconds; None: its rate is not known."""
    rate = machine.hardware.host_link_gb * 1e9
    return HostLink(rate, forward, backward) if rate > 0 else None


def swapped_bytes(case: Case, start: int, stop: int) -> float:
    """Return the bytes that a chunk moves to the host in a forward pass."""
    return sum(one.swapped for one in away(case, start, stop)) if case.dropped else 0.0


def swap_host_bytes(case: Case, stage: int) -> float:
    """Return the bytes of host memory in which a rank of a stage has swapped activations."""
    sizes = [swapped_bytes(case, start, stop) for start, stop in case.of_stage(case.layer_ranges, stage)]
    if not any(sizes):
        return 0.0
    count = steady_count(case.schedule, case.pp, case.micro_batches)
    held = most_held(make_schedule(case.schedule, case.pp, count, case.vp).plans[stage])
    return sum(held[chunk] * size for chunk, size in enumerate(sizes))


def most_swapped(case: Case) -> float:
    """Return the bytes of host memory of the rank that swaps most."""
    return max(swap_host_bytes(case, stage) for stage in range(case.pp)) if case.dropped else 0.0
