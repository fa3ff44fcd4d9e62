"""JSON that is not one record per line: an array, or values over several lines. Memory is bounded by one value."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any

from megatron_port.core.errors import DataError, shortened

READ = 1 << 20
_SPACE = re.compile(r"[ \t\n\r]*")
_UNFINISHED = 32
"""An error this close to the end of what was read may be a value that was cut there."""


def json_values(stream: Any, where: str, largest: int) -> Iterator[bytes]:
    """Yield each element of the array that a file is, or each of its values, as a line without its end.

    Bytes that are not UTF-8 are kept as they are.

    Raises:
        DataError: not JSON, with the line; a value of more than about ``largest`` bytes.
    """
    text = _Window(stream)
    array = text.skip_space() == "["
    if array:
        text.at += 1
    first = True
    while True:
        character = text.skip_space()
        if array and character == "]":
            text.at += 1
            array, character = False, text.skip_space()
            if character:
                raise DataError(f"{where}:{text.line()}: more text after the end of the array")
        if not character:
            if array:
                raise DataError(f"{where}:{text.line()}: the array does not end; the file is cut off")
            return
        if array and not first:
            if character != ",":
                raise DataError(f"{where}:{text.line()}: expected a comma or the end of the array")
            text.at += 1
            text.skip_space()
        first = False
        yield text.value(where, largest)


class _Window:
    """The part of a stream that is being parsed, as text."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._json = json.JSONDecoder()
        self._lines = 1
        self.text, self.at, self.ended = "", 0, False
        self._read(READ)
        self.at = int(self.text.startswith("\ufeff"))

    def skip_space(self) -> str:
        """Move to the next character that is no white space, and return it; empty: the end."""
        while True:
            self.at = _SPACE.match(self.text, self.at).end()  # type: ignore[union-attr]
            if self.at < len(self.text) or self.ended:
                return self.text[self.at:self.at + 1]
            self._read(READ)

    def value(self, where: str, largest: int) -> bytes:
        """Return the value that begins here."""
        while True:
            try:
                _, end = self._json.raw_decode(self.text, self.at)
                if end < len(self.text) or self.ended:
                    break
            except json.JSONDecodeError as error:
                cut = error.msg.startswith("Unterminated string") or error.pos + _UNFINISHED > len(self.text)
                if self.ended or not cut:
                    raise DataError(f"{where}:{self.line(error.pos)}: not JSON ({error.msg}); repair the file"
                                    ) from None
            except (RecursionError, ValueError) as error:  # ValueError: an integer of thousands of digits
                raise DataError(f"{where}:{self.line()}: a value that cannot be read ({shortened(str(error), 120)})"
                                ) from None
            if len(self.text) - self.at > largest:
                raise DataError(f"{where}:{self.line()}: a value of more than {largest} bytes, or a string without an "
                                "end; raise --largest-record if it is meant")
            self._read(max(READ, len(self.text) - self.at))  # twice as much: the parser begins anew
        raw = self.text[self.at:end].encode("utf-8", "surrogateescape")
        self.at = end
        return raw.replace(b"\n", b" ").replace(b"\r", b" ")  # no string holds them

    def line(self, position: int | None = None) -> int:
        """Return the line of a position in the window."""
        return self._lines + self.text.count("\n", 0, self.at if position is None else position)

    def _read(self, count: int) -> None:
        data = self._stream.read(count)
        self.ended = not data
        self._lines += self.text.count("\n", 0, self.at)
        self.text, self.at = self.text[self.at:] + self._decoder.decode(data, self.ended), 0
