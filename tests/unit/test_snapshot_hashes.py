"""A bit that flips in the host's copy of the state is not committed, wherever it is and whenever it flips."""

from __future__ import annotations

import ctypes
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from test_checkpoint_roundtrip import ThreadPeers, over_threads, state

from megatron_port.core.checkpoint import shard, writer
from megatron_port.core.checkpoint.reader import find_latest, open_checkpoint
from megatron_port.core.checkpoint.writer import save_checkpoint
from megatron_port.core.dist.record import StatePiece
from megatron_port.core.errors import CheckpointError
from megatron_port.ext.storage import background
from megatron_port.ext.storage.background import BackgroundSave

KINDS = {"weight": torch.float32, "exp_avg": torch.bfloat16, "exp_avg_sq": torch.float64, "codes": torch.uint8}
SIZE = 9001
"""Elements of a rank's piece: more than two rows of hashes, and odd."""


def pieces(rank: int) -> list[StatePiece]:
    """What a rank of two saves: views that begin at odd places."""
    out = []
    for kind, dtype in KINDS.items():
        flat = torch.randn(SIZE + 1, generator=torch.Generator().manual_seed(rank)).mul(50).abs().to(dtype)
        out.append(StatePiece("w", kind, (2 * SIZE,), (rank * SIZE,), (SIZE,), 0, flat[1:]))
    return out


def flip(memory: memoryview, byte: int, bit: int) -> None:
    """Flip a bit of memory, whether or not it may be written."""
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr() + byte
    there = ctypes.c_uint8.from_address(address)
    there.value ^= 1 << bit




@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_flip_in_the_hosts_copy_is_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, asynchronous: bool
) -> None:
    """Rank 1's copy; the tensor and the element are named, and what was committed before stays the newest."""
    draw = random.Random(kind)
    dtype = KINDS[kind]
    order = sorted(KINDS, key=lambda k: -KINDS[k].itemsize)
    element, bit = draw.randrange(SIZE), draw.randrange(8 * dtype.itemsize)
    byte = element * dtype.itemsize + bit // 8
    on = False
    real_part, real_bytes = writer.write_part, shard.bytes_of

    def in_snapshot(rank: int, work: Path, plan: Any, data: Any, **settings: Any) -> None:
        if on and rank == 1:
            begin = plan.spans[order.index(kind)][0]
            flip(saved[1]._job.image[begin:], byte, bit % 8)
        real_part(rank, work, plan, data, **settings)

    def in_copy(tensor: torch.Tensor) -> memoryview:
        copy = memoryview(bytearray(real_bytes(tensor)))
        if on and tensor.dtype == dtype and bool((tensor == mine[order.index(kind)].tensor).all()):
            flip(copy, byte, bit % 8)
        return copy

    monkeypatch.setattr(background, "write_part", in_snapshot)
    monkeypatch.setattr(writer, "bytes_of", in_copy)
    saved: dict[int, Any] = {}
    mine = sorted(pieces(1), key=lambda piece: -piece.tensor.element_size())

    def act(peers: ThreadPeers) -> str:
        if asynchronous:
            saver = saved.setdefault(peers.rank, BackgroundSave(peers, tmp_path, compare=True))
            saver.start(state(2 if on else 1), pieces(peers.rank))
            done = saver.finish()
            assert done is not None
            return done.failure or ""
        try:
            save_checkpoint(tmp_path, state(2 if on else 1), pieces(peers.rank), peers=peers, compare=True)
        except CheckpointError as error:
            return str(error)
        return ""

    assert over_threads(2, act) == ["", ""]
    on = True
    said = over_threads(2, act)
    assert said[0] == said[1] and f"the {kind} of w (element {element})" in said[0]
    assert "rank 1 on" in said[0] and "memory" in said[0]
    newest = find_latest(tmp_path)
    assert newest == tmp_path / "step-00000001"
    open_checkpoint(newest).verify()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000001"]
