"""One place to report to; what becomes of it is no concern of the loop, and nothing here stops training."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TextIO

from megatron_port.core.config.schema import RunConfig
from megatron_port.core.dist.rank import LeaseLost
from megatron_port.core.registry import PARTS
from megatron_port.ext.telemetry.console import make_console
from megatron_port.ext.telemetry.metrics import FILE_NAME, MetricsWriter, Record, encode, write_declared

_BACKLOG = 10_000


class Sink(Protocol):
    """Takes records; may raise anything, once."""

    def write(self, record: Record) -> None:
        """Take a training step, or an evaluation (it has a ``validation_loss``)."""

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

    def write(self, record: Record) -> None:
        """A training step or an evaluation."""
        self._waiting.append(record)
        self._flush()

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
        run_dir: folder of the run; gets metrics.jsonl and, if asked for, tensorboard/ and what trackers write.
        config: of the run: what is written and shown, and what trackers show as its settings.
        is_rank_zero: this rank reports.
        resumed_step: steps done by the state that this run starts from; later lines are removed.
        stream: where the console writes; None: standard output.
        warn: takes a line about a sink that failed.
        guard: called before each change of metrics.jsonl; raises LeaseLost when the folder is another attempt's.
    """

    def __init__(
        self, run_dir: Path, config: RunConfig, *, is_rank_zero: bool, warn: Callable[[str], None],
        resumed_step: int = 0, stream: TextIO | None = None, guard: Callable[[], None] = lambda: None,
    ) -> None:
        self._warn = warn
        self._sinks: list[Sink] = []
        self._experts: Any = None
        self._counts_of: Callable[..., Any] | None = None
        self._model = config.model
        if not is_rank_zero:
            return
        chosen = config.telemetry
        self._declare(run_dir, guard)
        self._add("metrics", lambda: MetricsSink(run_dir / FILE_NAME, resumed_step, warn, guard))
        self._add("console", lambda: make_console(
            total_steps=config.training.steps, log_interval=config.training.log_interval, stream=stream,
            name=config.name,
        ))
        if chosen.tensorboard:
            self._add("TensorBoard", lambda: PARTS.function("TensorBoard")(run_dir / "tensorboard", resumed_step))
        if config.model.moe.enabled:
            self._counts_of = PARTS.function("expert token counts")
            self._add("experts.jsonl", lambda: self._expert_sink(run_dir, config, resumed_step, guard))
        for kind, mode in (("wandb", chosen.wandb), ("mlflow", chosen.mlflow)):
            if mode != "off":
                make = PARTS.function("experiment tracker")
                self._sinks.append(make(kind, run_dir, config, mode=mode, resumed_step=resumed_step, warn=warn))

    def step(self, record: Record, tallies: Mapping[str, Any] | None = None) -> None:
        """Report a training step. ``record``: fields of docs/metrics.md; ``time`` is filled in, and what is known of
        experts is taken from the step's ``tallies``.

        Raises:
            ValueError: not a record (a programming mistake).
        """
        counts = self._counts_of(tallies, self._model) if self._counts_of and tallies and self._sinks else None
        if self._experts is not None:
            self._experts.counts = counts
        self._report(record if counts is None else {**record, **counts.summary()})

    def evaluation(self, *, step: int, validation_loss: float, seconds: float | None = None) -> None:
        """Report an evaluation after ``step`` steps: mean loss in nats per token, and the seconds it took."""
        self._report({"step": step, "validation_loss": validation_loss, "seconds": seconds})

    def close(self) -> None:
        """Finish all sinks; a second call does nothing."""
        for sink in list(self._sinks):
            self._guard(sink, sink.close)
        self._sinks.clear()

    def _report(self, record: Record) -> None:
        if not self._sinks:
            return
        full = {"time": time.time(), **{k: v for k, v in record.items() if v is not None}}
        encode(full)
        for sink in list(self._sinks):
            self._guard(sink, partial(sink.write, full))

    def _declare(self, run_dir: Path, guard: Callable[[], None]) -> None:
        """Tell readers of the folder which metrics plugins have declared."""
        try:
            write_declared(run_dir, guard)
        except LeaseLost:
            return  # the loop says why, and ends
        except OSError as error:
            self._warn(f"{run_dir}: {error}; reports will not show what plugins measure")

    def _expert_sink(self, run_dir: Path, config: RunConfig, resumed_step: int, guard: Callable[[], None]) -> Sink:
        sink: Sink = PARTS.function("expert token file")(run_dir, config, resumed_step, self._warn, guard)
        self._experts = sink
        return sink

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
