"""Plain lines by rank, and ranks in words. An object, not a module global: two runs in one process do not mix."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TextIO

from megatron_port.core.io.printable import SafeStream, printable

SHOWN = 16
"""Ranges of ranks that a message lists."""


@dataclass(frozen=True)
class Logger:
    """Writes lines; by default only rank 0 speaks (``log``), ``log_any`` is for what one rank alone knows."""

    rank: int = 0
    world_size: int = 1
    host: str = ""
    stream: TextIO = field(default_factory=lambda: sys.stdout)

    def log(self, message: str) -> None:
        """One message, on rank 0 only."""
        if self.rank == 0:
            self._write("", message)

    def log_any(self, message: str) -> None:
        """One message from whichever rank calls, marked with rank and host."""
        mark = f"[rank {self.rank} of {self.world_size}{' on ' + self.host if self.host else ''}] "
        self._write(mark, message)

    def _write(self, prefix: str, message: str) -> None:
        # One write a message, so that lines of several processes do not interleave.
        text = "".join(f"{prefix}{printable(line)}\n" for line in message.splitlines() or [""])
        stream = self.stream if isinstance(self.stream, SafeStream) else SafeStream(self.stream)
        try:
            stream.write(text)  # which writes characters that the stream's encoding lacks as escapes
            self.stream.flush()
        except BrokenPipeError:
            pass  # the reader of our output left (head, a closed terminal); that must not end a training run


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ``ranks 1, 4-7``, cut after some ranges."""
    pieces: list[list[int]] = []
    count = 0
    for rank in sorted(ranks):
        count += 1
        if pieces and rank == pieces[-1][1] + 1:
            pieces[-1][1] = rank
        else:
            pieces.append([rank, rank])
    text = [str(a) if a == b else f"{a}-{b}" for a, b in pieces[:SHOWN]]
    return f"rank{'s' if count != 1 else ''} " + ", ".join(text) + (" …" if len(pieces) > SHOWN else "")
