"""Copies of the state in memory: what is copied comes back, and nothing that was cut short, changed or mixed does."""

from __future__ import annotations

import os
import random
import stat
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_port.cli.main import main
from megatron_port.core.checkpoint.format import Lineage, SavedState, shard_name
from megatron_port.core.checkpoint.reader import open_checkpoint
from megatron_port.core.config.checks import resolve
from megatron_port.core.config.loader import load
from megatron_port.core.config.schema import LayoutConfig
from megatron_port.core.dist.record import StatePiece
from megatron_port.core.errors import CheckpointError, ConfigError, EnvironmentFault
from megatron_port.ext.storage import copies as module
from megatron_port.ext.storage.copies import (
    CopyFile,
    CopyKey,
    StateCopies,
    copies_folder,
    described,
    remove_copies,
    run_number,
)
from megatron_port.ext.storage.partner_copies import committed_copies
from megatron_port.ext.telemetry.flops import parameter_count
from megatron_port.tools.chaos import (
    Drill,
    Fault,
    Injected,
    drawn_schedule,
    parse_schedule,
    strike,
    text_of,
    with_ranks,
)
from megatron_port.tools.plan.case import Case, Machine, case_of, machine_of
from megatron_port.tools.plan.memory import Copied, copied, host_problem
from megatron_port.tools.plan.step import plan_step


def config(tmp_path: Path, *more: str) -> Any:
    return load(None, [f"output_dir={tmp_path / 'runs'}", f'checkpoint.memory_folder="{tmp_path / "memory"}"',
                       "checkpoint.memory_interval=1", *more]).config


def session(run: Any, log: list[str] | None = None) -> Any:
    """A rank alone."""
    info = SimpleNamespace(rank=0, world_size=1, hostname="h", num_nodes=1, local_rank=0, local_world_size=1)
    said = SimpleNamespace(log=(log if log is not None else []).append)
    return SimpleNamespace(config=run, info=info, logger=said, is_rank_zero=True, cpu_group=None)


def state(step: int) -> SavedState:
    return SavedState(step=step, samples=4 * step, tokens=8 * step, layout=LayoutConfig(), config={"seed": 1},
                      scalars={"optimizer_steps": step}, extra={}, kinds={"w": ("weight", "exp_avg"), "v": ("weight",)})


def pieces(seed: int, size: int = 300_000) -> list[StatePiece]:
    draw = torch.Generator().manual_seed(seed)
    out = []
    for name, kind, count in (("w", "weight", size), ("w", "exp_avg", size), ("v", "weight", 17)):
        out.append(StatePiece(name, kind, (count,), (0,), (count,), 0, torch.randn(count, generator=draw)))
    return out


def take(copies: StateCopies, seed: int, size: int = 300_000) -> None:
    copies.take(pieces(seed, size), seed, described(state(seed), Lineage(run="r", commit=3)))


@pytest.fixture
def run(tmp_path: Path) -> Any:
    (tmp_path / "memory").mkdir()
    return config(tmp_path)


@pytest.fixture
def made(run: Any) -> StateCopies:
    made = StateCopies(copies_folder(run), rank=0, world=1, run="r", epoch=5)
    take(made, 1)
    take(made, 2)
    take(made, 3)
    return made


def test_the_two_newest_come_back_as_checkpoints(run: Any, made: StateCopies) -> None:
    found = committed_copies(session(run), "r")
    assert [manifest.state.step for _, manifest in found] == [3, 2]
    assert found[0][1].lineage == Lineage(run="r", commit=3)
    for path, manifest in found:
        checkpoint = open_checkpoint(path)
        checkpoint.verify()
        for piece in pieces(manifest.state.step):
            assert torch.equal(checkpoint.read(piece.name, piece.kind, (0,), piece.shape), piece.tensor)
        assert checkpoint.scalars == {"optimizer_steps": manifest.state.step}
        checkpoint.close()
    assert stat.S_IMODE(copies_folder(run).stat().st_mode) == 0o700
    remove_copies(run)
    assert not copies_folder(run).exists() and committed_copies(session(run), "r") == []


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**9))
def test_any_flipped_bit_is_found_and_the_copy_before_it_is_left(seed: int) -> None:
    """In the file or in its list."""
    with tempfile.TemporaryDirectory() as folder:
        run, draw = config(Path(folder)), random.Random(seed)
        (Path(folder) / "memory").mkdir()
        copies = StateCopies(copies_folder(run), rank=0, world=1, run="r", epoch=5)
        take(copies, 1, 3_000)
        take(copies, 2, 3_000)
        name = draw.choice([shard_name(0), "rank-00000.json"])
        victim = copies_folder(run) / "copy-1" / name
        data = bytearray(victim.read_bytes())
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        victim.write_bytes(data)
        assert [manifest.state.step for _, manifest in committed_copies(session(run), "r")] == [1]


def test_what_was_cut_short_is_no_copy(
    run: Any, made: StateCopies, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Killed(BaseException):
        pass

    def killed(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(module, "_write_list", killed)
        take(made, 4)  # over the copy of step 2
    assert [manifest.state.step for _, manifest in committed_copies(session(run), "r")] == [3]
    assert not capsys.readouterr().out, "nothing is damaged"


def test_files_of_two_steps_are_no_copy(run: Any, made: StateCopies) -> None:
    """Rank 1 died before it had copied: its file is of the copy before."""
    folder = copies_folder(run)
    for rank, step in ((0, 4), (1, 4), (0, 5), (1, 5), (0, 6)):
        CopyFile(folder / f"copy-{step % 2}", rank).take(
            pieces(step) if rank == 0 else [], CopyKey(run_number("r"), 6, step, step, 2),
            described(state(step), Lineage(run="r")))
    assert [manifest.state.step for _, manifest in committed_copies(session(run), "r")] == [5]


def test_a_start_keeps_what_it_was_resumed_from(run: Any, made: StateCopies) -> None:
    again = StateCopies(copies_folder(run), rank=0, world=1, run="r", epoch=6, spare=0)  # step 3 is in copy-0
    take(again, 4)
    assert [manifest.state.step for _, manifest in committed_copies(session(run), "r")] == [4, 3]
    assert [manifest.state.step for _, manifest in committed_copies(session(run), "r", 4)] == [3]
    again.forget(newest_alone=True)
    assert [manifest.state.step for _, manifest in committed_copies(session(run), "r")] == [3]
    again.forget()
    assert committed_copies(session(run), "r") == []


def test_threads_copy_the_same(tmp_path: Path) -> None:
    odd = [StatePiece("w", "weight", (n,), (0,), (n,), 0, torch.randn(n)) for n in (3_000_001, 1, 262_144, 70_000)]
    odd = [replace(piece, name=f"w{i}") for i, piece in enumerate(odd)]
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    CopyFile(tmp_path / "a", 0).take(odd, CopyKey(9, 1, 1, 1, 1), {})
    with ThreadPoolExecutor(3) as threads:
        CopyFile(tmp_path / "b", 0, threads).take(odd, CopyKey(9, 1, 1, 1, 1), {})
    for name in (shard_name(0), "rank-00000.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    from safetensors.numpy import load_file  # the format's own reader

    found = load_file(tmp_path / "b" / shard_name(0))
    assert all(np.array_equal(found[f"weight/{p.name}@0"], p.tensor.numpy()) for p in odd)


def test_memory_that_is_not_there_is_an_error_and_no_signal(
    run: Any, made: StateCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(CheckpointError, match=r"no 1600\d+ bytes for a copy of this rank's state \(No space left"):
        made.take(pieces(9, 200_000), 9, {})


def test_anothers_folder_is_refused(run: Any, tmp_path: Path) -> None:
    place = copies_folder(run)
    place.parent.mkdir()
    place.symlink_to(tmp_path)
    with pytest.raises(EnvironmentFault, match="is not a folder of this user alone"):
        StateCopies(place, rank=0, world=1, run="r", epoch=1)
    with pytest.raises(EnvironmentFault, match="set checkpoint.memory_folder"):
        StateCopies(Path("/nowhere/a/b"), rank=0, world=1, run="r", epoch=1)


@pytest.mark.parametrize("part", ["", "copy-0"])
def test_nothing_is_read_below_a_folder_that_others_may_write(
    run: Any, made: StateCopies, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (copies_folder(run) / part).chmod(0o777)
    assert committed_copies(session(run), "r") == []
    assert "is not a folder of this user alone" in capsys.readouterr().out


def test_files_of_two_runs_are_no_copy(run: Any, made: StateCopies) -> None:
    """A run that begins anew under the old name has the epochs and numbers of the first."""
    folder = copies_folder(run)
    CopyFile(folder / "copy-0", 1).take([], CopyKey(run_number("r"), 5, 3, 3, 2), {})
    CopyFile(folder / "copy-0", 0).take(pieces(3), CopyKey(run_number("s"), 5, 3, 3, 2),
                                        described(state(3), Lineage(run="s")))
    log: list[str] = []
    assert [manifest.state.step for _, manifest in committed_copies(session(run), "r")] == [2]
    assert committed_copies(session(run, log), "s") == []
    assert log == ["the copy of step 2 in the nodes' memory is of another run, and is passed over"]
    StateCopies(folder, rank=0, world=1, run="s", epoch=6)
    assert committed_copies(session(run), "r") == []


# The drill.


def test_schedules() -> None:
    assert parse_schedule("60 stop; 30 kill 3;") == [Fault(30.0, "kill", 3), Fault(60.0, "stop")]
    for text in ("kill 30", "30 explode", "30", "-1 kill", "3 kill 1 2", "inf kill", "3 kill -1"):
        with pytest.raises(Exception, match="--schedule"):
            parse_schedule(text)
    drawn = drawn_schedule(3, 5.0, ["kill", "cut"], 2000)
    assert drawn == drawn_schedule(3, 5.0, ["kill", "cut"], 2000) != drawn_schedule(4, 5.0, ["kill", "cut"], 2000)
    assert 4.5 < drawn[-1].at / 2000 < 5.5 and {f.kind for f in drawn} == {"kill", "cut"}


def test_all_nodes_have_the_same_faults() -> None:
    """Drawn once for all; the first node, where the agent is, is not taken."""
    faults = drawn_schedule(3, 5.0, ["kill", "node"], 400)
    drawn = with_ranks(faults, 3, 2, 3)
    assert drawn == with_ranks(faults, 3, 2, 3) != with_ranks(faults, 4, 2, 3)
    assert {f.rank for f in drawn if f.kind == "kill"} == {*range(6)}
    assert {f.rank for f in drawn if f.kind == "node"} == {2, 3, 4, 5}
    assert with_ranks([Fault(1.0, "kill", 5)], 0, 2, 3) == [Fault(1.0, "kill", 5)]
    for fault in (Fault(1.0, "kill", 6), Fault(1.0, "node", 1)):
        with pytest.raises(ConfigError, match="ranks 0 to 5, and the loss of the first node, with ranks 0 to 1"):
            with_ranks([fault], 0, 2, 3)


def test_a_node_is_not_taken_from_one_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--schedule", "3 node 1"], ["--faults", "kill,node"]):
        assert main(["chaos", "runs/quickstart", "--nproc", "2", "--set", "layout.tensor_parallel_size=1", "--set",
                     "layout.pipeline_parallel_size=1", "--set", f"output_dir={tmp_path}", *words]) == 2
        assert "from a run of several: start the drill once on each (srun" in capsys.readouterr().err


def test_a_link_is_cut_from_outside() -> None:
    """In a process that was forked from this one, as ranks are from their agent."""
    import socket

    server = socket.create_server(("127.0.0.1", 0))
    pid = os.fork()
    if not pid:
        peer = socket.create_connection(server.getsockname())
        server.close()
        os._exit(0 if peer.recv(1) == b"" else 1)
    link, _ = server.accept()
    server.close()
    link.settimeout(10)
    assert strike("cut", pid, random.Random(1)) and link.recv(1) == b""
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert not strike("kill", 2**22 + 1, random.Random(1)) and not strike("cut", 2**22 + 1, random.Random(1))


def test_the_report() -> None:
    faults = (Injected("kill", 3, 1.0, 7, 2.25, (0.25, 0.5, 1.5), 1), Injected("cut", 0, 9.0, 8))
    done = Drill("r", 0, 90, 100.0, 1.0, 10.0, faults, 1)
    assert done.goodput == 0.9 and done.body()["goodput"] == 0.9
    # One fault in 50 s, each of which loses 2.25 s and half a step of 1 s: exp(-0.045) · 0.02 / (exp(0.02) - 1).
    assert done.body()["predicted_goodput"] == 0.9465
    lines = text_of(done).splitlines()
    assert lines[1].split() == ["kill", "3", "7", "2.2", "s", "0.2", "0.5", "1.5", "1"] and "with the next" in lines[2]
    assert "of which faults took 10.0 s (goodput 90.0 %; by the planner's formula 94.6 %)" in lines[3]
    assert Drill("r", 0, 9, 10.0, 1.0, 0.0, (), 0).predicted is None


# By plan.


def test_the_plan_has_their_memory_once_and_their_time() -> None:
    plans = {}
    for interval, stage in ((0, 1), (1, 1), (4, 1), (1, 0)):
        run = load(["models/gpt2-124m", "clusters/dgx-h100"], [
            f"checkpoint.memory_interval={interval}", f"layout.zero_stage={stage}", "layout.data_parallel_size=8",
            "batch.global_batch_size=8", "batch.micro_batch_size=1", "hardware.host_bandwidth_gb=0.0"]).config
        case, machine = case_of(resolve(run, 8))[0], machine_of(run)
        plans[interval, stage] = (plan_step(case, machine).seconds, copied(case, machine), case, machine)
    total = parameter_count(plans[1, 1][2].model)
    assert plans[0, 1][1] == Copied(0.0, 0.0)
    for key in ((1, 1), (1, 0)):  # eight replicas hold the same state, and one of them copies each part
        assert plans[key][1].node == pytest.approx(2 * 12 * total, rel=0.01) and not plans[key][1].sent
    assert plans[1, 1][1].seconds == pytest.approx(4 * plans[4, 1][1].seconds)
    assert plans[1, 1][1].seconds >= 12 * total / 8 / 4e9
    assert plans[1, 1][0] - plans[0, 1][0] == pytest.approx(plans[1, 1][1].seconds, rel=0.1)
    small = replace(plans[1, 1][3].hardware, host_memory_gb=5.0)
    machine = replace(plans[1, 1][3], hardware=small)
    problem = host_problem(plans[1, 1][2], machine)
    assert problem.startswith("copies of the state take 3.0 GB of a node's 5 GB of host") and "NVMe" in problem
    unknown = replace(machine, hardware=replace(small, host_memory_gb=0.0))
    assert not host_problem(plans[1, 1][2], unknown)


def several_nodes(nodes: int, *more: str) -> tuple[Case, Machine]:
    run = load(["models/gpt2-124m", "clusters/dgx-h100"], [
        "checkpoint.memory_interval=1", f"layout.data_parallel_size={8 * nodes}",
        f"batch.global_batch_size={8 * nodes}", f"cluster.nodes={nodes}", "batch.micro_batch_size=1",
        "hardware.nics=2", "hardware.nic_gb=0.5", "hardware.network_efficiency=1.0", "calibration.network_scale=1.0",
        *more]).config
    return case_of(resolve(run, 8 * nodes))[0], machine_of(run)


@pytest.mark.parametrize("nodes", [2, 5])
def test_copies_of_several_nodes_are_kept_twice_and_sent_once(nodes: int) -> None:
    """Four times 12 bytes of a parameter over all nodes: two copies of each node's own and of its neighbour's."""
    case, machine = several_nodes(nodes)
    found, total = copied(case, machine), parameter_count(case.model)
    assert found.node * nodes == pytest.approx(4 * 12 * total, rel=0.01)
    assert found.sent * nodes == pytest.approx(12 * total, rel=0.01)
    assert found.sending == pytest.approx(found.sent / 1e9)  # two adapters of 0.5 GB/s
    # Three seconds of one copy's way behind steps of 2 s: one of each step is waited for, none with two steps' time.
    slow = replace(found, sending=3.0)
    assert slow.late(1, 2.0) == 1.0 and slow.late(2, 1.0) == 0.5 and slow.late(2, 2.0) == slow.late(0, 2.0) == 0.0
    crawling = several_nodes(nodes, "checkpoint.memory_folder=/mnt/bb/me", "hardware.nvme_gb=100.0",
                             "hardware.nvme_write_gb=0.01")
    behind = plan_step(replace(crawling[0], copy_interval=0), machine).seconds + copied(*crawling).seconds
    assert plan_step(*crawling).seconds == pytest.approx(copied(*crawling).sending, rel=1e-9) and behind < 50


def test_copies_on_disks_take_the_disks_space() -> None:
    memory, disks = several_nodes(2), several_nodes(2, "checkpoint.memory_folder=/mnt/bb/me", "hardware.nvme_gb=5.0",
                                                    "hardware.nvme_write_gb=0.25")
    held = copied(*memory).node
    assert copied(*disks).node == held and copied(*disks).sending == pytest.approx(held / 2 / 0.25e9)
    for (case, machine), memory_gb, disk_gb, problem in (
        (memory, 1.9 * held / 1e9, 5.0, "of host memory with those of its neighbour, of which tmpfs has 50%"),
        (memory, 2.1 * held / 1e9, 0.0, ""), (disks, 1.9 * held / 1e9, 5.0, ""),
        (disks, 512.0, 0.9 * held / 1e9, "of a node's local disks, which have"),
        (disks, 1.9 * held / 1e9, 0.0, "hardware.nvme_gb is their size"),
    ):
        given = replace(machine.hardware, host_memory_gb=memory_gb, nvme_gb=disk_gb)
        found = host_problem(case, replace(machine, hardware=given))
        assert problem in found and bool(problem) == bool(found)


@pytest.mark.parametrize(("more", "sends", "holds"), [
    (("layout.zero_stage=0",), 1.0, 1.0), (("layout.zero_stage=1", "layout.shard_size=8"), 1.0, 1.0),
    (("layout.zero_stage=1", "layout.shard_size=16"), 0.5, 1.0), (("layout.zero_stage=1",), 0.25, 0.5),
])
def test_the_first_replica_copies_what_all_hold(more: tuple[str, ...], sends: float, holds: float) -> None:
    """Four nodes. Shares of the state: sent by the node with most of it, held by the one with most own and kept."""
    found, total = copied(*several_nodes(4, *more)), parameter_count(several_nodes(4)[0].model)
    assert found.sent == pytest.approx(sends * 12 * total, rel=0.01)
    assert found.node == pytest.approx(2 * holds * 12 * total, rel=0.01)
    by_stage = ("layout.pipeline_parallel_size=4", "layout.data_parallel_size=8")  # a node has a stage
    assert copied(*several_nodes(4, *by_stage, "layout.zero_stage=0")).sent == copied(*several_nodes(4, *by_stage)).sent
