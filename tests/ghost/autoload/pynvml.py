"""The driver's library on the ghost machine: a card at its power limit, whose clock falls after a while."""

from __future__ import annotations

import time
from typing import Any

NVML_CLOCK_SM, NVML_CLOCK_MEM = 1, 2
_BEGAN = time.monotonic()


def nvmlInit() -> None:
    """Nothing is opened."""


def nvmlDeviceGetHandleByUUID(uuid: bytes) -> int:
    """One device."""
    return 0


nvmlDeviceGetHandleByIndex = nvmlDeviceGetHandleByUUID


def nvmlSystemGetDriverVersion() -> str:
    """Of no driver."""
    return "ghost"


def nvmlDeviceGetEnforcedPowerLimit(handle: Any) -> int:
    """Milliwatts."""
    return 700_000


def nvmlDeviceGetPowerUsage(handle: Any) -> int:
    """Milliwatts."""
    return 699_000


def nvmlDeviceGetMaxClockInfo(handle: Any, kind: int) -> int:
    """MHz."""
    return 1980 if kind == NVML_CLOCK_SM else 3201


def nvmlDeviceGetClockInfo(handle: Any, kind: int) -> int:
    """MHz."""
    return 3201 if kind == NVML_CLOCK_MEM else 1980 if time.monotonic() - _BEGAN < 0.2 else 1665


def nvmlDeviceGetCurrentClocksThrottleReasons(handle: Any) -> int:
    """The power cap."""
    return 0x4
