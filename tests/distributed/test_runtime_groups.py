"""The rendezvous, agreement on errors, and the groups of a layout, on real processes."""

from __future__ import annotations

import socket
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from pool import RankPool

from megatron_port.core.dist.agree import agree, broadcast_text
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.mesh import Topology
from megatron_port.core.dist.rank import ProcessInfo
from megatron_port.core.errors import CheckpointError, EnvironmentFault, PortError
from megatron_port.run.rendezvous import start, stop


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _info(port: int, world: int, rank: int) -> ProcessInfo:
    return ProcessInfo(rank, world, rank, world, 0, 1, "127.0.0.1", port, "test", "here")


def _rendezvous(port: int, world: int, absent: int, timeout_s: float, faulty: int) -> object:
    """Leave the pool's group and meet again through ``start``; rank ``absent`` stays away."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    if rank == absent:
        return "absent"
    fault = EnvironmentFault("no GPU") if rank == faulty else None
    try:
        group = start(_info(port, world, rank), backend="gloo", timeout_s=timeout_s, fault=fault)
    except EnvironmentFault as error:
        return str(error)
    value = torch.tensor([1.0])
    dist.all_reduce(value)
    result = (value.item(), group.backend)
    stop(group)
    return result


def _taken_port() -> str:
    dist.destroy_process_group()
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        try:
            start(_info(other.getsockname()[1], 1, 0), backend="gloo", timeout_s=5)
        except EnvironmentFault as error:
            return str(error)
    return "started"


def _single_any_port() -> bool:
    dist.destroy_process_group()
    group = start(replace(_info(0, 1, 0), launcher="single"), backend="gloo", timeout_s=20)
    running = dist.is_initialized()
    stop(group)
    return running and not dist.is_initialized()


def _twice() -> str:
    try:
        start(_info(0, 1, 0), backend="gloo")
    except EnvironmentFault as error:
        return str(error)
    return "started"


def _same_device(port: int, identities: list[str], share: bool) -> str:
    """Start with NCCL on ranks whose GPUs have these identities."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    try:
        group = start(_info(port, len(identities), rank), backend="nccl", timeout_s=20,
                      device_identity=identities[rank], share_devices=share)
    except EnvironmentFault as error:
        return str(error)
    dist.all_reduce(torch.ones(1))
    stop(group)
    return group.backend


def _agree(bad: list[int], kind: str) -> tuple[str, int, str]:
    rank = dist.get_rank()
    kinds = {"checkpoint": CheckpointError, "bug": ZeroDivisionError}
    error = kinds[kind](f"disk {rank} is full") if rank in bad else None
    try:
        agree(error, where=f"pp {rank}")
    except PortError as raised:
        return type(raised).__name__, raised.exit_code, str(raised)
    except ZeroDivisionError as raised:
        return "own", 1, str(raised)
    return "fine", 0, ""


def _long_message() -> int:
    try:
        agree(CheckpointError("é" * 9000) if dist.get_rank() == 1 else None)
    except CheckpointError as raised:
        return len(str(raised))
    return 0


def _sums_by_axis(tp: int, pp: int, dp: int, copies: int) -> dict[str, float | None]:
    """All-reduce the rank over each axis, twice over (a second context beside the first)."""
    topology = Topology(tp=tp, pp=pp, dp=dp, kv_copies=copies)
    first = ParallelContext.create(topology, "cpu", "gloo")
    ctx = ParallelContext.create(topology, "cpu")
    sums: dict[str, float | None] = {}
    for axis in ("tp", "dp", "pp", "embedding", "kv_copies"):
        group = ctx.named_groups().get(axis)
        if group is None:
            sums[axis] = None
            continue
        value = torch.tensor([float(ctx.rank)])
        dist.all_reduce(value, group=group)
        sums[axis] = value.item()
    ctx.close()
    first.close()
    return sums


def _wrong_size() -> str:
    try:
        ParallelContext.create(Topology(tp=3), "cpu")
    except EnvironmentFault as error:
        return str(error)
    return "made"


def test_ranks_meet(ranks: RankPool) -> None:
    assert ranks.run(3, _rendezvous, _free_port(), 3, -1, 30.0, -1, fresh=True) == [(3.0, "gloo")] * 3


def test_missing_ranks_are_named_by_rank_0(ranks: RankPool) -> None:
    began, port = time.monotonic(), _free_port()
    said = ranks.run(2, _rendezvous, port, 5, 1, 1.0, -1, fresh=True)
    assert str(said[0]).startswith(f"4 of 5 ranks did not report to 127.0.0.1:{port} within 1 s: ranks 1-4 (here);")
    assert said[1] == "absent"
    assert time.monotonic() - began < 20


def test_an_absent_master_is_named(ranks: RankPool) -> None:
    port = _free_port()
    said = ranks.run(2, _rendezvous, port, 2, 0, 1.0, -1, fresh=True)
    assert said[0] == "absent"
    assert f"rank 1 on here could not reach the master at 127.0.0.1:{port}" in str(said[1])


def test_a_fault_before_the_start_reaches_all(ranks: RankPool) -> None:
    assert ranks.run(2, _rendezvous, _free_port(), 2, -1, 30.0, 1, fresh=True) == ["rank 1 on here: no GPU"] * 2


def test_a_taken_port_is_named(ranks: RankPool) -> None:
    assert "is taken" in ranks.run(1, _taken_port, fresh=True)[0]


def test_one_process_takes_any_port_and_stops(ranks: RankPool) -> None:
    assert ranks.run(1, _single_any_port, fresh=True) == [True]


def test_ranks_on_one_gpu_stop_unless_that_was_asked_for(ranks: RankPool) -> None:
    """They changed from NCCL to gloo without a word."""
    said = ranks.run(3, _same_device, _free_port(), ["a at 0000:1b:00", "a at 0000:43:00", "a at 0000:1b:00"], False,
                     fresh=True)
    assert said == [said[0]] * 3
    assert said[0].startswith("ranks 0, 2 on here hold the same GPU (a at 0000:1b:00), and NCCL takes one rank per GPU")
    assert "backend.share_devices = true" in said[0]
    assert ranks.run(2, _same_device, _free_port(), ["a", "a"], True, fresh=True) == ["gloo"] * 2


def _devices(port: int, identities: list[str]) -> str:
    from megatron_port.run.rendezvous import _shared_device, connect, leave

    info = _info(port, len(identities), dist.get_rank())
    store = connect(info, 20.0)
    found = _shared_device(info, store, identities[info.rank])
    leave(info, store, 10.0)
    return found


def test_gpus_of_one_uuid_at_two_addresses_are_two(ranks: RankPool) -> None:
    assert ranks.run(2, _devices, _free_port(), ["a at 0000:1b:00", "a at 0000:43:00"], fresh=True) == ["", ""]


def test_a_second_start_is_refused(ranks: RankPool) -> None:
    assert "already" in ranks.run(1, _twice)[0]


def test_nobody_fails(ranks: RankPool) -> None:
    assert ranks.run(2, _agree, [], "checkpoint") == [("fine", 0, "")] * 2


def test_the_first_failing_rank_speaks_for_all(ranks: RankPool) -> None:
    said = ranks.run(4, _agree, [2, 3], "checkpoint")
    assert said == [said[0]] * 4 and said[0][:2] == ("CheckpointError", 5)
    assert said[0][2] == f"rank 2 on {socket.gethostname()} (pp 2): disk 2 is full"


def test_a_bug_keeps_its_type_where_it_happened(ranks: RankPool) -> None:
    said = ranks.run(2, _agree, [1], "bug")
    assert said[1] == ("own", 1, "disk 1 is full")
    assert said[0][:2] == ("PortError", 1) and "ZeroDivisionError: disk 1 is full" in said[0][2]


def test_a_long_message_is_cut_not_lost(ranks: RankPool) -> None:
    lengths = ranks.run(2, _long_message)
    assert lengths[0] == lengths[1] and 4000 < lengths[0] < 8192


def _say(texts: list[str | None]) -> list[str | None]:
    return [broadcast_text(text if dist.get_rank() == 0 else "not asked") for text in texts]


def test_rank_0_tells_the_others_a_text(ranks: RankPool) -> None:
    texts = [None, "", "x", "/räume/" + 1000 * "ß"]
    assert ranks.run(2, _say, texts) == [texts, texts]
    assert broadcast_text("alone") == "alone"


@pytest.mark.parametrize(("tp", "pp", "dp", "copies"), [
    (2, 2, 1, 2), (1, 4, 1, 1), (1, 2, 2, 1), (4, 1, 1, 2), (1, 1, 1, 1),
])
def test_groups_join_the_ranks_of_an_axis(ranks: RankPool, tp: int, pp: int, dp: int, copies: int) -> None:
    topology = Topology(tp=tp, pp=pp, dp=dp)
    for rank, sums in enumerate(ranks.run(topology.world_size, _sums_by_axis, tp, pp, dp, copies)):
        first = rank // copies * copies
        assert sums["kv_copies"] == (None if copies == 1 else float(sum(range(first, first + copies))))
        for axis in ("tp", "dp", "pp"):
            alone = getattr(topology, axis) == 1
            members = topology.mesh.members(rank, topology.mesh.dims(axis))
            assert sums[axis] == (None if alone else float(sum(members)))
        stages = topology.mesh.members(rank, topology.mesh.dims("pp"))
        ends = pp > 1 and rank in (stages[0], stages[-1])
        assert sums["embedding"] == (float(stages[0] + stages[-1]) if ends else None)


def test_a_layout_of_another_size_is_refused(ranks: RankPool) -> None:
    assert all("2 processes are running" in said and "needs 3" in said for said in ranks.run(2, _wrong_size))
