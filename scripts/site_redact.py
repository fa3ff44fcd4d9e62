"""What must not leave a site: taken out of every file of a report, before ``site_report`` packs them."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import re
import socket
import sys
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_port.core.errors import EnvironmentFault
from megatron_port.core.io.logging import redact as without_secrets
from megatron_port.core.io.logging import redacted as values_without_secrets
from megatron_port.run.launchers import expand_hosts

ROOT = Path(__file__).resolve().parent.parent
ADDRESS = re.compile(
    r"\b(?!127\.|0\.0\.0\.0)(?:\d{1,3}\.){3}\d{1,3}\b"  # IPv4, not this machine itself
    r"|(?<![\w:])(?:[0-9a-fA-F]{2}:){5}[0-9a-fA-F]{2}(?![\w:])"  # of a network card
    r"|(?<![\w:])[23fF][0-9a-fA-F]{3}(?::[0-9a-fA-F]{1,4}){0,6}::[0-9a-fA-F:]*"  # IPv6, shortened
    r"|(?<![\w:])(?:[0-9a-fA-F]{1,4}:){7}[0-9a-fA-F]{1,4}(?![\w:])"  # and whole
    r"|[\w.+-]+@[\w-]+\.[\w.-]+"  # mail
)
PLACES = ("TMPDIR", "SCRATCH", "WORK", "PROJWORK", "MEMBERWORK", "WORLDWORK", "PROJECT", "STORE", "PSCRATCH")
"""Variables that name folders of a user or a project."""
ORDINARY = {"root", "user", "users", "gpu", "cpu", "node", "home", "work", "data", "test", "slurm", "torch", "python",
            "localhost", "ubuntu", "debian", "admin", "build", "runner"}
"""Names of users and hosts that say nothing, and stand in the texts for other things."""


def host_names() -> dict[str, str]:
    """Names of this host and of the job's nodes, whole and short → HOST, HOST-2, … in the job's order."""
    here = [socket.gethostname(), socket.getfqdn()]
    nodes: list[str] = []
    with contextlib.suppress(EnvironmentFault):
        nodes = expand_hosts(os.environ.get("SLURM_JOB_NODELIST", ""))
    short = here[0].split(".")[0]
    found = dict.fromkeys([*here, short], "HOST")
    others = [n for n in nodes if n.split(".")[0] != short]
    for number, node in enumerate(others, 2):
        found |= {node: f"HOST-{number}", node.split(".")[0]: f"HOST-{number}"}
    return found


def replacements() -> list[tuple[str, str]]:
    """Names that must not leave this machine, longest first, and what stands in their place."""
    known = {str(ROOT): "CHECKOUT", str(Path.home()): "HOME", sys.prefix: "ENVIRONMENT", sys.base_prefix: "PYTHON",
             **host_names()}
    for name in ("SLURM_SUBMIT_DIR", "PWD"):  # the same folders by way of links
        known.setdefault(os.environ.get(name, ""), "CHECKOUT")
    known.setdefault(str(Path(sys.prefix).resolve()), "ENVIRONMENT")
    for name in PLACES:
        if os.environ.get(name, "").startswith("/"):
            known.setdefault(os.environ[name].rstrip("/"), name)
    with contextlib.suppress(KeyError, OSError):
        known[getpass.getuser()] = "USER"
    for name in ("SLURM_JOB_ACCOUNT", "SLURM_JOB_USER", "SLURM_SUBMIT_HOST", "SLURM_CLUSTER_NAME"):
        if os.environ.get(name):
            known.setdefault(os.environ[name], name)
    # Names as ordinary as "root" or "/usr" stand in the texts for other things.
    ordinary = ORDINARY | {"/", "/usr", "/usr/local", "/tmp", "/root"}
    telling = {old: new for old, new in known.items() if len(old) > 1 and old not in ordinary}
    return sorted(telling.items(), key=lambda pair: -len(pair[0]))


def redact(text: str, names: Iterable[tuple[str, str]]) -> str:
    """The text without secrets, names and addresses."""
    text = without_secrets(text)
    for old, new in names:
        text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(old)}(?![A-Za-z0-9])", new, text)
    return ADDRESS.sub("ADDRESS", text)


def redact_json(value: Any, names: Iterable[tuple[str, str]]) -> Any:
    """The same for what was read from JSON: every text in it and every key; numbers stay."""
    names = list(names)

    def clean(item: Any) -> Any:
        if isinstance(item, str):
            return redact(item, names)
        if isinstance(item, dict):
            return {redact(key, names): clean(inner) for key, inner in item.items()}
        return [clean(inner) for inner in item] if isinstance(item, list) else item

    return clean(values_without_secrets(value))


def redact_file(path: Path, names: list[tuple[str, str]]) -> None:
    """In place; a file that is no text is removed: recorded gradients and the like, whose tables say what they hold."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        path.unlink()
        return
    with contextlib.suppress(ValueError):
        if path.suffix == ".json":  # as values, so that it stays JSON
            indent = 1 if "\n" in text.strip() else None
            path.write_text(json.dumps(redact_json(json.loads(text), names), indent=indent) + "\n", encoding="utf-8")
            return
    path.write_text(redact(text, names), encoding="utf-8")


def pack(folder: Path, archive: Path, given: Iterable[tuple[str, str]] = ()) -> None:
    """Redact every file in place and put all into the archive, which is whole or not there. ``given``: further names
    and what stands for them."""
    names = [*given, *replacements()]
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            path.unlink()  # what it names lies elsewhere
        elif path.is_file():
            redact_file(path, names)

    def anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        entry.name = redact(entry.name, names)
        return entry

    part = archive.with_name(f".{archive.name}.partial")
    with tarfile.open(part, "w:gz") as tar:
        tar.add(folder, arcname="site-report", filter=anonymous)
    with open(part, "rb") as stream:
        os.fsync(stream.fileno())
    part.replace(archive)
