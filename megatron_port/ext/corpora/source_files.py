"""Which input files are read, and as what: by their names, checked against their first bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_port.core.errors import DataError, shortened
from megatron_port.ext.corpora.conversations import ChatFields
from megatron_port.ext.corpora.formats import FORMATS, NAMES, WORDS
from megatron_port.ext.corpora.sniff import Content, look
from megatron_port.ext.corpora.source_walk import LINKED, SAME, Skipped, Walk
from megatron_port.ext.corpora.unpack import inner_suffix

LARGEST_RECORD = 64 << 20
"""Default of ``largest_record``."""
SHOWN = 20
"""Files that an error lists."""


@dataclass(frozen=True)
class Source:
    """One input file."""

    path: Path
    kind: str
    """jsonl | json (an array, or values over several lines) | csv | tsv | parquet | arrow | text"""
    packed: str = ""
    """gzip | bzip2 | xz | zstd | nothing"""
    guessed: bool = False
    """By its content; the name says nothing."""


@dataclass(frozen=True)
class ReadOptions:
    """Options on which the meaning of an input depends."""

    key: str = "text"
    """JSON key, or column, of the text."""
    blank_lines: int = 0
    """Plain text: n > 0 starts a document at n blank lines; 0: a file is a document."""
    split: str = "train"
    """Split of a ``datasets`` folder that has several."""
    suffixes: tuple[str, ...] = (".txt",)
    """Plain-text files that are read in folders."""
    format: str = "auto"
    """Format of all inputs; auto: by name and content."""
    skip: tuple[str, ...] = ()
    """Patterns of names, or of paths below an input folder, that are left out."""
    largest_record: int = LARGEST_RECORD
    """Bytes of a JSON line or of a text in a column."""
    leave_out: bool = False
    """Leave out what is larger, instead of stopping."""
    fields: ChatFields | None = None
    """Records are JSON objects with conversations, where these say; None: they are texts."""


@dataclass(frozen=True)
class Inventory:
    """The files of the inputs: those to read, in order, and those left out."""

    sources: list[Source]
    skipped: list[Skipped]

    def table(self) -> str:
        """Return what is read and what is not, by format and reason: lines of files, bytes and some names."""
        read: Counter[str] = Counter()
        sizes: Counter[str] = Counter()
        for source in self.sources:
            name = "read     " + ", ".join(filter(None, [
                WORDS[source.kind], source.packed, "by its content" if source.guessed else ""]))
            read[name] += 1
            sizes[name] += source.path.stat().st_size
        left: dict[str, list[Skipped]] = {}
        for entry in sorted(self.skipped, key=lambda e: (e.reason, e.path)):
            left.setdefault(f"skipped  {entry.reason}", []).append(entry)
        rows = [(name, read[name], sizes[name], "") for name in sorted(read)]
        rows += [(name, sum(e.files for e in entries), sum(e.bytes for e in entries), _few([e.path for e in entries]))
                 for name, entries in left.items()]
        width = max([len("input"), *(len(row[0]) for row in rows)])
        lines = [f"{'input':<{width}}  {'files':>7}  {'bytes':>15}"]
        lines += [f"{name:<{width}}  {files:>7,}  {size:>15,}  {names}".rstrip() for name, files, size, names in rows]
        return "\n".join(lines)


def _few(paths: Sequence[Path]) -> str:
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return ", ".join(shortened(str(path), 100) for path in paths[:3]) + more


def find_sources(paths: Sequence[str | Path], options: ReadOptions | None = None) -> Inventory:
    """Return the files to read, in order: files as given, and those below a directory, sorted by path.

    Each file is read once, whatever links lead to it. Left out of a directory, and listed: hidden files and folders,
    corpora that are tokenized already, what holds no text (empty, images, programs, arrays), and ``options.skip``.

    Raises:
        DataError: a path does not exist, a directory holds no input, or a file may hold text and is in no format that
            is read, or in another one than its name says. All such files are listed.
    """
    options = options or ReadOptions()
    if options.format not in FORMATS:
        raise DataError(f"format is {options.format!r}; choose one of {', '.join(FORMATS)}")
    walk = Walk(options.skip, options.split)
    given = [Path(path) for path in paths]
    for path in given:
        if not path.is_dir() and not path.is_file():
            raise DataError(f"{path}: no regular file; write it to one first" if path.exists() else
                            f"{path}: no such file or directory")
    # Named files first: a folder that holds one too does not decide what it is.
    named = {path: walk.file(path) for path in given if path.is_file()}
    found: list[Source] = []
    faults: list[tuple[Path, str]] = []
    for path in given:
        inside = [path] * named.pop(path, False) if path.is_file() else walk.folder(path)
        before = len(found), len(faults)
        for file in inside:
            _sort_in(file, options, walk, found, faults, named=path == file)
        left = [entry for entry in walk.skipped if entry.path.is_relative_to(path)]
        read_before = any(entry.reason in (SAME, LINKED) for entry in left)
        if path.is_dir() and not read_before and before == (len(found), len(faults)):
            known = ", ".join([*options.suffixes, *NAMES])
            why = Counter(entry.reason for entry in left)
            raise DataError(f"{path}: no {known} file below this directory, compressed or not; skipped: "
                            f"{', '.join(f'{count} {reason}' for reason, count in why.items()) or 'nothing'}")
    if faults:
        raise _refusal(faults, len(found))
    if not found:
        raise DataError(f"no text in {_few(given)}; all is skipped:\n{Inventory([], walk.skipped).table()}")
    return Inventory(found, walk.skipped)


def _sort_in(path: Path, options: ReadOptions, walk: Walk, found: list[Source], faults: list[tuple[Path, str]], *,
             named: bool) -> None:
    """Put a file among the sources, the skipped or the faults."""
    try:
        content = look(path)
    except OSError as error:
        faults.append((path, error.strerror or str(error)))
        return
    suffix = inner_suffix(path.name)[0]
    expected = NAMES.get(suffix) or ("text" if suffix in [s.lower() for s in options.suffixes] else "")
    if content.kind == "empty" or (content.kind == "binary" and not expected and not named):
        walk.skipped.append(Skipped(path, content.what, path.stat().st_size))
        return
    if options.format != "auto":
        kind, fault = options.format, ""
    else:
        kind, fault = _kind(content, expected, named=named)
    if kind in ("parquet", "arrow") and content.packing:
        fault = f"{WORDS[kind]} within {content.packing}; unpack it"
    fault = fault or _unfit(kind, content, options)
    if fault:
        faults.append((path, fault))
    else:
        found.append(Source(path, kind, content.packing, guessed=not expected and options.format == "auto"))


def _kind(content: Content, expected: str, *, named: bool) -> tuple[str, str]:
    """Return (format, what speaks against reading it): by content, the format that the name promises, if any."""
    kind, insist = content.kind, "or insist with --format"
    if kind in ("holder", "damaged"):
        return "", content.what
    if kind == "binary":
        # A table's own reader says what is wrong with it.
        return expected, "" if expected in ("parquet", "arrow") else f"binary; it is no text, {insist} FORMAT"
    if kind in ("parquet", "arrow"):
        return kind, ""
    if expected in ("parquet", "arrow"):
        return expected, ""
    if expected == "jsonl":
        return ("json" if kind == "json" else "jsonl"), ""
    if expected in ("csv", "tsv"):
        wrong = kind in ("json", "jsonl")
        return expected, f"{content.what}, and its name says {WORDS[expected]}; rename it, {insist} {kind}" * wrong
    if expected == "text" and kind != "text":
        format_ = "csv" if kind == "delimited" else kind
        return "text", (f"looks like {content.what}, and its name says plain text; rename it, {insist} {format_} (its "
                        "records are documents) or --format text (each line is text as it is)")
    if kind in ("json", "jsonl"):
        return kind, ""
    if kind == "delimited":
        return "csv", f"looks like {content.what}, and its name gives no format; name it .csv, {insist} csv or text"
    if not expected and not named:
        return "text", ("a text whose name says no format; add its suffix with --suffix, or name the file itself as "
                        "an --input, and it is read as plain text")
    return "text", ""


def _unfit(kind: str, content: Content, options: ReadOptions) -> str:
    """Return why a file of that format cannot be read under these options; empty: it can."""
    if options.fields is not None:
        return ("conversations are read from JSON lines, CSV, Parquet and Arrow; this is plain text"
                if kind == "text" else "")
    first = content.first if kind in ("jsonl", "json") else None
    if isinstance(first, dict) and options.key not in first and not options.leave_out:
        return (f"its first record has no text under the key {options.key!r}; it has "
                f"{', '.join(str(key)[:40] for key in list(first)[:12]) or 'none'}: --json-key")
    return ""


def _refusal(faults: Sequence[tuple[Path, str]], good: int) -> DataError:
    if len(faults) == 1 and not good:
        return DataError(f"{faults[0][0]}: {faults[0][1]}")
    lines = [f"  {path} ({path.stat().st_size} bytes): {shortened(fault, 300)}" for path, fault in faults[:SHOWN]]
    more = [f"  and {len(faults) - SHOWN} more"] if len(faults) > SHOWN else []
    names = list(dict.fromkeys(path.name for path, _ in faults[:SHOWN]))
    head = f"{len(faults)} of {len(faults) + good} input files may hold text, and cannot be read as they are:"
    patterns = " ".join(map(repr, names)) if len(names) < 4 else "PATTERN..."
    return DataError("\n".join([head, *lines, *more, f"change them, or leave them out with --skip {patterns}"]))
