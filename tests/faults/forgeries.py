"""Manifests that somebody else wrote: each hash is right, the content is not. ``CASES`` is name → change.

A case changes the newer checkpoint of a ``corruption.CheckpointCase``. None may cost more than a line: no traceback,
no waiting, no gigabytes, no moments lost without a word; the run resumes from the step before.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

from megatron_port.core.checkpoint.shard import Digest

SHARD = "rank-00000.safetensors"
Body = dict[str, Any]
Change = Callable[[Body, Path], "str | None"]
"""Changes the manifest's body in place (and files beside it), or returns the text to write instead."""
KEPT = "what the change put in the manifest's place"


def seal(body: Body) -> str:
    """The text of a manifest with the hash of its content. NaN and infinity are written as Python's JSON does."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return f'{{"hash":"{xxhash.xxh3_128_hexdigest(text.encode())}",\n"manifest":{text}}}\n'


def forge(checkpoint: Path, change: Change) -> None:
    """Change a checkpoint as ``change`` says and make its hashes right again."""
    path = checkpoint / "manifest.json"
    body = json.loads(path.read_text())["manifest"]
    text = change(body, checkpoint)
    if text != KEPT:
        path.write_text(seal(body) if text is None else text, errors="surrogateescape")


def rehash(body: Body, checkpoint: Path, name: str) -> None:
    """List a data file as it is now."""
    digest = Digest(1 << 20)
    digest.update((checkpoint / name).read_bytes())
    body["files"][name] = {**vars(digest.entry()), "blocks": list(digest.entry().blocks)}


def put(path: str, value: Any) -> Change:
    """Set what a dotted path names."""

    def change(body: Body, _: Path) -> None:
        *tables, last = path.split(".")
        for name in tables:
            body = body.setdefault(name, {})
        body[last] = value

    return change


def piece(**fields: Any) -> Change:
    """Set fields of the first piece."""
    return lambda body, _: body["pieces"][0].update(fields)


def drop(keep: Callable[[Body], bool]) -> Change:
    """Leave out pieces."""
    return lambda body, _: body.update(pieces=[p for p in body["pieces"] if keep(p)])


def without(name: str) -> Change:
    """Leave out a field."""

    def change(body: Body, _: Path) -> None:
        del body[name]

    return change


def raw(path: str, token: str) -> Change:
    """Put text in a value's place that Python's own JSON would not write, and hash it."""

    def change(body: Body, folder: Path) -> str:
        put(path, "@@")(body, folder)
        text = json.dumps(body, sort_keys=True, separators=(",", ":")).replace('"@@"', token)
        return f'{{"hash":"{xxhash.xxh3_128_hexdigest(text.encode())}",\n"manifest":{text}}}\n'

    return change


def instead(make: Callable[[Path], None], name: str = SHARD) -> Change:
    """Something else under a file's name; a data file is listed with size 0, as ``stat`` gives for it."""

    def change(body: Body, checkpoint: Path) -> str | None:
        (checkpoint / name).rename(checkpoint / "aside")
        make(checkpoint / name)
        if name not in body["files"]:
            return KEPT
        size = os.lstat(checkpoint / name).st_size
        body["files"][name].update(size=size, blocks=["0" * 32] * -(-size // body["files"][name]["block_bytes"]))
        return None

    return change


def _socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's path is at most 107 characters
    try:
        with socket.socket(socket.AF_UNIX) as s:
            s.bind(path.name)
    finally:
        os.chdir(here)


def _sparse(size: int) -> Change:
    """A hole of ``size`` bytes behind the tensors of a file, listed with as many hashes as it takes."""

    def change(body: Body, checkpoint: Path) -> None:
        width = 1 << 26
        os.truncate(checkpoint / SHARD, size)
        hole = xxhash.xxh3_128_hexdigest(bytes(width))
        body["files"][SHARD].update(size=size, block_bytes=width, blocks=[hole] * -(-size // width))

    return change


def _sparse_version_1(body: Body, checkpoint: Path) -> None:
    """The same without block hashes: only reading all of it would tell."""
    os.truncate(checkpoint / SHARD, 1 << 40)
    body["version"] = 1
    for entry in body["files"].values():
        del entry["blocks"], entry["block_bytes"]
    body["files"][SHARD]["size"] = 1 << 40


def _huge_tensor(body: Body, checkpoint: Path) -> None:
    """The hole is a tensor of its own, which no model has."""
    _sparse(1 << 40)(body, checkpoint)
    size = sum(p["numel"] * 4 for p in body["pieces"] if p["file"] == SHARD)
    numel = ((1 << 40) - 4096 - size) // 4
    for kind in ("weight", "exp_avg", "exp_avg_sq"):
        n = numel if kind == "weight" else 0
        body["pieces"].append({
            "name": "zz", "kind": kind, "global_shape": [n], "dtype": "float32", "offset": [0], "shape": [n],
            "flat_start": 0, "numel": n, "file": SHARD, "key": f"{kind}/zz", "hash": "",
        })


def _move_file(name: str) -> Change:
    def change(body: Body, _: Path) -> None:
        body["files"][name] = body["files"].pop(SHARD)
        for p in body["pieces"]:
            p["file"] = name if p["file"] == SHARD else p["file"]

    return change


def _header(text: bytes) -> Change:
    """A data file whose header is ``text``, listed with its hashes."""

    def change(body: Body, checkpoint: Path) -> None:
        path = checkpoint / SHARD
        data = path.read_bytes()
        rest = data[8 + int.from_bytes(data[:8], "little") :]
        path.write_bytes(len(text).to_bytes(8, "little") + text + rest)
        rehash(body, checkpoint, SHARD)

    return change


def _columns(body: Body, folder: Path) -> None:
    """One matrix in as many overlapping columns as a quadratic check takes minutes for."""
    first = body["pieces"][0]
    n = 6_000
    one = {**first, "global_shape": [1, n], "shape": [1, 1], "flat_start": 0, "numel": 1}
    body["pieces"] = [{**one, "offset": [0, min(i, n - 2)], "key": f"k{i}"} for i in range(n)]
    size = sum(4 for p in body["pieces"]) + 4096
    body["files"][first["file"]].update(size=size)
    os.truncate(folder / first["file"], size)
    for name in set(body["files"]) - {first["file"]}:
        del body["files"][name]


def _swap_kinds(body: Body, _: Path) -> None:
    """A tensor's second moments under another parameter's name."""
    pieces = [p for p in body["pieces"] if p["kind"] == "exp_avg_sq"]
    pieces[0]["name"] = pieces[1]["name"]


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return value


CASES: dict[str, Change] = {
    **{f"no {name}": without(name) for name in (
        "step", "samples", "tokens", "saved_at", "layout", "config", "scalars", "extra", "rng", "data", "schedule",
        "config_hash", "tokenizer", "versions", "files", "pieces", "schema", "version",
    )},
    **{f"{name} is a list": put(name, []) for name in (
        "step", "saved_at", "layout", "config", "scalars", "extra", "rng", "data", "versions", "files", "tokenizer",
        "config.model", "config.batch", "config.optimizer", "config.data", "extra.numerics",
    )},
    "step of another": put("step", 7),
    "step is true": put("step", True),
    "samples negative": put("samples", -1),
    "samples above 2^63": put("samples", 1 << 64),
    "saved_at is NaN": raw("saved_at", "NaN"),
    "saved_at is infinite": raw("saved_at", "1e999"),
    "saved_at after the calendar's end": put("saved_at", 1e18),
    "saved_at of 400 digits": raw("saved_at", "1" * 400),
    "saved_at of 5000 digits": raw("saved_at", "1" * 5000),
    "a scalar is NaN": raw("scalars.loss_scale", "NaN"),
    "a scalar is text": put("scalars.optimizer_steps", "20"),
    "a scalar is infinite": raw("scalars.optimizer_steps", "-1e999"),
    "optimizer steps a fraction": put("scalars.optimizer_steps", 20.5),
    "optimizer steps of 400 digits": raw("scalars.optimizer_steps", "9" * 400),
    "no optimizer steps": put("scalars", {}),
    "skipped is text": put("extra.skipped_total", "many"),
    "skipped is null": put("extra.skipped_total", None),
    "skipped is infinite": raw("extra.skipped_total", "Infinity"),
    "losses are text": put("extra.numerics", {"losses": "abc"}),
    "losses are null": put("extra.numerics", {"losses": None}),
    "anomalies are objects": put("extra.numerics", {"anomaly_steps": [{}]}),
    "left out is flat": put("extra.numerics", {"left_out": [1, 2]}),
    "tokenizer is a list": put("extra.tokenizer", ["gpt2"]),
    "corpora are numbers": put("data.corpora", [1]),
    "run id is a list": put("lineage.run", []),
    "commit is text": put("lineage.commit", "7"),
    "parent is a fraction": put("lineage.parent", 0.5),
    "lineage is a list": put("lineage", [1]),
    "config nested 500 deep": put("config.x", _nested(500)),
    "extra nested 100,000 deep": raw("extra.x", "[" * 100_000 + "]" * 100_000),
    "config of another model": put("config.model.num_layers", 3),
    "config of no model": put("config.model.hidden_size", 0),
    "config of a model without end": put("config.model.num_layers", 1 << 40),
    "layers are text": put("config.model.num_layers", "2"),
    "moments dropped": drop(lambda p: p["kind"] == "weight"),
    "second moments dropped": drop(lambda p: p["kind"] != "exp_avg_sq"),
    "moments of one dropped": drop(lambda p: p["kind"] == "weight" or not p["name"].endswith("weight")),
    "weights dropped": drop(lambda p: p["kind"] != "weight"),
    "a parameter dropped": drop(lambda p: not p["name"].startswith("layers.1.")),
    "all dropped": drop(lambda p: False),
    "kinds swapped": _swap_kinds,
    "a piece twice": lambda b, _: b["pieces"].append(b["pieces"][0]),
    "two names for one tensor": lambda b, _: b["pieces"].append({**b["pieces"][0], "name": "zz"}),
    "a piece is null": lambda b, _: b["pieces"].append(None),
    "a piece overlaps": lambda b, _: b["pieces"].append({**b["pieces"][0], "key": "other"}),
    "6,000 columns, one twice": _columns,
    "negative offset": piece(offset=[-1, 0]),
    "shape above 2^63": piece(global_shape=[1 << 62, 1 << 62]),
    "numel above the file": piece(numel=1 << 50),
    "eight dimensions more": piece(global_shape=[1] * 9, offset=[0] * 9, shape=[1] * 9),
    "dtype unknown": piece(dtype="object"),
    "dtype another": piece(dtype="float16"),
    "name of 10,000 characters": piece(name="x" * 10_000),
    "name a number": piece(name=3),
    "key another": piece(key="weight/none"),
    "key a list": piece(key=[]),
    "hash of a piece a number": piece(hash=5),
    "file leads up": _move_file("../../rank-00000.safetensors"),
    "file absolute": _move_file("/etc/passwd"),
    "file in other digits": _move_file("rank-٠٠٠٠٠.safetensors"),
    "file not listed": piece(file="rank-00009.safetensors"),
    "file is an object": piece(file={}),
    "file listed, not there": put("files.rank-00009", {}),
    "file size negative": lambda b, _: b["files"][SHARD].update(size=-1),
    "block width 0": lambda b, _: b["files"][SHARD].update(block_bytes=0, blocks=[]),
    "block width a terabyte": lambda b, _: b["files"][SHARD].update(block_bytes=1 << 40),
    "blocks are null": lambda b, _: b["files"][SHARD].update(blocks=None),
    "a pipe": instead(os.mkfifo),
    "a socket": instead(_socket),
    "a folder": instead(os.mkdir),
    "a symbolic link": instead(lambda p: p.symlink_to("aside")),
    "a link to a device": instead(lambda p: p.symlink_to("/dev/zero")),
    "manifest a pipe": instead(os.mkfifo, "manifest.json"),
    "manifest a folder": instead(os.mkdir, "manifest.json"),
    "manifest a link to a device": instead(lambda p: p.symlink_to("/dev/zero"), "manifest.json"),
    "manifest a sparse gigabyte": instead(lambda p: (p.touch(), os.truncate(p, 1 << 30))[1], "manifest.json"),  # type: ignore[func-returns-value]
    "sparse terabyte": _sparse(1 << 40),
    "sparse terabyte without blocks": _sparse_version_1,
    "sparse terabyte as a tensor": _huge_tensor,
    "header not JSON": _header(b"x" * 64),
    "header nested": _header(b"[" * 100_000),
    "header empty": _header(b"{}"),
    "header of numbers": _header(b'{"a":{"dtype":"F32","shape":[1e400],"data_offsets":[NaN,1]}}'),
    "manifest a number": lambda b, _: "3",
    "manifest empty": lambda b, _: "",
    "manifest not UTF-8": lambda b, _: '{"hash":"\udcff"}',
}
