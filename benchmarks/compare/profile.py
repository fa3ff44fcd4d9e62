"""Where a step's time goes, and how far each group of operations is from what it must take.

    python -m benchmarks.compare.profile --size quickstart
    python -m benchmarks.compare.profile --size gpt2-xl --peer torch-compile --out profile.json
    python -m benchmarks.compare.profile --size experts-8 experts-64      # a layer of experts: how often the host waits

Prints time by group beside the two limits by count (``limits``: FLOPs over the product rate, bytes over the copy rate,
both measured in this run), then the kernels that make up the slowest third of the step, and where a step brings a
value to the host (``waits``). On a GPU also the launch gaps: the share of a step in which no kernel ran, by the
kernels' times and the step's time without the profiler, which slows the host; and where CUDA was made to wait.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.compare.clocks import ClockLog, clock_log
from benchmarks.compare.limits import group_of, limits
from benchmarks.compare.peer import PEERS, Unable, build
from benchmarks.compare.results import hardware, write
from benchmarks.compare.sizes import Size, sizes
from benchmarks.compare.waits import device_syncs, host_reads
from benchmarks.compare.weights import batch
from benchmarks.compare.worker import rates, settled

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "hipStreamSynchronize",
         "hipDeviceSynchronize", "hipEventSynchronize")
"""Calls with which the host waits for the device."""


@dataclass(frozen=True)
class Kernel:
    """An operation (CPU) or a kernel (GPU); seconds and calls of one step."""

    name: str
    group: str
    seconds: float
    calls: float


@dataclass(frozen=True)
class Gaps:
    """Of the device, over whole steps."""

    profiled_gaps: float
    """Share of the time between the first and the last kernel in which none ran, under the profiler."""
    waits: dict[str, float]
    """Calls with which the host waited, a step; the end of the step counts as one."""
    busy: float = 0.0
    """Seconds of a step in which a kernel ran."""
    launch_gaps: float = 0.0
    """Share of a step without the profiler in which no kernel ran."""


def kernels_of(prof: profile, steps: int, cuda: bool) -> list[Kernel]:
    """By name, longest first, each step's own time only."""
    found = []
    for event in prof.key_averages():
        on_device = str(getattr(event, "device_type", "")).endswith("CUDA")
        if on_device is not cuda:
            continue
        us = event.self_device_time_total if cuda else event.self_cpu_time_total
        if us > 0 and not event.key.startswith("ProfilerStep"):
            found.append(Kernel(event.key, group_of(event.key), us / 1e6 / steps, event.count / steps))
    return sorted(found, key=lambda k: -k.seconds)


def gaps_of(intervals: Sequence[tuple[float, float]], waits: dict[str, float]) -> Gaps:
    """From the kernels' (begin, end), in any unit and order; kernels of several streams may overlap."""
    busy, reached = 0.0, None
    ordered = sorted(intervals)
    for begin, end in ordered:
        start = begin if reached is None else max(begin, reached)
        busy += max(0.0, end - start)
        reached = end if reached is None else max(reached, end)
    span = (reached or 0.0) - ordered[0][0] if ordered else 0.0
    return Gaps(1.0 - busy / span if span > 0 else 0.0, waits, busy)


def device_gaps(prof: profile, steps: int, seconds: float) -> Gaps:
    """Of a profile of some steps on a GPU; ``seconds``: of a step without it."""
    intervals, waits = [], dict.fromkeys(WAITS, 0.0)
    for event in prof.events() or ():
        if str(event.device_type).endswith("CUDA"):
            intervals.append((event.time_range.start, event.time_range.end))
        elif event.name in waits:
            waits[event.name] += 1 / steps
    found = gaps_of(intervals, {name: count for name, count in waits.items() if count})
    busy = found.busy / 1e6 / steps
    return replace(found, busy=busy, launch_gaps=max(0.0, 1.0 - busy / seconds))


def slowest_third(kernels: Sequence[Kernel]) -> list[Kernel]:
    """The longest that together take a third of the time."""
    goal, out = sum(k.seconds for k in kernels) / 3, []
    for kernel in kernels:
        if goal <= 0:
            break
        out.append(kernel)
        goal -= kernel.seconds
    return out


def measure(
    size: Size, peer: str, device: torch.device, steps: int, warm_up: int, clocks: ClockLog
) -> dict[str, Any]:
    """Profile some steps; the step's time is taken without the profiler."""
    cuda = device.type == "cuda"
    made = build(peer, size, device)
    batches = [batch(size, i, device) for i in range(2)]

    def run(count: int) -> float:
        if cuda:
            torch.cuda.synchronize()
        started = time.perf_counter()
        for i in range(count):
            made.step(*batches[i % 2])
        if cuda:
            torch.cuda.synchronize()
        return (time.perf_counter() - started) / count

    run(warm_up)
    seconds, clocked = clocks.timed(lambda: min(run(steps) for _ in range(3)))
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities) as prof:
        profiled = run(steps)
    measured = rates(device, size.dtype, small=size.for_tests)
    kernels = kernels_of(prof, steps, cuda)
    by_group: dict[str, float] = {}
    for kernel in kernels:
        by_group[kernel.group] = by_group.get(kernel.group, 0.0) + kernel.seconds
    counted = limits(size)
    groups = []
    for group in sorted({*by_group, *counted}, key=lambda g: -by_group.get(g, 0.0)):
        taken = by_group.get(group, 0.0)
        by_flops, by_bytes = counted[group].seconds(measured["flops"], measured["bandwidth"]) if (
            group in counted) else (0.0, 0.0)
        groups.append({"group": group, "seconds": taken, "flops_limit": by_flops, "bytes_limit": by_bytes})
    result: dict[str, Any] = {
        "size": size.name, "peer": peer, "settings": made.about.settings, "seconds": seconds, "clocks": clocked,
        "seconds_profiled": profiled, "rates": measured, "groups": groups, "kernels": [asdict(k) for k in kernels],
        "slowest_third": [asdict(k) for k in slowest_third(kernels)],
    }
    if cuda:
        result["device"] = asdict(device_gaps(prof, steps, seconds))
        result["device_syncs"] = [asdict(w) for w in device_syncs(lambda: made.step(*batches[0]))]
    if PEERS[peer].ours:  # compiled code would be compiled anew under the modes
        result["host_reads"] = [asdict(w) for w in host_reads(lambda: made.step(*batches[0]))]
    return result


def table(found: dict[str, Any]) -> str:
    """For people."""
    seen = sum(g["seconds"] for g in found["groups"])
    total = seen or 1.0
    lines = [
        f"{found['peer']} on {found['size']}: {found['seconds'] * 1e3:.2f} ms per step "
        f"({found['seconds_profiled'] * 1e3:.2f} ms under the profiler, {seen * 1e3:.2f} ms of it in operations)",
        f"  {'group':<30}{'ms':>9}{'share':>8}{'by FLOPs':>10}{'by bytes':>10}{'of limit':>10}",
    ]
    for g in found["groups"]:
        limit = max(g["flops_limit"], g["bytes_limit"])
        ratio = f"{limit / g['seconds']:.0%}" if limit and g["seconds"] else "-"
        lines.append(f"  {g['group']:<30}{g['seconds'] * 1e3:>9.3f}{g['seconds'] / total:>8.1%}"
                     f"{g['flops_limit'] * 1e3:>10.3f}{g['bytes_limit'] * 1e3:>10.3f}{ratio:>10}")
    lines.append("the slowest third of the step:")
    for k in found["slowest_third"]:
        lines.append(f"  {k['seconds'] * 1e3:>9.3f} ms {k['calls']:>7.1f} calls  {k['group']:<12} {k['name'][:70]}")
    if "device" in found and not seen:
        lines.append("the profiler saw no kernel: CUPTI (ROCm: roctracer) is missing or not permitted here, and the "
                     "times of groups and the launch gaps are unknown")
    elif "device" in found:
        waits = ", ".join(f"{n} {c:g}" for n, c in found["device"]["waits"].items()) or "none"
        gaps = found["device"]
        lines.append(f"launch gaps {gaps['launch_gaps']:.1%} of the step (a kernel ran {gaps['busy'] * 1e3:.2f} ms of "
                     f"it; under the profiler {gaps['profiled_gaps']:.1%}); host waits a step: {waits}")
    if "device" in found:
        lines.append(f"CUDA was made to wait in a step: {places(found['device_syncs'])}")
    if "host_reads" in found:
        lines.append(f"values brought to the host in a step: {places(found['host_reads'])}")
    return "\n".join(lines)


def places(waits: Sequence[dict[str, Any]]) -> str:
    """Where, for people."""
    return "; ".join(f"{w['calls']} × {w['what']} at {w['where']}" for w in waits) or "none"


def main(argv: list[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare.profile", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--size", nargs="+", choices=list(sizes()), default=["quickstart"], metavar="SIZE")
    parser.add_argument("--peer", choices=list(PEERS), default="ours")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=3)
    for name in ("layers", "micro-batch", "global-batch", "seq"):
        parser.add_argument(f"--{name}", type=int, default=0, help="instead of the size's own")
    parser.add_argument("--out", type=Path, help="JSON; written after each size")
    args = parser.parse_args(argv)
    kind = args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(args.threads)
    command = " ".join(["python", "-m", "benchmarks.compare.profile", *(sys.argv[1:] if argv is None else argv)])
    made: dict[str, Any] = {"command": command, "hardware": hardware(kind, args.threads), "profiles": []}
    changes = {k: getattr(args, k) for k in ("layers", "micro_batch", "global_batch", "seq")}
    with clock_log(kind) as clocks:
        for name in args.size:
            size = settled(sizes()[name], changes)
            try:
                found = measure(size, args.peer, torch.device(kind), args.steps, args.warm_up, clocks)
            except Unable as error:
                print(f"error: {args.peer}: {error}", file=sys.stderr)
                return 3
            made["profiles"].append(found)
            if args.out:
                write(args.out, made)
            print(table(found), flush=True)
    if args.out:
        print(f"written: {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
