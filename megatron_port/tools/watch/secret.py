"""How the ranks learn where the watch's hub is and by what secret it knows them.

They meet in torch's TCPStore, which anybody who can connect may read, list and write: every user of the host, where a
run is on one. So the store never holds the hub's secret. Where the ranks share one that never went through the store
(``--nproc`` hands it to its children, the job scripts export MEGATRON_PORT_SECRET), the record in the store is
encrypted and signed with keys derived from it. Elsewhere (plain srun, torchrun, mpirun) the store names a file in
the run's folder that only its owner can read.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import re
import secrets
import stat
import time
from pathlib import Path
from typing import Any, Protocol

from megatron_port.core.dist.discovery import SECRET, ProcessInfo

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
