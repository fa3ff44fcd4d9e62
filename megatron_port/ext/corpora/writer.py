"""Writing a corpus: tokens and lengths go to temporary files; the corpus appears under its name only when whole."""

from __future__ import annotations

import json
import os
import shutil
import struct
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import xxhash

from megatron_port.core.data.indexed import CHUNK, DTYPES, MAGIC, CorpusMeta, bin_path, idx_path, mask_path, meta_path
from megatron_port.core.errors import DataError
from megatron_port.core.io.files import fsync_directory, write_bytes
from megatron_port.core.io.typed_json import Natural
from megatron_port.ext.corpora.checked_tokens import BlockHashes, file_blocks, file_xxh3

TOKENS, LENGTHS, MASK, INDEX = "tokens", "lengths", "mask", "index"


def token_dtype(vocab_size: int) -> np.dtype:
    """u16 below 65500 ids, otherwise i32 (Megatron's rule)."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


@dataclass(frozen=True)
class Written:
    """Documents and tokens written so far."""

    documents: Natural
    tokens: Natural
    hashes: tuple[str, ...] = ()
    """xxh3-128 of the unfinished files up to there: tokens, lengths, mask."""


class IndexedWriter:
    """Writes a corpus document by document; the pair appears under its name only when it is whole.

    A context manager: leaving it well commits (``.bin``, sidecar, ``.idx`` last), leaving
    it by an exception removes what was written. Memory does not grow with the corpus.

    Args:
        masked: tokens come with a mask, for ``.mask``.
        folder: keeps the unfinished files, and may hold those of an earlier writer (see :meth:`restore`).
            None: a temporary one beside the corpus.
    """

    def __init__(self, prefix: str | Path, *, vocab_size: int, masked: bool = False, folder: Path | None = None
                 ) -> None:
        self.prefix = Path(prefix)
        self.vocab_size = vocab_size
        self.dtype = token_dtype(vocab_size)
        self.documents = self.tokens = 0
        self._hashes = BlockHashes()
        self._others = [xxhash.xxh3_128(), xxhash.xxh3_128()]
        """Hashes of the lengths and of the mask."""
        self._meta: CorpusMeta | None = None
        self.prefix.parent.mkdir(parents=True, exist_ok=True)
        if folder is None:
            folder = Path(tempfile.mkdtemp(prefix=f".{self.prefix.name}.", suffix=".tmp", dir=self.prefix.parent))
        self.folder = folder
        self._stream = _open(folder / TOKENS)
        self._sizes = _open(folder / LENGTHS)
        self._mask = _open(folder / MASK) if masked else None
        self.counted = 0

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.commit()
        else:
            self.abort()

    def add_document(self, ids: Sequence[int] | np.ndarray) -> None:
        """Append one document. DataError: an id is outside the vocabulary, or the document is too long."""
        wide = np.asarray(ids, dtype=np.int64)
        if wide.size >= 2**31:
            raise DataError(f"{self.prefix}: document {self.documents} has {wide.size} tokens; at most 2^31 - 1 fit")
        fault = outside(wide, self.vocab_size)
        if fault:
            raise DataError(f"{self.prefix}: document {self.documents}, {fault}")
        self.add_block(np.array([wide.size], dtype="<i4"), wide.astype(self.dtype).tobytes())

    def add_block(self, lengths: np.ndarray, data: bytes | memoryview, mask: bytes = b"") -> None:
        """Append documents of these ``lengths`` (i32) whose ids, checked and in the file's type, are ``data``.

        ``mask``: one byte for each id, 0 or 1, where the writer is ``masked``.
        """
        tokens = int(lengths.sum(dtype=np.int64))
        size = tokens * self.dtype.itemsize
        if size != len(data) or len(mask) != (tokens if self._mask else 0):
            raise ValueError(f"{len(data)} bytes and a mask of {len(mask)} for documents of {size} bytes, {tokens} ids")
        self._stream.write(data)
        self._hashes.update(data)
        sizes = lengths.astype("<i4").tobytes()
        self._sizes.write(sizes)
        self._others[0].update(sizes)
        if self._mask:
            self._mask.write(mask)
            self._others[1].update(mask)
            self.counted += mask.count(1)
        self.documents += len(lengths)
        self.tokens += len(data) // self.dtype.itemsize

    def describe(self, meta: CorpusMeta) -> None:
        """Set the sidecar; counts and the hashes of the files are filled in at commit."""
        self._meta = meta

    def flush(self) -> Written:
        """Make all written data durable, and return the state that :meth:`restore` takes."""
        for stream in self._streams:
            stream.flush()
            os.fsync(stream.fileno())
        return self.written

    @property
    def written(self) -> Written:
        """Return what has been written so far, on disk or not."""
        digests = [self._hashes.total, *self._others][:len(self._streams)]
        return Written(self.documents, self.tokens, tuple(digest.hexdigest() for digest in digests))

    def restore(self, to: Written) -> None:
        """Continue with the files of an earlier writer of the same folder; what they hold beyond ``to`` is cut off.

        The files are read and compared with their hashes: what they hold gets the final hashes.

        DataError: they hold less, or something else.
        """
        self._hashes, self._others = BlockHashes(), [xxhash.xxh3_128(), xxhash.xxh3_128()]
        wanted = (to.tokens * self.dtype.itemsize, to.documents * 4, to.tokens)
        for stream, size in zip(self._streams, wanted):
            found = os.fstat(stream.fileno()).st_size
            if found < size:
                raise DataError(f"{stream.name}: expected at least {size} bytes, found {found}")
            stream.truncate(size)
            stream.seek(size)
        for block in file_blocks(self.folder / TOKENS):
            self._hashes.update(block)
        for block in file_blocks(self.folder / LENGTHS):
            self._others[0].update(block)
        self.counted = 0
        for block in file_blocks(self.folder / MASK) if self._mask else ():
            self._others[1].update(block)
            self.counted += block.count(1)
        self.documents, self.tokens = to.documents, to.tokens
        if to.tokens and self.written != to:
            raise DataError(f"{self.folder}: the unfinished files are not what was written (their hashes differ)")

    def commit(self) -> None:
        """Move the files to their final names."""
        try:
            self.flush()
            self.close()
            index_hash = self._write_index()
            # An old index beside a new .bin would describe the wrong bytes after a crash in between.
            idx_path(self.prefix).unlink(missing_ok=True)
            os.replace(self.folder / TOKENS, bin_path(self.prefix))
            mask_hash = self._commit_mask()
            fsync_directory(self.prefix.parent)
            if self._meta is None:
                meta_path(self.prefix).unlink(missing_ok=True)
            else:
                own = {"documents": self.documents, "tokens": self.tokens, "idx_xxh3": index_hash,
                       "bin_xxh3": self._hashes.total.hexdigest(), "bin_blocks": self._hashes.hexdigest(),
                       "bin_block_bytes": self._hashes.block_bytes, "mask_xxh3": mask_hash, "counted": self.counted}
                text = json.dumps({**asdict(self._meta), **own}, indent=2) + "\n"
                write_bytes(meta_path(self.prefix), text.encode())
            os.replace(self.folder / INDEX, idx_path(self.prefix))
            fsync_directory(self.prefix.parent)
        finally:
            self.abort()

    def abort(self) -> None:
        """Remove the unfinished files."""
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        """Close the files and leave them where they are."""
        for stream in self._streams:
            stream.close()

    @property
    def _streams(self) -> list[BinaryIO]:
        return [self._stream, self._sizes, *([self._mask] if self._mask else [])]

    def _commit_mask(self) -> str:
        """Move the mask to its name, or remove that of a corpus that is replaced; its hash."""
        if self._mask is None:
            mask_path(self.prefix).unlink(missing_ok=True)
            return ""
        os.replace(self.folder / MASK, mask_path(self.prefix))
        return file_xxh3(mask_path(self.prefix))

    def _lengths(self) -> Iterator[np.ndarray]:
        for block in file_blocks(self.folder / LENGTHS):
            yield np.frombuffer(block, dtype="<i4")

    def _write_index(self) -> str:
        count = self.documents
        code = next(c for c, name in DTYPES.items() if np.dtype(name) == self.dtype)
        digest = xxhash.xxh3_128()
        with open(self.folder / INDEX, "wb") as stream:
            def put(data: bytes) -> None:
                stream.write(data)
                digest.update(data)

            put(MAGIC + struct.pack("<QBQQ", 1, code, count, count + 1))
            for lengths in self._lengths():
                put(lengths.tobytes())
            offset = 0
            for lengths in self._lengths():
                ends = np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize
                put((offset + np.concatenate(([0], ends[:-1]))).astype("<i8").tobytes())
                offset += int(ends[-1])
            for start in range(0, count + 1, CHUNK):
                put(np.arange(start, min(start + CHUNK, count + 1), dtype="<i8").tobytes())
            stream.flush()
            os.fsync(stream.fileno())
        return digest.hexdigest()


def _open(path: Path) -> BinaryIO:
    """For writing, without taking away what is there."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    return os.fdopen(handle, "r+b", buffering=CHUNK)


def outside(ids: np.ndarray, vocab_size: int) -> str:
    """Return where ``ids`` leaves [0, vocab_size), in words; empty where it does not."""
    if not ids.size or (int(ids.min()) >= 0 and int(ids.max()) < vocab_size):
        return ""
    at = int(np.flatnonzero((ids < 0) | (ids >= vocab_size))[0])
    return f"position {at}: token id {int(ids[at])} is outside the vocabulary of {vocab_size}"
