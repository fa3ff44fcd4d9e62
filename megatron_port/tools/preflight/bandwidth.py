"""Bandwidths as nccl-tests and rccl-tests define them (nccl-tests, doc/PERFORMANCE.md).

``algbw = S / t``; ``busbw = algbw * f``, the rate at which each link of a ring would have to run, so
that numbers of different world sizes compare with each other and with the hardware:

- all-reduce: f = 2 (n - 1) / n, S = bytes of the tensor that every rank holds
- all-gather: f = (n - 1) / n,   S = bytes of the *gathered* tensor, n times what one rank gives
- point-to-point: f = 1

GB are 10^9 bytes. t is the time of the slowest rank; the tests' own default is the ranks' mean.
"""

from __future__ import annotations

ALL_REDUCE, ALL_GATHER, POINT_TO_POINT = "all_reduce", "all_gather", "point_to_point"


def algbw_gb(size: int, seconds: float) -> float:
    """Return GB/s; ``size`` in bytes."""
    return size / seconds / 1e9


def bus_factor(operation: str, ranks: int) -> float:
    """Return busbw / algbw; 0 for a collective of one rank, which moves nothing."""
    if operation == POINT_TO_POINT:
        return 1.0
    factors = {ALL_REDUCE: 2.0, ALL_GATHER: 1.0}
    return factors[operation] * (ranks - 1) / ranks


def busbw_gb(operation: str, size: int, seconds: float, ranks: int) -> float:
    """Return the bus bandwidth, GB/s."""
    return algbw_gb(size, seconds) * bus_factor(operation, ranks)
