"""How the ranks meet: in the store on rank 0 every rank leaves its name before any collective starts.

What is wrong is found here, within a deadline, and said once: a master that does not answer, a port that is taken,
two processes of one rank, ranks that are missing (with their hosts), ranks that run other versions or another
configuration. Rank 0 writes the verdict into the store, all ranks raise it, and rank 0 prints it.

Cost: one connection, and five store operations per rank: an ``add`` and a ``compare_set`` of about 60 bytes, an
``add``, a ``wait`` (on rank 0 a few checks), a ``check``. The first rank of each distinct fingerprint leaves 5 KB more.
Nothing grows with the world, except that rank 0 reads all names once something is wrong. From the last connection
to everyone's release, with all clients (threads) and the server on the same two cores: 1.5 s for 1,024 ranks,
2.4 s for 3,072.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import os
import platform
import random
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, Store

from megatron_port import __version__
from megatron_port.core.config.dump import leaves, toml_value
from megatron_port.core.dist.rank import ProcessInfo
from megatron_port.core.errors import EnvironmentFault, PortError
from megatron_port.core.io.logging import ranks_text
from megatron_port.core.package import package_versions
from megatron_port.run.discovery import holder_of_port, is_loopback, is_own_address, own_addresses, resolve_host

# What every rank of a run must have alike: versions, the size of the world, the resolved configuration.
#
# Two ranks whose fingerprints differ would train different models, or fail an hour later in a collective whose
# shapes do not match. Host names, local paths of the environment and devices are left out: they may differ.

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


# The TCP store in which the ranks of a run meet: rank 0 serves it, the others connect, within a deadline.

def listen(info: ProcessInfo) -> socket.socket:
    """Rank 0's socket, on one interface: that of the master's address. On all of them only where this host knows
    that address as a loopback one (Debian's 127.0.1.1), so that the others could not come otherwise.

    Raises:
        EnvironmentFault: the master's address is not this host's, or the port is taken (by whom, if the system tells).
    """
    where = f"{info.master_addr}:{info.master_port} ({info.sources.get('master_port', 'default')})"
    address = "0.0.0.0"
    if info.num_nodes == 1:
        address = "127.0.0.1" if is_loopback(info.master_addr) else info.master_addr
    else:
        address = next((a for a in _own_addresses(info) if not is_loopback(a)), address)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, info.master_port))
        listener.listen(max(128, min(info.world_size, 4096)))
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            holder = holder_of_port(info.master_port)
            raise EnvironmentFault(
                f"port {info.master_port} of {where} is taken on {info.hostname}{f' by {holder}' if holder else ''}; "
                f"end what uses it, or pass another --master-port"
            ) from None
        raise EnvironmentFault(
            f"rank 0 on {info.hostname} cannot listen on {where}: {error}; is the master address this host's own?"
        ) from None
    return listener


def _own_addresses(info: ProcessInfo) -> list[str]:
    """Which of the master's addresses are this host's. EnvironmentFault: none."""
    source = info.sources.get("master_addr", "default")
    try:
        addresses = resolve_host(info.master_addr)
    except OSError as error:
        raise EnvironmentFault(
            f"master {info.master_addr} ({source}) cannot be resolved on {info.hostname}: {error}"
        ) from None
    own = [a for a in addresses if is_own_address(a)]
    if not own:
        raise EnvironmentFault(
            f"rank 0 runs on {info.hostname}, and the master address {info.master_addr} ({source}; "
            f"{', '.join(sorted(set(addresses)))}) is not this host's, which has "
            f"{', '.join(own_addresses()) or 'no address but loopback'}; pass --master-addr {info.hostname}"
        )
    return own


def connect(info: ProcessInfo, timeout_s: float) -> Store:
    """The store, served by rank 0 or by torchrun's agent.

    Raises:
        EnvironmentFault: it cannot be served (see ``listen``), or nobody answers within ``timeout_s`` seconds; the
            message tells a refused connection, a missing route, silence and an unknown name apart. It is printed by
            the first rank of each node, because rank 0 may not be there to print it.
    """
    limit = timedelta(seconds=timeout_s)
    if info.rank == 0 and not info.agent_store:
        listener = listen(info)
        address, port = listener.getsockname()[:2]
        # The descriptor is the store's from here on. The host is only what its own client connects to.
        host = address if address != "0.0.0.0" else "127.0.0.1"
        return _apart(info, dist.TCPStore(
            host, port, info.world_size, True, limit, wait_for_workers=False, master_listen_fd=listener.detach()
        ))
    deadline = time.monotonic() + timeout_s
    why = _await_master(info.master_addr, info.master_port, deadline)
    if not why:
        found: list[Store] = []
        why = _join(info, max(1.0, deadline - time.monotonic()), found)
        if found:
            found[0].set_timeout(limit)
            return _apart(info, found[0])
    raise spoken_locally(info, EnvironmentFault(
        f"rank {info.rank} on {info.hostname} could not reach the master at {info.master_addr}:{info.master_port} "
        f"({info.sources.get('master_addr', 'default')}) within {timeout_s:g} s: {why}; "
        f"--master-addr and --master-port choose others"
    ))


def _apart(info: ProcessInfo, store: Store) -> Store:
    """Under keys of this run's own: of this attempt where torchrun's agent keeps the store, and behind the secret.

    The store lists its keys to whoever connects, so they show a digest of the secret, from which nothing follows.
    """
    if info.agent_store:
        store = PrefixStore(f"attempt {info.attempt}", store)
    digest = hmac.new(info.secret.encode(), b"rendezvous", hashlib.sha256).hexdigest()[:32]
    return PrefixStore(f"run {digest}", store) if info.secret else store


def _join(info: ProcessInfo, seconds: float, found: list[Store]) -> str:
    """Put the store into ``found``, or say why not. In a thread: torch waits for ever for a greeting of the server."""
    failed: list[str] = []

    def join() -> None:
        try:
            found.append(dist.TCPStore(
                info.master_addr, info.master_port, info.world_size, False, timedelta(seconds=seconds),
                wait_for_workers=False,
            ))
        except (dist.DistError, RuntimeError, ValueError) as error:
            failed.append(str(error).splitlines()[0])

    within(seconds, join)
    if found:
        return ""
    told = failed[0] if failed else "no greeting"
    return f"something listens there that is not this run's rendezvous, or it ended ({told})"


def spoken_locally(info: ProcessInfo, error: EnvironmentFault) -> EnvironmentFault:
    """Let the first rank of each node print it (on rank 0's node the second: it is rank 0 that is missing)."""
    error.is_reporter = info.rank == 0 or info.local_rank == (1 if info.node_rank == 0 else 0)
    return error


def _await_master(host: str, port: int, deadline: float) -> str:
    """Try until somebody listens there; an empty text, or why nobody did. Pauses grow to a second and are jittered."""
    pause, why = 0.05, "no time was left to try"
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((host, port), timeout=min(5.0, max(left, 0.1))):
                return ""
        except OSError as error:
            why = _reason(error, host)
        time.sleep(max(0.0, min(pause * random.uniform(0.5, 1.5), deadline - time.monotonic())))
        pause = min(2 * pause, 1.0)
    return why


def _reason(error: OSError, host: str) -> str:
    """Return the meaning of a failed connection for a user."""
    if isinstance(error, socket.gaierror):
        return f"{host} cannot be resolved ({error.strerror})"
    if isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
        return "no answer at all (timed out): the host is down, or a firewall drops the port"
    if error.errno == errno.ECONNREFUSED:
        return ("the host answers, but nobody listens on the port (connection refused): rank 0 has not started, "
                "has given up and ended, or runs on another host")
    if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        return "there is no route to it (unreachable): the host is down, or the address is of a network not shared"
    return str(error)


def within(seconds: float, action: Callable[[], None]) -> bool:
    """Run it in a thread that may be left behind: what a dead peer holds up must not hold up the exit; False: it did.

    Errors of the communication library are dropped: the action is a farewell.
    """
    def run() -> None:
        with contextlib.suppress(dist.DistError, RuntimeError):
            action()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


SHOWN = 16
"""Missing hosts that a message lists."""
GRACE_S = 10.0
"""After something is found to be wrong, the others may still report for so long, so that one message names them all."""
OUTLAST_S = 15.0
"""So much longer than rank 0 the others wait: it gives up first, and its verdict is everyone's."""


def meet(
    info: ProcessInfo, store: Store, *, timeout_s: float, fingerprint: Fingerprint, fault: PortError | None = None
) -> None:
    """Wait until every rank has reported and all agree.

    Args:
        timeout_s: from here on (seconds). Rank 0 gives up first; a rank that comes later finds its verdict.
        fingerprint: of this process.
        fault: what went wrong on this rank before; every rank raises it.

    Raises:
        EnvironmentFault: ranks are missing, two processes claim one rank, the fingerprints differ, a rank brought a
            fault (the same message on all ranks); or rank 0 ended meanwhile.
    """
    try:
        number = _report(info, store, timeout_s, fingerprint, fault)
        if number is not None and not store.check(["trouble"]):
            return
        error = _verdict(info, store, timeout_s, number)
        _part(info, store)
    except (dist.DistError, RuntimeError) as lost:
        raise spoken_locally(info, EnvironmentFault(
            f"rank {info.rank} on {info.hostname}: the master at {info.master_addr}:{info.master_port} ended while the "
            f"ranks were meeting ({str(lost).splitlines()[0]}); look at the log of rank 0"
        )) from None
    raise error


def _report(
    info: ProcessInfo, store: Store, timeout_s: float, fingerprint: Fingerprint, fault: PortError | None
) -> int | None:
    """Leave this rank's name and fingerprint, raise the alarm if they are wrong, wait for the others.

    Returns how many had reported when this rank did, itself included; None if time ran out.
    """
    digest = fingerprint.digest
    if store.add(f"like/{digest}", 1) == 1:  # the first of its kind leaves the details
        store.set(f"print/{digest}", fingerprint.to_json())
        kind = store.add("kinds", 1)
        store.set(f"kind/{kind}", digest)
        if kind > 1:
            _raise_alarm(store)
    me = json.dumps([info.hostname, os.getpid(), digest])
    held = store.compare_set(f"here/{info.rank}", "", me).decode()
    if held != me:
        host, pid, _ = json.loads(held)
        store.compare_set(
            "verdict", "", f"two processes claim rank {info.rank} of {info.world_size}: process {pid} on {host} and "
            f"process {os.getpid()} on {info.hostname}; each rank must be started once, by one srun or torchrun"
        )
        _raise_alarm(store)
        return 0
    if fault is not None:
        store.compare_set("fault", "", f"rank {info.rank} on {info.hostname}: {fault}")
        store.add("faults", 1)
        _raise_alarm(store)
    number = store.add("here", 1)
    if number == info.world_size:
        store.set("all", "yes")
    if info.rank == 0:  # asks again and again: torch prints warnings when a wait runs out, and here that is expected
        until, pause = time.monotonic() + timeout_s, 0.001
        while not store.check(["all"]):
            if time.monotonic() > until:
                return None
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        return number
    try:
        store.wait(["all"], timedelta(seconds=timeout_s + OUTLAST_S))
    except (dist.DistError, RuntimeError):
        store.check(["all"])  # raises if it was the store that ended, not the time
        return None
    return number


def _raise_alarm(store: Store) -> None:
    """Something is wrong: nobody need wait for more ranks."""
    store.set("trouble", "yes")
    store.set("all", "yes")


def _verdict(info: ProcessInfo, store: Store, timeout_s: float, number: int | None) -> EnvironmentFault:
    """Return the error that all ranks raise. Rank 0 writes it; if it is absent (torchrun serves the store), the first
    rank to ask writes and prints it. ``number``: what ``_report`` returned.
    """
    wrote = False
    if not store.check(["verdict"]):
        mine = info.rank == 0 or (number is None and store.add("explainer", 1) == 1)
        if not mine:
            try:
                store.wait(["verdict"], timedelta(seconds=GRACE_S + OUTLAST_S))
            except (dist.DistError, RuntimeError):
                mine = store.add("explainer", 1) == 1
        if mine:
            text = _missing(info, store, timeout_s) if number is None else _explain(info, store)
            store.compare_set("verdict", "", text)
            wrote = True
        if number is None:
            _raise_alarm(store)
    error = EnvironmentFault(store.get("verdict").decode())
    if number is not None and store.check(["closed"]) and number > int(store.get("closed")):
        late = f"rank {info.rank} on {info.hostname} came after the others had given up: {error}"
        return spoken_locally(info, EnvironmentFault(late))
    if wrote and info.rank != 0 and not store.check(["here/0"]):
        error.is_reporter = True
    return error


def _explain(info: ProcessInfo, store: Store) -> str:
    """Faults that ranks brought, or how their fingerprints differ."""
    until = time.monotonic() + GRACE_S
    while store.add("here", 0) < info.world_size and time.monotonic() < until and not store.check(["verdict"]):
        time.sleep(0.1)
    if store.check(["fault"]):
        others = store.add("faults", 0) - 1
        more = f" ({others} more rank{'s' if others > 1 else ''} brought a fault)" if others else ""
        return store.get("fault").decode() + more
    prints = _prints(store)
    hosts, ranks = _names(store, max(int(p.versions[WORLD]) for p in prints.values()))
    return differences(prints, ranks, lambda found: f"{_some_hosts(info, found, hosts, 4)} ({ranks_text(found)})")


def _prints(store: Store) -> dict[str, Fingerprint]:
    """Every distinct fingerprint by its digest."""
    digests = [store.get(f"kind/{k}").decode() for k in range(1, store.add("kinds", 0) + 1)]
    return {digest: Fingerprint.from_json(store.get(f"print/{digest}").decode()) for digest in digests}


def _names(store: Store, world: int) -> tuple[dict[int, str], dict[str, list[int]]]:
    """(rank → host, digest → ranks) of those that have reported. Two operations per rank: only when something is wrong.

    ``world``: the largest that any rank was told of.
    """
    hosts: dict[int, str] = {}
    kinds: dict[str, list[int]] = {}
    for rank in range(world):
        if store.check([f"here/{rank}"]):
            host, _, digest = json.loads(store.get(f"here/{rank}").decode())
            hosts[rank] = host
            kinds.setdefault(digest, []).append(rank)
    return hosts, kinds


def _missing(info: ProcessInfo, store: Store, timeout_s: float) -> str:
    """Return which ranks have not reported, and where they should be."""
    hosts, _ = _names(store, info.world_size)
    missing = [r for r in range(info.world_size) if r not in hosts]
    store.set("closed", str(len(hosts)))
    others = "nobody else did either" if len(hosts) == 1 else "the others did"
    return (
        f"{len(missing)} of {info.world_size} ranks did not report to {info.master_addr}:{info.master_port} within "
        f"{timeout_s:g} s: {places(info, missing, hosts)}; {others}. Look at their nodes and logs; if they start "
        f"slowly, raise launch.rendezvous_timeout"
    )


def places(info: ProcessInfo, ranks: list[int], known: dict[int, str]) -> str:
    """Return ``all of n2, n3 (ranks 8-23); ranks 25-26 (n4)``: whole nodes by name, the rest by rank.

    Args:
        ranks: sorted.
        known: rank → host of the ranks that have reported, for nodes that the launcher does not name.
    """
    by_node: dict[int, list[int]] = {}
    for rank in ranks:
        by_node.setdefault(info.node_of(rank), []).append(rank)
    met = {info.node_of(rank) for rank in known}
    whole = [n for n in by_node if n not in met]
    parts = []
    if whole:
        found = [r for n in whole for r in by_node[n]]
        parts.append(f"all of {_some_hosts(info, found, known)} ({ranks_text(found)})")
    split = [n for n in by_node if n in met]
    parts += [f"{ranks_text(by_node[n])} ({_host(info, by_node[n][0], known)})" for n in split[:SHOWN]]
    if len(split) > SHOWN:
        parts.append(f"and some of {len(split) - SHOWN} more nodes")
    return "; ".join(parts)


def _host(info: ProcessInfo, rank: int, known: dict[int, str]) -> str:
    """The host of a rank: its own word, the launcher's, a neighbour's, or the number of the node."""
    told = known.get(rank) or info.host_of(rank)
    node = info.node_of(rank)
    if told is None:
        told = next((host for other, host in known.items() if info.node_of(other) == node), None)
    return told or f"node {node}"


def _some_hosts(info: ProcessInfo, ranks: list[int], known: dict[int, str], shown: int = SHOWN) -> str:
    hosts = list(dict.fromkeys(_host(info, r, known) for r in ranks))
    return ", ".join(hosts[:shown]) + (f" and {len(hosts) - shown} more hosts" if len(hosts) > shown else "")


def _arrived(store: Store) -> int:
    """Processes that have left a fingerprint, also those that have no rank of their own."""
    kinds = [f"kind/{k}" for k in range(1, store.add("kinds", 0) + 1)]
    return sum(store.add(f"like/{store.get(kind).decode()}", 0) for kind in kinds if store.check([kind]))


def _part(info: ProcessInfo, store: Store, wait_s: float = 10.0) -> None:
    """Rank 0, which serves the store, stays until those who have come have read the verdict (``wait_s`` at most)."""
    told = store.add("told", 1)
    if info.rank != 0 or info.agent_store:
        return
    until = time.monotonic() + wait_s
    while told < _arrived(store) and time.monotonic() < until:
        time.sleep(0.05)
        told = store.add("told", 0)


def leave(info: ProcessInfo, store: Store, wait_s: float) -> None:
    """At the end: rank 0 waits until the others no longer need the store (at most ``wait_s`` seconds)."""
    try:
        if store.add("bye", 1) == info.world_size:
            store.set("gone", "yes")
        elif info.rank == 0 and not info.agent_store:
            store.wait(["gone"], timedelta(seconds=wait_s))
    except (dist.DistError, RuntimeError):
        pass  # a peer is gone already: there is nobody left to wait for


def abandon(info: ProcessInfo, store: Store, wait_s: float = 1.0) -> None:
    """``leave`` on an error: a store that is gone is not asked (torch would print its stack), and rank 0 waits less."""
    if info.agent_store:
        return
    if info.rank != 0:
        with contextlib.suppress(OSError):
            socket.create_connection((info.master_addr, info.master_port), timeout=1.0).close()
            store.add("bye", 1)
        return
    until = time.monotonic() + wait_s
    while store.add("bye", 0) < info.world_size - 1 and time.monotonic() < until:
        time.sleep(0.05)


# Start and stop of the default process group, with a deadline and faults that name the rank.
#
# The ranks first meet in a TCP store (``meet``): rank 0 listens, everyone writes its name, and
# only when all have reported is the process group made. Hence a missing rank is
# named, instead of a collective that hangs without saying for whom.

SHARE_DEVICES = "set backend.share_devices = true (collectives then go over gloo, through host memory: slow)"


@dataclass(frozen=True, eq=False)
class StartedGroup:
    """The default group of this process."""

    info: ProcessInfo
    backend: str
    """For groups that move this device's tensors: nccl, or gloo where ranks share a GPU."""
    store: Store


def _interface(info: ProcessInfo) -> str | None:
    """The network interface by which this host reaches the master; None: leave it to gloo."""
    if info.num_nodes == 1:
        return "lo" if Path("/sys/class/net/lo").exists() else None
    import psutil

    try:
        target = resolve_host(info.master_addr)[0]
        with socket.socket(socket.AF_INET6 if ":" in target else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((target, info.master_port))  # sends nothing, only chooses a route
            own = probe.getsockname()[0]
    except OSError:
        return None
    names = [name for name, found in psutil.net_if_addrs().items() if any(a.address == own for a in found)]
    return None if is_loopback(own) or not names else names[0]


def _shared_device(info: ProcessInfo, store: Store, identity: str) -> str:
    """Return, on all ranks alike, which ranks hold one GPU (the first such GPU found); empty if each has its own.

    Collective. A few small store operations per rank.
    """
    key = f"device/{info.hostname}/{identity}"
    count = store.add(key, 1)
    store.set(f"{key}/{count}", str(info.rank))
    if count > 1:
        store.compare_set("device/shared", "", key)
    if store.add("device/count", 1) == info.world_size:
        store.set("device/all", "yes")
    store.wait(["device/all"])
    if not store.check(["device/shared"]):
        return ""
    key = store.get("device/shared").decode()
    holders = sorted(int(store.get(f"{key}/{i + 1}")) for i in range(store.add(key, 0)))
    _, host, gpu = key.split("/", 2)
    return f"{ranks_text(holders)} on {host} hold the same GPU ({gpu})"


def start(
    info: ProcessInfo,
    *,
    backend: str,
    timeout_s: float = 300.0,
    group_timeout_s: float = 1800.0,
    device_identity: str = "",
    share_devices: bool = False,
    fault: PortError | None = None,
    fingerprint: Fingerprint | None = None,
) -> StartedGroup:
    """Bring up the default process group.

    Its CPU tensors go over gloo always; with ``backend`` nccl the GPU's go over NCCL. gloo connects two ranks when
    they first exchange something (TORCH_GLOO_LAZY_INIT, unless set otherwise): three store operations and 0.5 KB a
    rank. Its full mesh reads 10 bytes times the world squared a rank from the store (measured with 8 to 64 ranks:
    2 to 43 KB), which for 3,072 ranks is 300 GB through rank 0, and 3,071 sockets each.

    Args:
        backend: ``gloo`` | ``nccl``.
        timeout_s: for the master to answer, and from then on for all ranks to report (seconds).
        group_timeout_s: of a collective (seconds).
        device_identity: what tells a GPU from the others of its host (``DeviceInfo.identity``). Empty: not checked.
        share_devices: ranks may hold the same GPU; gloo then replaces nccl, which would refuse.
        fault: what went wrong on this rank before (no GPU, say); every rank then raises it.
        fingerprint: what all ranks must have alike (None: versions and world size only).

    Raises:
        EnvironmentFault: the port is taken, the master cannot be reached, ranks are missing or differ (one message,
            on all ranks), a rank brought a fault, ranks share a GPU and may not, or the collective library does not
            start.
    """
    if dist.is_initialized():
        raise EnvironmentFault("torch.distributed is running already in this process; start() must be first to use it")
    interface = _interface(info)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    store = connect(info, timeout_s)
    meet(info, store, timeout_s=timeout_s, fingerprint=fingerprint or Fingerprint.of(info.world_size), fault=fault)
    if backend == "nccl" and device_identity:
        shared = _shared_device(info, store, device_identity)
        if shared and not share_devices:
            leave(info, store, timeout_s)  # rank 0 serves the store until all have read it
            raise EnvironmentFault(
                f"{shared}, and NCCL takes one rank per GPU. Start one rank per GPU, or show each rank its own "
                f"(srun --gpus-per-task=1), or {SHARE_DEVICES}"
            )
        if shared:
            backend = "gloo"
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo",
            store=PrefixStore("world", store), rank=info.rank, world_size=info.world_size,
            timeout=timedelta(seconds=group_timeout_s),
        )
    except (dist.DistError, RuntimeError) as error:
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
        raise EnvironmentFault(
            f"rank {info.rank} on {info.hostname}: {backend} did not start over interface "
            f"\"{interface or 'of its own choice'}\": {str(error).splitlines()[0]}; GLOO_SOCKET_IFNAME chooses another"
        ) from None
    return StartedGroup(info, backend, store)


_ABORTING = threading.Lock()


def abort_collectives() -> None:
    """Abort NCCL's communicators, from any thread: a rank that waits in one of them leaves it with an error."""
    abort = getattr(distributed_c10d, "_abort_process_group", None)
    if not _ABORTING.acquire(blocking=False):
        return  # another thread is at it
    try:
        with contextlib.suppress(dist.DistError, RuntimeError, ValueError):
            if abort is not None and dist.is_initialized() and "nccl" in dist.get_backend_config():
                abort()
    finally:
        _ABORTING.release()


def stop(group: StartedGroup, *, wait_s: float = 10.0, failed: bool = False, replaced: bool = False) -> None:
    """Take the default group down, and with it all others.

    Rank 0, which serves the store, leaves last: a dead rank delays it ``wait_s`` seconds.

    Args:
        failed: this rank leaves on an error, perhaps because a peer died. Then NCCL's communicators are aborted
            (an orderly end waits for the peers), nothing is raised, and it all takes 7 seconds at most.
        replaced: ranks that are lost are replaced: nobody takes leave of ranks that are about to meet again.
    """
    if not failed:
        if dist.is_initialized():
            dist.destroy_process_group()
        leave(group.info, group.store, wait_s)
        return
    if dist.is_initialized():
        within(5.0, abort_collectives if group.backend == "nccl" else dist.destroy_process_group)
    if not replaced:
        within(2.0, lambda: abandon(group.info, group.store))
