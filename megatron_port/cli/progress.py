"""Progress bars of commands: one line on a terminal with the time left, nothing where stderr is a file or a pipe."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from megatron_port.core.io.logging import trusted

if TYPE_CHECKING:
    from tqdm import tqdm


class ProgressBar:
    """A bar that is drawn when it is called, and removed when it is closed. It has no colours, so NO_COLOR holds.

    Args:
        what: what is under way, e.g. ``verify``.
        unit: of what is counted; ``B``: bytes, shown with decimal prefixes.
        stream: stderr, unless another is given; nothing is drawn where it is no terminal.
    """

    def __init__(self, what: str, unit: str = "B", *, stream: TextIO | None = None) -> None:
        self._stream = trusted(stream or sys.stderr)
        self._what, self._unit = what, unit
        self._bar: tqdm[Any] | None = None
        self.live = bool(self._stream.isatty())

    def __call__(self, done: int, total: int, note: str = "") -> None:
        """Show that ``done`` of ``total`` is done; ``note``: words behind the bar."""
        if not self.live:
            return
        if self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(
                total=total, desc=self._what, unit=self._unit, unit_scale=self._unit == "B", file=self._stream,
                dynamic_ncols=True, leave=False, mininterval=0.2,
            )
        if self._bar.total != total:
            self._bar.total = total
        if note:
            self._bar.set_postfix_str(note, refresh=False)
        self._bar.update(done - self._bar.n)

    def print(self, text: str) -> None:
        """Print a line on stdout, above the bar."""
        if self._bar is not None:
            self._bar.clear()
        print(text, flush=True)
        if self._bar is not None:
            self._bar.refresh()

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
