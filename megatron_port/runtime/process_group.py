"""Start and stop of the default process group, with a deadline and faults that name the rank.

The ranks first meet in a TCP store: rank 0 listens, everyone writes its name, and
only when all have reported is the process group made. Hence a missing rank is
named, instead of a collective that hangs without saying for whom.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from megatron_port.errors import EnvironmentFault, PortError
from megatron_port.runtime.discovery import ProcessInfo, is_loopback, resolve_host

SHOWN = 16
"""Missing ranks that a message lists."""


@dataclass(frozen=True, eq=False)
class StartedGroup:
    """The default group of this process."""

    info: ProcessInfo
    backend: str
    """For groups that move this device's tensors: nccl, or gloo where ranks share a GPU."""
    store: Store


def _listen(info: ProcessInfo) -> socket.socket:
    """Rank 0's socket: on the master's address where that is this host's own, else on all; EnvironmentFault."""
    address = "0.0.0.0"
    if info.num_nodes == 1:
        address = "127.0.0.1" if is_loopback(info.master_addr) else info.master_addr
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, info.master_port))
        listener.listen(max(128, min(info.world_size, 4096)))
    except OSError as error:
        listener.close()
        where = f"{info.master_addr}:{info.master_port} ({info.sources.get('master_port', 'default')})"
        if error.errno == errno.EADDRINUSE:
            raise EnvironmentFault(
                f"port {info.master_port} of {where} is taken on {info.hostname}; another run is using it: "
                f"end it, or pass another --master-port"
            ) from None
        raise EnvironmentFault(
            f"rank 0 on {info.hostname} cannot listen on {where}: {error}; is the master address this host's own?"
        ) from None
    return listener


def _connect(info: ProcessInfo, timeout_s: float) -> Store:
    """The store, served by rank 0 or by torchrun's agent; EnvironmentFault if it cannot be reached."""
    limit = timedelta(seconds=timeout_s)
    if info.rank == 0 and not info.agent_store:
        listener = _listen(info)
        address, port = listener.getsockname()[:2]
        # The descriptor is the store's from here on. The host is only what its own client connects to.
        host = address if address != "0.0.0.0" else "127.0.0.1"
        return dist.TCPStore(
            host, port, info.world_size, True, limit, wait_for_workers=False, master_listen_fd=listener.detach()
        )
    try:
        store: Store = dist.TCPStore(
            info.master_addr, info.master_port, info.world_size, False, limit, wait_for_workers=False
        )
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise EnvironmentFault(
            f"rank {info.rank} on {info.hostname} could not reach the master at {info.master_addr}:{info.master_port} "
            f"({info.sources.get('master_addr', 'default')}) within {timeout_s:g} s: {str(error).splitlines()[0]}; "
            f"is rank 0 running, and is the port open between the nodes? --master-addr and --master-port choose others"
        ) from None
    return PrefixStore(f"attempt {info.attempt}", store) if info.agent_store else store


def _ranges(ranks: list[int]) -> str:
    """``1, 4-7`` of sorted numbers, cut after some."""
    pieces: list[list[int]] = []
    for rank in ranks:
        if pieces and rank == pieces[-1][1] + 1:
            pieces[-1][1] = rank
        else:
            pieces.append([rank, rank])
    text = [str(a) if a == b else f"{a}-{b}" for a, b in pieces[:SHOWN]]
    return ", ".join(text) + (" …" if len(pieces) > SHOWN else "")


def _leave_together(info: ProcessInfo, store: Store, name: str, wait_s: float) -> None:
    """Rank 0, which serves the store, waits until the others no longer need it (at most ``wait_s`` seconds)."""
    try:
        last = store.add(f"{name}/count", 1) == info.world_size
        if last:
            store.set(f"{name}/all", "yes")
        elif info.rank == 0:
            store.wait([f"{name}/all"], timedelta(seconds=wait_s))
    except (dist.DistError, RuntimeError):
        pass  # a peer is gone already: there is nobody left to wait for


def _meet(
    info: ProcessInfo, store: Store, deadline: float, timeout_s: float, fault: PortError | None = None
) -> None:
    """Wait until every rank has reported; EnvironmentFault names those that have not, or tells the first fault."""
    store.set(f"here/{info.rank}", info.hostname)
    if fault is not None:
        store.compare_set("fault", "", f"rank {info.rank} on {info.hostname}: {fault}")
    if store.add("here/count", 1) == info.world_size:
        store.set("here/all", "yes")
    left = max(0.1, deadline - time.monotonic())
    try:
        # The others wait a little longer, so that rank 0 still finds their names and can leave them a list.
        store.wait(["here/all"], timedelta(seconds=left if info.rank == 0 else left + 5))
    except (dist.DistError, RuntimeError):
        if info.rank:
            raise EnvironmentFault(
                f"rank {info.rank} on {info.hostname}: not all of {info.world_size} ranks reported to "
                f"{info.master_addr}:{info.master_port} within {timeout_s:g} s; rank 0 lists the missing"
            ) from None
        missing = [r for r in range(info.world_size) if not store.check([f"here/{r}"])]
        raise EnvironmentFault(
            f"{len(missing)} of {info.world_size} ranks did not report within {timeout_s:g} s: {_ranges(missing)}; "
            f"look at their nodes' logs, or raise the time limit if their start is slow"
        ) from None
    if store.check(["fault"]):
        text = store.get("fault").decode()
        _leave_together(info, store, "told", 10.0)
        raise EnvironmentFault(text)


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


def _shares_device(info: ProcessInfo, store: Store, identity: str) -> bool:
    """True on all ranks if any two ranks hold the same device. Three small store operations a rank."""
    if store.add(f"device/{info.hostname}/{identity}", 1) > 1:
        store.set("device/shared", "yes")
    if store.add("device/count", 1) == info.world_size:
        store.set("device/all", "yes")
    store.wait(["device/all"])
    return bool(store.check(["device/shared"]))


def start(
    info: ProcessInfo,
    *,
    backend: str,
    timeout_s: float = 300.0,
    group_timeout_s: float = 1800.0,
    device_identity: str = "",
    fault: PortError | None = None,
) -> StartedGroup:
    """Bring up the default process group.

    Its CPU tensors go over gloo always; with ``backend`` nccl the GPU's go over NCCL.

    Args:
        backend: ``gloo`` | ``nccl``.
        timeout_s: for all ranks to report (seconds).
        group_timeout_s: of a collective (seconds).
        device_identity: a GPU's unique name; where two ranks hold the same one, gloo replaces nccl,
            which would refuse. Empty: not checked.
        fault: what went wrong on this rank before (no GPU, say); every rank then raises it.

    Raises:
        EnvironmentFault: the port is taken, the master cannot be reached, ranks are missing (rank 0 lists
            them), a rank brought a fault, or the collective library does not start.
    """
    if dist.is_initialized():
        raise EnvironmentFault("torch.distributed is running already in this process; start() must be first to use it")
    deadline = time.monotonic() + timeout_s
    interface = _interface(info)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    store = _connect(info, timeout_s)
    _meet(info, store, deadline, timeout_s, fault)
    if backend == "nccl" and device_identity and _shares_device(info, store, device_identity):
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


def stop(group: StartedGroup, *, wait_s: float = 10.0) -> None:
    """Take the default group down. Rank 0, which serves the store, leaves last: a dead rank delays it ``wait_s``."""
    info = group.info
    if dist.is_initialized():
        dist.destroy_process_group()
    _leave_together(info, group.store, "bye", wait_s)
