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
import json
import os
import socket
import time
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from megatron_port.core.errors import EnvironmentFault, PortError
from megatron_port.core.dist.discovery import ProcessInfo
from megatron_port.core.dist.fingerprint import WORLD, Fingerprint, differences
from megatron_port.core.io.logging import ranks_text
from megatron_port.core.dist.master_store import spoken_locally

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
