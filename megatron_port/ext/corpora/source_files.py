"""Which input files are read, and as what: by their names, checked against their first bytes."""

from __future__ import annotations

import os
import stat
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from megatron_port.core.data.indexed import MAGIC
from megatron_port.core.errors import DataError, shortened
from megatron_port.core.io.files import read_regular
from megatron_port.core.io.typed_json import LARGEST, WrongContent, parse_json
from megatron_port.ext.corpora.conversations import ChatFields
from megatron_port.ext.corpora.unpack import Content, inner_suffix, look

# Formats of inputs, and the suffixes that announce them.

NAMES = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".jl": "jsonl", ".json": "jsonl", ".csv": "csv", ".tsv": "tsv",
    ".parquet": "parquet", ".pq": "parquet", ".arrow": "arrow", ".feather": "arrow",
}
"""Suffix of a name, before that of a compression → format."""
WORDS = {
    "jsonl": "JSON lines", "json": "JSON over several lines", "csv": "CSV", "tsv": "TSV", "parquet": "Parquet",
    "arrow": "Arrow", "text": "plain text",
}
"""Format → how tables and messages call it."""
FORMATS = ("auto", *WORDS)


# Folders that ``datasets.save_to_disk`` wrote: which of their files hold the rows of a split.

NOT_ROWS = "describes a saved data set"


def parts_of(path: Path, split: str, *, required: bool = False) -> dict[str, str]:
    """Return why each entry of such a folder is not read, by name; empty: it is no such folder.

    ``required``: one that cannot be understood is an error, also where it may be a folder of another kind.

    Raises:
        DataError: no such split, or a saved selection of rows.
    """
    if not required and not (path / "dataset_dict.json").is_file() and not (path / "dataset_info.json").is_file():
        return {}
    try:
        names = [entry.name for entry in path.iterdir()]
        if (path / "dataset_dict.json").is_file():
            splits = parse_json(read_regular(path / "dataset_dict.json", LARGEST))["splits"]
            if split not in splits:
                raise DataError(f"{path}: no split {split!r}; it has {', '.join(map(str, splits))}: --split")
            return {name: NOT_ROWS if name == "dataset_dict.json" else "of another split (--split)"
                    for name in names if name != split}
        if not (path / "state.json").is_file():
            return {"dataset_info.json": NOT_ROWS}
        files = set(arrow_files(path))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: not a readable `datasets` folder ({type(error).__name__}: {error})") from error
    return {name: NOT_ROWS if name.endswith(".json") else "no part of the saved data set"
            for name in names if name not in files}


def arrow_files(path: Path) -> list[str]:
    """Return the names of the files of a saved data set, in its order.

    Raises:
        DataError: a name of another folder, a file that is missing, or rows that are selected apart.
        OSError, ValueError, KeyError, TypeError: it cannot be read.
    """
    state = parse_json(read_regular(path / "state.json", LARGEST))
    names = [str(entry["filename"]) for entry in state["_data_files"]]
    if state.get("_indices_files"):
        raise DataError(f"{path}: it keeps a selection of rows apart; save it again with datasets' save_to_disk "
                        "after flatten_indices()")
    for name in names:
        if Path(name).name != name or not (path / name).is_file():
            raise DataError(f"{path}/state.json names {name!r}, which is not a file in this folder")
    return names


# The files below input folders: each once, whatever links lead to it; what is left out is listed with the reason.

ASKED, HIDDEN, LINKED, SAME = "asked for (--skip)", "hidden", "link to a folder read already", "the same file again"
CORPUS, SUMMARY = "a tokenized corpus", "a summary of other files"
SUMMARIES = ("_metadata", "_common_metadata")
"""Parquet's: their rows are those of the files beside them."""


@dataclass(frozen=True)
class Skipped:
    """A file, or a hidden folder, that is not read."""

    path: Path
    reason: str
    bytes: int
    files: int = 1


@dataclass
class Walk:
    """Collector of the files below folders.

    Args:
        skip: patterns of names, or of paths below the folder, that are left out.
        split: of folders that ``datasets`` saved.
    """

    skip: Sequence[str] = ()
    split: str = "train"
    skipped: list[Skipped] = field(default_factory=list)
    _files: set[tuple[int, int]] = field(default_factory=set)
    _folders: set[tuple[int, int]] = field(default_factory=set)

    def file(self, path: Path) -> bool:
        """Return whether a file that was named is to be read: it was not skipped or met before."""
        if self._asked(path, path.parent):
            return self._leave(path, ASKED)
        return self._new(path)

    def folder(self, root: Path) -> list[Path]:
        """Return the files below a folder, sorted by path. Linked folders are followed.

        Raises:
            DataError: a folder that cannot be listed, or a link that leads nowhere.
        """
        found: list[Path] = []
        pending, links = deque([root]), deque[Path]()
        if not self._enter(root):
            self.skipped.append(Skipped(root, LINKED, 0, 0))
            return []
        while pending or links:
            if not pending:  # files and folders themselves come before links to them
                pending += self._link(links.popleft(), found)
                continue
            for path, kind in self._entries(pending.popleft(), root):
                if kind == "link":
                    links.append(path)
                elif kind == "folder":
                    if self._enter(path):
                        pending.append(path)
                elif self._new(path):
                    found.append(path)
        return sorted(found)

    def _entries(self, folder: Path, root: Path) -> Iterator[tuple[Path, str]]:
        """Yield (path, file | folder | link) of what is not left out."""
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError as error:
            raise DataError(f"{folder}: cannot be listed ({error.strerror}); change its permissions, or leave it out "
                            f"with --skip {folder.name}") from error
        parts = parts_of(folder, self.split, required=folder == root)
        indices = [entry.name for entry in entries if entry.name.endswith(".idx")]
        corpora = {name[:-4] for name in indices if _is_index(folder / name)}
        for entry in entries:
            path = folder / entry.name
            left = self._reason(path, root, entry, corpora) or (parts.get(entry.name, "") if parts else "")
            if left:
                self._leave(path, left)
            else:
                yield path, "link" if entry.is_symlink() else "folder" if entry.is_dir() else "file"

    def _reason(self, path: Path, root: Path, entry: os.DirEntry[str], corpora: set[str]) -> str:
        """Why an entry is left out, by its name and type; empty: it is not."""
        if self._asked(path, root):
            return ASKED
        if entry.name.startswith("."):
            return HIDDEN
        if any(entry.name.startswith(f"{c}.") and _of_corpus(entry.name[len(c):]) for c in corpora):
            return CORPUS
        if entry.name in SUMMARIES:
            return SUMMARY
        if entry.name == "corpus.json" and _of_fetch(path):
            return "a record of data fetch"
        plain = entry.is_symlink() or entry.is_dir() or entry.is_file()
        return "" if plain else "no regular file (a pipe, a socket or a device)"

    def _link(self, path: Path, found: list[Path]) -> list[Path]:
        """Follow a link: a file is added to ``found``, a folder returned."""
        try:
            mode = os.stat(path).st_mode
        except OSError as error:
            raise DataError(f"{path}: a link that leads nowhere ({os.readlink(path)}: {error.strerror}); restore what "
                            f"it names, or leave it out with --skip {path.name}") from error
        if stat.S_ISDIR(mode):
            target = Path(os.path.realpath(path))
            if target in [(here := Path(os.path.realpath(path.parent))), *here.parents]:
                self.skipped.append(Skipped(path, "link to a folder around it", 0, 0))
            elif self._enter(path):
                return [path]
            else:
                self.skipped.append(Skipped(path, LINKED, 0, 0))
        elif not stat.S_ISREG(mode):
            self._leave(path, "no regular file (a pipe, a socket or a device)")
        elif self._new(path):
            found.append(path)
        return []

    def _asked(self, path: Path, root: Path) -> bool:
        below = path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name
        return any(fnmatchcase(name, pattern.rstrip("/")) for pattern in self.skip for name in (path.name, below))

    def _enter(self, folder: Path) -> bool:
        return _add(self._folders, folder)

    def _new(self, path: Path) -> bool:
        return _add(self._files, path) or self._leave(path, SAME)

    def _leave(self, path: Path, reason: str) -> bool:
        if reason == ASKED and path.is_file():
            _add(self._files, path)  # nor is it read by a link to it
        if path.is_dir() and not path.is_symlink():
            sizes = [_size(Path(folder) / name) for folder, _, names in os.walk(path) for name in names]
            self.skipped.append(Skipped(path, reason, sum(sizes), len(sizes)))
        else:
            self.skipped.append(Skipped(path, reason, _size(path)))
        return False


def _add(known: set[tuple[int, int]], path: Path) -> bool:
    try:
        found = os.stat(path)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    if (found.st_dev, found.st_ino) in known:
        return False
    known.add((found.st_dev, found.st_ino))
    return True


def _size(path: Path) -> int:
    try:
        found = os.stat(path)
    except OSError:
        return 0
    return found.st_size if stat.S_ISREG(found.st_mode) else 0


def _is_index(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def _of_corpus(ending: str) -> bool:
    return ending in (".bin", ".idx", ".mask", ".meta.json", ".chat.json") or ending.startswith(".tokenizer.")


def _of_fetch(path: Path) -> bool:
    """Whether a file is the record that ``data fetch`` keeps beside its texts."""
    try:
        raw = parse_json(read_regular(path, 1 << 16))
    except (OSError, WrongContent):
        return False
    return isinstance(raw, dict) and {"source", "licence", "sha256"} <= set(raw)


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
