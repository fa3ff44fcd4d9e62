"""One place to report to; what becomes of it is no concern of the loop, and nothing here stops training."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TextIO

from megatron_port.runtime.lease import LeaseLost
from megatron_port.telemetry.console import make_console
from megatron_port.telemetry.metrics import FILE_NAME, MetricsWriter, Record, encode
from megatron_port.telemetry.trackers import tracker

_BACKLOG = 10_000


class Sink(Protocol):
    """Takes records; may raise anything, once."""

    def step(self, record: Record) -> None:
        """A training step."""

    def evaluation(self, record: Record) -> None:
        """An evaluation."""

    def close(self) -> None:
        """Finish."""


class MetricsSink:
    """metrics.jsonl. Lines that the disk refused are kept and tried again with the next one. Once the run's folder is
    another attempt's, nothing is written any more; the loop says why, and ends.
    """

    def __init__(
        self, path: Path, resumed_step: int, warn: Callable[[str], None], guard: Callable[[], None] = lambda: None
    ) -> None:
        self._path, self._resumed, self._warn, self._guard = path, resumed_step, warn, guard
        self._writer: MetricsWriter | None = None
        self._waiting: deque[Record] = deque(maxlen=_BACKLOG)
        self._failing = False
        self._flush()

    def step(self, record: Record) -> None:
        """A training step."""
        self._waiting.append(record)
        self._flush()

    def evaluation(self, record: Record) -> None:
        """An evaluation."""
        self.step(record)

    def close(self) -> None:
        """Last try, fsync, close."""
        self._flush()
        if self._writer is not None:
            self._writer.close()

    def _flush(self) -> None:
        try:
            if self._writer is None:
                self._writer = MetricsWriter(self._path, self._resumed, self._guard)
            while self._waiting:
                self._writer.write(self._waiting[0])
                self._waiting.popleft()
        except LeaseLost:
            self._waiting.clear()
        except OSError as error:
            if not self._failing:
                self._warn(f"{self._path}: {error}; training continues, the lines are kept in memory and tried again")
            self._failing = True
            return
        if self._failing:
            self._warn(f"{self._path}: written again, nothing is missing of the last {_BACKLOG} lines")
        self._failing = False


class Telemetry:
    """Passes each record to every sink. A sink that fails is reported once and left out from then on.

    Only the rank with ``is_rank_zero`` writes and prints; elsewhere every call returns at once.

    Args:
        run_dir: folder of the run; gets metrics.jsonl and, if asked for, tensorboard/.
        is_rank_zero: this rank reports.
        total_steps: of the run, for "step 3/100".
        log_interval: steps between console lines; metrics.jsonl has every step.
        resumed_step: steps done by the state that this run starts from; later lines are removed.
        tensorboard: also write TensorBoard events.
        trackers: kind (wandb, mlflow) → offline or online.
        project: under which trackers file the run.
        config: what trackers show as its settings; dotted name → value.
        name: title of the live table.
        stream: where the console writes; None: standard output.
        warn: takes a line about a sink that failed.
        guard: called before each change of metrics.jsonl; raises LeaseLost when the folder is another attempt's.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        is_rank_zero: bool,
        total_steps: int,
        log_interval: int = 1,
        resumed_step: int = 0,
        tensorboard: bool = False,
        trackers: Mapping[str, str] | None = None,
        project: str = "megatron_port",
        config: Mapping[str, Any] | None = None,
        name: str = "run",
        stream: TextIO | None = None,
        warn: Callable[[str], None] | None = None,
        guard: Callable[[], None] = lambda: None,
    ) -> None:
        self._warn = warn if warn is not None else logging.getLogger(__name__).warning
        self._sinks: list[Sink] = []
        self._clock = time.time
        if not is_rank_zero:
            return
        self.metrics_path = run_dir / FILE_NAME
        self._add("metrics", lambda: MetricsSink(self.metrics_path, resumed_step, self._warn, guard))
        self._add(
            "console",
            lambda: make_console(total_steps=total_steps, log_interval=log_interval, stream=stream, name=name),
        )
        if tensorboard:
            self._add("TensorBoard", lambda: _tensorboard(run_dir / "tensorboard", resumed_step))
        for kind, mode in (trackers or {}).items():
            if mode != "off":
                self._sinks.append(tracker(kind, run_dir, mode=mode, project=project, name=name, config=config or {},
                                           resumed_step=resumed_step, warn=self._warn))

    def step(self, record: Record) -> None:
        """Report a training step. ``record``: fields of docs/metrics.md; ``time`` is filled in.

        Raises:
            ValueError: not a record (a programming mistake).
        """
        self._report(record, lambda sink, full: sink.step(full))

    def evaluation(self, *, step: int, validation_loss: float, seconds: float | None = None) -> None:
        """Report an evaluation after ``step`` steps: mean loss in nats per token, and the seconds it took."""
        record: Record = {"step": step, "validation_loss": validation_loss, "seconds": seconds}
        self._report(record, lambda sink, full: sink.evaluation(full))

    def close(self) -> None:
        """Finish all sinks; a second call does nothing."""
        for sink in list(self._sinks):
            self._guard(sink, sink.close)
        self._sinks.clear()

    def _report(self, record: Record, send: Callable[[Sink, Record], None]) -> None:
        if not self._sinks:
            return
        full = {"time": self._clock(), **{k: v for k, v in record.items() if v is not None}}
        encode(full)
        for sink in list(self._sinks):
            self._guard(sink, lambda sink=sink: send(sink, full))  # type: ignore[misc]

    def _add(self, name: str, make: Callable[[], Sink]) -> None:
        try:
            self._sinks.append(make())
        except Exception as error:  # no sink is worth a run
            self._warn(f"{name} is off: {error}")

    def _guard(self, sink: Sink, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # no sink is worth a run
            self._sinks.remove(sink)
            self._warn(f"{type(sink).__name__} is off from here on: {type(error).__name__}: {error}")


def _tensorboard(folder: Path, resumed_step: int) -> Sink:
    from megatron_port.telemetry.tensorboard import TensorBoardSink

    try:
        return TensorBoardSink(folder, resumed_step)
    except ImportError as error:
        fix = "install it with `pip install tensorboard`, or set telemetry.tensorboard = false"
        raise ImportError(f"{error}; {fix}") from error
