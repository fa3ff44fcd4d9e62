"""Faults on purpose: ranks of a run are killed, stopped and cut off while it trains, and nodes taken from it.

The run is started as ``train --nproc`` does, with lost ranks replaced (``launch.when_lost``). Of several nodes each has
a process of the drill, which starts the node's part of the run. All have the same faults, and the one whose node has
the rank strikes. What each fault cost is read from the run's own events, to which those that strike add theirs.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import random
import signal
import socket
import stat
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megatron_port.core.errors import ConfigError
from megatron_port.run.processes import rank_named
from megatron_port.tools.plan.failures import kept

KILL, STOP, CUT, NODE = "kill", "stop", "cut", "node"
FAULTS = {
    KILL: "SIGKILL, as the kernel sends it where memory runs out",
    STOP: "SIGSTOP: a rank that hangs, and is declared hung by the watch",
    CUT: "one of the rank's connections to another is shut down",
    NODE: "the process that keeps the ranks of the rank's node is killed, where there are several",
}
_PIDFD_GETFD = 438
"""Number of the system call, on every architecture of Linux."""
_EVENT = "fault"
"""Kind of the events that a drill adds to those of its run."""
_SETTLES_S = 60.0
"""For the run to end after its last step."""


@dataclass(frozen=True)
class Fault:
    """One planned fault."""

    at: float
    """Seconds after the first step of the run."""
    kind: str
    rank: int | None = None
    """None: drawn."""


@dataclass
class Injected:
    """One fault that struck, and what followed."""

    fault: str
    rank: int
    time: float
    """Seconds since 1970."""
    step: int
    """Steps done by then, by the run's metrics."""
    recovered_seconds: float | None = None
    """Seconds until training continued; None: it had not when the run ended, or another fault came first."""
    parts: tuple[float, float, float] | None = None
    """Seconds of these until the loss was seen, then until the ranks had met anew, then until they had their state."""
    repeated: int | None = None
    """Steps that were taken again."""


@dataclass(frozen=True)
class Drill:
    """Result of a drill."""

    run: str
    exit_code: int
    steps: int
    seconds: float
    """From the first step to the last."""
    median_step: float
    """Seconds from the end of a step to the end of the next: with all that comes between them."""
    lost_seconds: float
    """What the gaps between steps in which ranks were replaced took beyond the median: repeated steps, too."""
    faults: tuple[Injected, ...]
    recoveries: int
    copy_interval: int = 1
    """Steps between copies of the state."""

    @property
    def goodput(self) -> float:
        """Share of the time that faults did not take."""
        return max(0.0, 1 - self.lost_seconds / self.seconds) if self.seconds else 0.0

    @property
    def predicted(self) -> float | None:
        """Goodput by the planner's formula (``plan.failures``) at this drill's rate and median time to recover."""
        times = [fault.recovered_seconds for fault in self.faults if fault.recovered_seconds is not None]
        if not times or not self.seconds:
            return None
        rate = len(self.faults) / self.seconds
        return kept(rate * self.copy_interval * self.median_step) * math.exp(-rate * statistics.median(times))

    def body(self) -> dict[str, Any]:
        """Return the result as JSON types."""
        predicted = self.predicted
        return {**asdict(self), "goodput": round(self.goodput, 4),
                "predicted_goodput": None if predicted is None else round(predicted, 4)}


def parse_schedule(text: str) -> list[Fault]:
    """Return the faults of ``"30 kill 3; 60 stop"``: seconds after the first step, kind, and perhaps the rank.

    Raises ConfigError.
    """
    found = []
    for part in filter(None, (p.strip() for p in text.split(";"))):
        words = part.split()
        try:
            at, kind = float(words[0]), words[1]
            rank = int(words[2]) if len(words) > 2 else None
        except (ValueError, IndexError):
            raise ConfigError(f"--schedule: {part!r} is not SECONDS FAULT [RANK], such as 30 kill 3") from None
        if kind not in FAULTS or len(words) > 3 or at < 0 or not at < float("inf") or (rank or 0) < 0:
            raise ConfigError(f"--schedule: {part!r}; a fault is one of {', '.join(FAULTS)}")
        found.append(Fault(at, kind, rank))
    return sorted(found, key=lambda fault: fault.at)


def drawn_schedule(seed: int, every: float, kinds: Sequence[str], count: int) -> list[Fault]:
    """Return ``count`` faults of drawn kinds with exponentially distributed gaps of ``every`` seconds on average."""
    draw, at, found = random.Random(seed), 0.0, []
    for _ in range(count):
        at += draw.expovariate(1 / every)
        found.append(Fault(at, draw.choice(list(kinds))))
    return found


def with_ranks(faults: Sequence[Fault], seed: int, nproc: int, nodes: int) -> list[Fault]:
    """Return the faults of a run of several nodes, alike on all of them: each has its rank.

    Nodes are taken from the second on, as the run ends with its first. Raises ConfigError.
    """
    draw, world, found = random.Random(f"ranks {seed}"), nproc * nodes, []
    for fault in faults:
        rank = draw.randrange(nproc if fault.kind == NODE else 0, world) if fault.rank is None else fault.rank
        if rank >= world or (fault.kind == NODE and rank < nproc):
            raise ConfigError(f"{fault.kind} of rank {rank}: the run has ranks 0 to {world - 1}, and the loss of the "
                              f"first node, with ranks 0 to {nproc - 1}, ends its job")
        found.append(replace(fault, rank=rank))
    return found


def ranks_of(agent: int) -> dict[int, int]:
    """Return rank → process id of the ranks that an agent's process keeps."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            rank = rank_named((folder / "comm").read_text().strip())
            if int(fields[1]) == agent and fields[0] not in "ZX" and rank is not None:
                found[rank] = int(folder.name)
    return found


def cut_link(pid: int, draw: random.Random) -> bool:
    """Shut down one established TCP connection of a process; False: it has none that can be reached.

    The kernel hands out a copy of its descriptor (pidfd_getfd), which a parent may ask for.
    """
    links = []
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if stat.S_ISSOCK(os.stat(f"/proc/{pid}/fd/{name}").st_mode):
                    links.append(int(name))
    draw.shuffle(links)
    handle = -1
    try:
        handle = os.pidfd_open(pid)
        for number in links:
            copy = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, handle, number, 0)
            if copy < 0:
                continue
            with socket.socket(fileno=copy) as sock:
                if sock.family in (socket.AF_INET, socket.AF_INET6):
                    with contextlib.suppress(OSError):
                        sock.getpeername()
                        sock.shutdown(socket.SHUT_RDWR)
                        return True
    except OSError:
        return False
    finally:
        if handle >= 0:
            os.close(handle)
    return False


def strike(kind: str, pid: int, draw: random.Random) -> bool:
    """Do one fault to a process; return whether it could be done."""
    if kind == CUT:
        return cut_link(pid, draw)
    if kind == NODE:
        return False
    try:
        os.kill(pid, signal.SIGKILL if kind == KILL else signal.SIGSTOP)
    except ProcessLookupError:
        return False
    return True


def drill(
    command: Sequence[str], run_folder: Path, faults: Sequence[Fault], *, seed: int = 0, copy_interval: int = 1,
    say: Callable[[str], None] = lambda line: None, output: Any = None, several: bool = False,
) -> Drill:
    """Start ``command``, which trains into ``run_folder``, and strike as ``faults`` says; return what it cost.

    Faults that are due after the last step are left out. ``output``: where the run's lines go (default: to stdout).
    ``several``: other nodes do the same, and strike the ranks that are not here.
    """
    events_before = len(_events(run_folder))
    before = _last_step(run_folder)
    # A session of its own: Ctrl-C is for the drill, which ends the run in order.
    process = subprocess.Popen(list(command), stdin=subprocess.DEVNULL, stdout=output, start_new_session=True)
    first, waiting, draw = 0.0, list(faults), random.Random(seed)
    try:
        while process.poll() is None:
            time.sleep(0.05)
            now, step = time.time(), _last_step(run_folder)
            if step < before:  # another run begins in the folder; the records of the former were put aside
                before = events_before = 0
            if not first:
                if step <= before:
                    continue
                first = now
            while waiting and now - first >= waiting[0].at:
                _strike_due(waiting.pop(0), process, run_folder, step, draw, say, several)
    except BaseException:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_SETTLES_S)
        process.kill()
        raise
    rows = [row for row in _rows(run_folder / "metrics.jsonl") if "loss" in row and row.get("step", 0) > before]
    return _cost(run_folder, process.returncode, rows, _events(run_folder)[events_before:], first, copy_interval)


def _strike_due(
    fault: Fault, process: subprocess.Popen[bytes], run_folder: Path, step: int, draw: random.Random,
    say: Callable[[str], None], several: bool,
) -> None:
    """Do a fault where its rank is here, and note it among the run's events."""
    there = ranks_of(process.pid)
    rank = fault.rank if fault.rank is not None else draw.choice(sorted(there)) if there else None
    if several and rank not in there:
        return
    if fault.kind == NODE and several:
        say(f"{fault.kind}: this node, with rank {rank}, after step {step}")
        _note(run_folder, fault.kind, rank, step)
        process.kill()
    elif rank is None or rank not in there or not strike(fault.kind, there[rank], draw):
        say(f"{fault.kind} at {fault.at:.1f} s was left out: there was nothing to strike")
    else:
        _note(run_folder, fault.kind, rank, step)
        say(f"{fault.kind}: rank {rank}, process {there[rank]}, after step {step}")


def _note(run_folder: Path, kind: str, rank: int | None, step: int) -> None:
    from megatron_port.run.run_files import add_event

    add_event(run_folder, {"event": _EVENT, "step": step, "fault": kind, "rank": rank, "message":
                           f"{kind} of rank {rank} on {socket.gethostname()}, in a drill"})


def _cost(
    run_folder: Path, exit_code: int, rows: Sequence[dict[str, Any]], events: Sequence[dict[str, Any]], first: float,
    copy_interval: int,
) -> Drill:
    """Return what the faults of a drill have cost, by the run's steps and events; ``first``: time of its first step."""
    struck = [Injected(e["fault"], e["rank"], e["time"], e["step"]) for e in events if e.get("event") == _EVENT]
    times = [row["time"] for row in rows]
    median = statistics.median(b - a for a, b in zip(times, times[1:])) if len(times) > 1 else 0.0
    recoveries = [e for e in events if e.get("event") == "recovery"]
    broken = {(a, b) for a, b in zip(times, times[1:]) if any(a <= event["time"] < b for event in recoveries)}
    for one, following in zip(struck, [*struck[1:], None]):
        until = following.time if following is not None else float("inf")
        for event in recoveries:
            if one.time <= event["time"] < until:
                one.recovered_seconds = round(event["time"] - one.time, 3)
                seen, met = event["seconds"], event["seconds"] - event["met_seconds"]
                one.parts = (round(one.recovered_seconds - seen, 3), round(seen - met, 3), round(met, 3))
                one.repeated = event.get("repeated")
                break
    return Drill(
        str(run_folder), exit_code, len(rows), rows[-1]["time"] - first if rows and first else 0.0,
        median, sum(max(0.0, b - a - median) for a, b in broken), tuple(struck), len(recoveries), copy_interval,
    )


def text_of(done: Drill) -> str:
    """Return a table of the faults and one line on the whole."""
    lines = [f"{'fault':<6} {'rank':>4} {'after step':>10} {'recovered in':>13} {'seen':>6} {'met':>6} {'state':>6} "
             f"{'steps repeated':>15}"]
    for fault in done.faults:
        seconds = "with the next" if fault.recovered_seconds is None else f"{fault.recovered_seconds:.1f} s"
        again = "" if fault.repeated is None else str(fault.repeated)
        parts = " ".join(f"{part:>6.1f}" for part in fault.parts) if fault.parts is not None else " " * 20
        lines.append(f"{fault.fault:<6} {fault.rank:>4} {fault.step:>10} {seconds:>13} {parts} {again:>15}")
    predicted = "" if done.predicted is None else f"; by the planner's formula {100 * done.predicted:.1f} %"
    lines.append(
        f"{len(done.faults)} faults, {done.recoveries} recoveries; {done.steps} steps in {done.seconds:.1f} s, "
        f"of which faults took {done.lost_seconds:.1f} s (goodput {100 * done.goodput:.1f} %{predicted}); a step takes "
        f"{done.median_step:.3f} s; exit code {done.exit_code}"
    )
    return "\n".join(lines)


def train_command(run_file: str, nproc: int, overrides: Sequence[str]) -> list[str]:
    """Return the command that trains with lost ranks replaced."""
    settings = [word for setting in overrides for word in ("--set", setting)]
    return [sys.executable, "-m", "megatron_port", "train", run_file, "--nproc", str(nproc), *settings]


def _rows(path: Path) -> list[dict[str, Any]]:
    rows = []
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):
                rows.append(json.loads(line))
    return rows


def _events(run_folder: Path) -> list[dict[str, Any]]:
    return _rows(run_folder / "events.jsonl")


def _last_step(run_folder: Path) -> int:
    """Return the last step in the metrics; 0: none."""
    from megatron_port.run.run_files import steps_done

    return steps_done(run_folder)
