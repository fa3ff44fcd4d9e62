"""Whatever is wrong with the files is a CheckpointError, never wrong numbers and never another exception."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from megatron_port.core.checkpoint import reader
from megatron_port.core.checkpoint.format import SavedState
from megatron_port.core.checkpoint.reader import find_latest, open_checkpoint
from megatron_port.core.checkpoint.shard import Digest
from megatron_port.core.checkpoint.writer import save_checkpoint
from megatron_port.core.dist.record import StatePiece
from megatron_port.core.errors import CheckpointError, DamagedCheckpoint
from megatron_port.ext.storage.ranged import parse_header

SHARD = "rank-00000.safetensors"


def save(folder: Path, step: int = 1, value: float = 1.0) -> Path:
    tensors = {"w": torch.arange(12.0).reshape(3, 4) * value, "b": torch.ones(4)}
    state = SavedState(
        step=step, samples=step, tokens=step, layout={}, config={}, scalars={"lr": 0.5}, extra={"a": [1, {"b": None}]}
    )
    return save_checkpoint(folder, state, [
        StatePiece(n, "weight", tuple(t.shape), (0,) * t.dim(), tuple(t.shape), 0, t.reshape(-1))
        for n, t in tensors.items()
    ])


def read_all(path: Path) -> list[torch.Tensor]:
    checkpoint = open_checkpoint(path)
    return [
        checkpoint.read(name, "weight", (0,) * len(checkpoint.shape(name)), checkpoint.shape(name))
        for name in checkpoint.names()
    ]


@pytest.mark.parametrize("name", [SHARD, "manifest.json"])
def test_every_flipped_bit_is_found(tmp_path: Path, name: str) -> None:
    at = save(tmp_path)
    good = (at / name).read_bytes()
    draw = random.Random(1)
    whole = read_all(at)
    for _ in range(300):
        bit = draw.randrange(8 * len(good))
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        (at / name).write_bytes(bad)
        with pytest.raises(CheckpointError):
            read_all(at)
            open_checkpoint(at).verify()
    (at / name).write_bytes(good)
    assert all(torch.equal(a, b) for a, b in zip(whole, read_all(at)))


@pytest.mark.parametrize("name", [SHARD, "manifest.json"])
@pytest.mark.parametrize("how", ["truncate", "empty", "grow", "remove"])
def test_size_faults_and_fall_back(tmp_path: Path, name: str, how: str) -> None:
    old, new = save(tmp_path, 1), save(tmp_path, 2)
    path = new / name
    data = path.read_bytes()
    if how == "remove":
        path.unlink()
    else:
        path.write_bytes({"truncate": data[: len(data) // 2], "empty": b"", "grow": data + b"x"}[how])
    with pytest.raises(CheckpointError):
        open_checkpoint(new)
    notes: list[str] = []
    assert find_latest(tmp_path, notes.append) == old
    assert len(notes) == 1 and "step-00000002" in notes[0]


def forge(at: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """A manifest changed by someone who also fixes its hash."""
    body = json.loads((at / "manifest.json").read_text())["manifest"]
    change(body)
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    outer = {"hash": xxhash.xxh3_128_hexdigest(text.encode()), "manifest": body}
    (at / "manifest.json").write_text(json.dumps(outer))


def test_forge_itself_is_accepted(tmp_path: Path) -> None:
    at = save(tmp_path)
    forge(at, lambda body: None)
    assert len(read_all(at)) == 2


def _move_file(body: dict[str, Any], name: str) -> None:
    body["files"][name] = body["files"].pop(SHARD)
    for piece in body["pieces"]:
        piece["file"] = name


def _piece(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda body: body["pieces"][0].update(fields)


FORGERIES: dict[str, Callable[[dict[str, Any]], None]] = {
    "path up": lambda b: _move_file(b, "../rank-00000.safetensors"),
    "absolute path": lambda b: _move_file(b, "/etc/passwd"),
    "newline in file": lambda b: _move_file(b, SHARD + "\n"),
    "file not listed": _piece(file="rank-00009.safetensors"),
    "file not a name": _piece(file=3),
    "negative offset": _piece(offset=[-1, 0]),
    "negative start": _piece(flat_start=-1),
    "huge start": _piece(flat_start=1 << 70),
    "huge shape": _piece(global_shape=[1 << 40, 1 << 40]),
    "big shape": _piece(global_shape=[1 << 40, 4], shape=[1 << 40, 4]),
    "huge numel": _piece(numel=1 << 50),
    "boolean numel": _piece(numel=True),
    "float numel": _piece(numel=12.0),
    "string shape": _piece(shape="34"),
    "many dims": _piece(shape=[1] * 100),
    "wrong dims": _piece(shape=[12], offset=[0]),
    "unknown dtype": _piece(dtype="object"),
    "other dtype": _piece(dtype="float16"),
    "other key": _piece(key="weight/none@0"),
    "key of another": _piece(key="weight/b@0"),
    "empty name": _piece(name=""),
    "piece twice": lambda b: b["pieces"].append(b["pieces"][0]),
    "piece is a list": lambda b: b["pieces"].append([]),
    "pieces is a dict": lambda b: b.update(pieces={}),
    "files is a list": lambda b: b.update(files=[]),
    "file without hash": lambda b: b["files"][SHARD].pop("hash"),
    "file size negative": lambda b: b["files"][SHARD].update(size=-5),
    "other schema": lambda b: b.update(schema="x"),
    "newer version": lambda b: b.update(version=4),
    "version is true": lambda b: b.update(version=True),
    "block missing": lambda b: b["files"][SHARD]["blocks"].clear(),
    "block too many": lambda b: b["files"][SHARD]["blocks"].append("0" * 32),
    "block of another": lambda b: b["files"][SHARD].update(blocks=["0" * 32]),
    "huge blocks": lambda b: b["files"][SHARD].update(block_bytes=1 << 40),
    "no blocks": lambda b: b["files"][SHARD].update(block_bytes=0, blocks=[]),
    "blocks is a count": lambda b: b["files"][SHARD].update(blocks=1),
    "config hash is a list": lambda b: b.update(config_hash=[]),
    "rng is missing": lambda b: b.pop("rng"),
    "step is a string": lambda b: b.update(step="1"),
    "scalar is a string": lambda b: b["scalars"].update(lr="x"),
    "no config": lambda b: b.pop("config"),
    "saved_at missing": lambda b: b.pop("saved_at"),
}


@pytest.mark.parametrize("change", FORGERIES.values(), ids=FORGERIES.keys())
def test_forged_manifests(tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    at = save(tmp_path)
    forge(at, change)
    with pytest.raises(CheckpointError):
        read_all(at)


@pytest.mark.parametrize(
    "text", ["", "[]", "null", "{}", '{"manifest": 1}', "[" * 100_000, '{"manifest": {"a": NaN}}', "\xff\xfe"]
)
def test_not_a_manifest(tmp_path: Path, text: str) -> None:
    at = save(tmp_path)
    (at / "manifest.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError):
        open_checkpoint(at)


def test_a_forged_shard_with_a_mended_hash(tmp_path: Path) -> None:
    at = save(tmp_path)
    path = at / SHARD
    data = bytearray(path.read_bytes())
    data[0] = 0xFF
    data[7] = 0x7F
    path.write_bytes(data)
    digest = xxhash.xxh3_128_hexdigest(data)
    forge(at, lambda b: b["files"][SHARD].update(hash=digest, blocks=[digest]))
    with pytest.raises(CheckpointError):
        read_all(at)


def test_wrong_requests_name_both_shapes(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save(tmp_path))
    with pytest.raises(CheckpointError, match=r"\(3, 4\).*\(3, 5\)"):
        checkpoint.read("w", "weight", (0, 0), (3, 5))
    with pytest.raises(CheckpointError, match=r"\(3, 4\).*\(12,\)"):
        checkpoint.read("w", "weight", (0,), (12,))
    with pytest.raises(CheckpointError, match=r"at \(-1, 0\)"):
        checkpoint.read("w", "weight", (-1, 0), (1, 4))
    with pytest.raises(CheckpointError, match="nothing of that name"):
        checkpoint.read("v", "weight", (0,), (1,))
    with pytest.raises(CheckpointError, match="it has weight of that name"):
        checkpoint.read("w", "exp_avg", (0, 0), (3, 4))
    with pytest.raises(CheckpointError, match=r"no manifest\.json"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="not a directory"):
        open_checkpoint(tmp_path / "none")


def cut_blocks(at: Path, width: int) -> None:
    """List the files' blocks anew, ``width`` bytes each: a small file has many then."""

    def change(body: dict[str, Any]) -> None:
        for name in body["files"]:
            digest = Digest(width)
            digest.update((at / name).read_bytes())
            body["files"][name] = {**vars(digest.entry()), "blocks": list(digest.entry().blocks)}

    forge(at, change)


class Reads:
    """What a checkpoint reads from its files, by pread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ranges: list[tuple[int, int]] = []
        real = os.preadv

        def preadv(handle: int, buffers: list[memoryview], offset: int) -> int:
            self.ranges.append((offset, offset + sum(len(b) for b in buffers)))
            return real(handle, buffers, offset)

        monkeypatch.setattr(os, "preadv", preadv)

    def take(self) -> list[tuple[int, int]]:
        out, self.ranges = self.ranges, []
        return out


def big(folder: Path, rows: int = 64, columns: int = 16, width: int = 256) -> tuple[Path, torch.Tensor, int]:
    """A checkpoint of one matrix in blocks of ``width`` bytes; also where its data begin."""
    w = torch.arange(float(rows * columns)).reshape(rows, columns)
    state = SavedState(step=1, samples=1, tokens=1, layout={}, config={}, scalars={}, extra={})
    at = save_checkpoint(folder, state, [
        StatePiece("w", kind, (rows, columns), (0, 0), (rows, columns), 0, w.reshape(-1) * scale)
        for kind, scale in (("weight", 1.0), ("exp_avg", 2.0))
    ])
    cut_blocks(at, width)
    return at, w, (at / SHARD).stat().st_size - 2 * w.numel() * 4


def test_only_blocks_that_are_read_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at, w, start = big(tmp_path)
    checkpoint, reads = open_checkpoint(at), Reads(monkeypatch)
    assert reads.take() == []
    checkpoint.read("w", "weight", (0, 0), (1, 1))
    header_blocks = -(-start // 256)
    assert max(z for _, z in reads.take()) <= (header_blocks + 1) * 256
    got = checkpoint.read("w", "weight", (32, 0), (8, 16))  # 512 bytes
    assert torch.equal(got, w[32:40])
    first = start + 32 * 64
    touched = reads.take()
    assert min(a for a, _ in touched) == first // 256 * 256 and max(z for _, z in touched) <= first + 512 + 255
    assert sum(z - a for a, z in touched) <= 512 + 2 * 255
    checkpoint.read("w", "weight", (32, 0), (4, 16))
    assert sum(z - a for a, z in reads.take()) <= 2 * 256  # again: what it takes to verify them
    checkpoint.verify()
    assert sum(z - a for a, z in reads.take()) >= (at / SHARD).stat().st_size


def test_damage_elsewhere_does_not_matter_and_damage_here_is_named(tmp_path: Path) -> None:
    at, w, start = big(tmp_path)
    data = bytearray((at / SHARD).read_bytes())
    data[start + 40 * 64] ^= 4  # row 40 of the weight
    data[-1] ^= 1  # the end of exp_avg
    (at / SHARD).write_bytes(data)
    checkpoint = open_checkpoint(at)
    assert torch.equal(checkpoint.read("w", "weight", (0, 0), (32, 16)), w[:32])
    block = (start + 40 * 64) // 256
    with pytest.raises(DamagedCheckpoint, match=rf"{SHARD}: block {block} .*damaged is weight of w; .*of w$"):
        checkpoint.read("w", "weight", (36, 0), (8, 16))
    with pytest.raises(DamagedCheckpoint, match="exp_avg of w"):
        checkpoint.read("w", "exp_avg", (63, 15), (1, 1))
    faults = list(checkpoint.faults())
    assert len(faults) == 2 and "weight of w" in faults[0] and "exp_avg of w" in faults[1]


def test_a_place_in_memory_hides_no_damage(tmp_path: Path) -> None:
    """Read straight into its place, whole blocks and parts of them: the same error, and the rest is still readable."""
    at, w, start = big(tmp_path)
    data = bytearray((at / SHARD).read_bytes())
    data[start + 40 * 64] ^= 4
    (at / SHARD).write_bytes(data)
    checkpoint = open_checkpoint(at)
    for low, rows in ((0, 64), (36, 8), (40, 1)):
        with pytest.raises(DamagedCheckpoint, match="damaged is weight of w; found while reading weight of w"):
            checkpoint.read("w", "weight", (low, 0), (rows, 16), out=torch.zeros(rows, 16))
    place = torch.zeros(32, 16)
    assert checkpoint.read("w", "weight", (0, 0), (32, 16), out=place) is place and torch.equal(place, w[:32])


def test_what_lies_beside_a_read_is_kept_for_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads in the order of the file fetch each block once; going back fetches what it takes to verify it again."""
    at, w, _start = big(tmp_path)
    checkpoint, reads = open_checkpoint(at), Reads(monkeypatch)
    size = (at / SHARD).stat().st_size
    for kind, scale in (("weight", 1.0), ("exp_avg", 2.0)):
        for row in range(0, 64, 3):
            rows = min(3, 64 - row)  # 192 bytes of blocks of 256
            assert torch.equal(checkpoint.read("w", kind, (row, 0), (rows, 16)), w[row : row + rows] * scale)
    touched = reads.take()
    assert sum(z - a for a, z in touched) == size and len({a for a, _ in touched}) == len(touched)
    assert torch.equal(checkpoint.read("w", "weight", (3, 0), (3, 16)), w[3:6])
    assert 192 <= sum(z - a for a, z in reads.take()) <= 2 * 256


@pytest.mark.parametrize("span", [1 << 24, 100, 64])
def test_boxes_of_any_shape_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, span: int) -> None:
    """Columns of a matrix and a cube cut in the middle, fetched in few or in many bites, through blocks of 37 bytes."""
    monkeypatch.setattr(reader, "_SPAN", span)
    cube = torch.arange(6.0 * 5 * 7).reshape(6, 5, 7)
    state = SavedState(step=1, samples=1, tokens=1, layout={}, config={}, scalars={}, extra={})
    at = save_checkpoint(tmp_path, state, [
        StatePiece("c", "weight", (6, 5, 7), (0, 0, 0), (6, 5, 4), 0, cube[:, :, :4].reshape(-1)[:50]),
        StatePiece("c", "weight", (6, 5, 7), (0, 0, 0), (6, 5, 4), 50, cube[:, :, :4].reshape(-1)[50:]),
        StatePiece("c", "weight", (6, 5, 7), (0, 0, 4), (6, 5, 3), 0, cube[:, :, 4:].reshape(-1)),
    ])
    cut_blocks(at, 37)
    draw = random.Random(span)
    for _ in range(40):
        low = [draw.randrange(n) for n in cube.shape]
        size = [draw.randint(1, n - a) for n, a in zip(cube.shape, low)]
        want = cube[tuple(slice(a, a + n) for a, n in zip(low, size))]
        checkpoint = open_checkpoint(at)
        assert torch.equal(checkpoint.read("c", "weight", tuple(low), tuple(size)), want)
        assert torch.equal(checkpoint.read("c", "weight", tuple(low), tuple(size)), want)  # now verified already
        checkpoint.close()


def test_version_1_is_still_read(tmp_path: Path) -> None:
    at = save(tmp_path)
    before = read_all(at)

    def older(body: dict[str, Any]) -> None:
        body["version"] = 1
        for name in ("rng", "data", "schedule", "config_hash", "tokenizer"):
            del body[name]
        for entry in body["files"].values():
            del entry["blocks"], entry["block_bytes"]

    forge(at, older)
    assert all(torch.equal(a, b) for a, b in zip(before, read_all(at)))
    open_checkpoint(at).verify()
    data = bytearray((at / SHARD).read_bytes())
    data[-1] ^= 1
    (at / SHARD).write_bytes(data)
    with pytest.raises(DamagedCheckpoint, match="does not match its hash"):
        read_all(at)
    with pytest.raises(DamagedCheckpoint, match="does not match its hash"):
        open_checkpoint(at).verify()


def test_a_directory_under_another_step_s_name(tmp_path: Path) -> None:
    at = save(tmp_path, 5)
    at.rename(tmp_path / "step-00000006")
    with pytest.raises(DamagedCheckpoint, match="its manifest is of step 5"):
        open_checkpoint(tmp_path / "step-00000006")
    assert find_latest(tmp_path) is None
    (tmp_path / "step-00000006").rename(tmp_path / "best")  # any other name says nothing about the step
    assert len(read_all(tmp_path / "best")) == 2


@pytest.mark.parametrize(
    "header",
    [
        b"", b"[]", b"{", b"\xff", b"[" * 100_000, b'{"a": 1}', b'{"a": {"dtype": "F32"}}',
        b'{"a": {"dtype": "F33", "shape": [1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}',
        b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}',
        b'{"a": {"dtype": "F32", "shape": [1e9], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [true, 4]}}',
        b'{"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}',
    ],
)
def test_headers_that_are_none(header: bytes) -> None:
    good = b'{"__metadata__": {"x": "y"}, "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'
    assert parse_header(good, 8, "f") == {"a": ("F32", 0, 8)}
    with pytest.raises(DamagedCheckpoint, match="header is damaged"):
        parse_header(header, 8, "f")
