"""Profiler traces of chosen steps and ranks, with the phases of a step as a track of their own, and memory snapshots.

Where nothing is to be traced no object of this module exists, so a step costs nothing more. docs/profiling.md says how
to read the traces.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megatron_port.core.config.ranges import parse_ranges, within
from megatron_port.core.dist.process import IDLE, SAVE, ProgressTracker, describe
from megatron_port.core.io.files import write_bytes, write_text
from megatron_port.core.train.folders import run_folder
from megatron_port.core.train.hooks import Ending, LoopHook, LoopState, Session
from megatron_port.ext.health.trace import FOLDER, MERGED, trace_name

NEXT = (2, 4)
"""Steps of this start that ``next`` stands for, counted from 0: the first two load kernels and fill pools."""
MOST_STEPS = 50
"""Steps of one trace; longer ones are cut into several, since a viewer holds a few hundred MB."""
_TOP_OPERATORS = 40


class PhaseTrack:
    """Recorder of the phases that a rank's progress tracker goes through, as events of a trace."""

    def __init__(self, progress: ProgressTracker) -> None:
        self.events: list[dict[str, Any]] = []
        self._progress, self._at = progress, progress.at
        self._open: tuple[str, int] | None = None

    def __enter__(self) -> PhaseTrack:
        setattr(self._progress, "at", self._record)  # noqa: B010 - over the method, while it is traced
        return self

    def __exit__(self, *error: object) -> None:
        self._close(time.time_ns())
        delattr(self._progress, "at")

    def _record(self, phase: str, operation: str = "", number: int = -1) -> None:
        self._at(phase, operation, number)
        now = time.time_ns()
        self._close(now)
        self._open = None if phase == IDLE else (describe(phase, operation, number), now)

    def _close(self, now: int) -> None:
        if self._open is not None:
            name, since = self._open
            self.events.append({"name": name, "since": since, "until": now})
            self._open = None


class StepProfiler:
    """Profiler of one rank; its traces go to ``profile/`` in the run's folder.

    Args:
        first_step: steps that were done when this start began.
    """

    def __init__(self, session: Session, first_step: int) -> None:
        telemetry = session.config.telemetry
        chosen = telemetry.profile
        self._session, self._memory = session, telemetry.profile_memory
        # Steps are counted from 1 in every line that a user reads.
        self._steps = (((first_step + 1 + NEXT[0], first_step + 1 + NEXT[1]),) if chosen == "next"
                       else parse_ranges(chosen))
        ranks = telemetry.profile_ranks
        self._mine = ranks == "all" or within(session.info.rank, parse_ranges(ranks))
        self._running: Any = None
        self._track: PhaseTrack | None = None
        self._from = 0
        self._merging: list[tuple[Path, subprocess.Popen[bytes]]] = []
        self._to_merge: Path | None = None

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Trace the body, which is the optimizer step ``step`` (from 1), if it is chosen."""
        self._merge()
        if not within(step, self._steps):
            yield
            return
        if not self._from:
            self._from = step
            if self._mine:
                self._start()
        with torch.profiler.record_function(f"step {step}") if self._mine else contextlib.nullcontext():
            yield
        last = not within(step + 1, self._steps) or step + 1 - self._from >= MOST_STEPS
        last = last or step >= self._session.config.training.steps
        if last:
            self._finish(step)

    def _start(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._session.device.is_gpu:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
            if self._memory:
                torch.cuda.memory._record_memory_history(max_entries=200_000)
        self._track = PhaseTrack(self._session.progress)
        self._track.__enter__()
        self._running = torch.profiler.profile(activities=activities, profile_memory=self._memory)
        self._running.__enter__()

    def _finish(self, step: int) -> None:
        """Write this rank's part; rank 0 merges all parts once every rank has passed the next agreement."""
        folder = self._folder(self._from, step)
        if self._track is not None:
            self._track.__exit__()
        with self._session.progress.enter(SAVE, "profile"):
            if self._mine:
                self._write(folder)
        if self._session.is_rank_zero:
            self._to_merge = folder
        self._from = 0

    def _folder(self, first: int, last: int) -> Path:
        return run_folder(self._session.config) / FOLDER / f"steps-{first}-{last}"

    def _write(self, folder: Path) -> None:
        """Write trace, table and snapshot of this rank. What the disk refuses is reported, and ends nothing."""
        info, profiler, track = self._session.info, self._running, self._track
        assert track is not None  # which has ended
        if self._session.device.is_gpu:
            torch.cuda.synchronize()
        profiler.__exit__(None, None, None)
        self._running = self._track = None
        part = folder / f".rank-{info.rank:05d}-{os.getpid()}.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(part))
            trace = json.loads(part.read_bytes())
            trace["rank"] = {
                "rank": info.rank, "host": info.hostname, "coords": str(self._session.ctx.coords),
                "phases": track.events,
            }
            write_bytes(folder / trace_name(info.rank), gzip.compress(json.dumps(trace).encode(), 5))
            sort = "self_device_time_total" if self._session.device.is_gpu else "self_cpu_time_total"
            table = profiler.key_averages().table(sort_by=sort, row_limit=_TOP_OPERATORS, max_name_column_width=60)
            write_text(folder / f"operators-rank-{info.rank:05d}.txt", table + "\n")
            if self._session.device.is_gpu and self._memory:
                self._write_snapshot(folder)
        except OSError as error:
            self._session.logger.log_any(f"profile: {folder} cannot be written ({error.strerror or error})")
        finally:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)

    def _write_snapshot(self, folder: Path) -> None:
        target = folder / f"memory-rank-{self._session.info.rank:05d}.pickle"
        temporary = target.with_name(f".{target.name}.tmp")
        torch.cuda.memory._dump_snapshot(str(temporary))
        torch.cuda.memory._record_memory_history(enabled=None)
        os.replace(temporary, target)

    def _merge(self) -> None:
        """Start the merging of the last traces, in a process of its own: it would hold up the step."""
        folder, self._to_merge = self._to_merge, None
        if folder is None:
            return
        command = [sys.executable, "-m", "megatron_port.ext.health.trace", str(folder)]
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True
            )
            self._merging.append((folder, process))
        except OSError as error:
            self._session.logger.log(f"profile: {folder} is not merged ({error}); run: {' '.join(command)}")

    def close(self) -> None:
        """End what is under way and log where the traces are; all ranks have agreed since the last step."""
        if self._running is not None:
            self._running.__exit__(None, None, None)
            if self._track is not None:
                self._track.__exit__()
            self._running = self._track = None
        self._merge()
        for folder, process in self._merging:
            code = process.wait()
            self._session.logger.log(
                f"profile: {folder / MERGED} (open it at https://ui.perfetto.dev, which reads it in the browser)"
                if code == 0 else f"profile: the traces in {folder} were not merged; each can be opened alone"
            )
        self._merging = []


class Profiler(LoopHook):
    """Trace the steps that ``telemetry.profile`` names."""

    def __init__(self, state: LoopState) -> None:
        super().__init__(state)
        self._profiler: StepProfiler | None = None

    def begin(self, *, again: bool = False) -> None:
        """Count the steps from this start."""
        if not again:
            self._profiler = StepProfiler(self.state.session, self.state.progress.step)

    def around_step(self, step: int) -> contextlib.AbstractContextManager[None]:
        """Trace the step, if it is chosen."""
        return contextlib.nullcontext() if self._profiler is None else self._profiler.step(step)

    def close(self, ending: Ending | None) -> None:
        """End what is under way and log where the traces are."""
        if self._profiler is not None:
            self._profiler.close()
