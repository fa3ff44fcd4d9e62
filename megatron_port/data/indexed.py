"""Token files in Megatron's ``.bin/.idx`` format, with a sidecar that says what they hold.

``.bin`` is the flat stream of token ids. ``.idx`` is, little-endian: ``MMIDIDX\\0\\0``,
version 1 (u64), dtype code (u8), number of sequences N (u64), number of document
boundaries D (u64), lengths i32[N], byte offsets i64[N], documents i64[D] (the first
sequence of each document, then N): exactly 34 + 12 N + 8 D bytes. Our writer makes
one sequence of each document. ``.meta.json`` is ours; other readers ignore it.
"""

from __future__ import annotations

import json
import os
import struct
import tempfile
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import BinaryIO

import numpy as np
import xxhash

from megatron_port.data.files import atomic_file, fsync_directory, write_bytes
from megatron_port.errors import DataError
from megatron_port.runtime.permissions import file_mode

MAGIC = b"MMIDIDX\x00\x00"
HEADER_BYTES = 34
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
CHUNK = 1 << 20
META_BYTES = 1 << 16
"""More than any sidecar has; nothing larger is read."""


def token_dtype(vocab_size: int) -> np.dtype:
    """u16 below 65500 ids, else i32 (Megatron's rule)."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


@dataclass(frozen=True, kw_only=True)
class CorpusMeta:
    """What the sidecar ``<prefix>.meta.json`` records."""

    tokenizer: str
    """Name for ``data.tokenizer.get_tokenizer``."""
    vocab_size: int
    eod_id: int
    """-1: documents carry no end token."""
    documents: int = 0
    tokens: int = 0
    source_bytes: int = 0
    """Bytes of text that were tokenized."""
    source_files: int = 0
    source_xxh3: str = ""
    """xxh3-128 over the input files' bytes, in order."""
    bin_xxh3: str = ""
    """xxh3-128 of the .bin file."""
    format: int = 1


def bin_path(prefix: str | Path) -> Path:
    """``<prefix>.bin``."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    """``<prefix>.idx``."""
    return Path(f"{prefix}.idx")


def meta_path(prefix: str | Path) -> Path:
    """``<prefix>.meta.json``."""
    return Path(f"{prefix}.meta.json")


def read_meta(prefix: str | Path) -> CorpusMeta | None:
    """The sidecar, or None where there is none (a corpus of another program). DataError: it is damaged."""
    path = meta_path(prefix)
    try:
        size = path.stat().st_size
        if size > META_BYTES:
            raise DataError(f"{path}: {size} bytes; a sidecar has at most {META_BYTES}. Prepare the corpus again")
        raw = json.loads(path.read_text(encoding="utf-8"))
        known = {f.name: raw[f.name] for f in fields(CorpusMeta) if f.name in raw}
        for name, value in known.items():
            number = CorpusMeta.__annotations__[name] == "int"
            if (type(value) is not int or not -1 <= value < 1 << 63) if number else type(value) is not str:
                raise ValueError(f"{name} is {value!r:.60}")
        return CorpusMeta(**known)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise DataError(f"{path}: not a readable sidecar ({error}); prepare the corpus again") from error


class IndexedWriter:
    """Writes a corpus document by document; the pair appears under its name only when it is whole.

    A context manager: leaving it well commits (``.bin``, sidecar, ``.idx`` last), leaving
    it by an exception removes what was written. Memory: 4 bytes a document.
    """

    def __init__(self, prefix: str | Path, *, vocab_size: int) -> None:
        self.prefix = Path(prefix)
        self.vocab_size = vocab_size
        self.dtype = token_dtype(vocab_size)
        self.lengths = array("i")
        self.tokens = 0
        self._hash = xxhash.xxh3_128()
        self._meta: CorpusMeta | None = None
        self.prefix.parent.mkdir(parents=True, exist_ok=True)
        handle, self._temporary = tempfile.mkstemp(prefix=f".{self.prefix.name}.bin.", suffix=".tmp",
                                                   dir=self.prefix.parent)
        self._stream: BinaryIO = os.fdopen(handle, "wb", buffering=CHUNK)

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.commit()
        else:
            self.abort()

    def add_document(self, ids: Sequence[int] | np.ndarray) -> None:
        """Append one document. DataError: an id lies outside the vocabulary, or the document is too long."""
        wide = np.asarray(ids, dtype=np.int64)
        if wide.size >= 2**31:
            raise DataError(f"{self.prefix}: document {len(self.lengths)} has {wide.size} tokens; at most 2^31 - 1 fit")
        if wide.size and (int(wide.min()) < 0 or int(wide.max()) >= self.vocab_size):
            at = int(np.flatnonzero((wide < 0) | (wide >= self.vocab_size))[0])
            raise DataError(
                f"{self.prefix}: document {len(self.lengths)}, position {at}: token id {int(wide[at])} "
                f"is outside the vocabulary of {self.vocab_size}"
            )
        data = wide.astype(self.dtype).tobytes()
        self._stream.write(data)
        self._hash.update(data)
        self.lengths.append(wide.size)
        self.tokens += wide.size

    def describe(self, meta: CorpusMeta) -> None:
        """Set the sidecar; counts and the hash of the .bin are filled in at commit."""
        self._meta = meta

    def commit(self) -> None:
        """Give the files their names."""
        try:
            self._stream.flush()
            os.fsync(self._stream.fileno())
            self._stream.close()
            os.chmod(self._temporary, file_mode())
            # An old index beside a new .bin would describe the wrong bytes after a crash in between.
            idx_path(self.prefix).unlink(missing_ok=True)
            os.replace(self._temporary, bin_path(self.prefix))
            fsync_directory(self.prefix.parent)
            if self._meta is None:
                meta_path(self.prefix).unlink(missing_ok=True)
            else:
                counts = {"documents": len(self.lengths), "tokens": self.tokens, "bin_xxh3": self._hash.hexdigest()}
                text = json.dumps({**asdict(self._meta), **counts}, indent=2) + "\n"
                write_bytes(meta_path(self.prefix), text.encode())
            self._write_index()
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """Forget everything written so far."""
        self._stream.close()
        Path(self._temporary).unlink(missing_ok=True)

    def _write_index(self) -> None:
        count = len(self.lengths)
        code = next(c for c, name in DTYPES.items() if np.dtype(name) == self.dtype)
        lengths = np.frombuffer(self.lengths, dtype=np.int32)
        with atomic_file(idx_path(self.prefix)) as stream:
            stream.write(MAGIC + struct.pack("<QBQQ", 1, code, count, count + 1))
            stream.write(lengths.astype("<i4").tobytes())
            offset = 0
            for start in range(0, count, CHUNK):
                ends = np.cumsum(lengths[start:start + CHUNK], dtype=np.int64) * self.dtype.itemsize
                stream.write((offset + np.concatenate(([0], ends[:-1]))).astype("<i8").tobytes())
                offset += int(ends[-1])
            for start in range(0, count + 1, CHUNK):
                stream.write(np.arange(start, min(start + CHUNK, count + 1), dtype="<i8").tobytes())


class IndexedDataset:
    """A memory-mapped corpus; opening it checks every size, reading copies only what is asked for.

    Raises:
        DataError: a file is missing, of another format, truncated or longer than its index says.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = Path(prefix)
        path = idx_path(prefix)
        for needed in (path, bin_path(prefix)):
            if not needed.is_file():
                raise DataError(f"{needed}: no such file; make the corpus with `data prepare`, "
                                "and give the prefix without .bin or .idx")
        with open(path, "rb") as stream:
            header = stream.read(HEADER_BYTES)
        if header[:9] != MAGIC or len(header) < HEADER_BYTES:
            raise DataError(f"{path}: does not start with the {HEADER_BYTES}-byte header of a Megatron index")
        version, code, self.num_sequences, boundaries = struct.unpack("<QBQQ", header[9:])
        if version != 1 or code not in DTYPES:
            raise DataError(f"{path}: version {version}, dtype code {code}; "
                            f"expected version 1 and an integer code of {sorted(DTYPES)}")
        self.dtype = np.dtype(DTYPES[code])
        expected, found = HEADER_BYTES + 12 * self.num_sequences + 8 * boundaries, path.stat().st_size
        if expected != found:
            raise DataError(f"{path}: expected {expected} bytes for {self.num_sequences} sequences and {boundaries} "
                            f"document boundaries, found {found}; copy or prepare the corpus again")
        self._map_index(path, boundaries)
        size, found = self.num_tokens * self.dtype.itemsize, bin_path(prefix).stat().st_size
        if size != found:
            raise DataError(f"{bin_path(prefix)}: expected {size} bytes for {self.num_tokens} tokens, found {found}; "
                            "copy or prepare the corpus again")
        self._tokens = np.memmap(bin_path(prefix), dtype=self.dtype, mode="r") if size else np.zeros(0, self.dtype)
        self.meta = read_meta(prefix)

    def _map_index(self, path: Path, boundaries: int) -> None:
        count = self.num_sequences
        def mapped(dtype: str, offset: int, size: int) -> np.ndarray:
            return np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=(size,)) if size else np.zeros(0, dtype)
        self.lengths = mapped("<i4", HEADER_BYTES, count)
        self.pointers = mapped("<i8", HEADER_BYTES + 4 * count, count)
        self.documents = mapped("<i8", HEADER_BYTES + 12 * count, boundaries)
        if count and int(self.lengths.min()) < 0:
            raise DataError(f"{path}: a sequence has a negative length; the file is damaged")
        self.num_tokens = int(self.lengths.sum(dtype=np.int64))
        last = int(self.pointers[-1]) // self.dtype.itemsize + int(self.lengths[-1]) if count else 0
        first = int(self.pointers[0]) if count else 0
        if first != 0 or last != self.num_tokens:
            raise DataError(f"{path}: byte offsets run from {first} to token {last}, lengths add up to "
                            f"{self.num_tokens} tokens; the file is damaged")
        if boundaries and (int(self.documents[0]) != 0 or int(self.documents[-1]) != count):
            raise DataError(f"{path}: documents run from sequence {int(self.documents[0])} to "
                            f"{int(self.documents[-1])}, expected 0 to {count}; the file is damaged")

    @property
    def num_documents(self) -> int:
        """Documents in the corpus."""
        return max(len(self.documents) - 1, 0)

    def sequence_start(self, index: int) -> int:
        """Position in the flat stream of sequence ``index``; ``num_sequences`` gives the end."""
        if index >= self.num_sequences:
            return self.num_tokens
        start = int(self.pointers[index]) // self.dtype.itemsize if index >= 0 else -1
        if not 0 <= start <= self.num_tokens:  # only the ends were checked when the corpus was opened
            raise DataError(f"{idx_path(self.prefix)}: sequence {index} starts at token {start} of {self.num_tokens}; "
                            "the file is damaged: `data verify` tells where")
        return start

    def document_start(self, index: int) -> int:
        """Position in the flat stream of document ``index``; ``num_documents`` gives the end."""
        return self.sequence_start(int(self.documents[index])) if self.num_documents else 0

    def nearest_document(self, position: int) -> int:
        """The document boundary (a position) closest to ``position``."""
        after = bisect_left(range(self.num_documents + 1), position, key=self.document_start)
        near = [self.document_start(i) for i in (after - 1, after) if 0 <= i <= self.num_documents]
        return min(near, key=lambda start: abs(start - position)) if near else 0

    def read(self, position: int, count: int) -> np.ndarray:
        """``count`` tokens of the flat stream from ``position`` on, int64 [count]; a copy."""
        if position < 0 or count < 0 or position + count > self.num_tokens:
            raise ValueError(f"{self.prefix}: tokens {position} to {position + count} of {self.num_tokens}")
        return self._tokens[position:position + count].astype(np.int64)

    def document(self, index: int) -> np.ndarray:
        """The tokens of document ``index``, int64; a copy."""
        if not 0 <= index < self.num_documents:
            raise ValueError(f"{self.prefix}: document {index} of {self.num_documents}")
        start, end = self.document_start(index), self.document_start(index + 1)
        if end < start:
            raise DataError(f"{idx_path(self.prefix)}: document {index} runs from token {start} to {end}; "
                            "the file is damaged: `data verify` tells where")
        return self.read(start, end - start)

    def chunks(self, size: int = CHUNK) -> Iterator[tuple[int, np.ndarray]]:
        """(position, tokens as stored) over the whole stream."""
        for position in range(0, self.num_tokens, size):
            yield position, self._tokens[position:position + size]

    def check_ids(self, vocab_size: int) -> None:
        """Read the whole stream. DataError names the first id that is not in [0, vocab_size)."""
        for position, tokens in self.chunks():
            if int(tokens.max()) >= vocab_size or int(tokens.min()) < 0:
                at = int(np.flatnonzero((tokens >= vocab_size) | (tokens < 0))[0])
                raise bad_token(self.prefix, position + at, int(tokens[at]), vocab_size)

    def verify(self) -> list[str]:
        """Read everything: offsets, document order, ids and the hash of the sidecar. What was checked, in words.

        Raises:
            DataError: the first thing that does not hold.
        """
        done = [f"sizes: {self.num_sequences} sequences, {self.num_documents} documents, {self.num_tokens} tokens"]
        position = 0
        for start in range(0, self.num_sequences, CHUNK):
            ends = position + np.cumsum(self.lengths[start:start + CHUNK], dtype=np.int64)
            starts = np.concatenate(([position], ends[:-1])) * self.dtype.itemsize
            wrong = np.flatnonzero(starts != self.pointers[start:start + CHUNK])
            if wrong.size:
                raise DataError(f"{idx_path(self.prefix)}: sequence {start + int(wrong[0])} has a wrong byte offset")
            position = int(ends[-1])
        for start in range(0, len(self.documents), CHUNK):
            if np.any(np.diff(self.documents[start:start + CHUNK + 1]) < 0):
                raise DataError(f"{idx_path(self.prefix)}: document boundaries go backwards after entry {start}")
        done.append("offsets and document boundaries are consistent")
        if self.meta is None:
            return [*done, "no sidecar: ids and contents could not be checked"]
        if (self.meta.tokens, self.meta.documents) != (self.num_tokens, self.num_documents):
            raise DataError(f"{meta_path(self.prefix)}: says {self.meta.tokens} tokens in {self.meta.documents} "
                            f"documents, the index {self.num_tokens} in {self.num_documents}")
        self.check_ids(self.meta.vocab_size)
        done.append(f"every id is below {self.meta.vocab_size}")
        if self.meta.bin_xxh3:
            digest = xxhash.xxh3_128()
            for _, tokens in self.chunks():
                digest.update(tokens.tobytes())
            if digest.hexdigest() != self.meta.bin_xxh3:
                raise DataError(f"{bin_path(self.prefix)}: xxh3-128 is {digest.hexdigest()}, the sidecar says "
                                f"{self.meta.bin_xxh3}; the file is damaged, prepare it again")
            done.append(f"xxh3-128 {self.meta.bin_xxh3} matches")
        return done


def bad_token(prefix: Path, position: int, token: int, vocab_size: int) -> DataError:
    """The error for a token that the model has no embedding for."""
    return DataError(
        f"{bin_path(prefix)}: position {position}: token id {token} is outside the vocabulary of {vocab_size}; "
        "the corpus was made with another tokenizer: set model.vocab_size or prepare it again"
    )


def unigram_entropy(data: IndexedDataset | str | Path) -> float:
    """Entropy of the token frequencies, nats a token; one pass, memory grows with the vocabulary only.

    It is the loss of the best model that ignores context.
    """
    corpus = data if isinstance(data, IndexedDataset) else IndexedDataset(data)
    counts = np.zeros(0, np.int64)
    for _, tokens in corpus.chunks():
        part = np.bincount(tokens.astype(np.int64), minlength=len(counts))
        part[:len(counts)] += counts
        counts = part
    if not corpus.num_tokens:
        raise DataError(f"{corpus.prefix}: the corpus holds no tokens")
    p = counts[counts > 0] / corpus.num_tokens
    return float(-(p * np.log(p)).sum())
