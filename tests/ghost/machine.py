"""Run ``megatron-port`` on the ghost machine and read back what its ranks asked of their GPUs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


@dataclass(frozen=True)
class Event:
    """One call. ``stream`` is a handle; "0" is the default stream."""

    kind: str
    stream: str
    detail: str
    memory: str = ""
    """What the call touches, where that is known: ``rADDRESS:BYTES wADDRESS:BYTES`` (0 bytes: not known how far)."""


@dataclass
class RankLog:
    """The calls of one rank, in order."""

    rank: int
    events: list[Event] = field(default_factory=list)

    def counts(self) -> Counter[str]:
        """Calls by kind."""
        return Counter(event.kind for event in self.events)


@dataclass(frozen=True)
class Ended:
    """A program that ran on the machine."""

    code: int
    output: str
    logs: list[RankLog]
    cpu_s: float
    """Processor seconds of all its processes."""

    def __iter__(self) -> Iterator[Any]:
        """Code, output, logs."""
        return iter((self.code, self.output, self.logs))


@dataclass
class Machine:
    """A node of GPUs that do not exist. ``python`` has the CUDA build of torch, ``built`` the libraries (libraries.py).

    The programs of one machine are forked from one process (serve.py), which imports the package from ``tree``.
    """

    python: Path
    built: Path
    scratch: Path
    devices: int = 8
    tree: Path = ROOT
    _server: subprocess.Popen[str] | None = None

    def __enter__(self) -> Machine:
        """Start it."""
        self.scratch.mkdir(parents=True, exist_ok=True)
        environment = {
            **os.environ, "LD_PRELOAD": str(self.built / "libghost.so"), "LD_LIBRARY_PATH": str(self.built),
            "PYTHONPATH": str(self.tree), "OMP_NUM_THREADS": "1", "GHOST_DEVICES": str(self.devices),
            "GHOST_KERNELS": str(self.built / "kernels" / "libmp_cuda.so"),
        }
        self._server = subprocess.Popen(
            [str(self.python), "-W", "ignore", str(HERE / "serve.py")], env=environment, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, cwd=self.scratch,
        )
        if not self._answer().get("ready"):
            raise RuntimeError(f"{self.python} serve.py does not start")
        return self

    def __exit__(self, *_: object) -> None:
        """End it."""
        assert self._server is not None and self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._server is not None and self._server.stdout is not None
        line = self._server.stdout.readline()
        found: dict[str, Any] = json.loads(line) if line else {}
        return found

    def run(self, *argv: str, settings: dict[str, str] | None = None, seconds: float = 300.0) -> Ended:
        """Run ``megatron-port ARGV``; code 124 after ``seconds``."""
        return self.start("megatron_port", *argv, settings=settings, seconds=seconds)

    def compute(self, *argv: str, seconds: float = 600.0) -> Ended:
        """Run ``megatron-port ARGV`` with numbers (answers.py)."""
        return self.start("megatron_port", *argv, settings={"GHOST_COMPUTE": "1"}, seconds=seconds)

    def start(self, *argv: str, settings: dict[str, str] | None = None, seconds: float = 300.0) -> Ended:
        """Run a module or a Python file in the folder ``scratch``."""
        assert self._server is not None and self._server.stdin is not None
        logs, meeting, output = self.scratch / "logs", self.scratch / "meeting", self.scratch / "output.txt"
        for folder in (logs, meeting):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        own = {"GHOST_LOG": str(logs / "process"), "GHOST_MEETING": str(meeting), "HOME": str(self.scratch),
               **(settings or {})}  # tables of a card that is not there stay out of the user's folder
        request = {"argv": argv, "folder": str(self.scratch), "settings": own, "output": str(output),
                   "seconds": seconds}
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        answer = self._answer()
        if not answer:
            raise RuntimeError("serve.py has ended; its message is above")
        return Ended(answer["code"], output.read_text(errors="replace"), read_logs(logs), answer["cpu_s"])


def read_logs(folder: Path) -> list[RankLog]:
    """Logs of the processes that used a GPU, by device: the rank on a node of one rank per GPU."""
    found = []
    for path in folder.iterdir():
        events = [Event(*line.split("\t", 3)) for line in path.read_text(errors="replace").splitlines()]
        devices = [int(event.detail) for event in events if event.kind == "device"]
        if any(event.kind in ("kernel", "communicator begins") for event in events):
            found.append(RankLog(devices[0] if devices else 0, events))
    return sorted(found, key=lambda log: log.rank)
