"""The TCP store in which the ranks of a run meet: rank 0 serves it, the others connect, within a deadline."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import random
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from megatron_port.core.errors import EnvironmentFault
from megatron_port.core.dist.discovery import ProcessInfo, is_loopback, resolve_host
from megatron_port.core.dist.sockets import holder_of_port, is_own_address, own_addresses


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
