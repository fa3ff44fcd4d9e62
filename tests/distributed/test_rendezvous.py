"""Ranks that meet, or fail to, and ranks that lose a peer: real processes, real gloo, real kills."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pool
import pytest
import torch
import torch.distributed as dist
from commands import Commands
from pool import RankFailed, RankPool

from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.mesh import REVERSE, Topology
from megatron_port.core.dist.rank import ProcessInfo
from megatron_port.core.errors import ConfigError, EnvironmentFault
from megatron_port.core.pipeline.runner import Boundary, StageLink
from megatron_port.run.peer_failure import CONSEQUENCE, explain_peer_failure
from megatron_port.run.rendezvous import Fingerprint, StartedGroup, meet, start, stop

VICTIM = 2


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _info(port: int, world: int, rank: int) -> ProcessInfo:
    return ProcessInfo(rank, world, rank, world, 0, 1, "127.0.0.1", port, "test", f"h{rank}")


def _meet_as(port: int, claims: list[tuple[int, int, str]]) -> str:
    """Leave the pool's group and start anew as (rank, world, version of torch) claims it."""
    me = dist.get_rank()
    dist.destroy_process_group()
    rank, world, torch_version = claims[me]
    mine = Fingerprint.of(world)
    changed = Fingerprint({**mine.versions, "torch": torch_version}, mine.config)
    info = replace(_info(port, world, rank), hostname=f"h{me}")
    began, said = time.monotonic(), "met"
    try:
        group = start(info, backend="gloo", timeout_s=60, fingerprint=changed)
        dist.barrier()  # the pool's ranks connect to all peers at once: who left now would cut off one still doing so
        stop(group)
    except EnvironmentFault as error:
        said = str(error)
    assert time.monotonic() - began < 50  # found, not timed out
    return said


@pytest.mark.parametrize(
    ("claims", "says"),
    [
        ([(0, 3, "2.13"), (1, 3, "2.13"), (2, 3, "2.13")], "met"),
        ([(0, 3, "2.13"), (1, 3, "2.13"), (1, 3, "2.13")], "two processes claim rank 1 of 3: process "),
        ([(0, 3, "2.13"), (1, 3, "2.13"), (2, 3, "2.11")],
         "the ranks differ: torch 2.13 on h0, h1 (ranks 0-1), 2.11 on h2 (rank 2). To fix:"),
    ],
    ids=["fine", "twice", "versions"],
)
def test_all_ranks_say_the_same(ranks: RankPool, claims: list[tuple[int, int, str]], says: str) -> None:
    said = ranks.run(3, _meet_as, _free_port(), claims, fresh=True)
    assert set(said) == {said[0]} and said[0].startswith(says), said


class _ModuleHolder:
    """A store on which one process is held up between its claim of a rank and its report."""

    def __init__(self, store: dist.Store) -> None:
        self.store, self.release = store, threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def add(self, key: str, value: int) -> int:
        if key == "here":
            assert self.release.wait(30)
        return self.store.add(key, value)


def _meet(info: ProcessInfo, store: Any, said: dict[str, str]) -> None:
    try:
        meet(info, store, timeout_s=20, fingerprint=Fingerprint.of(2))
    except EnvironmentFault as error:
        said[info.hostname] = str(error)


def test_rank_0_stays_until_a_late_one_has_read_why() -> None:
    """It serves the store. The second process of a rank does not count as one that has reported."""
    store, said = dist.HashStore(), {}
    held = _ModuleHolder(store)
    late = threading.Thread(target=_meet, args=(_info(1, 2, 1), held, said))
    late.start()
    while not store.check(["here/1"]):
        time.sleep(0.01)
    _meet(replace(_info(1, 2, 1), hostname="twin"), store, said)
    master = threading.Thread(target=_meet, args=(_info(1, 2, 0), store, said))
    master.start()
    master.join(0.5)
    assert master.is_alive() and set(said) == {"twin"}
    held.release.set()
    for thread in (master, late):
        thread.join(20)
    assert set(said) == {"twin", "h0", "h1"} and len(set(said.values())) == 1
    assert said["h0"].startswith("two processes claim rank 1 of 2: process ")


def _lose(folder: str, how: str, port: int) -> None:
    """Meet, lose the victim, and write down what that looked like; the victim ends by SIGKILL."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    info = _info(port, 3, rank)
    group = start(info, backend="gloo", timeout_s=20, group_timeout_s=1.0 if how == "silent" else 60.0)
    value = torch.ones(100_000)
    dist.all_reduce(value)
    victim = 0 if how == "store" else VICTIM
    if rank == victim:
        if how == "silent":
            time.sleep(2.5)
            return
        os.kill(os.getpid(), signal.SIGKILL)
    error: Exception | None = None
    try:
        _exchange(how, group, value)
    except Exception as raised:
        error = raised
    began = time.monotonic()
    lost = explain_peer_failure(error, info) if error else None
    stop(group, failed=True)
    seen = {"error": str(error), "lost": str(lost), "reports": lost and lost.is_reporter,
            "stop": time.monotonic() - began, "code": lost and lost.exit_code}
    path = Path(folder, f"{rank}.part")
    path.write_text(json.dumps(seen))
    path.rename(path.with_suffix(".json"))


def _exchange(how: str, group: StartedGroup, value: torch.Tensor) -> None:
    if how in ("all_reduce", "silent"):
        dist.all_reduce(value)
    elif how == "send":
        work = dist.isend(torch.ones(10_000_000), VICTIM)
        assert work is not None
        work.wait()
    elif how == "recv":
        dist.recv(value, VICTIM)
    elif how == "new_group":
        dist.all_reduce(value, group=dist.new_group([0, 1, 2], timeout=timedelta(seconds=1)))
    else:
        for _ in range(100):
            group.store.get(str(group.store.add("x", 1) and "here/0"))
            time.sleep(0.02)


@pytest.mark.parametrize(
    ("how", "place"),
    [("all_reduce", "all_reduce"), ("send", ""), ("recv", "recv"), ("silent", "all_reduce"), ("new_group", ""),
     ("store", "")],
)
def test_a_lost_peer_is_told_from_a_bug(
    ranks: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, place: str
) -> None:
    monkeypatch.setattr(pool, "LAST_WORDS_S", 20.0)  # the survivors take down their groups
    world = (3, _lose, str(tmp_path), how, _free_port())
    if how == "silent":
        ranks.run(*world, fresh=True)
    else:
        with pytest.raises(RankFailed) as caught:
            ranks.run(*world, fresh=True)
        assert caught.value.error_type == "Died"
    found: dict[str, Any] = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert len(found) == 2, found
    for rank, seen in found.items():
        assert seen["code"] == 3 and seen["lost"].endswith(CONSEQUENCE), seen
        assert seen["lost"].startswith(f"rank {rank} on h{rank} lost contact with a peer")
        assert seen["reports"] is (rank == "0") and seen["stop"] < 8, seen
        assert re.search(place, seen["lost"]) and "\n" not in seen["lost"]
        if how == "silent":
            assert "no answer for 1 s" in seen["lost"]


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (dist.DistBackendError(
            "NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3699, remote process exited or "
            "there was a network error, NCCL version 2.27.5\nncclRemoteError: A call failed possibly due to a network "
            "error or a remote process exiting prematurely.\nLast error:\n"), "a remote process ended"),
        (dist.DistBackendError(
            "NCCL error in: ProcessGroupNCCL.cpp:3356, unhandled system error (run with NCCL_DEBUG=INFO for details), "
            "NCCL version 2.27.5\nncclSystemError: System call (e.g. socket, malloc) or external library call failed "
            "or device error. \nLast error:\nsocketPollConnect: connect to 10.0.0.3<41234> returned Connection "
            "refused, exceeded error retry count after 35 attempts"), "NCCL: Connection refused"),
        (dist.DistBackendError(
            "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE, NumelIn=1, "
            "NumelOut=1, Timeout(ms)=600000) ran for 600012 milliseconds before timing out."), "for 600.012 s"),
        (dist.DistBackendError("NCCL communicator was aborted on rank 1."), "aborted"),
        (dist.DistBackendError(
            "NCCL error in: NCCLUtils.cpp:94, unhandled cuda error\nncclUnhandledCudaError: Call to CUDA function "
            "failed.\nLast error:\nCuda failure 2 'out of memory'"), None),
        (dist.DistBackendError("NCCL error: invalid usage\nncclInvalidUsage: Duplicate GPU detected"), None),
        (RuntimeError("Connection closed by peer"), None),  # not gloo's
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"), None),
        (ConnectionResetError("Connection reset by peer"), None),
        (ConfigError("[gloo/transport/tcp/pair.cc:1] Connection closed by peer [1.2.3.4]:5. x"), None),
        (RuntimeError("[/w/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.3]:934. "
                      "This is typically caused by a remote worker crashing."), "10.0.0.3 closed the connection"),
        (RuntimeError("[/w/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [10.0.0.3]:43: No route to "
                      "host. This is typically"), "10.0.0.3: No route to host;"),
    ],
)
def test_errors_are_recognised_by_their_text(error: Exception, says: str | None) -> None:
    lost = explain_peer_failure(error)
    assert (lost is None) if says is None else (lost is not None and says in str(lost)), lost
    wrapped = RuntimeError("step 3 failed")
    wrapped.__cause__ = error
    assert (explain_peer_failure(wrapped) is None) is (says is None)


RUN_FILE = """
engine = "native"
[model]
num_layers = 2
hidden_size = 32
num_attention_heads = 4
vocab_size = 300
seq_length = 32
[layout]
tensor_parallel_size = 2
zero_stage = 0
[batch]
micro_batch_size = 2
global_batch_size = 4
[precision]
dtype = "fp32"
[training]
steps = 1000000
[data]
synthetic = true
tokenizer = "byte"
"""


def test_the_command_line_prints_one_line_for_a_lost_peer(tmp_path: Path, commands: Commands) -> None:
    (tmp_path / "run.toml").write_text(RUN_FILE)
    silent = ("--set", "watch.enabled=false")  # the watch would name the cause
    command = commands.start("train", "run.toml", "--nproc", "2", *silent, cwd=tmp_path)
    until = time.monotonic() + 100
    while "\nstep 2/" not in command.output():
        assert command.poll() is None and time.monotonic() < until, command.output()
        time.sleep(0.01)
    os.kill(command.ranks(2)[1], signal.SIGKILL)
    code, output = command.wait(100), command.output()
    lines = output.splitlines(keepends=True)
    told = [line for line in lines if "lost contact with a peer" in line]
    assert code == 128 + signal.SIGKILL, output  # of the rank that ended first
    assert len(told) == 1 and told[0].startswith("error: rank 0 on ") and CONSEQUENCE in told[0], output
    assert "Traceback" not in output and "frame #" not in output, output


def _both_ways(steps: int) -> list[float]:
    """1F1B's traffic between two stages, batched, gradients on a group of their own, as under NCCL."""
    ctx = ParallelContext.create(Topology(pp=2), "cpu", "gloo")
    ctx = replace(ctx, relations={**ctx.relations, REVERSE: dist.new_group([0, 1], backend="gloo")})
    link, expected = StageLink(ctx), Boundary.of({"x": ((3,), torch.float32), "ids": ((2,), torch.int64)})
    link._batched = True
    got = []
    for step in range(steps):
        mine, other = float(10 * ctx.rank + step), 1 - ctx.rank
        link.send((torch.full((3,), mine), torch.full((2,), int(mine))), other)
        x, ids = link.receive(expected, other)
        assert ids.tolist() == [int(x[0])] * 2
        got.append(x[0].item())
    link.drain()
    ctx.close()
    return got


def test_batched_transfers_arrive_in_order(ranks: RankPool) -> None:
    assert ranks.run(2, _both_ways, 3) == [[10.0, 11.0, 12.0], [0.0, 1.0, 2.0]]
