"""Paths and URLs as users write them: what a shell would expand in a path, and what a URL must look like."""

from __future__ import annotations

import os
import re
from pathlib import Path

from megatron_port.core.errors import ConfigError

PACKAGES = {"s3": "s3fs", "http": "aiohttp", "https": "aiohttp"}
"""Scheme → the package that fsspec needs for it."""


TOKENIZER_FILES = ("hf", "sentencepiece")
"""Kinds of tokenizers that name a file, as in ``hf:FILE``."""
_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([^}]*)\})", re.ASCII)
_HOME = re.compile(r"~([\w.-]*)(?=/|$)")


def expanded(place: str) -> str:
    """Return a path with a leading ``~`` or ``~user``, and ``$NAME`` and ``${NAME}``, replaced as a shell does.

    In a URL only variables are. Other dollar signs stand for themselves.

    Raises:
        ConfigError: a variable that is not set or empty, or a user without a home.
    """
    def value(found: re.Match[str]) -> str:
        text = os.path.expandvars(found[0])
        if text in ("", found[0]):  # a folder of the variable's name, or one at the root, is never meant
            raise ConfigError(f"{place!r}: the environment variable {(found[1] or found[2])!r} is "
                              f"{'not set' if text else 'empty'}; set it, or write the path out")
        return text

    home = _HOME.match(place)
    if not home:
        return _VARIABLE.sub(value, place)
    folder = os.path.expanduser(home[0])
    if folder.startswith("~"):
        raise ConfigError(f"{place!r}: the home of {home[1] or 'this user'!r} is not known; write the path out, or "
                          f"./{place} for a folder of that name")
    return folder + _VARIABLE.sub(value, place[home.end():])


def expanded_tokenizer(name: str) -> str:
    """Return a tokenizer's name with its file :func:`expanded`, where it names one. Raises ConfigError."""
    kind, _, file = name.partition(":")
    return f"{kind}:{expanded(file)}" if kind in TOKENIZER_FILES else name


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
    """Return ``name``, :func:`expanded`, as a path of this machine.

    Raises:
        ConfigError: it is a URL, which a path would cut short, or names a variable that is not set.
    """
    if is_remote(name):
        raise ConfigError(
            f"{name}: a store is not supported here: this command reads and writes files of this machine; copy it here "
            "first (`megatron-port checkpoint pull URL FOLDER` and `checkpoint push` do that for checkpoints)"
        )
    return Path(expanded(name))
