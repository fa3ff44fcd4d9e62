"""How long work reports what is done: a call that a command shows as a progress bar, and others pass over."""

from __future__ import annotations

import threading
from collections.abc import Callable

Advance = Callable[[int, int], None]
"""Called with what is done and the total, in the unit of the work: bytes, windows, trials."""


def silent(done: int, total: int) -> None:
    """Show nothing."""


class Tally:
    """Sums what several threads have done of ``total``, and reports it to ``advance``."""

    def __init__(self, advance: Advance, total: int) -> None:
        self._advance, self._total, self._done = advance, total, 0
        self._lock = threading.Lock()

    def add(self, amount: int) -> None:
        """Report that so much more is done."""
        with self._lock:
            self._done += amount
            self._advance(self._done, self._total)
