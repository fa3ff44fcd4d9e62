"""Run ``megatron-port`` on the ghost machine and read back what its ranks asked of their GPUs."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


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
class Machine:
    """A node of GPUs that do not exist. ``python`` has the CUDA build of torch, ``built`` the two libraries."""

    python: Path
    built: Path
    scratch: Path
    devices: int = 8

    @property
    def kernels(self) -> Path | None:
        """The project's kernels as this machine can open them, where they could be built (``build_kernels``)."""
        found = self.built / "kernels" / "libmp_cuda.so"
        return found if found.exists() else None

    def run(
        self, *argv: str, settings: dict[str, str] | None = None, tree: Path = ROOT, seconds: float = 300.0
    ) -> tuple[int, str, list[RankLog]]:
        """Exit code, output and logs of ``megatron-port ARGV``; code 124 after ``seconds``."""
        return self._run(["-W", "ignore", "-m", "megatron_port", *argv], settings or {}, tree, seconds)

    def run_script(self, script: Path, *argv: str, seconds: float = 300.0) -> tuple[int, str, list[RankLog]]:
        """Run a Python file in the same way."""
        return self._run(["-W", "ignore", str(script), *argv], {}, ROOT, seconds)

    def _run(
        self, argv: list[str], settings: dict[str, str], tree: Path, seconds: float
    ) -> tuple[int, str, list[RankLog]]:
        logs, meeting = self.scratch / "logs", self.scratch / "meeting"
        for folder in (logs, meeting):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        environment = {
            **os.environ, "LD_PRELOAD": str(self.built / "libghost.so"), "LD_LIBRARY_PATH": str(self.built),
            "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "GHOST_DEVICES": str(self.devices),
            "GHOST_LOG": str(logs / "process"), "GHOST_MEETING": str(meeting),
            **({"GHOST_KERNELS": str(self.kernels)} if self.kernels else {}), **settings,
        }
        process = subprocess.Popen(
            [str(self.python), *argv], cwd=self.scratch, env=environment, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=seconds)
            code = process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            output, code = process.communicate()[0], 124
        return code, output, read_logs(logs)


def read_logs(folder: Path) -> list[RankLog]:
    """Logs of the processes that used a GPU, by device: the rank on a node of one rank per GPU."""
    found = []
    for path in folder.iterdir():
        events = [Event(*line.split("\t", 3)) for line in path.read_text(errors="replace").splitlines()]
        devices = [int(event.detail) for event in events if event.kind == "device"]
        if any(event.kind in ("kernel", "communicator begins") for event in events):
            found.append(RankLog(devices[0] if devices else 0, events))
    return sorted(found, key=lambda log: log.rank)
