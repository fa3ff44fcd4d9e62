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

import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

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
