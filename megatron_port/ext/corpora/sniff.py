"""Tell formats by the first bytes of a file: its name may say nothing, or something else."""

from __future__ import annotations

import csv
import io
import json
import re
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_port.core.errors import DataError
from megatron_port.ext.corpora.extras import MissingPackage
from megatron_port.ext.corpora.unpack import first_bytes, packing_of, unfinished

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
