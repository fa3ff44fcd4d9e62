"""Copies on a node's disk: they come back where those in memory are gone, and nothing that was cut short does."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_port.core.checkpoint.format import Lineage, SavedState, shard_name
from megatron_port.core.checkpoint.reader import open_checkpoint
from megatron_port.core.checkpoint.writer import listing_name
from megatron_port.core.config.checks import resolve
from megatron_port.core.config.loader import load
from megatron_port.core.config.schema import LayoutConfig
from megatron_port.core.dist.record import StatePiece
from megatron_port.core.errors import CheckpointError, ConfigError, EnvironmentFault
from megatron_port.ext.storage import copies as copies_module
from megatron_port.ext.storage import disk_copies as module
from megatron_port.ext.storage.copies import SLOTS, TIERS, StateCopies, copies_folder, described, remove_copies
from megatron_port.ext.storage.disk_copies import DiskCopies, file_system
from megatron_port.ext.storage.partner_copies import committed_copies
from megatron_port.ext.telemetry.flops import parameter_count
from megatron_port.run.copying import StateCopying
from megatron_port.tools.plan.case import Case, Machine, case_of, machine_of
from megatron_port.tools.plan.memory import copied, host_problem
from megatron_port.tools.plan.step import plan_step

INTERVAL = 3


def config(home: Path, *more: str) -> Any:
    for tier in TIERS:
        (home / tier).mkdir(exist_ok=True)
    return load(None, [f"output_dir={home / 'runs'}", f'checkpoint.memory_folder="{home / "memory"}"',
                       f'checkpoint.disk_folder="{home / "disk"}"', "checkpoint.memory_interval=1",
                       f"checkpoint.disk_interval={INTERVAL}", *more]).config


def session(run: Any) -> Any:
    info = SimpleNamespace(rank=0, world_size=1, hostname="h", num_nodes=1, local_rank=0, local_world_size=1)
    return SimpleNamespace(config=run, info=info, logger=SimpleNamespace(log=print), is_rank_zero=True, cpu_group=None)


def pieces(step: int, size: int = 40_000) -> list[StatePiece]:
    draw = torch.Generator().manual_seed(step)
    return [StatePiece("w", kind, (size,), (0,), (size,), 0, torch.randn(size, generator=draw))
            for kind in ("weight", "exp_avg")]


def described_at(step: int) -> dict[str, Any]:
    state = SavedState(step=step, samples=step, tokens=step, layout=LayoutConfig(), config={}, extra={},
                       scalars={"optimizer_steps": step}, kinds={"w": ("weight", "exp_avg")})
    return described(state, Lineage(run="r", commit=3))


class Rank:
    """A rank alone, whose loop is that of ``run.copying``."""

    def __init__(self, run: Any, *, epoch: int = 5, spare: int | None = None) -> None:
        self.disk = DiskCopies(copies_folder(run, "disk"), rank=0, interval=INTERVAL, spare=spare)
        self.copies = StateCopies(copies_folder(run), rank=0, world=1, run="r", epoch=epoch, disk=self.disk)
        self.errors: list[str] = []

    def take(self, *steps: int) -> None:
        for step in steps:
            if self.disk.due(step):
                error = self.disk.finish()
                self.errors += [str(error)] if error else []
                if not error:
                    self.disk.keep()
            self.copies.take(pieces(step), step, described_at(step))

    def written(self) -> None:
        """Wait until the disk has the last copy, or has refused it."""
        while self.disk._thread is not None and self.disk._thread.is_alive():
            time.sleep(0.01)


@pytest.fixture
def run(tmp_path: Path) -> Any:
    return config(tmp_path)


def found(run: Any, below: int = -1) -> list[tuple[str, int]]:
    """Tier and step of what a start would resume from, each read through and compared."""
    out = []
    for path, manifest in committed_copies(session(run), "r", below):
        checkpoint = open_checkpoint(path)
        checkpoint.verify()
        for piece in pieces(manifest.state.step):
            assert torch.equal(checkpoint.read(piece.name, piece.kind, (0,), piece.shape), piece.tensor)
        checkpoint.close()
        out.append((next(tier for tier in TIERS if path.parent == copies_folder(run, tier)), manifest.state.step))
    return out


def test_what_memory_has_lost_comes_back_from_the_disk(run: Any) -> None:
    """The first of a start, then every third; the two newest are kept."""
    rank = Rank(run)
    rank.take(1, 2)
    assert rank.disk.finish() is None and [rank.disk.due(n) for n in range(1, 7)] == [False, False, True] * 2
    rank.take(3, 4, 5, 6, 7)
    assert rank.disk.finish() is None and found(run) == [("memory", 7), ("memory", 6)]
    shutil.rmtree(copies_folder(run))
    assert found(run) == [("disk", 6), ("disk", 3)]
    assert found(run, below=6) == [("disk", 3)] and found(run, below=3) == []
    off = replace(run, checkpoint=replace(run.checkpoint, disk_interval=0))
    assert committed_copies(session(off), "r") == []
    remove_copies(run)
    assert not any(copies_folder(run, tier).exists() for tier in TIERS)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**9))
def test_whatever_is_damaged_is_named_and_the_next_is_used(seed: int) -> None:
    """Any of the four, in the file or in its list, by a bit or a missing end."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        run = config(Path(folder))
        rank = Rank(run)
        rank.take(1, 2, 3, 4)
        rank.disk.finish()
        all_four = [("memory", 4, 1), ("memory", 3, 0), ("disk", 3, 1), ("disk", 1, 0)]
        bad = draw.sample(all_four, draw.randint(1, 4))
        for tier, _, slot in bad:
            victim = copies_folder(run, tier) / SLOTS[slot] / draw.choice([shard_name(0), listing_name(0)])
            data = bytearray(victim.read_bytes())
            if draw.random() < 0.5:
                data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
            else:
                del data[draw.randrange(len(data)):]
            victim.write_bytes(data)
        left = [(tier, step) for tier, step, slot in all_four if (tier, step, slot) not in bad]
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            assert found(run) == [one for one in left if one[0] == (left[0][0])] if left else found(run) == []
        looked = [one for one in bad if one[0] == "memory" or not [x for x in left if x[0] == "memory"]]
        named = said.getvalue().count("is passed over")
        assert named == len(looked), said.getvalue()


@contextlib.contextmanager
def held(monkeypatch: pytest.MonkeyPatch, name: str) -> Iterator[Callable[[], None]]:
    """A system call that waits until it is released."""
    real, go = getattr(os, name), threading.Event()

    def late(*args: Any) -> Any:
        assert go.wait(60)
        return real(*args)

    with monkeypatch.context() as patched:
        patched.setattr(os, name, late)
        yield go.set
        go.set()


def test_memory_is_not_written_over_while_it_is_read(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next copy takes the other place; the one after it waits, and what is written is what was copied."""
    rank = Rank(run)
    with held(monkeypatch, "sendfile") as release:
        rank.take(1, 2)
        third = threading.Thread(target=lambda: rank.copies.take(pieces(8), 8, {}))
        third.start()
        third.join(0.3)
        assert third.is_alive()
        release()
        third.join(60)
    assert rank.disk.finish() is None
    assert on_disk(run) == [1]


def on_disk(run: Any) -> list[int]:
    """Steps of the copies that a start finds whose node has lost its memory."""
    aside = copies_folder(run).rename(copies_folder(run).with_name("aside"))
    steps = [step for tier, step in found(run) if tier == "disk"]
    aside.rename(copies_folder(run))
    return steps


def test_only_reading_is_waited_for_and_a_copy_counts_once_it_is_on_the_disk(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(run)
    listing = copies_folder(run, "disk") / SLOTS[0] / listing_name(0)
    with held(monkeypatch, "fsync") as release:
        rank.take(1, 2)
        rank.copies.take(pieces(8), 8, {})  # over the first, which has been read
        assert not listing.exists()
        release()
        assert rank.disk.finish() is None and listing.exists()


def test_the_file_is_on_the_disk_before_its_list_is(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real, synced = os.fsync, []

    def noted(handle: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        real(handle)

    rank = Rank(run)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", noted)
        rank.take(1)
        assert rank.disk.finish() is None
    assert synced[0] == shard_name(0) and listing_name(0) in synced[1] and synced[2:] == [SLOTS[0]]


def test_a_copy_given_up_has_no_list_and_the_next_start_has_the_one_before(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(run)
    rank.take(1, 2, 3)
    assert rank.disk.finish() is None
    rank.disk.keep()
    with held(monkeypatch, "fsync") as release:
        rank.copies.take(pieces(6), 6, {})
        rank.disk.close()
        release()
        assert rank.disk.finish() is None
    assert on_disk(run) == [3]
    again = Rank(run, epoch=6, spare=1)
    assert on_disk(run) == [3]
    again.take(4)
    assert again.disk.finish() is None
    assert on_disk(run) == [4, 3]
    Rank(run, epoch=7)  # it began elsewhere
    assert on_disk(run) == []


def test_a_disk_that_refuses_costs_that_copy_alone(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(run)
    rank.take(1, 2, 3)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        rank.written()
        patched.setattr(os, "sendfile", full)
        rank.take(6)
        rank.written()
    assert on_disk(run) == [3]
    rank.take(9)
    assert rank.disk.finish() is None
    error, = rank.errors
    assert "copy of this rank's state (No space left" in error and "Set checkpoint.disk_folder" in error, error
    assert on_disk(run) == [9, 3], "the place of the one that failed was taken, not the other's"


def test_a_copy_that_one_rank_lacks_takes_no_place_and_is_named() -> None:
    said: list[str] = []
    kept: list[int] = []
    hook = StateCopying.__new__(StateCopying)
    hook.state = SimpleNamespace(  # type: ignore[assignment]
        session=SimpleNamespace(cpu_group=None, logger=SimpleNamespace(log=said.append)))
    for error in (CheckpointError("the disk is full"), None):
        disk: Any = SimpleNamespace(finish=lambda error=error: error, keep=lambda: kept.append(len(said)))
        hook._finish_disk(disk)
    assert kept == [1] and said == ["the disk is full\ntraining continues; the copy before it stays on the disks"]


def test_going_back_drops_what_is_later(run: Any) -> None:
    rank = Rank(run)
    rank.take(1, 2, 3)
    assert rank.disk.finish() is None
    rank.disk.forget(3)
    assert on_disk(run) == [1]
    rank.disk.forget()
    assert on_disk(run) == [] and rank.disk.due(4), "the next copy is the first"


def test_a_copy_that_counts_no_more_and_stays_is_named(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later start would take it for the run's state: the disk has become read-only meanwhile."""
    rank = Rank(run)
    rank.take(1)
    assert rank.disk.finish() is None

    def refused(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "unlink", refused)
    with pytest.raises(CheckpointError, match=r"step 1 counts no more.*\(Read-only file system\).*remove it"):
        rank.disk.forget()
    monkeypatch.undo()
    rank.disk.forget()
    assert on_disk(run) == [], "tried again"


def gone_back(run: Any) -> Rank:
    """A rank that was resumed from the copy of step 1, and has dropped its own of step 2."""
    first = Rank(run)
    first.take(1)
    assert first.disk.finish() is None
    rank = Rank(run, epoch=6, spare=0)
    rank.take(2)
    assert rank.disk.finish() is None
    rank.disk.keep()
    rank.disk.forget()
    return rank


def test_after_going_back_the_copy_resumed_from_stays_until_there_is_another(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one takes the empty place, also where power is cut before it is written."""
    rank = gone_back(run)
    assert on_disk(run) == [1]
    with held(monkeypatch, "fsync") as release:
        rank.copies.take(pieces(2), 2, described_at(2))
        assert (copies_folder(run, "disk") / SLOTS[0] / listing_name(0)).exists()
        rank.disk.close()
        release()
        assert rank.disk.finish() is None
    assert on_disk(run) == [1]


def test_after_going_back_the_places_are_taken_in_turn_again(run: Any) -> None:
    rank = gone_back(run)
    for step, left in ((2, [2, 1]), (3, [3, 2]), (6, [6, 3])):
        rank.take(step)
        rank.written()
        assert on_disk(run) == left
    assert not rank.errors


def hook_of(run: Any, step: int, said: list[str]) -> StateCopying:
    """The hook of a run alone that was resumed at ``step`` from no copy on a disk."""
    hook = StateCopying.__new__(StateCopying)
    alone = session(run)
    alone.logger.log = said.append
    hook.state = SimpleNamespace(  # type: ignore[assignment]
        session=alone, config=run, checkpoints=[], progress=SimpleNamespace(step=step))
    hook._partner = None
    return hook


def test_a_start_from_memory_keeps_the_newest_copy_on_the_disk(run: Any) -> None:
    """Until its own first one is there: memory may go before that."""
    first = Rank(run)
    first.take(1, 2, 3)
    assert first.disk.finish() is None and on_disk(run) == [3, 1]
    writer = hook_of(run, 4, [])._writer("r")
    assert writer is not None and on_disk(run) == [3] and writer._next == 0
    assert hook_of(run, 2, [])._writer("r") is not None and on_disk(run) == [], "of a later step than it begins at"


def test_a_start_keeps_no_copy_of_another_run(run: Any) -> None:
    first = Rank(run)
    first.take(1, 2, 3)
    assert first.disk.finish() is None
    assert hook_of(run, 4, [])._writer("another") is not None and on_disk(run) == []


@pytest.mark.parametrize("call", ["mkdir", "unlink", "fsync"])
def test_a_disk_that_refuses_at_the_start_costs_a_line(
    run: Any, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Read-only: all ranks train without copies on disks."""
    real, said = getattr(os, call), list[str]()

    def refused(path: Any, *rest: Any, **more: Any) -> Any:
        if call == "fsync" or str(path).startswith(str(copies_folder(run, "disk"))):
            raise OSError(30, "Read-only file system")
        return real(path, *rest, **more)

    first = Rank(run)
    first.take(1)
    assert first.disk.finish() is None
    if call == "mkdir":
        shutil.rmtree(copies_folder(run, "disk") / SLOTS[1])
    with monkeypatch.context() as patched:
        patched.setattr(os, call, refused)
        with pytest.raises((CheckpointError, EnvironmentFault), match=r"Read-only file system.*checkpoint.disk_"):
            DiskCopies(copies_folder(run, "disk"), rank=0, interval=INTERVAL)
        assert hook_of(run, 2, said)._writer("r") is None
    line, = said
    assert "Read-only file system" in line and line.endswith("training continues without copies on the nodes' disks")


def test_a_disk_that_is_memory_is_named(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert file_system(Path("/proc")) == "proc" and file_system(Path("/nowhere")) == ""
    for kind, count in (("tmpfs", 1), ("ext4", 0)):
        said: list[str] = []
        monkeypatch.setattr(module, "file_system", lambda _, kind=kind: kind)
        assert hook_of(run, 2, said)._writer("r") is not None
        assert len(said) == count and all("is in memory (tmpfs), not on a disk" in line for line in said)


def test_new_folders_outlive_a_power_cut(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(module, "fsync_directory", synced.append)
    Rank(run)
    folder = copies_folder(run, "disk")
    assert synced == [folder, folder.parent, folder.parent.parent]


def test_a_copy_proved_on_a_full_disk_is_used(
    run: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its list cannot be written again, and the hash of the whole file is of the file as it is read."""
    rank = Rank(run)
    rank.take(1)
    assert rank.disk.finish() is None
    shutil.rmtree(copies_folder(run))

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(copies_module, "_write_list", full)
        assert found(run) == [("disk", 1)]
    assert "passed over" not in capsys.readouterr().out
    real, synced = os.fsync, list[str]()

    def noted(handle: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        real(handle)

    monkeypatch.setattr(os, "fsync", noted)
    assert found(run) == [("disk", 1)] and any(listing_name(0) in name for name in synced), "the list is replaced whole"
    synced.clear()
    assert found(run) == [("disk", 1)] and not any(listing_name(0) in name for name in synced), "and only once"


def test_a_folder_that_is_not_there_is_named(run: Any) -> None:
    with pytest.raises(EnvironmentFault, match=r"checkpoint.disk_folder to .*, or checkpoint.disk_interval = 0"):
        DiskCopies(Path("/nowhere/a/b"), rank=0, interval=1)


@pytest.mark.parametrize(("more", "message"), [
    (("checkpoint.disk_interval=3", "checkpoint.memory_interval=2"), "no multiple of checkpoint.memory_interval"),
    (("checkpoint.disk_interval=3", "checkpoint.memory_interval=0"), "no multiple of checkpoint.memory_interval"),
    (("checkpoint.disk_interval=3", "checkpoint.disk_folder=/dev/shm/me"), "disk_folder /dev/shm/me, where copies in"),
    (("checkpoint.disk_interval=3", "checkpoint.memory_folder=/var/tmp"), "disk_folder /var/tmp, where copies in mem"),
])
def test_settings_that_contradict_one_another(more: tuple[str, ...], message: str) -> None:
    from megatron_port.core.config.checks import check

    run = load(None, ["data.synthetic=true", "checkpoint.memory_interval=1", *more]).config
    with pytest.raises(ConfigError, match=f"checkpoint.disk_interval.*{message}"):
        check(run)


@pytest.mark.parametrize(("memory", "disk", "refused"), [
    ("/scratch", "/scratch2", False), ("/scratch/", "/scratch/a", True), ("/scratch/a", "/scratch/b", False),
    ("/m", "/run", True), ("/m", "/runs", False), ("/m", "/d/../dev/shm", True), ("/m", "/dev/shm-2", False),
])
def test_a_folder_in_memory_is_told_by_its_parents(memory: str, disk: str, refused: bool) -> None:
    from megatron_port.core.config.checks import check

    run = load(None, ["data.synthetic=true", "checkpoint.memory_interval=1", "checkpoint.disk_interval=3",
                      f"checkpoint.memory_folder={memory}", f"checkpoint.disk_folder={disk}"]).config
    with pytest.raises(ConfigError, match="where copies in memory are") if refused else contextlib.nullcontext():
        check(run)


def planned(nodes: int, *more: str) -> tuple[Case, Machine]:
    run = load(["models/gpt2-124m", "clusters/dgx-h100"], [
        "checkpoint.memory_interval=1", f"layout.data_parallel_size={8 * nodes}", "checkpoint.disk_interval=10",
        f"batch.global_batch_size={8 * nodes}", f"cluster.nodes={nodes}", "batch.micro_batch_size=1", *more]).config
    return case_of(resolve(run, 8 * nodes))[0], machine_of(run)


@pytest.mark.parametrize("nodes", [1, 4])
def test_the_plan_has_two_of_a_nodes_own_copies_and_the_time_of_one(nodes: int) -> None:
    """12 bytes of each parameter, over all nodes; in memory a neighbour's come on top, on the disk they do not."""
    case, machine = planned(nodes, "hardware.nvme_gb=100", "hardware.nvme_write_gb=0.5")
    found, total = copied(case, machine), parameter_count(case.model)
    assert found.disk * nodes == pytest.approx(2 * 12 * total, rel=0.01)
    assert found.writing == pytest.approx(found.disk / 2 / 0.5e9)
    without = copied(replace(case, disk_interval=0), machine)
    assert (without.disk, without.writing) == (0.0, 0.0) and without.node == found.node
    slow = replace(machine.hardware, nvme_write_gb=found.disk / 2 / 1e9 / 1000)  # a copy takes 1000 s
    waiting = plan_step(case, replace(machine, hardware=slow)).seconds
    assert waiting == pytest.approx(1000 / 10, rel=1e-9), "ten steps wait for it"
    full = replace(machine, hardware=replace(machine.hardware, nvme_gb=0.9 * found.disk / 1e9))
    assert "of a node's local disks, which have" in host_problem(case, full) and "disk_interval" in host_problem(
        case, full)
    assert not host_problem(replace(case, disk_interval=0), full)
