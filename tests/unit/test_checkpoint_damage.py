"""Whatever is wrong with the files is a CheckpointError, never wrong numbers and never another exception."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from megatron_port.checkpoint.format import SavedState, hash_file
from megatron_port.checkpoint.reader import find_latest, open_checkpoint
from megatron_port.checkpoint.writer import save_checkpoint
from megatron_port.engine.api import StatePiece
from megatron_port.errors import CheckpointError

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
    """A manifest changed by someone who also mends its hash."""
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
    "newer version": lambda b: b.update(version=2),
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
    forge(at, lambda b: b["files"][SHARD].update(hash=hash_file(path)))
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


def test_only_the_files_that_are_read_are_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at = save(tmp_path)
    hashed: list[str] = []
    monkeypatch.setattr(
        "megatron_port.checkpoint.reader.hash_file", lambda p: hashed.append(p.name) or hash_file(p)
    )
    checkpoint = open_checkpoint(at)
    assert hashed == []
    checkpoint.read("b", "weight", (0,), (4,))
    checkpoint.read("w", "weight", (0, 0), (1, 1))
    assert hashed == [SHARD]
    checkpoint.verify()
    assert hashed == [SHARD, SHARD]
