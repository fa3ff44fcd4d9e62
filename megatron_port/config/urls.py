"""URLs of stores, as the configuration checks them. Pure."""

from __future__ import annotations

from pathlib import Path

from megatron_port.errors import ConfigError

PACKAGES = {"s3": "s3fs", "http": "aiohttp", "https": "aiohttp"}
"""Scheme → the package that fsspec needs for it."""


def is_remote(place: object) -> bool:
    """Whether ``place`` is a URL, and not a path of this machine."""
    return "://" in str(place)


def url_fault(url: str, *, writable: bool = False) -> str:
    """Return what is wrong with a URL, for the configuration; empty: nothing."""
    scheme, _, rest = url.partition("://")
    known = [s for s in PACKAGES if not writable or not s.startswith("http")]
    if scheme not in known:
        return f"{url!r} must start with {' or '.join(f'{s}://' for s in known)}"
    if not rest.strip("/"):
        return f"{url!r} names no {'bucket' if scheme == 's3' else 'server'}"
    if scheme.startswith("http") and ("@" in rest.partition("/")[0] or "?" in rest):
        return f"{scheme}://… with credentials or a query; only plain addresses are read"
    return ""


def local_path(name: str) -> Path:
    """Return ``name`` as a path of this machine. Raises ConfigError: it is a URL, which a path would cut short."""
    if is_remote(name):
        raise ConfigError(
            f"{name}: a store is not supported here: this command reads and writes files of this machine; copy it here "
            "first (`megatron-port checkpoint pull URL FOLDER` and `checkpoint push` do that for checkpoints)"
        )
    return Path(name)
