"""What NCCL's and RCCL's debug output says of the network. The lines are shortened from real logs."""

from __future__ import annotations

import pytest

from megatron_port.tools.preflight.core import parse_log, plugin_problem, same_network
from megatron_port.tools.preflight.node_file import known

FRONTIER = """\
frontier00012:51404:51404 [0] NCCL INFO Bootstrap : Using hsn0:10.128.1.12<0>
frontier00012:51404:51404 [0] NCCL INFO RCCL version : 2.22.3-HEAD:1234abcd
frontier00012:51404:52019 [0] NCCL INFO NET/Plugin: Plugin name set by env to librccl-net-ofi.so
frontier00012:51404:52019 [0] NCCL INFO NET/Plugin: Failed to find ncclNetPlugin_v8 symbol.
frontier00012:51404:52019 [0] NCCL INFO NET/Plugin: Loaded net plugin AWS Libfabric (v5)
frontier00012:51404:52019 [0] NCCL INFO NET/OFI Using aws-ofi-rccl 1.4.0
frontier00012:51404:52019 [0] NCCL INFO NET/OFI Selected Provider is cxi (found 4 nics)
frontier00012:51404:52019 [0] NCCL INFO Using network AWS Libfabric
frontier00012:51404:52031 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/AWS Libfabric/0/GDRDMA
"""
NEW_NAME = """\
node-0-0:188:188 [0] NCCL INFO NCCL version 2.27.3+cuda12.9
node-0-0:188:585 [0] NCCL INFO NET/Plugin: Loaded net plugin Libfabric (v10)
node-0-0:188:585 [0] NCCL INFO NET/OFI Selected provider is efa, fabric is efa-direct (found 3 nics)
node-0-0:188:585 [0] NCCL INFO Initialized NET plugin Libfabric
node-0-0:188:585 [0] NCCL INFO Assigned NET plugin Libfabric to comm
node-0-0:188:585 [0] NCCL INFO Using network Libfabric
"""
SOCKET = """\
ubuntu:1482:1482 [0] NCCL INFO Bootstrap : Using eno1:172.22.116.89<0>
ubuntu:1482:1482 [0] NCCL INFO NET/Plugin: Could not find: libnccl-net.so
ubuntu:1482:1482 [0] NCCL INFO NET/IB : No device found.
ubuntu:1482:1482 [0] NCCL INFO NET/Socket : Using [0]eno1:172.22.116.89<0> [1]virbr0:192.168.193.155<0>
ubuntu:1482:1482 [0] NCCL INFO Using network Socket
ubuntu:1482:1490 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0
"""
OLD_SOCKET = """\
ip-172-31-8-153:45343:45343 [0] NCCL INFO NET/Plugin : No plugin found (libnccl-net.so).
ip-172-31-8-153:45343:45343 [0] NCCL INFO NET/Socket : Using [0]ens3:172.31.8.153<0>
"""
INFINIBAND = """\
gpu02:35637:35637 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB/SHARP [1]mlx5_1:1/RoCE [RO]; OOB enp41s0f1:10.0.0.2<0>
gpu02:35637:35637 [0] NCCL INFO Using network IB
NCCL version 2.19.3+cuda12.3
gpu02:35637:35723 [0] NCCL INFO Channel 00/0 : 0[1b000] -> 9[1b000] [receive] via NET/IB/0(8)/GDRDMA
gpu02:35637:35723 [0] NCCL INFO Channel 01/0 : 0[1b000] -> 9[1b000] [receive] via NET/IB/1
"""


def test_slingshot_with_the_ofi_plugin() -> None:
    found = parse_log(FRONTIER.splitlines())
    assert (found.network, found.provider, found.devices) == ("AWS Libfabric", "cxi", 4)
    assert found.plugin == "AWS Libfabric v5" and found.bootstrap == "hsn0" and found.gpu_direct is True
    assert found.version == "RCCL 2.22.3-HEAD" and not found.fault
    assert plugin_problem(found, "AWS Libfabric") is None and plugin_problem(found, "OFI") is None


def test_the_plugin_under_its_newer_name() -> None:
    found = parse_log(NEW_NAME.splitlines())
    assert (found.network, found.provider, found.devices) == ("Libfabric", "efa", 3)
    assert found.version == "NCCL 2.27.3+cuda12.9" and found.gpu_direct is None
    assert plugin_problem(found, "AWS Libfabric") is None


def test_sockets_in_place_of_the_plugin_come_with_the_fix() -> None:
    found = parse_log(SOCKET.splitlines())
    assert found.network == "Socket" and found.interfaces == ("eno1", "virbr0") and found.gpu_direct is False
    problem = plugin_problem(found, "AWS Libfabric")
    assert problem is not None
    text, fix = problem
    assert "Socket over eno1, virbr0" in text and "libnccl-net.so not found" in text
    assert "module load rccl-net-plugin" in fix and "LD_LIBRARY_PATH" in fix and "NCCL_NET_PLUGIN" in fix
    assert plugin_problem(found, "") is None


def test_a_log_that_says_nothing_of_the_network_is_a_problem_only_where_one_is_asked_for() -> None:
    found = parse_log(OLD_SOCKET.splitlines())
    assert found.network == "" and found.fault == "libnccl-net.so not found"
    assert plugin_problem(found, "") is None
    assert "does not say" in (plugin_problem(found, "IB") or ("", ""))[0]


def test_infiniband_with_one_channel_that_bypasses_gpu_memory() -> None:
    found = parse_log(INFINIBAND.splitlines())
    assert found.network == "IB" and found.interfaces == ("mlx5_0", "mlx5_1") and found.gpu_direct is False
    assert found.version == "NCCL 2.19.3+cuda12.3"
    assert plugin_problem(found, "ib") is None
    assert "not on AWS Libfabric" in (plugin_problem(found, "AWS Libfabric") or ("", ""))[0]


def test_the_plugin_over_plain_tcp_is_no_better_than_sockets() -> None:
    log = FRONTIER.replace("Provider is cxi", "Provider is tcp")
    problem = plugin_problem(parse_log(log.splitlines()), "AWS Libfabric")
    assert problem is not None and '"tcp"' in problem[0]


def test_a_network_that_was_forced_and_is_not_there() -> None:
    found = parse_log(["nid006352:34157:34217 [1] net.cc:626 NCCL WARN Error: network AWS Libfabric not found."])
    assert found.fault == "AWS Libfabric not found"


@pytest.mark.parametrize(
    ("a", "b", "same"), [("OFI", "AWS Libfabric", True), ("IB", "ib", True), ("IB", "Socket", False)]
)
def test_names_of_networks(a: str, b: str, same: bool) -> None:
    assert same_network(a, b) is same


def test_other_output_is_passed_over() -> None:
    assert known(parse_log(["", "step 1 loss 3.2", "NCCL", "\x00\xff"])) == {}
