"""Asynchronous saves over ranks that are threads: what is saved, what follows a failure, what a loop does about it."""

from __future__ import annotations

import os
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_checkpoint_roundtrip import ThreadPeers, over_threads, state, whole

from megatron_port.core.checkpoint import shard as disk
from megatron_port.core.checkpoint import writer
from megatron_port.core.checkpoint.format import shard_name
from megatron_port.core.checkpoint.reader import find_latest, open_checkpoint
from megatron_port.core.checkpoint.shard import bytes_of, plan_shard
from megatron_port.core.checkpoint.writer import Peers, listing_name, save_checkpoint, write_part
from megatron_port.core.config.schema import CheckpointConfig, ModelConfig, RunConfig
from megatron_port.core.dist.record import StatePiece
from megatron_port.core.errors import CheckpointError
from megatron_port.core.io import files
from megatron_port.core.model.shapes import parameter_shapes
from megatron_port.core.train.folders import FOLDER, run_folder
from megatron_port.ext.storage import background
from megatron_port.ext.storage.background import BackgroundSave, Finished, HostBuffer
from megatron_port.run.hooks import Saving
from megatron_port.run.state import Position


def part(rank: int, tensor: torch.Tensor) -> StatePiece:
    """Rank ``rank``'s quarter of a vector of 4 × len."""
    n = tensor.numel()
    return StatePiece("w", "weight", (3 * n,), (n * rank,), (n,), 0, tensor)


def test_what_is_saved_is_what_was_there_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training continues in place while the threads are held up; the second save uses the same memory."""
    go = threading.Event()
    real = write_part

    def late(*args: Any, **kwargs: Any) -> None:
        assert go.wait(20)
        real(*args, **kwargs)

    monkeypatch.setattr(background, "write_part", late)

    def act(peers: ThreadPeers) -> object:
        saver = BackgroundSave(peers, tmp_path, keep=1)
        mine = torch.full((1000,), float(peers.rank))
        seen = []
        for step in (1, 2):
            go.clear()
            saver.start(state(step), [part(peers.rank, mine)])
            assert saver.in_flight == step and saver.poll() is None
            held = saver._buffer.nbytes
            mine.add_(10)
            peers.first_failure(None)
            go.set()
            done = saver.finish()
            assert isinstance(done, Finished) and done.failure is None and saver.in_flight is None
            seen.append((done.path, held))
        assert saver.finish() is None and saver.poll() is None
        return seen

    results = over_threads(3, act)
    assert results == [[(tmp_path / "step-00000001", 4000), (tmp_path / "step-00000002", 4000)]] * 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000002"]  # kept: 1
    got = open_checkpoint(tmp_path / "step-00000002")
    got.verify()
    assert got.read("w", "weight", (0,), (3000,)).reshape(3, 1000).unique(dim=1).tolist() == [[10], [11], [12]]


def test_rank_0_may_commit_as_soon_as_a_list_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It moves the folder: whoever touched it after its list would take the commit for a failure."""
    work, moved = tmp_path / "step-00000001.tmp", tmp_path / "step-00000001"
    real = files.fsync_directory

    def synced(path: Path) -> None:
        if (path / listing_name(2)).exists():
            path.rename(moved)
        real(path)

    monkeypatch.setattr(files, "fsync_directory", synced)
    monkeypatch.setattr(writer, "fsync_directory", synced)
    work.mkdir()
    piece = part(0, torch.ones(8))
    write_part(2, work, plan_shard(shard_name(2), [piece]), [bytes_of(piece.tensor)], verify=True)
    assert sorted(path.name for path in work.iterdir()) == [listing_name(2), shard_name(2)] and not moved.exists()


def test_a_rank_that_fails_in_the_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All hear the same message, at a poll; the earlier checkpoint stays, nothing is left, the next save works."""
    save_checkpoint(tmp_path, state(1), [whole("w", torch.ones(6))])
    real, broken = write_part, threading.Event()
    broken.set()

    def fails(rank: int, *args: Any, **kwargs: Any) -> None:
        if rank == 1 and broken.is_set():
            raise CheckpointError("the disk of this rank is full")
        real(rank, *args, **kwargs)

    monkeypatch.setattr(background, "write_part", fails)

    def act(peers: ThreadPeers) -> object:
        saver = BackgroundSave(peers, tmp_path)
        saver.start(state(2), [part(peers.rank, torch.ones(2))])
        polls = 0
        while (done := saver.poll()) is None:
            polls += 1
            time.sleep(0.01)
            assert polls < 2000
        first = done.failure, saver.in_flight, find_latest(tmp_path)
        peers.first_failure(None)
        broken.clear()
        saver.start(state(3), [part(peers.rank, torch.ones(2))])
        again = saver.finish()
        assert again is not None
        return first, again.failure

    results = over_threads(3, act)
    assert results[0] == results[1] == results[2]
    (failure, in_flight, latest), again = results[0]
    assert "rank 1 on" in failure and "the disk of this rank is full" in failure and in_flight is None
    assert latest == tmp_path / "step-00000001" and again is None
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000001", "step-00000003"]


def test_the_thread_yields_to_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if sys.platform != "linux":
        pytest.skip("threads have priorities of their own on Linux only")
    seen: list[int] = []
    real = write_part

    def looks(*args: Any, **kwargs: Any) -> None:
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        real(*args, **kwargs)

    monkeypatch.setattr(background, "write_part", looks)
    mine = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    saver = BackgroundSave(Peers(), tmp_path)
    saver.start(state(), [whole("w", torch.ones(4))])
    done = saver.finish()
    assert done is not None and done.failure is None
    assert seen == [min(mine + 10, 19)] and os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == mine


def test_a_plan_is_used_again_only_where_it_fits() -> None:
    """What comes out is what planning anew gives, whatever the last one was of."""
    v, w = whole("v", torch.ones(6)), whole("w", torch.ones(6, dtype=torch.bfloat16))
    first = plan_shard("x", [w, v])
    again = plan_shard("x", [replace(w, tensor=w.tensor * 2), v], last=replace(first, pieces=()))
    assert again.entries is first.entries and [p.name for p in again.pieces] == ["v", "w"]
    assert torch.equal(again.pieces[1].tensor, w.tensor * 2)
    box = {"global_shape": (6,), "offset": (1,), "shape": (5,), "tensor": torch.ones(5)}
    for other in (
        [v], [v, v], [w, replace(v, name="u")], [w, replace(v, kind="exp_avg")], [w, replace(v, **box)],  # type: ignore[arg-type]
        [w, replace(v, tensor=torch.ones(6, dtype=torch.float64))], [w, replace(v, tensor=torch.ones(5))],
        [w, replace(v, tensor=torch.ones(5), flat_start=1)], [w, replace(v, global_shape=(7,))],
    ):
        assert plan_shard("x", other, last=first) == plan_shard("x", other)


def test_disks_that_are_not_shared(tmp_path: Path) -> None:
    def act(peers: ThreadPeers) -> object:
        saver = BackgroundSave(peers, tmp_path / f"node{peers.rank}", visible_seconds=0)
        saver.start(state(), [part(peers.rank, torch.ones(2))])
        done = saver.finish()
        assert done is not None
        return done.failure

    messages = over_threads(3, act)
    assert messages[0] == messages[1] == messages[2] and "share" in str(messages[0])


def test_another_rank_s_list_is_never_seen(tmp_path: Path) -> None:
    """A stale directory of that name on the other disk: it writes there, and rank 0 must not wait for ever."""
    (tmp_path / "node1" / "step-00000001.tmp").mkdir(parents=True)

    def act(peers: ThreadPeers) -> object:
        saver = BackgroundSave(peers, tmp_path / f"node{peers.rank}", visible_seconds=0)
        half = StatePiece("w", "weight", (4,), (2 * peers.rank,), (2,), 0, torch.ones(2))
        saver.start(state(), [half])
        done = saver.finish()
        assert done is not None
        return done.failure

    messages = over_threads(2, act)
    assert messages[0] == messages[1] and "1 of 2 ranks (first: rank 1)" in str(messages[0])


def test_a_save_that_cannot_begin(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")

    def act(peers: ThreadPeers) -> object:
        saver = BackgroundSave(peers, tmp_path / "file" / "checkpoints")
        try:
            saver.start(state(), [part(peers.rank, torch.ones(2))])
        finally:
            assert saver.in_flight is None
        return None

    errors = over_threads(3, act)
    assert all(isinstance(e, CheckpointError) and "rank 0 on" in str(e) for e in errors)


def test_one_at_a_time(tmp_path: Path) -> None:
    saver = BackgroundSave(Peers(), tmp_path)
    saver.start(state(1), [whole("w", torch.ones(4))])
    with pytest.raises(ValueError, match="step 1 is in flight"):
        saver.start(state(2), [whole("w", torch.ones(4))])
    assert saver.finish() is not None


def test_the_buffer_holds_the_file_s_data() -> None:
    pieces = [
        whole("a", torch.randn(5).to(torch.bfloat16)), whole("b", torch.randn(7)), whole("c", torch.randn(3).double()),
        StatePiece("d", "weight", (4,), (0,), (4,), 0, torch.arange(8.0)[::2]),
    ]
    plan = plan_shard("rank-00000.safetensors", pieces)
    buffer = HostBuffer()
    want = b"".join(bytes(bytes_of(p.tensor)) for p in plan.pieces)
    assert bytes(buffer.take(plan)) == want and plan.data_bytes == len(want) == buffer.nbytes
    smaller = plan_shard("rank-00000.safetensors", pieces[:1])
    assert bytes(buffer.take(smaller)) == bytes(bytes_of(pieces[0].tensor)) and buffer.nbytes == len(want)
    assert bytes(buffer.take(plan_shard("x", []))) == b""


# ---------------------------------------------------------------- what the loop does


class Stub:
    """An engine that holds ones, and the session of a single process; ``lines`` is its log."""

    def __init__(self, folder: Path, **checkpoint: Any) -> None:
        config = RunConfig(
            name="run", output_dir=str(folder),
            model=ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=2, vocab_size=11, seq_length=4),
            checkpoint=CheckpointConfig(save_interval=5, **checkpoint),
        )
        self.home = run_folder(config) / FOLDER
        self.lines: list[str] = []
        self.session: Any = SimpleNamespace(
            config=config, cpu_group=None, info=SimpleNamespace(world_size=1, rank=0), is_rank_zero=True,
            logger=SimpleNamespace(log=self.lines.append),
        )
        self.shapes, self.state_check_interval = parameter_shapes(config.model), 1

    def state_pieces(self) -> list[StatePiece]:
        return [whole(name, torch.ones(shape)) for name, shape in self.shapes.items()]

    def scalar_state(self) -> dict[str, float | int]:
        return {"optimizer_steps": 1}


def at(step: int) -> Position:
    return Position(step=step, samples=step, skipped=0, tokenizer="byte")


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_full_disk_does_not_end_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    stub = Stub(tmp_path, asynchronous=asynchronous)
    saving = Saving(stub, stub.session)  # type: ignore[arg-type]
    saving.save(at(5))
    saving.finish()
    assert saving.saved_step == 5 and "saved" in stub.lines[-1]
    monkeypatch.setattr(disk, "free_bytes", lambda path: 100)
    for step in (10, 15):
        saving.save(at(step))
        saving.finish()
        assert "training continues" in stub.lines[-1] and "No space left on device" in stub.lines[-1]
        assert "free 100 bytes" in stub.lines[-1] and f"step {step} was not saved (failure" in stub.lines[-1]
        assert sorted(p.name for p in stub.home.iterdir()) == ["latest", "step-00000005"]
    assert "failure 2 of at most 3 in a row" in stub.lines[-1] and "the last checkpoint is step 5" in stub.lines[-1]
    with pytest.raises(CheckpointError, match="3 saves in a row have failed"):
        saving.save(at(20))
        saving.finish()
    monkeypatch.undo()
    saving.save(at(25))
    saving.finish()
    assert "(after 3 that failed)" in stub.lines[-1] and saving.saved_step == 25
    open_checkpoint(stub.home / "step-00000025").verify()


def test_saves_without_a_limit_and_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = Stub(tmp_path, max_failures=0)
    saving = Saving(stub, stub.session)  # type: ignore[arg-type]
    monkeypatch.setattr(disk, "free_bytes", lambda path: 100)
    for step in range(5, 50, 5):
        saving.save(at(step))
        saving.finish()
    assert len(stub.lines) == 9 and "failure 9 in a row" in stub.lines[-1]
    with pytest.raises(CheckpointError, match="No space left"):
        saving.final(at(50))  # there is no later one to try
    monkeypatch.undo()
    saving.final(at(50))
    saved = stub.home / "step-00000050"
    assert saving.saved_step == 50 and saved.is_dir()
    before = saved.stat().st_mtime_ns
    saving.final(at(50))
    assert saved.stat().st_mtime_ns == before  # it was safe already


def test_a_save_in_flight_is_waited_for_before_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub, real = Stub(tmp_path), write_part

    def slow(*args: Any, **kwargs: Any) -> None:
        time.sleep(0.3)
        real(*args, **kwargs)

    monkeypatch.setattr(background, "write_part", slow)
    monkeypatch.setattr("megatron_port.run.hooks._NOTICEABLE", 0.1)
    saving = Saving(stub, stub.session)  # type: ignore[arg-type]
    saving.save(at(5))
    saving.poll()
    assert saving.saved_step == 0
    saving.save(at(10))
    assert saving.saved_step == 5 and any("saving takes longer than checkpoint.save_interval" in x for x in stub.lines)
    saving.final(at(10))
    assert saving.saved_step == 10 and sum("saved" in line for line in stub.lines) == 2


def test_the_manifest_says_what_the_run_was(tmp_path: Path) -> None:
    stub = Stub(tmp_path)
    saving = Saving(stub, stub.session)  # type: ignore[arg-type]
    saving.final(at(7))
    saved = open_checkpoint(stub.home / "step-00000007").manifest.state
    assert saved.rng["seed"] == 1234 and saved.data["next_sample"] == 7 and saved.schedule["learning_rate"] > 0
    assert len(saved.config_hash) == 16 and saved.tokenizer["name"] == "byte" and len(saved.tokenizer["hash"]) == 64
