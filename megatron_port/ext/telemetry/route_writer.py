"""Writes a rank's routes in the background: a step costs the training loop an append."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_port.core.dist.lease import LeaseLost
from megatron_port.ext.telemetry.route_file import RankRoutes, Share, write_steps

FILE_BYTES = 1 << 26
"""A file ends with the step in which it gets so large, and where the run saves."""
WAITING = 8
"""Steps that wait for the writer at most; then training waits for it."""
FLUSH_S = 120.0


@dataclass(frozen=True)
class _Flush:
    """Asks for all that came before it to be on disk; ``done`` is set then."""

    done: threading.Event


class RouteWriter:
    """Takes steps in order. What the disk refuses is lost, with a warning, and training continues.

    Args:
        share: of this rank.
        guard: called before a file gets its name; LeaseLost: nothing is written any more.
        warn: takes a line.
    """

    def __init__(
        self, folder: Path, rank: int, share: Share, *, guard: Callable[[], None], warn: Callable[[str], None]
    ) -> None:
        self._folder, self._rank, self._share, self._guard, self._warn = folder, rank, share, guard, warn
        self._items: queue.Queue[Callable[[], RankRoutes] | _Flush | None] = queue.Queue(WAITING)
        self._held: list[RankRoutes] = []
        self._off = False
        self._thread = threading.Thread(target=self._run, name="routes", daemon=True)
        self._thread.start()

    def put(self, step: Callable[[], RankRoutes]) -> None:
        """Take a step; ``step`` gives its routes, on the writer's thread, once the device has delivered them."""
        self._items.put(step)

    def flush(self) -> None:
        """Wait until all steps so far are on disk, or are given up."""
        done = threading.Event()
        self._items.put(_Flush(done))
        if not done.wait(FLUSH_S):
            self._warn(f"{self._folder}: the routes of the last steps were not written within {FLUSH_S:g} s")

    def close(self) -> None:
        """Flush and end; a second call does nothing."""
        if self._thread.is_alive():
            self.flush()
            self._items.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (item := self._items.get()) is not None:
            if isinstance(item, _Flush):
                self._write()
                item.done.set()
            elif not self._off:
                self._held.append(item())
                if sum(one.experts.nbytes for one in self._held) >= FILE_BYTES:
                    self._write()

    def _write(self) -> None:
        steps, self._held = self._held, []
        if not steps or self._off:
            return
        try:
            write_steps(self._folder, self._rank, steps, self._share, self._guard)
        except LeaseLost:
            self._off = True  # the loop says why, and ends
        except Exception as error:  # no log is worth a run
            self._warn(f"{self._folder}: {error}; the routes of steps {steps[0].step} to {steps[-1].step} are lost, "
                       "training continues")
