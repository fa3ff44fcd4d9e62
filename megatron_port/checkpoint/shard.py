"""One rank's data file: the safetensors format, written piece by piece while it is hashed.

The library's own writer wants all tensors in host memory at once; this one holds
one piece at a time, so saving costs a rank no more memory than its largest piece.
Format: 8 bytes little-endian header length, a JSON header padded with blanks to a
multiple of 8, the data without holes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import torch
import xxhash

from megatron_port.checkpoint.boxes import FlatRange, range_fault
from megatron_port.checkpoint.disk import disk_error
from megatron_port.checkpoint.format import DTYPES, FileEntry, PieceEntry
from megatron_port.engine.api import StatePiece
from megatron_port.errors import CheckpointError

_CHUNK = 1 << 26


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.float32`` → ``float32``. Raises CheckpointError for a dtype that the format does not hold."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise CheckpointError(f"a tensor of dtype {dtype} cannot be saved; the format holds {', '.join(DTYPES)}")
    return name


def piece_entry(piece: StatePiece, file: str, key: str) -> PieceEntry:
    """The manifest's line for a piece. Raises CheckpointError if the piece contradicts itself."""
    if piece.tensor.dim() != 1:
        raise ValueError(f"{piece.kind} of {piece.name}: a piece is 1-D, this one is {tuple(piece.tensor.shape)}")
    entry = PieceEntry(
        name=piece.name,
        kind=piece.kind,
        global_shape=tuple(piece.global_shape),
        dtype=dtype_name(piece.tensor.dtype),
        offset=tuple(piece.offset),
        shape=tuple(piece.shape),
        flat_start=piece.flat_start,
        numel=piece.tensor.numel(),
        file=file,
        key=key,
    )
    fault = range_fault(FlatRange(entry.offset, entry.shape, entry.flat_start, entry.numel), entry.global_shape)
    if fault:
        raise CheckpointError(f"{piece.kind} of {piece.name}: {fault}")
    return entry


def write_shard(path: Path, pieces: Sequence[StatePiece]) -> tuple[FileEntry, list[PieceEntry]]:
    """Write ``pieces`` to ``path`` (temporary name, fsync, rename).

    Tensors may be on any device; they are copied to the host one at a time.

    Raises:
        CheckpointError: the file system refused (path, bytes needed and free), or a piece contradicts itself.
    """
    # Wide elements first: every tensor stays aligned to its element size.
    ordered = sorted(pieces, key=lambda p: -p.tensor.element_size())
    entries: list[PieceEntry] = []
    header: dict[str, dict[str, object]] = {}
    position = 0
    for piece in ordered:
        entry = piece_entry(piece, path.name, _key(piece, header))
        code, width = DTYPES[entry.dtype]
        end = position + entry.numel * width
        header[entry.key] = {"dtype": code, "shape": [entry.numel], "data_offsets": [position, end]}
        entries.append(entry)
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    needed = len(head) + position
    digest = xxhash.xxh3_128()
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "wb") as stream:
            stream.write(head)
            digest.update(head)
            for piece in ordered:
                data = _bytes(piece.tensor)
                for start in range(0, len(data), _CHUNK):
                    chunk = data[start : start + _CHUNK]
                    stream.write(chunk)
                    digest.update(chunk)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(part, path)
    except OSError as error:
        raise disk_error(error, path, needed) from error
    return FileEntry(needed, digest.hexdigest()), entries


def _bytes(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous()
    # One element counts as contiguous whatever its stride, but cannot be viewed as bytes then.
    flat = flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8).numpy().data


def _key(piece: StatePiece, taken: dict[str, dict[str, object]]) -> str:
    key = base = f"{piece.kind}/{piece.name}@{piece.flat_start}"
    n = 1
    while key in taken:
        n += 1
        key = f"{base}#{n}"
    return key
