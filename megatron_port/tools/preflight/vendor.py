"""What nvidia-smi, rocm-smi and amd-smi print, as numbers. Pure functions of their output; absent is None."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NVIDIA_QUERY = (
    "index", "name", "driver_version", "temperature.gpu", "clocks.sm", "clocks.max.sm", "memory.total",
)
"""Fields that every nvidia-smi of the last ten years knows."""
NVIDIA_EXTRA = (
    "clocks_throttle_reasons.active", "ecc.errors.uncorrected.volatile.total", "ecc.errors.corrected.volatile.total",
    "remapped_rows.pending", "remapped_rows.failure",
)
"""Asked for as well; an nvidia-smi that does not know one refuses all."""
ROCM_ARGUMENTS = ("--showid", "--showtemp", "--showclocks", "--showdriverversion", "--json")
HARMFUL_THROTTLING = {
    0x08: "hardware slowdown", 0x20: "software thermal slowdown", 0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
"""Bits of clocks_throttle_reasons.active (NVML's nvmlClocksThrottleReasons) that a healthy node does not show."""


@dataclass(frozen=True)
class VendorDevice:
    """One device as the vendor's tool sees it."""

    index: int
    name: str = ""
    driver: str = ""
    temperature_c: float | None = None
    """The hottest sensor."""
    clock_mhz: float | None = None
    max_clock_mhz: float | None = None
    throttling: tuple[str, ...] = ()
    """Harmful reasons only."""
    ecc_uncorrected: int | None = None
    ecc_corrected: int | None = None
    needs_reset: str = ""
    """Memory repairs that wait for a reset, or failed."""


def _number(text: object) -> float | None:
    """Return the first number in a field; None for N/A, [Not Supported] and the like."""
    found = re.search(r"-?\d+(?:\.\d+)?", str(text)) if text is not None else None
    return float(found.group()) if found else None


def _whole(text: object) -> int | None:
    value = _number(text)
    return None if value is None else int(value)


def nvidia_command(*, extra: bool = True) -> list[str]:
    """Return the query whose output :func:`parse_nvidia` reads."""
    fields = NVIDIA_QUERY + (NVIDIA_EXTRA if extra else ())
    return ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]


def parse_nvidia(text: str) -> list[VendorDevice]:
    """Parse lines of ``nvidia-smi --query-gpu=… --format=csv,noheader,nounits``; other lines are skipped."""
    devices = []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(row) < len(NVIDIA_QUERY) or not row[0].strip().isdigit():
            continue
        get = dict(zip(NVIDIA_QUERY + NVIDIA_EXTRA, (c.strip() for c in row))).get
        bits = get("clocks_throttle_reasons.active", "")
        active = int(bits, 16) if re.fullmatch(r"0x[0-9a-fA-F]+", bits) else 0
        waits = [
            word for name, word in (("pending", "a row remap waits for a reset"), ("failure", "a row remap failed"))
            if get(f"remapped_rows.{name}", "").lower() in ("yes", "1")
        ]
        devices.append(VendorDevice(
            index=int(row[0]), name=get("name", ""), driver=get("driver_version", ""),
            temperature_c=_number(get("temperature.gpu")), clock_mhz=_number(get("clocks.sm")),
            max_clock_mhz=_number(get("clocks.max.sm")),
            throttling=tuple(word for bit, word in HARMFUL_THROTTLING.items() if active & bit),
            ecc_uncorrected=_whole(get(NVIDIA_EXTRA[1])), ecc_corrected=_whole(get(NVIDIA_EXTRA[2])),
            needs_reset="; ".join(waits),
        ))
    return devices


def _json_part(text: str) -> Any:
    """Return the first JSON value in a tool's output, which may begin with warnings; None if there is none."""
    for found in re.finditer(r"[{\[]", text):
        try:
            return json.JSONDecoder().raw_decode(text, found.start())[0]
        except ValueError:
            continue
    return None


def parse_rocm(text: str) -> list[VendorDevice]:
    """Parse ``rocm-smi … --json``: an object with ``card0``, ``card1`` … and ``system``; key names vary by release."""
    value = _json_part(text)
    if not isinstance(value, Mapping):
        return []
    system = value.get("system")
    driver = str(system.get("Driver version", "")) if isinstance(system, Mapping) else ""
    devices = []
    for card, found in value.items():
        number = re.fullmatch(r"card(\d+)", str(card))
        if not number or not isinstance(found, Mapping):
            continue
        lower = {str(k).lower(): v for k, v in found.items()}
        heat = [t for k, v in lower.items() if k.startswith("temperature (sensor") and (t := _number(v)) is not None]
        name = lower.get("device name") or lower.get("card series") or lower.get("gpu id") or ""
        devices.append(VendorDevice(
            index=int(number.group(1)), name=str(name), driver=driver, temperature_c=max(heat, default=None),
            clock_mhz=next((_number(v) for k, v in lower.items() if k.startswith("sclk clock speed")), None),
        ))
    return sorted(devices, key=lambda d: d.index)


def parse_amd_ecc(text: str) -> dict[int, tuple[int | None, int | None]]:
    """Parse ``amd-smi metric --ecc --json`` into device → (uncorrected, corrected)."""
    value = _json_part(text)
    if isinstance(value, Mapping):
        value = value.get("gpu_data", [])
    out = {}
    for entry in value if isinstance(value, list) else ():
        ecc = entry.get("ecc") if isinstance(entry, Mapping) else None
        if isinstance(ecc, Mapping) and isinstance(entry.get("gpu"), int):
            bad, corrected = (_whole(ecc.get(f"total_{kind}_count")) for kind in ("uncorrectable", "correctable"))
            out[entry["gpu"]] = (bad, corrected)
    return out
