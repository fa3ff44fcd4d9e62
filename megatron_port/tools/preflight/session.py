"""``preflight network`` on one rank: meet, measure, and on rank 0 read the library's log, write and print."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_port import __version__
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.dist.agree import attempt
from megatron_port.core.dist.mesh import Topology
from megatron_port.core.dist.rank import DeviceInfo, ProcessInfo
from megatron_port.core.errors import EnvironmentFault, PortError
from megatron_port.core.io.variables import node_name, variables
from megatron_port.run import rendezvous as process_group
from megatron_port.run.device import choose_device
from megatron_port.run.launchers import attempt_name, compress_hosts
from megatron_port.tools.preflight import node_file as files
from megatron_port.tools.preflight.core import LoadedNetwork, parse_log, plugin_problem
from megatron_port.tools.preflight.exchange import gather_place, meet
from megatron_port.tools.preflight.network import (
    NetworkResult,
    check_network,
    default_sizes,
    groups_across_nodes,
    render,
)

LONGEST_WAIT_S = 120.0
"""A message that takes longer is taken for lost (launch.collective_timeout, if that is less)."""
LOG_PATTERN = "nccl-rank*.log"


def network_check(
    config: RunConfig, info: ProcessInfo, folder: Path, topology_of: Callable[[RunConfig], Topology], *,
    message: int = 0,
) -> NetworkResult:
    """Check the network. Collective; rank 0 writes network.json, good.txt and bad.txt, and prints.

    Args:
        topology_of: gives the rank grid of a resolved run (``run.build``).
        message: bytes between two ranks (0: by device).

    Raises:
        EnvironmentFault: launcher, rendezvous or device; a message or a collective that failed, with the hosts.
    """
    device, fault = device_or_fault(config, info)
    if device is not None and device.is_gpu:
        torch.cuda.set_device(device.torch_device)
        _ask_library(folder, info)
    wait = min(LONGEST_WAIT_S, config.launch.collective_timeout)
    group = process_group.start(
        info, backend=device.comm_backend if device else "gloo", timeout_s=config.launch.rendezvous_timeout,
        group_timeout_s=wait, device_identity=device.identity if device and device.is_gpu else "",
        share_devices=config.backend.share_devices, fault=fault,
    )
    assert device is not None  # start raised the fault
    failed = True
    try:
        messages = device.torch_device if group.backend == "nccl" else torch.device("cpu")
        place = gather_place(node_name(), messages)
        groups = groups_across_nodes(config, info.world_size, place.lanes, topology_of, two_way=group.backend == "nccl")
        # Before the group's own limit, so that the fault is ours and on every rank.
        result = check_network(place, config.preflight, default_sizes(messages, message), groups=groups,
                               timeout_s=0.8 * wait)
        if info.rank == 0:
            loaded = read_logs(folder, place.hosts, place.node_of) if group.backend == "nccl" else {}
            judge_library(result, loaded, config.preflight.network_plugin)
            print(describe_library(loaded, group.backend, variables(prefixes=("GLOO_SOCKET_IFNAME",))))
            print(render(result))
            for text in result.faults:
                print(f"fault of the job: {text}")
            write_network(folder, result, loaded, group.backend)
        meet()  # nobody ends, and has srun end the others, before the files are written
        failed = False
    finally:
        process_group.stop(group, failed=failed)
    return result


def device_or_fault(config: RunConfig, info: ProcessInfo) -> tuple[DeviceInfo | None, PortError | None]:
    """Return this rank's device, or what is wrong with it, for all ranks to know."""
    return attempt(lambda: choose_device(
        config.backend.device, local_rank=info.local_rank, local_world_size=info.local_world_size,
        share=config.backend.share_devices,
    ))


def _ask_library(folder: Path, info: ProcessInfo) -> None:
    """Let NCCL or RCCL log what it loads, on one rank per node; before its first communicator."""
    if info.local_rank:
        return
    path = folder / f"nccl-rank{info.rank}.log"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
    except OSError as error:
        raise EnvironmentFault(f"{path} cannot be written: {error}") from None
    os.environ["NCCL_DEBUG"] = "INFO"
    os.environ["NCCL_DEBUG_SUBSYS"] = "INIT,NET"
    os.environ["NCCL_DEBUG_FILE"] = str(path)


def read_logs(folder: Path, hosts: list[str], node_of: list[int]) -> dict[str, LoadedNetwork]:
    """Return host → what its log shows; hosts whose log is missing are left out."""
    out = {}
    for path in sorted(folder.glob(LOG_PATTERN)):
        digits = path.stem.removeprefix("nccl-rank")
        if digits.isdigit() and int(digits) < len(node_of):
            with open(path, encoding="utf-8", errors="replace") as lines:
                out[hosts[node_of[int(digits)]]] = parse_log(lines)
    return out


def judge_library(result: NetworkResult, loaded: Mapping[str, LoadedNetwork], wanted: str) -> None:
    """Add what is wrong with the loaded network: to the job if all nodes share it, otherwise to the nodes.

    One node needs no network, so nothing is asked of it.
    """
    problems = {host: problem for host, found in loaded.items() if (problem := plugin_problem(found, wanted))}
    if len(result.place.hosts) < 2 or not problems:
        return
    if len(problems) == len(result.place.hosts):
        for text, fix in dict.fromkeys(problems.values()):
            result.faults.append(f"{text}; {fix}")
        return
    for host, (text, fix) in problems.items():
        result.bad.setdefault(host, f"{text}, unlike the other nodes; {fix}")


def describe_library(loaded: Mapping[str, LoadedNetwork], backend: str, settings: Mapping[str, str]) -> str:
    """Return one line for each kind of network that was loaded, with its hosts."""
    if backend != "nccl":
        name = settings.get("GLOO_SOCKET_IFNAME", "")
        return f"library: gloo over {name or 'the interface of the host name'}"
    if not loaded:
        return "library: NCCL/RCCL wrote no debug output"
    kinds: dict[str, list[str]] = {}
    for host, found in loaded.items():
        direct = "" if found.gpu_direct is None else "on" if found.gpu_direct else "off"
        named = (
            ("{}", found.version), ("network {}", found.network or "unknown"), ("plug-in {}", found.plugin),
            ("provider {}", found.provider), ("{} network devices", found.devices),
            ("interfaces {}", ", ".join(found.interfaces)), ("bootstrap over {}", found.bootstrap),
            ("GPU Direct RDMA {}", direct), ("{}", found.fault),
        )
        parts = [form.format(value) for form, value in named if value]
        kinds.setdefault("; ".join(parts), []).append(host)
    return "\n".join(f"library: {text} ({compress_hosts(hosts)})" for text, hosts in kinds.items())


def write_network(folder: Path, result: NetworkResult, loaded: Mapping[str, LoadedNetwork], backend: str) -> None:
    """Write network.json and the lists, from which the bad nodes are removed."""
    content: dict[str, Any] = {
        "format": files.FORMAT, "attempt": attempt_name(), "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "version": __version__, "torch": torch.__version__, "backend": backend,
        **result.as_json(), "library": {host: files.known(found) for host, found in loaded.items()},
    }
    files.write_json(folder / files.NETWORK, content)
    good, bad = files.read_hosts(folder / files.GOOD), files.read_hosts(folder / files.BAD)
    good += [h for h in result.place.hosts if h not in good and h not in bad]
    bad += [h for h in result.bad if h not in bad]
    files.write_hosts(folder / files.GOOD, [h for h in good if h not in bad])
    files.write_hosts(folder / files.BAD, bad)
