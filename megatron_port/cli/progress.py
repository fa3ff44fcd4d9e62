"""A progress bar on one line of a terminal; elsewhere a line every minute."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, TextIO

from megatron_port.charts.numbers import quantity
from megatron_port.runtime.printable import trusted
from megatron_port.telemetry.console import duration

if TYPE_CHECKING:
    from megatron_port.data.prepare import Progress

WIDTH = 24
EVERY_S = {True: 0.2, False: 60.0}


class ProgressLine:
    """Progress bar of ``prepare``; redrawn at most five times per second."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = trusted(stream or sys.stderr)
        self.live = self.stream.isatty()
        self.started = self.shown = time.monotonic()
        self.drawn = 0

    def __call__(self, at: Progress) -> None:
        now = time.monotonic()
        if now - self.shown < EVERY_S[self.live]:
            return
        self.shown = now
        share = min(at.done / max(at.total, 1), 1.0)
        seconds = max(now - self.started, 1e-9)
        left = duration((1 - share) / share * seconds) if share > 0 else "?"
        bar = "#" * int(share * WIDTH)
        text = (f"[{bar:<{WIDTH}}] {100 * share:5.1f} % of {quantity(at.total)}B, {quantity(at.text / seconds)}B/s, "
                f"{quantity(at.tokens)} tokens, {left} left")
        if self.live:
            print("\r" + text.ljust(self.drawn), end="", file=self.stream, flush=True)
            self.drawn = len(text)
        else:
            print(text, file=self.stream, flush=True)

    def close(self) -> None:
        """End the line."""
        if self.live and self.drawn:
            print("\r" + " " * self.drawn + "\r", end="", file=self.stream, flush=True)
