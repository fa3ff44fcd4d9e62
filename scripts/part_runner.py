"""Run commands one after another, each within a limit; one that fails or does not end leaves the others alone.

Shared by ``site_report``, ``gpu_check`` and ``gpu_session``. Needs psutil besides the standard library.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil

ROOT = Path(__file__).resolve().parent.parent

TIMED_OUT, ENDED, NOT_RUN = 124, 143, -1
"""Exits of parts that were stopped at their limit or by a signal, and of those that never began."""
TINY_RUN = """# Layouts against one process: small, so that every machine can.
engine = "native"
[model]
num_layers = 4
hidden_size = 64
num_attention_heads = 4
vocab_size = 256
seq_length = 32
[layout]
vocab_padding_multiple = 1
[batch]
micro_batch_size = 2
global_batch_size = 8
[precision]
dtype = "fp32"
[data]
synthetic = true
"""
"""A run file for parts that compare layouts."""
SMALLEST_S = 20.0
"""A part with less time than this is not begun."""


@dataclass(frozen=True)
class Part:
    """One command; its output goes to ``NAME.txt``."""

    name: str
    command: list[str]
    limit_s: float
    says: str = ""
    """What its output shows."""
    files: str = ""
    """What else it leaves in the folder."""
    least_s: float = 0.0
    """What the parts before it leave it where time is short."""


@dataclass
class PartResult:
    """How a part ended."""

    name: str
    command: str
    exit: int
    seconds: float
    limit_s: float
    says: str = ""
    files: str = ""

    @property
    def state(self) -> str:
        """For people."""
        if self.exit == TIMED_OUT:
            return f"stopped: not done after {self.limit_s:.4g} s, its limit"
        if self.exit == NOT_RUN:
            return "not run: no time left"
        if self.exit == ENDED:
            return "stopped: the job was told to end"
        return "ok" if self.exit == 0 else f"failed (exit {self.exit})"


class Told(Exception):
    """A signal asked this process to end."""


def allowance(part: Part, later: Sequence[Part], left_s: float | None, reserve_s: float = 0.0) -> float:
    """Return the seconds that a part gets of ``left_s`` (None: no end in sight), of which ``reserve_s`` are kept: its
    limit, but the parts after it get their least, and where even that is not there, its own least."""
    if left_s is None:
        return part.limit_s
    left = left_s - reserve_s
    spare = left - sum(p.least_s for p in later)
    return min(part.limit_s, left, max(spare, part.least_s))


def run(part: Part, folder: Path, limit_s: float | None = None) -> PartResult:
    """Run a part and what it starts; both streams into its file. ``PART_ENDS`` tells it when its limit is reached, by
    time.monotonic, which all processes of a machine share."""
    limit = part.limit_s if limit_s is None else limit_s
    started = time.monotonic()
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
           "PART_ENDS": f"{started + limit:.3f}"}
    code = NOT_RUN
    if limit >= min(SMALLEST_S, part.limit_s):
        with open(folder / f"{part.name}.txt", "wb") as out:
            process = subprocess.Popen(part.command, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT, env=env,
                                       stdin=subprocess.DEVNULL, start_new_session=True)
            why = ""
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                code, why = TIMED_OUT, f"not done after {limit:.4g} s, the limit of this part"
            except Told as told:
                code, why = ENDED, str(told)
            if why:
                end(process)
                out.write(f"\n[{part.name}] stopped: {why}\n".encode())
    seconds = round(time.monotonic() - started, 1)
    return PartResult(part.name, " ".join(part.command), code, seconds, limit, part.says, part.files)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a part and all that it started, in whatever session: a benchmark's workers would disturb the next part."""
    import psutil

    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        whole = psutil.Process(process.pid)
        family = [*whole.children(recursive=True), whole]
    process.terminate()  # srun passes it on to the nodes
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(10)
    for member in family:
        with contextlib.suppress(psutil.Error):
            member.kill()
    process.wait()
    until = time.monotonic() + 10
    while any(map(_alive, family)) and time.monotonic() < until:  # until memory of a device is free again
        time.sleep(0.1)


def _alive(process: psutil.Process) -> bool:
    """Whether a process still holds anything; one that is gone cannot even be asked."""
    import psutil

    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


@contextlib.contextmanager
def told_by_signals() -> Iterator[None]:
    """Within it TERM and INT raise Told, once."""

    def tell(number: int, _: object) -> None:
        for each in caught:
            signal.signal(each, signal.SIG_IGN)  # now the archive is made
        raise Told(f"this process got {signal.Signals(number).name}")

    caught = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, tell) for number in caught}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_all(
    wanted: Sequence[Part], folder: Path, ends: float | None, *, reserve_s: float = 0.0,
    after: Callable[[PartResult], None] = lambda outcome: None,
) -> list[PartResult]:
    """Run every part in turn until ``ends`` (of time.monotonic) less ``reserve_s``; call ``after`` with each result
    before the next part starts."""
    outcomes: list[PartResult] = []
    with told_by_signals():
        for index, part in enumerate(wanted):
            try:
                left = None if ends is None else ends - time.monotonic()
                told = any(o.exit == ENDED for o in outcomes)
                limit = 0.0 if told else allowance(part, wanted[index + 1 :], left, reserve_s)
                outcomes.append(run(part, folder, limit))
            except Told:  # between two parts
                outcomes.append(PartResult(part.name, " ".join(part.command), ENDED, 0.0, 0.0, part.says, part.files))
            print(f"{part.name:<18} {outcomes[-1].seconds:5.0f} s  {outcomes[-1].state}", flush=True)
            after(outcomes[-1])
    return outcomes
