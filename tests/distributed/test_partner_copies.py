"""Copies on a second node: four gloo ranks as two nodes, whose memory is a folder each."""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import RankPool

from megatron_port.core.checkpoint.format import Lineage, Parent, SavedState, shard_name
from megatron_port.core.checkpoint.reader import checkpoints_in, open_checkpoint
from megatron_port.core.checkpoint.shard import disk_error
from megatron_port.core.checkpoint.writer import Committer, peers_of, save_checkpoint
from megatron_port.core.config.loader import load
from megatron_port.core.config.schema import LayoutConfig
from megatron_port.core.dist.rank import Fence
from megatron_port.core.dist.record import StatePiece
from megatron_port.core.errors import PeerLost
from megatron_port.ext.storage import copies as copies_module
from megatron_port.ext.storage import partner_copies
from megatron_port.ext.storage.copies import (
    SLOTS,
    CopiesNotSaved,
    CopyFile,
    CopyKey,
    StateCopies,
    copies_folder,
    described,
    own_folder,
    remove_old_copies,
    run_number,
)
from megatron_port.ext.storage.disk_copies import DiskCopies
from megatron_port.ext.storage.partner_copies import Partner, committed_copies

SIZE = 2  # ranks a node


def state(step: int) -> SavedState:
    return SavedState(step=step, samples=4 * step, tokens=8 * step, layout=LayoutConfig(), config={"seed": 1},
                      scalars={"optimizer_steps": step}, extra={}, kinds={"w": ("weight", "exp_avg")})


def values(rank: int, kind: str, step: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1000 * step + 10 * rank + len(kind))
    return torch.randn(70_000 + 5 * rank, generator=draw)


def pieces(rank: int, world: int, step: int) -> list[StatePiece]:
    sizes = [70_000 + 5 * r for r in range(world)]
    return [StatePiece("w", kind, (sum(sizes),), (sum(sizes[:rank]),), (sizes[rank],), 0, values(rank, kind, step))
            for kind in ("weight", "exp_avg")]


class Node:
    """One rank's part of a run on two nodes."""

    def __init__(self, home: str, *, epoch: int = 5) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        node, nodes = self.rank // SIZE, self.world // SIZE
        self.log: list[str] = []
        self.memory = Path(home) / f"memory-{node}"
        self.memory.mkdir(exist_ok=True)
        (disk := Path(home) / f"disk-{node}").mkdir(exist_ok=True)
        config = load(None, [f"output_dir={home}/runs", f'checkpoint.memory_folder="{self.memory}"',
                             f'checkpoint.disk_folder="{disk}"', "checkpoint.disk_interval=2",
                             "checkpoint.memory_interval=1", "checkpoint.keep=0"]).config
        info = SimpleNamespace(rank=self.rank, world_size=self.world, hostname=f"n{node}", num_nodes=nodes,
                               local_rank=self.rank % SIZE, local_world_size=SIZE, master_addr="127.0.0.1")
        self.session: Any = SimpleNamespace(
            config=config, info=info, logger=SimpleNamespace(log=self.log.append), is_rank_zero=self.rank == 0,
            cpu_group=dist.group.WORLD, fence=Fence(epoch, "a"))
        self.folder = copies_folder(config)
        self.checkpoints = Path(config.output_dir) / config.name / "checkpoints"

    def copies(self, store: dist.Store) -> tuple[StateCopies, Partner]:
        if self.session.info.local_rank == 0:
            own_folder(self.folder, fresh=True)
        dist.barrier()
        partner = Partner(self.folder, store, rank=self.rank, world=self.world, step=SIZE, master="127.0.0.1")
        return StateCopies(self.folder, rank=self.rank, world=self.world, run="r", epoch=self.session.fence.epoch,
                           partner=partner), partner

    def found(self, run: str = "r", below: int = -1) -> list[tuple[Path, Any]]:
        dist.barrier()
        found = committed_copies(self.session, run, below)
        dist.barrier()
        return found


def take(copies: StateCopies, partner: Partner, node: Node, step: int) -> None:
    assert partner.finish() is None
    dist.barrier()
    lineage = Lineage(run="r", commit=3, parent=Parent(run="r", commit=2, step=1))
    copies.take(pieces(node.rank, node.world, step), step, described(state(step), lineage) if node.rank == 0 else {})


def store_of(home: str) -> dist.Store:
    return dist.FileStore(f"{home}/store-{len(list(Path(home).glob('done-*')))}", dist.get_world_size())


def copied(home: str, steps: int = 3) -> Node:
    """A run that took copies of steps 1 to ``steps``, and stopped."""
    node = Node(home)
    copies, partner = node.copies(store_of(home))
    for step in range(1, steps + 1):
        take(copies, partner, node, step)
    assert partner.finish() is None
    partner.close()
    dist.barrier()
    return node


def power_cut(home: str, damage: bool) -> tuple[list[str], list[str], list[bool]]:
    """Both nodes lose their memory; their disks have steps 1, 2 and 4, the newest two of them."""
    node = Node(home)
    own_folder(copies_folder(node.session.config, "disk"), tier="disk")
    dist.barrier()
    disk = DiskCopies(copies_folder(node.session.config, "disk"), rank=node.rank, interval=2)
    partner = node.copies(store_of(home))[1]
    copies = StateCopies(node.folder, rank=node.rank, world=node.world, run="r", epoch=5, partner=partner, disk=disk)
    for step in range(1, 6):
        if disk.due(step):
            assert disk.finish() is None
            dist.barrier()
            disk.keep()
        take(copies, partner, node, step)
    assert partner.finish() is None and disk.finish() is None
    partner.close()
    dist.barrier()
    shutil.rmtree(node.folder, ignore_errors=True)
    held = sorted(str(path.relative_to(home)) for path in Path(home).glob("disk-*/*/*/*/rank-*.json"))
    assert len(held) == 2 * 4 and not [name for name in held if name.startswith("disk-0") and "00002" in name], held
    if damage and node.rank == 3:
        path = copies_folder(node.session.config, "disk") / SLOTS[0] / shard_name(3)
        data = bytearray(path.read_bytes())
        data[70_000] ^= 8
        path.write_bytes(data)
    dist.barrier()
    found = node.found()
    if node.rank == 0:
        whole(found[0][0], 4, found[0][1].state.step)
    save_checkpoint(node.checkpoints, state(9), pieces(node.rank, 4, 9), peers=peers_of(dist.group.WORLD),
                    committer=committer(6))
    freed = remove_old_copies(node.session.config) if node.rank == 3 else True
    dist.barrier()
    return [path.name for path, _ in found], node.log, [freed, not list((Path(home) / "disk-1").glob("*/*"))]


@pytest.mark.parametrize("damage", [False, True])
def test_nodes_that_have_lost_their_memory_resume_from_their_disks(
    ranks: RankPool, tmp_path: Path, damage: bool
) -> None:
    """Each has its own ranks' files alone. What a later checkpoint makes needless is freed there as well."""
    results = ranks.run(4, power_cut, str(tmp_path), damage)
    assert results[0][0] == ["step-00000002" if damage else "step-00000004"], results
    assert "from the nodes' disks" in " ".join(results[0][1]), results
    assert all(freed == [True, True] for _, _, freed in results)


def whole(path: Path, world: int, step: int) -> None:
    """The checkpoint has every piece of the step, bit for bit."""
    checkpoint = open_checkpoint(path)
    checkpoint.verify()
    for kind in ("weight", "exp_avg"):
        expected = torch.cat([values(rank, kind, step) for rank in range(world)])
        assert torch.equal(checkpoint.read("w", kind, (0,), tuple(expected.shape)), expected)
    assert checkpoint.scalars == {"optimizer_steps": step}
    checkpoint.close()


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("rank-*"))}


def lost_node(home: str, node_lost: int, damage: str) -> tuple[list[str], list[str], bool]:
    node = copied(home)
    me = node.session.info
    if node.rank == 0:
        first, second = (files(Path(home) / f"memory-{n}") for n in range(2))
        assert first == second and len(first) == 2 * 2 * 4, "both nodes hold both slots of all four ranks"
        if node_lost >= 0:
            shutil.rmtree(Path(home) / f"memory-{node_lost}")
        for n in range(2):
            place = Path(home) / f"memory-{n}"
            newest = next(iter(place.rglob(SLOTS[0])), None)  # step 3: the third of two
            if newest is not None and damage == "newest":
                path = newest / shard_name(1)
                data = bytearray(path.read_bytes())
                data[-3] ^= 1
                path.write_bytes(data)
            if damage == "all":
                for path in place.rglob("rank-00003.json"):
                    path.unlink()
    dist.barrier()
    node.memory.mkdir(exist_ok=True)
    if damage == "saved":  # a checkpoint of a later epoch is newer than any copy
        save_checkpoint(node.checkpoints, state(2), pieces(node.rank, 4, 2), peers=peers_of(dist.group.WORLD),
                        committer=committer(6))
    found = node.found(below=3 if damage == "below" else -1)
    if me.rank == 0 and found:
        (path, manifest), = found
        whole(path, 4, manifest.state.step)
        assert path.parent == node.checkpoints and manifest.lineage.run == "r" and manifest.lineage.epoch == 5
        assert manifest.lineage.parent == Parent(run="r", commit=2, step=1), "as the copy says"
        assert not list(path.glob("*.json.tmp")) and sorted(p.name for p in path.iterdir()) == sorted(
            ["manifest.json", *(shard_name(rank) for rank in range(4))])
    return [str(path.name) for path, _ in found], node.log, bool(list(node.checkpoints.glob("*.tmp")))


def committer(epoch: int) -> Committer:
    fence = Fence(epoch, "b")
    fence.run = "r"
    return Committer(fence)


@pytest.mark.parametrize(("node_lost", "damage", "expected"), [
    (0, "", "step-00000003"), (1, "", "step-00000003"), (-1, "", "step-00000003"), (1, "newest", "step-00000002"),
    (0, "below", "step-00000002"), (0, "all", ""), (1, "saved", ""),
])
def test_the_state_of_a_lost_node_comes_back_from_the_next(
    ranks: RankPool, tmp_path: Path, node_lost: int, damage: str, expected: str
) -> None:
    results = ranks.run(4, lost_node, str(tmp_path), node_lost, damage)
    assert [found for found, _, _ in results] == [[expected] if expected else [], [], [], []]
    assert not any(left for _, _, left in results)
    log = " ".join(results[0][1])
    assert ("from the nodes' memory" in log) == bool(expected), log


def of_another_run(home: str) -> tuple[int, list[str]]:
    node = copied(home)
    return len(node.found(run="s")), node.log


def test_copies_of_another_run_are_named_and_passed_over(ranks: RankPool, tmp_path: Path) -> None:
    results = ranks.run(4, of_another_run, str(tmp_path))
    assert [count for count, _ in results] == [0] * 4
    assert "the copy of step 3 in the nodes' memory is of another run, and is passed over" in results[0][1]


def smaller(home: str) -> int:
    """Four ranks copied; their node 1 is lost, and node 0, which holds all their files, resumes alone."""
    node = Node(home)
    if node.rank == 0:
        shutil.move(f"{home}/memory-1", f"{home}/gone")
    dist.barrier()
    found = node.found()
    if node.rank == 0:
        assert [manifest.state.step for _, manifest in found] == [3, 2]
        whole(found[0][0], 4, 3)
    return len(found)


def test_fewer_ranks_read_what_more_have_copied(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(4, copied_only, str(tmp_path))
    assert ranks.run(2, smaller, str(tmp_path)) == [2, 0]


def copied_only(home: str) -> None:
    copied(home)


def cut_in_between(home: str) -> list[str]:
    """Rank 2 goes while the third copy is sent: its partner notices, and the second is on both nodes."""
    node = Node(home)
    copies, partner = node.copies(store_of(home))
    for step in (1, 2):
        take(copies, partner, node, step)
    assert partner.finish() is None
    dist.barrier()
    lost = ""
    if node.rank == 2:
        partner.close()
    else:
        copies.take(pieces(node.rank, 4, 3), 3, described(state(3), Lineage(run="r")) if node.rank == 0 else {})
        try:
            partner.finish()
        except PeerLost as error:
            lost = str(error)
    dist.barrier()
    partner.close()
    return [lost, *(str(manifest.state.step) for _, manifest in node.found())]


def test_a_partner_that_goes_is_a_lost_peer_and_the_copy_before_is_whole(ranks: RankPool, tmp_path: Path) -> None:
    results = ranks.run(4, cut_in_between, str(tmp_path))
    assert "rank 0 on" in results[0][0] and "lost contact with rank 2 while copies" in results[0][0], results
    assert results[0][1:] == ["2"] and results[1] == [""], results


def left_behind(home: str, saved: str) -> tuple[bool, int]:
    """Node 1 is cut off; the others commit ``saved`` (epoch, step), or nothing. Are its copies freed, what is left?"""
    node = copied(home)
    if saved:
        epoch, step = map(int, saved.split())
        save_checkpoint(node.checkpoints, state(step), pieces(node.rank, 4, step), peers=peers_of(dist.group.WORLD),
                        committer=committer(epoch))
    freed = True
    if node.rank == 3:
        freed = remove_old_copies(node.session.config)
        assert remove_old_copies(node.session.config) == freed and len(list(node.memory.iterdir())) == 1
    dist.barrier()
    return freed, len(files(Path(home) / "memory-1"))


@pytest.mark.parametrize(("saved", "freed"), [
    ("", False), ("5 2", False), ("5 3", False), ("5 4", True), ("6 1", True),
])
def test_a_node_that_is_left_frees_copies_that_no_start_would_take(
    ranks: RankPool, tmp_path: Path, saved: str, freed: bool
) -> None:
    """Copies of epoch 5, steps 2 and 3. A run that continued without the node has a later epoch."""
    results = ranks.run(4, left_behind, str(tmp_path), saved)
    assert results[3] == (freed, 0 if freed else 16), results


def of_another_start(home: str) -> int:
    """While the node looks, another start writes its copies there: they stay."""
    node = copied(home)
    save_checkpoint(node.checkpoints, state(9), pieces(node.rank, 4, 9), peers=peers_of(dist.group.WORLD),
                    committer=committer(6))
    if node.rank == 3:
        def and_then(*_: Any) -> Any:
            made = CopyFile(node.folder / SLOTS[0], 3)
            made.take(pieces(3, 4, 11), CopyKey(run_number("r"), 7, 1, 11, 4), {})
            return checkpoints_in(node.checkpoints)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(copies_module, "checkpoints_in", and_then)
            assert not remove_old_copies(node.session.config)
        assert not remove_old_copies(node.session.config), "it is newer than what is saved"
    dist.barrier()
    return len(files(Path(home) / "memory-1"))


def test_copies_of_another_start_stay(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(4, of_another_start, str(tmp_path)) == [16] * 4


def refused(home: str, times: int, below: int) -> tuple[str, list[str], list[str], int]:
    """The run's folder refuses rank 2's file so many times. What the start says, finds, logs, and what is left."""
    node = copied(home)
    calls: list[int] = []

    def full(work: Path, folder: Path, rank: int, *, verify: bool) -> None:
        calls.append(rank)
        if rank == 2 and calls.count(2) <= times:
            raise disk_error(OSError(122, "Disk quota exceeded"), work / shard_name(rank))
        write(work, folder, rank, verify=verify)

    write, said, found = partner_copies._write, "", []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(partner_copies, "_write", full)
        patched.setattr(partner_copies, "_AGAIN_S", 0.1)
        try:
            found = [path.name for path, _ in node.found(below=below)]
        except CopiesNotSaved as error:
            said = str(error)
    dist.barrier()
    assert not list(node.checkpoints.glob("*.tmp"))
    listed = [json.loads(text.partition(b"\n")[2])["key"]["step"] for name, text in files(node.memory).items()
              if name.endswith(".json")]
    again = [path.name for path, _ in node.found()] if said else []
    if node.rank == 0 and again:
        whole(node.checkpoints / again[0], 4, int(again[0][-8:]))
    return said, found + again, node.log, min(listed) * 10 + max(listed)


@pytest.mark.parametrize(("times", "below", "found"), [
    (1, -1, "step-00000003"), (2, -1, "step-00000002"), (99, -1, ""), (99, 3, ""),
])
def test_copies_that_cannot_be_saved_stay_and_the_next_start_has_them(
    ranks: RankPool, tmp_path: Path, times: int, below: int, found: str
) -> None:
    """Once is passing; where it lasts, the run ends and says what it would lose. Of damaged copies none is left."""
    results = ranks.run(4, refused, str(tmp_path), times, below)
    log = " ".join(results[0][2])
    assert "was not saved: rank " in log and "Disk quota exceeded" in log and "output_dir" in log, log
    assert ("the copy of step 3" in log) == (below < 0) and ("the copy of step 2" in log) == (times > 2)
    if found:
        assert [(said, left) for said, _, _, left in results] == [("", 23)] * 4 and results[0][1] == [found]
        return
    step = 3 if below < 0 else 2
    assert all(f"the copy of step {step} in the nodes' memory was not saved, and the run would go back to its beginning"
               in said and "Disk quota exceeded" in said for said, *_ in results), results
    assert [left for *_, left in results] == [23 if below < 0 else 22] * 4
    assert results[0][1] == [f"step-0000000{step}"], "the next start, once there is space"


def recovered_twice(home: str, interval: int) -> list[list[str]]:
    """Saves of steps 1 and 2, a recovery of step 3, and another of step 5; two saves are kept."""
    node, kept = Node(home), []
    config = replace(node.session.config, checkpoint=replace(
        node.session.config.checkpoint, keep=2, save_interval=interval))
    node.session.config = config
    for step in (1, 2):
        save_checkpoint(node.checkpoints, state(step), pieces(node.rank, 4, step), peers=peers_of(dist.group.WORLD),
                        committer=committer(4))
    for epoch, step in ((5, 3), (6, 5)):
        node.session.fence = Fence(epoch, "a")
        copies, partner = node.copies(store_of(home))
        take(copies, partner, node, step)
        assert partner.finish() is None
        partner.close()
        dist.barrier()
        if node.rank == 0:
            (Path(home) / f"done-{step}").touch()
        node.found()
        kept.append(sorted(path.name[-1] for path in node.checkpoints.glob("step-*")))
        dist.barrier()
    return kept


@pytest.mark.parametrize(("interval", "kept"), [
    (7, [["1", "2", "3"], ["1", "2", "5"]]), (0, [["1", "2", "3"], ["1", "2", "5"]]),
    (3, [["2", "3"], ["2", "3", "5"]]),
])
def test_recoveries_displace_no_save_and_one_is_kept(
    ranks: RankPool, tmp_path: Path, interval: int, kept: list[list[str]]
) -> None:
    """Where a save of the step was due, and the fault struck first, the recovery is that save."""
    assert ranks.run(4, recovered_twice, str(tmp_path), interval)[0] == kept


def of_one_step(home: str) -> list[str]:
    """A checkpoint of the copy's own step and epoch was damaged on the disk, which nobody has noticed yet."""
    node = copied(home)
    save_checkpoint(node.checkpoints, state(3), pieces(node.rank, 4, 3), peers=peers_of(dist.group.WORLD),
                    committer=committer(5))
    if node.rank == 0:
        path = node.checkpoints / "step-00000003" / shard_name(1)
        data = bytearray(path.read_bytes())
        data[-3] ^= 1
        path.write_bytes(data)
    found = node.found()
    if node.rank == 0:
        whole(found[0][0], 4, 3)
    return [path.name for path, _ in found]


def test_a_damaged_checkpoint_hides_no_copy_of_its_step(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(4, of_one_step, str(tmp_path))[0] == ["step-00000003"]


def gone_back(home: str) -> int:
    node = Node(home)
    copies, partner = node.copies(store_of(home))
    take(copies, partner, node, 1)
    assert partner.finish() is None
    dist.barrier()
    partner.forget()
    copies.forget()
    partner.close()
    return len(node.found())


def test_a_run_that_goes_back_drops_both_nodes_copies(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(4, gone_back, str(tmp_path)) == [0] * 4


def test_a_stranger_is_not_listened_to() -> None:
    """Whoever connects first without the token is closed, and the partner is still found."""
    import socket
    import threading

    store = dist.HashStore()
    with tempfile.TemporaryDirectory() as folder:
        made: dict[int, Partner] = {}

        def make(rank: int) -> None:
            made[rank] = Partner(Path(folder), store, rank=rank, world=2, step=1, master="127.0.0.1")

        first = threading.Thread(target=make, args=(0,))
        first.start()
        address, port, token = json.loads(store.get("partner/0"))
        stranger = socket.create_connection((address, port))
        stranger.sendall(b"x" * len(token))
        second = threading.Thread(target=make, args=(1,))
        second.start()
        first.join(20)
        second.join(20)
        assert set(made) == {0, 1}
        stranger.settimeout(10)
        assert stranger.recv(1) == b""
        for partner in made.values():
            partner.close()


def test_each_copy_is_at_the_next_node_alone_and_is_waited_for(tmp_path: Path) -> None:
    """Three nodes of one rank: the next one and the one before differ."""
    import threading

    store, made, stored = dist.HashStore(), {}, {}
    key = CopyKey(1, 1, 1, 7, 3)

    def make(rank: int) -> None:
        (tmp_path / f"{rank}").mkdir(mode=0o700)
        made[rank] = Partner(tmp_path / f"{rank}", store, rank=rank, world=3, step=1, master="127.0.0.1")

    def in_each(call: Any, *ranks: int) -> None:
        threads = [threading.Thread(target=call, args=(rank,)) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)

    def begin(rank: int) -> None:
        folder = tmp_path / f"{rank}" / SLOTS[1]
        folder.mkdir(mode=0o700, exist_ok=True)
        file = CopyFile(folder, rank)
        file.take([StatePiece("w", "weight", (900,), (300 * rank,), (300,), 0, torch.randn(300))], key, {})
        made[rank].begin(1, file.path, file.listing)

    def finish(rank: int) -> None:
        assert made[rank].finish() is None
        stored[rank] = True

    in_each(make, 0, 1, 2)
    begin(0)
    begin(2)
    waits = threading.Thread(target=finish, args=(0,))
    waits.start()
    waits.join(0.3)
    assert not stored, "rank 1 has not taken it yet"
    begin(1)
    in_each(finish, 1, 2)
    waits.join(30)
    assert stored == {0: True, 1: True, 2: True}
    for rank in range(3):
        made[rank].close()
        before, folder = (rank - 1) % 3, Path(SLOTS[1])
        assert sorted(files(tmp_path / f"{rank}")) == sorted(
            str(folder / name) for r in (before, rank) for name in (f"rank-{r:05d}.json", shard_name(r)))
        for name in (f"rank-{before:05d}.json", shard_name(before)):
            assert (tmp_path / f"{rank}" / folder / name).read_bytes() == (
                tmp_path / f"{before}" / folder / name).read_bytes()
