"""Messages between ranks and hub: a marker, a length, JSON. No pickle; lengths are checked before anything is read.

Text that does not begin with the marker is a dying process's last words: ``faulthandler`` writes into the
connection from a signal handler, where no message can be made.
"""

from __future__ import annotations

import json
from typing import Any

MARK = 1
HEAD = 4
"""The marker, then three bytes of length, big end first."""
LARGEST = 1 << 20
"""Limit on a message from a rank that has shown the secret, bytes."""
LARGEST_HELLO = 1 << 10
LARGEST_WORDS = 1 << 14

HELLO, BEAT, STACKS, FAILING, BYE = "hello", "beat", "stacks", "failing", "bye"
"""From a rank."""
ASK, LEAVE, SPEAK = "ask", "leave", "speak"
"""From the hub: send stacks; end at once; nobody else explains it, so tell your own error."""
ALIVE, ROSTER = "alive", "roster"
"""From the hub: a word per second; to rank 0 also who each rank is, for the hub that would follow."""


class WireError(Exception):
    """Error of a peer that does not speak this protocol."""


def pack(kind: str, *values: Any) -> bytes:
    """Return one message as bytes. Raises ValueError if it is too large."""
    body = json.dumps([kind, *values], separators=(",", ":")).encode()
    if len(body) > LARGEST:
        raise ValueError(f"a message of {len(body)} bytes; at most {LARGEST}")
    return bytes((MARK,)) + len(body).to_bytes(3, "big") + body


class Unpacker:
    """Splitter of a byte stream into messages.

    ``largest``: bytes of one message; raise it when the sender is known.
    """

    def __init__(self, largest: int = LARGEST) -> None:
        self.largest = largest
        self.words = b""
        """Text outside of messages: a traceback of a fatal signal."""
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[list[Any]]:
        """Return the messages that are complete now, ``[kind, value, …]``. Raises WireError."""
        self._buffer += data
        out: list[list[Any]] = []
        buffer, at = self._buffer, 0
        while at < len(buffer):
            if buffer[at] != MARK:
                end = buffer.find(MARK, at)
                end = len(buffer) if end < 0 else end
                if len(self.words) < LARGEST_WORDS:
                    self.words += bytes(buffer[at:end])
                at = end
                continue
            if len(buffer) - at < HEAD:
                break
            size = int.from_bytes(buffer[at + 1 : at + HEAD], "big")
            if size > self.largest:
                raise WireError(f"a message of {size} bytes; at most {self.largest}")
            if len(buffer) - at < HEAD + size:
                break
            out.append(_decode(bytes(buffer[at + HEAD : at + HEAD + size])))
            at += HEAD + size
        del buffer[:at]
        return out


def _decode(body: bytes) -> list[Any]:
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise WireError(f"not JSON: {error}") from None
    if not isinstance(message, list) or not message or not isinstance(message[0], str):
        raise WireError("not a message")
    return message
