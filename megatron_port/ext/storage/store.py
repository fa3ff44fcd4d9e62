"""A store of objects behind a URL, through fsspec: sizes, ranges of bytes, lists, uploads, each with one clear error.

Credentials, region and endpoint come from where the store's own tools take them (for S3: ``AWS_ACCESS_KEY_ID``,
``AWS_SECRET_ACCESS_KEY``, ``AWS_ENDPOINT_URL``, ``~/.aws``); a run file never holds them.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from megatron_port.core.config.urls import PACKAGES, url_fault
from megatron_port.core.errors import PortError

T = TypeVar("T")

ATTEMPTS = 4
FIRST_PAUSE = 0.5
"""Seconds before the second attempt; twice as long before each further one."""
PART_BYTES = 64 << 20
"""Larger objects are uploaded in parts of this size."""
_OPTIONS: dict[str, dict[str, Any]] = {
    # Attempts are counted here; botocore's own would multiply them.
    "s3": {"config_kwargs": {"connect_timeout": 10, "read_timeout": 60, "retries": {"max_attempts": 1}}},
}


@dataclass(frozen=True)
class ObjectInfo:
    """An object as its store describes it."""

    size: int
    """Bytes."""
    version: str
    """Changes with the content (ETag, or the time of the last change); empty if the store has none."""


class Store:
    """The objects below ``url``, named relative to it.

    Args:
        error: class of the errors that are raised: DataError for corpora, CheckpointError for checkpoints.

    Raises:
        error: here: the scheme is unknown or its package is not installed. In all methods: the store cannot be reached,
            refuses or answers with something else than it was asked for, after ``ATTEMPTS`` attempts.
    """

    def __init__(self, url: str, error: type[PortError]) -> None:
        self.url, self.error = url.rstrip("/"), error
        if fault := url_fault(url):
            raise error(fault)
        scheme = url.partition("://")[0]
        try:
            importlib.import_module(PACKAGES[scheme])
            import fsspec

            self._fs: Any = fsspec.filesystem(scheme, use_listings_cache=False, **_OPTIONS.get(scheme, {}))
        except ImportError as missing:
            package = PACKAGES[scheme]
            raise error(
                f"{url}: {package} is not installed; run: pip install {package} (or 'megatron_port[remote]')"
            ) from missing

    def place(self, name: str) -> str:
        """Return the URL of an object."""
        return f"{self.url}/{name}" if name else self.url

    def info(self, name: str = "") -> ObjectInfo:
        """Return size and version of an object. FileNotFoundError: there is none."""
        found = self._call("describe", name, lambda: self._fs.info(self.place(name)))
        if not isinstance(found.get("size"), int):
            raise self.error(f"{self.place(name)}: the server does not say how large it is; use one that does")
        version = found.get("ETag") or found.get("LastModified") or found.get("mtime") or ""
        return ObjectInfo(found["size"], str(version).strip('"'))

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Return the bytes [start, stop) of an object."""
        data: bytes = self._call(
            "read", name, lambda: self._fs.cat_file(self.place(name), start=start, end=stop) if stop > start else b""
        )
        if len(data) != stop - start:
            raise self.error(
                f"{self.place(name)}: asked for the bytes {start} to {stop}, got {len(data)} bytes; the server must "
                "serve ranges, and the object must not change while it is read"
            )
        return data

    def names(self) -> dict[str, int]:
        """Return the objects directly below the URL, and their bytes; empty where there are none."""
        try:
            found = self._call("list", "", lambda: self._fs.ls(self.url, detail=True))
        except FileNotFoundError:
            return {}
        return {str(f["name"]).rstrip("/").rpartition("/")[2]: int(f.get("size") or 0) for f in found}

    def pieces(self, name: str) -> Iterator[bytes]:
        """Yield the bytes of an object, ``PART_BYTES`` at a time. FileNotFoundError: there is none."""
        size = self.info(name).size
        for start in range(0, size, PART_BYTES):
            yield self.read(name, start, min(start + PART_BYTES, size))

    def put(self, path: Path, name: str, part_bytes: int = PART_BYTES) -> None:
        """Copy a file to an object, in parts where it is larger than two of them; whole or not at all."""
        self._call("write", name, lambda: self._fs.put_file(str(path), self.place(name), chunksize=part_bytes))

    def write(self, name: str, data: bytes) -> None:
        """Replace a small object."""
        self._call("write", name, lambda: self._fs.pipe_file(self.place(name), data))

    def _call(self, what: str, name: str, action: Callable[[], T]) -> T:
        began = time.monotonic()
        for attempt in range(ATTEMPTS):
            try:
                return action()
            except FileNotFoundError:
                raise
            except Exception as fault:  # each library has its own; all mean that the store did not do it
                if isinstance(fault, PermissionError) or attempt + 1 == ATTEMPTS:
                    raise self._refusal(what, name, fault, attempt + 1, time.monotonic() - began) from fault
            time.sleep(FIRST_PAUSE * 2**attempt)
        raise AssertionError

    def _refusal(self, what: str, name: str, fault: Exception, attempts: int, seconds: float) -> PortError:
        reason = " ".join(f"{type(fault).__name__}: {fault}".split())[:300]
        if isinstance(fault, PermissionError) or type(fault).__name__ == "NoCredentialsError":
            return self.error(
                f"{self.place(name)}: no permission to {what} it ({reason}); check the credentials of this job "
                "(for s3: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or ~/.aws, and AWS_ENDPOINT_URL)"
            )
        return self.error(
            f"{self.place(name)}: could not {what} it in {attempts} attempts and {seconds:.0f} s ({reason}); check "
            "that the server runs and can be reached from this node (for s3: AWS_ENDPOINT_URL), then start again"
        )
