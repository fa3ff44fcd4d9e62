"""A run that is read while it is written: metrics.jsonl line by line, the other files when they have changed."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from megatron_port.core.io.metric import Metric
from megatron_port.core.io.regular import open_regular
from megatron_port.ext.telemetry.declared import known_metrics
from megatron_port.ext.telemetry.expert_file import FILE_NAME as EXPERTS
from megatron_port.ext.telemetry.metrics import FILE_NAME, LINE_CHARACTERS, decode
from megatron_port.ext.telemetry.run_state import RunState, run_state
from megatron_port.tools.live.ranks import read_now
from megatron_port.tools.report.expert_report import expert_part, read_history
from megatron_port.tools.report.run_data import MetricsSums, RunData, read_around
from megatron_port.tools.watch.now import NOW
from megatron_port.tools.watch.watch_report import EVENTS, RANKS

_AROUND = ("config.toml", "environment.json", "outcome.json", "run.json", EVENTS, RANKS)
EXPERTS_EVERY_S = 10.0
"""experts.jsonl is read as a whole, so not more often."""


class MetricsFollower:
    """Reader of the lines that metrics.jsonl has grown by.

    A run that resumes rewrites the file without the steps that it takes again: then all of it is read anew.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: tuple[int, int] | None = None
        """Device and inode of what was read."""
        self.known: dict[str, Metric] = {}
        """Metrics that its lines may have."""
        self._offset, self._rest = 0, b""

    def poll(self) -> tuple[bool, list[dict[str, Any]], int]:
        """Return (whether the file is another one than before, its new records, lines that are none)."""
        try:
            with open(open_regular(self._path, follow=True), "rb") as stream:
                status = os.fstat(stream.fileno())
                identity = status.st_dev, status.st_ino
                anew = identity != self._file or status.st_size < self._offset
                if anew:
                    self.known = known_metrics(self._path.parent)
                    self._file, self._offset, self._rest = identity, 0, b""
                stream.seek(self._offset)
                data = stream.read()
        except OSError:
            anew, self._file, self._offset, self._rest = self._file is not None, None, 0, b""
            return anew, [], 0
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._rest = self._rest[:LINE_CHARACTERS]
        records = [decode(line.decode("utf-8", "replace"), self.known) for line in lines if line.strip()]
        return anew, [r for r in records if r is not None], sum(r is None for r in records)


class FollowedRun:
    """A run's folder as it is now. Not thread-safe: one reader at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data = RunData(folder, folder.resolve().name)
        self.state: RunState = run_state(folder)
        self.now: dict[str, Any] = {}
        self.experts = ""
        """HTML of the experts' load; empty: none."""
        self._metrics = MetricsFollower(folder / FILE_NAME)
        self._sums = MetricsSums(self.data)
        self._seen: tuple[Any, ...] = ()
        self._experts_at = -EXPERTS_EVERY_S
        self._experts_seen: Any = None

    def poll(self) -> None:
        """Read what has changed since the last call."""
        anew, records, _ = self._metrics.poll()
        if anew:
            self.data.metrics = self._metrics.known
            self._sums = MetricsSums(self.data)
        for record in records:
            self._sums.add(record)
        seen = tuple(_mark(self.folder / name) for name in _AROUND)
        if seen != self._seen:
            self._seen = seen
            read_around(self.data)
        self._sums.finish()
        self.state = run_state(self.folder)
        self.now = read_now(self.folder / NOW)
        self._poll_experts()

    def _poll_experts(self) -> None:
        mark, now = _mark(self.folder / EXPERTS), time.monotonic()
        if mark == self._experts_seen or now - self._experts_at < EXPERTS_EVERY_S:
            return
        self._experts_seen, self._experts_at = mark, now
        self.experts = expert_part(self.data, read_history(self.data))


def _mark(path: Path) -> tuple[int, int, int] | None:
    """Return what changes when a file does; None: there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
