"""The rate of one CPU core, told apart from the company it has.

Preflight must find a core that is slow (low clock) or held back (a CPU quota), and must not
blame one that merely shares its CPUs for a moment with others: right after srun every task of
every job step imports its libraries at once. So the product of two matrices is repeated in
windows of half a second (five periods of the kernel's CPU bandwidth control, 100 ms each), and
each window records four numbers:

- own CPU time / wall time: what this process got;
- idle time of the allowed CPUs / wall time: what it could have had besides;
- products / CPU second: the core's own speed, whoever else runs;
- time for which it was stopped: by its control group's quota (cpu.stat), or else neither running nor
  waiting for a CPU (schedstat), as a process that never sleeps is only under SIGSTOP or, from Linux 6.18
  on, a quota.

A window is *conclusive* if own + idle covers 90 % of it: whatever the process did not get then,
no other process took. Between windows that are not, the measurement waits for a random, doubling
time, so that checks which got into each other's way part. The rate is the best conclusive
window's: a quota of 25 % leaves 25 % in all of them. One that falls short says nothing yet: where a process comes and
goes, ours waits behind it for a moment while another CPU idles, which looks the same. So a rate below the core's own is
believed after four such windows, or else the node counts as never free. Stopped time counts
against the time that the process did not wait for others, stopped / (own + stopped), so that a quota
shows on a busy node too.
"""

from __future__ import annotations

import csv
import json
import os
import random
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WINDOW_S = 0.5
LIMIT_S = 12.0
CONCLUSIVE = 0.9
SHORT_WINDOWS = 4
"""Conclusive windows that must all fall short before a core is called slow."""
SIZE = 256


@dataclass(frozen=True)
class Window:
    """Stretch of uninterrupted work."""

    wall_s: float
    own_s: float
    """CPU time of this thread."""
    idle_s: float
    """Summed over the allowed CPUs, at most ``wall_s``."""
    stopped_s: float
    """Held by a quota or a signal, at most ``wall_s``."""
    products: int

    @property
    def share(self) -> float:
        """Share of the wall time spent on the CPU."""
        return min(1.0, self.own_s / self.wall_s)

    @property
    def conclusive(self) -> bool:
        """Whether nobody else took what is missing."""
        return (self.own_s + self.idle_s) / self.wall_s >= CONCLUSIVE


@dataclass(frozen=True)
class CoreRate:
    """Result of :func:`measure_core`."""

    gflops: float
    """Rate of the best conclusive window over wall time; if none was, of the best window. Not to be judged unless
    ``conclusive``."""
    cpu_gflops: float
    """The best window's rate over CPU time."""
    share: float
    """CPU time / wall time in the window that ``gflops`` is of."""
    stopped: float
    """Time for which a quota or a signal held the process / that and its CPU time."""
    conclusive: bool
    windows: int
    seconds: float


def rate_of(windows: list[Window], flop: float, seconds: float) -> CoreRate:
    """Judge some windows, each product costing ``flop``."""
    sure = [w for w in windows if w.conclusive]
    best = max(sure or windows, key=lambda w: w.products / w.wall_s)
    certain = any(w.share >= CONCLUSIVE for w in sure) or len(sure) >= SHORT_WINDOWS
    return CoreRate(
        gflops=best.products * flop / best.wall_s / 1e9,
        cpu_gflops=max(w.products * flop / max(w.own_s, 1e-9) for w in windows) / 1e9,
        share=best.share,
        stopped=sum(w.stopped_s for w in windows) / max(sum(w.own_s + w.stopped_s for w in windows), 1e-9),
        conclusive=certain, windows=len(windows), seconds=seconds,
    )


def enough(windows: list[Window]) -> bool:
    """Return whether there are two clear windows, or four conclusive ones that all fell short."""
    sure = [w for w in windows if w.conclusive]
    return sum(w.share >= CONCLUSIVE for w in sure) >= 2 or len(sure) >= SHORT_WINDOWS


def allowed_cpus() -> list[int]:
    """CPUs that this process may run on; empty where the system does not say."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def idle_seconds(cpus: list[int]) -> float | None:
    """Idle time so far, summed over ``cpus``; None where the system does not say (then all windows are conclusive)."""
    import psutil

    try:
        times = psutil.cpu_times(percpu=True)
        found: float | None = sum(times[c].idle + getattr(times[c], "iowait", 0.0) for c in cpus)
        return found
    except (OSError, IndexError, RuntimeError):
        return None


def quota_files(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> list[Path]:
    """cpu.stat of this process' control group and of those around it (versions 1 and 2)."""
    try:
        lines = [line.split(":", 2) for line in proc.read_text().splitlines()]
    except OSError:
        return []
    files = []
    for line in lines:
        if len(line) != 3 or (line[1] and "cpu" not in line[1].split(",")):
            continue
        bases = [root] if not line[1] else [root / line[1], root / "cpu"]
        inner = Path(line[2].lstrip("/"))
        if ".." in inner.parts:  # outside of this control-group namespace
            inner = Path()
        for base in bases:
            files += [f for p in (inner, *inner.parents) if (f := base / p / "cpu.stat").is_file()]
    return list(dict.fromkeys(files))


def quota_cpus(files: list[Path]) -> float | None:
    """CPUs that the strictest quota around this process allows; None without a quota.

    Args:
        files: of :func:`quota_files`; the limits are beside them (cpu.max, or cpu.cfs_quota_us and _period_us).
    """
    found = []
    for folder in (f.parent for f in files):
        try:
            if (folder / "cpu.max").is_file():
                words = (folder / "cpu.max").read_text().split()
            else:
                words = [(folder / f"cpu.cfs_{n}_us").read_text().strip() for n in ("quota", "period")]
            if words[0] not in ("max", "-1"):
                found.append(int(words[0]) / int(words[1]))
        except (OSError, ValueError, IndexError):
            continue
    return min(found, default=None)


def usable_cpus() -> float:
    """CPUs that this process may use: its affinity, or less by a quota."""
    allowed = float(len(allowed_cpus()) or os.cpu_count() or 1)
    quota = quota_cpus(quota_files())
    return allowed if quota is None else min(allowed, quota)


def stopped_seconds(files: list[Path]) -> float:
    """Time for which quotas have held the group so far: the largest over the nested groups."""
    worst = 0.0
    for file in files:
        try:
            pairs = dict(line.split() for line in file.read_text().splitlines() if len(line.split()) == 2)
        except OSError:
            continue
        worst = max(worst, int(pairs.get("throttled_usec", 0)) / 1e6, int(pairs.get("throttled_time", 0)) / 1e9)
    return worst


def accounted_seconds(file: Path = Path("/proc/thread-self/schedstat")) -> float | None:
    """Time so far that this thread ran or waited for a CPU; None where the system does not say."""
    try:
        ran, waited, _ = file.read_text().split()
        return (int(ran) + int(waited)) / 1e9 or None
    except (OSError, ValueError):
        return None


def measure_core(multiply: Callable[[], object], flop: float) -> CoreRate:
    """Repeat ``multiply`` (single-threaded, about a millisecond, ``flop`` operations) until the rate is sure.

    Takes 1 s on a node that is free, and up to ``LIMIT_S`` on one that is busy.
    """
    cpus, files, wait = allowed_cpus(), quota_files(), random.Random()
    begin = time.perf_counter()
    while time.perf_counter() - begin < 0.1:
        multiply()
    windows: list[Window] = []
    pause = 0.1
    while True:
        windows.append(_window(multiply, cpus, files))
        seconds = time.perf_counter() - begin
        if enough(windows) or seconds >= LIMIT_S:
            return rate_of(windows, flop, seconds)
        if not windows[-1].conclusive:
            time.sleep(wait.uniform(0.0, pause))
            pause = min(2 * pause, 2.0)


def _window(multiply: Callable[[], object], cpus: list[int], files: list[Path]) -> Window:
    idle, stopped, accounted = idle_seconds(cpus), stopped_seconds(files), accounted_seconds()
    wall, own, products = time.perf_counter(), time.thread_time(), 0
    while time.perf_counter() - wall < WINDOW_S:
        multiply()
        products += 1
    seconds, own = time.perf_counter() - wall, time.thread_time() - own
    now_idle, now_accounted = idle_seconds(cpus), accounted_seconds()
    free = seconds if idle is None or now_idle is None else min(max(now_idle - idle, 0.0), seconds)
    held = stopped_seconds(files) - stopped
    if accounted is not None and now_accounted is not None:
        held = max(held, seconds - (now_accounted - accounted))
    return Window(seconds, own, free, min(max(held, 0.0), seconds), products)


# What nvidia-smi, rocm-smi and amd-smi print, as numbers. Pure functions of their output; absent is None.

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


# Which network NCCL or RCCL really loaded, read from its debug output (NCCL_DEBUG=INFO, subsystems INIT and NET).

OFI_NAMES = ("aws libfabric", "libfabric", "ofi")
"""Names under which releases of the OFI plug-in (aws-ofi-nccl, aws-ofi-rccl) announce themselves."""
SLOW_PROVIDERS = ("tcp", "sockets", "udp", "net")
"""libfabric providers over the kernel's sockets."""


@dataclass(frozen=True)
class LoadedNetwork:
    """Network that one rank's log shows as loaded; empty where the log is silent."""

    network: str = ""
    """"AWS Libfabric", "Libfabric", "IB", "Socket" …"""
    plugin: str = ""
    """Plug-in library that was loaded, with its interface version."""
    provider: str = ""
    """libfabric's: cxi, efa, tcp …"""
    interfaces: tuple[str, ...] = ()
    """Interfaces used by IB or Socket."""
    devices: int | None = None
    """Network devices that the OFI plug-in found."""
    bootstrap: str = ""
    """Interface of the first contact, which is TCP always."""
    gpu_direct: bool | None = None
    """Whether a channel between nodes reads GPU memory directly; None: the log shows no such channel."""
    version: str = ""
    fault: str = ""
    """Why a plug-in that was asked for was not used."""


_NETWORK = re.compile(r"(?:NCCL INFO )Using network (.+?)\s*$")
_ASSIGNED = re.compile(r"Assigned NET plugin (.+?) to comm")
_LOADED = re.compile(r"NET/Plugin ?: Loaded net plugin (.+?) \((v\d+)\)")
_OFI = re.compile(r"NET/OFI (?:Using|Initializing) (aws-ofi-\S+(?: [\w.-]+)?)")
_PROVIDER = re.compile(r"NET/OFI Selected [Pp]rovider is ([^\s,(]+)")
_DEVICES = re.compile(r"\(found (\d+) nics?\)")
_USING = re.compile(r"NET/(IB|Socket) ?: Using (.+)$")
_INTERFACE = re.compile(r"\[\d+\]\s?([^:\s]+):")
_BOOTSTRAP = re.compile(r"Bootstrap ?: Using (?:\[\d+\])?([^:\s]+):")
_CHANNEL = re.compile(r"via NET/[^/]+/\d+(?:\(\d+\))?(/GDRDMA)?")
_VERSION = re.compile(r"\b([NR]CCL version) ?:? ?(\d[\w.+-]*)")
_FAULTS = (
    re.compile(r"NET/Plugin ?: (?:Could not find:? ?|No plugin found \()([^\s)]+)"),
    re.compile(r"NCCL WARN .*?network (.+?) not found"),
    re.compile(r"NET/OFI (.*(?:[Nn]o eligible providers|could not find any|initialization failed).*)$"),
)


def parse_log(lines: Iterable[str]) -> LoadedNetwork:
    """Parse the debug output of one process. Lines of other programs are skipped."""
    found: dict[str, Any] = {}
    interfaces: dict[str, tuple[str, ...]] = {}
    faults: list[str] = []
    for line in lines:
        line = line.rstrip()
        if m := _NETWORK.search(line) or _ASSIGNED.search(line):
            found["network"] = m.group(1)
        elif m := _LOADED.search(line):
            found["plugin"] = f"{m.group(1)} {m.group(2)}"
        elif m := _OFI.search(line):
            found.setdefault("plugin", m.group(1))
        elif m := _PROVIDER.search(line):
            found["provider"] = m.group(1)
            if d := _DEVICES.search(line):
                found["devices"] = int(d.group(1))
        elif m := _USING.search(line):
            listed = m.group(2).split(";")[0]
            interfaces[m.group(1)] = tuple(dict.fromkeys(_INTERFACE.findall(listed)))
        elif m := _BOOTSTRAP.search(line):
            found["bootstrap"] = m.group(1)
        elif m := _CHANNEL.search(line):
            found["gpu_direct"] = bool(m.group(1)) and found.get("gpu_direct", True)
        elif m := _VERSION.search(line):
            found["version"] = f"{m.group(1).split()[0]} {m.group(2)}"
        else:
            faults += [f"{m.group(1)} not found" if i < 2 else m.group(1)
                       for i, p in enumerate(_FAULTS) if (m := p.search(line))]
    if found.get("network") in interfaces:
        found["interfaces"] = interfaces[found["network"]]
    if faults and "plugin" not in found:
        found["fault"] = faults[-1]
    return LoadedNetwork(**found)


def same_network(a: str, b: str) -> bool:
    """Return whether two names mean one network; the OFI plug-in has had several."""
    a, b = a.strip().lower(), b.strip().lower()
    return a == b or (a in OFI_NAMES and b in OFI_NAMES)


def plugin_problem(loaded: LoadedNetwork, wanted: str) -> tuple[str, str] | None:
    """Return what is wrong with the loaded network, and what to do; None: nothing.

    Args:
        wanted: ``preflight.network_plugin``; empty: any.
    """
    ofi = wanted.strip().lower() in OFI_NAMES
    if loaded.network and ofi and same_network(loaded.network, wanted) and loaded.provider in SLOW_PROVIDERS:
        return (f"the OFI plug-in runs over libfabric's provider \"{loaded.provider}\", which is the kernel's sockets",
                "unset FI_PROVIDER, or set it to the machine's own (cxi on Slingshot, efa on AWS)")
    if not wanted or same_network(loaded.network, wanted):
        return None
    if not loaded.network:
        return (f"the debug output does not say which network was loaded ({wanted} was asked for)",
                "look into the nccl-rank*.log files beside network.json")
    over = f" over {', '.join(loaded.interfaces)}" if loaded.interfaces else ""
    why = f" ({loaded.fault})" if loaded.fault else ""
    text = f"NCCL/RCCL runs on {loaded.network}{over}, not on {wanted}{why}"
    if ofi:
        return text, (
            "load the OFI plug-in ahead of srun (Frontier: module load rccl-net-plugin; else put the folder of "
            "libnccl-net-ofi.so or librccl-net.so into LD_LIBRARY_PATH), name it in NCCL_NET_PLUGIN if it has "
            "another name, and do not set NCCL_NET=Socket"
        )
    return text, f"set NCCL_NET=\"{wanted}\"; if that fails to start, its library is not in LD_LIBRARY_PATH"


# Bandwidths as nccl-tests and rccl-tests define them (nccl-tests, doc/PERFORMANCE.md).
#
# ``algbw = S / t``; ``busbw = algbw * f``, the rate at which each link of a ring would have to run, so
# that numbers of different world sizes compare with each other and with the hardware:
#
# - all-reduce: f = 2 (n - 1) / n, S = bytes of the tensor that every rank holds
# - all-gather: f = (n - 1) / n,   S = bytes of the *gathered* tensor, n times what one rank gives
# - point-to-point: f = 1
#
# GB are 10^9 bytes. t is the time of the slowest rank; the tests' own default is the ranks' mean.

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
