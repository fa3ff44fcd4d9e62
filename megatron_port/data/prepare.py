"""Text to a token corpus: plain files, trees of them, or JSON lines."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from megatron_port.data.indexed import CorpusMeta, IndexedWriter
from megatron_port.data.tokenizer import Tokenizer
from megatron_port.errors import DataError

MAX_DOCUMENT_BYTES = 4 << 20
"""A plain-text document is cut at the next blank line after this, or at twice this at the next line end."""

Progress = Callable[[int, int], None]
"""Called with (bytes read, bytes in all) after each document."""


@dataclass(frozen=True)
class PrepareResult:
    """What was written."""

    prefix: Path
    documents: int
    tokens: int
    source_bytes: int


def source_files(paths: Sequence[str | Path]) -> list[Path]:
    """The files to read, in order: files as given; of a directory every .txt and .jsonl below it, sorted.

    Raises:
        DataError: a path does not exist or a directory holds no text.
    """
    found: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.suffix in (".txt", ".jsonl") and p.is_file())
            if not inside:
                raise DataError(f"{path}: no .txt or .jsonl file below this directory")
            found += inside
        elif path.is_file():
            found.append(path)
        else:
            raise DataError(f"{path}: no such file or directory")
    return found


class _HashedLines:
    """Lines of a file as bytes; hashes and counts what passes."""

    def __init__(self, digest: xxhash.xxh3_128) -> None:
        self.digest, self.count = digest, 0

    def of(self, path: Path) -> Iterator[bytes]:
        with open(path, "rb", buffering=1 << 20) as stream:
            # A bounded readline: a file without line ends must not be read whole.
            while line := stream.readline(MAX_DOCUMENT_BYTES):
                self.digest.update(line)
                self.count += len(line)
                yield line


def _decode(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: byte {data[error.start]:#x} is not UTF-8; convert the file, "
                        "for instance with iconv -f latin1 -t utf-8") from error


def _plain_documents(lines: Iterator[bytes], where: str, blank_lines: int) -> Iterator[str]:
    held: list[bytes] = []
    size = blanks = 0
    rest = b""
    for line in lines:
        if not line.strip() and line.endswith(b"\n"):
            blanks += 1
        else:
            rule = bool(blank_lines) and blanks >= blank_lines
            large = size >= MAX_DOCUMENT_BYTES and (blanks > 0 or size >= 2 * MAX_DOCUMENT_BYTES)
            if held and (rule or large):
                data = b"".join(held)
                # A bounded readline may have stopped inside a character; carry its bytes over.
                keep = 0 if data.endswith(b"\n") else _unfinished(data)
                rest = data[len(data) - keep:]
                yield _decode(data[:len(data) - keep], where)
                held, size = [rest] if rest else [], len(rest)
            blanks = 0
        held.append(line)
        size += len(line)
    if held:
        yield _decode(b"".join(held), where)


def _unfinished(data: bytes) -> int:
    """Bytes at the end that begin a UTF-8 character which is not complete."""
    for back in range(1, min(4, len(data) + 1)):
        byte = data[-back]
        if byte >= 0xC0:
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return back if back < length else 0
        if byte < 0x80:
            return 0
    return 0


def _json_documents(lines: Iterator[bytes], where: str, key: str) -> Iterator[str]:
    pending = b""
    number = 0
    for part in lines:
        pending += part
        if not part.endswith(b"\n"):
            continue  # a longer line than one bounded read
        number += 1
        yield from _json_text(pending, f"{where}:{number}", key)
        pending = b""
    if pending:
        yield from _json_text(pending, f"{where}:{number + 1}", key)


def _json_text(line: bytes, where: str, key: str) -> Iterator[str]:
    if not line.strip():
        return
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where}: not a JSON object ({error})") from error
    text = record.get(key) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise DataError(f"{where}: no text under the key {key!r}; name the right one with --json-key")
    yield text


def prepare(
    paths: Sequence[str | Path],
    prefix: str | Path,
    *,
    tokenizer: Tokenizer,
    blank_lines: int = 0,
    json_key: str = "text",
    append_eod: bool = True,
    progress: Progress | None = None,
) -> PrepareResult:
    """Tokenize ``paths`` into ``<prefix>.bin/.idx/.meta.json``; nothing appears unless all of it succeeds.

    A .jsonl line is a document. A plain file is one document, or, with ``blank_lines`` n > 0,
    one at each run of n or more blank lines; memory stays bounded for files of any size.
    White space alone makes no document. Each document ends with the tokenizer's eod id
    unless ``append_eod`` is false.

    Raises:
        DataError: unreadable input, or no text at all.
    """
    if blank_lines < 0:
        raise DataError(f"blank_lines is {blank_lines}; 0 keeps files whole, n > 0 splits at n blank lines")
    files = source_files(paths)
    total = sum(path.stat().st_size for path in files)
    source = _HashedLines(xxhash.xxh3_128())
    end = np.array([tokenizer.eod_id], dtype=np.int64)
    with IndexedWriter(prefix, vocab_size=tokenizer.vocab_size) as writer:
        for path in files:
            lines = source.of(path)
            texts = (_json_documents(lines, str(path), json_key) if path.suffix == ".jsonl"
                     else _plain_documents(lines, str(path), blank_lines))
            for text in texts:
                if text.strip():
                    ids = np.asarray(tokenizer.encode(text), dtype=np.int64)
                    writer.add_document(np.concatenate((ids, end)) if append_eod else ids)
                    if progress:
                        progress(source.count, total)
        if not writer.lengths:
            raise DataError(f"no text in {', '.join(map(str, paths))}")
        writer.describe(CorpusMeta(
            tokenizer=tokenizer.name, vocab_size=tokenizer.vocab_size,
            eod_id=tokenizer.eod_id if append_eod else -1, source_bytes=source.count,
            source_files=len(files), source_xxh3=source.digest.hexdigest()))
    return PrepareResult(Path(prefix), len(writer.lengths), writer.tokens, source.count)
