"""A file that answers a later read with other bytes: every byte that is used must be one that was hashed.

A bit is flipped in what one of the reads of a load returned, each read in turn. The file on disk stays whole, so only
a hash of the very bytes that land in a tensor can tell.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from megatron_port.core.checkpoint.format import SavedState
from megatron_port.core.checkpoint.reader import Checkpoint, open_checkpoint
from megatron_port.core.checkpoint.shard import Digest
from megatron_port.core.checkpoint.writer import save_checkpoint
from megatron_port.core.dist.record import StatePiece
from megatron_port.core.errors import DamagedCheckpoint
from megatron_port.ext.storage import ranged
from megatron_port.ext.storage.ranged import GrainHashes

KINDS = ("weight", "exp_avg", "exp_avg_sq")
GRAIN = 96
ONE_BLOCK = 1 << 20
Tensors = dict[tuple[str, str], torch.Tensor]


@contextmanager
def flipped(call: int, draw: random.Random) -> Iterator[list[tuple[int, int]]]:
    """Flip one bit of what the ``call``-th preadv returns (-1: of none); yields (offset, bytes) of every call."""
    real, seen = os.preadv, []

    def preadv(handle: int, buffers: list[Any], offset: int) -> int:
        count = real(handle, buffers, offset)
        if len(seen) == call and count:
            at = draw.randrange(count)
            for buffer in buffers:
                if at < len(buffer):
                    buffer[at] ^= 1 << draw.randrange(8)
                    break
                at -= len(buffer)
        seen.append((offset, count))
        return count

    os.preadv = preadv  # type: ignore[assignment]
    try:
        yield seen
    finally:
        os.preadv = real


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensors]:
    """Three kinds of two tensors, the file in the order of kinds, in blocks of 1,000 bytes."""
    generator = torch.Generator().manual_seed(3)
    truth = {
        (name, kind): torch.randn(shape, generator=generator)
        for kind in KINDS for name, shape in (("w", (24, 16)), ("b", (40,)))
    }
    state = SavedState(step=1, samples=1, tokens=1, layout={}, config={}, scalars={}, extra={})
    at = save_checkpoint(tmp_path_factory.mktemp("reread"), state, [
        StatePiece(name, kind, tuple(t.shape), (0,) * t.dim(), tuple(t.shape), 0, t.reshape(-1))
        for (name, kind), t in truth.items()
    ])
    return at, truth


def relist(at: Path, width: int) -> None:
    """List the files' blocks anew, ``width`` bytes each; 0: as version 1 did, without blocks."""
    body = json.loads((at / "manifest.json").read_text())["manifest"]
    body["version"] = 2 if width else 1
    for name in body["files"]:
        digest = Digest(width or 1 << 20)
        digest.update((at / name).read_bytes())
        entry = digest.entry()
        body["files"][name] = {"size": entry.size, "hash": entry.hash}
        if width:
            body["files"][name] |= {"block_bytes": width, "blocks": list(entry.blocks)}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    outer = {"hash": xxhash.xxh3_128_hexdigest(text.encode()), "manifest": body}
    (at / "manifest.json").write_text(json.dumps(outer))


def by_name(checkpoint: Checkpoint, truth: Tensors) -> Tensors:
    """As an engine loads: parameter by parameter, its kinds one after the other, straight into their places."""
    got = {}
    for name in ("w", "b"):
        for kind in KINDS:
            shape = tuple(truth[name, kind].shape)
            got[name, kind] = checkpoint.read(name, kind, (0,) * len(shape), shape, out=torch.zeros(shape))
    return got


def by_rows(checkpoint: Checkpoint, truth: Tensors) -> Tensors:
    """In slices of three rows, from the last to the first, the kinds by turns."""
    got = {key: torch.zeros_like(t) for key, t in truth.items()}
    for (name, kind), place in got.items():
        for low in reversed(range(0, place.shape[0], 3)):
            n = min(3, place.shape[0] - low)
            rest = tuple(place.shape[1:])
            place[low : low + n] = checkpoint.read(name, kind, (low, *(0 for _ in rest)), (n, *rest))
    return got


def by_columns(checkpoint: Checkpoint, truth: Tensors) -> Tensors:
    """As another tensor-parallel size would: a column slice of each, then the next."""
    got = {key: torch.zeros_like(t) for key, t in truth.items()}
    for low in range(0, 16, 4):
        for kind in KINDS:
            got["w", kind][:, low : low + 4] = checkpoint.read("w", kind, (0, low), (24, 4))
    for kind in KINDS:
        got["b", kind] = checkpoint.read("b", kind, (0,), (40,))
    return got


def after_verify(checkpoint: Checkpoint, truth: Tensors) -> Tensors:
    """`checkpoint verify` and a load by one object: what was verified is read again."""
    checkpoint.verify()
    return by_name(checkpoint, truth)


def reopened(checkpoint: Checkpoint, truth: Tensors) -> Tensors:
    """The descriptors are closed between reads, as with many files, and the header is known from before."""
    by_columns(checkpoint, truth)
    checkpoint.close()
    return by_name(checkpoint, truth)


@pytest.mark.parametrize("width", [1000, ONE_BLOCK, 0], ids=["blocks", "one block", "version 1"])
@pytest.mark.parametrize("load", [by_name, by_rows, by_columns, after_verify, reopened], ids=lambda f: f.__name__)
def test_a_bit_flipped_in_any_read_is_found(
    saved: tuple[Path, Tensors], load: Callable[[Checkpoint, Tensors], Tensors], width: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ranged, "GRAIN", GRAIN)  # several in a block
    at, truth = saved
    relist(at, width)
    draw = random.Random(7)
    checkpoint = open_checkpoint(at)
    with flipped(-1, draw) as calls:
        got = load(checkpoint, truth)
    checkpoint.close()
    assert all(torch.equal(got[key], t) for key, t in truth.items())
    if width != ONE_BLOCK:  # which the scratch buffer holds
        assert sum(n for _, n in calls) > sum(p.stat().st_size for p in at.glob("*.safetensors")), "nothing read twice"
    for call in sorted(draw.sample(range(len(calls)), min(len(calls), 60))):
        checkpoint = open_checkpoint(at)
        with flipped(call, draw), pytest.raises(DamagedCheckpoint):
            load(checkpoint, truth)
        checkpoint.close()


def test_a_file_that_changes_between_two_reads(
    saved: tuple[Path, Tensors], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read after the change is found; what did not change is still given out."""
    monkeypatch.setattr(ranged, "GRAIN", GRAIN)
    at, truth = saved
    relist(at, 0)
    checkpoint = open_checkpoint(at)
    assert torch.equal(checkpoint.read("w", "weight", (0, 0), (2, 16)), truth["w", "weight"][:2])
    checkpoint.close()
    path = next(at.glob("*.safetensors"))
    data = path.read_bytes()
    try:
        path.write_bytes(data[:-8] + bytes(8))
        assert torch.equal(checkpoint.read("w", "weight", (2, 0), (2, 16)), truth["w", "weight"][2:4])
        with pytest.raises(DamagedCheckpoint, match="were right when block 0 was verified and are not now.*exp_avg_sq"):
            checkpoint.read("b", "exp_avg_sq", (0,), (40,))
    finally:
        path.write_bytes(data)


@pytest.mark.parametrize("cuts", [[], [1], [63, 64, 65], [64, 128], [10, 20, 200]])
def test_hashes_of_grains_do_not_depend_on_how_the_stream_is_cut(cuts: list[int]) -> None:
    data = random.Random(1).randbytes(200)
    grains = GrainHashes(64)
    for a, z in zip([0, *cuts], [*cuts, len(data)]):
        grains.update(memoryview(data)[a:z])
    assert grains.digests() == b"".join(xxhash.xxh3_128_digest(data[i : i + 64]) for i in range(0, 200, 64))
