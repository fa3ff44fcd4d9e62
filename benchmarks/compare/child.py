"""The parent's end of a worker process."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


CLOSING_S = 5.0
"""What a part of a session needs to end by itself."""
IMPORTING_S = 120.0
"""A process that says it began longer ago than this has a wrong clock, as on some virtual machines."""


def ends_at(seconds: float) -> float | None:
    """Return when to end, by time.monotonic: so many seconds after this process was started, since what importing took
    counts for whoever waits. 0: before ``PART_ENDS`` of scripts/part_runner.py; None: never."""
    if not seconds:
        ends = os.environ.get("PART_ENDS")
        return float(ends) - CLOSING_S if ends else None
    import psutil

    ago = time.time() - psutil.Process().create_time()
    return time.monotonic() + seconds - (ago if 0.0 < ago < IMPORTING_S else 0.0)


class Child:
    """A worker; ``ask`` never raises for what happens in the worker: the answer has ``failed`` or ``unable``."""

    def __init__(self, device: str, threads: int) -> None:
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the child
        # Compiled code of torch.compile is cached between the children of a run as it would be between runs.
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH", "")])]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": str(threads)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.compare.worker", device, str(threads)], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=self.log, cwd=ROOT, env=env, start_new_session=True,
        )

    def ask(self, do: str, *, timeout_s: float, **more: Any) -> dict[str, Any]:
        """One request and its answer; a worker that does not answer in time is ended."""
        if self.log.closed or self.process.poll() is not None:
            return {"failed": f"ended before {do}"}
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write((json.dumps({"do": do, **more}) + "\n").encode())
            self.process.stdin.flush()
        except BrokenPipeError:
            return self._lost(do)
        ready, _, _ = select.select([self.process.stdout], [], [], timeout_s)
        if not ready:
            self.kill()
            return {"cut": f"no answer to {do} within {timeout_s:.0f} s"}
        line = self.process.stdout.readline()
        if not line:
            return self._lost(do)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _lost(self, do: str) -> dict[str, Any]:
        self.process.wait(timeout=30)
        return {"failed": f"ended with {self.process.returncode} at {do}: {self.last_words()}"}

    def last_words(self) -> str:
        """The end of what the worker wrote to stderr."""
        size = self.log.seek(0, os.SEEK_END)
        self.log.seek(max(0, size - 400))
        return " | ".join(self.log.read().decode(errors="replace").split("\n")[-4:]).strip(" |")

    def kill(self) -> None:
        """End it and what it started (torch.compile's workers)."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        """Ask it to end, then make sure; a second call does nothing."""
        if self.log.closed:
            return
        with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
            if self.process.poll() is None:
                assert self.process.stdin is not None
                self.process.stdin.write(b'{"do": "quit"}\n')
                self.process.stdin.close()
                self.process.wait(timeout=5)
        self.kill()
        self.log.close()
