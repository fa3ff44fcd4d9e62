"""Plain lines by rank, and ranks in words. An object, not a module global: two runs in one process do not mix."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from megatron_port.core.config.ranges import HIDDEN, masked, secret_name
from megatron_port.core.errors import EnvironmentFault, PortError, shortened

# Text of files and other people on a terminal: letters, never commands to it.

_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters, all but tab and newline
    "\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"  # line separators; what turns the direction of writing round
    "\ufff9-\ufffb\U000e0000-\U000e007f\ud800-\udfff]"  # annotations, invisible tags, halves of a character
)


def printable(text: str) -> str:
    """``text`` with every character that a terminal would obey, or that would hide or reorder others, as an escape.

    Tabs and newlines stay: for a name within a line use :func:`one_line`.
    """
    return _UNSAFE.sub(lambda found: found.group().encode("unicode_escape", "surrogatepass").decode("ascii"), text)


def one_line(text: str) -> str:
    """Escape tabs and newlines as well, so that a name cannot begin a line that looks like one of ours."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


class SafeStream:
    """A text stream whose ``write`` passes everything through :func:`printable`. ``trusted`` is the stream itself.

    What draws on a terminal (a progress bar, a live table) writes to ``trusted``. Characters that the stream's
    encoding lacks become escapes too.
    """

    def __init__(self, stream: TextIO) -> None:
        self.trusted = stream

    def write(self, text: str) -> int:
        """Write the printable form; return the number of characters given."""
        safe = printable(text)
        try:
            self.trusted.write(safe)
        except UnicodeEncodeError:
            encoding = self.trusted.encoding or "ascii"
            self.trusted.write(safe.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write every line."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.trusted, name)


def trusted(stream: Any) -> Any:
    """The stream behind a :class:`SafeStream`, for what draws; any other stream as it is."""
    return stream.trusted if isinstance(stream, SafeStream) else stream


def encodable(stream: Any) -> None:
    """Have a stream write what its encoding lacks as escapes, instead of raising UnicodeEncodeError.

    An ASCII locale is usual in job scripts and containers; progress bars and libraries write to the stream itself.
    """
    if getattr(stream, "errors", "") in ("strict", "surrogateescape"):
        with suppress(AttributeError, OSError, ValueError):  # none of Python's own text streams, or closed
            stream.reconfigure(errors="backslashreplace")


@contextmanager
def safe_output() -> Iterator[None]:
    """Context in which all that this process prints passes through :func:`printable`."""
    before = sys.stdout, sys.stderr
    for stream in before:
        encodable(trusted(stream))
    sys.stdout, sys.stderr = (
        stream if stream is None or isinstance(stream, SafeStream) else SafeStream(stream) for stream in before
    )
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


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
        """Write a message, on rank 0 only."""
        if self.rank == 0:
            self._write("", message)

    def log_any(self, message: str) -> None:
        """Write a message from whichever rank calls, marked with rank and host."""
        mark = f"[rank {self.rank} of {self.world_size}{' on ' + self.host if self.host else ''}] "
        self._write(mark, message)

    def _write(self, prefix: str, message: str) -> None:
        # One write per message, so that lines of several processes do not interleave.
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


# Diagnostics without secrets: what looks like one, and what this environment says is one.

SHORTEST = 8
"""Shorter values occur within too many other words to be hidden."""


def redact(text: str, environ: Mapping[str, str] | None = None) -> str:
    """Return ``text`` for a file or a terminal that others may read.

    Hidden are passwords in URLs, keys of well-known forms, what is assigned to names like ``api_key``, and the values
    of all environment variables whose names look like a secret's, wherever they stand.
    """
    env = os.environ if environ is None else environ
    values = {v for k, v in env.items() if len(v) >= SHORTEST and secret_name(k)}
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    return masked(text)


def redacted(value: Any, environ: Mapping[str, str] | None = None) -> Any:
    """Redact a value that becomes JSON: every text in it, and all under a name that looks like a secret's."""
    if isinstance(value, str):
        return redact(value, environ)
    if isinstance(value, Mapping):
        return {
            key: HIDDEN if isinstance(key, str) and isinstance(item, str) and secret_name(key)
            else redacted(item, environ) for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [redacted(item, environ) for item in value]
    return value


# Errors that nobody foresaw: one line for the user, the traceback in a file for whoever fixes the program.
#
# A terminal full of frames tells a user nothing, and thousands of ranks would each print theirs.

LINE_CHARACTERS = 500


class UnexpectedError(PortError):
    """Fault of the program itself: an exception that has no message for the user. ``__cause__`` is that exception."""

    is_reporter = True


def unexpected(error: Exception, folder: Path | None = None, name: str = "") -> PortError:
    """Return the error to report in place of ``error``; its traceback is written to a file that only the user reads.

    Args:
        folder: where the file goes; made if it is not there. None, or where that fails: the folder for temporary files.
        name: of the file; empty: a new one.
    """
    named = file_name_fault(error)
    if named is not None:
        return named
    text = redact("".join(traceback.format_exception(type(error), error, error.__traceback__)))
    place = _written(text, folder, name)
    kept = f"its traceback is in {place}" if place else "its traceback could not be written"
    said = " ".join(str(error).split())
    what = f"{type(error).__name__}: {shortened(said, LINE_CHARACTERS)}" if said else type(error).__name__
    out = UnexpectedError(
        f"{what} (not foreseen: a fault of megatron_port or of a library; {kept}, and --debug prints it)"
    )
    out.__cause__ = error
    return out


def file_name_fault(error: Exception) -> EnvironmentFault | None:
    """Return the message for a file name that this locale cannot write; None: ``error`` is something else."""
    encoding = sys.getfilesystemencoding()
    if not isinstance(error, UnicodeEncodeError) or encoding == "utf-8" or error.encoding != encoding:
        return None
    out = EnvironmentFault(
        f"the file name {error.object!a:.200} cannot be written in this locale, whose encoding is {encoding}; "
        "export LC_ALL=C.UTF-8 (or PYTHONUTF8=1), or take a name of ASCII letters"
    )
    out.is_reporter = True
    out.__cause__ = error
    return out


def _written(text: str, folder: Path | None, name: str) -> Path | None:
    """Return the new file that holds ``text``; None where no folder takes it."""
    for place in (folder, Path(tempfile.gettempdir())):
        if place is None:
            continue
        try:
            place.mkdir(parents=True, exist_ok=True)
            handle, path = _opened(place, name)
            with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as stream:
                stream.write(text)
            return Path(path)
        except OSError:
            continue
    return None


def _opened(place: Path, name: str) -> tuple[int, str]:
    if not name:
        return tempfile.mkstemp(".txt", "megatron-port-traceback-", place)
    path = place / name
    path.unlink(missing_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), str(path)


# Progress of long work: a call that a command shows as a progress bar, and others pass over.

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
