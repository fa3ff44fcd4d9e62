"""What every rank of a run must have alike: versions, the size of the world, the resolved configuration.

Two ranks whose fingerprints differ would train different models, or fail an hour later in a collective whose
shapes do not match. Host names, local paths of the environment and devices are left out: they may differ.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_port import __version__
from megatron_port.core.config.dump import leaves, toml_value
from megatron_port.core.package import package_versions

WORLD = "world size"
PACKAGES = ("torch", "deepspeed")
MOST_KEYS = 12
"""Differing keys that a message lists."""


@dataclass(frozen=True)
class Fingerprint:
    """Texts that must be equal on all ranks, by name."""

    versions: Mapping[str, str]
    config: Mapping[str, str]
    """Dotted key of the resolved configuration → its value as TOML; empty where there is no configuration."""

    @classmethod
    def of(cls, world_size: int, config: Any = None) -> Fingerprint:
        """This process's. ``config``: a resolved ``RunConfig``, or None. Imports no package, asks for its version."""
        values = {} if config is None else {name: toml_value(value) for name, value in leaves(config)}
        return cls({WORLD: str(world_size), **installed_versions()}, values)

    @classmethod
    def from_json(cls, text: str) -> Fingerprint:
        """The inverse of :meth:`to_json`."""
        versions, config = json.loads(text)
        return cls(versions, config)

    def to_json(self) -> str:
        """About 5 KB with a configuration."""
        return json.dumps([dict(self.versions), dict(self.config)], sort_keys=True)

    @property
    def digest(self) -> str:
        """16 hex digits of the SHA-256 of :meth:`to_json`."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]


def installed_versions() -> dict[str, str]:
    """Versions that ranks must share; a package that is not there is ``absent``."""
    known = {"megatron_port": __version__, "Python": platform.python_version()}
    return {**known, **dict.fromkeys(PACKAGES, "absent"), **package_versions(PACKAGES)}


def differences(
    prints: Mapping[str, Fingerprint], ranks: Mapping[str, list[int]], where: Callable[[list[int]], str]
) -> str:
    """One message on what differs and on which ranks.

    Args:
        prints: digest → fingerprint, two or more.
        ranks: digest → sorted ranks that reported it.
        where: ranks → "n1, n2 (ranks 0-15)".
    """
    parts, advice = [], []
    tables = {digest: {**p.versions, **p.config} for digest, p in prints.items()}
    names = list(dict.fromkeys(name for table in tables.values() for name in table))
    versions = {name for p in prints.values() for name in p.versions}
    for name in names:
        holders: dict[str, list[int]] = {}
        for digest, table in tables.items():
            holders.setdefault(table.get(name, "not set"), []).extend(ranks.get(digest, []))
        if len(holders) < 2:
            continue
        most = sorted(holders.items(), key=lambda item: (-len(item[1]), min(item[1], default=0)))
        sign = " " if name in versions else " = "
        parts.append(f"{name}{sign}" + ", ".join(f"{value} on {where(sorted(found))}" for value, found in most))
        if name == WORLD:
            advice.append("start all ranks with one srun or torchrun")
        elif name in versions:
            advice.append("give all nodes the same environment")
        else:
            advice.append("start all ranks with the same run file and the same --set")
    more = f"; and {len(parts) - MOST_KEYS} more" if len(parts) > MOST_KEYS else ""
    return f"the ranks differ: {'; '.join(parts[:MOST_KEYS])}{more}. To fix: {', '.join(dict.fromkeys(advice))}"
