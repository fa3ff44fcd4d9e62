"""Which network NCCL or RCCL really loaded, read from its debug output (NCCL_DEBUG=INFO, subsystems INIT and NET)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

OFI_NAMES = ("aws libfabric", "libfabric", "ofi")
"""Names under which releases of the OFI plug-in (aws-ofi-nccl, aws-ofi-rccl) announce themselves."""
SLOW_PROVIDERS = ("tcp", "sockets", "udp", "net")
"""libfabric providers over the kernel's sockets."""


@dataclass(frozen=True)
class LoadedNetwork:
    """Network that one rank's log shows as loaded; empty where the log is silent."""

    network: str = ""
    """"AWS Libfabric", "Libfabric", "IB", "Socket" …"""
    plugin: str = ""
    """Plug-in library that was loaded, with its interface version."""
    provider: str = ""
    """libfabric's: cxi, efa, tcp …"""
    interfaces: tuple[str, ...] = ()
    """Interfaces used by IB or Socket."""
    devices: int | None = None
    """Network devices that the OFI plug-in found."""
    bootstrap: str = ""
    """Interface of the first contact, which is TCP always."""
    gpu_direct: bool | None = None
    """Whether a channel between nodes reads GPU memory directly; None: the log shows no such channel."""
    version: str = ""
    fault: str = ""
    """Why a plug-in that was asked for was not used."""


_NETWORK = re.compile(r"(?:NCCL INFO )Using network (.+?)\s*$")
_ASSIGNED = re.compile(r"Assigned NET plugin (.+?) to comm")
_LOADED = re.compile(r"NET/Plugin ?: Loaded net plugin (.+?) \((v\d+)\)")
_OFI = re.compile(r"NET/OFI (?:Using|Initializing) (aws-ofi-\S+(?: [\w.-]+)?)")
_PROVIDER = re.compile(r"NET/OFI Selected [Pp]rovider is ([^\s,(]+)")
_DEVICES = re.compile(r"\(found (\d+) nics?\)")
_USING = re.compile(r"NET/(IB|Socket) ?: Using (.+)$")
_INTERFACE = re.compile(r"\[\d+\]\s?([^:\s]+):")
_BOOTSTRAP = re.compile(r"Bootstrap ?: Using (?:\[\d+\])?([^:\s]+):")
_CHANNEL = re.compile(r"via NET/[^/]+/\d+(?:\(\d+\))?(/GDRDMA)?")
_VERSION = re.compile(r"\b([NR]CCL version) ?:? ?(\d[\w.+-]*)")
_FAULTS = (
    re.compile(r"NET/Plugin ?: (?:Could not find:? ?|No plugin found \()([^\s)]+)"),
    re.compile(r"NCCL WARN .*?network (.+?) not found"),
    re.compile(r"NET/OFI (.*(?:[Nn]o eligible providers|could not find any|initialization failed).*)$"),
)


def parse_log(lines: Iterable[str]) -> LoadedNetwork:
    """Parse the debug output of one process. Lines of other programs are skipped."""
    found: dict[str, Any] = {}
    interfaces: dict[str, tuple[str, ...]] = {}
    faults: list[str] = []
    for line in lines:
        line = line.rstrip()
        if m := _NETWORK.search(line) or _ASSIGNED.search(line):
            found["network"] = m.group(1)
        elif m := _LOADED.search(line):
            found["plugin"] = f"{m.group(1)} {m.group(2)}"
        elif m := _OFI.search(line):
            found.setdefault("plugin", m.group(1))
        elif m := _PROVIDER.search(line):
            found["provider"] = m.group(1)
            if d := _DEVICES.search(line):
                found["devices"] = int(d.group(1))
        elif m := _USING.search(line):
            listed = m.group(2).split(";")[0]
            interfaces[m.group(1)] = tuple(dict.fromkeys(_INTERFACE.findall(listed)))
        elif m := _BOOTSTRAP.search(line):
            found["bootstrap"] = m.group(1)
        elif m := _CHANNEL.search(line):
            found["gpu_direct"] = bool(m.group(1)) and found.get("gpu_direct", True)
        elif m := _VERSION.search(line):
            found["version"] = f"{m.group(1).split()[0]} {m.group(2)}"
        else:
            faults += [f"{m.group(1)} not found" if i < 2 else m.group(1)
                       for i, p in enumerate(_FAULTS) if (m := p.search(line))]
    if found.get("network") in interfaces:
        found["interfaces"] = interfaces[found["network"]]
    if faults and "plugin" not in found:
        found["fault"] = faults[-1]
    return LoadedNetwork(**found)


def same_network(a: str, b: str) -> bool:
    """Return whether two names mean one network; the OFI plug-in has had several."""
    a, b = a.strip().lower(), b.strip().lower()
    return a == b or (a in OFI_NAMES and b in OFI_NAMES)


def plugin_problem(loaded: LoadedNetwork, wanted: str) -> tuple[str, str] | None:
    """Return what is wrong with the loaded network, and what to do; None: nothing.

    Args:
        wanted: ``preflight.network_plugin``; empty: any.
    """
    ofi = wanted.strip().lower() in OFI_NAMES
    if loaded.network and ofi and same_network(loaded.network, wanted) and loaded.provider in SLOW_PROVIDERS:
        return (f"the OFI plug-in runs over libfabric's provider \"{loaded.provider}\", which is the kernel's sockets",
                "unset FI_PROVIDER, or set it to the machine's own (cxi on Slingshot, efa on AWS)")
    if not wanted or same_network(loaded.network, wanted):
        return None
    if not loaded.network:
        return (f"the debug output does not say which network was loaded ({wanted} was asked for)",
                "look into the nccl-rank*.log files beside network.json")
    over = f" over {', '.join(loaded.interfaces)}" if loaded.interfaces else ""
    why = f" ({loaded.fault})" if loaded.fault else ""
    text = f"NCCL/RCCL runs on {loaded.network}{over}, not on {wanted}{why}"
    if ofi:
        return text, (
            "load the OFI plug-in ahead of srun (Frontier: module load rccl-net-plugin; else put the folder of "
            "libnccl-net-ofi.so or librccl-net.so into LD_LIBRARY_PATH), name it in NCCL_NET_PLUGIN if it has "
            "another name, and do not set NCCL_NET=Socket"
        )
    return text, f"set NCCL_NET=\"{wanted}\"; if that fails to start, its library is not in LD_LIBRARY_PATH"
