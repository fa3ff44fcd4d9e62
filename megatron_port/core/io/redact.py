"""Diagnostics without secrets: what looks like one, and what this environment says is one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from megatron_port.core.config.secrets import HIDDEN, masked, secret_name

SHORTEST = 8
"""Values of fewer characters are in too many other words."""


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
