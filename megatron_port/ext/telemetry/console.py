"""What a person sees: a plain line each log interval, or a live table where the output is a terminal."""

from __future__ import annotations

import sys
from collections import deque
from math import isfinite, isnan
from typing import TYPE_CHECKING, Any, TextIO

from megatron_port.core.io.logging import trusted
from megatron_port.ext.telemetry.metrics import Record
from megatron_port.ext.telemetry.numbers import shown
from megatron_port.ext.telemetry.step_metrics import step_metrics

if TYPE_CHECKING:
    from rich.console import Group

_ROWS = 12
_PEAK = 1.1
"""A peak is this many times as high as the losses of the lines on both sides: more than batches differ."""


def duration(seconds: float) -> str:
    """Return ``2 d 03:04:05`` or ``03:04:05``."""
    whole = int(seconds)
    days, rest = divmod(whole, 86400)
    clock = f"{rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"{days} d {clock}" if days else clock


def cells(record: Record) -> dict[str, str]:
    """Label → text of what a record knows, in the order of a console line. Unknown values have no entry.

    The validation loss comes first: it is what the line of an evaluation is about.
    """
    out = {
        metric.label: shown(metric, record) for name, metric in step_metrics().items()
        if metric.label and record.get(name) is not None
        and (metric.hidden is None or record[name] != metric.hidden)
    }
    first = "validation loss"
    return {first: out.pop(first), **out} if first in out else out


def make_console(
    *, total_steps: int, log_interval: int = 1, stream: TextIO | None = None, name: str = "run"
) -> PlainConsole | LiveConsole:
    """A live table on a terminal that can draw one, otherwise plain lines. Call it on the rank that speaks only."""
    out = stream if stream is not None else sys.stdout
    if out.isatty():
        try:
            return LiveConsole(total_steps=total_steps, log_interval=log_interval, stream=out, name=name)
        except (ImportError, ValueError):
            pass
    return PlainConsole(total_steps=total_steps, log_interval=log_interval, stream=out)


def _is_due(step: int, total: int, interval: int, record: Record) -> bool:
    return step % max(interval, 1) == 0 or step in (1, total) or bool(record.get("skipped"))


class LossPeak:
    """The highest loss since the last logged line, which a log interval of several steps would hide."""

    def __init__(self) -> None:
        self._before: float | None = None
        self._highest: tuple[float, int] | None = None

    def add(self, record: Record) -> None:
        """Note the loss of a step, logged or not."""
        loss = record.get("loss")
        if loss is None or (self._highest is not None and isnan(self._highest[0])):
            return
        if self._highest is None or not float(loss) <= self._highest[0]:  # NaN is above everything
            self._highest = float(loss), int(record["step"] or 0)

    def cells(self, record: Record) -> dict[str, str]:
        """``text.cells`` of a logged line, with ``peak`` after the loss where the steps since the last line had one.

        A peak is a loss that is not finite, or ``_PEAK`` times as high as the losses of both lines. Call this once
        per logged line: the next interval starts here.
        """
        loss, highest, before = record.get("loss"), self._highest, self._before
        self._before, self._highest = None if loss is None else float(loss), None
        out = cells(record)
        if highest is None or loss is None or highest[1] == record["step"]:
            return out
        ends = [x for x in (before, float(loss)) if x is not None and isfinite(x)]
        if isfinite(highest[0]) and ends and highest[0] <= _PEAK * max(ends):
            return out
        return {"loss": out.pop("loss"), "peak": f"{highest[0]:.4f} at step {highest[1]}", **out}


class PlainConsole:
    """One line per logged step; skipped steps, the first and the last are always logged.

    A loss between two lines that is well above both is shown in the later line as ``peak``.
    """

    def __init__(self, *, total_steps: int, log_interval: int, stream: TextIO) -> None:
        self._total, self._interval, self._stream = total_steps, log_interval, stream
        self._peak = LossPeak()

    def write(self, record: Record) -> None:
        """A training step or an evaluation."""
        step = int(record["step"] or 0)
        if "validation_loss" in record:
            self._line(f"evaluation after step {step}/{self._total}", cells(record))
            return
        self._peak.add(record)
        if _is_due(step, self._total, self._interval, record):
            self._line(f"step {step}/{self._total}", self._peak.cells(record))

    def close(self) -> None:
        """Nothing is held."""

    def _line(self, head: str, shown: dict[str, str]) -> None:
        parts = [head, *(f"{label} {text}" for label, text in shown.items())]
        print(" | ".join(parts), file=self._stream, flush=True)


class LiveConsole:
    """A table that is redrawn in place: the last steps, the last evaluation, and the time to go.

    Other prints pass above the table. Without a refresh thread: it is drawn when something happens.
    Raises ImportError without ``rich``, ValueError on a terminal that cannot move its cursor.
    """

    def __init__(self, *, total_steps: int, log_interval: int, stream: TextIO, name: str) -> None:
        from rich.console import Console
        from rich.live import Live

        console = Console(file=trusted(stream))
        if not console.is_terminal or console.is_dumb_terminal:
            raise ValueError("the terminal cannot move its cursor")
        self._total, self._interval, self._name = total_steps, log_interval, name
        self._rows: deque[tuple[int, dict[str, str]]] = deque(maxlen=_ROWS)
        self._validation = ""
        self._peak = LossPeak()
        self._seconds: deque[float] = deque(maxlen=20)
        self._last_step = 0
        self._live: Any = Live(console=console, auto_refresh=False, get_renderable=self._table)
        self._live.start()

    def write(self, record: Record) -> None:
        """A training step or an evaluation."""
        if "validation_loss" in record:
            self._validation = f"validation loss {cells(record)['validation loss']} after step {record['step']}"
            self._live.refresh()
            return
        self._last_step = int(record["step"] or 0)
        seconds = record.get("seconds")
        if seconds is not None:
            self._seconds.append(float(seconds))
        self._peak.add(record)
        if _is_due(self._last_step, self._total, self._interval, record):
            self._rows.append((self._last_step, self._peak.cells(record)))
            self._live.refresh()

    def close(self) -> None:
        """Draw once more and leave the table on the screen."""
        self._live.refresh()
        self._live.stop()

    def _table(self) -> Group:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        title = f"{self._name}: step {self._last_step} of {self._total}"
        if self._seconds:
            left = (self._total - self._last_step) * sum(self._seconds) / len(self._seconds)
            title += f", {duration(left)} to go"
        table = Table()
        labels = list(dict.fromkeys(label for _, row in self._rows for label in row))
        for label in ["step", *labels]:
            table.add_column(label, justify="right", no_wrap=True)
        for step, row in self._rows:
            table.add_row(str(step), *(row.get(label, "") for label in labels))
        # Not the table's own title: that one wraps at the table's width.
        below = [Text(self._validation)] if self._validation else []
        return Group(Text(title, style="bold"), table, *below)
