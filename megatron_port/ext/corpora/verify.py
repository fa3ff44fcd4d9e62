"""Verification of a corpus: each fault with its file, its byte, and the expected and found values.

The parts of a pair say much twice: sizes follow from counts, offsets from lengths, and the sidecar has hashes.
So a damaged length can be told from a damaged offset, and a damaged token is in a known block.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import xxhash

from megatron_port.core.data.indexed import (
    CHUNK,
    DTYPES,
    HEADER_BYTES,
    MAGIC,
    OWN_TOKENIZERS,
    CorpusMeta,
    IndexedDataset,
    bin_path,
    chat_path,
    idx_path,
    mapped,
    mask_path,
    meta_path,
    read_meta,
    reference_path,
    tokenizer_name,
)
from megatron_port.core.errors import DataError
from megatron_port.core.io.logging import Advance, silent
from megatron_port.core.registry import PARTS
from megatron_port.ext.corpora.checked_tokens import BlockHashes, file_blocks, file_xxh3
from megatron_port.ext.corpora.tokenizer import content_hash, identity, read_file

MOST_FAULTS = 20
"""Faults of one kind that are listed."""


@dataclass(frozen=True)
class Fault:
    """One fault of a corpus."""

    file: Path
    byte: int
    """Offset of the first byte concerned; -1: the file as a whole."""
    what: str
    expected: str
    found: str

    def __str__(self) -> str:
        at = f" byte {self.byte}:" if self.byte >= 0 else ""
        return f"{self.file}:{at} {self.what}: expected {self.expected}, found {self.found}"


@dataclass
class Report:
    """Result of ``verify``."""

    faults: list[Fault] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)
    """Checks that passed, in words."""

    def add(self, file: Path, byte: int, what: str, expected: object, found: object) -> None:
        """Note a fault; its arguments are the fields of :class:`Fault`."""
        self.faults.append(Fault(file, byte, what, str(expected), str(found)))

    def raise_if_bad(self) -> None:
        """Raise DataError with all faults, if there are any."""
        if not self.faults:
            return
        if len(self.faults) == 1:
            raise DataError(f"{self.faults[0]}; copy or prepare the corpus again")
        lines = "\n".join(f"  {fault}" for fault in self.faults)
        raise DataError(f"{len(self.faults)} faults; copy or prepare the corpus again:\n{lines}")


def verify(prefix: str | Path, *, vocab_size: int | None = None, advance: Advance = silent) -> Report:
    """Read a corpus from end to end. Constant memory.

    Args:
        vocab_size: check ids against this instead of the sidecar's.
        advance: called with the bytes of the .bin that were read.

    Raises:
        DataError: the sidecar cannot be read. (All other faults are in the report.)
    """
    report = Report()
    for path in (idx_path(prefix), bin_path(prefix)):
        if not path.is_file():
            report.add(path, -1, "the file", "a regular file", "none")
    if report.faults:
        return report
    meta = read_meta(prefix)
    index = _Index(idx_path(prefix), report)
    if index.dtype is None:
        return report
    _check_bin(bin_path(prefix), index, meta, vocab_size, report, advance)
    if meta is None:
        report.checked.append("no sidecar: contents" + (" could not be checked" if vocab_size else
                                                         " and ids could not be checked"))
        return report
    _check_counts(meta_path(prefix), meta, index, report)
    if meta.idx_xxh3:
        _check_index_hash(idx_path(prefix), meta, report)
    if meta.mask_xxh3:
        _check_mask(mask_path(prefix), index, meta, report)
    if meta.chat:
        _check_chat(chat_path(prefix), meta, report)
    if meta.pairs:
        _check_pairs(prefix, index, meta, report)
    return report


class _Index:
    """The .idx, as far as its header and size allow."""

    def __init__(self, path: Path, report: Report) -> None:
        self.path, self.report = path, report
        self.dtype: np.dtype | None = None
        self.tokens: int | None = None
        """By the offsets and lengths of the index; None where they are damaged."""
        self.sequences = self.documents = 0
        size = path.stat().st_size
        with open(path, "rb") as stream:
            header = stream.read(HEADER_BYTES)
        if len(header) < HEADER_BYTES:
            self._add(0, "the header", f"{HEADER_BYTES} bytes", len(header))
            return
        version, code, self.sequences, boundaries = struct.unpack("<QBQQ", header[9:])
        if header[:9] != MAGIC:
            self._add(0, "the header of a Megatron index", repr(MAGIC), repr(header[:9]))
        if version != 1:
            self._add(9, "version", 1, version)
        if code not in DTYPES:
            self._add(17, "type code", f"one of {sorted(DTYPES)}", code)
        expected = HEADER_BYTES + 12 * self.sequences + 8 * boundaries
        if expected != size:
            self._add(-1, f"size for {self.sequences} sequences and {boundaries} document boundaries (bytes 18 and 26)",
                      f"{expected} bytes", size)
        if report.faults:
            return
        self.dtype = np.dtype(DTYPES[code])
        self.documents = max(boundaries - 1, 0)
        self._boundaries = boundaries
        self._check_offsets()
        self._check_documents()
        if not report.faults:
            report.checked += [
                f"sizes: {self.sequences} sequences, {self.documents} documents, {self.tokens} tokens",
                f"offsets and document boundaries are consistent; {self._document_lengths()}"]

    def _add(self, byte: int, what: str, expected: object, found: object) -> None:
        self.report.add(self.path, byte, what, expected, found)

    def _check_offsets(self) -> None:
        """Each sequence begins where the one before it ends; one wrong value is told apart from its neighbours."""
        assert self.dtype is not None
        n, width, reported = self.sequences, self.dtype.itemsize, 0
        lengths = mapped(self.path, "<i4", HEADER_BYTES, n)
        pointers = mapped(self.path, "<i8", HEADER_BYTES + 4 * n, n)
        good, total = True, 0
        if n and int(pointers[0]) != 0:
            good = False
            self._add(HEADER_BYTES + 4 * n, "offset of sequence 0", 0, pointers[0])
        for start in range(0, n, CHUNK):
            size = np.asarray(lengths[start:start + CHUNK], dtype=np.int64)
            for at in np.flatnonzero(size < 0)[:MOST_FAULTS]:
                good = False
                self._add(HEADER_BYTES + 4 * (start + int(at)), f"length of sequence {start + int(at)}", "0 or more",
                          size[at])
            total += int(size.sum())
            here = np.asarray(pointers[start:start + CHUNK + 1])
            # Compared by subtraction modulo 2^64: hostile offsets may not overflow into a warning.
            step = (here[1:].view(np.uint64) - here[:-1].view(np.uint64)).view(np.int64)
            for at in np.flatnonzero(step != size[:len(step)] * width):
                good = False
                if reported < MOST_FAULTS and not size[at] < 0:
                    reported += self._name_wrong(start + int(at), lengths, pointers)
        self.tokens = total if good else None

    def _name_wrong(self, i: int, lengths: np.ndarray, pointers: np.ndarray) -> int:
        """Sequence i + 1 does not begin at i's end. 1 if a fault was added."""
        assert self.dtype is not None
        n, width = self.sequences, self.dtype.itemsize
        here, there, size = int(pointers[i]), int(pointers[i + 1]), int(lengths[i]) * width
        if i == 0 and here != 0:
            return 0  # named already
        follows = i + 2 >= n or int(pointers[i + 2]) - there == int(lengths[i + 1]) * width
        precedes = i == 0 or here - int(pointers[i - 1]) == int(lengths[i - 1]) * width
        if not precedes and follows:
            return 0  # the offset of i itself is wrong, and was named one step before
        if follows and i + 2 < n:
            # The offsets agree with one another before and after: it is the length that does not fit.
            self._add(HEADER_BYTES + 4 * i, f"length of sequence {i}", f"{(there - here) / width:g}", lengths[i])
        else:
            self._add(HEADER_BYTES + 4 * n + 8 * (i + 1), f"sequence {i + 1} has a wrong byte offset", here + size,
                      there)
        return 1

    def _check_documents(self) -> None:
        n, count = self.sequences, self._boundaries
        begin = HEADER_BYTES + 12 * n
        documents = mapped(self.path, "<i8", begin, count)
        if count and int(documents[0]) != 0:
            self._add(begin, "first sequence of document 0", 0, documents[0])
        if count and int(documents[-1]) != n:
            self._add(begin + 8 * (count - 1), "end of the last document", f"{n} sequences", documents[-1])
        reported = 0
        for start in range(0, count, CHUNK):
            part = np.asarray(documents[start:start + CHUNK + 1])
            for at in np.flatnonzero(part[1:] < part[:-1]):
                if reported < MOST_FAULTS:
                    self._add(begin + 8 * (start + int(at) + 1), f"boundary {start + int(at) + 1} goes backwards",
                              f"{part[at]} or more", part[at + 1])
                    reported += 1

    def _document_lengths(self) -> str:
        """How long documents are, in words; the boundaries are known to be sound."""
        assert self.dtype is not None and self.tokens is not None
        pointers = mapped(self.path, "<i8", HEADER_BYTES + 4 * self.sequences, self.sequences)
        documents = mapped(self.path, "<i8", HEADER_BYTES + 12 * self.sequences, self._boundaries)
        shortest, longest = self.tokens, 0
        for start in range(0, self.documents, CHUNK):
            bounds = np.asarray(documents[start:start + CHUNK + 1])
            edges = np.full(len(bounds), self.tokens, dtype=np.int64)
            inside = bounds < self.sequences
            edges[inside] = pointers[bounds[inside]] // self.dtype.itemsize
            lengths = np.diff(edges)
            shortest, longest = min(shortest, int(lengths.min())), max(longest, int(lengths.max()))
        return f"documents have {shortest} to {longest} tokens" if self.documents else "there are no documents"


def _check_bin(
    path: Path, index: _Index, meta: CorpusMeta | None, vocab_size: int | None, report: Report, advance: Advance
) -> None:
    """Size, ids and hashes, in one pass."""
    assert index.dtype is not None
    width, size = index.dtype.itemsize, path.stat().st_size
    if index.tokens is not None and size != index.tokens * width:
        report.add(path, -1, f"size for {index.tokens} tokens", f"{index.tokens * width} bytes", size)
    limit = vocab_size or (meta.vocab_size if meta else 0)
    hashes, position, bad = BlockHashes(), 0, 0
    for block in file_blocks(path):
        hashes.update(block)
        ids = np.frombuffer(block[:len(block) // width * width], dtype=index.dtype)
        if limit and ids.size and (int(ids.max()) >= limit or int(ids.min()) < 0):
            for at in np.flatnonzero((ids >= limit) | (ids < 0)):
                bad += 1
                if bad <= MOST_FAULTS:
                    what = f"position {position + int(at)}: token id {ids[at]} is outside the vocabulary of {limit}"
                    report.add(path, (position + int(at)) * width, what, f"0 to {limit - 1}", ids[at])
        position += len(block) // width
        advance(position * width, size)
    if bad > MOST_FAULTS:
        report.add(path, -1, "ids outside the vocabulary", "none", f"{bad} (the first are above)")
    if limit and not bad:
        report.checked.append(f"every id is below {limit}")
    if meta and meta.bin_xxh3:
        _check_bin_hash(path, hashes, meta, report)


def _check_bin_hash(path: Path, hashes: BlockHashes, meta: CorpusMeta, report: Report) -> None:
    found = hashes.total.hexdigest()
    if found == meta.bin_xxh3:
        report.checked.append(f"xxh3-128 {meta.bin_xxh3} matches")
        return
    mine, theirs = hashes.hexdigest(), meta.bin_blocks
    if hashes.block_bytes == meta.bin_block_bytes and len(mine) == len(theirs):
        different = [i for i in range(len(mine) // 16) if mine[16 * i:16 * i + 16] != theirs[16 * i:16 * i + 16]]
        for i in different[:MOST_FAULTS]:
            last = min((i + 1) * hashes.block_bytes, path.stat().st_size)
            report.add(path, i * hashes.block_bytes, f"xxh3-64 of the bytes up to {last}",
                       theirs[16 * i:16 * i + 16], mine[16 * i:16 * i + 16])
        if different:
            return
    report.add(path, -1, "xxh3-128", meta.bin_xxh3, found)


def _check_mask(path: Path, index: _Index, meta: CorpusMeta, report: Report) -> None:
    """One byte per token, 0 or 1; as many ones as the sidecar says; the hash."""
    if not path.is_file():
        report.add(path, -1, "the file", "a regular file", "none")
        return
    size, position, counted, digest, before = path.stat().st_size, 0, 0, xxhash.xxh3_128(), len(report.faults)
    if index.tokens is not None and size != index.tokens:
        report.add(path, -1, f"size for {index.tokens} tokens", f"{index.tokens} bytes", size)
    for block in file_blocks(path):
        digest.update(block)
        values = np.frombuffer(block, dtype=np.uint8)
        for at in np.flatnonzero(values > 1)[:MOST_FAULTS]:
            report.add(path, position + int(at), f"whether token {position + int(at)} counts", "0 or 1", values[at])
        counted += block.count(1)
        position += len(block)
    if counted != meta.counted:
        report.add(path, -1, "tokens that count", meta.counted, counted)
    found = digest.hexdigest()
    if found != meta.mask_xxh3:
        report.add(path, -1, "xxh3-128", meta.mask_xxh3, found)
    if len(report.faults) == before:
        report.checked.append(f"mask: {counted} of {size} tokens count, xxh3-128 {found} matches")


def _check_chat(path: Path, meta: CorpusMeta, report: Report) -> None:
    found = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "no file"
    if found == meta.chat:
        report.checked.append(f"sha256 of the chat template {found} matches")
    else:
        report.add(path, -1, "sha256", meta.chat, found)


def _check_pairs(prefix: str | Path, index: _Index, meta: CorpusMeta, report: Report) -> None:
    """Two documents of each pair; the reference's log-probabilities, where there are any."""
    if index.documents != 2 * meta.pairs:
        report.add(meta_path(prefix), -1, f"documents of {meta.pairs} pairs", 2 * meta.pairs, index.documents)
        return
    report.checked.append(f"{meta.pairs} pairs")
    if reference_path(prefix).exists():
        try:
            header = PARTS.function("reference of preference pairs")(IndexedDataset(prefix)).header
        except DataError as error:
            report.add(reference_path(prefix), -1, str(error), "the log-probabilities of this corpus", "others")
        else:
            report.checked.append(f"log-probabilities by {header.weights}, xxh3-128 {header.xxh3} matches")


def _check_counts(path: Path, meta: CorpusMeta, index: _Index, report: Report) -> None:
    pairs = (("documents", index.documents, meta.documents), ("tokens", index.tokens, meta.tokens))
    for what, expected, found in pairs:
        if expected is not None and expected != found:
            report.add(path, -1, f"{what}, which the index counts", expected, found)


def _check_index_hash(path: Path, meta: CorpusMeta, report: Report) -> None:
    found = file_xxh3(path)
    if found == meta.idx_xxh3:
        report.checked.append(f"xxh3-128 of the index {meta.idx_xxh3} matches")
    elif not any(fault.file == path for fault in report.faults):
        # Consistent in itself, and not what was written: of another corpus of the same size, or lengths that moved.
        report.add(path, -1, "xxh3-128", meta.idx_xxh3, found)


def _check_chat_hash(path: Path, wanted: str) -> None:
    """Raise DataError here rather than in the export of what was trained."""
    found = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "no file"
    if found != wanted:
        raise DataError(f"{path}: the chat template of these conversations has sha256 {wanted}, found {found}; put the "
                        "old file back, or prepare the corpus again")


def check_tokenizers(corpora: Sequence[IndexedDataset]) -> None:
    """Check that the tokenizers named in the sidecars are those that made the corpora, and so are the chat templates.

    Raises:
        DataError: a tokenizer's files, or a template, were exchanged since.
    """
    for corpus in corpora:
        meta = corpus.meta
        if meta is not None and meta.chat:
            _check_chat_hash(chat_path(corpus.prefix), meta.chat)
        if meta is None or not meta.tokenizer_hash:
            continue
        name = tokenizer_name(corpus.prefix, meta)
        if name in OWN_TOKENIZERS:
            found = identity(name)["hash"]
        else:
            path = Path(name.partition(":")[2].rpartition("#")[0] or name.partition(":")[2])
            if name.startswith("tiktoken:") or not path.is_file():
                continue  # a network may be needed; training itself needs no tokenizer
            # End-of-document ids that no document carries are not in the sidecar.
            found = content_hash(read_file(path)[1], meta.eod_id) if meta.eod_id >= 0 else meta.tokenizer_hash
        if found != meta.tokenizer_hash:
            raise DataError(f"{meta_path(corpus.prefix)}: the corpus was made with tokenizer {meta.tokenizer} of hash "
                            f"{meta.tokenizer_hash}, the one that is there now has {found}: its ids mean other text. "
                            "Put the old file back, or prepare the corpus again")
