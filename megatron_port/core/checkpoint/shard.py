"""One rank's data file: the safetensors format, planned first, then written from tensors or from a snapshot of them.

The library's own writer wants all tensors in host memory at once; this one holds
one piece at a time, so saving costs a rank no more memory than its largest piece.
Format: 8 bytes little-endian header length, a JSON header padded with blanks to a
multiple of 8, the data without holes. A file is hashed while it is written.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import xxhash

from megatron_port.core.checkpoint.format import DTYPES, MAX_BLOCK, FileEntry, PieceEntry
from megatron_port.core.checkpoint.slices import range_fault
from megatron_port.core.dist.record import StatePiece
from megatron_port.core.errors import CheckpointError
from megatron_port.core.io.files import atomic_file, free_bytes

# Files of a checkpoint: whole ones only are written; disk errors say what to do.

_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_RIGHTS = (errno.EACCES, errno.EPERM, errno.EROFS)


def disk_error(error: OSError, path: Path, needed: int | None = None) -> CheckpointError:
    """Return an error with the path, what was needed and what is free."""
    free = free_bytes(path)
    numbers = [f"needed {needed} bytes"] if needed is not None else []
    if free is not None:
        numbers.append(f"free {free} bytes")
    tail = f" ({', '.join(numbers)})" if numbers else ""
    if error.errno in _SPACE:
        advice = "free some space (or quota), lower checkpoint.keep, or choose another output_dir"
    elif error.errno in _RIGHTS:
        advice = "give this user write permission there, or choose another output_dir"
    else:
        advice = "look at the file system (df, mount, dmesg), or choose another output_dir"
    return CheckpointError(
        f"{path}: {error.strerror or error}{tail}. The previous checkpoints are untouched; {advice}"
    )


def write_chunks(path: Path, size: int, chunks: Iterable[memoryview | bytes]) -> None:
    """Write a whole file of ``size`` bytes, or none (:func:`megatron_port.core.io.files.atomic_file`).

    Nothing is begun where less than ``size`` is free: a full disk is not made fuller. The directory must exist: one
    that is gone was another attempt's to remove. Memory: one chunk.

    Raises:
        CheckpointError: the file system refused.
    """
    free = free_bytes(path.parent)
    if free is not None and free < size:
        raise disk_error(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), path, size)
    with atomic_file(path, parents=False, refused=lambda error: disk_error(error, path, size)) as stream:
        for chunk in chunks:
            stream.write(chunk)


def write_text(path: Path, text: str) -> int:
    """Write a whole file, or none. Returns its bytes.

    Raises:
        CheckpointError: the file system refused.
    """
    data = text.encode()
    write_chunks(path, len(data), [data])
    return len(data)


# xxh3-128 of a file, whole and by block, in one pass over its bytes.

MIN_BLOCK, _BLOCKS = 1 << 20, 128
CHUNK = 1 << 20
"""Bytes read, written or hashed at a time: they are still in the core's cache when the next hand touches them."""


def block_bytes(size: int) -> int:
    """Return the block size for a file of ``size`` bytes: at most 128 of 1 to 64 MiB, so manifests stay small."""
    width = MIN_BLOCK
    while width < MAX_BLOCK and size > _BLOCKS * width:
        width *= 2
    return width


class SpanHashes:
    """Hashes of consecutive ranges of a stream. ``spans``: their ends, rising.

    Ranges of ``limit`` bytes or more get no hash (an empty text): blocks tell those apart.
    """

    def __init__(self, spans: Sequence[tuple[int, int]], limit: int) -> None:
        self._spans, self._limit = spans, limit
        self._digest = xxhash.xxh3_128()
        self._at = 0
        self.hashes: list[str] = []

    def update(self, data: memoryview) -> None:
        """Hash the next bytes of the stream."""
        while len(data) and len(self.hashes) < len(self._spans):
            start, stop = self._spans[len(self.hashes)]
            part, data = data[: stop - self._at], data[stop - self._at :]
            if stop - start < self._limit:
                self._digest.update(part)
            self._at += len(part)
            if self._at == stop:
                self.hashes.append(self._digest.hexdigest() if stop - start < self._limit else "")
                self._digest.reset()


class Digest:
    """Hashes of a stream. ``block_bytes``: size of a block."""

    def __init__(self, block_bytes: int) -> None:
        self._width = block_bytes
        self._whole = xxhash.xxh3_128()
        self._block = xxhash.xxh3_128()
        self._blocks: list[str] = []
        self._size = 0

    def update(self, data: memoryview | bytes) -> None:
        """Hash the next bytes."""
        view = memoryview(data).cast("B")
        at = 0
        while at < len(view):
            room = self._width - self._size % self._width
            part = view[at : at + min(CHUNK, room)]
            self._whole.update(part)
            self._block.update(part)
            at += len(part)
            self._size += len(part)
            if self._size % self._width == 0:
                self._blocks.append(self._block.hexdigest())
                self._block.reset()

    def entry(self) -> FileEntry:
        """Return size and hashes of what has passed."""
        last = [self._block.hexdigest()] if self._size % self._width else []
        return FileEntry(self._size, self._whole.hexdigest(), self._width, (*self._blocks, *last))


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``float32`` for ``torch.float32``. Raises CheckpointError for a dtype that the format does not hold."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise CheckpointError(f"a tensor of dtype {dtype} cannot be saved; the format holds {', '.join(DTYPES)}")
    return name


def piece_entry(piece: StatePiece, file: str, key: str) -> PieceEntry:
    """The manifest's line for a piece. Raises CheckpointError if the piece contradicts itself."""
    if piece.tensor.dim() != 1:
        raise ValueError(f"{piece.kind} of {piece.name}: a piece is 1-D, this one is {tuple(piece.tensor.shape)}")
    entry = PieceEntry(
        name=piece.name, kind=piece.kind, global_shape=tuple(piece.global_shape), dtype=dtype_name(piece.tensor.dtype),
        offset=tuple(piece.offset), shape=tuple(piece.shape), flat_start=piece.flat_start, numel=piece.tensor.numel(),
        file=file, key=key,
    )
    fault = range_fault(entry, entry.global_shape)
    if fault:
        raise CheckpointError(f"{piece.kind} of {piece.name}: {fault}")
    return entry


@dataclass(frozen=True)
class ShardPlan:
    """Where everything of a file goes. Holds no data, only references to the pieces' tensors."""

    head: bytes
    """The safetensors length and header."""
    pieces: tuple[StatePiece, ...]
    """In the order of the file; widest elements first, so that every tensor is aligned to its element size."""
    entries: tuple[PieceEntry, ...]
    spans: tuple[tuple[int, int], ...]
    """First and last + 1 byte of each piece, counted from the end of the header."""

    @property
    def data_bytes(self) -> int:
        """Bytes after the header."""
        return self.spans[-1][1] if self.spans else 0

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return len(self.head) + self.data_bytes


def plan_shard(file: str, pieces: Iterable[StatePiece], *, last: ShardPlan | None = None) -> ShardPlan:
    """Lay out a file called ``file``. Raises CheckpointError if a piece contradicts itself.

    ``last``: the plan of an earlier file of that name; where all pieces but their values are the same it is used again.
    """
    ordered = tuple(sorted(pieces, key=lambda p: -p.tensor.element_size()))
    if last is not None and len(last.entries) == len(ordered) and all(map(_fits, last.entries, ordered)):
        return replace(last, pieces=ordered)
    entries: list[PieceEntry] = []
    spans: list[tuple[int, int]] = []
    header: dict[str, dict[str, object]] = {}
    position = 0
    for piece in ordered:
        entry = piece_entry(piece, file, _key(piece, header))
        code, width = DTYPES[entry.dtype]
        end = position + entry.numel * width
        header[entry.key] = {"dtype": code, "shape": [entry.numel], "data_offsets": [position, end]}
        entries.append(entry)
        spans.append((position, end))
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return ShardPlan(len(text).to_bytes(8, "little") + text, ordered, tuple(entries), tuple(spans))


def _fits(entry: PieceEntry, piece: StatePiece) -> bool:
    """Whether ``entry`` is what ``piece_entry`` would say of the piece."""
    tensor = piece.tensor
    return (
        entry.name == piece.name and entry.kind == piece.kind and entry.flat_start == piece.flat_start
        and entry.offset == piece.offset and entry.shape == piece.shape and entry.global_shape == piece.global_shape
        and entry.numel == tensor.numel() and tensor.dim() == 1 and f"torch.{entry.dtype}" == str(tensor.dtype)
    )


def write_planned(
    path: Path, plan: ShardPlan, data: Iterable[memoryview], *, proceed: Callable[[], None] | None = None
) -> tuple[FileEntry, tuple[PieceEntry, ...]]:
    """Write a planned file whose data are given in order, in parts of any size; what the manifest says of it.

    ``proceed`` is called before each mebibyte; what it raises ends the writing.
    """
    width = block_bytes(plan.size)
    digest, pieces = Digest(width), SpanHashes(plan.spans, width)

    def chunks() -> Iterator[memoryview]:
        digest.update(plan.head)
        yield memoryview(plan.head)
        for part in data:
            for start in range(0, len(part), CHUNK):
                if proceed is not None:
                    proceed()
                chunk = part[start : start + CHUNK]
                digest.update(chunk)
                pieces.update(chunk)
                yield chunk

    write_chunks(path, plan.size, chunks())
    return digest.entry(), tuple(replace(e, hash=h) for e, h in zip(plan.entries, pieces.hashes, strict=True))


def check_written(path: Path, entry: FileEntry) -> None:
    """Read a file back and compare: what the file system returns is what was hashed on the way in.

    Raises:
        CheckpointError: it is not, or cannot be read.
    """
    digest = Digest(entry.block_bytes)
    buffer = memoryview(bytearray(min(CHUNK, max(entry.size, 1))))
    try:
        with open(path, "rb", buffering=0) as stream:
            while count := stream.readinto(buffer):
                digest.update(buffer[:count])
    except OSError as error:
        raise disk_error(error, path) from error
    found = digest.entry()
    if found.size != entry.size:
        raise CheckpointError(f"{path}: {found.size} bytes came back right after {entry.size} were written")
    for i, (got, want) in enumerate(zip(found.blocks, entry.blocks)):
        if got != want:
            raise CheckpointError(
                f"{path}: block {i} (bytes {i * entry.block_bytes} and on) came back changed right after it was "
                "written: the memory or the file system of this host is faulty; do not trust this node"
            )


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The elements of a 1-D tensor as bytes, on the host; a view where that is possible."""
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
