"""Messages between ranks and hub: a marker, a length, JSON. No pickle; lengths are checked before anything is read.

Text that does not begin with the marker is a dying process's last words: ``faulthandler`` writes into the
connection from a signal handler, where no message can be made.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import re
import secrets
import signal
import stat
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from megatron_port.core.dist.rank import ProcessInfo
from megatron_port.run.discovery import SECRET

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
HUNG, SLOW = "hung", "slow"
"""From the hub: tell the agent which ranks hang; which is slow."""
ALIVE, ROSTER = "alive", "roster"
"""From the hub: a word per second; to rank 0 also who each rank is, for the hub that would follow."""

STACK_SIGNAL = signal.SIGUSR2
"""Makes ``faulthandler`` write a stack into the connection, even where the interpreter is stuck."""
PAUSE_S = 2.5
"""The watch itself was stopped (with the whole job, mostly) if it slept longer than this."""
HUB_STARTS_S = 30.0
"""For a new hub to serve."""


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


# How the ranks learn where the watch's hub is and by what secret it knows them.
#
# They meet in torch's TCPStore, which anybody who can connect may read, list and write: every user of the host, where a
# run is on one. So the store never holds the hub's secret. Where the ranks share one that never went through the store
# (``--nproc`` hands it to its children, the job scripts export MEGATRON_PORT_SECRET), the record in the store is
# encrypted and signed with keys derived from it. Elsewhere (plain srun, torchrun, mpirun) the store names a file in
# the run's folder that only its owner can read.

KEY, READ = "watch", "watch/read"
FILE = re.compile(r"\.watch-[0-9a-f]{32}")
APPEARS_S = 10.0
"""A file that rank 0 has written may be seen so much later on another node."""


class Store(Protocol):
    """Store interface of the rendezvous, as far as it is used here."""

    def set(self, key: str, value: str) -> None:
        """Publish a value."""

    def get(self, key: str) -> bytes:
        """Wait for a key."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return its new value."""


def publish(store: Store, where: dict[str, Any], info: ProcessInfo, folder: Path) -> None:
    """Publish, from rank 0, where the hub is.

    Args:
        where: {address, port, secret}; empty: there is no hub.
        folder: of the run.

    Raises:
        OSError: the file cannot be written; the others are told that there is no hub.
    """
    record: dict[str, str] = {}
    try:
        if where:
            text = json.dumps(where)
            record = _sealed(text, info.secret) if info.secret else {"file": _written(text, folder)}
    finally:
        store.set(KEY, json.dumps(record))


def look_up(store: Store, info: ProcessInfo, folder: Path) -> dict[str, Any]:
    """Return what rank 0 published, on another rank. The last to read a file removes it.

    Raises:
        OSError: the record is not rank 0's, or its file is not there, or others could have written it.
    """
    record = json.loads(store.get(KEY))
    if not record:
        return {}
    if info.secret:
        return dict(json.loads(_opened(record, info.secret)))
    name = str(record.get("file", ""))
    if not FILE.fullmatch(name):
        raise PermissionError("what the store says of the watch is not from this run")
    found = dict(json.loads(_read(folder / name)))
    if store.add(READ, 1) == info.world_size - 1:
        with contextlib.suppress(OSError):
            (folder / name).unlink()
    return found


def _keys(secret: str, nonce: str, length: int) -> tuple[bytes, bytes]:
    """Return (key stream, signing key) for one record."""
    def derived(use: str) -> bytes:
        return hmac.new(secret.encode(), f"watch {use} {nonce}".encode(), hashlib.sha256).digest()

    return hashlib.shake_256(derived("stream")).digest(length), derived("sign")


def _sealed(text: str, secret: str) -> dict[str, str]:
    nonce, plain = secrets.token_hex(16), text.encode()
    stream, sign = _keys(secret, nonce, len(plain))
    body = bytes(a ^ b for a, b in zip(plain, stream)).hex()
    return {"nonce": nonce, "body": body, "mac": hmac.new(sign, body.encode(), hashlib.sha256).hexdigest()}


def _opened(record: dict[str, Any], secret: str) -> str:
    nonce, body, mac = (str(record.get(name, "")) for name in ("nonce", "body", "mac"))
    stream, sign = _keys(secret, nonce, len(body) // 2)
    if not hmac.compare_digest(mac.encode(), hmac.new(sign, body.encode(), hashlib.sha256).hexdigest().encode()):
        raise PermissionError("what the store says of the watch is not from this run")
    return bytes(a ^ b for a, b in zip(bytes.fromhex(body), stream)).decode()


def _written(text: str, folder: Path) -> str:
    """Write a new file that only this user can read; return its name."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f".watch-{secrets.token_hex(16)}"
    handle = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    return name


def _read(path: Path) -> str:
    """Return the text of a file that nobody but this user can have written."""
    until = time.monotonic() + APPEARS_S
    while True:
        try:
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
            break
        except FileNotFoundError:
            if time.monotonic() > until:
                raise FileNotFoundError(
                    f"{path} does not exist; is the run's folder the same on all nodes? If not, export {SECRET}, the "
                    f"same random text, to all ranks"
                ) from None
            time.sleep(0.1)
    with os.fdopen(handle, "r", encoding="utf-8") as stream:
        about = os.fstat(stream.fileno())
        if about.st_uid != os.geteuid() or about.st_mode & 0o077 or not stat.S_ISREG(about.st_mode):
            raise PermissionError(f"{path} is another user's, or others can read it")
        return stream.read()


# How ranks, stacks and waits are put into words.

Frame = tuple[str, int, str]
"""File, line, function."""
Stack = tuple[str, list[Frame]]
"""A thread: its name, and its frames, outermost first."""

FOREIGN = "not Python's"
"""Name of a thread that Python did not start, autograd's for one."""


def stack_text(stacks: Sequence[Stack]) -> str:
    """Return all threads of a process, innermost frame last, as a traceback shows them."""
    out = []
    for name, frames in stacks:
        out.append(f"Thread {name}:")
        out += [f'  File "{file}", line {line}, in {function}' for file, line, function in frames]
    return "\n".join(out)


def _short(file: str) -> str:
    """Return ``dist.collectives`` for ``megatron_port/core/dist/collectives.py``."""
    return file.rpartition("megatron_port/")[2].removesuffix(".py").replace("/", ".")


def _is_ours(file: str) -> bool:
    return "megatron_port/" in file and "/watch/" not in file


def waits_in(stacks: Sequence[Stack]) -> str:
    """Return ``all_reduce (dist.collectives.all_reduce_sum)`` if training is inside torch.distributed; else empty.

    The main thread is looked at, and threads of torch: with GPUs a backward pass runs our functions in autograd's. What
    a thread of ours waits for (a save in the background) holds up nobody.
    """
    for name, frames in stacks:
        if name not in ("MainThread", FOREIGN):
            continue
        call = ours = ""
        for file, _line, function in frames:
            if "torch/distributed/" in file or "deepspeed/comm/" in file:
                call = call or ("" if function in ("wrapper", "log_wrapper") else function)
            elif _is_ours(file):
                ours, call = f"{_short(file)}.{function}", ""
        if call and frames and not _is_ours(frames[-1][0]):
            return f"{call} ({ours})" if ours else call
    return ""


def innermost(stacks: Sequence[Stack]) -> str:
    """Return where the main thread is: ``loader.py:71 in step``."""
    for _, frames in stacks[:1]:
        if frames:
            file, line, function = frames[-1]
            return f"{file.rpartition('/')[2]}:{line} in {function}"
    return ""
