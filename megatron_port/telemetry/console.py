"""What a person sees: a plain line each log interval, or a live table where the output is a terminal."""

from __future__ import annotations

import sys
from collections import deque
from typing import TYPE_CHECKING, Any, TextIO

from megatron_port.telemetry.metrics import Record
from megatron_port.telemetry.text import cells, duration

if TYPE_CHECKING:
    from rich.console import Group

_ROWS = 12


def make_console(
    *, total_steps: int, log_interval: int = 1, stream: TextIO | None = None, name: str = "run"
) -> PlainConsole | LiveConsole:
    """A live table on a terminal that can draw one, else plain lines. Call it on the rank that speaks only."""
    out = stream if stream is not None else sys.stdout
    if out.isatty():
        try:
            return LiveConsole(total_steps=total_steps, log_interval=log_interval, stream=out, name=name)
        except (ImportError, ValueError):
            pass
    return PlainConsole(total_steps=total_steps, log_interval=log_interval, stream=out)


def _is_due(step: int, total: int, interval: int, record: Record) -> bool:
    return step % max(interval, 1) == 0 or step in (1, total) or bool(record.get("skipped"))


class PlainConsole:
    """One line a logged step; skipped steps, the first and the last are always logged."""

    def __init__(self, *, total_steps: int, log_interval: int, stream: TextIO) -> None:
        self._total, self._interval, self._stream = total_steps, log_interval, stream

    def step(self, record: Record) -> None:
        """A training step."""
        step = int(record["step"] or 0)
        if _is_due(step, self._total, self._interval, record):
            self._line(f"step {step}/{self._total}", record)

    def evaluation(self, record: Record) -> None:
        """An evaluation."""
        self._line(f"evaluation after step {record['step']}/{self._total}", record)

    def close(self) -> None:
        """Nothing is held."""

    def _line(self, head: str, record: Record) -> None:
        parts = [head, *(f"{label} {text}" for label, text in cells(record).items())]
        print(" | ".join(parts), file=self._stream, flush=True)


class LiveConsole:
    """A table that is redrawn in place: the last steps, the last evaluation, and the time to go.

    Other prints pass above the table. Without a refresh thread: it is drawn when something happens.
    Raises ImportError without ``rich``, ValueError on a terminal that cannot move its cursor.
    """

    def __init__(self, *, total_steps: int, log_interval: int, stream: TextIO, name: str) -> None:
        from rich.console import Console
        from rich.live import Live

        console = Console(file=stream)
        if not console.is_terminal or console.is_dumb_terminal:
            raise ValueError("the terminal cannot move its cursor")
        self._total, self._interval, self._name = total_steps, log_interval, name
        self._rows: deque[tuple[int, dict[str, str]]] = deque(maxlen=_ROWS)
        self._validation = ""
        self._seconds: deque[float] = deque(maxlen=20)
        self._last_step = 0
        self._live: Any = Live(console=console, auto_refresh=False, get_renderable=self._table)
        self._live.start()

    def step(self, record: Record) -> None:
        """A training step."""
        self._last_step = int(record["step"] or 0)
        seconds = record.get("seconds")
        if seconds is not None:
            self._seconds.append(float(seconds))
        if _is_due(self._last_step, self._total, self._interval, record):
            self._rows.append((self._last_step, cells(record)))
            self._live.refresh()

    def evaluation(self, record: Record) -> None:
        """An evaluation."""
        self._validation = f"validation loss {cells(record).get('validation loss', '?')} after step {record['step']}"
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
