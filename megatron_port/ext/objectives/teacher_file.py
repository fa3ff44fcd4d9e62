"""A teacher's most likely tokens at every position of a training order, computed ahead: ``distill logits`` writes them.

A folder: ``header.json`` says of what, and ``block-N.bin`` has the records of ``block`` samples, numbered as the run
consumes them. A record is of one sample: a hash of the tokens (and document starts) that the teacher read, ids
[seq, k], log-probabilities [seq, k] and that of all other tokens [seq], then a hash over all of it, the sample's number
and the header. Every record is compared with its hash, and with the sample that it is used for, before it is used. A
block is written whole or not at all, so an interrupted run of the command continues where it was.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import torch
import xxhash

from megatron_port.core.data.sample import Sample
from megatron_port.core.errors import DataError
from megatron_port.core.io.files import open_regular, write_bytes
from megatron_port.core.io.typed_json import parse_json, typed
from megatron_port.ext.objectives.stored_teacher import Stored

HEADER = "header.json"
HEADER_BYTES = 1 << 16
"""More than any header has."""
_DIGEST, _TOKENS = 16, 8
FORMATS = {"fp32": "<f4", "fp64": "<f8"}


@dataclass(frozen=True, kw_only=True)
class LogitsHeader:
    """Description of the work that the records belong to; the same bytes for the same work."""

    teacher: str
    """Path of its weights."""
    fingerprint: str
    """Fingerprint of their values (``weights.readers``)."""
    computed_in: str
    """The dtype of the teacher's passes."""
    vocab_size: int
    seq_length: int
    top: int
    """Tokens kept at each position, k."""
    temperature: float
    values: str
    """fp32 | fp64: of the log-probabilities."""
    samples: int
    block: int
    """Samples in a block; the last one may have fewer."""
    format: int = 1

    def text(self) -> bytes:
        """Return the bytes of the file."""
        body = json.dumps(asdict(self), sort_keys=True)
        return json.dumps({"header": asdict(self), "xxh3": xxhash.xxh3_128_hexdigest(body.encode())},
                          sort_keys=True, indent=1).encode() + b"\n"

    @property
    def id_type(self) -> str:
        """Dtype of stored ids."""
        return "<u2" if self.vocab_size <= 1 << 16 else "<u4"

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Bytes of a record's ids, log-probabilities and tails."""
        elements, width = self.seq_length * self.top, np.dtype(FORMATS[self.values]).itemsize
        return elements * np.dtype(self.id_type).itemsize, elements * width, self.seq_length * width

    @property
    def record_bytes(self) -> int:
        """Bytes of a sample's record."""
        return _TOKENS + sum(self.sizes) + _DIGEST

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return -(-self.samples // self.block)

    def samples_of(self, block: int) -> range:
        """Return the samples of a block."""
        return range(block * self.block, min((block + 1) * self.block, self.samples))


@dataclass(frozen=True)
class _HeaderFile:
    header: LogitsHeader


def block_path(folder: Path, block: int) -> Path:
    """Return the file of a block."""
    return folder / f"block-{block:08d}.bin"


def read_header(folder: Path) -> LogitsHeader | None:
    """Return what a folder's records are of; None: there is no header. Raises DataError where it is damaged."""
    path = folder / HEADER
    try:
        with open(open_regular(path, follow=True), "rb") as stream:
            text = stream.read(HEADER_BYTES)
        header = typed(_HeaderFile, parse_json(text)).header
        positive = ("vocab_size", "seq_length", "top", "samples", "block")
        if header.format != 1 or header.text() != text or header.values not in FORMATS or not all(
            isinstance(getattr(header, name), int) and getattr(header, name) > 0 for name in positive
        ):
            raise ValueError("it is not what was written")
        return header
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: damaged ({type(error).__name__}: {error}); write the folder again with "
                        "`megatron-port distill logits`") from None


def tokens_hash(sample: Sample) -> bytes:
    """Return 8 bytes that tell what a teacher reads of a sample."""
    found = xxhash.xxh3_64(np.ascontiguousarray(sample.tokens, dtype="<i8").tobytes())
    if sample.starts is not None:
        found.update(np.ascontiguousarray(sample.starts, dtype="<i4").tobytes())
    return found.digest()


class StoredLogits:
    """The records of a folder.

    Raises:
        DataError: no header, or a damaged one.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        header = read_header(self.folder)
        if header is None:
            raise DataError(f"{self.folder / HEADER}: no such file; write the folder with `megatron-port distill "
                            "logits RUN`")
        self.header = header
        self._identity = xxhash.xxh3_128_digest(header.text())

    def check(self, *, vocab_size: int, seq_length: int, temperature: float, samples: int) -> None:
        """Check that a run can read them, and that all blocks of ``samples`` are there.

        Raises:
            DataError: they are of another vocabulary, sequence length or temperature, or too few.
        """
        wrong = [
            f"{name} {theirs} and the run's is {mine}" for name, theirs, mine in (
                ("vocab_size", self.header.vocab_size, vocab_size), ("seq_length", self.header.seq_length, seq_length),
                ("temperature", self.header.temperature, temperature),
            ) if theirs != mine
        ]
        if wrong:
            raise DataError(f"{self.folder} was written for {'; for '.join(wrong)}; write it again with "
                            "`megatron-port distill logits`, into another folder")
        if self.header.samples < samples:
            raise DataError(f"{self.folder} has {self.header.samples} samples and the run consumes {samples}; write "
                            "all of them with `megatron-port distill logits`, into another folder")
        for block in range(-(-samples // self.header.block)):
            path, wanted = block_path(self.folder, block), len(self.header.samples_of(block)) * self.header.record_bytes
            found = path.stat().st_size if path.is_file() else -1
            if found != wanted:
                what = "is missing" if found < 0 else f"has {found} bytes, expected {wanted}"
                raise DataError(f"{path} {what}; the same `megatron-port distill logits` continues where it was")

    def record(self, number: int, sample: Sample, stored: Stored) -> bytes:
        """Return the bytes of a sample's record; ``stored``: of [seq] positions."""
        values = FORMATS[self.header.values]
        payload = tokens_hash(sample) + b"".join((
            stored.ids.numpy().astype(self.header.id_type).tobytes(),
            stored.log_probabilities.numpy().astype(values).tobytes(), stored.log_tail.numpy().astype(values).tobytes(),
        ))
        return payload + self._digest(number, payload)

    def _digest(self, number: int, payload: bytes) -> bytes:
        return xxhash.xxh3_128_digest(self._identity + number.to_bytes(8, "little") + payload)

    def read(self, number: int, sample: Sample) -> Stored:
        """Return what is kept of the teacher at the positions of a sample [seq].

        Raises:
            DataError: the record is damaged or missing, or of a sample with other tokens.
        """
        payload = self._payload(number)
        if payload[:_TOKENS] != tokens_hash(sample):
            raise DataError(
                f"{self.folder}: the teacher read other tokens in sample {number} than this run does: another corpus, "
                "seed, order, sequence length or document setting; write the folder with this run's configuration"
            )
        header, (ids, values, _), at = self.header, self.header.sizes, _TOKENS
        shape, kind = (header.seq_length, header.top), FORMATS[header.values]
        raw = np.frombuffer(payload, header.id_type, header.seq_length * header.top, at).reshape(shape)
        log_p = np.frombuffer(payload, kind, header.seq_length * header.top, at + ids).reshape(shape)
        tail = np.frombuffer(payload, kind, header.seq_length, at + ids + values)
        return Stored(torch.from_numpy(raw.astype(np.int64)), torch.from_numpy(log_p.astype(kind[1:])),
                      torch.from_numpy(tail.astype(kind[1:])))

    def _payload(self, number: int) -> bytes:
        size = self.header.record_bytes
        if not 0 <= number < self.header.samples:
            raise DataError(f"{self.folder} has samples 0 to {self.header.samples - 1}, and the run reads {number}; "
                            "write more with `megatron-port distill logits`, into another folder")
        block, at = divmod(number, self.header.block)
        path = block_path(self.folder, block)
        try:
            with open(path, "rb") as stream:
                found = os.pread(stream.fileno(), size, at * size)
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}; the same `megatron-port distill logits` writes it") from None
        payload, digest = found[:-_DIGEST], found[-_DIGEST:]
        if len(found) != size or digest != self._digest(number, payload):
            raise DataError(f"{path}: the record of sample {number} is damaged: its hash is another; the same "
                            "`megatron-port distill logits` writes the block again")
        return payload

    def damaged(self, block: int) -> list[int]:
        """Return the samples of a block whose record is missing or damaged."""
        out = []
        for number in self.header.samples_of(block):
            try:
                self._payload(number)
            except DataError:
                out.append(number)
        path = block_path(self.folder, block)
        if not out and path.stat().st_size != len(self.header.samples_of(block)) * self.header.record_bytes:
            return list(self.header.samples_of(block))
        return out

    def write_block(self, block: int, records: Iterator[bytes]) -> None:
        """Write a block: whole, or as it was before."""
        write_bytes(block_path(self.folder, block), b"".join(records))


def begin(folder: Path, header: LogitsHeader) -> StoredLogits:
    """Return the records of a folder, which is made where it is new.

    Raises:
        DataError: it has records of something else.
    """
    there = read_header(folder)
    if there is None:
        folder.mkdir(parents=True, exist_ok=True)
        write_bytes(folder / HEADER, header.text())
    elif there != header:
        differ = [f"{f.name} is {getattr(there, f.name)} there and {getattr(header, f.name)} here"
                  for f in fields(LogitsHeader) if getattr(there, f.name) != getattr(header, f.name)]
        raise DataError(f"{folder} has records of something else: {'; '.join(differ)}; name another folder, or remove "
                        "this one")
    return StoredLogits(folder)
