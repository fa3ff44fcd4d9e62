"""Questions to the system about addresses and ports."""

from __future__ import annotations

import os
import socket
from pathlib import Path

LISTENING = "0A"
"""State in /proc/net/tcp."""


def is_own_address(address: str) -> bool:
    """True if this host has the address (a socket can be bound to it)."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def own_addresses() -> list[str]:
    """This host's IPv4 addresses, loopback left out."""
    import psutil

    found = [a.address for rows in psutil.net_if_addrs().values() for a in rows if a.family == socket.AF_INET]
    return sorted(a for a in set(found) if not a.startswith("127."))


def holder_of_port(port: int, proc: Path = Path("/proc")) -> str:
    """Return who listens on a TCP port: ``process 41 (python train.py)``, ``a process of user ann``; empty: unknown."""
    owners: dict[str, str] = {}
    for table in ("tcp", "tcp6"):
        try:
            rows = (proc / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            columns = row.split()
            if columns[3] == LISTENING and int(columns[1].rpartition(":")[2], 16) == port:
                owners[columns[9]] = columns[7]
    if not owners:
        return ""
    for folder in proc.glob("[0-9]*"):
        try:
            links = {os.readlink(entry) for entry in (folder / "fd").iterdir()}
        except OSError:
            continue  # another user's, or it has ended
        if any(f"socket:[{inode}]" in links for inode in owners):
            try:
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            except OSError:
                command = ""
            return f"process {folder.name} ({command[:80]})"
    return f"a process of user {_user_name(next(iter(owners.values())))}"


def _user_name(uid: str) -> str:
    import pwd

    try:
        return pwd.getpwuid(int(uid)).pw_name
    except (KeyError, ValueError):
        return uid
