"""Start and stop of the default process group, with a deadline and faults that name the rank.

The ranks first meet in a TCP store (``dist.rendezvous``): rank 0 listens, everyone writes its name, and
only when all have reported is the process group made. Hence a missing rank is
named, instead of a collective that hangs without saying for whom.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, Store

from megatron_port.core.errors import EnvironmentFault, PortError
from megatron_port.core.dist.discovery import ProcessInfo, is_loopback, resolve_host
from megatron_port.core.dist.fingerprint import Fingerprint
from megatron_port.core.io.logging import ranks_text
from megatron_port.core.dist.master_store import connect, within
from megatron_port.core.dist.rendezvous import abandon, leave, meet

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


def stop(group: StartedGroup, *, wait_s: float = 10.0, failed: bool = False) -> None:
    """Take the default group down, and with it all others.

    Rank 0, which serves the store, leaves last: a dead rank delays it ``wait_s`` seconds.

    Args:
        failed: this rank leaves on an error, perhaps because a peer died. Then NCCL's communicators are aborted
            (an orderly end waits for the peers), nothing is raised, and it all takes 7 seconds at most.
    """
    if not failed:
        if dist.is_initialized():
            dist.destroy_process_group()
        leave(group.info, group.store, wait_s)
        return
    if dist.is_initialized():
        abort = getattr(distributed_c10d, "_abort_process_group", None) if group.backend == "nccl" else None
        within(5.0, abort or dist.destroy_process_group)
    within(2.0, lambda: abandon(group.info, group.store))
