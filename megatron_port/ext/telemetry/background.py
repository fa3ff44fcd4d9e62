"""A sink behind a queue: what it does, however long it takes, costs the training loop an append.

Trackers start programs, open connections and wait for servers. All of that happens on a thread of its own, started
with the first record. A tracker that fails is reported once and left alone; one that hangs is left behind.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from megatron_port.ext.telemetry.metrics import Record

BACKLOG = 10_000
"""Records that wait at most; the oldest go first."""
CLOSE_S = 30.0
"""How long the end of a run waits for a tracker."""


class BackgroundSink:
    """Passes records to a sink that ``make`` builds, on a thread.

    Args:
        name: for messages.
        make: builds the sink (imports, log-in, files); whatever it raises switches the tracker off.
        warn: takes a line.
    """

    def __init__(self, name: str, make: Callable[[], Any], warn: Callable[[str], None], *,
                 close_s: float = CLOSE_S) -> None:
        self._name, self._make, self._warn, self._close_s = name, make, warn, close_s
        self._records: queue.Queue[Record | None] = queue.Queue(BACKLOG)
        self._dropped = 0
        self._off = False
        self._thread = threading.Thread(target=self._run, name=f"telemetry-{name}", daemon=True)
        self._thread.start()

    def write(self, record: Record) -> None:
        """A training step or an evaluation."""
        self._put(record)

    def close(self) -> None:
        """Give the tracker ``close_s`` to finish; a second call does nothing."""
        if self._thread.is_alive() and not self._off:
            self._put(None)
            self._thread.join(self._close_s)
            if self._thread.is_alive():
                self._warn(f"{self._name} did not finish within {self._close_s:g} s and is left behind; metrics.jsonl "
                           "has everything")
        self._off = True
        if self._dropped:
            self._warn(f"{self._name} could not keep up: {self._dropped} records were not passed on (metrics.jsonl has "
                       "them)")
            self._dropped = 0

    def _put(self, item: Record | None) -> None:
        if self._off:
            return
        while True:
            try:
                self._records.put_nowait(item)
                return
            except queue.Full:
                try:
                    self._records.get_nowait()
                    self._dropped += 1
                except queue.Empty:
                    pass

    def _run(self) -> None:
        try:
            sink = self._make()
            while (item := self._records.get()) is not None:
                sink.write(item)
            sink.close()
        except BaseException as error:  # SystemExit, too: a library may not end a run
            self._off = True
            self._warn(f"{self._name} is off from here on: {type(error).__name__}: {error}")
