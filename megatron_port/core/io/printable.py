"""Text of files and other people on a terminal: letters, never commands to it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

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
        """Write the printable form; the number of characters given."""
        safe = printable(text)
        try:
            self.trusted.write(safe)
        except UnicodeEncodeError:
            encoding = self.trusted.encoding or "ascii"
            self.trusted.write(safe.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write each."""
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
    """While it is open, all that this process prints passes through :func:`printable`."""
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
