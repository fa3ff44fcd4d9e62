"""Compressed inputs as streams, known by their first bytes. None may unpack to more than text does."""

from __future__ import annotations

import csv
import gzip
import importlib
import io
import json
import re
import tarfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from megatron_port.core.errors import DataError

# Optional packages: what each is for, and one message when it is missing.

EXTRAS = {
    "tokenizers": "tokenizer.json files of Hugging Face, and training a BPE",
    "tiktoken": "GPT-2's and OpenAI's byte-pair encodings",
    "sentencepiece": "SentencePiece .model files",
    "pyarrow": "Parquet files and `datasets` folders",
    "zstandard": ".zst files",
    "jinja2": "chat templates",
}
"""Module, which pip calls by the same name → what it is for."""


class MissingPackage(DataError):
    """An optional package that an input needs is not installed."""


def need(module: str, wanted_for: str) -> Any:
    """Import an optional module. Raises MissingPackage, with the command that installs it, where it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingPackage(
            f"{wanted_for}: {module} is not installed ({EXTRAS[module]}); run: pip install {module} (or pip install "
            "'megatron_port[data]' for all kinds of input)"
        ) from error


EXPANSION = 300
"""A compressed file, or a table, may unpack to this many times its size. Text compresses 3 to 20 times, and deflate at
most 1032."""
EXPANSION_FREE = 64 << 20
"""Unpacked bytes below which the ratio is not looked at."""
READ = 1 << 17
"""Compressed bytes read at a time."""
PACKINGS = {
    "gzip": (".gz", ".gzip"), "bzip2": (".bz2",), "xz": (".xz", ".lzma"), "zstd": (".zst", ".zstd"),
}
"""Compression → the suffixes that announce it."""


class Counted(Protocol):
    """A raw file that counts the bytes read of it."""

    count: int


def packing_of(head: bytes) -> str:
    """Return the compression that a file's first bytes show; empty: none."""
    magic = int.from_bytes(head[:4], "little")
    if head[:3] == b"\x1f\x8b\x08":
        return "gzip"
    if head[:3] == b"BZh" and head[4:10] in (b"1AY&SY", b"\x17\x72\x45\x38\x50\x90"):
        return "bzip2"
    if head[:6] == b"\xfd7zXZ\0" or (head[:3] == b"]\0\0" and head[5:13] == b"\xff" * 8):
        return "xz"
    return "zstd" if magic == 0xFD2FB528 or (magic & 0xFFFFFFF0 == 0x184D2A50 and len(head) >= 8) else ""


def inner_suffix(name: str) -> tuple[str, str]:
    """Return (suffix, compression) that a file name announces, e.g. (".jsonl", "gzip"), whatever their case."""
    path = Path(name.lower())
    for packing, suffixes in PACKINGS.items():
        if path.suffix in suffixes:
            return Path(path.stem).suffix, packing
    return path.suffix, ""


def unpacked(packing: str, raw: Any, path: Path) -> io.BufferedReader:
    """Return the unpacked bytes of ``raw``, a :class:`Counted` raw file.

    Raises:
        DataError: when read, more than ``EXPANSION`` times the bytes of the file; at once, a zstd file that is cut
            off, or zstandard missing.
        zlib.error, EOFError: when read, a damaged file, whatever the library.
    """
    if not packing:
        return io.BufferedReader(raw, 1 << 20)
    inner, error = _opened(packing, io.BufferedReader(raw, READ), path)
    if packing == "zstd":
        check_frames(path)
    return io.BufferedReader(_Limited(inner, raw, path, error), 1 << 20)


def first_bytes(path: Path, packing: str, count: int) -> bytes:
    """Return the first ``count`` bytes of a file once unpacked.

    Raises:
        DataError: it cannot be unpacked.
    """
    with open(path, "rb") as file:
        if not packing:
            return file.read(count)
        inner, error = _opened(packing, file, path)
        data = b""
        try:
            while len(data) < count and (part := inner.read(count - len(data))):
                data += part
            return data
        except (error, EOFError, zlib.error, gzip.BadGzipFile) as fault:
            raise DataError(f"{path}: damaged or cut off ({fault}); copy it again") from fault


def _opened(packing: str, file: BinaryIO, path: Path) -> tuple[Any, type[Exception]]:
    """The stream of a library, and its error for damage beside zlib's, gzip's and EOFError."""
    if packing == "gzip":
        return gzip.GzipFile(fileobj=file), zlib.error
    if packing == "bzip2":
        return _Streams(file, _built_in("bz2", path).BZ2Decompressor, OSError), OSError
    if packing == "xz":
        lzma = _built_in("lzma", path)
        return _Streams(file, lzma.LZMADecompressor, lzma.LZMAError), lzma.LZMAError
    zstandard = need("zstandard", str(path))
    inner = zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(file, read_across_frames=True)
    return inner, zstandard.ZstdError


def _built_in(name: str, path: Path) -> Any:
    """Import a module of the standard library that an interpreter may have been built without."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingPackage(f"{path}: this Python was built without {name}; unpack the file, or use another "
                             "Python") from error


class _Streams:
    """One compressed stream after another, as pbzip2 and ``cat`` write them. Raises EOFError, and the library's error.

    ``BZ2File`` and ``LZMAFile`` take a stream that does not begin well for garbage after the end: of a file with
    damage there, or with padding between its streams, the rest would be lost without a word.
    """

    def __init__(self, file: BinaryIO, new: Callable[[], Any], error: type[Exception]) -> None:
        self._file, self._new, self._error, self._stream, self._ahead = file, new, error, new(), b""
        self._begun = True
        """The stream has given something, or is the first."""

    def read(self, size: int) -> bytes:
        """Return at most ``size`` bytes; none at the end."""
        while True:
            if self._stream.eof:
                # Zeros fill up a block of a tape, and pad a stream of xz to four bytes.
                self._ahead = (self._stream.unused_data or self._ahead).lstrip(b"\0")
                while not self._ahead and (block := self._file.read(READ)):
                    self._ahead = block.lstrip(b"\0")
                if not self._ahead:
                    return b""
                self._stream, self._begun = self._new(), False
            elif self._stream.needs_input and not self._ahead:
                self._ahead = self._file.read(READ)
                if not self._ahead:
                    raise EOFError("it ends within a compressed stream")
            given, self._ahead = self._ahead, b""
            try:
                data: bytes = self._stream.decompress(given, size)
            except self._error as error:
                if self._begun:
                    raise
                raise self._error("what follows the end of a compressed stream is damaged, or no part of it") from error
            if data:
                self._begun = True
                return data


class _Limited(io.RawIOBase):
    """An unpacked stream that may not grow without bound; the ``error`` of its library becomes zlib's."""

    def __init__(self, inner: Any, raw: Counted, where: Path, error: type[Exception]) -> None:
        self._inner, self._raw, self._where, self._error = inner, raw, where, error
        self._out = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._inner.read(len(buffer))
        except self._error as error:
            raise zlib.error(str(error)) from error
        buffer[:len(data)] = data
        self._out += len(data)
        if self._out > EXPANSION_FREE and self._out > EXPANSION * self._raw.count:
            raise DataError(
                f"{self._where}: {self._raw.count} bytes have unpacked to {self._out}, more than {EXPANSION} times as "
                "many; text does not do that. Unpack it yourself if it is intended")
        return len(data)


def check_frames(path: Path) -> None:
    """DataError: a .zst file whose last frame is not whole, which the decoder would take for the end (RFC 8878)."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        at = 0
        while at < size:
            file.seek(at)
            head = file.read(18)
            magic = int.from_bytes(head[:4], "little")
            if magic & 0xFFFFFFF0 == 0x184D2A50:  # skippable
                at += 8 + int.from_bytes(head[4:8], "little") if len(head) >= 8 else size + 1
                continue
            if magic != 0xFD2FB528 or len(head) < 6:
                raise DataError(f"{path}: byte {at}: expected a zstd frame, found {head[:4].hex()}; copy it again")
            flags = head[4]
            single, checksum = flags >> 5 & 1, flags >> 2 & 1
            at += 5 + (1 - single) + (0, 1, 2, 4)[flags & 3] + (single, 2, 4, 8)[flags >> 6]
            last = 0
            while not last and at + 3 <= size:
                file.seek(at)
                block = int.from_bytes(file.read(3), "little")
                last, kind = block & 1, block >> 1 & 3
                at += 3 + (1 if kind == 1 else block >> 3)
            at += 4 * checksum
            if not last:
                at = size + 1
        if at > size:
            raise DataError(f"{path}: cut off: its last zstd frame does not end within the {size} bytes; copy it again")


def unfinished(data: bytes) -> int:
    """Return the number of bytes at the end that begin an incomplete UTF-8 character."""
    for back in range(1, min(4, len(data) + 1)):
        byte = data[-back]
        if byte >= 0xC0:
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return back if back < length else 0
        if byte < 0x80:
            return 0
    return 0


# Tell formats by the first bytes of a file: its name may say nothing, or something else.

HEAD = 64 << 10
"""Bytes that are looked at."""
LINES = 20
"""Records that are looked at."""
HOLDERS = (
    (0, b"PK\x03\x04", "a zip archive, or a document or checkpoint in one"), (0, b"PK\x05\x06", "an empty zip archive"),
    (257, b"ustar", "a tar archive"), (0, b"7z\xbc\xaf\x27\x1c", "a 7z archive"), (0, b"Rar!\x1a\x07", "a rar archive"),
    (0, b"\x04\x22\x4d\x18", "compressed with lz4"), (0, b"\x1f\x9d", "compressed with compress (.Z)"),
    (0, b"\xff\x06\0\0sNaPpY", "compressed with snappy"), (0, b"LZIP", "compressed with lzip"),
    (0, b"%PDF-", "a PDF document"), (0, b"{\\rtf", "an RTF document"), (0, b"\xd0\xcf\x11\xe0", "an Office document"),
    (0, b"SQLite format 3\0", "an SQLite database"), (0, b"\x89HDF\r\n", "an HDF5 file"),
    (0, b"Obj\x01", "an Avro file"), (0, b"ORC", "an ORC file"),
    (0, b"FEA1", "a Feather file of version 1; write it again with pyarrow"),
    (0, b"PARE", "an encrypted Parquet file"), (0, b"\xff\xfe\0\0", "UTF-32; convert it: iconv -f utf-32 -t utf-8"),
    (0, b"\0\0\xfe\xff", "UTF-32; convert it: iconv -f utf-32 -t utf-8"),
    (0, b"\xff\xfe", "UTF-16; convert it: iconv -f utf-16 -t utf-8"),
    (0, b"\xfe\xff", "UTF-16; convert it: iconv -f utf-16 -t utf-8"),
    (0, b"version https://git-lfs", "a pointer of Git LFS, without the file; run: git lfs pull"),
)
"""(offset, bytes, words) of formats that may hold text, and that are not read."""
OTHERS = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"RIFF", b"\x7fELF", b"\x93NUMPY", b"ID3", b"OggS", b"fLaC", b"\0asm",
          b"\xca\xfe\xba\xbe", b"wOFF", b"wOF2", b"II*\0", b"MM\0*")
"""First bytes of formats without text: images, sound, programs, arrays."""
DELIMITERS = {",": "commas", "\t": "tabs", ";": "semicolons", "|": "bars"}
_PRINTABLE = (b"%PDF-", b"{\\rtf", b"version https://git-lfs")
_CONTROLS = bytes(b for b in (*range(32), 127) if b not in b"\t\n\v\f\r\b\x1b")
_ELEMENT = re.compile(r'\[\s*(\{\s*"[^"\n]{1,200}"\s*:|"(?:[^"\\]|\\.)*"\s*[,\]])')
_FEW = 4
_KEYED = re.compile(r'\{\s*"[^"\n]{1,200}"\s*:')
_NAME = re.compile(r"[A-Za-z_][\w.-]*")


@dataclass(frozen=True)
class Content:
    """Format that the first bytes of a file show."""

    kind: str
    """empty | jsonl | json (an array, or objects over several lines) | delimited | parquet | arrow | text |
    holder (not read, but text may be in it) | binary | damaged (does not unpack)"""
    packing: str = ""
    what: str = ""
    """Details, in words."""
    first: Any = None
    """jsonl, json: the first record, if it ends within these bytes."""


def look(path: Path) -> Content:
    """Return what a file holds.

    Raises:
        OSError: it cannot be read.
        DataError: a package that unpacks it is missing.
    """
    with open(path, "rb") as file:
        head = file.read(HEAD)
    packing = packing_of(head)
    if packing:
        try:
            head = first_bytes(path, packing, HEAD)
        except MissingPackage:
            raise
        except DataError as error:
            return Content("damaged", packing, str(error).removeprefix(f"{path}: "))
        if inner := packing_of(head):
            return Content("holder", packing, f"compressed twice ({inner} within {packing}); unpack it once")
    found = _of(head)
    if packing and found.kind in ("parquet", "arrow"):
        return Content("holder", packing, f"{found.kind} within {packing}; unpack it")
    return Content(found.kind, packing, found.what, found.first)


def _of(head: bytes) -> Content:
    if not head:
        return Content("empty", what="empty")
    if head[:4] == b"PAR1":
        return Content("parquet")
    if head[:6] == b"ARROW1" or (head[:4] == b"\xff\xff\xff\xff" and 0 < int.from_bytes(head[4:8], "little") < 1 << 28):
        return Content("arrow")
    controls = len(head) - len(head.translate(None, _CONTROLS))
    for offset, magic, words in HOLDERS:
        if head.startswith(magic, offset) and (controls or magic in _PRINTABLE):
            return Content("holder", what=words)
    if _is_tar(head):
        return Content("holder", what="a tar archive")
    if controls and head.startswith(OTHERS):
        return Content("binary", what="binary")
    return _binary(head, controls) or _text(head)


def _is_tar(head: bytes) -> bool:
    """Whether a file begins with a tar header of before POSIX, which has no mark but a checksum."""
    if len(head) < 512 or not head[0]:
        return False
    try:
        tarfile.TarInfo.frombuf(head[:512], "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return False
    return True


def _binary(head: bytes, controls: int) -> Content | None:
    """None: it may be text, damaged or in another encoding, perhaps."""
    even, odd = head[::2].count(0), head[1::2].count(0)
    if len(head) > 3 and max(even, odd) > 0.3 * len(head) / 2 > 10 * min(even, odd):
        return Content("holder", what=f"UTF-16 without a mark, or numbers; if it is text, convert it: iconv -f utf-16"
                       f"{'be' if even > odd else 'le'} -t utf-8")
    try:
        head[:len(head) - unfinished(head)].decode("utf-8")
        share = head.count(0) / len(head)
        limit = 0.1
    except UnicodeDecodeError:
        share, limit = controls / len(head), 0.06  # random bytes have 0.11
    few = controls < _FEW and controls < len(head)  # a text with a damaged byte or two
    return Content("binary", what="binary") if share > limit and not few else None


def _text(head: bytes) -> Content:
    text = head.decode("utf-8", "replace").removeprefix("\ufeff")
    whole = len(head) < HEAD
    lines = text.split("\n") if whole else text.split("\n")[:-1]
    start, rows = text.lstrip(), [line for line in lines if line.strip()][:LINES]
    if not start:
        return Content("text")
    if start.startswith("{"):
        first = _parsed(rows[0]) if rows else None
        if isinstance(first, dict):
            return Content("jsonl", what="JSON lines", first=first)
        if _KEYED.match(start):
            pretty = len(rows) > 1 and _begins(rows[0]) and not isinstance(_parsed(rows[1]), dict)
            return Content("json", what="JSON over several lines", first=_first_value(start)) if pretty else Content(
                "jsonl", what="JSON lines")
    elif start.startswith("["):
        if _ELEMENT.match(start) or (whole and isinstance(_parsed(text), list)):
            return Content("json", what="a JSON array", first=_first_value(start[1:].lstrip()))
        if len(rows) > 1 and all(isinstance(_parsed(row), list) for row in rows):
            return Content("jsonl", what="JSON lines")
    for delimiter, words in DELIMITERS.items():
        if _delimited(text, delimiter, whole):
            return Content("delimited", what=f"columns separated by {words}")
    return Content("text")


def _parsed(text: str) -> Any:
    """The JSON value; None: it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _first_value(text: str) -> Any:
    """Return the JSON value that a text begins with; None: it is none, or does not end."""
    try:
        return json.JSONDecoder().raw_decode(text)[0]
    except (ValueError, RecursionError):
        return None


def _begins(line: str) -> bool:
    """Whether a line is the beginning of a JSON value."""
    try:
        json.loads(line)
    except json.JSONDecodeError as error:
        return error.pos >= len(line.rstrip()) - 1
    except (ValueError, RecursionError):
        pass
    return False


def _delimited(text: str, delimiter: str, whole: bool) -> bool:
    """Whether a text is a header of names and records of as many cells."""
    header = text.lstrip().partition("\n")[0].strip()
    names = [cell.strip('"') for cell in header.split(delimiter)]
    if len(names) < 2 or len(set(names)) < len(names) or not all(_NAME.fullmatch(name) for name in names):
        return False
    try:
        read = csv.reader(io.StringIO(text.lstrip(), newline=""), delimiter=delimiter, strict=whole)
        records = [record for record, _ in zip(read, range(LINES)) if record]
    except csv.Error:
        return False
    if not whole and len(records) < LINES:
        records.pop()  # cut off
    return len(records) > 1 and all(len(record) == len(names) for record in records)
