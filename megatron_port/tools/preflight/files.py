"""The files of a preflight folder; each is whole or absent."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_port.core.dist.slurm import compress_hosts, expand_hosts
from megatron_port.core.errors import EnvironmentFault
from megatron_port.core.io.atomic import write_output
from megatron_port.core.io.redact import redacted
from megatron_port.core.io.regular import read_regular
from megatron_port.core.io.typed_json import LARGEST, WrongContent, parse_json

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

FORMAT = 1
REPORT, NETWORK = "preflight.json", "network.json"
GOOD, BAD, SELECTED = "good.txt", "bad.txt", "selected.txt"


def write_text(path: Path, text: str) -> None:
    """Write a whole file. Raises EnvironmentFault if the file system refuses."""
    write_output(path, text, advice="--out must be a folder that every node can write")


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write JSON as :func:`write_text` does, without secrets."""
    write_text(path, json.dumps(redacted(value), indent=1, ensure_ascii=False) + "\n")


def known(result: DataclassInstance) -> dict[str, Any]:
    """Return the fields of a result that hold something, for JSON."""
    return {name: value for name, value in asdict(result).items() if value not in (None, "", ())}


def read_json(path: Path) -> dict[str, Any]:
    """Return an object of this format. Raises EnvironmentFault for any other file; the message has which and why."""
    try:
        value = parse_json(read_regular(path, LARGEST))
    except (OSError, WrongContent) as error:
        raise EnvironmentFault(f"{path.name} cannot be read: {error}") from None
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise EnvironmentFault(f"{path.name} is not of format {FORMAT}; it is another version's")
    return value


def write_hosts(path: Path, hosts: Sequence[str]) -> None:
    """Write one line for ``srun --nodelist=`` or ``--exclude=``; an empty file for no host."""
    write_text(path, compress_hosts(hosts) + "\n" if hosts else "")


def read_hosts(path: Path) -> list[str]:
    """Return the hosts of a list that :func:`write_hosts` wrote; none if it is not there."""
    try:
        return expand_hosts(read_regular(path, LARGEST).decode("utf-8", "replace").strip())
    except OSError:
        return []


def read_reasons(path: Path) -> dict[str, str]:
    """Return node → reason, from lines with a tab between them; none if it is not there."""
    try:
        lines = read_regular(path, LARGEST).decode("utf-8", "replace").splitlines()
    except OSError:
        return {}
    return {name: reason for name, tab, reason in (line.partition("\t") for line in lines) if tab}
