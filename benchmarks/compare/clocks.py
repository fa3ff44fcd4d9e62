"""Power, clocks and throttle reasons of a GPU, 50 times a second, beside what is timed meanwhile.

A rate at the power limit cannot be read without them: an H200 multiplies 790 TFLOP/s for a tenth of a second and 680
after it. The source is the driver's library by ``pynvml`` (package nvidia-ml-py), else the program ``nvidia-smi``;
where neither answers, every figure says why. Watts by ``pynvml`` are the driver's average over a second, by
``nvidia-smi`` those of the moment where the driver knows them.
"""

from __future__ import annotations

import importlib
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

PERIOD_S = 0.02
REASONS = {0x1: "idle", 0x2: "application clocks", 0x4: "power cap", 0x8: "hardware slowdown", 0x10: "sync boost",
           0x20: "heat (software)", 0x40: "heat (hardware)", 0x80: "power brake", 0x100: "display"}
"""Bits of NVML's nvmlClocksEventReasons: what keeps the clocks below their most."""
KINDS = ("GH200", "H200", "H100")
"""Words of a device's name that the session on a GPU knows."""
QUERIES = (("power.draw.instant", "clocks.sm", "clocks.mem", "clocks_event_reasons.active"),
           ("power.draw", "clocks.sm", "clocks.mem", "clocks_throttle_reasons.active"))
"""Names of the same fields, of newer drivers and of older ones; one that it does not know is an error of nvidia-smi."""
LIMITS = ("power.limit", "clocks.max.sm", "clocks.max.mem", "driver_version", "ecc.mode.current")


@dataclass(frozen=True)
class Sample:
    """One look at the device. ``at``: seconds of time.monotonic; ``reasons``: bits of :data:`REASONS`."""

    at: float
    watts: float
    sm_mhz: float
    memory_mhz: float
    reasons: int


class Source(Protocol):
    """Where samples come from."""

    def samples(self, stopped: threading.Event) -> Iterator[Sample]:
        """Yield samples until ``stopped`` is set."""

    def limits(self) -> dict[str, Any]:
        """Return the power limit, the most of both clocks, and the driver's version."""


class Unavailable(Exception):
    """No source answers; the message says why."""


class Nvml:
    """The driver's library, by ``pynvml``. Raises Unavailable."""

    def __init__(self) -> None:
        try:
            self.nvml: Any = importlib.import_module("pynvml")
            self.nvml.nvmlInit()
            self.handle = self._handle()
            self.read()
        except Exception as error:  # not installed, no driver, no permission: each its own class
            raise Unavailable(f"pynvml: {type(error).__name__}: {error}"[:200]) from error

    def _handle(self) -> Any:
        uuid = str(getattr(torch.cuda.get_device_properties(0), "uuid", ""))
        try:
            return self.nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())
        except Exception:  # MIG and some virtual machines hide it
            return self.nvml.nvmlDeviceGetHandleByIndex(0)

    def read(self) -> Sample:
        """Return a sample."""
        n, at = self.nvml, time.monotonic()
        return Sample(at, n.nvmlDeviceGetPowerUsage(self.handle) / 1e3,
                      float(n.nvmlDeviceGetClockInfo(self.handle, n.NVML_CLOCK_SM)),
                      float(n.nvmlDeviceGetClockInfo(self.handle, n.NVML_CLOCK_MEM)),
                      int(n.nvmlDeviceGetCurrentClocksThrottleReasons(self.handle)))

    def samples(self, stopped: threading.Event) -> Iterator[Sample]:
        """See :class:`Source`."""
        while not stopped.wait(PERIOD_S):
            yield self.read()

    def limits(self) -> dict[str, Any]:
        """See :class:`Source`."""
        n = self.nvml
        version = n.nvmlSystemGetDriverVersion()
        return {"power_limit_w": n.nvmlDeviceGetEnforcedPowerLimit(self.handle) / 1e3,
                "most_sm_mhz": n.nvmlDeviceGetMaxClockInfo(self.handle, n.NVML_CLOCK_SM),
                "most_memory_mhz": n.nvmlDeviceGetMaxClockInfo(self.handle, n.NVML_CLOCK_MEM),
                "driver": version.decode() if isinstance(version, bytes) else str(version), "source": "pynvml"}


class Smi:
    """The program ``nvidia-smi``. Raises Unavailable."""

    def __init__(self) -> None:
        try:
            self.told = self._ask(LIMITS)
        except (OSError, subprocess.SubprocessError) as error:
            raise Unavailable(f"nvidia-smi: {type(error).__name__}: {error}"[:200]) from error
        self.query = next((fields for fields in QUERIES if self._gives_numbers(fields)), ())
        if not self.query:
            raise Unavailable("nvidia-smi: gives no number for power, clocks and their limits")

    def _gives_numbers(self, fields: Sequence[str]) -> bool:
        try:
            return parse(",".join(self._ask(fields)), 0.0) is not None
        except (OSError, subprocess.SubprocessError):
            return False

    @staticmethod
    def _command(fields: Sequence[str]) -> list[str]:
        return ["nvidia-smi", "-i", "0", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]

    def _ask(self, fields: Sequence[str]) -> list[str]:
        done = subprocess.run(self._command(fields), capture_output=True, text=True, check=True, timeout=10)
        return [word.strip() for word in done.stdout.splitlines()[0].split(",")]

    def samples(self, stopped: threading.Event) -> Iterator[Sample]:
        """See :class:`Source`."""
        command = [*self._command(self.query), "-lms", f"{PERIOD_S * 1e3:.0f}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if stopped.is_set():
                    break
                sample = parse(line, time.monotonic())
                if sample is not None:
                    yield sample
            process.kill()

    def limits(self) -> dict[str, Any]:
        """See :class:`Source`."""
        power, sm, memory, driver, ecc = self.told
        numbers = {"power_limit_w": power, "most_sm_mhz": sm, "most_memory_mhz": memory}
        known = {key: float(value) for key, value in numbers.items() if value.replace(".", "").isdigit()}
        return {**known, "driver": driver, "ecc": ecc, "source": "nvidia-smi"}


def parse(line: str, at: float) -> Sample | None:
    """Return the sample in a line of nvidia-smi's answer to one of :data:`QUERIES`; None: it holds no number."""
    words = [word.strip() for word in line.split(",")]
    try:
        return Sample(at, float(words[0]), float(words[1]), float(words[2]), int(words[3], 16))
    except (ValueError, IndexError):
        return None


def summarise(samples: Sequence[Sample], begin: float, end: float) -> dict[str, Any]:
    """Return medians, least and most within [begin, end] of time.monotonic, and for each throttle reason the share of
    samples that had it."""
    found = [s for s in samples if begin <= s.at <= end]
    if not found:
        return {"missing": "the window holds no sample"}
    made: dict[str, Any] = {"samples": len(found)}
    for key in ("watts", "sm_mhz", "memory_mhz"):
        values = [getattr(s, key) for s in found]
        made[key] = {"median": statistics.median(values), "least": min(values), "most": max(values)}
    made["throttled"] = {name: count / len(found) for bit, name in REASONS.items()
                         if (count := sum(bool(s.reasons & bit) for s in found))}
    return made


class ClockLog:
    """Samples taken by a thread from ``__enter__`` to ``__exit__``. ``missing``: why there are none."""

    def __init__(self, source: Source | None, missing: str = "") -> None:
        self.source, self.missing = source, missing
        self.taken: list[Sample] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._take, daemon=True)

    def __enter__(self) -> ClockLog:
        if self.source is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        if self.source is not None:
            self._thread.join(2.0)

    def _take(self) -> None:
        assert self.source is not None
        try:
            for sample in self.source.samples(self._stopped):
                self.taken.append(sample)
        except Exception as error:  # a driver that stops answering must not stop what is timed
            self.missing = f"{type(error).__name__}: {error}"[:200]

    def between(self, begin: float, end: float) -> dict[str, Any]:
        """See :func:`summarise`; ``missing`` in place of numbers where there are none."""
        if self.source is None or (self.missing and not self.taken):
            return {"missing": self.missing}
        return summarise(self.taken, begin, end)

    def timed(self, function: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
        """Call a function; return its result and the clocks meanwhile."""
        begin = time.monotonic()
        result = function()
        return result, self.between(begin, time.monotonic())


def source_of(device: str) -> tuple[Source | None, str]:
    """Return the first source that answers, or why there is none."""
    if device != "cuda":
        return None, "a CPU"
    if torch.version.hip:
        return None, "NVML knows NVIDIA's devices only"
    reasons = []
    for kind in (Nvml, Smi):
        try:
            return kind(), ""
        except Unavailable as error:
            reasons.append(str(error))
    return None, "; ".join(reasons)


def clock_log(device: str) -> ClockLog:
    """Return the log of ``cuda`` or ``cpu``, not yet started."""
    return ClockLog(*source_of(device))


def kind_of(name: str) -> str:
    """Return H100, H200 or GH200; other devices by their own name."""
    return next((kind for kind in KINDS if kind in name), name)


def card(device: str) -> dict[str, Any]:
    """Return what a figure was measured on: the device's name, kind and bytes, its power limit and most clocks."""
    if device != "cuda":
        return {"name": "cpu", "kind": "cpu"}
    properties = torch.cuda.get_device_properties(0)
    found = {"name": properties.name, "kind": kind_of(properties.name), "memory": properties.total_memory}
    source, missing = source_of(device)
    return found | (source.limits() if source is not None else {"clocks_missing": missing})
